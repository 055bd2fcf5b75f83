"""What ``attnsel explain`` answers to a rule's examples, as far as the rule goes: asked, never typed."""

from __future__ import annotations

import re
from typing import NamedTuple

from attnsel.decision import Selection, select
from attnsel.environment import Environment, component_name
from attnsel.environment.versions import Version, Versions
from attnsel.errors import InvalidInput, printable
from attnsel.pages.commands import example_commands
from attnsel.pages.rule_facts import version_gates
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.report.hints import hint_lines
from attnsel.report.lines import fold
from attnsel.report.ranked import ranked_lines
from attnsel.report.reasons import reason_lines
from attnsel.report.verdict import verdict
from attnsel.report.ways import unlock_lines
from attnsel.rules import Hint, Page, PolicyRule, Rule
from attnsel.rules.examples import question

WIDTH = 80
_GROUP = re.compile(r"  (?:[–\d]|To get |On another GPU|or: )")
_REASON = re.compile(r" {6}[A-Z]+\d{3}  ")


class Answer(NamedTuple):
    """The example that a rule refuses, or a hint is about.

    command: what to paste; "" where no command line says it. lines: of its report those about this rule, and
    the first way out. adapted: what attnsel changes so that a candidate of the rule runs all the same; "" for
    nothing.
    """

    command: str
    lines: list[str]
    adapted: str = ""


def answer_to(page: Page) -> Answer | None:
    """The report on a page's example, asked of the engine now; None for a page without one."""
    command = example_commands(page).get("fires_on", "")
    if isinstance(page, PolicyRule):
        if not command:
            return None
        policy = Policy(**page.fires_on[1])
        return Answer(
            command, _lines(page, select(AttentionParams(), Environment.describe("H100"), policy=policy))
        )
    if not isinstance(page, (Rule, Hint)) or (isinstance(page, Hint) and page.of_tensors):
        return None
    policy = Policy(preview=page.status == "preview")
    command += " --preview" if command and policy.preview else ""
    p, env = question(page, page.fires_on)
    selection = select(p, env, policy=policy)
    lines = _lines(page, selection)
    if isinstance(page, Rule) and not any(page.code in line for line in lines):
        # Of what is not installed, or needs a GPU, a report gives the reasons where it is asked for alone.
        name = page.candidates[0]
        command += f" --backend {name}" if command else ""
        selection = select(p, env, policy=policy.model_copy(update={"backend": name}))
        lines = _lines(page, selection)
    return Answer(command, lines, _adapted(page, selection))


def _lines(page: Page, selection: Selection) -> list[str]:
    """The sentence, what is said of this rule, and the first way to one of its candidates."""
    parts = [fold(verdict(selection), WIDTH)]
    told = hint_lines(selection, WIDTH)
    parts.append(told if any(page.code in line for line in told) else [])
    for lines in (ranked_lines(selection, WIDTH), reason_lines(selection, WIDTH, False)):
        groups = [group for group in _groups(lines) if any(page.code in line for line in group)]
        parts += [_only(page.code, group) for group in groups]
    if isinstance(page, Rule):
        ways = _groups(unlock_lines(selection, WIDTH))
        leads = tuple(f"  To get {name}:" for name in page.candidates)
        parts.append(next((way for way in ways if way[0].startswith(leads)), []))
    shown: list[str] = []
    for part in filter(None, parts):
        shown += ["", *part] if shown else part
    return [printable(line.rstrip()) for line in shown]


def _groups(lines: list[str]) -> list[list[str]]:
    """Lines of a report by the candidate, or the way, that they are about."""
    groups: list[list[str]] = []
    for line in filter(None, lines):
        if _GROUP.match(line):
            groups.append([])
        if groups:
            groups[-1].append(line)
    return groups


def _only(code: str, group: list[str]) -> list[str]:
    """A group with the reason ``code`` alone, of those that stand against its candidates."""
    kept: list[str] = []
    keeping = True
    for line in group:
        if _REASON.match(line):
            keeping = line.split()[0] == code
        if keeping:
            kept.append(line)
    return kept


def _adapted(page: Page, selection: Selection) -> str:
    for candidate in selection.ranked:
        for made in candidate.adaptations:
            if any(reason.code == page.code for reason in made.avoids):
                return f"{candidate.name} runs, and {made.text}"
    return ""


class Edge(NamedTuple):
    """What the rule's example comes to with a version beyond one end of its gates: ``where``, such as
    ``cuDNN 9.5.0``; ``codes`` are those that refuse it there; none, and ``runs``, where it runs."""

    where: str
    codes: tuple[str, ...]
    runs: bool


def beyond(page: Page) -> list[Edge]:
    """The example of a rule at the versions next to its gates, put to the engine."""
    edges: list[Edge] = []
    for component, gate in version_gates(page):
        low, high = gate.intervals[0][0], gate.intervals[-1][1]
        before = None if low is None else Versions(component, ((None, low),)).sample()
        for version in (before, high):
            found = None if version is None else _asked_with(page, component, version)
            if version is not None and found is not None:
                edges.append(Edge(f"{component_name(component)} {version}", *found))
    return edges


def _asked_with(page: Page, component: str, version: Version) -> tuple[tuple[str, ...], bool] | None:
    """Who refuses the example with another version, and whether a candidate of the rule runs it."""
    if not isinstance(page, Rule):
        return None
    try:
        p, env = question(page, {**page.fires_on, component: str(version)})
    except (InvalidInput, ValueError):
        return None
    selection = select(p, env, policy=Policy(adapt="never"))
    candidates = [selection[name] for name in page.candidates]
    if any(candidate.verdict == "eligible" for candidate in candidates):
        return (), True
    return tuple(dict.fromkeys(reason.code for reason in candidates[0].reasons)), False
