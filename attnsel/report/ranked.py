"""The candidates that run, best first: what each does on every call, what it costs and what that avoids."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attnsel.backends.registry import CANDIDATES
from attnsel.report.lines import MARK, fold
from attnsel.report.verdict import verb
from attnsel.report.words import on_gpu
from attnsel.rules import REGISTRY, Preference
from attnsel.selection.memory import memory_parts
from attnsel.selection.proof import unproven_parts
from attnsel.verdicts.requirements import size

if TYPE_CHECKING:
    from attnsel.params import AttentionParams
    from attnsel.selection.view import SelectionView
    from attnsel.verdicts.verdict import Adaptation, Candidate

_ISSUE = re.compile(r"[\w.-]+#\d+")  # as sources name one: pytorch#193893
_NAME = 15  # columns for a candidate's name
_BESIDE_PROOF = ("PREF011", "PREF012", "PREF013")  # said of what is unproven too


def ranked_lines(selection: SelectionView, width: int) -> list[str]:
    lines: list[str] = []
    for place, candidate in enumerate(selection.ranked, 1):
        head = f"{place:>3} {MARK[candidate.verdict]} {candidate.name:<{_NAME}} "
        deeper = " " * len(head)
        texts = [runs_text(candidate, selection), *adaptation_texts(candidate, selection.params)]
        for number, text in enumerate(texts):
            lead, indent = (head, deeper) if not number else (deeper + "  ", deeper + "    ")
            lines += fold(text, width, lead, indent)
    return lines


def runs_text(candidate: Candidate, selection: SelectionView) -> str:
    record, env = CANDIDATES[candidate.name], selection.environment
    notes = [verb(candidate)]
    if record.last_resort and on_gpu(env):
        notes[0] += ", slow"
    if not candidate.eligible:
        notes[0] += ": nobody has checked"
    own = memory_parts(candidate.name, selection.params, env)
    notes += [f"{size(amount)} of {what}" for what, amount in own]
    if candidate.unproven:
        parts = unproven_parts(record, selection.params, env.target)
        where = f"{env.target} with {', '.join(parts)}" if parts else env.target
        notes.append(f"unproven on {where}: {unproven_words(candidate)}")
    if candidate.placed_by is not None and not record.last_resort:
        page = REGISTRY.pages[candidate.placed_by]
        assert isinstance(page, Preference)
        if not candidate.unproven or page.code in _BESIDE_PROOF:
            notes.append(page.short)
    return " · ".join(notes)


def unproven_words(candidate: Candidate) -> str:
    """What was done instead of running it on a GPU, in a few words."""
    record = CANDIDATES[candidate.name]
    if record.plugin:
        return f"{record.distribution} declares no proof"
    return "executed off-GPU" if candidate.executed_off_gpu else record.unproven_note


def adaptation_texts(candidate: Candidate, p: AttentionParams) -> list[str]:
    """A line for each change, with what it costs and what it avoids."""
    return [f"{adaptation_words(made, p)}{_avoided(made)}" for made in candidate.adaptations]


def adaptation_words(made: Adaptation, p: AttentionParams) -> str:
    """A change and what it costs: memory it makes, and work beyond the call's own."""
    words = [made.text]
    if made.bytes:
        words.append(size(made.bytes))
    if made.flops:
        more = made.flops / max(1, p.flops)
        words.append(f"+{100 * more:.2g} % work" if more < 1 else f"{1 + more:.2g} times the work")
    return ", ".join(words)


def _avoided(made: Adaptation) -> str:
    if not made.avoids:
        return ""
    first, *others = made.avoids
    issue = _ISSUE.search(first.source) if first.code.startswith("BUG") else None
    more = f" and {', '.join(reason.code for reason in others)}" if others else ""
    known = f" [{issue[0]}]" if issue else ""
    return f" · avoids {first.code}{more}: {first.rule.title}{known}"
