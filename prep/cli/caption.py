"""`prep caption`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from dataclasses import replace as replaced
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say
from prep.cli.options import quiet_pillow
from prep.cli.signature import choice
from prep.cli.ticker import progress_unless
from prep.encode.options import DEVICES
from prep.errors import EXIT_FINDINGS, UsageError

if TYPE_CHECKING:
    from prep.captioning.endpoint import Endpoint
    from prep.captioning.local import LocalModel
    from prep.captioning.structured import Schema
    from prep.captioning.tagger import Tagger
    from prep.models.fingerprint import RememberedDigest

SERVED = {"concurrency": 8, "timeout": 300.0, "retries": 5}  # options of a server, and their defaults
LOADED = {"device": "auto", "batch_size": 4, "download": False}  # those of a model on this computer
DESCRIBING = {"max_tokens": 512, "temperature": None}  # those of a model that describes
SIDE = 1024
EXAMPLE = ('for example: prep caption SOURCE --model Qwen/Qwen2.5-VL-3B-Instruct --download, --tagger '
           'SmilingWolf/wd-vit-tagger-v3 --download, or --endpoint http://localhost:8000/v1 --model NAME')


def caption(
    source: opt.SourceArg,
    endpoint: Annotated[str | None, typer.Option(
        metavar="URL", help="the server to ask: any with OpenAI's chat completions, like http://localhost:8000/v1; a "
        "key is read from OPENAI_API_KEY alone", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="with --endpoint: the model as the server calls it; without: one on "
                                              "this computer, a directory or a Hub id", show_default=False)] = None,
    tagger: Annotated[str | None, typer.Option(
        metavar="DIR|ID", help="a tagger on this computer, of SmilingWolf's kind (model.onnx, selected_tags.csv). "
        "Alone: tags are captions. With --model: {tags} in --prompt and --template", show_default=False)] = None,
    tag_threshold: Annotated[float | None, typer.Option(help="with --tagger: score of a tag, at least (default: 0.35)",
                                                        min=0.05, max=1, show_default=False)] = None,
    character_threshold: Annotated[float | None, typer.Option(
        help="with --tagger: score of a character's name, at least (default: 0.85)", min=0.05, max=1,
        show_default=False)] = None,
    tags_without: Annotated[list[str] | None, typer.Option(
        metavar="TAGS", help="with --tagger: tags to leave out, separated by commas; repeatable",
        show_default=False)] = None,
    tags_replace: Annotated[list[str] | None, typer.Option(
        metavar="OLD=NEW", help="with --tagger: other words for a tag; repeatable", show_default=False)] = None,
    tags_underscores: Annotated[bool, typer.Option(
        "--tags-underscores", help="with --tagger: long_hair stays, and does not become long hair")] = False,
    tags_rating: Annotated[bool, typer.Option("--tags-rating", help="with --tagger: the likeliest rating (general, "
                                              "sensitive, questionable, explicit) is the last tag")] = False,
    prompt: Annotated[list[str] | None, typer.Option(
        help="what the model is asked; repeatable: each makes a caption. {folder}, {name}, {old} (a person's words) "
        "and {tags} (of --tagger) are filled in", show_default=False)] = None,
    template: Annotated[str, typer.Option(help="what captions are made of: {caption} (what the model said), {folder}, "
                                          "{name}, {old}, {tags} (of --tagger)")] = "{caption}",
    trigger: Annotated[str, typer.Option(help="a word for every caption: at [trigger], else at the start")] = "",
    json_schema: Annotated[Path | None, typer.Option(
        metavar="FILE", help="with --model: captions are JSON objects that follow the JSON schema in this file",
        show_default=False)] = None,
    side: Annotated[int | None, typer.Option(help="with --model: pixels of the longer side of what it sees, at most "
                                             "(default: 1024)", min=32, max=8192, show_default=False)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="with --model: tokens of an answer, at most (default: 512)",
                                                   min=1, max=1 << 16, show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="with --model; 0: always the likeliest word (default: "
                                                      "the model's)",
                                                      min=0, max=2, show_default=False)] = None,
    concurrency: Annotated[int | None, typer.Option(help="with --endpoint: requests at a time (default: 8)", min=1,
                                                    max=256, show_default=False)] = None,
    timeout: Annotated[float | None, typer.Option(help="with --endpoint: seconds that a request may take (default: "
                                                  "300)", min=1, max=86400, show_default=False)] = None,
    retries: Annotated[int | None, typer.Option(help="with --endpoint: how often a request that fails is repeated "
                                                "(default: 5)", min=0, max=100, show_default=False)] = None,
    device: Annotated[str | None, choice(help="where a model on this computer runs (default: auto)", words=DEVICES,
                                         other="cuda:N")] = None,
    batch_size: Annotated[int | None, typer.Option(help="pictures at a time of a model on this computer, at most "
                                                   "(default: 4)", min=1, show_default=False)] = None,
    download: opt.Download = False,
    replace: Annotated[bool, typer.Option("--replace", help="also replace captions that a person wrote")] = False,
    edits: Annotated[Path | None, typer.Option(help="directory that captions are written to, as prep view --edit does "
                                               "(default: SOURCE-edits beside SOURCE)", show_default=False)] = None,
    sidecars: Annotated[bool, typer.Option("--sidecars", help="write them beside the pictures instead")] = False,
    sources: opt.Sources = None,
    limit: Annotated[int | None, typer.Option(help="pictures to ask about, at most: to look first", min=1,
                                              show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show how many pictures would be sent where; ask and write "
                                          "nothing")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 for any finding")] = False,
    every: opt.Every = False,
    jobs: opt.Jobs = opt.JOBS, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Make captions of the pictures that have none. prep view --edit shows and edits them; what people wrote stays."""
    from prep.captioning import structured
    from prep.captioning.engine import PROMPT
    from prep.captioning.run import CaptionCall, run_caption
    from prep.captioning.tags import tagging_of
    from prep.captioning.template import Wording

    quiet_pillow()
    groups = _Groups(
        served={"concurrency": concurrency, "timeout": timeout, "retries": retries},
        loaded={"device": device, "batch_size": batch_size, "download": download or None},
        describing={"prompt": prompt or None, "json_schema": json_schema, "side": side, "max_tokens": max_tokens,
                    "temperature": temperature},
        tagging={"threshold": tag_threshold, "character_threshold": character_threshold, "without": tags_without,
                 "words": tags_replace, "underscores": tags_underscores or None, "rating": tags_rating or None})
    _check(endpoint, model, tagger, groups)
    schema = None if json_schema is None else structured.schema_of(json_schema)
    wording = Wording(prompts=tuple(dict.fromkeys(prompt or [PROMPT if schema is None else structured.PROMPT])),
                      template=template, trigger=trigger, scored=model is None, schema=schema,
                      tagging=None if tagger is None else tagging_of(groups.tagging))
    scorer = None if tagger is None else _tagger(tagger, groups, quiet=quiet, first=bool(model and endpoint is None))
    if scorer is not None and wording.tagging is not None:
        wording = replaced(wording, tagging=replaced(wording.tagging, tagger=scorer.digest))
    engine, side = (scorer, scorer.side) if model is None and scorer is not None else (
        _describer(endpoint, str(model), groups, schema, quiet=quiet), side or SIDE)
    if not prompt and schema is None:
        wording = replaced(wording, prompts=(engine.prompt,))
    recipe, folder = opt.recipe_to_edit(source, {"edits": edits, "sources": sources}, sidecars=sidecars)
    report = run_caption(CaptionCall(
        recipe=recipe, folder=folder, wording=wording, side=side, replace=replace, limit=limit, dry_run=dry_run,
        jobs=jobs, notice=(lambda _: None) if quiet else say, record=opt.recorder_of(recipe, folder),
        progress=progress_unless(quiet)), engine, None if engine is scorer else scorer)
    if as_json:
        put_json(report.as_json())
    else:
        put(report.as_text(every=every))
    if report.unmade or (strict and report.findings):
        raise typer.Exit(EXIT_FINDINGS)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Groups:
    """What was given of the options that only some engines have; `None`: not given."""

    served: Mapping[str, Any]
    loaded: Mapping[str, Any]
    describing: Mapping[str, Any]
    tagging: Mapping[str, Any]


