"""Implements `prep export`. An interrupted export goes on where it stopped: each file is whole or not there."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from prep.digest import canonical, seal
from prep.errors import PathError, UsageError
from prep.export import folder, kohya, safetensors, webdataset
from prep.export.formats import FORMATS
from prep.export.sample import Sample, Samples
from prep.formatting import counted, format_bytes
from prep.fs import atomic
from prep.fs.mirror import refuse_url
from prep.fs.untrusted import read_regular
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.parse import Unparsed, brief, sealed_json, suggest
from prep.progress import Progress, Tick, silent

MARKER, MARKED = ".latentry-export.json", "latentry/exporting"  # says of what a directory is an export
MARKER_BYTES = 1 << 12
_LEFT = re.compile(r"\.[0-9a-f]{16}\.partial")  # as `atomic.temporary_name` makes them


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What was written."""

    to: str
    output: Path
    samples: int
    files: int  # of the export, also those that an earlier run had written
    written: int  # by this run
    bytes: int  # by this run

    def as_json(self) -> dict[str, Any]:
        """The document of `prep export --json`."""
        return {"format": "latentry/export", "version": 1, "to": self.to, "output": str(self.output),
                "samples": self.samples, "files": self.files, "written": self.written, "bytes": self.bytes}

    def as_text(self) -> str:
        """The output of `prep export`."""
        earlier = f", {counted(self.files - self.written, 'file')} from before" if self.files > self.written else ""
        return (f"{self.output}: {counted(self.samples, 'sample')} in {counted(self.written, 'file')} "
                f"({format_bytes(self.bytes)}){earlier}")


class _Files:
    """Writes the files of an export, each atomically, but for those that are there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = self.written = self.bytes = 0

    def lacks(self, name: str) -> bool:
        """Counts a file; whether it has to be written."""
        self.files += 1
        return not (self.root / name).is_file()

    def write(self, name: str, data: atomic.Buffer) -> None:
        """Writes a file that was lacking."""
        path = self.root / name
        atomic.make_dirs(path.parent)
        atomic.write_atomic(path, data)
        self.written += 1
        self.bytes += memoryview(data).nbytes


def export(manifest: Path, to: str, output: Path, *, tar_bytes: int = 1 << 30, progress: Progress = silent
           ) -> ExportReport:
    """Writes all samples of a manifest to the directory `output`, which is new, empty, or an export of the same.

    `to` is one of `FORMATS`. Raises `PathError`, `ManifestError`, `CacheError`, and `UsageError` for samples that the
    format cannot hold.
    """
    if to not in FORMATS:
        raise UsageError(f"--to is {brief(to)}, expected one of: {', '.join(FORMATS)}{suggest(to, FORMATS)}")
    refuse_url(output)
    samples = Samples(open_manifest(read_manifest(manifest)))
    if to == "kohya":
        kohya.architecture(samples.manifest.document["family"])
    made = _Files(output)
    _begin(output, {"to": to, "manifest": samples.manifest.digest, "tar_bytes": tar_bytes})
    with progress(f"exporting as {to}", len(samples), "samples") as tick:
        if to == "webdataset":
            _write_tars(made, samples, tar_bytes, tick)
        elif to == "safetensors":
            for sample in samples:
                name = f"{sample.stem}.safetensors"
                if made.lacks(name):
                    made.write(name, safetensors.spell(sample))
                tick(1)
        else:
            _write_pictures(made, samples, to, tick)
    return ExportReport(to=to, output=output, samples=len(samples), files=made.files, written=made.written,
                        bytes=made.bytes)


def _begin(output: Path, asked: Mapping[str, Any]) -> None:
    """Marks a new or empty directory; accepts one that is marked for the same. Raises `PathError`."""
    if output.exists() and not output.is_dir():
        raise PathError(f"{output} is a file, expected a new directory")
    marker = output / MARKER
    if marker.is_file():
        try:
            found = sealed_json(read_regular(marker, MARKER_BYTES), str(marker))
        except (OSError, Unparsed) as error:
            raise PathError(f"{marker} cannot be read: {error}", hint="name a new directory with -o") from None
        if {name: found.get(name) for name in asked} != dict(asked):
            raise PathError(f"{output} has an export of another manifest, or in another format",
                            hint="name a new directory with -o")
        for left in output.rglob(".*.partial"):  # of a run that was killed
            if _LEFT.fullmatch(left.name):
                atomic.remove(left)
        return
    if output.is_dir() and any(output.iterdir()):
        raise PathError(f"{output} is not empty", hint="name a new directory with -o")
    atomic.make_dirs(output.absolute())
    atomic.write_atomic(marker, canonical(seal({"format": MARKED, "version": 1, **asked})))


def _write_pictures(made: _Files, samples: Iterable[Sample], to: str, tick: Tick) -> None:
    """Files of each picture, whose samples follow one another; then metadata.jsonl."""
    pictures = _by_picture(samples)
    for some in pictures:
        for name, make in (folder if to == "folder" else kohya).files(some).items():
            if made.lacks(name):
                made.write(name, make())
        tick(len(some))
    if to == "folder" and made.lacks(folder.METADATA):
        made.write(folder.METADATA, b"".join(map(folder.metadata_line, pictures)))


def _by_picture(samples: Iterable[Sample]) -> list[list[Sample]]:
    """The samples of each picture, in the order of the first: a picture at several sizes makes several."""
    def whose(sample: Sample) -> tuple[int, str]:
        return int(sample.of.columns.source[sample.number]), sample.name

    return [list(some) for _, some in groupby(sorted(samples, key=whose), whose)]


def _write_tars(made: _Files, samples: Samples, most: int, tick: Tick) -> None:
    """Tars of about `most` bytes, each named by the numbers of its first and last sample."""
    left = list(samples)
    while left:
        first = left[0].number
        there = sorted(made.root.glob(f"samples-{first:09d}-*.tar"))
        count = int(there[0].stem.rpartition("-")[2]) - first + 1 if there else _write_tar(made, left, most)
        made.files += 1
        tick(count)
        left = left[count:]


def _write_tar(made: _Files, samples: Sequence[Sample], most: int) -> int:
    """Writes a tar of the first samples, at least one, that make `most` bytes; returns their number."""
    first, count = samples[0].number, 0
    staged = atomic.temporary_name(made.root / "samples.tar")
    try:
        with atomic.create(staged) as handle:
            with tarfile.open(fileobj=handle, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                while count < len(samples) and (count == 0 or handle.tell() < most):
                    webdataset.add(tar, samples[count])
                    count += 1
            made.bytes += handle.tell()
            atomic.sync(handle)
        atomic.publish(staged, made.root / f"samples-{first:09d}-{first + count - 1:09d}.tar")
    finally:
        atomic.forget(staged)
    made.written += 1
    return count
