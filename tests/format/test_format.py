"""The format page is true: its keys, columns, limits, vectors and bytes are those of the code, in both directions."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from one_key import latent_key, mask_key

from prep import keys
from prep.arrays import ITEM_BYTES, ArraySpec
from prep.cache import damage, plans, shard_format
from prep.cache.damage import Damage
from prep.cache.records import Task
from prep.cache.store import open_cache
from prep.cache.writer import ShardWriter
from prep.digest import canonical, digest_json, with_checksum
from prep.fs.paths import MARKER
from prep.geometry import Placement
from prep.images.decode import POLICY
from prep.manifest.tables import FINDINGS, SAMPLES, SAMPLES_WITH_REFERENCES, SHARDS, samples_schema
from prep.models.families.registry import FAMILIES
from prep.models.fields import FIELDS, dims_of
from prep.parse import sealed_json

MANIFESTS = Path(__file__).parents[2] / "manifests"
PAGE = (MANIFESTS / "format.md").read_text(encoding="utf-8")
SCHEMA = json.loads((MANIFESTS / "manifest.schema.json").read_text())
BLOCKS = re.findall(r"^```(json|hex) (.*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)


def section(number: int | str) -> str:
    """The text below a numbered heading."""
    found = re.search(rf"^## {number}\.? .*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"the page has no section {number}"
    return found[0]


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the Markdown table whose head begins with `head`; the ticks around whole cells go."""
    (table,) = re.findall(rf"^\| {re.escape(head)}.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
    return [[re.sub(r"^`([^`]*)`$", r"\1", cell) for cell in row] for row in cells]


def blocks(kind: str, name: str = "") -> list[tuple[str, str]]:
    """(the rest of its first line, text) of each fenced block whose first line begins with `kind` and `name`."""
    return [(words, text.rstrip("\n")) for found, words, text in BLOCKS if found == kind and words.startswith(name)]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()


# ---- canonical JSON --------------------------------------------------------------------------------------------------


def test_the_examples_are_canonical_and_the_marker_is_the_one_that_is_written(tmp_path):
    ((_, example),) = blocks("json", "canonical")
    assert canonical(json.loads(example)).decode() == example
    ((_, marker),) = blocks("json", "sealed")
    assert sealed_json(marker.encode(), "page")["format"] == "latentry/cache"
    open_cache(tmp_path / "cache", create=True)
    assert (tmp_path / "cache" / MARKER).read_text() == marker
    body = {key: value for key, value in json.loads(marker).items() if key != "self"}
    assert sha256(json.dumps(body, sort_keys=True, separators=(",", ":"))) == json.loads(marker)["self"]


def test_every_character_is_spelled_as_the_page_says():
    """Section 2 as a program of its own, for all of the first planes and a sample of the others."""
    short = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}
    for code in [*range(0x10000), *range(0x10000, 0x110000, 4099)]:
        if 0xD800 <= code <= 0xDFFF:
            continue
        high, low = 0xD800 + (code - 0x10000 >> 10), 0xDC00 + (code & 0x3FF)
        wanted = short.get(code) or (chr(code) if 0x20 <= code <= 0x7E else f"\\u{code:04x}" if code < 0x10000
                                     else f"\\u{high:04x}\\u{low:04x}")
        assert canonical(chr(code)).decode() == f'"{wanted}"', code


# ---- the cache -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A directory with cache and manifest of a real encode: masks, prompts, a rejected picture; and a second run."""
    from pictures import draw, draw_mask

    from prep.cli.console import run
    from prep.cli.main import app

    root = tmp_path_factory.mktemp("format")
    for number, size in enumerate([(96, 96), (144, 64)]):
        draw(root / "photos" / f"{number}.png", size, seed=number).with_suffix(".txt").write_text(f"picture {number}")
    draw_mask(root / "photos" / "0-masklabel.png", (96, 96))
    (root / "prompts.txt").write_text("a dog --n ugly\n")
    arguments = ["encode", root / "photos", "--model", tiny_model, "--cache", root / "cache", "-o", root / "m.json",
                 "--resolution", 96, "--step", 16, "--mask", "sidecar", "--prompts", root / "prompts.txt", "--quiet"]
    for _ in range(2):
        with pytest.raises(SystemExit) as ending:
            run(app, "prep", [str(word) for word in arguments])
        assert not ending.value.code
    return root


