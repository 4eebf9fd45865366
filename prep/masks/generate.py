"""Makes mask pictures: threads read, decode and write; if the method needs a model, it gets batches in between.

Masks go to a directory of their own, with the same subdirectories as the pictures; white trains. Each file is complete
or absent. An existing file is kept, since somebody may have edited it, so a repeated run continues where it stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event

from prep.errors import PathError
from prep.findings import Finding
from prep.formatting import printable
from prep.fs.paths import is_inside, resolve, same_place
from prep.masks.methods import METHODS, MadeMasks, MaskOptions, check_options, mask_path
from prep.masks.picture import Model, Outcome, Ready, finish_picture, no_room, start_picture, write_white
from prep.progress import Tick
from prep.sources.item import Item


def make_masks(items: Iterable[Item], choice: MaskOptions, *, out: Path, load: Callable[[], Model] | None = None,
               jobs: int = 2, batch_size: int = 4, tick: Tick = lambda _: None) -> MadeMasks:
    """Writes the masks of `items` below `out`, the only place it writes to.

    Without `combine`, an item's own mask is used as it is, and an existing file is kept unless `force`. With `combine`,
    the new mask is combined with the existing file, or else with the item's own mask. `load` is called once, when a
    mask first needs the model. Raises `UsageError` for options that make no mask, `PathError` if `out` cannot be
    written or a link in it leads elsewhere.
    """
    check_options(choice)
    model: Model | None = None
    remaining = [(item, out / mask_path(item.name, choice.naming)) for item in items]
    _check_below({target.parent for _, target in remaining}, out)
    outcomes: list[tuple[Item, Outcome]] = []
    written: set[Path] = set()
    while remaining:  # pictures of the same stem share the mask of the first
        firsts, remaining = _first_of_each(remaining)
        todo = []
        for item, target in firsts:
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
    return _made([(item, _told_apart(item, outcome, out, choice)) for item, outcome in outcomes])


def _told_apart(item: Item, outcome: Outcome, out: Path, choice: MaskOptions) -> Outcome:
    """Writes a white mask for a skipped picture in a subdirectory if a mask of its name lies directly in `out`.

    `prep encode` also accepts masks directly in `out`, and would use that mask for this picture.
    """
    target = out / mask_path(item.name, choice.naming)
    if outcome != "skipped" or target.parent == out or not (out / target.name).exists():
        return outcome
    return write_white(item, target)


def _made(outcomes: Sequence[tuple[Item, Outcome]]) -> MadeMasks:
    results = [outcome for _, outcome in outcomes]
    black = tuple(item.label for item, outcome in outcomes if outcome == "black")
    return MadeMasks(written=results.count("written") + len(black), kept=results.count("kept"),
                     skipped=results.count("skipped"), black=black,
                     findings=tuple(finding for finding in results if isinstance(finding, Finding)))


def _first_of_each(pairs: Sequence[tuple[Item, Path]]) -> tuple[list[tuple[Item, Path]], list[tuple[Item, Path]]]:
    """The first item of each target, and the others."""
    seen: set[Path] = set()
    first: list[tuple[Item, Path]] = []
    later: list[tuple[Item, Path]] = []
    for item, target in pairs:
        (later if target in seen else first).append((item, target))
        seen.add(target)
    return first, later


def _check_below(folders: Iterable[Path], out: Path) -> None:
    """Raises `PathError` if a link in `out` puts a folder elsewhere, perhaps beside the pictures."""
    top = resolve(out)
    for folder in sorted(folders):
        at = resolve(folder)
        if not same_place(at, top) and not is_inside(at, top):
            raise PathError(f"{printable(str(folder))} leads to {printable(str(at))}, expected a directory below "
                            f"{printable(str(top))}", hint="remove the link, or choose another directory: -o DIR")


def _known(item: Item, target: Path, choice: MaskOptions) -> Outcome | None:
    """The outcome if it is known without reading the picture: the file exists, or its name is too long."""
    try:
        return "kept" if target.exists() and not choice.force and choice.combine is None else None
    except OSError as error:
        return no_room(item, target, error)


def _needs_model(item: Item, choice: MaskOptions) -> bool:
    return METHODS[choice.method].model and (item.mask is None or choice.combine is not None)


# ---- threads and batches ---------------------------------------------------------------------------------------------


def _run(todo: Sequence[tuple[Item, Path]], choice: MaskOptions, model: Model | None, jobs: int, batch_size: int,
         tick: Tick) -> list[tuple[Item, Path, Outcome]]:
    """The outcomes in order. After Ctrl-C or an error, finished maps are still written as masks; nothing new starts."""
    outcomes: dict[int, Outcome] = {}
    batch: list[tuple[int, Ready]] = []
    ending: deque[tuple[int, Future[Outcome]]] = deque()
    pool, stop = ThreadPoolExecutor(jobs), Event()

    def settle(most: int) -> None:
        while len(ending) > most:
            number, future = ending.popleft()
            outcomes[number] = future.result()
            tick(1)

    def flush() -> None:
        assert model is not None, f"{choice.method} needs a model"
        maps = model.maps([ready.input for _, ready in batch])
        ending.extend((number, pool.submit(finish_picture, ready, gray, choice))
                      for (number, ready), gray in zip(batch, maps, strict=True))
        batch.clear()
        settle(2 * batch_size)

    with pool, closing(_ahead(pool, stop, todo, choice, model, jobs + batch_size)) as beginnings:
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


def _ahead(pool: ThreadPoolExecutor, stop: Event, todo: Sequence[tuple[Item, Path]], choice: MaskOptions,
           model: Model | None, window: int) -> Generator[tuple[int, Outcome | Ready], None, None]:
    """Starts the items in order, at most `window` ahead, and yields the results; closing it cancels the rest."""
    waiting: deque[Future[Outcome | Ready]] = deque()
    try:
        for number, (item, target) in enumerate(todo):
            waiting.append(pool.submit(start_picture, item, target, choice, model, stop))
            if len(waiting) == window:
                yield number - window + 1, waiting.popleft().result()
        for number in range(len(todo) - len(waiting), len(todo)):
            yield number, waiting.popleft().result()
    finally:
        stop.set()  # threads may wait for a store
        for future in waiting:
            future.cancel()
