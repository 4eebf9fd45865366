"""`prep caption`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
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

SERVED = {"concurrency": 8, "timeout": 300.0, "retries": 5}  # options of a server, and their defaults
LOADED = {"device": "auto", "batch_size": 4, "download": False}  # those of a model on this computer


def caption(
    source: opt.SourceArg,
    endpoint: Annotated[str | None, typer.Option(
        metavar="URL", help="the server to ask: any with OpenAI's chat completions, like http://localhost:8000/v1; a "
        "key is read from OPENAI_API_KEY alone", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="with --endpoint: the model as the server calls it; without: one on "
                                              "this computer, a directory or a Hub id", show_default=False)] = None,
    prompt: Annotated[list[str] | None, typer.Option(
        help="what the model is asked; repeatable: each makes a caption. {folder}, {name} and {old} (a person's words) "
        "are filled in", show_default=False)] = None,
    template: Annotated[str, typer.Option(help="what captions are made of: {caption} (what the model said), {folder}, "
                                          "{name}, {old}")] = "{caption}",
    trigger: Annotated[str, typer.Option(help="a word for every caption: at [trigger], else at the start")] = "",
    side: Annotated[int, typer.Option(help="pixels of the longer side of what the model sees, at most", min=32,
                                      max=8192)] = 1024,
    max_tokens: Annotated[int, typer.Option(help="tokens of an answer, at most", min=1, max=1 << 16)] = 512,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest word (default: the model's)",
                                                      min=0, max=2, show_default=False)] = None,
    concurrency: Annotated[int | None, typer.Option(help="with --endpoint: requests at a time (default: 8)", min=1,
                                                    max=256, show_default=False)] = None,
    timeout: Annotated[float | None, typer.Option(help="with --endpoint: seconds that a request may take (default: "
                                                  "300)", min=1, max=86400, show_default=False)] = None,
    retries: Annotated[int | None, typer.Option(help="with --endpoint: how often a request that fails is repeated "
                                                "(default: 5)", min=0, max=100, show_default=False)] = None,
    device: Annotated[str | None, choice(help="without --endpoint: where the model runs (default: auto)", words=DEVICES,
                                         other="cuda:N")] = None,
    batch_size: Annotated[int | None, typer.Option(help="without --endpoint: pictures at a time, at most (default: 4)",
                                                   min=1, show_default=False)] = None,
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
    from prep.captioning.engine import PROMPT
    from prep.captioning.run import CaptionCall, run_caption
    from prep.captioning.template import Wording

    quiet_pillow()
    wording = Wording(prompts=tuple(dict.fromkeys(prompt or [PROMPT])), template=template, trigger=trigger)
    both = {"max_tokens": max_tokens, "temperature": temperature}
    served = {"concurrency": concurrency, "timeout": timeout, "retries": retries}
    loaded = {"device": device, "batch_size": batch_size, "download": download or None}
    _check(endpoint, model, served, loaded)
    engine = _endpoint(endpoint, str(model), served, both) if endpoint is not None else _local(
        str(model), loaded, both, quiet=quiet)
    if not prompt:
        wording = replaced(wording, prompts=(engine.prompt,))
    recipe, folder = opt.recipe_to_edit(source, {"edits": edits, "sources": sources}, sidecars=sidecars)
    report = run_caption(CaptionCall(
        recipe=recipe, folder=folder, wording=wording, side=side, replace=replace, limit=limit, dry_run=dry_run,
        jobs=jobs, notice=(lambda _: None) if quiet else say, record=opt.recorder_of(recipe, folder),
        progress=progress_unless(quiet)), engine, engine.describe())
    if as_json:
        put_json(report.as_json())
    else:
        put(report.as_text(every=every))
    if report.unmade or (strict and report.findings):
        raise typer.Exit(EXIT_FINDINGS)


def _check(endpoint: str | None, model: str | None, served: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Raises `UsageError` for a model that is missing, and for an option of the other kind of engine."""
    if model is None:
        raise UsageError("--model is missing: what should describe the pictures?",
                         hint="for example: prep caption SOURCE --model Qwen/Qwen2.5-VL-3B-Instruct --download, or "
                         "--endpoint http://localhost:8000/v1 --model NAME")
    wanted = "of a server, but --endpoint is not given" if endpoint is None else (
        "on this computer, but --endpoint is given")
    for name, value in (served if endpoint is None else loaded).items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is for a model {wanted}", hint=f"leave {flag} out")


def _chosen(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: default if values[name] is None else values[name] for name, default in defaults.items()}


def _endpoint(url: str, model: str, served: Mapping[str, Any], both: Mapping[str, Any]) -> Endpoint:
    from prep.captioning.endpoint import Endpoint, chat_address, key_of_environment

    return Endpoint(chat_address(url), model=model, key=key_of_environment(), **_chosen(served, SERVED), **both)


def _local(model: str, loaded: Mapping[str, Any], both: Mapping[str, Any], *, quiet: bool) -> LocalModel:
    from prep.fs.memo import Memo, memo_path
    from prep.models.device.named import require_device
    from prep.models.fingerprint import RememberedDigest
    from prep.runtime import defer_interrupts

    options = _chosen(loaded, LOADED)
    require_device(options["device"])
    with defer_interrupts():
        from prep.captioning.local import LocalModel  # imports torch

    with closing(Memo(memo_path("models", "1"))) as memo:
        return LocalModel(model, file_digest=RememberedDigest(memo, "sha256", "sha256"),
                          progress=progress_unless(quiet), **options, **both)
