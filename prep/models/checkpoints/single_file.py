"""Converts a single-file checkpoint to a pipeline directory, offline, with diffusers' functions that rename weights.

A single file has weights only. Configs and tokenizers, and weights that the file lacks, come from a pipeline directory
of the same architecture; they are copied first, so that no library looks at anything else in it, and none downloads.
Each weight keeps its dtype. Those of 8 bits with a scale beside them cannot: they are multiplied, and become bfloat16.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from prep.errors import ModelError, PathError, first_line
from prep.models.checkpoints.bounds import TooMuch, build, limited
from prep.models.checkpoints.original import (
    Fit,
    Parts,
    Way,
    fit,
    is_harmless,
    parts_of,
    ways_of_diffusers,
    ways_of_encoder,
)
from prep.models.checkpoints.stored import DTYPES, Stored, write
from prep.models.components import class_of
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.files import CONFIG_BYTES, read_config, read_small
from prep.models.fingerprint import text_files
from prep.models.loading import named, quiet_libraries
from prep.models.pipeline import infer_family, pipeline_index, scheduler_config, tokenizer_files, weighted_files
from prep.models.text.pipeline import spoken
from prep.models.weights import read_tensors
from prep.parse import brief

CHECKPOINT = ".safetensors"
SCALED = torch.bfloat16  # of a weight that is multiplied by its scale
_DIR = "the directory of --config"
_LOSING = "name a pipeline directory of the same architecture, with weights for what the file lacks: --config DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """What was written."""

    out: Path
    scaled: int  # weights that were multiplied by their scales


def convert(file: Path, config: Path, out: Path) -> Converted:
    """Writes `out`, a pipeline directory with the weights of `file` and the configs and tokenizers of `config`.

    Raises `ModelError`, also for a tensor that nothing reads and for weights that are not finite; `PathError` if `out`
    exists and is not an empty directory.
    """
    check_target(out)
    stored = _stored(file)
    family = FAMILIES[infer_family(config)]
    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.absolute().parent) as folder:
        made = Path(folder) / out.name
        made.mkdir()
        components = _copy_configs(config, family, made)
        _check_marks(stored, made, file)
        _write_weights(file, stored, config, made, components)
        weighted_files(made, family.denoiser)
        weighted_files(made, "vae")
        text_files(made)  # as every model directory is checked before it is used
        if out.is_dir():
            out.rmdir()
        made.rename(out)
    return Converted(out=out, scaled=len(stored.scales.of))


def is_whole(file: Path) -> bool:
    """Whether `file` has a denoiser, a VAE and text encoders, so that of another model only configs are needed.

    Raises `ModelError`.
    """
    parts = parts_of(_stored(file).tensors)
    return bool(parts.denoiser and parts.vae and parts.encoders)


def _stored(file: Path) -> Stored:
    """The tensors of `file`. Raises `ModelError`, also if it is truncated."""
    if file.suffix != CHECKPOINT:
        raise ModelError(f"{file} is no safetensors file, expected NAME{CHECKPOINT}",
                         hint="only safetensors are read: a .ckpt file can run code when it is loaded")
    if not file.exists():
        raise ModelError(f"{file} does not exist", hint="name the file to convert")
    tensors = read_tensors([file])
    if not tensors:
        raise ModelError(f"{file} has no tensors", hint="name the file to convert")
    return Stored.of(tensors)


def check_target(out: Path) -> None:
    """Raises `PathError` unless `out` may become a directory."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise PathError(f"{out} exists, expected a new or empty directory", hint="name another with -o")
    if not out.absolute().parent.is_dir():
        raise PathError(f"{out} cannot be written: there is no directory {out.absolute().parent}",
                        hint="make the directory first")


