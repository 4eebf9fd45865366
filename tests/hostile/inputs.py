"""Spoiled files from outside, read again and again in a process of its own: `inputs.py DIR KIND:FIRST:COUNT …`.

Prints the kind and seed that it is at, so that a crash of a decoder can be told; ends with code 0 when each was read,
or refused in words. A case that takes longer than any picture should, or memory that nobody gives back, is a failure;
so is a file opened that is not one of those that were given.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]

import onlookers  # noqa: E402
import seeds  # noqa: E402
import spoil  # noqa: E402
from fuzz import TooLong, told, too_long  # noqa: E402
from onlookers import Watch  # noqa: E402
from walking import item_of, walk, walk_tar  # noqa: E402

from prep.captions import read as captions  # noqa: E402
from prep.captions.options import CaptionOptions  # noqa: E402
from prep.captions.variants import captions_of  # noqa: E402
from prep.cli.console import run  # noqa: E402
from prep.errors import Problem  # noqa: E402
from prep.findings import CODES, Finding  # noqa: E402
from prep.fs.blob import Blob, blob_at  # noqa: E402
from prep.images.decode import quiet_pillow, read_header  # noqa: E402
from prep.images.formats.parts import BadPicture  # noqa: E402
from prep.recipe.init import init_from_file  # noqa: E402
from prep.recipe.load import load_recipe  # noqa: E402
from prep.recipe.overview import overview_of  # noqa: E402
from prep.runtime import peak_resident  # noqa: E402
from prep.scan.examine import check_item, exact_pixels, preview_jpeg  # noqa: E402
from prep.scan.protocol import ExaminedMessage  # noqa: E402
from prep.sources.item import Item  # noqa: E402
from prep.sources.readers import SERVICE, read_table  # noqa: E402
from prep.workers import pool  # noqa: E402
from prep.workers.pool import WorkerLost, WorkerPool  # noqa: E402
from prep.workers.protocol import decode, encode  # noqa: E402

MOST = 6 << 30  # bytes of address space: less than a worker may map
SECONDS = 60  # for one case, of four decodings at most: a worker has as long for one, and the machine may be busy
GROWTH = 4 << 30  # bytes that a case may take: a header of kilobytes may say that there are 2^28 pixels
LEFT = 400 << 20  # bytes that all cases of a kind may leave behind
KEYS = {"path", "code", "severity", "detail", "other", "likeness"}  # of a finding in JSON
WORKERS = WorkerPool(SERVICE)  # of its own process, unlike those of most kinds
DRAWN = CaptionOptions(wildcards=True, shuffle=True, dropout=0.3, trigger="ohwx", variants=4)


@dataclass(kw_only=True)
class Bench:
    """Where cases are laid out, and what they came to."""

    root: Path
    watch: Watch
    refused: int = 0
    told: dict[str, int] = field(default_factory=dict)  # how often each code was

    def count(self, findings: list[Finding]) -> None:
        for one in findings:
            self.told[one.code] = self.told.get(one.code, 0) + 1

    def empty(self) -> Path:
        """A directory for one case, with nothing in it; beside it, files that nobody is to open."""
        place = self.root / "in"
        for path in sorted(place.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        place.mkdir(parents=True, exist_ok=True)
        return place


def sound(findings: list[Finding]) -> None:
    """Raises unless each can be told: in a terminal, in JSON, in a table of the cache."""
    for one in findings:
        assert one.code in CODES and one.severity in ("error", "warning", "info"), one
        assert one.detail and len(one.detail) < 2000, one
        json.dumps(one.as_json()).encode("ascii")
        f"{one.path} {one.detail}".encode()  # no halves of characters


def checked(item: Item, bench: Bench) -> bool:
    """Whether an item can be used; all that is said of it is sound, and so are its pixels and captions if it can."""
    examined = check_item(item)
    findings = list(examined.findings)
    sound(findings)
    bench.count(findings)
    assert decode(encode(ExaminedMessage.of(examined)), ExaminedMessage).examined().findings == examined.findings
    for text in examined.captions:
        assert text == " ".join(text.split()) and text and not captions._CONTROL.search(text), text[:80]
    for text, weight in captions_of(examined.captions, DRAWN):
        assert text.encode() is not None and weight > 0, "what keys are made of"
    if not examined.usable:
        assert any(one.severity == "error" for one in findings)
        return False
    assert examined.identity is not None and 0 < examined.identity.size[0] * examined.identity.size[1] <= 1 << 28
    return True


# ---- the kinds -------------------------------------------------------------------------------------------------------


def picture(bench: Bench, rng: Random) -> bool:
    """A picture, now and then as the mask of a sound one."""
    place, files = bench.empty(), seeds.pictures()
    extension, data = rng.choice(files)
    spoiled = spoil.picture(data, rng, rng.choice(files)[1])
    path = place / f"a.{extension}"
    path.write_bytes(spoiled)
    picture, mask = Blob(file=str(path)), None
    with bench.watch.look():
        if rng.random() < 0.2:
            good = place / "good.png"
            good.write_bytes(seeds.icon())
            picture, mask = Blob(file=str(good)), Blob(file=str(path))
        usable = checked(item_of("a.png", picture=picture, captions=("x",), mask=mask), bench)
        if mask is None:
            assert bool(exact_pixels(picture)) == usable and bool(preview_jpeg(picture, 16)) == usable
            try:
                read_header(spoiled)
            except BadPicture:
                assert not usable
    return not usable


def caption(bench: Bench, rng: Random) -> bool:
    """A caption beside a sound picture."""
    place = bench.empty()
    extension, data = rng.choice(seeds.CAPTIONS)
    ways = [lambda: spoil.some_bytes(data, rng, rng.choice(seeds.CAPTIONS)[1]), lambda: spoil.text(data, rng)]
    if extension == "json":
        ways += [lambda: spoil.values(data, rng)] * 2
    (place / "a.png").write_bytes(seeds.icon())
    (place / f"a.{extension}").write_bytes(rng.choice(ways)())
    with bench.watch.look():
        (item,) = [one for one in walk(place, source=0, mask_from="none") if isinstance(one, Item)]
        usable = checked(item, bench)
    return not usable


def table(bench: Bench, rng: Random) -> bool:
    """A table of captions and masks beside sound pictures; outside, there are others."""
    place = bench.empty()
    for name in ("a.png", "sub/b.jpg", "c.webp", "masks/a.png"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(seeds.icon())
    name, data = rng.choice(seeds.tables())
    ways = [lambda: spoil.some_bytes(data, rng, rng.choice(seeds.tables())[1])]
    if name.endswith(".parquet"):
        ways += [lambda: spoil.parquet(data, rng)] * 3
    else:
        ways += [lambda: spoil.text(data, rng)] * 2
        if ".json" in name:
            ways += [lambda: spoil.values(data, rng)] * 3
    (place / name).write_bytes(rng.choice(ways)())
    named = None if name.startswith("metadata") else place / name
    if name.endswith(".parquet") and ends_its_reader(place / name):
        return True
    with bench.watch.look():
        found = list(walk(place, source=0, mask_from="sidecar", table=named))
        overview_of([place], jobs=1)
        findings = _looked_at(found, place, bench)
    return any(one.severity == "error" for one in findings)


def ends_its_reader(path: Path) -> bool:
    """Whether a table ends the process that reads it: Arrow's C++ aborts on some. That costs a worker, and one finding.
    """
    try:
        read_table(WORKERS, blob_at(path))
    except WorkerLost:
        return True
    return False


def tar(bench: Bench, rng: Random) -> bool:
    """A tar of samples."""
    place = bench.empty()
    path = place / "a.tar"
    path.write_bytes(spoil.tar(rng.choice(seeds.tars()), rng))
    with bench.watch.look():
        found = list(walk_tar(path))
        findings = _looked_at(found, place, bench)
        for one in found:
            if isinstance(one, Item):
                for blob in (one.picture, one.caption, one.mask):
                    assert blob is None or (blob.offset > 0 and blob.length is not None and blob.length >= 0
                                            and blob.offset + blob.length <= path.stat().st_size), blob
    return any(one.severity == "error" for one in findings)


def _looked_at(found: list[Item | Finding], place: Path, bench: Bench) -> list[Finding]:
    """The findings of a walk; each of its items is checked."""
    findings = [one for one in found if isinstance(one, Finding)]
    sound(findings)
    bench.count(findings)
    for one in found:
        if isinstance(one, Item):
            checked(one, bench)
    return findings


def recipe(bench: Bench, rng: Random) -> bool:
    """A recipe; where it is one still, the whole of `prep bucket` with it."""
    place = _filled(bench.empty())
    text = rng.choice(seeds.RECIPES).encode()
    way = rng.choice((spoil.text, spoil.some_bytes, spoil.toml, spoil.toml, spoil.toml, spoil.toml))
    (place / "dataset.toml").write_bytes(way(text, rng))
    with bench.watch.look():
        try:
            found = load_recipe(place / "dataset.toml", choices={})
        except Problem as error:
            _clear(error)
            return True
        except OSError:  # of which the console makes a problem
            return True
    named = [*found.mask_folders, *found.reference_folders,
             *(one for source in found.sources for one in (source.path, source.table) if one)]
    if not all(_inside(one, place) for one in named):  # its owner may name any place; here nobody is to go there
        return False
    ours = [f"{event} '{bench.root}/remembered/" for event in onlookers.OPENING]
    # Typer evaluates annotations each time; what tars hold is remembered; Ctrl-C wakes a thread by a pair of sockets.
    pair = f"socket.__new__ (<socket.socket fd=-1, family=0, type=0, proto=0>, {int(socket.AF_UNIX)}, "
    with looking(bench.watch, "compile ", "exec (<code object <module> ", pair, *ours):
        code, out = command("bucket", place / "dataset.toml", "--batch-size", 2, "--json", "--quiet", "--jobs", 1)
    assert code in (0, 3, 5, 8), (code, out[1])
    if code == 0:
        json.loads(out[0])
    return code != 0


def _inside(path: Path, place: Path) -> bool:
    try:
        return path.resolve().is_relative_to(place) and path.resolve() != place
    except (OSError, ValueError, RuntimeError):
        return True


def other(bench: Bench, rng: Random) -> bool:
    """A data set file of another tool, as `prep init --from` reads it."""
    place = _filled(bench.empty())
    text = rng.choice((seeds.KOHYA, json.dumps(seeds.ONETRAINER), json.dumps(seeds.SIMPLETUNER))).encode()
    ways = [lambda: spoil.text(text, rng), lambda: spoil.some_bytes(text, rng)]
    ways += [lambda: spoil.values(text, rng) if text[:1] == b"[" else spoil.toml(text, rng)] * 4
    (place / "theirs").write_bytes(rng.choice(ways)())
    there = set(place.iterdir())
    with looking(bench.watch, *_prompts((place / "theirs").read_bytes(), place)):
        try:
            init_from_file(place / "theirs", place / "dataset.toml")
        except Problem as error:
            _clear(error)
            assert set(place.iterdir()) == there, "all of it or nothing"
            return True
        except OSError:
            assert set(place.iterdir()) == there
            return True
    assert set(place.iterdir()) == {*there, place / "dataset.toml"}
    load_recipe(place / "dataset.toml", choices={})
    return False


def _prompts(data: bytes, place: Path) -> list[str]:
    """What OneTrainer's file may have opened: its files of prompts, wherever they are."""
    try:
        concepts = json.loads(data)
        named = [one["text"]["prompt_path"] for one in concepts if isinstance(one, dict)
                 and isinstance(one.get("text"), dict) and isinstance(one["text"].get("prompt_path"), str)]
    except (ValueError, RecursionError, TypeError):
        return []
    spelled = [way for text in named for way in (text, text.replace("\\", "/"))]
    return [f"open {str(base / one)!r}" for one in spelled for base in (place, Path.cwd(), place.parent)]


