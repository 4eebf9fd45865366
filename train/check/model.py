"""The model before it is loaded: facts for a run, and whether it fits manifest, cache and settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from prep.errors import ModelError, Problem
from prep.loader.index import Index
from prep.manifest.document import Manifest, check_model_named
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.files import Model
from prep.models.fingerprint import (
    FileDigest,
    bytes_of,
    text_files,
    text_fingerprint,
    ticking,
    vae_files,
    vae_fingerprint,
)
from prep.models.hub import locate
from prep.models.pipeline import scheduler_config, weighted_files
from prep.progress import BackgroundTotal, Progress
from prep.training.schema import Config, Dtype
from train.check.adapter import training_adapter
from train.check.drawing import drawing_model
from train.check.faults import Noting
from train.check.objective import check_guidance, check_min_snr, check_noise, check_sampler, prediction_of
from train.check.rows import check_rows
from train.models.adapters.frozen import FrozenAdapter, fingerprints
from train.models.base import base_fingerprints, remembered_digests
from train.models.naming import Naming, naming_of, strengths_of
from train.models.size_shift import size_shifts
from train.models.targets import Presets, Shapes, is_ambiguous, layers_of, read_weights, targeted, trained_shapes
from train.optim.optimizers import TABLE, state_bytes
from train.runs.initial import inspect_weights
from train.setup import CheckedModel, Initial, RunRequest


def model_of(request: RunRequest, config: Config, manifest: Manifest, index: Index | None,
             faults: list[Problem], progress: Progress) -> CheckedModel | None:
    """Facts about the model, or `None` if they are incomplete; appends its faults to `faults`."""
    check_model_named(manifest, request.model)
    path, family = locate(request.model or manifest.model, download=request.download), FAMILIES[manifest.family]
    presets, naming, initial, adapter, drawing = family.lora.presets, naming_of(family), None, None, path
    trained: list[tuple[int, ...]] | None = None
    adapted: Shapes = {}
    base: dict[str, str] | None = None
    others: Mapping[str, str] | None = None
    shifts: tuple[float, ...] | None = None
    with Noting(faults):
        shifts = _shifts(path, config, manifest)
    _check_files(path, config, manifest, index, faults)
    with Noting(faults):
        weights = read_weights(path, family)
        trained, naming = trained_shapes(weights, config, presets), naming.knowing(layers_of(weights))
        adapted = _adapted(layers_of(weights), config, presets, naming)
        drawing = drawing_model(request, config, manifest, index, adapted) or path
    with remembered_digests() as digest, progress("hashing the model", _bytes_of(path, family), "bytes") as tick:
        with Noting(faults):
            base = base_fingerprints(path, family, ticking(digest, tick))
        with Noting(faults):
            others = _check_encoders(path, manifest, request.other_encoders, ticking(digest, tick))
        with Noting(faults):
            if trained is not None:
                initial, adapter = _beside(request, config, family, weights, naming, digest)
    if trained is None or base is None or others is None or shifts is None:
        return None
    numbers = sum(map(prod, trained))
    return CheckedModel(
        path=path, base=base | fingerprints(adapter), others=others, initial=initial, adapter=adapter, shifts=shifts,
        state_bytes=state_bytes(TABLE[config.optimizer.name], trained), saved=_saved(numbers, weights, config),
        numbers=numbers, ambiguous=config.method == "lora" and is_ambiguous(weights, config.lora, presets),
        strengths=strengths_of(config.lora, adapted), fits_kohya=naming.fits_kohya(config.lora, adapted),
        large=any(prod(shape[2:]) > 1 for shape in adapted.values()), convolves=_convolves(weights),
        naming=naming, rescaled=_rescaled(path), dtype=_dtype(path, family), drawing=drawing)


def _check_files(model: Model, config: Config, manifest: Manifest, index: Index | None, faults: list[Problem]) -> None:
    """Appends what is wrong with the model's configs for the rows and the settings; where another model draws sample
    pictures, their sampler is none of its settings."""
    with Noting(faults):
        check_rows(model, manifest, index)
    for checked in (check_guidance, check_noise, check_min_snr, *(() if config.sample.model else (check_sampler,))):
        with Noting(faults):
            checked(model, config, manifest)


def _bytes_of(model: Model, family: Family) -> BackgroundTotal:
    """What `base_fingerprints` and `_check_encoders` read."""
    return BackgroundTotal(lambda: bytes_of([*(weighted_files(model, name) for name in family.trained_with),
                                             vae_files(model), *text_files(model).encoders.values()]))


def _beside(request: RunRequest, config: Config, family: Family, weights: Shapes, naming: Naming, digest: FileDigest
            ) -> tuple[Initial | None, FrozenAdapter | None]:
    """The weights that the run begins with, and its training adapter, if there are any."""
    initial = None if request.init is None else inspect_weights(
        request.init, config, family, weights, family.lora.presets, naming, digest)
    return initial, training_adapter(config, layers_of(weights), naming, digest)


def _shifts(model: Model, config: Config, manifest: Manifest) -> tuple[float, ...]:
    """The further shift of timesteps for each bucket; `check_fields` refuses one where no flow is predicted."""
    draws = config.timesteps
    if prediction_of(config, manifest) != "flow":
        draws = replace(draws, shift_by_size="none")
    return size_shifts(draws, FAMILIES[manifest.family],
                       scheduler_config(model), manifest.buckets)


def _dtype(model: Model, family: Family) -> Dtype:
    """The dtype of most numbers in the denoiser's files; of fp8, with or without scales, and of GGUF's types of few
    bits, bfloat16."""
    numbers: Counter[str] = Counter()
    for tensor in weighted_files(model, family.denoiser).tensors.values():
        numbers[tensor.dtype] += prod(tensor.shape)
    (most, _), = numbers.most_common(1)
    return "bfloat16" if most.startswith(("Q", "IQ")) else _SHORT.get(most, "float32")


_SHORT: Mapping[str, Dtype] = {"F16": "float16", "BF16": "bfloat16", "F8_E4M3": "bfloat16", "F8_E5M2": "bfloat16"}


def _convolves(weights: Shapes) -> bool:
    """Whether the denoiser has convolutions."""
    return any(len(shape) == 4 for shape in weights.values())


def _rescaled(model: Model) -> bool:
    """Whether the model's own noise schedule ends in pure noise."""
    return scheduler_config(model).get("rescale_betas_zero_snr") is True


