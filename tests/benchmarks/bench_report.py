"""`prep inspect --html` of 10,000 samples: the page's bytes, and how long a browser takes to load and search it.

    python tests/benchmarks/bench_report.py [--samples 10000] [--photos DIR] [--quick] [--write]

The data set is made first (tests/support/synthetic.py), with captions of 200 letters and a mask for every sample.
Thumbnails are of random crops of the photos in DIR (default: photos/ in LATENTRY_REAL_DATA), or of noise without any,
which no photo is as hard to compress as. Masks are soft ellipses.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
from PIL import Image
from results import emit, parser_of, table

WORDS = "a small white robot stands on a mossy gray rock in the style of an old photograph with light from the left"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=None, help="default: 10,000; 1000 with --quick")
    parser.add_argument("--photos", type=Path, default=None)
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    import synthetic
    from browser import start_browser

    from prep.manifest.opened import open_manifest
    from prep.manifest.statistics import latent_statistics
    from prep.report.snapshots import gallery
    from prep.report.snapshots.manifest import Measurements, write_page

    wanted = options.samples or (1000 if options.quick else 10_000)
    photos = photos_of(options.photos)
    synthetic.caption = lambda number: f"{number} {WORDS} {WORDS}"[:200]
    with tempfile.TemporaryDirectory() as scratch:
        synthetic.WITH_MASK = 1
        opened = open_manifest(synthetic.build(Path(scratch), synthetic.Scale(samples=wanted)))
        sides: list[int] = []
        gallery.source_thumbnails = lambda _, side: sides.append(side) or (
            lambda one: thumbnail(one["name"], photos, side))
        gallery._mask = lambda _reader, place, side: gallery.small_shade(ellipse(str(place)), side)
        begun = time.perf_counter()
        statistic = latent_statistics(opened, lambda _: None)
        measured = time.perf_counter() - begun
        write_page(opened, Path(scratch) / "page.html", date(2024, 2, 29), measured=Measurements(latents=statistic))
        written = time.perf_counter() - begun - measured
        size = (Path(scratch) / "page.html").stat().st_size
        text = (Path(scratch) / "page.html").read_text()
        shown = text.count('"webp,') + text.count("image/webp;")
        browser = start_browser()
        rows = [[name, *(f"{pick(times):.0f}" for pick in (statistics.median, min, max))]
                for name, times in browse(browser, Path(scratch) / "page.html").items()]
        browser.close()
    told = table(["ms in Chromium", "median", "lowest", "highest"], rows)
    emit("A page of 10,000 samples", f"`bench_report.py`: {wanted:,} samples make a page of {size / 1e6:.2f} MB with "
         f"{shown:,} pictures and masks; photos have a longer side of {sides[0]} pixels. Statistics of latents take "
         f"{measured:.1f} s, the page {written:.1f} s, without decoding the photos.\n\n{told}", options.write)


def browse(browser, page: Path) -> dict[str, list[float]]:
    """Milliseconds until the page is loaded, and until it shows what was searched for or ordered."""
    found: dict[str, list[float]] = {"load": [], "search": [], "order by name": []}
    for number in range(5):
        begun = time.perf_counter()
        browser.open(page)
        browser.run("document.querySelectorAll('#cards .card').length")
        found["load"].append(1000 * (time.perf_counter() - begun))
        for name, box, value in (("search", "find-words", f"{number}7 robot"), ("order by name", "find-order", "0")):
            found[name].append(browser.run(f"""(() => {{ const box = document.getElementById("{box}");
                box.value = "{value}"; const begun = performance.now(); box.dispatchEvent(new Event("change"));
                document.getElementById("find-order").dispatchEvent(new Event("change"));
                document.body.offsetHeight; return performance.now() - begun; }})()"""))
    return found


def photos_of(folder: Path | None) -> list[Image.Image]:
    """The photos of a directory, of 1024 pixels at most."""
    named = os.environ.get("LATENTRY_REAL_DATA")
    root = folder or (Path(named) / "photos" if named else None)
    found = []
    for path in sorted(root.rglob("*")) if root else []:
        if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"):
            with Image.open(path) as picture:
                found.append(picture.convert("RGB"))
            found[-1].thumbnail((1024, 1024))
    return found


def thumbnail(name: str, photos: list[Image.Image], side: int) -> bytes:
    """A crop of a photo, of half to all of its sides, as a WebP; the same for the same name."""
    from prep.images.thumbnail import encode_webp

    random = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    if not photos:
        return encode_webp(random.integers(0, 256, (side * 2 // 3, side, 3), dtype=np.uint8))
    photo = photos[random.integers(len(photos))]
    part = random.uniform(0.5, 1)
    wide, high = round(part * photo.width), round(part * photo.height)
    left, top = (int(random.integers(rest + 1)) for rest in (photo.width - wide, photo.height - high))
    cut = photo.crop((left, top, left + wide, top + high))
    cut.thumbnail((side, side), Image.Resampling.LANCZOS)
    return encode_webp(np.asarray(cut))


def ellipse(name: str) -> np.ndarray:
    """A soft ellipse in a mask of 96 x 128 cells, uint8; the same for the same name."""
    random = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    y, x = np.mgrid[-1:1:96j, -1:1:128j]
    (a, b), (s, t) = random.uniform(-0.3, 0.3, 2), random.uniform(0.3, 0.8, 2)
    return (255 / (1 + np.exp(20 * (((x - a) / s) ** 2 + ((y - b) / t) ** 2 - 1)))).astype(np.uint8)


if __name__ == "__main__":
    main()
