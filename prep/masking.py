"""Makes mask pictures: threads read, decode and write, and a model, where there is one, gets batches in between.

Below a directory of their own, in the pictures' own subdirectories; white trains. Each file is whole or absent; one
that exists is left alone, since somebody may have edited it. So a run goes on where it stopped.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from prep import images
from prep.cache.files import write_whole
from prep.errors import PathError
from prep.images import Pixels
from prep.mask import METHODS, Made, MaskChoice, check_choice, mask_path
from prep.mask_pixels import combined, finished, plain_map, read_mask, scaled
from prep.paths import is_inside, resolve, same_place
from prep.records import Finding, Item, Size
from prep.report.words import safe
from prep.sources.blob import code_of, read_blob

Outcome = Literal["written", "black", "kept", "skipped"] | Finding
Tick = Callable[[int], object]


class Model(Protocol):
    """What makes maps of pictures."""

    def prepare(self, picture: Pixels) -> Any:
        """What `maps` takes of a picture, uint8 [H, W, 3]; called by many threads at once."""

    def maps(self, inputs: Sequence[Any]) -> Sequence[Pixels]:
        """For each input, uint8 [h, w] over the whole picture, of any size; called by one thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A picture that waits for the model."""

    item: Item
    target: Path
    size: Size
    base: Pixels | None  # the mask to combine with, of the picture's size
    input: Any  # the model's


def make_masks(items: Iterable[Item], choice: MaskChoice, *, out: Path, load: Callable[[], Model] | None = None,
               jobs: int = 2, batch_size: int = 4, tick: Tick = lambda _: None) -> Made:
    """Writes the masks of `items` below `out`, the only place it writes to.

    Without `combine`, an item's own mask is taken over and a file that is there is kept, unless `force`; with it, the
    new mask is combined with the file that is there, or else with the item's own. `load` is called once, when a mask
    needs the model. Raises `UsageError` for a choice that makes no mask, `PathError` where `out` cannot be written, or
    where a link in it leads elsewhere.
    """
    check_choice(choice)
    model: Model | None = None
    left = [(item, out / mask_path(item.name, choice.naming)) for item in items]
    _check_below({target.parent for _, target in left}, out)
    outcomes: list[tuple[Item, Outcome]] = []
    written: set[Path] = set()
    while left:  # two pictures of one stem share the first one's mask
        now, left = _first_of_each(left)
        todo = []
        for item, target in now:
            known = "kept" if target in written else _known(item, target, choice)
            if known is None:
                todo.append((item, target))
            else:
                outcomes.append((item, known))
                tick(1)
        if load is not None and model is None and any(_needs_model(item, choice) for item, _ in todo):
            model = load()
        for item, target, outcome in _run(todo, choice, model, jobs, batch_size, tick):
            outcomes.append((item, outcome))
            written.update([target] if outcome in ("written", "black") else [])
    return _made(outcomes)


def _made(outcomes: Sequence[tuple[Item, Outcome]]) -> Made:
    results = [outcome for _, outcome in outcomes]
    black = tuple(item.name for item, outcome in outcomes if outcome == "black")
    return Made(written=results.count("written") + len(black), kept=results.count("kept"),
                skipped=results.count("skipped"), findings=tuple(one for one in results if isinstance(one, Finding)),
                black=black)


def _first_of_each(left: Sequence[tuple[Item, Path]]) -> tuple[list[tuple[Item, Path]], list[tuple[Item, Path]]]:
    """The first item of each target, and the others."""
    seen: set[Path] = set()
    first: list[tuple[Item, Path]] = []
    later: list[tuple[Item, Path]] = []
    for item, target in left:
        (later if target in seen else first).append((item, target))
        seen.add(target)
    return first, later


def _check_below(folders: Iterable[Path], out: Path) -> None:
    """Raises `PathError` when a link in `out` makes a folder lie elsewhere, beside the pictures perhaps."""
    top = resolve(out)
    for folder in sorted(folders):
        at = resolve(folder)
        if not same_place(at, top) and not is_inside(at, top):
            raise PathError(f"{safe(str(folder))} leads to {safe(str(at))}, expected a directory below "
                            f"{safe(str(top))}", hint="remove the link, or choose another directory: -o DIR")


def _known(item: Item, target: Path, choice: MaskChoice) -> Outcome | None:
    """What is known without reading anything: the file is there, or can never be."""
    try:
        return "kept" if target.exists() and not choice.force and choice.combine is None else None
    except OSError as error:
        return _no_room(item, target, error)


def _needs_model(item: Item, choice: MaskChoice) -> bool:
    return METHODS[choice.method].model and (item.mask is None or choice.combine is not None)


# ---- threads and batches ---------------------------------------------------------------------------------------------


def _run(todo: Sequence[tuple[Item, Path]], choice: MaskChoice, model: Model | None, jobs: int, batch_size: int,
         tick: Tick) -> list[tuple[Item, Path, Outcome]]:
    """The outcomes in order. After Ctrl-C, or an error, what the model has done is still written; nothing begins."""
    outcomes: dict[int, Outcome] = {}
    batch: list[tuple[int, Ready]] = []
    ending: deque[tuple[int, Future[Outcome]]] = deque()
    pool = ThreadPoolExecutor(jobs)

    def settle(left: int) -> None:
        while len(ending) > left:
            number, future = ending.popleft()
            outcomes[number] = future.result()
            tick(1)

    def flush() -> None:
        assert model is not None, f"{choice.method} needs a model"
        maps = model.maps([ready.input for _, ready in batch])
        ending.extend((number, pool.submit(_end, ready, gray, choice))
                      for (number, ready), gray in zip(batch, maps, strict=True))
        batch.clear()
        settle(2 * batch_size)

    with pool, closing(_ahead(pool, todo, choice, model, jobs + batch_size)) as beginnings:
        for number, begun in beginnings:
            if isinstance(begun, Ready):
                batch.append((number, begun))
            else:
                outcomes[number] = begun
                tick(1)
            if len(batch) == batch_size:
                flush()
        if batch:
            flush()
        settle(0)
    return [(item, target, outcomes[number]) for number, (item, target) in enumerate(todo)]


def _ahead(pool: ThreadPoolExecutor, todo: Sequence[tuple[Item, Path]], choice: MaskChoice, model: Model | None,
           window: int) -> Generator[tuple[int, Outcome | Ready], None, None]:
    """Each item's beginning in order, at most `window` of them ahead; those not yet begun never are, once closed."""
    waiting: deque[Future[Outcome | Ready]] = deque()
    try:
        for number, (item, target) in enumerate(todo):
            waiting.append(pool.submit(_begin, item, target, choice, model))
            if len(waiting) == window:
                yield number - window + 1, waiting.popleft().result()
        for number in range(len(todo) - len(waiting), len(todo)):
            yield number, waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


