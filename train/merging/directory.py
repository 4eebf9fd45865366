"""`train merge`: adds a LoRA to the weights of its model; writes a diffusers directory that needs no LoRA.

Weights are read, changed and written one tensor at a time, so the memory is that of the LoRA and the largest tensor.
The sum is computed in float32 and rounded once, to the dtype of the weight or to one that is asked for. The weights of
a full run take the place of the model's, as the run has them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from prep.errors import ModelError, PathError, Problem, UsageError
from prep.fs import atomic
from prep.fs.paths import NamedPath, check_above, check_disjoint, in_cache
from prep.models.checkpoints.single_file import convert
from prep.models.configs import copied_index, index_file, is_modular, pipeline_index
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.files import MODULAR, ComponentFiles, Model, SingleFile
from prep.models.pipeline import SCHEDULER, infer_family, scheduler_config, weighted_files
from prep.models.weights import index_name, read_shapes, variant_of
from prep.parse import Unparsed
from prep.runs.documents import open_plain, refused
from prep.training.schema import Dtype
from train.merging.additions import Added, changed, read_lora
from train.merging.card import CARD, Merger, card
from train.merging.streamed import cast, check_space, infos_of, part_of, sha256_of, size_of
from train.merging.trained import another, family_of_run, find_lora, find_trained, metadata_of
from train.metadata import table_in
from train.models.base import base_fingerprints
from train.models.naming import naming_of
from train.models.targets import layers_of
from train.runs.checkpoint import recorded_digest
from train.runs.checkpoint_files import write_part
from train.runs.lora_file import unfit

INDEX = ".safetensors.index.json"
_COPIED = (".json", ".txt", ".model", ".jinja", ".md", ".safetensors")  # no pickles, no code


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeRequest:
    """A request to merge."""

    lora: Path  # a file, or a run; also a run that trained all weights
    model: Model
    output: Path
    strength: float = 1.0
    dtype: Dtype | None = None  # None: each weight keeps its own
    hub_id: str | None = None  # of the model, if it was named by that


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """The result of a merge."""

    output: Path
    lora: Path  # the file, of a full run that of its weights
    sha256: str  # its digest
    layers: int  # how many were changed; of a full run, how many weights it has
    size: int  # bytes of the directory
    notes: tuple[str, ...] = ()  # about the file of the LoRA
    full: bool = False  # whether the weights took the place of the model's


Tick = Callable[[int], object]


def merge(request: MergeRequest, tick: Tick = lambda count: None) -> Merged:
    """Writes the directory `request.output`, whole or not at all. `tick`: called for each file that was written.

    A single file is made a directory first, beside the output. Raises `PathError`, `ModelError`, `CacheError`.
    """
    _check_output(request)
    if not isinstance(request.model, SingleFile):
        return _merged_from(request.model, request, tick)
    parent = request.output.absolute().parent
    atomic.make_dirs(parent)
    with tempfile.TemporaryDirectory(prefix=f".{request.output.name}.", dir=parent) as folder:
        made = Path(folder) / "model"
        convert(request.model, made)
        return _merged_from(made, request, tick)


def _merged_from(model: Path, request: MergeRequest, tick: Tick) -> Merged:
    """Merges into the directory `model`, which has the files of `request.model`."""
    family = FAMILIES[infer_family(model, family_of_run(request.lora))]
    files = weighted_files(model, family.denoiser)
    trained = find_trained(request.lora, family)
    path = find_lora(request.lora) if trained is None else trained
    content = (_of_lora if trained is None else _of_full)(request, family, files, path)
    others = list(_others(model, family))
    schedules = _scheduling(model, family, table_in(content.metadata, "latentry.config"))
    check_space(request.output, content.needed + sum(path.stat().st_size for path, _ in others), "merged model")
    digest = sha256_of(path)
    with atomic.new_directory(request.output) as staged:
        for source, name in others:
            _copy(source, staged / name, schedules.get(name))
            tick(1)
        (staged / family.denoiser).mkdir()
        content.write(staged / family.denoiser, digest)
        atomic.write_synced(staged / CARD, _card(request, content, path, digest).encode())
        size = sum(each.stat().st_size for each in staged.rglob("*") if each.is_file())
        _check_unused(request.output)  # another program may have made it meanwhile
    return Merged(output=request.output, lora=path, sha256=digest, layers=content.layers, size=size, full=content.full,
                  notes=content.notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    """The denoiser to be written."""

    full: bool  # whether it takes the place of the model's
    layers: int
    notes: tuple[str, ...] = ()
    needed: int  # bytes
    base: Mapping[str, str]  # fingerprints of the model that was trained on
    metadata: Mapping[str, str]  # of the file that was trained
    write: Callable[[Path, str], None]  # into this directory, given the digest of what was trained


def _of_lora(request: MergeRequest, family: Family, files: ComponentFiles, path: Path) -> _Content:
    """The model's denoiser with what the LoRA adds. Raises `ModelError`, `CacheError`."""
    shapes = read_shapes(files.weights)
    layers, norms = layers_of(shapes), {name.removesuffix(".weight"): shape for name, shape in shapes.items()
                                        if name.endswith(".weight") and len(shape) == 1}
    read = read_lora(path, {**layers, **norms}, naming_of(family, layers))
    for name, part in read.added.items():
        if part.bias is not None and f"{name}.bias" not in shapes:
            raise unfit(path, Unparsed(f"it adds to a bias of {name[:120]}, which has none in this model"))
    infos = [infos_of(each) for each in files.weights]
    base = base_fingerprints(request.model, family)
    return _Content(full=False, layers=len(read.added), notes=read.file.notes(path.name), base=base,
                    needed=sum(size_of(each, request.dtype) for each in infos),
                    metadata=read.file.metadata, write=lambda folder, digest: _write_denoiser(
                        request, files, read.added, _facts(request, base, path, digest), folder))


