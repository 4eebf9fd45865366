"""Sets of very many small pictures: CPU seconds, peak memory and how both grow, of planning, again, and of previews.

    python -m tests.benchmarks --only bench_sets [--write] [--quick]
    python -m tests.benchmarks.bench_sets [--pictures 2000 20000 200000] [--keep DIR] [--kinds folder]

The pictures are those of `bench_again`: PNGs of four shapes, each with bytes and a caption of its own; as files, as
tars of a thousand, and as files whose captions are in a table. Rows are made up once, and shared by all kinds.
Each figure is a process of its own, start-up included, with all remembered that earlier ones could remember:

    planned       `prep encode` for a manifest that is new, all of whose rows are there
    unchanged     `prep encode` for the one that is there
    bucket, view  `prep bucket`; `prep view SOURCE` until its pages could be served

"grows" is the exponent of CPU seconds from one size to the next: 1 is linear. Bytes a picture are what the peak is
above that of the smallest set, by the pictures more.
"""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prep.fs.memo import REST_NS
from tests.benchmarks.bench_again import COMMAND, FILL, MODEL, write_pictures
from tests.benchmarks.results import emit, parser_of, table

KINDS = ("folder", "tars", "table")
IN_TAR = 1000  # pictures
PREVIEW = ("--resolution", "64", "--step", "16", "--quiet")
VIEW = """
import sys
from prep.view.serve import Server
Server.run_until_stopped = lambda self, here: None
from prep.cli.main import main; main()
"""  # all but answering requests


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a process took."""

    cpu: float  # seconds of all its threads, user and system
    memory: float  # MiB at the highest


def main() -> None:
    """Prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--pictures", type=int, nargs="+", default=[2000, 20_000, 200_000])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--keep", type=Path, help="make the sets here, or use those that are here")
    options = parser.parse_args()
    counts = [500, 2000] if options.quick else options.pictures
    with tempfile.TemporaryDirectory() as scratch:
        roots = {count: (options.keep or Path(scratch)) / str(count) for count in counts}
        for count, root in roots.items():
            make(root, count, options.kinds)
        time.sleep(REST_NS / 1e9 + 1)  # younger stamps are not trusted
        found = {count: measure(root, options.kinds) for count, root in roots.items()}
    rows = []
    for case in found[counts[0]]:
        costs = [found[count][case] for count in counts]
        for place, (count, cost) in enumerate(zip(counts, costs, strict=True)):
            rows.append([f"{case}, {count:,}", f"{cost.cpu:.2f}", f"{cost.memory:.0f}", *grown(counts, costs, place)])
    text = table(["sets of pictures", "CPU s", "peak MiB", "grows", "bytes a picture"], rows)
    emit("Sets of very many pictures", f"{text}\n\nOne run each (`bench_sets.py`).", options.write)


def grown(counts: Sequence[int], costs: Sequence[Cost], place: int) -> list[str]:
    """The exponent from the size before to this one, and the bytes that a picture takes; dashes for the first."""
    if not place:
        return ["-", "-"]
    exponent = math.log(costs[place].cpu / costs[place - 1].cpu) / math.log(counts[place] / counts[place - 1])
    more = (costs[place].memory - costs[0].memory) * 2**20 / (counts[place] - counts[0])
    return [f"{exponent:.2f}", f"{more:.0f}"]


def measure(root: Path, kinds: Sequence[str]) -> dict[str, Cost]:
    """The costs of each kind of source and command."""
    costs: dict[str, Cost] = {}
    for kind in kinds:
        source = source_of(root, kind)
        words = ["encode", source, "--resolution", "64", "--step", "16", "--model", root / "model", "--cache",
                 root / "cache", "-o", root / f"{kind}.json", "--mask", "none", "--json", "--quiet"]
        run(FILL, words, root)
        time.sleep(2.1)  # until the cache's files are at rest
        run(COMMAND, words, root)
        costs[f"{kind}, planned"] = run(COMMAND, [*words, "-o", root / "another.json"], root)
        costs[f"{kind}, unchanged"] = run(COMMAND, words, root)
        for name, program in (("bucket", COMMAND), ("view", VIEW)):
            shown = [name, source, *PREVIEW]
            run(program, shown, root)
            costs[f"{kind}, {name}"] = run(program, shown, root)
    return costs


def make(root: Path, count: int, kinds: Sequence[str]) -> None:
    """The sets, unless they are there."""
    if not root.exists():
        subprocess.run([sys.executable, "-c", MODEL, root / "model"], check=True)  # there: torch stays out of this one
        write_pictures(root / "folder", count, masks=False)
    if "tars" in kinds and not (root / "tars").exists():
        pack(root)
    if "table" in kinds and not (root / "table").exists():
        tabulate(root)


def pack(root: Path) -> None:
    """Tars of the folder's pictures and captions."""
    (root / "tars").mkdir()
    names = sorted(path.stem for path in (root / "folder").glob("*.png"))
    for start in range(0, len(names), IN_TAR):
        with tarfile.open(root / "tars" / f"{start // IN_TAR:04}.tar", "w") as tar:
            for name in names[start : start + IN_TAR]:
                for end in (".png", ".txt"):
                    data = (root / "folder" / f"{name}{end}").read_bytes()
                    info = tarfile.TarInfo(f"{name}{end}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def tabulate(root: Path) -> None:
    """Links to the folder's pictures, and a table of their captions."""
    (root / "table").mkdir()
    with (root / "table" / "metadata.csv").open("w") as rows:
        rows.write("file_name,text\n")
        for path in sorted((root / "folder").glob("*.png")):
            os.link(path, root / "table" / path.name)
            rows.write(f"{path.name},{path.with_suffix('.txt').read_text()}\n")


def source_of(root: Path, kind: str) -> Path | str:
    """What a command calls a kind of source."""
    return f"{root}/tars/*.tar" if kind == "tars" else root / kind


def run(program: str, words: Sequence[str | Path], root: Path) -> Cost:
    """One run of a command, with what is remembered in a place of its own."""
    environment = {**os.environ, "LATENTRY_USER_CACHE": str(root / "remembered")}
    child = subprocess.Popen([sys.executable, "-c", program, *map(str, words)], stdout=subprocess.DEVNULL,
                             env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, list(words))
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10  # ru_maxrss
    return Cost(cpu=usage.ru_utime + usage.ru_stime, memory=usage.ru_maxrss / unit)


if __name__ == "__main__":
    main()
