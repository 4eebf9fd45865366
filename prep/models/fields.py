"""Dtypes and shapes of each field's rows, known before anything is encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prep.arrays import ArraySpec, DType
from prep.geometry import Size
from prep.models.family import ATTENTION_MASK, TOKEN, Dims, Family, Shape

# Names of each array's dimensions, in the order of its shape; h w count latent cells. A family says those of text.
PICTURE_DIMS: Mapping[str, Mapping[str, Dims]] = {
    "latent": {"latent": ("c", "h", "w")},
    "mask": {"mask": ("1", "h", "w")},
    "embedding": {"embedding": ("d",)},
}
MASK_OF_PIXELS: Mapping[str, Dims] = {"mask": ("pixel", "h", "w")}  # as many as a cell has, by row
FIELDS = ("latent", "mask", "text", "embedding")
STD = "std"  # the array of latents whose posterior is "mean+std": standard deviations, beside the means in `latent`


def dims_of(family: Family, field: str, *, with_std: bool = False) -> Mapping[str, Dims]:
    """The dimensions of each array of a field; `with_std`: latents have standard deviations, too."""
    if field != "text":
        std = {STD: PICTURE_DIMS["latent"]["latent"]} if with_std and field == "latent" else {}
        return {**(MASK_OF_PIXELS if field == "mask" and family.mask_channels > 1 else PICTURE_DIMS[field]), **std}
    masks = {ATTENTION_MASK: (TOKEN,)} if family.text.layout == "trimmed" else {}
    return {**family.text.arrays, **masks}


def array_dtype(field: str, array: str, dtype: DType) -> DType:
    """The dtype of an array, in a cache that stores numbers as `dtype`: masks are always bytes, embeddings float16."""
    if field == "embedding":
        return "float16"
    return "uint8" if field == "mask" or array == ATTENTION_MASK else dtype


def embedding_arrays(width: int) -> tuple[ArraySpec, ...]:
    """The arrays of an embedding of so many numbers."""
    return (ArraySpec(name="embedding", dtype="float16", shape=(width,)),)


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpecs:
    """Everything that row shapes depend on, besides the bucket or the length of a caption."""

    family: Family
    dtype: DType
    text: Mapping[str, Shape]  # of the longest text row, by array, without the attention mask
    with_std: bool = False  # whether latents have standard deviations, too
    embedding: int = 0  # numbers of an embedding; 0: there are none

    def arrays_of(self, field: str, bucket: Size | None, tokens: int | None = None) -> tuple[ArraySpec, ...]:
        """The arrays of a row of `field`. Text has no bucket; `tokens` is the length of rows that are trimmed."""
        if field == "embedding":
            return embedding_arrays(self.embedding)
        dims = self._dims(field)
        return tuple(ArraySpec(name=name, dtype=array_dtype(field, name, self.dtype),
                               shape=self._text(name, dims[name], tokens) if field == "text" else
                               self._picture(field, bucket)) for name in dims)

    def _picture(self, field: str, bucket: Size | None) -> Shape:
        assert bucket is not None, f"a row of {field} has a bucket"
        width, height = (side // self.family.factor for side in bucket)
        return (self.family.mask_channels if field == "mask" else self.family.latent_channels, height, width)

    def _text(self, array: str, dims: Dims, tokens: int | None) -> Shape:
        longest = self.text.get(array) or (self.max_tokens,)  # the attention mask has only tokens
        return tuple(tokens if name == TOKEN and tokens else side for name, side in zip(dims, longest, strict=True))

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text row."""
        return max(side for name, dims in self.family.text.arrays.items()
                   for dim, side in zip(dims, self.text[name], strict=True) if dim == TOKEN)

    def row_bytes(self, field: str, bucket: Size | None, tokens: int | None = None) -> int:
        """Bytes of one row of `field`, without checksums."""
        return sum(spec.row_bytes for spec in self.arrays_of(field, bucket, tokens))

    def as_manifest(self, field: str) -> dict[str, Any]:
        """The field's arrays as the manifest records them: dtype and dims."""
        return {name: {"dtype": array_dtype(field, name, self.dtype), "dims": list(dims)}
                for name, dims in self._dims(field).items()}

    def _dims(self, field: str) -> Mapping[str, Dims]:
        return dims_of(self.family, field, with_std=self.with_std)
