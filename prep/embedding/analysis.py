"""Analyzes the embeddings of a recipe's pictures, or of a manifest's samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from prep.batching.split import ROLES
from prep.embedding.rows import Mask, Rows
from prep.embedding.survey import EmbeddedPicture
from prep.findings import Finding
from prep.manifest.opened import OpenedManifest
from prep.models.vision.texts import Memory, remembered_rows
from prep.recipe.schema import Recipe
from prep.similarity.analysis import Analysis, analyze
from prep.similarity.captions import Captions
from prep.similarity.neighbors import Tick
from prep.similarity.options import SimilarityOptions
from prep.similarity.shares import Picture

LEAST = 3  # pictures of which anything can be said


def of_pictures(recipe: Recipe, pictures: Sequence[EmbeddedPicture], rows: Rows, there: Mask, model: str,
                memory: Memory, tick: Tick) -> tuple[Finding, ...]:
    """The findings on a recipe's pictures, whose embeddings are `rows`, as far as they are `there`; `model`: the
    fingerprint of what made them, `memory` has those of captions."""
    names = [str(source.path) for source in recipe.sources]
    found = _analysis(
        [Picture(name=each.label, size=each.size, source=names[each.source], role=each.role,
                 repeats=recipe.sources[each.source].repeats) for each in pictures],
        [each.picture for each in pictures], lambda number: pictures[number].captions, rows, there, model,
        memory, recipe.similarity, tick)
    return () if found is None else found.findings


def of_samples(opened: OpenedManifest, rows: Rows, there: Mask, memory: Memory, tick: Tick = lambda _: None
               ) -> Analysis | None:
    """The analysis of a manifest's samples, whose names have the prefix of their source; `None` if too few have an
    embedding."""
    samples = opened.samples
    sources = [str(place or "") for place in opened.manifest.sources]
    return _analysis(
        [Picture(name=label, size=(width, height), source=sources[source], role=ROLES[role], repeats=repeats)
         for label, source, role, width, height, repeats in zip(
             opened.labels(), samples.source.tolist(), samples.role.tolist(), samples.width.tolist(),
             samples.height.tolist(), samples.repeats.tolist(), strict=True)],
        samples.table["picture"].to_pylist(), samples.captions, rows, there,
        str(opened.manifest.fields["embedding"].context["model"]), memory, SimilarityOptions(), tick)


def _analysis(pictures: Sequence[Picture], digests: Sequence[object], captions: Callable[[int], Sequence[str]],
              rows: Rows, there: Mask, model: str, memory: Memory, options: SimilarityOptions, tick: Tick
              ) -> Analysis | None:
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
                   captions=_captions([captions(number) for number in chosen], model, memory, rows.shape[1]))


def _captions(of: Sequence[Sequence[str]], model: str, memory: Memory, width: int) -> Captions | None:
    """The captions of pictures, as far as their embeddings by this model are remembered; `None` if none are."""
    texts, rows = remembered_rows(memory, model, chain.from_iterable(of), width)
    numbers = {text: number for number, text in enumerate(texts)}
    return Captions(texts=texts, rows=rows, of=[[numbers[text] for text in each if text in numbers] for each in of]
                    ) if texts else None
