"""The architecture as tests: packages by concept, imports that point down, one room per library, light imports."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sources_parsed import PATHS, ROOT, tree_of

MODULES = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in PATHS}
NAMES = set(MODULES.values())

# The root of prep is closed: these words, the library's face, and packages. A word imports only other words.
VOCABULARY = {"errors", "findings", "geometry", "arrays", "digest", "keys", "parse", "formatting", "progress",
              "runtime", "setting"}

# A package imports from lower lines only, and from no other of its own line.
FLOORS = (
    VOCABULARY,
    {"workers"},
    {"fs", "images", "captions", "buckets", "batching", "models", "demo"},
    {"cache", "sources", "runs", "training", "similarity"},
    {"manifest", "recipe"},
    {"dataset", "maintenance", "export", "loader", "doctor", "jobs"},
    {"captioning", "scan", "masks", "encode", "pages"},
    {"report", "api", "imports", "embedding"},
    {"view"},
    {"studio"},
    {"cli"},
)

ANY = tuple(name for floor in FLOORS for name in sorted(floor))
# Finer than the floors; the vocabulary is allowed to all.
MAY_IMPORT = {
    "fs": (), "images": (), "captions": (), "buckets": (), "batching": (), "models": ("workers",), "demo": (),
    "workers": (),
    "cache": ("fs",), "sources": ("fs", "captions", "workers"),
    "similarity": ("batching",), "runs": ("fs", "images"), "jobs": ("fs", "runs"), "training": ("batching", "models"),
    "manifest": ("fs", "cache", "batching", "models"),
    "recipe": ("fs", "images", "captions", "sources", "buckets", "batching", "models", "workers", "training",
               "similarity"),
    "dataset": ("fs", "images", "captions", "sources", "buckets", "batching", "models", "recipe", "workers"),
    "maintenance": ("fs", "cache", "manifest"), "export": ("fs", "images", "buckets", "sources", "cache", "manifest"),
    "loader": ("fs", "cache", "manifest", "batching", "models", "training"), "doctor": ("fs", "models"),
    "scan": ("fs", "images", "captions", "sources", "models", "recipe", "dataset", "workers", "similarity"),
    "masks": ("fs", "images", "sources", "models", "recipe", "dataset"),
    "captioning": ("fs", "images", "captions", "sources", "models", "recipe", "dataset", "workers"),
    "encode": ("fs", "images", "buckets", "batching", "models", "cache", "manifest", "recipe", "dataset",
               "maintenance", "workers"),
    "pages": ("fs", "images", "manifest", "recipe", "runs", "export", "similarity"),
    "report": ("fs", "images", "sources", "buckets", "cache", "manifest", "recipe", "dataset", "doctor", "runs", "scan",
               "masks", "export", "pages"),
    "api": ("fs", "images", "recipe", "dataset", "encode", "maintenance", "manifest", "masks", "scan", "export",
            "loader"),
    "imports": ("fs", "buckets", "models", "workers", "cache", "recipe", "dataset", "export", "encode"),
    "embedding": ("fs", "batching", "models", "cache", "manifest", "recipe", "dataset", "encode", "similarity"),
    "view": ("fs", "images", "captions", "buckets", "batching", "models", "workers", "cache", "sources", "runs",
             "manifest", "recipe", "dataset", "scan", "masks", "encode", "embedding", "similarity", "pages"),
    "studio": ("fs", "models", "sources", "runs", "manifest", "recipe", "jobs", "pages", "view"),
    "cli": ANY,
}

TRAIN_FLOORS = (
    {"config"},
    {"models", "optim", "parallel"},
    {"objectives", "setup"},
    {"runs", "sampling", "failures"},
    {"metadata", "trackers", "validate", "state"},
    {"check", "state_files", "prompts", "cluster_forecast", "card", "trial"},
    {"memory", "merging", "show_step", "update"},
    {"sample", "report"},
    {"selection"},
    {"evaluate"},
    {"loop"},
    {"rates"},
    {"cli"},
)

# What `train` may take from `prep`, beside the vocabulary.
TRAIN_TAKES = {"prep", "prep.loader.*", "prep.fs.atomic", "prep.fs.lock", "prep.fs.memo", "prep.fs.place",
               "prep.fs.paths", "prep.fs.remote.*", "prep.fs.text", "prep.fs.untrusted", "prep.cache.*",
               "prep.manifest.*", "prep.batching.*", "prep.training.*", "prep.recipe.prompts", "prep.cli.*",
               "prep.models.family", "prep.models.configs", "prep.models.denoiser.*", "prep.models.families.*",
               "prep.models.lora.*", "prep.models.pipeline", "prep.models.files",
               "prep.models.fingerprint", "prep.models.hub", "prep.models.named", "prep.models.loading",
               "prep.models.tensors", "prep.models.checkpoints.single_file",
               "prep.models.text.*", "prep.models.components", "prep.models.device.*",
               "prep.models.checkpoints.bounds", "prep.models.checkpoints.streaming", "prep.models.vae",
               "prep.models.checkpoints.converted", "prep.models.checkpoints.stored",
               "prep.models.weights", "prep.pages.*",
               "prep.runs.*", "prep.images.decode", "prep.images.formats.parts", "prep.images.resize",
               "prep.images.thumbnail", "prep.models.vision.*", "prep.embedding.rows",
               "prep.similarity.*"} | {f"prep.{word}" for word in VOCABULARY}

# Each foreign library, and the only modules that may import it. The demo's makers are users of the libraries, like
# scripts: they stand apart (prep.demo.*).
LIBRARIES = {
    "PIL": {"prep.images.*", "prep.scan.duplicates.identity", "prep.masks.pixels", "prep.report.snapshots.bucket_png",
            "train.sampling.grid", "train.runs.loss_plot", "prep.demo.*"},
    "pillow_heif": {"prep.images.plugins"}, "pillow_jxl": {"prep.images.plugins"},
    "zarr": {"prep.cache.zarr_view"}, "awscrt": {"prep.cache.shard_format"}, "google_crc32c": set(),
    "obstore": {"prep.fs.remote.*"}, "sqlite3": {"prep.fs.memo"}, "platformdirs": {"prep.fs.user_cache"},
    "pyarrow": {"prep.cache.arrow", "prep.cache.ledger.index", "prep.cache.plans", "prep.manifest.*",
                "prep.sources.table_files"},
    "diffusers": {"prep.models.*", "train.models.*", "train.sampling.sampler", "prep.demo.*"},
    "transformers": {"prep.models.*", "prep.masks.segmentation", "prep.captioning.local", "prep.demo.*",
                     "train.optim.optimizers"},
    "huggingface_hub": {"prep.models.hub"}, "gguf": {"prep.models.checkpoints.stored"},
    "rembg": {"prep.masks.rembg"}, "onnxruntime": {"prep.captioning.tagger"}, "onnx": set(),
    "peft": {"train.models.lora"},
    "bitsandbytes": {"train.optim.optimizers", "train.models.quantized"}, "prodigyopt": {"train.optim.optimizers"},
    "schedulefree": {"train.optim.optimizers"}, "lion_pytorch": {"train.optim.optimizers"},
    "regex": {"train.models.targets"}, "sentencepiece": {"prep.models.text.trial"},
    "yaml": {"prep.recipe.convert.detect"},
    "safetensors": {"prep.demo.*"}, "tensorboard": {"train.trackers.tensorboard"}, "wandb": {"train.trackers.wandb"},
    "ray": {"prep.workers.ray"}, "datasets": {"prep.api"}, "playwright": set(),
    "starlette": {"prep.view.app", "prep.view.routes", "prep.view.edit.routes", "prep.studio.app", "prep.studio.looks"},
    "uvicorn": {"prep.view.serve"},
    "torch": {"prep.models.*", "prep.loader.*", "prep.masks.segmentation", "prep.captioning.local", "prep.view.model",
              "train.*", "prep.demo.*"},
    "typer": {"prep.cli.*", "train.cli.*"}, "http": {"prep.captioning.client", "prep.fs.remote.*"},
    "jinja2": {"prep.pages.layout", "prep.models.text.chat"},
    "markupsafe": {"prep.pages.layout", "prep.pages.snapshot"},
    "rich": {"prep.cli.console", "prep.cli.ticker", "prep.report.terminal.*", "train.runs.watch"},
    "webdataset": {"prep.sources.tars"}, "braceexpand": {"prep.sources.tar_paths"},
    "msgspec": {"prep.workers.protocol", "prep.scan.protocol", "prep.encode.engines.protocol",
                "prep.sources.table_files", "prep.sources.tar_members"},
}

# Where an import inside a function is right: commands, so that --help is quick; what only some runs need; what only
# POSIX has.
LAZY = {
    "prep.api", "prep.cli.*", "train.cli.*", "prep.fs.atomic", "prep.fs.remote.*", "prep.encode.execute",
    "prep.encode.dry_run", "prep.encode.text_groups",
    "prep.dataset.texts", "prep.encode.prompts",
    "prep.encode.engines.local", "prep.encode.engines.devices", "prep.encode.engines.measure",
    "prep.workers.ray", "prep.models.hub", "prep.runtime",
    "prep.models.pipeline", "prep.models.loading", "prep.models.checkpoints.stored",
    "prep.models.checkpoints.original", "prep.models.text.trial",
    "prep.models.device.named", "prep.models.vision.texts", "prep.doctor.machine", "prep.imports.verify",
    "prep.captioning.tagger",
    "prep.demo", "prep.demo.*", "prep.masks.run", "prep.masks.rembg", "prep.images.plugins",
    "prep.sources.globs", "prep.sources.tars", "prep.sources.table_files", "prep.workers.worker", "prep.scan.run",
    "train.optim.optimizers", "train.models.quantized", "train.parallel.ranks", "train.trackers.tensorboard",
    "train.trackers.wandb",
}

HEAVY = ("torch", "zarr", "diffusers", "transformers", "pyarrow", "PIL", "numpy", "webdataset", "pydantic",
         "pillow_heif", "pillow_jxl", "jinja2", "starlette", "uvicorn")
MOST_MODULES = 14  # of a folder; commands and families of models may have one each


@cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """Every module that a file imports when it runs, and whether it does so inside a function."""
    return tuple(imports_of(tree_of(path)))


def imports_of(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Imports are statements, so expressions are not looked at: these are most of a tree."""
    inside = inside or isinstance(node, ast.FunctionDef)
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for each in getattr(node, part, ()):
            if isinstance(each, ast.Import):
                yield from ((alias.name, inside) for alias in each.names)
            elif isinstance(each, ast.ImportFrom) and each.module:
                for alias in each.names:
                    full = f"{each.module}.{alias.name}"
                    yield (full if full in NAMES else each.module), inside
            elif not isinstance(each, ast.If) or "TYPE_CHECKING" not in ast.unparse(each.test):
                yield from imports_of(each, inside)


