"""`prep caption`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, say
from prep.cli.options import quiet_pillow
from prep.cli.ticker import progress_unless
from prep.errors import EXIT_FINDINGS, UsageError

if TYPE_CHECKING:
    from prep.captioning.endpoint import Endpoint


def caption(
    source: opt.SourceArg,
    endpoint: Annotated[str | None, typer.Option(
        metavar="URL", help="the server to ask: any with OpenAI's chat completions, like http://localhost:8000/v1; a "
        "key is read from OPENAI_API_KEY alone", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="the model, as the server calls it", show_default=False)] = None,
    prompt: Annotated[list[str] | None, typer.Option(
        help="what the model is asked; repeatable: each makes a caption. {folder}, {name} and {old} (the caption until "
        "now) are filled in", show_default=False)] = None,
    template: Annotated[str, typer.Option(help="what captions are made of: {caption} (what the model said), {folder}, "
                                          "{name}, {old}")] = "{caption}",
    trigger: Annotated[str, typer.Option(help="a word for every caption: at [trigger], else at the start")] = "",
    side: Annotated[int, typer.Option(help="pixels of the longer side of what the model sees, at most", min=32,
                                      max=8192)] = 1024,
    max_tokens: Annotated[int, typer.Option(help="tokens of an answer, at most", min=1, max=1 << 16)] = 512,
    temperature: Annotated[float | None, typer.Option(help="0: always the likeliest word (default: the server's)",
                                                      min=0, max=2, show_default=False)] = None,
    concurrency: Annotated[int, typer.Option(help="requests at a time", min=1, max=256)] = 8,
    timeout: Annotated[float, typer.Option(help="seconds that a request may take", min=1, max=86400)] = 300,
    retries: Annotated[int, typer.Option(help="how often a request that fails is repeated", min=0, max=100)] = 5,
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
    engine = _endpoint(endpoint, model, concurrency, timeout, retries, max_tokens, temperature)
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


def _endpoint(url: str | None, model: str | None, at_once: int, seconds: float, retries: int, max_tokens: int,
              temperature: float | None) -> Endpoint:
    from prep.captioning.endpoint import Endpoint, chat_address, key_of_environment

    if url is None or model is None:
        raise UsageError(f"{'--endpoint' if url is None else '--model'} is missing: what should describe the pictures?",
                         hint="for example: prep caption SOURCE --endpoint http://localhost:8000/v1 --model NAME")
    return Endpoint(chat_address(url), model=model, key=key_of_environment(), at_once=at_once, seconds=seconds,
                    retries=retries, max_tokens=max_tokens, temperature=temperature)
