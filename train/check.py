"""Checks manifest, cache, settings and model files before a model is loaded. No torch: `train check` takes a second."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from math import isqrt, prod
from pathlib import Path
from types import TracebackType

from prep.batching.plan import StepPlan, require_steps, step_plan
from prep.errors import CacheError, ConfigError, ModelError, Problem
from prep.loader.index import Index, open_index
from prep.loader.shards import Looks, check_shards, room_notes
from prep.manifest.commands import encode_command
from prep.manifest.document import Manifest, check_model_named, read_manifest
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.files import read_config
from prep.models.fingerprint import FileDigest, text_fingerprint, vae_fingerprint
from prep.models.hub import locate
from prep.models.pipeline import infer_family, weighted_files
from train.config.optimizers import OPTIMIZERS
from train.config.schema import Config, Lora
from train.config.unused import Facts, unused
from train.models.base import base_fingerprints, remembered_digests
from train.models.families.registry import DENOISERS, naming_of
from train.models.levels import check_levels
from train.models.naming import Naming, strengths_of
from train.models.samplers import DIFFUSION, LIBRARIES, RESCALED, samplers
from train.models.size_shift import size_shifts
from train.models.targets import Shapes, is_ambiguous, layers_of, read_weights, targeted, trained_shapes
from train.optim.optimizers import TABLE, state_bytes
from train.runs.initial import inspect_weights
from train.setup import CheckReport, Initial, RunRequest, Setup
from train.trackers.tracked import check_trackers

DIVIDES = (2, 9)  # the first torch that can add gradients over ranks instead of taking their mean


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """Facts about the model before it is loaded."""

    path: Path
    base: Mapping[str, str]
    others: Mapping[str, str]
    numbers: int
    shifts: tuple[float, ...]
    saved: int
    state_bytes: int
    initial: Initial | None
    large: bool  # this and the next two as in `train.config.unused.Facts`
    convolves: bool
    rescaled: bool
    ambiguous: bool  # this and the next two as in `Setup`
    strengths: tuple[float, ...]
    fits_kohya: bool


def check(asked: RunRequest, config: Config, *, planned: int | None = None) -> CheckReport:
    """Checks manifest, fields, shards, step plan, model and its encoders, and reports every fault. `planned`: the
    micro-batch with which the steps of a resumed run were planned."""
    faults: list[Problem] = []
    manifest: Manifest | None = None
    index: Index | None = None
    plan: StepPlan | None = None
    model: _Model | None = None
    shards: Looks = {}
    with _Noting(faults):
        manifest = read_manifest(asked.manifest)
    if manifest is None:
        return CheckReport(faults=tuple(faults), setup=None, plan=None, left_out=(), repeated=())
    with _Noting(faults):
        _check_fields(manifest, config)
    with _Noting(faults):
        _check_libraries(config)
    with _Noting(faults):
        index = open_index(manifest)
    if index is not None:
        with _Noting(faults):
            shards = check_shards(index)
        with _Noting(faults):
            _check_masks(index, config)
        with _Noting(faults):
            plan = _plan(index, config, planned)
        with _Noting(faults):
            _check_schedule(config, plan)
    with _Noting(faults):
        model = _model(asked, config, manifest, index, faults)
    setup = None
    if not faults and index and plan and model:
        setup = _setup(asked, config, manifest, index, plan, model, shards)
    left_out, repeated = _uneven(index, plan)
    return CheckReport(faults=tuple(faults), setup=setup, plan=plan, left_out=left_out, repeated=repeated,
                       notes=(*_notes(model, config, manifest, index), *(() if index is None else room_notes(index))))


def _setup(asked: RunRequest, config: Config, manifest: Manifest, index: Index, plan: StepPlan, model: _Model,
           shards: Looks) -> Setup:
    return Setup(asked=asked, config=config, manifest=manifest, index=index, plan=plan, model=model.path,
                 base=model.base, numbers=model.numbers, state_bytes=model.state_bytes, saved=model.saved,
                 shifts=model.shifts, others=model.others, ambiguous=model.ambiguous, strengths=model.strengths,
                 fits_kohya=model.fits_kohya, init=_recorded(model.initial), initial=model.initial,
                 masked=_masked(index, config), prediction=_prediction(config, manifest), steps=_steps(config, plan),
                 family=FAMILIES[manifest.family], shards=shards)


def _notes(model: _Model | None, config: Config, manifest: Manifest, index: Index | None) -> Iterator[str]:
    """What is no fault, but worth knowing: unused tensors, settings without effect, a learning rate far from the usual
    one, latents of another program."""
    if model is not None and index is not None:
        yield from unused(config, Facts(masked=_masked(index, config), held_out=any(map(len, index.validation)),
                                        large=model.large, convolves=model.convolves, rescaled=model.rescaled))
    initial = None if model is None else model.initial
    if initial is not None and initial.unused:
        yield f"{initial.name} also adapts text encoders; {initial.unused} of its tensors are not used"
    if initial is not None and model is not None:
        yield from _other_origin(initial, model.base, _prediction(config, manifest))
    if model is not None and config.method == "lora":
        yield from _misread(config.lora, naming_of(FAMILIES[manifest.family]), model)
    given = config.optimizer
    usual = OPTIMIZERS[given.name].lr
    if given.lr < usual / 200 or given.lr > usual * 200:
        yield f"optimizer.lr is {given.lr:g}; '{given.name}' is usually given {usual:g}"
    imported = manifest.document["latents"].get("imported")
    if imported is not None and not imported["verified"]:
        yield (f"latents were imported ({imported['from']}), VAE unverified: none was compared with what the model's "
               f"VAE makes; to compare some: {encode_command(manifest, '--verify', '8')}")


def _misread(lora: Lora, naming: Naming, model: _Model) -> Iterator[str]:
    """That ComfyUI scales the result otherwise than it was trained, and what helps."""
    if not naming.is_misread(lora, model.strengths):
        return
    least, most = model.strengths[0], model.strengths[-1]
    one = least == most and not lora.dora  # a LoRA of which a strength is a multiple
    told = f"{least:g}" if least == most else f"{least:g} to {most:g} by layer"
    yield (f"ComfyUI reads no alpha in files with diffusers' names and takes it for the rank, but alpha / rank is "
           f"{told}{', by lora.rslora' if lora.rslora else ''}: "
           + (f"strength {least:g} there draws what was trained; " if one else "")
           + "what helps is alpha as large as the rank" + (" without lora.rslora" if lora.rslora else "")
           + (", or --set lora.format=kohya" if model.fits_kohya else ""))


def _other_origin(initial: Initial, base: Mapping[str, str], prediction: str) -> Iterator[str]:
    """In what the weights that a run begins with were trained for another model, as far as their file says."""
    said = {"epsilon": "epsilon", "v": "v_prediction"}.get(initial.metadata.get("modelspec.prediction_type", ""))
    if said not in (None, prediction):
        yield f"{initial.name} was trained to predict {said}, and this run trains it to predict {prediction}"
    if initial.metadata.get("latentry.base", dumped := json.dumps(dict(base), sort_keys=True)) != dumped:
        yield f"{initial.name} was trained on another model than the one that this run trains"


class _Noting:
    """Ends its block at a raised `Problem` and appends it to the faults, each message once."""

    def __init__(self, faults: list[Problem]) -> None:
        self._faults = faults

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if isinstance(error, Problem) and error.message not in (fault.message for fault in self._faults):
            self._faults.append(error)
        return isinstance(error, Problem)


def _check_fields(manifest: Manifest, config: Config) -> None:
    if config.loss.masked is True and "mask" not in manifest.fields:
        raise CacheError("manifest has no field 'mask', but the settings ask for masked loss",
                         hint=encode_command(manifest, "--mask", "sidecar"))
    predictions, asked = FAMILIES[manifest.family].predictions, _prediction(config, manifest)
    if asked not in predictions:
        raise ConfigError(f"prediction is '{asked}', expected {' or '.join(predictions)} for family "
                          f"'{manifest.family}'", hint="--set prediction=manifest")
    if config.zero_terminal_snr and asked != "v_prediction":
        why = "of pure noise tells nothing of the picture" if asked == "epsilon" else "already ends in pure noise"
        raise ConfigError(f"zero_terminal_snr is on, but this model predicts {asked}, which {why}",
                          hint="--set zero_terminal_snr=false; or --set prediction=v_prediction, which "
                          "retrains the model to predict v" if asked == "epsilon" else "--set zero_terminal_snr=false")
    if asked != "flow" and config.timesteps.shift_by_size != "none":
        raise ConfigError(f"timesteps.shift_by_size is '{config.timesteps.shift_by_size}', which is for models that "
                          f"predict a flow, but this one predicts {asked}", hint="--set timesteps.shift_by_size=none")
    mixed = [f"noise.{name}" for name in ("offset", "pyramid") if getattr(config.noise, name)]
    if asked == "flow" and mixed:
        raise ConfigError(f"{mixed[0]} is {getattr(config.noise, mixed[0][6:]):g}, but models of family "
                          f"'{manifest.family}' predict a flow, which ends in plain noise: pictures are made from that",
                          hint=f"--set {mixed[0]}=0")
    wanted = {"none": asked, "debiased": "epsilon"}.get(config.loss.weighting, "flow")
    if asked != wanted:
        raise ConfigError(f"loss.weighting is '{config.loss.weighting}', which is for models that predict {wanted}, "
                          f"but this one predicts {asked}", hint="--set loss.weighting=none")
    if asked == "flow" and config.loss.min_snr:
        raise ConfigError(f"loss.min_snr is {config.loss.min_snr:g}, but models of family '{manifest.family}' predict "
                          "a flow, which has no such weighting", hint="--set loss.min_snr=0")


def _check_libraries(config: Config) -> None:
    """Raises `ConfigError` if the library of a tracker or of the optimizer is not installed, or torch is too old."""
    check_trackers(config.log)
    name = config.optimizer.name
    facts = TABLE[name]
    if facts.library and find_spec(facts.library) is None:
        raise ConfigError(f"optimizer.name is '{name}', which needs the library {facts.library}",
                          hint=f"pip install 'latentry[{facts.extra}]'")
    _require_torch(facts.torch, f"optimizer.name is '{name}', which needs", "--set optimizer.name=adamw")
    if config.quantization != "none":
        _check_quantized(config)
    if config.parallel.shard:
        _check_divided(config)


def _check_quantized(config: Config) -> None:
    """Raises `ConfigError` for settings that need the base's weights as they are, or without the library."""
    lora, kind = config.lora, config.quantization
    for name, wrong, way in (("method", config.method == "full", "--method lora"),
                             ("lora.kind", lora.kind != "lora", "--set lora.kind=lora"),
                             ("lora.dora", lora.dora, "--set lora.dora=false"),
                             ("lora.init", lora.init != "kaiming", "--set lora.init=kaiming"),
                             ("parallel.shard", config.parallel.shard, "--no-shard")):
        if wrong:
            raise ConfigError(f"quantization is '{kind}', which is for the frozen base of a LoRA as lora.kind 'lora' "
                              f"adds it, but {name} needs the weights as they are",
                              hint=f"{way}, or --set quantization=none")
    if kind == "nf4" and find_spec("bitsandbytes") is None:
        raise ConfigError("quantization is 'nf4', which needs the library bitsandbytes",
                          hint="pip install 'latentry[bnb]', or --set quantization=fp8")


