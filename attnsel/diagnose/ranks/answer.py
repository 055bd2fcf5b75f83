"""Who differs, and why: what the lines of many ranks say together.

Files may be larger than the memory: what is kept is an entry for each rank, question, kernel, set of
circumstances and fall-back, MOST_ENTRIES of them at most.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from attnsel.base.records import to_json
from attnsel.diagnose.ranks.lines import (
    NOTHING,
    Circumstances,
    RankLine,
    Source,
    UnreadLine,
    find_sources,
    lines_of,
    read_line,
)
from attnsel.errors import InvalidInput, printable, short
from attnsel.params import AttentionParams
from attnsel.report.words import params_words
from attnsel.verdicts.reasons import WRONG_NUMBERS

MOST_ENTRIES = 20_000
_MOST_MISSING = 10_000
_ROOM = f"no room for more than {MOST_ENTRIES:,} ranks, questions, kernels and circumstances"
_SWITCHES = (
    "look for a switch that is set on some ranks alone: sdpa_kernel, torch.backends.cuda.enable_*, "
    "TORCH_CUDNN_SDPA_*, NVTE_*, attn_implementation"
)
_MORE = "ATTNSEL_DEBUG_FORMAT=json also says versions, GPU, policy and strides"

# ---- the answer --------------------------------------------------------------------------------------


class Differs(NamedTuple):
    """What is otherwise on the ranks of a group: here, and on those of the first group."""

    name: str
    here: str
    others: str


class Group(NamedTuple):
    """Ranks ("0-16, 18-63") that ended with the same kernels for a question.

    Of a group that is not the first: what differs from the first, which kernels refused on its ranks or
    served them wrongly, and what to do about it first.
    """

    ranks: str
    rank_count: int
    kernels: tuple[str, ...]
    differs: tuple[Differs, ...] = ()
    refused: tuple[str, ...] = ()
    fix: str = ""


class Ran(NamedTuple):
    """What ran for a question: one group where the ranks agree; else several, the largest first.

    source: "debug", "watch" or "log". alike: how many further questions part the ranks in the same way.
    """

    question: str
    source: str
    groups: tuple[Group, ...]
    alike: int = 0


class Fell(NamedTuple):
    """A fall-back, or a failed self-check: first at this time and on this rank, in all on these ranks."""

    time: str
    rank: str
    candidate: str
    code: str
    message: str
    then: str
    question: str
    ranks: str = ""
    rank_count: int = 0


class Trouble(NamedTuple):
    """A rank whose files say less than they should."""

    rank: str
    what: str


class Unread(NamedTuple):
    """What was not read, where it was first, and how often it was."""

    what: str
    first: str
    times: int


class RanksAnswer(NamedTuple):
    """What many ranks ran. lines: in all files; known: those that attnsel wrote."""

    ranks: int
    world_sizes: tuple[int, ...]
    files: int
    lines: int
    known: int
    ran: tuple[Ran, ...]
    fell_back: tuple[Fell, ...]
    failed_checks: tuple[Fell, ...]
    troubles: tuple[Trouble, ...]
    unread: tuple[Unread, ...]

    @property
    def disagreements(self) -> list[Ran]:
        return [one for one in self.ran if len(one.groups) > 1]

    @property
    def nothing_ran(self) -> list[Group]:
        """Ranks on which nothing could run a call."""
        return [group for one in self.ran for group in one.groups if NOTHING in group.kernels]

    @property
    def agreed(self) -> bool:
        """False also where numbers were wrong, a call could not run, or a rank is missing or failed."""
        return not (self.disagreements or self.nothing_ran or self.failed_checks or self.troubles)

    def as_dict(self) -> dict[str, Any]:
        return {"agreed": self.agreed, **to_json(self)}


def read(given: Sequence[str], moved: Callable[[int, int], None] = lambda done, total: None) -> RanksAnswer:
    """The answer of all these files, folders and patterns. ``moved``: bytes that are behind, of how many.

    Raises InvalidInput for a name that is nothing.
    """
    kept = _Kept()
    sources = find_sources(given, kept.skip)
    total, behind = sum(source.bytes for source in sources), 0
    for source in sources:
        kept.add_file(source, lambda done, behind=behind: moved(behind + done, total))  # type: ignore[misc]
        behind += source.bytes
        moved(behind, total)
    return kept.answer(len(sources))


# ---- what is kept of the lines -----------------------------------------------------------------------

K = TypeVar("K")


@dataclass(slots=True)
class _Rank:
    """``number`` None: only its file is known. ``bit``: in sets of ranks, which are integers."""

    number: int | None
    name: str
    bit: int
    told: bool = False  # a line of it was read
    ended: str = ""  # the error that its last program ended with
    unfinished: str = ""  # a file that was not read to its end


@dataclass(slots=True)
class _Question:
    """By kernel and by circumstances: the ranks."""

    words: str
    source: str
    ran: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    circumstances: dict[Circumstances, int] = field(default_factory=dict)

    def groups(self) -> list[tuple[int, tuple[str, ...]]]:
        """Ranks by the kernels that they ended with, the most ranks first."""
        every = 0
        for ranks in self.ran.values():
            every |= ranks
        groups: list[tuple[int, tuple[str, ...]]] = [(every, ())]
        for name, ranks in sorted(self.ran.items()):
            ran = ranks & ~self.refused.get(name, 0)
            split = [((of & ran, (*kernels, name)), (of & ~ran, kernels)) for of, kernels in groups]
            groups = [part for parts in split for part in parts if part[0]]
        return sorted(groups, key=lambda group: (-group[0].bit_count(), group[1]))

    def holds(self, ranks: int) -> dict[str, set[str]]:
        """Every value that holds on these ranks, by name."""
        found: dict[str, set[str]] = {}
        for circumstances, where in self.circumstances.items():
            if where & ranks:
                for name, value in circumstances:
                    found.setdefault(name, set()).add(value)
        return found


class _Kept:
    def __init__(self) -> None:
        self.ranks: dict[Any, _Rank] = {}
        self.numbers: set[int] = set()
        self.questions: dict[bytes, _Question] = {}
        self.fell: dict[tuple[str, str, bytes], Fell] = {}
        self.fell_on: dict[tuple[str, str, bytes], int] = {}
        self.unread: dict[str, Unread] = {}
        self.world_sizes: set[int] = set()
        self.lines = self.known = self.entries = 0

    def has_room(self) -> bool:
        self.entries += 1
        return self.entries <= MOST_ENTRIES

    def mark(self, ranks: dict[K, int], key: K, rank: _Rank) -> None:
        if key in ranks or self.has_room():
            ranks[key] = ranks.get(key, 0) | rank.bit

    def skip(self, what: str, where: str) -> None:
        if what in self.unread or self.has_room():
            before = self.unread.get(what, Unread(what, printable(where), 0))
            self.unread[what] = before._replace(times=before.times + 1)

    def add_file(self, source: Source, moved: Callable[[int], None]) -> None:
        rank = None if source.rank is None else self.rank(RankLine(source.rank), source)
        circumstances: Circumstances = ()  # of a watched process, for the lines behind its own
        unfinished = False
        try:
            for number, text, whole in lines_of(source.path, moved):
                self.lines += 1
                try:
                    line = read_line(text)
                except UnreadLine as error:
                    unfinished = not whole
                    if whole:
                        self.skip(str(error), f"{source.name}:{number}")
                    continue
                if line is None:
                    self.skip("a line for attnsel explain --from-log", f"{source.name}:{number}")
                    continue
                self.known += 1
                if line.rank is not None or rank is None:
                    rank = self.rank(line, source)
                if line.begins:
                    circumstances = line.circumstances
                if rank is not None:
                    self.add(line._replace(circumstances=line.circumstances or circumstances), rank, source)
        except InvalidInput as error:
            self.skip(error.allowed, source.name)
            unfinished = error.allowed != "no text"
        if unfinished and (rank := rank or self.rank(RankLine(), source)) is not None:
            rank.unfinished = source.name

    def rank(self, line: RankLine, source: Source) -> _Rank | None:
        """Who wrote a line; the file where nobody says which rank it is of. None where there is no room.

        Every process of a world of one calls itself rank 0. Then the file's name tells, as with launchers
        that set no RANK; else the process, as with programs that have nothing to do with each other.
        """
        number, key = line.rank, line.rank if line.rank is not None else source.name
        name = short(key, str, 60)
        if line.world_size == 1 and source.rank is not None:
            number = key = source.rank
            name = str(key)
        elif line.world_size == 1 and line.pid:
            key = f"{line.rank} (process {line.pid} on {line.host})"
            if number in self.numbers and key not in self.ranks:
                number, name = None, key
        if key not in self.ranks and self.has_room():
            self.ranks[key] = _Rank(number, name, 1 << len(self.ranks))
            self.numbers |= set() if number is None else {number}
        return self.ranks.get(key)

    def add(self, line: RankLine, rank: _Rank, source: Source) -> None:
        rank.told = True
        if line.world_size and (line.world_size in self.world_sizes or self.has_room()):
            self.world_sizes.add(line.world_size)
        if line.begins:
            ended = f"the program ended with exit code {line.ended} ({source.name})"
            rank.ended = ended if line.ended else ""
        key = _digest(line) if line.kernel else b""
        if line.kernel and key not in self.questions and self.has_room():
            self.questions[key] = _Question(_words(line), line.source)
        question = self.questions.get(key)
        for said in line.setbacks:  # words and figures differ from rank to rank: the first are kept
            about = said.candidate, said.code, key
            self.mark(self.fell_on, about, rank)
            before = self.fell.get(about)
            if about in self.fell_on and (before is None or "" < line.time < before.time):
                words = question.words if question else ""
                self.fell[about] = Fell(line.time, rank.name, *said, line.kernel, words)
        if question is not None:
            self.mark(question.ran, line.kernel, rank)
            self.mark(question.circumstances, line.circumstances, rank)
            for said in line.setbacks:
                self.mark(question.refused, said.candidate, rank)

    # ---- what follows from it ------------------------------------------------------------------------

    def answer(self, files: int) -> RanksAnswer:
        fell = []
        for about, one in sorted(self.fell.items(), key=lambda item: item[1].time or "~"):
            ranks, count = self.named(self.fell_on[about])
            fell.append(one._replace(ranks=ranks, rank_count=count))
        left_out = self.entries - MOST_ENTRIES
        return RanksAnswer(
            ranks=sum(rank.told for rank in self.ranks.values()),
            world_sizes=tuple(sorted(self.world_sizes)),
            files=files,
            lines=self.lines,
            known=self.known,
            ran=tuple(self.ran()),
            fell_back=tuple(one for one in fell if one.code != WRONG_NUMBERS),
            failed_checks=tuple(one for one in fell if one.code == WRONG_NUMBERS),
            troubles=tuple(self.troubles()),
            unread=(*self.unread.values(), *([Unread(_ROOM, "", left_out)] if left_out > 0 else [])),
        )

    def named(self, ranks: int) -> tuple[str, int]:
        """A set of ranks as 0-16, 18-63, those that only their file names last; and how many there are."""
        rows = [row for row in self.ranks.values() if row.bit & ranks]
        names = sorted(row.name for row in rows if row.number is None)
        if len(names) > 4:
            names[3:] = [f"{len(names) - 3} more files"]
        spans = _spans(row.number for row in rows if row.number is not None)
        return ", ".join([*spans, *names]), len(rows)

    def ran(self) -> Iterable[Ran]:
        found: dict[Any, Ran] = {}
        for key, question in self.questions.items():
            if not question.ran:  # there was no room for it
                continue
            most, *others = question.groups()
            groups = (
                Group(*self.named(most[0]), most[1]),
                *(self.dissent(question, *one, most) for one in others),
            )
            one = Ran(question.words, question.source, groups)
            same: Any = [(*group[:3], tuple(d.name for d in group.differs)) for group in groups]
            same = tuple(same) if others else key
            found[same] = found[same]._replace(alike=found[same].alike + 1) if same in found else one
        return found.values()

    def dissent(
        self, question: _Question, ranks: int, kernels: tuple[str, ...], most: tuple[int, tuple[str, ...]]
    ) -> Group:
        here, there = question.holds(ranks), question.holds(most[0])
        differs = tuple(
            Differs(name, " or ".join(sorted(here[name])), " or ".join(sorted(there[name])))
            for name in here
            if name in there and not here[name] & there[name]
        )
        refused = tuple(name for name, where in question.refused.items() if where & ranks)
        alike = f"ATTNSEL_BACKENDS={','.join(most[1])} on all ranks"
        otherwise = {"watch": _SWITCHES, "log": _MORE}.get(question.source, alike)
        return Group(*self.named(ranks), kernels, differs, refused, _fix(differs, refused, otherwise))

    def troubles(self) -> Iterator[Trouble]:
        by_number = sorted(
            self.ranks.values(), key=lambda row: (row.number is None, row.number or 0, row.name)
        )
        for row in by_number:
            if row.unfinished:
                yield Trouble(row.name, f"cut off or damaged ({row.unfinished})")
            if row.ended:
                yield Trouble(row.name, row.ended)
            if row.number is not None and not row.told and not row.unfinished:
                yield Trouble(row.name, "its file holds no line of attnsel's")
        size = max(self.world_sizes, default=0)
        missing = [number for number in range(min(size, _MOST_MISSING)) if number not in self.numbers]
        if missing:
            alone = ": ATTNSEL_DEBUG_RANKS=all lets every rank speak" if self.numbers == {0} else ""
            yield Trouble(", ".join(_spans(missing)), f"no file or line, and the world size is {size}{alone}")


def _digest(line: RankLine) -> bytes:
    """Of a question. Strides are no part of it: they are a circumstance in which ranks may differ."""
    asked = line.words if line.params is None else {**line.params, "tensors": None}
    text = json.dumps([line.source, asked], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _words(line: RankLine) -> str:
    """A question as reports say it; of one that this version does not understand the plain fields."""
    if line.params is None:
        return line.words
    try:
        return " ".join(params_words(AttentionParams(**line.params)))
    except (ValueError, TypeError, RecursionError):  # InvalidInput, and pydantic's
        plain = {name: value for name, value in line.params.items() if isinstance(value, (str, int, float))}
        return short(" ".join(f"{name}={value}" for name, value in plain.items()), str, 300)


def _spans(numbers: Iterable[int]) -> list[str]:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans]


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
