"""The text options of a recipe, and records of captions that text encoders do not read to their end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prep.errors import ConfigError
from prep.models.configs import Configs
from prep.models.families.registry import FAMILIES
from prep.models.family import Family, TextOptions
from prep.models.files import Model
from prep.models.pipeline import family_of
from prep.recipe.schema import ModelOptions, Recipe

if TYPE_CHECKING:
    from prep.models.text.truncation import Truncation, TruncationFinder

MOST_LOST = 500  # characters of lost words in a finding
PART, WHOLE = "caption-over-one-limit", "caption-over-limit"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextReading:
    """The model whose text encoders read captions, and their options."""

    model: Model
    family: Family
    options: TextOptions

    def finder(self) -> TruncationFinder:
        """Loads the tokenizers. Raises `ModelError`."""
        from prep.models.loading import quiet_libraries  # here: a run without new captions imports no torch
        quiet_libraries()
        from prep.models.text.truncation import TruncationFinder

        return TruncationFinder(self.model, self.family, self.options)

    def truncations(self, captions: Sequence[str]) -> Iterable[Truncation | None]:
        """The losses of each caption; `None`: nothing is lost. Raises `ModelError`."""
        return self.finder().find(captions)


def reading_of(model: str, recipe: Recipe) -> TextReading:
    """How the text encoders of a model, a directory, single file or Hub id, read captions. Raises `ModelError`,
    `ConfigError`."""
    from prep.models.hub import locate  # here: as above

    where = locate(model, download=None)
    family = FAMILIES[family_of(where, recipe.model.family)]
    return TextReading(model=where, family=family, options=text_options_of(family, recipe.model, Configs(where)))


def over_limit(readings: Iterable[Truncation | None]) -> Iterator[tuple[str, str]]:
    """(code, detail) of the findings on a picture's captions that are not read whole: of each code, the worst."""
    worst: dict[str, Mapping[str, Any]] = {}
    for reading in readings:
        if reading is not None:
            record = record_of(reading)
            worst[code_of(record)] = max(record, worst.get(code_of(record), record),
                                         key=lambda record: int(record["tokens"]) - int(record["read"]))
    yield from ((code, detail_of(most)) for code, most in worst.items())


def text_options_of(family: Family, chosen: ModelOptions, configs: Configs) -> TextOptions:
    """The text options of a recipe. Raises `ConfigError` for those that the family or the model cannot follow."""
    facts, tokens = family.text, chosen.max_length or family.text.max_length
    if not facts.shortest <= tokens <= facts.longest:
        wanted = str(facts.longest) if facts.shortest == facts.longest else f"{facts.shortest} to {facts.longest}"
        raise ConfigError(f"model.max_length is {tokens}, expected {wanted} for family '{family.name}'",
                          hint="leave it out; longer captions need --text-windows 2 or 3" if facts.windows else
                          f"leave it out for the family's own, {facts.max_length}")
    if chosen.text_windows > 1 and not facts.windows:
        raise ConfigError(f"model.text_windows is {chosen.text_windows}, but the text of family '{family.name}' is not "
                          "read in windows", hint="leave it out; --max-length sets the number of tokens")
    if chosen.clip_skip and not facts.clip:
        raise ConfigError(f"model.clip_skip is {chosen.clip_skip}, but rows of family '{family.name}' have no hidden "
                          "states of CLIP", hint="leave it out")
    layers = configs("text_encoder").get("num_hidden_layers") if chosen.clip_skip else None
    if isinstance(layers, int) and chosen.clip_skip >= layers:
        raise ConfigError(f"model.clip_skip is {chosen.clip_skip}, expected less than {layers}, the layers of the text "
                          "encoder", hint="1 is usual for models that were trained with the last layer but one")
    if chosen.text_quantization != "none" and family.text_compute is None:
        raise ConfigError(f"model.text_quantization is '{chosen.text_quantization}', but the text encoders of family "
                          f"'{family.name}' are all CLIP, which is small and never quantized", hint="leave it out")
    return TextOptions(max_length=tokens, clip_skip=chosen.clip_skip, windows=chosen.text_windows,
                       quantization=chosen.text_quantization)


def record_of(cut: Truncation) -> dict[str, Any]:
    """The record of a truncation, as JSON allows, with as many words as a finding has."""
    lost = "" if cut.whole else cut.lost if len(cut.lost) <= MOST_LOST else f"{cut.lost[:MOST_LOST - 1]}…"
    return {"encoder": cut.encoder, "tokens": cut.tokens, "read": cut.read, "lost": lost, "whole": cut.whole}


def code_of(record: Mapping[str, Any]) -> str:
    """The finding's code: whether all encoders lose something, or only some of them."""
    return PART if record["whole"] else WHOLE


def detail_of(record: Mapping[str, Any]) -> str:
    """The finding's text on a caption that is cut."""
    read = f"{record['encoder']} reads {record['read']} of {record['tokens']} tokens"
    return f"{read}, {record['whole']} all of them" if record["whole"] else f"{read}, and not '{record['lost']}'"
