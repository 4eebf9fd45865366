"""Reads and writes `manifest.json`: canonical when written, checked strictly when read; small, without times.

It names its cache and a local model relative to itself, a Hub model by id, and the Arrow tables by digest.
manifests/format.md and manifests/manifest.schema.json describe the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prep.cache.remote.documents import fetch_tables, read_sealed
from prep.digest import canonical, with_checksum
from prep.errors import ManifestError, ModelError, PathError
from prep.formatting import shell_name
from prep.fs.labels import source_prefixes
from prep.fs.paths import MARKER, check_replaceable
from prep.fs.place import Place, is_file, is_link, place_below, real_name
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import copy_of, directory_of
from prep.fs.remote.storage import put
from prep.fs.text import TooLarge, read_small, without_mark
from prep.fs.untrusted import read_regular
from prep.geometry import PAIR, BucketShape, Size, have_references, shape_in
from prep.manifest.schema import check_document
from prep.models.families.registry import FAMILIES
from prep.models.named import is_there, named_in
from prep.parse import Alpha, Unparsed, brief
from prep.parse import sealed_json as sealed

FORMAT = "latentry/manifest"
VERSION, WITH_REFERENCES, WITH_EMBEDDINGS = 1, 2, 3  # of data sets with reference pictures; with embeddings
LIMIT = 1 << 20  # bytes; the manifest of any dataset is smaller
NAME_IT = "name the manifest.json that prep encode wrote"
_SOURCE = re.compile(rb"^\s*(\[\[\s*source\s*\]\]|source\s*=)", re.MULTILINE)  # only a recipe has one


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field of a manifest: its arrays, and the key context that all its rows share."""

    context: Mapping[str, Any]
    arrays: Mapping[str, Mapping[str, Any]]  # name → {"dtype": …, "dims": […]}
    rows: int
    shards: int
    bytes: int  # of the shards' files


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A manifest that was read and checked."""

    path: Place  # as given
    base: Place  # the directory that its cache is named relative to
    document: Mapping[str, Any]
    fields: Mapping[str, Field]
    buckets: tuple[Size, ...]
    shapes: tuple[BucketShape, ...]  # of the buckets, with the sizes of their references
    new_cache: Place | None = None  # where its cache is now, if that is not where the document says

    @property
    def digest(self) -> str:
        """Its `self`: the SHA-256 of its canonical bytes without that key."""
        return str(self.document["self"])

    @property
    def folder(self) -> Path:
        """Its other paths are relative to this; of one in a store, where its copy would be, and nothing is."""
        return directory_of(self.base)

    @property
    def cache(self) -> Place:
        """Where its cache is."""
        return self.new_cache or place_below(self.base, self.document["cache"])

    @property
    def cache_root(self) -> Path:
        """The directory of its cache; of one in a store, of its copies here."""
        return directory_of(self.cache)

    @property
    def in_store(self) -> bool:
        """Whether it is in a store: rows are uploaded there, and what it names besides its cache is elsewhere."""
        return isinstance(self.path, Bucket)

    @property
    def embedded(self) -> bool:
        """Whether its samples have embeddings."""
        return "embedding" in self.fields

    @property
    def alpha(self) -> Alpha | None:
        """What became of transparency; `None`: it was refused, or is not recorded."""
        alpha = self.document["latents"].get("alpha")
        return tuple(alpha) if isinstance(alpha, list) else alpha

    @property
    def inpaints(self) -> bool:
        """Whether its model is told by masks what to paint: each view has one, and its masked picture's latent as its
        reference."""
        return FAMILIES[str(self.document["family"])].inpainting is not None

    @property
    def referring(self) -> bool:
        """Whether samples have reference pictures as conditions."""
        return have_references(self.shapes) and not self.paired

    @property
    def paired(self) -> bool:
        """Whether the one reference of each view is the other picture of its pair, placed alike: the opposite in a
        slider, and no condition."""
        return bool(self.document["latents"].get("references", {}).get("fit") == PAIR)

    @property
    def model(self) -> Path | str:
        """A local model, a directory or a single file, or a Hub id: see `prep.models.hub.locate`."""
        return named_in(self.document["model"], self.folder)

    @property
    def sources(self) -> tuple[Place | None, ...]:
        """Where the pictures were when they were encoded; `None` if no relative path leads there."""
        return tuple(None if place is None else self._at(place) for place in self.document["sources"])

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The beginning of the names of each source's pictures in findings."""
        return source_prefixes(self.sources)

    @property
    def options(self) -> tuple[str | Place, ...]:
        """The options of the command that wrote it, except source, cache and output."""
        words = self.document["options"]
        places = (word if isinstance(word, str) else word["path"] for word in words)
        return tuple(place if isinstance(word, str) else self._at(place or "PATH")
                     for word, place in zip(words, places, strict=True))

    def _at(self, place: str) -> Place:
        """A path that is relative to the manifest, or a place in a store."""
        return place_below(self.folder, place)

    @property
    def family(self) -> str:
        """The model family's name."""
        return str(self.document["family"])


