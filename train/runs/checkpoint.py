"""The state of a run on disk, whole or not at all, safetensors and JSON only.

    RUN/checkpoints/step-000500/
      lora.safetensors | unet/      what is trained; for LoRA a file that ComfyUI and diffusers load
      optimizer.safetensors         `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`
      ema.safetensors               the moving average, when it is on
      state.json                    the step, the manifest's digest, the settings

A checkpoint is staged beside its place, synced and renamed; what a crash leaves begins with a dot and is never read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from prep.errors import CacheError, ConfigError, first_line
from prep.fs import atomic
from prep.loader.device import to_device
from train.runs.safetensors_writer import write_safetensors

FORMAT = "latentry/checkpoint"
VERSION = 1
# Settings that may differ between a checkpoint and the run that goes on from it: they decide no weight after a step
# that was made, only how far, how often and how it is shown. `steps` is one of them for a constant schedule.
CHANGEABLE = ("steps", "epochs", "validation", "sample", "checkpoint", "lora.format", "gradient_checkpointing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One file of a checkpoint: tensors with metadata, or bytes."""

    name: str  # relative path
    tensors: Mapping[str, Tensor] | None = None
    metadata: Mapping[str, str] | None = None
    data: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What a run goes on from."""

    step: int  # optimizer steps done
    manifest: str  # digest
    config: Mapping[str, Any]  # as config.as_table gives it


def save(run: Path, state: State, parts: Iterable[Part], keep: int) -> Path:
    """Writes the checkpoint of `state.step` and removes the oldest beyond `keep` (0: none). Returns its directory."""
    folder = run / "checkpoints" / f"step-{state.step:06d}"
    body = {"format": FORMAT, "version": VERSION, "step": state.step, "manifest": state.manifest,
            "config": dict(state.config)}
    last = Part(name="state.json", data=json.dumps(body, indent=1).encode() + b"\n")
    write_folder(folder, [*parts, last])
    for old in list_checkpoints(run)[:-keep] if keep else ():
        atomic.remove_tree(old)
    return folder


def write_folder(folder: Path, parts: Iterable[Part]) -> None:
    """`folder` holds exactly `parts` when this returns, and is on the disk; an older one gives way."""
    atomic.make_dirs(folder.parent)
    staged = atomic.temporary_name(folder)
    staged.mkdir()
    try:
        for part in parts:
            write_part(staged / part.name, part)
        _sync_tree(staged)
        atomic.remove_tree(folder)
        atomic.rename(staged, folder)
        atomic.sync_dir(folder.parent)
    finally:
        atomic.remove_tree(staged)


def write_file(path: Path, part: Part) -> None:
    """`path` has the part's content and is on the disk; an older file gives way in one step."""
    staged = atomic.temporary_name(path)
    try:
        write_part(staged, part)
        atomic.rename(staged, path)
    finally:
        atomic.remove(staged)
    atomic.sync_dir(path.parent)


def write_part(path: Path, part: Part) -> None:
    """Creates the file and syncs it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if part.tensors is None:
        atomic.write_synced(path, part.data)
        return
    with path.open("xb") as handle:
        write_safetensors(handle, part.tensors, {"format": "pt", **(part.metadata or {})})
        atomic.sync(handle)


def list_checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted((path.parent for path in (run / "checkpoints").glob("step-*/state.json")),
                  key=lambda folder: (len(folder.name), folder.name))


def remove_partial(run: Path) -> None:
    """Removes what a crash left half written in a run: checkpoints, pictures, the result."""
    for folder in (run, run / "checkpoints", run / "samples"):
        for left in folder.glob(".*.partial"):
            if left.is_dir():
                atomic.remove_tree(left)
            else:
                atomic.remove(left)


def read_state(folder: Path) -> State:
    """The state in a checkpoint's directory. Raises `CacheError` when it is damaged or of another version."""
    path = folder / "state.json"
    try:
        body = json.loads(path.read_bytes())
        if body.get("format") != FORMAT or body.get("version") != VERSION:
            raise CacheError(f"{path} has format {body.get('format')!r} version {body.get('version')!r}, "
                             f"this program reads '{FORMAT}' version {VERSION}")
        return State(step=int(body["step"]), manifest=str(body["manifest"]), config=dict(body["config"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"cannot read checkpoint {path}: {error}",
                         hint=f"remove {folder}; --resume then goes on from the one before it") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file. Raises `CacheError`."""
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CacheError(f"cannot read {path}: {first_line(error)}", hint=_without(path)) from None


def copy_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], path: Path) -> None:
    """Copies `values` into the tensors of those names. Raises `CacheError` when one is missing or of another shape."""
    with torch.no_grad():
        for name, target in targets.items():
            value = values.get(name)
            if value is None or value.shape != target.shape:
                seen = "is missing" if value is None else f"has shape {list(value.shape)}"
                raise CacheError(f"'{name}' {seen} in {path}, expected shape {list(target.shape)}", hint=_without(path))
            target.copy_(to_device(value, target.device))


def _without(path: Path) -> str:
    """The way out of a damaged file of a checkpoint."""
    folder = next((parent for parent in path.parents if parent.name.startswith("step-")), path.parent)
    return f"remove {folder}; --resume then goes on from the checkpoint before it"


def check_same(state: State, manifest: str, config: Mapping[str, Any]) -> None:
    """Raises when going on is not what one run would do: another manifest (`CacheError`), setting (`ConfigError`)."""
    if state.manifest != manifest:
        raise CacheError(f"the checkpoint was made from manifest {state.manifest[:12]}, and this is {manifest[:12]}",
                         hint="resume with the manifest of the run, or train the new one into another RUN with -o")
    old, new = _flat(state.config), _flat(config)
    free = CHANGEABLE if old.get("schedule.name", "constant") == "constant" else CHANGEABLE[2:]
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name) and name not in free and name.partition(".")[0] not in free:
            raise ConfigError(f"{name} is {new.get(name)!r}, and the checkpoint was trained with {old.get(name)!r}",
                              hint="resume with the settings of the run (leave -c away), or choose another RUN with -o")


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return flat


def _sync_tree(folder: Path) -> None:
    for inner in sorted(folder.rglob("*")):
        if inner.is_dir():
            atomic.sync_dir(inner)
    atomic.sync_dir(folder)
