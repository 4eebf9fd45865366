"""The page of `train evaluate`: the scores of the checkpoints, and their pictures side by side, a row per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from prep.errors import PathError
from prep.formatting import shell_name
from prep.fs.atomic import write_atomic
from prep.fs.paths import NamedPath
from prep.images.thumbnail import small_jpeg
from prep.pages.overlay import Shot
from prep.pages.parts import Column, Head, Section, Table, plural
from prep.pages.run import Film, Frame
from prep.pages.snapshot import EmbeddedPictures, PageOrigin, check_page_file, render_snapshot
from train.selection.run import Evaluation

SIDE = 320  # pixels of the longer side of a picture
NONE = "–"


def check_page(path: Path) -> None:
    """Raises `PathError` unless the page may be written to `path`, over an earlier page only."""
    check_page_file(path, ())
    if path.suffix.lower() not in (".html", ".htm"):  # browsers show an HTML page of another name as its text
        raise PathError(f"{path} is not named like an HTML page, expected a name that ends in .html",
                        hint=f"--html {shell_name(str(path.with_suffix('.html')))}")


def write_page(found: Evaluation, path: Path, made: date) -> None:
    """Writes the page to `path`, atomically. Raises `PathError`."""
    manifest = found.columns[-1].setup.manifest
    check_page_file(path, (NamedPath(role=role, path=place) for role, place in (
        ("cache", manifest.cache), *(("pictures", place) for place in manifest.sources)) if place is not None))
    write_atomic(path, page(found, made).encode("utf-8"))


def page(found: Evaluation, made: date) -> str:
    """Renders the page, dated `made`."""
    room = EmbeddedPictures()
    films, neutral = _films(found, 0, found.prompts, room), _films(found, found.prompts, None, room)
    scores, chosen, reason = _scores(found), found.proposal.name, found.proposal.reason
    sections = [
        Section(id="scores", title="Scores", count=len(scores.rows), note=(
            f"{reason[0].upper()}{reason[1:]}. held-out and training: likeness, the mean cosine with the nearest of "
            "these pictures; nearest: the highest with a training picture. A drift of 0: pictures that should stay are "
            "as the base model draws them; 1: they are as far from those as these are from one another. Prompt fit is "
            "the mean cosine with the prompt, and no part of the rule.")),
        Section(id="pictures", title="Pictures", count=len(films)),
        Section(id="neutral", title="Pictures that should stay", count=len(neutral),
                note="Step 0 is the base model." if neutral else "This model draws none without a picture.")]
    head = Head(kind="Evaluation", what=plural(len(scores.rows), "checkpoint"),
                usable=f"Proposed: {chosen}" if chosen else "None is proposed", part=None,
                tone="good" if chosen else "warning", todo="")
    origin = PageOrigin(name=found.run.folder.resolve().name, places=(str(found.run.local),), made=made)
    return render_snapshot("evaluation.html", origin, head=head, sections=sections, scripted=True, scores=scores,
                           copies=_copies(found), films=films, neutral=neutral)


def _scores(found: Evaluation) -> Table:
    document = found.as_json()["checkpoints"]
    names = ("held_out", "training", "nearest", "drift", "validation", "prompt_fit")
    rows = tuple((each["name"], *(NONE if each[name] is None else f"{each[name]:.4f}" for name in names),
                  str(len(each["copies"])), "; ".join(each["excluded"])) for each in document)
    return Table(caption="Scores of the checkpoints", rows=rows, columns=(
        Column(head="checkpoint", kind="code"), *(Column(head=head, kind="number") for head in (
            "held-out", "training", "nearest", "drift", "validation", "prompt fit", "copies")),
        Column(head="out of bounds")))


def _copies(found: Evaluation) -> Table:
    rows = tuple((each["name"], copy["prompt"], str(copy["seed"]), copy["picture"], f"{copy['cosine']:.4f}")
                 for each in found.as_json()["checkpoints"] for copy in each["copies"])
    return Table(caption="Drawn pictures that are nearly training pictures", rows=rows, columns=(
        Column(head="checkpoint", kind="code"), Column(head="prompt"), Column(head="seed", kind="number"),
        Column(head="training picture", kind="name"), Column(head="cosine", kind="number")))


def _films(found: Evaluation, first: int, last: int | None, room: EmbeddedPictures) -> Sequence[Film]:
    """The pictures of these prompts of all checkpoints, and of the neutral ones also the base model's."""
    prompts, films = found.columns[0].prompts[first:last], []
    for number, prompt in enumerate(prompts):
        keys = [(0, found.base.keys[number])] if first and found.base is not None else []
        keys += [(each.start.state.step, each.keys[first + number]) for each in found.columns if each.start]
        title = f"{prompt.prompt or 'no prompt'}, seed {prompt.settings.seed}"
        films.append(Film(prompt=title, frames=tuple(
            Frame(step=step, shot=Shot(name=f"{title}, at step {step:,}", address=_address(found, key, room),
                                       instead="The page has no room for this picture."))
            for step, key in keys)))
    return films


def _address(found: Evaluation, key: str, room: EmbeddedPictures) -> str:
    pixels = found.kept.picture(key)
    return room.add(None if pixels is None else small_jpeg(pixels, SIDE))
