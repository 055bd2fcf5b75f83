"""``attnsel rules`` and ``attnsel rule CODE``: everything that is known, and the page of one piece of it."""

from __future__ import annotations

import re
from typing import Annotated, Any

from cyclopts import Parameter

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import stamped
from attnsel.cli.form import OUTPUT, TEXT, Form, one_form
from attnsel.cli.output import BAD_INPUT, FOUND, complain
from attnsel.environment.gpus import WITHOUT_PYTORCH, Gpu, catalogue, look_up_gpu
from attnsel.errors import InvalidInput, short
from attnsel.pages.commands import example_commands
from attnsel.pages.rule import (
    as_dict,
    candidates_of,
    devices_of,
    does,
    legend_of,
    names_of,
    paragraphs,
    status_of,
    text_of,
    whole_page,
)
from attnsel.report.document import Block, Document, Fields, Item, Paragraph, Paste, Table
from attnsel.rules import REGISTRY, Hint, Page, Placing, Removed, find_rule, load_all
from attnsel.rules.codes import Range, all_ranges
from attnsel.verdicts.reasons import EVIDENCE

_FILTER = Parameter(group="Filters")


def rules(
    *,
    candidate: Annotated[str | None, _FILTER] = None,
    family: Annotated[str | None, _FILTER] = None,
    evidence: Annotated[str | None, _FILTER] = None,
    ranges: Annotated[bool, Parameter(group=OUTPUT, negative="", show_default=False)] = False,
    form: Form = TEXT,
) -> int:
    """Every rule: its code and title, which candidates it is about, where it holds, what it rests on.

    --json prints a list of objects: code, kind (rule, policyrule, preference or hint), family, title,
    candidates, when (versions and architectures; empty is everywhere), evidence, source, status (active,
    preview or deprecated), replaced_by (the code that took over, or null). With --ranges: prefix, first,
    last, file, about, next (the next free code, or null).

    Parameters
    ----------
    candidate
        Only rules about this candidate.
    family
        Only codes that begin so, such as BUG or CUDNN.
    evidence
        Only rules that rest on this, such as library or source.
    ranges
        Instead of rules: which codes lie in which file, and the next free one of each range.
    """
    form.require_one()
    one_form(markdown=form.markdown, ranges=ranges)
    load_all()
    pages = list(REGISTRY.pages.values())
    families = list(dict.fromkeys(page.family for page in pages))
    family = None if family is None else family.upper()
    for name, value, allowed in (
        ("candidate", candidate, list(CANDIDATES)),
        ("family", family, families),
        ("evidence", evidence, list(EVIDENCE)),
    ):
        if value is not None and value not in allowed:
            raise InvalidInput(f"--{name}", value, f"allowed: {', '.join(allowed)}")
        if value is not None and ranges and name != "family":
            raise InvalidInput(f"--{name}", value, "not together with --ranges, which --family alone narrows")
    if ranges:
        held = [codes for codes in all_ranges() if family in (None, codes.prefix)]
        form.print(
            lambda: _ranges(held),
            lambda: [stamped("ranges", {**codes._asdict(), "next": codes.next_free()}) for codes in held],
        )
        return FOUND
    shown = [
        page
        for page in pages
        if (candidate is None or candidate in candidates_of(page))
        and (family is None or page.family == family)
        and (evidence is None or page.evidence == evidence)
    ]
    form.print(
        lambda: _rules(shown, table=form.markdown),
        lambda: [stamped("rules", as_dict(page)) for page in shown],
    )
    return FOUND


def rule(
    code: Annotated[str, Parameter(help="such as CUDNN204; case does not matter")],
    /,
    *,
    form: Form = TEXT,
) -> int:
    """The page of one rule: what it says, why, where it holds, what it rests on, and examples.

    --json prints one object: what a row of "attnsel rules --json" holds, and name, text, module,
    fires_on and passes (the fields of two examples), commands (the examples as command lines, where
    they can be written as one), figures (of a rule that orders kernels, what was published: text,
    pairs, lowest and highest, title, date, source). Of a code that was removed: code, family, status,
    release, replaced_by, why.
    """
    form.require_one()
    try:
        page = find_rule(code)
    except KeyError as error:
        complain(f"{error.args[0]}; all of them: attnsel rules")
        return BAD_INPUT

    def document() -> Document:
        if form.markdown:
            from attnsel.pages.rule_markdown import page_document  # which asks the engine

            return page_document(page)
        return _removed(page) if isinstance(page, Removed) else _page(page)

    def record() -> dict[str, Any]:
        if not isinstance(page, Placing):
            return whole_page(page)
        from attnsel.pages.figures import figures_of  # which ranks what was measured

        return whole_page(page, figures_of(page.code))

    form.print(document, record)
    return FOUND


def _ranges(held: list[Range]) -> Document:
    rows = []
    for codes in held:
        span = f"{codes.prefix}{codes.first:03}" + ("" if codes.first == codes.last else f"-{codes.last:03}")
        code = codes.next_free()
        rows.append((span, (f"{f'next {code}' if code else 'full':<17}{codes.file}", codes.about)))
    end = Paragraph("A new rule takes the next code of its file's range: CONTRIBUTING.md")
    return Document((Fields(tuple(rows)), end))


