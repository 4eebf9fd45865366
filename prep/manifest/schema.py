"""Checks every value of a manifest, which is untrusted even with a valid digest.

Afterwards numbers are in bounds, paths are relative, fields and arrays are the known ones, and contexts are nested at
most once, so other modules need no further checks. Everything here raises `Unparsed` with the place of the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from prep.arrays import ITEM_BYTES
from prep.batching.split import ROLES
from prep.cache.shard_format import MAX_ROWS
from prep.errors import PathError
from prep.fs.remote.bucket import Bucket, names_bucket
from prep.geometry import FITS, shape_in
from prep.models.families.registry import FAMILIES
from prep.models.family import ATTENTION_MASK, Family
from prep.models.fields import FIELDS, STD, dims_of
from prep.models.named import check_recorded
from prep.parse import (
    KEPT,
    PATH,
    Unparsed,
    brief,
    count,
    decimal,
    digest_of,
    expect,
    known_keys,
    list_of,
    one_of,
    relative,
    within,
)
from prep.parse import rgb_of as check_color

KEYS = ("format", "version", "cache", "model", "family", "latents", "prediction", "models", "fields", "buckets",
        "samples", "sources", "recipe", "options", "prompts", "tables", "rejected", "self")
MOST_BUCKETS = 4096
MOST_DEEP = 100  # directories on the way to a cache: deeper ones are made, and then few programs can remove them
MOST_SIDE = 1 << 17  # pixels of a bucket's side
MOST_REFERENCES = 64  # of a sample
MOST_AREA = 1 << 29  # pixels of a bucket: twice the square of the largest resolution
PROMPT_NUMBERS = {"width": (8, 8192), "height": (8, 8192), "seed": (0, (1 << 53) - 1), "steps": (1, 1000)}
PROMPT_GUIDANCE = (1, 100)
SCALE = 1e6  # largest magnitude of the scaling and shift of latents


def check_document(document: Mapping[str, Any], where: str) -> None:
    """Raises `Unparsed` unless `prep encode` could have written the document; format and version are checked before."""
    _exactly(document, KEYS, where)
    _check_cache(expect(document["cache"], str, "cache"))
    _check_model(expect(document["model"], dict, "model"))
    family = FAMILIES[one_of(document["family"], FAMILIES, "family")]
    one_of(document["prediction"], family.predictions, "prediction")
    _check_latents(expect(document["latents"], dict, "latents"), family)
    _check_digests(document["models"], ("vae", "text"), "models")
    _check_digests(document["tables"], ("samples", "shards", "findings"), "tables")
    _check_fields(expect(document["fields"], dict, "fields"), family)
    _check_buckets(document, family.factor)
    count(document["rejected"], "rejected")
    _check_prompts(expect(document["prompts"], dict, "prompts"), family.factor)
    for place in [*expect(document["sources"], list, "sources"), document["recipe"]]:
        if place is not None:
            _check_place(expect(place, str, "sources"), "sources")
    list_of(document["options"], _check_option, "options")


def _exactly(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    known_keys(table, keys, where)
    for key in keys:
        if key not in table:
            raise Unparsed(f"{where} lacks '{key}'")


def _check_option(value: Any, where: str) -> None:
    """Checks one option: a word, or a path relative to the manifest; null if no relative path exists."""
    if isinstance(value, str):
        return
    table = expect(value, dict, where)
    _exactly(table, ("path",), where)
    if table["path"] is not None:
        _check_place(expect(table["path"], str, where), where)


def _check_place(place: str, where: str) -> None:
    """Checks a path relative to the manifest, or the URL of a prefix in an object store."""
    if not names_bucket(place):
        relative(place, where)
        return
    try:
        wanted = str(Bucket.parse(place))
    except PathError as error:
        raise Unparsed(f"{where} is {brief(place)}: {error.message}") from None
    if place != wanted or len(place) > PATH:
        raise Unparsed(f"{where} is {brief(place)}, expected a URL like s3://bucket/prefix")


def _check_cache(place: str) -> None:
    """Checks where the cache is: relative to the manifest, or the URL of a cache in an object store."""
    _check_place(place, "cache")
    if place.count("/") > MOST_DEEP:
        raise Unparsed(f"cache is {brief(place)}, {place.count('/')} directories deep, expected at most {MOST_DEEP}")
    if names_bucket(place) and not Bucket.parse(place).key:
        raise Unparsed(f"cache is {brief(place)}, expected a URL like s3://bucket/cache")


def _check_model(model: dict[str, Any]) -> None:
    check_recorded(model, "model", lambda path, where: relative(expect(path, str, where), where))


def _check_latents(latents: dict[str, Any], family: Family) -> None:
    known_keys(latents, ("channels", "factor", "scaling_factor", "shift_factor", "mean", "std", "alpha", "references",
                         "imported"), "latents")
    for name, wanted in (("channels", family.latent_channels), ("factor", family.factor)):
        if count(latents.get(name), f"latents.{name}") != wanted:
            raise Unparsed(f"latents.{name} is {latents[name]}, expected {wanted} for family '{family.name}'")
    for name in ("scaling_factor", "shift_factor"):
        within(float(decimal(latents.get(name), f"latents.{name}")), -SCALE, SCALE, f"latents.{name}")
    if abs(float(latents["scaling_factor"])) * SCALE < 1:
        raise Unparsed(f"latents.scaling_factor is {latents['scaling_factor']}, expected at least {1 / SCALE}: latents "
                       "are divided by it")
    if "mean" in latents or "std" in latents:
        _check_statistics(latents, family)
    if latents.get("alpha") is not None and not (family.keeps_alpha and latents["alpha"] == KEPT):
        check_color(latents["alpha"], "latents.alpha")
    if "references" in latents:
        references = expect(latents["references"], dict, "latents.references")
        _exactly(references, ("fit", "resolution"), "latents.references")
        one_of(references["fit"], FITS, "latents.references.fit")
        count(references["resolution"], "latents.references.resolution", MOST_SIDE)
    if "imported" in latents:
        _check_imported(expect(latents["imported"], dict, "latents.imported"))


def _check_imported(imported: dict[str, Any]) -> None:
    """Checks what says that another program made the latents."""
    _exactly(imported, ("from", "verified", "options"), "latents.imported")
    one_of(imported["from"], ("kohya-npz",), "latents.imported.from")
    count(imported["verified"], "latents.imported.verified")
    list_of(imported["options"], lambda value, where: one_of(value, ("--bucket-no-upscale",), where),
            "latents.imported.options")


def _check_statistics(latents: dict[str, Any], family: Family) -> None:
    """Checks the mean and standard deviation of each channel, or of each channel and cell of a patch."""
    for name in ("mean", "std"):
        values = list_of(latents.get(name), decimal, f"latents.{name}")
        if len(values) not in (family.latent_channels, family.latent_channels * family.patch ** 2):
            raise Unparsed(f"latents.{name} has {len(values)} numbers, expected one for each of "
                           f"{family.latent_channels} channels")
        for value in values:
            within(float(value), 1 / SCALE if name == "std" else -SCALE, SCALE, f"latents.{name}")
    if len(latents["mean"]) != len(latents["std"]):
        raise Unparsed(f"latents.std has {len(latents['std'])} numbers, expected {len(latents['mean'])}, as "
                       "latents.mean")


def _check_digests(value: Any, names: tuple[str, ...], where: str) -> None:
    table = expect(value, dict, where)
    _exactly(table, names, where)
    for name in names:
        digest_of(table[name], f"{where}.{name}")


def _check_fields(fields: dict[str, Any], family: Family) -> None:
    known_keys(fields, FIELDS, "fields")
    for name, value in fields.items():
        where = f"fields.{name}"
        field = expect(value, dict, where)
        _exactly(field, ("context", "arrays", "rows", "shards", "bytes"), where)
        _check_arrays(expect(field["arrays"], dict, f"{where}.arrays"), name, family)
        _check_context(expect(field["context"], dict, f"{where}.context"), f"{where}.context", levels=2)
        for number in ("rows", "shards", "bytes"):
            count(field[number], f"{where}.{number}")
    for name in ("latent", "text"):
        if name not in fields:
            raise Unparsed(f"fields lacks '{name}', which is required")


def _check_arrays(arrays: dict[str, Any], field: str, family: Family) -> None:
    wanted = dims_of(family, field, with_std=STD in arrays)
    _exactly(arrays, tuple(wanted), f"fields.{field}.arrays")
    for name, dims in wanted.items():
        where = f"fields.{field}.arrays.{name}"
        array = expect(arrays[name], dict, where)
        _exactly(array, ("dtype", "dims"), where)
        is_mask = field == "mask" or name == ATTENTION_MASK
        one_of(array["dtype"], ["float16"] if field == "embedding" else
               [dtype for dtype in ITEM_BYTES if (dtype == "uint8") == is_mask], f"{where}.dtype")
        if array["dims"] != list(dims):
            raise Unparsed(f"{where}.dims is {brief(array['dims'])}, expected {list(dims)}")


def _check_context(context: dict[str, Any], where: str, levels: int) -> None:
    """Checks what keys are computed from: whole numbers, and strings without NUL, which marks a placeholder in keys."""
    for name, value in context.items():
        place = f"{where}.{name[:40]}"
        if isinstance(value, dict) and levels > 1:
            _check_context(value, place, levels - 1)
        elif type(value) is not int and not isinstance(value, str):
            raise Unparsed(f"{place} is {brief(value)}, expected a string or a whole number")
        if "\0" in name or (isinstance(value, str) and "\0" in value):
            raise Unparsed(f"{place} contains a NUL, expected none in the input of keys")


def _check_buckets(document: Mapping[str, Any], factor: int) -> None:
    buckets = list_of(document["buckets"], lambda value, where: _bucket(value, where, factor), "buckets")
    if len(buckets) > MOST_BUCKETS:
        raise Unparsed(f"buckets has {len(buckets)} members, expected at most {MOST_BUCKETS}")
    if len(set(map(shape_in, buckets))) != len(buckets):
        raise Unparsed("buckets has a size twice, expected distinct sizes")
    _check_counts(document["samples"], "samples", ROLES)
    for role in ROLES:
        total = sum(bucket[role] for bucket in buckets)
        if document["samples"][role] != total:
            raise Unparsed(f"samples.{role} is {document['samples'][role]}, expected {total}, the sum over the buckets")


def _bucket(value: Any, where: str, factor: int) -> dict[str, Any]:
    table = expect(value, dict, where)
    _check_counts({name: each for name, each in table.items() if name != "references"}, where, ("size", *ROLES))
    _check_size(table["size"], f"{where}.size", factor)
    _check_references(table, where, partial(_check_size, factor=factor), "sizes")
    return table


def _check_references(table: Mapping[str, Any], where: str, check: Callable[[Any, str], None], what: str) -> None:
    """Checks each of a table's references, if it has any, and how many there are."""
    if "references" in table:
        references = list_of(table["references"], check, f"{where}.references")
        if not 0 < len(references) <= MOST_REFERENCES:
            raise Unparsed(f"{where}.references has {len(references)} {what}, expected 1 to {MOST_REFERENCES}")


