"""Text files that people write: with a byte order mark or without, bounded, and UTF-8 or an error."""

from __future__ import annotations

import codecs
import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.fs.blob import TooLarge
from prep.fs.text import decode_text, read_text, without_mark
from prep.fs.untrusted import NotRegularFile
from prep.parse import Unparsed

MARK = codecs.BOM_UTF8


@given(st.text(st.characters(codec="utf-8")).filter(lambda text: not text.startswith("\ufeff")))
def test_a_mark_is_no_part_of_the_text(text):
    assert decode_text(text.encode()) == decode_text(MARK + text.encode()) == text
    assert without_mark(MARK + text.encode()) == without_mark(text.encode()) == text.encode()


@pytest.mark.parametrize(("data", "says"), [
    (b"\xff", "byte 0 is not UTF-8, expected UTF-8 text"), (MARK + b"a\xe4", "byte 1 is not UTF-8"),
    ("a".encode("utf-16"), "byte 0 is not UTF-8")])
def test_what_is_not_utf_8_is_refused(data, says):
    with pytest.raises(Unparsed, match=says):
        decode_text(data)
    with pytest.raises(Unparsed, match="expected a recipe"):
        decode_text(data, "a recipe")


def test_files_have_a_bound(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"x" * 100)
    assert read_text(path, most=100) == "x" * 100
    with pytest.raises(TooLarge, match="it has more than 99 bytes"):
        read_text(path, most=99)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "b.toml")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_the_user_may_name_a_pipe_and_a_file_may_not(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotRegularFile):
        read_text(tmp_path / "pipe", regular=True)
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(MARK + b"seed = 1",))
    writer.start()
    assert read_text(tmp_path / "pipe") == "seed = 1"
    writer.join()


def test_every_file_of_ours_may_begin_with_a_mark(prep, train, photos, tiny_model, tmp_path):
    """As editors on Windows write them: recipe, prompts, captions, tables, manifest, settings, others' files."""
    for caption in photos.rglob("*.txt"):
        caption.write_bytes(MARK + caption.read_bytes())
    recipe, prompts = tmp_path / "r.toml", tmp_path / "prompts.txt"
    recipe.write_bytes(MARK + f"[image]\nresolution = 64\nstep = 16\n[prompts]\nfile = 'prompts.txt'\n"
                              f"[[source]]\npath = '{photos}'\n".encode())
    prompts.write_bytes(MARK + b"a red square\na blue one --n noise\n")
    manifest = tmp_path / "m.json"
    encode = ["encode", recipe, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", manifest, "--json"]
    assert prep(*encode).code == 0
    plain = prep("inspect", manifest, "--json").json
    assert plain["prompts"] == ["a red square", "a blue one"]
    manifest.write_bytes(MARK + manifest.read_bytes())
    assert prep("inspect", manifest, "--json").json == plain and prep("verify", manifest).code == 0
    settings = tmp_path / "train.toml"
    settings.write_bytes(MARK + b"seed = 7\n")
    checked = train("check", manifest, "-c", settings, "--steps", 2, "--batch-size", 1)
    assert checked.code == 0, checked.err
    (tmp_path / "concepts.json").write_bytes(MARK + json.dumps([{"path": str(photos)}]).encode())
    assert prep("init", "--from", tmp_path / "concepts.json", "-o", tmp_path / "new.toml").code == 0
    recipe.write_bytes(MARK + b"[[source]]\n")
    assert prep("init", photos, "-o", recipe, "--force").code == 0, "it is seen to be a recipe"
