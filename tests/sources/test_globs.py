"""Globs of names, as in a .gitignore."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.parse import Unparsed
from prep.sources.globs import chosen_by


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [("*.png", ["a.png", "cats/a.png"], ["a.jpg", "a.pngx", "png"]),
     ("cats", ["cats/a.png", "x/cats/y/a.png"], ["cats2/a.png", "a/cats.png"]),
     ("cats/", ["cats/a.png"], ["x/scats/a.png"]),
     ("cats/*.png", ["cats/a.png"], ["x/cats/a.png", "cats/b/a.png"]),
     ("/a.png", ["a.png"], ["b/a.png"]),
     ("**/raw/*", ["raw/a.png", "x/y/raw/a.png"], ["a.png"]),
     ("a/**/b.png", ["a/b.png", "a/x/y/b.png"], ["b.png", "a/bb.png"]),
     ("a/**", ["a/b", "a/b/c"], ["ab"]),
     ("img_?.png", ["img_1.png"], ["img_12.png", "img_/.png"]),
     ("[ab].png", ["a.png", "b.png"], ["c.png", "ab.png"]),
     ("[!ab].png", ["c.png", "x/c.png"], ["a.png", "x/.png"]),
     ("a+b(1).png", ["a+b(1).png"], ["aab1.png"]),
     ("[a-c]", ["b"], ["d"]), ("[]a]", ["a", "]"], ["b"]), ("[x", [], ["x"]),
     ("\\#a", ["#a"], ["a"]), ("# a comment", [], ["# a comment"]), ("a ", ["a"], ["b"]),
     ("\\!a", ["!a"], ["a"]), ("[[:alpha:]]", [], []),
     ("line\n*.png", ["line\nbreak.png"], ["line.png"])],
)  # fmt: skip
def test_globs(glob, yes, no):
    assert list(filter(chosen_by([glob], []), yes + no)) == yes
    assert list(filter(chosen_by([], [glob]), yes + no)) == no


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [([], [], ["a.png", "b/c.png"]), (["b"], [], ["b/c.png"]), ([], ["b"], ["a.png"]), (["*.png"], ["a*"], ["b/c.png"]),
     (["x", "a.png"], [], ["a.png"]), (["*.png", "!a*"], [], ["b/c.png"]), ([], ["*.png", "!c.png"], ["b/c.png"])],
)  # fmt: skip
def test_included_and_excluded(include, exclude, names):
    assert list(filter(chosen_by(include, exclude), ["a.png", "b/c.png"])) == names


@given(st.text("ab.*?[]!^-\\/&|~", max_size=8), st.text("ab.*?[]!^-\\/", max_size=8))
def test_any_glob_is_a_pattern(glob, name):
    try:
        chosen_by([glob], [])(name)
    except Unparsed as error:
        assert "is not a valid glob, expected one as in a .gitignore" in str(error)


@pytest.mark.parametrize("glob", ["[b-a]", "a\\", "!"])
def test_what_is_no_glob_is_an_error_of_the_recipe(prep, tmp_path, glob):
    (tmp_path / "in").mkdir()
    (tmp_path / "r.toml").write_text(f"[[source]]\npath = 'in'\nexclude = ['*.png', '{glob}']\n")
    result = prep("scan", tmp_path / "r.toml")
    assert result.code == 3
    assert f"source[0].exclude: {glob!r} is not a valid glob, expected one as in a .gitignore" in result.err


@given(st.text("ab.*?", min_size=1, max_size=6).filter(lambda glob: "**" not in glob), st.text("ab.", max_size=6))
def test_without_directories_it_is_fnmatch(glob, name):
    assert chosen_by([glob], [])(name) == bool(name and re.fullmatch(fnmatch.translate(glob), name))