def _check_size(value: Any, where: str, factor: int) -> None:
    size = list_of(value, count, where)
    if len(size) != 2:
        raise Unparsed(f"{where} is {brief(size)}, expected width and height")
    for side in size:
        if side % factor or not factor <= side <= MOST_SIDE or size[0] * size[1] > MOST_AREA:
            raise Unparsed(f"{where} is {size}, expected multiples of {factor}, at most {MOST_SIDE}, with "
                           f"an area of at most {MOST_AREA}")


def _check_counts(value: Any, where: str, keys: tuple[str, ...]) -> None:
    table = expect(value, dict, where)
    _exactly(table, keys, where)
    for role in ROLES:
        count(table[role], f"{where}.{role}")


def _check_prompts(prompts: dict[str, Any], factor: int) -> None:
    _exactly(prompts, ("file", "digest", "unconditional", "samples"), "prompts")
    if prompts["file"] is not None:
        relative(expect(prompts["file"], str, "prompts.file"), "prompts.file")
    if prompts["file"] is not None or prompts["digest"] is not None:
        digest_of(prompts["digest"], "prompts.digest")
    _check_row(prompts["unconditional"], "prompts.unconditional")
    list_of(prompts["samples"], partial(_check_prompt, factor=factor), "prompts.samples")


def _check_prompt(value: Any, where: str, factor: int) -> None:
    table = expect(value, dict, where)
    _exactly({name: each for name, each in table.items() if name not in ("settings", "references")},
             ("prompt", "negative", "positive", "negative_row"), where)
    _check_references(table, where, partial(_check_reference, factor=factor), "members")
    if "settings" in table:
        _check_prompt_settings(expect(table["settings"], dict, f"{where}.settings"), f"{where}.settings")
    expect(table["prompt"], str, f"{where}.prompt")
    if table["negative"] is not None:
        expect(table["negative"], str, f"{where}.negative")
    _check_row(table["positive"], f"{where}.positive")
    _check_row(table["negative_row"], f"{where}.negative_row")


