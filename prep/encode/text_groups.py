"""Groups text rows by length, for families whose rows are trimmed: rows of one task have one shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prep.encode.targets.records import TextTarget
from prep.models.family import Family, TextOptions
from prep.models.files import Model


class TextGroups:
    """The lengths of text rows in tokens, rounded up; counted only for rows that are to be encoded."""

    def __init__(self, model: Model, family: Family, options: TextOptions, texts: Mapping[str, TextTarget]) -> None:
        self._model, self._family, self._options, self._texts = model, family, options, texts
        self._tokens: dict[str, int] = {}

    @classmethod
    def known(cls, like: TextGroups, tokens: Mapping[str, int]) -> TextGroups:
        """Lengths of other rows of the same model, without counting."""
        groups = cls(like._model, like._family, like._options, {})
        groups._tokens = dict(tokens)
        return groups

    def count(self, keys: Iterable[str]) -> None:
        """Counts the tokens of rows; does nothing if rows are not trimmed. Raises `ModelError`."""
        lacking = [key for key in keys if key not in self._tokens]
        if self._family.text.layout != "trimmed" or not lacking:
            return
        from prep.models.loading import quiet_libraries  # here: a run with nothing to encode imports no torch
        quiet_libraries()
        from prep.models.text.lengths import LengthCounter

        counter = LengthCounter(self._model, self._family, self._options)
        seeing = [key for key in lacking if self._texts[key].pictures]
        self._tokens |= {key: counter.seen(self._texts[key].caption, [
            picture.placement.bucket for picture in self._texts[key].pictures]) for key in seeing}
        lacking = [key for key in lacking if not self._texts[key].pictures]
        for negative in (False, True):
            captions = {key: caption for key in lacking if (caption := self._texts[key].caption) is not None
                        and self._texts[key].negative == negative}
            self._tokens |= dict(zip(captions, counter.groups(list(captions.values()), negative=negative), strict=True))
        self._tokens |= {key: counter.unconditional() for key in lacking if self._texts[key].caption is None}

    def only(self, keys: Iterable[str]) -> TextGroups:
        """The lengths of these rows alone, as another process needs them."""
        return TextGroups.known(self, {key: self._tokens[key] for key in keys if key in self._tokens})

    def tokens(self, key: str) -> int:
        """Tokens of the group of a row; 0 if rows are not trimmed, or if this one was not counted."""
        return self._tokens.get(key, 0)
