"""Tables of `prep bucket`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prep.buckets.suggest import as_command_options
from prep.dataset.preview import EpochPreview, preview_as_json
from prep.formatting import format_size, join_names
from prep.report.terminal.tables import _page, _table

LISTED = 30  # names; --json has them all
NOTABLE_LOSS = 10.0  # percent of a picture cut away, from which it is worth a line


def outlook_tables(outlook: EpochPreview) -> str:
    """What `prep bucket` says: buckets, steps, and by name whoever is left out, repeated, cut or enlarged."""
    document = preview_as_json(outlook)
    rows = [
        (format_size(one["size"]), str(one["pictures"]), str(one["samples"]), str(one["showings"]), str(one["batches"]),
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
        f"suggested: {as_command_options(best)}, which loses {best['score']} %: of the pictures' area {best['crop']}, "
        f"of the pictures {best['unused']}, of the places in micro-batches {best['empty']}"), *(
        f"with the batch size of this call: {as_command_options(one)}, which loses {one['score']} %"
        for one in each if one["batch_size"] == batch_size != best["batch_size"]))


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
            lines.append(f"{words} ({len(document[key])}): {join_names(document[key], LISTED)}")
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
    lines = [f"{words} ({len(names)}): {join_names(names, LISTED)}" for words, names in groups if names]
    return lines + [f"merged: {format_size(one['bucket'])} into {format_size(one['into'])} "
                    f"({one['pictures']} pictures, cut by {one['crop_loss']['after']:.1f} % instead of "
                    f"{one['crop_loss']['before']:.1f} %)"
                    for one in document["merges"]]


def _unused(said: Iterable[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Pictures that no bucket takes, by what was expected of them, which is the same of many."""
    groups: dict[str, list[str]] = {}
    for one in said:
        seen, _, wanted = one["detail"].partition(", ")
        groups.setdefault(f"cannot be used, {wanted}", []).append(f"{one['path']} ({seen.removeprefix('picture is ')})")
    return list(groups.items())
