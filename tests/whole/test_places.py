"""A place is a value: no room above `fs` and `cache` asks what a path spells, and few ask which kind a place is.

The numbers below only shrink. What must differ between this computer and a store is chosen once, by a function of `fs`
or `cache` that takes either.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
           for package in ("prep", "train") for path in sorted((ROOT / package).rglob("*.py"))}
ABOVE = {name: text for name, text in MODULES.items() if not name.startswith(("prep/fs/", "prep/cache/"))}

SPELLED = re.compile(r"\bis_url\(|\burl_of\(|\blocal_path\(|\bis_object\(|\bfetcher is (?:not )?None|\"://\"|"
                     r"startswith\(\(?f?\"(?:s3|gs|az)\b")
KINDS = re.compile(r"isinstance\([^\n]*?, (?:Bucket|Path)\)|\bcache\.store is (?:not )?None|"
                   r"\.origin is (?:not )?None|\b(?:manifest|old|a|b)\.in_store\b")

# Hub ids, and words of a run's document; tars, of which a store gives the headers.
SPELL = {"prep/models/hub.py": 1, "prep/runs/document.py": 1, "prep/sources/tars.py": 1,
         "prep/sources/readers.py": 2}
# By why it is asked: the number of questions in each module.
ASK: dict[str, dict[str, int]] = {
    "one of both is chosen, once, where something is opened or listed": {
        "prep/cli/view.py": 1, "prep/encode/engines/ray_worker.py": 1, "prep/manifest/document.py": 2,
        "prep/sources/folders.py": 1, "prep/sources/walk.py": 2, "train/runs/stored/stored.py": 1},
    "only one of both will do, as an error says": {
        "prep/encode/prepare.py": 1, "prep/export/pack.py": 1, "prep/export/unpack.py": 1,
        "prep/manifest/document.py": 2, "prep/recipe/edits.py": 1, "prep/recipe/init.py": 1, "prep/recipe/load.py": 1,
        "prep/recipe/validate.py": 1, "prep/runs/document.py": 1, "prep/view/edit/places.py": 1},
    "a store lacks it, or it is named otherwise there: replaced manifests, records of damage, paths from a run": {
        "prep/encode/manifest/assemble.py": 1, "prep/encode/manifest/commits.py": 1,
        "prep/encode/manifest/replaced.py": 1, "prep/manifest/commands.py": 4, "prep/manifest/diff.py": 2,
        "train/cli/resumed.py": 1, "train/report/page.py": 1, "train/runs/directory.py": 3,
        "train/sampling/prompts.py": 1},
    "shards are fetched when they are read": {
        "prep/cli/verify.py": 1, "prep/loader/prefetch.py": 1, "prep/maintenance/verify.py": 1,
        "prep/manifest/statistics.py": 1, "train/check/nodes.py": 1},
    "it is no place: a model is a directory or an id on the Hub, and other values may be paths": {
        "prep/manifest/document.py": 1, "prep/models/hub.py": 1, "prep/recipe/write.py": 1,
        "prep/report/snapshots/manifest.py": 1, "train/card.py": 1, "train/parallel/code.py": 1,
        "train/runs/directory.py": 1},
    "maintenance of caches here and in stores": {
        "prep/maintenance/compact.py": 2, "prep/maintenance/others.py": 6, "prep/maintenance/pull.py": 1,
        "prep/maintenance/push.py": 1, "prep/maintenance/recheck.py": 1, "prep/maintenance/repair.py": 1,
        "prep/maintenance/stock.py": 2, "prep/maintenance/sweep.py": 1},
}


def counted(pattern: re.Pattern[str]) -> Counter[str]:
    return Counter({name: len(pattern.findall(text)) for name, text in ABOVE.items() if pattern.search(text)})


def test_what_a_path_spells_is_asked_in_fs_and_cache_alone():
    assert counted(SPELLED) == SPELL


def test_few_rooms_ask_which_kind_a_place_is():
    assert counted(KINDS) == sum(map(Counter, ASK.values()), Counter())


def test_a_path_is_made_of_no_url():
    """Of what a person typed a place is made by `place_of`."""
    for name, text in ABOVE.items():
        assert not re.search(r"\bPath\(\w*url\b|\bPath\(str\(\w+\.(?:url|store)\)\)", text), name
