"""Text encoders with weights of 8 or 4 bits, by bitsandbytes. CLIP is small and never quantized.

    8bit   LLM.int8() (Dettmers et al. 2022): weights and inputs of linear layers in 8 bits, scaled by row; columns of
           inputs with values beyond 6 stay in half precision. Which these are depends on all tokens of a batch, so a
           batch has one caption: a row depends on nothing else
    4bit   NF4 (Dettmers et al. 2023): weights in 4 bits, scaled in blocks of 64; inputs stay as they are

Embeddings, norms and the head keep their dtype, and so does the last layer of T5's feed-forward part, which
transformers never quantizes. How numbers round differs between releases of bitsandbytes and between devices, as it does
for other kernels, by far less than quantization changes them. Encoders are quantized in host memory and then moved; on
a GPU, that has not been run by our tests.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import prod
from typing import Any

from prep.errors import UsageError

NONE = "none"
BLOCK, SCALE_BYTES = 64, 4  # of NF4: weights that share a scale; a scale is a float32
# The matrices that stay as they are, by the end of their names.
_WHOLE = re.compile(r"(?:^|\.)(?:shared|\w*embed\w*|relative_attention_bias|lm_head|output_layer|wo)\.weight$")


def is_quantized(encoder: str, quantization: str) -> bool:
    """Whether `quantization` applies to text encoders of this transformers class."""
    return quantization != NONE and not encoder.startswith("CLIP")


def require_library(quantization: str) -> None:
    """Raises `UsageError` if `quantization` needs a library that is not installed."""
    if quantization == NONE:
        return
    if find_spec("bitsandbytes") is None:
        raise UsageError(f"text encoders with weights of {quantization.removesuffix('bit')} bits need the package "
                         "bitsandbytes, which is not installed", hint="pip install 'latentry[bnb]'")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it says at each layer that inputs are cast


def bitsandbytes_options(quantization: str, compute: Any) -> dict[str, Any]:
    """The arguments of transformers' `BitsAndBytesConfig`; all that decide values are given, and in no default."""
    if quantization == "8bit":
        return {"load_in_8bit": True, "llm_int8_threshold": 6.0}
    return {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": compute}


def most_captions(quantization: str) -> int | None:
    """The most captions that a batch may have; `None`: any number."""
    return 1 if quantization == "8bit" else None


def encoder_bytes(encoder: str, shapes: Mapping[str, Sequence[int]], quantization: str, item: int) -> int:
    """Bytes of the weights of these shapes, by name, in a text encoder of this class; those that are not quantized have
    `item` bytes a number."""
    packed = is_quantized(encoder, quantization)
    return sum(_matrix_bytes(shape, quantization) if packed and len(shape) == 2 and not _WHOLE.search(name)
               else item * prod(shape) for name, shape in shapes.items())


def _matrix_bytes(shape: Sequence[int], quantization: str) -> int:
    """A matrix with its scales."""
    rows, columns = shape
    if quantization == "8bit":
        return rows * columns + rows * SCALE_BYTES
    return -(-rows * columns // 2) + -(-rows * columns // BLOCK) * SCALE_BYTES
