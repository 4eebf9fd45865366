"""A quantized layer's product, forward and backward: CPU seconds beside bfloat16, and how far off it is.

    python tests/benchmarks/bench_products.py [--rounds 7] [--quick] [--write]

On one thread, in turn, the least of the rounds. Weights, inputs and gradients are normally distributed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.results import emit, parser_of, table
from train.models.quantized import QuantizedLinear

# Rows, in and out: SDXL's attention and feed-forward at 1024 pixels' deepest size, FLUX.1's blocks.
SHAPES = ((1024, 1280, 1280), (1024, 1280, 5120), (512, 3072, 3072))
FORMS = ("fp8", "nf4", "int8")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for shape in SHAPES[:1 if options.quick else None]
            for row in measure(*shape, 2 if options.quick else options.rounds)]
    emit("Products of quantized layers", table(
        ["rows x in x out, form", "CPU s", "to bf16", "off forward", "off backward"], rows), options.write)


def measure(rows: int, columns: int, outputs: int, rounds: int) -> list[list[str]]:
    """A line of the table for each form; errors are relative to products in float32."""
    torch.manual_seed(0)
    exact = nn.Linear(columns, outputs, bias=False).requires_grad_(False)
    plain = nn.Linear(columns, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    plain.load_state_dict(exact.state_dict())
    layers: dict[str, nn.Module] = {"bf16": plain, **{form: QuantizedLinear(exact, form) for form in FORMS}}
    given, gradient = torch.randn(rows, columns), torch.randn(rows, outputs)
    wanted = passed(exact, given, gradient)
    least = dict.fromkeys(layers, float("inf"))
    off = {}
    for _ in range(rounds):
        for form, layer in layers.items():
            begun = time.process_time()
            found = passed(layer, given.bfloat16(), gradient.bfloat16())
            least[form] = min(least[form], time.process_time() - begun)
            off[form] = [float((mine.float() - value).norm() / value.norm())
                         for mine, value in zip(found, wanted, strict=True)]
    return [[f"{rows} x {columns} x {outputs}, {form}", f"{least[form]:.4f}", f"{least[form] / least['bf16']:.2f}",
             *(f"{value:.4f}" for value in off[form])] for form in layers]


def passed(layer: nn.Module, given: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The product, and the gradient of its input."""
    given = given.requires_grad_()
    product = layer(given)
    return product.detach(), torch.autograd.grad(product, given, gradient)[0]


if __name__ == "__main__":
    main()
