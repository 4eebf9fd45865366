"""Analyzes the embeddings of a recipe's pictures, or of a manifest's samples."""

from __future__ import annotations

from collections.abc import Sequence

from prep.batching.split import ROLES
from prep.embedding.rows import Mask, Rows
from prep.embedding.survey import EmbeddedPicture
from prep.findings import Finding
from prep.manifest.opened import OpenedManifest
from prep.recipe.schema import Recipe
from prep.similarity.analysis import Analysis, analyze
from prep.similarity.neighbors import Tick
from prep.similarity.options import SimilarityOptions
from prep.similarity.shares import Picture

LEAST = 3  # pictures of which anything can be said


def of_pictures(recipe: Recipe, pictures: Sequence[EmbeddedPicture], rows: Rows, there: Mask, tick: Tick
                ) -> tuple[Finding, ...]:
    """The findings on a recipe's pictures, whose embeddings are `rows`, as far as they are `there`."""
    names = [str(source.path) for source in recipe.sources]
    found = _analysis(
        [Picture(name=each.label, size=each.size, source=names[each.source], role=each.role,
                 repeats=recipe.sources[each.source].repeats) for each in pictures],
        [each.picture for each in pictures], rows, there, recipe.similarity, tick)
    return () if found is None else found.findings


def of_samples(opened: OpenedManifest, rows: Rows, there: Mask, tick: Tick = lambda _: None) -> Analysis | None:
    """The analysis of a manifest's samples, whose names have the prefix of their source; `None` if too few have an
    embedding."""
    samples = opened.samples
    sources = [str(place or "") for place in opened.manifest.sources]
    return _analysis(
        [Picture(name=label, size=(width, height), source=sources[source], role=ROLES[role], repeats=repeats)
         for label, source, role, width, height, repeats in zip(
             opened.labels(), samples.source.tolist(), samples.role.tolist(), samples.width.tolist(),
             samples.height.tolist(), samples.repeats.tolist(), strict=True)],
        samples.table["picture"].to_pylist(), rows, there, SimilarityOptions(), tick)


def _analysis(pictures: Sequence[Picture], digests: Sequence[object], rows: Rows, there: Mask,
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
    return analyze([pictures[number] for number in chosen], rows[chosen], options, copies=copies, tick=tick)