def _check_divided(config: Config) -> None:
    """Raises `ConfigError` for settings that a divided model cannot have, or if torch is too old for it."""
    name = config.optimizer.name
    if not TABLE[name].by_number:
        raise ConfigError(f"optimizer.name is '{name}', which needs whole weights, but parallel.shard divides them",
                          hint="--set optimizer.name=adamw, or --no-shard")
    faster = [name for name in ("channels_last", "compile") if getattr(config, name)]
    if faster:
        raise ConfigError(f"{faster[0]} is on, which is only for models that are not divided, but parallel.shard is on",
                          hint=f"--set {faster[0]}=false, or --no-shard")
    if config.ema.decay and config.ema.device != "model":
        raise ConfigError(f"ema.device is '{config.ema.device}', which is only for models that are not divided, but "
                          "parallel.shard is on: each rank has its part of the average beside that of the weights",
                          hint="--set ema.device=model, or --no-shard")
    _require_torch(DIVIDES, "parallel.shard needs", "--no-shard")


def _require_torch(least: tuple[int, int], what: str, otherwise: str) -> None:
    """Raises `ConfigError` if torch is older; `what` begins the message, `otherwise` ends the hint."""
    installed = version("torch")
    if tuple(int(part) for part in installed.split(".")[:2]) < least:
        raise ConfigError(f"{what} torch {'.'.join(map(str, least))} or later, but {installed} is installed",
                          hint=f"install a later torch, or {otherwise}")