def read_manifest(path: Place, *, fetch: bool = True, cache: Place | None = None) -> Manifest:
    """The manifest at `path`. Raises `ManifestError` if it is missing, damaged, edited or of another version.

    A manifest in an object store is fetched, and of a cache there what is needed besides shards; with `fetch` False,
    only the manifest itself. `cache`: where its cache is now, if it has moved. Raises `CacheError`, and `PathError` for
    an odd URL, or a `cache` for a manifest in a store, which lies beside its own.
    """
    _check_moved(path, cache)
    if isinstance(path, Bucket):
        return _fetched(path, tables=fetch)
    try:
        data = without_mark(read_small(path, most=LIMIT, regular=True))
    except TooLarge:
        raise ManifestError(f"{path} is larger than {LIMIT} bytes, so it is not a manifest",
                            hint=NAME_IT) from None
    except OSError as error:
        raise ManifestError(f"cannot read manifest {path}: {error.strerror or error}",
                            hint="create it: prep encode SOURCE --model MODEL --cache CACHE -o manifest.json") from None
    return _with_tables(_parsed(path, data), fetch, cache)


def read_copy(copy: Path, path: Place, *, fetch: bool = True, cache: Place | None = None) -> Manifest:
    """The manifest in the file `copy`, as if it lay at `path`, from where its paths lead. Raises as `read_manifest`."""
    _check_moved(path, cache)
    try:
        manifest = _parsed(path, without_mark(read_regular(copy, LIMIT)))
    except OSError as error:
        raise ManifestError(f"cannot read manifest {copy}: {error.strerror or error}", hint=NAME_IT) from None
    return _with_tables(manifest, fetch, cache)


def _check_moved(path: Place, cache: Place | None) -> None:
    if cache is not None and isinstance(path, Bucket):
        raise PathError(f"--cache is given, but {path} is in a store, beside its cache", hint="omit --cache")


def _with_tables(manifest: Manifest, fetch: bool, cache: Place | None) -> Manifest:
    """The manifest, whose cache is at `cache` now if that is given; with `fetch`, what a store has of its tables."""
    located = replace(manifest, new_cache=cache and cache.absolute())
    if fetch:
        fetch_tables(located.cache, located.document["tables"].values())
    return located


def _fetched(path: Bucket, *, tables: bool) -> Manifest:
    """A manifest in a store, whose tables are fetched if `tables` are asked for."""
    copy_of(path)  # first: without a home there is no place for what would come
    try:
        manifest = _parsed(path, without_mark(read_sealed(path, LIMIT)))
    except OSError as error:
        raise ManifestError(f"cannot read manifest {path}: {error.strerror}",
                            hint="upload it with its cache: prep push MANIFEST URL") from None
    cache = manifest.document["cache"]
    if path.parent.follow(cache) is None:
        raise ManifestError(f"{path} names the cache {cache}, which is outside its bucket",
                            hint="upload both into one bucket: prep push MANIFEST URL")
    if tables:
        fetch_tables(manifest.cache, manifest.document["tables"].values())
    return manifest


def _parsed(path: Place, data: bytes) -> Manifest:
    _check_kind(path, data)
    try:
        return _checked(path, sealed(data, str(path)))
    except Unparsed as error:
        raise ManifestError(str(error), hint="run the prep encode command again: it rewrites the manifest and "
                            "encodes only missing rows") from None


