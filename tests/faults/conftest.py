"""Fixtures of the fault tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pictures import draw, draw_mask

pytest.register_assert_rewrite("account", "harness")
from harness import ENVIRONMENT, Launcher, Stage  # noqa: E402  # after that

SUPPORT = Path(__file__).parents[1] / "support"
SIZES = [(96, 96), (100, 96), (144, 64), (140, 66), (64, 144)]


@pytest.fixture(scope="session")
def setting(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, Path]:
    """Five pictures of three shapes with captions, masks for two; and a model. Never written to."""
    root = tmp_path_factory.mktemp("setting") / "photos"
    for number, size in enumerate(SIZES):
        draw(root / f"{number}.png", size, seed=number).with_suffix(".txt").write_text(f"picture number {number % 3}")
        if number in (0, 2):
            draw_mask(root / f"{number}-masklabel.png", size)
    return root, tiny_model


@pytest.fixture(scope="session")
def launch(setting: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """`launch(run, …)`: see launcher.py."""
    first = Stage(launch=None, pictures=setting[0], model=setting[1], home=tmp_path_factory.mktemp("first"))
    launcher = Launcher(first.encode(), first.verify())
    yield launcher
    launcher.close()


@pytest.fixture
def stage(launch: Launcher, setting: tuple[Path, Path], tmp_path: Path) -> Iterator[Stage]:
    """A stage whose pictures and model are the same bytes after the test."""
    pictures, model = setting
    before = [_stamps(pictures), _stamps(model)]
    (tmp_path / "whole").mkdir()
    yield Stage(launch=launch, pictures=pictures, model=model, home=tmp_path / "whole")
    assert [_stamps(pictures), _stamps(model)] == before, "a run has written to what is the user's"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster: a head without a worker, and two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=f"{ENVIRONMENT['PYTHONPATH']}:{SUPPORT}")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False,
                                                         "object_store_memory": 80 << 20})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1, object_store_memory=80 << 20)
        yield made
    finally:
        made.shutdown()
        os.environ.clear()
        os.environ.update(before)


def _stamps(root: Path) -> dict[str, tuple[int, int, bytes]]:
    return {path.relative_to(root).as_posix(): (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes())
            for path in root.rglob("*") if path.is_file()}
