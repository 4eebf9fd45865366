"""Prompt files: kohya's options become settings of that prompt, and nothing else with two dashes is ever text."""

from __future__ import annotations

import importlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.errors import ConfigError, PathError
from prep.recipe import prompts
from prep.recipe.prompts import PromptSettings, parse_prompt, parse_prompts, prompts_of, read_prompts


def one(line):
    return parse_prompt(line, "p.txt, line 1")


def test_options_become_settings():
    found = one("a red circle, on a table --n blurry, dark --w 512 --h 768 --d 42 --s 30 --l 7.5")
    assert (found.text, found.negative) == ("a red circle, on a table", "blurry, dark")
    assert found.settings == PromptSettings(width=512, height=768, seed=42, steps=30, guidance=7.5)
    assert one("a cat").settings == PromptSettings() and one("a cat").negative is None
    assert one("a cat --W 64").settings.width == 64  # kohya's trainer ignores case
    assert one("a cat\t--s  9  --n  b  c ") == one("a cat --n b  c --s 9")


def test_lines_are_counted_and_skipped():
    found = list(parse_prompts("# notes\n\na\r\n  # more\rb --n c\n"))
    assert [(each.text, each.negative, each.line) for each in found] == [("a", None, 3), ("b", "c", 5)]
    assert [each.text for each in parse_prompts("a\u2028b\x85c\x0bd")] == ["a\u2028b\x85c\x0bd"]


@pytest.mark.parametrize(("line", "text"), [
    (r"a \--ar 3", "a --ar 3"), (r"\--w 512", "--w 512"), ("a -- b", "a -- b"), ("a --- b", "a --- b"),
    ("well--known", "well--known"), ("a -w 3", "a -w 3"), (r"a\--b", r"a\--b"),
])
def test_dashes_that_are_text(line, text):
    assert one(line).text == text and one(line).settings == PromptSettings()


@pytest.mark.parametrize(("line", "said"), [
    ("a --ar 16:9", "p.txt, line 1: unknown option '--ar', expected --n, --w, --h, --d, --s, --l, --ref or --mask"),
    ("a --w", "p.txt, line 1: --w is '', expected a whole number from 8 to 8192"),
    ("a --w 500", "--w is '500', expected a whole number from 8 to 8192 in multiples of 8"),
    ("a --w 512px", "--w is '512px', expected a whole number from 8 to 8192"),
    ("a --w 7", "--w is '7', expected a whole number from 8 to 8192"),
    ("a --h \u0661\u0662\u0668", "expected a whole number from 8 to 8192"),
    ("a --s 1001", "--s is '1001', expected a whole number from 1 to 1000"),
    ("a --l 0.5", "--l is '0.5', expected a number from 1 to 100"),
    ("a --l nan", "--l is 'nan', expected a number from 1 to 100"),
    ("a --d -1", "--d is '-1', expected a whole number from 0 to 9007199254740991"),
    ("a --s 3 --s 4", "p.txt, line 1: --s is given twice, expected once"),
    ("a --n b --ss euler_a", "unknown option '--ss'"),
    ("--w 512", "p.txt, line 1: there is no prompt before the options"),
])
def test_a_bad_line_is_refused(line, said):
    with pytest.raises(ConfigError) as caught:
        one(line)
    assert said in caught.value.message and caught.value.exit_code == 3


def test_the_hint_says_how_to_write_dashes():
    with pytest.raises(ConfigError) as caught:
        one("a --ar 3")
    assert caught.value.hint == r"write \--ar if it is part of the prompt"


def test_the_line_is_named_and_without_echo_nothing_of_it_is_repeated(tmp_path):
    path = tmp_path / "p.txt"
    for line in ("password --hunter2", "password --w hunter2", "--n hunter2 password"):
        path.write_text(f"fine\n{line}\n")
        with pytest.raises(ConfigError) as caught:
            raise prompts_of(path.read_bytes(), path, "--prompts", echo=False)[1][0]
        told = caught.value.message + caught.value.hint
        assert f"prompt file {path} (--prompts), line 2: " in told and "hunter2" not in told and "password" not in told
    _, (fault,) = prompts_of(b"password --hunter2\n", path, "--prompts", echo=False)
    assert fault.message == (f"prompt file {path} (--prompts), line 1: unknown option, expected --n, --w, --h, --d, "
                             "--s, --l, --ref or --mask")
    assert fault.hint == r"write \--x if it is part of the prompt"


def test_bad_lines_are_told_beside_the_good_ones(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("a\nb --ar 3\n\nc\n--w 512\n")
    found, faults = prompts_of(path.read_bytes(), path, "FILE")
    assert [(one.text, one.line) for one in found] == [("a", 1), ("c", 4)]
    assert [fault.message.partition(": ")[0] for fault in faults] == [
        f"prompt file {path} (FILE), line 2", f"prompt file {path} (FILE), line 5"]
    with pytest.raises(ConfigError) as caught:
        read_prompts(path, "FILE")
    assert caught.value.message == faults[0].message


def test_what_cannot_be_read(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PathError, match=r"cannot read prompt file .*loop"):
        read_prompts(tmp_path / "loop", "--prompts")


def test_the_bounds_are_those_of_the_manifest():
    schema = importlib.import_module("prep.manifest.schema")
    found = {target: (low, high) for target, low, high, _ in prompts._NUMBERS.values()}
    assert found == schema.PROMPT_NUMBERS
    assert prompts.GUIDANCE == schema.PROMPT_GUIDANCE


numbers = st.builds(PromptSettings, width=st.none() | st.integers(8, 8192), height=st.none() | st.integers(8, 8192),
                    seed=st.none() | st.integers(0, prompts.MOST_SEED), steps=st.none() | st.integers(1, 1000),
                    guidance=st.none() | st.integers(10, 1000).map(lambda tenths: tenths / 10))


@given(numbers)
def test_settings_survive_the_manifest(settings):
    assert PromptSettings.of_document(settings.as_document()) == settings


@given(st.text())
def test_any_line_is_a_prompt_or_one_clear_error(text):
    """What remains of a prompt has no option in it that was not escaped."""
    line = re.sub("[\r\n]", " ", text)
    try:
        found = parse_prompt(line, "p")
    except ConfigError:
        return
    assert found.text == found.text.strip() and (found.text or not line.strip())
    if not re.search(r"\\--", line):
        assert not re.search(r"(?:^|\s)--\w", found.text)