# The options of a tagger, by the fields of `Tagging`.
TAGGING = {"threshold": "tag-threshold", "without": "tags-without", "words": "tags-replace",
           "underscores": "tags-underscores", "rating": "tags-rating"}


def _check(endpoint: str | None, model: str | None, tagger: str | None, groups: _Groups) -> None:
    """Raises `UsageError` for a model that is missing, and for an option of an engine that is not asked."""
    if model is None and (tagger is None or endpoint is not None):
        raise UsageError("--model is missing: what should describe the pictures?", hint=EXAMPLE)
    unused: dict[str, Mapping[str, Any]] = {}
    if endpoint is None:
        unused["is for a model of a server, but --endpoint is not given"] = groups.served
    elif tagger is None:
        unused["is for a model on this computer, but --endpoint is given"] = groups.loaded
    if model is None:
        unused["is for a model that describes pictures, but --model is not given"] = groups.describing
    if tagger is None:
        unused["is for a tagger, but --tagger is not given"] = groups.tagging
    for why, options in unused.items():
        for name, value in options.items():
            if value is not None:
                flag = f"--{TAGGING.get(name, name.replace('_', '-'))}"
                raise UsageError(f"{flag} {why}", hint=f"leave {flag} out")


def _chosen(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: default if values[name] is None else values[name] for name, default in defaults.items()}


def _describer(endpoint: str | None, model: str, groups: _Groups, schema: Schema | None, *, quiet: bool
               ) -> Endpoint | LocalModel:
    from prep.models.device.named import require_device
    from prep.runtime import defer_interrupts

    describing = _chosen(groups.describing, DESCRIBING)
    if endpoint is not None:
        from prep.captioning.endpoint import Endpoint, chat_address, key_of_environment

        return Endpoint(chat_address(endpoint), model=model, key=key_of_environment(),
                        response_format=None if schema is None else schema.response_format,
                        **_chosen(groups.served, SERVED), **describing)
    options = _chosen(groups.loaded, LOADED)
    require_device(options["device"])
    with defer_interrupts():
        from prep.captioning.local import LocalModel  # imports torch

    with _remembered_digests() as file_digest:
        return LocalModel(model, file_digest=file_digest, progress=progress_unless(quiet), **options, **describing)


def _tagger(tagger: str, groups: _Groups, *, quiet: bool, first: bool) -> Tagger:
    """The tagger; `first`: another model on this computer follows, whose device may be one that a tagger cannot use."""
    from prep.models.device.named import require_device
    from prep.runtime import defer_interrupts

    options = _chosen({**groups.loaded, **({"device": None} if first else {})}, LOADED)
    require_device(options["device"])
    with defer_interrupts():
        from prep.captioning.tagger import Tagger  # imports torch

    with _remembered_digests() as file_digest:
        return Tagger(tagger, file_digest=file_digest, progress=progress_unless(quiet), **options)


@contextmanager
def _remembered_digests() -> Iterator[RememberedDigest]:
    from prep.fs.memo import Memo, memo_path
    from prep.models.fingerprint import RememberedDigest

    with closing(Memo(memo_path("models", "1"))) as memo:
        yield RememberedDigest(memo, "sha256", "sha256")
