"""`prep view`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli import options as opt
from prep.cli import serving
from prep.cli.console import say
from prep.cli.ticker import progress_unless
from prep.errors import PathError, UsageError
from prep.formatting import shell_name
from prep.fs.paths import resolve
from prep.fs.place import Local, Place, is_directory, is_file, is_here, maybe_place, place_of
from prep.fs.remote.bucket import Bucket
from prep.recipe.options import BY_NAME, without_caption_stop

if TYPE_CHECKING:
    from prep.manifest.opened import OpenedManifest
    from prep.recipe.schema import Recipe
    from prep.view.edit.editor import Edits
    from prep.view.guard import Guard
    from prep.view.model import ViewedModel
    from prep.view.site import Site
    from prep.view.source.state import SourceSet


NOT_SHOWN = ("model", "dtype", "compute", "max_length", "clip_skip", "text_windows", "text_quantization", "posterior",
             "tile", "prompts")


@opt.with_recipe_options(without=NOT_SHOWN)
def view(
    what: Annotated[Path, typer.Argument(
        metavar="SOURCE|MANIFEST|RUN", help="a directory of pictures, a recipe .toml or tars; a manifest.json; or the "
        "directory of a training run, finished or not. All but a recipe and a run may be in an object store: "
        "s3://bucket/dataset/manifest.json", show_default=False)],
    manifest: Annotated[Path | None, typer.Option(help="of a RUN whose manifest has moved")] = None,
    model: Annotated[str | None, typer.Option(
        help="the model that made the cache, a directory or a Hub id: shows tokens, which of them are cut off, and "
        "decoded latents; for a SOURCE, the model whose buckets to show")] = None,
    since: Annotated[Path | None, typer.Option(help="an earlier manifest, or the run on one: shows both side by "
                                               "side, and which samples changed; of two runs, what differs")] = None,
    scan: Annotated[bool, typer.Option("--scan", help="scan a SOURCE first, as prep scan does; else findings of "
                                       "earlier scans are shown")] = False,
    edit: Annotated[bool, typer.Option("--edit", help="edit captions and masks of a SOURCE, or of a MANIFEST's "
                                       "sources, in the pages; they are written to the directory of --edits (default: "
                                       "SOURCE-edits beside SOURCE)"
                                       )] = False,
    sidecars: Annotated[bool, typer.Option("--sidecars", help="with --edit: write them beside the pictures instead"
                                           )] = False,
    cache: Annotated[Path | None, typer.Option(
        help="of a MANIFEST or RUN: where the cache is, if it has moved; with --edit: the cache that the pictures are "
        "encoded to, to count what re-encoding would take; needs the recipe's model, or --model (default: the "
        "MANIFEST's)")] = None,
    given: opt.Given = {},  # noqa: B006  # replaced by the options, and never changed
    port: Annotated[int, typer.Option(help="of 127.0.0.1 (default: a free one)", min=0, max=65535,
                                      show_default=False)] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="open the address in your browser")] = False,
    jobs: opt.Jobs = opt.JOBS, as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Show pictures, a manifest or a run in your browser: samples, search, filters, what training sees of each.

    Pictures are shown before anything is encoded, in the buckets and crops that prep encode would choose. Of a run,
    also its curves, its sampled pictures through time, and the loss of each sample. Ends with Ctrl-C.

    Nothing is changed, but with --edit what you save; the buttons of a run ask the process that trains it. Reachable
    from this computer only, and only with the token in the printed address.
    """
    serving.require_extra()
    from prep.images.decode import quiet_pillow
    from prep.view.guard import new_token

    quiet_pillow()
    token, first, place = new_token(), "", place_of(what)
    if edit and is_file(place) and not is_source(place):
        sources = _sources_of(place, {**given, "model": model}, maybe_place(cache))
        sources = replace(sources, scan=scan, jobs=jobs, quiet=quiet, edit=True, sidecars=sidecars)
        _refuse({"--manifest": manifest, "--since": since}, "showing a MANIFEST or RUN", "--edit shows its sources")
        app, site = _source(sources, token)
    elif is_source(place):
        _refuse({"--manifest": manifest, "--since": since}, "a MANIFEST or RUN",
                f"{place} is a source of pictures")
        sources = _SourceOptions(what=place, given={**given, "model": model}, scan=scan, jobs=jobs, quiet=quiet,
                                 edit=edit, sidecars=sidecars, cache=None if cache is None else place_of(cache))
        app, site = _source(sources, token)
    else:
        options = {BY_NAME[name].flag: value for name, value in given.items()}
        flags = {"--scan": scan or None, "--edit": edit or None, "--sidecars": sidecars or None}
        _refuse({**options, **flags}, "a SOURCE", f"{place} is none")
        app, site, first = _encoded(place, token, maybe_place(manifest), model, maybe_place(since), maybe_place(cache))
    try:
        serving.serve(app, port, f"{token}/{first}", first, "latentry/view", open_browser=open_browser, as_json=as_json)
    finally:
        site.pictures.close()


