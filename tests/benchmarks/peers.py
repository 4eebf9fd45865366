"""The same rows in other libraries' formats, and how each reads them into the caller's buffers.

A maker writes all rows below a directory and returns a way to open them, afresh each time, as a `Fill`. Each uses the
quickest public way of its library that I know of, and copies what the library hands out into the buffers, unless it
can read into them. Where a library lacks something, its maker raises `ImportError`.
"""

from __future__ import annotations

import importlib.machinery
import sys
import tarfile
import types
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from prep.cache import shard_format
from prep.cache.store import Cache

Data = Mapping[str, np.ndarray]  # uint8 [N, row_bytes] for each array
Fill = Callable[[Data, Sequence[int]], None]  # fills the first rows of each buffer
Open = Callable[[], Fill]


def memcpy(data: Data, root: Path) -> Open:
    def fill(out: Data, picks: Sequence[int]) -> None:
        for name, rows in data.items():
            target = out[name]
            for place, pick in enumerate(picks):
                target[place] = rows[pick]

    return lambda: fill


def npz(data: Data, root: Path) -> Open:
    for row in range(count(data)):
        np.savez(root / f"{row}.npz", **{name: rows[row] for name, rows in data.items()})

    def fill(out: Data, picks: Sequence[int]) -> None:
        for place, pick in enumerate(picks):
            with np.load(root / f"{pick}.npz") as stored:
                for name in out:
                    out[name][place] = stored[name]

    return lambda: fill


def pt(data: Data, root: Path) -> Open:
    import torch

    for row in range(count(data)):
        torch.save({name: torch.from_numpy(rows[row].copy()) for name, rows in data.items()}, root / f"{row}.pt")

    def fill(out: Data, picks: Sequence[int]) -> None:
        for place, pick in enumerate(picks):
            stored = torch.load(root / f"{pick}.pt", weights_only=True)
            for name in out:
                out[name][place] = stored[name].numpy()

    return lambda: fill


def safetensors(data: Data, root: Path) -> Open:
    from safetensors.numpy import load_file, save_file

    for row in range(count(data)):
        save_file({name: rows[row] for name, rows in data.items()}, root / f"{row}.safetensors")

    def fill(out: Data, picks: Sequence[int]) -> None:
        for place, pick in enumerate(picks):
            stored = load_file(root / f"{pick}.safetensors")
            for name in out:
                out[name][place] = stored[name]

    return lambda: fill


def webdataset(data: Data, root: Path) -> Open:
    """Tars are read from their beginning to their end: what is asked for is not what comes, only how much."""
    import webdataset as wds

    with tarfile.open(root / "rows.tar", "w") as tar:
        for row in range(count(data)):
            for name, rows in data.items():
                member = tarfile.TarInfo(f"{row:06}.{name}")
                member.size = rows.shape[1]
                tar.addfile(member, BytesIO(rows[row]))

    def opened() -> Fill:
        def endless() -> Any:
            while True:
                yield from wds.WebDataset(str(root / "rows.tar"), shardshuffle=False)

        samples = endless()

        def fill(out: Data, picks: Sequence[int]) -> None:
            for place in range(len(picks)):
                sample = next(samples)
                for name in out:
                    out[name][place] = np.frombuffer(sample[name], np.uint8)

        return fill

    return opened


def mds(data: Data, root: Path) -> Open:
    stand_in_for_torchvision()
    from streaming import LocalDataset, MDSWriter

    with MDSWriter(out=str(root), columns=dict.fromkeys(data, "bytes")) as writer:
        for row in range(count(data)):
            writer.write({name: rows[row].tobytes() for name, rows in data.items()})
    return lambda: items(LocalDataset(local=str(root)))


def litdata(data: Data, root: Path) -> Open:
    from litdata import StreamingDataset
    from litdata.streaming.cache import Cache as Chunks

    chunks = Chunks(str(root), chunk_bytes="64MB")
    for row in range(count(data)):
        chunks[row] = {name: rows[row].tobytes() for name, rows in data.items()}
    chunks.done()
    chunks.merge()
    return lambda: items(StreamingDataset(str(root), shuffle=False))


def items(dataset: Any) -> Fill:
    """Reads a data set whose items are dicts of bytes."""
    def fill(out: Data, picks: Sequence[int]) -> None:
        for place, pick in enumerate(picks):
            stored = dataset[pick]
            for name in out:
                out[name][place] = np.frombuffer(stored[name], np.uint8)

    return fill


def hf_datasets(data: Data, root: Path) -> Open:
    """Memory-mapped Arrow."""
    import datasets

    datasets.disable_progress_bars()
    features = datasets.Features({name: datasets.Value("large_binary") for name in data})
    rows = {name: [row.tobytes() for row in rows] for name, rows in data.items()}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(root))
    return lambda: tables(datasets.load_from_disk(str(root)).with_format("arrow").__getitem__)


