"""Can I use it? A page for each feature, one for each architecture, and the whole as JSON and as Markdown.

All of it is asked of the engine (attnsel/pages/can_i_use); a rule that is added changes the pages by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import component_name
from attnsel.environment.versions import Version
from attnsel.pages.can_i_use import GPUS, Cell, Feature, Mode, Span, all_features, cells
from attnsel.pages.can_i_use_tables import (
    LOOKS,
    as_dict,
    avoided,
    command,
    cost_words,
    evidence_words,
    label,
    overview,
    range_words,
    sentence,
    span_mark,
)
from attnsel.report.document import Document
from attnsel.report.markdown import code, escape, to_markdown
from attnsel.report.markdown import table as markdown_table
from attnsel.report.text import fold_command
from attnsel.rules import load_all
from sitegen.model import File
from sitegen.rules import playground_address

FOLDER = "can-i-use"
INDEX_GPU = "sm90"
TRAIL = (("Can I use it?", f"{FOLDER}/index.md"),)
_WELL_KNOWN = {
    "sm70": "V100", "sm75": "T4, RTX 20", "sm80": "A100", "sm86": "A10, RTX 30", "sm89": "L4, L40S, RTX 40",
    "sm90": "H100, H200", "sm100": "B200", "sm103": "B300", "sm120": "RTX 50, RTX PRO 6000",
}  # fmt: skip


def files(playground: bool = True) -> Iterator[File]:
    """The pages, ``matrix.json`` and ``matrix.markdown``.

    playground: whether the site has one, to which pages link.
    """
    found = matrix()
    yield File(f"{FOLDER}/index.md", _gpu_page(INDEX_GPU, found), "Can I use it?")
    for gpu in GPUS:
        if gpu != INDEX_GPU:
            yield File(f"{FOLDER}/{gpu}.md", _gpu_page(gpu, found), trail=TRAIL)
    for feature in all_features().values():
        about = [cell for cell in found if cell.feature is feature]
        yield File(f"{FOLDER}/{feature.name}.md", _feature_page(feature, about, playground), trail=TRAIL)
    text = json.dumps(as_dict(found), ensure_ascii=False, separators=(",", ":"))
    yield File(f"{FOLDER}/matrix.json", text + "\n")
    tables = Document(tuple(overview([cell for cell in found if cell.gpu == gpu]) for gpu in GPUS))
    yield File(f"{FOLDER}/matrix.markdown", to_markdown(tables) + "\n")


@lru_cache(maxsize=1)
def matrix() -> tuple[Cell, ...]:
    """Every cell: all features, all of attnsel's own kernels, the architectures of the matrix."""
    load_all()
    own = (name for name, record in CANDIDATES.items() if not record.plugin)
    return tuple(cells(all_features().values(), tuple(own), GPUS))


# ---- one architecture -----------------------------------------------------------------------------------


def _gpu_page(gpu: str, found: Sequence[Cell]) -> str:
    """All features over all kernels on one architecture."""
    here = {(cell.feature.name, cell.kernel): cell for cell in found if cell.gpu == gpu}
    kernels = list(dict.fromkeys(cell.kernel for cell in found))
    lines: list[str] = []
    if gpu == INDEX_GPU:
        lines += [
            "# Can I use it?",
            "",
            _INTRODUCTION.format(features=len(all_features()), kernels=len(kernels)),
            "",
        ]
        lines += [f"## On {gpu}: {_WELL_KNOWN[gpu]}", ""]
    else:
        lines += [f"# Can I use it on {gpu}?", "", f"{gpu} is {_WELL_KNOWN[gpu]}. {_EACH}", ""]
    lines += [_gpu_links(gpu), "", _SIGNS, ""]
    lines += ["## Features and kernels", ""] if gpu != INDEX_GPU else []
    head = ("feature", *map(_broken, kernels))
    for group, members in groupby(all_features().values(), key=lambda feature: feature.group):
        made = [
            (
                f"[{escape(each.title)}]({each.name}.md)",
                *(_mark(here[each.name, name], f"{each.name}.md") for name in kernels),
            )
            for each in members
        ]
        lines += [f"### {group}", "", *_table(head, made), ""]
    lines += ["## What the signs mean", "", *_legend(), "", _FOOT]
    return "\n".join(lines) + "\n"


