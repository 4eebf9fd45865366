"""Rewords the captions of many samples at once: search and replace, and words in front. Shown first, undone as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from prep.dataset.edits.refused import Refused
from prep.digest import digest_strings
from prep.formatting import counted
from prep.manifest.select import TAG_END
from prep.parse import Unparsed, brief, one_of
from prep.view.edit.editor import Editor, Sent

REWORDING = ("find", "with", "prepend", "whole")  # names in an address
LONGEST = 1000  # characters of each
MOST = 2000  # captions that are saved at once
LOOKED_AT = 20_000  # samples whose captions are read for it
KEPT = 16  # batches that can be undone as one


@dataclass(frozen=True, slots=True)
class Rewording:
    """The steps of changing each caption, in this order."""

    find: str  # as it is written; "": nothing
    replacement: str
    prepend: str
    whole: bool = False  # find whole tags only: what stands between commas

    def of(self, caption: str) -> str:
        """The reworded caption; one that begins with the words in front already gets none."""
        replaced = caption
        if self.find and self.whole:
            replaced = self._with_tags(caption)
        elif self.find:
            replaced = caption.replace(self.find, self.replacement)
        return replaced if replaced.startswith(self.prepend.strip()) else self.prepend + replaced


    def _with_tags(self, caption: str) -> str:
        """The caption with each such tag replaced, or, by nothing, taken out with its comma."""
        tags = caption.split(TAG_END)
        kept: list[str] = []
        for tag in tags:
            if tag.strip() != self.find.strip():
                kept.append(tag)
            elif self.replacement.strip():
                kept.append(tag.replace(self.find.strip(), self.replacement.strip()))
        return caption if kept == tags else TAG_END.join(kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A caption file that is reworded."""

    sent: Sent  # what its own page would send
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplacePlan:
    """The changes of a rewording."""

    changes: tuple[Change, ...] = ()
    uncaptioned: int = 0  # samples without a caption, which are left as they are
    uneditable: int = 0

    @property
    def token(self) -> str:
        """Names what is changed, and what it is changed to."""
        return digest_strings([text for change in self.changes
                               for text in (change.sent.sample, change.sent.version, *change.after)])


def rewording_of(values: Mapping[str, str]) -> Rewording:
    """The rewording of an address. Raises `Unparsed`."""
    find, replacement, prepend = (_text(values.get(name, ""), name) for name in REWORDING[:3])
    whole = values.get("whole", "")
    return Rewording(find, replacement, prepend, bool(whole and one_of(whole, ("yes",), "whole")))


def address_of(wording: Rewording) -> list[tuple[str, str]]:
    """The names and values of an address. `rewording_of` reads them back."""
    texts = wording.find, wording.replacement, wording.prepend, "yes" * wording.whole
    return list(zip(REWORDING, texts, strict=True))


def _text(text: str, name: str) -> str:
    if len(text) > LONGEST or not text.isprintable():
        raise Unparsed(f"{name} is {brief(text)}, expected at most {LONGEST} printable characters")
    return text


def plan(editor: Editor, numbers: Iterable[int], wording: Rewording) -> ReplacePlan:
    """The changes that a rewording makes to these samples' captions; a file of several samples counts once. Raises
    `Refused`."""
    seats, entries = editor.source.state.seats, editor.log.entries()
    changes: dict[str, Change] = {}
    uncaptioned = uneditable = 0
    for looked, number in enumerate(numbers):
        if looked >= LOOKED_AT:
            raise Refused(400, f"more than {LOOKED_AT:,} samples are shown: search or filter first")
        try:
            now = editor.editable(number, "caption", entries)
        except Refused:
            uneditable += 1
            continue
        after = tuple(" ".join(wording.of(line).split()) for line in now.lines)
        uncaptioned += not now.lines
        if after != now.lines and now.place not in changes:
            sent = Sent(number=number, kind="caption", sample=seats[number].id, version=now.version,
                        media="text/plain", body="\n".join(after).encode())
            changes[now.place] = Change(sent=sent, before=now.lines, after=after)
    if len(changes) > MOST:
        raise Refused(400, f"{len(changes):,} captions would change, at most {MOST:,} at once: search or filter first")
    return ReplacePlan(changes=tuple(changes.values()), uncaptioned=uncaptioned, uneditable=uneditable)


def save(editor: Editor, planned: ReplacePlan, token: str) -> str:
    """Saves a plan, if it is the one that the page showed. Returns a line for the user. Raises `Refused`."""
    if planned.token != token or not planned.changes:
        raise Refused(409, "the captions are others than this page showed: load it again")
    saved, failed, noted = [], [], ""
    for change in planned.changes:
        try:
            done = editor.save(change.sent)
            saved.append(replace(change.sent, version=done.version, body=b""))
            noted = noted or done.said.partition(". ")[2]
        except (Refused, OSError) as error:
            failed.append(_reason(error))
    editor.batches[token] = tuple(saved)
    while len(editor.batches) > KEPT:
        editor.batches.pop(next(iter(editor.batches)))
    return " ".join(filter(None, (f"Saved {counted(len(saved), 'caption')}.", _outcome(failed, "saved"), noted)))


def undo(editor: Editor, token: str) -> str:
    """Takes a saved plan back. As `save`."""
    batch = editor.batches.pop(token, None)
    if not batch:
        raise Refused(409, "there is nothing of it to undo")
    failed = []
    for sent in batch:
        try:
            editor.undo(sent)
        except (Refused, OSError) as error:
            failed.append(_reason(error))
    back = len(batch) - len(failed)
    return " ".join(filter(None, (f"{counted(back, 'caption')} {'is' if back == 1 else 'are'} as before.",
                                  _outcome(failed, "undone"))))


def _outcome(failed: list[str], done: str) -> str:
    if not failed:
        return ""
    return f"{counted(len(failed), 'caption')} {'was' if len(failed) == 1 else 'were'} not {done}: {failed[0]}."


def _reason(error: Refused | OSError) -> str:
    return error.message if isinstance(error, Refused) else error.strerror or str(error)
