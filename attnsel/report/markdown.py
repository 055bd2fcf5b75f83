"""A document as Markdown, which GitHub and Python-Markdown read alike.

Whatever was given from outside is shown as it stands: nothing in it becomes markup, a link or a mention. A
character with a meaning is written as an entity, since Python-Markdown knows few escapes; where it has none,
as in ``head_dim``, it stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from attnsel.report import text
from attnsel.report.document import (
    Block,
    Code,
    Document,
    Drawing,
    Facts,
    Fields,
    Inline,
    Item,
    Items,
    Link,
    Paragraph,
    Paste,
    Prose,
    Ref,
    Screen,
    Strong,
    Table,
    shown,
)
from attnsel.report.prose import spans

_MARKUP = re.compile(r"[&<>*`\[\]|\\~^{}$]|(?<![^\W_])_+|_+(?![^\W_])")  # underscores: not within a word
_OPENING = re.compile(r"^(?:\d+(?=[.)](?:\s|$))|(?:#+|[+=-]+)(?=\s)|(?:#{2,}|[=-]{2,})$)")  # of a line
# GitHub looks for mentions, issues and addresses after entities are gone; an empty comment parts them.
_FOUND_LATER = re.compile(r"(@|(?<!&)#(?=\d)|:(?=//)|www(?=\.))")
_BAR = re.compile(r"(?<!\\)\|")
_LOWEST = 6
_WIDTH = 80  # columns of what is shown as a terminal shows it
_PAGE, _IN_AN_ISSUE = 2, 3  # the level of headings: what has no title stands below those of others


def nowhere(_: str) -> str:
    """The address of what has no page of its own."""
    return ""


def to_markdown(document: Document, rule_at: Callable[[str], str] = nowhere) -> str:
    """The whole document. ``rule_at``: the address of a rule's page; "" where it has none."""
    writer = _Writer(rule_at)
    if not document.title:
        return "\n\n".join(writer.parts(document.blocks, _IN_AN_ISSUE))
    return "\n\n".join([f"# {escape(document.title)}", *writer.parts(document.blocks, _PAGE)])


def inline(text: Inline) -> str:
    """What stands within a line."""
    return _Writer(nowhere).said(text)


# ---- pieces ---------------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """``text`` in one line that Markdown shows as it stands."""
    return _opened(_plain(text.strip()))


def _plain(text: str) -> str:
    """``text`` where it does not begin a line."""
    plain = _MARKUP.sub(_entities, shown(text))
    return _FOUND_LATER.sub(r"\1<!-- -->", plain) if _FOUND_LATER.search(plain) else plain


def _opened(said: str) -> str:
    """What is Markdown already, at the beginning of a line: it begins no heading and no list."""
    return _OPENING.sub(_entities, said)


def _entities(found: re.Match[str]) -> str:
    return "".join(f"&#{ord(sign)};" for sign in found[0])


def code(text: str) -> str:
    """``text`` as code within a line."""
    said = shown(text)
    ticks = "`" * (_longest_run(said) + 1)
    space = " " if said[:1] in ("`", " ", "") or said[-1:] in ("`", " ") else ""
    return f"{ticks}{space}{said}{space}{ticks}"


def fenced(lines: Iterable[str], language: str) -> str:
    """Lines as a block of code."""
    said = "\n".join(map(shown, lines))
    ticks = "`" * max(3, _longest_run(said) + 1)
    return f"{ticks}{language}\n{said}\n{ticks}"


