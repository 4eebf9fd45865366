"""Runs `prep caption`: finds the pictures, says where they go, asks, and writes the captions as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from prep.captioning.ask import Asker, open_answers, remembered
from prep.captioning.engine import Answer, Engine
from prep.captioning.picture import BYTES_PER_PIXEL
from prep.captioning.plan import Asked, CaptionPlan, keys_of, plan, survey, texts_of
from prep.captioning.template import Wording
from prep.captioning.write import Writer
from prep.dataset.edits.log import UndoLog
from prep.dataset.edits.places import EditPlaces, check_editable, check_folder
from prep.dataset.texts import over_limit, reading_of
from prep.errors import ModelError
from prep.findings import Finding, finding, rejected_lines
from prep.formatting import counted, format_bytes, grouped, printable
from prep.fs.memo import Memo, dry_run
from prep.images.thumbnail import shrunk_size
from prep.progress import Progress, phase
from prep.recipe.schema import Recipe
from prep.runtime import defer_interrupts, killable

EXAMPLES = 3  # captions that are shown, unless a limit is given
AGAIN = ("not-captioned", "unreadable-file", "changed-meanwhile")  # which the same command may do later


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionCall:
    """A call of `prep caption`."""

    recipe: Recipe
    folder: Path | None  # of edits, which captions are written to; None: beside the pictures
    wording: Wording
    side: int  # pixels of the longer side of what models see, at most
    replace: bool  # also captions of a person
    limit: int | None  # pictures that are asked about, at most
    dry_run: bool
    jobs: int  # processes that decode
    notice: Callable[[str], None]
    record: Callable[[], str]  # notes in the recipe where captions are, and says so
    progress: Progress

    @property
    def alpha(self) -> str:
        """The color that replaces transparency."""
        return self.recipe.image.alpha.replace("reject", "white")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionReport:
    """What `prep caption` did, or of a dry run what it would do."""

    where: str  # captions are written
    model: str
    plan: CaptionPlan
    todo: int  # pictures whose caption was to be made, within the limit
    again: int  # of them, those of which a person rejected what a model made
    new: int  # answers that were asked for; of a dry run, that would be
    written: tuple[tuple[str, tuple[str, ...]], ...]
    findings: tuple[Finding, ...]
    limit: int | None
    dry_run: bool

    @property
    def unmade(self) -> bool:
        """Whether captions are missing that the same command may make later."""
        return any(each.code in AGAIN for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The document of `prep caption --json`."""
        return {"format": "latentry/caption", "version": 1, "directory": self.where, "model": self.model,
                "dry_run": self.dry_run, "pictures": self.plan.pictures, "kept": self.plan.kept, "made": self.plan.made,
                "todo": self.todo, "again": self.again, "asked": self.new, "written": len(self.written),
                "captions": [{"path": label, "captions": list(lines)} for label, lines in self.written],
                "findings": [each.as_json() for each in self.findings]}

    def as_text(self, *, every: bool = False) -> str:
        """A short summary for people; with `every`, it lists every finding."""
        left = len(self.plan.asked) - self.todo
        parts = [f"{counted(len(self.written), 'caption')} written" if not self.dry_run else
                 f"{counted(self.todo, 'picture')} would get a caption",
                 f"{counted(self.new, 'answer')} {'would be ' * self.dry_run}asked for",
                 f"{grouped(self.plan.kept)} existing kept{' (--replace replaces them)' if self.plan.kept else ''}",
                 *([f"{grouped(self.plan.made)} made before"] if self.plan.made else []),
                 *([f"{grouped(self.again)} asked about again"] if self.again else []),
                 *([f"{grouped(left)} left by --limit"] if left else [])]
        shown = self.written[:None if self.limit is not None or every else EXAMPLES]
        lines = [f"{printable(self.where)}: {', '.join(parts)}",
                 *(f"{printable(label)}: {printable(line)}" for label, texts in shown for line in texts)]
        return "\n".join([*lines, *rejected_lines(self.findings, every=every)])


class Scorer(Engine, Protocol):
    """An engine whose answers are scores of tags: `prep.captioning.tagger`."""

    @property
    def side(self) -> int:
        """Pixels of a side of what it sees."""


def run_caption(call: CaptionCall, engine: Engine, tagger: Scorer | None = None) -> CaptionReport:
    """Makes captions of the pictures that have none; a `tagger` is asked first, for the tags in prompts and captions.
    Raises `UsageError`, `PathError`, `ConfigError`, `ModelError`."""
    check_editable(call.recipe, call.folder)
    if call.folder is not None:
        check_folder(call.recipe, call.folder)
    with dry_run() if call.dry_run else nullcontext():
        places = EditPlaces(recipe=call.recipe, folder=call.folder)
        log = UndoLog(places.undo)
        items, faults = survey(call.recipe, jobs=call.jobs, progress=call.progress)
        planned = plan(items, faults, places, log, engine, call.wording, side=call.side, alpha=call.alpha,
                       replaced=call.replace, beside=_beside(call))
        todo = planned.asked[:call.limit]
        answers = open_answers()
        writer, new = Writer(log=log, wording=call.wording, by=engine.name), 0
        try:
            asking = todo if tagger is None else tuple(_tagged(call, todo, engine, tagger, answers, writer))
            missing = _announce(call, asking, engine, call.side, answers)
            if not call.dry_run:
                asker = Asker(engine, answers, side=call.side, alpha=call.alpha, jobs=call.jobs,
                              read=call.wording.read)
                new = _made(call, asking, asker, writer)
        finally:
            answers.close()
    return CaptionReport(where="beside the pictures" if call.folder is None else str(call.folder), model=engine.name,
                         plan=planned, todo=len(todo), again=sum(asked.again for asked in todo),
                         new=missing if call.dry_run else new, limit=call.limit,
                         written=tuple(writer.written), dry_run=call.dry_run,
                         findings=(*planned.findings, *writer.findings, *writer.repeated(),
                                   *_too_long(call, writer.written)))