def is_source(what: Place) -> bool:
    """Whether a path names pictures: a directory that is no run, a recipe, or tars; of URLs, all but those that end in
    .json. Raises `PathError`, also for a run in a store."""
    from prep.runs.document import NAME, check_not_stored
    from prep.sources.walk import is_tars

    if isinstance(what, Bucket):
        if what.suffix not in (".json", ".toml", ".tar"):
            check_not_stored(what)
        return what.suffix != ".json"
    if what.is_dir():
        return not (what / NAME).exists()
    if what.suffix == ".toml" or is_tars(what):
        return True
    if what.suffix != ".json" and not what.exists():
        raise PathError(f"there is no file or directory {what}", hint="name pictures, a recipe, a manifest or a run")
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _SourceOptions:
    """The options for a SOURCE."""

    what: Place
    given: opt.Given
    scan: bool
    jobs: int
    quiet: bool
    edit: bool
    sidecars: bool
    cache: Place | None


def _sources_of(manifest: Path, values: opt.Given, cache: Place | None) -> _SourceOptions:
    """The recipe that a manifest was encoded from, with the options of that command and of this one."""
    from prep.manifest.document import read_manifest
    from prep.recipe.edits import NONE
    from prep.recipe.options import given_by

    origin = read_manifest(manifest, cache=cache)
    recipe, sources = origin.document["recipe"], origin.sources
    what = origin.folder / recipe if recipe is not None else sources[0] if len(sources) == 1 else None
    if what is None:
        raise PathError(f"{manifest} does not say where its pictures are", hint="name them: prep view SOURCE --edit")
    words = [word if isinstance(word, str) else resolve(word) for word in origin.options]
    own = {name: value for name, value in values.items() if value is not None}
    encoded = {name: value for name, value in given_by(words).items() if value != NONE}  # which no edit has to stay
    every = {**dict.fromkeys(values), **encoded, **own}
    return _SourceOptions(what=resolve(what), given=every, scan=False, jobs=1, quiet=False,
                          edit=True, sidecars=False, cache=origin.cache)


def _source(options: _SourceOptions, token: str) -> tuple[Guard, Site]:
    from prep.view.app import build_source_app
    from prep.view.guard import Guard
    from prep.view.source.state import SourceSet
    from prep.view.source.survey import survey_source

    if not options.edit:
        _refuse({"--sidecars": options.sidecars or None, "--cache": options.cache}, "--edit", "it is not given")
    recipe, folder = _recipe(options)
    survey = survey_source(without_caption_stop(recipe), jobs=options.jobs, scan=options.scan,
                           progress=progress_unless(options.quiet))
    if not survey.items:
        raise PathError(f"{options.what} has no picture that can be used, and is no training run",
                        hint=f"prep scan {shell_name(str(options.what))} says what is there; of a manifest, name its "
                        f"file{'' if is_here(options.what) else ', which in an object store ends in .json'}")
    source = SourceSet(survey)
    edits = _edits(options, recipe, folder, source) if options.edit else None
    for line in () if options.quiet else (*source.notices, *source.data().notes):
        say(line)
    app, site = build_source_app(source, f"/{token}", edits)
    return Guard(app, token, site.edit_token), site


