"""Selects and sorts samples by text, tag, split, source, bucket, finding and mask, column by column; counts tags.

No Python object is made for a sample. Measured at 10^6 samples: tests/benchmarks/bench_view.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prep.batching.split import ROLES
from prep.cache.ledger.columns import Column
from prep.findings import SEVERITIES
from prep.fs.labels import labels_of, sources_of
from prep.manifest.samples import SampleColumns

SORTS = ("name", "id", "mask", "weight", "caption", "pixels", "loss", "alike", "typical")
LIKENESS = ("alike", "typical")  # sorts by what embeddings say
LASTING = ("name", "id", "weight", "pixels")  # orders that captions and masks do not change
MADE = ("look", "accepted", "changed", "again")  # captions of models: see `prep.dataset.edits.made`
MOST_TAGS = 1 << 20  # different ones; captions that are sentences have more
REMEMBERED = 16  # selections; each takes 4 bytes a sample
TAG_END = ","
MANY = 1000  # places in a chunk that are found one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Chooses samples and their order; fields that are `None` or empty leave none out."""

    text: str = ""  # in a caption or the name, in upper or lower case
    tag: str = ""  # what a caption has between commas, or before the first or after the last
    made: str = ""  # one of MADE, or "model" for all of these but "again"
    role: str = ""  # one of ROLES
    source: int | None = None
    bucket: int | None = None
    finding: str = ""  # a code
    masked: bool | None = None
    low: float | None = None  # of the mask's mean: samples without a mask have none
    high: float | None = None
    hard: float | None = None  # the least loss, as in `Selector.losses`
    cluster: int | None = None  # as in `Compared.clusters`
    sort: str = SORTS[0]
    descending: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What embeddings say of N samples; of one without an embedding nothing."""

    clusters: Column  # int32 [N], -1: none
    alike: Column  # float64 [N]: cosine with the nearest other picture, or NaN
    typical: Column  # float64 [N]: mean cosine with its neighbors, or NaN
    findings: pa.Table  # as the FINDINGS table


class Selectable(Protocol):
    """Samples and findings: a manifest, or a data set that is not encoded."""

    @property
    def samples(self) -> SampleColumns: ...
    @property
    def findings_table(self) -> pa.Table: ...
    @property
    def prefixes(self) -> Sequence[str]: ...  # of the names of each source's pictures in findings


class Selector:
    """Answers queries about one manifest, or one data set. Threads may share one."""

    def __init__(self, listed: Selectable) -> None:
        self._listed = listed
        self.samples = listed.samples
        self.losses: Column | None = None  # float64 [N], of a run: 1 is usual, NaN was not shown
        self.compared: Compared | None = None  # None: not known
        self.made: Column = np.empty(0, np.uint8)  # [N]: 1 + the place in MADE, 0 for none; empty: nothing is known
        self._lock, self._sorting, self._counting = Lock(), Lock(), Lock()
        self._tags: TagIndex | None = None
        self._known: OrderedDict[Query, Column] = OrderedDict()
        self._orders: dict[tuple[str, bool], Column] = {}

    def prepare(self) -> None:
        """Sorts the names and reads all texts, so that the first answers are as quick as later ones."""
        self._order(SORTS[0], False)
        _ = self._texts

    def renewed(self, listed: Selectable) -> Selector:
        """A prepared selector of `listed`: the same samples, some with other captions, masks or findings."""
        new = Selector(listed)
        with self._sorting:
            new._orders = {key: order for key, order in self._orders.items() if key[0] in LASTING}
        new.prepare()
        return new

    def learn(self, losses: Column) -> None:
        """Sorts and filters by these losses from now on."""
        if losses is self.losses:
            return
        with self._sorting, self._lock:
            self.losses = losses
            self._forget("loss")

    def compare(self, compared: Compared) -> None:
        """Sorts, filters and tells findings by what embeddings say from now on."""
        if compared is self.compared:
            return
        with self._sorting, self._lock:
            self.compared = compared
            self._forget(*LIKENESS)
            for name in ("findings", "codes"):
                self.__dict__.pop(name, None)

    def _forget(self, *sorts: str) -> None:
        self._known.clear()
        for sort in sorts:
            for descending in (False, True):
                self._orders.pop((sort, descending), None)

    def judge(self, made: Column) -> None:
        """Filters by these origins of captions from now on."""
        with self._lock:
            if made is not self.made:
                self.made = made
                self._known = OrderedDict((query, known) for query, known in self._known.items() if not query.made)

    def select(self, query: Query) -> Column:
        """The numbers of the samples that fit, int32, in the query's order."""
        with self._lock:
            if query in self._known:
                self._known.move_to_end(query)
                return self._known[query]
        losses, made, compared, fits = self.losses, self.made, self.compared, np.ones(len(self.samples), bool)
        for test in self._tests(query):  # the search comes last
            fits &= test()
        order = self._order(query.sort, query.descending)
        selected = order[fits[order]]
        with self._lock:
            if losses is self.losses and made is self.made and compared is self.compared:
                self._known[query] = selected
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return selected

    def _tests(self, query: Query) -> list[Callable[[], Column]]:
        samples = self.samples
        tests: list[tuple[bool, Callable[[], Column]]] = [
            (bool(query.role), lambda: samples.role == ROLES.index(query.role)),
            (query.source is not None, lambda: samples.source == query.source),
            (query.bucket is not None, lambda: samples.bucket == query.bucket),
            (query.masked is not None, lambda: np.isnan(samples.coverage) != query.masked),
            (query.low is not None, lambda: samples.coverage >= query.low),  # never of NaN
            (query.high is not None, lambda: samples.coverage <= query.high),
            (query.hard is not None, lambda: self._losses() >= query.hard),
            (query.cluster is not None, lambda: self._clusters() == query.cluster),
            (bool(query.finding), lambda: self._with_finding(query.finding)),
            (bool(query.made), lambda: self._with_origin(query.made)),
            (bool(query.tag), lambda: self._with_tag(query.tag)),
            (bool(query.text), lambda: self._with_text(query.text)),
        ]
        return [test for asked, test in tests if asked]

    def _with_origin(self, made: str) -> Column:
        if len(self.made) != len(self.samples):
            return np.zeros(len(self.samples), bool)
        return (self.made > 0) & (self.made <= 3) if made == "model" else self.made == 1 + MADE.index(made)

    # ---- tags --------------------------------------------------------------------------------------------------------

    @property
    def tags(self) -> TagIndex:
        """The tags of all captions, found when they are first asked for."""
        with self._counting:
            if self._tags is None:
                self._tags = TagIndex(self.samples.table["texts"])
            return self._tags

    def _with_tag(self, tag: str) -> Column:
        fits = self.tags.having(tag)
        if fits is None:  # it is none of those that are counted
            fits = self._with_text(tag)
            for number in np.flatnonzero(fits).tolist():
                fits[number] = any(tag in map(str.strip, caption.split(TAG_END))
                                   for caption in self.samples.captions(number))
        return fits

    # ---- text --------------------------------------------------------------------------------------------------------

    @cached_property
    def _texts(self) -> list[tuple[LowerCase, LowerCase, Column]]:
        """By chunk of the table: names, captions, and the number of the first caption of each sample."""
        table, searched = self.samples.table, []
        for names, texts in zip(table["name"].chunks, table["texts"].chunks, strict=True):
            if len(names):
                counts = pc.list_value_length(texts).to_numpy()
                captions = pc.struct_field(pc.list_flatten(texts), "caption")
                searched.append((LowerCase(names), LowerCase(captions), np.cumsum(counts) - counts))
        return searched

    def _with_text(self, text: str) -> Column:
        needle = pc.utf8_lower(pa.scalar(text)).as_py().encode()
        matches = [names.contain(needle) | np.logical_or.reduceat(captions.contain(needle), starts)
                   for names, captions, starts in self._texts]
        return np.concatenate([np.empty(0, bool), *matches])

    # ---- findings ----------------------------------------------------------------------------------------------------

    @cached_property
    def findings(self) -> pa.Table:
        """The FINDINGS table, the worst first, then by path. Raises `CacheError`."""
        table = self._listed.findings_table
        if self.compared is not None:
            table = pa.concat_tables([table, self.compared.findings])
        rank = pc.fill_null(pc.index_in(table["severity"], value_set=pa.array(SEVERITIES)), len(SEVERITIES))
        order = pc.sort_indices(table.append_column("rank", rank),
                                sort_keys=[("rank", "ascending"), ("path", "ascending"), ("code", "ascending")])
        return table.take(order)

    @cached_property
    def codes(self) -> dict[str, int]:
        """The number of findings by code, sorted by code."""
        counted = pc.value_counts(self.findings["code"].combine_chunks())
        return dict(sorted((count["values"], count["counts"]) for count in counted.to_pylist()))

    def findings_with(self, code: str) -> pa.Table:
        """The findings of a code, or all of them for ""."""
        return self.findings.filter(pc.equal(self.findings["code"], code)) if code else self.findings

    def findings_of(self, sample: int) -> list[dict[str, str]]:
        """The findings about a sample, as documents."""
        name, source = self.samples.name(sample), int(self.samples.source[sample])
        labels = pa.array([name, *labels_of(source, name, self._listed.prefixes)])
        findings: list[dict[str, str]] = self.findings.filter(pc.is_in(self.findings["path"], labels)).to_pylist()
        return findings

    def _with_finding(self, code: str) -> Column:
        """Samples by the paths of findings: names, or labels, which begin with their source's prefix."""
        paths = self.findings_with(code)["path"].to_pylist()
        by_source: dict[int | None, list[str]] = {None: paths}
        prefixes = self._listed.prefixes
        for path in paths:
            for source, name in sources_of(path, prefixes):
                by_source.setdefault(source, []).append(name)
        matches = np.zeros(len(self.samples), bool)
        for number, names in by_source.items():
            named = pc.is_in(self.samples.table["name"], pa.array(names, pa.string())).to_numpy()
            matches |= named if number is None else named & (self.samples.source == number)
        return matches

    def samples_of(self, paths: Sequence[str]) -> dict[str, int]:
        """The first sample of each of a few paths of findings; those of no sample, such as rejected pictures, are left
        out."""
        named: dict[str, tuple[int | None, str]] = {}
        for path in paths:
            named[path] = next(iter(sources_of(path, self._listed.prefixes)), (None, path))
        wanted = pa.array(sorted({name for _, name in named.values()} | set(paths)), pa.string())
        near: dict[tuple[int | None, str], int] = {}
        for number in np.flatnonzero(pc.is_in(self.samples.table["name"], wanted).to_numpy()).tolist():
            name = self.samples.name(number)
            near.setdefault((int(self.samples.source[number]), name), number)
            near.setdefault((None, name), number)
        samples = {path: near.get(key, near.get((None, path))) for path, key in named.items()}
        return {path: number for path, number in samples.items() if number is not None}

    # ---- order -------------------------------------------------------------------------------------------------------

    def _order(self, sort: str, descending: bool) -> Column:
        """All samples, sorted; each order is computed once, and of equal samples the first in the table comes first."""
        with self._sorting:
            if (sort, descending) not in self._orders:
                keys = self._keys(sort)
                order = np.argsort(-keys if descending else keys, kind="stable")
                self._orders[sort, descending] = order.astype(np.int32)
            return self._orders[sort, descending]

    def _keys(self, sort: str) -> Column:
        """A number for each sample; NaN comes last in both directions."""
        samples = self.samples
        if sort == "id":  # the table's own order
            return np.arange(len(samples))
        if sort == "name":
            ranks = np.empty(len(samples), np.int64)
            ranks[pc.sort_indices(samples.table["name"]).to_numpy()] = np.arange(len(samples))
            return ranks
        if sort == "caption":
            lengths = samples.caption_lengths
            return np.maximum.reduceat(lengths, samples.text_offsets[:-1]) if len(lengths) else lengths
        if sort == "pixels":
            return samples.width.astype(np.int64) * samples.height
        if sort == "loss":
            return self._losses()
        if sort in LIKENESS:
            return np.full(len(samples), np.nan) if self.compared is None else getattr(self.compared, sort)
        return samples.coverage if sort == "mask" else samples.weight

    @property
    def clusters(self) -> list[tuple[int, int]]:
        """Each cluster's place and its number of samples, if they are known."""
        if self.compared is None:
            return []
        numbers, counts = np.unique(self.compared.clusters[self.compared.clusters >= 0], return_counts=True)
        return list(zip(numbers.tolist(), counts.tolist(), strict=True))

    def _clusters(self) -> Column:
        return np.full(len(self.samples), -1) if self.compared is None else self.compared.clusters

    def _losses(self) -> Column:
        return np.full(len(self.samples), np.nan) if self.losses is None else self.losses