def idle_ranks(batch_size: int, world: int) -> ConfigError | None:
    """What is wrong if a step has fewer samples than there are ranks."""
    if batch_size >= world:
        return None
    return ConfigError(f"batch_size is {batch_size}, but {world} ranks divide a step's samples",
                       hint=f"--batch-size {world} or more, or start fewer processes")


def needs_device(config: Config) -> bool:
    """Whether the settings need a certain kind of device."""
    return bool(TABLE[config.optimizer.name].device)


def check_device(config: Config, kind: str) -> None:
    """Raises `ConfigError` if the optimizer does not work on a device of this kind."""
    needed = TABLE[config.optimizer.name].device
    if needed and kind != needed:
        raise ConfigError(f"optimizer.name is '{config.optimizer.name}', which needs {needed}, but the device is "
                          f"{kind}", hint=f"--device {needed} on a machine that has it, or --set optimizer.name="
                          f"{config.optimizer.name.removesuffix('-paged')}")


def _check_masks(index: Index, config: Config) -> None:
    if config.loss.masked is True and "mask" in index.manifest.fields and not index.masked:
        raise CacheError(f"the settings ask for masked loss, but none of the {len(index.samples)} samples has a mask",
                         hint="--no-masked, or add masks at the paths in the recipe and run prep encode again")


