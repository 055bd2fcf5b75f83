"""The answer as Markdown, for an issue: a table of candidates, the reasons as a list, commands fenced.

Whatever was given from outside is shown as it stands: nothing in it becomes markup, a link or a mention.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attnsel.backends.registry import CANDIDATES
from attnsel.errors import printable
from attnsel.report.answer import (
    absent_packages,
    adaptation_texts,
    assumption_words,
    closing_lines,
    grouped,
    hint_lines,
    needing_gpu,
    planned_only,
    runs_text,
    verdict,
    worth_showing,
)
from attnsel.report.document import MARK
from attnsel.report.short import offer_text, refusal_text
from attnsel.report.words import environment_words, params_words, policy_words

if TYPE_CHECKING:
    from attnsel.selection.view import SelectionView

_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#|~$!&])")
_BAR = re.compile(r"(?<!\\)\|")
_WIDE = 10_000  # columns: Markdown is folded by who shows it
_MOST_WAYS = 3
_OF_A_SHELL = {"pip", "git", "cd", "export", "unset", "conda", "apt-get"}


def render_markdown(selection: SelectionView, sources: bool = False) -> str:
    """The whole answer."""
    if selection.dispatched is not None:
        own = selection.alone()
        return "\n\n".join([*_dispatched(selection, sources), "attnsel's own answer:", render_markdown(own)])
    env, p = selection.environment, selection.params
    facts = [" · ".join(environment_words(env)), " · ".join(params_words(p))]
    policy = policy_words(selection)
    facts += [f"! {warning}" for warning in env.warnings]
    facts += [f"! planned only: {why}" for why in planned_only(selection)]
    facts += [f"policy · {' · '.join(policy)}"] if policy else []
    parts = [f"**{escape(verdict(selection))}**", fenced("\n".join(map(printable, facts)), "text")]
    parts += [escape(line) for line in hint_lines(selection, _WIDE)]
    parts.append(table(("", "candidate", "what it does"), _rows(selection)))
    reasons = _reasons(selection, sources)
    reasons += [f"- ? {escape(assumption_words(assumption))}" for assumption in selection.assumptions]
    if reasons:
        parts.append("\n".join(["Why not the others:", "", *reasons]))
    parts += _ways(selection)
    parts.append(escape(" ".join(" ".join(closing_lines(selection, _WIDE)).split())))
    return "\n\n".join(parts)


# ---- parts --------------------------------------------------------------------------------------------


def _rows(selection: SelectionView) -> list[tuple[str, str, str]]:
    rows = []
    for place, c in enumerate(selection.ranked, 1):
        texts = [runs_text(c, selection), *adaptation_texts(c, selection.params)]
        rows.append((f"{place} {MARK[c.verdict]}", code(c.name), escape("; ".join(texts))))
    for c in selection:
        if c.verdict == "refused":
            codes = ", ".join(dict.fromkeys(reason.code for reason in c.reasons))
            rows.append((MARK["refused"], code(c.name), escape(codes)))
    return rows


def _dispatched(selection: SelectionView, sources: bool) -> list[str]:
    """What another library's chooser takes: the sentence, the facts, its kernels with every reason."""
    dispatch = selection.dispatched
    assert dispatch is not None
    held = ", ".join(f"{name}={value}" for name, value in dispatch.switches) or "none set"
    facts = [f"call: {dispatch.call}", f"switches: {held}"]
    if dispatch.inferred:
        facts.append(f"read in {dispatch.read}: {dispatch.inferred}")
    lines = []
    for place, offer in enumerate(dispatch.offers, 1):
        mark = MARK["eligible" if offer.taken else "refused"]
        text = offer_text(offer, dispatch.chosen)
        lines.append(f"{place}. {mark} {code(offer.name)}{f' {escape(text)}' if text else ''}")
        for refusal in offer.refusals:
            lines.append(f"   - {escape(refusal_text(refusal))}")
            if sources:
                lines.append(f"     Source: {escape(refusal.source)}")
    parts = [f"**{escape(selection.difference)}**", fenced("\n".join(map(printable, facts)), "text")]
    parts += ["\n".join(lines)] if lines else []
    parts += [escape(f"It says: {dispatch.error}")] if dispatch.error else []
    return [*parts, *(escape(note) for note in dispatch.notes)]


def _reasons(selection: SelectionView, sources: bool) -> list[str]:
    absent, without_gpu = absent_packages(selection), needing_gpu(selection)
    lines: list[str] = []
    told = [c for c in selection.candidates if c.name not in without_gpu]
    for names, reasons in grouped(told, absent).items():
        lines.append(f"- {', '.join(map(code, names))}")
        for message, reason in reasons:
            lines.append(f"  - {reason.code}: {escape(message)} ({reason.evidence})")
            if sources:
                lines.append(f"    Source: {escape(reason.source)}")
    if absent:
        lines.append(f"- {', '.join(map(code, absent))}: not installed")
    if without_gpu:
        device = escape(selection.environment.device.type)
        lines.append(f"- {', '.join(map(code, without_gpu))}: need a GPU, and this is {device}")
    return lines


def _ways(selection: SelectionView) -> list[str]:
    parts: list[str] = []
    seen: dict[str, int] = {}
    for way in selection.unlocks:
        if CANDIDATES[way.candidate].last_resort or not worth_showing(way, selection):
            continue
        seen[way.candidate] = seen.get(way.candidate, 0) + 1
        if seen[way.candidate] > _MOST_WAYS:
            continue
        parts.append(f"To get {code(way.candidate)}: {escape(way.change)}")
        if way.paste and way.paste not in way.change:
            first_words = {line.split(maxsplit=1)[0] for line in way.paste.splitlines() if line.strip()}
            language = "sh" if first_words & _OF_A_SHELL else "python"
            parts.append(fenced("\n".join(map(printable, way.paste.splitlines())), language))
        if way.install is not None and way.install.why:
            parts.append(escape(f"Why: {'. '.join(way.install.why)}."))
    return parts


# ---- Markdown -----------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """``text`` in one line that Markdown shows as it stands."""
    shown = _MARKUP.sub(r"\\\1", printable(text))
    # GitHub looks for mentions and addresses after escapes are gone; an empty comment parts them.
    return shown.replace("@", "@<!-- -->").replace("://", ":<!-- -->//").replace("www.", "www<!-- -->.")


def code(text: str) -> str:
    """``text`` as code within a line."""
    shown = printable(text)
    ticks = "`" * (_longest_run(shown) + 1)
    space = " " if shown[:1] in ("`", " ", "") or shown[-1:] in ("`", " ") else ""
    return f"{ticks}{space}{shown}{space}{ticks}"


def fenced(text: str, language: str) -> str:
    """``text`` as a block of code."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text}\n{ticks}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already. A bar parts cells even within code."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, cells))} |" for cells in lines)


def _cell(text: str) -> str:
    return _BAR.sub(r"\|", text)


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