def link(said: str, address: str) -> str:
    """What is Markdown already as a link, where there is an address; to what is no page of Markdown as HTML,
    which Zensical moves along with the page."""
    if ".html" in address and "://" not in address:
        return f'<a href="{address}">{said}</a>'
    plain = said.replace("<!-- -->", "")  # nothing is looked for in a link
    return f"[{plain}]({address})" if address else said


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already. A bar parts cells even within code."""
    lines = ([_BAR.sub(r"\|", cell) for cell in cells] for cells in (head, ["---"] * len(head), *rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


# ---- blocks ---------------------------------------------------------------------------------------------


class _Writer:
    """Writes blocks as parts that an empty line separates."""

    def __init__(self, rule_at: Callable[[str], str]) -> None:
        self.rule_at = rule_at

    def said(self, text: Inline) -> str:
        if isinstance(text, str):
            return _plain(text)
        if isinstance(text, Code):
            return code(text.text)
        if isinstance(text, Ref):
            return link(escape(text.code), self.rule_at(text.code))
        if isinstance(text, Link):
            return link(self.said(text.text), text.to)
        if isinstance(text, Strong):
            said = self.said(text.text).strip()
            return f"**{said}**" if said else ""
        if isinstance(text, Prose):
            return self.said(spans(text.text))
        said = ""
        for part in map(self.said, text):
            image = said[-1:] == "!" and part[:1] == "["  # which a link behind an exclamation mark would be
            said = f"{said[:-1]}&#33;{part}" if image else said + part
        return said

    def parts(self, blocks: Iterable[Block], level: int) -> list[str]:
        return [part for block in blocks for part in self.block(block, level)]

    def block(self, block: Block, level: int) -> list[str]:
        if isinstance(block, Paragraph):
            return [_opened(self.said(block.text).strip())]
        if isinstance(block, Item):
            return self.entry(block, level)
        if isinstance(block, Items):
            return self.items(block, level)
        if isinstance(block, Facts):
            lines = [" · ".join(line) for line in block.lines if not isinstance(line, Item)]
            remarks = [line for line in block.lines if isinstance(line, Item)]
            return [fenced(lines, "text"), *(part for one in remarks for part in self.entry(one, level))]
        if isinstance(block, Fields):
            rows = [(escape(name), "<br>".join(map(self.said, texts))) for name, texts in block.rows]
            return [table(rows[0], rows[1:])]
        if isinstance(block, Table):
            width = len(block.head)
            said = [[self.said(cell) for cell in row] for row in block.rows]
            said = [row if len(row) > 1 else [f"**{row[0]}**", *[""] * (width - 1)] for row in said]
            return [table([*map(self.said, block.head)], said)]
        if isinstance(block, Paste):
            why = [escape(f"Why: {'. '.join(block.why)}.")] if block.why else []
            return [fenced(text.paste_lines(block, _WIDTH), block.language)] * bool(block.lines) + why
        if isinstance(block, Drawing):
            return [fenced(block.draw(_WIDTH).split("\n"), "text")]
        if isinstance(block, Screen):
            return self.parts(block.blocks, level)
        number = f"{block.number}. " if block.number else ""
        return [f"{'#' * level} {number}{escape(block.title)}", *self.parts(block.blocks, level + 1)]

    def items(self, block: Items, level: int) -> list[str]:
        """A list, in two where entries without a place follow on others. One with lines to paste, which no
        list shows well everywhere, as paragraphs."""
        title = [f"{escape(block.title)}:"] if block.title else []
        if any(isinstance(one, Paste) for item in block.items for one in item.below):
            return [*title, *(part for item in block.items for part in self.entry(item, level))]
        placed = [line for item in block.items if isinstance(item.number, int) for line in self.listed(item)]
        others = [
            line for item in block.items if not isinstance(item.number, int) for line in self.listed(item)
        ]
        titled = ["\n".join(placed), *title, "\n".join(others)] if others else ["\n".join(placed)]
        return list(filter(None, titled))

    def listed(self, item: Item) -> list[str]:
        bullet = f"{item.number}." if isinstance(item.number, int) else "-"
        inner = " " * (len(bullet) + 1)
        lines = [
            f"{bullet} {self.line(item)}",
            *(f"{inner}- {_opened(self.said(one).strip())}" for one in item.more),
        ]
        for block in item.below:
            parts = self.listed(block) if isinstance(block, Item) else self.block(block, _LOWEST)
            lines += [f"{inner}{line}" for line in "\n".join(parts).split("\n")]
        return lines

    def entry(self, item: Item, level: int) -> list[str]:
        """An item that is no entry of a list."""
        more = "".join(f"; {self.said(one)}" for one in item.more)
        return [f"{self.line(item)}{more}", *self.parts(item.below, level)]

    def line(self, item: Item) -> str:
        label, said = self.said(item.label), self.said(item.text).strip()
        if label and said and not item.number:
            label += ":"
        tag = f"({self.said(item.tag)})" if item.tag else ""
        return _opened(" ".join(filter(None, (escape(item.mark), label, said, tag))).strip())
