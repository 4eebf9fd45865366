"""Tables of `prep inspect` and `prep verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from prep.formatting import format_bytes, format_size, join_names
from prep.report.terminal.scan import finding_parts, finding_rows
from prep.report.terminal.tables import _page, _table


def inspect_tables(document: Mapping[str, Any]) -> str:
    """What `prep inspect` says of a manifest."""
    model = document["model"].get("path") or document["model"].get("hub")
    facts = [("family", f"{document['family']}, {document['prediction']}"), ("model", str(model)),
             *((f"{name} fingerprint", digest[:16]) for name, digest in document["models"].items()),
             ("samples", ", ".join(f"{count} {role}" for role, count in document["samples"].items())),
             ("masks", _mask_line(document["masks"])), ("sample prompts", str(len(document["prompts"]))),
             ("rejected", str(document["rejected"])), ("manifest", document["digest"][:16])]
    fields = [(name, array, described["dtype"], " ".join(described["dims"]), _shapes(described["shapes"]),
               str(field["rows"]), str(field["shards"]), format_bytes(field["bytes"]))
              for name, field in document["fields"].items() for array, described in field["arrays"].items()]
    buckets = [(format_size(one["size"]), *(str(one[role]) for role in ("train", "validation", "prior")))
               for one in document["buckets"]]
    return _page(
        _table(("", ""), facts), _table(("field", "array", "dtype", "dims", "shapes", "rows", "shards", "size"), fields,
                                        right=(5, 6, 7)),
        _table(("bucket", "train", "validation", "prior"), buckets, right=(1, 2, 3)),
        *finding_parts(document["findings"]),
    )


def sample_text(document: Mapping[str, Any]) -> str:
    """What `prep inspect --sample` says: all about the samples of one name."""
    parts: list[Table | str] = []
    for sample in document["samples"]:
        rows = [(name, str(sample[name])) for name in ("name", "id", "role", "picture", "source", "repeats", "weight")]
        rows += [("size", format_size(sample["size"])), ("bucket", format_size(sample["bucket"])),
                 ("mask coverage", "no mask" if sample["coverage"] is None else f"{sample['coverage']:.1%}")]
        for view in sample["views"]:
            flipped = ", mirrored" if view["flip"] else ""
            rows.append(("view", f"scaled to {format_size(view['scaled'])}, cut at {tuple(view['crop'])}{flipped}"))
            rows += [(f"  {field}", place_of(view[field])) for field in ("latent", "mask")]
        for text in sample["texts"]:
            rows += [("caption", text["caption"]), ("  text", place_of(text["row"]))]
        parts.append(_table(("", ""), rows))
    return _page(*parts, _table(("", "code", "file", "what"), finding_rows(document["findings"])))


def verify_tables(document: Mapping[str, Any]) -> str:
    """What `prep verify` says: a line for each damaged row, what repair costs, and notes of what costs nothing."""
    rows = [((one["shard"] or "")[:12], one["field"], "all" if one["row"] is None else str(one["row"]),
             join_names(one["samples"], 3), one["what"]) for one in document["damaged"]]
    notes = [f"note: {note}" for note in document["notes"]]
    how = "sizes, documents and indexes as they should be" if document["quick"] else "every byte as it should be"
    if document["ok"]:
        return _page(*notes, f"{document['shards']} shards, {format_bytes(document['bytes'])}: {how}")
    if document["repair"] is None:
        cost = "without these tables nobody can tell how many rows are to be made"
    else:
        lost = ", ".join(f"{count} {field}" for field, count in document["repair"].items()) or "no"
        cost = f"{lost} rows to be made"
    how = "prep encode, run again, repairs this"
    if document["unrecorded"]:
        how = ("the cache cannot be written here, so the damage is not recorded in it; prep encode, run again where it "
               "can be written and with --recheck, repairs this")
    return _page(_table(("shard", "field", "row", "samples", "what"), rows, right=(2,)), *notes, f"{how}: {cost}")


def place_of(place: Mapping[str, Any] | None) -> str:
    """Shard, row and key of a row, or that there is none."""
    if place is None:
        return "none"
    return f"shard {place['shard'][:12]} row {place['row']}, key {(place.get('key') or 'unreadable')[:12]}"


def _mask_line(masks: Mapping[str, Any]) -> str:
    return f"{masks['samples']} samples" + (
        "" if masks["coverage"] is None else f", training {masks['coverage']:.1%} of the picture on average")


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    """Up to three shapes, then how many more."""
    more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
    return " ".join(str(list(shape)) for shape in shapes[:3]) + more