def edges(top: str) -> Iterator[tuple[str, str]]:
    """Imports between modules of `top`, as module and module."""
    for path, module in MODULES.items():
        for name, _ in imports(path):
            if {module.partition(".")[0], name.partition(".")[0]} == {top} and name in NAMES:
                yield module, name


def room(module: str) -> str:
    """The package, or the module at the root, that a module of prep or train belongs to; "" for the root itself."""
    return (*module.split("."), "")[1]


def allowed(module: str, rooms: set[str]) -> bool:
    return module in rooms or any(name.endswith(".*") and module.startswith(name[:-1]) for name in rooms)


def test_each_library_has_its_room():
    for path, module in MODULES.items():
        for name, _ in imports(path):
            rooms = LIBRARIES.get(name.partition(".")[0])
            assert rooms is None or allowed(module, rooms), f"{module} imports {name}, expected in {rooms}"


def test_the_root_of_prep_is_closed():
    there = {path.stem for path in (ROOT / "prep").glob("*.py")} - {"__init__", "__main__", "api"}
    assert there == VOCABULARY
    packages = {path.parent.name for path in (ROOT / "prep").glob("*/__init__.py")}
    assert packages <= {name for floor in FLOORS for name in floor}


def test_packages_of_prep_import_down():
    height = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    for module, name in edges("prep"):
        ours, theirs = room(module), room(name)
        if ours in ("", "__main__") or theirs in ("", ours):
            continue
        if ours in VOCABULARY:
            assert theirs in VOCABULARY, f"{module} imports {name}"
            continue
        assert theirs in VOCABULARY or theirs in MAY_IMPORT[ours], f"{module} imports {name}"
        assert height[theirs] < height[ours], f"{module} imports {name}, which is no lower"


