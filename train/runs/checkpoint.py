"""Checkpoints of a run, written atomically, in safetensors and JSON only.

    RUN/checkpoints/step-000500/
      lora.safetensors | unet/      the trained weights; for LoRA a file that ComfyUI and diffusers load
      optimizer.safetensors         what the optimizer keeps: of AdamW `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`
      ema.safetensors               the average of the weights, if `ema.decay` or the optimizer makes one
      ema-0.05.safetensors …        with `ema.snapshots`, power-function averages of two lengths, which go to
                                    RUN/averages/step-000500/ when the checkpoint is removed
      state.json                    the step, what decides the steps, the settings, and the SHA-256 of each file

A model of which all weights train can be divided among N ranks (`--shard`). Each rank then writes the rows that it has,
beside the others, and no tensor is gathered. Directories stand for the files:

      unet/diffusion_pytorch_model/shard-00001-of-0000N.safetensors …    one from each rank
      optimizer/shard-00001-of-0000N.safetensors …                       and one with the numbers that all ranks have
      ema/shard-00001-of-0000N.safetensors …                             likewise ema-0.05/, ema-0.10/

A piece is a safetensors file, whose metadata say where its rows belong, as torch.distributed.checkpoint's
HuggingFaceStorageWriter spells it; no file is a pickle. When all ranks have written and synced theirs, the first one
writes state.json with all sizes and digests. Any number of ranks, divided or not, continues from pieces or from whole
files: each reads the files that hold rows of its own. Only a divided run of all weights writes pieces: a LoRA is small,
and other programs load its file. The result of a run is never in pieces.

A checkpoint is staged beside its final path, synced and renamed; leftovers of a crash begin with a dot and are never
read. Reading trusts nothing: the step must match the directory's name, the files must be exactly those that state.json
lists, and their bytes, names, dtypes and shapes must be the expected ones. Checkpoints of version 1 have no digests;
everything else is checked. `train.runs.checkpoint_files` writes and reads the tensors; this module needs no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from prep.errors import PathError
from prep.formatting import shell_name
from prep.fs import atomic
from prep.fs.paths import in_cache
from prep.fs.place import Local
from prep.fs.untrusted import check_dir, size_regular, walk
from prep.loader.identity import facts_of
from prep.parse import Unparsed, count, digest_of, expect, list_of
from prep.runs.document import NAME
from prep.runs.documents import check_links, open_plain, read_sealed, refused

FORMAT = "latentry/checkpoint"
VERSION = 3
PIECES = 4  # the version of checkpoints in pieces; earlier programs still read the others
_SECOND = ("format", "version", "step", "manifest", "data", "base", "config", "micro_batch", "adopted", "files")
_KEYS = {1: ("format", "version", "step", "manifest", "config"), 2: _SECOND, 3: (*_SECOND, "init", "meaning"),
         4: (*_SECOND, "init", "meaning")}
# How steps follow from data and settings. A change of the loss, the draws or the update gets a new number, so that no
# run silently continues in another way.
MEANINGS = {
    1: "the loss of a step is the mean over its cells",
    2: "the loss of a step is the sum of its samples' means, divided by batch_size",
}
MEANING = max(MEANINGS)
STATE, AVERAGES = "state.json", "averages"
# The files with power-function averages of these lengths: those of Karras et al. 2024 (section 3.2).
POWERS: Mapping[str, float] = {"ema-0.05.safetensors": 0.05, "ema-0.10.safetensors": 0.10}
_NAME = re.compile(r"step-[0-9]{6,13}")
_PIECE = re.compile(r"shard-[0-9]{5}-of-[0-9]{5}\.safetensors")
_ASIDE = re.compile(r"aside(?:-[0-9]+)?-(step-[0-9]{6,13})")
_PICTURE = re.compile(r"step-([0-9]{6,13})\.png")


def step_name(step: int) -> str:
    """The name of a checkpoint's directory."""
    return f"step-{step:06d}"


def step_named(name: str, steps: Iterable[int]) -> int | None:
    """The one of `steps` that `name` means, as step-500, step-000500 or 500; `None` if it means none of them."""
    number = name.removeprefix("step-")
    return int(number) if number.isdecimal() and number.isascii() and int(number) in set(steps) else None