@contextmanager
def looking(watch: Watch, *meant: str) -> Iterator[None]:
    """As the watch looks, but for events that begin like one of these."""
    with watch.look():
        try:
            yield
        finally:
            watch.armed = False
            watch.seen = [one for one in watch.seen if not one.startswith(meant)]


def _filled(place: Path) -> Path:
    """The directory with pictures, masks, a table, prompts and a tar that recipes name."""
    for number, name in enumerate(("photos/a.png", "photos/sub/b.png", "photos/c.png", "masks/a.png")):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(seeds.large(number))
    (place / "captions.jsonl").write_bytes(b'{"file_name": "a.png", "text": "a cat, {red|blue}"}\n')
    (place / "captions.json").write_bytes(b'{"a": {"caption": "a cat"}}')
    (place / "prompts.txt").write_bytes(b"a cat --n a dog\n{x|y}\n")
    (place / "in.tar").write_bytes(seeds.tars()[0])
    return place


def _clear(error: Problem) -> None:
    assert error.exit_code in (2, 3, 5, 6) and error.message and len(error.message) < 20_000, error.message[:300]


def command(*words: object) -> tuple[int, tuple[str, str]]:
    """The exit code of `prep` with these words, and what it said on stdout and stderr."""
    from prep.cli.main import app

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            run(app, "prep", [str(word) for word in words])
        except SystemExit as ending:
            code = int(ending.code or 0)
    assert "Traceback" not in err.getvalue(), err.getvalue()[-3000:]
    return code, (out.getvalue(), err.getvalue())


