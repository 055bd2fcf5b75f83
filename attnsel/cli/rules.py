"""``attnsel rules`` and ``attnsel rule CODE``: everything that is known, and the page of one piece of it."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any, get_args

from cyclopts import Parameter

from attnsel.candidates import CANDIDATES
from attnsel.cli.examples import example_commands, jsonable
from attnsel.cli.flags import Json
from attnsel.cli.output import BAD_INPUT, FOUND, complain, tell, text_width, wrap
from attnsel.environment import Device
from attnsel.errors import InvalidInput
from attnsel.rules import REGISTRY, Page, Preference, Rule, Wish, find_rule, load_all
from attnsel.verdict import EVIDENCE

_FILTER = Parameter(group="Filters")


def rules(
    *,
    candidate: Annotated[str | None, _FILTER] = None,
    family: Annotated[str | None, _FILTER] = None,
    evidence: Annotated[str | None, _FILTER] = None,
    json: Json = False,
) -> int:
    """Every rule: its code and title, which candidates it is about, where it holds, what it rests on.

    --json prints a list of objects: code, kind (rule, wish or preference), family, title, candidates,
    when (versions and architectures; empty is everywhere), evidence, source.

    Parameters
    ----------
    candidate
        Only rules about this candidate.
    family
        Only codes that begin so, such as BUG or CUDNN.
    evidence
        Only rules that rest on this, such as library or source.
    """
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
    shown = [
        page
        for page in pages
        if (candidate is None or candidate in candidates_of(page))
        and (family is None or page.family == family)
        and (evidence is None or page.evidence == evidence)
    ]
    if json:
        print(jsonlib.dumps([_as_dict(page) for page in shown], indent=2, ensure_ascii=False))
        return FOUND
    lines = [line for page in shown for line in _row(page)]
    count = "1 rule" if len(shown) == 1 else f"{len(shown)} rules"
    tell("\n".join([*lines, "", f"{count}.  The page of one: attnsel rule CODE"]))
    return FOUND


def rule(
    code: Annotated[str, Parameter(help="such as CUDNN204; case does not matter")], /, *, json: Json = False
) -> int:
    """The page of one rule: what it says, why, where it holds, what it rests on, and examples.

    --json prints one object: what a row of "attnsel rules --json" holds, and name, text, module,
    trips and passes (the fields of two examples), commands (the examples as command lines, where they
    can be written as one).
    """
    try:
        page = find_rule(code)
    except KeyError as error:
        complain(f"{error.args[0]}; all of them: attnsel rules")
        return BAD_INPUT
    if json:
        print(jsonlib.dumps(_whole_page(page), indent=2, ensure_ascii=False))
    else:
        tell("\n".join(_page_lines(page)))
    return FOUND


def candidates_of(page: Page) -> tuple[str, ...]:
    """The candidates a page is about; a preference or a wish is about them all."""
    return page.candidates if isinstance(page, Rule) else tuple(CANDIDATES)


def _row(page: Page) -> list[str]:
    facts = " · ".join([_names(candidates_of(page)), page.when_text or "everywhere"])
    return [
        *wrap(page.title, f"{page.code:<11}"),
        *wrap(f"{facts}  [{page.evidence}]", " " * 11),
    ]


def _names(candidates: tuple[str, ...]) -> str:
    """Candidates in few words."""
    if set(candidates) == set(CANDIDATES):
        return "all"
    if set(candidates) == {name for name, info in CANDIDATES.items() if not info.plugin}:
        return "all but plug-ins"
    sdpa = [name for name in CANDIDATES if name.startswith("sdpa.")]
    if set(sdpa) <= set(candidates):
        return ", ".join(["sdpa.*", *(name for name in candidates if name not in sdpa)])
    return ", ".join(candidates)


def _as_dict(page: Page) -> dict[str, Any]:
    return {
        "code": page.code,
        "kind": type(page).__name__.lower(),
        "family": page.family,
        "title": page.title,
        "candidates": list(candidates_of(page)),
        "when": page.when_text,
        "evidence": page.evidence,
        "source": page.source,
    }


def _whole_page(page: Page) -> dict[str, Any]:
    examples: dict[str, Any] = {"trips": None, "passes": None}
    if isinstance(page, Rule):
        examples = {"trips": dict(page.trips), "passes": dict(page.passes)}
    if isinstance(page, Wish):
        examples["trips"] = {"candidate": page.trips[0], "policy": dict(page.trips[1])}
    text = {"name": page.name, "text": page.text, "module": page.module}
    return {**_as_dict(page), **text, **jsonable(examples), "commands": example_commands(page)}


def _page_lines(page: Page) -> list[str]:
    """The page in the order of a reader's questions: what, where, why, how sure, show me."""
    lines = [*wrap(page.title, f"{page.code}  "), ""]
    facts = {
        "About": ", ".join(candidates_of(page)),
        "Holds": page.when_text or "everywhere",
        "Rests on": f"{EVIDENCE[page.evidence]} [{page.evidence}]",
        "Written in": f"{page.module}: {page.name}",
    }
    if isinstance(page, Rule) and page.device is not None and "cuda" not in page.device:
        types = get_args(Device.model_fields["type"].annotation)
        facts["Holds"] += f", devices: {', '.join(kind for kind in types if kind in page.device)}"
    if isinstance(page, Preference):
        facts["Does"] = "orders candidates that can run; refuses none"
    for name, text in facts.items():
        lines += wrap(text, f"  {name + ':':<12}")
    for paragraph in _paragraphs(page.text):
        lines += ["", *wrap(paragraph, "  ")]
    commands = example_commands(page)
    for name, title in (("trips", "Refused so"), ("passes", "Passes so")):
        if name in commands:
            lines += ["", f"  {title}:", *_command_lines(commands[name])]
    return lines


def _paragraphs(text: str) -> list[str]:
    """A page's text: each labelled part (Why:, Fix:, Source:) a paragraph of its own."""
    parts: list[str] = []
    fresh = True
    for line in text.splitlines():
        label = line.split(":")[0]
        starts = fresh or (":" in line and label.isalpha() and label[:1].isupper())
        if line.strip() and starts:
            parts.append(line.strip())
        elif line.strip():
            parts[-1] += " " + line.strip()
        fresh = not line.strip()
    return parts


def _command_lines(command: str) -> list[str]:
    """A command folded between its flags, so that it can be pasted as it stands."""
    first, *flags = command.split(" --")
    lines = [f"    {first}"]
    for flag in flags:
        if len(lines[-1]) + len(flag) + 5 > text_width():
            lines[-1] += " \\"
            lines.append(f"       --{flag}")
        else:
            lines[-1] += f" --{flag}"
    return lines
