"""Formats the output of `prep inspect` and `prep verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prep.formatting import bucket_name, counted, format_bytes, format_size, grouped, join_names, shell_name
from prep.manifest.describe import import_line
from prep.report.terminal.scan import HEADS, finding_parts, finding_rows
from prep.report.terminal.tables import TextTable, page, records, table

MOST_NAMED = 30  # samples that use a damaged row, in a pipe; --json has all


def inspect_tables(document: Mapping[str, Any], *, width: int | None = None, every: bool = False) -> str:
    """The output of `prep inspect` for a manifest; `every`: with all of its findings."""
    model, imported = document["model"].get("path") or document["model"].get("hub"), import_line(document["latents"])
    facts = [("family", f"{document['family']}, {document['prediction']}"), ("model", str(model)),
             *((f"{name} fingerprint", digest[:16]) for name, digest in document["models"].items()),
             *([("latents", imported)] if imported else []),
             ("samples", ", ".join(f"{grouped(count)} {role}" for role, count in document["samples"].items())),
             ("masks", _mask_line(document["masks"])), ("sample prompts", str(len(document["prompts"]))),
             ("rejected", grouped(document["rejected"])), ("manifest", document["digest"][:16])]
    fields = [(name, array, described["dtype"], " ".join(described["dims"]), _shapes(described["shapes"]),
               grouped(field["rows"]), grouped(field["shards"]), format_bytes(field["bytes"]))
              for name, field in document["fields"].items() for array, described in field["arrays"].items()]
    buckets = [(bucket_name(bucket), *(grouped(bucket[role]) for role in ("train", "validation", "prior")))
               for bucket in document["buckets"]]
    return page(
        table(("", ""), facts), table(("field", "array", "dtype", "dims", "shapes", "rows", "shards", "size"), fields,
                                        right=(5, 6, 7)),
        table(("bucket", "train", "validation", "prior"), buckets, right=(1, 2, 3)),
        *finding_parts(document["findings"], width=width, every=every), width=width,
    )


def sample_text(document: Mapping[str, Any], *, width: int | None = None) -> str:
    """The output of `prep inspect --sample`: every detail of the samples with one name."""
    parts: list[TextTable | str] = []
    for sample in document["samples"]:
        rows = [("name", shell_name(sample["name"]))]
        rows += [(name, str(sample[name])) for name in ("id", "role", "picture", "source", "repeats", "weight")]
        rows += [("size", format_size(sample["size"])), ("bucket", format_size(sample["bucket"])),
                 ("mask coverage", "no mask" if sample["coverage"] is None else f"{sample['coverage']:.1%}")]
        for view in sample["views"]:
            flipped = ", mirrored" if view["flip"] else ""
            rows.append(("view", f"scaled to {format_size(view['scaled'])}, cropped at {tuple(view['crop'])}{flipped}"))
            rows += [(f"  {field}", place_of(view[field])) for field in ("latent", "mask")]
            for reference in view.get("references", ()):
                flipped = ", mirrored" if reference["flip"] else ""
                rows += [("  reference", shell_name(reference["name"])),
                         ("    picture", f"{reference['picture']}, {format_size(reference['size'])}"),
                         ("    placed", f"scaled to {format_size(reference['scaled'])}, cropped to "
                          f"{format_size(reference['bucket'])} at {tuple(reference['crop'])}{flipped}"),
                         ("    latent", place_of(reference["latent"]))]
        if "embedding" in sample:
            rows.append(("embedding", place_of(sample["embedding"])))
        for text in sample["texts"]:
            rows += [("caption", text["caption"]), ("  text", place_of(text["row"]))]
        parts.append(table(("", ""), rows))
    return page(*parts, records(HEADS, finding_rows(document["findings"])), width=width)


def verify_tables(document: Mapping[str, Any], *, width: int | None = None, recorded: bool = True) -> str:
    """The output of `prep verify`: a line per damaged row, notes, and the cost of the repair.

    `recorded`: the cache records damage; for one in a store, where a repair makes whole shards again, a note says how.
    """
    rows = [((row["shard"] or "")[:12], row["field"], "all" if row["row"] is None else str(row["row"]),
             join_names(row["samples"], MOST_NAMED if width is None else 3), row["what"])
            for row in document["damaged"]]
    notes = [f"note: {note}" for note in document["notes"]]
    how = "sizes, documents and indexes verified" if document["quick"] else "all verified"
    if document["ok"]:
        return page(*notes, f"{counted(document['shards'], 'shard')}, {format_bytes(document['bytes'])}: {how}")
    repair = "to repair, run prep encode again"
    if document["unrecorded"]:
        repair = ("the damage is not recorded, because the cache is read-only here; to repair, run prep encode "
                  "--recheck where the cache is writable")
    cost = f"{repair}: {_repair_cost(document['repair'])}" if recorded else ""
    return page(records(("shard", "field", "row", "samples", "what"), rows, right=(2,)), *notes, cost, width=width)


def _repair_cost(rows: Mapping[str, int] | None) -> str:
    if rows is None:
        return "the number of rows to re-encode is unknown without these tables"
    if not rows:
        return "no rows will be re-encoded"
    lost = ", ".join(counted(count, f"{field} row") for field, count in rows.items())
    return f"{lost} will be re-encoded"


def place_of(place: Mapping[str, Any] | None) -> str:
    """Shard, row and key of a row, or "none"."""
    if place is None:
        return "none"
    return f"shard {place['shard'][:12]} row {place['row']}, key {(place.get('key') or 'unreadable')[:12]}"


def _mask_line(masks: Mapping[str, Any]) -> str:
    return counted(masks["samples"], "sample") + (
        "" if masks["coverage"] is None else f"; on average {masks['coverage']:.1%} of the picture trains")


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    """Up to three shapes, and the number of others."""
    more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
    return " ".join(str(list(shape)) for shape in shapes[:3]) + more
