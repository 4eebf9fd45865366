"""Renders the pages of a project: what it has and the way on, forms, and jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from prep.digest import digest_strings
from prep.errors import UsageError
from prep.formatting import shell_name
from prep.jobs.job import Job, written_by
from prep.jobs.log import size_of, tail
from prep.pages.layout import render
from prep.studio.forecasts import Forecast, question_of
from prep.studio.forms import Field, Form, bounds_of, complete
from prep.studio.looks import KINDS, address_of
from prep.studio.project import Project
from prep.studio.steps import STEPS, Step, next_step

LOG = 1 << 15  # bytes of a job's log on its page
JOBS = 50  # that are over, on the page of jobs
OFTEN = 2  # seconds between looks of a page
BUTTONS = {"stop": "Stop after this step", "kill": "Stop now", "again": "Run again", "first": "Run next",
           "remove": "Remove"}


def project_page(project: Project, jobs: Sequence[Job], **site: Any) -> str:
    """What there is, the steps, and the jobs that wait or run."""
    at = next_step(project)
    things = [(kind, shown, [(name, _look(site["base"], kind, name)) for name in project.names(kind)])
              for kind, shown in KINDS.items() if project.names(kind)]
    steps = [(step, step is at, ", ".join(project.names(step.makes)) if step.makes else "") for step in STEPS]
    return render("project.html", **site, steps=steps, things=things, at=at, links=project.links,
                  busy=[_shown(job) for job in jobs if not job.is_over])


def step_of(form: Form) -> Step | None:
    """The step whose command a form is of."""
    return next((step for step in STEPS if step.form == form.name), None)


def form_page(form: Form, project: Project, values: Mapping[str, Sequence[str]] | None, *, asks: Form | None,
              forecast: Forecast | None, busy: bool, **site: Any) -> str:
    """The form of a command, filled with `values` (`None`: as far as the project tells), and the command; what it would
    take, if the command of the form `asks` says so."""
    step = step_of(form)
    known = values if values is not None else step.filled(project) if step is not None else {}
    known = {name: list(given) for name, given in known.items() if any(field.name == name for field in form.fields)}
    words, trouble = list[str](), ""
    try:
        words = form.words(known)
        complete(form, known)
    except UsageError as error:
        trouble = error.message
    main = () if step is None else step.main
    fields = sorted(form.fields, key=lambda field: main.index(field.name) if field.name in main else len(main))
    shown = [(field, known.get(field.name, []), _suggested(field, step, project), bounds_of(field)) for field in fields]
    return render("form.html", **site, form=form, step=step, trouble=trouble,
                  first=shown[:len(main)] or shown, more=shown[len(main):] if main else [],
                  command=_line(words), add=f"{site['base']}/form/{form.name}?{_query(known)}",
                  forecast=None if asks is None else _forecast(form, asks, known, forecast, site["base"], busy=busy))


def _forecast(form: Form, asks: Form, known: Mapping[str, Sequence[str]], newest: Forecast | None, base: str, *,
              busy: bool) -> dict[str, Any]:
    """What the page shows of what the command would take; the buttons that ask."""
    address, usable = f"{base}/forecast/{form.name}", {**known, "measure": []}
    try:
        words = question_of(asks, usable)
    except UsageError:
        words = []
    buttons = [("What would it take?", f"{address}?{_query(usable)}")]
    if any(field.name == "measure" for field in asks.fields):
        buttons.append(("Measure how long, too", f"{address}?{_query({**known, 'measure': ['yes']})}"))
    if newest is None:
        return {"buttons": buttons, "fillable": bool(words), "asked": False}
    answer = newest.answer
    ways = () if answer is None else [(says, ", ".join(f"{name} = {_value(value)}" for name, value in settings.items()),
                                       f"{base}/form/{form.name}?{_query(_with(form, known, settings))}")
                                      for says, settings in answer.ways]
    return {"buttons": buttons, "fillable": bool(words), "asked": True, "answer": answer, "ways": ways, "busy": busy,
            "command": _line(newest.words), "forget": f"{address}/forget",
            "same": words == [word for word in newest.words if word != "--measure"]}


def _with(form: Form, known: Mapping[str, Sequence[str]], settings: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """The values of a form with other settings: in fields of their own, else among those that are set by name."""
    values, names = dict(known), {field.name for field in form.fields}
    for name, value in settings.items():
        if (own := name.replace(".", "_")) in names:
            values[own] = [_value(value)]
        else:
            others = [each for each in values.get("settings", ()) if each.partition("=")[0].strip() != name]
            values["settings"] = [*others, f"{name}={_value(value)}"]
    return values


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _query(values: Mapping[str, Sequence[str]]) -> str:
    return urlencode([(name, value) for name, given in values.items() for value in given])


def _line(words: Sequence[str]) -> str:
    return " ".join(map(shell_name, words))


def _suggested(field: Field, step: Step | None, project: Project) -> Sequence[str]:
    """Names in the project that fit a field."""
    kind = step.fill.get(field.name, "") if step is not None else ""
    return project.names(kind) if kind else field.words if field.is_open else ()


def _look(base: str, kind: str, name: str) -> str:
    return f"{address_of(base, kind, name)}/{'run' if kind == 'runs' else ''}"


def jobs_page(jobs: Sequence[Job], *, trouble: str, **site: Any) -> str:
    """The queue: what runs, what waits, and the last jobs that are over, the newest first."""
    over = [job for job in jobs if job.is_over]
    return render("jobs.html", **site, trouble=trouble,
                  running=[_shown(job) for job in jobs if job.state == "running"],
                  waiting=[_shown(job) for job in jobs if job.state == "waiting"],
                  over=[_shown(job) for job in over[::-1][:JOBS]], more=max(len(over) - JOBS, 0))


def job_page(job: Job, project: Project, **site: Any) -> str:
    """A job, the end of what it printed, and where to go on once it is done."""
    form = "-".join(job.words[:2])
    following = next((STEPS[place + 1] for place, step in enumerate(STEPS[:-1]) if step.form == form), None)
    return render("job.html", **site, job=_shown(job), log=tail(job, LOG), following=following,
                  run=next(((name, _look(site["base"], "runs", name)) for name in written_by(job)
                            if name in project.runs), None))


def jobs_tag(jobs: Sequence[Job], *more: object) -> str:
    """A name of what pages of jobs show, which is another one as soon as that changes."""
    sizes = [size_of(job) for job in jobs if job.state == "running"]
    return f'"{digest_strings([repr([job.as_json() for job in jobs]), repr(sizes), repr(more)])[:32]}"'


def _shown(job: Job) -> dict[str, Any]:
    """What templates show of a job."""
    actions = ["kill"] if job.stopping else {"running": ["stop", "kill"], "waiting": ["first", "remove"]}.get(
        job.state, ["again", "remove"])
    tone = {"running": "info", "waiting": "info", "done": "good", "stopped": "warning"}.get(job.state, "error")
    return {"name": job.name, "command": job.command, "says": job.says, "state": job.state, "tone": tone,
            "alone": job.alone is not None,
            "part": job.done / job.total if job.total and job.state == "running" else None,
            "actions": [(action, BUTTONS[action]) for action in actions]}


def name_of(project: Path) -> str:
    """How pages call a project."""
    return project.name or str(project)
