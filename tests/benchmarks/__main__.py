"""`make bench`: the benchmarks, one after another, each in a process of its own. Nothing here passes or fails.

    python -m tests.benchmarks [--only NAME] [--quick] [--write]

Other options go to the benchmarks that `--only` names: `--only bench_read --cold 0`. Those of `BY_NAME` run if it names
them.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.results import machine

HERE = Path(__file__).parent
BY_NAME = {"bench_gpu", "bench_real"}  # need a GPU, or an hour


def main() -> None:
    names = [path.stem for path in sorted(HERE.glob("bench_*.py")) if has_main(path)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    parser.add_argument("--write", action="store_true", help="put the figures into RESULTS.md")
    parser.add_argument("--quick", action="store_true", help="less data and fewer rounds: a look, not a result")
    options, more = parser.parse_known_args()
    if more and not options.only:
        parser.error(f"options {' '.join(more)} are for one benchmark, expected --only NAME with them")
    print(machine())
    failed, environment = [], {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    for name in options.only or [name for name in names if name not in BY_NAME]:
        path = HERE / f"{name}.py"
        print(f"\n== {name}: {doc(path)}", flush=True)
        given = [flag for flag in ("--write", "--quick") if getattr(options, flag[2:]) and takes(path, flag)]
        if subprocess.run([sys.executable, path, *given, *more], env=environment, check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def has_main(path: Path) -> bool:
    """Whether a file is a benchmark to run, and not a part of one."""
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(path.read_text()).body)


def takes(path: Path, flag: str) -> bool:
    """Whether a benchmark has this option, its own or that of `results.parser_of`."""
    return flag in path.read_text() or "parser_of(" in path.read_text()


def doc(path: Path) -> str:
    """The first line of a benchmark's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n", 1)[0]


if __name__ == "__main__":
    main()
