"""Formats the summary of `train check` and `train run`: the model, the samples, the steps."""

from __future__ import annotations

import math
from collections import Counter
from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING

from prep.formatting import (
    counted,
    duration,
    format_bytes,
    format_size,
    grouped,
    join_names,
    join_texts,
    listed,
    printable,
)
from prep.geometry import pixels_of

if TYPE_CHECKING:
    from prep.batching.plan import StepPlan
    from prep.fs.place import Local
    from train.cluster_forecast import Outlook
    from train.setup import CheckReport, Setup

LONG = 600  # seconds
LARGE = 64 << 30  # bytes of a node's memory
MANY = 3  # micro-batches that are named
NETWORK = 1e9  # bytes a second, to give an idea of the time that a download takes


def plan_lines(report: CheckReport, ranks: int = 0) -> list[str]:
    """Model, data and number of steps; with faults, the part that is known. `ranks`: if not 0, also the smaller
    micro-batches with which fewer steps are short, down to a sample for each."""
    from train.check.shares import shares_of

    lines = [] if report.setup is None else _what(report.setup)
    if report.plan is not None:
        lines.append(f"{counted(sum(report.plan.counts), 'sample')} per epoch, in "
                     f"{counted(report.plan.steps_per_epoch, 'step')} with up to "
                     f"{counted(report.plan.batch_size, 'sample')}, in micro-batches with up to "
                     f"{report.plan.micro_batch}")
        lines += _short_steps(report.plan)
        lines += _fewer_short(report.plan, ranks) if ranks else []
    if report.setup is not None:
        lines += _longest_sequence(report.setup)
        lines.append(shares_of(report.setup).line)
        epochs = math.floor(report.setup.steps / report.setup.plan.steps_per_epoch * 10) / 10
        lines.append(f"{counted(report.setup.steps, 'step')} = {epochs} {'epoch' if epochs == 1 else 'epochs'}; "
                     "ready to train")
        lines += _intervals(report.setup)
        lines += sample_lines(report.setup)
    return lines


def _longest_sequence(setup: Setup) -> list[str]:
    """A line on the longest sequence of the denoiser that has references, if there are any. One that inpaints takes
    its masked picture in the same tokens, and the pictures of a pair are seen one after the other."""
    trained = [shape for shape, members in zip(setup.manifest.shapes, setup.index.training, strict=True)
               if shape[1] and len(members)]
    if not trained or setup.index.inpaints or setup.index.paired:
        return []
    side = setup.family.token_side
    size, references = max(trained, key=pixels_of)
    tokens, alone = pixels_of((size, references)) // side**2, pixels_of((size, ())) // side**2
    what = f"{counted(len(references), 'reference')} of {listed([format_size(each) for each in references])}"
    return [f"longest sequence: {format_size(size)} with {what}, {counted(tokens, 'token')} of pictures, "
            f"{tokens / alone:.1f} times those without"]


def _intervals(setup: Setup) -> list[str]:
    """A line on what intervals in epochs are in steps, if there are any."""
    config, held_out = setup.config, any(map(len, setup.index.validation))
    settings = {"validation": config.validation.every if held_out else 0, "sample pictures": config.sample.every,
                "checkpoints": config.checkpoint.every}
    lines = [f"{what} every {every.removeprefix('1 ')} ({setup.interval(every).text})"
             for what, every in settings.items() if isinstance(every, str)]
    return [", ".join(lines)] if lines else []


