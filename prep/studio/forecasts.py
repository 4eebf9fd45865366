"""What a command would take, asked of commands that only look: `prep encode --dry-run`, `train check`.

Each is a process beside the queue, so that it can be asked while jobs run. A form has one at a time, of the values that
were filled in when it was asked.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from prep.formatting import clock, counted, format_bytes
from prep.jobs.process import end, start
from prep.studio.forms import Form, complete

SHOWN = 2000  # characters of what a command says that ends without an answer
FAULTS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a command would take, in words."""

    tone: str  # error, warning, good or info
    says: str
    facts: tuple[tuple[str, str], ...] = ()
    hints: tuple[str, ...] = ()
    ways: tuple[tuple[str, Mapping[str, Any]], ...] = ()  # what it would take with other settings, and these


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A question to a command."""

    words: tuple[str, ...]  # the command
    asked: float  # seconds since 1970
    child: subprocess.Popen[bytes]
    answer: Answer | None = None  # None: not yet


class Forecasts:
    """The newest question of each form. Threads may share it."""

    def __init__(self, project: Path) -> None:
        self._project, self._lock = project, Lock()
        self._known: dict[str, Forecast] = {}

    def of(self, form: str) -> Forecast | None:
        """The newest question of a form."""
        with self._lock:
            return self._known.get(form)

    def ask(self, form: str, words: Sequence[str]) -> None:
        """Asks a command of these words, instead of what the form has asked before. Raises `OSError`."""
        self.forget(form)
        child = start([*words[:2], "--json", *words[2:]], self._project, out=subprocess.PIPE, err=subprocess.PIPE)
        asked = Forecast(words=tuple(words), asked=time.time(), child=child)
        with self._lock:
            self._known[form] = asked
        Thread(target=self._wait, args=(form, asked), name="forecast", daemon=True).start()

    def forget(self, form: str) -> None:
        """Forgets what a form has asked, and ends the command if it runs."""
        with self._lock:
            known = self._known.pop(form, None)
        if known is not None and known.child.poll() is None:
            end(known.child.pid, now=True)

    def close(self) -> None:
        """Ends all commands."""
        for form in list(self._known):
            self.forget(form)

    def _wait(self, form: str, asked: Forecast) -> None:
        out, err = asked.child.communicate()
        answer = answer_of(out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), asked.child.returncode)
        with self._lock:
            if self._known.get(form) is asked:
                self._known[form] = replace(asked, answer=answer)


def question_of(form: Form, values: Mapping[str, Sequence[str]]) -> list[str]:
    """The words that ask the command of `form`, with the values of the form of another one. Raises `UsageError`."""
    names = {field.name for field in form.fields}
    given = {name: value for name, value in values.items() if name in names}
    return complete(form, given | {name: ["yes"] for name in names & {"dry_run"}})


def answer_of(out: str, err: str, code: int) -> Answer:
    """The answer in the document that a command printed; why there is none, if it ended without one."""
    with suppress(ValueError, RecursionError, KeyError, TypeError):
        document = json.loads(out)
        kind = document["format"]
        if kind == "latentry/encode":
            return _of_encode(document)
        if kind == "latentry/check":
            return _of_check(document)
        if kind == "latentry/error":
            error = document["error"]
            return Answer(tone="error", says=f"{error['message']}.", hints=(error["hint"],) if error["hint"] else ())
    return Answer(tone="error", says=f"The command ended with {code}, and without an answer.",
                  hints=(err[-SHOWN:].strip(),) if err.strip() else ())


def _of_encode(document: Mapping[str, Any]) -> Answer:
    encoded, reused = document["encoded"], document["reused"]
    estimate = document["estimate"]
    memory, measured = estimate["memory"] or {}, estimate["measured"]
    peaks = [memory[name] for name in ("text", "latent", "embedding") if memory.get(name)]
    rejected = len(document["rejected"])
    facts = [
        *((f"{name}s" if name != "text" else "texts", f"{count:,} to encode, {reused.get(name, 0):,} in the cache")
          for name, count in encoded.items()),
        ("size of new rows", format_bytes(sum(field["bytes"] for field in estimate["fields"].values()))),
        ("pictures left out", f"{rejected:,}" if rejected else ""),
        ("memory of the text encoder", _bytes(memory.get("text"))),
        ("memory of the VAE", _bytes(memory.get("latent")) and (
            f"{_bytes(memory['latent'])}, for {counted(memory['batch_size'], 'picture')} at a time"
            + ("" if memory["largest_batch"] is None else f"; {memory['largest_batch']:,} would fit"))),
        ("memory of the vision model", _bytes(memory.get("embedding"))),
        ("time", "" if measured is None else f"about {clock(measured['seconds'])}"),
        ("memory, measured", "" if measured is None else _bytes(measured["memory"]))]
    says = "encoding takes no encoder: the cache has all rows" if not any(encoded.values()) else (
        f"encoding takes {'memory that cannot be counted' if not peaks else format_bytes(max(peaks))}")
    return _fitting(says, max(peaks, default=None), memory.get("free"), facts)


def _of_check(document: Mapping[str, Any]) -> Answer:
    memory = document["memory"]
    notes = tuple(document["notes"])
    if document["faults"] and memory is None:
        faults = document["faults"]
        return Answer(tone="error", says="The run cannot begin.", hints=tuple(
            f"{fault['what']}{'; ' * bool(fault['hint'])}{fault['hint']}" for fault in faults[:FAULTS]))
    facts = [("steps of an epoch", f"{document['steps_per_epoch']:,}")]
    if memory is None:
        return Answer(tone="warning", says="The run can begin; its memory cannot be estimated.", facts=tuple(facts),
                      hints=notes)
    facts += [(f"memory of {name}", format_bytes(size)) for name, size in memory["parts"].items() if size]
    facts.append((f"memory of the {'computer' if memory['device'] == 'cpu' else 'GPU'}", _bytes(memory["total"])))
    ways = tuple((f"{format_bytes(way['peak'])}, which {'fits' if way['fits'] else 'does not fit'}", way["settings"])
                 for way in memory["ways"])
    peak = memory["peak"]
    return replace(_fitting(f"training takes {format_bytes(peak)} at its peak", peak, memory["free"], facts),
                   hints=notes, ways=ways)


def _fitting(says: str, peak: int | None, free: int | None, facts: Sequence[tuple[str, str]]) -> Answer:
    """`says`, with whether the peak fits into what is free."""
    if peak is None or free is None:
        tone, fits = "info", ""
    else:
        tone = "good" if peak <= free else "error"
        fits = f", and {'fits' if peak <= free else 'does not fit'} in the {format_bytes(free)} that are free"
    return Answer(tone=tone, says=f"{says[:1].upper()}{says[1:]}{fits}.",
                  facts=tuple(fact for fact in facts if fact[1]))


def _bytes(size: int | None) -> str:
    return "" if size is None else format_bytes(size)
