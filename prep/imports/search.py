"""Finds the caches of pictures: the file with the latents of each, and the crop that they are of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prep.buckets.views import Flip
from prep.dataset.bucketing import least_step
from prep.dataset.ingest import KnownItem
from prep.findings import Finding, finding
from prep.formatting import counted, format_size, printable_name
from prep.fs.blob import Blob, error_code
from prep.fs.memo import Fact, Memo
from prep.geometry import Placement, Size
from prep.imports.kohya import FACTS, cache_names, npz_facts, placement_of, size_in_name
from prep.imports.npz import BadNpz
from prep.models.family import Family


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedLatents:
    """The cache of a picture."""

    blob: Blob
    digest: str
    views: tuple[tuple[Placement, ...], ...]  # of each size


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """A search for caches, and the requirements that they must meet."""

    word: str  # sd-scripts' name of the architecture
    family: Family
    flip: Flip  # which views are wanted
    unscaled: int  # pixels of the largest picture that sd-scripts did not scale; 0: it scaled all
    caches: Mapping[Path, Sequence[tuple[str, Size]]]  # names with sizes, and these, by path of picture without suffix

    def __call__(self, item: KnownItem, twin: str, facts: Memo
                 ) -> tuple[CachedLatents | None, list[Finding], list[str]]:
        """The cache of a picture, findings, and what else the cache has ("mask", "mirrored"), which is not imported.

        `twin` is another picture that would have the same cache, or "".
        """
        path, label = item.item.picture.path, item.item.label
        others = self.caches.get(path.with_suffix(""), ())
        names = [name for name in cache_names(path.stem, item.size, self.word) if (path.parent / name).is_file()]
        if not names:
            return None, [_missing(item, others)], []
        findings = _unused(label, names, others)
        if twin:
            return None, [*findings, finding(label, "latents-shared", f"shares {printable_name(names[0])} with "
                                             f"{printable_name(twin)}, and it has the latents of one of them")], []
        blob = Blob(file=str(path.parent / names[0]))
        try:
            fact = facts.get_or_read(blob, FACTS, npz_facts)
            if "code" in fact:
                raise BadNpz(str(fact["detail"]))
            views = tuple(self._views(item.size, *size_facts) for size_facts in fact["sizes"])
        except OSError as error:
            code, detail = error_code(error), f"cannot be read: {error.strerror or error}"
        except BadNpz as error:
            code, detail = "bad-latents", str(error)
        except _Stale as error:
            code, detail = "stale-latents", str(error)
        else:
            return CachedLatents(blob=blob, digest=str(fact["digest"]), views=views), findings, self._left(fact)
        return None, [*findings, finding(label, code, f"its latents {printable_name(names[0])}: {detail}",
                                         as_error=True)], []

    def _views(self, size: Size, _suffix: str, shape: Sequence[int], mirrored: bool, _masked: bool,
               original: Sequence[float], ltrb: Sequence[float]) -> tuple[Placement, ...]:
        """The wanted views of one size in a cache. Raises `BadNpz`, `_Stale`."""
        channels, bucket = shape[0], (shape[2] * self.family.factor, shape[1] * self.family.factor)
        if channels != self.family.latent_channels:
            raise BadNpz(f"latents of {channels} channels, expected {self.family.latent_channels} of family "
                         f"'{self.family.name}'")
        if any(side % least_step(self.family) for side in bucket):
            raise BadNpz(f"latents of a bucket of {format_size(bucket)}, expected multiples of "
                         f"{least_step(self.family)}, for family '{self.family.name}'")
        was = int(original[0]), int(original[1])
        if was != size:
            raise _Stale(_of_another_size(was, size))
        plain = placement_of(size, bucket, ltrb, unscaled=size[0] * size[1] <= self.unscaled)
        if plain is None:
            raise BadNpz(f"crop_ltrb is {[round(each, 1) for each in ltrb]}, which no crop of {format_size(size)} to "
                         f"{format_size(bucket)} has")
        if self.flip != "none" and not mirrored:
            raise BadNpz(f"no latents of the mirrored picture, which flip = \"{self.flip}\" needs")
        return tuple(replace(plain, flip=flip) for flip in {"none": (False,), "both": (False, True),
                                                            "always": (True,)}[self.flip])

    def _left(self, fact: Fact) -> list[str]:
        """The parts of a cache that are not imported."""
        masked, mirrored = (any(size[at] for size in fact["sizes"]) for at in (3, 2))
        return [*(["mask"] if masked else []), *(["mirrored"] if mirrored and self.flip == "none" else [])]


def notices(leftovers: Iterable[str]) -> Iterator[str]:
    """Notes on the parts of caches that are not imported."""
    counts = Counter(leftovers)
    if counts["mask"]:
        yield (f"note: {counted(counts['mask'], 'cache')} with masks, which are not imported: masks are made of the "
               "pictures' own files, --mask sidecar, --mask alpha or --mask DIR")
    if counts["mirrored"]:
        yield f"note: {counted(counts['mirrored'], 'cache')} with mirrored latents, too; --flip both imports them"


def twins(items: Iterable[KnownItem]) -> list[str]:
    """For each picture, the name of another one of the same stem in its directory; "" if there is none."""
    paths = [item.item.picture.path for item in items]
    named: dict[Path, list[str]] = {}
    for path in paths:
        named.setdefault(path.with_suffix(""), []).append(path.name)
    return [next((name for name in named[path.with_suffix("")] if name != path.name), "") for path in paths]


class _Stale(Exception):
    """A cache is of another picture than the one that is there; the text says why."""


def caches_of(items: Iterable[KnownItem], word: str) -> dict[Path, list[tuple[str, Size]]]:
    """Names and sizes of the caches of an architecture in the directories of these pictures, by path without suffix.

    Raises `OSError`.
    """
    caches: dict[Path, list[tuple[str, Size]]] = {}
    for folder in sorted({item.item.picture.path.parent for item in items}):
        for path in sorted(folder.iterdir()):
            if (parts := size_in_name(path.name, word)) is not None:
                caches.setdefault(folder / parts[0], []).append((path.name, parts[1]))
    return caches


def _missing(item: KnownItem, others: Sequence[tuple[str, Size]]) -> Finding:
    """The finding on a picture without a cache of its size; `others` are those of other sizes."""
    if not others:
        return finding(item.item.label, "no-latents", "has no cache of latents beside it")
    name, was = others[0]
    if was == item.size:
        return finding(item.item.label, "bad-latents", f"its latents {printable_name(name)}: are no file",
                       as_error=True)
    return finding(item.item.label, "stale-latents",
                   f"its latents {printable_name(name)}: {_of_another_size(was, item.size)}")


def _of_another_size(was: Size, size: Size) -> str:
    """The reason why a cache of a picture that had another size is stale."""
    turned = "; sd-scripts does not turn pictures as their EXIF data says" if was == size[::-1] else ""
    return f"made of a picture of {format_size(was)}, but this one has {format_size(size)}{turned}"


def _unused(label: str, names: Sequence[str], others: Sequence[tuple[str, Size]]) -> list[Finding]:
    """Findings on caches of a picture beside the one that is used, the first of `names`."""
    rest = dict.fromkeys([*names[1:], *(name for name, _ in others if name != names[0])])
    return [finding(label, "latents-unused", f"{printable_name(name)} is another cache of it; "
                    f"{printable_name(names[0])} is used") for name in rest]