def _copy_configs(config: Path, family: Family, made: Path) -> dict[str, Any]:
    """Copies the configs and tokenizers of the pipeline directory `config`, and nothing else of it.

    The new model_index.json names only components of the family. Returns the class of each component with weights.
    Raises `ModelError`.
    """
    index = pipeline_index(config)
    kept = {key: value for key, value in index.items() if not isinstance(value, list)}
    found: dict[str, Any] = {}
    for component, value in index.items():
        if component in family.components and value not in (None, [None, None]):
            library, kind = class_of(index, component, config)
            kept[component] = [library, kind]
            if component.startswith("tokenizer"):
                _write_small(made / component, tokenizer_files(config, component).small)
            else:
                _write_small(made / component, {
                    "config.json": read_small(config / component / "config.json", CONFIG_BYTES)})
                found[component] = getattr(transformers if library == "transformers" else diffusers, kind)
        elif isinstance(value, list):
            kept[component] = [None, None] if _is_component(value) else value
    _copy_scheduler(config, index, kept, made)
    _write_small(made, {"model_index.json": json.dumps(kept, indent=2).encode() + b"\n"})
    return found


def _is_component(value: list[Any]) -> bool:
    """Whether a list of model_index.json names a component: others are options with several numbers."""
    return not value or not all(type(one) is int for one in value)