def listed_paths() -> set[str]:
    """The first column of the tree in section 3, digests spelled as patterns."""
    tree = re.findall(r"^      (\S+)", section(3), re.MULTILINE)
    return {re.sub(r"ab12…", r"[0-9a-f]{64}", path).replace("/ab/", "/[0-9a-f]{2}/") for path in tree}


def test_every_file_of_a_cache_is_on_the_page(world):
    cache = world / "cache"
    patterns = [path + (".*" if path.endswith("/") else "") for path in listed_paths()]
    found = {path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()}
    assert found
    for path in found:
        assert any(re.fullmatch(pattern, path) for pattern in patterns), path
    for kind in ("shards", "tables", "commits"):
        assert any(path.startswith(kind) for path in found)


def test_every_kind_of_file_is_said_to_be_where_the_code_puts_it(tmp_path):
    cache, name = open_cache(tmp_path / "cache", create=True), "ab" + "12" * 31
    places = [cache.shard(name), cache.table(name), cache.commit(name), cache.plan(name), cache.damaged(name)]
    patterns = [path.rstrip("/") for path in listed_paths()]
    for place in places:
        path = place.relative_to(cache.root).as_posix()
        assert any(re.fullmatch(pattern, path) for pattern in patterns), path
    assert importlib.import_module("prep.cache.ledger.index").NAME in listed_paths()


# ---- the manifest ----------------------------------------------------------------------------------------------------


def dotted(schema: dict, prefix: str = "") -> Iterator[str]:
    """Every key of a JSON Schema: `a.b`, `a.*.b` where names are free, `a[].b` in lists."""
    for name, inner in schema.get("properties", {}).items():
        yield prefix + name
        yield from dotted(inner, f"{prefix}{name}.")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from dotted(schema["additionalProperties"], f"{prefix}*.")
    if "items" in schema:
        yield from dotted(schema["items"], f"{prefix.rstrip('.')}[].")
    for choice in (*schema.get("oneOf", ()), *schema.get("anyOf", ())):
        yield from dotted(choice, prefix)


PLACE = {f"prompts.{where}.{name}" for where in ("unconditional", "samples[].positive", "samples[].negative_row")
         for name in ("shard", "row")}


def test_every_key_of_a_manifest_is_on_the_page_and_the_reverse():
    told = [row[0] for row in rows(section(4), "key")]
    assert len(told) == len(set(told))
    assert set(told) == set(dotted(SCHEMA)) - PLACE
    assert '`{"row": R, "shard": S}`' in section(4)


def test_the_schema_requires_what_the_code_requires():
    document = importlib.import_module("prep.manifest.schema")
    assert set(SCHEMA["required"]) == set(SCHEMA["properties"]) == set(document.KEYS)
    optional = {row[0] for row in rows(section(4), "key") if row[2].startswith("optional")}
    lacking = {name for name in SCHEMA["properties"]["latents"]["properties"]
               if name not in SCHEMA["properties"]["latents"]["required"]}
    assert {f"latents.{name}" for name in lacking} == {"latents.alpha", "latents.mean", "latents.std",
                                                       "latents.imported", "latents.references"}
    configs = next(choice["properties"]["configs"] for choice in SCHEMA["properties"]["model"]["oneOf"]
                   if "configs" in choice["properties"])
    sources = {f"model.configs{name}" for name in ("", ".path", ".hub", ".own")}
    assert {f"model.configs.{name}" for name in dotted(configs)} | {"model.configs"} == sources
    prompt = SCHEMA["properties"]["prompts"]["properties"]["samples"]["items"]
    assert set(prompt["properties"]) - set(prompt["required"]) == {"settings", "references"}
    assert set(prompt["properties"]["settings"]["properties"]) == {*document.PROMPT_NUMBERS, "guidance"}
    objects = {f"latents.{name}{child}" for name in ("imported", "references") for child in (
        "", *(f".{key}" for key in SCHEMA["properties"]["latents"]["properties"][name]["required"]))}
    of_prompts = {name: prompt["properties"][name] for name in ("references", "settings")}
    assert optional == {*sources, "buckets[].references", "latents.alpha", "latents.mean", "latents.std",
                        *objects,
                        *(f"prompts.samples[].{name}" for name in dotted({"properties": of_prompts}))}


def test_the_schema_has_the_limits_of_the_code():
    document = importlib.import_module("prep.manifest.schema")
    buckets, prompts = SCHEMA["properties"]["buckets"], SCHEMA["properties"]["prompts"]["properties"]
    size, row = buckets["items"]["properties"]["size"]["items"], prompts["unconditional"]["properties"]["row"]
    assert (buckets["maxItems"], size["maximum"]) == (document.MOST_BUCKETS, document.MOST_SIDE)
    assert buckets["items"]["properties"]["references"]["maxItems"] == document.MOST_REFERENCES
    assert row["maximum"] == shard_format.MAX_ROWS - 1


