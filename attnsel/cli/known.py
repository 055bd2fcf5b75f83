"""``attnsel rules`` and ``attnsel rule CODE``: everything that is known, and the page of one piece of it."""

from __future__ import annotations

import re
from typing import Annotated, Any

from cyclopts import Parameter

from attnsel.backends.registry import CANDIDATES
from attnsel.base.schemas import stamped
from attnsel.cli.flags import OUTPUT, Json, Markdown, one_form
from attnsel.cli.output import BAD_INPUT, FOUND, complain, print_json, print_text, text_width, wrap
from attnsel.environment.gpus import Gpu, catalogue, look_up_gpu
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
    removed_as_dict,
    status_of,
    text_of,
    whole_page,
)
from attnsel.report.markdown import escape, table
from attnsel.report.text import fold_command
from attnsel.rules import REGISTRY, Hint, Page, Removed, find_rule, load_all
from attnsel.rules.codes import RANGES, Range
from attnsel.verdicts.reasons import EVIDENCE

_FILTER = Parameter(group="Filters")


def rules(
    *,
    candidate: Annotated[str | None, _FILTER] = None,
    family: Annotated[str | None, _FILTER] = None,
    evidence: Annotated[str | None, _FILTER] = None,
    ranges: Annotated[bool, Parameter(group=OUTPUT, negative="", show_default=False)] = False,
    markdown: Markdown = False,
    json: Json = False,
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
    one_form(markdown=markdown, json=json)
    one_form(markdown=markdown, ranges=ranges)
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
        return _show_ranges([codes for codes in RANGES if family in (None, codes.prefix)], json)
    shown = [
        page
        for page in pages
        if (candidate is None or candidate in candidates_of(page))
        and (family is None or page.family == family)
        and (evidence is None or page.evidence == evidence)
    ]
    if json:
        print_json([stamped("rules", as_dict(page)) for page in shown])
        return FOUND
    if markdown:
        head = ("code", "rule", "about", "holds", "rests on")
        print_text(table(head, [_markdown_row(page) for page in shown]))
        return FOUND
    lines = [line for page in shown for line in _row(page)]
    count = "1 rule" if len(shown) == 1 else f"{len(shown)} rules"
    print_text("\n".join([*lines, "", f"{count}.  The page of one: attnsel rule CODE"]))
    return FOUND


def rule(
    code: Annotated[str, Parameter(help="such as CUDNN204; case does not matter")],
    /,
    *,
    markdown: Markdown = False,
    json: Json = False,
) -> int:
    """The page of one rule: what it says, why, where it holds, what it rests on, and examples.

    --json prints one object: what a row of "attnsel rules --json" holds, and name, text, module,
    fires_on and passes (the fields of two examples), commands (the examples as command lines, where
    they can be written as one). Of a code that was removed: code, family, status, release,
    replaced_by, why.
    """
    one_form(markdown=markdown, json=json)
    try:
        page = find_rule(code)
    except KeyError as error:
        complain(f"{error.args[0]}; all of them: attnsel rules")
        return BAD_INPUT
    if isinstance(page, Removed):
        as_json, lines = stamped("removed-rule", removed_as_dict(page)), _removed_lines(page)
    else:
        as_json, lines = stamped("rule", whole_page(page)), _page_lines(page)
    if json:
        print_json(as_json)
    elif markdown:
        from attnsel.pages.rule_markdown import page_markdown  # which asks the engine

        print_text(page_markdown(page).rstrip("\n"))
    else:
        print_text("\n".join(lines))
    return FOUND


def _show_ranges(shown: list[Range], json: bool) -> int:
    if json:
        rows = [stamped("ranges", {**codes._asdict(), "next": codes.next_free()}) for codes in shown]
        print_json(rows)
        return FOUND
    lines = []
    for codes in shown:
        span = f"{codes.prefix}{codes.first:03}" + ("" if codes.first == codes.last else f"-{codes.last:03}")
        code = codes.next_free()
        lines += wrap(codes.file, f"{span:<15}{f'next {code}' if code else 'full':<17}")
        lines += wrap(codes.about, " " * 15)
    print_text("\n".join([*lines, "", "A new rule takes the next code of its file's range: CONTRIBUTING.md"]))
    return FOUND


def _row(page: Page) -> list[str]:
    facts = " · ".join([", ".join(names_of(candidates_of(page))), page.when_text or "everywhere"])
    return [
        *wrap(page.title, f"{page.code:<11}"),
        *wrap(f"{facts}  [{page.evidence}]{_status_word(page)}", " " * 11),
    ]


def _markdown_row(page: Page) -> tuple[str, ...]:
    facts = (", ".join(names_of(candidates_of(page))), page.when_text or "everywhere")
    return (page.code, *map(escape, (page.title + _status_word(page), *facts)), page.evidence)


def _status_word(page: Page) -> str:
    """What a row says of a rule that is not simply in force."""
    if page.status == "deprecated":
        return f"  deprecated, see {page.replaced_by}"
    return "" if page.status == "active" else f"  {page.status}"


def _removed_lines(gone: Removed) -> list[str]:
    """The page of a code that no rule has any more."""
    lines = [f"{gone.code}  removed in {gone.release}", "", *wrap(gone.why, "  Why: ", "  ")]
    if gone.replaced_by:
        page = REGISTRY.pages.get(gone.replaced_by)
        title = "" if page is None else f", {page.title}"
        lines += ["", *wrap(f"{gone.replaced_by}{title}", "  Read instead: ", "  ")]
    return lines


def _page_lines(page: Page) -> list[str]:
    """The page in the order of a reader's questions: what, where, why, how sure, show me."""
    lines = [*wrap(page.title, f"{page.code}  "), ""]
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
    for name, text in facts.items():
        lines += wrap(text, f"  {name + ':':<12}")
    for paragraph in (*paragraphs(text_of(page)), *filter(None, [legend_of(page)])):
        lines += ["", *wrap(paragraph, "  ")]
    commands = example_commands(page)
    fires = "Said of" if isinstance(page, Hint) else "Refused so"
    for name, title in (("fires_on", fires), ("passes", "Passes so")):
        if name in commands:
            lines += [
                "",
                f"  {title}:",
                *(f"    {line}" for line in fold_command(commands[name], text_width() - 4)),
            ]
    return lines


# ---- ``attnsel gpus [FILTER]``: the GPUs that ``--gpu`` knows ------------------------------------------


_HEAD = ("name", "architecture", "memory", "SMs", "kind")


def gpus(
    *words: Annotated[str, Parameter(name="FILTER", help="only those with all of these: H100, sm89, laptop")],
    markdown: Markdown = False,
    json: Json = False,
) -> int:
    """The GPUs that --gpu knows: name, architecture, memory, SMs. "-" is not known.

    A filter is a part of the name, an architecture (sm89, 8.9), a kind (GeForce, workstation, data center,
    Jetson, mining) or a whole name as a driver or a shop spells it. --gpu takes those too, and parts of a
    card: "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "GRID T4-8Q".

    --json prints a list of objects: name, arch (90 is sm90), memory_gib and sm_count (null: not known), kind.
    """
    one_form(markdown=markdown, json=json)
    shown = [gpu for gpu in catalogue().values() if all(_has(gpu, word) for word in words)]
    if words and not shown:
        try:
            shown = [look_up_gpu(" ".join(words))]
        except ValueError as error:
            complain(f"{short(' '.join(words), str)}: {error}")
            return BAD_INPUT
    if json:
        print_json([stamped("gpus", gpu._asdict()) for gpu in shown])
    elif markdown:
        print_text(table(_HEAD, [tuple(map(escape, _gpu_row(gpu))) for gpu in shown]))
    else:
        print_text("\n".join(_lines([_gpu_row(gpu) for gpu in shown])))
    return FOUND


def _has(gpu: Gpu, word: str) -> bool:
    asked = _squeezed(word)
    archs = (f"sm{gpu.arch}", f"{gpu.arch // 10}.{gpu.arch % 10}")
    return asked in archs or asked in _squeezed(gpu.name) or asked in _squeezed(gpu.kind)


def _squeezed(text: str) -> str:
    return re.sub(r"[\s_-]", "", text.casefold())


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    memory = "-" if gpu.memory_gib is None else f"{gpu.memory_gib} GB"
    return gpu.name, f"sm{gpu.arch}", memory, str(gpu.sm_count or "-"), gpu.kind


def _lines(rows: list[tuple[Any, ...]]) -> list[str]:
    name = max(len(_HEAD[0]), *(len(row[0]) for row in rows))
    lines = [
        f"{n:<{name}}  {arch:<12}  {memory:>6}  {sms:>3}  {kind}"
        for n, arch, memory, sms, kind in (_HEAD, *rows)
    ]
    count = "1 GPU" if len(rows) == 1 else f"{len(rows)} GPUs"
    return [*lines, "", f"{count}.  Any of them: attnsel explain --gpu NAME"]
