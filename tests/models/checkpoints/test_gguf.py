"""GGUF files: headers as the authors' library reads them, values as it unpacks them, and nothing of what is damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf_files
import pytest
import torch

from prep.errors import ModelError, UsageError
from prep.models.checkpoints.contents import contents_of
from prep.models.checkpoints.gguf import QUANTIZED, TYPES, tensors_in
from prep.models.checkpoints.stored import Stored
from prep.models.weights import read_tensors

PACKED = sorted(QUANTIZED)


@pytest.fixture
def library():
    return pytest.importorskip("gguf", reason="an extra")


def test_sizes_of_types_are_those_of_the_library(library):
    for number, (name, numbers, size) in TYPES.items():
        kind = library.GGMLQuantizationType(number)
        assert (kind.name, *library.GGML_QUANT_SIZES[kind]) == (name, numbers, size)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_headers_and_values_are_what_was_written(library, kind, tmp_path):
    drawn = torch.Generator().manual_seed(1)
    given = {"a.weight": torch.randn(96, 64, generator=drawn), "a.bias": torch.randn(7, generator=drawn),
             "conv": torch.randn(5, 4, 3, 3, generator=drawn), "deep": torch.randn(2, 3, 2, 2, 2, generator=drawn),
             "one": torch.randn((), generator=drawn).reshape(1)}
    meant = gguf_files.write(tmp_path / "x.gguf", given, kind)
    tensors = read_tensors([tmp_path / "x.gguf"])
    assert {name: one.shape for name, one in tensors.items()} == {name: tuple(one.shape) for name, one in given.items()}
    assert tensors["a.weight"].dtype == kind and tensors["conv"].dtype == "F32"
    assert [(str(one.name), one.data_offset, one.data_offset + one.n_bytes)
            for one in library.GGUFReader(tmp_path / "x.gguf").tensors] == [
        (name, one.begin, one.end) for name, one in tensors.items()]
    stored = Stored.of(tensors)
    for name, value in meant.items():
        assert torch.equal(stored.cast(name, torch.float32), value), name
        assert torch.equal(stored.cast(name, torch.bfloat16), value.to(torch.bfloat16)), name
        assert torch.equal(stored.read(name), value), name


@pytest.mark.parametrize("kind", PACKED)
def test_each_type_is_unpacked_in_pieces_as_by_the_library_at_once(library, kind, tmp_path, monkeypatch):
    """Random bytes, with scales of 1: that is how files are read whose types Python cannot write."""
    from gguf.quants import dequantize

    numbers, size = QUANTIZED[kind]
    rows = 5
    data = torch.randint(0, 60, (rows, 2 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)).numpy()
    number = next(each for each, (name, _, _) in TYPES.items() if name == kind)
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_files.header([("w", (2 * numbers, rows), number, 0)]) + data.tobytes())
    monkeypatch.setattr("prep.models.checkpoints.stored.UNPACKED", 2 * numbers)  # two blocks at a time
    stored = Stored.of(read_tensors([path]))
    wanted = torch.from_numpy(dequantize(data, library.GGMLQuantizationType[kind]).copy())
    assert stored.tensors["w"].shape == (rows, 2 * numbers) == tuple(wanted.shape)
    assert torch.equal(torch.nan_to_num(stored.cast("w", torch.float32)), torch.nan_to_num(wanted))


ENTRY = ("w", (32, 2), 8, 0)
BODY = b"\0" * 68


def pair(name: str, kind: int, value: bytes) -> bytes:
    return gguf_files.text(name) + struct.pack("<I", kind) + value


DAMAGED = {
    "another magic": b"GGML" + gguf_files.header([ENTRY])[4:] + BODY,
    "an unknown version": gguf_files.header([ENTRY], version=9) + BODY,
    "a cut header": gguf_files.header([ENTRY])[:40],
    "more tensors than a file has": gguf_files.header([ENTRY], tensors=1 << 60) + BODY,
    "more pairs than a file has": gguf_files.header([ENTRY], count=1 << 60) + BODY,
    "a name twice": gguf_files.header([ENTRY, ENTRY]) + BODY,
    "half a block": gguf_files.header([("w", (33, 2), 8, 0)]) + BODY,
    "many dimensions": gguf_files.header([("w", (32,) * 9, 8, 0)]) + BODY,
    "a huge side": gguf_files.header([("w", (1 << 62, 2), 8, 0)]) + BODY,
    "a name of no letters": gguf_files.header([ENTRY]).replace(b"w", b"\xff") + BODY,
    "an alignment of 0": gguf_files.header([ENTRY], pair("general.alignment", 4, struct.pack("<I", 0)), 1) + BODY,
    "an alignment in letters": gguf_files.header([ENTRY], pair("general.alignment", 8, gguf_files.text("x")), 1) + BODY,
    "a list of lists": gguf_files.header([ENTRY], pair("x", 9, struct.pack("<IQ", 9, 2)), 1) + BODY,
    "a list without end": gguf_files.header([ENTRY], pair("x", 9, struct.pack("<IQ", 4, 1 << 50)), 1) + BODY,
    "a text without end": gguf_files.header([ENTRY], pair("x", 8, struct.pack("<Q", 1 << 50)), 1) + BODY,
    "another shape than numbers": gguf_files.header([ENTRY], pair(
        "comfy.gguf.orig_shape.w", 9, struct.pack("<IQii", 5, 2, 3, 3)), 1) + BODY,
    "a negative shape": gguf_files.header([ENTRY], pair(
        "comfy.gguf.orig_shape.w", 9, struct.pack("<IQii", 5, 2, -8, -8)), 1) + BODY,
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_headers_are_refused(what, tmp_path):
    (tmp_path / "x.gguf").write_bytes(DAMAGED[what])
    with pytest.raises(ModelError, match=r"x\.gguf has no GGUF header; it is damaged or has another format"):
        tensors_in(tmp_path / "x.gguf")


def test_cut_data_and_unknown_types_are_named(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_files.header([ENTRY]) + BODY)
    assert tensors_in(path)["w"].shape == (2, 32)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"x\.gguf has \d+ bytes, expected \d+ as its header says"):
        tensors_in(path)
    path.write_bytes(gguf_files.header([("w", (32, 2), 99, 0)]) + BODY)
    with pytest.raises(ModelError, match=r"x\.gguf has 'w' of the type 99, expected one of: F32, "):
        tensors_in(path)


def test_without_the_library_quantized_files_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("prep.models.checkpoints.contents.find_spec", lambda name: None)
    names = ("double_blocks.0.img_attn.x", "single_blocks.0.x", "vector_in.x")
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_files.header([(name, (32, 2), 8, 0) for name in names]) + BODY)
    with pytest.raises(UsageError, match="quantized tensors, which need the package gguf") as error:
        contents_of(path)
    assert error.value.hint == "pip install 'latentry[gguf]'"
    path.write_bytes(gguf_files.header([(name, (2, 2), 0, 0) for name in names]) + BODY)
    assert contents_of(Path(path)).family == "flux"
