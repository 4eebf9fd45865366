"""Checkpoints in pieces, as torch.distributed.checkpoint's own reader finds them."""

from __future__ import annotations

import json
import shutil
import warnings

import torch
from safetensors.torch import save
from torch.distributed import checkpoint as dcp

from prep.digest import digest_bytes
from prep.runs.documents import with_checksum

NAMES = ("unet/diffusion_pytorch_model", "optimizer", "ema", "ema-0.05", "ema-0.10")


def whole(folder):
    """The tensors of one file's pieces."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    found = {name: torch.full(each.size, 7, dtype=each.properties.dtype)
             for name, each in reader.read_metadata().state_dict_metadata.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it assumes one process
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def make_whole(checkpoint):
    """Replaces the pieces of a checkpoint by the files that a run of one process writes."""
    body = json.loads((checkpoint / "state.json").read_text())
    for name in NAMES:
        data = save(whole(checkpoint / name))
        shutil.rmtree(checkpoint / name)
        (checkpoint / f"{name}.safetensors").write_bytes(data)
        body["files"] = {each: facts for each, facts in body["files"].items() if not each.startswith(f"{name}/")} | {
            f"{name}.safetensors": {"bytes": len(data), "sha256": digest_bytes(data)}}
    body.pop("self")
    (checkpoint / "state.json").write_bytes(with_checksum({**body, "version": 3}))


def flip(path):
    """Changes a bit of the last tensor; the bytes before."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return data
