"""Reports as text for a terminal: tables that read well without colour; the only room of rich beside the progress bar.

Names and captions come from files, so whatever a terminal would obey in them is shown escaped.
"""

from __future__ import annotations

import io
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prep.arrays import Finding
from prep.buckets.suggest import options_of
from prep.dataset.preview import Outlook, as_json
from prep.findings import CODES
from prep.formatting import bytes_of, names_of, safe, size_of

LISTED = 30  # names; --json has them all
SCREEN = 20  # findings; more are summed up by code
ERRORS = 10  # that are shown by name all the same
NAME = 32  # letters of an example's name
SEVERITIES = ("error", "warning", "info")
NOTABLE_LOSS = 10.0  # percent of a picture cut away, from which it is worth a line


def findings_table(findings: Sequence[Finding], *, pictures: int, usable: int, every: bool) -> str:
    """What `prep scan` says: each finding and the sums; or, of more than a screen, the first errors, and how often each
    code comes with an example. `every`: all by name, however many."""
    counts = ", ".join(f"{sum(one.severity == kind for one in findings)} {kind}" for kind in SEVERITIES)
    end = f"{usable} of {pictures} pictures are usable; {counts}"
    if every or len(findings) <= SCREEN:
        return _page(_findings(findings), *([_sums(findings)] if len(findings) > SCREEN else ()), end)
    errors = [one for one in findings if one.severity == "error"]
    more = [f"and {len(errors) - ERRORS} more of severity error", ""] if len(errors) > ERRORS else []
    return _page(_findings(errors[:ERRORS]), *more, _sums(findings), end,
                 "by name: --all, or --select CODE; --write-report FILE.html, or --json")


def _findings(findings: Sequence[Finding]) -> Table:
    rows = [(one.severity, one.code, one.path, one.detail) for one in findings]
    return _table(("", "code", "file", "what"), rows)


def _sums(findings: Sequence[Finding]) -> Table:
    first: dict[tuple[str, str], str] = {(one.severity, one.code): one.path for one in reversed(findings)}
    rows = [(severity, code, str(count), _end_of(first[severity, code]), CODES[code][1] if code in CODES else "")
            for severity, code, count in sums_by_code(findings)]
    return _table(("", "code", "files", "such as", "meaning"), rows, right=(2,))


def _end_of(name: str) -> str:
    """The end of a long name, which says more than its beginning."""
    return name if len(name) <= NAME else "…" + name[1 - NAME:]


def sums_by_code(findings: Iterable[Finding]) -> list[tuple[str, str, int]]:
    """(severity, code, how many), the worst first, then the most."""
    counts = Counter((one.severity, one.code) for one in findings)
    return sorted(((severity, code, count) for (severity, code), count in counts.items()),
                  key=lambda one: (SEVERITIES.index(one[0]), -one[2], one[1]))


def outlook_tables(outlook: Outlook) -> str:
    """What `prep bucket` says: buckets, steps, and by name whoever is left out, repeated, cut or enlarged."""
    document = as_json(outlook)
    rows = [
        (size_of(one["size"]), str(one["pictures"]), str(one["samples"]), str(one["showings"]), str(one["batches"]),
         "-".join(f"{scale:.2f}" for scale in one["scale"]), f"{one['crop_loss']['mean']:.1f}",
         f"{one['crop_loss']['worst']:.1f}", str(one["upscaled"]))
        for one in document["buckets"]
    ]
    heads = ("bucket", "pictures", "to train", "an epoch", "micro-batches", "scale", "cut %", "worst", "enlarged")
    return _page(_table(heads, rows, right=range(1, 9)), *_step_lines(document), *_picture_lines(document))


def suggestion_table(choices: Sequence[Mapping[str, Any]], batch_size: int) -> str:
    """What `prep bucket --suggest` says: the best choice, the best of each batch size, and of the call's own."""
    if not choices:
        return "nothing to suggest: no buckets take any of the pictures"
    best, *each = choices
    heads = ("batch size", "buckets", "step", "min_bucket", "used", "cut %", "unused %", "empty %", "sum")
    rows = [tuple(str(one[name]) for name in ("batch_size", "buckets", "step", "min_bucket", "used_buckets", "crop",
                                              "unused", "empty", "score")) for one in each]
    return _page(_table(heads, rows, right=(0, *range(2, 9))), (
        f"suggested: {options_of(best)}, which loses {best['score']} %: of the pictures' area {best['crop']}, "
        f"of the pictures {best['unused']}, of the places in micro-batches {best['empty']}"), *(
        f"with the batch size of this call: {options_of(one)}, which loses {one['score']} %"
        for one in each if one["batch_size"] == batch_size != best["batch_size"]))


