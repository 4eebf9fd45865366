"""Finds what text encoders do not read of long captions, without reading their weights.

The pipeline's own `encode_prompt` encodes a few probes with stand-ins for the encoders, while its tokenizers are
watched: that shows what it writes around a caption, and after how many tokens it cuts. Captions are then given to the
tokenizers alone. A caption's tokens are those between the template's.

100,000 captions of 60 words take about 10 s with CLIP on one core; the pipeline would take minutes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from prep.errors import ModelError, first_line
from prep.models.components import class_of
from prep.models.configs import pipeline_index
from prep.models.family import Family, TextOptions
from prep.models.files import FETCH_AGAIN, Model
from prep.models.fingerprint import text_files
from prep.models.pipeline import APART, PROCESSORS
from prep.models.text.lengths import row_length, text_pipeline
from prep.models.text.pipeline import tokenizer_name, tokenizers_of
from prep.models.text.tokenizer import without_panics

BATCH = 1024  # captions counted at once
# The first is in no template; the second shows what becomes of spaces and capital letters; the third is longer than any
# encoder reads, which only trimmed rows tell: of others it is cut short, since its tokens take a tenth of a second.
_PROBES = ("vwxyz", " A É  b ", "a " * 5000)
_CHANGES: tuple[Callable[[str], str], ...] = (str, str.strip, str.lower, lambda text: text.lower().strip())
# Of an encoder's class, or of a tokenizer's without one: CLIPTextModel, T5EncoderModel, T5TokenizerFast.
_KIND = re.compile(r"(Text|Encoder|Model|Tokenizer|For[A-Z]).*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """A caption that is longer than a text encoder reads; of several encoders, the one that reads most of it."""

    encoder: str  # CLIP, T5, …
    tokens: int  # of the caption
    read: int  # of these
    lost: str  # the words that are not read
    whole: str = ""  # another encoder, which reads all of the caption; "": there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """The lengths of captions."""

    encoder: str  # CLIP, T5, …: of several, the one that reads most
    limit: int  # tokens of a caption that it reads, without those of start, end and template
    tokens: tuple[int, ...]  # of each caption, in the same count


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A text encoder's reading of a caption."""

    encoder: str  # CLIP, T5, …
    tokens: tuple[tuple[str, bool], ...]  # the text of each token of the caption, and whether it is read

    @property
    def read(self) -> int:
        """The number of tokens that are read."""
        return sum(read for _, read in self.tokens)


class TruncationFinder:
    """Finds what is lost of captions. Raises `ModelError` if the tokenizers cannot be loaded."""

    def __init__(self, model: Model, family: Family, options: TextOptions) -> None:
        files, index = text_files(model), pipeline_index(model)
        tokenizers = tokenizers_of(model, family, files)
        pipeline = text_pipeline(model, family, files, tokenizers)
        self._model = model
        probes = list(_PROBES) if family.text.layout == "trimmed" else [*_PROBES[:-1], _PROBES[-1][:2]]
        named = {name: tokenizer_name(name) for name in files.encoders if tokenizer_name(name) in tokenizers}
        named |= {name: name for name in APART if name in tokenizers and name not in PROCESSORS}  # without an encoder
        with ExitStack() as stack, torch.inference_mode(), without_panics(model):
            seen = {name: stack.enter_context(_watched(tokenizers[there])) for name, there in named.items()}
            try:
                rows = family.text.encode(pipeline, probes, options, torch.device("cpu"))
            except ModelError:
                raise
            except Exception as error:  # some faulty configs fail only here
                raise ModelError(f"the tokenizers of {model} cannot count the tokens of a caption: {first_line(error)}",
                                 hint=FETCH_AGAIN) from None
        kinds = {name: _KIND.sub("", class_of(index, name, model)[1]) for name in seen}
        if (pieces := family.text.pieces) is not None:
            self._readers = [_Reader(encoder=kinds[name], tokenizer=tokenizers[there], before="", after="", change=str,
                                     room=options.max_length, added=0, pieces=pieces) for name, there in named.items()]
            return
        # A tokenizer whose texts are never cut is not among the readers.
        self._readers = [_reader(kinds[name], tokenizers[named[name]], calls)
                         for name, calls in seen.items() if len(calls) >= len(_PROBES)]
        if family.text.layout == "trimmed" and len(self._readers) == 1:
            short, _, longest = (row_length(family, row) for row in rows)
            self._readers = [self._readers[0].within(short, longest)]

    def find(self, captions: Sequence[str]) -> Iterator[Truncation | None]:
        """Yields the loss of each caption; `None` if every encoder reads all of it."""
        for start in range(0, len(captions), BATCH):
            chunk = captions[start:start + BATCH]
            with without_panics(self._model):
                by_reader = [reader.truncations(chunk) for reader in self._readers]
            for truncations in zip(*by_reader, strict=True):
                yield _of_all(truncations, [reader.encoder for reader in self._readers])

    def readings(self, caption: str) -> list[Reading]:
        """The readings of a caption by each encoder that may cut captions."""
        return [reader.reading(caption) for reader in self._readers]

    def count(self, captions: Sequence[str]) -> TokenCounts | None:
        """The tokens of each caption for the encoder that reads most; `None` if no tokenizer of the pipeline cuts."""
        if not self._readers:
            return None
        reader = max(self._readers, key=lambda reader: reader.limit)
        lengths = [length for start in range(0, len(captions), BATCH) for length in reader.counts(
            captions[start:start + BATCH])]
        return TokenCounts(encoder=reader.encoder, limit=reader.limit, tokens=tuple(lengths))


