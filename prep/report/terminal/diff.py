"""Formats the output of `prep diff`: one line per change; long lists end with a count of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prep.formatting import bucket_name, counted, grouped, join_texts, printable, shell_name

LISTED, PIPED = 10, 1000  # names on a terminal, and in a pipe; --json has all
REASONS = {
    "picture": "different picture", "size": "different size", "bucket": "different bucket", "placement": "cropped or "
    "scaled differently", "mask added": "mask added", "mask removed": "mask removed", "mask": "different mask",
    "references": "different references", "reference placement": "references cropped or scaled differently",
    "caption": "different caption", "caption weight": "different caption weights", "role": "different role",
    "repeats": "different repeats", "weight": "different weight", "source": "different source",
}


def changes_text(document: Mapping[str, Any], *, width: int | None = None) -> str:
    """The document of `prep diff` as lines; on a terminal (`width` columns), each has at most `LISTED` names, and else
    `PIPED`."""
    listed = PIPED if width is None else LISTED
    a, b = document["a"], document["b"]
    lines = [f"from {printable(a['manifest'])} ({a['digest'][:12]}) to {printable(b['manifest'])} ({b['digest'][:12]})",
             *(f"not compared: {printable(note)}" for note in dict.fromkeys(document["notes"]))]
    if document["identical"]:
        return "\n".join([*lines, "the manifests are identical"])
    if document["same"] is not False:
        return "\n".join([*lines, *_alike(document)])
    return "\n".join([*lines, *_model(document["model"]), *_fields(document["fields"]),
                      *_samples(document["samples"], document["counts"], listed),
                      *_buckets(document["buckets"], listed), *_prompts(document["prompts"], listed),
                      *_findings(document["findings"], listed)])


def _alike(document: Mapping[str, Any]) -> Iterator[str]:
    yield ("no difference that training would see" if document["same"]
           else "no difference that training would see in what could be compared")
    for name, field in document["fields"].items():
        if field["rows"]["shared"] is not None and field["shards"]["a"] != field["shards"]["b"]:
            yield (f"{name}: the same rows in {counted(field['shards']['b'], 'shard')}, previously in "
                   f"{grouped(field['shards']['a'])}")


def _model(changes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for change in changes:
        yield f"{change['what']}: {_short(change['b'])}, was {_short(change['a'])}"


def _fields(fields: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, field in fields.items():
        if field["change"]:
            yield f"{name}: the field was {field['change']}"
        for array in field["context"]:
            yield f"{name}: {_shortened(array)}"
        for array in field["arrays"]:
            yield f"{name}: array '{array['array']}' is {_array(array['b'])}, was {_array(array['a'])}"
        rows = field["rows"]
        if rows["shared"] is None:
            if rows["a"] != rows["b"]:
                yield f"{name}: {counted(rows['b'], 'row')}, {'was' if rows['a'] == 1 else 'were'} {grouped(rows['a'])}"
        elif rows["added"] or rows["removed"]:
            yield (f"{name}: {counted(rows['shared'], 'row')} shared, {grouped(rows['added'])} added, "
                   f"{grouped(rows['removed'])} no longer used")


def _samples(samples: Mapping[str, Any] | None, counts: Mapping[str, Mapping[str, int]],
             listed: int | None) -> Iterator[str]:
    yield from (f"{role} samples: {grouped(count['b'])}, {'was' if count['a'] == 1 else 'were'} {grouped(count['a'])}"
                for role, count in counts.items() if count["a"] != count["b"])
    if samples is None:
        return
    for what in ("added", "removed"):
        yield from _named(f"samples {what}", [shell_name(name) for name in samples[what]], listed)
    yield from _named("samples renamed", [f"{shell_name(sample['from'])} to {shell_name(sample['to'])}" + (
        f" ({', '.join(sample['why'])})" if sample["why"] else "") for sample in samples["renamed"]], listed)
    groups: dict[str, list[str]] = {}
    for sample in samples["changed"]:
        groups.setdefault(", ".join(REASONS[why] for why in sample["why"]), []).append(shell_name(sample["name"]))
    lines = [line for reasons, names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
             for line in _named(f"samples changed: {reasons}", names, listed)]
    yield from _cut(lines, "samples changed for other reasons", listed)


def _buckets(buckets: Sequence[Mapping[str, Any]], listed: int | None) -> Iterator[str]:
    yield from _cut([f"bucket {bucket_name(bucket)}: {_roles(bucket['b'])}, {_were(bucket['a'])}"
                     for bucket in buckets], "buckets", listed)


def _prompts(prompts: Mapping[str, Sequence[Mapping[str, Any]]], listed: int | None) -> Iterator[str]:
    for what in ("added", "removed"):
        yield from _named(f"sample prompts {what}", [
            "".join([prompt["prompt"], "" if prompt["negative"] is None else f" --n {prompt['negative']}",
                     *(f" --ref {each['name']}" for each in prompt.get("references", ())),
                     *(f" --mask {each['mask']}" for each in prompt.get("references", ()) if "mask" in each)])
            for prompt in prompts[what]], listed)


def _findings(findings: Mapping[str, Sequence[Mapping[str, str]]] | None, listed: int | None) -> Iterator[str]:
    for what, name in (("added", "new"), ("removed", "gone")):
        yield from _cut([f"finding {name}: {finding['severity']} {finding['code']}: {printable(finding['path'])}"
                         for finding in (findings or {}).get(what, ())], f"findings {name}", listed)


def _cut(lines: Sequence[str], what: str, listed: int | None) -> Iterator[str]:
    yield from lines[:listed]
    if listed is not None and len(lines) > listed:
        yield f"{what}: and {grouped(len(lines) - listed)} more"


def _named(what: str, names: Sequence[str], listed: int | None) -> Iterator[str]:
    if names:
        yield f"{what} ({len(names)}): {join_texts(names, listed)}"


def _roles(counts: Mapping[str, int] | None) -> str:
    return "none" if counts is None else ", ".join(f"{count} {role}" for role, count in counts.items() if count)


def _were(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return "new"
    return f"{'was' if sum(counts.values()) == 1 else 'were'} {_roles(counts)}"


def _array(array: Mapping[str, Any] | None) -> str:
    return "absent" if array is None else f"{array['dtype']} [{' '.join(array['dims'])}]"


def _shortened(change: Mapping[str, Any]) -> str:
    words = str(change["words"])
    for value in (change["a"], change["b"]):
        words = words.replace(str(value), _short(value))
    return printable(words)


def _short(value: Any) -> str:
    """A value as text; a digest is shortened to 12 characters."""
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 and not set(text) - set("0123456789abcdef") else printable(text)
