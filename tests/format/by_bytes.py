"""Rows of a Latentry shard with nothing but struct, NumPy and a table of CRC-32C: section [6] of the format page."""

import hashlib
import json
import struct

import numpy as np

DTYPES = {"bfloat16": "<u2", "float16": "<f2", "float32": "<f4", "uint8": "u1"}
TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    TABLE.append(byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[crc & 255 ^ byte]
    return crc ^ 0xFFFFFFFF


def checked(data):  # without the four bytes at its end, which must be its checksum
    if struct.pack("<I", crc32c(data[:-4])) != data[-4:]:
        raise ValueError("checksum does not fit")
    return data[:-4]


def listing(root):
    for path in sorted(root.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            yield {"path": path.relative_to(root).as_posix(), "sha256": hashlib.sha256(data).hexdigest(),
                   "size": len(data)}


def digest(root):  # the shard's name
    ordered = sorted(listing(root), key=lambda entry: entry["path"])
    return hashlib.sha256(json.dumps(ordered, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def keys(root):
    data = checked((root / "key" / "c.0.0").read_bytes())
    return [data[start:start + 32].hex() for start in range(0, len(data), 32)]


def rows(root, name):  # the values of one array, in the order of keys(); bfloat16 as its 16 bits
    header = json.loads((root / name / "zarr.json").read_bytes())
    count, *shape = header["shape"]
    data = (root / name / ("c" + ".0" * (1 + len(shape)))).read_bytes()
    entries = struct.iter_unpack("<QQ", checked(data[-4 - 16 * count:]))
    for offset, length in entries:
        values = np.frombuffer(checked(data[offset:offset + length]), DTYPES[header["data_type"]])
        yield values.reshape(shape)
