"""Renders the pages about a data set: the list of samples, a sample, findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import numpy as np

from prep.batching.split import ROLES
from prep.findings import CODES
from prep.formatting import format_bucket, format_size, shell_name
from prep.fs.place import Place
from prep.manifest.select import LIKENESS, MADE, MOST_TAGS, SORTS, Query
from prep.pages.layout import render
from prep.pages.overlay import Shot, crop_overlay
from prep.pages.parts import findings_table, pager_of, plural
from prep.sources.tree import MASK, PICTURES, stem_of
from prep.view.data import Data
from prep.view.edit.pages import edit_of, made_of, query_fields, with_form
from prep.view.edit.replace import Rewording
from prep.view.params import LONGEST, address
from prep.view.pictures import statistics
from prep.view.run_pages import facts_of_run, loss_chart
from prep.view.similar.pages import comparing_page
from prep.view.site import Site, card_of, loss_of
from prep.view.source.worker import UNDECODABLE

if TYPE_CHECKING:
    from prep.models.text.truncation import Reading

CARDS = 60  # per page
ROWS = 200  # of findings, per page
TAGS = 500  # that are listed
READ = 64  # captions whose tokens are shown
TOKENS = 2000  # of a caption
VIEWS = 32  # on a sample's page
CHANNELS = 64  # of a latent
ORDERS = {"name": "name", "id": "id (random)", "mask": "how much of it trains", "weight": "weight of its loss",
          "caption": "length of its caption", "pixels": "pixels", "loss": "loss, for its timesteps",
          "alike": "likeness to the nearest picture", "typical": "likeness to near pictures"}
assert tuple(ORDERS) == SORTS
NOT_HERE = "The original was not found, has changed, or cannot be decoded."


def list_page(site: Site, query: Query, page: int) -> str:
    """One page of the samples that a query selects; `page` counts from 0. Beyond the last page, the last."""
    if site.similar is not None and site.lacks(query):
        return comparing_page(site, site.similar)
    hard, data = site.hardness(), site.data
    selected = site.select(data, query)
    pages = max(1, -(-len(selected) // CARDS))
    page = min(page, pages - 1)
    shown = selected[page * CARDS:(page + 1) * CARDS].tolist()
    query_string = address(query, data.shapes)
    return site.render(
        "list.html", query=query, given=query_string, edit_token=site.edit_token,
        queried=query_fields(query_string), **_judged(site), filtered=query != Query(text=query.text),
        wording=None, prefilled=Rewording(query.tag, "", "", whole=True) if query.tag else None,
        orders={name: words for name, words in ORDERS.items()
                if (hard is not None or name != "loss") and (site.similar is not None or name not in LIKENESS)},
        clusters=data.selector.clusters,
        roles=[role for role in ROLES if data.roles[role]],
        buckets=[(format_bucket(shape), count) for shape, count in zip(data.shapes, data.crowds, strict=True)],
        sources=[_source(path) for path in data.sources], facts=data.facts, total=len(data.selector.samples),
        count=len(selected), first=page * CARDS + 1, cards=with_form(site, {
            number: card_of(site, data, number, query=query_string,
                                    facts=(*loss_of(hard, number), *_likeness(data, query, number)))
            for number in shown}),
        low=_percent(query.low), high=_percent(query.high), samples=data.roles, rejected=data.rejected,
        notes=data.notes, next=data.next,
        pager=pager_of(page, pages, lambda other: f"{site.base}/{address(query, data.shapes, page=other + 1)}"))


def sample_page(site: Site, number: int, query: Query) -> str:
    """Everything about one sample, and the way to its neighbors among those that the query selects."""
    hard, data = site.hardness(), site.data
    row, selected = data.describe(number), site.select(data, query)
    places = np.flatnonzero(selected == number)
    query_string, at = address(query, data.shapes), int(places[0]) if len(places) else None
    back = address(query, data.shapes, page=1 + (at or 0) // CARDS)
    weights = sum(text["weight"] for text in row["texts"])
    return site.render(
        "sample.html", number=number, row=row, at=at, count=len(selected), back=f"{site.base}/{back}",
        before=None if not at else f"{site.base}/sample/{selected[at - 1]}{query_string}",
        after=None if at is None or at + 1 == len(selected) else f"{site.base}/sample/{selected[at + 1]}{query_string}",
        picture=_picture(site, number, row), losses=loss_chart(site, number),
        facts=[*_sample_facts(row, data.sources[row["source"]]), *facts_of_run(hard, number)],
        findings=findings_table(data.selector.findings_of(number)),
        views=[_view(site, number, place, row) for place in range(min(len(row["views"]), VIEWS))],
        texts=[{**text, "part": text["weight"] / weights if weights else None, "readings": readings}
               for text, readings in zip(row["texts"], _readings(site, row), strict=True)],
        decodes=site.model is not None, edit=edit_of(site, number), made=made_of(site, [number]).get(number),
        **_judged(site))


def _judged(site: Site) -> dict[str, Any]:
    """How many captions models made, by what people did to them, and the command that asks again about rejected ones.
    """
    if site.origins is None:
        return {"made_counts": {}, "again": 0}
    made = np.bincount(site.origins.column(), minlength=1 + len(MADE))[1:].tolist()
    counts = {"model": sum(made[:-1]), **dict(zip(MADE, made, strict=True))}
    captioning = "prep caption SOURCE" if site.editor is None else site.editor.edits.captioning
    return {"made_counts": counts if sum(made) else {}, "again": made[-1],
            "captioning": f"{captioning} --model {shell_name(site.origins.rejected_of())}"}


def _likeness(data: Data, query: Query, number: int) -> tuple[str, ...]:
    """The fact of a sample's card by which it is sorted, if embeddings say that."""
    compared = data.selector.compared
    if compared is None or query.sort not in LIKENESS:
        return ()
    return (f"cosine {getattr(compared, query.sort)[number]:.3f}",)


