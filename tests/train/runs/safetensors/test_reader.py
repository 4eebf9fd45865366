"""Tensors of a checkpoint: exactly those that are expected, read once, with their digest."""

from __future__ import annotations

import io
import json

import pytest
import torch
from safetensors.torch import save

from prep.digest import digest_bytes
from prep.parse import Unparsed
from train.runs.safetensors import reader
from train.runs.safetensors.header import read_header
from train.runs.safetensors.reader import names_of, read_joined, read_safetensors

TENSORS = {"x": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16), "one": torch.tensor(2.5),
           "none": torch.zeros(0, 4)}
WANTED = {name: (value.dtype, tuple(value.shape)) for name, value in TENSORS.items()}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(save(TENSORS))
    return tmp_path / "x.safetensors"


def test_the_library_s_files_are_read(path):
    found = read_safetensors(path, WANTED, digest_bytes(path.read_bytes()))
    assert list(found) == list(WANTED) and names_of(path) == set(WANTED)
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in TENSORS.items())


@pytest.mark.parametrize(("change", "said"), [
    ({"more": (torch.float32, (2,))}, "'more' is missing, expected shape [2]"),
    ({"x": (torch.float32, (3, 2))}, "'x' has shape [2, 3] F32, expected [3, 2] float32"),
    ({"x": (torch.bfloat16, (2, 3))}, "'x' has shape [2, 3] F32, expected [2, 3] bfloat16"),
    ({"one": None}, "'one' is not a tensor of this run"),
])
def test_tensors_are_those_that_are_wanted(path, change, said):
    wanted = {name: value for name, value in {**WANTED, **change}.items() if value is not None}
    with pytest.raises(Unparsed) as caught:
        read_safetensors(path, wanted, None)
    assert str(caught.value) == said


@pytest.fixture
def pieces(tmp_path):
    """Five rows in files of two, none and three; a scalar is in the first one."""
    whole, found = torch.arange(15.0).view(5, 3), {}
    for number, (start, end) in enumerate([(0, 2), (2, 2), (2, 5)]):
        tensors = {"x": whole[start:end].clone()} if end > start else {}
        places = {"x": {"saved_offsets": [start, 0]}} if tensors else {}
        if not number:
            tensors["one"], places["one"] = torch.tensor(2.5), {"saved_offsets": []}
        data = save(tensors, {"DCP_SHARDING_INFO": json.dumps(places)})
        (path := tmp_path / f"{number}.safetensors").write_bytes(data)
        found[path] = digest_bytes(data)
    return whole, found


@pytest.mark.parametrize("rows", [None, range(2), range(1, 4), range(2, 5), range(5, 5)])
def test_rows_of_pieces(pieces, rows):
    whole, paths = pieces
    wanted = {"one": (torch.float32, ()), "x": (torch.float32, (5, 3))}
    found = read_joined(paths, wanted, lambda path, error: error, {} if rows is None else {"x": rows})
    assert torch.equal(found["x"], whole if rows is None else whole[rows.start : rows.stop])
    assert found["one"] == 2.5 and list(found) == list(wanted)


def test_only_files_of_wanted_rows_are_read(pieces):
    """And those without rows, whose digest nobody else would check."""
    _, paths = pieces
    first, empty, last = paths
    refused = lambda path, error: Unparsed(f"{path.name}: {error}")  # noqa: E731
    wrong = {first: paths[first], empty: paths[empty], last: "0" * 64}
    assert len(read_joined(wrong, None, refused, {"x": range(2)})["x"]) == 2
    with pytest.raises(Unparsed, match=r"2.safetensors: its bytes do not match their digest"):
        read_joined(wrong, None, refused, {"x": range(1, 3)})
    with pytest.raises(Unparsed, match=r"1.safetensors: its bytes do not match their digest"):
        read_joined({**paths, empty: "0" * 64}, None, refused, {"x": range(2)})
    del paths[first]
    with pytest.raises(Unparsed, match=r"tensor 'x' has .3, 3. F32 from row 2 on, expected rows like .* from row 0 on"):
        read_joined(paths, None, refused)


def test_a_file_that_is_replaced_while_it_is_read(path, monkeypatch):
    plain = reader.joined

    def replace(headers):
        found = plain(headers)
        path.write_bytes(save({"x": torch.ones(3)}))
        return found

    monkeypatch.setattr(reader, "joined", replace)
    with pytest.raises(Unparsed, match="it was changed while it was read"):
        read_safetensors(path, WANTED, None)


def test_dtypes_that_are_not_asked_for(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(save({"x": torch.ones(2, dtype=torch.float64)}))
    with pytest.raises(Unparsed, match="it has a tensor of dtype F64, expected one of: F32, BF16, F16"):
        read_safetensors(path, None, None)


def test_a_file_that_shrinks_while_it_is_read(path):
    data = path.read_bytes()
    handle = io.BytesIO(data[:-4])
    hashed = reader._Hashed(handle)
    header = read_header(hashed, len(data))
    with pytest.raises(Unparsed, match="it ends 4 bytes early"):
        for info in header.values():
            reader._read(hashed, info)
