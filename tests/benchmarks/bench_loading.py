"""Memory and CPU time of loading models of real size, beside `from_pretrained` of their libraries in the same dtype.

    python tests/benchmarks/bench_loading.py [--model sd15] [--model sdxl] [--model zimage] [--model flux]
                                             [--part denoiser] [--part text] [--form none] [--form fp8] [--form nf4]
                                             [--form float32] [--form 8bit] [--form 4bit] [--file]
                                             [--rounds 3] [--limits]

Weights are random, in files as they are published: denoisers have 1.7 GB for sd15, 5.1 for sdxl, 12 for zimage, 24 for
flux, and of text encoders the largest 0.25, 1.4, 8 and 9.5. They lie in the directory for temporary files, which TMPDIR
names. Each round loads in a process of its own, the library's last: a denoiser for a LoRA in bfloat16, without its
adapters; text encoders in bfloat16, in float32 or quantized. Memory is the most that is not of files, above what
imports had taken; CPU seconds are of the loading alone, without imports. `from_pretrained` leaves weights in their
mapped file if they have its dtype: its CPU seconds are then those of copying them, too. With `--file` denoisers are
also loaded from one file in the names of their authors (not of flux). With `--limits` the run fails
unless memory is at most 1.15 times the weights in their form and 0.6 GB, of text encoders 1 GB and the largest tensor.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from results import emit, parser_of, table

FORMS = {"denoiser": ("none", "fp8", "nf4"), "text": ("none", "float32", "8bit", "4bit")}
USUAL = {"denoiser": FORMS["denoiser"], "text": ("none", "float32")}
SPARE = {"denoiser": 0.6e9, "text": 1e9}  # bytes: what the allocator keeps; of a denoiser also its largest tensor
ONE = """
import json, sys, threading, time
from pathlib import Path
import torch, diffusers, transformers
from prep.models.device.offload import weight_bytes
from prep.models.families.registry import FAMILIES
from prep.models.fingerprint import text_files
from prep.models.loading import quiet_libraries
from prep.models.hub import locate
from prep.models.configs import pipeline_index
from prep.models.pipeline import infer_family
from prep.models.text.pipeline import load_encoder
from train.config.load import parse
from train.models.denoiser import load

def anonymous():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10

folder, part, form = locate(sys.argv[1]), sys.argv[2], sys.argv[3]
family, most, ended, of_library = FAMILIES[infer_family(folder)], [0], threading.Event(), form.startswith("library")
files = {} if part == "denoiser" else text_files(folder).encoders
name = family.denoiser if part == "denoiser" else max(
    files, key=lambda each: sum(path.stat().st_size for path in files[each].weights))
kind = getattr(diffusers if part == "denoiser" else transformers, pipeline_index(folder)[name][1])
dtype = torch.float32 if form.endswith("float32") else torch.bfloat16
variant = "fp16" if list((folder / name).glob("*.fp16.*")) else None
quiet_libraries()
if form == "nf4":
    import bitsandbytes.functional

def watch():
    while not ended.wait(0.02):
        most[0] = max(most[0], anonymous())

def made():
    if of_library:
        model = kind.from_pretrained(folder / name, variant=variant, torch_dtype=dtype)
        if part == "text" and variant is None and dtype == torch.bfloat16:
            for value in model.parameters():
                value.data = value.data.clone()
        return model
    if part == "text":
        return load_encoder(folder, family, name, text_files(folder), dtype, form if "bit" in form else "none")
    settings = parse({"precision": "bf16", "quantization": form}, "benchmark")
    return load(folder, settings, family.predictions[0], torch.device("cpu"), adapt=False, family=family.name).model

begun, cpu = anonymous(), time.process_time()
thread = threading.Thread(target=watch)
thread.start()
model = made()
cpu = time.process_time() - cpu
ended.set()
thread.join()
largest = max(value.nbytes for value in model.parameters())
print(json.dumps([max(most[0], anonymous()) - begun, cpu, weight_bytes(model), largest]))
"""


def main() -> None:
    """Prints a line for each model, part and form."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", action="append", choices=("sd15", "sdxl", "zimage", "flux"))
    parser.add_argument("--part", action="append", choices=FORMS)
    parser.add_argument("--form", action="append", choices=sorted({form for each in FORMS.values() for form in each}))
    parser.add_argument("--file", action="store_true", help="load denoisers from a single file, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limits", action="store_true", help="fail where memory exceeds its limit")
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    import real_sizes

    for part in options.part or FORMS:
        rows, above = [], []
        forms = [form for form in options.form or USUAL[part] if form in FORMS[part]]
        beside = ["library", *(["library float32"] if "float32" in forms else [])]
        for name in options.model or ("sd15", "sdxl"):
            with tempfile.TemporaryDirectory() as root:
                folder = real_sizes.build(name, Path(root) / name, parts=[part])
                rounds = 1 if options.quick else options.rounds
                found = measured(str(folder), part, (*forms, *beside), rounds)
                if options.file and part == "denoiser":
                    file = real_sizes.in_one_file(folder, Path(root) / f"{name}.safetensors")
                    found |= {f"{form}, one file": each for form, each in measured(file, part, forms, rounds).items()}
            for form, (memory, seconds, size, largest) in found.items():
                rows.append((f"{name}, {form}", f"{size / 1e9:.2f}", f"{memory / 1e9:.2f}", f"{seconds:.1f}"))
                most = 1.15 * size + SPARE[part] + (largest if part == "text" else 0)
                if form.partition(",")[0] in forms and memory > most:
                    above.append(rows[-1][0])
        emit("Loading" if part == "denoiser" else "Loading text encoders",
             table(("model, form", "weights, GB", "peak, GB", "CPU s"), rows), options.write)
        if options.limits and above:
            sys.exit(f"above the limits: {'; '.join(above)}")


Figures = tuple[float, float, float, float]  # bytes at the peak, CPU seconds, bytes of weights and of the largest


def measured(folder: str, part: str, forms: tuple[str, ...], rounds: int) -> dict[str, Figures]:
    """Medians by form."""
    runs: dict[str, list[Figures]] = {form: [] for form in forms}
    for _ in range(rounds):
        for form in forms:
            made = subprocess.run([sys.executable, "-c", ONE, folder, part, form], check=True, text=True,
                                  stdout=subprocess.PIPE)
            runs[form].append(json.loads(made.stdout.splitlines()[-1]))
    return {form: tuple(map(statistics.median, zip(*each, strict=True))) for form, each in runs.items()}  # type: ignore[misc]


if __name__ == "__main__":
    main()
