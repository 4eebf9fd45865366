"""Finds captions and prompts that are longer than the text encoders read, and says which words are lost.

The tokenizers are loaded only for captions that are new: what is lost of a caption is remembered by the key of its row,
which covers the caption, the tokenizers, the template and the options.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prep.dataset.texts import TextReading, code_of, detail_of, record_of
from prep.encode.targets.records import Targets
from prep.findings import Finding, finding
from prep.fs.memo import Memo
from prep.models.family import TextEncoding, TextOptions
from prep.progress import Progress, phase
from prep.recipe.schema import MOST_WINDOWS

if TYPE_CHECKING:
    from prep.models.text.truncation import Truncation

KIND = "lost-1"  # of a text row's key: what is lost of its caption; raise the number when `record_of` changes
PROMPT = "prompt-over-limit"
MARKS = 2  # start and end of a window


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncated:
    """The findings on captions and prompts that are cut, and what helps."""

    findings: tuple[Finding, ...] = ()
    hint: str = ""


def find_truncated(targets: Targets, reading: TextReading, facts: Memo, progress: Progress) -> Truncated:
    """The findings on the captions of all samples and on prompts. Raises `ModelError`."""
    records = _records(targets, reading, facts, progress)
    findings = tuple(dict.fromkeys(_findings(targets, records)))
    most = max((record["tokens"] for record in records.values() if not record["whole"]), default=0)
    return Truncated(findings=findings, hint=_advice(reading.family.text, reading.options, most) if most else "")


def _records(targets: Targets, reading: TextReading, facts: Memo, progress: Progress) -> Mapping[str, Any]:
    """What is lost, by key of a text row; without those of which nothing is lost."""
    with phase(progress, "counting tokens"):
        cut: dict[str, bytes] = {}
        lacking = []
        for key, text in targets.texts.items():
            if text.caption is None:
                continue
            record = facts.get_digest(KIND, key)
            if record is None:
                lacking.append(key)
            elif record:
                cut[key] = record
        if lacking:
            captions = [str(targets.texts[key].caption) for key in lacking]
            for key, truncation in zip(lacking, reading.truncations(captions), strict=True):
                facts.put_digest(KIND, key, record := _record(truncation))
                if record:
                    cut[key] = record
    return {key: json.loads(record) for key, record in cut.items()}


def _record(truncation: Truncation | None) -> bytes:
    return b"" if truncation is None else json.dumps(record_of(truncation)).encode()


def _findings(targets: Targets, records: Mapping[str, Any]) -> Iterator[Finding]:
    if not records:
        return
    for sample, label in zip(targets.samples, targets.labels, strict=True):
        for text in sample.texts:
            if record := records.get(text.key):
                yield finding(label, code_of(record), detail_of(record))
    for prompt in targets.prompts:
        for key in (prompt.positive_key, prompt.negative_key):
            if (record := records.get(key)) and not record["whole"]:
                yield finding(prompt.prompt, PROMPT, detail_of(record))


def _advice(facts: TextEncoding, options: TextOptions, tokens: int) -> str:
    """What helps to read captions of up to so many tokens."""
    inner = options.max_length - MARKS
    if facts.windows and options.windows < MOST_WINDOWS:
        windows = min(MOST_WINDOWS, -(-tokens // inner))
        return f"--text-windows {windows} reads up to {windows * inner} tokens of a caption"
    if options.max_length < facts.longest:
        return f"--max-length {facts.longest} reads more of a caption"
    return "shorten these captions; models of this family read no more"
