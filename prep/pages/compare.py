"""Several runs beside each other: last numbers, curves in one chart, what differs, the pictures of each prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prep.formatting import clock, pace
from prep.pages.charts import Chart, Kind, Series, chart_of
from prep.pages.parts import Column, Section, Table, plural
from prep.pages.run import Film, Prompt
from prep.runs.history import History
from prep.runs.state import WORDS, RunState

LINES: tuple[Kind, ...] = ("line", "second", "third", "fourth")  # one for each run
MOST = len(LINES)  # runs on a page
DIGITS = 12  # of a digest
DIGESTS = ("manifest_digest", "data", "recipe")
NONE = "–"
Films = list[tuple[str, list[tuple[str, Film]]]]  # prompt, and by the name of its run each film of that


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A run of several, as it is now."""

    name: str
    base: str  # of the addresses of its pages
    history: History
    state: RunState
    document: Mapping[str, Any]  # of run.json
    films: Sequence[Film]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What `templates/compare.html` shows."""

    sides: Sequence[Side]
    numbers: Table
    charts: Sequence[Chart]
    differ: Table
    films: Films
    sections: Mapping[str, Section]


def comparison(sides: Sequence[Side]) -> Comparison:
    """Compares two to `MOST` runs."""
    (differ, same), charts, (films, note) = _settings(sides), _charts(sides), _films(sides)
    sections = (
        Section(id="numbers", title="Now"),
        Section(id="curves", title="Curves", note="" if charts else "The logs have no steps yet."),
        Section(id="settings", title="What differs", count=len(differ.rows),
                note=f"{plural(same, 'setting')} {'is' if same == 1 else 'are'} the same." if differ.rows else
                "Nothing: these runs have the same settings, data and models."),
        Section(id="samples", title="Samples", count=len(films), note=note))
    return Comparison(sides=sides, numbers=_numbers(sides), charts=charts, differ=differ, films=films,
                      sections={section.id: section for section in sections})


def _numbers(sides: Sequence[Side]) -> Table:
    """The last numbers of each run."""
    rows = [(cells[0][0], *(cell[1] for cell in cells)) for cells in zip(*map(_last, sides), strict=True)]
    return _table("The last numbers of each run", sides, rows)


def _last(side: Side) -> Iterator[tuple[str, str]]:
    history = side.history
    best, memory = history.lowest, history.curves["memory"]
    yield "state", WORDS[side.state.doing]
    yield "steps", f"{side.state.step:,} of {history.steps:,}"
    yield "loss, smoothed", f"{history.smooth[-1][1]:.4g}" if history.smooth else NONE
    yield "validation loss", f"{history.held_out[-1][1]:.4g}" if history.held_out else NONE
    yield "lowest validation loss", NONE if best is None else f"{best[1]:.4g}, at step {best[0]:,}"
    yield "speed", " ".join(pace(history.samples / history.seconds, "sample")) if history.seconds else NONE
    yield "training time", clock(history.seconds)
    yield "GPU memory", f"{memory[-1][1] / (1 << 30):.2f} GiB" if memory else NONE
    yield "device", history.device or NONE


def _charts(sides: Sequence[Side]) -> list[Chart]:
    """The curves of all runs, each in one chart."""
    last = max(side.history.steps for side in sides)
    curves = {"Loss, smoothed": [side.history.smooth for side in sides],
              "Validation loss": [side.history.held_out for side in sides],
              "Likeness of drawn pictures to held-out ones": [side.history.scores["held_out"] for side in sides],
              "Learning rate": [side.history.curves["lr"] for side in sides]}
    every = [chart_of(title, [Series(name=side.name, kind=kind, points=line)
                              for side, kind, line in zip(sides, LINES, lines, strict=False)], axis="step", last=last)
             for title, lines in curves.items()]
    return [chart for chart in every if chart is not None]


def _settings(sides: Sequence[Side]) -> tuple[Table, int]:
    """What differs in data, models and settings, and how much does not."""
    known = [dict(_facts(side.document)) for side in sides]
    names = list(dict.fromkeys(name for facts in known for name in facts))
    rows = [(name, *(facts.get(name, "default") for facts in known)) for name in names]
    differ = [row for row in rows if len(set(row[1:])) > 1]
    return _table("What differs between the runs", sides, differ), len(rows) - len(differ)


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values of what made a run: data and models, then its settings. Values are as a stranger wrote them."""
    yield "manifest", _spelled(document["manifest"])
    yield from ((f"{name.removesuffix('_digest')}, SHA-256", _spelled(document[name])[:DIGITS])
                for name in DIGESTS if document.get(name))
    yield "model", _spelled(document["model"])
    base, config = ({str(key): value for key, value in table.items()} if isinstance(table, dict) else {}
                    for table in (document.get("base"), document["config"]))
    yield from ((f"{name}, fingerprint", _spelled(digest)[:DIGITS]) for name, digest in base.items())
    for name, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", _spelled(each)) for inner, each in value.items())
        else:
            yield name, _spelled(value)


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _table(caption: str, sides: Sequence[Side], rows: Sequence[tuple[str, ...]]) -> Table:
    return Table(caption=caption, rows=tuple(rows), columns=(
        Column(head="", kind="code"), *(Column(head=side.name) for side in sides)))


def _films(sides: Sequence[Side]) -> tuple[Films, str]:
    """The pictures of each prompt that several runs have, and a note on the others."""
    known: list[dict[Prompt, Film]] = []
    for side in sides:
        texts = [film.prompt for film in side.films]
        known.append({(text, texts[:place].count(text)): film
                      for place, (text, film) in enumerate(zip(texts, side.films, strict=True))})
    prompts = list(dict.fromkeys(prompt for films in known for prompt in films))
    shared = [prompt for prompt in prompts if sum(prompt in films for films in known) > 1]
    alone = len(prompts) - len(shared)
    if not shared:
        return [], ("No two of these runs have sample pictures of the same prompt." if prompts
                    else "The runs have no sample pictures yet.")
    return [(prompt[0] or "All prompts", [(side.name, films[prompt])
                                          for side, films in zip(sides, known, strict=True) if prompt in films])
            for prompt in shared], (f"{plural(alone, 'prompt')} that one run alone has "
                                    f"{'is' if alone == 1 else 'are'} left out." if alone else "")
