"""`train check`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from prep.cli.console import put, put_json
from prep.formatting import counted, grouped, printable
from train.cli import options as opt

if TYPE_CHECKING:
    from train.setup import CheckReport, Setup


def check(
    manifest: opt.ManifestArg, config: opt.ConfigOpt = None, model: opt.ModelOpt = None, method: opt.Method = None,
    steps: opt.Steps = None, epochs: opt.Epochs = None, batch_size: opt.BatchSize = None,
    micro_batch: opt.MicroBatch = None, underfill: opt.Underfill = None, seed: opt.Seed = None,
    precision: opt.Precision = None, lr: opt.Lr = None, rank: opt.Rank = None, masked: opt.Masked = None,
    settings: opt.Set = None, allow_other_encoders: opt.Others = False, download: opt.Download = False,
    as_json: opt.AsJson = False,
) -> None:
    """Check everything that run checks, and show the step plan. Nothing is trained and no model is loaded."""
    chosen = opt.read_settings(config, settings, {
        "method": method, "steps": steps, "epochs": epochs, "batch_size": batch_size, "micro_batch": micro_batch,
        "underfill": underfill, "seed": seed, "precision": precision, "optimizer.lr": lr, "lora.rank": rank,
        "loss.masked": masked})
    report = opt.check_all(opt.request_of(manifest, model, download, allow_other_encoders), chosen)
    if as_json:
        put_json(_as_json(report))
    else:
        text = _as_text(report)
        if text:
            put(text)
    opt.stop_at_faults(report, told=as_json)


def _as_json(report: CheckReport) -> dict[str, Any]:
    return {"format": "latentry/check", "version": 1, "ok": not report.faults,
            "faults": [{"what": fault.message, "hint": fault.hint} for fault in report.faults],
            "steps_per_epoch": report.plan.steps_per_epoch if report.plan else 0,
            "left_out": list(report.left_out), "repeated": list(report.repeated)}


def _as_text(report: CheckReport) -> str:
    lines = [] if report.setup is None else _what(report.setup)
    if report.plan is not None:
        lines.append(f"{counted(sum(report.plan.counts), 'sample')} per epoch, in "
                     f"{counted(report.plan.steps_per_epoch, 'step')} of up to "
                     f"{counted(report.plan.batch_size, 'sample')}, micro-batches of up to {report.plan.micro_batch}")
    if report.setup is not None:
        epochs = math.floor(report.setup.steps / report.setup.plan.steps_per_epoch * 10) / 10
        lines.append(f"{counted(report.setup.steps, 'step')} = {epochs} {'epoch' if epochs == 1 else 'epochs'}; "
                     "ready to train")
    lines += [f"left out: {printable(name)}" for name in report.left_out]
    lines += [f"repeated: {printable(name)}" for name in report.repeated]
    return "\n".join(lines)


def _what(setup: Setup) -> list[str]:
    """What would be trained, and on what."""
    config, manifest = setup.config, setup.manifest
    dtypes = {name: "/".join(str(array["dtype"]) for array in each.arrays.values())
              for name, each in manifest.fields.items()}
    unused = "" if config.loss.masked else " (not used: loss.masked is off)"
    black = f", {grouped(setup.index.black)} of them entirely black" if setup.index.black else ""
    masked = f" for {grouped(setup.index.masked)} of {grouped(len(setup.index.samples))}{black}{unused}"
    fields = [f"{name} {dtype}{masked if name == 'mask' else ''}" for name, dtype in sorted(dtypes.items())]
    held_out = sum(len(members) for members in setup.index.validation)
    what = f"a LoRA of rank {config.lora.rank} on" if config.method == "lora" else "every weight of"
    return [f"{what} {printable(str(setup.model))} ({manifest.family}, {setup.prediction})",
            f"{counted(len(setup.index.samples) - held_out, 'training sample')} and "
            f"{counted(held_out, 'validation sample')} in {counted(len(manifest.buckets), 'bucket')}: "
            f"{', '.join(fields)}"]
