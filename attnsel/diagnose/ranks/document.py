"""The answer of many ranks as a document."""

from __future__ import annotations

from collections.abc import Iterable

from attnsel.diagnose.ranks.answer import Fell, Group, Ran, RanksAnswer
from attnsel.report.document import Block, Code, Document, Item, Items, Paragraph, Ref, Section, Strong

_MOST = 12  # entries of a section
_MOST_DIFFERS = 6
_MOST_LISTED = 60  # characters of ranks in a line


def ranks_document(answer: RanksAnswer, for_issue: bool = False) -> Document:
    """The whole answer. ``for_issue``: without what names files and hosts."""
    troubles = [f"rank {_cut(one.rank)}: {one.what}" for one in answer.troubles]
    if for_issue and troubles:
        troubles = [f"{_count(len(troubles), 'remark')} on missing or cut-off ranks"]
    blocks: list[Block] = [Paragraph(Strong(_verdict(answer))), Paragraph(_facts(answer))]
    for title, items in (
        ("Ranks that differ", [_ran(one) for one in answer.disagreements]),
        ("What ran", [_ran(one) for one in answer.ran if len(one.groups) == 1]),
        ("First fall-backs", [_fell(one) for one in answer.fell_back]),
        ("Failed self-checks", [_fell(one) for one in answer.failed_checks]),
        ("Ranks whose files say less than they should", [Item(text) for text in troubles]),
        ("Not read", [] if for_issue else [Item(text) for text in _unread(answer)]),
    ):
        if len(items) > _MOST:
            items[_MOST:] = [Item(f"and {len(items) - _MOST} more: --json has them all")]
        blocks += [Section(title, (Items(tuple(items)),))] if items else []
    return Document(tuple(blocks))


def nothing_found(answer: RanksAnswer) -> str:
    """One line for files without anything of attnsel's: what is looked for, and what they hold instead."""
    looked_for = "lines of ATTNSEL_DEBUG_FILE, files of attnsel watch --out, attnsel's warnings"
    found = f". Found: {'; '.join(_unread(answer)[:3])}" if answer.unread else ""
    return f"nothing of attnsel's in {_count(answer.files, 'file')}. Looked for: {looked_for}{found}"


# ---- parts -------------------------------------------------------------------------------------------


def _verdict(answer: RanksAnswer) -> str:
    parts = [_who_differs(answer.disagreements)] if answer.disagreements else []
    if answer.nothing_ran:
        parts.append(f"nothing could run on {_group(answer.nothing_ran[0])}")
    if answer.failed_checks:
        parts.append(_count(len(answer.failed_checks), "failed self-check"))
    if answer.troubles:
        ranks = _count(len(answer.troubles), "rank")
        parts.append(f"files of {ranks} or span of ranks say less than they should")
    if not parts:
        parts.append("they agree" if answer.ranks > 1 else "nothing to compare it with")
    if answer.fell_back:
        parts.append(_count(len(answer.fell_back), "fall-back"))
    return f"{_count(answer.ranks, 'rank')}: {'; '.join(parts)}."


def _who_differs(disagreements: list[Ran]) -> str:
    questions = _count(sum(1 + one.alike for one in disagreements), "question")
    if _is_even(disagreements[0]):
        return f"{' and '.join(map(_group, disagreements[0].groups))} differ in {questions}"
    who = ", ".join(dict.fromkeys(group.ranks for one in disagreements for group in one.groups[1:]))
    verb = "differ" if "," in who or "-" in who else "differs"
    return f"rank {_cut(who)} {verb} from the others in {questions}"


def _is_even(one: Ran) -> bool:
    """Whether no group is the largest, so that nobody is called the dissenter."""
    return len(one.groups) > 1 and one.groups[0].rank_count == one.groups[1].rank_count


def _facts(answer: RanksAnswer) -> str:
    said = [_count(answer.ranks, "rank")]
    said += [f"world size {' or '.join(map(str, answer.world_sizes))}"] if answer.world_sizes else []
    said += [_count(answer.files, "file"), f"{answer.known:,} of {answer.lines:,} lines are attnsel's"]
    return " · ".join(said)


def _ran(one: Ran) -> Item:
    alike = f" (and {_count(one.alike, 'question')} alike)" if one.alike else ""
    below = []
    for place, group in enumerate(one.groups):
        text = f"{_group(group)}: {' and '.join(group.kernels) or 'none that did not refuse'}"
        why = tuple(map(Item, _why(group))) if place else ()
        below.append(Item(text, ">" if place and not _is_even(one) else "", below=why))
    return Item(f"{one.question}{alike}", below=tuple(below))


def _why(group: Group) -> Iterable[str]:
    for one in group.differs[:_MOST_DIFFERS]:
        yield f"{one.name}: {one.here} here, {one.others} on the others"
    if len(group.differs) > _MOST_DIFFERS:
        yield f"and {len(group.differs) - _MOST_DIFFERS} more: --json has them all"
    for name in group.refused:
        yield f"{name} refused when it ran there, or its numbers were wrong"
    if not group.differs and not group.refused:
        yield "nothing else that the files hold differs"
    yield f"fix: {group.fix}"


def _fell(one: Fell) -> Item:
    then = (", then ", Code(one.then)) if one.then else ""
    when = f" at {one.time}" if one.time else ""
    ranks = f", {one.rank_count} ranks in all" if one.rank_count > 1 else ""
    where = f": first on rank {one.rank}{when}{ranks}: {one.message} ["
    return Item((Code(one.candidate), then, where, Ref(one.code), "]"))


def _unread(answer: RanksAnswer) -> list[str]:
    said = []
    for one in answer.unread:
        first = f": {one.first}" if one.first else ""
        said.append(f"{one.what}{first}" + (f" and {one.times - 1:,} more" if one.times > 1 else ""))
    return said


def _group(group: Group) -> str:
    ranks = _cut(group.ranks)
    return f"rank {ranks}" if group.rank_count == 1 else f"{group.rank_count} ranks ({ranks})"


def _cut(ranks: str) -> str:
    return ranks if len(ranks) <= _MOST_LISTED else f"{ranks[:_MOST_LISTED].rpartition(', ')[0]}, …"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