def test_the_table_of_imports_agrees_with_the_floors():
    height = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    assert set(MAY_IMPORT) == set(ANY) - VOCABULARY
    for package, others in MAY_IMPORT.items():
        assert all(height[other] < height[package] for other in others if package != "cli"), package


def test_packages_of_train_import_down():
    height = {name: number for number, floor in enumerate(TRAIN_FLOORS) for name in floor}
    for module, name in edges("train"):
        ours, theirs = room(module), room(name)
        if ours not in ("", "__main__", theirs) and theirs:
            assert height[theirs] < height[ours], f"{module} imports {name}, which is no lower"


def test_train_takes_from_prep_only_what_is_light():
    for path, module in MODULES.items():
        for name, _ in imports(path):
            if module.startswith("train") and name.startswith("prep"):
                assert allowed(name, TRAIN_TAKES), f"{module} imports {name}"
            assert not (module.startswith("prep") and name.startswith("train")), f"{module} imports {name}"


def test_engines_are_imported_late():
    for path, module in MODULES.items():
        for name, inside in imports(path):
            if name.startswith("prep.encode.engines.") and not module.startswith("prep.encode.engines"):
                assert inside or name == "prep.encode.engines.job", f"{module} imports {name} at once"


def test_formats_are_read_as_bytes():
    for path, module in MODULES.items():
        if module.startswith("prep.images.formats"):
            assert not {name.partition(".")[0] for name, _ in imports(path)} & {"PIL", "numpy"}, module


