"""Tags with scores, as taggers give them, and the choice of those that become a caption.

What a tagger says of a picture is remembered as scores, of all tags that any threshold could choose; so another
threshold, another tag left out or another word for one costs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prep.digest import digest_json
from prep.errors import UsageError
from prep.formatting import printable
from prep.parse import Unparsed, expect

GENERAL, CHARACTER, RATING = 0, 4, 9  # categories, as Danbooru numbers them; 9 is the taggers' own
CATEGORIES = (GENERAL, CHARACTER, RATING)
LEAST = 0.05  # score of a tag that is remembered; ratings are, whatever theirs
# Defaults of the taggers' own page, https://huggingface.co/spaces/SmilingWolf/wd-tagger (app.py), and of get_wd14_tags
# in deepghs/imgutils. Characters are many and alike, so they take more.
THRESHOLD, CHARACTER_THRESHOLD = 0.35, 0.85
# Faces as "^_^", "o_o", "(o)_(o)" or "||_||" keep their underscores. Kohya's tagger
# (finetune/tag_images_by_wd14_tagger.py) knows them by their length of three characters at most; that page lists longer
# ones, too. In none of them do two letters or digits follow each other, as they do in tags of words.
_WORD = re.compile(r"[^\W_]{2}")

Scored = tuple[int, str, float]  # category, tag, score


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagging:
    """How tags are chosen."""

    tagger: str  # digest of the model; "": not read yet
    threshold: float = THRESHOLD
    character_threshold: float = CHARACTER_THRESHOLD
    without: frozenset[str] = frozenset()  # tags that are left out, as `plain` spells them
    words: tuple[tuple[str, str], ...] = ()  # other words for tags, as `plain` spells these
    underscores: bool = False  # whether they stay
    rating: bool = False  # whether the likeliest rating is the last tag

    @property
    def digest(self) -> str:
        """Of all that decides which tags are chosen."""
        return digest_json({"tagger": self.tagger, "threshold": f"{self.threshold:g}",
                            "character": f"{self.character_threshold:g}", "without": sorted(self.without),
                            "words": [list(pair) for pair in self.words], "underscores": self.underscores,
                            "rating": self.rating})

    def chosen(self, scores: str) -> str:
        """The tags in the spelled scores of a picture that are a caption: characters, the rest, each from the highest
        score down; separated by commas."""
        scored, least = read_scores(scores), {GENERAL: self.threshold, CHARACTER: self.character_threshold}
        tags = [tag for wanted in (CHARACTER, GENERAL) for category, tag, score in scored
                if category == wanted and score >= least[category]]
        ratings = [tag for category, tag, _ in scored if category == RATING]
        words, there = dict(self.words), [*tags, *(ratings[:1] if self.rating else [])]
        return ", ".join(dict.fromkeys(words.get(plain(tag)) or (tag if self.underscores else plain(tag))
                                       for tag in there if plain(tag) not in self.without))


def tagging_of(options: Mapping[str, Any]) -> Tagging:
    """What options of a command say; `None`: not given. Raises `UsageError`."""
    texts: Mapping[str, Callable[[Sequence[str]], Any]] = {"without": _left_out, "words": _replaced}
    return Tagging(tagger="", **{name: texts[name](value) if name in texts else value
                                 for name, value in options.items() if value is not None})


def plain(tag: str) -> str:
    """A tag with spaces instead of underscores, unless it is a face."""
    return " ".join(tag.replace("_", " ").split()) if _WORD.search(tag) else tag.strip()


def _left_out(texts: Sequence[str]) -> frozenset[str]:
    """The tags of --tags-without, each text some of them, separated by commas."""
    return frozenset(plain(tag) for text in texts for tag in text.split(",") if tag.strip())


def _replaced(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(tag, other words) of --tags-replace: old=new. Raises `UsageError`."""
    pairs = []
    for text in texts:
        # The last "=" that has something on both sides, since faces have some: "=_==closed eyes".
        old, _, new = text.rpartition("=")
        if not old.strip() or not new.strip():
            raise UsageError(f"--tags-replace is '{printable(text)}', expected OLD=NEW, like 'grey hair=gray hair'",
                             hint="--tags-without leaves a tag out")
        pairs.append((plain(old), " ".join(new.split())))
    return tuple(pairs)


def spell_scores(scored: Sequence[Scored]) -> str:
    """Scores as one line, the highest first, without those below `LEAST` but for ratings."""
    return json.dumps([[category, tag, round(score, 6)] for category, tag, score in
                       sorted(scored, key=lambda one: -one[2]) if score >= LEAST or category == RATING],
                      ensure_ascii=False, separators=(",", ":"))


def read_scores(text: str) -> list[Scored]:
    """What `spell_scores` made; empty for anything else, which only another program can have put there."""
    try:
        return [(expect(category, int, "category"), expect(tag, str, "tag"), expect(score, float, "score"))
                for category, tag, score in json.loads(text)]
    except (ValueError, TypeError, RecursionError, Unparsed):
        return []