def _broken(kernel: str) -> str:
    """A kernel's name that may be broken into two lines behind a dot or an underscore."""
    return kernel.replace(".", ".<wbr>").replace("_", "\\_<wbr>")


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """A table of signs, which is set more tightly than others."""
    return ['<div class="ciu-table" markdown>', "", markdown_table(head, body), "", "</div>"]


def _gpu_links(gpu: str) -> str:
    links = []
    for other in GPUS:
        page = "index.md" if other == INDEX_GPU else f"{other}.md"
        name = f"{other} ({_WELL_KNOWN[other]})"
        links.append(f"**{name}**" if other == gpu else f"[{name}]({page})")
    return "Architectures: " + " · ".join(links)


def _mark(cell: Cell, page: str = "") -> str:
    """A cell as a link to its reasons. Colour comes from a class; the sign says the same."""
    look = LOOKS[cell.state]
    return f'[{escape(label(cell))}]({page}#{anchor(cell)}){{ .ciu .ciu-{cell.state} title="{look.word}" }}'


def _legend() -> list[str]:
    lines = [
        f'- <span class="ciu ciu-{state}">{look.mark}</span> **{look.word}**: {look.means}'
        for state, look in LOOKS.items()
    ]
    lines.append(
        "- **2.6+**: from that release on; **2.6\\***: not with every later one; **≤2.6**: with none later. "
        "No release stands where all will do that run a plain call on that GPU."
    )
    return lines


# ---- one feature ----------------------------------------------------------------------------------------


def _feature_page(feature: Feature, about: Sequence[Cell], playground: bool) -> str:
    """One feature over kernels and architectures; below it every answer, once for all GPUs that share it."""
    kernels = list(dict.fromkeys(cell.kernel for cell in about))
    table_rows = [
        (f"[{_broken(name)}](#{_slug(name)})", *(_mark(cell) for cell in about if cell.kernel == name))
        for name in kernels
    ]
    asked = ", ".join(
        f"{code(str(field))} {escape(_value(value))}" for field, value in feature.changes.items()
    )
    modes = " and ".join(feature.modes)
    lines = [f"# {escape(feature.title)}", "", escape(feature.about), ""]
    lines += [f"Asked for {modes}: {f'a plain call with {asked}' if asked else 'a plain call'}. {_EACH}", ""]
    lines += [*_table(("kernel", *GPUS), table_rows), ""]
    lines += [f"In a terminal: `attnsel can-i-use {feature.name}` · [all features](index.md)", ""]
    for name in kernels:
        own = [cell for cell in about if cell.kernel == name]
        lines += [f"## `{name}` {{ #{_slug(name)} }}", ""]
        lines += [
            f"{escape(CANDIDATES[name].title)}. Releases are those of {component_name(own[0].component)}.",
            "",
        ]
        for sharing in _alike(own):
            lines += [*_answer(sharing, playground), ""]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(inner)}" for name, inner in value.items())
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def anchor(cell: Cell) -> str:
    """Where a cell's reasons stand on its feature's page."""
    return f"{_slug(cell.kernel)}-{cell.gpu}"


def _slug(kernel: str) -> str:
    return kernel.replace(".", "-").replace("_", "-")


