"""Lists directories, with names sorted into pictures, captions and masks; follows links, but never in circles."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path

from prep.findings import Finding, Severity
from prep.formatting import printable_name
from prep.fs.blob import Blob
from prep.fs.paths import MARKER

PICTURES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".avif", ".bmp", ".dib", ".tif", ".tiff", ".gif",
            ".heic", ".heif", ".hif", ".jxl")  # these four need an extra; without it, each is reported
CAPTIONS = (".txt", ".caption", ".json")  # the first found counts
FOREIGN = {".jp2", ".j2k", ".svg", ".psd", ".tga", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw", ".exr", ".hdr",
           ".ico", ".mp4", ".mov", ".webm", ".pdf"}
TABLES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")  # Hugging Face's; read wherever they lie
MASK, CONDITION = "-masklabel", "-condlabel"  # OneTrainer: such files are never pictures of their own
_USED = {*PICTURES, *CAPTIONS}
_SYSTEM_FOLDERS = {"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information"}
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@dataclass(kw_only=True, slots=True)
class Directory:
    """The names of one directory, sorted by kind."""

    prefix: str  # POSIX path below the root, "" or ending in /
    base: str  # what the path, or the URL, of every file in it begins with
    versions: Mapping[str, str] = field(default_factory=dict)  # of its objects, if it is in a store, by name
    pictures: list[str] = field(default_factory=list)
    captions: dict[str, list[str]] = field(default_factory=dict)  # stem → names; the first is used
    masks: dict[str, str] = field(default_factory=dict)  # stem of the picture → name
    second_masks: dict[str, str] = field(default_factory=dict)  # name → that of the mask that is used instead
    foreign: set[str] = field(default_factory=set)  # stems of files in formats that are not read
    tables: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def blob(self, name: str) -> Blob:
        """The file `name` of this directory."""
        return Blob(file=self.base + name, version=self.versions.get(name, ""))

    def say(self, name: str, code: str, severity: Severity, detail: str) -> None:
        """Adds a finding on the file `name` of this directory."""
        self.findings.append(Finding(path=printable_name(self.prefix + name), code=code, severity=severity,
                                     detail=detail))


def stem_of(name: str) -> str:
    """The file name `name` without its last extension; leading dots do not begin an extension."""
    stem = name.rpartition(".")[0]
    return stem if stem.strip(".") else name


def folders_below(root: Path) -> Iterator[Directory]:
    """Every directory from `root` down, once, in the order of names: a directory's files before its subdirectories.

    A link to a directory inside `root` is skipped, since that directory is listed anyway; a link that leads outside is
    followed once.
    """
    seen: set[tuple[int, int]] = set()
    inside = root.resolve()
    todo = [("", root)]
    while todo:
        prefix, path = todo.pop()
        folder = Directory(prefix=prefix, base=str(path / "_")[:-1])
        if _is_new(path, seen):
            _fill(folder, path, inside)
            todo.extend((f"{prefix}{name}/", path / name) for name in reversed(folder.folders))
        yield folder


def _is_new(path: Path, seen: set[tuple[int, int]]) -> bool:
    """Whether this directory was not listed before, under any name; adds it to `seen`."""
    try:
        stamp = path.stat()
    except OSError:  # removed meanwhile; `_fill` reports it
        return True
    mark = stamp.st_dev, stamp.st_ino
    new = mark not in seen
    seen.add(mark)
    return new


def _fill(folder: Directory, path: Path, inside: Path) -> None:
    """Reads the directory's names into `folder`."""
    try:
        with os.scandir(path) as entries:
            listed = sorted(entries, key=attrgetter("name"))
    except OSError as error:
        folder.say("", "unreadable-file", "error", f"directory cannot be read: {error.strerror}")
        return
    if folder.prefix and any(entry.name == MARKER for entry in listed):
        note_cache(folder)
        return
    for entry in listed:
        if entry.name.startswith("."):
            note_hidden(folder, entry.name)
        elif _leads_to_directory(entry):
            _add_listed_folder(folder, entry, inside)
        else:
            add_file(folder, entry.name, partial(_is_usable, folder, entry, inside))


def note_cache(folder: Directory) -> None:
    """Adds the finding on a directory that is a cache."""
    folder.say("", "cache-inside", "warning", "is a cache of latents, not pictures; skipped")


def note_directory(folder: Directory, name: str) -> None:
    """Adds the finding on an object with bytes that is called like a directory, with or without a slash at its end."""
    folder.say(name, "directory-object", "info", "an object with bytes is called like this directory; skipped")


def note_hidden(folder: Directory, name: str) -> None:
    """Adds the finding on a hidden file, if it is a picture."""
    if _extension(name) in PICTURES and not name.startswith("._"):
        folder.say(name, "hidden-file", "info", "hidden files are skipped")


def _leads_to_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links; reported as a file
        return False


def _add_listed_folder(folder: Directory, entry: os.DirEntry[str], inside: Path) -> None:
    if entry.name not in _SYSTEM_FOLDERS and entry.is_symlink():
        target = Path(entry.path).resolve()
        if target == inside or inside in target.parents:
            code, says = "directory-loop", "links to a directory of this source, which is read once, under its own name"
            folder.say(entry.name, code, "warning", says)
            return
    add_folder(folder, entry.name)


def add_folder(folder: Directory, name: str) -> None:
    """Adds a subdirectory, unless it is a system's own."""
    if name not in _SYSTEM_FOLDERS:
        folder.folders.append(name)


def add_file(folder: Directory, name: str, is_usable: Callable[[], bool]) -> None:
    """Sorts one name by its extension; asks only for files that will be used whether they can be."""
    extension, stem = _extension(name), stem_of(name)
    if extension in FOREIGN:
        folder.foreign.add(stem)
        folder.say(name, "unsupported-format", "info", f"{extension} files are not read, expected {' '.join(PICTURES)}")
    elif name in TABLES and is_usable():
        folder.tables.append(name)
    elif extension in _USED and is_usable():
        if extension in CAPTIONS:
            names = folder.captions.setdefault(stem, [])
            names.append(name)
            if len(names) > 1:
                names.sort(key=lambda file: (CAPTIONS.index(_extension(file)), file))
        elif stem.casefold().endswith(MASK):
            if (first := folder.masks.setdefault(stem[: -len(MASK)], name)) != name:
                folder.second_masks[name] = first
        elif not stem.casefold().endswith(CONDITION):
            folder.pictures.append(name)


def _is_usable(folder: Directory, entry: os.DirEntry[str], inside: Path) -> bool:
    """Whether the name leads to a regular file; adds a finding if not, and if it leads out of the source."""
    if entry.is_file(follow_symlinks=False):  # known from the listing itself
        return True
    try:
        kind = stat.S_IFMT(entry.stat().st_mode)
        target = Path(entry.path).resolve() if entry.is_symlink() else None
    except FileNotFoundError:
        folder.say(entry.name, "dangling-link", "error", "is a link to a file that does not exist")
        return False
    except OSError as error:  # ELOOP
        folder.say(entry.name, "link-loop", "error", f"is a link that cannot be followed: {error.strerror}")
        return False
    if kind != stat.S_IFREG:
        folder.say(entry.name, "special-file", "error", f"is {_KINDS.get(kind, 'no file')}, expected a file")
        return False
    if target is not None and inside not in target.parents:
        folder.say(entry.name, "link-outside", "info", "is a link to a file outside this source")
    return True


def _extension(name: str) -> str:
    """The last extension, in lower case; that of `.png` alone is `.png`."""
    return "." + name.rpartition(".")[2].lower() if "." in name else ""
