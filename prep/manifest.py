"""The document `manifest.json`: written canonically, read strictly; small, relative, without times.

It names its cache and a local model relative to itself, a Hub model by id, and the Arrow tables by digest. Its
format is described in manifests/README.md and manifests/manifest.schema.json.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from prep.cache.files import write_whole
from prep.digest import canonical, seal
from prep.errors import ManifestError
from prep.models.family import FAMILIES
from prep.parse import Unparsed, count, decimal, digest_of, expect, hub_id, known_keys, list_of, one_of, relative
from prep.parse import rgb_of as check_colour
from prep.parse import sealed_json as sealed
from prep.records import ITEM_BYTES, Size

FORMAT = "latentry/manifest"
VERSION = 1
LIMIT = 1 << 20  # bytes; a manifest is below this for any dataset, so anything larger is not one
KEYS = ("format", "version", "cache", "model", "family", "latents", "prediction", "models", "fields", "buckets",
        "samples", "sources", "recipe", "options", "prompts", "tables", "rejected", "self")


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field of a manifest: its arrays, and the context that its rows' keys share."""

    context: Mapping[str, Any]
    arrays: Mapping[str, Mapping[str, Any]]  # name → {"dtype": …, "dims": […]}
    rows: int
    shards: int
    bytes: int  # of the shards' files


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A manifest as it was read and checked."""

    path: Path
    document: Mapping[str, Any]
    fields: Mapping[str, Field]
    buckets: tuple[Size, ...]

    @property
    def digest(self) -> str:
        """Its `self`: the SHA-256 of its canonical bytes without that key."""
        return str(self.document["self"])

    @property
    def cache_root(self) -> Path:
        """Where its cache lies."""
        return self.path.parent / PurePosixPath(self.document["cache"])

    @property
    def model(self) -> Path | str:
        """A local model directory, or a Hub id."""
        named = self.document["model"]
        return self.path.parent / PurePosixPath(named["path"]) if "path" in named else str(named["hub"])

    @property
    def sources(self) -> tuple[Path | None, ...]:
        """Where the pictures were when they were encoded; `None` where no relative path leads there."""
        named = self.document["sources"]
        return tuple(None if place is None else self.path.parent / PurePosixPath(place) for place in named)

    @property
    def options(self) -> tuple[str | Path, ...]:
        """The options of the command that wrote it, beside source, cache and output."""
        words = self.document["options"]
        places = (word if isinstance(word, str) else word["path"] for word in words)
        return tuple(place if isinstance(word, str) else self.path.parent / PurePosixPath(place or "PATH")
                     for word, place in zip(words, places, strict=True))

    @property
    def shard_count(self) -> int:
        """How many shards it uses."""
        return sum(field.shards for field in self.fields.values())

    @property
    def family(self) -> str:
        """The model family's name."""
        return str(self.document["family"])


def read(path: Path) -> Manifest:
    """The manifest at `path`. Raises `ManifestError` when it is missing, damaged, edited or of another version."""
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise ManifestError(f"cannot read manifest {path}: {error.strerror or error}",
                            hint="prep encode SOURCE --model MODEL --cache CACHE -o manifest.json writes one") from None
    if len(data) > LIMIT:
        raise ManifestError(f"{path} is larger than {LIMIT} bytes, so it is not a manifest")
    try:
        return _checked(path, sealed(data, str(path)))
    except Unparsed as error:
        raise ManifestError(str(error), hint="run the prep encode command again: it rewrites the manifest and "
                            "computes only what is missing") from None


def write(path: Path, document: Mapping[str, Any]) -> Manifest:
    """Seals and writes `document` whole or not at all; checked first as a reader would. Raises `ManifestError`."""
    whole = seal(document)
    try:
        manifest = _checked(path, whole)
    except Unparsed as error:
        raise ManifestError(f"the manifest to be written is not valid: {error}") from None
    data = canonical(whole)
    if len(data) > LIMIT:
        raise ManifestError(f"the manifest would have {len(data)} bytes, expected at most {LIMIT}")
    staging = manifest.cache_root / "tmp"
    if not path.is_file() or path.read_bytes() != data:
        write_whole(path, data, staging=staging if staging.is_dir() else None)
    return manifest


def relative_to_manifest(target: Path, manifest: Path) -> str | None:
    """`target` as a POSIX path relative to the manifest's directory.

    `None` where none leads there (another drive), or none that every system reads (a backslash in a name).
    """
    try:
        place = Path(os.path.relpath(target.resolve(), manifest.resolve().parent)).as_posix()
    except ValueError:
        return None
    place = f"./{place}" if ":" in place.split("/")[0] else place  # or it would read as a drive
    return None if "\\" in place else place


def looks_like_one(start: bytes) -> bool:
    """Whether a file that begins so was meant to be a manifest, whole or damaged; an empty one may become one."""
    return not start or start.startswith(b'{"buckets":[')