def _masked(index: Index, config: Config) -> bool:
    """Whether the loss uses masks: as the settings say; with "auto", if any sample has a mask."""
    if config.loss.masked == "auto":
        return "mask" in index.manifest.fields and index.masked > 0
    return bool(config.loss.masked)


def _plan(index: Index, config: Config, planned: int | None) -> StepPlan:
    whole = planned is not None and config.batch_size % planned == 0
    plan = step_plan(index.counts, seed=config.seed, batch_size=config.batch_size,
                     micro_batch=planned if planned and whole else config.micro_batch, underfill=config.underfill,
                     shuffle=config.shuffle)
    if not plan.steps_per_epoch:
        require_steps(plan, index.manifest.buckets, index.names(plan.left_out(0)) if sum(plan.counts) else ())
    return plan


def _steps(config: Config, plan: StepPlan) -> int:
    return config.steps or (config.epochs or 0) * plan.steps_per_epoch


def _check_schedule(config: Config, plan: StepPlan | None) -> None:
    steps, schedule = 0 if plan is None else _steps(config, plan), config.schedule
    if plan is not None and schedule.warmup > steps:
        raise ConfigError(f"schedule.warmup is {schedule.warmup}, but the run has {steps} steps: the learning "
                          "rate would never reach optimizer.lr", hint=f"--set schedule.warmup={steps // 10}")
    falling = max(steps - schedule.warmup, 1)
    if plan is not None and schedule.name == "cosine-restarts" and schedule.cycles > falling:
        raise ConfigError(f"schedule.cycles is {schedule.cycles}, but only {falling} steps follow the warm-up",
                          hint=f"--set schedule.cycles={min(4, falling)}")


def _model(asked: RunRequest, config: Config, manifest: Manifest, index: Index | None,
           faults: list[Problem]) -> _Model | None:
    """Facts about the model, or `None` if they are incomplete; appends its faults to `faults`."""
    check_model_named(manifest, asked.model)
    path, family = locate(asked.model or manifest.model, download=asked.download), FAMILIES[manifest.family]
    presets, initial = DENOISERS[family.name].presets, None
    trained: list[tuple[int, ...]] | None = None
    adapted: Shapes = {}
    base: Mapping[str, str] | None = None
    others: Mapping[str, str] | None = None
    shifts: tuple[float, ...] | None = None
    with _Noting(faults):
        shifts = _shifts(path, config, manifest)
    with _Noting(faults):
        _check_shapes(path, manifest, index)
    for checked in (_check_guidance, _check_levels, _check_min_snr, _check_sampler):
        with _Noting(faults):
            checked(path, config, manifest)
    with _Noting(faults):
        weights = read_weights(path, family)
        trained = trained_shapes(weights, config, presets)
        adapted = _adapted(layers_of(weights), config, family)
    with remembered_digests() as digest:
        with _Noting(faults):
            base = base_fingerprints(path, family, digest)
        with _Noting(faults):
            others = _check_encoders(path, manifest, asked.other_encoders, digest)
        with _Noting(faults):
            if asked.init is not None and trained is not None:
                initial = inspect_weights(asked.init, config, family, weights, presets, naming_of(family), digest)
    if trained is None or base is None or others is None or shifts is None:
        return None
    numbers = sum(map(prod, trained))
    return _Model(path=path, base=base, others=others, numbers=numbers, shifts=shifts, initial=initial,
                  large=any(prod(shape[2:]) > 1 for shape in adapted.values()), convolves=_convolves(weights),
                  rescaled=_rescaled(path), saved=_saved(numbers, weights, config),
                  strengths=strengths_of(config.lora, adapted),
                  fits_kohya=naming_of(family).fits_kohya(config.lora, adapted),
                  ambiguous=config.method == "lora" and is_ambiguous(weights, config.lora, presets),
                  state_bytes=state_bytes(TABLE[config.optimizer.name], trained))