def test_no_module_is_in_a_circle():
    """Counting imports inside functions, too."""
    below: dict[str, set[str]] = {module: set() for module in NAMES}
    for top in ("prep", "train"):
        for module, name in edges(top):
            if module != name:
                below[module].add(name)
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"circle: {' -> '.join((*above, module))}"
        if module not in done:
            for name in sorted(below[module]):
                visit(name, (*above, module))
            done.add(module)

    for module in sorted(below):
        visit(module, ())


def test_imports_inside_functions_have_a_reason():
    for path, module in MODULES.items():
        late = [name for name, inside in imports(path) if inside]
        assert not late or allowed(module, LAZY), f"{module} imports {late} inside functions"


def test_no_folder_is_crowded():
    for folder in sorted({path.parent for path in MODULES}):
        modules = [path for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
        many = folder.name in ("cli", "families")
        assert many or len(modules) <= MOST_MODULES, f"{folder} has {len(modules)} modules"


def test_functions_are_small():
    for path, module in MODULES.items():
        commands = "cli" in path.parts  # with an option a line
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - (node.body[0].lineno if commands else node.lineno) + 1
                assert lines <= 40, f"{module}.{node.name} has {lines} lines, expected 40 at most"


# Where an expression that Python's `re` looks for is made at run time, from what is trusted or only compiled.
EXPRESSIONS = {
    "prep.images.formats.sniff": "patterns of its own table", "prep.recipe.prompts": "patterns of its own table",
    "prep.models.lora.kohya": "rules of the families", "train.models.adapters.spelling": "patterns of its own table",
    "prep.sources.tar_paths": "made by fnmatch, which never backtracks",
    "prep.training.checks": "compiled, to say what is wrong; found by train.models.targets, with a limit of time",
}


def test_expressions_of_others_are_never_looked_for_by_re():
    def of_ours(argument: ast.expr) -> bool:
        return isinstance(argument, ast.Constant | ast.JoinedStr) or (
            isinstance(argument, ast.BinOp) and of_ours(argument.left) and of_ours(argument.right))

    found = {MODULES[path] for path in MODULES for call in ast.walk(tree_of(path)) if isinstance(call, ast.Call)
             and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
             and call.func.value.id == "re" and call.func.attr not in ("escape", "error") and not of_ours(call.args[0])}
    assert found == set(EXPRESSIONS)


def test_no_module_is_called_inspect():
    """`inspect.py` in a package breaks dataclasses when a file of it is run as a script."""
    assert not [path for path in MODULES if path.name == "inspect.py"]


# ---- what an import loads --------------------------------------------------------------------------------------------


def loaded_by(code: str) -> set[str]:
    """The heavy libraries that a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(ast.literal_eval(done.stdout.strip().splitlines()[-1]))


@pytest.mark.parametrize("code", ["import prep, train", "import prep.cli.main", "import train.cli.main",
                                  "import prep.recipe.load",
                                  "from prep.cli.main import app\ntry: app(['--help'])\nexcept SystemExit: pass"])
def test_what_help_waits_for_is_light(code):
    assert loaded_by(code) == set()


def test_the_test_of_light_imports_sees_heavy_ones():
    assert loaded_by("import prep.images.decode") >= {"PIL", "numpy"}


def test_reading_needs_neither_torch_nor_zarr():
    code = "import prep.cache.reader, prep.manifest.document, prep.batching.plan, prep.encode.run"
    assert not loaded_by(code) & {"torch", "zarr", "diffusers", "transformers"}


def test_the_wheel_holds_every_package(tmp_path):
    """Builds one and looks for every file in it: tests that run from the tree do not see what a wheel lacks."""
    source = tmp_path / "source"
    for name in ("prep", "train"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        there = set(archive.namelist())
    wanted = {path.relative_to(ROOT).as_posix() for name in ("prep", "train") for path in (ROOT / name).rglob("*")
              if path.is_file() and path.suffix not in (".pyc", ".md")}
    assert len(wanted) > len(NAMES) and wanted <= there, wanted - there
