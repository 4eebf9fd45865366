"""`prep codes`."""

from __future__ import annotations

from typing import Annotated

import typer

from prep.cli import options as opt
from prep.cli.console import put, put_json, screen_width
from prep.cli.signature import complete


def _codes(incomplete: str) -> object:
    from prep.findings import CODES

    return complete({code: facts[1] for code, facts in CODES.items()})(incomplete)


def codes(
    code: Annotated[str | None, typer.Argument(metavar="[CODE]", help="one code (default: all)", show_default=False,
                                               autocompletion=_codes)] = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the codes of findings, with severity, meaning and remedy."""
    from prep.errors import UsageError
    from prep.findings import CODES, parse_code
    from prep.parse import Unparsed
    from prep.report.terminal.codes import code_text, codes_table

    if code is not None:
        try:
            parse_code(code, "CODE")
        except Unparsed as error:
            raise UsageError(str(error), hint="prep codes lists all codes") from None
    shown = CODES if code is None else {code: CODES[code]}
    if as_json:
        put_json({"format": "latentry/codes", "version": 1, "codes": [
            {"code": name, "severity": severity, "meaning": meaning, "remedy": remedy}
            for name, (severity, meaning, remedy) in shown.items()]})
    else:
        put(codes_table(shown, width=screen_width()) if code is None else code_text(code))
