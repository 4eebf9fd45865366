"""What `prep encode --dry-run` says of the VAE's memory, beside what a batch takes: VAEs of published size on a CPU.

    python tests/benchmarks/bench_forecast_encode.py [--model sd15] [--model sdxl] [--compute float32] [--batch 1]

VAEs of published size with random weights encode random pictures of 512x512 pixels (sd15) or 1024x1024 (sdxl).
`forecast` is what is counted without weights, and what the process took before the VAE was loaded; `resident` is the
most that it took. SDXL's takes 3 GB for one picture in float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from results import emit, parser_of, table

SIDES = {"sd15": 512, "sdxl": 1024}
ONE = """
import gc, json, sys, time
from pathlib import Path
import numpy as np
from prep.models.device.allocator import settled_heap
from prep.models.device.peaks import vae_peak
from prep.models.vae import VaeEncoder
from prep.runtime import ask_for_huge_pages, peak_resident, resident

ask_for_huge_pages()

model, side, batch, compute = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
begun = time.process_time()
told = vae_peak(model, compute, (side, side)).of(batch)
seconds = time.process_time() - begun
gc.collect()
before = resident()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
encoder = VaeEncoder(model, device="cpu", compute=compute, dtype="bfloat16")
with settled_heap(encoder.batches.device):
    encoder.encode(np.random.default_rng(0).integers(0, 255, (batch, side, side, 3), dtype=np.uint8))
print(json.dumps([told + before, peak_resident(), before, seconds]))
"""


def main() -> None:
    """Prints a line for each model."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", action="append", choices=SIDES)
    parser.add_argument("--compute", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    import real_sizes

    rows = []
    for name in options.model or SIDES:
        with tempfile.TemporaryDirectory() as root:
            folder = real_sizes.build(name, Path(root) / name, parts=["vae"])
            made = subprocess.run([sys.executable, "-c", ONE, str(folder), str(SIDES[name]), str(options.batch),
                                   options.compute], check=True, text=True, stdout=subprocess.PIPE)
        told, found, before, seconds = json.loads(made.stdout.splitlines()[-1])
        rows.append((f"{name}, {SIDES[name]} px, batch {options.batch}, {options.compute}", f"{told / 2**30:.2f}",
                     f"{found / 2**30:.2f}", f"{told / found:.3f}", f"{before / 2**30:.2f}", f"{seconds:.1f}"))
    emit(f"Encode forecast: {options.compute}, batch {options.batch}", table(
        ("", "forecast GiB", "resident GiB", "forecast / resident", "before GiB", "CPU seconds"), rows), options.write)


if __name__ == "__main__":
    main()