def _too_long(call: CaptionCall, written: Sequence[tuple[str, tuple[str, ...]]]) -> Iterator[Finding]:
    """A finding for each caption that the recipe's model does not read whole, if it has one that is here."""
    if not written or not call.recipe.model.path:
        return
    try:
        reading = reading_of(call.recipe.model.path, call.recipe)
        with phase(call.progress, "counting tokens"), defer_interrupts():  # it loads transformers
            finder = reading.finder()
    except ModelError as error:
        call.notice(f"note: tokens of captions were not counted: {printable(error.message)}")
        return
    for label, lines in written:
        for code, detail in over_limit(finder.find(lines)):
            yield finding(label, code, detail)


def _beside(call: CaptionCall) -> dict[str, tuple[str, ...]]:
    """The captions of pictures without any edit, by label, if new ones are made of them."""
    if not call.wording.uses_old or call.folder is None:
        return {}
    items, _ = survey(replace(call.recipe, edits=None), jobs=call.jobs, progress=call.progress)
    return {known.item.label: texts_of(known) for known in items}


def _tagged(call: CaptionCall, todo: Sequence[Asked], engine: Engine, tagger: Scorer, answers: Memo, writer: Writer
            ) -> Iterator[Asked]:
    """The pictures with their tags, in order. One that the tagger cannot be asked about becomes a finding; in a dry
    run, one that it was not asked about stays as it is."""
    scoring = [replace(each, prompts=(tagger.prompt,),
                       keys=keys_of(each.known, (tagger.prompt,), tagger, tagger.side, call.alpha)) for each in todo]
    _announce(call, scoring, tagger, tagger.side, answers)
    if call.dry_run:
        known = ((each.place.name, remembered(answers, each)[0]) for each in scoring)
        found = {place: call.wording.tags_in(answer) for place, answer in known if answer is not None}
    else:
        found = dict(_tags(call, scoring, tagger, answers, writer))
    for asked in todo:
        tags = found.get(asked.place.name)
        if tags is not None:
            prompts = call.wording.asked_of(asked.known.item, asked.old, tags)
            yield replace(asked, tags=tags, prompts=prompts,
                          keys=keys_of(asked.known, prompts, engine, call.side, call.alpha, asked.rejected))
        elif call.dry_run:
            yield asked


def _tags(call: CaptionCall, scoring: Sequence[Asked], tagger: Scorer, answers: Memo, writer: Writer
          ) -> Iterator[tuple[str, str]]:
    """The tags of each picture, by the place of its caption; why the tagger cannot be asked about one is a finding."""
    asker = Asker(tagger, answers, side=tagger.side, alpha=call.alpha, jobs=call.jobs, read=lambda answer: answer)
    with call.progress("tagging", len(scoring), "pictures") as tick, killable(), closing(asker.ask(scoring)) as results:
        for said in results:
            tick(1)
            if isinstance(said.answers, Finding):
                writer.take(said)
            for answer in said.answers if isinstance(said.answers, tuple) else ():
                if isinstance(answer, Answer):
                    yield said.asked.place.name, call.wording.tags_in(answer)


def _made(call: CaptionCall, todo: tuple[Asked, ...], asker: Asker, writer: Writer) -> int:
    """Writes the captions; the number of answers that were not remembered."""
    new = 0
    with call.progress("captioning", len(todo), "pictures") as tick, killable(), closing(asker.ask(todo)) as results:
        for said in results:
            first = not writer.written
            writer.take(said)
            new += said.new
            if first and writer.written and (noted := call.record()):
                call.notice(noted.strip())
            tick(1)
    return new


def _announce(call: CaptionCall, todo: Sequence[Asked], engine: Engine, side: int, answers: Memo) -> int:
    """Says where pictures go, if any do; the number of answers that are not remembered."""
    lacking = {asked.keys: asked for asked in todo if None in remembered(answers, asked)}
    missing = sum(remembered(answers, asked).count(None) for asked in lacking.values())
    if lacking:
        call.notice(_announced(list(lacking.values()), missing, side, engine))
    return missing


def _announced(lacking: list[Asked], missing: int, side: int, engine: Engine) -> str:
    """What is said before the first request."""
    where = engine.describe()
    if engine.form != "jpeg":
        does = "tags" if engine.form == "square" else "describes"
        return f"note: {engine.name} {does} {counted(len(lacking), 'picture')} {where}"
    pixels = 0
    for asked in lacking:
        width, height = shrunk_size(asked.known.size, side)
        pixels += width * height * len(asked.prompts)
    return (f"note: {counted(len(lacking), 'picture')} will be sent to {where}, model {engine.name}: "
            f"{counted(missing, 'request')}, {engine.at_once} at a time, each with a JPEG of at most {side} pixels a "
            f"side, about {format_bytes(int(pixels * BYTES_PER_PIXEL))} in all")
