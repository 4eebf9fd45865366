"""`prep view` at a million samples: how long a page takes, over HTTP on the loopback address.

    python tests/benchmarks/bench_view.py [--samples 1000000] [--rounds 5] [--directory DIR] [--quick] [--write]

The data set is made first (tests/support/synthetic.py; two minutes). Each round asks for every page once; a search, a
filter and an order that were asked for before are remembered, so each round searches for other words ("first"), and
asks for the same again ("again"). Tags are found when they are first asked for, which is the highest time; the captions
are no tags: nearly all are different, which is the worst case.
"""

from __future__ import annotations

import http.client
import statistics
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from results import emit, parser_of, table

PAGES = {  # {} is another number in each round
    "all samples, the first page": "/", "page 10,000 of them": "/?page=10000",
    "a search for what few captions have, first": "/?q=number+{}71",
    "again, another page": "/?q=number+{}71&page=2",
    "bucket, mask and a search, first": "/?bucket=80x8&mask=yes&q=9{}",
    "sorted by length of caption": "/?sort=caption&order=down",
    "the tags of all, found once": "/tags", "the tags of a bucket": "/tags?bucket=80x8&mask=yes&from={}",
    "the samples of a tag, first": "/?tag=number+{}71",
    "a sample": "/sample/{}0000", "a sample within a search": "/sample/{}0000?q=number+{}71",
    "one channel of its latent": "/latent/{}0000/0/1",
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=None, help="default: a million; 20,000 with --quick")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where the data set is made, or was")
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    from synthetic import Scale, build
    from viewing import viewing

    with tempfile.TemporaryDirectory() as scratch:
        root = (options.directory or Path(scratch)) / "scale"
        wanted = options.samples or (20_000 if options.quick else 1_000_000)
        if not (root / "m.json").exists():
            build(root, Scale(samples=wanted))
        begun = time.perf_counter()
        with viewing(root / "m.json") as running:
            started = time.perf_counter() - begun
            rows = measure(running.url, options.rounds)
            peak = resident(running.process.pid if running.process else 0)
    told = table(["ms", "median", "lowest", "highest"], rows)
    emit("A million samples in a browser", f"`bench_view.py --rounds {options.rounds}`: {wanted:,} samples; the "
         f"command answers {started:.1f} s after it was typed, and takes {peak:.0f} MiB at most.\n\n{told}",
         options.write)


def measure(url: str, rounds: int) -> list[list[str]]:
    """Milliseconds of each page, in every round."""
    parts = urlsplit(url)
    found: dict[str, list[float]] = {name: [] for name in PAGES}
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    for number in range(1, rounds + 1):
        for name, path in PAGES.items():
            begun = time.perf_counter()
            connection.request("GET", parts.path.rstrip("/") + path.replace("{}", str(number)))
            answer = connection.getresponse()
            assert answer.read() and answer.status == 200, f"{path}: {answer.status}"
            found[name].append(1000 * (time.perf_counter() - begun))
    return [[name, *(f"{pick(times):.0f}" for pick in (statistics.median, min, max))] for name, times in found.items()]


def resident(process: int) -> float:
    """The peak of a process's resident memory in MiB; 0 where the system does not say."""
    status = Path(f"/proc/{process}/status")
    words = dict(line.split(":", 1) for line in status.read_text().splitlines()) if status.exists() else {}
    return int(words.get("VmHWM", "0 kB").split()[0]) / 1024


if __name__ == "__main__":
    main()
