"""`make docs`: writes the pages that are generated from the code. A test fails when one is stale.

    python -m tests.docs
"""

from __future__ import annotations

from pathlib import Path

from prep.training.table import as_toml
from tests.docs import recipe, reference

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    (root / reference.PAGE).write_text(reference.reference(), encoding="utf-8")
    (root / recipe.PAGE).write_text(recipe.recipe(), encoding="utf-8")
    (root / "manifests" / "train.toml").write_text(as_toml(), encoding="utf-8")