def _checked(path: Path, document: dict[str, Any]) -> Manifest:
    if document.get("format") != FORMAT:
        raise Unparsed(f"{path} has format {document.get('format')!r}, expected '{FORMAT}'")
    if document.get("version") != VERSION:
        raise Unparsed(f"{path} has version {document.get('version')!r}, this program reads version {VERSION}")
    known_keys(document, KEYS, str(path))
    for key in KEYS:
        if key not in document:
            raise Unparsed(f"{path} lacks '{key}'")
    relative(expect(document["cache"], str, "cache"), "cache")
    _check_model(expect(document["model"], dict, "model"))
    _check_small(document)
    for place in [*expect(document["sources"], list, "sources"), document["recipe"]]:
        if place is not None:
            relative(expect(place, str, "sources"), "sources")
    list_of(document["options"], _option, "options")
    raw_fields = expect(document["fields"], dict, "fields")
    fields = {name: _field(value, f"fields.{name}") for name, value in raw_fields.items()}
    buckets = tuple(list_of(document["buckets"], _bucket, "buckets"))
    return Manifest(path=path, document=document, fields=fields, buckets=buckets)


def _option(value: Any, where: str) -> str | None:
    """A word of the command, or the path in it; `None` for a path that cannot be said relative to the manifest."""
    if isinstance(value, str):
        return value
    place = expect(value, dict, where).get("path")
    known_keys(value, ("path",), where)
    if place is not None:
        relative(expect(place, str, where), where)
    return place


def _check_model(model: dict[str, Any]) -> None:
    known_keys(model, ("path", "hub"), "model")
    if len(model) != 1:
        raise Unparsed(f"model is {model!r}, expected one of 'path' and 'hub'")
    if "path" in model:
        relative(expect(model["path"], str, "model.path"), "model.path")
    else:
        hub_id(expect(model["hub"], str, "model.hub"), "model.hub")


def _check_small(document: dict[str, Any]) -> None:
    latents = expect(document["latents"], dict, "latents")
    for name in ("channels", "factor"):
        count(latents.get(name), f"latents.{name}")
    for name in ("scaling_factor", "shift_factor"):
        decimal(latents.get(name), f"latents.{name}")
    if latents.get("alpha") is not None:
        check_colour(latents["alpha"], "latents.alpha")
    one_of(document["family"], FAMILIES, "family")
    one_of(document["prediction"], ("epsilon", "v_prediction"), "prediction")
    for group in ("models", "tables"):
        for name, value in expect(document[group], dict, group).items():
            digest_of(value, f"{group}.{name}")
    for name in ("samples", "shards", "findings"):
        digest_of(document["tables"].get(name), f"tables.{name}")
    _counts(document["samples"], "samples")
    count(document["rejected"], "rejected")
    _check_prompts(expect(document["prompts"], dict, "prompts"))


def _check_prompts(prompts: dict[str, Any]) -> None:
    known_keys(prompts, ("file", "digest", "unconditional", "samples"), "prompts")
    if prompts.get("file") is not None:
        relative(expect(prompts["file"], str, "prompts.file"), "prompts.file")
        digest_of(prompts.get("digest"), "prompts.digest")
    _row(prompts.get("unconditional"), "prompts.unconditional")
    for number, sample in enumerate(expect(prompts.get("samples"), list, "prompts.samples")):
        where = f"prompts.samples[{number}]"
        table = expect(sample, dict, where)
        expect(table.get("prompt"), str, f"{where}.prompt")
        if table.get("negative") is not None:
            expect(table["negative"], str, f"{where}.negative")
        _row(table.get("positive"), f"{where}.positive")
        _row(table.get("negative_row"), f"{where}.negative_row")


def _row(value: Any, where: str) -> None:
    table = expect(value, dict, where)
    for name in ("shard", "row"):
        count(table.get(name), f"{where}.{name}")


def _counts(value: Any, where: str) -> None:
    for role in ("train", "validation", "prior"):
        count(expect(value, dict, where).get(role), f"{where}.{role}")


def _field(value: Any, where: str) -> Field:
    table = expect(value, dict, where)
    known_keys(table, ("context", "arrays", "rows", "shards", "bytes"), where)
    arrays = expect(table.get("arrays"), dict, f"{where}.arrays")
    for name, array in arrays.items():
        one_of(expect(array, dict, f"{where}.arrays.{name}").get("dtype"), ITEM_BYTES, f"{where}.arrays.{name}.dtype")
        list_of(array.get("dims"), lambda dim, at: expect(dim, str, at), f"{where}.arrays.{name}.dims")
    counts = {name: count(table.get(name), f"{where}.{name}") for name in ("rows", "shards", "bytes")}
    return Field(context=expect(table.get("context"), dict, f"{where}.context"), arrays=arrays, **counts)


def _bucket(value: Any, where: str) -> Size:
    table = expect(value, dict, where)
    _counts(table, where)
    size = list_of(table.get("size"), count, f"{where}.size")
    if len(size) != 2:
        raise Unparsed(f"{where}.size is {size}, expected width and height")
    return size[0], size[1]