def _card(request: MergeRequest, content: _Content, path: Path, digest: str) -> str:
    return card(Merger(model=request.model, hub_id=request.hub_id, base=content.base, trained=path.name, sha256=digest,
                       strength=None if content.full else request.strength, metadata=content.metadata))


# ---- what is written -------------------------------------------------------------------------------------------------


def _write_denoiser(request: MergeRequest, files: ComponentFiles, added: Mapping[str, Added], facts: Mapping[str, str],
                    folder: Path) -> None:
    total = 0
    for path in files.weights:
        part = part_of({path: infos_of(path)}, request.dtype, partial(_merged, added, request), facts)
        total += sum(value.nbytes for value in (part.tensors or {}).values())
        write_part(folder / files.weight_name(path), part)
    for name, data in files.small.items():
        if ".index." in name:
            body = json.loads(data)
            body["metadata"] = {**(body.get("metadata") or {}), "total_size": total}
            data = json.dumps(body, indent=2).encode() + b"\n"
        atomic.write_synced(folder / name, data)


def _merged(added: Mapping[str, Added], request: MergeRequest, name: str, value: Tensor) -> Tensor:
    """A weight with what the LoRA adds. Raises `ModelError`."""
    layer, _, end = name.rpartition(".")
    part, whole = added.get(layer), value
    if part is not None and end == "weight":
        whole = changed(value.float(), part, request.strength)
    elif part is not None and end == "bias" and part.bias is not None:
        whole = value.float() + request.strength * part.bias
    return cast(name, whole, request.dtype, value)


def _facts(request: MergeRequest, base: Mapping[str, str], path: Path, digest: str) -> dict[str, str]:
    """Metadata of the merged weights: the base, the LoRA and the strength."""
    lora = {"name": path.name, "sha256": digest, "strength": request.strength}
    return {"latentry.base": json.dumps(dict(base), sort_keys=True),
            "latentry.merged": json.dumps([lora], sort_keys=True), "modelspec.sai_model_spec": "1.0.1",
            "modelspec.merged_from": f"{request.model.name}, {path.name} x {request.strength:g}"}


