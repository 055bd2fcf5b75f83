"""The matrix as Markdown, for an issue: a table, what the marks mean, each answer's releases and rules."""

from __future__ import annotations

from collections.abc import Sequence

from attnsel.pages.can_i_use.cells import Cell
from attnsel.pages.can_i_use.tables import by_gpu, by_kernel, components_line, legend
from attnsel.pages.can_i_use.words import LOOKS, codes_of, command, parts, range_words, sentence, span_mark
from attnsel.report.markdown import code, escape, table
from attnsel.rules import REGISTRY


def markdown_lines(found: Sequence[Cell]) -> list[str]:
    """All cells: one table for each feature over GPUs; on one GPU the reasons too, or all features in one."""
    features = list(dict.fromkeys(cell.feature for cell in found))
    gpus = list(dict.fromkeys(cell.gpu for cell in found))
    if len(gpus) == 1 and len(features) > 1:
        made = by_kernel(found)
        lines = [f"What runs on {escape(gpus[0])}", "", _table(made.head, made.rows), ""]
        return [*lines, *_legend(found)]
    lines = []
    for feature in features:
        about = [cell for cell in found if cell.feature is feature]
        lines += [f"### {escape(feature.title)}", "", escape(feature.about), ""]
        if len(gpus) > 1:
            made = by_gpu(about)
            lines += [_table(made.head, made.rows), "", *_legend(about), ""]
            lines += [escape(f"Releases are those of {components_line(about)}."), ""]
        else:
            lines += [*_answers(about), ""]
    return lines[:-1]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table([*map(escape, head)], [[*map(escape, row)] for row in rows])


def _legend(found: Sequence[Cell]) -> list[str]:
    return [f"- {look.mark} {look.means}" for look in legend(found)]


def _answers(found: Sequence[Cell]) -> list[str]:
    """Each kernel on the one GPU, with its releases in ranges and the rules that are named."""
    lines = []
    for cell in found:
        lines.append(f"- {LOOKS[cell.state].mark} {code(cell.kernel)}: {escape(sentence(cell))}")
        for part in parts(cell):
            for span in reversed(part.spans):
                if span.codes or len(part.spans) > 1:
                    named = f" {', '.join(span.codes)}" if span.codes else ""
                    lines.append(f"  - {part.title}, {range_words(span)}: {span_mark(span)}{named}")
        mode = next(iter(cell.spans))
        lines.append(f"  - asked: {code(command(cell, mode))}")
    named_by_any = list(codes_of(found))
    if named_by_any:
        lines += ["", *(f"- {name}: {escape(REGISTRY.pages[name].title)}" for name in named_by_any)]
    return lines
