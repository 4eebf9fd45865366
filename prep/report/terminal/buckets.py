"""Tables of `prep bucket`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prep.buckets.suggest import as_command_options
from prep.dataset.preview import EpochPreview, summary_as_json
from prep.formatting import bucket_name, counted, format_size, grouped, join_names, join_texts, shell_name
from prep.report.terminal.tables import page, table

LISTED = 30  # names; --all and --json have them all
NOTABLE_LOSS = 10.0  # percent of a picture's area; pictures that lose this or more are listed


def outlook_tables(outlook: EpochPreview, *, width: int | None = None, every: bool = False) -> str:
    """The output of `prep bucket`: buckets, steps, and the names of dropped, repeated, cropped or enlarged pictures.

    Unless `every`, long lists of names are shortened.
    """
    document = summary_as_json(outlook)
    rows = [
        (bucket_name(bucket), *(str(bucket[name]) for name in ("pictures", "samples", "showings", "batches")),
         "-".join(f"{scale:.2f}" for scale in bucket["scale"]), f"{bucket['crop_loss']['mean']:.1f}",
         f"{bucket['crop_loss']['worst']:.1f}", str(bucket["upscaled"]))
        for bucket in document["buckets"]
    ]
    heads = ("bucket", "pictures", "train", "epoch", "batches", "scale", "crop %", "worst", "enlarged")
    listed = None if every else LISTED
    return page(table(heads, rows, right=range(1, 9)), *_step_lines(document, listed),
                *_picture_lines(outlook, document, listed), width=width)


def suggestion_table(choices: Sequence[Mapping[str, Any]], batch_size: int, *, width: int | None = None) -> str:
    """The output of `prep bucket --suggest`: the best settings overall and for each batch size.

    `batch_size` is the command's; its best settings get a line too.
    """
    if not choices:
        return "nothing to suggest: no picture fits a bucket"
    best, *each = choices
    heads = ("batch size", "buckets", "step", "min_bucket", "used", "crop %", "unused %", "empty %", "sum")
    rows = [tuple(str(choice[name]) for name in ("batch_size", "buckets", "step", "min_bucket", "used_buckets", "crop",
                                                 "unused", "empty", "score")) for choice in each]
    least = min(choice["score"] for choice in each if choice["batch_size"] > 1)
    why = f"; larger batches would lose at least {least} %"
    return page(table(heads, rows, right=(0, *range(2, 9))), (
        f"suggested: {as_command_options(best)}, with a loss of {best['score']} %: cropped area "
        f"{best['crop']}, unused pictures {best['unused']}, empty slots in micro-batches {best['empty']}"
        f"{why if best['batch_size'] == 1 else ''}"), *(
        f"with this command's batch size: {as_command_options(choice)}, loss {choice['score']} %"
        for choice in each if choice["batch_size"] == batch_size != best["batch_size"]), width=width)


def _step_lines(document: Mapping[str, Any], listed: int | None) -> list[str]:
    micro_batches = counted(document["batch_size"] // document["micro_batch"], "micro-batch", "micro-batches")
    lines = [f"{counted(document['steps_per_epoch'], 'step')} per epoch, each of up to "
             f"{counted(document['batch_size'], 'sample')} in {micro_batches} of {document['micro_batch']}; "
             f"underfill {document['underfill']}"]
    if document["idle_ranks"]:
        lines.append(f"{document['idle_ranks']} of {counted(document['world'], 'rank')} idle: a step has "
                     f"{micro_batches}; use smaller micro-batches")
    if len(document["resolutions"]) > 1:
        lines.append("pictures at resolution " + ", ".join(f"{row['resolution']}: {grouped(row['pictures'])}"
                                                            for row in document["resolutions"]))
    samples, views = (sum(bucket[name] for bucket in document["buckets"]) for name in ("samples", "views"))
    if views != samples:
        lines.append(f"{counted(views, 'view')} of {counted(samples, 'training sample')}, each a row; training "
                     "draws one view each time")
    for key, words in (("left_out", "dropped in epoch 0"), ("repeated", "repeated in epoch 0")):
        if document[key]:
            lines.append(f"{words} ({len(document[key])}): {join_names(document[key], listed)}")
    return lines


def _picture_lines(outlook: EpochPreview, document: Mapping[str, Any], listed: int | None) -> list[str]:
    findings, pictures = document["findings"], outlook.bucketing.pictures
    losses = ((round(picture.crop_loss, 2), picture.name) for picture in pictures)  # as in the document
    cut = sorted((-loss, name) for loss, name in losses if loss >= NOTABLE_LOSS)
    groups = [
        (f"cropped by {NOTABLE_LOSS:.0f} % or more", [f"{shell_name(name)} ({-loss:.0f} %)" for loss, name in cut]),
        ("enlarged", [f"{shell_name(picture.name)} (x{picture.scale:.2f})"
                      for picture in pictures if picture.upscaled]),
        *_unused(finding for finding in findings if finding["code"] == "too-small"),
        ("without a mask to paint into", _paths(findings, "missing-mask")),
        ("cropped by more than --max-crop", _paths(findings, "heavy-crop")),
        ("enlarged more than --max-upscale", _paths(findings, "heavy-upscale")),
        ("in a bucket below min_bucket", _paths(findings, "small-bucket")),
    ]
    lines = [f"{words} ({len(names)}): {join_texts(names, listed)}" for words, names in groups if names]
    return lines + [f"merged: {format_size(merge['bucket'])} into {format_size(merge['into'])} "
                    f"({counted(merge['pictures'], 'picture')}, cropped by {merge['crop_loss']['after']:.1f} % "
                    f"instead of {merge['crop_loss']['before']:.1f} %)"
                    for merge in document["merges"]]


def _unused(findings: Iterable[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Pictures that fit no bucket, grouped by the expectation they fail."""
    groups: dict[str, list[str]] = {}
    for finding in findings:
        seen, _, expected = finding["detail"].partition(", ")
        name = shell_name(finding["path"])
        groups.setdefault(f"cannot be used, {expected}", []).append(f"{name} ({seen.removeprefix('picture is ')})")
    return list(groups.items())


def _paths(findings: Iterable[Mapping[str, str]], code: str) -> list[str]:
    return [shell_name(finding["path"]) for finding in findings if finding["code"] == code]
