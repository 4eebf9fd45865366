"""Holds what embeddings say of a manifest's samples: read and compared once, beside the pages, when first asked for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from prep.embedding.analysis import of_samples
from prep.embedding.rows import Mask, embeddings_of
from prep.errors import Problem
from prep.fs.memo import Memo, memo_path
from prep.manifest.opened import OpenedManifest
from prep.manifest.select import Compared
from prep.manifest.tables import build_findings
from prep.models.vision.texts import MEMORY
from prep.similarity.analysis import CODES, Analysis
from prep.similarity.neighbors import nearest
from prep.similarity.vectors import Vectors, vectors_of

PATIENCE = 2.0  # seconds that a page is waited for before it says how far it is
OF_EMBEDDINGS = frozenset(CODES)


class Similar:
    """The embeddings of a manifest's samples, and what they say. Threads may share it."""

    def __init__(self, opened: OpenedManifest) -> None:
        self._opened = opened
        self._lock, self._comparing = threading.Lock(), threading.Lock()
        self._read: tuple[Vectors, Mask] | None = None  # the embeddings, and which samples have one
        self._thread: threading.Thread | None = None
        self.found: Analysis | None = None  # what they say; None: not known yet, or too few samples have one
        self.compared: Compared | None = None  # the same of each sample
        self._failed: Problem | None = None
        self._names: dict[str, int] = {}
        self.done = 0  # pictures that were compared, so far

    def wait(self, patience: float) -> bool:
        """Compares them, and says whether that is done after so many seconds. Raises the `Problem` that kept it from
        being done."""
        with self._comparing:
            if self._thread is None:
                self._thread = threading.Thread(target=self._compare, name="similar", daemon=True)
                self._thread.start()
        self._thread.join(patience)
        if self._failed is not None:
            raise self._failed
        return not self._thread.is_alive()

    def sample_of(self, name: str) -> int | None:
        """The sample with a name in the analysis; `None`: a finding of that name is about a source, or the set."""
        return self._names.get(name)

    def nearest(self, sample: int, count: int) -> list[tuple[int, float]]:
        """The samples most like one, and the cosine with each; none if it has no embedding. Raises `CacheError`."""
        vectors, there = self._vectors()
        if not there[sample]:
            return []
        numbers, place = np.flatnonzero(there), np.array([int(there[:sample].sum())])
        found = nearest(vectors, place, np.arange(len(vectors)), min(count, len(vectors)))
        pairs = zip(found.others[0].tolist(), found.cosines[0].tolist(), strict=True)
        return [(int(numbers[other]), cosine) for other, cosine in pairs if other >= 0]

    def _vectors(self) -> tuple[Vectors, Mask]:
        with self._lock:
            if self._read is None:
                rows, there = embeddings_of(self._opened)
                self._read = vectors_of(rows, np.flatnonzero(there)), there
            return self._read

    def _compare(self) -> None:
        try:
            vectors, there = self._vectors()
            labels = self._opened.labels()
            for number in np.flatnonzero(there).tolist():
                self._names.setdefault(labels[number], number)
            with closing(Memo(memo_path(*MEMORY))) as memory:
                found = of_samples(self._opened, vectors.rows, there, memory, self._tick)
            if found is not None:
                self.found, self.compared = found, _of_each(found, labels)
        except Problem as error:
            self._failed = error

    def _tick(self, count: int) -> None:
        self.done += count


def _of_each(found: Analysis, labels: Sequence[str]) -> Compared:
    """What an analysis says of the sample with each label; those of a picture in several resolutions are alike."""
    each, places = found.each, dict(zip(found.each.names, range(len(found.each.names)), strict=True))
    at = np.array([places.get(label, len(places)) for label in labels])
    return Compared(clusters=np.append(each.clusters, -1)[at].astype(np.int32),
                    alike=np.append(each.alike, np.nan)[at], typical=np.append(each.typical, np.nan)[at],
                    findings=build_findings(list(found.findings)))
