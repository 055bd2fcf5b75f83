"""The answer to a log as a document: for each call what the log says, why, and what helps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, zip_longest

from attnsel.diagnose.logs.answer import AnsweredCall, Cause, Explained, library_of
from attnsel.diagnose.logs.message import Finding
from attnsel.diagnose.logs.parsers import libraries
from attnsel.report.answer import paste_of, to_paste, warnings
from attnsel.report.document import (
    Block,
    Document,
    Facts,
    Inline,
    Item,
    Items,
    Paragraph,
    Ref,
    Section,
    Strong,
)
from attnsel.report.words import environment_words, params_words
from attnsel.selection.unlock import Unlock

MOST_CALLS = 5  # shown; --json has all
_MARKS = {"refusal": "✖", "error": "✖", "chosen": "✔", "question": "·", "note": "·"}
_MOST_SAID = 14  # messages of one call
_MOST_PASTE = 6


def log_document(explained: Explained) -> Document:
    """The whole answer."""
    blocks: list[Block] = [Paragraph(Strong(_headline(explained)))]
    for number, answer in enumerate(explained.answers[:MOST_CALLS], 1):
        blocks.append(Section(_title(answer), (_facts(answer), *_parts(answer)), number))
    rest = _rest(explained)
    return Document((*blocks, *([Paragraph(rest)] if rest else [])))


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


def _title(answer: AnsweredCall) -> str:
    call = answer.call
    words = [call.library]
    words += [f"{call.times} times"] if call.times > 1 else []
    words += [", ".join(call.ranks)] if call.ranks else []
    more = " …" if call.times > len(call.lines) else ""
    words += (
        [f"line{'s' * (len(call.lines) > 1)} {', '.join(map(str, call.lines))}{more}"] if call.lines else []
    )
    return " · ".join(words)


def _facts(answer: AnsweredCall) -> Facts:
    rebuilt = answer.rebuilt
    lines: list[tuple[str, ...] | Item] = [tuple(environment_words(rebuilt.environment))]
    if rebuilt.described:
        lines += [tuple(params_words(rebuilt.params)), *warnings(rebuilt.environment)]
        if rebuilt.assumed:
            lines.append((f"not in the log, assumed: {rebuilt.assumed[0]}", *rebuilt.assumed[1:]))
    else:
        lines.append(("the call itself is not in the log",))
    # Without a call only a PyTorch that is not known matters: another one is assumed in its place.
    unread = [one for one in rebuilt.unread if rebuilt.described or one.startswith("torch = ")]
    if unread:
        lines.append((f"not used: {unread[0]}", *unread[1:]))
    return Facts(tuple(lines))


def _parts(answer: AnsweredCall) -> Iterator[Section]:
    yield _part("What the log says", _said(answer.call.findings))
    if answer.causes:
        yield _part("Why", map(_cause, answer.causes))
    helps = [*(Item(fix, "→") for fix in answer.fixes), *map(_way, answer.ways)]
    if not answer.rebuilt.described:
        ask = library_of(answer.call).ask
        flags = "--gpu H100 --head-dim 128 --seqlen 4096 --attn-mask-type causal …"
        helps += [Item(text, "→") for text in (ask, f"or state the call with flags: {flags}") if text]
    if helps:
        yield _part("What helps", helps)
    if answer.rebuilt.described:
        backend = answer.attnsel.backend
        runs = Item("nothing runs such a call" if backend is None else f"{backend} runs such a call", "·")
        yield _part("With attnsel", [*(Item(text, "!") for text in answer.against), runs])


def _part(title: str, items: Iterable[Item]) -> Section:
    return Section(title, (Items(tuple(items)),))


def _said(findings: Iterable[Finding]) -> Iterator[Item]:
    told = tuple(findings)
    # Some only announce the reason that stands behind them.
    heads = [a.text.endswith("because:") and a.candidates == b.candidates for a, b in pairwise(told)]
    shown = [f for f, head in zip_longest(told, heads) if not head and f.kind != "question"]
    left = len(shown) - _MOST_SAID
    if left > 0:
        shown = [*shown[: _MOST_SAID - 1], shown[-1]]
    for finding in shown:
        yield Item(finding.text, _MARKS.get(finding.kind, "·"))
    if left > 0:
        yield Item(f"and {left + 1} more", "·")
    if not shown:
        yield Item("the call's configuration, and not what became of it", "·")


_LEADS = {"computed": "✖", "said": "?", "known": "·"}


def _cause(cause: Cause) -> Item:
    names = f"{', '.join(cause.candidates)}: " if cause.candidates else ""
    said = (
        " (so the message says; the call as it is known here does not show it)" if cause.how == "said" else ""
    )
    coded: Inline = (" [", Ref(cause.code), "]") if cause.code else ""
    link = f" ({cause.link})" if cause.link else ""
    return Item((f"{names}{cause.text}{said}", coded, link), _LEADS[cause.how])


def _way(way: Unlock) -> Item:
    lines = [line for line in paste_of(way) if not line.startswith("params = ")][:_MOST_PASTE]
    below = (to_paste(lines),) if lines else ()
    return Item(f"to get {way.candidate}: {way.change}", "→", below=below)


def _rest(explained: Explained) -> str:
    hidden = len(explained.answers) - MOST_CALLS
    words = [f"{hidden} more different calls: --json has them all."] if hidden > 1 else []
    if hidden == 1:
        words.append("1 more different call: --json has it.")
    if explained.left_out:
        calls, were = ("call", "was") if explained.left_out == 1 else ("calls", "were")
        words.append(f"{explained.left_out} {calls} more than can be told apart {were} left out.")
    codes = dict.fromkeys(cause.code for a in explained.answers for cause in a.causes if cause.code)
    words += [f"Why a rule: attnsel rule {next(iter(codes))}"] if codes else []
    return " ".join(words)
