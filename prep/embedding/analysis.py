"""Analyzes the embeddings of a recipe's pictures, or of a manifest's samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from prep.batching.split import ROLES
from prep.embedding.rows import Mask, Rows
from prep.embedding.survey import EmbeddedPicture
from prep.findings import Finding
from prep.manifest.opened import OpenedManifest
from prep.models.vision.model import WITH_TEXTS, VisionModel
from prep.models.vision.texts import Memory, remembered_rows
from prep.recipe.schema import Recipe
from prep.similarity.analysis import Analysis, analyze
from prep.similarity.captions import Captions
from prep.similarity.neighbors import Tick
from prep.similarity.options import SimilarityOptions
from prep.similarity.shares import Picture

LEAST = 3  # pictures of which anything can be said


def of_pictures(recipe: Recipe, pictures: Sequence[EmbeddedPicture], rows: Rows, there: Mask,
                vision: VisionModel, memory: Memory, tick: Tick) -> tuple[Finding, ...]:
    """The findings on a recipe's pictures, whose embeddings by `vision` are `rows`, as far as they are `there`;
    `memory` has those of captions."""
    names = [str(source.path) for source in recipe.sources]
    texts = None if vision.reading is None else _Texts(
        of=lambda number: pictures[number].captions, model=vision.expected.digest, tokenizer=vision.reading.digest,
        memory=memory)
    found = _analysis(
        [Picture(name=each.label, size=each.size, source=names[each.source], role=each.role,
                 repeats=recipe.sources[each.source].repeats) for each in pictures],
        [each.picture for each in pictures], texts, rows, there, recipe.similarity, tick)
    return () if found is None else found.findings


def of_samples(opened: OpenedManifest, rows: Rows, there: Mask, memory: Memory, tick: Tick = lambda _: None
               ) -> Analysis | None:
    """The analysis of a manifest's samples, whose names have the prefix of their source; `None` if too few have an
    embedding. `memory` has the embeddings of captions."""
    samples, context = opened.samples, opened.manifest.fields["embedding"].context
    texts = None if context.get("output") != WITH_TEXTS else _Texts(
        of=samples.captions, model=str(context.get("model")), tokenizer="", memory=memory)
    sources = [str(place or "") for place in opened.manifest.sources]
    return _analysis(
        [Picture(name=label, size=(width, height), source=sources[source], role=ROLES[role], repeats=repeats)
         for label, source, role, width, height, repeats in zip(
             opened.labels(), samples.source.tolist(), samples.role.tolist(), samples.width.tolist(),
             samples.height.tolist(), samples.repeats.tolist(), strict=True)],
        samples.table["picture"].to_pylist(), texts, rows, there, SimilarityOptions(), tick)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Texts:
    """Where the captions of pictures are, and the embeddings of these."""

    of: Callable[[int], Sequence[str]]  # of a picture
    model: str  # the fingerprint of the vision model
    tokenizer: str  # the digest of its files; "": not known
    memory: Memory

    def captions(self, pictures: Sequence[int], width: int) -> Captions | None:
        """The captions of pictures, as far as their embeddings are remembered; `None` if none are."""
        every = [self.of(number) for number in pictures]
        texts, rows = remembered_rows(self.memory, self.model, chain.from_iterable(every), width, self.tokenizer)
        numbers = {text: number for number, text in enumerate(texts)}
        own = [[numbers[text] for text in each if text in numbers] for each in every]
        return Captions(texts=texts, rows=rows, of=own) if texts else None


def _analysis(pictures: Sequence[Picture], digests: Sequence[object], texts: _Texts | None, rows: Rows, there: Mask,
              options: SimilarityOptions, tick: Tick) -> Analysis | None:
    """Of pictures in several resolutions, the first. Files with the bytes of another are no news: a scan names them."""
    first: dict[str, int] = {}
    seen: set[object] = set()
    copies: set[str] = set()
    for number, picture in enumerate(pictures):
        if there[number] and picture.name not in first:
            first[picture.name] = number
            if digests[number] in seen:
                copies.add(picture.name)
            seen.add(digests[number])
    chosen = list(first.values())
    if len(chosen) < LEAST:
        return None
    return analyze([pictures[number] for number in chosen], rows[chosen], options, copies=copies, tick=tick,
                   captions=None if texts is None else texts.captions(chosen, rows.shape[1]))