def test_the_example_has_every_key_that_is_not_optional():
    def seen(value, prefix: str = "") -> Iterator[str]:
        members = value.items() if isinstance(value, dict) else ()
        for name, inner in members:
            free = prefix in ("fields.", "fields.*.arrays.")
            yield from () if free else (prefix + name,)
            if f"{prefix}{name}" not in ("fields.*.context",):
                yield from seen(inner, f"{prefix}*." if free else f"{prefix}{name}.")
        for inner in value if isinstance(value, list) else ():
            yield from seen(inner, f"{prefix.rstrip('.')}[].")

    found = set(seen(json.loads((MANIFESTS / "example.json").read_bytes())))
    wanted = {row[0] for row in rows(section(4), "key") if not row[2].startswith("optional")} | PLACE
    assert found - {"latents.alpha"} == wanted - {"model.hub"}


def test_families_and_dtypes_are_the_codes():
    said = {row[0]: row[2] for row in rows(section(4), "key")}
    assert re.findall(r"`(\w+)`", f"`{said['family'].strip('`')}`") == list(FAMILIES)
    assert set(re.findall(r"`(\w+)`", said["fields.*.arrays.*.dtype"])) == set(ITEM_BYTES)
    dims = {(field, name): each for family in FAMILIES.values() for field in FIELDS
            for name, each in dims_of(family, field, with_std=True).items()}
    assert {(row[0], row[1]) for row in rows(section(6), "field")} == set(dims)
    for field, name, _, told, _ in rows(section(6), "field"):
        assert tuple(told.split(", ")) == dims[field, name]


# ---- keys ------------------------------------------------------------------------------------------------------------


def placement(spelled: dict) -> Placement:
    return Placement(scaled=tuple(spelled["scaled"]), crop=tuple(spelled["crop"]), bucket=tuple(spelled["bucket"]),
                     flip=bool(spelled["flip"]))


KEY_OF = {
    "latent": lambda d: latent_key(d["picture"], placement(d["placement"]),
                                   tuple(d["alpha"]) if isinstance(d["alpha"], list) else d["alpha"], d["context"]),
    "imported": lambda d: keys.ImportedLatentKeys(d["context"]).key(d["picture"], d["file"],
                                                                    placement(d["placement"])),
    "mask": lambda d: mask_key(d["origin"], placement(d["placement"]), d["context"]),
    "text": lambda d: keys.text_key(d["caption"], d["context"]),
    "negative": lambda d: keys.negative_key(d["negative"], d["context"]),
    "referring": lambda d: keys.text_key(d["caption"], d["context"], [
        keys.SeenPicture(picture=each["picture"], placement=placement(each["placement"]),
                         alpha=None if each["alpha"] is None else tuple(each["alpha"])) for each in d["references"]]),
    "unconditional": lambda d: keys.unconditional_key(d["context"]),
    "sample": lambda d: keys.sample_id(d["picture"], tuple(d["bucket"]), d["copy"]),
    "embedding": lambda d: keys.EmbeddingKeys(d["context"]).key(
        d["picture"], placement(d["placement"]), None if d["alpha"] is None else tuple(d["alpha"])),
    "task": lambda d: importlib.import_module("prep.encode.plan")._task(d["field"], d["rows"]).key,
    "plan": digest_json,
}


@pytest.mark.parametrize("kind", KEY_OF)
def test_golden_vectors_are_digests_of_their_own_text_and_what_the_code_makes(kind):
    found = [(words.split()[1], text) for words, text in blocks("json", f"{kind} ")]
    assert found
    for digest, text in found:
        assert sha256(text) == digest == KEY_OF[kind](json.loads(text))
        assert canonical(json.loads(text)).decode() == text


def test_the_members_of_a_key_are_those_of_its_vector():
    for row, spelled in rows(section(5), "row"):
        kind = {"text of no prompt": "unconditional", "negative text": "negative",
                "imported latent": "imported"}.get(row, row)
        members = set(re.findall(r'"(\w+)":', spelled))
        for _, text in blocks("json", f"{kind} "):
            assert set(json.loads(text)) == members, row
    for name in re.findall(r'`\{"kind": "sample".*?\}`', section(5)):
        assert set(re.findall(r'"(\w+)":', name)) == set(json.loads(blocks("json", "sample ")[0][1]))


