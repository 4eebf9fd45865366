"""Sources with settings of their own, and captions with variants, from the recipe to the manifest's rows."""

from __future__ import annotations

import json
import shutil

import pytest
from pictures import draw

from prep.cache.store import Cache
from prep.manifest.document import read_manifest
from prep.manifest.samples import open_samples
from prep.manifest.tables import SAMPLES, read_table


@pytest.fixture
def folder(tmp_path):
    for number, words in enumerate(["a cat\non a mat", "ohwx, b, c", "{red|blue} dog"]):
        draw(tmp_path / f"photos/{number}.png", (64, 64), seed=number)
        (tmp_path / f"photos/{number}.txt").write_text(words)
    return tmp_path


@pytest.fixture
def sealed(folder, prep, tiny_model):
    """`sealed(toml)`: captions with their weights, by name, as the manifest of that recipe has them."""
    def encode(toml: str, code: int = 0):
        (folder / "r.toml").write_text(f"[image]\nresolution = 64\n[model]\npath = '{tiny_model}'\n{toml}")
        result = prep("encode", folder / "r.toml", "--cache", folder / "cache", "-o", folder / "m.json", "--json")
        assert result.code == code, result.err
        if code:
            return result
        encode.report = json.loads(result.out)
        manifest = read_manifest(folder / "m.json")
        table = read_table(Cache(root=manifest.cache_root), manifest.document["tables"]["samples"], SAMPLES)
        samples = open_samples(table)
        weights = [float(one) for one in samples.texts["weight"]]
        ends = samples.text_offsets
        several = len(set(samples.source.tolist())) > 1
        return {f"{samples.source[at]}/{samples.name(at)}" if several else samples.name(at):
                dict(zip(samples.captions(at), weights[ends[at]:ends[at + 1]], strict=True))
                for at in range(len(samples))}

    return encode


def test_lines_tags_and_wildcards_become_rows(sealed):
    assert sealed("[[source]]\npath = 'photos'") == {
        "0.png": {"a cat": 0.5, "on a mat": 0.5}, "1.png": {"ohwx, b, c": 1.0}, "2.png": {"{red|blue} dog": 1.0}}
    chance = "[caption]\nwildcards = true\nshuffle = true\nkeep_tokens = 1\nvariants = 16\n"
    found = sealed(f"{chance}[[source]]\npath = 'photos'")
    assert set(found["1.png"]) == {"ohwx, b, c", "ohwx, c, b"} and sum(found["1.png"].values()) == 1.0
    assert set(found["2.png"]) == {"red dog", "blue dog"}
    assert sealed.report["encoded"] == {"latent": 0, "mask": 0, "text": 3}, "only the captions that are new"
    again = sealed(f"{chance}[[source]]\npath = 'photos'")
    assert again == found and not any(sealed.report["encoded"].values())


def test_lines_joined_or_the_first(sealed):
    assert sealed("[caption]\nlines = 'join'\n[[source]]\npath = 'photos'")["0.png"] == {"a cat on a mat": 1.0}
    assert sealed("[caption]\nlines = 'first'\n[[source]]\npath = 'photos'")["0.png"] == {"a cat": 1.0}


def test_a_source_has_captions_and_globs_of_its_own(sealed, folder):
    shutil.copytree(folder / "photos", folder / "more")
    (folder / "more/1.txt").unlink()
    found = sealed("""
        [caption]
        prefix = "photo of"
        [[source]]
        path = "photos"
        include = ["1.*"]
        [[source]]
        path = "more"
        exclude = ["2.png"]
        caption = {missing = "constant", constant = "x", lines = "first", suffix = "too"}
    """)
    assert found == {"0/1.png": {"photo of ohwx, b, c": 1.0}, "1/0.png": {"photo of a cat too": 1.0},
                     "1/1.png": {"photo of x too": 1.0}}


def test_a_missing_caption_stops_only_where_it_should(sealed, folder):
    shutil.copytree(folder / "photos", folder / "more")
    (folder / "more/1.txt").unlink()
    source = "[[source]]\npath = 'photos'\n[[source]]\npath = 'more'\n"
    result = sealed(source, code=3)
    assert "pictures without a caption (1): more/1.png" in result.err
    sealed(source + "caption = {missing = 'reject'}")
    assert [one["path"] for one in sealed.report["rejected"]] == ["more/1.png"]


def test_masks_by_source(sealed, folder):
    shutil.copytree(folder / "photos", folder / "more")
    for place in ("photos", "more"):
        draw(folder / place / "0-masklabel.png", (64, 64), seed=9)
    sealed("[[source]]\npath = 'photos'\nmask = 'sidecar'\n[[source]]\npath = 'more'\nmask = 'none'")
    assert sealed.report["encoded"]["mask"] == 1
    table = read_manifest(folder / "m.json").document["tables"]["samples"]
    samples = open_samples(read_table(Cache(root=folder / "cache"), table, SAMPLES))
    masked = {(int(samples.source[at]), samples.name(at)) for at in range(len(samples))
              if samples.views["mask_shard"][samples.view_offsets[at]] >= 0}
    assert masked == {(0, "0.png")}


def test_beside_transparency_no_files_are_looked_for(sealed, folder):
    shutil.copytree(folder / "photos", folder / "more")
    draw(folder / "photos/3.png", (64, 64), seed=3, alpha=True)
    (folder / "photos/3.txt").write_text("a cat")
    draw(folder / "more/0-masklabel.png", (64, 64), seed=9)
    sealed("[[source]]\npath = 'photos'\nmask = 'alpha'\n[[source]]\npath = 'more'")
    assert sealed.report["encoded"]["mask"] == 1 and sealed.report["masks"] == {"found": 1, "used": 1}


@pytest.mark.parametrize(
    ("toml", "says"),
    [("[[source]]\npath = 'photos'\nmask = 'alpha'\n[[source]]\npath = 'photos'\nmask = 'sidecar'",
      "some sources take masks from alpha and others from files, expected one kind per recipe"),
     ("[[source]]\npath = 'photos'\ninclude = ['../x']",
      "source[0].include has '../x', expected a glob of names below the source, like 'cats/**'"),
     ("[[source]]\npath = 'photos'\ncaption = {shufle = true}", "did you mean 'shuffle'"),
     ("[[source]]\npath = 'photos'\ncaption = {dropout = 2}", "source[0].caption.dropout is 2"),
     ("[caption]\nseparator = ''\n[[source]]\npath = 'photos'",
      "caption.separator is empty, expected what stands between tags, like ','"),
     ("[caption]\nlines = 'some'\n[[source]]\npath = 'photos'", "caption.lines is 'some'"),
     ("[[source]]\npath = 'photos'\nmask = 'nowhere'",
      "nowhere', expected auto, none, sidecar, alpha or an existing directory")],
)  # fmt: skip
def test_settings_that_cannot_be(sealed, toml, says):
    assert says in sealed(toml, code=3).err
