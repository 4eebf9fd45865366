"""Latents as sequences of patches, for transformers that take them so.

B samples, C latent channels, h w latent cells; a patch has 2 × 2 cells, its numbers in the order channel, row, column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.geometry import Size

if TYPE_CHECKING:
    from torch import Tensor

PATCH = 2


def pack(latent_BChw: Tensor) -> Tensor:
    """[B, (h/2)·(w/2), 4·C]: patches row by row, as `FluxPipeline._pack_latents` orders them."""
    count, channels, height, width = latent_BChw.shape
    parts = latent_BChw.reshape(count, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * PATCH * PATCH)


def unpack(packed_BNP: Tensor, cells: Size) -> Tensor:
    """[B, C, h, w] of packed latents; `cells` is (w, h)."""
    count, _, numbers = packed_BNP.shape
    width, height = cells
    parts = packed_BNP.reshape(count, height // PATCH, width // PATCH, numbers // PATCH**2, PATCH, PATCH)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(count, -1, height, width)


def positions(like_BChw: Tensor, axes: int = 3) -> Tensor:
    """[N, axes] float32: row and column of each patch on axes 1 and 2, zero on the others.

    float32, because bfloat16 has no 257.
    """
    height, width = like_BChw.shape[-2] // PATCH, like_BChw.shape[-1] // PATCH
    found = like_BChw.new_zeros((height, width, axes)).float()
    found[..., 1] += found.new_tensor(range(height))[:, None]
    found[..., 2] += found.new_tensor(range(width))[None]
    return found.reshape(height * width, axes)


def with_references(given: Mapping[str, Any], references: Sequence[Tensor], *, apart: int) -> Mapping[str, Any]:
    """A denoiser's arguments with the patches of `references`, [B, C, h, w] each, behind those of the noise.

    Their positions are those of the noise, but for axis 0, where they are `apart` from it and from each other.
    """
    if not references:
        return given
    places = [positions(latent_BChw, given["img_ids"].shape[-1]) for latent_BChw in references]
    for number, place in enumerate(places, 1):
        place[:, 0] = apart * number
    return {**given, "hidden_states": joined(given["hidden_states"], [pack(latent) for latent in references]),
            "img_ids": joined(given["img_ids"], places)}


def joined(first: Tensor, others: Sequence[Tensor]) -> Tensor:
    """[…, N, D], by all N: like `torch.cat`, but the facts of families are read without torch."""
    count = first.shape[-2]
    whole = first.new_empty((*first.shape[:-2], sum(each.shape[-2] for each in (first, *others)), first.shape[-1]))
    whole[..., :count, :] = first
    for each in others:
        whole[..., count:count + each.shape[-2], :] = each
        count += each.shape[-2]
    return whole
