"""The answer in words, and as a document: for a terminal, or for an issue."""

from __future__ import annotations

from collections.abc import Sequence

from attnsel.diagnose.ranks.answer import Answer, Disagreement, Dissent, Fell, Ran
from attnsel.diagnose.ranks.records import NOTHING
from attnsel.errors import short
from attnsel.report.document import (
    Block,
    Code,
    Document,
    Item,
    Items,
    Paragraph,
    Ref,
    Section,
    Strong,
)
from attnsel.verdicts.requirements import size

_MOST = 12  # entries of a section
_MOST_DIFFERS = 6
_MOST_LISTED = 60  # characters of ranks in a line


def verdict(answer: Answer) -> str:
    """The answer in a sentence."""
    said = f"{_count(answer.ranks, 'rank')}: "
    parts = []
    if answer.disagreements:
        parts.append(_who_differs(answer.disagreements))
    nothing = [ran for ran in answer.ran if ran.kernel == NOTHING]
    if nothing:
        parts.append(f"nothing could run on ranks {_cut(nothing[0].ranks)}")
    if answer.failed_checks:
        parts.append(f"{_count(len(answer.failed_checks), 'failed self-check')}")
    if answer.troubles:
        parts.append(
            f"files of {_count(len(answer.troubles), 'rank')} or span of ranks say less than they should"
        )
    if not parts:
        parts.append("they agree" if answer.ranks > 1 else "nothing to compare it with")
    if answer.fell_back:
        parts.append(f"{_count(len(answer.fell_back), 'fall-back')}")
    if any(ran.slow for ran in answer.ran):
        parts.append(f"{_count(sum(ran.slow for ran in answer.ran), 'slow path')}")
    return f"{said}{'; '.join(parts)}."


def _who_differs(disagreements: Sequence[Disagreement]) -> str:
    questions = sum(1 + one.alike for one in disagreements)
    first = disagreements[0]
    if first.even:
        halves = [first.most, *(dissent.group for dissent in first.dissents)]
        who = " and ".join(_group(half.rank_count, half.ranks) for half in halves)
        return f"{who} differ in {_count(questions, 'question')}"
    who = ", ".join(dict.fromkeys(d.group.ranks for one in disagreements for d in one.dissents))
    verb = "differ" if "," in who or "-" in who else "differs"
    return f"rank {_cut(who)} {verb} from the others in {_count(questions, 'question')}"


# ---- the whole answer -------------------------------------------------------------------------------------


def ranks_document(answer: Answer, for_issue: bool = False) -> Document:
    """The whole answer. ``for_issue``: without what names files and hosts."""
    unread = [Item(text) for text in _unread(answer)]
    troubles = [Item(f"rank {_cut(one.rank)}: {one.what}") for one in answer.troubles]
    if for_issue:
        unread = [Item(_count(answer.broken, "broken line"))] if answer.broken else []
    if for_issue and troubles:
        troubles = [Item(f"{_count(len(troubles), 'entry')} on missing or cut-off ranks")]
    blocks: list[Block] = [Paragraph(Strong(verdict(answer))), Paragraph(_facts(answer))]
    for title, items in (
        ("Ranks that differ", [_disagreement(one) for one in answer.disagreements]),
        ("What ran", [_ran(group) for group in _by_question(answer.ran)]),
        ("First fall-backs", [_fell(one) for one in answer.fell_back]),
        ("Failed self-checks", [_fell(one) for one in answer.failed_checks]),
        ("Slow paths", [_slow(one) for one in answer.ran if one.slow]),
        ("Ranks whose files say less than they should", troubles),
        ("Not read", unread),
    ):
        more = len(items) - _MOST
        if more > 0:
            items = [*items[:_MOST], Item(f"and {more} more: --json has them all")]
        blocks += [Section(title, (Items(tuple(items)),))] if items else []
    return Document(tuple(blocks))


def _facts(answer: Answer) -> str:
    said = [
        _count(answer.ranks, "rank"),
        *([f"world size {' or '.join(map(str, answer.world_sizes))}"] if answer.world_sizes else []),
        *([_count(answer.hosts, "host")] if answer.hosts else []),
        _count(answer.files, "file"),
        size(answer.bytes),
        f"{answer.known:,} of {answer.lines:,} lines are attnsel's",
    ]
    return " · ".join(said)


