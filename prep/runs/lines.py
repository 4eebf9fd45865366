"""Events of a run as lines of text, for terminals and pages."""

from __future__ import annotations

from prep.formatting import counted, grouped, join_texts, listed, printable
from prep.runs.events import Event

_TEXTS = {"validation": "step {step}: validation loss {loss}", "sample": "step {step}: {picture}",
          "evaluation": "step {step}: likeness {likeness}; {copied}{drifted}{fitting}",
          "checkpoint": "step {step}: {folder}", "warning": "warning: {text}", "end": "done: {result}",
          "stopped": "stopped after step {step}; the same command with --resume continues from there"}


def line(event: Event) -> str | None:
    """An event in one line, safe for a terminal; `None` for a step."""
    kind = event["event"]
    if kind == "start":
        steps, each, count = event["steps"], event["steps_per_epoch"], event["parameters"]
        text = (f"{counted(steps, 'step')}, {grouped(each)} per epoch, {counted(count, 'trained parameter')} on "
                f"{event['device']}{_ranks(event.get('ranks', 1))}{_offloaded(event.get('offload', 0))}")
    elif kind in _TEXTS:
        scores = _of_scores(event) if kind == "evaluation" else {}
        text = _TEXTS[kind].format(**event, **scores) + _of_sources(event) + _of_proposal(event)
    else:
        return None
    return printable(text)


def _of_scores(event: Event) -> dict[str, str]:
    """The scores of a checkpoint in the words of `train evaluate`, as far as they are known."""
    def known(key: str, text: str) -> str:
        return "" if event.get(key) is None else text.format(event[key])

    like = [known("held_out", "{:.4f} to held-out pictures"), known("training", "{:.4f} to training pictures")]
    return {"likeness": listed([each for each in like if each]), "copied": counted(event["copies"], "copy", "copies"),
            "drifted": known("drift", "; drift {:.4f}"), "fitting": known("prompt_fit", "; prompt fit {:.4f}")}


def _of_proposal(event: Event) -> str:
    """Which of the evaluated checkpoints is proposed, if any is."""
    found = event.get("proposal")
    return f"; proposed: {found['checkpoint']}" if isinstance(found, dict) and found.get("checkpoint") else ""


def _of_sources(event: Event) -> str:
    """The validation loss of each source, if there are several."""
    parts = [f"{name} {part['loss']}" for name, part in (event.get("sources") or {}).items()]
    return f" ({join_texts(parts, 5)})" if parts else ""


def _offloaded(count: int) -> str:
    """The number of blocks that a run keeps in host memory, if any."""
    return f", {counted(count, 'block')} in system RAM" if count else ""


def _ranks(count: int) -> str:
    """The number of processes that train together, if there are several."""
    return f", {counted(count, 'process', 'processes')}" if count > 1 else ""
