"""Text rows of different lengths, side by side, as trimmed rows come: padded to the longest, with a mask.

B samples, L tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prep.models.family import ATTENTION_MASK, Prompted, TextArrays

if TYPE_CHECKING:
    from torch import Tensor


def lengths(text: TextArrays) -> list[int]:
    """The tokens of each row; padding is always at the end."""
    found: list[int] = text[ATTENTION_MASK].sum(dim=1).tolist()
    return found


def rows(text: TextArrays, name: str) -> list[Tensor]:
    """The rows [its own length, …] of an array."""
    return [row[:length] for row, length in zip(text[name], lengths(text), strict=True)]


def cut(text: TextArrays, name: str) -> tuple[Tensor, Tensor | None]:
    """An array, [B, L, …], and its mask, [B, L] bool; `None` if no row is shorter than another.

    Rows are stored with padding up to the length of their group; without a mask, attention is faster.
    """
    counts = lengths(text)
    most = max(counts)
    return text[name][:, :most], None if min(counts) == most else text[ATTENTION_MASK][:, :most].bool()


def by_length(text: TextArrays, name: str, answer: Callable[[list[int], Tensor], Tensor]) -> Tensor:
    """[B, …] of what `answer` gives for the rows of each length, [G, …]: it is called with their numbers and arrays,
    [G, that length, …], so without padding.
    """
    groups: dict[int, list[int]] = {}
    for number, length in enumerate(lengths(text)):
        groups.setdefault(length, []).append(number)
    parts = [(numbers, answer(numbers, text[name][numbers][:, :length])) for length, numbers in groups.items()]
    whole = parts[0][1].new_empty((len(text[name]), *parts[0][1].shape[1:]))
    for numbers, part in parts:
        whole[numbers] = part
    return whole


def embeddings(prompted: Prompted, name: str = "hidden", mask: str = "prompt_attention_mask") -> dict[str, Tensor]:
    """An array and its mask, of the prompt and of its negative, under the names that most pipelines have for them.

    The shorter one is padded with zeros, also in its mask: some pipelines take both only at one length.
    """
    length = max(text[name].shape[1] for text in (prompted.positive, prompted.negative))
    found: dict[str, Tensor] = {}
    for prefix, text in (("", prompted.positive), ("negative_", prompted.negative)):
        found[f"{prefix}prompt_embeds"] = _padded(text, name, length)
        found[f"{prefix}{mask}"] = _padded(text, ATTENTION_MASK, length)
    return found


def _padded(text: TextArrays, name: str, length: int) -> Tensor:
    array = text[name]
    longer = array.new_zeros((array.shape[0], length, *array.shape[2:]))
    longer[:, :array.shape[1]] = array
    return longer
