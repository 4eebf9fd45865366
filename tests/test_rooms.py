# ruff: noqa: E501
"""The architecture as tests: one room per library, imports that point down, light imports, small modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
           for package in ("prep", "train") for path in sorted((ROOT / package).rglob("*.py"))}
NAMES = set(MODULES.values())

# Each foreign library, and the only modules that may import it. The demo's makers are users of the libraries, like
# scripts: they stand apart (prep.demo.*).
ROOMS = {
    "PIL": {"prep.images.decode", "prep.images.header", "prep.formats", "prep.images.plugins", "prep.scan.duplicates.identity", "prep.images.color", "train.sampling.grid",
            "prep.demo.drawing", "prep.demo.*", "prep.masks.pixels", "prep.report.pages.bucket_png"},
    "pillow_heif": {"prep.images.plugins"},
    "pillow_jxl": {"prep.images.plugins"},
    "zarr": {"prep.cache.zarr_view"},
    "awscrt": {"prep.cache.shard_format"},
    "google_crc32c": set(),
    "pyarrow": {"prep.cache.plans", "prep.manifest.samples", "prep.manifest.shards", "prep.manifest.tables", "prep.manifest.describe",
                "prep.manifest.diff_samples", "prep.sources.tables"},
    "sqlite3": {"prep.fs.memo", "prep.scan.memo"},
    "diffusers": {"prep.models.vae", "prep.models.text_encoder", "prep.models.quiet", "train.models.denoiser", "train.sampling.sampler",
                  "prep.demo.*"},
    "transformers": {"prep.models.text_encoder", "prep.models.tokenizer", "prep.masks.segmentation", "prep.models.quiet",
                     "prep.demo.*"},
    "huggingface_hub": {"prep.models.hub"},
    "rembg": {"prep.masks.rembg"},
    "peft": {"train.models.lora"},
    "safetensors": {"train.runs.checkpoint", "train.models.lora", "prep.demo.*"},
    "torch": {"prep.loader.*", "prep.models.tensors", "prep.models.device", "prep.models.vae", "prep.models.text_encoder",
              "prep.masks.segmentation", "train.*", "prep.demo.*"},
    "typer": {"prep.cli.main", "prep.cli_cache", "prep.cli.init", "prep.cli.options", "prep.cli.console", "train.cli.main"},
    "rich": {"prep.cli.console", "prep.report.*", "train.runs.watch"},
    "webdataset": {"prep.sources.tars"},
    "braceexpand": {"prep.sources.walk"},
}

# What `train` may take from `prep`: only what is light.
FROM_PREP = {"prep", "prep.errors", "prep.arrays", "prep.parse", "prep.fs.paths", "prep.digest", "prep.batching.plan", "prep.batching.permutation",
             "prep.keys", "prep.recipe.prompts", "prep.manifest.document", "prep.manifest.consistency", "prep.cli.console", "prep.runtime",
             "prep.progress", "prep.models.family", "prep.models.fingerprint", "prep.models.hub", "prep.models.loading"}

# Where an import inside a function is right: commands, so that --help is quick; what only some runs need; what only
# POSIX has.
LAZY = {
    "prep.fs.atomic", "prep.cli.main", "prep.cli_cache", "prep.cli.init", "train.cli.main", "prep.cli.console",
    "prep.encode.run", "prep.encode.engines.local", "prep.models.hub", "prep.models.quiet", "prep.demo", "prep.demo.*",
    "prep.masks.run", "prep.masks.rembg", "prep.images.plugins",
    "prep.sources.tars", "prep.sources.tables", "prep.scan.worker", "prep.scan.run",
}

HEAVY = ("torch", "zarr", "diffusers", "transformers", "pyarrow", "PIL", "numpy", "webdataset", "pydantic",
         "pillow_heif", "pillow_jxl")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports when it runs, and whether it does so inside a function."""
    tree = ast.parse(path.read_text())
    inside = {id(node) for outer in ast.walk(tree) if isinstance(outer, ast.FunctionDef) for node in ast.walk(outer)}
    for_types = [one for one in ast.walk(tree) if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.unparse(one.test)]
    typing_only = {id(node) for outer in for_types for node in ast.walk(outer)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in NAMES else node.module), id(node) in inside


def allowed(module: str, room: set[str]) -> bool:
    return module in room or any(name.endswith(".*") and module.startswith(name[:-1]) for name in room)


@pytest.mark.parametrize("path", MODULES, ids=MODULES.values())
def test_each_library_has_its_room(path):
    for name, _ in imports(path):
        room = ROOMS.get(name.partition(".")[0])
        assert room is None or allowed(MODULES[path], room), f"{MODULES[path]} imports {name}, whose rooms are {room}"


def test_imports_point_down():
    """No cycle between modules, counting those inside functions, too."""
    edges = {MODULES[path]: {name for name, _ in imports(path) if name in NAMES and name != MODULES[path]}
             for path in MODULES}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"cycle: {' -> '.join((*above, module))}"
        if module not in done:
            for below in sorted(edges[module]):
                visit(below, (*above, module))
            done.add(module)

    for module in sorted(edges):
        visit(module, ())


@pytest.mark.parametrize("path", MODULES, ids=MODULES.values())
def test_imports_inside_functions_have_a_reason(path):
    late = [name for name, inside in imports(path) if inside]
    assert not late or allowed(MODULES[path], LAZY), f"{MODULES[path]} imports {late} inside functions"


def test_train_takes_from_prep_only_what_is_light():
    for path, module in MODULES.items():
        for name, _ in imports(path):
            if module.startswith("train") and name.startswith("prep"):
                assert name in FROM_PREP or name.startswith(("prep.cache", "prep.fs", "prep.loader", "prep.manifest", "prep.formatting")), f"{module} imports {name}"
            assert not (module.startswith("prep") and name.startswith("train")), f"{module} imports {name}"


def loaded_by(code: str) -> set[str]:
    """The heavy libraries that a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(ast.literal_eval(done.stdout.strip().splitlines()[-1]))


@pytest.mark.parametrize("code", ["import prep, train", "import prep.cli.main", "import train.cli.main", "import prep.recipe.load",
                                  "from prep.cli.main import app\ntry: app(['--help'])\nexcept SystemExit: pass"])
def test_what_help_waits_for_is_light(code):
    assert loaded_by(code) == set()


def test_the_test_of_light_imports_sees_heavy_ones():
    assert loaded_by("import prep.images.decode") >= {"PIL", "numpy"}


def test_reading_needs_neither_torch_nor_zarr():
    assert not loaded_by("import prep.cache.reader, prep.manifest.document, prep.batching.plan, prep.encode.plan, prep.encode.assemble, "
                         "prep.encode.run") & {"torch", "zarr", "diffusers", "transformers"}


@pytest.mark.parametrize("path", MODULES, ids=MODULES.values())
def test_functions_are_small(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and not any("command" in ast.unparse(one) for one in node.decorator_list):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= 40, f"{MODULES[path]}.{node.name} has {lines} lines, expected 40 at most"


def test_no_module_is_called_inspect():
    """`inspect.py` in a package breaks dataclasses when a file of it is run as a script."""
    assert not [path for path in MODULES if path.name == "inspect.py"]