def _recipe(options: _SourceOptions) -> tuple[Recipe, Path | None]:
    """The recipe, and with --edit the directory that edits are written to; `None`: beside the pictures."""
    if not options.edit:
        return opt.recipe_from_options(options.what, **options.given), None
    return opt.recipe_to_edit(options.what, options.given, sidecars=options.sidecars)


def _edits(options: _SourceOptions, recipe: Recipe, folder: Path | None, source: SourceSet) -> Edits:
    from functools import partial

    from prep.dataset.edits.places import EditPlaces, check_editable
    from prep.view.edit.cost import cost_of
    from prep.view.edit.editor import Edits

    check_editable(recipe, folder)
    if options.cache is not None and not recipe.model.path:
        raise UsageError("--cache is given, but no model is known, so rows cannot be counted",
                         hint="add --model MODEL, or set path in [model] of the recipe")
    pairs = zip(recipe.options[::2], recipe.options[1::2], strict=True)
    words = ["prep", "encode", str(options.what), *(word for pair in pairs if pair[0] != "--edits" for word in pair),
             *(() if folder is None else ("--edits", folder)), "--cache", options.cache or "CACHE", "--dry-run"]
    if not options.quiet:
        say(f"edits are written {'beside the pictures' if folder is None else f'to {folder}'}")
    counted = partial(cost_of, recipe, options.cache, jobs=options.jobs) if options.cache is not None else None
    asking = ["prep", "caption", str(options.what), *(("--sidecars",) if folder is None else ("--edits", str(folder)))]
    return Edits(places=EditPlaces(recipe=recipe, folder=folder), cost=counted, record=opt.recorder_of(recipe, folder),
                 command=" ".join(shell_name(str(word)) for word in words),
                 captioning=" ".join(map(shell_name, asking)))


def _encoded(what: Place, token: str, manifest: Place | None, model: str | None,
             since: Place | None, cache: Place | None) -> tuple[Guard, Site, str]:
    """The pages of a manifest or a run, and the first of them."""
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest
    from prep.view.app import build_app
    from prep.view.guard import Guard

    place, run = _found(what, manifest)
    opened = open_manifest(read_manifest(place, cache=cache))
    earlier = None if since is None else _found(since, None)
    app, site = build_app(opened, f"/{token}", run, None if model is None else _model(model, opened),
                          None if earlier is None else open_manifest(read_manifest(earlier[0])),
                          None if earlier is None else earlier[1])
    return Guard(app, token, site.edit_token), site, "" if run is None else "run"


def _refuse(options: Mapping[str, Any], use: str, why: str) -> None:
    """Raises `UsageError` for the first option with a value."""
    for flag, value in options.items():
        if value is not None:
            raise UsageError(f"{flag} is for {use}, but {why}", hint=f"leave {flag} out")


def _model(named: str, opened: OpenedManifest) -> ViewedModel:
    from prep.models.hub import locate
    from prep.runtime import defer_interrupts

    with defer_interrupts():
        from prep.view.model import ViewedModel  # imports torch
    return ViewedModel(locate(named, download=None), opened.manifest)


def _found(what: Place, manifest: Place | None) -> tuple[Place, Path | None]:
    """The manifest to show, and the run."""
    from prep.runs.document import check_manifest, manifest_of

    if not is_directory(what):
        if manifest is not None:
            raise UsageError(f"--manifest is for a RUN, but {what} is not a directory",
                             hint=f"prep view {manifest}")
        return what, None
    named = manifest_of(what)
    if manifest is None:
        check_manifest(Local(what), named)
    return manifest or named, what
