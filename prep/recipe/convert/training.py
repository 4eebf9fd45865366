"""Converts training settings of other tools to a `train.toml`, with notes on those without a counterpart.

It writes only settings that the trainer accepts, and only values within their bounds (`prep.training`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prep.models.checkpoints.contents import CHECKPOINTS
from prep.models.named import file_of
from prep.parse import Unparsed, hub_id
from prep.recipe.convert.note import ConversionNote, shown
from prep.recipe.schema import ModelOptions
from prep.recipe.write import comment_lines, quoted
from prep.setting import LARGEST
from prep.training.optimizers import OPTIMIZERS
from prep.training.table import SETTINGS

WHOLE = int(SETTINGS["lora.rank"].bounds[1])  # from that rank on LoKr's matrices are whole, up to 8192 rows a factor
# What the optimizers' libraries decay weights by, if a file does not say.
DECAYS: Mapping[str, float] = {**dict.fromkeys(OPTIMIZERS, 0.0), "adamw": 0.01, "adamw-8bit": 0.01,
                               "adamw-8bit-paged": 0.01}


@dataclass(kw_only=True, slots=True)
class Training:
    """A `train.toml` under construction."""

    settings: dict[str, Any] = field(default_factory=dict)  # by name with section: "lora.rank"
    notes: list[ConversionNote] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)  # of each setting, its name in the file

    def put(self, name: str, value: Any, key: str) -> None:
        """Adds a setting; a value that the trainer does not accept becomes a note on `key`, its name in the file."""
        if self._fits(name, value):
            self.settings[name], self.keys[name] = value, key
        else:
            self.note(key, value, f"{name} accepts {_values(name)}; not written")

    def put_nearest(self, name: str, value: float, key: str) -> None:
        """Adds a number, or the nearest that the trainer accepts, with a note; one below 0 has no nearest."""
        low, high = SETTINGS[name].bounds
        nearest = type(value)(min(max(value, low), high))
        if value < 0 <= low or nearest == value:
            self.put(name, value, key)
            return
        self.note(key, value, f"{name} accepts {_values(name)}; {nearest:g} is written")
        self.put(name, nearest, key)

    def put_rank(self, name: str, rank: int, key: str, kind: str) -> None:
        """Adds a rank. LoKr keeps its matrices whole from half their side on, for which people ask for 100,000."""
        if kind == "lokr" and rank > WHOLE:
            self.note(key, rank, f"asks for whole LoKr matrices, which {name} = {WHOLE} makes, too; {WHOLE} is written")
            rank = WHOLE
        self.put_nearest(name, rank, key)

    def put_range(self, low: float, high: float, keys: tuple[str, str]) -> None:
        """Adds the least and the largest t that are drawn, as fractions of the noise schedule; all of it: nothing."""
        if not max(low, 0) < min(high, 1):
            self.note(keys[0], None, f"up to {keys[1]} there is one timestep at most, which has no counterpart; not "
                      "written")
            return
        for name, value, usual, key in (("low", low, 0, keys[0]), ("high", high, 1, keys[1])):
            if value != usual:
                self.put(f"timesteps.{name}", value, key)

    def put_epochs(self, name: str, count: float, key: str) -> None:
        """Adds an interval in whole epochs, as other tools count them; less than one epoch: never."""
        whole = int(count) if 0 <= count <= LARGEST else 0
        self.put(name, f"{whole} epoch{'' if whole == 1 else 's'}" if whole else 0 if 0 <= count < 1 else count, key)

    def put_debiased(self, key: str, value: Any, *, predicts_v: bool, beside: str = "") -> None:
        """Weights the loss by 1 / sqrt(SNR), which sd-scripts and OneTrainer limit to SNRs of at most 1,000: they reach
        that in the first few of a thousand timesteps, whose weights are near zero either way.
        """
        if predicts_v:
            self.note(key, value, "for models that predict v it is another weight, 1 / (SNR + 1): no counterpart")
        elif beside:
            self.note(key, value, f"one weighting at a time; {beside} beside it is written")
        else:
            self.put("loss.weighting", "debiased", key)

    def put_optimizer(self, name: str, values: Mapping[str, tuple[Any, str]]) -> None:
        """Adds the optimizer `name` and its settings: `values` are {setting: (value, key)}; it may lack some of them.
        """
        self.settings["optimizer.name"] = name
        if "weight_decay" not in values:
            self.settings["optimizer.weight_decay"] = DECAYS[name]
        for setting, (value, key) in values.items():
            takes = setting in OPTIMIZERS[name].takes
            if OPTIMIZERS[name].first_beta and setting == "betas" and not value[0]:
                self.note(key, value, f"'{name}' needs a first one above 0; not written")
            elif takes and setting in ("weight_decay", "eps", "d_coef"):
                self.put_nearest(f"optimizer.{setting}", value, key)
            elif takes:
                self.put(f"optimizer.{setting}", value, key)
            else:
                self.note(key, value, f"'{name}' has no such setting")

    def put_full(self, *, half: str, fused: str) -> None:
        """Adds weights in bfloat16, and updates in the backward pass, to full fine-tuning; to what the trainer has them
        for. `half` and `fused`: the names in the file of what asks for it, empty: nothing does."""
        settings = self.settings
        whole = settings.get("method") == "full" and OPTIMIZERS[settings.get("optimizer.name", "adamw")].singly
        several = settings.get("micro_batch", settings.get("batch_size")) != settings.get("batch_size")
        precision = settings.get("precision")
        for key, name, value, possible in (
                (half, "full.dtype", "bfloat16", precision in ("bf16", "auto")),
                (fused, "full.fused_backward", True, precision != "fp16" and not several)):
            if key and whole and possible:
                self.put(name, value, key)
            elif key:
                self.note(key, True, "only for full fine-tuning with an optimizer that updates each weight by itself, "
                          "and " + ("in bf16" if key == half else "in one forward pass a step, not in fp16")
                          + "; not written")

    def settle(self) -> None:
        """Replaces settings that the trainer refuses for LoHa and LoKr: dropout, and another alpha / rank of
        convolutions."""
        settings = self.settings
        if (kind := settings.get("lora.kind", "lora")) == "lora":
            return
        if settings.pop("lora.dropout", 0):
            self.note(self.keys["lora.dropout"], None, f"lora.kind '{kind}' has no dropout; not written")
        rank = settings.get("lora.rank", 16)
        alpha = settings.get("lora.alpha", float(rank))
        own = settings.get("lora.conv_rank")
        conv_alpha = settings.get("lora.conv_alpha", alpha if own is None else float(own))
        expected = (rank if own is None else own) * alpha / rank
        if abs(conv_alpha - expected) <= 1e-6 * expected:
            return
        key = self.keys.get("lora.conv_alpha", self.keys.get("lora.conv_rank", ""))
        self.note(key, conv_alpha, f"with lora.kind '{kind}' alpha / rank is the same in all layers, so it is not "
                  "written")
        settings.pop("lora.conv_alpha", None)
        if self._fits("lora.conv_alpha", expected):
            settings["lora.conv_alpha"] = expected
        else:
            settings.pop("lora.conv_rank", None)

    def _fits(self, name: str, value: Any) -> bool:
        try:
            SETTINGS[name].spec.check(value, name)
        except Unparsed:
            return False
        return True

    def note(self, key: str, value: Any, said: str) -> None:
        """Adds a note, once for each key and value."""
        note = ConversionNote(key=key, value=shown(key, value), said=said, at="train.toml")
        if note not in self.notes:
            self.notes.append(note)

    def note_others(self, unread: Mapping[str, Any]) -> None:
        """Adds one note on all settings that were not read, with their values."""
        if unread:
            self.notes.append(ConversionNote(
                key="other settings", value="", said=f"no counterpart: {', '.join(sorted(unread))}", at="train.toml",
                several=tuple((name, shown(name, unread[name])) for name in sorted(unread))))

    def rendered(self, head: str) -> str:
        """The text of the file: settings by section, then the notes."""
        lines = [*comment_lines(head), ""]
        for section in dict.fromkeys(name.rpartition(".")[0] for name in ("", *self.settings)):
            inside = {name.rpartition(".")[2]: value for name, value in self.settings.items()
                      if name.rpartition(".")[0] == section}
            lines += [f"[{section}]"] if section else []
            lines += [*(f"{name} = {_spelled(value)}" for name, value in inside.items()), ""]
        for note in self.notes:
            lines += comment_lines(note.text)
        return "\n".join(lines).rstrip("\n") + "\n"


def _values(name: str) -> str:
    """The values that a setting accepts, in words."""
    spec = SETTINGS[name].spec
    return spec.values if spec.bounds is None else "numbers from {:g} to {:g}".format(*spec.bounds)


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_spelled, value))}]"
    return quoted(value) if isinstance(value, str) else repr(value)


def number_of(value: Any) -> float | None:
    """A number from a file, also as a string, as GUIs write them; `None` for anything else."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == number and abs(number) != float("inf") else None


def model_of(named: str, key: str, training: Training, base: Path) -> ModelOptions:
    """The model that a file in `base` names: a directory or single file, or a Hub id; a note, if it is not here, or
    nothing that is known."""
    for place in (base / named, Path(named)):
        if place.is_dir() or (place.is_file() and place.suffix.lower() in CHECKPOINTS):
            return ModelOptions(path=str(place.absolute()))
    if file_of(named) is not None:
        training.note(key, named, "a single file: set [model] path to a .safetensors file that is here")
        return ModelOptions()
    try:
        return ModelOptions(path=hub_id(named, "model"))
    except Unparsed:
        training.note(key, named, "[model] path is a diffusers pipeline directory or a Hub id")
        return ModelOptions()