def _rules(shown: list[Page], table: bool) -> Document:
    """Two lines for each, or a row of a ``table``."""
    rows: list[Any] = []
    for page in shown:
        status = "" if page.status == "active" else f"  {page.status}"
        if page.status == "deprecated":
            status += f", see {page.replaced_by}"
        about, holds = ", ".join(names_of(candidates_of(page))), page.when_text or "everywhere"
        if table:
            rows.append((page.code, page.title + status, about, holds, page.evidence))
        else:
            rows.append((page.code, (page.title, f"{about} · {holds}  [{page.evidence}]{status}")))
    if table:
        return Document((Table(("code", "rule", "about", "holds", "rests on"), tuple(rows)),))
    count = "1 rule" if len(shown) == 1 else f"{len(shown)} rules"
    return Document((Fields(tuple(rows)), Paragraph(f"{count}.  The page of one: attnsel rule CODE")))


def _removed(gone: Removed) -> Document:
    """The page of a code that no rule has any more."""
    parts = [Paragraph(f"Why: {gone.why}")]
    if gone.replaced_by:
        page = REGISTRY.pages.get(gone.replaced_by)
        title = "" if page is None else f", {page.title}"
        parts.append(Paragraph(f"Read instead: {gone.replaced_by}{title}"))
    return Document(tuple(parts), f"{gone.code}  removed in {gone.release}")


def _page(page: Page) -> Document:
    """The page in the order of a reader's questions: what, where, why, how sure, show me."""
    facts = {
        "About": ", ".join(candidates_of(page)),
        "Holds": page.when_text or "everywhere",
        "Rests on": f"{EVIDENCE[page.evidence]} [{page.evidence}]",
        "Written in": f"{page.module}: {page.name}",
    }
    if page.status != "active":
        facts["Status"] = status_of(page)
    if devices := devices_of(page):
        facts["Holds"] += f", devices: {', '.join(devices)}"
    if does(page):
        facts["Does"] = does(page)
    if isinstance(page, Hint):
        del facts["About"]
    parts: list[Block] = [Fields(tuple((f"{name}:", (text,)) for name, text in facts.items()))]
    parts += map(Paragraph, filter(None, (*paragraphs(text_of(page)), legend_of(page))))
    if isinstance(page, Placing):
        from attnsel.pages.figures import figure_blocks  # which ranks what was measured

        parts += figure_blocks(page)
    commands = example_commands(page)
    fires = "Said of" if isinstance(page, Hint) else "Refused so"
    for name, title in (("fires_on", fires), ("passes", "Passes so")):
        if name in commands:
            parts.append(Item(label=title, below=(Paste((commands[name],)),)))
    return Document(tuple(parts), f"{page.code}  {page.title}")


# ---- ``attnsel gpus [FILTER]``: the GPUs that ``--gpu`` knows ------------------------------------------


def gpus(
    *words: Annotated[str, Parameter(name="FILTER", help="only those with all of these: H100, sm89, laptop")],
    form: Form = TEXT,
) -> int:
    """The GPUs that --gpu knows: name, architecture, memory, SMs. "-" is not known.

    A filter is a part of the name, an architecture (sm89, 8.9, gfx942), what PyTorch calls other makers' GPUs
    (rocm, xpu, mps), a kind (GeForce, workstation, data center, Jetson, mining, Instinct, Radeon, Ryzen, Arc,
    Apple) or a whole name as a driver or a shop spells it. --gpu takes those too, and parts of a card:
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "GRID T4-8Q". Cards too old for PyTorch (Fermi, Kepler) need a filter.

    --json prints a list of objects: name, arch (90 is sm90), memory_gib and sm_count (null: not known), kind,
    device (cuda, rocm, xpu, mps), gfx (AMD's target), sold_with (the sizes of which a name must say one).
    """
    form.require_one()
    shown = [gpu for gpu in catalogue().values() if all(_has(gpu, word) for word in words)]
    if not words:
        shown = [gpu for gpu in shown if gpu.arch not in WITHOUT_PYTORCH]
    if words and not shown:
        try:
            shown = [look_up_gpu(" ".join(words))]
        except ValueError as error:
            complain(f"{short(' '.join(words), str)}: {error}")
            return BAD_INPUT
    form.print(
        lambda: _gpus(shown, counted=not form.markdown),
        lambda: [stamped("gpus", gpu._asdict() | {"arch": gpu.arch or None}) for gpu in shown],
    )
    return FOUND


def _has(gpu: Gpu, word: str) -> bool:
    asked = _squeezed(word)
    archs = (gpu.target, gpu.device, f"{gpu.arch // 10}.{gpu.arch % 10}")
    return asked in archs or asked in _squeezed(gpu.name) or asked in _squeezed(gpu.kind)


def _squeezed(text: str) -> str:
    return re.sub(r"[\s_-]", "", text.casefold())


def _gpus(shown: list[Gpu], counted: bool) -> Document:
    rows = []
    for gpu in shown:
        sizes = "/".join(map(str, gpu.sold_with or (gpu.memory_gib,)))
        memory = "-" if sizes == "None" else f"{sizes} GB"
        rows.append((gpu.name, gpu.target, memory, str(gpu.sm_count or "-"), gpu.kind))
    count = "1 GPU" if len(rows) == 1 else f"{len(rows)} GPUs"
    end = (Paragraph(f"{count}.  Any of them: attnsel explain --gpu NAME"),) if counted else ()
    return Document((Table(("name", "architecture", "memory", "SMs", "kind"), tuple(rows)), *end))
