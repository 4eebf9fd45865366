"""prep encode on a Ray cluster whose nodes share nothing but a store, with pictures, cache and manifest in it."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from harness import FORKS
from pictures import draw, draw_mask

pytest.importorskip("ray")
from started_ray import PATIENCE, StartedRay

from prep.fs.remote.objects import list_objects

pytestmark = [FORKS, pytest.mark.slow]
NODES = ("ray start --head", "ray start --address HEAD:6379")
SMALL = ("--resolution", "96", "--step", "16", "--dtype", "float32", "--json")


@pytest.fixture
def ray(store, tmp_path):
    """Two nodes, each with copies of its own: the store's variables are those of `ray start`."""
    found = StartedRay()
    try:
        for number, line in enumerate(NODES):
            found.run(line, LATENTRY_REMOTE_DIR=str(tmp_path / f"node{number}"))
        yield found
    finally:
        found.close()


def test_pictures_and_cache_in_a_store(store, ray, prep, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # to which the manifest's model is relative
    photos = tmp_path / "photos"
    for number in range(6):
        picture = draw(photos / f"{number}.png", (96, 96 + 16 * number), seed=number)
        picture.with_suffix(".txt").write_text(f"a {number}")
    draw_mask(photos / "0-masklabel.png", (96, 96))
    for path in photos.iterdir():
        store.server.put(f"{store.prefix}/photos/{path.name}", path.read_bytes())

    def words(name):
        place = f"{store.url}/{name}"
        return ["encode", f"{store.url}/photos", "--model", str(tiny_model), "--cache", f"{place}/cache", "-o",
                f"{place}/m.json", *SMALL]

    alone = prep(*words("alone"), "--device", "cpu")
    assert alone.code == 0, alone.err
    on_nodes = subprocess.run(
        ["prep", *words("nodes"), "--engine", "ray", "--address", f"127.0.0.1:{ray.port}", "--workers", "2"],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
        env={**ray.environment, **{name: os.environ[name] for name in os.environ if name.startswith("AWS_")},
             "LATENTRY_REMOTE_DIR": str(tmp_path / "driver"), "LATENTRY_USER_CACHE": str(tmp_path / "user")})
    assert on_nodes.returncode == 0, on_nodes.stderr
    assert json.loads(on_nodes.stdout)["encoded"] == json.loads(alone.out)["encoded"]
    made = [{name: store.server.get(f"{store.prefix}/{place}/{name}") for name in list_objects(f"{store.url}/{place}")}
            for place in ("alone", "nodes")]
    assert made[0].keys() == made[1].keys() and any("/shards/" in name for name in made[0])
    assert [name for name in made[0] if "/commits/" not in name and made[0][name] != made[1][name]] == []
    kept = {place: list((tmp_path / place / "whole").rglob("latent/c.0*")) for place in ("node0", "node1", "driver")}
    assert kept["node0"] + kept["node1"] and not kept["driver"], "what nodes upload stays with them as a copy"
    assert prep("verify", f"{store.url}/nodes/m.json").code == 0