def tags_page(site: Site, query: Query) -> str:
    """How many of the samples that a query selects have each tag, with links to these."""
    data = site.data
    selected = site.select(data, query)
    counts, different = data.selector.tags.counted(selected, TAGS)
    return site.render(
        "tags.html", query=query, given=address(query, data.shapes), count=len(selected),
        total=len(data.selector.samples), different=different, complete=data.selector.tags.complete, most=MOST_TAGS,
        rows=[(tag, count, count / len(selected), f"{site.base}/{address(replace(query, tag=tag), data.shapes)}"
               if len(tag) <= LONGEST else "") for tag, count in counts])


def findings_page(site: Site, code: str, page: int) -> str:
    """One page of the findings of a code, or of all; `page` counts from 0."""
    chosen = site.selector.findings_with(code)
    pages = max(1, -(-len(chosen) // ROWS))
    page = min(page, pages - 1)

    def link(other: int) -> str:
        values = {name: value for name, value in (("code", code), ("page", other + 1)) if value}
        return f"{site.base}/findings?{urlencode(values)}"

    shown = chosen.slice(page * ROWS, ROWS).to_pylist()
    return site.render("findings.html", code=code, meaning=CODES[code] if code else None, count=len(chosen),
                       findings=shown, numbers=_pictured(site, [finding["path"] for finding in shown]),
                       pager=pager_of(page, pages, link))


def _pictured(site: Site, paths: Sequence[str]) -> dict[str, int]:
    """The samples that findings are about: pictures, or those of a mask or caption file."""
    of = {path: [path, *(stem_of(path).removesuffix(MASK) + end for end in PICTURES)] for path in paths}
    known = site.selector.samples_of([name for names in of.values() for name in names])
    pictured = {path: next((known[name] for name in names if name in known), None) for path, names in of.items()}
    return {path: number for path, number in pictured.items() if number is not None}


def error_page(base: str, status: int, what: str, hint: str = "", *, first: str = "All samples") -> str:
    """A page that says what is wrong, with a link to the `first` page."""
    return render("error.html", base=base, first=first, home="", name="Latentry", kind="", status=status, what=what,
                  hint=hint, codes={}, has_run=False, root="", edits=False, encoded=False,
                  compares=False, embedded=False)


def _sample_facts(row: Mapping[str, Any], source: Any) -> list[tuple[str, str]]:
    trains = "everything (no mask)" if row["coverage"] is None else f"{row['coverage']:.1%} of the picture"
    return [("split", row["role"]), ("source", _source(source)),
            ("size", f"{format_size(row['size'])}, to the bucket {format_size(row['bucket'])}"),
            ("trained area", trains), ("per epoch", plural(row["repeats"], "time")), ("weight", f"{row['weight']:g}"),
            ("picture", row["picture"]), ("id", row["id"])]


def _readings(site: Site, row: Mapping[str, Any]) -> Iterator[list[Reading]]:
    """Yields how the text encoders read each caption; of many captions only the first."""
    for number, text in enumerate(row["texts"]):
        known = [] if site.model is None or number >= READ else site.model.readings(text["caption"])
        yield [replace(reading, tokens=reading.tokens[:TOKENS]) for reading in known]


def _view(site: Site, number: int, place: int, row: Mapping[str, Any]) -> dict[str, Any]:
    view, latent = row["views"][place], None if site.rows is None else site.rows.latent(number, place)
    channels = [] if latent is None else statistics(latent[:CHANNELS])
    return {"place": place, "latent": view["latent"], "mask": view["mask"], "channels": channels,
            "shape": None if latent is None else "×".join(map(str, latent.shape)),
            "more": 0 if latent is None else len(latent) - len(channels),
            "references": _references(site, number, view),
            "how": _how(view, row["bucket"])}


def _how(view: Mapping[str, Any], bucket: Sequence[int]) -> str:
    """How a picture is placed in a bucket."""
    (wide, high), (left, top), (width, height) = view["scaled"], view["crop"], bucket
    return (f"scaled to {wide}x{high}, cropped to {width}x{height} at {left}, {top}"
            + (", mirrored" if view["flip"] else "")
            + f"; {1 - width * height / (wide * high):.1%} of the picture is cut off")


def _references(site: Site, number: int, view: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The references of a described view, each with its picture and crop."""
    shown = []
    for place, each in enumerate(view.get("references", ())):
        whole = site.pictures.whole(number, place) not in (None, UNDECODABLE)
        shown.append({"name": each["name"], "size": format_size(each["size"]), "how": _how(each, each["bucket"]),
                      "latent": each["latent"], "picture": each["picture"], "shot": Shot(
                          name=f"Reference {place + 1} with its crop", size=each["size"], instead=NOT_HERE,
                          address=f"{site.base}/picture/{number}/{place}" if whole else "",
                          overlays=(crop_overlay(each, each["bucket"], ""),))})
    return shown


def _picture(site: Site, number: int, row: Mapping[str, Any]) -> Shot:
    """The original with its crops and masks."""
    whole = site.pictures.whole(number) not in (None, UNDECODABLE)
    overlays = tuple(
        crop_overlay(view, row["bucket"], "" if view["mask"] is None else f"{site.base}/shade/{number}/{place}")
        for place, view in enumerate(row["views"][:VIEWS]))
    return Shot(name="The original with its crops and masks" if whole else "The crops; the original cannot be shown",
                address=f"{site.base}/picture/{number}" if whole else "", size=row["size"], overlays=overlays,
                instead=NOT_HERE)


def _percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:g}"


def _source(place: Place | None) -> str:
    return "unknown" if place is None else place.as_posix()