def _disagreement(one: Disagreement) -> Item:
    alike = f" (and {_count(one.alike, 'question')} alike)" if one.alike else ""
    groups = [Item(f"{_group(one.most.rank_count, one.most.ranks)}: {_kernels(one.most.kernels)}")]
    for dissent in one.dissents:
        text = f"{_group(dissent.group.rank_count, dissent.group.ranks)}: {_kernels(dissent.group.kernels)}"
        groups.append(Item(text, "" if one.even else ">", below=tuple(map(Item, _why(dissent)))))
    return Item(f"{one.question}{alike}", below=tuple(groups))


def _why(dissent: Dissent) -> list[str]:
    words = [
        f"{differs.name}: {differs.here} here, {differs.others} on the others"
        for differs in dissent.differs[:_MOST_DIFFERS]
    ]
    more = len(dissent.differs) - _MOST_DIFFERS
    words += [f"and {more} more: --json has them all"] if more > 0 else []
    words += [f"{name} refused when it ran there, or its numbers were wrong" for name in dissent.refused]
    if not words:
        words.append("nothing else that the files hold differs")
    return [*words, *([f"fix: {dissent.fix}"] if dissent.fix else [])]


def _by_question(ran: Sequence[Ran]) -> list[list[Ran]]:
    groups: dict[tuple[str, str], list[Ran]] = {}
    for one in ran:
        groups.setdefault((one.question, one.source), []).append(one)
    return list(groups.values())


def _ran(kernels: Sequence[Ran]) -> Item:
    below = []
    for one in kernels:
        often = _count(one.calls, "call") if one.calls else f"said {_count(one.lines, 'time')}"
        below.append(Item((Code(one.kernel), f": {often}, {_group(one.rank_count, one.ranks)}")))
    return Item(kernels[0].question, below=tuple(below))


def _fell(one: Fell) -> Item:
    when = f"{one.time}, first" if one.time else "first"
    then = (", then ", Code(one.then)) if one.then else ""
    where = f": {when} on rank {one.rank}, in all {_group(one.rank_count, one.ranks)}"
    question = [Paragraph(one.question)] if one.question else []
    said = Paragraph((f"{one.message} [", Ref(one.code), "]"))
    return Item((Code(one.candidate), then, where), below=(*question, said))


def _slow(one: Ran) -> Item:
    below = [Item(f"{name}: {text}") for name, text in (("why", one.why), ("fix", one.fix)) if text]
    return Item((Code(one.kernel), f" for {one.question}"), below=tuple(below))


def _unread(answer: Answer) -> list[str]:
    said = []
    if answer.broken:
        said.append(f"{_count(answer.broken, 'broken line')}: {', '.join(answer.broken_places)}")
    said += [
        f"{schema}: {_count(count, 'line')} of a version that this attnsel does not read"
        for schema, count in answer.unknown_schemas.items()
    ]
    if answer.foreign:
        files = ", ".join(answer.foreign_files)
        lines = _count(answer.foreign, "line")
        said.append(f"{lines} of others ({files}): attnsel explain --from-log FILE reads those")
    said += [f"{short(one.name, str, 80)}: {one.why}" for one in answer.skipped]
    said += [f"{count:,} {what}: there is no room for more" for what, count in answer.dropped.items()]
    return said


def nothing_found(answer: Answer) -> str:
    """One line for files without anything of attnsel's: what is looked for, and what they hold instead."""
    unread = "; ".join(_unread(answer)[:3])
    looked_for = "lines of ATTNSEL_DEBUG_FILE, files of attnsel watch --out, attnsel's warnings"
    files = _count(answer.files, "file")
    found = f". Found: {unread}" if unread else ""
    return f"nothing of attnsel's in {files}. Looked for: {looked_for}{found}"


def _group(count: int, ranks: str) -> str:
    return f"rank {_cut(ranks)}" if count == 1 else f"{count} ranks ({_cut(ranks)})"


def _kernels(names: Sequence[str]) -> str:
    return " and ".join(names) or "none that did not refuse"


def _cut(ranks: str) -> str:
    if len(ranks) <= _MOST_LISTED:
        return ranks
    return f"{ranks[:_MOST_LISTED].rpartition(', ')[0]}, …"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
