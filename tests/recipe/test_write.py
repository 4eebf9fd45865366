"""The text of a recipe: whatever a recipe says, its file says, and nothing in a name is taken for anything else."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prep.captions.options import CAPTION_LINES, MISSING_CAPTION, CaptionOptions
from prep.errors import PathError
from prep.findings import CODES, ScanOptions
from prep.parse import Unparsed
from prep.recipe.load import load_recipe
from prep.recipe.schema import ImageOptions, ModelOptions, Recipe, Source
from prep.recipe.write import Comment, quoted, relative_to, render_recipe
from prep.sources.globs import chosen_by


def is_glob(text: str) -> bool:
    try:
        chosen_by([text], [])
    except Unparsed:
        return False
    return True


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAME = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=12).filter(
    lambda text: text not in (".", ".."))
PLACE = st.lists(st.one_of(NAME, st.just("..")), min_size=1, max_size=3).map("/".join)
GLOBS = st.lists(NAME.filter(lambda text: text != ".." and is_glob(text)), max_size=2).map(tuple)
CAPTION = st.builds(
    CaptionOptions, missing=st.sampled_from(MISSING_CAPTION), constant=TEXT, lines=st.sampled_from(CAPTION_LINES),
    variants=st.integers(1, 1024), wildcards=st.booleans(), shuffle=st.booleans(), dropout=st.floats(0, 1),
    separator=TEXT.filter(bool), keep_tokens=st.integers(0, 9), keep_separator=TEXT, trigger=TEXT, prefix=TEXT,
    suffix=TEXT)
IMAGE = st.sampled_from([("step", ()), ("ratio", ()), ("single", ()), ("list", ("1024x1024", "512x768"))]).flatmap(
    lambda kind: st.builds(
        ImageOptions, resolution=st.integers(128, 16384), buckets=st.just(kind[0]), sizes=st.just(kind[1]),
        step=st.sampled_from([8, 64, 128]), shortest=st.integers(0, 99), longest=st.integers(0, 99),
        min_side=st.integers(0, 99), upscale=st.sampled_from(["never", "allow", "reject", 1.5]),
        crop=st.just("random"), views=st.integers(1, 64),
        flip=st.sampled_from(["none", "both", "always"]), alpha=st.sampled_from(["white", "keep", "reject", "#0a1B2c"]),
        min_bucket=st.integers(1, 9)))
MODEL = st.builds(ModelOptions, path=TEXT, family=st.sampled_from(["", "sd15"]),
                  dtype=st.sampled_from(["bfloat16", "float32"]), compute=st.sampled_from(["", "float16"]))


SCAN = st.builds(
    ScanOptions, ignore=st.lists(st.sampled_from(sorted(CODES)), max_size=2).map(tuple),
    severity=st.dictionaries(st.sampled_from(sorted(CODES)), st.sampled_from(["error", "warning", "info"]),
                             max_size=2).map(lambda found: tuple(found.items())))


def sources(base: Path, masks: st.SearchStrategy):
    place = PLACE.map(lambda text: base / text)
    return st.builds(
        Source, path=st.one_of(place, st.just(base), st.just(Path("/elsewhere/photos"))),
        repeats=st.integers(1, 10000), role=st.sampled_from(["train", "validation", "prior"]),
        weight=st.floats(0, 1000), include=GLOBS, exclude=GLOBS, table=st.one_of(st.none(), place),
        mask=st.one_of(st.none(), masks), missing_mask=st.sampled_from(["", "none", "draw"]),
        caption=st.one_of(st.none(), CAPTION))


def recipes(base: Path):
    kinds = st.sampled_from([["none", "alpha"], ["auto", "none", "sidecar", base / "masks", base / "alpha"]])
    return kinds.flatmap(lambda kind: st.builds(
        Recipe, sources=st.lists(sources(base, st.sampled_from(kind)), min_size=1, max_size=3).map(tuple), model=MODEL,
        image=IMAGE, caption=CAPTION, scan=SCAN, mask=st.sampled_from(kind),
        mask_resize=st.sampled_from(["allow", "reject"]), missing_mask=st.sampled_from(["none", "draw"]),
        validation=st.floats(0, 0.9),
        prompts=st.one_of(st.none(), PLACE.map(lambda text: base / text))))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base").resolve()
    for name in ("masks", "alpha"):
        (path / name).mkdir()
    return path


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_a_recipe_says_its_file_says(base, data):
    recipe = data.draw(recipes(base))
    remarks = [Comment(at=at, text=data.draw(TEXT))
               for at in ("", "image", "image.step", "caption.prefix", "source[0]")]
    shown = data.draw(st.sets(st.sampled_from(["image.step", "caption.missing", "validation.fraction", "mask.from",
                                                "mask.missing"])))
    (base / "r.toml").write_text(render_recipe(recipe, base=base, remarks=remarks, shown=shown), newline="\n")
    try:
        found = load_recipe(base / "r.toml", choices={})
    except Exception as error:  # what a recipe cannot say, its file cannot either
        pytest.fail(f"{error}\n{(base / 'r.toml').read_text()}")
    assert replace(found, file=None) == recipe


@settings(deadline=None)
@given(TEXT)
def test_any_text_is_a_string_on_one_printable_line(text):
    spelled = quoted(text)
    assert spelled.isprintable() and tomllib.loads(f"a = {spelled}") == {"a": text}


def test_a_name_that_is_no_text_cannot_be_said():
    with pytest.raises(PathError, match="the byte ff, which is not UTF-8, so a recipe cannot contain it"):
        quoted(os.fsdecode(b"a\xff.png"))


def test_a_remark_stays_a_comment_whatever_is_in_it(base):
    recipe = Recipe(sources=(Source(path=base / "photos"),))
    text = render_recipe(recipe, base=base,
                         remarks=[Comment(at="source[0]", text="a\nb\rpath = 'x'\x1b[2J\u2028c " * 20)])
    assert tomllib.loads(text) == {"source": [{"path": "photos"}]}
    assert all(line.isprintable() and len(line) <= 120 for line in text.splitlines())


def test_paths_are_relative_to_the_recipe_and_follow_no_links_of_its_own(tmp_path):
    (tmp_path / "real/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep")
    (tmp_path / "photos").mkdir()
    written = relative_to(tmp_path / "photos", tmp_path / "link")
    assert not Path(written).is_absolute() and (tmp_path / "link" / written).resolve() == tmp_path / "photos"
    assert relative_to(Path("photos"), Path()) == "photos" and relative_to(Path("/a"), Path("/b")) == "/a"