def _shifts(model: Path, config: Config, manifest: Manifest) -> tuple[float, ...]:
    """The further shift of timesteps for each bucket; `_check_fields` refuses one where no flow is predicted."""
    draws = config.timesteps
    if _prediction(config, manifest) != "flow":
        draws = replace(draws, shift_by_size="none")
    return size_shifts(draws, FAMILIES[manifest.family], DENOISERS[manifest.family],
                       read_config(model / "scheduler" / "scheduler_config.json"), manifest.buckets)


def _convolves(weights: Shapes) -> bool:
    """Whether the denoiser has convolutions."""
    return any(len(shape) == 4 for shape in weights.values())


def _rescaled(model: Path) -> bool:
    """Whether the model's own noise schedule ends in pure noise."""
    return read_config(model / "scheduler" / "scheduler_config.json").get("rescale_betas_zero_snr") is True


def _saved(numbers: int, weights: Shapes, config: Config) -> int:
    """How many numbers a file of weights has: of PiSSA also the parts that adapters began with."""
    if config.method == "full":
        return sum(map(prod, weights.values()))
    return 2 * numbers if config.lora.init == "pissa" else numbers


def _recorded(initial: Initial | None) -> Mapping[str, str]:
    return {} if initial is None else {"name": initial.name, "sha256": initial.digest}


def _check_levels(model: Path, config: Config, manifest: Manifest) -> None:
    """Raises `ModelError` for a noise schedule without usable levels."""
    check_levels(read_config(model / "scheduler" / "scheduler_config.json"), model,
                 flow=_prediction(config, manifest) == "flow")


def _check_min_snr(model: Path, config: Config, manifest: Manifest) -> None:
    """Raises `ConfigError` where the weight would be 0 / 0: the last timestep is pure noise, and its SNR 0."""
    scheduler = read_config(model / "scheduler" / "scheduler_config.json")
    zero = scheduler.get("rescale_betas_zero_snr") is True
    if zero and config.loss.min_snr and _prediction(config, manifest) == "epsilon":
        raise ConfigError(f"loss.min_snr is {config.loss.min_snr:g}, but the noise schedule of {model} ends in pure "
                          "noise, from which a model that predicts epsilon learns nothing",
                          hint="--set loss.min_snr=0, or --set prediction=v_prediction if the model predicts that")
    if zero and config.loss.weighting == "debiased":
        raise ConfigError(f"loss.weighting is 'debiased', but the noise schedule of {model} ends in pure noise, where "
                          "that weight is infinite", hint="--set loss.weighting=none")


def _check_sampler(model: Path, config: Config, manifest: Manifest) -> None:
    """Raises `ConfigError` for a scheduler that cannot make pictures of the model, or not along its noise schedule, or
    not without a library."""
    taken: Sequence[str] = DIFFUSION
    scheduler = read_config(model / "scheduler" / "scheduler_config.json")
    if _prediction(config, manifest) == "flow":
        taken = samplers(DENOISERS[manifest.family].solvers, scheduler)
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
    library = LIBRARIES.get(config.sample.sampler or "")
    if library and find_spec(library) is None:
        raise ConfigError(f"sample.sampler is '{config.sample.sampler}', which needs the library {library}",
                          hint=f"pip install {library}, or leave sample.sampler out for the usual one")


