"""`prep models`."""

from __future__ import annotations

from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, screen_width
from prep.cli.signature import complete


def _families(incomplete: str) -> object:
    from prep.models.families.registry import FAMILIES

    return complete({name: ", ".join(family.models) for name, family in FAMILIES.items()})(incomplete)


def models(
    name: Annotated[str | None, typer.Argument(metavar="[FAMILY]", help="one family (default: all)",
                                               show_default=False, autocompletion=_families)] = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the families of models that can be encoded and trained, with what the recipe of each may set."""
    from prep.errors import UsageError
    from prep.models.families.registry import FAMILIES
    from prep.parse import Unparsed, one_of
    from prep.report.terminal.models import describe, family_text, models_table

    if name is not None:
        try:
            one_of(name, FAMILIES, "FAMILY")
        except Unparsed as error:
            raise UsageError(str(error), hint="prep models describes them") from None
    families = [describe(family) for family in FAMILIES.values() if name in (None, family.name)]
    if as_json:
        put_json({"format": "latentry/models", "version": 1, "families": families})
    else:
        put(models_table(families, width=screen_width()) if name is None else family_text(families[0]))
