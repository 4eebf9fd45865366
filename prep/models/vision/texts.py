"""Embeds texts into the space of a vision model's pictures, and remembers the rows by model and text.

A cache and a manifest have none of them: a text takes a hundredth of a picture's time. The memory (`prep.fs.memo`) is
disposable; a caption whose row is not there is compared with nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from prep.digest import digest_json
from prep.errors import ModelError, OutOfMemoryError
from prep.formatting import counted
from prep.models.vision.model import VisionModel
from prep.progress import Progress, phase
from prep.runtime import defer_interrupts

MEMORY = ("texts", "1")  # kind and version: raised when the same text would get another row
BATCH = 64  # texts at a time
_RECORD = "row"
_NOT_COMPARED = "texts are not compared with pictures"
_PACKAGES = (("sentencepiece", "sentencepiece"), ("protobuf", "google.protobuf"))  # and the module of each
_EXTRA = "pip install 'latentry[siglip]'"
_TOKENIZER = 32  # bytes of the digest of the tokenizer's files, in front of each row

Rows = np.ndarray[Any, np.dtype[np.float16]]  # [C, D], each of length 1


class Memory(Protocol):
    """What keeps rows between runs: `prep.fs.memo.Memo`."""

    @property
    def trust(self) -> bool: ...

    def get_digest(self, kind: str, digest: str) -> bytes | None: ...

    def put_digest(self, kind: str, digest: str, value: bytes) -> None: ...

    def flush(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedTexts:
    """What became of texts that are embedded."""

    made: int  # with a dry run, would be
    reused: int
    note: str  # why some have no row; "" if all have one


def lacking_texts(model: VisionModel, texts: Iterable[str], memory: Memory) -> list[str]:
    """Those of `texts`, each once, that have no row by this model and its tokenizer; no empty one."""
    assert model.reading is not None, "it reads texts"
    tokenizer = bytes.fromhex(model.reading.digest)
    return [text for text in dict.fromkeys(texts) if text.strip()
            and (_recalled(memory, model.expected.digest, text) or b"")[:_TOKENIZER] != tokenizer]


def embed_lacking(model: VisionModel, texts: Iterable[str], memory: Memory, *, device: str, progress: Progress,
                  dry_run: bool = False) -> EmbeddedTexts:
    """Embeds those of `texts` that have no row; with `dry_run`, only counts them. They are compared for information,
    after pictures, which took the time: so what is wrong with texts stops no command."""
    wanted = {text for text in texts if text.strip()}
    lacking, note = lacking_texts(model, sorted(wanted), memory), unread(model, memory)
    reused, left = len(wanted) - len(lacking), len(lacking)
    if dry_run:
        left = left if note else 0
    elif not note:
        reason = ""
        try:
            embed_texts(model, lacking, memory, device=device, progress=progress)
        except (ModelError, OutOfMemoryError) as error:
            reason = f"{error.message} (hint: {error.hint})"
        left = len(lacking_texts(model, lacking, memory))
        if left and not reason:
            reason = f"the model in {model.folder} makes no finite numbers of {counted(left, 'text')}"
        note = reason and f"{_NOT_COMPARED}: {reason}"
    return EmbeddedTexts(made=len(lacking) - left, reused=reused, note=note)


def embed_texts(model: VisionModel, texts: Sequence[str], memory: Memory, *, device: str, progress: Progress) -> None:
    """Makes the rows of `texts`, which `lacking_texts` returned, on the first of the devices in `device`, and remembers
    them as it goes. A text that is longer than the model reads is cut off there; one whose row is not finite gets none.

    Raises `ModelError`, `OutOfMemoryError`.
    """
    if not texts:
        return
    with defer_interrupts():
        from prep.models.device.memory import memory_freed  # here: a run with nothing to embed imports no torch
        from prep.models.tensors import device_names
        from prep.models.vision.text_encoder import TextEncoder
    assert model.reading is not None, "it reads texts"
    with phase(progress, "loading the text half of the vision model"):
        encoder = TextEncoder(model, device=device_names(device)[0])
    with memory_freed(encoder.batches.device), progress("embedding texts", len(texts), "texts") as tick:
        for start in range(0, len(texts), BATCH):
            some = texts[start:start + BATCH]
            for text, row in zip(some, encoder.rows(some), strict=True):
                if row is not None:
                    memory.put_digest(_RECORD, _name(model.expected.digest, text),
                                      bytes.fromhex(model.reading.digest) + row.tobytes())
            memory.flush()
            tick(len(some))
        del encoder


def remembered_rows(memory: Memory, model: str, texts: Iterable[str], width: int, tokenizer: str = ""
                    ) -> tuple[list[str], Rows]:
    """(those of `texts` that have a row of `width` numbers by the model with this fingerprint; their rows): by the
    tokenizer with this digest, or "" for the last one that it was used with."""
    found: dict[str, bytes] = {}
    for text in texts:
        if text not in found and (record := _recalled(memory, model, text)) is not None \
                and len(record) == _TOKENIZER + 2 * width and record.startswith(bytes.fromhex(tokenizer)):
            found[text] = record[_TOKENIZER:]
    return list(found), np.frombuffer(b"".join(found.values()), np.float16).reshape(len(found), width)


def unread(model: VisionModel, memory: Memory) -> str:
    """What to say of a model, which reads texts, if they cannot be read and remembered here; "" if they can."""
    assert model.reading is not None, "it reads texts"
    if not memory.trust:  # as on Windows: no row would be found again
        return f"{_NOT_COMPARED}: on this computer nothing is remembered"
    needed = _PACKAGES if model.reading.tokenizer == "SiglipTokenizer" else ()
    lacking = [name for name, module in needed if not _installed(module)]
    return "" if not lacking else (
        f"{_NOT_COMPARED}: the tokenizer in {model.folder} needs {' and '.join(lacking)}: {_EXTRA}")


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _recalled(memory: Memory, model: str, text: str) -> bytes | None:
    return memory.get_digest(_RECORD, _name(model, text))


def _name(model: str, text: str) -> str:
    return digest_json({"kind": "embedded text", "model": model, "text": text})
