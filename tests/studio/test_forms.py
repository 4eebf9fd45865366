"""Forms of commands: each field becomes the words that the command itself reads as the same value."""

from __future__ import annotations

import os
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from prep.cli.forms import LEFT_OUT, forms_of
from prep.errors import UsageError
from prep.jobs.job import PROGRAMS
from prep.studio.forms import Field, Form
from prep.studio.project import Project
from prep.studio.steps import STEPS

COMMANDS = {program: get_command(import_module(module).app) for program, module in PROGRAMS.items()}
FORMS = [form for program, group in COMMANDS.items() for form in forms_of(program, list(group.commands))]


def sample(field: Field, draw: random.Random) -> list[str]:
    """Values that a person may type into a field."""
    if field.kind == "flag":
        return [draw.choice(["yes", "no", ""])]
    if field.kind == "choice":
        return [draw.choice(field.words)]
    if field.kind == "number":
        low, high = field.low or 0, 9 if field.high is None else field.high
        number = draw.uniform(low, max(low, min(high, low + 9)))
        return [str(round(number)) if field.whole else f"{number:.3f}"]
    texts = ["a b", "-x", "--", "ü", "s3://bucket/a", "*"]
    return draw.sample(texts, 2) if field.kind == "several" else [draw.choice(texts)]


def parsed(form: Form, words: list[str]) -> dict[str, Any]:
    """What the command's parser takes the words for, as text."""
    command = COMMANDS[form.program].commands[form.command]
    context = command.context_class(command, info_name=form.command, resilient_parsing=True)
    return command.make_parser(context).parse_args(args=words[2:])[0]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_words_are_read_as_the_values_that_made_them(form: Form) -> None:
    draw = random.Random(form.name)
    for _ in range(20):
        chosen = [field for field in form.fields if field.required or draw.random() < 0.5]
        if sum(not field.flag for field in chosen) > 1:  # of several arguments, the first takes what there is
            chosen = [field for field in chosen if field.flag or field.required]
        values = {field.name: sample(field, draw) for field in chosen}
        read = parsed(form, form.words(values))
        for field in chosen:
            given, found = values[field.name], read.get(field.name)
            if field.kind == "flag":
                assert found == {"yes": True, "no": False if field.off else None, "": None}[given[0]]
            elif field.kind == "several":
                assert list(found or ()) == given
            elif found is not None or given[0] != field.default:
                assert (found[0] if isinstance(found, tuple) else found) == given[0]


def test_every_option_of_a_command_is_a_field() -> None:
    for form in FORMS:
        params = COMMANDS[form.program].commands[form.command].params
        assert {field.name for field in form.fields} == {param.name for param in params if not param.hidden} - LEFT_OUT
        assert all(field.help for field in form.fields)
    assert any(field.low is not None for form in FORMS for field in form.fields)


def test_steps_name_fields_of_their_commands() -> None:
    forms = {form.name: form for form in FORMS}
    for step in STEPS:
        names = {field.name for field in forms[step.form].fields}
        assert {*step.main, *step.fill, *step.preset, *step.fresh} <= names, step.title
        filled = step.filled(Project(folder=Path("nowhere"), runs=("run",), manifests=("m.json",)))
        forms[step.form].words(filled)


def test_forms_are_filled_with_what_is_probably_meant(tmp_path: Path) -> None:
    """The usual names, the newest run, and else the first of a kind."""
    names = ("a", "b", "c")
    for age, name in enumerate(("b", "a", "c")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
        os.utime(tmp_path / name / "run.json", (1000 - age, 1000 - age))
    project = Project(folder=tmp_path, runs=names, settings=("fast.toml", "train.toml"), models=names,
                      recipes=("all.toml", "dataset.toml"), manifests=("manifest.json", "z.json"))
    assert [project.likely(kind) for kind in ("runs", "settings", "source", "manifests", "models")] == [
        "b", "train.toml", "dataset.toml", "manifest.json", "a"]
    assert Project(folder=tmp_path, settings=names, runs=("gone",)).likely("settings") == "a"
    assert Project(folder=tmp_path, runs=("gone",)).likely("runs") == "gone"


@pytest.mark.parametrize(("values", "says"), [
    ({"unknown": ["1"]}, "train run has no field unknown"), ({"steps": ["1", "2"]}, "steps is given 2 times"),
    ({"steps": ["x"]}, "expected a whole number"), ({"steps": ["1.5"]}, "expected a whole number"),
    ({"steps": ["1e3"]}, "expected a whole number"), ({"manifest": ["a\nb"]}, "printable characters"),
    ({"manifest": ["a\0"]}, "printable characters"), ({"manifest": ["x" * 5000]}, "a line of at most 4096"),
    ({"precision": ["float99"]}, "expected one of auto, bf16"),
    ({"settings": ["a=1"] * 101}, "set is given 101 times")])
def test_wrong_values_are_refused(values: dict[str, list[str]], says: str) -> None:
    run = next(form for form in FORMS if form.name == "train-run")
    with pytest.raises(UsageError, match=says):
        run.words(values)


def test_numbers_have_bounds() -> None:
    form = Form(program="prep", command="x", help="", fields=(
        Field(name="n", flag="--n", help="n", kind="number", low=1, high=4),))
    assert form.words({"n": ["2.5"]}) == ["prep", "x", "--n", "2.5"]
    for value in ("0", "5", "nan"):
        with pytest.raises(UsageError, match=f"n is {value}, expected 1 or more, 4 or less"):
            form.words({"n": [value]})


def test_what_is_missing_is_told() -> None:
    scan = next(form for form in FORMS if form.name == "prep-scan")
    assert scan.missing({}) == ["source"] == scan.missing({"source": [""]})
    assert scan.missing({"source": ["photos"]}) == []
