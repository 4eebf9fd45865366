"""`train push`: which files of a run go to the Hub, and that none of them names a directory of this computer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prep.errors import PathError
from prep.formatting import shell_name
from prep.fs.untrusted import read_regular
from prep.runs.document import read_document
from train.runs.checkpoint import open_weights
from train.runs.directory import RESULTS
from train.runs.safetensors.header import read_header_and_metadata

CARD = "README.md"
_SAMPLE = re.compile(r"step-\d+\.png")
_PICTURE = re.compile(rb"^!\[[^\n]*\]\(samples/[^\n]*\n+", re.MULTILINE)  # as train.card shows it
_MOST = 1 << 22  # bytes of a text


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """The files that go to the Hub, or their changed content, by their names there."""

    files: Mapping[str, Path | bytes]

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file."""
        return {name: len(value) if isinstance(value, bytes) else value.stat().st_size
                for name, value in self.files.items()}


def files_of(run: Path, *, samples: bool) -> Pushed:
    """The result of a run, its card, and its sample pictures, which without `samples` the card does not show. Raises
    `PathError`, `CacheError`."""
    read_document(run)  # which refuses what is no run, and links in it
    result = next((run / name for name in RESULTS if (run / name).exists()), None)
    if result is None or not (run / CARD).is_file():
        raise PathError(f"{run} has no result yet, expected {' or '.join(RESULTS)}, and {CARD}",
                        hint=f"let the run end, or continue it: train run --resume -o {shell_name(str(run))}")
    paths = [run / CARD, *([result] if result.is_file() else sorted(result.iterdir()))]
    paths += sorted(path for path in (run / "samples").glob("*.png") if _SAMPLE.fullmatch(path.name)) if samples else []
    files: dict[str, Path | bytes] = {}
    for path in (each for each in paths if each.is_file()):
        name = path.relative_to(run).as_posix()
        _require_no_paths(name, path, run)
        files[name] = path
    if not samples:
        files[CARD] = _PICTURE.sub(b"", read_regular(run / CARD, _MOST))
    return Pushed(files=files)


def _require_no_paths(name: str, path: Path, run: Path) -> None:
    """Raises `PathError` if a file names the user's home, or the directory of the run: titles and descriptions are free
    texts, and configs of models are others'."""
    text = "\n".join(_texts(path))
    text += "\n" + re.sub(r"\\(\W|_)", r"\1", text)  # as Markdown shows it
    for folder in {Path.home(), run.absolute(), run.resolve()}:
        spelled = {str(folder), json.dumps(str(folder))[1:-1]}
        if folder.parent != folder and re.search(rf"(?:{'|'.join(map(re.escape, spelled))})(?![\w.-])", text):
            raise PathError(f"{name} of the run names {folder}, which is a directory of this computer",
                            hint="change that text there, or, if it is a setting, continue the run with another: "
                            f"train run --resume -o {shell_name(str(run))}")


def _texts(path: Path) -> Iterator[str]:
    """The texts in a file: of weights their metadata; of pictures, which are drawn by the run, none."""
    if path.suffix == ".safetensors":
        with open_weights(path) as handle:
            yield from read_header_and_metadata(handle, path.stat().st_size)[1].values()
    elif path.suffix in (".json", ".md"):
        yield read_regular(path, _MOST).decode(errors="replace")
