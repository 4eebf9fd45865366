"""`train run`."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prep.cli.console import explain_interruption, lasting_stderr, put, put_json, say
from prep.cli.ticker import progress_unless
from prep.errors import CacheError, UsageError
from prep.formatting import printable, shell_name
from prep.fs.place import Local, Place, is_directory, maybe_place, place_of
from prep.models.device.named import require_device
from prep.runtime import defer_interrupts
from train.cli import options as opt
from train.cli.summary import place_line, plan_lines, uneven_lines
from train.parallel.errors import RankFailed
from train.parallel.ranks import Ranks, joined

if TYPE_CHECKING:
    from prep.training.schema import Config
    from train.runs.heart import Requests
    from train.runs.log import Log
    from train.runs.resume import Start
    from train.runs.stored.stored import OnDisk
    from train.setup import Origin, RunRequest, Setup


@opt.with_setting_options
def run(
    manifest: opt.ManifestOrRuns = None, cache: opt.MovedCache = None, config: opt.ConfigOpt = None,
    model: Annotated[str | None, typer.Option(help="directory, single file or Hub id (default: the manifest's, and "
                                              "with --resume the run's; needed then if it has moved)")] = None,
    output: opt.Output = None,
    resume: opt.Resume = False, start_from: opt.From = None, adopt: opt.Adopt = False,
    given: opt.Given = {},  # noqa: B006  # replaced by the options, and never changed
    settings: opt.Set = None, init_from: opt.Init = None, allow_other_encoders: opt.Others = False,
    download: opt.Download = False, device: opt.Device = "auto", as_json: opt.AsJson = False, quiet: opt.Quiet = False,
) -> None:
    """Train from a manifest, which names the model and the cache. Ctrl-C saves a checkpoint and stops.

    Several processes train together: torchrun --nproc-per-node 2 --no-python train run MANIFEST.
    """
    from train.runs.stored.stored import kept_in

    storage = kept_in(run_place(manifest, output, resume, "train run"))
    local = storage.run
    with lasting_stderr(), joined() as ranks:
        with _preparing(ranks):  # first of all: before anything is downloaded, read or written
            require_device(_device(device, ranks))
        _prepare(storage, resume, start_from, ranks)
        with _preparing(ranks):
            start = None if storage.begins(resume) else start_of(local, resume, start_from, adopt, init_from, ranks)
            chosen = opt.read_settings(config if start else opt.settings_of(config, manifest), settings, given,
                                       start.state.config if start else None)
            data = maybe_place(manifest) or manifest_of(local)
            request = opt.request_of(data, model, download, allow_other_encoders, init_from, cache)
            setup = _set_up(of_run(request, local) if start else request, chosen, storage, start, adopt, quiet,
                            alone=resume)
        with _preparing(ranks):  # apart: a rank that failed above compares nothing, and the others would wait for it
            if ranks.world > 1:
                _require_equal(ranks, setup, start)
        ending = _train(setup, storage, device, start, start_from, ranks, quiet)
    if as_json and ranks.first:
        put_json({"format": "latentry/run-result", "version": 1, **ending})
    elif ranks.first:
        if (found := ending.get("proposal")) and not quiet:
            say(f"of the evaluated checkpoints {found['checkpoint'] or 'none'} is proposed: {found['reason']}; "
                f"the scores: train evaluate {shell_name(str(local.path))}")
        put(str(local / ending["result"]))


def run_place(manifest: Path | None, output: Path | None, resume: bool, command: str) -> Place:
    """The run's place. Raises `UsageError` if that, or the manifest, cannot be known."""
    if output is not None and (manifest is not None or resume):
        return place_of(output)
    if manifest is None:
        raise UsageError("no MANIFEST is given", hint=f"{command} MANIFEST is for a new run; {command} --resume -o RUN "
                         "takes that of the run that is continued")
    return Path("runs") / manifest.stem


def no_manifest() -> UsageError:
    """The error for a run in a store that is to be continued, but begins."""
    return UsageError("no MANIFEST is given, and the run has no checkpoint yet", hint="name the MANIFEST: the run "
                      "begins with it")


def manifest_of(local: Local) -> Place:
    """The manifest that the run was last started with. Raises `PathError`; `CacheError` also if the manifest is gone;
    `UsageError` if the run has none yet."""
    from train.runs.directory import read_run, require_manifest

    if not (local.path / "run.json").is_file():
        raise no_manifest()
    run, copy = read_run(local), local.path / "manifest.json"
    try:
        require_manifest(run)
    except CacheError as error:
        error.hint = f"name where it is now: train run MANIFEST --resume -o {shell_name(str(local))}"
        if copy.is_file() and is_directory(run.request.manifest.parent):
            place = os.path.normpath(str(run.request.manifest))
            back = f"cp {shell_name(str(copy))} {shell_name(place)}"
            error.hint = f"put the run's copy of it back: {back}; or {error.hint}"
        raise
    return run.request.manifest