def piece_name(name: str, number: int, count: int) -> str:
    """The name of piece `number`, from 0, of a file that is in `count` pieces."""
    return f"{name.removesuffix('.safetensors')}/shard-{number + 1:05d}-of-{count:05d}.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """Size and digest of a file, as state.json records them."""

    bytes: int
    sha256: str | None  # None: a checkpoint of version 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """The part of the data that decides the steps (`prep.loader.identity`)."""

    digest: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The state that a run resumes from: the content of state.json."""

    step: int  # optimizer steps done
    manifest: str  # digest
    config: Mapping[str, Any]  # as config.as_table gives it
    data: DataFacts | None = None  # None: version 1
    base: Mapping[str, str] = field(default_factory=dict)  # fingerprints of denoiser and scheduler; empty: version 1
    micro_batch: int | None = None  # with which the steps are planned; None: version 1
    meaning: int = MEANING  # of MEANINGS
    init: Mapping[str, str] = field(default_factory=dict)  # what step 0 began with: {"name", "sha256"}; empty: nothing
    adopted: tuple[Mapping[str, Any], ...] = ()  # changes that --adopt accepted: {"step", "changes"}
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    version: int = VERSION


def files_of(name: str, listed: Iterable[str]) -> tuple[str, ...]:
    """The files among `listed` that hold the tensors of `name`: the file itself, or its pieces in their order.

    Raises `Unparsed` if pieces are missing.
    """
    names = set(listed)
    if name in names:
        return (name,)
    folder = name.removesuffix(".safetensors") + "/"
    pieces = tuple(sorted(each for each in names
                          if each.startswith(folder) and _PIECE.fullmatch(each.removeprefix(folder))))
    count = int(pieces[0].removesuffix(".safetensors")[-5:]) if pieces else 0
    for each in (piece_name(name, number, count) for number in range(count)):
        if each not in pieces:
            raise Unparsed(f"its piece {each} is missing")
    if len(pieces) != count:
        raise Unparsed(f"it has {len(pieces)} pieces, expected {count} as {pieces[0]} says")
    return pieces


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoint directories of a run by name, oldest first; their content is not checked.

    Raises `CacheError` if there is a link in the run's directory, or among them.
    """
    if any(os.path.lexists(run / name) for name in ("checkpoints", NAME)):
        check_links(run)
    if (run / "checkpoints").is_dir():
        check_links(run / "checkpoints")
    return sorted((path for path in (run / "checkpoints").glob("step-*") if _NAME.fullmatch(path.name)),
                  key=lambda folder: int(folder.name[5:]))


def is_checkpoint(folder: Path) -> bool:
    """Whether a directory is a checkpoint. Raises `CacheError` if there is a link in it."""
    if not (folder / STATE).is_file():
        return False
    check_links(folder)
    return True


def find_checkpoint(run: Local, named: str | None) -> Path:
    """The newest checkpoint of a run, or the checkpoint `named` step-N, or by its path. Raises `PathError` if there is
    none."""
    folders = list_checkpoints(run.path)
    if named is None and folders:
        return folders[-1]
    name = _without_path(run.path, named or "")
    chosen = step_named(name, (int(folder.name[5:]) for folder in folders))
    for folder in folders:
        if chosen == int(folder.name[5:]):
            return folder
    if not folders:
        raise PathError(f"{run} has no checkpoint")
    names = ", ".join(folder.name for folder in folders)
    if (match := _ASIDE.fullmatch(name)) and (aside := run.path / "checkpoints" / name).is_dir():
        raise PathError(f"checkpoint {name} of {run} was set aside, expected one of: {names}",
                        hint=_way_back(aside, match[1]))
    raise PathError(f"{run} has no checkpoint '{(named or '')[:80]}', expected one of: {names}")


def _without_path(run: Path, named: str) -> str:
    """The name of the checkpoint at the path `named`, if that is below the run's checkpoints; any other text as it is.
    """
    above, folder = Path(named).parent, run / "checkpoints"
    inside = above == Path(folder.name) or (above != Path() and above.resolve() == folder.resolve())
    return Path(named).name if inside else named


def _way_back(aside: Path, name: str) -> str:
    """How a checkpoint gets back the name that it had before it was set aside. By hand, since the log keeps the steps
    that were made since: two histories of the same steps do not fit into it."""
    back = aside.with_name(name)
    moves = [(aside, back)]
    if back.exists():
        moves.insert(0, (back, back.with_name(aside_name(name, lambda other: back.with_name(other).exists()))))
    command = " && ".join(f"mv {shell_name(str(old))} {shell_name(str(new))}" for old, new in moves)
    return f"{command}, then --resume --from {name}: the log keeps the losses of the other steps"


def set_aside(run: Path, step: int) -> list[str]:
    """Renames checkpoints after `step` to `aside-…`, so that none is taken for the newest; returns the new names."""
    return [_put_aside(folder) for folder in list_checkpoints(run) if int(folder.name[5:]) > step]


def set_aside_averages(run: Path, step: int) -> list[str]:
    """Renames averages of removed checkpoints after `step` likewise; returns the new names."""
    return [_put_aside(folder) for folder in list_averages(run) if int(folder.name[5:]) > step]


def list_averages(run: Path) -> list[Path]:
    """The directories with averages of removed checkpoints, oldest first. Raises `CacheError` for links."""
    folder = run / AVERAGES
    if not folder.is_dir():
        return []
    for each in (run, folder):
        check_links(each)
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)),
                  key=lambda path: int(path.name[5:]))


def clear_pictures(run: Path, step: int, *, keep: bool) -> list[str]:
    """Removes the sample pictures after `step`, or renames them with `keep` as `set_aside`; returns the new names."""
    later = sorted(path for path in (run / "samples").glob("step-*") if pictured(path.name, after=step))
    if keep:
        return [_put_aside(path) for path in later]
    for path in later:
        atomic.remove(path)
    return []


def pictured(name: str, after: int = -1) -> bool:
    """Whether a file of this name has the sample pictures of a step, one after step `after`."""
    match = _PICTURE.fullmatch(name)
    return match is not None and int(match[1]) > after


def aside_name(name: str, taken: Callable[[str], bool]) -> str:
    """The name under which a checkpoint or a picture is set aside: the first that is not `taken`."""
    names = (f"aside{'' if number == 1 else f'-{number}'}-{name}" for number in range(1, 1 << 20))
    return next(name for name in names if not taken(name))


def _put_aside(path: Path) -> str:
    name = aside_name(path.name, lambda name: path.with_name(name).exists())
    atomic.rename(path, path.with_name(name))
    return name


def remove_partial(run: Path) -> None:
    """Removes partial files that a crash left in a run: checkpoints, pictures, the result."""
    for folder in (run, run / "checkpoints", run / "samples"):
        for partial in folder.glob(".*.partial"):
            if partial.is_dir() and not partial.is_symlink():
                atomic.remove_tree(partial)
            else:
                atomic.remove(partial)


# ---- reading ---------------------------------------------------------------------------------------------------------


def listed_files(path: Path, folder: Path) -> Mapping[str, FileFacts]:
    """The files that the state.json at `path` lists, of the checkpoint `folder`. Raises `CacheError`."""
    try:
        body = read_sealed(path, FORMAT, {version: keys for version, keys in _KEYS.items() if "files" in keys})
        return {name: _file(name, value) for name, value in expect(body["files"], dict, "files").items()}
    except (OSError, Unparsed) as error:
        raise refused(folder / STATE, error, way_out(folder)) from None


def open_weights(path: Path) -> BinaryIO:
    """Opens a file of weights for reading. Outside of runs and caches it may be a link, like those of a snapshot in the
    Hub's cache. Raises `OSError`."""
    near = list(path.absolute().parents)[:3]  # pieces of a denoiser's file are the deepest
    inside = in_cache(path) or any(os.path.lexists(folder / name) for folder in near for name in (NAME, STATE))
    return open_plain(path if inside else path.resolve())


