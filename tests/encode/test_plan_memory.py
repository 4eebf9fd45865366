"""Planning holds the wanted keys once, however many there are: no text of all of them, no second copy of each."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from walking import item_of

from prep.cache.store import Cache, open_cache
from prep.dataset.bucketing import buckets_for
from prep.dataset.ingest import Ingested, KnownItem
from prep.encode.plan import plan
from prep.encode.targets.records import Contexts, PictureTarget, PictureTargets
from prep.encode.targets.samples import targets_of
from prep.fs.blob import Blob
from prep.geometry import Placement
from prep.manifest.samples import in_table_order
from prep.recipe.schema import ModelOptions, Recipe, Source

KEYS = sorted(hashlib.sha256(b"%d" % number).hexdigest() for number in range(30_000))
ROWS = 10  # of a task


@dataclass(frozen=True, slots=True)
class OneView:
    """A sample, and its only view."""

    id: str
    name: str = ""

    def keys(self, field: str) -> list[str]:
        return [self.id]


@contextmanager
def bytes_a_row() -> Iterator[list[float]]:
    """The most memory that the block takes at once, over what was there before."""
    found: list[float] = []
    tracemalloc.start()
    try:
        yield found
        found.append(tracemalloc.get_traced_memory()[1] / len(KEYS))
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def wanted() -> Any:
    samples = [OneView(key) for key in reversed(KEYS)]
    targets = SimpleNamespace(samples=samples, keys=lambda: KEYS,
                            by_field=lambda: {"latent": KEYS, "mask": [], "text": []})
    return SimpleNamespace(targets=targets, text_groups=SimpleNamespace(count=lambda keys: None),
                           group_of=lambda field, key: (64, 64), row_bytes=lambda field, key: 1 << 16)


def test_a_plan_takes_less_memory_than_its_keys(cache: Cache, wanted: Any, tmp_path: Path) -> None:
    """A key as a string takes 113 bytes."""
    plan(wanted, open_cache(tmp_path / "another", create=True))  # what is imported and kept once is not counted
    with bytes_a_row() as first:
        made = plan(wanted, cache, shard_bytes=ROWS << 16)
    with bytes_a_row() as again:
        followed = plan(wanted, cache, shard_bytes=ROWS << 16)
    assert made.tasks == followed.tasks and len(made.tasks) == len(KEYS) / ROWS
    assert first[0] < 150 and again[0] < 200, "120 and 160; with all keys spelled, or there twice, 190 and 290"
    own = set(map(id, KEYS))
    assert all(id(key) in own for task in followed.tasks for key in task.rows), "keys are there twice"


def test_samples_of_one_id_are_in_the_order_of_their_names() -> None:
    samples: list[Any] = [OneView("b", "1"), OneView("a", "2"), OneView("a", "1"), OneView("b", "0")]
    assert [(one.id, one.name) for one in in_table_order(samples)] == [("a", "1"), ("a", "2"), ("b", "0"), ("b", "1")]


BLOBS = (Blob(file="/photos/a/b.png"), Blob(file="/elsewhere/b.png"), Blob(file="s3://x/a/b.png", version='"1" 7'),
         Blob(file="/photos/a.tar", offset=512, length=9, member="b.png"))


@pytest.mark.parametrize("blob", BLOBS, ids=lambda blob: blob.file)
@pytest.mark.parametrize("name", ["a/b.png", "b.png", "its/a/b.png"])
def test_a_target_is_what_was_added(blob: Blob, name: str) -> None:
    place = Placement(scaled=(9, 8), crop=(1, 0), bucket=(8, 8))
    plain = PictureTarget(key="k", name=name, file=name, blob=blob, digest="ab" * 32, placement=place)
    mask = plain._replace(key="m", file=f"{name}: its mask", digest="cd" * 32)
    drawn, masked = plain._replace(key="d", mask_from="drawn"), plain._replace(key="h", hole=mask)
    targets = PictureTargets()
    for target in (plain, mask, drawn, masked, plain._replace(digest="ef" * 32)):
        targets.add(target)
    assert dict(targets) == {"k": plain, "m": mask, "d": drawn, "h": masked}
    assert len(targets) == 4 and "x" not in targets


def test_a_picture_that_is_planned_takes_less_than_a_kilobyte() -> None:
    """Its sample, the names of its rows, its place and its caption; what was read of it is let go of."""
    recipe = Recipe(sources=(Source(path=Path("/photos")),), model=ModelOptions(family="sd15"))
    contexts = Contexts(latent={"kind": "latent"}, mask=None, text={"kind": "text"})
    count = 5000
    tracemalloc.start()
    try:
        items = [KnownItem(item=item_of(f"/photos/{number}.png", caption=".txt"),
                           picture=hashlib.sha256(b"%d" % number).hexdigest(), size=(512, 512), has_alpha=False,
                           captions=((f"picture number {number} of many", 1.0),), mask=None) for number in range(count)]
        survey = Ingested(items=items, findings=())
        found = targets_of(recipe, survey, buckets_for(recipe, survey), contexts, ())
        blocks = [trace.size for trace in tracemalloc.take_snapshot().traces]
        taken = sum(size for size in blocks if size < 1 << 20) / count  # Python's table of interned names may grow, too
    finally:
        tracemalloc.stop()
    assert len(found.samples) == count == len(found.latents) and not items
    assert {one.caption for one in found.texts.values()} >= {"picture number 7 of many"}
    assert taken < 830, f"{taken:.0f} bytes, expected 807; with records of samples and their rows there were 1,235"
