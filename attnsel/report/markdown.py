"""A document as Markdown, which GitHub and Python-Markdown read alike.

Whatever was given from outside is shown as it stands: nothing in it becomes markup, a link or a mention. A
character with a meaning is written as an entity, since Python-Markdown knows few escapes; where it has none,
as in ``head_dim``, it stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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
    Paragraph,
    Paste,
    Ref,
    Screen,
    shown,
)

_MARKUP = re.compile(
    r"[&<>*`\[\]|\\~^{}$]"
    r"|(?<![^\W_])_+|_+(?![^\W_])"  # not within a word
    r"|^(?:\d+(?=[.)](?:\s|$))|(?:#+|[+=-]+)(?=\s)|(?:#{2,}|[=-]{2,})$)"  # at the beginning of a line
)
# GitHub looks for mentions, issues and addresses after entities are gone; an empty comment parts them.
_FOUND_LATER = re.compile(r"(@|(?<!&)#(?=\d)|:(?=//)|www(?=\.))")
_BAR = re.compile(r"(?<!\\)\|")
_WIDTH = 80  # columns of what is shown as a terminal shows it
_LEVEL = 3  # of headings: the whole stands in somebody's issue, below others


def to_markdown(document: Document) -> str:
    """The whole document."""
    return "\n\n".join(_parts(document.blocks))


# ---- pieces ---------------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """``text`` in one line that Markdown shows as it stands."""
    plain = _MARKUP.sub(lambda found: "".join(f"&#{ord(sign)};" for sign in found[0]), shown(text).strip(" "))
    return _FOUND_LATER.sub(r"\1<!-- -->", plain) if _FOUND_LATER.search(plain) else plain


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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already. A bar parts cells even within code."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in cells)} |" for cells in lines)


def _cell(said: str) -> str:
    return _BAR.sub(r"\|", said)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _said(text: Inline) -> str:
    if isinstance(text, str):
        start, end = text[: text[:1] == " "], text[len(text) - (text[-1:] == " ") :]
        return f"{start}{escape(text)}{end}" if text.strip(" ") else text
    if isinstance(text, Code):
        return code(text.text)
    if isinstance(text, Ref):
        return escape(text.code)
    return "".join(map(_said, text))


# ---- blocks ---------------------------------------------------------------------------------------------


def _parts(blocks: Iterable[Block], level: int = _LEVEL) -> list[str]:
    """Blocks as parts with an empty line between them."""
    return [part for block in blocks for part in _block(block, level)]


def _block(block: Block, level: int) -> list[str]:
    if isinstance(block, Paragraph):
        said = _said(block.text).strip()
        return [f"**{said}**" if block.strong else said]
    if isinstance(block, Item):
        return _entry(block, level)
    if isinstance(block, Items):
        return _items(block, level)
    if isinstance(block, Facts):
        lines = [" · ".join(line) for line in block.lines if not isinstance(line, Item)]
        remarks = [part for line in block.lines if isinstance(line, Item) for part in _entry(line, level)]
        return [fenced(lines, "text"), *remarks]
    if isinstance(block, Fields):
        return ["\n".join(f"- {escape(name)}: {_said(held)}" for name, held in block.rows)]
    if isinstance(block, Paste):
        why = [escape(f"Why: {'. '.join(block.why)}.")] if block.why else []
        return [fenced(text.paste_lines(block, _WIDTH), block.language)] * bool(block.lines) + why
    if isinstance(block, Drawing):
        return [fenced(block.draw(_WIDTH).split("\n"), "text")]
    if isinstance(block, Screen):
        return _parts(block.blocks, level)
    number = f"{block.number}. " if block.number else ""
    return [f"{'#' * level} {number}{escape(block.title)}", *_parts(block.blocks, level + 1)]


def _items(block: Items, level: int) -> list[str]:
    """A list, in two where entries without a place follow on others; one with lines to paste, which no list
    shows well everywhere, as paragraphs."""
    title = [f"{escape(block.title)}:"] if block.title else []
    if any(isinstance(one, Paste) for item in block.items for one in item.below):
        return [*title, *(part for item in block.items for part in _entry(item, level))]
    placed = [item for item in block.items if isinstance(item.number, int)]
    others = [item for item in block.items if not isinstance(item.number, int)]
    lists = [
        "\n".join(line for item in among for line in _listed(item)) for among in (placed, others) if among
    ]
    return [*lists[:-1], *title, lists[-1]] if others else lists


def _listed(item: Item) -> list[str]:
    bullet = f"{item.number}." if isinstance(item.number, int) else "-"
    inner = " " * (len(bullet) + 1)
    lines = [f"{bullet} {_line(item)}", *(f"{inner}- {_said(one)}" for one in item.more)]
    for block in item.below:
        below = _listed(block) if isinstance(block, Item) else "\n\n".join(_block(block, 6)).split("\n")
        lines += [f"{inner}{line}" for line in below]
    return lines


def _entry(item: Item, level: int) -> list[str]:
    """An item that is no entry of a list."""
    more = "".join(f"; {_said(one)}" for one in item.more)
    return [f"{_line(item)}{more}", *_parts(item.below, level)]


def _line(item: Item) -> str:
    label, said = _said(item.label), _said(item.text).strip()
    if label and said and not item.number:
        label += ":"
    tag = f"({_said(item.tag)})" if item.tag else ""
    return " ".join(filter(None, (escape(item.mark), label, said, tag)))
