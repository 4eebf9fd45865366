"""Reports as text for a terminal: tables that read well without color; the only room of rich beside the progress bar.

Names and captions come from files, so whatever a terminal would obey in them is shown escaped.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prep.formatting import printable


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> Table:
    """Columns without a box; cells are text, never markup, and fold rather than lose a letter."""
    table = Table(box=None, show_header=any(heads) and bool(rows), pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if number in set(right) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _page(*parts: Table | str) -> str:
    """The parts as text, a blank line between tables; as wide as the terminal, or 120 columns."""
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    blocks = []
    for part in parts:
        if isinstance(part, Table) and not part.row_count:
            continue
        out = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
        out.print(Text(printable(part)) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))
        text = "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())  # type: ignore[attr-defined]
        blocks.append(text if isinstance(part, str) else text + "\n")
    return "\n".join(blocks).rstrip("\n")
