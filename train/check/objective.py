"""Whether settings suit what the model predicts, and its noise schedule."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from prep.errors import CacheError, ConfigError
from prep.manifest.commands import encode_command
from prep.manifest.document import Manifest
from prep.models.denoiser.samplers import DIFFUSION, LIBRARIES, RESCALED, require_steps, samplers
from prep.models.denoiser.trainable import check_schedule
from prep.models.families.registry import FAMILIES
from prep.models.files import Model
from prep.models.pipeline import scheduler_config, weighted_files
from prep.training.schema import Config


def prediction_of(config: Config, manifest: Manifest) -> str:
    """What the model is trained to predict."""
    return str(manifest.document["prediction"]) if config.prediction == "manifest" else config.prediction


def check_fields(manifest: Manifest, config: Config) -> None:
    """Raises `ConfigError` for settings that do not suit the prediction, `CacheError` for masks that were not encoded.
    """
    if config.loss.masked is True and "mask" not in manifest.fields:
        raise CacheError("manifest has no field 'mask', but the settings ask for masked loss",
                         hint=f"--no-masked, or encode masks: {encode_command(manifest, '--mask', 'sidecar')}")
    predictions, prediction = FAMILIES[manifest.family].predictions, prediction_of(config, manifest)
    if prediction not in predictions:
        raise ConfigError(f"prediction is '{prediction}', expected {' or '.join(predictions)} for family "
                          f"'{manifest.family}'", hint="--set prediction=manifest")
    if config.zero_terminal_snr and prediction != "v_prediction":
        why = "of pure noise tells nothing of the picture" if prediction == "epsilon" else "already ends in pure noise"
        raise ConfigError(f"zero_terminal_snr is on, but this model predicts {prediction}, which {why}",
                          hint="--set zero_terminal_snr=false; or --set prediction=v_prediction, which "
                          "retrains the model to predict v" if prediction == "epsilon"
                          else "--set zero_terminal_snr=false")
    if prediction != "flow" and config.timesteps.shift_by_size != "none":
        raise ConfigError(f"timesteps.shift_by_size is '{config.timesteps.shift_by_size}', which is for models that "
                          f"predict a flow, but this one predicts {prediction}",
                          hint="--set timesteps.shift_by_size=none")
    mixed = [f"noise.{name}" for name in ("offset", "pyramid") if getattr(config.noise, name)]
    if prediction == "flow" and mixed:
        raise ConfigError(f"{mixed[0]} is {getattr(config.noise, mixed[0][6:]):g}, but models of family "
                          f"'{manifest.family}' predict a flow, which ends in plain noise: pictures are made from that",
                          hint=f"--set {mixed[0]}=0")
    wanted = {"none": prediction, "debiased": "epsilon"}.get(config.loss.weighting, "flow")
    if prediction != wanted:
        raise ConfigError(f"loss.weighting is '{config.loss.weighting}', which is for models that predict {wanted}, "
                          f"but this one predicts {prediction}", hint="--set loss.weighting=none")
    if prediction == "flow" and config.loss.min_snr:
        raise ConfigError(f"loss.min_snr is {config.loss.min_snr:g}, but models of family '{manifest.family}' predict "
                          "a flow, which has no such weighting", hint="--set loss.min_snr=0")


def check_noise(model: Model, config: Config, manifest: Manifest) -> None:
    """Raises `ModelError` for a noise schedule without usable levels."""
    check_schedule(model, flow=prediction_of(config, manifest) == "flow")


def check_min_snr(model: Model, config: Config, manifest: Manifest) -> None:
    """Raises `ConfigError` where the weight would be 0 / 0: the last timestep is pure noise, and its SNR 0."""
    scheduler = scheduler_config(model)
    zero = scheduler.get("rescale_betas_zero_snr") is True
    if zero and config.loss.min_snr and prediction_of(config, manifest) == "epsilon":
        raise ConfigError(f"loss.min_snr is {config.loss.min_snr:g}, but the noise schedule of {model} ends in pure "
                          "noise, from which a model that predicts epsilon learns nothing",
                          hint="--set loss.min_snr=0, or --set prediction=v_prediction if the model predicts that")
    if zero and config.loss.weighting == "debiased":
        raise ConfigError(f"loss.weighting is 'debiased', but the noise schedule of {model} ends in pure noise, where "
                          "that weight is infinite", hint="--set loss.weighting=none")


def check_guidance(model: Model, config: Config, manifest: Manifest) -> None:
    """Raises `ConfigError` for a guidance number that the denoiser does not take."""
    family = FAMILIES[manifest.family]
    if config.guidance_embedding is not None and not (
            family.takes_guidance and weighted_files(model, family.denoiser).config.get("guidance_embeds") is True):
        raise ConfigError(f"guidance_embedding is {config.guidance_embedding:g}, but the denoiser of {model} takes no "
                          "such number: its config has no guidance_embeds", hint="omit guidance_embedding")


def check_sampler(model: Model, config: Config, manifest: Manifest) -> None:
    """Raises `ConfigError` for a scheduler that cannot make pictures of the model, or not along its noise schedule, or
    not without a library, or not in so many steps; `UsageError` without the library of the family."""
    taken: Sequence[str] = DIFFUSION
    scheduler = scheduler_config(model)
    if prediction_of(config, manifest) == "flow":
        taken = samplers(FAMILIES[manifest.family].sampling.solvers, scheduler)
    elif config.zero_terminal_snr or scheduler.get("rescale_betas_zero_snr"):
        taken = RESCALED
    if config.sample.sampler in DIFFUSION and taken is RESCALED and config.sample.sampler not in RESCALED:
        raise ConfigError(f"sample.sampler is '{config.sample.sampler}', which cannot follow a noise schedule that "
                          f"ends in pure noise, expected one of: {', '.join(RESCALED)}",
                          hint="leave sample.sampler out for the usual one")
    if config.sample.sampler not in (None, *taken):
        raise ConfigError(f"sample.sampler is '{config.sample.sampler}', which cannot sample this model of family "
                          f"'{manifest.family}', expected one of: {', '.join(taken)}",
                          hint="leave sample.sampler out for the usual one")
    if config.sample.every:
        FAMILIES[manifest.family].require_library(", or --set sample.every=0")
    library = LIBRARIES.get(config.sample.sampler or "")
    if library and find_spec(library) is None:
        raise ConfigError(f"sample.sampler is '{config.sample.sampler}', which needs the library {library}",
                          hint=f"pip install {library}, or leave sample.sampler out for the usual one")
    require_steps(config.sample.sampler or "", scheduler, config.sample.steps)
