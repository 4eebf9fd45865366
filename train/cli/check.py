"""`train check`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prep.cli.console import put, put_json
from prep.formatting import printable
from train.cli import options as opt
from train.cli.summary import plan_lines, step_sizes

if TYPE_CHECKING:
    from prep.errors import Problem
    from train.config.schema import Config
    from train.setup import CheckReport, Setup


def check(
    manifest: opt.ManifestArg, config: opt.ConfigOpt = None, model: opt.ModelOpt = None, output: opt.Output = None,
    method: opt.Method = None, steps: opt.Steps = None, epochs: opt.Epochs = None, batch_size: opt.BatchSize = None,
    micro_batch: opt.MicroBatch = None, underfill: opt.Underfill = None, seed: opt.Seed = None,
    precision: opt.Precision = None, lr: opt.Lr = None, rank: opt.Rank = None, masked: opt.Masked = None,
    settings: opt.Set = None, init_from: opt.Init = None, allow_other_encoders: opt.Others = False,
    download: opt.Download = False, device: opt.Device = "auto", as_json: opt.AsJson = False,
) -> None:
    """Check everything that run checks, and show the step plan. Nothing is trained and no model is loaded."""
    chosen = opt.read_settings(config, settings, {
        "method": method, "steps": steps, "epochs": epochs, "batch_size": batch_size, "micro_batch": micro_batch,
        "underfill": underfill, "seed": seed, "precision": precision, "optimizer.lr": lr, "lora.rank": rank,
        "loss.masked": masked})
    report = opt.check_all(opt.request_of(manifest, model, download, allow_other_encoders, init_from), chosen)
    if more := _check_place(report.setup, output, Path("runs") / manifest.stem) + _check_device(device, chosen):
        report = replace(report, faults=(*report.faults, *more), setup=None)
    if as_json:
        put_json(_as_json(report))
    else:
        text = _as_text(report)
        if text:
            put(text)
    opt.stop_at_faults(report.faults, told=as_json)


def _check_place(setup: Setup | None, named: Path | None, usual: Path) -> list[Problem]:
    """The fault of the run's directory, if it has one; without -o only that of its disk."""
    from prep.errors import Problem
    from train.runs.directory import check_place, check_space, check_unused, check_writable

    try:
        if setup is not None:
            if named is not None:
                check_place(named, setup)
                check_writable(named)
                check_unused(named)
            check_space(named or usual, setup)
    except Problem as problem:
        return [problem]
    return []


def _check_device(name: str, config: Config) -> list[Problem]:
    """The fault of a device that was asked for, or of settings that need another; only that imports torch."""
    from prep.errors import Problem
    from train.check import check_device, needs_device

    if name in ("auto", "cpu") and not needs_device(config):
        return []
    from prep.models.tensors import pick_device

    try:
        check_device(config, pick_device(name).type)
    except Problem as problem:
        return [problem]
    return []


def _as_json(report: CheckReport) -> dict[str, Any]:
    return {"format": "latentry/check", "version": 1, "ok": not report.faults,
            "faults": [{"what": fault.message, "hint": fault.hint} for fault in report.faults],
            "steps_per_epoch": report.plan.steps_per_epoch if report.plan else 0,
            "step_sizes": {str(size): steps for size, steps in step_sizes(report.plan).items()} if report.plan else {},
            "masked": report.setup.masked if report.setup else None,
            "left_out": list(report.left_out), "repeated": list(report.repeated)}


def _as_text(report: CheckReport) -> str:
    lines = plan_lines(report)
    lines += [f"note: {printable(note)}" for note in report.notes]
    lines += [f"dropped: {printable(name)}" for name in report.left_out]
    lines += [f"repeated: {printable(name)}" for name in report.repeated]
    return "\n".join(lines)
