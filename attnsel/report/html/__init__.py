"""An answer as one page that asks for nothing: text, pictures, search, style and script are in the file.

The templates beside this module read the answers that other forms are made of and derive no fact. What is
given from outside is text there: Jinja2 escapes it, in the JSON that the page holds too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from math import ceil, floor, log2
from typing import Any, NamedTuple

from attnsel._version import __version__
from attnsel.backends.registry import CANDIDATES
from attnsel.report import answer, short, words
from attnsel.report.document import MARK, Document, Inline, Paragraph, Strong, shown
from attnsel.report.prose import spans
from attnsel.rules import REGISTRY
from attnsel.verdicts.requirements import size

_CODE = re.compile(r"\b[A-Z]{2,}[0-9]{3}\b")
_PART = re.compile(r'<section class="part" id="([^"]+)"[^>]*>\s*<h2[^>]*>(.*?)</h2>')


class Page(NamedTuple):
    """A template beside this module, by its name, and what it reads."""

    template: str
    named: Mapping[str, Any]


def page_of(document: Document) -> Page:
    """The page of a report that has no pictures: its first sentence is the heading."""
    match document.blocks:
        case (Paragraph(Strong(text)), *rest):
            return Page("document", {"said_first": text, "among": rest})
    return Page("document", {"said_first": document.title or "What attnsel says", "among": document.blocks})


def to_html(page: Page, record: Any) -> str:
    """``record``: the same answer as JSON, which the page holds too."""
    templates = _templates()
    inner = templates.get_template(f"{page.template}.html").make_module(dict(page.named))
    text = body = str(inner)
    named: set[str] = set()
    while more := {*_CODE.findall(text)} & (REGISTRY.pages.keys() - named):  # sources name rules too
        named |= more
        text = " ".join(REGISTRY.pages[code].source for code in more)
    made: str = templates.get_template("page.html").render(
        title=inner.title,
        heading=inner.heading,
        body=body,
        parts=_PART.findall(body),
        rules=[REGISTRY.pages[code] for code in sorted(named)],
        record=record,
        version=__version__,
    )
    return made


@cache
def _templates() -> Any:
    import jinja2  # for a page alone

    def source(name: str) -> str:
        """A template without its indentation, which would be a third of a page."""
        text = resources.files("attnsel.report.html").joinpath(name).read_text(encoding="utf-8")
        return re.sub("(?m)^ +", "", text)

    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {}  # keys in the order of the record
    made.globals |= {"answer": answer, "short": short, "words": words}
    made.globals |= {"CANDIDATES": CANDIDATES, "MARK": MARK, "RULES": REGISTRY.pages}
    made.filters |= {"plain": plain, "shown": shown, "size": size, "spans": spans, "tone": tone}
    made.filters |= {"kind": lambda part: type(part).__name__, "over_one": lambda text: (text, 1)}
    made.tests["web"] = lambda address: re.match("https?://", address) is not None
    return made


_TONES = {"✔": "yes", "✖": "no", "?": "unknown", "!": "unknown", "◐": "yes", "▷": "unknown", "◁": "unknown"}


def tone(said: str | None) -> str:
    """The class of a sign, or of a kernel's colour."""
    name = said or "nothing"
    return _TONES.get(name) or f"k k-{re.sub('[^a-z0-9]+', '-', name.lower())}"


def plain(part: Inline) -> str:
    """What stands within a line, as text."""
    if isinstance(part, str):
        return shown(part)
    return "".join(map(plain, part[:1] if hasattr(part, "_fields") else part))


class Tile(NamedTuple):
    """A part of a row of a plane: what is shown, its class, and what is said of it in lines. ``here``: it is
    what was asked. ``at``, ``span``: its first column, and how many."""

    text: str
    tone: str
    tip: tuple[str, ...]
    here: bool
    at: int
    span: int = 1


class Plane(NamedTuple):
    """What is answered over two fields: their names, the values along the top, and a row for each other."""

    caption: str
    axes: tuple[str, str]
    head: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Tile, ...]], ...]


class Line(NamedTuple):
    """One line of a plot. ``points``: lengths and bytes; ``ends``: codes of what lets it go no further."""

    name: str
    tone: str
    points: tuple[tuple[int, int], ...]
    ends: tuple[str, ...] = ()


class Plot(NamedTuple):
    """Memory over length, both by powers of two; below the lowest power nothing is needed."""

    caption: str
    lines: tuple[Line, ...]

    @property
    def lengths(self) -> list[int]:
        return sorted({length for line in self.lines for length, _ in line.points})

    @property
    def powers(self) -> range:
        """Where lines of its grid are."""
        amounts = [amount for line in self.lines for _, amount in line.points if amount] or [1 << 20]
        lowest, highest = floor(log2(min(amounts))), ceil(log2(max(amounts)))
        step = max(1, ceil((highest - lowest) / 7))
        return range(lowest, max(highest, lowest + 4) + step, step)

    def x(self, length: int) -> float:
        first, last = log2(self.lengths[0]), log2(self.lengths[-1])
        return round(64 + 456 * (log2(length) - first) / max(1, last - first), 1)

    def y(self, amount: int) -> float:
        lowest, highest = self.powers[0], self.powers[-1]
        return round(290 - 272 * (log2(amount) - lowest) / (highest - lowest), 1) if amount else 316.0

    @property
    def labels(self) -> Iterator[tuple[Line, float, float]]:
        """Each line with the height of its end and that of its name, which touches no other."""
        free, least = 400.0, 14.0 * len(self.lines)
        for end, line in sorted(((self.y(one.points[-1][1]), one) for one in self.lines), reverse=True):
            free = min(max(end, least), free - 14)
            least -= 14
            yield line, end, free