def _of_full(request: MergeRequest, family: Family, files: ComponentFiles, path: Path) -> _Content:
    """The weights of a full run, in place of the model's. Raises `ModelError`, `CacheError`, `UsageError`."""
    if request.strength != 1:
        raise UsageError(f"--strength is {request.strength:g}, which is for a LoRA, but {path} has all weights",
                         hint="omit --strength")
    shapes, infos = read_shapes(files.weights), infos_of(path, from_run=True)
    for name, info in infos.items():
        if tuple(info.shape) != tuple(shapes.get(name, ())):
            expected = f"shape {list(shapes[name])}" if name in shapes else "no such tensor"
            raise ModelError(f"{path} has '{name[:80]}' with shape {list(info.shape)}, but {request.model} has "
                             f"{expected}", hint="name the model of the run with --model")
    lacking = shapes.keys() - infos.keys()
    if others := sorted(lacking - family.buffers):
        raise ModelError(f"{path} lacks '{others[0][:80]}', which {request.model} has",
                         hint="name the model of the run with --model")
    metadata = metadata_of(path)

    from_model = {each: {name: info for name, info in infos_of(each).items() if name in lacking}
                  for each in files.weights if lacking}

    def write(folder: Path, digest: str) -> None:
        if digest != (recorded_digest(path) or digest):
            raise refused(path, Unparsed("its bytes do not match their digest"), another(path))
        facts = {name: value for name, value in metadata.items() if name.startswith(("latentry.", "modelspec."))}
        part = part_of({path: infos, **from_model}, request.dtype,
                     lambda name, value: cast(name, value, request.dtype, value), facts)
        write_part(folder / "diffusion_pytorch_model.safetensors", part)
        atomic.write_synced(folder / "config.json", files.small["config.json"])

    return _Content(full=True, layers=len(infos), needed=size_of(infos, request.dtype), metadata=metadata, write=write,
                    base=table_in(metadata, "latentry.base"))


def _scheduling(model: Model, family: Family, settings: Mapping[str, Any]) -> dict[str, bytes]:
    """The files that say how pictures are made, if what the run trained predicts otherwise than its model, and the
    index of a modular repository: by path."""
    rescaled, prediction = settings.get("zero_terminal_snr") is True, settings.get("prediction", "manifest")
    body, index = scheduler_config(model), pipeline_index(model)
    config = dict(body)
    if prediction in ("epsilon", "v_prediction"):
        config["prediction_type"] = prediction
    if rescaled:
        config |= {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing",
                   "_class_name": "DDIMScheduler"}
        index["scheduler"] = ["diffusers", "DDIMScheduler"]
    files: dict[str, Mapping[str, Any]] = {SCHEDULER: config} if config != body else {}
    if is_modular(model):
        files[MODULAR] = copied_index(model, [family.denoiser])
    if rescaled:
        files["model_index.json"] = index
    return {name: json.dumps(value, indent=2).encode() + b"\n" for name, value in files.items()}


def _others(model: Model, family: Family) -> Iterator[tuple[Path, str]]:
    """The files of the other components, and the index: each with its path in the directory."""
    yield index_file(model), index_file(model).name
    for name, kind in sorted(pipeline_index(model).items()):
        folder = model / name
        if name == family.denoiser or not isinstance(kind, list) or not folder.is_dir():
            continue
        named = {path.name: path.name for path in folder.iterdir()}
        with suppress(Problem):  # a tokenizer and a scheduler have no weights
            named = _without_variant(weighted_files(model, name))
        for path in sorted(folder.iterdir()):
            weights = path.suffix == ".safetensors" or ".safetensors.index." in path.name
            if path.suffix in _COPIED and path.is_file() and not path.name.startswith(".") and (
                    not weights or path.name in named):
                yield path, f"{name}/{named.get(path.name, path.name)}"


def _without_variant(files: ComponentFiles) -> dict[str, str]:
    """The files of a component's weights and their index, each with its name if it were of no variant: the denoiser
    that is written has none, and diffusers loads one variant of all components."""
    names = {path.name: files.weight_name(path) for path in files.weights}
    for name in (name for name in files.small if name.endswith(INDEX)):
        stem = name.removesuffix(INDEX)
        names[index_name(stem, variant_of(files.folder, stem))] = name
    return names


def _copy(source: Path, target: Path, changed: bytes | None = None) -> None:
    """Copies a file, or writes its changed content."""
    target.parent.mkdir(exist_ok=True)
    if changed is not None:
        atomic.write_synced(target, changed)
        return
    try:
        with open_plain(source.resolve()) as read, atomic.create(target) as handle:  # links of the Hub's cache
            while data := read.read(1 << 20):
                atomic.write(handle, data)
            atomic.sync(handle)
    except OSError as error:
        raise PathError(f"cannot copy {source} to {target}: {error.strerror or error}") from None


# ---- what is refused -------------------------------------------------------------------------------------------------


def _check_output(request: MergeRequest) -> None:
    _check_unused(request.output)
    check_above(request.output, "merged model")
    if in_cache(request.output.resolve()):
        raise PathError(f"{request.output} lies in a cache", hint="name a directory outside with -o")
    base = request.model.path if isinstance(request.model, SingleFile) else request.model
    check_disjoint([NamedPath(role="output", path=request.output), NamedPath(role="model", path=base)])


def _check_unused(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise PathError(f"{output} exists, expected a new directory", hint="name another with -o")
