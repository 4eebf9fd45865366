"""Items are read in threads, in order, and not all at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from walking import item_of

from prep.dataset import ingest
from prep.dataset.reading import FactReader
from prep.fs.memo import Memo
from prep.recipe.schema import Recipe, Source


def test_what_waits_for_a_slow_file_is_not_the_rest_of_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item that waits takes more memory than all that is known of it afterwards."""
    begun: list[str] = []
    read, given = FactReader.read, []

    def slowly(self: FactReader, kind: str, data: bytes) -> Any:
        begun.append(kind)
        time.sleep(0.2 if len(begun) == 1 else 0)
        return read(self, kind, data)

    def items() -> Any:
        for number in range(40):
            given.append(number)
            picture = tmp_path / f"{number}.png"
            Image.new("RGB", (8, 8), (number, 0, 0)).save(picture)
            yield item_of(picture, name=picture.name, captions=("x",))

    monkeypatch.setattr(FactReader, "read", slowly)
    monkeypatch.setattr(ingest, "AHEAD", 6)
    recipe = Recipe(sources=(Source(path=tmp_path),))
    known = ingest.ingest_items(items(), recipe, Memo(None), jobs=2)
    first = next(known)
    assert isinstance(first, ingest.KnownItem) and first.item.name == "0.png"
    assert 7 <= len(given) <= 8
    names = [each.item.name for each in known if isinstance(each, ingest.KnownItem)]
    assert names == [f"{number}.png" for number in range(1, 40)]