def _prepare(storage: OnDisk, resume: bool, named: str | None, ranks: Ranks) -> None:
    """Brings what the run's place in a store has to its directory: first for the first rank, then on other computers.
    """
    for turn in (ranks.first, ranks.local == 0 and not ranks.first):
        with _preparing(ranks):
            if turn and (resume or ranks.first):
                for warning in storage.prepare(resume=resume, named=named):
                    say(f"warning: {printable(warning)}")
    if storage.begins(resume) and ranks.first:
        say(f"note: {storage.run} has no checkpoint yet: the run begins")


def _train(setup: Setup, storage: OnDisk, device: str, start: Start | None, start_from: str | None, ranks: Ranks,
           quiet: bool) -> Mapping[str, Any]:
    """Trains, and returns the last event. Of several ranks the first locks the run, writes and shows it."""
    from prep.fs.lock import PATIENCE, lock_directory
    from prep.loader.shards import check_shards
    from train.check.requirements import check_device
    from train.runs.directory import lock_run

    with defer_interrupts():
        from prep.models.device.allocator import settled_heap
        from prep.models.tensors import pick_device
        from train.failures import Progress, explained
        from train.loop import train
        from train.runs.stored.stored import OnDisk

    index, local = setup.index, storage.run
    with ExitStack() as opened:
        with _preparing(ranks):
            place = pick_device(_device(device, ranks))
            check_device(setup.config, place.type)
            opt.check_compiler(setup.config, place.type)
            for note in _notes(setup, place.type, ranks, begins=start is None):
                say(f"note: {note}")
            if ranks.first:
                opened.enter_context(lock_run(local, setup.manifest))
            opened.enter_context(lock_directory(index.cache.root, exclusive=False, patience=PATIENCE))
            check_shards(index, setup.shards)  # another process may have changed the cache before the lock
            _unchanged(local, start_from, start)
        log, requests = _log(opened, local.path, setup.config, ranks, quiet)
        step = 0 if start is None else start.state.step
        progress = Progress(device=place, done=step, saved=step, world=ranks.world)
        try:
            with explained(setup, local.path, progress), settled_heap(place):
                train(setup, storage if ranks.first else OnDisk(local), log, progress, start, ranks, requests)
        except KeyboardInterrupt:
            if log.last.get("event") == "stopped":  # after its checkpoint, not by a second Ctrl-C
                _explain_stop(local, log.last["step"], start_from)
            raise
        return log.last


def _notes(setup: Setup, kind: str, ranks: Ranks, *, begins: bool) -> list[str]:
    """What `train check` notes, too: of a kind of device, of several ranks and nodes, and of the parts of the run."""
    from train.check.nodes import notes_on_nodes
    from train.check.shares import notes_on_shares
    from train.config.unused import unused_on

    return [*unused_on(setup.config, kind, ranks.world), *notes_on_nodes(setup, ranks.nodes, begins=begins),
            *notes_on_shares(setup)]


def _log(opened: ExitStack, folder: Path, config: Config, ranks: Ranks, quiet: bool) -> tuple[Log, Requests | None]:
    """The log of a rank, which also shows the run; of the first one, with its heartbeat and the requests of others."""
    from train.runs.heart import Heart
    from train.runs.log import Log, NoLog
    from train.runs.watch import watching
    from train.trackers.tracked import tracking

    watch = opened.enter_context(watching(quiet or not ranks.first))
    tracked = opened.enter_context(tracking(watch, config, folder))
    log = opened.enter_context(Log(folder / "log.jsonl", tracked, watch.progress) if ranks.first else NoLog())
    tracked.warn = lambda step, text: log("warning", step, text=text)
    return log, opened.enter_context(Heart(folder, log)) if ranks.first else None


def _explain_stop(local: Local, step: int, named: str | None) -> None:
    """Lets the command say at its end which checkpoint was saved, and how the run goes on."""
    from train.runs.checkpoint import step_name

    explain_interruption(f"interrupted after step {step}; saved {local / 'checkpoints' / step_name(step)}",
                         f"run the same command again {'with --resume' if named is None else 'without --from'} to "
                         "continue")


@contextmanager
def _preparing(ranks: Ranks) -> Iterator[None]:
    """What every rank does before it trains. Only the first prints, and the first that failed its errors."""
    if ranks.world == 1:
        yield
        return
    heard = io.StringIO()
    try:
        with ranks.collective(), nullcontext() if ranks.first else redirect_stderr(heard):
            yield
    except RankFailed as error:
        if error.rank == ranks.rank and isinstance(error.__cause__, typer.Exit):  # it has said why
            say(heard.getvalue().rstrip())
        raise


def _require_equal(ranks: Ranks, setup: Setup, start: Start | None) -> None:
    """Raises `ConfigError` unless all ranks train the same, and each has something to do."""
    from train.check.requirements import too_many_ranks
    from train.config.load import as_table, published
    from train.parallel.code import code_digest

    ranks.require_equal({
        "manifest": setup.manifest.digest, "model": dict(setup.model.base),
        "settings": as_table(published(setup.config)), "checkpoint": None if start is None else start.state.step,
        "code": code_digest()})
    if fault := too_many_ranks(setup.config, ranks.world):
        raise fault