def scan(bench: Bench, rng: Random) -> bool:
    """A directory of all of these, through the whole commands, with their workers."""
    place = bench.empty()
    for number in range(40):
        extension, data = rng.choice(seeds.pictures())
        (place / f"{number}.{extension}").write_bytes(spoil.picture(data, rng, rng.choice(seeds.pictures())[1]))
        kind, words = rng.choice(seeds.CAPTIONS)
        (place / f"{number}.{kind}").write_bytes(spoil.text(words, rng) if kind != "json" else spoil.values(words, rng))
    name, rows = rng.choice(seeds.tables())
    (place / name).write_bytes(spoil.text(rows, rng) if "parquet" not in name else spoil.parquet(rows, rng))
    (place / "in.tar").write_bytes(spoil.tar(rng.choice(seeds.tars()), rng))
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    codes = []
    for source in (place, place / "in.tar"):
        code, (out, err) = command("scan", source, "--json", "--quiet", "--jobs", 2)
        assert code in (0, 1), (code, err)
        document = json.loads(out)
        assert all({"path", "code", "severity", "detail"} <= set(one) for one in document["findings"])
        assert {key for one in document["findings"] for key in one} <= KEYS
        assert not [one for one in document["findings"] if one["code"] == "decoder-hung"], document["findings"]
        codes.append(code)
    for words in (("init", place, "-o", bench.root / "dataset.toml", "--force", "--quiet"),
                  ("bucket", place, "--resolution", 64, "--batch-size", 2, "--quiet")):
        code, (_, err) = command(*words)
        assert code in (0, 3, 5, 8), (code, err)
    assert before == {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}, "nothing is touched"
    return any(codes)


