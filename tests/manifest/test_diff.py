"""`prep diff`: each kind of change is named once, in words; whatever training would not see is none."""

from __future__ import annotations

import shutil

import pytest
import small_manifest
from pictures import draw, draw_mask, saved
from PIL import Image

from prep.manifest.diff import compare
from prep.manifest.document import read_manifest, write_manifest
from prep.report.terminal.diff import changes_text

SMALL = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--device", "cpu", "--json")


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    def go(name, *options, source=photos, model=tiny_model):
        result = prep("encode", source, "--model", model, "--cache", tmp_path / "cache", "-o", tmp_path / name,
                      *SMALL, *options)
        assert result.code == 0, result.err

    return go


@pytest.fixture
def diff(prep, tmp_path):
    """`diff()`: the document from a.json to b.json, and what people read."""

    def go(*options):
        names = tmp_path / "a.json", tmp_path / "b.json"
        document = prep("diff", *names, "--json")
        assert document.code == 0, document.err
        text = prep("diff", *names, "--exit-code")
        assert text.code == {True: 0, False: 1, None: 7}[document.json["same"]]
        return document.json, text.out.splitlines()

    return go


def changes(document):
    return {one["name"]: one["why"] for one in document["samples"]["changed"]}


def test_nothing(encode, diff, tmp_path):
    encode("a.json", "--mask", "sidecar")
    encode("b.json", "--mask", "sidecar")
    document, lines = diff()
    assert (document["format"], document["version"]) == ("latentry/diff", 1)
    assert document["same"] and document["identical"] and not document["notes"]
    assert lines[1] == "the manifests are identical"
    write_manifest(tmp_path / "b.json", {**read_manifest(tmp_path / "b.json").document, "options": ["--jobs"]})
    document, lines = diff()
    assert document["same"] and not document["identical"]
    assert lines[1] == "no difference that training would see"


def test_the_same_rows_in_other_shards(prep, encode, diff, tmp_path, monkeypatch):
    monkeypatch.setattr("prep.encode.plan.TASK_ROWS", 1)
    encode("a.json")
    assert prep("compact", tmp_path / "cache").code == 0
    encode("b.json")
    document, lines = diff()
    assert document["same"] and "text: the same rows in 1 shard, previously in 7" in lines


def test_each_sample_that_changed_is_named_with_the_reason(encode, diff, photos):
    encode("a.json", "--mask", "sidecar")
    (photos / "0.txt").write_text("quite another caption")
    draw(photos / "1.png", (100, 96), seed=77)
    draw(photos / "3.png", (96, 144), seed=3)
    (photos / "0-masklabel.png").unlink()
    draw_mask(photos / "1-masklabel.png", (100, 96))
    (photos / "4.png").rename(photos / "renamed.png")
    (photos / "4.txt").rename(photos / "renamed.txt")
    (photos / "6.png").unlink()
    (photos / "6.txt").unlink()
    draw(photos / "new.png", (96, 96), seed=40).with_suffix(".txt").write_text("new")
    Image.new("L", (144, 64), 200).save(photos / "2-masklabel.png")
    encode("b.json", "--mask", "sidecar")
    document, lines = diff()
    samples = document["samples"]
    assert (samples["added"], samples["removed"]) == (["new.png"], ["6.png"])
    assert samples["renamed"] == [{"from": "4.png", "to": "renamed.png", "why": []}]
    assert changes(document) == {"0.png": ["mask removed", "caption"], "1.png": ["picture", "mask added"],
                                 "2.png": ["mask"], "3.png": ["picture", "size", "bucket"]}
    assert samples["a"] == samples["b"] == 8
    assert "samples added (1): new.png" in lines and "samples removed (1): 6.png" in lines
    assert "samples renamed (1): 4.png to renamed.png" in lines
    assert "samples changed: mask removed, different caption (1): 0.png" in lines
    assert "samples changed: different mask (1): 2.png" in lines
    fields = document["fields"]
    assert fields["latent"]["rows"] == {"a": 8, "b": 8, "shared": 5, "added": 3, "removed": 3}
    assert not any(field["context"] or field["arrays"] or field["change"] for field in fields.values())
    assert {tuple(one["size"]) for one in document["buckets"]}
    assert not document["same"] and not document["notes"]