def inspect_tables(document: Mapping[str, Any]) -> str:
    """What `prep inspect` says of a manifest."""
    model = document["model"].get("path") or document["model"].get("hub")
    facts = [("family", f"{document['family']}, {document['prediction']}"), ("model", str(model)),
             *((f"{name} fingerprint", digest[:16]) for name, digest in document["models"].items()),
             ("samples", ", ".join(f"{count} {role}" for role, count in document["samples"].items())),
             ("masks", _mask_line(document["masks"])), ("sample prompts", str(len(document["prompts"]))),
             ("rejected", str(document["rejected"])), ("manifest", document["digest"][:16])]
    fields = [(name, array, described["dtype"], " ".join(described["dims"]), _shapes(described["shapes"]),
               str(field["rows"]), str(field["shards"]), bytes_of(field["bytes"]))
              for name, field in document["fields"].items() for array, described in field["arrays"].items()]
    buckets = [(size_of(one["size"]), *(str(one[role]) for role in ("train", "validation", "prior")))
               for one in document["buckets"]]
    return _page(
        _table(("", ""), facts), _table(("field", "array", "dtype", "dims", "shapes", "rows", "shards", "size"), fields,
                                        right=(5, 6, 7)),
        _table(("bucket", "train", "validation", "prior"), buckets, right=(1, 2, 3)),
        *_finding_parts(document["findings"]),
    )


def sample_text(document: Mapping[str, Any]) -> str:
    """What `prep inspect --sample` says: all about the samples of one name."""
    parts: list[Table | str] = []
    for sample in document["samples"]:
        rows = [(name, str(sample[name])) for name in ("name", "id", "role", "picture", "source", "repeats", "weight")]
        rows += [("size", size_of(sample["size"])), ("bucket", size_of(sample["bucket"])),
                 ("mask coverage", "no mask" if sample["coverage"] is None else f"{sample['coverage']:.1%}")]
        for view in sample["views"]:
            flipped = ", mirrored" if view["flip"] else ""
            rows.append(("view", f"scaled to {size_of(view['scaled'])}, cut at {tuple(view['crop'])}{flipped}"))
            rows += [(f"  {field}", place_of(view[field])) for field in ("latent", "mask")]
        for text in sample["texts"]:
            rows += [("caption", text["caption"]), ("  text", place_of(text["row"]))]
        parts.append(_table(("", ""), rows))
    return _page(*parts, _table(("", "code", "file", "what"), _finding_rows(document["findings"])))


def verify_tables(document: Mapping[str, Any]) -> str:
    """What `prep verify` says: a line for each damaged row, what repair costs, and notes of what costs nothing."""
    rows = [((one["shard"] or "")[:12], one["field"], "all" if one["row"] is None else str(one["row"]),
             names_of(one["samples"], 3), one["what"]) for one in document["damaged"]]
    notes = [f"note: {note}" for note in document["notes"]]
    how = "sizes, documents and indexes as they should be" if document["quick"] else "every byte as it should be"
    if document["ok"]:
        return _page(*notes, f"{document['shards']} shards, {bytes_of(document['bytes'])}: {how}")
    if document["repair"] is None:
        cost = "without these tables nobody can tell how many rows are to be made"
    else:
        lost = ", ".join(f"{count} {field}" for field, count in document["repair"].items()) or "no"
        cost = f"{lost} rows to be made"
    return _page(_table(("shard", "field", "row", "samples", "what"), rows, right=(2,)), *notes,
                 f"prep encode, run again, repairs this: {cost}")


def place_of(place: Mapping[str, Any] | None) -> str:
    """Shard, row and key of a row, or that there is none."""
    if place is None:
        return "none"
    return f"shard {place['shard'][:12]} row {place['row']}, key {(place.get('key') or 'unreadable')[:12]}"


