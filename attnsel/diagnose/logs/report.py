"""The answer to a log as text and as Markdown: for each call what the log says, why, and what helps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, zip_longest
from typing import NamedTuple

from attnsel.diagnose.logs.answer import Answer, Cause, Explained, library_of
from attnsel.diagnose.logs.message import Finding
from attnsel.diagnose.logs.parsers import libraries
from attnsel.report.markdown import escape, fenced
from attnsel.report.text import fold, fold_command, join_items
from attnsel.report.words import environment_words, params_words
from attnsel.selection.unlock import Unlock

MOST_CALLS = 5  # shown; --json has all
_MARKS = {"refusal": "✖", "error": "✖", "chosen": "✔", "question": "·", "note": "·"}
_MOST_SAID = 14  # messages of one call
_MOST_PASTE = 6


Point = tuple[str, str, list[str]]
"""A mark, a text, and lines to paste that stand below it as they are."""


class Part(NamedTuple):
    """A heading and its points."""

    title: str
    points: list[Point]


def render_text(explained: Explained, width: int) -> str:
    """The whole answer in lines of ``width`` columns."""
    lines: list[str] = [_headline(explained)]
    for number, answer in enumerate(explained.answers[:MOST_CALLS], 1):
        lines += ["", *fold(f"{number}. {_title(answer)}", width, "", "   ")]
        for facts in _facts(answer):
            lines += [f"   {line}" for line in join_items(facts, width - 3)]
        for part in _parts(answer):
            lines += ["", f"   {part.title}"]
            for lead, text, paste in part.points:
                lines += fold(text, width, f"   {lead} ", "       ")
                lines += [f"       {line}" for one in paste for line in fold_command(one, width - 7)]
    rest = _rest(explained)
    return "\n".join([*lines, "", *fold(rest, width)] if rest else lines)


def render_markdown(explained: Explained) -> str:
    """The whole answer for an issue; nothing of the log becomes markup."""
    parts = [f"**{escape(_headline(explained))}**"]
    for number, answer in enumerate(explained.answers[:MOST_CALLS], 1):
        parts.append(f"### {number}. {escape(_title(answer))}")
        parts.append(fenced((" · ".join(facts) for facts in _facts(answer)), "text"))
        for part in _parts(answer):
            points = [f"{escape(part.title)}:", ""]
            for lead, text, paste in part.points:
                points.append(f"- {escape(f'{lead} {text}')}")
                points += ["", fenced(paste, "text"), ""] if paste else []
            parts.append("\n".join(points).rstrip())
    rest = _rest(explained)
    return "\n\n".join([*parts, escape(rest)] if rest else parts)


def nothing_known() -> list[str]:
    """What is looked for, where a log has nothing of it: name and texts of each library."""
    return [f"{library.name}: {library.looked_for}" for library in libraries() if library.looked_for]


# ---- parts --------------------------------------------------------------------------------------------


def _headline(explained: Explained) -> str:
    total = sum(answer.call.times for answer in explained.answers)
    different = len(explained.answers)
    if total == 1:
        return "One attention call in this log."
    told = "all alike" if different == 1 else f"{different} different"
    return f"{total} attention calls in this log, {told}."


def _title(answer: Answer) -> str:
    call = answer.call
    words = [call.library]
    words += [f"{call.times} times"] if call.times > 1 else []
    words += [", ".join(call.ranks)] if call.ranks else []
    more = " …" if call.times > len(call.lines) else ""
    words += (
        [f"line{'s' * (len(call.lines) > 1)} {', '.join(map(str, call.lines))}{more}"] if call.lines else []
    )
    return " · ".join(words)


def _facts(answer: Answer) -> Iterator[list[str]]:
    rebuilt = answer.rebuilt
    yield environment_words(rebuilt.environment)
    if rebuilt.described:
        yield params_words(rebuilt.params)
        for warning in rebuilt.environment.warnings:
            yield [f"! {warning}"]
        if rebuilt.assumed:
            yield ["not in the log, assumed: " + rebuilt.assumed[0], *rebuilt.assumed[1:]]
    else:
        yield ["the call itself is not in the log"]
    # Without a call only a PyTorch that is not known matters: another one is assumed in its place.
    unread = [one for one in rebuilt.unread if rebuilt.described or one.startswith("torch = ")]
    if unread:
        yield ["not used: " + unread[0], *unread[1:]]


def _parts(answer: Answer) -> Iterator[Part]:
    yield Part("What the log says", list(_said(answer.call.findings)))
    if answer.causes:
        yield Part("Why", [(_lead(cause), _cause(cause), []) for cause in answer.causes])
    helps: list[Point] = [("→", fix, []) for fix in answer.fixes]
    helps += [_way(way) for way in answer.ways]
    if not answer.rebuilt.described:
        helps += [("→", text, []) for text in _to_know_more(answer)]
    if helps:
        yield Part("What helps", helps)
    if not answer.rebuilt.described:
        return
    with_it: list[Point] = [("!", text, []) for text in answer.against]
    backend = answer.attnsel.backend
    runs = "nothing runs such a call" if backend is None else f"{backend} runs such a call"
    yield Part("With attnsel", [*with_it, ("·", runs, [])])


def _to_know_more(answer: Answer) -> Iterator[str]:
    ask = library_of(answer.call).ask
    if ask:
        yield ask
    yield "or state the call with flags: --gpu H100 --head-dim 128 --seqlen 4096 --attn-mask-type causal …"


def _said(findings: Iterable[Finding]) -> Iterator[Point]:
    told = tuple(findings)
    heads = [_heads(one, after) for one, after in pairwise(told)]
    shown = [f for f, head in zip_longest(told, heads) if not head and f.kind != "question"]
    left = len(shown) - _MOST_SAID
    if left > 0:
        shown = [*shown[: _MOST_SAID - 1], shown[-1]]
    for finding in shown:
        yield _MARKS.get(finding.kind, "·"), finding.text, []
    if left > 0:
        yield "·", f"and {left + 1} more", []
    if not shown:
        yield "·", "the call's configuration, and not what became of it", []


def _heads(one: Finding, after: Finding) -> bool:
    """Whether a message only announces the reason that stands behind it."""
    return one.text.endswith("because:") and one.candidates == after.candidates


def _lead(cause: Cause) -> str:
    return {"computed": "✖", "said": "?", "known": "·"}[cause.how]


def _cause(cause: Cause) -> str:
    names = f"{', '.join(cause.candidates)}: " if cause.candidates else ""
    said = (
        " (so the message says; the call as it is known here does not show it)" if cause.how == "said" else ""
    )
    coded = f" [{cause.code}]" if cause.code else ""
    link = f" ({cause.link})" if cause.link else ""
    return f"{names}{cause.text}{said}{coded}{link}"


def _way(way: Unlock) -> Point:
    lines = way.paste.splitlines()
    paste = [line for line in lines if line not in way.change and not line.startswith("params = ")]
    return "→", f"to get {way.candidate}: {way.change}", paste[:_MOST_PASTE]


def _rest(explained: Explained) -> str:
    hidden = len(explained.answers) - MOST_CALLS
    words = [f"{hidden} more different calls: --json has them all."] if hidden > 0 else []
    if explained.left_out:
        words.append(f"{explained.left_out} calls more than can be told apart were left out.")
    codes = dict.fromkeys(cause.code for a in explained.answers for cause in a.causes if cause.code)
    words += [f"Why a rule: attnsel rule {next(iter(codes))}"] if codes else []
    return " ".join(words)
