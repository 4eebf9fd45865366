"""The Ray engine: what its driver takes for each task, and two of its workers beside the best of the local engine.

    python tests/benchmarks/bench_ray.py [--tasks 400] [--pictures 64] [--rounds 3] [--quick] [--write]

Needs the package ray; clusters of one node are started on this machine. The driver is measured with workers that answer
at once and tasks of 256 pictures: CPU time of the command's process, and time by the clock, both of the tasks alone.

Encoding is measured at the margin: with a VAE a quarter as wide as SD 1.5's, 512x512 pixels, each engine encodes some
pictures and then twice as many, each in a new cache, and what the second half takes more is compared. So the start of
processes and libraries does not count. Two workers with a thread each, against one process with two threads, and two
processes. Targets: 20 ms of the driver a task or less; 0.9 of the best of local or more.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_encode import ROOT, SIDE, seconds_to_encode, write_halves, write_model
from results import emit, parser_of, table

ROWS = 256  # of a task, for the driver
ENGINES = {"local, one process": ("--device", "cpu"), "local, two processes": ("--device", "cpu,cpu"),
           "ray, two workers": ("--device", "cpu", "--engine", "ray", "--workers", "2")}


def job_of(root: Path, tasks: int) -> Any:
    """A job of so many tasks, whose pictures are not there."""
    from prep.cache.records import Task
    from prep.cache.store import open_cache
    from prep.encode.execute import job_of
    from prep.encode.options import EncodeOptions
    from prep.encode.plan import plan
    from prep.encode.prepare import EncodeCall, prepare
    from prep.recipe.load import load_recipe

    recipe = load_recipe(root / "photos", choices={"model.path": str(root / "model"), "image.buckets": "list",
                                                   "image.sizes": (f"{SIDE}x{SIDE}",)})
    ready = prepare(EncodeCall(recipe=recipe, cache=root / "driver", output=root / "driver.json",
                               options=EncodeOptions(device="cpu", jobs=2)))
    cache = open_cache(root / "driver", create=True)
    job = job_of(ready, plan(ready.resolved, cache), cache)
    target = next(iter(job.targets.latents.values()))
    keys = [f"{number:064x}" for number in range(tasks * ROWS)]
    latents = {key: target._replace(key=key, name=f"directory/{key[-8:]}.jpg", digest=key) for key in keys}
    made = tuple(Task(key=keys[start], field="latent", rows=tuple(keys[start:start + ROWS]))
                 for start in range(0, len(keys), ROWS))
    return replace(job, tasks=made, targets=replace(job.targets, latents=latents))


def driver(root: Path, tasks: int) -> tuple[float, float]:
    """Milliseconds of the driver's process, and by the clock, for each task."""
    from idle_ray import IdleWorker

    from prep.encode.engines import ray as engine
    from prep.encode.engines.job import RayOptions
    from prep.workers.crew import Crew

    plain, spent = Crew.as_completed, []

    def as_completed(self: Any, units: Any) -> Any:
        for number, completed in enumerate(plain(self, units)):
            if number == 0:  # processes start before the clock does
                begun, cpu = time.perf_counter(), time.process_time()
            yield completed
        spent.extend([1000 * (time.process_time() - cpu) / tasks, 1000 * (time.perf_counter() - begun) / tasks])

    engine.RayWorker, Crew.as_completed = IdleWorker, as_completed  # type: ignore[misc,method-assign]
    outcome = engine.run(job_of(root, tasks), RayOptions(workers=2))
    assert outcome.encoded == {"latent": ROWS * tasks}, outcome
    return spent[0], spent[1]


def seconds(root: Path, source: str, options: tuple[str, ...], number: int) -> float:
    """Seconds of a whole run into a new cache."""
    return seconds_to_encode(root, source, "--cache", f"cache{number}", "-o", f"{number}.json", *options)


def margins(root: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds that the second half of the pictures takes, by engine; the engines take turns."""
    found: dict[str, list[float]] = {name: [] for name in ENGINES}
    number = 0
    for _ in range(rounds):
        for name, options in ENGINES.items():
            some, all_of_them = (seconds(root, source, options, number := number + 1) for source in ("half", "photos"))
            found[name].append(all_of_them - some)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", type=int, default=None, help="default: 400; 100 with --quick")
    parser.add_argument("--pictures", type=int, default=None, help="in all; default: 64; 16 with --quick")
    parser.add_argument("--rounds", type=int, default=None, help="default: 3; 1 with --quick")
    options = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0",  # workers find the modules of the tests by it
                   "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}:{os.environ.get('PYTHONPATH', '')}"}
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    tasks = options.tasks or (100 if options.quick else 400)
    pictures = options.pictures or (16 if options.quick else 64)
    rounds = options.rounds or (1 if options.quick else 3)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_halves(root, pictures)
        write_model(root / "model", "small")
        cpu, clock = driver(root, tasks)
        found = margins(root, rounds)
    middle = {name: statistics.median(times) for name, times in found.items()}
    best = min(time for name, time in middle.items() if name.startswith("local"))
    rows = [[name, f"{middle[name]:.1f}", f"{min(times):.1f}-{max(times):.1f}", f"{best / middle[name]:.2f}"]
            for name, times in found.items()]
    told = table(["engine", "s", "from-to", "of the best local"], rows)
    emit("The Ray engine", f"`bench_ray.py --tasks {tasks} --pictures {pictures} --rounds {rounds}`. The driver takes "
         f"{cpu:.1f} ms of CPU time and {clock:.1f} ms by the clock for each task of {ROWS} pictures.\n\n"
         f"{pictures // 2} pictures of {SIDE}x{SIDE}, at the margin:\n\n{told}", options.write)


if __name__ == "__main__":
    main()
