"""A document as one page that asks for nothing: text, pictures, search, style and script are in the file.

The templates beside this module show blocks and know no answer. What is given from outside is text there:
Jinja2 escapes it, in the JSON that the page holds too. A page has further blocks, which follow here and which
no other form shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from math import ceil, floor, log2
from typing import TYPE_CHECKING, Any, NamedTuple

from attnsel._version import __version__
from attnsel.report.document import Document, Inline, Item, Paragraph, Section, Strong, codes, shown
from attnsel.report.prose import spans
from attnsel.rules import REGISTRY
from attnsel.verdicts.requirements import size

if TYPE_CHECKING:
    import jinja2


class Fold(NamedTuple):
    """An entry whose blocks are shown when it is opened. ``anchor``: what a link to it names."""

    head: Item
    below: tuple[Any, ...]
    open: bool = False
    anchor: str = ""


class Part(NamedTuple):
    """A part of a page with a heading, which may hold what only a page shows."""

    title: str
    blocks: tuple[Any, ...]


class Tree(NamedTuple):
    """Entries below what they belong to."""

    root: Inline
    folds: tuple[Fold, ...]


class Tile(NamedTuple):
    """A part of a map. tone: classes of page.css, of a kernel or of a state. tip: what is said of it where
    the pointer or the focus is, in lines. span: over how many columns. to: the anchor where more is said.
    here: that it is what was asked."""

    text: str
    tone: str
    tip: tuple[Inline, ...]
    span: int = 1
    to: str = ""
    here: bool = False

    @property
    def said(self) -> str:
        """The tip as text, in which a speaking browser's user finds what others see."""
        text = "\n".join(filter(None, map(plain, self.tip)))
        return text if self.text in text else f"{self.text}\n{text}"

    @property
    def parts(self) -> list[str]:
        """The text in one line or, of a long one, in two."""
        if len(self.text) < 10:
            return [self.text]
        at = max(self.text.find("."), self.text.find(" ")) + 1
        return [self.text[:at], self.text[at:]] if at else [self.text]


class Map(NamedTuple):
    """Rows of tiles below a head of texts, each over so many columns. legend: tones in words. axes: what the
    rows and the columns are, of a plane, which is drawn; others are tables."""

    caption: str
    head: tuple[tuple[Inline, int], ...]
    rows: tuple[tuple[Inline, tuple[Tile, ...]], ...]
    legend: tuple[tuple[str, str], ...] = ()
    axes: tuple[str, str] | None = None

    @property
    def columns(self) -> int:
        return sum(count for _, count in self.head)

    @property
    def label_width(self) -> float:
        """Rem of the column of labels: many tiles beside them leave less."""
        longest = max((len(plain(label)) for label, _ in self.rows), default=0)
        return min(24.0 if self.columns < 9 else 11.0, max(5.0, 2 + longest / 2.2))

    @property
    def narrowest(self) -> float:
        """Rem that a column needs, so that a line of upright text fits into the narrowest tile."""
        return 1.25 / min((tile.span for _, tiles in self.rows for tile in tiles), default=1)

    @property
    def wide(self) -> float:
        """Of a plane, what a column takes in its drawing, whose letters are 6.5 wide."""
        texts = [part for _, tiles in self.rows for tile in tiles for part in tile.parts]
        return max(64.0, 10 + 6.5 * max(map(len, (*texts, *(plain(text) for text, _ in self.head)))))

    @property
    def left(self) -> float:
        """Of a plane, what the labels of its rows take."""
        return max(88.0, 14 + 6.5 * max(len(plain(label)) for label, _ in self.rows))

    def upright(self, tile: Tile) -> bool:
        """Whether a text is longer than its tile on a page of usual width, and that is narrow."""
        return self.columns > 10 and len(tile.text) > 140 * tile.span / self.columns

    @property
    def placed(self) -> Iterator[tuple[int, int, Tile]]:
        """Row, first column and tile."""
        for row, (_, tiles) in enumerate(self.rows):
            for column, tile in zip(accumulate((t.span for t in tiles), initial=0), tiles, strict=False):
                yield row, column, tile


class Line(NamedTuple):
    """One line of a plot. ``points``: lengths and bytes; ``ends``: why it goes no further."""

    name: str
    tone: str
    points: tuple[tuple[int, int], ...]
    ends: Inline = ""


