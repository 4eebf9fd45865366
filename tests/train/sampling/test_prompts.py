"""Sample prompts that are edited, emptied or deleted while training: a warning, never an end."""

from __future__ import annotations

import os

import numpy as np
import pytest

from prep.loader.index import open_index
from prep.loader.rows import Rows
from train.sampling.prompts import cached, current


@pytest.fixture
def opened(make, monkeypatch):
    """What was made, and its index; the working directory is the manifest's."""
    made = make()
    monkeypatch.chdir(made.root)
    return made, open_index(made.manifest)


def words(prompts):
    return [prompt.prompt for prompt in prompts]


def test_an_unchanged_file_gives_the_manifest_s_rows(opened):
    made, index = opened
    found = current(index)
    assert found.prompts == cached(index) and found.warnings == ()
    assert words(found.prompts) == ["a red circle", "a blue square"]
    text = Rows(index).text([found.prompts[1].positive, found.prompts[1].negative]).float().numpy()
    values = list(made.texts.values())
    assert all(any(np.array_equal(row, value) for value in values) for row in text)
    assert found.prompts[0].negative != found.prompts[1].negative


def test_an_edited_file_finds_rows_that_the_cache_has(opened):
    made, index = opened
    caption = made.samples[0].texts[0].caption
    (made.root / "prompts.txt").write_text(f"{caption}\na red circle --n blurry\n")
    found = current(index)
    assert words(found.prompts) == [caption, "a red circle"] and found.warnings == ()
    assert found.prompts[1].negative == cached(index)[1].negative


def test_a_new_prompt_is_left_out_with_the_command_that_makes_it(opened):
    made, index = opened
    (made.root / "prompts.txt").write_text("a red circle\na green dragon\na blue square --n unheard of\n")
    found = current(index)
    assert words(found.prompts) == ["a red circle"]
    one, other = found.warnings
    assert one.startswith(f"prompt 'a green dragon' of {made.root / 'prompts.txt'} has no text row yet, so it is left "
                          "out; prep encode photos --model ")
    assert "--prompts " in one and "'a blue square --n unheard of'" in other


def test_only_new_prompts_leave_the_manifest_s(opened):
    made, index = opened
    (made.root / "prompts.txt").write_text("a green dragon\n")
    found = current(index)
    assert found.prompts == cached(index) and len(found.warnings) == 1


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n\n", b"\xff\xfe\xff"],
                         ids=["gone", "empty", "notes", "noise"])
def test_a_file_that_says_nothing_leaves_the_manifest_s(opened, content):
    made, index = opened
    path = made.root / "prompts.txt"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    found = current(index)
    assert found.prompts == cached(index)
    (warning,) = found.warnings
    assert "prompts.txt" in warning and "of the manifest are used" in warning.replace("those of", "of")


def test_a_manifest_without_prompt_file_has_its_own(make):
    index = open_index(make(prompts=None).manifest)
    assert current(index).prompts == () and current(index).warnings == ()


def test_a_file_elsewhere_that_a_manifest_names_is_not_repeated(make, monkeypatch):
    """A stranger's manifest may name any file; what is in it goes into no log."""
    made = make(change=lambda document: document["prompts"].update(file="../secret"))
    (made.root.parent / "secret").write_text("a red circle\nmy password\n")
    found = current(open_index(made.manifest))
    (warning,) = found.warnings
    assert words(found.prompts) == ["a red circle"] and "password" not in warning
    assert "1 of 2 prompts of " in warning and "have no text row yet, so they are left out; prep encode" in warning


def test_very_many_new_prompts_are_counted(opened):
    made, index = opened
    (made.root / "prompts.txt").write_text("\n".join(f"dragon {number}" for number in range(30)))
    assert len(current(index).warnings) == 21 and current(index).warnings[-1].startswith("and 10 more prompts of ")


@pytest.mark.parametrize("kind", ["pipe", "large", "directory"])
def test_something_else_than_a_prompt_file_is_not_waited_for(opened, kind):
    made, index = opened
    path = made.root / "prompts.txt"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.mkdir()
    found = current(index)
    assert found.prompts == cached(index) and "cannot read prompt file" in found.warnings[0]