def test_contexts_have_the_keys_that_the_page_lists(world):
    fields = json.loads((world / "m.json").read_bytes())["fields"]
    told: dict[str, dict[str, str]] = {}
    for field, key, value in rows(section(5), "field"):
        told.setdefault(field, {})[key] = value
    assert {field: set(found) for field, found in told.items()} == {
        field: set(fields[field]["context"]) for field in fields}
    for field, found in fields.items():
        for key, value in found["context"].items():
            spelled = told[field][key].replace('"colour": …', f'"colour": "{POLICY["colour"]}"')
            if isinstance(value, dict):
                assert json.loads(re.search(r"\{.*?\}", spelled)[0]) == value
            elif key in ("meaning", "posterior", "layout"):
                assert spelled.replace("`", "").startswith(str(value))


def test_fingerprints_are_made_as_the_page_says(tiny_model):
    """Section 5 as a program of its own."""
    from prep.models.fingerprint import text_fingerprint, vae_fingerprint

    def digest(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def config(path: Path, *without: str) -> str:
        kept = {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("_")
                and key not in ("transformers_version", "torch_dtype", "dtype", *without)}
        return sha256(json.dumps({"config": json.dumps(kept, sort_keys=True)}, separators=(",", ":")))

    noise = ("name_or_path", "special_tokens_map_file", "is_local", "backend", "local_files_only")
    assert all(f"`{name}`" in section(5) for name in noise)
    folder = tiny_model / "vae"
    parts = [["config.json", config(folder / "config.json")],
             *([path.name, digest(path)] for path in sorted(folder.glob("*.safetensors")))]
    assert vae_fingerprint(tiny_model) == digest_json({"kind": "vae", "parts": parts})
    folder = tiny_model / "text_encoder"
    parts = [["config.json", config(folder / "config.json")],
             *([path.name, digest(path)] for path in sorted(folder.glob("*.safetensors")))]
    names = re.findall(r"`([a-z_]+\.(?:json|txt|model))`", re.search(r"whichever are\s+there of.*?, in this order",
                                                                     section(5), re.DOTALL)[0])
    tokenizer = [[name, config(tiny_model / "tokenizer" / name, *noise) if name == "tokenizer_config.json"
                  else digest(tiny_model / "tokenizer" / name)] for name in names
                 if (tiny_model / "tokenizer" / name).is_file()]
    assert text_fingerprint(tiny_model) == digest_json({"kind": "text", "parts": parts, "tokenizer": tokenizer})


# ---- shards ----------------------------------------------------------------------------------------------------------


def page_shard() -> dict[str, bytes]:
    """The files of appendix B."""
    files = {name: text.encode() for name, text in blocks("json") if name.endswith("zarr.json")}
    for name, text in blocks("hex"):
        lines = [line.split() for line in text.splitlines()]
        data = bytes.fromhex("".join(byte for line in lines for byte in line[1:]))
        assert [int(line[0], 16) for line in lines] == list(range(0, len(data), 16))
        files[name] = data
    return files


def test_the_shard_of_the_page_is_the_one_that_is_written(tmp_path):
    cache = open_cache(tmp_path / "cache", create=True)
    with ShardWriter(cache, "mask", [ArraySpec(name="mask", dtype="uint8", shape=(1, 1, 3))]) as writer:
        writer.add("11" * 32, {"mask": bytes([0, 128, 255])})
        writer.add("22" * 32, {"mask": bytes([1, 2, 3])})
        made = writer.finish()
    root = cache.shard(made.digest)
    written = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert written == page_shard()
    ((words, listing),) = blocks("json", "shard ")
    assert words.split()[1] == made.digest == sha256(listing)
    assert json.loads(listing) == [{"path": name, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
                                   for name, data in sorted(written.items())]


def test_the_bytes_of_a_data_file_lie_where_the_page_says():
    """The ranges of section 6, evaluated for the shard of appendix B."""
    data, N, R = page_shard()["mask/c.0.0.0.0"], 2, 3
    scope = {"N": N, "R": R, "T": R + 4}
    ranges = [[eval(side.replace("×", "*"), {**scope, "i": i}) for side in cell.split(" to ")]
              for cell, _ in rows(section(6), "bytes") for i in (range(N) if "i" in cell else [0])]
    assert sorted(place for start, end in ranges for place in range(start, end)) == list(range(len(data)))
    assert len(data) == eval("N * (T + 16) + 4", scope)
    parts = [data[start:end] for start, end in ranges]
    assert parts[:2] == [b"\0\x80\xff", b"\1\2\3"]
    assert parts[2:4] == [shard_format.crc_bytes(part) for part in parts[:2]]
    offsets, lengths = ([struct.unpack("<Q", part)[0] for part in parts[place:place + 2]] for place in (4, 6))
    assert offsets == [0, scope["T"]] and lengths == [scope["T"]] * 2
    assert parts[8] == shard_format.crc_bytes(data[N * scope["T"]:-4])
    assert "0xE3069283" in section(1) and shard_format.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_documents_of_every_dtype_differ_as_the_page_says(dtype):
    spec = ArraySpec(name="a", dtype=dtype, shape=(4, 2))
    document = json.loads(shard_format.array_document(spec, 5))
    sharding = document["codecs"][0]["configuration"]
    assert (document["shape"], sharding["chunk_shape"]) == ([5, 4, 2], [1, 4, 2])
    assert document["chunk_grid"]["configuration"]["chunk_shape"] == [5, 4, 2] and document["data_type"] == dtype
    assert ("configuration" in sharding["codecs"][0]) == (dtype != "uint8")
    pattern = json.loads(page_shard()["mask/zarr.json"])
    assert {key: type(value) for key, value in pattern.items()} == {key: type(value) for key, value in document.items()}


# ---- tables ----------------------------------------------------------------------------------------------------------


def columns(schema: pa.Schema) -> list[list[str]]:
    found = []
    for field in schema:
        if pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type):
            found.append([field.name, "list of struct"])
            found += [[f"{field.name}[].{inner.name}", str(inner.type)] for inner in field.type.value_type]
        elif pa.types.is_list(field.type):
            found.append([field.name, f"list of {field.type.value_type}"])
        else:
            found.append([field.name, str(field.type)])
    return found


@pytest.mark.parametrize(("name", "schema"), [("samples", SAMPLES), ("shards", SHARDS), ("findings", FINDINGS)])
def test_the_columns_of_a_table_are_those_of_the_code(name, schema):
    text = re.search(rf"^\*\*{name}\*\*.*?(?=^\*\*|\Z)", section(7), re.MULTILINE | re.DOTALL)[0]
    assert [row[:2] for row in rows(text, "column")] == columns(schema)
    nullable = [field.name for field in schema if field.nullable]
    assert nullable == (["coverage"] if name == "samples" else [])


def test_the_column_of_references_is_that_of_the_code():
    assert [row[:2] for row in rows(section(7), "of references")] == columns(
        pa.schema([field for field in SAMPLES_WITH_REFERENCES if field.name not in SAMPLES.names]))


def test_the_columns_of_embeddings_are_those_of_the_code():
    assert [row[:2] for row in rows(section(7), "of embeddings")] == columns(
        pa.schema([field for field in samples_schema((), embedded=True) if field.name not in SAMPLES.names]))


def test_the_columns_of_a_plan_are_those_of_the_code(tmp_path):
    assert [row[:2] for row in rows(section(9), "column")] == columns(plans.SCHEMA)
    cache = open_cache(tmp_path / "cache", create=True)
    plans.write_plan(cache, "ab" * 32, [Task(key="cd" * 32, field="text", rows=("11" * 32,))])
    data = cache.plan("ab" * 32).read_bytes()
    assert data[-32:] == hashlib.sha256(data[:-32]).digest()
    table = pa.ipc.open_stream(data[:-32]).read_all().to_pylist()
    assert table == [{"task": b"\xcd" * 32, "field": "text", "rows": [b"\x11" * 32]}]


def test_tables_are_as_the_page_says(world):
    document = json.loads((world / "m.json").read_bytes())
    for name, digest in document["tables"].items():
        data = (world / "cache" / "tables" / digest[:2] / f"{digest}.arrow").read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest and data[:8] == b"ARROW1\0\0" and data[-6:] == b"ARROW1"
        table = pa.ipc.open_file(data).read_all()
        keys = {"samples": ["id"], "shards": ["field", "digest"], "findings": table.column_names}[name]
        order = [tuple(row[key] for key in keys) for row in table.to_pylist()]
        assert order == sorted(order) and table.schema.metadata is None


# ---- commits and damage ----------------------------------------------------------------------------------------------


def test_commits_have_the_keys_that_the_page_lists(world):
    told = [row[0] for row in rows(section(8), "key")]
    commits = [json.loads(path.read_bytes()) for path in (world / "cache" / "commits").glob("*/*.json")]
    plain, inner = {key for key in told if "." not in key}, {key.split(".")[1] for key in told if "." in key}
    provenance = {"host", "device", "versions", "milliseconds"}
    assert commits and all(set(commit) == plain | provenance for commit in commits)
    assert all(f"`{name}`" in section(8) for name in (*provenance, "salvaged", "compacted"))
    from prep.cache.commits import as_json
    from prep.cache.records import Reject

    assert set(as_json(Reject(key="", code="", detail=""))) == inner
    for path in (world / "cache" / "commits").glob("*/*.json"):
        assert sealed_json(path.read_bytes(), "commit")["task"] == path.stem


def test_damage_records_have_the_keys_that_the_page_lists(tmp_path):
    cache = open_cache(tmp_path / "cache", create=True)
    damage.record(cache, [Damage(shard="ab" * 32, field="latent", array="latent", row=3, what="x"),
                          Damage(shard="ab" * 32, field=None, array=None, row=None, what="y")])
    document = sealed_json(cache.damaged("ab" * 32).read_bytes(), "record")
    told = [row[0] for row in rows(section(10), "key")]
    assert set(document) == {key for key in told if "." not in key}
    assert set(document["damages"][0]) == {key.split(".")[1] for key in told if "." in key}
    spelled = [canonical(one) for one in document["damages"]]
    assert spelled == sorted(spelled)


def test_formats_of_documents_are_named():
    for kind in ("latentry/manifest", "latentry/cache", "latentry/commit", "latentry/damage", "latentry/shard"):
        assert kind in PAGE
    for number, kind in ((4, "manifest"), (8, "commit"), (10, "damage")):
        told = {row[0]: row[2] for row in rows(section(number), "key")}
        versions = ("1; 2 if a bucket has references; 3 if there are embeddings, with references or without"
                    if kind == "manifest" else "1")
        assert (told["format"], told["version"]) == (f"latentry/{kind}", versions)
    assert with_checksum({"format": "x"})["self"] == digest_json({"format": "x"})


# ---- limits ----------------------------------------------------------------------------------------------------------


LIMITS = [row for head in ("limit", "habit") for row in rows(section(16), head)]


@pytest.mark.parametrize(("what", "value", "constant"), LIMITS, ids=[row[2] for row in LIMITS])
def test_limits_are_the_constants(what, value, constant):
    module, _, name = constant.rpartition(".")
    assert re.fullmatch(r"[0-9^ -]+", value)
    assert getattr(importlib.import_module(module), name) == eval(value.replace("^", "**"))


def test_every_limit_of_the_cache_is_listed():
    """Constants called MOST…, MAX_… or LIMIT of the modules that read what a stranger may have written."""
    modules = {constant.rpartition(".")[0] for _, _, constant in LIMITS}
    named = {constant for *_, constant in LIMITS}
    found = {f"{module}.{name}" for module in modules for name, value in vars(importlib.import_module(module)).items()
             if re.fullmatch(r"(MOST|MAX)(_\w+)?|LIMIT", name) and isinstance(value, int | float)}
    own = {name for name in found if not importlib.import_module(name.rpartition(".")[0]).__dict__.get("__all__")}
    imported = {name for name in own if re.search(rf"import.*\b{name.rpartition('.')[2]}\b",
                                                  Path(importlib.import_module(name.rpartition('.')[0]).__file__)
                                                  .read_text())}
    assert own - imported <= named


def test_names_of_arrays_and_decimals_are_the_patterns_of_the_code():
    from prep import parse

    assert f"`{shard_format.NAME.pattern}`" in section(16) and f"`{parse._NUMBER.pattern}`" in section(4)


# ---- the page itself -------------------------------------------------------------------------------------------------


def test_every_section_is_in_the_list_and_the_reverse():
    heads = re.findall(r"^## (?:(\d+)\. )?(?:([AB])\. )?(.*)$", PAGE, re.MULTILINE)
    wanted = [f"#{(number or letter).lower()}-{re.sub(r'[^a-z0-9 -]', '', title.lower()).replace(' ', '-')}"
              for number, letter, title in heads]
    assert re.findall(r"\]\((#[a-z0-9-]+)\)", PAGE) == wanted and len(wanted) == 19


def test_the_readers_name_sections_that_are_there():
    numbers = {int(number) for path in Path(__file__).parent.glob("*.py")
               for number in re.findall(r"\[(\d+)\]", path.read_text().split('"""')[1] + " ".join(
                   re.findall(r"# \[\d+\]", path.read_text())))}
    assert numbers and all(section(number) for number in numbers)
