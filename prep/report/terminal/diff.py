"""What `prep diff` says to people: one line for each thing that changed, long lists cut with a count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prep.formatting import format_size, join_names, printable

LISTED = 10  # names; --json has them all
REASONS = {
    "picture": "another picture", "size": "another size", "bucket": "another bucket", "placement": "cut or scaled "
    "otherwise", "mask added": "a mask now", "mask removed": "no mask any more", "mask": "another mask",
    "caption": "another caption", "caption weight": "another weight of captions", "role": "another role",
    "repeats": "other repeats", "weight": "another weight", "source": "in another source",
}


def changes_text(document: Mapping[str, Any]) -> str:
    """The document of `prep diff` as lines."""
    a, b = document["a"], document["b"]
    lines = [f"from {printable(a['manifest'])} ({a['digest'][:12]}) to {printable(b['manifest'])} ({b['digest'][:12]})",
             *(f"not compared: {printable(note)}" for note in dict.fromkeys(document["notes"]))]
    if document["identical"]:
        return "\n".join([*lines, "they are the same, byte for byte"])
    if document["same"] is not False:
        return "\n".join([*lines, *_alike(document)])
    return "\n".join([*lines, *_model(document["model"]), *_fields(document["fields"]),
                      *_samples(document["samples"], document["counts"]), *_buckets(document["buckets"]),
                      *_prompts(document["prompts"]), *_findings(document["findings"])])


def _alike(document: Mapping[str, Any]) -> Iterator[str]:
    yield ("nothing differs that training would see" if document["same"]
           else "what could be compared does not differ in anything that training would see")
    for name, field in document["fields"].items():
        if field["rows"]["shared"] is not None and field["shards"]["a"] != field["shards"]["b"]:
            yield f"{name}: the same rows in {_count(field['shards']['b'], 'shard')}, were in {field['shards']['a']}"


def _model(changes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for one in changes:
        yield f"{one['what']}: {_short(one['b'])}, was {_short(one['a'])}"


def _fields(fields: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, field in fields.items():
        if field["change"]:
            yield f"{name}: the field was {field['change']}"
        for one in field["context"]:
            yield f"{name}: {_shortened(one)}"
        for one in field["arrays"]:
            yield f"{name}: array '{one['array']}' is {_array(one['b'])}, was {_array(one['a'])}"
        rows = field["rows"]
        if rows["shared"] is None:
            if rows["a"] != rows["b"]:
                yield f"{name}: {_count(rows['b'], 'row')}, {'were' if rows['a'] != 1 else 'was'} {rows['a']}"
        elif rows["added"] or rows["removed"]:
            yield (f"{name}: {_count(rows['shared'], 'row')} shared, {rows['added']} added, "
                   f"{rows['removed']} not used any more")


def _samples(samples: Mapping[str, Any] | None, counts: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    yield from (f"{role} samples: {one['b']}, were {one['a']}" for role, one in counts.items() if one["a"] != one["b"])
    if samples is None:
        return
    for what in ("added", "removed"):
        yield from _named(f"samples {what}", samples[what])
    yield from _named("samples renamed", [f"{one['from']} to {one['to']}" + (
        f" ({', '.join(one['why'])})" if one["why"] else "") for one in samples["renamed"]])
    groups: dict[str, list[str]] = {}
    for one in samples["changed"]:
        groups.setdefault(", ".join(REASONS[why] for why in one["why"]), []).append(one["name"])
    lines = [line for reasons, names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
             for line in _named(f"samples changed: {reasons}", names)]
    yield from _cut(lines, "samples changed for other reasons")


def _buckets(buckets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from _cut([f"bucket {format_size(one['size'])}: {_roles(one['b'])}, {_were(one['a'])}" for one in buckets],
                    "buckets")


def _prompts(prompts: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    for what in ("added", "removed"):
        yield from _named(f"sample prompts {what}", [one["prompt"] if one["negative"] is None
                                                     else f"{one['prompt']} --n {one['negative']}"
                                                     for one in prompts[what]])


def _findings(findings: Mapping[str, Sequence[Mapping[str, str]]] | None) -> Iterator[str]:
    for what, name in (("added", "new"), ("removed", "gone")):
        some = (findings or {}).get(what, ())
        yield from _cut([f"finding {name}: {one['severity']} {one['code']}: {printable(one['path'])}" for one in some],
                        f"findings {name}")


def _cut(lines: Sequence[str], what: str) -> Iterator[str]:
    yield from lines[:LISTED]
    if len(lines) > LISTED:
        yield f"{what}: and {len(lines) - LISTED} more"


def _named(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"{what} ({len(names)}): {join_names(names, LISTED)}"


def _roles(counts: Mapping[str, int] | None) -> str:
    return "none" if counts is None else ", ".join(f"{count} {role}" for role, count in counts.items() if count)


def _were(counts: Mapping[str, int] | None) -> str:
    return "there was none" if counts is None else f"were {_roles(counts)}"


def _array(told: Mapping[str, Any] | None) -> str:
    return "not there" if told is None else f"{told['dtype']} [{' '.join(told['dims'])}]"


def _shortened(change: Mapping[str, Any]) -> str:
    words = str(change["words"])
    for value in (change["a"], change["b"]):
        words = words.replace(str(value), _short(value))
    return printable(words)


def _short(value: Any) -> str:
    """A value; of a digest its beginning."""
    text = "none" if value is None else str(value)
    return text[:12] if len(text) == 64 and not set(text) - set("0123456789abcdef") else printable(text)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