def _device(name: str, ranks: Ranks) -> str:
    """The device of this rank. Raises `UsageError` if all ranks would get the same GPU."""
    if ranks.world == 1:
        return name
    if name.startswith("cuda:"):
        raise UsageError(f"--device is '{name}', but {ranks.world} processes train together",
                         hint="omit --device: each process takes the GPU of its number on its machine")
    import torch

    return f"cuda:{ranks.local}" if name in ("auto", "cuda") and torch.cuda.is_available() else name


def start_of(local: Local, resume: bool, start_from: str | None, adopt: bool, init_from: Path | None,
             ranks: Ranks, *, complete: bool = True) -> Start | None:
    """The checkpoint to continue from, if --resume is given; `complete` as in `read_state`. Raises `UsageError` for
    options that contradict it."""
    if resume:
        if init_from is not None:
            raise UsageError("--init-from is given with --resume, but a resumed run has its own weights",
                             hint="omit one of them")
        return _start(local, start_from, ranks, complete)
    if start_from is not None or adopt:
        raise UsageError(f"{'--adopt' if adopt else '--from'} is given without --resume", hint="add --resume")
    return None


def _set_up(request: RunRequest, chosen: Config, storage: OnDisk, start: Start | None, adopt: bool, quiet: bool, *,
            alone: bool) -> Setup:
    """The checked setup of a new run, or of one that resumes from `start`; prints the plan. Exits on faults. `alone`:
    perhaps a scheduler resumes the run, and nobody is there to correct the prompt file."""
    from train.check import check
    from train.runs.directory import check_place, check_unused, check_writable

    local = storage.run
    report = check(request, chosen, planned=None if start is None else start.planned, progress=progress_unless(quiet))
    opt.stop_at_faults(report.faults)
    if not alone:
        opt.stop_at_faults(opt.prompt_faults(report.setup))
    assert report.setup is not None
    setup = replace(report.setup, origin=_origin(local, report.setup, start))
    check_place(local.path, setup.manifest)
    check_writable(local.path)
    storage.check_space(setup, 0 if start is None else start.state.step)
    notes = report.notes
    if start is None:
        check_unused(local)
    else:
        setup, changes = _compared(start, setup, adopt)
        notes = (*notes, *changes)
    for note in notes:
        say(f"note: {printable(note)}")
    for line in [*plan_lines(report), *uneven_lines(report)] if not quiet else ():
        say(line)
    if not quiet:
        say(place_line(local, setup))
    return setup


def _origin(local: Local, setup: Setup, start: Start | None) -> Origin:
    """When the run began and from which recipe; of a resumed run, as its run.json says."""
    from train.runs.directory import begin, read_run
    from train.setup import Origin

    if start is None:
        return begin(setup.manifest)
    return read_run(local).origin if (local.path / "run.json").is_file() else Origin()


def _start(local: Local, named: str | None, ranks: Ranks, complete: bool) -> Start:
    from prep.errors import PathError
    from train.runs.checkpoint import list_checkpoints
    from train.runs.directory import RESULTS, unused_name
    from train.runs.resume import find_start

    try:
        return find_start(local, named, complete=complete)
    except PathError as error:
        if named is not None and list_checkpoints(local.path):
            error.hint = error.hint or "omit --from to use the newest"
        else:
            error.hint = "omit --resume to start this run"
        if named is None and any((local.path / name).exists() for name in RESULTS):
            places = f"-o {shell_name(str(unused_name(local)))} --init-from {shell_name(str(local))}"
            error.hint = (f"its result is there, which has no optimizer state: {places} begins another run with these "
                          "weights")
        if not ranks.first:  # which would have failed as well, if it had none
            error.hint = (f"copy {local.path} from the first rank's machine, since only that rank writes there, or use "
                          "a disk that all machines share")
        raise


def of_run(request: RunRequest, local: Local) -> RunRequest:
    """`request` with the model that the run was started with, unless `request` names another."""
    from train.runs.directory import model_of, read_run

    if not (local.path / "run.json").is_file():
        return request
    run = read_run(local)
    return replace(request, model=model_of(run, request.model), cache=request.cache or run.request.cache,
                   other_encoders=request.other_encoders or run.request.other_encoders)


def _compared(start: Start, setup: Setup, adopt: bool) -> tuple[Setup, tuple[str, ...]]:
    """The setup with all accepted changes so far, and notes on changes. Exits if the run may not resume."""
    from train.runs.resume import compare

    compared = compare(start, setup, adopt=adopt)
    opt.stop_at_faults(compared.faults)
    adopted: tuple[Any, ...] = start.state.adopted
    if compared.adopted:
        adopted = (*adopted, {"step": start.state.step, "changes": list(compared.adopted)})
    notes = (*compared.notes, *(f"accepted: {what}" for what in compared.adopted))
    return replace(setup, adopted=adopted, init=start.state.init), notes


def _unchanged(local: Local, named: str | None, start: Start | None) -> None:
    """Raises `PathError` if another process continued the run before it was locked."""
    from prep.errors import PathError
    from train.runs.directory import check_unused
    from train.runs.resume import find_start

    if start is None:
        check_unused(local)
    elif find_start(local, named) != start:
        raise PathError(f"another program trained in {local.path} meanwhile", hint="run the same command again")