def _saved(numbers: int, weights: Shapes, config: Config) -> int:
    """How many numbers a file of weights has: of PiSSA also the parts that adapters began with."""
    if config.method == "full":
        return sum(map(prod, weights.values()))
    return 2 * numbers if config.lora.init == "pissa" else numbers


def _adapted(layers: Shapes, config: Config, presets: Presets, naming: Naming) -> Shapes:
    """The layers that get an adapter. Raises `ConfigError` if `lora.format` cannot hold them."""
    if config.method == "full":
        return {}
    adapted = {name: layers[name] for name in targeted(layers, config.lora, presets)}
    naming.require(config.lora, adapted)
    naming.require_shapes(config.lora, adapted)
    return adapted


def _check_encoders(model: Model, manifest: Manifest, allowed: bool, digest: FileDigest) -> Mapping[str, str]:
    """Fingerprints of the model's encoders that did not make the cache, by name.

    Raises `ModelError` if there are any, unless `allowed`.
    """
    mine = {"vae": vae_fingerprint(model, digest), "text": text_fingerprint(model, digest)}
    made = manifest.document["models"]
    others = {name: digest for name, digest in mine.items() if digest != made.get(name)}
    if others and not allowed:
        spelled = {"vae": "VAE", "text": "text encoder"}
        name, fingerprint = next(iter(others.items()))
        raise ModelError(
            f"the {' and the '.join(spelled[other] for other in others)} of {model} did not make this cache: "
            f"{spelled[name]} is {fingerprint[:12]}, expected {str(made.get(name))[:12]}",
            hint="run prep encode with this model, or add --allow-other-encoders if the difference is intended")
    return others