def _alike(own: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of one kernel by their answers, which stand on the page once."""
    groups: dict[object, list[Cell]] = {}
    for cell in own:
        said = [
            (row.first, row.last, mode, span.outcome, span.codes, _details(cell, mode, span))
            for row in rows(cell)
            for mode, span in row.said.items()
        ]
        groups.setdefault((sentence(cell), *said), []).append(cell)
    return list(groups.values())


def _details(cell: Cell, mode: Mode, span: Span) -> tuple[str, ...]:
    """What is told in full, of the release at hand: reasons, changes with what they cost, evidence."""
    if cell.at not in span:
        return ()
    reasons = (f"{reason.code} {reason.message}" for reason in span.candidate.reasons)
    return (*reasons, *cost_words(cell, mode, span))


def _answer(sharing: Sequence[Cell], playground: bool) -> list[str]:
    """One answer: the sentence, the releases as a table, why, at what cost, and the question."""
    cell = sharing[0]
    look = LOOKS[cell.state]
    ids = "".join(f'<span id="{anchor(each)}"></span>' for each in sharing)
    where = ", ".join(each.gpu for each in sharing)
    sign = f'<span class="ciu ciu-{cell.state}">{look.mark}</span>'
    lines = [f"{ids}**{where}** {sign} {escape(sentence(cell))}.", ""]
    made = rows(cell)
    if cell.state != "never" and (len(made) > 1 or len({span.outcome for span in made[0].said.values()}) > 1):
        lines += [_releases_table(cell, made), ""]
    points = _points(cell)
    lines += [*points, ""] if points else []
    asked = [line for mode in cell.spans for line in fold_command(command(cell, mode), _COLUMNS)]
    block = ["```sh", *asked, "```"]
    if playground:
        addresses = {mode: playground_address(command(cell, mode)) for mode in cell.spans}
        links = (f'<a href="{address}">{mode}</a>' for mode, address in addresses.items() if address)
        block += ["", f"In the browser: {', '.join(links)}."]
    return [*lines, '??? ciu-ask "Ask it again"', "", *(f"    {line}" for line in block)]


class Row(NamedTuple):
    """Releases in a row in which every mode has one answer, and that answer by mode."""

    first: Version
    last: Version
    said: dict[Mode, Span]


def rows(cell: Cell) -> list[Row]:
    """All known releases, the newest first, cut where the answer of some mode changes."""
    firsts = sorted({span.first for spans in cell.spans.values() for span in spans})
    found = []
    for first in reversed(firsts):
        said = {mode: cell.span(mode, first) for mode in cell.spans}
        found.append(Row(first, min(span.last for span in said.values()), said))
    return found


def _releases_table(cell: Cell, made: Sequence[Row]) -> str:
    head = (component_name(cell.component), *cell.spans)
    body = [
        (
            range_words(row),
            *(" ".join([span_mark(span), *map(_rule, _named(span))]) for span in row.said.values()),
        )
        for row in made
    ]
    return markdown_table(head, body)


def _named(span: Span) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*span.codes, *avoided(span))))


def _points(cell: Cell) -> list[str]:
    """With the release at hand: every reason, every change with what it costs, and what a yes rests on."""
    told: dict[str, None] = {}
    for mode in cell.spans:
        span = cell.span(mode)
        for reason in span.candidate.reasons:
            told[f"- {_rule(reason.code)} {escape(reason.message)} ({reason.evidence})"] = None
        changes = zip(span.candidate.adaptations, cost_words(cell, mode, span), strict=True)
        for made, words in changes:
            codes = dict.fromkeys(reason.code for reason in made.avoids)
            avoids = f"; avoids {', '.join(map(_rule, codes))}" if codes else ""
            told[f"- {mode} {escape(words)}{avoids}"] = None
        for words in evidence_words(cell, span):
            told[f"- {escape(words)}"] = None
    return list(told)


def _rule(name: str) -> str:
    return f"[{name}](../rules/{name}.md)"


_COLUMNS = 84
_INTRODUCTION = """\
{features} features of attention, {kernels} kernels, nine architectures, every known release. Each answer is
what `attnsel explain` says to one question; each sign leads to its reasons, and to the command that asks
again. The same in a terminal: `attnsel can-i-use softcap`. As data: [matrix.json](matrix.json), described by
`docs/schemas/can-i-use-2.json`; as Markdown: [matrix.markdown](matrix.markdown)."""
_EACH = (
    "What decides (cuDNN, Triton, PyTorch or flash-attn) is asked with every known release, the rest is the "
    "newest."
)
_SIGNS = "Signs: " + " · ".join(
    f'<span class="ciu ciu-{state}">{look.mark}</span> {look.word}'
    for state, look in LOOKS.items()
    if state != "backward"
)
_FOOT = """\
A plain call is `AttentionParams()`: bf16 (fp16 before sm80), causal, two sequences of 4096, 16 heads of 128.
A feature changes what it needs and nothing else. Two features together may still be refused: ask
`attnsel explain` for the call that you have. **Yes** means that no rule refuses it; what has run on which GPU
stands below each answer as *unproven*."""