def _check_kind(path: Place, data: bytes) -> None:
    """Raises `ManifestError` for what was never a manifest, which encoding again would not mend."""
    if path.suffix == ".toml" and _SOURCE.search(data):
        made = f"prep encode {shell_name(str(path))} --cache cache -o manifest.json"
        raise ManifestError(f"{path} is a recipe, expected a manifest",
                            hint=f"make one: {made}" if is_file(path) else NAME_IT)
    zeroed = not data.strip(b"\0")  # as a power failure leaves a file
    if not (zeroed or looks_like_manifest(data) or FORMAT.encode() in data):
        raise ManifestError(f"{path} is no manifest", hint=NAME_IT)


def version_of(shapes: Iterable[BucketShape], *, embedded: bool) -> int:
    """The version of a manifest with buckets of these shapes, and perhaps with embeddings: the first that has both."""
    return WITH_EMBEDDINGS if embedded else WITH_REFERENCES if have_references(shapes) else VERSION


def write_manifest(path: Place, document: Mapping[str, Any]) -> Manifest:
    """Seals `document`, checks it as a reader would, and writes it: atomically, or to a store, which is read again.

    Raises `ManifestError`, `CacheError`.
    """
    manifest, data = _new(path, document)
    staging = manifest.cache_root / "tmp"
    put(path, data, staging=staging if staging.is_dir() else None)
    return manifest


def check_manifest_place(path: Place) -> None:
    """Raises `PathError` unless a manifest can be written at `path`: where nothing is, or one that is replaced."""
    check_replaceable(path, "manifest", looks_like_manifest)


def _new(path: Place, document: Mapping[str, Any]) -> tuple[Manifest, bytes]:
    """A new manifest, as a reader would see it, and its bytes. Raises `ManifestError`."""
    whole = with_checksum(document)
    try:
        manifest = _checked(path, whole)
    except Unparsed as error:
        raise ManifestError(f"the new manifest is not valid: {error}") from None
    data = canonical(whole)
    if len(data) > LIMIT:
        raise ManifestError(f"the manifest would have {len(data)} bytes, expected at most {LIMIT}")
    return manifest, data


def check_model_named(manifest: Manifest, named: str | Path | None) -> None:
    """Raises `ModelError` if the only model that is named lies beside a manifest in an object store."""
    model = manifest.model
    if manifest.in_store and not named and "path" in manifest.document["model"] and not is_there(model):
        raise ModelError(f"{manifest.path} names the model {manifest.document['model']['path']}, which is "
                         "where the cache was made",
                         hint="name the model on this computer, or its Hub id, with --model")


def looks_like_manifest(start: bytes) -> bool:
    """Whether a file that begins with `start` is a manifest, intact or damaged; an empty file counts."""
    return not start or start.startswith(b'{"buckets":[')


def _checked(path: Place, document: dict[str, Any]) -> Manifest:
    if document.get("format") != FORMAT:
        raise Unparsed(f"{path} has format {brief(document.get('format'))}, expected '{FORMAT}'")
    if document.get("version") not in (VERSION, WITH_REFERENCES, WITH_EMBEDDINGS):
        raise Unparsed(f"{path} has version {brief(document.get('version'))}, this program reads versions "
                       f"{VERSION} to {WITH_EMBEDDINGS}")
    check_document(document, str(path))
    fields = {name: Field(**value) for name, value in document["fields"].items()}
    shapes = tuple(map(shape_in, document["buckets"]))
    wanted = version_of(shapes, embedded="embedding" in fields)
    if document["version"] != wanted:
        raise Unparsed(f"{path} has version {document['version']}, expected {wanted}: {WITH_EMBEDDINGS} if it has "
                       f"embeddings, {WITH_REFERENCES} if not and a bucket has references")
    base = _base(path, document["cache"])
    return Manifest(path=path, base=base, document=document, fields=fields, shapes=shapes,
                    buckets=tuple(size for size, _ in shapes))


def _base(path: Place, cache: str) -> Place:
    """The directory that a manifest's paths are relative to: the directory of the file itself if `path` is a link.

    It is the link's directory if only that has the cache: some stores replace each file by a link.
    """
    if not is_link(path):
        return path.parent
    real = Path(real_name(path)).parent
    beside_link, beside_file = (is_file(place_below(folder, cache) / MARKER) for folder in (path.parent, real))
    return path.parent if beside_link and not beside_file else real