def _write_small(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _copy_scheduler(config: Path, index: dict[str, Any], kept: dict[str, Any], made: Path) -> None:
    """The scheduler's config: plain values, of a class of diffusers."""
    given = index.get("scheduler")
    known = isinstance(given, list) and len(given) == 2 and given[0] == "diffusers"
    kind = str(given[1]) if isinstance(given, list) and len(given) == 2 else ""
    if not known or not kind.endswith("Scheduler") or not hasattr(diffusers, kind):
        raise ModelError(f"scheduler in {config / 'model_index.json'} is {brief(given)}, expected one of diffusers",
                         hint=_LOSING)
    values = scheduler_config(config)
    _write_small(made / "scheduler", {"scheduler_config.json": json.dumps(values, indent=2).encode() + b"\n"})
    kept["scheduler"] = ["diffusers", kind]


# Empty tensors by which some files say what their denoiser predicts, and what the scheduler's config says then.
_MARKS: Mapping[str, tuple[str, Any]] = {"v_pred": ("prediction_type", "v_prediction"),
                                         "ztsnr": ("rescale_betas_zero_snr", True)}


def _check_marks(stored: Stored, made: Path, file: Path) -> None:
    """Raises `ModelError` if the file says that its denoiser predicts otherwise than the scheduler's config says."""
    config = scheduler_config(made)
    for mark, (key, value) in _MARKS.items():
        if mark in stored.tensors and config.get(key) != value:
            raise ModelError(f"{file} has the mark {mark}, but {key} of the scheduler of --config is "
                             f"{brief(config.get(key))}, expected {json.dumps(value)}",
                             hint=f"in a copy of {_DIR}, set {key} in scheduler/scheduler_config.json")


def _write_weights(file: Path, stored: Stored, config: Path, made: Path, components: Mapping[str, Any]) -> None:
    """Writes the weights of each component: of `file`, or of the pipeline directory `config` if the file lacks it.

    Raises `ModelError`.
    """
    parts, taken = parts_of(stored.tensors.keys() - stored.scales.beside), set[str]()
    plans: dict[str, tuple[Way, Fit]] = {}
    for component, kind in components.items():
        model = _empty(kind, made / component, stored)
        ways = [way for way in _ways(component, kind, made, parts, model) if not taken & set(way.names.values())]
        found = [(way, fits) for way in ways if (fits := _fit(way, stored, model, file)) is not None]
        if found:
            plans[component] = max(found, key=lambda one: (one[1].whole, one[1].common))
            taken |= set(plans[component][0].names.values())
        elif _is_there(component, parts):
            raise ModelError(f"{file} cannot be converted: its {spoken(component)} is no {kind.__name__} as in {_DIR}, "
                             "or diffusers does not know its names", hint=_LOSING)
    _check(file, stored, plans, taken)
    for component in components:
        stem = _stem(pipeline_index(made)[component][0])
        if component in plans:
            _write(made / component / f"{stem}{CHECKPOINT}", stored, *plans[component])
        else:
            _copy_weights(file, config, component, made / component)


def _stem(library: str) -> str:
    return "model" if library == "transformers" else "diffusion_pytorch_model"


def _ways(component: str, kind: Any, made: Path, parts: Parts, model: Any) -> Iterator[Way]:
    """The ways in which the file may have this component."""
    if component.startswith("text_encoder"):
        for prefix, part in parts.encoders.items():
            yield from ways_of_encoder(prefix, part, model)
    elif _is_there(component, parts):
        yield from ways_of_diffusers(kind, read_config(made / component / "config.json"),
                                     parts.vae if component == "vae" else parts.denoiser)


def _is_there(component: str, parts: Parts) -> bool:
    """Whether the file has tensors that can be of no other component."""
    return bool({"vae": parts.vae, "unet": parts.denoiser, "transformer": parts.denoiser}.get(component))


def _empty(kind: Any, folder: Path, stored: Stored) -> Any:
    """The model that the config in `folder` describes, without data. Raises `ModelError`."""
    try:
        with limited(stored.tensors), torch.device("meta"):
            return build(kind, folder)
    except (TooMuch, MemoryError):
        raise ModelError(f"{folder.name} of --config is far larger than what the file has", hint=_LOSING) from None
    except Exception as error:  # bad values can raise nearly any exception
        raise ModelError(f"{folder.name} of --config cannot be used: {first_line(error)}", hint=_LOSING) from None


def _fit(way: Way, stored: Stored, model: Any, file: Path) -> Fit | None:
    """How the file's tensors fit into `model`; `None`: they are of another. Raises `ModelError`."""
    given = {name: torch.empty(stored.tensors[there].shape, dtype=_dtype(stored, there, file), device="meta")
             for name, there in way.names.items()}
    try:
        found = fit(given, way, model)
    except Exception:  # a converter stumbles over what it does not find
        return None
    return found if 2 * found.common > len(model.state_dict()) else None


def _dtype(stored: Stored, name: str, file: Path) -> torch.dtype:
    found = SCALED if name in stored.scales.of else DTYPES.get(stored.tensors[name].dtype)
    if found is None:
        raise ModelError(f"{file} has {brief(name)} as {stored.tensors[name].dtype}, expected one of: "
                         f"{', '.join(DTYPES)}")
    return found


def _check(file: Path, stored: Stored, plans: Mapping[str, tuple[Way, Fit]], taken: set[str]) -> None:
    """Raises `ModelError` if a component is not whole, or if the file has tensors that no component reads."""
    for component, (_, found) in plans.items():
        if found.missing:
            raise ModelError(f"{file} lacks weights of the {spoken(component)}: {named(list(found.missing))}",
                             hint=_LOSING)
        if found.misshapen:
            raise ModelError(f"{file} has weights of the {spoken(component)} whose shapes are not those of --config: "
                             f"{named(list(found.misshapen))}", hint=_LOSING)
    unread = {name for name in stored.tensors.keys() - stored.scales.beside - taken if not is_harmless(name)}
    if surplus := sorted(unread.union(*(found.unread for _, found in plans.values()))):
        raise ModelError(f"{file} has tensors that nothing reads: {named(surplus)}",
                         hint="name with --config the directory of a pipeline that has what these belong to")


def _write(path: Path, stored: Stored, way: Way, found: Fit) -> None:
    """Writes a component's weights. Raises `ModelError` if a number is not finite."""
    made = way.convert({name: stored.read(there, SCALED) for name, there in way.names.items()})
    bad = sorted(name for name in found.layout if made[name].is_floating_point()
                 and not bool(made[name].float().isfinite().all()))
    if bad:
        raise ModelError(f"weights of the {spoken(path.parent.name)} are not finite, NaN or infinite: {named(bad)}",
                         hint="the file is damaged, or its training diverged: download it again, or name another")
    write(path, found.layout, (made[name] for name in found.layout))


def _copy_weights(file: Path, config: Path, component: str, target: Path) -> None:
    """Copies the weights of a component that the file lacks. Raises `ModelError`."""
    if not list((config / component).glob(f"*{CHECKPOINT}")):
        raise ModelError(f"{file} cannot be converted: it has no {spoken(component)}, and neither has {_DIR}",
                         hint=_LOSING)
    found = weighted_files(config, component)
    _write_small(target, found.small)
    for path in found.weights:
        shutil.copyfile(path, target / found.weight_name(path))