class TagIndex:
    """The tags of each sample, each once: the parts of its captions between commas, without blanks around them.

    Of a million samples with 20 tags each it takes about ten seconds and 80 MB, and to count those of a selection a
    tenth of a second. Tags beyond the first `MOST_TAGS` different ones are left out.
    """

    def __init__(self, texts: pa.ChunkedArray) -> None:
        self._names: pa.Array = pa.array([], pa.string())
        self.complete = True  # whether all tags are counted
        codes, lengths = [np.empty(0, np.int32)], [np.zeros(1, np.int64)]
        for chunk in texts.chunks:
            found = np.sort(self._coded(*_parts_of(chunk)))
            owners, numbers = np.divmod(found[np.diff(found, prepend=-1) > 0], max(1, len(self._names)))
            codes.append(numbers.astype(np.int32))
            lengths.append(np.bincount(owners, minlength=len(chunk)))
        order = pc.sort_indices(self._names)
        self._names = self._names.take(order)
        ranks = np.empty(len(order), np.int32)  # codes in the order of names
        ranks[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
        self._codes = ranks[np.concatenate(codes)]  # of all samples, one after the other
        self._offsets = np.cumsum(np.concatenate(lengths))  # [N + 1]
        self._totals = np.bincount(self._codes, minlength=len(order))

    def _coded(self, owners: Column, parts: pa.Array) -> Column:
        """Numbers that stand for a sample of a chunk, and a tag of it."""
        encoded = parts.dictionary_encode()
        tags = pc.utf8_trim_whitespace(encoded.dictionary)
        unknown = pc.and_(pc.is_null(pc.index_in(tags, value_set=self._names)), pc.not_equal(tags, ""))
        new = tags.filter(unknown).unique()
        self.complete &= len(self._names) + len(new) <= MOST_TAGS
        self._names = pa.concat_arrays([self._names, new.slice(0, MOST_TAGS - len(self._names))])
        known = pc.fill_null(pc.index_in(tags, value_set=self._names), -1).to_numpy()
        codes = known[encoded.indices.to_numpy()] if len(known) else np.empty(0, np.int32)
        found: Column = owners * max(1, len(self._names)) + codes
        return found[codes >= 0]

    def having(self, tag: str) -> Column | None:
        """Whether each sample has a tag; `None` if it is none of those that are counted."""
        code = pc.index(self._names, pa.scalar(tag)).as_py()
        if code < 0 and not self.complete:
            return None
        fits = np.zeros(len(self._offsets) - 1, bool)
        fits[np.searchsorted(self._offsets, np.flatnonzero(self._codes == code), side="right") - 1] = True
        return fits

    def counted(self, selected: Column, most: int) -> tuple[list[tuple[str, int]], int]:
        """The tags that most of the selected samples have, with the number of these, at most `most`, the most frequent
        first, of equal ones by name; and how many different tags there are in all."""
        counts = self._totals
        if len(selected) < len(self._offsets) - 1:
            fits = np.zeros(len(self._offsets) - 1, bool)
            fits[selected] = True
            counts = np.bincount(self._codes[np.repeat(fits, np.diff(self._offsets))], minlength=len(counts))
        last = len(counts) - 1
        keys = counts * len(counts) + np.arange(last, -1, -1)  # differ, and have the order that is wanted
        top = -np.sort(-(keys if len(keys) <= most else np.partition(keys, -most)[-most:]))
        named = ((last - key % len(counts), key // len(counts)) for key in top.tolist())
        return ([(self._names[code].as_py(), count) for code, count in named if count], int(np.count_nonzero(counts)))


def _parts_of(texts: pa.Array) -> tuple[Column, pa.Array]:
    """What stands between commas in a chunk of samples' texts: the number of its sample in the chunk, and the text."""
    captions = pc.struct_field(pc.list_flatten(texts), "caption")
    parts = pc.split_pattern(captions, TAG_END)
    owners = np.repeat(np.repeat(np.arange(len(texts)), pc.list_value_length(texts).to_numpy()),
                       pc.list_value_length(parts).to_numpy())
    return owners, pc.list_flatten(parts)


class LowerCase:
    """Strings in lower case, as one piece of memory that is searched from end to end.

    Arrow's `match_substring` begins anew with each string: it takes five times as long for a million short ones.
    """

    def __init__(self, strings: pa.Array) -> None:
        bounds, data = _parts(strings)
        if not data.isascii():  # then Unicode decides, and lengths may change
            bounds, data = _parts(pc.utf8_lower(strings))
        self._bounds, self._data = bounds, data.lower()

    def contain(self, needle: bytes) -> Column:
        """Whether each string contains `needle`, UTF-8 in lower case."""
        contained = np.zeros(len(self._bounds) - 1, bool)
        places = self._places(needle)
        owners = np.searchsorted(self._bounds, places, side="right") - 1
        inside = places + len(needle) <= self._bounds[owners + 1]  # and not across the end of a string
        contained[owners[inside]] = True
        return contained

    def _places(self, needle: bytes) -> Column:
        """Where `needle` begins."""
        places: list[int] = []
        at = self._data.find(needle)
        while at >= 0 and len(places) < MANY:
            places.append(at)
            at = self._data.find(needle, at + 1)
        if at < 0:
            return np.array(places, np.int64)
        data = np.frombuffer(self._data, np.uint8)  # so many that comparing every byte is quicker
        hits = np.flatnonzero(data[:len(data) - len(needle) + 1] == needle[0])
        for place, byte in enumerate(needle[1:], 1):
            hits = hits[data[hits + place] == byte]
        return hits


def _parts(strings: pa.Array) -> tuple[Column, bytes]:
    """N + 1 offsets, from 0, and the bytes of all strings."""
    _, offsets, data = strings.buffers()
    bounds = np.frombuffer(offsets, np.int32)[strings.offset:strings.offset + len(strings) + 1].astype(np.int64)
    if data is None or not len(strings):
        return np.zeros(len(strings) + 1, np.int64), b""
    return bounds - bounds[0], data.slice(int(bounds[0]), int(bounds[-1] - bounds[0])).to_pybytes()
