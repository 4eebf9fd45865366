"""Writes captions where edits are written, so that they are read, shown and undone as edits are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prep.captioning.ask import Said
from prep.captioning.engine import Answer, Unanswered
from prep.captioning.plan import Asked
from prep.captioning.template import Wording
from prep.captions.read import BadCaption
from prep.dataset.edits.log import UndoLog, digest_of
from prep.errors import PathError
from prep.findings import Finding, finding
from prep.formatting import counted

PATIENCE = 5.0  # seconds for which another program's save is waited for
MOST_FILE = 1 << 28  # bytes of a caption file
MANY = 3  # pictures of one answer, from which it says something of the model
# How assistants begin when they decline, in English.
REFUSAL = re.compile(r"(?:i(?:['’]m| am) (?:sorry|unable|not able)|sorry, (?:but )?(?:i|we)\b|i can(?:no|['’])t\b|"
                     r"i can not\b|i won['’]t|as an ai\b)", re.IGNORECASE)


@dataclass(kw_only=True, slots=True)
class Writer:
    """Writes the captions of one run, and notes what is wrong with them. One thread at a time."""

    log: UndoLog
    wording: Wording
    by: str  # the model
    written: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)  # labels with captions, in order
    findings: list[Finding] = field(default_factory=list)
    _answers: Counter[str] = field(default_factory=Counter)
    _said: list[tuple[str, str]] = field(default_factory=list)  # labels with answers

    def take(self, said: Said) -> None:
        """Writes what was said about a picture, if it is a caption. Raises `PathError`."""
        label = said.asked.known.item.label
        if isinstance(said.answers, Finding):
            self.findings.append(said.answers)
            return
        lines: list[str] = []
        for one in said.answers:
            if isinstance(one, Unanswered):
                self.findings.append(finding(label, "not-captioned", one.detail))
                return
            answer = self.wording.heard(one)
            if not answer.text:
                self.findings.append(finding(label, "empty-caption", "no tag has a score that is high enough" if
                                             self.wording.scored else "the model said nothing"))
                continue
            if answer.refused or REFUSAL.match(answer.text):
                self.findings.append(finding(label, "caption-refused", f"'{_start(answer.text)}'"))
                continue
            lines += self._line(said.asked, label, answer)
        if lines:
            self._write(said.asked, label, tuple(dict.fromkeys(lines)))

    def repeated(self) -> Iterator[Finding]:
        """A finding for each picture about which a model said the same as about many others."""
        for label, text in self._said:
            if self._answers[text] >= MANY:
                yield finding(label, "caption-repeated",
                              f"'{_start(text)}', as of {counted(self._answers[text] - 1, 'other picture')}")

    def _line(self, asked: Asked, label: str, answer: Answer) -> Sequence[str]:
        if answer.cut:
            self.findings.append(finding(label, "caption-cut", f"it ends with '…{answer.text[-40:]}'"))
        self._answers[answer.text] += 1
        self._said.append((label, answer.text))
        try:
            if line := self.wording.caption_of(asked.known.item, asked.old, answer.text, asked.tags):
                return [line]
            self.findings.append(finding(label, "empty-caption", f"the model said '{_start(answer.text)}'"))
        except BadCaption as error:
            self.findings.append(finding(label, error.code, f"the answer's {error.detail}"))
        return []

    def _write(self, asked: Asked, label: str, lines: tuple[str, ...]) -> None:
        place, data = asked.place, "".join(f"{line}\n" for line in lines).encode()
        try:
            with place.folder.opened(make=True) as folder, folder.locked(PATIENCE):
                try:
                    before = folder.read(place.file, MOST_FILE)
                except FileNotFoundError:
                    before = None
                if digest_of(before) != asked.disk:
                    self.findings.append(finding(label, "changed-meanwhile", f"{place.name} was written by another "
                                                 "program meanwhile, and stays", as_error=True))
                    return
                self.log.add(place.name, "caption", before, data, by=self.by, how=asked.how)
                folder.write(place.file, data)
        except OSError as error:
            raise PathError(f"cannot write caption {place.path}: {error.strerror or error}",
                            hint="free space, or allow writing there, then run the same command again; what models "
                            "said is remembered") from None
        self.written.append((label, lines))


def _start(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"
