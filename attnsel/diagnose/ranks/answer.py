"""What follows from the tables: where ranks differ and why, what fell back, which files are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from attnsel.base.records import to_json
from attnsel.diagnose.ranks.records import NOTHING
from attnsel.diagnose.ranks.sources import Damaged, Found, Skipped, Unreadable, find_sources, lines_of
from attnsel.diagnose.ranks.tables import KernelRow, QuestionRow, RankRow, SetbackRow, Tables
from attnsel.verdicts.reasons import WRONG_NUMBERS

_MOST_MISSING = 10_000


_SWITCHES = (
    "look for a switch that is set on some ranks alone: sdpa_kernel, torch.backends.cuda.enable_*, "
    "TORCH_CUDNN_SDPA_*, NVTE_*, attn_implementation"
)
_MORE = "ATTNSEL_DEBUG_FORMAT=json also says versions, GPU, policy and strides"


class Ran(NamedTuple):
    """One kernel for one question: what ran, how often, where."""

    question: str
    source: str
    kernel: str
    ranks: str
    rank_count: int
    calls: int
    lines: int
    places: tuple[str, ...]
    slow: bool
    why: str
    fix: str


class Group(NamedTuple):
    """Ranks that ran the same kernels for a question."""

    ranks: str
    rank_count: int
    kernels: tuple[str, ...]


class Differs(NamedTuple):
    """What is otherwise on the ranks of a group: here, and on the others."""

    name: str
    here: str
    others: str


class Dissent(NamedTuple):
    """One group beside the largest, or beside an equal one (``even``)."""

    group: Group
    differs: tuple[Differs, ...]
    refused: tuple[str, ...]
    fix: str


class Disagreement(NamedTuple):
    """A question that ranks answered differently; ``alike``: further questions with the same groups."""

    question: str
    most: Group
    even: bool
    dissents: tuple[Dissent, ...]
    alike: int = 0


class Fell(NamedTuple):
    """A fall-back, or a failed self-check."""

    time: str
    rank: str
    candidate: str
    code: str
    message: str
    then: str
    question: str
    ranks: str
    rank_count: int


class Trouble(NamedTuple):
    """A rank whose files say less than they should."""

    rank: str
    what: str


class Answer(NamedTuple):
    ranks: int
    world_sizes: tuple[int, ...]
    hosts: int
    files: int
    bytes: int
    lines: int
    known: int
    ran: tuple[Ran, ...]
    disagreements: tuple[Disagreement, ...]
    fell_back: tuple[Fell, ...]
    failed_checks: tuple[Fell, ...]
    troubles: tuple[Trouble, ...]
    broken: int
    broken_places: tuple[str, ...]
    unknown_schemas: dict[str, int]
    foreign: int
    foreign_files: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    dropped: dict[str, int]

    @property
    def bad(self) -> bool:
        """Whether ranks differ, numbers were wrong, a call could not run, or a rank is missing or failed."""
        nothing_ran = any(ran.kernel == NOTHING for ran in self.ran)
        return bool(self.disagreements or self.failed_checks or self.troubles or nothing_ran)

    def as_dict(self) -> dict[str, Any]:
        return {"agreed": not self.bad, **to_json(self)}


def read(given: Sequence[str], moved: Callable[[int, int], None] = lambda done, total: None) -> Answer:
    """The answer of all these files, folders and patterns. ``moved``: bytes that are behind, of how many.

    Raises InvalidInput for a name that is nothing.
    """
    found = find_sources(given)
    tables, total = Tables(), sum(source.bytes for source in found.sources)
    skipped, behind = list(found.skipped), 0
    for source in found.sources:
        tables.begin(source)
        try:
            for line in lines_of(source.path, partial(_further, moved, behind, total)):
                tables.add(line)
        except Damaged as error:
            tables.is_cut()
            skipped.append(Skipped(source.name, str(error)))
        except Unreadable as error:
            skipped.append(Skipped(source.name, str(error)))
        tables.end()
        behind += source.bytes
    return answer_of(tables, found._replace(skipped=tuple(skipped)))


def _further(moved: Callable[[int, int], None], behind: int, total: int, done: int) -> None:
    moved(behind + done, total)


def answer_of(tables: Tables, found: Found) -> Answer:
    ran = [_ran(q, name, row, tables) for q in tables.questions.values() for name, row in q.kernels.items()]
    fell = sorted(tables.setbacks.values(), key=lambda row: row.first_time or "~")
    setbacks = [_fell(row, tables) for row in fell]
    return Answer(
        ranks=sum(1 for row in tables.ranks if row.lines),
        world_sizes=tuple(sorted(tables.world_sizes)),
        hosts=len({host for row in tables.ranks for host in row.hosts}),
        files=len(found.sources),
        bytes=sum(source.bytes for source in found.sources),
        lines=tables.lines,
        known=tables.known,
        ran=tuple(sorted((one for one in ran if one.rank_count), key=lambda one: (-one.calls, -one.lines))),
        disagreements=tuple(_disagreements(tables)),
        fell_back=tuple(one for one in setbacks if one.code != WRONG_NUMBERS),
        failed_checks=tuple(one for one in setbacks if one.code == WRONG_NUMBERS),
        troubles=tuple(_troubles(tables)),
        broken=tables.broken,
        broken_places=tuple(tables.broken_places),
        unknown_schemas=dict(tables.unknown),
        foreign=tables.foreign,
        foreign_files=tuple(tables.foreign_files),
        skipped=found.skipped,
        dropped=dict(tables.dropped),
    )


# ---- ranks in words -----------------------------------------------------------------------------------


def ranks_text(rows: Sequence[RankRow]) -> str:
    """0-16, 18-63; ranks that only their file names as that."""
    return ", ".join(
        [_spans([row.number for row in rows if row.number is not None]), *_nameless(rows)]
    ).strip(", ")


def _nameless(rows: Sequence[RankRow]) -> list[str]:
    names = [row.name for row in rows if row.number is None]
    return names if len(names) < 5 else [*names[:3], f"{len(names) - 3} more files"]


def _spans(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _ran(question: QuestionRow, kernel: str, row: KernelRow, tables: Tables) -> Ran:
    rows = list(tables.rows_of(row.ranks))
    return Ran(
        question.words,
        question.kind,
        kernel,
        ranks_text(rows),
        len(rows),
        row.calls,
        row.lines,
        tuple(sorted(row.places)),
        bool(row.slow) and kernel != NOTHING,
        row.why,
        row.fix,
    )


def _fell(row: SetbackRow, tables: Tables) -> Fell:
    rows = list(tables.rows_of(row.ranks))
    first, setback = tables.ranks[row.first_rank], row.setback
    return Fell(
        row.first_time,
        first.name,
        setback.candidate,
        setback.code,
        setback.message,
        row.then,
        row.question,
        ranks_text(rows),
        len(rows),
    )


# ---- ranks that differ --------------------------------------------------------------------------------


def _disagreements(tables: Tables) -> list[Disagreement]:
    """One for each set of groups: questions that part the ranks alike are counted."""
    found: dict[Any, Disagreement] = {}
    for question in tables.questions.values():
        groups = _groups(question)
        if len(groups) < 2:
            continue
        one = _disagreement(question, groups, tables)
        alike = tuple((d.group, tuple(differs.name for differs in d.differs)) for d in one.dissents)
        key = (one.most, alike)
        before = found.get(key)
        found[key] = one if before is None else before._replace(alike=before.alike + 1)
    return list(found.values())


def _groups(question: QuestionRow) -> list[tuple[int, tuple[str, ...]]]:
    """Ranks by the kernels that they ended with, the most ranks first."""
    every = 0
    for row in question.kernels.values():
        every |= row.ranks
    groups: list[tuple[int, tuple[str, ...]]] = [(every, ())]
    for name, row in sorted(question.kernels.items()):
        ran = row.ranks & ~row.left
        groups = [
            part
            for ranks, kernels in groups
            for part in ((ranks & ran, (*kernels, name)), (ranks & ~ran, kernels))
            if part[0]
        ]
    return sorted(groups, key=lambda group: (-group[0].bit_count(), group[1]))


def _disagreement(
    question: QuestionRow, groups: list[tuple[int, tuple[str, ...]]], tables: Tables
) -> Disagreement:
    most, *others = groups
    even = others[0][0].bit_count() == most[0].bit_count()
    dissents = tuple(_dissent(question, other, most, tables) for other in others)
    return Disagreement(question.words, _group(most, tables), even, dissents)


def _group(group: tuple[int, tuple[str, ...]], tables: Tables) -> Group:
    rows = list(tables.rows_of(group[0]))
    return Group(ranks_text(rows), len(rows), group[1])


def _dissent(
    question: QuestionRow,
    group: tuple[int, tuple[str, ...]],
    most: tuple[int, tuple[str, ...]],
    tables: Tables,
) -> Dissent:
    here, there = (_circumstances(question, ranks, tables) for ranks, _ in (group, most))
    differs = tuple(
        Differs(name, " or ".join(sorted(here[name])), " or ".join(sorted(there[name])))
        for name in here
        if name in there and not here[name] & there[name]
    )
    refused = tuple(name for name, row in question.kernels.items() if row.left & group[0])
    fix = next((row.fix for name, row in question.kernels.items() if name in group[1] and row.fix), "")
    if not fix:
        alike = f"ATTNSEL_BACKENDS={','.join(most[1])} on all ranks"
        fix = {"watch": _SWITCHES, "log": _MORE}.get(question.kind, alike)
    return Dissent(_group(group, tables), differs, refused, _fix(differs, refused, fix))


def _circumstances(question: QuestionRow, ranks: int, tables: Tables) -> dict[str, set[str]]:
    """Every value that holds on these ranks, by name."""
    found: dict[str, set[str]] = {}
    for row in question.kernels.values():
        for machine, where in row.machines.items():
            if where & ranks and 0 <= machine < len(tables.machines):
                for name, value in tables.machines[machine].items():
                    found.setdefault(name, set()).add(value)
    return found


def _fix(differs: Sequence[Differs], refused: Sequence[str], otherwise: str) -> str:
    """The first thing to do about it, by what differs."""
    for one in differs:
        if one.name.startswith(("ATTNSEL_", "the argument ")):
            return f"set {one.name} alike on all ranks: it is {one.here} here, {one.others} on the others"
    for one in differs:
        if one.name in ("GPU", "device", "architecture"):
            return otherwise
        if one.name == "tensors":
            return f"give the same strides on all ranks: here {one.here}"
        if one.name == "missing":
            return f"install what does not load here: {one.here}"
        if one.others != "none":
            return f"install {one.name} {one.others} here too"
    if refused:
        names = ",".join(refused)
        return (
            f"ATTNSEL_DISABLE={names} on all ranks makes them equal; ATTNSEL_REPLAY_DIR keeps what it refused"
        )
    return otherwise


# ---- ranks that say less than they should -------------------------------------------------------------


def _troubles(tables: Tables) -> list[Trouble]:
    found = []
    for row in sorted(tables.ranks, key=lambda row: (row.number is None, row.number or 0, row.name)):
        where = f" ({', '.join(sorted(row.files))})" if row.files else ""
        if row.cut:
            found.append(Trouble(row.name, f"cut off in the middle of a line ({', '.join(sorted(row.cut))})"))
        if row.ended not in (None, 0):
            found.append(Trouble(row.name, f"the program ended with exit code {row.ended}{where}"))
        if row.number is not None and not row.lines and not row.cut:
            found.append(Trouble(row.name, "its file holds no line of attnsel's"))
    return found + _missing(tables)


def _missing(tables: Tables) -> list[Trouble]:
    size = max(tables.world_sizes, default=0)
    there = {row.number for row in tables.ranks}
    gone = [number for number in range(min(size, _MOST_MISSING)) if number not in there]
    if not gone:
        return []
    said = f"no file or line, and the world size is {size}"
    if there == {0}:
        said += ": ATTNSEL_DEBUG_RANKS=all lets every rank speak"
    return [Trouble(_spans(gone), said)]
