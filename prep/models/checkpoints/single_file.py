"""Converts a single-file checkpoint to a pipeline directory, offline, by diffusers' own `from_single_file`.

A single file has weights only. Configs and tokenizers, and weights that the file lacks, come from a pipeline directory
of the same architecture; they are staged first, so that no library looks at anything else in it, and none downloads.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from prep.errors import ModelError, PathError, first_line
from prep.models.checkpoints.staging import link_or_copy
from prep.models.components import class_of
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.files import CONFIG_BYTES, open_regular, read_config, read_small
from prep.models.fingerprint import text_files
from prep.models.loading import dtype_keyword, quiet_libraries
from prep.models.pipeline import infer_family, pipeline_index, tokenizer_files, weighted_files
from prep.models.text.pipeline import spoken
from prep.models.weights import read_shapes
from prep.parse import brief

CHECKPOINT = ".safetensors"
_DIR = "the directory of --config"
_LOSING = "name a pipeline directory of the same architecture, with weights for what the file lacks: --config DIR"


def convert(file: Path, config: Path, out: Path) -> Path:
    """Writes `out`, a pipeline directory with the weights of `file` and the configs and tokenizers of `config`.

    Weights keep the file's dtype. Raises `ModelError`, `PathError` if `out` exists and is not an empty directory.
    """
    check_target(out)
    if file.suffix != CHECKPOINT:
        raise ModelError(f"{file} is no safetensors file, expected NAME{CHECKPOINT}",
                         hint="only safetensors are read: a .ckpt file can run code when it is loaded")
    family = FAMILIES[infer_family(config)]
    read_shapes([file])  # a truncated file is named here
    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.absolute().parent) as folder:
        made = Path(folder) / out.name
        with _staged(config, family) as stage:
            _save(_load(file, stage, family), made, family)
        if out.is_dir():
            out.rmdir()
        made.rename(out)
    return out


def check_target(out: Path) -> None:
    """Raises `PathError` unless `out` may become a directory."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise PathError(f"{out} exists, expected a new or empty directory", hint="name another with -o")
    if not out.absolute().parent.is_dir():
        raise PathError(f"{out} cannot be written: there is no directory {out.absolute().parent}",
                        hint="make the directory first")


@contextmanager
def _staged(config: Path, family: Family) -> Iterator[Path]:
    """A directory with the configs, tokenizers and weights of the pipeline directory `config`, and nothing else of it.

    Its model_index.json names only components of the family. Raises `ModelError`.
    """
    index = pipeline_index(config)
    with tempfile.TemporaryDirectory(prefix="latentry-model-", ignore_cleanup_errors=True) as name:
        stage = Path(name)
        kept = {key: value for key, value in index.items() if not isinstance(value, list)}
        for component, value in index.items():
            if component in family.components and value not in (None, [None, None]):
                kept[component] = list(class_of(index, component, config))
                _stage(config, component, stage)
            elif isinstance(value, list):
                kept[component] = [None, None]
        _stage_scheduler(config, index, kept, stage)
        (stage / "model_index.json").write_text(json.dumps(kept), encoding="utf-8")
        yield stage


def _stage(config: Path, component: str, stage: Path) -> None:
    """A component's small files, and links to its weights if there are any."""
    folder = stage / component
    folder.mkdir()
    if component.startswith("tokenizer"):
        small = tokenizer_files(config, component).small
    elif list((config / component).glob(f"*{CHECKPOINT}")):
        found = weighted_files(config, component)
        small = found.small
        for path in found.weights:
            link_or_copy(path.resolve(), folder / found.weight_name(path))
    else:
        small = {"config.json": read_small(config / component / "config.json", CONFIG_BYTES)}
    for name, data in small.items():
        (folder / name).write_bytes(data)


