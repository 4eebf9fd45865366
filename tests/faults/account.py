"""Accounts for every file of a cache's home: outside tmp/ is only what the layout allows, and all of it is whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from prep.cache import plans
from prep.cache.commits import read_commit
from prep.cache.damage import recorded
from prep.cache.ledger.ledger import is_finished
from prep.cache.store import Cache
from prep.digest import digest_bytes
from prep.fs.tree import file_digest, tree_digest

State = dict[str, object]
HEX = r"([0-9a-f]{64})"
FOLDER = re.compile(rf"cache(/(tmp|plans|damaged|(shards|commits|tables)(/..)?|shards/../{HEX}/\w+))?")
DISPOSABLE = re.compile(r"cache/(lock|damaged/lock|facts\.sqlite(-journal)?|lookup\.[a-z]+)"  # in any state
                        r"|[\w-]+\.json\.replaced-[0-9a-f]{12}")


@dataclass
class Account:
    """What lies where it may: leftovers in tmp/, shards that no commit names (yet), unfinished plans."""

    staging: list[str]
    shards: list[str]
    commits: list[str]
    plans: list[str]
    manifests: list[str]


def account(home: Path) -> Account:
    """The account of `home`, which has `cache` and manifests. Fails at a file that should not be there, or is torn."""
    cache = Cache(root=home / "cache")
    found = Account(staging=[], shards=[], commits=[], plans=[], manifests=[])
    damaged = set(cache.names("damaged"))
    for path in sorted(home.rglob("*")):
        name = path.relative_to(home).as_posix()
        if name.startswith("cache/tmp/"):
            found.staging.append(name)
        elif match := re.fullmatch(rf"cache/shards/(..)/{HEX}", name):
            assert match[2].startswith(match[1]), name
            assert tree_digest(path) == match[2] or match[2] in damaged, f"{name} is torn"
            found.shards.append(match[2])
        elif path.is_dir():
            assert FOLDER.fullmatch(name), f"what is {name}?"
        elif match := re.fullmatch(rf"cache/commits/../{HEX}\.json", name):
            assert read_commit(cache, match[1]) is not None, f"{name} is torn"
            assert is_finished(cache, match[1]) or damaged, f"{name} has no shard"
            found.commits.append(match[1])
        elif match := re.fullmatch(rf"cache/tables/../{HEX}\.arrow", name):
            assert file_digest(path) == match[1], f"{name} is torn"
        elif match := re.fullmatch(rf"cache/plans/{HEX}\.arrow", name):
            assert plans.read_plan(cache, match[1]) is not None, f"{name} is torn"
            found.plans.append(match[1])
        elif match := re.fullmatch(rf"cache/damaged/{HEX}\.json", name):
            assert all("record" not in damage.what for damage in recorded(cache, match[1])), f"{name} is torn"
        elif re.fullmatch(r"[\w-]+\.json", name):
            found.manifests.append(name)
        else:
            assert name == "cache/latentry.json" or DISPOSABLE.fullmatch(name) or "/shards/" in name, f"what is {name}?"
    return found


def state(home: Path) -> State:
    """All that two honest runs make the same: names, and bytes but for commits, which say how long they took."""
    files: State = {}
    for path in sorted(home.rglob("*")):
        name = path.relative_to(home).as_posix()
        if path.is_file() and not DISPOSABLE.fullmatch(name) and not name.startswith("cache/tmp/"):
            files[name] = "there" if name.startswith("cache/commits/") else digest_bytes(path.read_bytes())
    return files
