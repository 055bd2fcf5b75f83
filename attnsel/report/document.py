"""What an answer is made of: blocks, and what stands within a line of them.

A builder makes a ``Document`` from a record; ``report/text.py`` and ``report/markdown.py`` write it. Builders
know no width and escape nothing; writers know shapes and no answer. A plain ``str`` is shown as it stands,
whatever is in it: it may come from a log or a plug-in. What is to be code, or the code of a rule, says so.

Named tuples, since a class of ``dataclasses`` takes three times as long to load.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from attnsel.errors import printable

MARK = {"eligible": "✔", "unknown": "?", "refused": "✖"}


# ---- within a line ------------------------------------------------------------------------------------


class Code(NamedTuple):
    """A name of code, or a command within a sentence."""

    text: str


class Ref(NamedTuple):
    """The code of a rule: a link, where the page has addresses."""

    code: str


class Link(NamedTuple):
    """A text with its address; the text alone where there is none."""

    text: Inline
    to: str


class Strong(NamedTuple):
    """What is to be read first."""

    text: Inline


class Prose(NamedTuple):
    """A sentence of our own, in which names of code, rules, addresses and issues are recognised."""

    text: str


Inline: TypeAlias = "str | Code | Ref | Link | Strong | Prose | tuple[Inline, ...]"


def joined(parts: Iterable[Inline], between: str = ", ", last: str = "") -> Inline:
    """Parts of a line with something between them. ``last``: what stands before the last of several."""
    among = list(parts)
    out: list[Inline] = []
    for place, part in enumerate(among, 1):
        out += [last if last and place == len(among) else between, part] if out else [part]
    return tuple(out)


_SPACES = re.compile(r"[\t\n\v\f\r]+")


def shown(text: str) -> str:
    """A text in one line that nothing in it can leave: what every writer shows."""
    return text if text.isprintable() else printable(_SPACES.sub(" ", text))


def codes(part: Any) -> Iterator[str]:
    """The rules that a block, or a part of one, refers to."""
    if isinstance(part, Ref):
        yield part.code
    elif isinstance(part, tuple):
        for one in part:
            yield from codes(one)


# ---- blocks -------------------------------------------------------------------------------------------


class Paragraph(NamedTuple):
    """A text."""

    text: Inline


class Item(NamedTuple):
    """An entry of a list, or a remark that stands alone.

    number: its place; "–" or " " for one that has none below others that have. mark: one sign before it.
    label: whom it is about. text, more: what is said, each of ``more`` on lines of its own. tag: what kind of
    statement it is. below: blocks that belong to it.
    """

    text: Inline = ""
    mark: str = ""
    number: int | str = ""
    label: Inline = ""
    tag: Inline = ""
    more: tuple[Inline, ...] = ()
    below: tuple[Block, ...] = ()


class Items(NamedTuple):
    """A list. ``title``: what its entries without a place are, where a list without columns needs it said."""

    items: tuple[Item, ...]
    title: str = ""


class Facts(NamedTuple):
    """What was asked: lines of short parts, none broken inside, and remarks between them."""

    lines: tuple[tuple[str, ...] | Item, ...]


class Fields(NamedTuple):
    """Names, each with what it holds, in a line or several."""

    rows: tuple[tuple[str, tuple[Inline, ...]], ...]


class Table(NamedTuple):
    """Cells below a head. A row of one cell is a heading above those that follow. A head of two parts, as in
    ``("sdpa.", "flash")``, may stand in two lines."""

    head: tuple[Inline, ...]
    rows: tuple[tuple[Inline, ...], ...]


class Paste(NamedTuple):
    """Lines to paste as they stand. ``why``: sentences about them."""

    lines: tuple[str, ...]
    language: str = "sh"
    why: tuple[str, ...] = ()


class Drawing(NamedTuple):
    """What draws itself as text of a given number of columns."""

    draw: Callable[[int], str]


class Section(NamedTuple):
    """A part with a heading. ``number``: its place among others."""

    title: str
    blocks: tuple[Block, ...]
    number: int = 0


class Screen(NamedTuple):
    """Blocks without empty lines between them, to be seen at once."""

    blocks: tuple[Block, ...]


Block: TypeAlias = "Paragraph | Item | Items | Facts | Fields | Table | Paste | Drawing | Section | Screen"


class Document(NamedTuple):
    """A whole answer. ``title``: of one that is a page."""

    blocks: tuple[Block, ...]
    title: str = ""
