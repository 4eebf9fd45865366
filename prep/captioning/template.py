"""Prompts and captions with the parts of a picture in them: `{folder}, {caption}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from prep.captioning.engine import Answer, Unanswered
from prep.captioning.structured import Schema
from prep.captioning.tags import Tagging
from prep.captions.options import CaptionOptions
from prep.captions.read import BadCaption, judge_captions
from prep.captions.variants import variants_of
from prep.dataset.ingest import caption_from_name, words_of
from prep.errors import UsageError
from prep.formatting import printable
from prep.parse import suggest
from prep.recipe.layout import REPEATED
from prep.sources.item import Item

FIELDS: Mapping[str, str] = {"caption": "what the model said", "folder": "the directory that the picture is in",
                             "name": "the picture's name, as words", "old": "the caption that the picture had",
                             "tags": "what a tagger said"}
CAPTION, TAGS = "{caption}", "{tags}"
_FIELD = re.compile(r"\{([a-z_]+)\}")  # other braces are plain text
_OBJECT = "\x02caption\x02"  # stands for a JSON object; no caption has such characters
_GAP = re.compile(r"\s*,(?:\s*,)+")  # commas around a part that is empty


@dataclass(frozen=True, kw_only=True, slots=True)
class Wording:
    """What models are asked, and what captions are made of their answers."""

    prompts: tuple[str, ...]  # each makes a caption
    template: str = CAPTION
    trigger: str = ""
    tagging: Tagging | None = None  # how the tags of a tagger are chosen
    scored: bool = False  # whether what the model says are scores of tags
    schema: Schema | None = None  # of the JSON object that a model is asked for

    def __post_init__(self) -> None:
        """Raises `UsageError` for a field that there is not, and for a template without the model's words."""
        known = [name for name in FIELDS if name != "tags" or self.tagging is not None]
        for option, texts, fields in (("--prompt", self.prompts, [name for name in known if name != "caption"]),
                                      ("--template", (self.template,), known)):
            for text in texts:
                for name in _FIELD.findall(text):
                    if name not in fields:
                        if name == "tags":
                            raise UsageError(f"{option} has '{TAGS}', but there is no tagger",
                                             hint="add --tagger DIR, or a Hub id: SmilingWolf/wd-vit-tagger-v3")
                        raise UsageError(f"{option} has '{{{name}}}', expected one of: "
                                         f"{', '.join(f'{{{field}}}' for field in fields)}{suggest(name, fields)}")
        for option, text in (("--template", self.template), ("--trigger", self.trigger)):
            try:
                judge_captions([text])
            except BadCaption as error:
                raise UsageError(f"{option} {error.detail.removeprefix('caption ')}") from None
        if CAPTION not in self.template and not (self.scored and TAGS in self.template):
            raise UsageError(f"--template is '{printable(self.template)}', expected one with {CAPTION}, which is what "
                             "the model says")
        if self.tagging is not None and not self.scored and TAGS not in "".join((*self.prompts, self.template)):
            raise UsageError(f"--tagger is given, but neither --prompt nor --template has {TAGS}",
                             hint=f"for example: --prompt 'Describe this image. Its tags: {TAGS}'")

    @property
    def uses_old(self) -> bool:
        """Whether earlier captions decide the new ones."""
        return any("{old}" in text for text in (*self.prompts, self.template))

    @property
    def choices(self) -> tuple[str, ...]:
        """What decides a caption besides the answers and the template."""
        return () if self.tagging is None else (self.tagging.digest,)

    def heard(self, answer: Answer) -> Answer:
        """What a model said, as words: of scores, the tags that are chosen."""
        return replace(answer, text=self.tags_in(answer)) if self.scored else answer

    def tags_in(self, scores: Answer) -> str:
        """The tags of a picture, chosen from what a tagger said of it."""
        return self.tagging.chosen(scores.text) if self.tagging else ""

    def asked_of(self, item: Item, old: Sequence[str], tags: str = TAGS) -> tuple[str, ...]:
        """The prompts for a picture whose captions were `old`."""
        parts = {**_parts(item, old), "tags": tags}
        prompts = tuple(_filled(prompt, parts) for prompt in self.prompts)
        return prompts if self.schema is None else tuple(map(self.schema.asking, prompts))

    def read(self, answer: Answer | Unanswered) -> Answer | Unanswered:
        """An answer as it is remembered; one that is not what was asked for counts as none."""
        return answer if self.schema is None else self.schema.read(answer)

    def caption_of(self, item: Item, old: Sequence[str], said: str, tags: str = TAGS) -> str:
        """The caption of a picture about which a model `said` something. Raises `BadCaption`."""
        # A JSON object takes its place when commas around empty parts are gone: it has commas of its own.
        words = said if self.schema is None else _OBJECT
        text = _filled(self.template, {**_parts(item, old), "caption": words, "tags": words if self.scored else tags})
        text = text if self.template == CAPTION else _GAP.sub(",", text).strip(" ,")
        lines = judge_captions([text if self.schema is None else text.replace(_OBJECT, said)])[0]
        options = CaptionOptions(trigger=" ".join(self.trigger.split()), keep_separator="")
        return variants_of(lines, options)[0][0] if lines else ""


def _parts(item: Item, old: Sequence[str]) -> dict[str, str]:
    folder = PurePosixPath(item.name).parent.name or PurePosixPath(item.picture.file).parent.name
    return {"folder": words_of(REPEATED.sub(r"\2", folder)), "name": caption_from_name(item.name),
            "old": old[0] if old else ""}


def _filled(text: str, parts: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda match: parts[match[1]], text)
