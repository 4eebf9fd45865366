"""Forks real `prep` processes from one that has imported everything: 0.2 s each instead of 4.

    python launcher.py [train]      then a line of JSON in, a line of JSON out

With `train` it has imported what that program needs, too.

The first line is the commands of a run in this very process, so that what is imported late is there as well, also for
a run of a user who may not read it. Each further request is a list of runs, all started at once, each like
`{"argv": [[...], ...], "shim": {...}}`: commands run one after another in one process, under the faults that `shim.py`
makes. `kill_after` kills a run with SIGKILL after so many seconds; `beside` repeats its commands until every run else
has ended; `user` is a number whose rights it has; `program` is `prep` or `train`; `environment` has further variables,
and `directory` is where it runs.
The answer has for each run its exit codes, the signal that ended it, and what it wrote. Nothing here has threads when
it forks, Arrow's allocator apart.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

for name, value in {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                    "ARROW_DEFAULT_MEMORY_POOL": "system", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
                    "CUDA_VISIBLE_DEVICES": ""}.items():  # fmt: skip
    os.environ[name] = value

import shim  # noqa: E402  # beside this file

os.fsync = lambda descriptor: os.fstat(descriptor) and None  # as in tests/conftest.py; what power takes is modelled


def load() -> None:
    """Imports what `prep encode` and its friends import late."""
    import torch

    torch.set_num_threads(1)
    from prep.models.loading import quiet_libraries

    quiet_libraries()
    import diffusers
    import transformers

    import prep.cli.main
    import prep.encode.engines.local
    import prep.encode.run
    import prep.models.text.encoder
    import prep.models.vae

    lazy = (diffusers.StableDiffusionPipeline, transformers.CLIPTokenizer, transformers.CLIPTextModel, prep.models.vae)
    assert all(lazy)
    if "train" in sys.argv:
        import train.check
        import train.cli.main
        import train.loop
        import train.runs.watch

        assert all((train.check, train.cli.main, train.loop, train.runs.watch))
    check_threads()


def thread_names() -> list[str]:
    """The names of this process's threads."""
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends at this moment
            names.append(task.read_text().strip())
    return names


def check_threads() -> None:
    """A fork has one thread, and whatever the others held it holds for ever."""
    patience = time.monotonic() + 5  # threads that were joined take a moment to go
    while len(names := thread_names()) > 2:
        assert time.monotonic() < patience, f"threads {names} where one is wanted: a fork of them is no copy"
        time.sleep(0.01)


def command(argv: list[str], program: str = "prep") -> int:
    """Runs one command in this process; its exit code."""
    from prep.cli.console import run

    app = import_module(f"{program}.cli.main").app
    try:
        run(app, program, argv)
    except SystemExit as ending:
        return int(ending.code or 0)


def child(run: dict[str, Any], folder: Path) -> None:
    """A run's process: never returns."""
    code = 99
    try:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_APPEND), descriptor)
        if run.get("user"):
            os.setgroups([])
            os.setgid(run["user"])
            os.setuid(run["user"])
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")  # as torchrun has it
        os.environ.update(run.get("environment", {}))
        os.chdir(run.get("directory", "."))
        faults = shim.install(run.get("shim", {}))
        ended = False
        while not ended:
            with (folder / "codes").open("a") as codes:
                for argv in run["argv"]:
                    code = command(argv, run.get("program", "prep"))
                    print(code, file=codes, flush=True)
            ended = not run.get("beside") or (folder / "stop").exists()
        faults.end()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(run: dict[str, Any], folder: Path) -> int:
    folder.mkdir()
    folder.chmod(0o777)
    for name in ("out", "err"):  # also of one that dies at once
        (folder / name).touch()
    pid = os.fork()
    if pid == 0:
        child(run, folder)
    return pid


def wait(pid: int, until: float | None) -> int:
    """The process's status; killed when it lives at `until`."""
    while until is not None and time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.001)
    if until is not None:
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def answer(runs: list[dict[str, Any]], scratch: Path) -> list[dict[str, Any]]:
    """Starts all runs, waits for all, and says how each ended."""
    begun = time.monotonic()
    started = [(run, scratch / str(number), start(run, scratch / str(number))) for number, run in enumerate(runs)]
    statuses: dict[int, int] = {}
    for run, _, pid in sorted(started, key=lambda one: one[0].get("kill_after", 1e9)):
        if not run.get("beside"):
            statuses[pid] = wait(pid, begun + run["kill_after"] if "kill_after" in run else None)
    for run, folder, pid in started:
        if run.get("beside"):
            (folder / "stop").touch()
            statuses[pid] = wait(pid, None)
    return [ending(folder, statuses[pid]) for _, folder, pid in started]


def ending(folder: Path, status: int) -> dict[str, Any]:
    codes = (folder / "codes").read_text().split() if (folder / "codes").exists() else []
    return {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "codes": [int(code) for code in codes],
            "out": (folder / "out").read_text(), "err": (folder / "err").read_text()}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints while it is imported is no answer
    load()
    codes = [command(argv) for argv in json.loads(sys.stdin.readline())]
    check_threads()
    gc.collect()
    gc.freeze()  # else a child's collector writes to, and so copies, every page of ours
    print(json.dumps(codes), file=replies, flush=True)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as scratch:
            Path(scratch).chmod(0o777)
            print(json.dumps(answer(json.loads(line), Path(scratch))), file=replies, flush=True)


if __name__ == "__main__":
    main()
