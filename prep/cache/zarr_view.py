"""Opens shards as Zarr groups, and adds bfloat16 to zarr-python. Not used on the hot path.

tensorstore and zarrs read bfloat16 by themselves. zarr-python needs one `register()` per process: it lists the entry
points of the group `zarr.data_type`, which include this type, but up to at least 3.1.6 never loads them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
import zarr
from zarr.core.dtype.common import DataTypeValidationError, HasEndianness, HasItemSize
from zarr.core.dtype.npy.common import float_to_json_v3
from zarr.dtype import ZDType, data_type_registry

from prep.cache.store import Cache


def register() -> None:
    """Makes zarr-python read and write `bfloat16`, in this whole process."""
    data_type_registry.register("bfloat16", BFloat16)


def open_shard(cache: Cache, digest: str) -> Any:
    """A shard as a read-only `zarr.Group`: `group["latent"][3]`. Slow (1 ms a row): for inspection and other tools."""
    register()
    return zarr.open_group(str(cache.shard(digest)), mode="r", zarr_format=3)


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[Any, Any], HasEndianness, HasItemSize):
    """Zarr's `bfloat16`: `ml_dtypes.bfloat16` in NumPy if that is installed, else its bits as uint16."""

    dtype_cls: ClassVar[Any] = np.dtype
    _zarr_v3_name: ClassVar[str] = "bfloat16"

    @property
    def item_size(self) -> int:
        """Bytes of one number."""
        return 2

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """This type for `ml_dtypes.bfloat16`; never for uint16, which Zarr has as a separate type."""
        if getattr(dtype, "name", None) != "bfloat16":
            raise DataTypeValidationError(f"data type is {dtype}, expected bfloat16")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of rows that are read."""
        return native_bfloat16() or np.dtype("<u2" if self.endianness == "little" else ">u2")

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError("Zarr v2 has no bfloat16")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"data type is {data!r}, expected 'bfloat16'")
        return cls()

    def to_json(self, zarr_format: Literal[2, 3]) -> Any:
        """The name in `zarr.json`."""
        if zarr_format == 2:
            raise DataTypeValidationError("Zarr v2 has no bfloat16")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.number) or getattr(data, "dtype", None) == self.to_native_dtype()

    def cast_scalar(self, data: object) -> Any:
        """`data` as one number; without ml_dtypes its bits, truncated and not rounded (fill values are 0)."""
        native = self.to_native_dtype()
        if native.name == "bfloat16" or isinstance(data, np.uint16):
            return native.type(data)
        return (np.asarray(data, np.float32).reshape(1).view(np.uint32) >> 16).astype(native)[0]

    def default_scalar(self) -> Any:
        """Zero."""
        return self.cast_scalar(0)

    def from_json_scalar(self, data: Any, *, zarr_format: Literal[2, 3]) -> Any:
        """A fill value; accepts "NaN", "Infinity" and "-Infinity" as Zarr spells them."""
        return self.cast_scalar(float(data))

    def to_json_scalar(self, data: object, *, zarr_format: Literal[2, 3]) -> Any:
        """A fill value as JSON."""
        bits = np.asarray(self.cast_scalar(data)).reshape(1).view(np.uint16).astype(np.uint32) << 16
        return float_to_json_v3(bits.view(np.float32)[0])


def native_bfloat16() -> np.dtype[Any] | None:
    """`ml_dtypes.bfloat16` if that package is installed; Latentry does not need it."""
    try:
        native: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        return None
    return native
