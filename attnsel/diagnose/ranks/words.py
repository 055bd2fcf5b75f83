"""The answer as text for a terminal, and as Markdown for an issue."""

from __future__ import annotations

from collections.abc import Sequence

from attnsel.diagnose.ranks.answer import Answer, Disagreement, Dissent, Fell, Ran
from attnsel.diagnose.ranks.records import NOTHING
from attnsel.errors import printable, short
from attnsel.report.markdown import code, escape, fenced, table
from attnsel.report.text import fold
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


# ---- text ---------------------------------------------------------------------------------------------


def render(answer: Answer, width: int = 80) -> str:
    lines = [*fold(verdict(answer), width), "", *fold(_facts(answer), width)]
    for title, parts in (
        ("Ranks that differ", [_disagreement(one, width) for one in answer.disagreements]),
        ("What ran", [_ran(group, width) for group in _by_question(answer.ran)]),
        ("First fall-backs", [_fell(one, width) for one in answer.fell_back]),
        ("Failed self-checks", [_fell(one, width) for one in answer.failed_checks]),
        ("Slow paths", [_slow(one, width) for one in answer.ran if one.slow]),
        (
            "Ranks whose files say less than they should",
            [fold(f"rank {_cut(one.rank)}: {one.what}", width, "  ", "    ") for one in answer.troubles],
        ),
        ("Not read", [fold(text, width, "  ", "    ") for text in _unread(answer)]),
    ):
        if parts:
            lines += ["", title]
            lines += [line for part in parts[:_MOST] for line in part]
        if len(parts) > _MOST:
            lines.append(f"  and {len(parts) - _MOST} more: --json has them all")
    return "\n".join(printable(line.rstrip()) for line in lines)


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


def _disagreement(one: Disagreement, width: int) -> list[str]:
    alike = f" (and {_count(one.alike, 'question')} alike)" if one.alike else ""
    lines = fold(f"{one.question}{alike}", width, "  ", "    ")
    lines += fold(
        f"{_group(one.most.rank_count, one.most.ranks)}: {_kernels(one.most.kernels)}",
        width,
        "    ",
        "      ",
    )
    for dissent in one.dissents:
        group = dissent.group
        text = f"{_group(group.rank_count, group.ranks)}: {_kernels(group.kernels)}"
        lines += fold(text, width, "    " if one.even else "  > ", "      ")
        for words in _why(dissent):
            lines += fold(words, width, "      ", "        ")
    return lines


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


def _ran(kernels: Sequence[Ran], width: int) -> list[str]:
    lines = fold(kernels[0].question, width, "  ", "    ")
    for one in kernels:
        often = _count(one.calls, "call") if one.calls else f"said {_count(one.lines, 'time')}"
        text = f"{one.kernel}: {often}, {_group(one.rank_count, one.ranks)}"
        lines += fold(text, width, "    ", "      ")
    return lines


def _fell(one: Fell, width: int) -> list[str]:
    when = f"{one.time}, first" if one.time else "first"
    more = f", then {one.then}" if one.then else ""
    lines = fold(
        f"{one.candidate}{more}: {when} on rank {one.rank}, in all {_group(one.rank_count, one.ranks)}",
        width,
        "  ",
        "    ",
    )
    if one.question:
        lines += fold(one.question, width, "    ", "    ")
    return lines + fold(f"{one.message} [{one.code}]", width, "    ", "    ")


def _slow(one: Ran, width: int) -> list[str]:
    lines = fold(f"{one.kernel} for {one.question}", width, "  ", "    ")
    lines += fold(f"why: {one.why}", width, "    ", "      ") if one.why else []
    return lines + (fold(f"fix: {one.fix}", width, "    ", "      ") if one.fix else [])


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


# ---- Markdown -----------------------------------------------------------------------------------------


def render_markdown(answer: Answer) -> str:
    """For an issue: hosts and file names are left out."""
    parts = [f"**{escape(verdict(answer))}**", fenced([_facts(answer)], "text")]
    parts += [_disagreement_markdown(one) for one in answer.disagreements[:_MOST]]
    rows = [
        (
            escape(ran.question),
            code(ran.kernel),
            f"{ran.calls:,}" if ran.calls else "-",
            escape(_cut(ran.ranks)),
        )
        for ran in answer.ran[: 2 * _MOST]
    ]
    parts += [table(("question", "kernel", "calls", "ranks"), rows)] if rows else []
    for title, found in (("Fell back", answer.fell_back), ("Failed self-checks", answer.failed_checks)):
        if found:
            parts.append("\n".join([f"{title}:", "", *(_fell_markdown(one) for one in found[:_MOST])]))
    slow = [
        f"- {code(ran.kernel)} for {escape(ran.question)}" + (f": {escape(ran.fix)}" if ran.fix else "")
        for ran in answer.ran
        if ran.slow
    ]
    parts += ["\n".join(["Slow paths:", "", *slow[:_MOST]])] if slow else []
    counts = [f"{answer.broken:,} broken lines"] if answer.broken else []
    counts += (
        [f"{_count(len(answer.troubles), 'entry')} on missing or cut-off ranks"] if answer.troubles else []
    )
    return "\n\n".join([*parts, *map(escape, counts)])


def _disagreement_markdown(one: Disagreement) -> str:
    rows = [(escape(_group(one.most.rank_count, one.most.ranks)), escape(_kernels(one.most.kernels)), "")]
    for dissent in one.dissents:
        group = dissent.group
        why = escape("; ".join(_why(dissent)))
        rows.append((escape(_group(group.rank_count, group.ranks)), escape(_kernels(group.kernels)), why))
    return f"{escape(one.question)}:\n\n{table(('ranks', 'ran', 'what differs'), rows)}"


def _fell_markdown(one: Fell) -> str:
    then = f", then {code(one.then)}" if one.then else ""
    where = escape(f"first on rank {one.rank}, in all {one.rank_count}")
    return f"- {code(one.candidate)}{then}, {where}: {escape(one.message)} ({one.code})"
