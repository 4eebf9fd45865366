"""Prompt files: one prompt a line, `prompt --n negative`; blank lines and lines that begin with `#` say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prep.errors import PathError
from prep.fs.untrusted import read_regular

MOST = 1 << 24  # bytes; prep encode takes fewer
PromptPair = tuple[str, str | None]  # a prompt and its negative; None: none given


def read_prompts(path: Path) -> tuple[bytes, list[PromptPair]]:
    """The bytes of a prompt file, and its prompts.

    Raises `PathError` where it cannot be read, is no file of a few pages (a manifest may name anything), or not UTF-8.
    """
    try:
        data = read_regular(path.resolve(), MOST)
        return data, list(parse_prompts(data.decode("utf-8-sig")))
    except OSError as error:
        raise PathError(f"cannot read prompt file {path}: {error.strerror or error}",
                        hint="write it again, or leave [prompts] file of the recipe, or --prompts, away") from None
    except UnicodeDecodeError as error:
        raise PathError(f"prompt file {path} is not UTF-8: {error.reason} at byte {error.start}") from None


def parse_prompts(text: str) -> Iterator[PromptPair]:
    """The prompts in the text of a prompt file."""
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            prompt, mark, negative = line.partition(" --n ")
            yield prompt.strip(), negative.strip() if mark else None
