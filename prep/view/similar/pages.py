"""Renders the pages of what embeddings say of the samples: the map of all, and those most like one."""

from __future__ import annotations

from prep.embedding.analysis import LEAST
from prep.pages.overlay import Shot
from prep.pages.similarity import similarity_page
from prep.view.similar.state import PATIENCE, Similar
from prep.view.site import Site, card_of

LIKE = 24  # samples that are shown beside one


def map_page(site: Site, similar: Similar) -> str:
    """The map of the samples, what resembles what, and findings. Raises `CacheError`."""
    found = similar.found if similar.wait(PATIENCE) else None
    if found is None:
        return comparing_page(site, similar)

    def page_of(name: str) -> str:
        sample = similar.sample_of(name)
        return "" if sample is None else f"{site.base}/sample/{sample}"

    page = similarity_page(
        found, what="", all_of=lambda number: f"{site.base}/?cluster={number + 1}", page_of=page_of,
        link=lambda name: f"{site.base}/like/{similar.sample_of(name)}",
        shot=lambda name: Shot(name=name, address=f"{site.base}/thumbnail/{similar.sample_of(name)}", lazy=True))
    return site.render("similarity.html", page=page)


def comparing_page(site: Site, similar: Similar) -> str:
    """How far a comparison is; the page asks again by itself. Or that too few samples have an embedding."""
    return site.render("comparing.html", compared=similar.done, total=len(site.selector.samples),
                       least=LEAST if similar.wait(0) else None)


def like_page(site: Site, similar: Similar, number: int) -> str:
    """A sample, and those that are most like it. Raises `CacheError`."""
    data = site.data
    cards = [card_of(site, data, other, facts=(f"cosine {cosine:.3f}",))
             for other, cosine in similar.nearest(number, LIKE)]
    return site.render(
        "like.html", sample=data.selector.samples.name(number), up=f"{site.base}/sample/{number}",
        picture=f"{site.base}/thumbnail/{number}", cards=cards)
