"""Sample prompts that are edited, emptied or deleted while training: a warning, never an end."""

from __future__ import annotations

import os

import numpy as np
import pytest

from prep.loader.index import open_index
from prep.loader.rows import Rows
from prep.recipe.prompts import PromptSettings
from train.sampling.prompts import bad_lines, cached, current


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
    text = Rows(index).text([found.prompts[1].positive, found.prompts[1].negative])["hidden"].float().numpy()
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
    assert one.startswith(f"the prompt in line 2 of {made.root / 'prompts.txt'} has no text row yet and is skipped; "
                          "to encode it, run prep prompts ")
    assert "prompts.txt --manifest " in one and "in line 3 of " in other


def test_only_new_prompts_leave_the_manifest_s(opened):
    made, index = opened
    (made.root / "prompts.txt").write_text("a green dragon\n")
    found = current(index)
    assert found.prompts == cached(index) and len(found.warnings) == 1


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n\n", b"\xff\xfe\xff", b"a cat --ar 3:2\n"],
                         ids=["gone", "empty", "notes", "noise", "option"])
def test_a_file_that_says_nothing_leaves_the_manifest_s(opened, content):
    made, index = opened
    path = made.root / "prompts.txt"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    found = current(index)
    assert found.prompts == cached(index)
    assert len(found.warnings) == (2 if content == b"a cat --ar 3:2\n" else 1)
    warning = found.warnings[-1]
    assert "prompts.txt" in warning and warning.endswith("; using the manifest's prompts")
    assert "3:2" not in found.warnings[0]


def test_a_bad_line_costs_no_other(opened):
    made, index = opened
    path = made.root / "prompts.txt"
    path.write_text("a red circle --ar 3:2\na blue square\n\n--w 512\na red circle --w 65\n")
    found = current(index)
    assert words(found.prompts) == ["a blue square"]
    role = f"prompt file {path} (prompts.file in {made.path})"
    assert found.warnings == (
        f"{role}, line 1: unknown option, expected --n, --w, --h, --d, --s, --l, --ref or --mask; the line is skipped",
        f"{role}, line 4: there is no prompt before the options; the line is skipped",
        f"{role}, line 5: --w has an invalid value, expected a whole number from 8 to 8192 in multiples of 8; the line "
        "is skipped")
    assert [f"{fault.message}; the line is skipped" for fault in bad_lines(index)] == list(found.warnings)
    path.write_text("--w 512\n" * 30)
    assert len(current(index).warnings) == 22 and current(index).warnings[-2] == f"10 more lines of {path} are skipped"
    path.unlink()
    assert bad_lines(index) == []


def test_without_a_prompt_file_validation_captions_are_shown(make):
    made = make(prompts=None, validation=6)
    index = open_index(made.manifest)
    found = current(index)
    held_out = {sample.texts[0].caption: sample for sample in made.samples if sample.role == "validation"}
    assert len(found.prompts) == 4 and set(words(found.prompts)) < set(held_out) and found.warnings == ()
    rows = Rows(index)
    for prompt in found.prompts:
        key = held_out[prompt.prompt].texts[0].key
        assert np.array_equal(rows.text([prompt.positive])["hidden"].float().numpy()[0], made.texts[key])
        assert prompt.negative == index.ref(**made.manifest.document["prompts"]["unconditional"])


def test_without_validation_samples_training_captions_are_shown(make):
    made = make(prompts=None, validation=0, counts=(2, 1))
    found = current(open_index(made.manifest))
    assert sorted(words(found.prompts)) == sorted(sample.texts[0].caption for sample in made.samples)


def test_options_of_a_line_come_from_the_manifest_and_from_an_edited_file(make):
    made = make(prompts="a red circle --w 128 --d 7 --l 2.5\n")
    index = open_index(made.manifest)
    wanted = PromptSettings(width=128, seed=7, guidance=2.5)
    assert made.manifest.document["prompts"]["samples"][0]["settings"] == {"width": 128, "seed": 7, "guidance": "2.5"}
    assert [prompt.settings for prompt in current(index).prompts] == [wanted]
    (made.root / "prompts.txt").write_text("a red circle --s 3\n")
    assert [prompt.settings for prompt in current(index).prompts] == [PromptSettings(steps=3)]


def test_a_file_elsewhere_that_a_manifest_names_is_not_repeated(make, monkeypatch):
    """A stranger's manifest may name any file; what is in it goes into no log."""
    made = make(change=lambda document: document["prompts"].update(file="../secret"))
    (made.root.parent / "secret").write_text("a red circle\nmy password\n")
    found = current(open_index(made.manifest))
    (warning,) = found.warnings
    assert words(found.prompts) == ["a red circle"] and "password" not in warning
    assert "the prompt in line 2 of " in warning


@pytest.mark.parametrize("through", ["file", "directory"])
def test_a_link_out_of_the_manifest_s_directory_is_not_followed(make, tmp_path_factory, through):
    """A stranger's bundle: manifest, cache, and a prompt file that is a link to a file of ours."""
    secret = tmp_path_factory.mktemp("private") / "prompts.txt"
    secret.write_text("a red circle\npassword --hunter2\n")
    named = "prompts.txt" if through == "file" else "more/prompts.txt"
    made = make(change=lambda document: document["prompts"].update(file=named))
    if through == "file":
        (made.root / "prompts.txt").unlink()
        (made.root / "prompts.txt").symlink_to(secret)
    else:
        (made.root / "more").symlink_to(secret.parent)
    index = open_index(made.manifest)
    found = current(index)
    assert found.prompts == cached(index)
    assert found.warnings == (f"prompt file {made.root / named} is a link out of the manifest's directory, so it is "
                              "not read; using the manifest's prompts",)


def test_a_link_within_the_manifest_s_directory_is_followed(opened):
    made, index = opened
    (made.root / "prompts.txt").rename(made.root / "real.txt")
    (made.root / "prompts.txt").symlink_to("real.txt")
    assert current(index).warnings == () and current(index).prompts == cached(index)


def test_very_many_new_prompts_are_counted(opened):
    made, index = opened
    (made.root / "prompts.txt").write_text("\n".join(f"dragon {number}" for number in range(30)))
    assert len(current(index).warnings) == 21 and current(index).warnings[-1].startswith("10 more prompts of ")


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
