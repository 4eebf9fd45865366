r"""Prompt files: one prompt per line, with kohya's options after it. Blank lines and lines starting with # are skipped.

    a red circle on a table --n blurry, dark --w 512 --h 768 --d 42 --s 30 --l 7.5

`--n` is the negative prompt, `--w` and `--h` the size in pixels, `--d` the seed, `--s` the sampler steps, `--l` the
guidance scale, as in sd-scripts (`line_to_prompt_dict` in library/train_util.py). `--ref` is the path of a reference
picture, relative to the prompt file; several are given in their order. `--mask` is the path of a mask, which says what
a model that inpaints is to paint of it. sd-scripts drops unknown options. Here they are errors, since their text would
be neither prompt nor option. `\--x` is the text `--x`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prep.errors import ConfigError, PathError
from prep.fs.place import require_local
from prep.fs.text import decode_text
from prep.fs.untrusted import read_regular
from prep.parse import BRIEF, Unparsed

MOST = 1 << 24  # bytes; prep encode accepts fewer
MOST_SIDE = 8192  # pixels
MOST_SEED = (1 << 53) - 1  # every JSON reader keeps it exact
_OPTION = re.compile(r"(?:^|(?<=\s))--(?=\w)(\S*)")
_ESCAPED = re.compile(r"(?:^|(?<=\s))\\--")
CELL = 8  # pixels of a latent cell's side: width and height are multiples of it
# Option to what it sets, its bounds, and its unit.
_NUMBERS: Mapping[str, tuple[str, int, int, int]] = {
    "w": ("width", CELL, MOST_SIDE, CELL), "h": ("height", CELL, MOST_SIDE, CELL), "d": ("seed", 0, MOST_SEED, 1),
    "s": ("steps", 1, 1000, 1),
}  # fmt: skip
GUIDANCE = (1, 100)
_WORDS = {"n": "negative", "l": "guidance", "mask": "mask"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSettings:
    """Settings of one prompt's pictures; `None` follows the run's settings."""

    width: int | None = None  # pixels
    height: int | None = None
    seed: int | None = None
    steps: int | None = None  # of the sampler
    guidance: float | None = None

    def as_document(self) -> dict[str, int | str]:
        """The settings for a manifest: only those that are set, guidance as a decimal string."""
        values = {name: getattr(self, name) for name in ("width", "height", "seed", "steps", "guidance")}
        return {name: f"{value:.10g}" if name == "guidance" else value for name, value in values.items()
                if value is not None}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> PromptSettings:
        """The reverse of `as_document`, for a checked document."""
        values: dict[str, Any] = {**document}
        if "guidance" in values:
            values["guidance"] = float(values["guidance"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One line of a prompt file."""

    text: str
    negative: str | None  # None: none given
    settings: PromptSettings
    line: int  # from 1
    references: tuple[str, ...] = ()  # paths of pictures, as given
    mask: str = ""  # path of the mask of what is painted of the only one; "": as its sample's

    @property
    def pictures(self) -> tuple[tuple[str, str], ...]:
        """Each reference, with the mask."""
        return tuple((name, self.mask) for name in self.references)


def read_prompts(path: Path, named: str) -> tuple[bytes, list[Prompt]]:
    """The bytes of a prompt file, and its prompts. `named`: the option or setting that names it, for messages.

    Raises `PathError` unless it is a readable, small, regular UTF-8 file; `ConfigError` for a bad line.
    """
    data = read_prompt_file(path, named)
    prompts, faults = prompts_of(data, path, named)
    if faults:
        raise faults[0]
    return data, prompts


def read_prompt_file(path: Path, named: str) -> bytes:
    """The bytes of a prompt file. Raises `PathError` unless it is a readable, small, regular file."""
    require_local(path, "prompt file")
    try:
        return read_regular(path.resolve(), MOST)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise PathError(f"cannot read {_role(path, named)}: {getattr(error, 'strerror', None) or 'too many links'}",
                        hint="write the file again, or name another") from None


