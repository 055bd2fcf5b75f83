"""What an answer is printed as, and the flags that say so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from attnsel.base.files import replace_whole
from attnsel.cli.output import print_text, text_width
from attnsel.errors import InvalidInput
from attnsel.report.document import Document
from attnsel.report.markdown import to_markdown
from attnsel.report.text import to_text

OUTPUT = Group("Output", sort_key=5)


def yes_or_no(text: str, **more: Any) -> Parameter:
    """A flag that is there or not: none says no to it."""
    return Parameter(negative="", show_default=False, help=text, **more)


Json = Annotated[bool, yes_or_no("print JSON instead of text", group=OUTPUT)]
Markdown = Annotated[bool, yes_or_no("print Markdown, for an issue", group=OUTPUT)]


def one_form(**asked: bool) -> None:
    """Raises InvalidInput where two forms of output are asked for at once."""
    names = [f"--{name}" for name, wanted in asked.items() if wanted]
    if len(names) > 1:
        raise InvalidInput(names[0], None, f"cannot go with {' and '.join(names[1:])}: one form at a time")


def write_whole(flag: str, file: Path, text: str) -> None:
    """All of a file or nothing of it. Raises InvalidInput."""
    try:
        target = os.path.realpath(file)
        if os.path.exists(target) and not os.path.isfile(target):
            raise OSError("it is a folder or a device")
        folder, name = os.path.split(target)
        replace_whole(target, text.encode(), os.path.join(folder, f".{name}.{os.getpid()}"))
    except (OSError, ValueError) as error:  # a name with a NUL in it
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidInput(flag, str(file), f"cannot be written: {why}") from None


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
        self,
        document: Callable[[], Document],
        record: Callable[[], Any],
        indent: int | None = 2,
        page: Callable[[], Any] | None = None,
    ) -> None:
        """The answer on standard output, with colours only for a person. ``page``: its html.Page."""
        file: Path | None = getattr(self, "html", None)
        if file is not None:
            from attnsel.report.html import page_of, to_html  # for this flag alone

            html = to_html(page_of(document()) if page is None else page(), record())
            if str(file) == "-":  # in what any standard output can say
                print(html.encode("ascii", "xmlcharrefreplace").decode())
                return
            write_whole("--html", file, html)
        text = self.written(document, record, text_width(), indent)
        if self.json:
            print(text)
        else:
            print_text(text)


TEXT = Form()


@Parameter(name="*")
@dataclass(frozen=True)
class PageForm(Form):
    """Also a page in a file, beside what is printed; ``-`` is standard output, in the place of that."""

    html: Annotated[
        Path | None,
        Parameter(
            group=OUTPUT,
            allow_leading_hyphen=True,
            help="also write the answer as a page with pictures, which needs no network; - prints it",
        ),
    ] = None

    def require_one(self, **others: bool) -> None:
        one_form(**others, markdown=self.markdown, json=self.json, html=str(self.html) == "-")


TEXT_AND_PAGE = PageForm()