def recorded_digest(path: Path) -> str | None:
    """The SHA-256 that a checkpoint's state.json has of the file at `path`; `None` if it lies in no checkpoint, or in
    one of version 1. Raises `CacheError` if that state is damaged."""
    for folder in list(path.parents)[:3]:  # pieces of a denoiser's file are the deepest
        if (folder / STATE).is_file():
            try:
                body = read_sealed(folder / STATE, FORMAT, _KEYS)
                facts = expect(body.get("files", {}), dict, "files").get(path.relative_to(folder).as_posix())
                return None if facts is None else _file(path.name, facts).sha256
            except (OSError, Unparsed) as error:
                raise refused(folder / STATE, error, "name undamaged weights") from None
    return None


def read_state(folder: Path, *, complete: bool = True) -> State:
    """The state of a checkpoint, after checking that it has the listed files in the listed sizes; reads none of them.

    Without `complete` the files may be missing. Raises `CacheError`.
    """
    try:
        check_dir(folder)
        state = _parse(folder, read_sealed(folder / STATE, FORMAT, _KEYS))
    except (OSError, Unparsed) as error:
        raise refused(folder / STATE, error, way_out(folder)) from None
    try:
        if complete:
            _check_files(folder, state)
    except (OSError, Unparsed) as error:
        raise refused(folder, error, way_out(folder)) from None
    return state


