"""Makes the working copy of a run what the store has, before the run begins or continues.

What counts is what the store has. A newer checkpoint here, of which the upload was interrupted, counts only if the
store's newest is here, too, with the same state.json to the byte, and if the store's writer.json is the one that this
computer wrote: so nobody else has begun to continue the run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from prep.cache.remote.documents import cache_above, places_above
from prep.errors import PathError
from prep.formatting import shell_name
from prep.fs import atomic
from prep.fs.place import Local
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.objects import ObjectEntry
from prep.parse import Unparsed
from prep.runs.document import FORMAT
from prep.runs.document import NAME as RUN
from prep.runs.documents import refused
from prep.runs.events import NAME as LOG
from prep.runs.losses import NAME as LOSSES
from train.runs.checkpoint import (
    STATE,
    FileFacts,
    find_checkpoint,
    list_checkpoints,
    listed_files,
    pictured,
    set_aside,
    step_name,
    step_named,
)
from train.runs.directory import PASSING
from train.runs.stored.layout import CHECKPOINTS, PROMPTS, WANDB_ID, WRITER, has_result, whole_steps
from train.runs.stored.objects import Objects, differs, digests_of

NEEDED = (RUN, "samples.bin", "manifest.json", LOG, LOSSES, WANDB_ID)  # to continue a run, besides a checkpoint
Names = Mapping[str, ObjectEntry]


def check_new(objects: Objects, listed: Names) -> None:
    """Raises `PathError` unless a new run may begin at its place in the store."""
    url = objects.place
    if RUN in listed or whole_steps(listed) or has_result(listed):
        raise PathError(f"{url} already holds a run", hint="add --resume to continue it; or name another: "
                        f"-o {shell_name(f'{url}-2')}")
    if listed:
        raise PathError(f"{url} is not empty and is not a training run", hint="name another place with -o")
    _check_outside(objects)


def make_way(url: Bucket, folder: Path) -> list[str]:
    """Sets aside what is left here of another run at the same place; returns warnings."""
    if not folder.is_dir() or all(path.name in PASSING for path in folder.iterdir()):
        return []
    targets = (folder.with_name(f"{folder.name}.aside-{number}") for number in range(1, 1 << 20))
    target = next(place for place in targets if not place.exists())
    atomic.rename(folder, target)
    return [f"{url} is gone from the store; what was here of it was set aside: {target}"]


def _check_outside(objects: Objects) -> None:
    """Raises `PathError` if the run would lie in a cache or in another run. Raises `StoreError`."""
    if (above := cache_above(objects.place, stop=objects.stop)) is not None:
        raise PathError(f"run {objects.place} lies in the cache {above}", hint="name a place outside with -o")
    for place in places_above(objects.place, RUN, stop=objects.stop):
        if place.key and FORMAT.encode() in (Objects(place).read(RUN) or b""):  # not of another program
            raise PathError(f"run {objects.place} would lie in the run {place}", hint="name a place outside with -o")


def continued(objects: Objects, run: Local, listed: Names, named: str | None) -> list[str]:
    """Brings what a resumed run needs; returns warnings. Raises `PathError`, `CacheError`."""
    if RUN not in listed:
        raise PathError(f"{objects.place} is not a training run: it has no run.json",
                        hint="omit --resume to start this run")
    folder, steps, warnings = run.path, whole_steps(listed), list[str]()
    ahead = _ahead(objects, folder, max(steps, default=None))
    if not ahead:
        superseded = set_aside(folder, max(steps, default=0))
        warnings = [f"a checkpoint here is not of the run that the store has, and was set aside: "
                    f"{folder / 'checkpoints' / name}" for name in superseded]
    chosen = _choose(objects.place, {*steps, *ahead}, named)
    if chosen in steps:
        bring_checkpoint(objects, folder, step_name(chosen), listed)
    elif chosen is not None:
        find_checkpoint(run, step_name(chosen))
    if not ahead:
        for path in list((folder / "samples").glob("step-*")):
            if pictured(path.name) and f"samples/{path.name}" not in listed:
                atomic.remove(path)
        follow(objects, folder, listed, (*NEEDED, *_prompts(listed), f"samples/{step_name(chosen or 0)}.png"))
    return warnings


def _ahead(objects: Objects, folder: Path, newest: int | None) -> set[int]:
    """The checkpoints here that the store lacks and that count."""
    local_steps = {int(saved.name[5:]) for saved in list_checkpoints(folder)}
    later = {step for step in local_steps if newest is None or step > newest}
    names = (WRITER, *(() if newest is None else (f"{CHECKPOINTS}{step_name(newest)}/{STATE}",)))
    try:
        same = bool(later) and all((folder / name).read_bytes() == objects.read(name) for name in names)
    except OSError:
        same = False
    return later if same else set()


def _choose(url: Bucket, steps: set[int], named: str | None) -> int | None:
    """The newest checkpoint, or the one `named`; `None` if there is none. Raises `PathError`."""
    if named is None:
        return max(steps, default=None)
    if (chosen := step_named(named, steps)) is not None:
        return chosen
    if not steps:
        raise PathError(f"{url} has no checkpoint", hint="omit --from to begin with the first step")
    names = ", ".join(map(step_name, sorted(steps)))
    raise PathError(f"{url} has no checkpoint '{named[:80]}', expected one of: {names}",
                    hint="omit --from to use the newest")


def _prompts(listed: Names) -> Iterable[str]:
    return (name for name in listed if name.startswith(PROMPTS))


def bring_checkpoint(objects: Objects, folder: Path, name: str, listed: Names, *, weights_only: bool = False) -> Path:
    """Makes the checkpoint called `name` in a run's directory that of the store; files with the right digest stay.

    With `weights_only`, what the optimizer keeps is left out. Raises `CacheError`, and `FileNotFoundError` if it is
    removed meanwhile.
    """
    place, own = f"{CHECKPOINTS}{name}", folder / "checkpoints" / name
    staged = own.with_name(f".{name}.partial")
    atomic.make_dirs(staged)
    objects.fetch(f"{place}/{STATE}", staged / STATE, listed[f"{place}/{STATE}"])
    files = _needed(staged / STATE, own, weights_only)
    if _is_whole(own, staged / STATE, files):
        atomic.remove_tree(staged)
        return own
    for file, facts in sorted(files.items()):
        for here in (staged / file, own / file):
            if _has(here, facts):
                if here != staged / file:
                    atomic.make_dirs((staged / file).parent)
                    atomic.rename(here, staged / file)
                break
        else:
            objects.fetch(f"{place}/{file}", staged / file, _listed(place, file, listed, own), facts.sha256)
    atomic.publish_directory(staged, own, replace=True)
    return own


def has_weights(objects: Objects, folder: Path, name: str) -> bool:
    """Whether the checkpoint called `name` in a run's directory is that of the store, as `bring_checkpoint` brings it
    with `weights_only`; changes nothing. Raises `CacheError`."""
    own = folder / "checkpoints" / name
    try:
        same = (own / STATE).read_bytes() == objects.read(f"{CHECKPOINTS}{name}/{STATE}")
    except OSError:
        return False
    return same and _is_whole(own, own / STATE, _needed(own / STATE, own, weights_only=True))


def _needed(state: Path, own: Path, weights_only: bool) -> Mapping[str, FileFacts]:
    """The files that the state.json of the checkpoint `own` lists, as far as they are brought. Raises `CacheError`."""
    return {name: facts for name, facts in listed_files(state, own).items()
            if not (weights_only and name.startswith("optimizer"))}


def _listed(place: str, file: str, listing: Names, own: Path) -> ObjectEntry:
    """What the list says of a file of a checkpoint. Raises `CacheError` if it is missing."""
    if f"{place}/{file}" not in listing:
        raise refused(own / file, Unparsed("it is missing in the store"), "continue from another checkpoint, with "
                      "--resume --from")
    return listing[f"{place}/{file}"]


def _is_whole(own: Path, state: Path, files: Mapping[str, FileFacts]) -> bool:
    """Whether a directory has exactly this state and these files."""
    try:
        present = {path.relative_to(own).as_posix() for path in own.rglob("*") if path.is_file()}
        return (own / STATE).read_bytes() == state.read_bytes() and present == {STATE, *files} and all(
            _has(own / name, facts) for name, facts in files.items())
    except OSError:
        return False


def _has(path: Path, facts: FileFacts) -> bool:
    try:
        return path.stat().st_size == facts.bytes and digests_of(path).sha256 == facts.sha256
    except OSError:
        return False


def follow(objects: Objects, folder: Path, listed: Names, needed: Iterable[str]) -> None:
    """Makes `needed` files of a run's directory those of the store. Of the others, removes what the store has anew."""
    wanted = set(needed)
    for name, entry in listed.items():
        if name.startswith(CHECKPOINTS) or name == WRITER or not differs(folder / name, entry):
            continue
        if name in wanted:
            bring_file(objects, folder, name, entry)
        elif (folder / name).is_file():
            atomic.remove(folder / name)


def bring_file(objects: Objects, folder: Path, name: str, listed: ObjectEntry) -> None:
    """Downloads a file, unless it is gone meanwhile."""
    try:
        objects.fetch(name, folder / name, listed)
    except FileNotFoundError:
        atomic.remove(folder / name)
