"""Whether a run fits into the memory of a device, and which settings would make it fit.

A forecast counts tensors as a step makes them, but not what kernels and allocators add or share. So a run surely does
not fit if nine tenths of it are more than all memory of the device: that is a fault. Whatever else is more than what is
free is a note.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from prep.arrays import ITEM_BYTES
from prep.batching.short import smaller_sizes
from prep.errors import ConfigError, first_line
from prep.formatting import format_bytes
from prep.models.device.counting import ACTIVATIONS
from prep.models.device.offload import SHARED
from prep.models.pipeline import single_model_files
from prep.models.vision.model import COMPUTE
from prep.training.checks import AUTO, IN_HOST
from prep.training.schema import Config
from prep.training.table import spell
from train.check.data import planned_by
from train.check.requirements import check_libraries, too_many_ranks
from train.config.load import as_table, parse
from train.memory.room import Room, room_of
from train.memory.step import INPUTS, count
from train.models.offload import fewest, saved, spread
from train.parallel.ranks import Ranks
from train.setup import Setup

SURELY = 0.9  # of a forecast
FILLED = 0.9  # of the free memory, by a forecast where `offload` is auto
PARTS = ("weights", "adapters", "gradients", "optimizer", "average", "activations", "inputs", "libraries")
_LEAST_RANK = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The memory of a run at its peak."""

    parts: Mapping[str, int]  # bytes, in the order of `PARTS`
    room: Room
    settings: Mapping[str, Any]  # that differ from those of the run
    samples: int = 1  # of a pass
    blocks: tuple[int, ...] = ()  # bytes of the frozen weights of each block that may be in host memory
    offloaded: int = 0  # of them
    unrecomputed: int = 0  # bytes at the peak without gradient checkpointing, if "auto" turns it on

    @property
    def peak(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        """Whether there is as much; `None`: the system does not say."""
        return None if self.room.free is None else self.peak <= self.room.free

    @property
    def impossible(self) -> bool:
        """Whether the run surely does not fit, whatever else the device is used for."""
        tensors = self.peak - self.parts["libraries"]
        return self.room.total is not None and SURELY * tensors > self.room.total

    @property
    def drawing(self) -> int:
        """Bytes while another model of the same size draws sample pictures, without what its passes take."""
        return self.resting + self.parts["weights"] + self.parts["adapters"]

    @property
    def resting(self) -> int:
        """Bytes between steps."""
        return sum(self.parts[name] for name in ("weights", "adapters", "optimizer", "average", "libraries"))

    @property
    def line(self) -> str:
        """The parts in a line."""
        parts = [f"{name} {format_bytes(size)}" for name, size in self.parts.items() if size]
        there = "" if self.room.total is None else f"; {self.room.name} has {format_bytes(self.room.total)}"
        if self.room.free is not None and self.room.free != self.room.total:
            there += f", of which {format_bytes(self.room.free)} are free"
        return (f"estimated memory at the peak: {format_bytes(self.peak)} ({', '.join(parts)}){self.elsewhere}"
                f"{self._why}{there}")

    @property
    def _why(self) -> str:
        """Why activations are recomputed, if "auto" decides so."""
        return (f", with gradient checkpointing, since it would take {format_bytes(self.unrecomputed)} without"
                if self.unrecomputed else "")

    @property
    def elsewhere(self) -> str:
        """Which blocks are in host memory, if any."""
        if not self.offloaded:
            return ""
        size = sum(self.blocks[number] for number in spread(len(self.blocks), self.offloaded))
        return f", with {self.offloaded} of {len(self.blocks)} blocks ({format_bytes(size)}) in system RAM"

    def offloading(self, count: int) -> Forecast:
        """The same with so many blocks in host memory."""
        spared = saved(self.blocks, count) - saved(self.blocks, self.offloaded)
        return replace(self, parts={**self.parts, "weights": self.parts["weights"] - spared},
                       offloaded=min(count, len(self.blocks)))

    def fewest(self, part: float = 1.0) -> int:
        """How many blocks have to be in host memory for the run to fit into this part of the free memory; all, if even
        that is not enough."""
        if self.room.free is None:
            return 0
        return fewest(self.blocks, self.offloading(0).peak - part * self.room.free)


def forecast(setup: Setup, room: Room, settings: Mapping[str, Any] | None = None, *, world: int = 1) -> Forecast:
    """The memory of each of `world` processes, with some `settings` changed.

    Raises `ModelError`, and whatever a library raises for a model that it cannot run without data.
    """
    changed = setup
    if settings:
        config = changed_by(setup.config, settings)
        begun = setup.plan.micro_batch != setup.config.micro_batch  # a resumed run keeps its plan
        changed = replace(setup, config=config, plan=setup.plan if begun else planned_by(config, setup.index.counts))
    found, config = _counted(changed, room, settings or {}, world), changed.config
    auto = config.gradient_checkpointing == AUTO and not config.recomputes
    part = FILLED if config.parallel.shard else 1.0  # where nothing else decides
    if not auto or room.free is None or room.kind == "cpu" or found.peak <= part * room.free:
        return found  # on a CPU no pass fails that takes too much
    recomputing = replace(changed, config=replace(changed.config, gradient_checkpointing=True))
    return replace(_counted(recomputing, room, settings or {}, world), unrecomputed=found.peak)


def vision_bytes(setup: Setup) -> int:
    """Bytes of the vision model that embeds the pictures of evaluated checkpoints, on its device; 0: none is evaluated.
    Raises `ModelError`."""
    if setup.vision is None:
        return 0
    tensors = single_model_files(setup.vision.folder).tensors
    return ITEM_BYTES[COMPUTE] * sum(prod(tensor.shape) for name, tensor in tensors.items()
                                     if not name.startswith("text_model."))  # which is not moved there


def _counted(setup: Setup, room: Room, settings: Mapping[str, Any], world: int) -> Forecast:
    """The memory of each of `world` processes; `settings`: what to say of the setup."""
    taken = count(setup, room, world)
    found = {**taken.parts, "libraries": room.libraries}
    whole = Forecast(parts={name: found.get(name, 0) for name in PARTS}, room=room, settings=settings,
                     samples=taken.samples, blocks=taken.blocks)
    wanted = setup.config.offload
    return whole.offloading(wanted if isinstance(wanted, int) else whole.fewest(FILLED))


def blocks_offloaded(setup: Setup, device: torch.device, world: int = 1) -> int:
    """How many blocks a run keeps in host memory on a device. Raises `ConfigError` if that cannot be found out."""
    wanted = setup.config.offload
    if not wanted or device.type in SHARED:
        return 0
    if isinstance(wanted, int):
        return wanted
    try:
        return forecast(setup, room_of(str(device)), world=world).offloaded
    except Exception as error:  # a library may need data that a model without weights has not
        raise ConfigError("offload is 'auto', but the memory of this run cannot be estimated: "
                          f"{first_line(error)[:200]}", hint="name a number of blocks: --set offload=N") from None


def recomputing(setup: Setup, device: torch.device, ranks: Ranks) -> tuple[Setup, list[str]]:
    """The setup with gradient checkpointing on, and why, if processes divide the model and the forecast needs it. A
    trial (`train.trial`) cannot say so: they meet within each pass, and one that lacks memory cannot try again."""
    config, why = setup.config, ""
    if not config.parallel.shard or ranks.world == 1 or config.gradient_checkpointing != AUTO or device.type == "cpu":
        return setup, []
    try:
        found = forecast(setup, room_of(str(device)), world=ranks.world)
        if found.unrecomputed:
            taken, free = (format_bytes(size or 0) for size in (found.unrecomputed, found.room.free))
            why = f"a step would take about {taken} without, of {free}"
    except Exception as error:  # a library may need data that a model without weights has not
        why = f"the memory of a step cannot be estimated: {first_line(error)[:200]}"
    if not ranks.any(bool(why)):
        return setup, []
    return (replace(setup, config=replace(config, gradient_checkpointing=True)),
            [f"gradient checkpointing is on, since {why or 'another process has less memory'}"])


def ways(setup: Setup, first: Forecast, world: int = 1) -> Iterator[Forecast]:
    """Forecasts with more and more settings changed, those that cost least first, until one fits."""
    now = first
    for change in _changes:
        if now.fits:
            return
        wanted = change(changed_by(setup.config, now.settings), now)
        if not wanted:
            continue
        settings = {**now.settings, **wanted}
        try:
            changed = changed_by(setup.config, settings)
            check_libraries(changed, setup.family, references=setup.index.referring,
                            paired=setup.index.paired)
        except ConfigError:  # of a library that is not installed, or of settings that exclude each other
            continue
        if too_many_ranks(changed, world):
            continue
        tried = forecast(setup, first.room, settings, world=world)
        if "offload" in settings:  # fewer may now be enough
            tried = tried.offloading(tried.fewest())
            tried = replace(tried, settings={**settings, "offload": tried.offloaded})
        if tried.peak < now.peak:
            now = tried
            yield now


def _average_elsewhere(config: Config, now: Forecast) -> Mapping[str, Any]:
    there = (config.ema.decay or config.ema.snapshots) and config.ema.device == "model" and now.room.kind != "cpu"
    return {"ema.device": "cpu"} if there else {}


def _recomputed(config: Config, now: Forecast) -> Mapping[str, Any]:
    return {} if config.recomputes or now.unrecomputed else {"gradient_checkpointing": True}


def _recomputed_from_host(config: Config, now: Forecast) -> Mapping[str, Any]:
    there = now.room.has_own_memory and config.gradient_checkpointing != IN_HOST
    return {"gradient_checkpointing": IN_HOST} if there else {}


def _fewer_at_once(config: Config, now: Forecast) -> Mapping[str, Any]:
    """The largest micro-batch that leaves room, as activations grow with it."""
    assert now.room.free is not None
    moving = now.parts[ACTIVATIONS] + now.parts[INPUTS]
    each = moving / now.samples
    most = (now.room.free - (now.peak - moving)) / each if each else 1
    smaller = smaller_sizes(config.batch_size, config.micro_batch)
    return {"micro_batch": next((size for size in smaller if size <= most), 1)} if smaller else {}


def _offloaded(config: Config, now: Forecast) -> Mapping[str, Any]:
    more = now.fewest()
    on = {} if config.recomputes else {"gradient_checkpointing": True}
    return {**on, "offload": more} if more > now.offloaded else {}


def _smaller_moments(config: Config, now: Forecast) -> Mapping[str, Any]:
    return {"optimizer.name": "adamw-8bit"} if config.optimizer.name == "adamw" else {}


def _within_backward(config: Config, now: Forecast) -> Mapping[str, Any]:
    """In one pass a step, whose activations may take more than gradients do: then it is of no use."""
    if config.method != "full" or config.full.fused_backward:
        return {}
    one = {"micro_batch": config.batch_size} if config.micro_batch != config.batch_size else {}
    return {"full.fused_backward": True, **one}


def _halved(config: Config, now: Forecast) -> Mapping[str, Any]:
    return {"full.dtype": "bfloat16"} if config.method == "full" and config.full.dtype == "float32" else {}


def _factored_moments(config: Config, now: Forecast) -> Mapping[str, Any]:
    there = config.method == "full" and config.optimizer.name in ("adamw", "adamw-8bit")
    return {"optimizer.name": "adafactor"} if there else {}


def _in_8_bits(config: Config, now: Forecast) -> Mapping[str, Any]:
    return {"quantization": "fp8"} if config.method == "lora" and config.quantization == "none" else {}


def _in_4_bits(config: Config, now: Forecast) -> Mapping[str, Any]:
    return {"quantization": "nf4"} if config.method == "lora" and config.quantization != "nf4" else {}


def _smaller_rank(config: Config, now: Forecast) -> Mapping[str, Any]:
    rank = max(_LEAST_RANK, config.lora.rank // 4)
    return {"lora.rank": rank} if config.method == "lora" and rank < config.lora.rank else {}


# In the order of what they cost: nothing, time, and then a little of the result.
_changes = (_average_elsewhere, _recomputed, _fewer_at_once, _recomputed_from_host, _offloaded, _smaller_moments,
            _within_backward, _halved, _factored_moments, _in_8_bits, _in_4_bits, _smaller_rank)


def changed_by(config: Config, settings: Mapping[str, Any]) -> Config:
    """The configuration with some settings changed, named as in `lora.rank`."""
    table = copy.deepcopy(as_table(config))
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        (table[section] if section else table)[key] = value
    return parse(table, "")


def spelled(settings: Mapping[str, Any]) -> str:
    """Settings as options of a command."""
    return " ".join(f"--set {name}={value if isinstance(value, str) else spell(value)}"
                    for name, value in settings.items())
