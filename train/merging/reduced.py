"""LoRA files that `train resize` and `train extract` write: what each layer keeps, where they may lie, how they are
written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from prep.errors import PathError, UsageError
from prep.formatting import shell_name
from prep.fs.paths import check_replaceable, in_cache, same_place
from train.models.principal import kept_of_all
from train.runs.checkpoint_files import CheckpointFile, write_file
from train.runs.safetensors.writer import data_digest

SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    """What a layer keeps of what was added to it."""

    layer: str
    before: int  # rank; of a whole difference the smaller side of its matrix
    rank: int
    norm: float  # Frobenius norm of what was added
    kept: float  # the part of that norm


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A LoRA file that was written, or PEFT's directory of one."""

    output: Path
    layers: Sequence[Reduced]
    size: int  # bytes
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> float:
        """The part of the norm of all layers together."""
        return whole(self.layers)


def whole(layers: Sequence[Reduced]) -> float:
    """The part of the norm that all layers together keep."""
    return kept_of_all([each.norm for each in layers], [each.kept for each in layers])


def check_output(output: Path, sources: Sequence[Path], *, force: bool | None, what: str = "LoRA file") -> None:
    """Raises `PathError`, `UsageError` unless a file of weights may be written there. `force`: whether it may replace
    one; `None`: the command has no such option."""
    if output.suffix != SUFFIX:
        raise UsageError(f"output {output} has no name of a {what}, expected one that ends in {SUFFIX}",
                         hint=f"-o {shell_name(f'{output}{SUFFIX}')}")
    if any(same_place(output, source) for source in sources if source.exists() and output.exists()):
        raise PathError(f"output {output} is what is read", hint="name another file with -o")
    if in_cache(output.resolve()):
        raise PathError(f"{output} lies in a cache", hint="name a file outside with -o")
    if output.absolute().parent.is_dir():
        check_replaceable(output, what, lambda head: True)
    if (output.exists() or output.is_symlink()) and not force:
        raise PathError(f"{output} exists, so it is not replaced",
                        hint="name another file with -o" + ("" if force is None else ", or add --force"))


def write_lora(output: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Writes the file, whole or not at all, with the digests by which web UIs know it."""
    digest = data_digest(tensors)
    hashes = {"modelspec.hash_sha256": f"0x{digest}", "sshs_model_hash": digest}
    write_file(output, CheckpointFile(name=output.name, tensors=tensors, metadata={**facts, **hashes}))
