"""What every engine has in common: pictures and prompts go in, texts come out.

`prep.captioning.endpoint` asks a server; models and taggers on this computer follow the same protocol. All else (which
pictures are asked about, what is remembered, where captions are written) is the same for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

PROMPT = ("Describe this image in one paragraph: the subject, what it does, the surroundings, the composition, the "
          "style, the light and the colors. Write only the description.")


# What models think before they answer; of some, the template of the prompt has the beginning.
_THOUGHTS = re.compile(r"<think>.*?(?:</think>|\Z)|\A(?:(?!<think>).)*?</think>", re.DOTALL)


def spoken(text: str) -> str:
    """What a model said on one line, without its thoughts."""
    return " ".join(_THOUGHTS.sub(" ", text).split())


Form = Literal["jpeg", "pixels", "square"]  # square: pixels of a white square with the picture in its middle


class Stopped(Exception):
    """The engine was closed while it was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A picture as an engine gets it, decoded and scaled down by a worker process."""

    data: bytes  # the JPEG file, or the pixels: uint8 [height, width, 3]
    width: int
    height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an engine said about a picture."""

    text: str  # on one line
    cut: bool = False  # whether it was cut off at the most tokens that were asked for
    refused: bool = False  # whether the server marked it as a refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class Unanswered:
    """Why an engine has no answer for one picture, although it has for others. It may have one in the next run."""

    detail: str


class Engine(Protocol):
    """Describes pictures."""

    @property
    def name(self) -> str:
        """Its model, for people and for records."""

    @property
    def identity(self) -> Mapping[str, str | int | None]:
        """What decides an answer, besides picture and prompt."""

    @property
    def prompt(self) -> str:
        """What it is asked by default."""

    @property
    def form(self) -> Form:
        """Of a `Prepared` picture."""

    @property
    def at_once(self) -> int:
        """Threads that may call `answer` at the same time."""

    @property
    def batch(self) -> int:
        """Pictures that a call takes, at most."""

    def describe(self) -> str:
        """Where pictures go, for people."""

    def answer(self, pictures: Sequence[Prepared], prompts: Sequence[str]) -> Sequence[Answer | Unanswered]:
        """An answer for each picture, to its prompt. Raises `Problem` if no picture will get one; `Stopped`."""

    def close(self) -> None:
        """Ends what is asked just now, soon. Threads may call it."""
