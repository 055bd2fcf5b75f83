"""How the tools of this folder print: JSON in a line, and text folded to the width of the terminal."""

from __future__ import annotations

import json
from typing import Any

from attnsel.cli.output import text_width
from attnsel.report.text import fold


def print_json(value: Any) -> None:
    """In ASCII: nothing in it can move a terminal's cursor."""
    print(json.dumps(value))


def wrap(text: str, lead: str = "", indent: str | None = None) -> list[str]:
    """``text`` folded to the width; ``lead`` before the first line, ``indent`` before the others."""
    return fold(text, text_width(), lead, " " * len(lead) if indent is None else indent)