def lance(data: Data, root: Path) -> Open:
    import lance as library
    import pyarrow

    columns = {name: pyarrow.array([row.tobytes() for row in rows], pyarrow.large_binary())
               for name, rows in data.items()}
    library.write_dataset(pyarrow.table(columns), str(root / "rows"))
    return lambda: tables(library.dataset(str(root / "rows")).take)


def tables(take: Callable[[list[int]], Any]) -> Fill:
    """Reads what gives an Arrow table for a list of rows; its values are copied once, from where they lie."""
    def fill(out: Data, picks: Sequence[int]) -> None:
        table = take(list(picks))
        for name in out:
            column = table.column(name)
            for place in range(len(picks)):
                out[name][place] = np.frombuffer(column[place].as_buffer(), np.uint8)

    return fill


def zarr_python(cache: Cache, shards: Mapping[str, str]) -> Open:
    """Row by row: `oindex` on a sharded array is ten times slower."""
    from prep.cache.zarr_view import open_shard

    return lambda: rows_of({name: open_shard(cache, shard)[name] for name, shard in shards.items()})


def zarrs(cache: Cache, shards: Mapping[str, str]) -> Open:
    import zarr

    importlib.import_module("zarrs")  # or it is left out

    from prep.cache.zarr_view import open_shard

    def opened() -> Fill:
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            return rows_of({name: open_shard(cache, shard)[name] for name, shard in shards.items()})

    return opened


def rows_of(stored: Mapping[str, Any]) -> Fill:
    """Reads arrays that are indexed by a row."""
    def fill(out: Data, picks: Sequence[int]) -> None:
        for name in out:
            for place, pick in enumerate(picks):
                out[name][place] = np.ascontiguousarray(stored[name][pick]).reshape(-1).view(np.uint8)

    return fill


def tensorstore(cache: Cache, shards: Mapping[str, str]) -> Open:
    """A batch is one read, by an array of indices."""
    import tensorstore as library

    def opened() -> Fill:
        stored = {name: library.open({"driver": "zarr3", "kvstore": f"file://{cache.shard(shard) / name}/"}).result()
                  for name, shard in shards.items()}

        def fill(out: Data, picks: Sequence[int]) -> None:
            reading = {name: stored[name][list(picks)].read() for name in out}
            for name, one in reading.items():
                out[name][: len(picks)] = one.result().view(np.uint8).reshape(len(picks), -1)

        return fill

    return opened


def sequential(cache: Cache, shards: Mapping[str, str], specs: Mapping[str, Any]) -> Open:
    """Our files from their beginnings to their ends, a mebibyte at a time, into one buffer: what the disk gives."""
    import os

    def opened() -> Fill:
        block = bytearray(1 << 20)
        paths = [cache.shard(shard) / shard_format.data_path(specs[name]) for name, shard in shards.items()]
        handles = [path.open("rb", buffering=0) for path in paths]
        for handle in handles:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        state = {"file": 0, "ahead": 0}

        def fill(out: Data, picks: Sequence[int]) -> None:
            wanted = sum(rows.shape[1] for rows in out.values()) * len(picks) - state["ahead"]
            while wanted > 0:
                got = handles[state["file"]].readinto(block)
                wanted -= got
                if not got:
                    state["file"] = (state["file"] + 1) % len(handles)
                    handles[state["file"]].seek(0)
            state["ahead"] = -wanted

        return fill

    return opened


FILES: dict[str, Callable[[Data, Path], Open]] = {
    "memcpy": memcpy, "safetensors, a file a sample": safetensors, "pt (torch.save), a file a sample": pt,
    "npz, a file a sample": npz, "WebDataset, sequential": webdataset, "MosaicML MDS": mds, "LitData": litdata,
    "HF datasets (Arrow, mmap)": hf_datasets, "Lance": lance,
}  # fmt: skip
OURS: dict[str, Callable[[Cache, Mapping[str, str]], Open]] = {
    "tensorstore, our shards": tensorstore, "zarrs, our shards": zarrs, "zarr-python, our shards": zarr_python,
}


def count(data: Data) -> int:
    """N."""
    return len(next(iter(data.values())))


def stand_in_for_torchvision() -> None:
    """MDS imports two names of torchvision for its own pictures; nothing here calls them.

    Where torchvision is not installed, or not for this build of torch, they are empty. Whoever asks whether it is
    there (transformers) is asked first.
    """
    import transformers  # noqa: F401

    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.VisionDataset, module.to_tensor = object, None
        sys.modules[name] = module
