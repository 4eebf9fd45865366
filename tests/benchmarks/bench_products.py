"""A quantized layer's product, forward and backward: its time beside bfloat16, and how far off it is.

    python tests/benchmarks/bench_products.py [--device cuda] [--rounds 7] [--quick] [--write]

On a CPU seconds of one thread; on a GPU its time for a pass of ten that are queued, as a run queues them. In turn, the
least of the rounds. Weights, inputs and gradients are normally distributed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.results import emit, parser_of, table
from train.models import quantized
from train.models.quantized import QuantizedLinear

# Rows, in and out. On a CPU SDXL's attention and feed-forward at 1024 pixels' deepest size, and FLUX.1's; on a GPU
# FLUX.1's at 1024 pixels, 4,096 tokens of the picture and 512 of the text.
SHAPES = {"cpu": ((1024, 1280, 1280), (1024, 1280, 5120), (512, 3072, 3072)),
          "cuda": ((4608, 3072, 3072), (4608, 3072, 12288), (4608, 12288, 3072))}
FORMS = ("fp8", *(["nf4"] if find_spec("bitsandbytes") else []), "int8", "fp8-w8a8")
AFTER = "fp8-w8a8, rows scaled after"  # the way of GPUs other than Hopper, there beside its own


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    rows = [row for shape in SHAPES[device.type][:1 if options.quick else None]
            for row in measure(device, *shape, 2 if options.quick else options.rounds)]
    name = f" on {torch.cuda.get_device_name(device)}, torch {torch.__version__}" if device.type == "cuda" else ""
    emit(f"Products of quantized layers{name}", table(
        ["rows x in x out, form", "forward ms", "backward ms", "to bf16", "off forward", "off backward"], rows),
         options.write)


def measure(device: torch.device, rows: int, columns: int, outputs: int, rounds: int) -> list[list[str]]:
    """A line of the table for each form; errors are relative to products in float32."""
    torch.manual_seed(0)
    exact = nn.Linear(columns, outputs, bias=False, device=device).requires_grad_(False)
    plain = nn.Linear(columns, outputs, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
    plain.load_state_dict(exact.state_dict())
    layers: dict[str, nn.Module] = {"bf16": plain, **{form: QuantizedLinear(exact, form) for form in FORMS}}
    scales_rows = quantized._scales_rows(device)
    if device.type == "cuda" and scales_rows:
        layers[AFTER] = layers["fp8-w8a8"]
    given, gradient = torch.randn(rows, columns, device=device), torch.randn(rows, outputs, device=device)
    wanted = passed(exact, given, gradient)[:2]
    least, off = {form: [float("inf")] * 2 for form in layers}, {}
    for _ in range(rounds):
        for form, layer in layers.items():
            quantized._scales_rows = lambda device, now=scales_rows and form != AFTER: now
            *found, forward, backward = passed(layer, given.bfloat16(), gradient.bfloat16())
            least[form] = [min(least[form][0], forward), min(least[form][1], backward)]
            off[form] = [float((mine.float() - value).norm() / value.norm())
                         for mine, value in zip(found, wanted, strict=True)]
    return [[f"{rows} x {columns} x {outputs}, {form}", *(f"{1000 * each:.3f}" for each in least[form]),
             f"{sum(least[form]) / sum(least['bf16']):.2f}", *(f"{value:.4f}" for value in off[form])]
            for form in layers]


def passed(layer: nn.Module, given: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """The product, the gradient of its input, and the seconds that each took."""
    given.requires_grad_()
    product, forward = timed(lambda: layer(given))
    back, backward = timed(lambda: torch.autograd.grad(product, given, gradient, retain_graph=True)[0])
    return product.detach(), back, forward, backward


def timed(call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What it returns, and its seconds: of the CPU, or of the GPU that the tensor is on."""
    begun = time.process_time()
    found = call()
    if not found.is_cuda:
        return found, time.process_time() - begun
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(10):
        found = call()
    last.record()
    last.synchronize()
    return found, first.elapsed_time(last) / 10_000


if __name__ == "__main__":
    main()