def test_another_vae_and_how_rows_are_made(prep, encode, diff, tiny_model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    from safetensors.torch import load_file, save_file

    path = next((other / "vae").glob("*.safetensors"))
    tensors = load_file(path)
    save_file({name: tensor + 0.001 for name, tensor in tensors.items()}, path)
    encode("a.json")
    encode("b.json", "--compute", "float32", "--dtype", "float16", model=other)
    document, lines = diff()
    entries = {one["entry"]: one["words"] for one in document["fields"]["latent"]["context"]}
    assert entries == {"stored": "all latents change: stored as float16, was float32",
                       "vae": "all latents change: the VAE differs"}
    assert "latent: all latents change: the VAE differs" in lines
    assert "text: all text rows change: stored as float16, was float32" in lines
    assert "latent: array 'latent' is float16 [c h w], was float32 [c h w]" in lines
    assert "latent: 0 rows shared, 8 added, 8 no longer used" in lines
    assert [one["what"] for one in document["model"]] == ["vae", "model"]
    assert any(line.startswith("vae: ") and ", was " in line and len(line) < 50 for line in lines)
    assert not changes(document)  # it is said once, of the field


def test_masks_switched_on(encode, diff):
    encode("a.json", "--mask", "none")
    encode("b.json", "--mask", "sidecar")
    document, lines = diff()
    assert document["fields"]["mask"]["change"] == "added"
    assert document["fields"]["mask"]["rows"] == {"a": 0, "b": 3, "shared": 0, "added": 3, "removed": 0}
    assert changes(document) == {name: ["mask added"] for name in ("0.png", "2.png", "5.png")}
    assert "mask: the field was added" in lines and "samples changed: mask added (3): 0.png, 2.png, 5.png" in lines


def test_masks_of_another_origin_are_all_others(encode, diff):
    encode("a.json", "--mask", "sidecar")
    encode("b.json", "--mask", "alpha")
    document, _ = diff()
    (entry,) = document["fields"]["mask"]["context"]
    assert entry["words"].startswith("all masks change: made from alpha, was file")
    assert changes(document) == {"0.png": ["mask removed"], "2.png": ["mask removed"]}


def recipe_of(tmp_path, photos, extra, sources=None):
    path = tmp_path / "dataset.toml"
    listed = sources or [f'path = "{photos.name}"\n{extra}']
    path.write_text("".join(f"[[source]]\n{one}\n" for one in listed))
    return path


def test_repeats_weight_and_roles(encode, diff, photos, tmp_path):
    encode("a.json", source=recipe_of(tmp_path, photos, "repeats = 1"))
    encode("b.json", source=recipe_of(tmp_path, photos, "repeats = 3\nweight = 0.5"))
    document, lines = diff()
    assert set(map(tuple, changes(document).values())) == {("repeats", "weight")}
    assert ("samples changed: different repeats, different weight (8): "
            "0.png, 1.png, 2.png, 3.png, 4.png, 5.png, 6.png, 7.png") in lines
    encode("b.json", "--validation", "0.4", source=recipe_of(tmp_path, photos, ""))
    document, lines = diff()
    assert changes(document) and set(map(tuple, changes(document).values())) == {("role",)}
    assert any(line.startswith("train samples: ") and line.endswith(", were 8") for line in lines)
    assert any(line.startswith("bucket ") and "validation" in line for line in lines)


def test_sources_are_the_same_where_they_lie_at_one_place(encode, diff, photos, tmp_path):
    more = tmp_path / "more"
    shutil.copytree(photos, more)
    for number in range(4):
        draw(more / f"{number}.png", (96, 96), seed=90 + number)
    first, second = f'path = "{photos.name}"\nmask = "none"', 'path = "more"\nmask = "none"'
    encode("a.json", source=recipe_of(tmp_path, photos, "", [first, second]))
    encode("b.json", source=recipe_of(tmp_path, photos, "", [second, first]))
    document, _ = diff()
    assert not document["samples"]["added"] and not changes(document)
    shutil.move(photos / "0.png", tmp_path / "0.png")
    (photos / "0.txt").unlink()
    shutil.move(more / "1.png", tmp_path / "1.png")
    (more / "1.txt").unlink()
    shutil.move(tmp_path / "0.png", more / "solo.png")
    (more / "solo.txt").write_text("picture number 0")
    encode("b.json", source=recipe_of(tmp_path, photos, "", [first, second]))
    document, _ = diff()
    assert document["samples"]["removed"] == ["1.png"]
    assert document["samples"]["renamed"] == [{"from": "0.png", "to": "solo.png", "why": []}]
    shutil.move(photos / "7.png", tmp_path / "7.png")
    (more / "7.png").unlink()
    (more / "7.txt").unlink()
    encode("a.json", source=recipe_of(tmp_path, photos, "", [first, second]))
    shutil.move(tmp_path / "7.png", photos / "7.png")
    encode("a.json", source=recipe_of(tmp_path, photos, "", [first, second]))
    shutil.move(photos / "7.png", more / "7.png")
    shutil.move(photos / "7.txt", more / "7.txt")
    encode("b.json", source=recipe_of(tmp_path, photos, "", [first, second]))
    assert changes(diff()[0]) == {"7.png": ["source"]}


def test_prompts_and_findings(encode, diff, photos, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\na blue square --n blurry\n")
    (photos / "bad.png").write_bytes(b"no picture")
    (photos / "bad.txt").write_text("bad")
    encode("a.json", "--prompts", prompts)
    prompts.write_text("a red circle\na blue square --n foggy\n")
    (photos / "bad.png").unlink()
    (photos / "bad.txt").unlink()
    encode("b.json", "--prompts", prompts)
    document, lines = diff()
    assert document["prompts"] == {"added": [{"prompt": "a blue square", "negative": "foggy"}],
                                   "removed": [{"prompt": "a blue square", "negative": "blurry"}]}
    assert "sample prompts added (1): a blue square --n foggy" in lines
    (gone,) = document["findings"]["removed"]
    assert gone["path"] == "bad.png" and f"finding gone: error {gone['code']}: bad.png" in lines


def test_without_a_cache_documents_are_compared(encode, diff, photos, tmp_path):
    encode("a.json", "--mask", "sidecar")
    (photos / "7.png").unlink()
    (photos / "7.txt").unlink()
    encode("b.json")
    shutil.move(tmp_path / "cache", tmp_path / "gone")
    document, lines = diff()
    assert document["samples"] is None and document["findings"] is None
    assert len(document["notes"]) == 2 and all("cache, does not exist" in note for note in document["notes"])
    assert lines[1].startswith("not compared: ") and "cache, does not exist" in lines[1]
    assert document["fields"]["latent"]["rows"] == {"a": 8, "b": 7, "shared": None, "added": None, "removed": None}
    assert "latent: 7 rows, were 8" in lines and "train samples: 7, were 8" in lines
    encode("a.json")
    encode("b.json")
    shutil.rmtree(tmp_path / "cache")
    document, lines = diff()
    assert document["same"]
    assert document["identical"]


def test_what_could_not_be_compared_is_not_called_the_same(encode, diff, photos, tmp_path):
    """Another caption leaves all counts as they were; where its row lies says nothing of the rows."""
    (photos / "0.txt").write_text("a caption of its own")
    encode("a.json")
    (photos / "0.txt").write_text("another caption")
    encode("b.json")
    for path in (tmp_path / "cache").glob("tables/*/*.arrow"):
        path.unlink()
    document, lines = diff()
    assert document["same"] is None and document["fields"]["text"]["shards"] == {"a": 1, "b": 2}
    assert lines[-1] == "no difference that training would see in what could be compared"
    assert len(lines) == len(set(lines))


def test_damaged_keys_are_a_note(encode, diff, photos, tmp_path):
    encode("a.json")
    (photos / "0.txt").write_text("another caption")
    encode("b.json")
    path = next((tmp_path / "cache").glob("shards/*/*/key/c*"))
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    document, _ = diff()
    assert any("'key'" in note for note in document["notes"])
    assert document["fields"]["text"]["rows"]["shared"] is None and changes(document) == {"0.png": ["caption"]}


def test_long_lists_are_cut_on_a_terminal_and_nowhere_else(encode, diff, photos):
    encode("a.json")
    for number in range(12):
        draw(photos / f"z{number:02}.png", (96, 96), seed=200 + number).with_suffix(".txt").write_text("z")
    encode("b.json")
    document, lines = diff()
    assert len(document["samples"]["added"]) == 12
    assert next(line for line in lines if line.startswith("samples added (12): z00.png")).endswith("z11.png")
    terminal = changes_text(document, width=80).splitlines()
    assert next(line for line in terminal if line.startswith("samples added (12): z00.png")).endswith(" and 2 more")


def test_what_is_no_manifest(prep, encode, tmp_path):
    encode("a.json")
    assert prep("diff", tmp_path / "a.json", tmp_path / "none.json").code == 4
    assert prep("diff", tmp_path / "a.json").code == 2


CONTROLS = {f"{name}.png": saved(Image.new("RGB", (60, 40), name)) for name in ("teal", "navy")}


@pytest.mark.parametrize(("after", "why", "words"), [
    (CONTROLS, [], "the manifests are identical"),
    (dict(reversed(CONTROLS.items())), ["references"], "samples changed: different references (1): a.png"),
    ({**CONTROLS, "navy.png": saved(Image.new("RGB", (60, 40), "red"))}, ["references"],
     "samples changed: different references (1): a.png"),
    ({"teal.png": CONTROLS["teal.png"]}, ["references"],
     "bucket 64x64+48x32+48x32: none, was 1 train"),
    ({}, ["references"], "bucket 64x64: 2 train, was 1 train"),
    ((32, 32), ["reference placement"],
     "samples changed: references cropped or scaled differently (1): a.png"),
    ((48, 40), ["reference placement"], "bucket 64x64+48x40+48x40: 1 train, new")],
    ids=["same", "order", "picture", "fewer", "none", "crop", "size"])
def test_references(tmp_path, monkeypatch, after, why, words):
    first = small_manifest.write_small(tmp_path / "a", references=CONTROLS)
    if isinstance(after, tuple):
        monkeypatch.setattr(small_manifest, "REFERENCE", after)
    second = small_manifest.write_small(tmp_path / "b", references=CONTROLS if isinstance(after, tuple) else after)
    document = compare(read_manifest(first), read_manifest(second))
    assert changes(document) == ({"a.png": why} if why else {}) and words in changes_text(document).splitlines()
    assert document["same"] == (not why)
    back = compare(read_manifest(second), read_manifest(first))
    assert changes(back) == changes(document) and len(back["buckets"]) == len(document["buckets"])