def _parse(folder: Path, body: Mapping[str, Any]) -> State:
    step = count(body["step"], "step")
    if folder.name != step_name(step):
        raise Unparsed(f"it is the state of step {step}, expected {folder.name}")
    common: dict[str, Any] = {"step": step, "manifest": digest_of(body["manifest"], "manifest"),
                              "config": expect(body["config"], dict, "config"), "version": body["version"]}
    if body["version"] == 1:
        return State(**common, files=_files_there(folder), meaning=1)
    data, base = expect(body["data"], dict, "data"), expect(body["base"], dict, "base")
    files = {name: _file(name, value) for name, value in expect(body["files"], dict, "files").items()}
    return State(
        **common, files=files, micro_batch=count(body["micro_batch"], "micro_batch"),
        data=DataFacts(digest=digest_of(data.get("digest"), "data.digest"),
                       facts=facts_of(data.get("facts"), "data.facts")),
        base={name: digest_of(value, f"base.{name}") for name, value in base.items()},
        meaning=1 if body["version"] == 2 else _meaning(body["meaning"]), init=_init(body.get("init", {})),
        adopted=tuple(list_of(body["adopted"], adopted_of, "adopted")))


def _meaning(value: Any) -> int:
    number = count(value, "meaning")
    if number not in MEANINGS:
        raise Unparsed(f"meaning is {number}, expected {' or '.join(map(str, MEANINGS))}")
    return number


def _init(value: Any) -> Mapping[str, str]:
    table = expect(value, dict, "init")
    return {"name": expect(table.get("name"), str, "init.name"),
            "sha256": digest_of(table.get("sha256"), "init.sha256")} if table else {}


def adopted_of(value: Any, where: str) -> Mapping[str, Any]:
    """A change that --adopt accepted. Raises `Unparsed`."""
    table = expect(value, dict, where)
    count(table.get("step"), f"{where}.step")
    list_of(table.get("changes"), lambda each, at: expect(each, str, at), f"{where}.changes")
    return table


def _file(name: str, value: Any) -> FileFacts:
    parts = PurePosixPath(name).parts
    if not parts or any(part in ("..", "/") for part in parts) or "\\" in name or ":" in name or name == STATE:
        raise Unparsed(f"it lists the file {name[:80]!r}, expected a path in the checkpoint")
    table = expect(value, dict, f"files.{name[:80]}")
    return FileFacts(bytes=count(table.get("bytes"), f"size of {name[:80]}"),
                     sha256=digest_of(table.get("sha256"), f"digest of {name[:80]}"))


def _files_there(folder: Path) -> dict[str, FileFacts]:
    """The files of a checkpoint, without state.json. Raises `OSError`, as `NotRegularFile` for links and others."""
    files: dict[str, FileFacts] = {}
    for path in walk(folder):
        name = path.relative_to(folder).as_posix()
        if name != STATE:
            files[name] = FileFacts(bytes=size_regular(path), sha256=None)
    return files


def _check_files(folder: Path, state: State) -> None:
    """Raises `Unparsed` unless the directory has exactly the listed files, in the listed sizes."""
    present = _files_there(folder)
    for name, facts in state.files.items():
        if name not in present:
            raise Unparsed(f"{name} is missing")
        if present[name].bytes != facts.bytes:
            raise Unparsed(f"{name} has {present[name].bytes} bytes, expected {facts.bytes}")
    for name in present:
        if name not in state.files:
            raise Unparsed(f"{name[:80]} is not listed in {STATE}")


def way_out(folder: Path) -> str:
    """The hint for a damaged checkpoint of a run that is to be resumed."""
    other = newest_other(folder)
    if other is None:
        return f"it is the only checkpoint of {folder.parent.parent}; train again into another RUN with -o"
    return f"--resume --from {other.name} continues from another checkpoint"


def newest_other(folder: Path) -> Path | None:
    """The newest checkpoint of the same run besides `folder`, if any."""
    others = [other for other in list_checkpoints(folder.parent.parent) if other.name != folder.name]
    return others[-1] if others else None
