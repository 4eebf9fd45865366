"""`prep encode` with a vision model: a field beside the others, which training does not see."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from prep.batching.plan import step_plan
from prep.embedding.rows import embeddings_of
from prep.errors import CacheError, ConfigError
from prep.loader.batches import batches
from prep.loader.draws import training
from prep.loader.identity import identify
from prep.loader.index import open_index
from prep.loader.rows import Rows
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    """`encode(*more, output=…)`: the result of encoding the photos."""

    def go(*more, output="manifest.json", cache="cache", code=0, words=()):
        done = prep(*(words or ("encode", photos)), "--model", tiny_model, "--cache", tmp_path / cache, "-o",
                    tmp_path / output, "--resolution", 64, "--step", 8, "--flip", "both", *more, "--json")
        assert done.code == code, done.err
        return done

    return go


def opened(path):
    return open_manifest(read_manifest(path))


def test_rows_of_prep_embed_are_found_and_read_with_the_manifest(prep, encode, photos, vision, tmp_path):
    dry = encode("--embed", vision["clip"], "--dry-run", "--measure").json
    assert dry["estimate"]["measured"]["rows"]["embedding"] == 8
    assert dry["estimate"]["memory"]["embedding"] > (vision["clip"] / "model.safetensors").stat().st_size // 2
    assert (dry["encoded"]["embedding"], dry["estimate"]["fields"]["embedding"]["bytes"]) == (8, 8 * 24 * 2)
    made = prep("embed", photos, "--model", vision["clip"], "--cache", tmp_path / "cache", "--resolution", 64, "--step",
                8, "--json")
    assert made.json["made"] == 8
    done = encode("--embed", vision["clip"]).json
    assert (done["encoded"]["embedding"], done["reused"]["embedding"], done["encoded"]["latent"]) == (0, 8, 16)
    path = tmp_path / "manifest.json"
    document = json.loads(path.read_text())
    field = document["fields"]["embedding"]
    assert (document["version"], field["rows"], field["arrays"]) == (
        3, 8, {"embedding": {"dtype": "float16", "dims": ["d"]}})
    assert (field["context"]["output"], field["context"]["compute"], field["context"]["stored"]) == (
        "features", "float32", "float16")
    first = path.read_bytes()
    assert encode("--embed", vision["clip"]).json["reused"]["embedding"] == 8  # unchanged
    assert path.read_bytes() == first
    rows, there = embeddings_of(opened(path))
    assert (rows.shape, rows.dtype, there.all()) == ((8, 24), np.float16, True)
    (sample,) = prep("inspect", path, "--sample", "3.png", "--json").json["samples"]
    assert sample["embedding"]["row"] >= 0 and "embedding" in prep("inspect", path, "--sample", "3.png").out
    assert "embedding" in prep("inspect", path).out
    alone = encode("--embed", vision["clip"], cache="other", output="other.json").json
    assert alone["encoded"]["embedding"] == 8
    other, _ = embeddings_of(opened(tmp_path / "other.json"))
    np.testing.assert_allclose(rows.astype(np.float32), other.astype(np.float32), atol=1e-3)
    with pytest.raises(ConfigError, match="has no embeddings"):
        embeddings_of(opened(encode(output="plain.json") and tmp_path / "plain.json"))
    same = prep("diff", tmp_path / "plain.json", path, "--json").json
    assert (same["same"], same["identical"], same["fields"]["embedding"]["change"]) == (True, False, "added")
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square")
    assert prep("prompts", tmp_path / "prompts.txt", "--manifest", path).code == 0  # which renumbers shards
    np.testing.assert_array_equal(embeddings_of(opened(path))[0], rows)


def test_training_sees_no_embeddings(encode, vision, tmp_path, photos):
    encode(output="plain.json", cache="plain")
    plain = (tmp_path / "plain.json").read_bytes()
    encode("--embed", vision["dinov2"])
    encode(output="again.json")  # in the cache with embeddings
    again = json.loads((tmp_path / "again.json").read_text())
    assert {**again, "cache": "plain", "self": ""} == {**json.loads(plain), "self": ""}
    seen = []
    for name in ("plain.json", "manifest.json"):
        index = open_index(read_manifest(tmp_path / name))
        plan = step_plan(index.counts, seed=0, batch_size=4, micro_batch=2)
        with batches(Rows(index), training(index, plan, 0, 3, timesteps=1000), masked=True, pinned=False) as some:
            seen.append((identify(index, masked=True, prediction="epsilon").digest, [
                (batch.latent_BChw.float().numpy().copy(), batch.noise_BChw.numpy().copy(),
                 *(batch.text[key].float().numpy().copy() for key in sorted(batch.text))) for batch in some]))
    (one, first), (two, second) = seen
    assert one == two and len(first) == len(second) > 0
    assert all(np.array_equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


def damage(audit):
    """Changes a byte of the first row of embeddings."""
    (digest,) = [shard["digest"] for shard in audit.shards if shard["field"] == "embedding"]
    (path,) = [path for path in (audit.cache.shard(digest) / "embedding").iterdir() if path.name != "zarr.json"]
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    return digest


def test_rows_are_kept_verified_and_made_again(prep, encode, vision, photos, tmp_path):
    encode("--embed", vision["siglip"])
    encode(output="plain.json")
    path, plain = tmp_path / "manifest.json", tmp_path / "plain.json"
    before, _ = embeddings_of(opened(path))
    assert prep("verify", path, "--json").json["ok"]
    digest = damage(opened(path))
    found = prep("verify", path, "--json").json
    assert [(one["field"], one["row"], one["shard"]) for one in found["damaged"]] == [("embedding", 0, digest)]
    assert (found["damaged"][0]["samples"][0].endswith(".png"), found["repair"]) == (True, {"embedding": 1})
    with pytest.raises(CacheError, match="do not match their checksum"):
        embeddings_of(opened(path))
    assert encode("--embed", vision["siglip"]).json["encoded"]["embedding"] == 1  # the others were salvaged
    after, there = embeddings_of(opened(path))
    assert there.all()
    np.testing.assert_allclose(before.astype(np.float32), after.astype(np.float32), atol=1e-3)
    assert prep("compact", tmp_path / "cache", "--json").code == 0
    np.testing.assert_array_equal(embeddings_of(opened(path))[0], after)

    def collected(*kept) -> int:
        done = prep("gc", tmp_path / "cache", *(word for one in kept for word in ("--keep", one)), "--older-than", 0,
                    "--yes", "--json")
        assert done.code == 0, done.err
        return len(list((tmp_path / "cache" / "shards").glob("*/*")))

    both = collected(path, plain)
    np.testing.assert_array_equal(embeddings_of(opened(path))[0], after)
    assert collected(plain) < both
    with pytest.raises(CacheError):
        embeddings_of(opened(path))
    assert prep("verify", plain).code == 0


def test_a_picture_without_its_embedding_stays(prep, encode, vision, photos, tmp_path, monkeypatch):
    from prep.models.vision import encoder

    forward = encoder.VisionEncoder._forward
    monkeypatch.setattr(encoder.VisionEncoder, "_forward",
                        lambda self, pixels: [None, *forward(self, pixels)[1:]] if len(pixels) > 1 else
                        forward(self, pixels))
    Image.new("RGB", (96, 96), "red").save(photos / "8.jpg")
    (photos / "8.jpg").write_bytes((photos / "8.jpg").read_bytes()[:-60])
    (photos / "8.txt").write_text("damaged")
    done = encode("--embed", vision["dinov2"])
    assert [finding["path"] for finding in done.json["rejected"]] == ["8.jpg"]
    audit = opened(tmp_path / "manifest.json")
    rows, there = embeddings_of(audit)
    assert (len(rows), there.sum(), audit.manifest.fields["embedding"].rows) == (8, 7, 7)
    assert [finding["code"] for finding in audit.findings if finding["severity"] == "warning"] == ["not-embedded"]
    assert prep("verify", tmp_path / "manifest.json").code == 0
    monkeypatch.undo()
    again = encode("--embed", vision["dinov2"], "--retry-rejects")
    assert again.json["encoded"]["embedding"] == 1
    assert embeddings_of(opened(tmp_path / "manifest.json"))[1].all()


def test_a_recipe_says_it_and_parts_share_it(prep, vision, photos, tiny_model, tmp_path):
    recipe, path = tmp_path / "dataset.toml", tmp_path / "manifest.json"
    shutil.copytree(vision["siglip"], tmp_path / "seeing")
    recipe.write_text(f'[model]\npath = "{tiny_model}"\n[image]\nresolution = [48, 64]\nstep = 8\n'
                      '[embed]\nmodel = "seeing"\n[[source]]\npath = "photos"\n')
    for part in ("0/2", "1/2"):
        assert prep("encode", recipe, "-o", path, "--part", part).code == 0
    sealed = prep("seal", recipe, "-o", path, "--json")
    assert sealed.code == 0, sealed.err
    rows, there = embeddings_of(opened(path))
    assert (len(rows), there.all()) == (16, True)