def _of_all(truncations: Sequence[Truncation | None], encoders: Sequence[str]) -> Truncation | None:
    """The loss of one caption, from the losses of each encoder."""
    cut = [truncation for truncation in truncations if truncation is not None]
    if not cut:
        return None
    whole = next((name for name, truncation in zip(encoders, truncations, strict=True) if truncation is None), "")
    best = min(cut, key=lambda truncation: len("".join(truncation.lost.split())))  # decoding adds spaces
    return Truncation(encoder=best.encoder, tokens=best.tokens, read=best.read, lost=best.lost, whole=whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """A tokenizer, and what a pipeline does with captions before and after it."""

    encoder: str
    tokenizer: Any
    before: str  # what the template has before a caption
    after: str
    change: Callable[[str], str]  # of the caption itself
    room: int  # tokens that are kept
    added: int  # tokens for start and end, beside these
    pieces: Callable[[str], Sequence[str]] | None = None  # those of `TextEncoding`

    def within(self, short: int, longest: int) -> _Reader:
        """The reader of a pipeline that may also cut rows: of the first probe to `short` tokens, of any to `longest`.

        Rows may lack the first tokens of the template.
        """
        (tokens,) = self._lengths([f"{self.before}{_PROBES[0]}{self.after}"])
        dropped = max(0, tokens + self.added - short)
        return replace(self, room=min(self.room, longest + dropped - self.added))

    @property
    def limit(self) -> int:
        """The number of a caption's tokens that are read."""
        return max(0, self.room - self._template)

    @property
    def _template(self) -> int:
        return self._lengths([f"{self.before}{self.after}"])[0] if self.before or self.after else 0

    def counts(self, captions: Sequence[str]) -> list[int]:
        """The tokens of each caption, without those of the template."""
        template = self._template
        texts = [f"{self.before}{self.change(caption)}{self.after}" for caption in captions]
        return [max(0, length - template) for length in self._lengths(texts)]

    def truncations(self, captions: Sequence[str]) -> list[Truncation | None]:
        """The loss of each caption."""
        texts = [f"{self.before}{self.change(caption)}{self.after}" for caption in captions]
        return [self._truncation(caption, text) if length > self.room else None
                for caption, text, length in zip(captions, texts, self._lengths(texts), strict=True)]

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        parts = [self._parts(text) for text in texts]
        counts = iter(self._counts([part for each in parts for part in each]))
        return [sum(islice(counts, len(each))) for each in parts]

    def _parts(self, text: str) -> Sequence[str]:
        return [text] if self.pieces is None else self.pieces(text)

    def _counts(self, parts: Sequence[str]) -> list[int]:
        if not self.tokenizer.is_fast:
            return [len(self._tokens(part)["input_ids"]) for part in parts]
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return [len(encoding) for encoding in backend.encode_batch_fast(parts, add_special_tokens=False)]

    def _tokens(self, part: str) -> Any:
        return self.tokenizer(part, add_special_tokens=False, verbose=False,
                              return_offsets_mapping=self.tokenizer.is_fast)

    def _tokenized(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text, and where they begin and end in it; nowhere, if the tokenizer does not say."""
        ids, spans, begin = list[int](), list[tuple[int, int]](), 0
        for part in self._parts(text):
            tokens = self._tokens(part)
            ids += tokens["input_ids"]
            spans += [(begin + start, begin + end) for start, end in tokens.get("offset_mapping", ())]
            begin += len(part)
        return ids, spans

    def _truncation(self, caption: str, text: str) -> Truncation | None:
        ids, spans = self._tokenized(text)
        gone = self._gone(ids)
        if self.tokenizer.is_fast:
            words, mine, lost = self._spelled(caption, text, spans, gone)
        else:
            words, mine, lost = self._decoded(ids, gone)
        if not lost or not words:
            return None
        return Truncation(encoder=self.encoder, tokens=mine, read=mine - lost, lost=words)

    def _gone(self, ids: Sequence[int]) -> range:
        """The places of tokens that are cut off."""
        places = range(len(ids))
        if self.pieces is None and self.tokenizer.truncation_side == "left":
            return places[:max(0, len(ids) - self.room)]
        return places[self.room:]

    def reading(self, caption: str) -> Reading:
        """The caption's tokens, without the template's; "…" is one for the same characters as the token before it."""
        text = f"{self.before}{self.change(caption)}{self.after}"
        ids, spans = self._tokenized(text)
        gone = self._gone(ids)
        if self.tokenizer.is_fast:
            first, last = len(self.before), len(text) - len(self.after)
            mine = [number for number, (start, end) in enumerate(spans) if start < last and end > first]
            words = ["…" if number and spans[number] == spans[number - 1] else
                     text[max(spans[number][0], first):min(spans[number][1], last)] for number in mine]
        else:
            start, end = (len(self._tokenized(part)[0]) for part in (self.before, self.after))
            mine = list(range(start, len(ids) - end))
            words = [self.tokenizer.decode([ids[number]], clean_up_tokenization_spaces=False) for number in mine]
        return Reading(encoder=self.encoder, tokens=tuple((word, number not in gone)
                                                          for word, number in zip(words, mine, strict=True)))

    def _spelled(self, caption: str, text: str, spans: Sequence[tuple[int, int]],
                 gone: range) -> tuple[str, int, int]:
        """The words of the caption at the tokens `gone`; how many tokens it has, and how many of them are gone."""
        first, last = len(self.before), len(text) - len(self.after)
        mine = [number for number, (start, end) in enumerate(spans) if start < last and end > first]
        lost = [number for number in mine if number in gone]
        if not lost:
            return "", len(mine), 0
        start, end = max(spans[lost[0]][0], first) - first, min(spans[lost[-1]][1], last) - first
        own, stripped = text[first:last], caption.strip()
        words = stripped if len(stripped) == len(own) else own  # with the caption's own capital letters
        return words[start:end].strip(), len(mine), len(lost)

    def _decoded(self, ids: Sequence[int], gone: range) -> tuple[str, int, int]:
        """As `_spelled`, by decoding tokens, for tokenizers that do not say where in the text they are."""
        first, last = (len(self._tokenized(part)[0]) for part in (self.before, self.after))
        mine = range(first, len(ids) - last)
        lost = [number for number in mine if number in gone]
        words = self.tokenizer.decode([ids[number] for number in lost], skip_special_tokens=True,
                                      clean_up_tokenization_spaces=False)
        return words.strip(), len(mine), len(lost)


@dataclass(frozen=True, slots=True)
class _TokenizerCall:
    """A text that a tokenizer was given, how many of its tokens it kept at most, and how many it added."""

    text: str
    room: int
    added: int


def _reader(encoder: str, tokenizer: Any, calls: Sequence[_TokenizerCall]) -> _Reader:
    """The reader of a tokenizer with these calls, one for each of the probes."""
    before, _, after = calls[0].text.partition(_PROBES[0])
    change = next((change for change in _CHANGES if f"{before}{change(_PROBES[1])}{after}" == calls[1].text), str)
    return _Reader(encoder=encoder, tokenizer=tokenizer, before=before, after=after, change=change, room=calls[0].room,
                   added=calls[0].added)


@contextmanager
def _watched(tokenizer: Any) -> Iterator[list[_TokenizerCall]]:
    """Inside, notes the calls of a tokenizer that may cut texts.

    Calls go through the class, also those from within its own methods, so the tokenizer gets a class of its own.
    """
    kind, seen = type(tokenizer), list[_TokenizerCall]()

    def call(self: Any, text: Any = None, *args: Any, **options: Any) -> Any:
        if options.get("truncation"):
            added = self.num_special_tokens_to_add() if options.get("add_special_tokens", True) else 0
            room = (options.get("max_length") or self.model_max_length) - added
            seen.extend(_TokenizerCall(part, room, added) for part in ([text] if isinstance(text, str) else text))
        return kind.__call__(self, text, *args, **options)

    tokenizer.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    try:
        yield seen
    finally:
        tokenizer.__class__ = kind
