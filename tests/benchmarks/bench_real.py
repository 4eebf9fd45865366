"""Whole runs of models of real size: memory, CPU seconds and forecasts of each command, beside diffusers' own code.

    python tests/benchmarks/bench_real.py [--model sd15] [--model sdxl] [--model flux] [--model zimage]
                                          [--side 512] [--alone] [--limits]

Random weights in files as they are published, in the directory for temporary files: 2 GB for sd15, 7 for sdxl, 34 for
flux, 20 for zimage. Three drawn pictures go through `prep encode`, `train check`, `train run` of two LoRA steps with
checkpoints, `train sample` of two inference steps and `train merge`, each as a user calls it, on the CPU. The run is
killed after its first checkpoint, and resumed; sd15 is trained again without that, and last checkpoint and result have
to be equal, bit by bit. FLUX.1 and Z-Image have fewer pixels than 1024x1024, where a step takes many minutes on a CPU.

Beside them, each in a process of its own, in the same dtype: a pipeline without denoiser that encodes the same pictures
and captions, a loop of two steps with peft's adapter on the rows of the same cache, a pipeline with the LoRA that makes
a picture in two steps, and one that fuses it. --alone leaves them out.

resident is the most that the process of a command took, with mapped files, which the system can take back: weights that
are being read are among them. anonymous is the same without them, with that of its worker processes. forecast is what
`prep encode --dry-run` says, with what it takes itself, and what `train check` says. With --limits the run fails if
anonymous memory is more than 1.15 times the forecast (in training: or than loading needs, as in bench_loading; without
a forecast: than diffusers takes), if a checkpoint has another size than `train run` says, or if the resumed run
differs.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench_encode import write_pictures
from processes import Taken, measured
from real_peers import PROMPT
from results import emit, parser_of, table

PEERS = Path(__file__).with_name("real_peers.py")
ABOVE = 1.15  # of a forecast
SPARE = 0.6e9  # bytes: what the allocator keeps while weights are read
UNLIKE = 0.02  # of the size of a checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """How a model is trained."""

    side: int  # pixels
    settings: Mapping[str, str] = field(default_factory=dict)  # of `train`
    twice: bool = False  # whether it is trained again without being interrupted
    peers: Sequence[str] = ("encode", "run", "sample", "merge")  # what diffusers' code has the memory for


CASES: Mapping[str, Case] = {
    "sd15": Case(side=512, twice=True),
    "sdxl": Case(side=1024, settings={"gradient_checkpointing": "true"}),
    "flux": Case(side=256, settings={"quantization": "nf4"}, peers=("encode",)),  # theirs quantizes on a GPU alone
    "zimage": Case(side=256, settings={"gradient_checkpointing": "true"}, peers=("encode", "run")),
}


def main() -> None:
    """Prints a section for each model."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", action="append", choices=CASES)
    parser.add_argument("--side", type=int, help="pixels of the pictures' sides")
    parser.add_argument("--alone", action="store_true", help="leave diffusers' own code out")
    parser.add_argument("--limits", action="store_true", help="fail where a figure exceeds its limit")
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    import real_sizes

    for name in options.model or ("sd15", "sdxl"):
        case = CASES[name]
        with tempfile.TemporaryDirectory() as scratch:
            whole = Whole(root=Path(scratch), case=case, side=options.side or case.side)
            real_sizes.build(name, whole.root / "model", parts=("denoiser", "vae", "text"))
            write_pictures(whole.root / "photos", 3)
            whole.run(() if options.alone or options.quick else case.peers)
        emit(f"Whole runs at real size: {name}", whole.section(), options.write)
        if options.limits and whole.faults:
            sys.exit(f"{name}: {'; '.join(whole.faults)}")


