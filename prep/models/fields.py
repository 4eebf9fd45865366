"""Dtypes and shapes of each field's rows, known before anything is encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prep.arrays import ArraySpec, DType
from prep.geometry import Size
from prep.models.family import Family

# Names of each array's dimensions, in the order of its shape; h w count latent cells.
DIMS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "latent": {"latent": ("c", "h", "w")},
    "mask": {"mask": ("1", "h", "w")},
    "text": {"hidden": ("token", "channel")},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpecs:
    """Everything that row shapes depend on, besides the bucket."""

    family: Family
    dtype: DType
    text_width: int  # channels of the text encoder's hidden states

    def arrays_of(self, field: str, bucket: Size | None) -> tuple[ArraySpec, ...]:
        """The arrays of a row of `field`; text has no bucket."""
        if field == "text":
            return (ArraySpec(name="hidden", dtype=self.dtype, shape=(self.family.max_length, self.text_width)),)
        assert bucket is not None, f"a row of {field} has a bucket"
        width, height = (side // self.family.factor for side in bucket)
        if field == "mask":
            return (ArraySpec(name="mask", dtype="uint8", shape=(1, height, width)),)
        return (ArraySpec(name="latent", dtype=self.dtype, shape=(self.family.latent_channels, height, width)),)

    def row_bytes(self, field: str, bucket: Size | None) -> int:
        """Bytes of one row of `field`, without checksums."""
        return sum(spec.row_bytes for spec in self.arrays_of(field, bucket))

    def as_manifest(self, field: str) -> dict[str, Any]:
        """The field's arrays as the manifest records them: dtype and dims."""
        dtype = "uint8" if field == "mask" else self.dtype
        return {name: {"dtype": dtype, "dims": list(dims)} for name, dims in DIMS[field].items()}