def _stage_scheduler(config: Path, index: dict[str, Any], kept: dict[str, Any], stage: Path) -> None:
    """The scheduler's config: plain values, of a class of diffusers."""
    named = index.get("scheduler")
    known = isinstance(named, list) and len(named) == 2 and named[0] == "diffusers"
    kind = str(named[1]) if isinstance(named, list) and len(named) == 2 else ""
    if not known or not kind.endswith("Scheduler") or not hasattr(diffusers, kind):
        raise ModelError(f"scheduler in {config / 'model_index.json'} is {brief(named)}, expected one of diffusers",
                         hint=_LOSING)
    values = read_config(config / "scheduler" / "scheduler_config.json")
    (stage / "scheduler").mkdir()
    (stage / "scheduler" / "scheduler_config.json").write_text(json.dumps(values), encoding="utf-8")
    kept["scheduler"] = ["diffusers", kind]


def _load(file: Path, stage: Path, family: Family) -> Any:
    """The pipeline, with every weight from `file`, or from `stage` for components that `file` lacks.

    Raises `ModelError`, which names a component that is in neither.
    """
    kind = getattr(diffusers, str(read_config(stage / "model_index.json")["_class_name"]))
    if not hasattr(kind, "from_single_file"):
        raise ModelError(f"diffusers cannot convert single files of a {kind.__name__}",
                         hint="download the model as a diffusers directory")
    parts: dict[str, Any] = {}
    while True:
        try:
            pipeline = kind.from_single_file(str(file), config=str(stage), local_files_only=True,
                                             torch_dtype=_dtype_of(file), **parts)
        except Exception as error:  # damaged files make the libraries raise almost anything
            lacking = next((name for name in family.components if f"{name} = " in str(error) and name not in parts), "")
            if not lacking or not list((stage / lacking).glob(f"*{CHECKPOINT}")):
                said = f"it has no {spoken(lacking)}, and neither has {_DIR}" if lacking else _said(error)
                raise ModelError(f"{file} cannot be converted: {said}", hint=_LOSING) from None
            parts[lacking] = _part(stage, lacking)
            continue
        _refuse_holes(pipeline, file)
        return pipeline


def _said(error: Exception) -> str:
    """A library's message; for tensors without data, what that means."""
    line = first_line(error)
    return "it lacks weights that the configs ask for" if "meta" in line else line


def _part(stage: Path, name: str) -> Any:
    """A component that the file lacks, from the staged directory."""
    library, kind = read_config(stage / "model_index.json")[name]
    module: Any = transformers if library == "transformers" else diffusers
    keyword = dtype_keyword(transformers.__version__) if library == "transformers" else "torch_dtype"
    return getattr(module, kind).from_pretrained(stage / name, local_files_only=True, use_safetensors=True,
                                                 **{keyword: "auto" if library == "transformers" else None})


def _dtype_of(file: Path) -> torch.dtype:
    """The dtype that most numbers of the file have."""
    sizes = Counter[str]()
    with open_regular(file) as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    for name, tensor in header.items():
        if name != "__metadata__":
            sizes[tensor["dtype"]] += prod(tensor["shape"])
    known = {"F16": torch.float16, "BF16": torch.bfloat16}
    return known.get(max(sizes, key=sizes.__getitem__, default="F32"), torch.float32)


def _refuse_holes(pipeline: Any, file: Path) -> None:
    """Raises `ModelError` if a weight of a component came from nowhere: diffusers leaves it without data."""
    for name, part in pipeline.components.items():
        tensors = part.state_dict() if hasattr(part, "state_dict") else {}
        empty = [key for key, value in tensors.items() if value.is_meta]
        if empty:
            raise ModelError(f"{file} lacks weights of the {spoken(name)}: {', '.join(empty[:3])}", hint=_LOSING)


def _save(pipeline: Any, made: Path, family: Family) -> None:
    """Writes the pipeline, and checks it as every model directory is checked before it is used."""
    pipeline.save_pretrained(made, safe_serialization=True)
    for path in made.rglob("config.json"):
        values = {key: value for key, value in json.loads(path.read_text("utf-8")).items() if key != "_name_or_path"}
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    weighted_files(made, family.denoiser)
    weighted_files(made, "vae")
    text_files(made)
