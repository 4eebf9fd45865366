"""The frozen weights of a LoRA's base with 8 or 4 bits a number, so that larger models fit; room of bitsandbytes.

    fp8       float8 e4m3 (Micikevicius et al. 2022) with a power of two for each row, so that undoing it is exact
    nf4       4 bits, the quantiles of a normal distribution, scaled in blocks of 64 (QLoRA, Dettmers et al. 2023)
    int8      whole numbers to 127 with a scale for each row, multiplied as such by inputs rounded in the same way
              (vector-wise quantization of LLM.int8, Dettmers et al. 2022, section 3.1)
    fp8-w8a8  the bytes of fp8, multiplied as such by inputs rounded in the same way

These are the linear layers of the denoiser's blocks. The others stay as they are: they embed the input, the timestep
and the text, or project to the output, and are small. With fp8 and nf4 each pass makes a layer's weights anew in the
dtype of the computation, forward and backward, so that no more than one layer has them at a time, and what the adapters
learn is exact for this base. Products in int8 and fp8-w8a8 are themselves off, by about 1 % and 4 %; devices that do
not multiply 8 bits unpack weights for them, too. Whether they are faster depends on what rounding costs beside the
product: on CPUs without AMX int8 is, on an H200 neither is without compiling. A result is meant for the model it was
trained on, at any precision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.torch_version import TorchVersion

from prep.training.schema import Quantization

LEAST: Mapping[Quantization, float | None] = {"none": None, "fp8": 1.0, "nf4": 0.5, "int8": 1.0,
                                              "fp8-w8a8": 1.0}  # bytes of a number
BLOCK = 64  # of NF4: numbers that share a scale
PART = 1 << 18  # numbers that are quantized at a time: tens of bytes for each are needed meanwhile
PART_OF_CPU = 15 << 11  # as above: a core's cache holds them, and torch divides 32,768 or more among threads
FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0  # its largest number
INT8_MOST = 127  # so that the range is symmetric
ROWS = 17  # torch's product of int8 matrices on CUDA takes no fewer rows; of fp8, they would be no faster
# What the sides of the weight must be multiples of: `_int_mm` and `_scaled_mm` of torch on CUDA.
SIDES: Mapping[Quantization, int] = {"int8": 8, "fp8-w8a8": 16}


def quantized(quantization: Quantization, name: str, layer: nn.Module) -> nn.Module:
    """The replacement of the layer `name` of a denoiser: a linear layer of a block is quantized, unless `quantization`
    is none. One on the meta device has the shapes of its bytes and scales.
    """
    within_block = any(part.isdecimal() for part in name.split(".")[:-1])  # else the number is that in an embedder
    if quantization != "none" and type(layer) is nn.Linear and within_block:
        return QuantizedLinear(layer, quantization)
    return layer


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weight, `[out, in]`, is kept as bytes, with its scales in float32."""

    scale: Tensor

    def __init__(self, layer: nn.Linear, quantization: Quantization) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias, self.quantization = layer.bias, quantization
        packed, scale = _PACKED[quantization](layer.weight.detach())
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scale", scale)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The weight, `[out, in]`."""
        return self.unpack(self.weight, self.scale, dtype)

    def unpack(self, packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight that these bytes are, `[out, in]`."""
        if self.quantization == "int8":
            return (packed * scale).to(dtype)
        if self.quantization == "nf4":
            return _from_nf4(packed, scale, (self.out_features, self.in_features), dtype)
        return packed.view(FP8).to(dtype) * scale.to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """`inputs` times the weight, in autocast's dtype if it is on, plus the bias."""
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        product_of: Any = _PRODUCTS[self.quantization] if self._multiplies_8_bits(inputs) else _Product
        product: Tensor = product_of.apply(inputs.to(dtype), self.weight, self.scale, self)
        return product if self.bias is None else product + self.bias.to(dtype)

    def _multiplies_8_bits(self, inputs: Tensor) -> bool:
        """Whether torch multiplies matrices of 8 bits here; the shapes that CUDA demands count on a CPU, too."""
        side = SIDES.get(self.quantization)
        return (side is not None and inputs.numel() >= ROWS * self.in_features and self.in_features % side == 0
                and self.out_features % side == 0 and _HAS[self.quantization](inputs.device))


@cache
def _has_int8(device: torch.device) -> bool:
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (7, 5)  # tensor cores for int8: Turing and later
    return device.type in ("cuda", "cpu")


@cache
def _has_fp8(device: torch.device) -> bool:
    """On AMD's GPUs the format is another one (fnuz) or new. A CPU only emulates the product, slower than weights
    unpacked; it is used there to be what it is on GPUs, and before 2.13 it refused scales of rows on CPUs with AMX.
    """
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (8, 9)  # tensor cores for fp8: Ada, Hopper and later
    return device.type == "cpu" and TorchVersion(torch.__version__) >= "2.13"


@cache
def _scales_rows(device: torch.device) -> bool:
    """Whether torch's product in fp8 itself scales rows well. Elsewhere OneTrainer found scaling afterwards much faster
    (its LinearW8A8.py); torch's builds for Windows lack the kernel (RowwiseScaledMM.cuh), and consumer Blackwell was
    refused it (pytorch#192707). A CPU is slow without.
    """
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return device.type == "cpu" or (hopper and sys.platform != "win32")


class _Product(torch.autograd.Function):
    """x Wᵀ for a frozen W that is made anew for the backward pass. PyTorch's own would keep W until then.

    Its bytes are saved as other tensors are, so that gradient checkpointing has them again before they are needed.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, scale: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.save_for_backward(packed, scale)
        ctx.layer = layer
        return functional.linear(inputs, layer.unpack(packed, scale, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return gradient @ ctx.layer.unpack(*ctx.saved_tensors, gradient.dtype), None, None, None


class _Int8Product(torch.autograd.Function):
    """x Wᵀ of matrices of int8 with a scale for each row, and its gradient g W, whose scales of W go with g."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, weight_scale: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.save_for_backward(weight, weight_scale)
        packed, scale = _to_int8(inputs.flatten(0, -2))
        product = torch._int_mm(packed, weight.t()) * scale * weight_scale.t()
        return product.to(inputs.dtype).view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (weight, weight_scale) = gradients, ctx.saved_tensors
        packed, scale = _to_int8(gradient.flatten(0, -2) * weight_scale.t())
        # By rows, a second matrix took cuBLAS 3.3 times as long.
        product = torch._int_mm(packed, _by_columns(weight) if gradient.is_cuda else weight) * scale
        return product.to(gradient.dtype).view(*gradient.shape[:-1], -1), None, None, None


class _Fp8Product(torch.autograd.Function):
    """x Wᵀ of matrices of float8 with a scale for each row, and its gradient g W, whose scales of W go with g.

    Gradients are e4m3, too, as in torchao's recipe `rowwise`: of normally distributed ones and of those with long tails
    (Student's t with 2 or 3 degrees of freedom, lognormal with σ = 2) its rounding took products off by 0.027, e5m2's
    by 0.053 to 0.056. A row's own scale makes up for the smaller range.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, weight_scale: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.save_for_backward(weight, weight_scale)
        product = _fp8_product(inputs.flatten(0, -2), weight.t(), weight_scale.t())
        return product.to(inputs.dtype).view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (weight, weight_scale) = gradients, ctx.saved_tensors
        rows = _ranged(gradient.flatten(0, -2))
        product = _fp8_product(rows * weight_scale.t().to(rows.dtype), _by_columns(weight), None)
        return product.to(gradient.dtype).view(*gradient.shape[:-1], -1), None, None, None


def _by_columns(weight: Tensor) -> Tensor:
    """A copy of the weight that lies by columns, as tensor cores want the second matrix of 8 bits; transposed for the
    forward pass, the weight lies so itself. It has a byte a number and lives no longer than the product, where a kept
    one would double a model."""
    return weight.t().contiguous().t()


def _fp8_product(rows: Tensor, packed: Tensor, scale: Tensor | None) -> Tensor:
    """`rows`, rounded to float8, times a matrix of bytes of float8 that lies by columns, with a `scale` for each: in
    bfloat16, which is all that torch's product with scales of rows has had on GPUs.

    All scales are powers of two, so that bfloat16 takes them before or after its rounding to the same end: a product of
    the largest numbers of float8 is far from its limits. Sums of fewer bits (`use_fast_accum`) are what torchao's
    recipe `rowwise` takes: the kernels are fast only so.
    """
    first, first_scale = _to_fp8(rows.contiguous())  # gradients may lie by columns
    if in_rows := _scales_rows(rows.device):
        given = first_scale, first_scale.new_ones(1, packed.shape[1]) if scale is None else scale
    else:
        given = first_scale.new_ones(()), first_scale.new_ones(())
    product = torch._scaled_mm(first.view(FP8), packed.view(FP8), given[0], given[1], out_dtype=torch.bfloat16,
                               use_fast_accum=True)
    for each in () if in_rows else (first_scale, scale):
        if each is not None:
            product.mul_(each.bfloat16())
    return product


_PRODUCTS: Mapping[Quantization, type[torch.autograd.Function]] = {"int8": _Int8Product, "fp8-w8a8": _Fp8Product}
_HAS: Mapping[Quantization, Callable[[torch.device], bool]] = {"int8": _has_int8, "fp8-w8a8": _has_fp8}


def _to_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of -127 to 127, `[rows, columns]`, and the scale of each row, float32 `[rows, 1]`."""
    scale = (_largest(matrix) / INT8_MOST).clamp(min=2.0**-100)
    return (matrix / scale).round_().to(torch.int8), scale


def _to_fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes `[rows, columns]`, and powers of two `[rows, 1]` with which the largest number of a row is 224 to 448."""
    numbers = _ranged(matrix)
    scale = torch.exp2(torch.ceil(torch.log2(_largest(numbers).clamp(min=2.0**-100) / FP8_MOST)))
    return (numbers * (1 / scale).to(numbers.dtype)).to(FP8).view(torch.uint8), scale


def _ranged(matrix: Tensor) -> Tensor:
    """The matrix in a dtype with float32's range, in which its numbers and powers of two have exact products.

    On a CPU that is float32, with which torch computes faster.
    """
    return matrix.float() if matrix.dtype == torch.float16 or matrix.device.type == "cpu" else matrix


def _largest(matrix: Tensor) -> Tensor:
    """The largest magnitude of each row, float32 `[rows, 1]`, without a matrix of magnitudes."""
    return torch.maximum(matrix.amax(dim=1, keepdim=True), -matrix.amin(dim=1, keepdim=True)).float()


def _by_rows(pack: Callable[[Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype, weight: Tensor
             ) -> tuple[Tensor, Tensor]:
    """What `pack` makes of a weight, some rows at a time: `dtype` `[out, in]`, and a scale for each row, `[out, 1]`."""
    on = weight.device
    packed, scale = torch.empty(weight.shape, dtype=dtype, device=on), torch.empty(len(weight), 1, device=on)
    if weight.is_meta:
        return packed, scale
    rows = max(1, _part(on) // weight.shape[1])
    for first in range(0, len(weight), rows):
        where = slice(first, first + rows)
        packed[where], scale[where] = pack(weight[where])
    return packed, scale


def _to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers a byte, `[bytes, 1]`, and the largest magnitude of each block of 64 in the order of the rows.

    The weight goes there flat, and comes back so: on a CPU, bitsandbytes 0.50 mixes up the blocks of a matrix whose
    rows are no multiple of 64 long. The end of a weight that is no whole block is scaled in another way there.
    """
    from bitsandbytes.functional import quantize_4bit

    packed = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(-(-weight.numel() // BLOCK), device=weight.device)
    if weight.is_meta:
        return packed, scale
    size = _part(weight.device)
    parts: Any = weight.flatten().split(size)  # type: ignore[no-untyped-call]
    places = zip(packed.split(size // 2), scale.split(size // BLOCK), strict=True)  # type: ignore[no-untyped-call]
    for part, (bytes_of, scales_of) in zip(parts, places, strict=True):
        if part.device.type == "cpu" and part.numel() % BLOCK == 0:
            made, largest = _nf4_by_counting(part.float().view(-1, BLOCK))
        else:
            made, state = quantize_4bit(part.float(), blocksize=BLOCK, quant_type="nf4", compress_statistics=False)
            largest = state.absmax
        bytes_of.copy_(made)
        scales_of.copy_(largest)
    return packed, scale


def _nf4_by_counting(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """What bitsandbytes makes of `blocks`, `[blocks, 64]` in host memory: bytes, `[bytes, 1]`, and scales, `[blocks]`.

    It searches the bounds between the 16 values for each number. To compare all numbers with each bound takes an eighth
    of the time.
    """
    scale = blocks.abs().amax(dim=1)
    scaled = (blocks * (1.0 / scale.clamp(min=1e-38)).view(-1, 1)).flatten().numpy()
    values = _nf4_values(torch.device("cpu")).numpy()
    within, codes = np.empty(len(scaled), bool), np.full(len(scaled), len(values) - 1, np.uint8)
    for bound in (values[:-1] + values[1:]) / np.float32(2):
        np.less_equal(scaled, bound, out=within)
        codes -= within.view(np.uint8)
    pairs = codes.view("<u2")  # the first number of two in the lower byte
    return torch.from_numpy((pairs << 4 | pairs >> 8).astype(np.uint8)).view(-1, 1), scale


def _part(device: torch.device) -> int:
    """How many numbers are quantized at a time on this device."""
    return PART_OF_CPU if device.type == "cpu" else PART


_PACKED: Mapping[Quantization, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "fp8": partial(_by_rows, _to_fp8, torch.uint8), "nf4": _to_nf4, "int8": partial(_by_rows, _to_int8, torch.int8),
    "fp8-w8a8": partial(_by_rows, _to_fp8, torch.uint8)}


def _from_nf4(packed: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    kind: Any = QuantState
    state = kind(absmax=scale, shape=torch.Size([shape[0] * shape[1]]), code=_nf4_values(packed.device),
                 blocksize=BLOCK, quant_type="nf4", dtype=dtype)
    return dequantize_4bit(packed, state).reshape(shape)


@cache
def _nf4_values(device: torch.device) -> Tensor:
    from bitsandbytes.functional import get_4bit_type

    values: Any = get_4bit_type
    quantiles: Tensor = values("nf4", device=device)
    return quantiles
