"""The answer to a log as a document: for each call what the log says, why, and what helps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from itertools import pairwise, zip_longest

from attnsel.diagnose.logs.answer import AnsweredCall, Cause, Explained, library_of
from attnsel.diagnose.logs.calls import ANY, LoggedCall
from attnsel.diagnose.logs.message import Finding
from attnsel.environment import COMPONENTS
from attnsel.environment.versions import component_name
from attnsel.params import AttentionParams
from attnsel.report.answer import paste_of, to_paste, warnings
from attnsel.report.document import Block, Document, Facts, Item, Items, Paragraph, Ref, Section, Strong
from attnsel.report.words import environment_words, params_words
from attnsel.selection.unlock import Unlock

MOST_CALLS = 5  # shown; --json has all
_MARKS = {"refusal": "✖", "error": "✖", "chosen": "✔"}
_LEADS = {"computed": "✖", "said": "?", "known": "·", "guessed": "?"}
_EITHER = re.compile(r"; (?=(?:or|else)[ ,])")  # between what helps as well as the other
_MOST_SAID, _MOST_PASTE = 14, 6  # messages of one call, lines of one paste
_TOLD_LAST = re.compile("the program itself|decoderF:|smallkF:|tritonflash|(fa3F: )?the operator begins")


def log_document(explained: Explained) -> Document:
    """The whole answer: the verdict of each call first, then why, what helps, and what the log says."""
    answers = explained.answers[:MOST_CALLS]
    if len(explained.answers) == 1:
        blocks: list[Block] = [Paragraph(Strong(_verdict(answers[0]))), *_parts(answers[0])]
    else:
        blocks = [Paragraph(Strong(f"{len(explained.answers)} things in this log are about attention."))]
        blocks += [Section(_verdict(one), tuple(_parts(one)), n) for n, one in enumerate(answers, 1)]
    if rest := _rest(explained):
        blocks.append(Paragraph(rest))
    return Document(tuple(blocks))


def short_log_document(explained: Explained) -> Document:
    """The verdict of each call, a line each, the most frequent first."""
    told = [Paragraph(_verdict(answer)) for answer in explained.answers[:MOST_CALLS]]
    rest = len(explained.answers) - MOST_CALLS
    return Document((*told, *([Paragraph(f"{rest} more: --json has them")] if rest > 0 else [])))


_FORM = "the form 'A missing rule' (.github/ISSUE_TEMPLATE/missing-rule.yml)"


def nothing_known() -> list[str]:
    """What to say where a log has nothing that is known: whose messages are, and where to report it."""
    urls = []
    with suppress(PackageNotFoundError):
        urls = metadata("attnsel").get_all("Project-URL") or []
    named = (url.partition(", ")[2] for url in urls if re.match("(?i)issues|bug", url))
    return [
        "nothing in this log is known (docs/how-to/logs.md: whose messages are)",
        f"if it is about attention, report it: {next(named, _FORM)}",
    ]


def _verdict(answer: AnsweredCall) -> str:
    """What happened, in one sentence: the cause that is known best, else the message that it ended with."""
    call, cause = answer.call, _deciding(answer)
    if cause is None and call.outcome is None and all(f.kind == "question" for f in call.findings):
        return f"{call.library}: the configuration of a call, and not what became of it"
    if cause is None:
        told = call.outcome or call.findings[-1]
        return f"{call.library}{' chose' * (told.kind == 'chosen')}: {told.text}"
    about = ", ".join(cause.candidates) or ("" if call.library == ANY else call.library)
    link = f" ({cause.link})" if cause.link else ""
    return cause.text + link if about.casefold() in cause.text.casefold() else f"{about}: {cause.text}{link}"


def _deciding(answer: AnsweredCall) -> Cause | None:
    """The cause that is the verdict; that a kernel was left out or is for other calls is the last."""
    order = ("known", "computed", "guessed", "said")
    told = sorted(answer.causes, key=lambda c: (bool(_TOLD_LAST.match(c.text)), order.index(c.how)))
    return told[0] if told else None


def _title(call: LoggedCall) -> str:
    times = f"{call.times} times" if call.times > 1 else ""
    lines = f"line{'s' * (len(call.lines) > 1)} {', '.join(map(str, call.lines))}" if call.lines else ""
    more = " …" if lines and call.times > len(call.lines) else ""
    return " · ".join(filter(None, (call.library, times, ", ".join(call.ranks), lines + more)))


def _facts(answer: AnsweredCall) -> Facts:
    """Where it ran and what was called, as far as anybody says it."""
    rebuilt = answer.rebuilt
    p, env = rebuilt.params, rebuilt.environment
    lines: list[tuple[str, ...] | Item] = [(_title(answer.call),)]
    machine, fields = environment_words(env), {*AttentionParams.model_fields} - {"tensors"}
    if rebuilt.whole:
        lines += [tuple(machine), tuple(params_words(p)), *warnings(env)]
        if rebuilt.assumed:
            lines.append((f"not in the log, assumed: {rebuilt.assumed[0]}", *rebuilt.assumed[1:]))
    else:  # nothing that is supposed for the rules alone
        card = machine[0] if rebuilt.placed else "GPU: not in the log (say which: --gpu NAME)"
        releases = (name for name in rebuilt.stated if name in COMPONENTS)
        lines.append((card, *(f"{component_name(name)} {getattr(env, name)}" for name in releases)))
        said = rebuilt.stated if rebuilt.described else ()
        lines.append(tuple(f"{name} {getattr(p, name)}" for name in said if name in fields))
    unread = [one for one in rebuilt.unread if rebuilt.described or one.startswith(("torch = ", "gpu = "))]
    if unread:
        lines.append((f"not used: {unread[0]}", *unread[1:]))
    return Facts(tuple(line for line in lines if line))


def _parts(answer: AnsweredCall) -> Iterator[Block]:
    rebuilt = answer.rebuilt
    if why := tuple(_why(answer)):
        yield _part("Why", why)
    helps = [*(Item(one, "→") for fix in answer.fixes for one in _EITHER.split(fix)), *map(_way, answer.ways)]
    known = (cause := _deciding(answer)) is not None and cause.how != "said"
    if not (rebuilt.described or known) and (ask := library_of(answer.call).ask):
        helps.append(Item(ask, "→"))
    if not helps and not rebuilt.whole:
        gpu = rebuilt.environment.device.name if rebuilt.placed else "NAME"
        ran = answer.call.outcome is not None and answer.call.outcome.kind == "chosen"
        lead = "which kernel runs is no error; whether another would run" if ran else "the call with flags"
        helps.append(Item(f"{lead}: attnsel explain --gpu {gpu} --head-dim … --seqlen …", "→"))
    if helps:
        guessed = cause is not None and cause.how == "guessed"
        yield _part("What may help" if guessed else "What helps", helps)
    yield _part("What the log says", _said(answer.call.findings), _facts(answer))
    if rebuilt.whole:
        backend = answer.attnsel.backend
        runs = Item("nothing runs such a call" if backend is None else f"{backend} runs such a call", "·")
        yield _part("With attnsel", [*(Item(text, "!") for text in answer.against), runs])


def _part(title: str, items: Iterable[Item], *more: Block) -> Section:
    return Section(title, (Items(tuple(items)), *more))


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
        yield Item("the call's configuration", "·")


def _why(answer: AnsweredCall) -> Iterator[Item]:
    """The causes beside the verdict; of those that a message only may mean, the rules in one line."""
    deciding = _deciding(answer)
    for cause in answer.causes:
        if cause.how != "said" and not (cause is deciding and not cause.code):
            yield _cause(cause)
    meant = [cause for cause in answer.causes if cause.how == "said"]
    if meant and deciding is not None and deciding.how != "said":
        words: list[Ref | str] = [word for cause in meant for word in (Ref(cause.code), ", ")]
        yield Item(("what the message can mean: ", *words[:-1]), "?")
    else:
        yield from map(_cause, meant)


def _cause(cause: Cause) -> Item:
    names = f"{', '.join(cause.candidates)}: " if cause.candidates else ""
    said = " (the message means it; the log does not say enough to show it)" if cause.how == "said" else ""
    text, link = f"{names}{cause.text}{said}", f" ({cause.link})" if cause.link else ""
    return Item((text, (" [", Ref(cause.code), "]") if cause.code else "", link), _LEADS[cause.how])


def _way(way: Unlock) -> Item:
    lines = [line for line in paste_of(way) if not line.startswith("params = ")][:_MOST_PASTE]
    below = (to_paste(lines),) if lines else ()
    return Item(f"to get {way.candidate}: {way.change}", "→", below=below)


def _rest(explained: Explained) -> str:
    hidden, left_out = len(explained.answers) - MOST_CALLS, explained.left_out
    words = [f"Different calls that are not shown: {hidden} (--json has them all)."] if hidden > 0 else []
    words += [f"Calls beyond those that can be told apart, left out: {left_out}."] if left_out else []
    codes = dict.fromkeys(cause.code for a in explained.answers for cause in a.causes if cause.code)
    words += [f"Why a rule: attnsel rule {next(iter(codes))}"] if codes else []
    return " ".join(words)
