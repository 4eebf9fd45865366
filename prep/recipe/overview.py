"""Looks at a source: which pictures, captions, masks and tables are there. Headers are read, and no pixels are decoded.

All names are walked. Of many files only some are opened, evenly spread over the walk, so that the look takes seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prep.captions.read import BadCaption, read_caption
from prep.captions.variants import TRIGGER, has_wildcards
from prep.errors import PathError
from prep.fs.blob import read_blob
from prep.fs.paths import is_inside, resolve
from prep.geometry import Size
from prep.images.decode import read_header
from prep.images.formats.parts import BadPicture
from prep.images.header import Header
from prep.progress import Tick
from prep.sources.item import Item
from prep.sources.mask_directory import MaskFolder
from prep.sources.tables import KINDS, Tables
from prep.sources.tree import PICTURES, TABLES, stem_of
from prep.sources.walk import is_tars, tars_in, walk_source

MOST_OPENED = 5000  # pictures whose header and caption are read
MOST_TABLE = 1 << 26  # bytes of a file that may be a table of captions
_REPEATED = re.compile(r"(\d{1,9})_(.+)", re.DOTALL)  # kohya's directories: 10_cat is shown ten times an epoch
_SEPARATOR = "|||"
_MASKS = ("masks", "mask", "{}_masks", "{}-masks")  # names of a directory of masks beside the source
TAGS, WORDS = 4, 4  # so many parts between commas, of so few words each, are tags


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatFolder:
    """A directory in the source that kohya's tools would read: its repeats and class stand in its name."""

    name: str
    repeats: int
    words: str
    pictures: int


@dataclass(kw_only=True, slots=True)
class SampledFiles:
    """What was read in some of the files."""

    count: int = 0
    sizes: list[Size] = field(default_factory=list)
    unreadable: int = 0
    alpha: int = 0
    empty: int = 0  # captions without text
    several: int = 0  # captions of several lines
    wildcards: int = 0
    tags: int = 0  # captions that look like tags
    kept: int = 0  # captions with |||
    triggers: int = 0  # captions with [trigger]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOverview:
    """What is in a source."""

    path: Path
    pictures: int
    captions: dict[str, int]  # by where they are: ".txt", ".caption", ".json", "table"
    missing: int  # pictures without a caption
    masks: int  # pictures that have one
    mask_folder: Path | None  # a directory of them beside the source
    spoken: int  # pictures without a caption whose name has words
    folders: tuple[RepeatFolder, ...]
    outside: int  # pictures in none of `folders`
    table: Path | None  # of captions, to be named in the recipe
    opened: SampledFiles


def overview_of(path: Path, *, jobs: int, tick: Tick = lambda _: None) -> SourceOverview:
    """What is in the source at `path`, a directory or tars. Raises `PathError`."""
    items = [one for one in walk_source(path, source=0, masks="sidecar") if isinstance(one, Item)]
    table = None if is_tars(path) or not any(_bare(one) for one in items) else _table_of(path, items)
    if table is not None:
        items = [one for one in walk_source(path, source=0, masks="sidecar", table=table) if isinstance(one, Item)]
    if not items:
        tars = tars_in(path)
        raise PathError(f"source {path} has no pictures, expected {' '.join(PICTURES)}",
                        hint=f"it has {tars} tars: prep init '{path}/*.tar'" if tars else
                        "name the directory that holds them; what lies below it is found")
    bare = [one for one in items if _bare(one)]
    folders = () if is_tars(path) else tuple(_folders(items))
    masked, beside = sum(one.mask is not None for one in items), None
    if not masked and not folders:
        masked, beside = _masks_beside(path, items)
    return SourceOverview(path=path, pictures=len(items),
                          captions=dict(Counter(_kind(one) for one in items if not _bare(one))),
                          missing=len(bare), masks=masked, mask_folder=beside,
                          spoken=sum(_speaks(one.name) for one in bare), folders=folders,
                          outside=len(items) - sum(one.pictures for one in folders), table=table,
                          opened=_open(items, jobs, tick))


def _bare(item: Item) -> bool:
    return item.caption is None and not item.captions


