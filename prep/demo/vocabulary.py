"""The demo's vocabulary: the words of its captions, and a byte-level CLIP tokenizer with merges for them.

Any text can be tokenized, because the alphabet has all 256 bytes; the demo's own words are one token each.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "heart")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "white")
GROUNDS = ("striped", "checked", "cloudy", "shaded")

LEFT_OUT = ("red", "heart")
"""The pair that the tiny model never saw, no heart of any color, and that LoRA training on the demo teaches it."""

START, END = "<|startoftext|>", "<|endoftext|>"
MAX_TOKENS = 77  # CLIP's context, to which SD 1.5 pads every prompt

_WORDS = (*SHAPES, *COLORS, *GROUNDS, "a", "an", "on", "ground", "photo", "picture", "of", "the", "with", "and")


def caption(color: str, shape: str, ground: str) -> str:
    """A caption, such as "a red circle on a striped ground"."""
    article = "an" if color[0] in "aeiou" else "a"
    return f"{article} {color} {shape} on a {ground} ground"


def write_tokenizer(folder: Path) -> None:
    """Writes the four files that `CLIPTokenizer.from_pretrained` reads, without importing it."""
    folder.mkdir(parents=True, exist_ok=True)
    merges = _merges(_WORDS)
    tokens = vocabulary()
    special = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    config = {**special, "add_prefix_space": False, "do_lower_case": True, "model_max_length": MAX_TOKENS,
              "errors": "replace", "tokenizer_class": "CLIPTokenizer"}  # fmt: skip
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, value in (
        ("vocab.json", {token: index for index, token in enumerate(tokens)}),
        ("special_tokens_map.json", special),
        ("tokenizer_config.json", config),
    ):
        (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def vocabulary() -> tuple[str, ...]:
    """Every token in id order: bytes, bytes that end a word, merges, and CLIP's two special tokens."""
    letters = _byte_letters()
    merged = (left + right for left, right in _merges(_WORDS))
    return (*letters, *(letter + "</w>" for letter in letters), *merged, START, END)


def _byte_letters() -> tuple[str, ...]:
    """One printable character per byte, as in GPT-2 (openai/clip simple_tokenizer.py bytes_to_unicode)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return tuple(chr(byte) for byte in printable) + tuple(chr(256 + index) for index in range(len(hidden)))


def _merges(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Byte-pair merges, most frequent pair first, until every word is one token."""
    spelled = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    while any(len(parts) > 1 for parts in spelled):
        pairs = Counter(pair for parts in spelled for pair in pairwise(parts))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spelled = [_join(parts, best) for parts in spelled]
    return merges


def _join(parts: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return joined