# ---- one picture -----------------------------------------------------------------------------------------------------


def _begin(item: Item, target: Path, choice: MaskChoice, model: Model | None) -> Outcome | Ready:
    """The whole mask, or what the model needs for it."""
    try:
        if item.mask is not None and choice.combine is None:
            size = images.read_header(read_blob(item.picture)).size if choice.naming == "kohya" else None
            return _write(item, target, read_mask(read_blob(item.mask), size))  # kohya wants the picture's size
        data = read_blob(item.picture)
        if not METHODS[choice.method].model:
            made = plain_map(data, choice)
            return _finish(item, target, made, _base(item, target, (made.shape[1], made.shape[0]), choice), choice)
        picture = images.decode(data, alpha="white")
        assert model is not None, f"{choice.method} needs a model"
        return Ready(item=item, target=target, size=picture.size, base=_base(item, target, picture.size, choice),
                     input=model.prepare(np.asarray(picture)))
    except OSError as error:
        return Finding(path=item.name, code=code_of(error), severity="error",
                       detail=f"cannot be read: {error.strerror or error}")
    except images.BadPicture as error:
        return Finding(path=item.name, code=error.code, severity="error", detail=error.detail)
    except MemoryError:
        return Finding(path=item.name, code="too-large", severity="error", detail="takes more memory than there is")


def _base(item: Item, target: Path, size: Size, choice: MaskChoice) -> Pixels | None:
    """The mask to combine with: the file that is there, else the item's own. Raises `OSError`, `BadPicture`."""
    if choice.combine in (None, "replace"):
        return None
    if target.exists():
        return read_mask(target.read_bytes(), size)
    return None if item.mask is None else read_mask(read_blob(item.mask), size)


def _end(ready: Ready, gray: Pixels, choice: MaskChoice) -> Outcome:
    return _finish(ready.item, ready.target, scaled(gray, ready.size), ready.base, choice)


def _finish(item: Item, target: Path, gray: Pixels, base: Pixels | None, choice: MaskChoice) -> Outcome:
    mask = finished(gray, choice)
    return _write(item, target, combined(mask, base, choice.combine) if choice.combine else mask)


def _write(item: Item, target: Path, mask: Pixels) -> Outcome:
    """Writes a mask, unless it would be white everywhere, which is what having none means."""
    try:
        if mask.min() == 255 and not target.exists():
            return "skipped"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, images.encode_png(np.ascontiguousarray(mask)))
    except OSError as error:
        return _no_room(item, target, error)
    return "written" if mask.max() else "black"


def _no_room(item: Item, target: Path, error: OSError) -> Finding:
    """The finding for a name that the file system of `target` does not take. Raises `PathError` for another error."""
    if error.errno != errno.ENAMETOOLONG:
        raise PathError(f"cannot write mask {safe(str(target))}: {error.strerror or error}",
                        hint="choose another directory: -o DIR") from None
    return Finding(path=item.name, code="name-too-long", severity="error",
                   detail="the name or path of its mask would be longer than the file system allows")