def _step_lines(document: Mapping[str, Any]) -> list[str]:
    per_step = document["batch_size"] // document["micro_batch"]
    lines = [f"{document['steps_per_epoch']} steps an epoch, each of up to {document['batch_size']} samples in "
             f"{per_step} micro-batches of {document['micro_batch']}; underfill {document['underfill']}"]
    if document["idle_ranks"]:
        lines.append(f"{document['idle_ranks']} of {document['world']} ranks have nothing to do: a step has {per_step} "
                     f"micro-batches; make micro-batches smaller")
    if len(document["resolutions"]) > 1:
        lines.append("pictures at resolution " + ", ".join(f"{one['resolution']}: {one['pictures']}"
                                                            for one in document["resolutions"]))
    samples, views = (sum(one[name] for one in document["buckets"]) for name in ("samples", "views"))
    if views != samples:
        lines.append(f"{views} views of {samples} samples to train on, each a row; training shows one at a time")
    for key, words in (("left_out", "left out in epoch 0"), ("repeated", "shown again in epoch 0")):
        if document[key]:
            lines.append(f"{words} ({len(document[key])}): {names_of(document[key], LISTED)}")
    return lines


def _picture_lines(document: Mapping[str, Any]) -> list[str]:
    said = document["findings"]
    cut = sorted((one for one in document["pictures"] if one["crop_loss"] >= NOTABLE_LOSS),
                 key=lambda one: (-one["crop_loss"], one["name"]))
    groups = [
        (f"cut by {NOTABLE_LOSS:.0f} % or more", [f"{one['name']} ({one['crop_loss']:.0f} %)" for one in cut]),
        ("enlarged", [f"{one['name']} (x{one['scale']:.2f})" for one in document["pictures"] if one["upscaled"]]),
        *_unused(one for one in said if one["code"] == "too-small"),
        ("cut by more than --max-crop", [one["path"] for one in said if one["code"] == "heavy-crop"]),
        ("enlarged more than --max-upscale", [one["path"] for one in said if one["code"] == "heavy-upscale"]),
        ("in a bucket below min_bucket", [one["path"] for one in said if one["code"] == "small-bucket"]),
    ]
    lines = [f"{words} ({len(names)}): {names_of(names, LISTED)}" for words, names in groups if names]
    return lines + [f"merged: {size_of(one['bucket'])} into {size_of(one['into'])} ({one['pictures']} pictures, "
                    f"cut by {one['crop_loss']['after']:.1f} % instead of {one['crop_loss']['before']:.1f} %)"
                    for one in document["merges"]]


def _unused(said: Iterable[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Pictures that no bucket takes, by what was expected of them, which is the same of many."""
    groups: dict[str, list[str]] = {}
    for one in said:
        seen, _, wanted = one["detail"].partition(", ")
        groups.setdefault(f"cannot be used, {wanted}", []).append(f"{one['path']} ({seen.removeprefix('picture is ')})")
    return list(groups.items())


def _finding_parts(findings: Sequence[Mapping[str, str]]) -> list[Table | str]:
    """A manifest's findings by name; of more than a screen, how often each code comes."""
    if len(findings) <= SCREEN:
        return [_table(("", "code", "file", "what"), _finding_rows(findings))]
    return [_sums([Finding(**one) for one in findings]), "by name: --json, or --sample NAME"]  # type: ignore[arg-type]


def _finding_rows(findings: Iterable[Mapping[str, str]]) -> list[tuple[str, ...]]:
    return [(one["severity"], one["code"], one["path"], one["detail"]) for one in findings]


def _mask_line(masks: Mapping[str, Any]) -> str:
    return f"{masks['samples']} samples" + (
        "" if masks["coverage"] is None else f", training {masks['coverage']:.1%} of the picture on average")


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    """Up to three shapes, then how many more."""
    more = f" and {len(shapes) - 3} more" if len(shapes) > 3 else ""
    return " ".join(str(list(shape)) for shape in shapes[:3]) + more


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> Table:
    """Columns without a box; cells are text, never markup, and fold rather than lose a letter."""
    table = Table(box=None, show_header=any(heads) and bool(rows), pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if number in set(right) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(safe(cell)) for cell in row))
    return table


def _page(*parts: Table | str) -> str:
    """The parts as text, a blank line between tables; as wide as the terminal, or 120 columns."""
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    blocks = []
    for part in parts:
        if isinstance(part, Table) and not part.row_count:
            continue
        out = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
        out.print(Text(safe(part)) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))
        text = "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())  # type: ignore[attr-defined]
        blocks.append(text if isinstance(part, str) else text + "\n")
    return "\n".join(blocks).rstrip("\n")
