"""Memory and CPU time of loading denoisers of real size, beside diffusers' `from_pretrained` in the same dtype.

    python tests/benchmarks/bench_loading.py [--model sd15] [--model sdxl] [--model zimage] [--model flux]
                                             [--form none] [--form fp8] [--form nf4] [--rounds 3] [--limits]

Weights are random, in files as they are published: 1.7 GB for sd15, 5.1 for sdxl, 12 for zimage, 24 for flux, in the
directory for temporary files, which TMPDIR names. Each round loads in a process of its own, diffusers' last,
for a LoRA in bfloat16, without its adapters. Memory is the most that is not of files, above what imports had taken; CPU
seconds are of the loading alone, without imports. With `--limits` the run fails unless memory is at most 1.15 times the
weights in their form and 0.6 GB.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from results import emit, parser_of, table

FORMS = ("none", "fp8", "nf4")
SPARE = 0.6e9  # bytes: the largest tensor, and what the allocator keeps
ONE = """
import json, sys, threading, time
from pathlib import Path
import torch, diffusers
from prep.models.families.registry import FAMILIES
from prep.models.pipeline import infer_family, pipeline_index
from train.config.load import parse
from train.models.denoiser import load

def anonymous():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10

folder, form = Path(sys.argv[1]), sys.argv[2]
family, most, ended = FAMILIES[infer_family(folder)], [0], threading.Event()

def watch():
    while not ended.wait(0.02):
        most[0] = max(most[0], anonymous())

settings = None if form == "diffusers" else parse({"precision": "bf16", "quantization": form}, "benchmark")
kind = getattr(diffusers, pipeline_index(folder)[family.denoiser][1])
part = folder / family.denoiser
begun, cpu = anonymous(), time.process_time()
thread = threading.Thread(target=watch)
thread.start()
if settings is None:
    variant = "fp16" if list(part.glob("*.fp16.*")) else None
    model = kind.from_pretrained(part, variant=variant, torch_dtype=torch.bfloat16)
else:
    model = load(folder, settings, family.predictions[0], torch.device("cpu"), adapt=False, family=family.name).model
cpu = time.process_time() - cpu
ended.set()
thread.join()
size = sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
print(json.dumps([max(most[0], anonymous()) - begun, cpu, size]))
"""


def main() -> None:
    """Prints a line for each model and form."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", action="append", choices=("sd15", "sdxl", "zimage", "flux"))
    parser.add_argument("--form", action="append", choices=FORMS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limits", action="store_true", help="fail where memory exceeds its limit")
    options = parser.parse_args()
    forms = options.form or FORMS
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    import real_sizes

    rows, above = [], []
    for name in options.model or ("sd15", "sdxl"):
        with tempfile.TemporaryDirectory() as root:
            folder = real_sizes.build(name, Path(root) / name)
            found = measured(folder, (*forms, "diffusers"), 1 if options.quick else options.rounds)
        for form, (memory, seconds, size) in found.items():
            rows.append((f"{name}, {form}", f"{size / 1e9:.2f}", f"{memory / 1e9:.2f}", f"{seconds:.1f}"))
            if form != "diffusers" and memory > 1.15 * size + SPARE:
                above.append(rows[-1][0])
    emit("Loading", table(("model, form", "weights, GB", "peak, GB", "CPU s"), rows), options.write)
    if options.limits and above:
        sys.exit(f"above the limits: {'; '.join(above)}")


def measured(folder: Path, forms: tuple[str, ...], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Medians of peak bytes and CPU seconds by form, and the bytes of the weights."""
    runs: dict[str, list[tuple[float, float, float]]] = {form: [] for form in forms}
    for _ in range(rounds):
        for form in forms:
            made = subprocess.run([sys.executable, "-c", ONE, str(folder), form], check=True, text=True,
                                  stdout=subprocess.PIPE)
            runs[form].append(json.loads(made.stdout.splitlines()[-1]))
    return {form: tuple(map(statistics.median, zip(*each, strict=True))) for form, each in runs.items()}  # type: ignore[misc]


if __name__ == "__main__":
    main()