def outlook_lines(outlook: Outlook, latency: float | None = None) -> list[str]:
    """Lines on the memory, downloads and start of ranks and nodes. `latency`: seconds in which a store answers a
    request, if there is one."""
    from prep.manifest.shards import MOST_OF_A_MANIFEST, manifests_for

    lines = [f"{counted(outlook.world, 'rank')} on {counted(outlook.nodes, 'node')}: "
             f"{counted(outlook.samples, 'sample')} and {counted(outlook.steps, 'step')} an epoch; planning a step "
             f"takes {outlook.planning * 1e3:.1f} ms, the index {format_bytes(outlook.memory)} of a node's memory"]
    if outlook.idle:
        lines.append(f"note: {counted(outlook.idle, 'rank')} have no sample of a micro-batch: a larger --micro-batch, "
                     "or fewer ranks")
    lines.append(f"copies of shards: a node downloads {format_bytes(outlook.begin)} for its first step "
                 f"({outlook.begin / NETWORK:.1f} s at 1 GB/s), about {_first_epoch(outlook)}, and "
                 f"{format_bytes(outlook.later)} in each later one")
    if latency is not None:
        lines.append(_start_line(outlook, latency))
        if outlook.rounds * latency > LONG:
            lines.append("note: reading the headers of all shards is the limit of the start: a cache of larger shards "
                         "has fewer (prep compact --shard-mib), and so have several manifests")
    if outlook.memory > LARGE:
        lines.append("note: memory for the index is the limit: each rank holds that of all samples; fewer ranks on a "
                     "node, or several manifests, take less")
    if (least := manifests_for(outlook.shards, outlook.tables)) > 1:
        lines.append(f"note: {MOST_OF_A_MANIFEST}, so these samples need at least {grouped(least)} manifests")
    if outlook.later:
        lines.append("note: a node has no room for all the shards that it reads, so it downloads them again and again: "
                     "each comes whole; more room on the nodes helps, or more nodes with shuffle = \"partitioned\"")
    return lines


def _reading(outlook: Outlook) -> str:
    return (f"reads tables of {format_bytes(outlook.tables)} and the headers of all shards, "
            f"{counted(outlook.requests, 'request')} for {format_bytes(outlook.headers)}")


def _first_epoch(outlook: Outlook) -> str:
    """What a node downloads in its first epoch, and of how much; more than all shards have, if some come again."""
    first, whole = format_bytes(outlook.first), f"{format_bytes(outlook.bytes)} ({counted(outlook.shards, 'shard')})"
    if outlook.first > outlook.bytes:
        return (f"{first} in its first epoch, {outlook.first / outlook.bytes:.1f} times the {whole} that there are, "
                "since it downloads the same shards again and again")
    return f"{first} of {whole} in its first epoch"


def _start_line(outlook: Outlook, latency: float) -> str:
    """What a node reads of a store before its first download of a shard, and how long that takes at least."""
    seconds = outlook.rounds * latency + (outlook.tables + outlook.headers) / NETWORK
    return (f"a first start {_reading(outlook)}: {duration(seconds)}, if the store answers in {latency * 1e3:g} ms and "
            "sends 1 GB/s; copies of them stay on the node")


def _short_steps(plan: StepPlan) -> list[str]:
    """A line on the first epoch's steps that have fewer samples than batch_size, if there are any."""
    sizes = step_sizes(plan)
    short = {size: steps for size, steps in sizes.items() if size < plan.batch_size}
    if not short:
        return []
    many = sum(short.values())
    parts = [f"{grouped(steps)} with {size}" for size, steps in sorted(short.items(), reverse=True)]
    each = str(min(short)) if len(short) == 1 else join_texts(parts, 5)
    return [f"{counted(many, 'step')} of the first epoch {'has' if many == 1 else 'have'} fewer than {plan.batch_size} "
            f"samples ({each}), so {'its gradient is' if many == 1 else 'their gradients are'} smaller"]


def _fewer_short(plan: StepPlan, ranks: int) -> list[str]:
    """A line on smaller micro-batches with which fewer steps of the first epoch are short, if there are any."""
    from prep.batching.short import fewer_short

    short = fewer_short(plan, ranks)
    sizes = list(short) if len(short) <= MANY else [*list(short)[: MANY - 1], min(short)]
    if [*short.values()] == [0]:
        return [f"with --micro-batch {sizes[0]} there are no such steps"]
    numbers = [f"{grouped(short[size]) if short[size] else 'none'} with --micro-batch {size}" for size in sizes]
    return [f"such steps with smaller micro-batches: {', '.join(numbers)}"] if numbers else []


