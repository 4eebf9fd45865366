"""A manifest that would be too large is refused before anything is encoded; one that is allowed is read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from prep.digest import canonical
from prep.encode.manifest import limits as ceiling
from prep.encode.manifest.limits import PROMPT_BYTES
from prep.manifest import schema as document
from prep.manifest.document import LIMIT, read_manifest


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    """`encode(*options, source=…)` into tmp_path/cache and tmp_path/m.json."""
    return lambda *options, source=photos: prep(
        "encode", source, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
        "--resolution", 96, "--step", 16, *options)


def recipe(root: Path, photos: Path, count: int) -> Path:
    """A recipe of `photos` and `count` empty sources with long names."""
    lines = [f'[[source]]\npath = "{photos.name}"']
    for number in range(count):
        source = root / f"{number:04}-{'x' * 200}"
        source.mkdir()
        lines.append(f'[[source]]\npath = "{source.name}"')
    (root / "dataset.toml").write_text("\n".join(lines))
    return root / "dataset.toml"


def test_many_short_prompts_are_refused_before_anything_is_made(encode, tmp_path):
    """The prompt file is small enough; what the manifest says of each prompt is not."""
    (tmp_path / "prompts.txt").write_text("a dog\n" * 9000)
    result = encode("--prompts", tmp_path / "prompts.txt")
    assert result.code == 3 and not (tmp_path / "cache").exists() and not (tmp_path / "m.json").exists()
    assert "the manifest would have up to 11" in result.err and "expected at most 1048576" in result.err
    assert "of them are its prompts" in result.err and "remove prompts from the prompt file" in result.err


def test_a_dry_run_says_it_too(encode, tmp_path):
    (tmp_path / "prompts.txt").write_text("a dog\n" * 9000)
    assert encode("--prompts", tmp_path / "prompts.txt", "--dry-run").code == 3


def test_prompts_that_canonical_json_spells_at_length_are_refused(encode, tmp_path):
    """One character of two bytes becomes six: a file of the allowed size can be too large."""
    (tmp_path / "prompts.txt").write_text("ä" * (PROMPT_BYTES // 2 - 1) + "\n", encoding="utf-8")
    assert encode("--prompts", tmp_path / "prompts.txt", "--dry-run").code == 0
    (tmp_path / "prompts.txt").write_text("\x01" * (PROMPT_BYTES - 1) + "\n")
    result = encode("--prompts", tmp_path / "prompts.txt")
    assert result.code == 3 and "of them are its prompts" in result.err


def test_many_sources_are_refused(encode, photos, tmp_path, monkeypatch):
    """The limit is lowered: five thousand directories would take long to make."""
    source = recipe(tmp_path, photos, 30)
    for module in ("encode.manifest.limits", "manifest.document"):
        monkeypatch.setattr(f"prep.{module}.LIMIT", 6000)
    result = encode(source=source)
    assert result.code == 3 and "of them are its sources" in result.err and "name fewer sources" in result.err
    assert not (tmp_path / "cache").exists()


def test_what_a_reader_would_refuse_is_refused_first(encode, tmp_path, monkeypatch):
    """More buckets than a manifest may have; the limit is lowered, since four thousand take as many pictures."""
    monkeypatch.setattr(document, "MOST_BUCKETS", 2)
    result = encode()
    assert result.code == 3 and "no manifest can hold this recipe: buckets has" in result.err
    assert "makes fewer buckets" in result.err and not (tmp_path / "cache").exists()


def test_the_largest_prompt_file_fits(encode, tmp_path, monkeypatch):
    """What is written is no larger than what was foreseen, and is read again."""
    foreseen = []
    largest = ceiling._largest
    monkeypatch.setattr(ceiling, "_largest", lambda *given: foreseen.append(largest(*given)) or foreseen[-1])
    line = "a " + "dog " * 254 + "--n ugly\n"
    (tmp_path / "prompts.txt").write_text(line * (PROMPT_BYTES // len(line)))
    result = encode("--mask", "sidecar", "--prompts", tmp_path / "prompts.txt")
    assert result.code == 0, result.err
    size = (tmp_path / "m.json").stat().st_size
    assert PROMPT_BYTES < size <= len(canonical(foreseen[0])) < LIMIT
    assert len(read_manifest(tmp_path / "m.json").document["prompts"]["samples"]) == PROMPT_BYTES // len(line)
    for name, value in read_manifest(tmp_path / "m.json").document.items():
        assert len(canonical({name: value})) <= len(canonical({name: foreseen[0][name]})), name
