"""Tries in a worker what a model's tokenizer does with a text before it comes to tokens.

tokenizer.json is a program that came with a model: it normalizes a text, by replacements of any length, and splits it,
by regular expressions. Both may take longer than anybody waits, or more memory than there is. So a text goes through
these parts in a worker, within limits of time and memory, before it goes to the tokenizer itself, which does the same.

Most classes of transformers make these parts themselves, and read just the vocabulary: their texts need no trial.

ChatGLM's tokenizer.model and SigLIP's spiece.model normalize texts, too. sentencepiece reads them, in C++, and files
made for that end its process in release 0.2.1 (google/sentencepiece 1263, 1269). So a worker reads such a file first,
and splits each text.
"""

from __future__ import annotations

import functools
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from prep.errors import ModelError, first_line, is_panic
from prep.models.files import VOCABULARY, ComponentFiles
from prep.parse import Unparsed
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.service import Limits, Service, Task

LIMITS = Limits(seconds=20, memory=2 << 30)  # for one question: it takes a tenth of a second and 300 MB
MOST_AT_ONCE = 1 << 18  # characters of a question, unless one text has more
MOST_ADDED = 1 << 20  # characters of a text, beside its own
NAME = "tokenizer.json"
HINT = f"take the {NAME} of the model's authors"


class Trial:
    """The trial of texts for one tokenizer; `ask` raises `ModelError` for one that takes too long or too much."""

    def __init__(self, files: ComponentFiles, vocabulary: str = VOCABULARY) -> None:
        """`vocabulary`: the name of the file that sentencepiece reads, if there is one. Raises `Unparsed` for a
        tokenizer.json that is no JSON."""
        self._folder, whole = files.folder, files.small.get(vocabulary)
        self._hint = HINT if whole is None else HINT.replace(NAME, vocabulary)
        self._parts = (_parts_of(files.small[NAME]), b"") if whole is None else ("", whole)
        self._pool = WorkerPool(SERVICE, most=1)
        weakref.finalize(self, self._pool.close)

    def ask(self, texts: Iterable[str]) -> None:
        """Tries texts, a worker for all of them."""
        batch, size = list[str](), 0
        for text in texts:
            if batch and size + len(text) > MOST_AT_ONCE:
                self._ask(batch)
                batch, size = [], 0
            batch.append(text)
            size += len(text)
        if batch:
            self._ask(batch)

    def _ask(self, texts: list[str]) -> None:
        try:
            (failure,) = self._pool.ask(TRY, (*self._parts, texts), LIMITS)
        except WorkerLost as lost:
            failure = lost.detail
        if failure:
            raise ModelError(f"the tokenizer in {self._folder} cannot take a text within its limits: {failure}",
                             hint=self._hint)


def try_first(tokenizer: Any, trial: Trial) -> None:
    """From now on each text is tried before `tokenizer` gets it, whichever of its methods is called; of one that has no
    part in Rust, and takes texts one by one, where it is called itself."""
    if tokenizer.is_fast:
        tokenizer._tokenizer = _Tried(tokenizer._tokenizer, trial)
        return
    kind = type(tokenizer)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        trial.ask(strings_in([args, options]))
        return kind.__call__(self, *args, **options)

    tokenizer.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class _Tried:
    """A tokenizer of the library tokenizers, whose texts are tried."""

    def __init__(self, backend: Any, trial: Trial) -> None:
        vars(self).update(_backend=backend, _trial=trial)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_backend"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_backend"], name, value)

    def encode(self, text: Any, *args: Any, **options: Any) -> Any:
        self._trial.ask(strings_in(text))
        return self._backend.encode(text, *args, **options)

    def encode_batch(self, texts: Any, *args: Any, **options: Any) -> Any:
        self._trial.ask(strings_in(texts))
        return self._backend.encode_batch(texts, *args, **options)

    def encode_batch_fast(self, texts: Any, *args: Any, **options: Any) -> Any:
        self._trial.ask(strings_in(texts))
        return self._backend.encode_batch_fast(texts, *args, **options)


def strings_in(value: Any) -> Iterator[str]:
    """Yields the strings in lists and tables of any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings_in(item)


def _parts_of(data: bytes) -> str:
    """A tokenizer.json with the parts that a text goes through before it comes to tokens, and its special tokens."""
    try:
        document = json.loads(data)
        added = [{**token, "id": number} for number, token in enumerate(document.get("added_tokens") or [], 1)]
        return json.dumps({"version": "1.0", "added_tokens": added, "normalizer": document.get("normalizer"),
                           "pre_tokenizer": document.get("pre_tokenizer"),
                           "model": {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Unparsed(f"{NAME} is no tokenizer: {first_line(error)}"[:300]) from None


# ---- in a worker -----------------------------------------------------------------------------------------------------


def _tried(question: tuple[str, bytes, list[str]]) -> Iterator[str]:
    """Yields the reason why texts cannot be taken; "" if they can. The question has the parts of a tokenizer.json or
    the bytes of a tokenizer.model, the other being empty."""
    *parts, texts = question
    try:
        yield _failure(_made(*parts), texts)
    except MemoryError:
        raise
    except BaseException as error:  # what a model's file does may raise anything
        if not (is_panic(error) or isinstance(error, Exception)):
            raise
        yield f"{first_line(error)}"[:300]


def _failure(made: _Made, texts: list[str]) -> str:
    for text in texts:
        if (length := len(made.normalize(text))) > len(text) + MOST_ADDED:
            return f"it makes {length} characters of {len(text)}"
    made.split(texts)
    return ""


class _Made(NamedTuple):
    """What a tokenizer does with texts."""

    normalize: Callable[[str], str]
    split: Callable[[list[str]], object]


@functools.lru_cache(maxsize=4)
def _made(parts: str, whole: bytes) -> _Made:
    if whole:
        import sentencepiece  # an extra

        model = sentencepiece.SentencePieceProcessor(model_proto=whole)
        return _Made(model.normalize, lambda texts: [model.encode(text) for text in texts])
    made = Tokenizer.from_str(parts)
    normalizer = made.normalizer
    return _Made(str if normalizer is None else normalizer.normalize_str,
                 functools.partial(made.encode_batch_fast, add_special_tokens=False))


def _prepare() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of their own would take memory


TRY = Task(name="try", question=tuple[str, bytes, list[str]], part=str, work=_tried)
SERVICE = Service(module=__name__, tasks=(TRY,), prepare=_prepare)