Case = Callable[[Bench, Random], bool]
KINDS: dict[str, Case] = {"picture": picture, "caption": caption, "table": table, "tar": tar, "recipe": recipe,
                          "other": other, "scan": scan}
WHOLE = {"scan"}  # with processes of its own


def jobs_of(words: list[str]) -> Iterator[tuple[str, int, int]]:
    for word in words:
        kind, first, count = word.split(":")
        yield kind, int(first), int(count)


def warm(bench: Bench) -> None:
    """What is imported late is imported now, so that nobody hears of it."""
    import webdataset.tariterators

    assert webdataset.tariterators
    command("bucket", _filled(bench.empty()) / "photos", "--resolution", 64, "--batch-size", 1)
    for kind in KINDS.keys() - WHOLE:
        for seed in range(-3, 0):
            with suppress(Exception):
                _case(kind, seed, bench)
            bench.watch.seen.clear()


def _case(kind: str, seed: int, bench: Bench) -> None:
    """One case; tables and tars are read in this process, where the watch sees it, but for whole commands."""
    pool.can_spawn = lambda: kind in WHOLE
    bench.refused += KINDS[kind](bench, Random(f"{kind} {seed}"))


def size(which: int) -> int:
    """Bytes of this process that are mapped (0), or resident (1)."""
    return int(Path("/proc/self/statm").read_text().split()[which]) * os.sysconf("SC_PAGE_SIZE")


def limit() -> None:
    import resource

    mapped = size(0)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST, mapped + MOST))


def main(root: Path, words: list[str]) -> int:
    """0 when every case went well; tells of each that did not."""
    root.mkdir(parents=True)
    (root / "outside.png").write_bytes(seeds.icon())
    signal.signal(signal.SIGALRM, too_long)
    onlookers.SECONDS = SECONDS
    bench = Bench(root=root.resolve(), watch=Watch(root / "in"))
    warnings.simplefilter("error")
    quiet_pillow()
    os.environ["LATENTRY_USER_CACHE"] = str(root / "remembered")
    warm(bench)
    if sys.platform == "linux":
        limit()
    failed, before = 0, peak_resident()
    for kind, first, count in jobs_of(words):
        start_size = size(1) if sys.platform == "linux" else 0
        bench.refused, bench.told, begun, slowest = 0, {}, time.monotonic(), (0.0, 0)
        for seed in range(first, first + count):
            os.write(1, f"\r{kind} {seed}".encode())
            start = time.monotonic()
            try:
                _case(kind, seed, bench)
            except (Exception, TooLong):
                import traceback

                print(f"\n{kind} {seed} failed:\n{told(traceback.format_exc())}", flush=True)
                bench.watch.seen.clear()
                failed += 1
            slowest = max(slowest, (time.monotonic() - start, seed))
            if peak_resident() - before > GROWTH:
                print(f"\n{kind} {seed} failed: memory grew by {(peak_resident() - before) >> 20} MB", flush=True)
                before, failed = peak_resident(), failed + 1
        left = size(1) - start_size if sys.platform == "linux" else 0
        if left > LEFT:
            print(f"\n{kind} failed: {left >> 20} MB are left behind", flush=True)
            failed += 1
        print(f"\n{kind}: {count} cases, {bench.refused} refused, {time.monotonic() - begun:.1f} s, slowest "
              f"{slowest[0]:.1f} s ({slowest[1]}), memory grew by {(peak_resident() - before) >> 20} MB", flush=True)
        print(f"{kind} told: {json.dumps(dict(sorted(bench.told.items())))}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    os._exit(code)