def _kind(item: Item) -> str:
    return "table" if item.caption is None else f".{item.caption.name.rpartition('.')[2].lower()}"


def _speaks(name: str) -> bool:
    """Whether a name could be a caption: two words or more, and none of a camera's."""
    return len(re.findall(r"[^\W\d_]{3,}", stem_of(name.rpartition("/")[2]))) >= 2


def _folders(items: Iterable[Item]) -> Iterator[RepeatFolder]:
    """Directories directly in the source that are called N_class, in the order of their names."""
    found = Counter(one.name.partition("/")[0] for one in items if "/" in one.name)
    for name, pictures in found.items():
        if match := _REPEATED.fullmatch(name):
            yield RepeatFolder(name=name, repeats=int(match[1]), words=match[2], pictures=pictures)


def _masks_beside(path: Path, items: Sequence[Item]) -> tuple[int, Path | None]:
    """How many pictures have a mask in a directory beside the source, and where; that with the most."""
    best: tuple[int, Path | None] = (0, None)
    for name in _MASKS:
        folder = path.absolute().parent / name.format(path.name)
        if folder.is_dir() and not is_inside(resolve(path), resolve(folder)) and resolve(folder) != resolve(path):
            masks = MaskFolder.read(folder)
            found = sum(masks.find(_stem(one)) is not None for one in items)
            best = max(best, (found, folder), key=lambda one: one[0])
    return best


def _stem(item: Item) -> str:
    """What the name of an item's mask begins with in a directory of masks; of a member of a tar, its key."""
    return item.picture.member.rpartition(".")[0] or stem_of(item.name)


def _table_of(root: Path, items: Sequence[Item]) -> Path | None:
    """The file directly in `root` that has captions for most of the pictures without one."""
    stems = {stem_of(one.name) for one in items}
    bare = [one.name for one in items if _bare(one)]
    best: tuple[int, Path | None] = (len(bare) // 2, None)
    for path in sorted(root.iterdir()):
        side = path.suffix.lower() not in KINDS or path.name in TABLES or path.name.startswith(".")
        if side or stem_of(path.name) in stems or not path.is_file() or path.stat().st_size > MOST_TABLE:
            continue
        table = Tables(root=root)
        table.add(path, "", path.name)
        fits = sum(1 for name in bare if (row := table.find(name)) is not None and row.captions)
        best = max(best, (fits, path), key=lambda one: one[0])
    return best[1]


# ---- what is in the files --------------------------------------------------------------------------------------------


def _open(items: Sequence[Item], jobs: int, tick: Tick) -> SampledFiles:
    """Reads headers and captions of at most `MOST_OPENED` items, evenly spread."""
    every = -(-len(items) // MOST_OPENED)
    opened = SampledFiles()
    pool = ThreadPoolExecutor(jobs)
    try:
        for item, header, lines in pool.map(_read, items[::every]):
            tick(1)
            opened.count += 1
            if header is None:
                opened.unreadable += 1
            else:
                opened.sizes.append(header.size)
                opened.alpha += header.has_alpha
            if not _bare(item):
                _count(lines, opened)
    finally:
        pool.shutdown(cancel_futures=True)
    return opened


def _read(item: Item) -> tuple[Item, Header | None, tuple[str, ...]]:
    header, lines = None, item.captions
    with suppress(BadPicture, OSError):  # counted; prep scan says what is wrong
        header = read_header(read_blob(item.picture))
    if item.caption is not None:
        try:
            lines = read_caption(read_blob(item.caption), item.caption_format)
        except (BadCaption, OSError):
            lines = ()
    return item, header, lines


def _count(lines: Sequence[str], opened: SampledFiles) -> None:
    text = "\n".join(lines)
    opened.empty += not lines
    opened.several += len(lines) > 1
    opened.wildcards += has_wildcards(text)
    opened.kept += _SEPARATOR in text
    opened.triggers += TRIGGER in text
    parts = [part.split() for part in text.split(",")]
    opened.tags += len(lines) == 1 and len(parts) >= TAGS and sum(map(len, parts)) <= WORDS * len(parts)