def _adapted(layers: Shapes, config: Config, family: Family) -> Shapes:
    """The layers that get an adapter. Raises `ConfigError` if `lora.format` cannot hold them."""
    if config.method == "full":
        return {}
    naming = naming_of(family)
    found = {name: layers[name] for name in targeted(layers, config.lora, DENOISERS[family.name].presets)}
    naming.require(config.lora, found)
    naming.require_shapes(config.lora, found)
    return found


def _check_guidance(model: Path, config: Config, manifest: Manifest) -> None:
    """Raises `ConfigError` for a guidance number that the denoiser does not take."""
    family = FAMILIES[manifest.family]
    takes = DENOISERS[family.name].takes_guidance
    if config.guidance_embedding is not None and not (
            takes and weighted_files(model, family.denoiser).config.get("guidance_embeds") is True):
        raise ConfigError(f"guidance_embedding is {config.guidance_embedding:g}, but the denoiser of {model} takes no "
                          "such number: its config has no guidance_embeds", hint="omit guidance_embedding")


def _check_shapes(model: Path, manifest: Manifest, index: Index | None) -> None:
    named = infer_family(model)
    if named != manifest.family:
        raise ModelError(f"model {model} is of family '{named}', but the manifest is of family '{manifest.family}'",
                         hint="train the model that the cache was made for, or run prep encode with this one: it "
                         "reuses rows that both have in common")
    family = FAMILIES[named]
    config = weighted_files(model, family.denoiser).config
    shapes = {"latent": (family.latent_channels,), **(index.text_shapes if index is not None else {})}
    for name, (array, factor) in DENOISERS[named].config_widths.items():
        wanted = shapes[array][-1] * factor if array in shapes else None
        if wanted is not None and config.get(name) != wanted:
            raise ModelError(f"{model / family.denoiser} has {name} {config.get(name)!r}, but the cache's rows have "
                             f"{wanted}",
                             hint="train the model that the cache was made for, or run prep encode with this one")
    longest_side, largest_area = DENOISERS[named].longest_side, DENOISERS[named].largest_area
    _check_sides(model, manifest, None if longest_side is None else longest_side(config))
    _check_areas(model, manifest, None if largest_area is None else largest_area(config))


def _check_sides(model: Path, manifest: Manifest, most: int | None) -> None:
    """Raises `ModelError` for a bucket that is larger than the denoiser's table of positions."""
    for size in manifest.buckets:
        if most is not None and max(size) > most:
            raise ModelError(f"{model} takes sides of at most {most} pixels, but the manifest has the bucket "
                             f"{size[0]}x{size[1]}",
                             hint=f"set image.longest = {most} in the recipe, and run prep encode again")


def _check_areas(model: Path, manifest: Manifest, most: int | None) -> None:
    """Raises `ModelError` for a bucket that is not square and has more patches than the denoiser pads to."""
    for width, height in manifest.buckets:
        if most is not None and width != height and width * height > most:
            raise ModelError(f"{model} takes at most {most} pixels of a picture that is not square, but the manifest "
                             f"has the bucket {width}x{height}",
                             hint=f"set image.resolution = {isqrt(most)} in the recipe, and run prep encode again")


def _check_encoders(model: Path, manifest: Manifest, allowed: bool, digest: FileDigest) -> Mapping[str, str]:
    """Fingerprints of the model's encoders that did not make the cache, by name.

    Raises `ModelError` if there are any, unless `allowed`.
    """
    mine = {"vae": vae_fingerprint(model, digest), "text": text_fingerprint(model, digest)}
    made = manifest.document["models"]
    others = {name: digest for name, digest in mine.items() if digest != made.get(name)}
    if others and not allowed:
        spelled = {"vae": "VAE", "text": "text encoder"}
        name, found = next(iter(others.items()))
        raise ModelError(
            f"the {' and the '.join(spelled[other] for other in others)} of {model} did not make this cache: "
            f"{spelled[name]} is {found[:12]}, expected {str(made.get(name))[:12]}",
            hint="run prep encode with this model, or add --allow-other-encoders if the difference is intended")
    return others


def _prediction(config: Config, manifest: Manifest) -> str:
    return str(manifest.document["prediction"]) if config.prediction == "manifest" else config.prediction


def _uneven(index: Index | None, plan: StepPlan | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if index is None or plan is None:
        return (), ()
    return tuple(index.names(plan.left_out(0))), tuple(index.names(plan.repeated(0)))