def prompts_of(data: bytes, path: Path, named: str, *, echo: bool = True) -> tuple[list[Prompt], list[ConfigError]]:
    """The prompts in the bytes of the prompt file at `path`, and an error for each bad line. Without `echo`, errors
    never quote the file. Raises `PathError` if it is not UTF-8."""
    try:
        text = decode_text(data)
    except Unparsed as error:
        raise PathError(f"{_role(path, named)}: {error}", hint="save it as UTF-8") from None
    prompts, faults = list[Prompt](), list[ConfigError]()
    for number, line in _lines(text):
        try:
            prompts.append(parse_prompt(line, f"{_role(path, named)}, line {number}", number, echo=echo))
        except ConfigError as error:
            faults.append(error)
    return prompts, faults


def _role(path: Path, named: str) -> str:
    return f"prompt file {path} ({named})"


def parse_prompts(text: str, where: str = "prompts") -> Iterator[Prompt]:
    """The prompts in the text of a prompt file; `where` names the file in messages. Raises `ConfigError`."""
    for number, line in _lines(text):
        yield parse_prompt(line, f"{where}, line {number}", number)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The numbers, from 1, and the text of the lines that have a prompt."""
    for number, line in enumerate(re.split("\r\n|\r|\n", text), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line


def parse_prompt(line: str, where: str, number: int = 1, *, echo: bool = True) -> Prompt:
    """One prompt with its options. Raises `ConfigError`."""
    marks = list(_OPTION.finditer(line))
    values: dict[str, Any] = {}
    references: list[str] = []
    for mark, after in zip(marks, [*marks[1:], None], strict=False):
        name, value = mark[1].lower(), line[mark.end() : after.start() if after else len(line)].strip()
        target = _WORDS.get(name) or (_NUMBERS[name][0] if name in _NUMBERS else None)
        if name == "ref":
            references.append(_path(name, value, where))
            continue
        if target is None:
            raise _unknown(mark[0], where, echo)
        if target in values:
            raise ConfigError(f"{where}: --{name} is given twice, expected once")
        values[target] = (_plain(value) if name == "n" else _path(name, value, where) if name == "mask" else
                          _number(name, value, where, echo))
    prompt = line[: marks[0].start()] if marks else line
    if not prompt.strip():
        raise ConfigError(f"{where}: there is no prompt before the options", hint="for example: a red circle --w 512")
    return Prompt(text=_plain(prompt), negative=values.pop("negative", None), mask=values.pop("mask", ""),
                  settings=PromptSettings(**values), line=number, references=tuple(references))


def _path(name: str, value: str, where: str) -> str:
    if not value:
        raise ConfigError(f"{where}: --{name} has no path", hint=f"--{name} PICTURE")
    return _plain(value)


def _plain(text: str) -> str:
    return _ESCAPED.sub("--", text).strip()


def _number(name: str, value: str, where: str, echo: bool) -> int | float:
    low, high, unit = (*GUIDANCE, 0) if name == "l" else _NUMBERS[name][1:]
    kind = "number" if name == "l" else "whole number"
    pattern = r"[0-9]{1,10}(\.[0-9]{1,10})?" if name == "l" else "[0-9]{1,16}"
    number = (float(value) if name == "l" else int(value)) if re.fullmatch(pattern, value, re.ASCII) else -1
    if not low <= number <= high or (unit > 1 and number % unit):
        seen = f"is {value[:BRIEF]!r}" if echo else "has an invalid value"
        steps = f" in multiples of {unit}" if unit > 1 else ""
        raise ConfigError(f"{where}: --{name} {seen}, expected a {kind} from {low} to {high}{steps}")
    return number


def _unknown(mark: str, where: str, echo: bool) -> ConfigError:
    seen = f"unknown option '{mark[:BRIEF]}'" if echo else "unknown option"
    literal = f"\\{mark[:BRIEF]}" if echo else "\\--x"
    return ConfigError(f"{where}: {seen}, expected --n, --w, --h, --d, --s, --l, --ref or --mask",
                       hint=f"write {literal} if it is part of the prompt")
