"""`make docs`: writes the pages that are generated from the code. A test fails when one is stale.

    python -m tests.docs
"""

from __future__ import annotations

from pathlib import Path

from tests.docs.reference import PAGE, reference

if __name__ == "__main__":
    path = Path(__file__).parents[2] / PAGE
    path.write_text(reference(), encoding="utf-8")
