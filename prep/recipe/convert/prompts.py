"""Writes other tools' sample prompts as lines of a prompt file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from prep.recipe.prompts import CELL, GUIDANCE, MOST_SEED, MOST_SIDE

NAME = "prompts.txt"  # of the file, beside the recipe
MOST_STEPS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One prompt of another tool; a number that it does not have is None."""

    prompt: str
    negative: str = ""
    width: float | None = None  # pixels
    height: float | None = None
    seed: float | None = None
    steps: float | None = None
    guidance: float | None = None
    references: tuple[str, ...] = ()  # paths of pictures


def prompt_text(prompts: Iterable[Sampled]) -> str:
    """The text of a prompt file, with numbers brought into its bounds; "" without a prompt."""
    return "".join(f"{_line(prompt)}\n" for prompt in prompts if _plain(prompt.prompt))


def _line(prompt: Sampled) -> str:
    sides = [None if side is None else min(max(int(side), CELL), MOST_SIDE) // CELL * CELL
             for side in (prompt.width, prompt.height)]
    seed = None if prompt.seed is None or prompt.seed < 0 else min(int(prompt.seed), MOST_SEED)
    steps = None if prompt.steps is None else min(max(int(prompt.steps), 1), MOST_STEPS)
    low, high = GUIDANCE
    guidance = None if prompt.guidance is None else f"{min(max(prompt.guidance, low), high):.6f}".rstrip("0")
    options = {"n": _plain(prompt.negative) or None, "w": sides[0], "h": sides[1], "s": steps, "d": seed,
               "l": guidance and guidance.rstrip(".")}
    words = (f"--{name} {value}" for name, value in options.items() if value is not None)
    return " ".join([_plain(prompt.prompt), *words, *(f"--ref {_plain(path)}" for path in prompt.references)])


def _plain(text: str) -> str:
    """A prompt on one line, in which nothing begins an option or a comment."""
    encodable = text.encode("utf-8", "replace").decode()  # JSON may have half a character
    return re.sub(r"(^|(?<=\s))--", r"\\--", " ".join(encodable.split()).lstrip("# "))
