"""Tells from a run's log and heartbeat what it is doing, and which command comes next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prep.formatting import duration, printable, shell_name
from prep.runs.heartbeat import Heartbeat, Kind, read_heartbeat
from prep.runs.history import History
from prep.runs.requests import waiting

Doing = Literal["running", "failed", "finished", "stopped", "killed", "unknown"]
WORDS: dict[Doing, str] = {"running": "Running", "failed": "Failed", "finished": "Finished", "stopped": "Stopped",
                           "killed": "Killed", "unknown": "Running, or killed"}
TONES: dict[Doing, str] = {"running": "info", "failed": "error", "finished": "good", "stopped": "warning",
                           "killed": "error", "unknown": "warning"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What a run is doing."""

    doing: Doing
    step: int  # done
    beat: Heartbeat | None
    requests: tuple[Kind, ...] = ()

    @property
    def says(self) -> str:
        """What its process does or why it ended, in a sentence; "" if that is not known or not needed."""
        beat = self.beat
        if beat is None:
            return "Its log has no end, and it has no heartbeat: an earlier version of Latentry wrote none." if (
                self.doing == "unknown") else ""
        who = f"process {beat.pid} on {printable(beat.host)}"
        if self.doing == "failed":
            return f"{printable(beat.ended or '')}."
        if self.doing == "killed":
            return f"{who[0].upper()}{who[1:]} has ended without a message, at: {printable(beat.phase)}."
        if self.doing == "unknown":
            return f"The last sign of {who} is {duration(beat.age)} old."
        phase = printable(beat.phase)
        return f"{phase[:1].upper()}{phase[1:]}, {who}" if self.doing == "running" else ""


def state_of(run: Path, history: History) -> RunState:
    """What the run in a directory is doing now."""
    beat = read_heartbeat(run)
    step = history.step
    if beat is not None and beat.life == "running":
        return RunState(doing="running", step=max(step, beat.step), beat=beat, requests=tuple(waiting(run, beat)))
    if beat is not None and beat.life == "failed":
        return RunState(doing="failed", step=step, beat=beat)
    if history.status != "open":
        return RunState(doing=history.status, step=step, beat=None)
    return RunState(doing="killed" if beat is not None and beat.life == "gone" else "unknown", step=step, beat=beat)


def next_command(run: Path, state: RunState) -> str:
    """The command that comes next, with absolute paths; "" if the page has better, or it cannot be known."""
    name = shell_name(str(run.resolve()))
    if state.doing == "finished":
        return f"train sample {name} --compare"
    if state.doing == "running" or not any((run / "checkpoints").glob("step-*/state.json")):
        return ""
    return f"train run --resume -o {name}"
