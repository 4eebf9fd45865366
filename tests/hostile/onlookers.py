"""What happens when a hostile record is read: an answer or a clean error, and nothing is opened but the cache."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from victims import Victim

from prep.batching.plan import step_plan
from prep.cache import damage, plans
from prep.cache.commits import read_commit
from prep.cache.ledger.ledger import load_ledger
from prep.cache.store import open_cache
from prep.errors import Problem, from_system
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.index import open_index
from prep.loader.rows import Rows
from prep.maintenance.verify import verify
from prep.manifest import describe as audits
from prep.manifest.document import Manifest, read_manifest
from prep.manifest.opened import open_manifest
from prep.report.terminal.manifest import inspect_tables, sample_text, verify_tables
from train.sampling import prompts

SECONDS = 30  # for one look, on a busy machine; they take a hundredth of a second
OPENING = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link",
           "os.symlink", "os.chmod", "os.truncate", "shutil.copyfile", "shutil.rmtree", "sqlite3.connect"}
NAMES = {"os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink"}  # what is done to a name, not to its target
RUNNING = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "socket.", "pickle.",
           "ctypes.", "urllib.", "webbrowser.", "code.__new__")
OURS = tuple({os.path.realpath(place) for place in (sys.prefix, sys.base_prefix, Path(__file__).parents[2])})


class Watch:
    """Hears of everything that is opened or run while it is armed."""

    def __init__(self, root: Path) -> None:
        self.root = os.path.realpath(root)
        self.armed = False
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        self.armed = False  # not of what this does itself
        try:
            if event in OPENING:
                names = event in NAMES
                self.seen += [f"{event} {place!r}" for place in args[:2 if names else 1]
                              if isinstance(place, str | bytes | os.PathLike) and not self._inside(place, names)]
            elif event.startswith(RUNNING) or (event in ("exec", "compile") and not _of_a_module(event, args)):
                self.seen.append(f"{event} {args!r}"[:200])
        finally:
            self.armed = True

    def _inside(self, place: Any, name: bool) -> bool:
        path = os.fsdecode(place)
        real = os.path.realpath(Path(path).parent) if name else os.path.realpath(path)
        return any(real == root or real.startswith(root + os.sep) for root in (self.root, *OURS, "/proc", "/sys"))

    @contextmanager
    def look(self) -> Iterator[None]:
        """Within it, opening anything outside is remembered, and taking for ever is an error."""
        signal.alarm(SECONDS)
        self.armed = True
        try:
            yield
        finally:
            self.armed = False
            signal.alarm(0)
        assert not self.seen, f"opened or run: {self.seen[:5]}"


def _of_a_module(event: str, args: tuple[Any, ...]) -> bool:
    """Whether that is the import of a file of Python's or ours."""
    name = args[0].co_filename if event == "exec" else args[1]
    name = os.fsdecode(name) if isinstance(name, bytes) else str(name)
    return name.startswith(("<frozen", *OURS)) or (event == "compile" and args[0] is None and name == "<string>")


class Look:
    """Everything that reads, one after another; each may answer or raise a `Problem`."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def at(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (Problem, OSError) as caught:  # the console makes a problem of what the system says
            error = caught if isinstance(caught, Problem) else from_system(caught)
            assert error.message and "\n" not in error.message.strip() and len(error.message) < 20_000, error.message
            self.codes.append(error.exit_code)
            return None


def look_at(victim: Victim, *, whole: bool = False, quick: bool = True) -> list[int]:
    """Reads all there is, as inspect, verify (wholly, quickly, or not) and train would; the codes of refusals."""
    look = Look()
    manifest = look.at(lambda: read_manifest(victim.path))
    if manifest is not None:
        _audit(look, manifest, whole, quick)
        index = look.at(lambda: open_index(manifest))
        if index is not None:
            look.at(lambda: _batches(index))
    assert set(look.codes) <= {4, 5, 7, 8, 2}, look.codes
    return look.codes


def look_at_records(victim: Victim) -> list[int]:
    """Reads commits, plans and damage records as encode would."""
    look = Look()
    cache = look.at(lambda: open_cache(victim.root / "cache", create=False))
    if cache is None:
        return look.codes
    for task in look.at(lambda: list(cache.names("commits"))) or ():
        look.at(lambda task=task: read_commit(cache, task))
    loaded = look.at(lambda: load_ledger(cache))
    if loaded is not None:
        keys = [bytes(key).ljust(32, b"\0").hex() for key in loaded.keys[:40]]
        found = look.at(lambda: loaded.resolve(keys)) or {}
        assert all(ref.row >= 0 for ref in found.values())
    for shard in look.at(lambda: list(cache.names("damaged"))) or ():
        look.at(lambda shard=shard: damage.recorded(cache, shard))
    for plan in look.at(lambda: list(cache.names("plans"))) or ():
        look.at(lambda plan=plan: plans.read_plan(cache, plan))
    assert set(look.codes) <= {5, 7}, look.codes
    return look.codes


def _audit(look: Look, manifest: Manifest, whole: bool, also: bool) -> None:
    audit = look.at(lambda: open_manifest(manifest))
    if audit is None:
        return
    document = look.at(lambda: audits.describe_manifest(audit))
    if document is not None:
        json.dumps(document, allow_nan=False).encode()
        if whole:
            inspect_tables(document).encode()
    name = look.at(lambda: audit.samples.name(0) if len(audit.samples) else "0.png")
    found = look.at(lambda: audits.describe_samples(audit, name or "0.png"))
    if found is not None:
        json.dumps(found)
        if whole:
            sample_text(found).encode()
    report = look.at(lambda: verify(audit, quick=not whole)) if whole or also else None
    if report is not None:
        json.dumps(report)
        if whole:
            verify_tables(report).encode()


def _batches(index: Any) -> None:
    """The first two batches, and a prompt."""
    plan = step_plan(index.counts, seed=0, batch_size=4)
    rows = Rows(index)
    masked = "mask" in index.manifest.fields
    requests = draws.training(index, plan, 0, 2 if plan.steps_per_epoch else 0, timesteps=1000,
                              dropout=draws.Dropout(caption=0.3))
    with batches(rows, islice(requests, 4), masked=masked, pinned=False) as made:
        for batch in made:
            (bucket,) = {int(index.samples.bucket[shot.sample]) for shot in batch.draws}
            width, height = index.manifest.buckets[bucket]
            assert tuple(batch.latent_BChw.shape[2:]) == (height // 8, width // 8), "a batch of another bucket"
    for prompt in prompts.cached(index)[:2]:
        rows.text([prompt.positive, prompt.negative])
