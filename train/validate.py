"""Computes the validation loss: on held-out samples, with noise and timesteps that never change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch

from prep.fs.paths import resolve
from prep.loader import draws
from prep.loader.batches import Batch, batches
from prep.loader.device import to_host
from prep.loader.latents import latents_of
from prep.loader.rows import Rows
from train.models.denoiser import Denoiser, evaluating
from train.models.lora import at_weight
from train.objectives.forward import forward, has_opposite, opposite, sample_losses
from train.objectives.slider import Slide
from train.parallel.ranks import Ranks
from train.parallel.shards import Whole
from train.setup import Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLoss:
    """The loss of the samples of one source."""

    loss: float
    spread: float  # standard deviation of the samples' losses
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    """The validation loss: the mean over all samples and timesteps, and the mean over all samples at each timestep."""

    loss: float
    spread: float  # standard deviation of the samples' losses
    timesteps: tuple[int, ...]
    losses: tuple[float, ...]  # at each of `timesteps`
    samples: int
    sources: Mapping[str, SourceLoss]  # by name; empty if there is only one


def validate(denoiser: Denoiser, model: Whole, rows: Rows, setup: Setup, slide: Slide | None = None
             ) -> Validated | None:
    """The denoiser's current validation loss, or that of a slider; `None` without validation samples. Does not change
    the denoiser.

    Each sample is predicted from its first view and first text. Masks weight the cells, and Huber's loss bounds errors,
    as in training; sample weights and weights by noise level are not applied, so that runs with other ones compare.

    Several ranks take the forward passes in turn. All have the same result, which is that of one: the passes are the
    same, and their losses are added in the same order.
    """
    config, ranks = setup.config, model.ranks
    wanted = draws.spread(config.validation.timesteps, denoiser.timesteps)
    requests = list(draws.validation(rows.index, config.micro_batch, count=config.validation.timesteps,
                                     timesteps=denoiser.timesteps, most=config.validation.most))
    own = requests[ranks.rank :: ranks.world]
    if model.sharded and len(own) < len(requests[:: ranks.world]):
        own.append(requests[0])  # every rank takes part in every pass; this one's result is not used
    with model.passes():
        own_losses = losses_of(denoiser, model, rows, setup, own, slide)
    each = ranks.gather(own_losses)
    sums, counts, losses = dict.fromkeys(wanted, 0.0), dict.fromkeys(wanted, 0), dict[int, list[float]]()
    for number, request in enumerate(requests):
        for draw, value in zip(request.draws, each[number % ranks.world][number // ranks.world], strict=True):
            sums[draw.timestep] += value
            counts[draw.timestep] += 1
            losses.setdefault(draw.sample, []).append(value)
    if not losses:
        return None
    means = {sample: fmean(each) for sample, each in losses.items()}
    return Validated(loss=sum(sums.values()) / sum(counts.values()), spread=pstdev(means.values()),
                     timesteps=tuple(wanted), losses=tuple(sums[at] / counts[at] for at in wanted),
                     samples=len(means), sources=_by_source(means, rows, setup))


def losses_of(denoiser: Denoiser, model: Whole, rows: Rows, setup: Setup, requests: Sequence[draws.BatchRequest],
              slide: Slide | None = None) -> list[list[float]]:
    """The losses of the samples of each forward pass, before any weight; of a slider the mean of both directions. Does
    not change the denoiser."""
    latents, losses = latents_of(setup.manifest).to(denoiser.device), []
    with (evaluating(denoiser), torch.no_grad(),
          batches(rows, iter(requests), masked=setup.masked, pinned=denoiser.device.type == "cuda",
                  sharing=model.ranks.local_world) as feed):
        for batch in _agreed(feed, model.ranks) if model.sharded else feed:
            here = batch.to(denoiser.device)
            predicted = forward(denoiser, here, latents, setup.config.loss, slide=slide)
            losses_B = sample_losses(predicted, setup.config.loss)
            if has_opposite(here, slide):
                with at_weight(denoiser.model, -1):
                    other = opposite(denoiser, here, latents, setup.config.loss, predicted)
                    losses_B = (losses_B + sample_losses(other, setup.config.loss)) / 2
            losses.append(to_host(losses_B).tolist())
    return losses


def _agreed(feed: Iterator[Batch], ranks: Ranks) -> Iterator[Batch]:
    """The batches, if all ranks could read theirs: each pass needs all of them."""
    while True:
        with ranks.collective():
            batch = next(feed, None)
        if batch is None:
            return
        yield batch


def _by_source(means: Mapping[int, float], rows: Rows, setup: Setup) -> dict[str, SourceLoss]:
    """The losses of each source of the recipe that has samples among `means`, by the name of its directory."""
    by_source: dict[int, list[float]] = {}
    for sample, mean in means.items():
        by_source.setdefault(int(rows.index.samples.source[sample]), []).append(mean)
    short = ["source" if place is None else resolve(place).name for place in setup.manifest.sources]
    names = [name if short.count(name) == 1 else f"{name} {number + 1}" for number, name in enumerate(short)]
    return {} if len(by_source) < 2 else {
        names[source]: SourceLoss(loss=fmean(each), spread=pstdev(each), samples=len(each))
        for source, each in sorted(by_source.items())}