def _check_reference(value: Any, where: str, factor: int) -> None:
    """Checks a reference of a prompt: the picture, how it is placed, and where its row is."""
    table = expect(value, dict, where)
    _exactly({name: each for name, each in table.items() if name != "mask"},
             ("name", "picture", "size", "scaled", "crop", "bucket", "shard", "row"), where)
    if "mask" in table:
        mask = expect(table["mask"], dict, f"{where}.mask")
        _exactly(mask, ("name", "digest", "shard", "row"), f"{where}.mask")
        expect(mask["name"], str, f"{where}.mask.name")
        digest_of(mask["digest"], f"{where}.mask.digest")
        _check_row({name: mask[name] for name in ("shard", "row")}, f"{where}.mask")
    expect(table["name"], str, f"{where}.name")
    digest_of(table["picture"], f"{where}.picture")
    _check_size(table["bucket"], f"{where}.bucket", factor)
    for name in ("size", "scaled", "crop"):
        pair = list_of(table[name], count, f"{where}.{name}")
        if len(pair) != 2 or max(pair) > MOST_SIDE or (name != "crop" and min(pair) < 1):
            raise Unparsed(f"{where}.{name} is {brief(pair)}, expected two sides of at most {MOST_SIDE}")
    for whole, first, side in zip(table["scaled"], table["crop"], table["bucket"], strict=True):
        if first + side > whole:
            raise Unparsed(f"{where}.crop is {table['crop']}, expected a crop within the scaled picture")
    _check_row({name: table[name] for name in ("shard", "row")}, where)


def _check_prompt_settings(settings: dict[str, Any], where: str) -> None:
    """Checks a prompt's own sampling settings: whole numbers, and the guidance scale as a decimal string."""
    known_keys(settings, (*PROMPT_NUMBERS, "guidance"), where)
    for name, value in settings.items():
        number = float(decimal(value, f"{where}.guidance")) if name == "guidance" else count(value, f"{where}.{name}")
        within(number, *PROMPT_NUMBERS.get(name, PROMPT_GUIDANCE), f"{where}.{name}")


def _check_row(value: Any, where: str) -> None:
    table = expect(value, dict, where)
    _exactly(table, ("shard", "row"), where)
    count(table["shard"], f"{where}.shard", (1 << 31) - 1)
    count(table["row"], f"{where}.row", MAX_ROWS - 1)