@dataclass(kw_only=True)
class Whole:
    """A model's way from pictures to a merged model, in the directory `root`."""

    root: Path
    case: Case
    side: int
    taken: dict[str, Taken] = field(default_factory=dict)
    forecasts: dict[str, int] = field(default_factory=dict)  # bytes
    parts: dict[str, int] = field(default_factory=dict)  # bytes of a step, by forecast
    faults: list[str] = field(default_factory=list)
    checkpoint: tuple[int, int] = (0, 0)  # bytes as `train run` says, and as they are

    def run(self, peers: Sequence[str]) -> None:
        """Runs everything, and notes what it took and what is wrong."""
        self.encode()
        self.train()
        for peer in peers:
            words = [str(PEERS), peer, str(self.side), *map("=".join, self.case.settings.items())]
            self.taken[f"diffusers, {peer}"] = measured(words, self.root)
        self.limit()

    def encode(self) -> None:
        """Encodes the pictures."""
        words = ["prep", "encode", "photos", "--model", "model", "--cache", "cache", "-o", "manifest.json",
                 "--resolution", str(self.side), "--upscale", "allow", "--batch-size", "1", "--device", "cpu"]
        dry = self.command("prep encode --dry-run", [*words, "--dry-run", "--json"])
        memory = json.loads(dry.out)["estimate"]["memory"]
        self.forecasts["prep encode"] = max(memory["text"], memory["latent"]) + dry.resident
        self.command("prep encode", words)

    def train(self) -> None:
        """Trains a LoRA in two commands, the first of which is killed, and uses it."""
        settings = [word for pair in self.case.settings.items() for word in ("--set", "=".join(pair))]
        words = ["manifest.json", "--steps", "2", "--batch-size", "1", "--precision", "bf16", "--device", "cpu",
                 "--set", "checkpoint.every=1", "--set", "sample.every=0", *settings]
        check = self.command("train check", ["train", "check", *words, "--json"])
        self.parts = json.loads(check.out)["memory"]["parts"]
        self.forecasts |= dict.fromkeys(("train run, killed", "train run --resume", "train run"),
                                        sum(self.parts.values()))
        first = self.root / "run" / "checkpoints" / "step-000001" / "state.json"
        killed = self.command("train run, killed", ["train", "run", *words, "-o", "run"], until=first.exists)
        self.command("train run --resume", ["train", "run", "--resume", "-o", "run", "--device", "cpu"])
        self.compare_size(killed.told)
        if self.case.twice:
            self.command("train run", ["train", "run", *words, "-o", "whole"])
            self.compare_runs()
        self.command("train sample", ["train", "sample", "run", "--prompt", PROMPT, "--steps", "2", "-o", "grid.png",
                                      "--device", "cpu"])
        self.command("train merge", ["train", "merge", "run", "-o", "merged"])

    def command(self, name: str, words: Sequence[str], until: Callable[[], bool] = lambda: False) -> Taken:
        """One command, called `name` in the table; it is killed when `until` becomes true."""
        self.taken[name] = measured(["-m", *words], self.root, until=until)
        return self.taken[name]

    def compare_size(self, told: str) -> None:
        """Notes how large a checkpoint is, and as what `train run` announced it."""
        number, unit = re.findall(r"a checkpoint takes about ([\d.]+) (\w+)", told)[0]
        said = int(float(number) * (1 << {"KiB": 10, "MiB": 20, "GiB": 30}[unit]))
        folder = self.root / "run" / "checkpoints" / "step-000002"
        self.checkpoint = said, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if abs(said / self.checkpoint[1] - 1) > UNLIKE:
            self.faults.append(f"a checkpoint has {self.checkpoint[1]} bytes, {said} were announced")

    def compare_runs(self) -> None:
        """Notes tensors in which the resumed run differs from the one that was never interrupted."""
        one, other = (weights_below(self.root / name) for name in ("whole", "run"))
        if not one or one.keys() != other.keys():
            self.faults.append(f"the resumed run has {sorted(other)}, the other {sorted(one)}")
        self.faults += [f"{name} differs after a resumption" for name in one if one[name] != other.get(name)]

    def limit(self) -> None:
        """Notes memory above its limit, and results that are missing."""
        loading = self.parts["libraries"] + ABOVE * self.parts["weights"] + SPARE
        for name, taken in self.taken.items():
            beside = self.taken.get(name.replace("train ", "diffusers, "))
            if name in self.forecasts:
                most = max(ABOVE * self.forecasts[name], loading if name.startswith("train") else 0)
            elif name in ("train sample", "train merge") and beside:
                most = ABOVE * beside.anonymous
            else:
                continue
            if taken.anonymous > most:
                self.faults.append(f"{name} took {taken.anonymous / 1e9:.2f} GB, expected at most {most / 1e9:.2f}")
        for result in ("manifest.json", "run/lora.safetensors", "grid.png", "merged/model_index.json"):
            if not (self.root / result).exists():
                self.faults.append(f"{result} is missing")

    def section(self) -> str:
        """The figures in words and a table."""
        rows = []
        for name, taken in self.taken.items():
            said = self.forecasts.get(name)
            rows.append((name, f"{taken.resident / 1e9:.2f}", f"{taken.anonymous / 1e9:.2f}",
                         "-" if said is None else f"{said / 1e9:.2f}",
                         "-" if said is None else f"{said / taken.anonymous:.2f}", f"{taken.cpu:.0f}"))
        settings = "".join(f", {key} {value}" for key, value in self.case.settings.items())
        said, found = self.checkpoint
        return (f"Three pictures, {self.side} px, bf16, batch 1{settings}; a checkpoint has {found / 1e6:.2f} MB, "
                f"{said / 1e6:.2f} were announced. {'; '.join(self.faults)}\n\n" + table(
                    ("command", "resident GB", "anonymous GB", "forecast GB", "forecast / anonymous", "CPU s"), rows))


def weights_below(run: Path) -> dict[str, bytes]:
    """Of a run's result and last checkpoint, the bytes of the tensors of each file of weights."""
    found = {}
    for path in (run / "lora.safetensors", *sorted((run / "checkpoints" / "step-000002").rglob("*.safetensors"))):
        data = path.read_bytes()
        found[str(path.relative_to(run))] = data[8 + int.from_bytes(data[:8], "little"):]  # without names and metadata
    return found


if __name__ == "__main__":
    main()
