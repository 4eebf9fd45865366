"""The samples of a manifest in other libraries' formats, and an epoch of them from a server, as their users read them.

Each sample has the bytes of its latent, mask and text arrays, in shards of 64 MB. `WORKERS` processes of a DataLoader
read, as these libraries recommend; what they hand out is bytes, which nobody batches or checks further.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import stand_in_for_torchvision

from prep.runtime import usable_cores

SHARD, WORKERS = 64 << 20, min(4, usable_cores())
PATIENCE = 120.0  # seconds for an epoch; MosaicML's processes may wait for each other without end
ATTEMPTS = 5
Sample = dict[str, bytes]


def write_mds(samples: Iterator[Sample], to: Path) -> None:
    """MosaicML's shards."""
    stand_in_for_torchvision()
    from streaming import MDSWriter

    first = next(samples)
    with MDSWriter(out=str(to), columns=dict.fromkeys(first, "bytes"), size_limit=SHARD) as writer:
        writer.write(first)
        for sample in samples:
            writer.write(sample)


def write_tars(samples: Iterator[Sample], to: Path) -> None:
    """WebDataset's tars, 000.tar and so on."""
    import webdataset as wds

    to.mkdir()
    with wds.ShardWriter(str(to / "%03d.tar"), maxsize=SHARD, verbose=0) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number:06}", **sample})


def read_mds(url: str, local: Path, count: int) -> float:
    """Seconds of a shuffled epoch by MosaicML Streaming, without copies at first; it has `count` samples. Infinite if
    it does not end within `PATIENCE`, or fails again and again: its workers sometimes read parts of a file that are
    not there yet."""
    command = [sys.executable, __file__, url, str(local), str(count)]
    for _ in range(ATTEMPTS):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                told, _ = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return float("inf")
        if process.returncode == 0:
            return float(told.splitlines()[-1])
    return float("inf")


def _epoch_of_mds(url: str, local: Path, count: int) -> float:
    stand_in_for_torchvision()
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()
    begun = time.perf_counter()
    place = local / f"{begun}"  # of its own: another round's processes may not have ended
    dataset = StreamingDataset(remote=url, local=str(place), shuffle=True, batch_size=8)
    found = sum(len(batch) for batch in DataLoader(dataset, batch_size=8, num_workers=WORKERS, collate_fn=list))
    took = time.perf_counter() - begun
    shutil.rmtree(place, ignore_errors=True)
    assert found == count, f"{found} samples of {count}"
    return took


def read_tars(url: str, count: int) -> float:
    """Seconds of an epoch by WebDataset, its shards shuffled, and samples within 1000."""
    import webdataset as wds

    begun = time.perf_counter()
    urls = [f"{url}/{number:03}.tar" for number in range(_tars(url))]
    dataset = wds.WebDataset(urls, shardshuffle=100, empty_check=False, nodesplitter=wds.split_by_node).shuffle(1000)
    loader: Any = wds.WebLoader(dataset, batch_size=None, num_workers=min(WORKERS, len(urls)))
    found = sum(1 for _ in loader)
    took = time.perf_counter() - begun
    assert found == count, f"{found} samples of {count}"
    return took


def _tars(url: str) -> int:
    """How many there are."""
    import urllib.request

    with urllib.request.urlopen(f"{url}/") as answer:
        return len(set(re.findall(r'href="[^"]*?([0-9]+\.tar)"', answer.read().decode())))


if __name__ == "__main__":
    print(_epoch_of_mds(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
