"""The batches of training for other people's loops: an iterable that continues where its saved state ends.

It streams what `train run` does with the same settings: the same samples in the same steps with the same draws, for any
number of ranks. B samples, C channels, h w latent cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.data import IterableDataset, get_worker_info

from prep.batching.plan import StepPlan, require_steps, step_plan
from prep.batching.policy import Shuffle, Underfill
from prep.errors import CacheError, ConfigError, UsageError
from prep.loader import draws
from prep.loader.batches import Batch, batches
from prep.loader.identity import identify
from prep.loader.index import Index
from prep.loader.latents import Latents, latents_of
from prep.loader.rows import Rows
from prep.loader.shards import check_shards

FORMAT = "latentry/stream"
ENDLESS = 1 << 62  # steps, where no number of them is given


# What states of earlier versions do not say.
_EARLIER = {"shuffle": "global", "reference_dropout": 0.0, "each_reference_dropout": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """The settings that decide the batches, besides the data."""

    batch_size: int = 4  # samples of a step, over all ranks
    micro_batch: int | None = None  # samples of a batch, over all ranks; None: batch_size
    underfill: Underfill = "partial"
    shuffle: Shuffle = "global"
    seed: int = 0
    caption_dropout: float = 0.0
    reference_dropout: float = 0.0  # of all references of a sample
    each_reference_dropout: float = 0.0
    timesteps: int = 1000  # of the noise schedule
    masked: bool = False  # whether masks are read


class BatchStream(IterableDataset[dict[str, Any]]):
    """Batches of a manifest's training samples, as dicts of tensors on the CPU:

    - `latents`: float32 [B, C, h, w], as the denoiser takes them
    - `references`: of each sample as many, float32 [B, C, h, w] each, as the denoiser takes them
    - `opposites`, of pairs of pictures: float32 [B, C, h, w], as `latents`: what a slider learns at weight -1
    - `text`: the arrays of text rows by the family's names, [B, …] each, in their stored dtype
    - `masks`, if the stream is masked: float32 [B, 1, h, w], 1: trains
    - `inpaint_masks`, of families that inpaint: float32 [B, M, h, w], 1: to be painted; the masked picture's latent is
      the one reference
    - `noise`: float32 [B, C, h, w], standard normal; `timesteps`: int64 [B], uniform
    - `sizes`: float32 [B, 6], SDXL's size conditions
    - `weights`: float32 [B]. A step's loss is the sum of each sample's loss times its weight, divided by `batch_size`
    - `names`: of the samples; `step`: from 0; `last`: whether the step's gradient is complete after this batch

    All ranks have equally many batches in a step; one that only keeps a rank busy has weights of 0. With a
    `DataLoader`, give `batch_size=None` and no worker processes: a thread reads ahead already.
    """

    def __init__(self, index: Index, settings: StreamSettings, *, steps: int | None = None, rank: int | None = None,
                 world: int | None = None, sharing: int = 1) -> None:
        super().__init__()
        grouped = distributed.is_available() and distributed.is_initialized()
        self._world = (distributed.get_world_size() if grouped else 1) if world is None else world
        self._rank = (distributed.get_rank() if grouped else 0) if rank is None else rank
        if not 0 <= self._rank < self._world:
            raise ConfigError(f"rank is {self._rank}, expected 0 to {self._world - 1}")
        for name in ("caption_dropout", "reference_dropout", "each_reference_dropout"):
            if not 0 <= getattr(settings, name) <= 1:
                raise ConfigError(f"{name} is {getattr(settings, name):g}, expected 0 to 1")
        self.settings, self._index, self._steps, self._next = settings, index, steps, 0
        self._sharing = sharing
        self.plan: StepPlan = step_plan(index.counts, seed=settings.seed, batch_size=settings.batch_size,
                                        micro_batch=settings.micro_batch, underfill=settings.underfill,
                                        shuffle=settings.shuffle)
        require_steps(self.plan, index.manifest.shapes)
        if settings.masked and "mask" not in index.manifest.fields:
            raise CacheError("masks are asked for, but the manifest has none", hint="prep encode with --mask")
        self._latents: Latents = latents_of(index.manifest)
        self._data = identify(index, masked=settings.masked,
                              prediction=str(index.manifest.document["prediction"])).digest
        check_shards(index)
        draws.require_shown(index, self._dropout)

    @property
    def _dropout(self) -> draws.Dropout:
        settings = self.settings
        return draws.Dropout(caption=settings.caption_dropout, references=settings.reference_dropout,
                             each_reference=settings.each_reference_dropout)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches from the next step on. Raises `CacheError`, which names the samples of a damaged row."""
        if get_worker_info() is not None:
            raise UsageError("a BatchStream is read in a worker process of a DataLoader, expected num_workers=0",
                             hint="its own thread reads ahead; each worker would read the same batches")
        settings, plan, first = self.settings, self.plan, self._next
        total = ENDLESS if self._steps is None else self._steps
        share = draws.RankShare(rank=self._rank, world=self._world, pad_ranks=True)
        requests = draws.training(self._index, plan, first, total, dropout=self._dropout,
                                  timesteps=settings.timesteps, most=plan.micro_batch, share=share)
        with batches(Rows(self._index), requests, masked=settings.masked, pinned=False, sharing=self._sharing) as feed:
            for step in range(first, total):
                count = draws.passes(self._index, plan, step, dropout=self._dropout, most=plan.micro_batch, share=share)
                for number in range(count):
                    last = number == count - 1
                    made = self._made(next(feed), step, last)
                    self._next = step + last
                    yield made

    def _made(self, batch: Batch, step: int, last: bool) -> dict[str, Any]:
        """A batch in memory of its own: the ring fills its buffers again."""
        masks: dict[str, Tensor] = {}
        if batch.mask_B1hw is not None:
            masks["masks"] = batch.mask_B1hw.to(torch.float32) / 255
        if batch.inpaint_mask_BMhw is not None:
            masks["inpaint_masks"] = batch.inpaint_mask_BMhw.to(torch.float32) / 255
        return {
            "latents": self._latents.normalize(batch.latent_BChw).clone(),
            "references": [self._latents.normalize(reference).clone() for reference in batch.references],
            **({} if batch.opposite_BChw is None else {
                "opposites": self._latents.normalize(batch.opposite_BChw).clone()}),
            "text": {name: array.clone() for name, array in batch.text.items()}, **masks,
            "noise": batch.noise_BChw.clone(), "timesteps": batch.timestep_B.clone(),
            "sizes": batch.sizes_B6.clone(), "weights": batch.weight_B * (0.0 if batch.padding else 1.0),
            "names": [self._index.samples.name(draw.sample) for draw in batch.draws], "step": step, "last": last}

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream, as JSON allows: after a batch that ends a step, the next step; else the same."""
        return {"format": FORMAT, "version": 1, "step": self._next, "data": self._data,
                "settings": asdict(self.settings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state, also with another number of ranks.

        Raises `ConfigError` for other settings, `CacheError` for other data.
        """
        if state.get("format") != FORMAT or state.get("version") != 1:
            raise ConfigError("that is not the state of a BatchStream, expected what state_dict returned")
        saved, ours = {**_EARLIER, **state["settings"]}, asdict(self.settings)
        changed = sorted(name for name in {*saved, *ours} if saved.get(name) != ours.get(name))
        if changed:
            raise ConfigError(f"{changed[0]} is {ours.get(changed[0])!r}, but the saved state is of a stream with "
                              f"{saved.get(changed[0])!r}", hint="make the stream with the settings in the state")
        if state["data"] != self._data:
            raise CacheError("the saved state is of other samples or rows than the manifest has now",
                             hint="open the manifest that it was saved with, or begin anew")
        self._next = int(state["step"])