class Plot(NamedTuple):
    """Memory over length, both by powers of two; below the lowest power nothing is needed."""

    caption: str
    lines: tuple[Line, ...]

    @property
    def lengths(self) -> list[int]:
        return sorted({length for line in self.lines for length, _ in line.points})

    @property
    def _range(self) -> tuple[int, int]:
        amounts = [amount for line in self.lines for _, amount in line.points if amount] or [1 << 20]
        return floor(log2(min(amounts))), max(ceil(log2(max(amounts))), floor(log2(min(amounts))) + 4)

    @property
    def amounts(self) -> list[int]:
        """Where lines of the grid are."""
        lowest, highest = self._range
        return [1 << power for power in range(lowest, highest + 1, ceil((highest - lowest) / 7))]

    def x(self, length: int) -> float:
        first, last = log2(self.lengths[0]), log2(self.lengths[-1])
        return round(64 + 456 * (log2(length) - first) / max(1, last - first), 1)

    def y(self, amount: int) -> float:
        lowest, highest = self._range
        return round(290 - 272 * (log2(amount) - lowest) / (highest - lowest), 1) if amount else 316.0

    def path(self, line: Line) -> str:
        return " ".join(f"{self.x(length)},{self.y(amount)}" for length, amount in line.points)

    @property
    def labels(self) -> Iterator[tuple[Line, float]]:
        """Each line with the height of its name, which touches no other."""
        free = 400.0
        ends = sorted(self.lines, key=lambda line: -self.y(line.points[-1][1]))
        highest = 14.0 * len(ends)
        for line in ends:
            free = min(max(self.y(line.points[-1][1]), highest), free - 14)
            highest -= 14
            yield line, free


class Page(NamedTuple):
    """A whole page. ``codes``: of rules that are named in no block and explained all the same."""

    title: str
    heading: Inline
    blocks: tuple[Any, ...]
    codes: tuple[str, ...] = ()


def page_of(document: Document) -> Page:
    """A page of a report: its first sentence is the heading."""
    first, *rest = document.blocks or (Paragraph(""),)
    if isinstance(first, Paragraph) and isinstance(first.text, Strong):
        return Page(plain(first.text), first.text.text, tuple(rest))
    heading = document.title or (first.title if isinstance(first, Section) else "What attnsel says")
    return Page(heading, heading, document.blocks)


def plain(part: Inline) -> str:
    """What stands within a line, as text."""
    if isinstance(part, str):
        return shown(part)
    return "".join(map(plain, part[:1] if hasattr(part, "_fields") else part))


def kernel_tone(name: str | None) -> str:
    """The class of a kernel's colour."""
    return "nothing" if name is None else f"k k-{re.sub('[^a-z0-9]+', '-', name.lower())}"


def runs_of(tiles: Iterator[Tile] | list[Tile]) -> tuple[Tile, ...]:
    """Neighbours that say the same as one."""
    found: list[Tile] = []
    for tile in tiles:
        last = found[-1] if found else None
        if last is not None and last._replace(span=1) == tile._replace(span=1):
            found[-1] = last._replace(span=last.span + tile.span)
        else:
            found.append(tile)
    return tuple(found)


def to_html(page: Page, record: Any) -> str:
    """``record``: the same answer as JSON, which the page holds too."""
    named = dict.fromkeys((*codes(page.blocks), *codes((page.heading,)), *page.codes))
    rules = [REGISTRY.pages[code] for code in sorted(named) if code in REGISTRY.pages]
    template = _templates().get_template("page.html")
    return template.render(
        page=page,
        contents=[
            (f"part-{place}", one.title)
            for place, one in enumerate(page.blocks, 1)
            if isinstance(one, (Part, Section))
        ],
        record=record,
        rules=rules,
        explained={rule.code for rule in rules},
        version=__version__,
    )


@cache
def _templates() -> jinja2.Environment:
    import jinja2  # for a page alone

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("attnsel.report.html", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {}  # keys in the order of the record
    made.filters |= {
        "kind": lambda part: type(part).__name__,
        "shown": shown,
        "plain": plain,
        "spans": spans,
        "size": size,
        "tone": lambda mark: _TONES.get(mark, "quiet"),
    }
    made.tests["web"] = lambda address: re.match("https?://", address) is not None
    return made


_TONES = {"✔": "yes", "✖": "no", "?": "unknown", "!": "unknown", "◐": "yes", "▷": "unknown", "◁": "unknown"}
