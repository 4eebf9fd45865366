"""What `train merge` does with several results: their average."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prep.cli.console import put, put_json, say
from prep.formatting import counted, format_bytes, printable, shell_name
from prep.runtime import defer_interrupts
from train.cli.options import numbers_in

if TYPE_CHECKING:
    from prep.fs.place import Local
    from prep.training.schema import Dtype
    from train.merging.average import Averaged


def numbers(text: str | None, count: int) -> tuple[float, ...]:
    """The weights in `--weights`; equal ones if there is none. Raises `UsageError`."""
    from prep.errors import UsageError

    if text is None:
        return (1 / count,) * count
    found = numbers_in(text)
    if len(found) != count or not all(isfinite(each) and each > 0 for each in found):
        raise UsageError(f"--weights is '{text[:80]}', expected {count} numbers above 0 with commas between them",
                         hint=f"--weights {','.join(f'{1 / count:.2g}' for _ in range(count))}")
    return found


def average(sources: Sequence[Local], output: Path, weights: Sequence[float], rank: int | None, dtype: Dtype | None, *,
            as_json: bool, quiet: bool) -> None:
    """Averages the results, and shows what was written."""
    from prep.cli.ticker import progress

    with defer_interrupts():
        from train.merging.average import AverageRequest, average

    request = AverageRequest(sources=[each.path for each in sources], weights=weights, output=output, rank=rank,
                             dtype=dtype)
    if abs((total := sum(weights)) - 1) > 1e-6:
        parts = ", ".join(f"{each / total:.4g}" for each in weights)
        say(f"note: the weights sum to {total:.6g}, so they are divided by that: {parts}")
    with progress("averaging", None, unit="tensors", shown=not quiet) as tick:
        done = average(request, tick)
    _show(done, as_json)


def posthoc(source: Local, output: Path, length: float, dtype: Dtype | None, *, as_json: bool, quiet: bool) -> None:
    """Makes a moving average of a run from its snapshots, and shows what was written."""
    from prep.cli.ticker import progress

    with defer_interrupts():
        from train.merging.posthoc import PosthocRequest, posthoc

    request = PosthocRequest(run=source.path, length=length, output=output, dtype=dtype)
    with progress("averaging", None, unit="tensors", shown=not quiet) as tick:
        done, step, solved = posthoc(request, tick)
    if as_json:
        put_json(_document(done) | {"ema": {"length": length, "step": step, "error": solved.error}})
        return
    put(f"wrote {shell_name(str(output))}: the average of length {length:g} at step {step}, of "
        f"{counted(len(done.parts), 'snapshot')}, {format_bytes(done.size)}")
    put(f"its profile is off by {solved.error:.2%} of its size" + (
        "" if solved.error < 0.1 else ": more checkpoints (checkpoint.every) hold such a length better"))


def _document(done: Averaged) -> dict[str, Any]:
    return {"format": "latentry/average", "version": 1, "output": str(done.output), "full": done.full,
            "parts": [{"path": str(part.path), "sha256": part.sha256, "weight": part.weight} for part in done.parts],
            "tensors": done.tensors, "kept": done.kept, "bytes": done.size}


def _show(done: Averaged, as_json: bool) -> None:
    for note in done.notes:
        say(f"note: {printable(note)}")
    if as_json:
        put_json(_document(done))
        return
    kept = "" if done.kept > 1 - 1e-9 else f", {int(done.kept * 1e4 + 1e-5) / 100:.2f}% of the whole change kept"
    put(f"wrote {shell_name(str(done.output))}: the average of {counted(len(done.parts), 'result')}, "
        f"{counted(done.tensors, 'tensor' if done.full else 'layer')}{kept}, {format_bytes(done.size)}")