def step_sizes(plan: StepPlan) -> dict[int, int]:
    """The number of the first epoch's steps by their number of samples, the largest first."""
    return dict(sorted(Counter(plan.sizes(0).tolist()).items(), reverse=True))


def sample_lines(setup: Setup) -> list[str]:
    """A line if sample pictures use captions for lack of prompts."""
    prompts = setup.manifest.document["prompts"]
    if not setup.config.sample.every or prompts["samples"] or prompts["file"] is not None:
        return []
    from prep.manifest.commands import prompts_command

    held_out = any(len(members) for members in setup.index.validation)
    return [f"no prompt file: sample pictures show captions of {'validation' if held_out else 'training'} samples "
            f"(to add prompts: {prompts_command(setup.manifest, Path('prompts.txt'))})"]


def uneven_lines(report: CheckReport) -> list[str]:
    """A line for samples that the first epoch drops, and a line for those that it repeats."""
    lines = []
    for names, what in ((report.left_out, "dropped in the first epoch"), (report.repeated, "repeated to fill up")):
        if names:
            lines.append(f"note: {counted(len(names), 'sample')} {what}: {join_names(names, 5)}; train check lists all")
    return lines


def place_line(run: Local, setup: Setup) -> str:
    """A line on where a run writes, and about how large its checkpoints are."""
    from train.runs.directory import checkpoint_bytes

    size = format_bytes(checkpoint_bytes(setup))
    keep = setup.config.checkpoint.keep
    keeping = f"the newest {keep} are kept" if keep else "all are kept"
    return f"writes to {printable(str(run))}; a checkpoint takes about {size}, {keeping}"


def _what(setup: Setup) -> list[str]:
    """Lines on what is trained, and on which samples."""
    config, manifest = setup.config, setup.manifest
    dtypes = {name: "/".join(str(array["dtype"]) for array in each.arrays.values())
              for name, each in manifest.fields.items()}
    fields = [f"{name} {dtype}{_masks(setup) if name == 'mask' else ''}" for name, dtype in sorted(dtypes.items())]
    held_out = sum(len(members) for members in setup.index.validation)
    part = "some weights of" if config.full.train or config.full.freeze else "every weight of"
    what = f"a LoRA of rank {config.lora.rank} on" if config.method == "lora" else part
    return [f"{what} {printable(normpath(str(setup.model.path)))} ({manifest.family}, {setup.prediction}), "
            f"{counted(setup.model.numbers, 'trained parameter')}",
            *_beside(setup),
            f"{counted(len(setup.index.samples) - held_out, 'training sample')} and "
            f"{counted(held_out, 'validation sample')} in {counted(len(manifest.buckets), 'bucket')}: "
            f"{', '.join(fields)}"]


def _beside(setup: Setup) -> list[str]:
    """A line on the training adapter, if there is one."""
    adapter, scale = setup.model.adapter, setup.config.base.adapter_scale
    return [] if adapter is None else [
        f"beside the training adapter {printable(str(adapter.path))} on {counted(len(adapter.layers), 'layer')}"
        f"{'' if scale == 1 else f', with a strength of {scale:g}'}: neither in sample pictures nor in the result"]


def _masks(setup: Setup) -> str:
    """How many samples have a mask, and whether the loss uses them."""
    black = f", {grouped(setup.index.black)} of them entirely black" if setup.index.black else ""
    used = "used" if setup.masked else "not used: loss.masked is false"
    if setup.index.inpaints:
        used = f"to paint into; in the loss {'used, too' if setup.masked else 'not used'}"
    return f" for {grouped(setup.index.masked)} of {grouped(len(setup.index.samples))}{black} ({used})"
