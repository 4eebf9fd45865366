"""What denoisers are given of a batch of trimmed rows."""

from __future__ import annotations

import torch

from prep.models.denoiser import padding


def text(*lengths: int, stored: int) -> dict[str, torch.Tensor]:
    """Rows of so many tokens, padded to `stored`, with 3 channels."""
    mask = (torch.arange(stored)[None] < torch.tensor(lengths)[:, None]).to(torch.uint8)
    hidden = torch.randn(len(lengths), stored, 3) * mask[..., None]
    return {"hidden": hidden, "attention_mask": mask}


def test_lengths_beyond_those_that_a_byte_can_count():
    assert padding.lengths(text(300, 511, 1, stored=512)) == [300, 511, 1]


def test_rows_have_their_own_length():
    given = text(2, 5, stored=16)
    short, long = padding.rows(given, "hidden")
    assert torch.equal(short, given["hidden"][0, :2]) and torch.equal(long, given["hidden"][1, :5])


def test_a_batch_is_cut_to_its_longest_row():
    given = text(2, 5, stored=16)
    hidden, mask = padding.cut(given, "hidden")
    assert torch.equal(hidden, given["hidden"][:, :5])
    assert mask.dtype == torch.bool and mask.tolist() == [[True, True, False, False, False], [True] * 5]


def test_rows_of_one_length_need_no_mask():
    hidden, mask = padding.cut(text(7, 7, stored=16), "hidden")
    assert mask is None and hidden.shape == (2, 7, 3)
