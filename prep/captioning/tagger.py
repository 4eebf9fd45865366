"""Tags pictures with a model on this computer, of the layout of SmilingWolf's WD14 taggers: `model.onnx` and
`selected_tags.csv`. Needs an extra (`pip install 'latentry[tagger]'`).

The layout is that of https://huggingface.co/SmilingWolf/wd-vit-tagger-v3 and its kin, as their author's page (app.py of
https://huggingface.co/spaces/SmilingWolf/wd-tagger), kohya's finetune/tag_images_by_wd14_tagger.py and deepghs/imgutils
(imgutils/tagging/wd14.py) read it: float32 [B, side, side, 3] from 0 to 255, blue first, the picture in the middle of a
white square; out come scores from 0 to 1, [B, tags], in the order of the table. The model is loaded when a picture is
first tagged, and never opens another file: `prep.captioning.onnx_header`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from prep.captioning.engine import Answer, Form, Prepared, Stopped, Unanswered
from prep.captioning.onnx_header import AGAIN, input_shape
from prep.captioning.tags import CATEGORIES, spell_scores
from prep.digest import digest_bytes, digest_json
from prep.errors import ModelError, OutOfMemoryError, UsageError, first_line
from prep.formatting import printable
from prep.fs.untrusted import read_up_to
from prep.models.device.memory import FittingBatches
from prep.models.files import open_regular, unreadable
from prep.models.fingerprint import FileDigest, digest_existing
from prep.models.hub import TAGGER, locate_directory
from prep.models.tensors import pick_device
from prep.progress import Progress, phase
from prep.runtime import usable_cores

MODEL, TABLE = TAGGER
MOST_TABLE = 1 << 24  # bytes; 10,861 tags take 300 kB
MOST_TAGS = 1 << 18  # rows; the largest known model has 75,000
LEAST_SIDE, MOST_SIDE = 16, 2048  # pixels of what a model sees; all known ones see 448
CUDA = "CUDAExecutionProvider"

Label = tuple[int, str]  # category, tag


class Tagger:
    """A tagger in a directory; an `Engine` whose answers are scores, as `prep.captioning.tags` spells them. One thread
    at a time asks it."""

    form: Form = "square"
    at_once = 1
    prompt = ""

    def __init__(self, named: str, *, download: bool, device: str, batch_size: int, file_digest: FileDigest,
                 progress: Progress) -> None:
        """`named`: a directory or a Hub id. Reads the table, and of the model all bytes for its digest. Raises
        `ModelError`, `UsageError`."""
        self._library = _imported()
        self.name, self.batch = named, batch_size
        self._device, self._cuda = _device_of(device, self._library)
        folder = locate_directory(named, download=download, parts=TAGGER)
        table = _read(folder / TABLE)
        self._path, self._labels = folder / MODEL, labels_in(table, folder / TABLE)
        self.side, self._fixed = side_of(input_shape(self._path), self._path)
        with phase(progress, "reading the tagger"):
            self.digest = digest_json({"kind": "tagger", "model": digest_existing(self._path, file_digest),
                                       "tags": digest_bytes(table)})
        self.identity: Mapping[str, str | int | None] = {"engine": "onnxruntime", "model": self.digest}
        self._batches = FittingBatches(self._device, "float32", min(batch_size, self._fixed or batch_size))
        self._progress, self._lock = progress, Lock()
        self._ending = self._library.RunOptions()
        self._session: Any = None

    def describe(self) -> str:
        """Where pictures go, for people."""
        return f"on this computer ({self._device})"

    def close(self) -> None:
        """Ends a batch under way after the layer that is computed."""
        self._ending.terminate = True

    def answer(self, pictures: Sequence[Prepared], prompts: Sequence[str]) -> Sequence[Answer | Unanswered]:
        """The scores of each picture, as `Engine.answer`, in batches that the device holds."""
        with self._lock:
            self._session = self._session or self._load()
            try:
                rows = self._batches.run(pictures, self._scores, "one picture")
            except OutOfMemoryError as error:
                raise OutOfMemoryError(error.message, hint="--device cpu, or a smaller model; what was tagged is "
                                       "remembered") from None
        return [Answer(text=spell_scores([(category, tag, float(score)) for (category, tag), score in
                                          zip(self._labels, row, strict=True) if category in CATEGORIES]))
                for row in rows]

    def _load(self) -> Any:
        """The session. Raises `ModelError`, `Stopped`."""
        if self._ending.terminate:
            raise Stopped
        options = self._library.SessionOptions()
        options.log_severity_level = 4  # what is wrong is raised
        options.intra_op_num_threads = usable_cores()
        options.add_session_config_entry("session.load_model_format", "ONNX")  # which was looked through
        wanted = [(CUDA, {"device_id": self._device.index or 0})] if self._cuda else []
        with phase(self._progress, "loading the tagger"):
            try:
                session = self._library.InferenceSession(str(self._path), options,
                                                         providers=[*wanted, "CPUExecutionProvider"])
            except Exception as error:  # of the library, whose errors have no class in common
                raise ModelError(f"onnxruntime cannot load {self._path}: {_said(error)}", hint=AGAIN) from None
        if wanted and CUDA not in session.get_providers():
            raise ModelError("onnxruntime cannot use CUDA here, though it was built with it",
                             hint="install the versions of CUDA and cuDNN that it asks for, or use --device cpu")
        (given, *_) = session.get_inputs()
        if given.type != "tensor(float)":
            raise ModelError(f"{self._path} takes {given.type}, expected float32", hint=AGAIN)
        return session

    def _scores(self, pictures: Sequence[Prepared]) -> list[np.ndarray[Any, Any]]:
        """The scores of a batch, float32 [tags] for each picture. Raises `ModelError`, `Stopped`, `MemoryError`."""
        batch_BHW3 = np.zeros((self._fixed or len(pictures), self.side, self.side, 3), np.float32)
        for place, one in enumerate(pictures):
            batch_BHW3[place] = np.frombuffer(one.data, np.uint8).reshape(self.side, self.side, 3)[:, :, ::-1]
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        try:
            (scores, *_) = self._session.run([outputs[0].name], {inputs[0].name: batch_BHW3}, self._ending)
        except Exception as error:  # as above
            if self._ending.terminate:
                raise Stopped from None
            if "alloc" in str(error).lower():  # "Failed to allocate memory", "std::bad_alloc"
                raise MemoryError from None
            raise ModelError(f"the tagger in {self._path.parent} cannot tag a picture: {_said(error)}",
                             hint=AGAIN) from None
        wanted = (len(batch_BHW3), len(self._labels))
        if getattr(scores, "shape", None) != wanted:
            raise ModelError(f"{self._path} gives an array of {list(getattr(scores, 'shape', ()))}, expected a score "
                             f"for each of the {wanted[1]} tags of {TABLE}: {list(wanted)}", hint=AGAIN)
        if not (scores.dtype == np.float32 and np.all((scores >= 0) & (scores <= 1))):
            raise ModelError(f"{self._path} gives numbers that are no scores from 0 to 1", hint="a tagger's last layer "
                             "is a sigmoid; choose a model exported with it")
        return list(scores[:len(pictures)])


def labels_in(table: bytes, path: Path) -> list[Label]:
    """The tags of `selected_tags.csv`, with their categories, in the order of the model's scores. Raises `ModelError`.
    """
    labels: list[Label] = []
    try:
        rows = csv.DictReader(io.StringIO(table.decode("utf-8-sig"), newline=""), strict=True)
        if not {"name", "category"} <= set(rows.fieldnames or ()):
            raise ModelError(f"{path} has the columns {printable(str(rows.fieldnames or [])[:200])}, expected tag_id, "
                             "name, category and count", hint=AGAIN)
        for row in rows:
            if len(labels) == MOST_TAGS:
                raise ModelError(f"{path} has more than {MOST_TAGS} tags", hint=AGAIN)
            name, category = row["name"], row["category"]
            if not name or not category or not category.isdecimal() or len(category) > 2:
                raise ModelError(f"line {rows.line_num} of {path} has category {printable(str(category)[:40])!r} and "
                                 f"name {printable(str(name)[:40])!r}, expected a number and a tag", hint=AGAIN)
            labels.append((int(category), name))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ModelError(f"{path} is no table of tags: {error}", hint=AGAIN) from None
    return labels


def side_of(shape: tuple[int | None, ...], path: Path) -> tuple[int, int | None]:
    """(pixels of a side of what the model sees, pictures at a time if it takes no other number). Raises `ModelError`.
    """
    shown = [("any" if size is None else size) for size in shape]
    wanted = "expected [pictures, side, side, 3], colors last, as SmilingWolf's taggers take them"
    if len(shape) == 4 and shape[1] == 3 != shape[3]:
        raise ModelError(f"{path} takes pictures as {shown}, colors first, {wanted}", hint="how such a model wants its "
                         "colors scaled is not in its file, so tags would be wrong; choose another one")
    if len(shape) != 4 or shape[3] != 3 or shape[1] is None or shape[1] != shape[2]:
        raise ModelError(f"{path} takes {shown}, {wanted}", hint=AGAIN)
    if not LEAST_SIDE <= shape[1] <= MOST_SIDE or not 1 <= (shape[0] or 1) <= 1 << 10:
        raise ModelError(f"{path} takes {shown}, expected at most 1024 pictures of {LEAST_SIDE} to {MOST_SIDE} pixels",
                         hint=AGAIN)
    return shape[1], shape[0]


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            data = read_up_to(file, MOST_TABLE + 1)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(data) > MOST_TABLE:
        raise ModelError(f"{path} has more than {MOST_TABLE >> 20} MiB, expected a table of tags", hint=AGAIN)
    return data


def _device_of(name: str, library: Any) -> tuple[Any, bool]:
    """The torch device, which is the CPU where onnxruntime has nothing else, and whether it is a CUDA one. Raises
    `UsageError` for a device that is named but that onnxruntime cannot use."""
    device = pick_device(name)
    if device.type == "cuda" and CUDA in library.get_available_providers():
        return device, True
    if device.type != "cpu" and name != "auto":
        raise UsageError(f"--device is '{name}', but this onnxruntime cannot use it: it has "
                         f"{', '.join(library.get_available_providers())}", hint="for CUDA install onnxruntime-gpu "
                         "instead of onnxruntime; or use --device cpu")
    return pick_device("cpu"), False


def _imported() -> Any:
    """The library. Raises `UsageError` without it."""
    try:
        import onnxruntime
    except ImportError:
        raise UsageError("--tagger needs the package onnxruntime, which is not installed",
                         hint="pip install 'latentry[tagger]'") from None
    onnxruntime.disable_telemetry_events()
    return onnxruntime


def _said(error: Exception) -> str:
    return printable(first_line(error)[:300])
