"""Z-Image's transformer gives a list of pictures."""

from __future__ import annotations

import torch

from prep.models.families.zimage import _stacked


def test_stacked_pictures_keep_their_gradients():
    parts = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
    whole = _stacked(parts)
    assert torch.equal(whole, torch.stack(parts))
    (whole * torch.arange(3.0)[:, None, None]).sum().backward()
    assert [part.grad.unique().tolist() for part in parts] == [[0.0], [1.0], [2.0]]
