"""A place is a value: no room above `fs` and `cache` asks what a path spells, and few ask which kind a place is.

The numbers below only shrink. What must differ between this computer and a store is chosen once, by a function of `fs`
or `cache` that takes either; what a cache lacks in a store, it says by name: `is_whole`, `records_damage`, `has_lock`.
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
KINDS = re.compile(r"isinstance\([^\n]*?, Bucket\)|\bcache\.store is (?:not )?None|\.origin is (?:not )?None|"
                   r"\b(?:manifest|old|a|b)\.in_store\b")
PATHS = re.compile(r"isinstance\([^\n]*?, Path\)")  # in a room of values that are no places, it is another question

# Hub ids, and words of a run's document; tars, of which a store gives the headers.
SPELL = {"prep/models/named.py": 1, "prep/runs/document.py": 1, "prep/sources/tars.py": 1,
         "prep/sources/readers.py": 2}
# By why it is asked: the number of questions in each module.
ASK: dict[str, dict[str, int]] = {
    "one of both is chosen, once, where something is opened, listed or written": {
        "prep/cli/view.py": 1, "prep/encode/engines/ray_worker.py": 1, "prep/encode/prepare.py": 1,
        "prep/maintenance/stock.py": 1, "prep/manifest/document.py": 1, "prep/sources/folders.py": 1,
        "prep/sources/walk.py": 2,
        "train/runs/stored/stored.py": 1},
    "a store has none: edits beside pictures, manifests that were replaced, prompt files, ways back to a checkpoint": {
        "prep/maintenance/others.py": 1, "prep/recipe/edits.py": 1, "prep/dataset/edits/places.py": 1,
        "train/runs/directory.py": 1, "train/sampling/prompts.py": 1},
    "a manifest in a store was uploaded: paths in it lead nowhere, and what repairs it is an upload": {
        "prep/manifest/commands.py": 2, "prep/manifest/diff.py": 2, "prep/manifest/document.py": 3},
    "a run in a store begins when it is resumed without a checkpoint, and its manifest is looked for when it is read": {
        "prep/runs/document.py": 1, "train/cli/resumed.py": 1},
}


def counted(pattern: re.Pattern[str]) -> Counter[str]:
    return Counter({name: len(pattern.findall(text)) for name, text in ABOVE.items() if pattern.search(text)})


def test_what_a_path_spells_is_asked_in_fs_and_cache_alone():
    assert counted(SPELLED) == SPELL


def test_few_rooms_ask_which_kind_a_place_is():
    paths = Counter({name: count for name, count in counted(PATHS).items() if re.search(r"\bPlace\b", ABOVE[name])})
    assert counted(KINDS) + paths == sum(map(Counter, ASK.values()), Counter())


def test_a_path_is_made_of_no_url():
    """Of what a person typed a place is made by `place_of`."""
    for name, text in ABOVE.items():
        assert not re.search(r"\bPath\(\w*url\b|\bPath\(str\(\w+\.(?:url|store)\)\)", text), name
