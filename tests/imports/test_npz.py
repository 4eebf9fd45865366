"""`.npz` files are read as NumPy writes them, or refused: whatever their bytes say, nothing else happens."""

from __future__ import annotations

import io
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.imports import npz
from prep.imports.kohya import npz_facts
from prep.imports.npz import BadNpz, Npz

ARRAYS = {"latents": np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8), "original_size": np.array([64, 48]),
          "crop_ltrb": np.array([0.0, 0.0, 64.0, 48.0]), "half": np.ones((2, 3), np.float16, order="F"),
          "one": np.float64(3.5)}


def saved(save=np.savez, **arrays):
    stream = io.BytesIO()
    save(stream, **(arrays or ARRAYS))
    return stream.getvalue()


def zipped(members, kind=zipfile.ZIP_STORED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", kind) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return stream.getvalue()


def spelled(descr="'<f4'", order="False", shape="(2, 2)", data=b"\0" * 16, version=1):
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return (b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(2 if version == 1 else 4, "little") + header
            + data)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_writes_is_read(save):
    found = Npz(saved(save))
    assert found.names == tuple(ARRAYS)
    for name, wanted in ARRAYS.items():
        read = found.read(name)
        np.testing.assert_array_equal(read, wanted)
        assert read.dtype == wanted.dtype and found.header(name).shape == wanted.shape


def test_later_versions_of_the_header_are_read():
    for version in (2, 3):
        assert Npz(zipped([("a.npy", spelled(version=version))])).read("a").shape == (2, 2)


class Fires:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize(("data", "why"), [
    (b"", "is not a zip of arrays, or is cut off"),
    (b"PK\5\6" + b"\0" * 17, "is not a zip of arrays, or is cut off"),
    (saved()[:-1], "is not a zip of arrays, or is cut off"),
    (zipped([("a.npy", b"text")]), "has 'a', which is not an array"),
    (zipped([("a.npy", spelled(version=9))]), "has 'a', which is not an array"),
    (zipped([("a.npy", spelled(descr="'|O'", data=pickle.dumps(Fires())))]), "which is not an array of numbers"),
    (zipped([("a.npy", spelled(descr="__import__('os').abort()"))]), "which is not an array of numbers"),
    (zipped([("a.npy", spelled(shape="(-1, 4)"))]), "which is not an array of numbers"),
    (zipped([("a.npy", spelled(descr="[('a', '<f4')]"))]), "which is not an array of numbers"),
    (zipped([("a.npy", spelled(shape="(99999, 99999)"))]), "has 'a' of 39999200004 bytes, expected at most"),
    (zipped([("a.npy", spelled(shape="(2, 3)"))]), "has other bytes in 'a' than its header says"),
    (zipped([("a.npy", spelled(shape="(2, 1)"))]), "has other bytes in 'a' than its header says"),
    (zipped([("a.npy", spelled(descr="'<f1'"))]), "has 'a' damaged"),
    (zipped([("a.npy", spelled())], zipfile.ZIP_LZMA), "is compressed in a way that NumPy does not write"),
    (zipped([(f"{number}.npy", b"") for number in range(257)]), "has 257 members, expected at most 256"),
    (zipped([("x" * 300 + f"{number}.npy", b"") for number in range(250)]), "has a list of members of"),
    (zipped([("b.npy", spelled())]), "has no array 'a'"),
], ids=range(17))
def test_what_is_refused(data, why):
    with pytest.raises(BadNpz, match=why):
        Npz(data).read("a")


def test_names_that_occur_twice_are_refused():
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = zipped([("a.npy", spelled()), ("a.npy", spelled())])
    with pytest.raises(BadNpz, match="each name once"):
        Npz(data)


def test_a_bomb_is_not_unpacked(monkeypatch):
    """Its header says more than is allowed, or less than the zip has: only so much is decompressed."""
    bomb = zipped([("a.npy", spelled(data=bytes(1 << 26)))], zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 17
    read = []
    plain = zipfile.ZipExtFile.read
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda self, n=-1: read.append(n) or plain(self, n))
    with pytest.raises(BadNpz, match="has other bytes in 'a' than its header says"):
        Npz(bomb).read("a")
    assert 0 < sum(read) < 5000 and min(read) > 0
    monkeypatch.setattr(npz, "MOST_BYTES", 100)
    with pytest.raises(BadNpz, match="bytes, expected at most 100"):
        Npz(bomb)


@given(st.data())
def test_damage_is_a_finding_or_changes_nothing(data):
    """Any byte changed, or the end cut off: the facts are as before, or they say why there are none."""
    whole = saved()
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        spoiled = whole[:at]
    else:
        spoiled = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1:]
    found, good = npz_facts(spoiled), npz_facts(whole)
    assert "sizes" in good
    if "sizes" not in found:
        assert found["code"] == "bad-latents" and found["detail"]
        return
    try:
        np.testing.assert_array_equal(Npz(spoiled).read("latents"), ARRAYS["latents"])
    except BadNpz:
        return
    assert found["sizes"] == good["sizes"]


@given(st.binary(max_size=400))
def test_no_bytes_are_anything_else(data):
    assert npz_facts(data)["code"] == "bad-latents"
    assert npz_facts(zipped([("latents.npy", b"\x93NUMPY" + data)]))["code"] == "bad-latents"
