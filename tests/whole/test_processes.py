"""Processes that we start find no modules in the current directory, which may be that of a stranger's dataset."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import subprocess
import sys

import pytest
from sources_parsed import PATHS, ROOT, nodes_of, tree_of
from traps import trap

from prep.runtime import safe_path
from prep.scan.worker import SERVICE
from prep.workers.pool import WorkerPool

SUBPROCESS = re.compile(r"subprocess\.(Popen|[a-z]\w*)")
# Nobody calls these: whatever they start has the module path of a script, or that of this process.
NEVER = re.compile(r"os\.(exec|spawn|posix_spawn|fork|popen|system|startfile)\w*|pty\.\w+|runpy\.\w+|"
                   r"(.*\.)?(ProcessPoolExecutor|DataLoader|create_subprocess_\w+|start_processes)")
FORKS = {("prep.jobs.keeper", "os.fork")}  # of itself, before it does anything
WORDS = re.compile(rf"\b(subprocess|multiprocessing|from os import|{NEVER.pattern})")  # of modules that are parsed
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}
TEXTS = {module: path.read_text() for module, path in FILES.items()}
STARTING = sorted(module for module, text in TEXTS.items() if WORDS.search(text))
# Where a library starts processes, and what starts them there inside of `safe_path`.
LIBRARIES = {"multiprocessing": {"prep.encode.engines.devices": {"SharedClaims"}, "prep.encode.engines.claims": set(),
                                 "prep.workers.processes": {"_Process"}}}
INTERPRETER = {"prep.runtime", "prep.workers.pool", "prep.doctor.libraries"}  # who names it: the last two start nothing


def imports(module: str, library: str) -> bool:
    """Whether a module imports a library, or a part of it."""
    for node in nodes_of(tree_of(FILES[module])):
        names = ([node.module or ""] if isinstance(node, ast.ImportFrom)
                 else [alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        if any(library in (name, name.partition(".")[0]) for name in names):
            return True
    return False


def calls(module: str) -> list[tuple[str, ast.Call]]:
    """Calls of a module, each with what it calls: by its full name, if that was imported from a module."""
    tree = tree_of(FILES[module])
    names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in nodes_of(tree)
             if isinstance(node, ast.ImportFrom) for alias in node.names}
    names |= {alias.asname: alias.name for node in nodes_of(tree) if isinstance(node, ast.Import)
              for alias in node.names if alias.asname}
    found = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Call):
            head, dot, rest = ast.unparse(node.func).partition(".")
            found.append((f"{names.get(head, head)}{dot}{rest}", node))
    return found


def test_every_place_that_starts_a_process_gives_it_a_safe_path():
    started = 0
    for module in STARTING:
        for name, call in calls(module):
            assert not NEVER.fullmatch(name) or (module, name) in FORKS, f"{module} calls {name}"
            if SUBPROCESS.fullmatch(name):
                first = ast.unparse(call.args[0]) if call.args else ""
                assert first.startswith("python("), f"{module}: {name} starts {first}, expected python(…)"
                started += 1
    assert started == 4, "the pool's workers, the process that encodes prompts beside a run, keepers of jobs and jobs"
    named = {module for module, text in TEXTS.items() if "sys.executable" in text}
    assert named == INTERPRETER


def test_libraries_that_start_processes_do_so_inside_of_a_safe_path():
    for library, places in LIBRARIES.items():
        assert {module for module in STARTING if imports(module, library)} == set(places)
        for module, starting in places.items():
            inside = {ast.unparse(call.func) for node in nodes_of(tree_of(FILES[module])) if isinstance(node, ast.With)
                      if any(ast.unparse(item) == "safe_path()" for item in node.items)
                      for call in nodes_of(node) if isinstance(call, ast.Call)}
            assert starting <= inside


@pytest.fixture
def caught(tmp_path, monkeypatch):
    """The file that a module of the current directory writes when something imports it."""
    monkeypatch.chdir(tmp_path)
    return trap(tmp_path)


def test_workers(caught):
    with WorkerPool(SERVICE) as pool:
        pool._take().end()
        assert pool.started == 1
    assert not caught.exists()


def test_processes_of_multiprocessing(caught):
    context = multiprocessing.get_context("spawn")
    with safe_path():
        process = context.Process(target=os.getcwd)
        process.start()
    process.join()
    assert process.exitcode == 0 and not caught.exists()


@pytest.mark.parametrize("name", ["prep", "train"])
def test_m_leaves_the_current_directory_out(caught, name):
    """But for what Python itself imports before anything of ours runs."""
    for before in ("prep", "train", *sys.stdlib_module_names):
        (caught.parent / f"{before}.py").unlink()
    done = subprocess.run([sys.executable, "-m", name, "--version"], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert not caught.exists()


def test_what_a_command_starts_has_a_safe_path(caught, monkeypatch):
    """Whatever library starts it: each process that a command starts inherits that from its environment."""
    from prep.cli import console

    seen = []
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with pytest.raises(SystemExit):
        console.run(lambda *_, **__: seen.append(subprocess.run(
            [sys.executable, "-c", "import json"], capture_output=True, check=False, env={
                **os.environ, "PYTHONPATH": ""})), "prep", [])
    assert seen and not caught.exists() and "PYTHONSAFEPATH" not in os.environ
