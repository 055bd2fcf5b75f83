"""What an answer is printed as."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from cyclopts import Parameter

from attnsel.cli.flags import Json, Markdown, one_form
from attnsel.cli.output import print_text, text_width
from attnsel.report.document import Document
from attnsel.report.markdown import to_markdown
from attnsel.report.text import to_text


@Parameter(name="*")
@dataclass(frozen=True)
class Form:
    """Text, where no flag says otherwise.

    A further form is a field here, which is its flag, a line in ``written`` and a writer in attnsel/report/.
    """

    markdown: Markdown = False
    json: Json = False

    def require_one(self, **others: bool) -> None:
        """Raises InvalidInput where two forms are asked for at once. ``others``: those of one command."""
        one_form(**others, **asdict(self))

    def written(
        self, document: Callable[[], Document], record: Callable[[], Any], width: int, indent: int | None = 2
    ) -> str:
        """An answer in this form. ``record``: what JSON is made of; ``indent``: None for JSON in one line."""
        if self.json:  # in ASCII: nothing in it can move a terminal's cursor
            return json.dumps(record(), indent=indent)
        return to_markdown(document()) if self.markdown else to_text(document(), width)

    def print(
        self, document: Callable[[], Document], record: Callable[[], Any], indent: int | None = 2
    ) -> None:
        """The answer on standard output, with colours only for a person."""
        text = self.written(document, record, text_width(), indent)
        if self.json:
            print(text)
        else:
            print_text(text)


TEXT = Form()
