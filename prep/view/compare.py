"""Renders the page of several runs beside each other: curves in one chart, the settings that differ, sampled pictures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prep.digest import digest_strings
from prep.formatting import clock, pace
from prep.pages.charts import Chart, Kind, Series, chart_of
from prep.pages.layout import render
from prep.pages.parts import Column, Section, Table, plural
from prep.pages.run import Film, films_of
from prep.runs.document import read_document
from prep.runs.history import History
from prep.runs.state import WORDS
from prep.view.run import RunFiles
from prep.view.run_pages import OFTEN, SELDOM, cells_of, run_tag, shot_of

LINES: tuple[Kind, ...] = ("line", "second", "third", "fourth")  # one for each run
MOST = len(LINES)  # runs on a page
STEPS, PROMPTS = 60, 24  # with pictures, of each run
DIGITS = 12  # of a digest
DIGESTS = ("manifest_digest", "data", "recipe")
NONE = "–"
Prompt = tuple[str, int]  # its text, and how many before it have the same


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A run on the page."""

    name: str
    base: str  # of the addresses of its pages
    files: RunFiles


def compared(runs: Sequence[tuple[str, RunFiles]]) -> list[Compared]:
    """Runs by the addresses of their pages; each named by its directory, and what that is in if another has the name.
    """
    folders = [files.folder.resolve() for _, files in runs]
    names = [folder.name for folder in folders]
    return [Compared(name=name if names.count(name) == 1 else f"{folder.parent.name}/{name}", base=base, files=files)
            for name, folder, (base, files) in zip(names, folders, runs, strict=True)]


def compare_page(runs: Sequence[Compared], base: str, *, home: str) -> str:
    """The page of two to `MOST` runs, with a link to the project's page at `home`, if there is one. Raises `PathError`,
    `CacheError`."""
    histories = [run.files.history for run in runs]
    differ, same = _settings(runs)
    charts, (films, note) = _charts(runs, histories), _films(runs, histories)
    going = any(run.files.state.doing == "running" for run in runs)
    sections = {section.id: section for section in (
        Section(id="numbers", title="Now"),
        Section(id="curves", title="Curves", note="" if charts else "The logs have no steps yet."),
        Section(id="settings", title="What differs", count=len(differ.rows),
                note=f"{plural(same, 'setting')} {'is' if same == 1 else 'are'} the same." if differ.rows else
                "Nothing: these runs have the same settings, data and models."),
        Section(id="samples", title="Samples", count=len(films), note=note))}
    return render("compare.html", base=base, home=home, edits=False, has_run=False, runs=runs, charts=charts,
                  numbers=_numbers(runs, histories), differ=differ, films=films, sections=sections,
                  every=OFTEN if going else SELDOM, tag=compare_tag(runs))


def compare_tag(runs: Sequence[Compared]) -> str:
    """A name of what the page shows, which is another one as soon as that changes."""
    return f'"{digest_strings([run_tag(run.files) for run in runs])[:32]}"'


def _numbers(runs: Sequence[Compared], histories: Sequence[History]) -> Table:
    """The last numbers of each run."""
    rows = zip(*(_last(run, history) for run, history in zip(runs, histories, strict=True)), strict=True)
    return _table("The last numbers of each run", runs, [(cells[0][0], *(cell[1] for cell in cells)) for cells in rows])


def _last(run: Compared, history: History) -> Iterator[tuple[str, str]]:
    state, best, memory = run.files.state, history.lowest, history.curves["memory"]
    yield "state", WORDS[state.doing]
    yield "steps", f"{state.step:,} of {history.steps:,}"
    yield "loss, smoothed", f"{history.smooth[-1][1]:.4g}" if history.smooth else NONE
    yield "validation loss", f"{history.held_out[-1][1]:.4g}" if history.held_out else NONE
    yield "lowest validation loss", NONE if best is None else f"{best[1]:.4g}, at step {best[0]:,}"
    yield "speed", " ".join(pace(history.samples / history.seconds, "sample")) if history.seconds else NONE
    yield "training time", clock(history.seconds)
    yield "GPU memory", f"{memory[-1][1] / (1 << 30):.2f} GiB" if memory else NONE
    yield "device", history.device or NONE


def _charts(runs: Sequence[Compared], histories: Sequence[History]) -> list[Chart]:
    """The curves of all runs, each in one chart."""
    last = max(history.steps for history in histories)
    curves = {"Loss, smoothed": [history.smooth for history in histories],
              "Validation loss": [history.held_out for history in histories],
              "Learning rate": [history.curves["lr"] for history in histories]}
    every = [chart_of(title, [Series(name=run.name, kind=kind, points=line)
                              for run, kind, line in zip(runs, LINES, lines, strict=False)], axis="step", last=last)
             for title, lines in curves.items()]
    return [chart for chart in every if chart is not None]


def _settings(runs: Sequence[Compared]) -> tuple[Table, int]:
    """What differs in settings, data and models, and how much does not."""
    known = [dict(_facts(read_document(run.files.folder))) for run in runs]
    names = list(dict.fromkeys(name for facts in known for name in facts))
    rows = [(name, *(facts.get(name, "default") for facts in known)) for name in names]
    differ = [row for row in rows if len(set(row[1:])) > 1]
    return _table("What differs between the runs", runs, differ), len(rows) - len(differ)


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values of what made a run: data and models, then its settings."""
    yield "manifest", str(document["manifest"])
    yield from ((f"{name.removesuffix('_digest')}, SHA-256", str(document[name])[:DIGITS])
                for name in DIGESTS if document.get(name))
    yield "model", _spelled(document["model"])
    yield from ((f"{name}, fingerprint", str(digest)[:DIGITS]) for name, digest in document.get("base", {}).items())
    for name, value in document["config"].items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", _spelled(each)) for inner, each in value.items())
        else:
            yield name, _spelled(value)


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _table(caption: str, runs: Sequence[Compared], rows: Sequence[tuple[str, ...]]) -> Table:
    return Table(caption=caption, rows=tuple(rows), columns=(
        Column(head="", kind="code"), *(Column(head=run.name) for run in runs)))


def _films(runs: Sequence[Compared], histories: Sequence[History]) -> tuple[list[tuple[str, list[tuple[str, Film]]]],
                                                                            str]:
    """The pictures of each prompt that several runs have, as (prompt, [(name of the run, film)]); and a note."""
    known: list[dict[Prompt, Film]] = []
    for run, history in zip(runs, histories, strict=True):
        grids = history.grids
        films, _ = films_of(grids, partial(cells_of, grids), partial(shot_of, run.base), steps=STEPS, prompts=PROMPTS)
        texts = [film.prompt for film in films]
        known.append({(text, texts[:place].count(text)): film
                      for place, (text, film) in enumerate(zip(texts, films, strict=True))})
    prompts = list(dict.fromkeys(prompt for films in known for prompt in films))
    shared = [prompt for prompt in prompts if sum(prompt in films for films in known) > 1]
    alone = len(prompts) - len(shared)
    note = "" if shared else "No two of these runs have sample pictures of the same prompt." if prompts else (
        "The runs have no sample pictures yet.")
    if shared and alone:
        note = f"{plural(alone, 'prompt')} that one run alone has {'is' if alone == 1 else 'are'} left out."
    return [(prompt[0] or "All prompts", [(run.name, films[prompt]) for run, films in zip(runs, known, strict=True)
                                          if prompt in films]) for prompt in shared], note
