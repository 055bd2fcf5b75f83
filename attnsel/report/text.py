"""A document as text of some width: for a terminal, a log and an error message alike."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

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

_LABEL = 15  # columns of a label behind a number, at least: one column for the names of all candidates
_LIST, _LIST_ON_A_SCREEN = 2, 1  # the column of a list, at least
_NAME = 6  # letters of a name in the second line of a table's head, where there is little room: then in two
_FLAG = re.compile(r""" (?=--)(?=(?:[^'"]|'[^']*'|"[^"]*")*$)""")  # before a flag, outside quotes


def to_text(document: Document, width: int = 80) -> str:
    """The whole document. No line is wider but for one word that is, which is never broken: it may be an
    address, or part of a command."""
    title = [*fold(shown(document.title), width, "", "  "), ""] if document.title else []
    return "\n".join(line.rstrip() for line in (*title, *_blocks(document.blocks, width)))


# ---- what other renderers fold with ---------------------------------------------------------------------


def fold(text: str, width: int, lead: str = "", indent: str = "") -> list[str]:
    """``text`` in lines of ``width`` columns: ``lead`` before the first, ``indent`` before the others."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=lead,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def fold_command(command: str, width: int) -> list[str]:
    """A command continued before its flags where it is too wide, to be pasted as it stands."""
    first, *flags = _FLAG.split(command)
    lines = [first]
    for flag in flags:
        if len(lines[-1]) + len(flag) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"   {flag}")
        else:
            lines[-1] += f" {flag}"
    return lines


def join_items(items: Sequence[str], width: int) -> list[str]:
    """Items with a dot between them, none broken inside."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 3 + len(item) <= width:
            lines[-1] += f" · {item}"
        else:
            lines.append(item)
    return lines


def paste_lines(block: Paste, width: int) -> list[str]:
    """What is to be pasted; commands of a shell are continued."""
    lines = [shown(line).rstrip() for line in block.lines]
    return [one for line in lines for one in fold_command(line, width)] if block.language == "sh" else lines


# ---- blocks ---------------------------------------------------------------------------------------------


def _said(text: Inline) -> str:
    """The words alone, of one line."""
    if isinstance(text, str):
        return shown(text)
    if isinstance(text, (Code, Ref)):
        return shown(text[0])
    if isinstance(text, (Link, Strong)):
        return _said(text.text)
    if isinstance(text, Prose):
        return shown(text.text.replace("`", ""))
    return "".join(map(_said, text))


def _blocks(blocks: Iterable[Block], width: int, at: int = 0, screen: bool = False) -> list[str]:
    """Blocks from column ``at`` on, with an empty line between them unless they are on one ``screen``."""
    out: list[str] = []
    for block in blocks:
        out += [""] if out and not screen else []
        out += _block(block, width, at, screen)
    return out


def _block(block: Block, width: int, at: int, screen: bool) -> list[str]:
    pad = " " * at
    if isinstance(block, Paragraph):
        return fold(_said(block.text), width, pad, pad)
    if isinstance(block, Item):
        return _item(block, width, at)
    if isinstance(block, Items):
        column = max(at, _LIST_ON_A_SCREEN if screen else _LIST)
        wide = max([_LABEL, *(len(_said(item.label)) for item in block.items if item.number)])
        return [line for item in block.items for line in _item(item, width, column, wide)]
    if isinstance(block, Facts):
        out: list[str] = []
        for line in block.lines:
            if isinstance(line, Item):
                out += _item(line, width, at)
            else:
                out += [pad + one for one in join_items(list(map(shown, line)), width - at)]
        return out
    if isinstance(block, Fields):
        wide = max((len(shown(name)) for name, _ in block.rows), default=0) + 2
        held: list[str] = []
        for name, texts in block.rows:
            leads = [f"{pad}{shown(name):<{wide}}", *[" " * (at + wide)] * len(texts)]
            for lead, text in zip(leads, texts, strict=False):
                held += fold(_said(text), width, lead, leads[-1])
        return held
    if isinstance(block, Table):
        return [f"{pad}{line}" for line in _table(block, width - at)]
    if isinstance(block, Paste):
        lines = [f"{pad}{line}" for line in paste_lines(block, width - at)]
        reasons = (fold(shown(why), width, f"{pad}# ", f"{pad}# ") for why in block.why)
        return [*lines, *(line for reason in reasons for line in reason)]
    if isinstance(block, Drawing):
        return [f"{pad}{shown(line)}" for line in block.draw(width - at).split("\n")]
    if isinstance(block, Screen):
        return _blocks(block.blocks, width, at, True)
    number = f"{block.number}. " if block.number else ""
    heading = fold(shown(block.title), width, pad + number, pad + " " * (len(number) or 2))
    return [*heading, *_blocks(block.blocks, width, at + len(number), screen)]


def _table(block: Table, width: int) -> list[str]:
    """Columns as far apart as there is room. Where there is little, the first blank within cells goes; then
    heads of two parts take two lines; at last other columns stand in a table below, with the first again."""
    head = [*map(_said, block.head)]
    indent = " " * any(len(row) == 1 for row in block.rows)
    rows = [[*map(_said, row)] for row in block.rows]
    rows = [row if len(row) == 1 else [indent + row[0], *row[1:]] for row in rows]
    tight = [[row[0], *(cell.replace(" ", "", 1) for cell in row[1:])] for row in rows]
    for cells, gap in ((rows, 3), (rows, 2), (rows, 1), (tight, 1)):
        lines = _columns(head, cells, gap)
        if all(len(line) <= width for line in lines):
            return lines
    parts = [tuple(map(_said, part)) if type(part) is tuple else ("", _said(part)) for part in block.head]
    families = [above.rstrip(".") for above, _ in parts]
    for most in (width, _NAME) if any(families) else ():
        broken = [bool(above) and len(name) > most for above, name in parts]
        names = [f"{name[:4]}-" if cut else name for cut, (_, name) in zip(broken, parts, strict=True)]
        rest = [name[4:] if cut else "" for cut, (_, name) in zip(broken, parts, strict=True)]
        lines = _columns(names, rows, 1, families, rest)
        if all(len(line) <= width for line in lines):
            return lines
    widths = _widths(head, rows)
    groups: list[list[int]] = [[0]]
    for column in range(1, len(head)):
        if len(groups[-1]) > 1 and sum(widths[c] + 2 for c in groups[-1]) + widths[column] > width:
            groups.append([0])
        groups[-1].append(column)
    lines = []
    for group in groups:
        below = [row if len(row) == 1 else [row[column] for column in group] for row in rows]
        lines += ["", *_columns([head[column] for column in group], below, 2)]
    return lines[1:]


def _widths(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(head, *(row for row in rows if len(row) > 1), strict=True)]


def _columns(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    gap: int,
    families: Sequence[str] = (),
    rest: Sequence[str] = (),
) -> list[str]:
    """A table in one piece. ``families``: what heads have in common with their neighbours, shown once;
    ``rest``: of heads that take two lines."""
    widths, above, blank = _widths(head, [*rows, rest] if rest else rows), [], " " * gap
    for family, members in groupby(range(len(families)), families.__getitem__):
        places = list(members)
        room = sum(widths[place] + gap for place in places) - gap
        widths[places[-1]] += max(0, len(family) - room)
        above.append(f"{family:<{room}}")

    def line(cells: Iterable[str]) -> str:
        return blank.join(f"{cell:<{wide}}" for cell, wide in zip(cells, widths, strict=True)).rstrip()

    lines = [blank.join(above).rstrip(), line(head)] if families else [line(head)]
    lines += [line(rest)] if any(rest) else []
    if all(len(row) > 1 for row in rows):
        lines.append(line("─" * wide for wide in widths))
    for row in rows:
        lines += [line(row)] if len(row) > 1 else ["", row[0]]
    return lines


def _item(item: Item, width: int, at: int, wide: int = _LABEL) -> list[str]:
    """One entry. What belongs to it stands below its text, or two columns right of where it begins."""
    mark = f"{shown(item.mark)} " if item.mark else ""
    label, text = _said(item.label), _said(item.text)
    if item.tag:
        text += f"  [{_said(item.tag)}]"
    if item.number:
        lead = f"{shown(str(item.number)):>{at + 1}} {mark}"
        below = len(lead)
        lead += f"{label:<{wide}} " if label else ""
        hang = len(lead)
    else:
        lead = " " * at + mark
        named = label and not isinstance(item.label, Ref)  # the code of a rule needs no colon
        below = hang = len(lead) + (4 if named and not mark else 2)
        lead += f"{label}: " if named else f"{label}  " if label else ""
    out = fold(text, width, lead, " " * hang) or [lead.rstrip()] * bool(lead.strip())
    for one in item.more:
        out += fold(_said(one), width, " " * (hang + 2), " " * (hang + 4))
    for block in item.below:
        out += _block(block, width, below, False)
    return out
