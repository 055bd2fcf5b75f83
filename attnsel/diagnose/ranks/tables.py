"""What is kept of all lines, however many there are: every table has a bound, and what it drops is counted.

Ranks are numbered in the order in which they are met, so that a set of ranks is one integer.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from attnsel.diagnose.ranks.records import (
    NOTHING,
    Broken,
    Choice,
    Process,
    Record,
    Setback,
    UnknownSchema,
    in_words,
    read_line,
)
from attnsel.diagnose.ranks.sources import Line, Source
from attnsel.errors import InvalidInput, printable, short
from attnsel.params import AttentionParams
from attnsel.report import params_words

MOST_RANKS = 16384
MOST_QUESTIONS = 2048
MOST_KERNELS = 16  # of one question
MOST_MACHINES = 1024
MOST_SETBACKS = 512
_MOST_PLACES = 5
_MOST_SCHEMAS = 32
_UNKNOWN_MACHINE = -1


@dataclass(slots=True)
class RankRow:
    """One rank. ``number`` None: only its file is known."""

    number: int | None
    name: str
    hosts: set[str] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    lines: int = 0
    begun: int = 0  # watched processes whose line was read
    ended: int | None = None
    machine: int = _UNKNOWN_MACHINE


@dataclass(slots=True)
class KernelRow:
    """One kernel for one question. Sets of ranks are integers, a bit for each."""

    ranks: int = 0
    left: int = 0  # ranks that it refused or served wrongly
    calls: int = 0
    lines: int = 0
    slow: int = 0
    why: str = ""
    fix: str = ""
    places: set[str] = field(default_factory=set)
    machines: dict[int, int] = field(default_factory=dict)  # circumstances: ranks


@dataclass(slots=True)
class QuestionRow:
    kind: str
    words: str
    kernels: dict[str, KernelRow] = field(default_factory=dict)


@dataclass(slots=True)
class SetbackRow:
    """One fall-back or failed self-check. ``first``: when and on which rank it was seen first."""

    setback: Setback
    question: str
    then: str
    first_time: str
    first_rank: int
    ranks: int = 0
    lines: int = 0


@dataclass(slots=True)
class _File:
    """What its earlier lines say of the later ones."""

    source: Source
    rank: int | None = None  # the row of the rank
    machine: int = _UNKNOWN_MACHINE
    told: bool = False  # a line of attnsel's was read


class Tables:
    def __init__(self) -> None:
        self.ranks: list[RankRow] = []
        self.questions: dict[bytes | str, QuestionRow] = {}
        self.machines: list[dict[str, str]] = []
        self.setbacks: dict[tuple[str, str, bytes | str], SetbackRow] = {}
        self.world_sizes: Counter[int] = Counter()
        self.lines = self.known = self.broken = self.foreign = 0
        self.broken_places: list[str] = []
        self.foreign_files: list[str] = []
        self.unknown: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._rank_rows: dict[Any, int] = {}
        self._machine_rows: dict[bytes, int] = {}
        self._file: _File | None = None
        self._foreign_before = 0

    # ---- one file -------------------------------------------------------------------------------------

    def begin(self, source: Source) -> None:
        self._file = _File(source)
        self._foreign_before = self.foreign
        if source.rank is not None:
            self._file.rank = self._rank(Process(source.rank))

    def add(self, line: Line) -> None:
        """Count a line, and keep what it says."""
        assert self._file is not None
        self.lines += 1
        if line.text is None:
            self._is_broken(line, "longer than is read")
            return
        try:
            record = read_line(line.text)
        except Broken as error:
            if line.whole:
                self._is_broken(line, str(error))
            else:
                self.is_cut()
        except UnknownSchema as error:
            schema = str(error)
            self.unknown[
                schema if schema in self.unknown or len(self.unknown) < _MOST_SCHEMAS else "others"
            ] += 1
        else:
            if record is None:
                self.foreign += 1
            else:
                self.known += 1
                self._keep(record)

    def is_cut(self) -> None:
        """The file ends in the middle of a line."""
        assert self._file is not None
        row = self._rank_of_file()
        if row is not None:
            self.ranks[row].cut.add(self._file.source.name)

    def end(self) -> None:
        assert self._file is not None
        if self.foreign > self._foreign_before and len(self.foreign_files) < _MOST_PLACES:
            self.foreign_files.append(self._file.source.name)

    def _is_broken(self, line: Line, why: str) -> None:
        assert self._file is not None
        self.broken += 1
        if len(self.broken_places) < _MOST_PLACES:
            self.broken_places.append(f"{printable(self._file.source.name)}:{line.number} ({why})")

    # ---- one line -------------------------------------------------------------------------------------

    def _keep(self, record: Record) -> None:
        assert self._file is not None
        file = self._file
        process = record.process
        if process.world_size:
            self.world_sizes[process.world_size] += 1
        of_file = process.rank is None and not process.host
        row = self._rank_of_file() if of_file else self._rank(process)
        if row is None:
            return
        if process.rank is not None or file.rank is None:
            file.rank = row
        self._meet(self.ranks[row], process)
        machine = file.machine
        if record.circumstances is not None:
            tensors = record.choice.params.get("tensors") if record.choice and record.choice.params else None
            machine = self._machine({**record.circumstances, "tensors": tensors})
            self.ranks[row].machine = machine
        if record.begins:
            file.machine = machine
            self.ranks[row].begun += 1
            self.ranks[row].ended = record.ended
        if record.choice is not None:
            self._choose(record.choice, row, machine, process.time)
        if record.setback is not None:
            self._set_back(record.setback, "", "", row, process.time, "")

    def _meet(self, row: RankRow, process: Process) -> None:
        assert self._file is not None
        row.lines += 1
        for held, value in ((row.hosts, process.host), (row.files, self._file.source.name)):
            if value and len(held) < _MOST_PLACES:
                held.add(value)
        if process.pid and len(row.pids) < _MOST_PLACES:
            row.pids.add(process.pid)

    def _rank_of_file(self) -> int | None:
        assert self._file is not None
        if self._file.rank is None:
            self._file.rank = self._rank(Process())
        return self._file.rank

    def _rank(self, process: Process) -> int | None:
        """The row of a rank; of its file where nobody says which rank it is."""
        key, number = self._key(process)
        row = self._rank_rows.get(key)
        if row is None:
            if len(self.ranks) >= MOST_RANKS:
                self.dropped["lines of further ranks"] += 1
                return None
            row = self._rank_rows[key] = len(self.ranks)
            taken = any(other.number == number for other in self.ranks) if isinstance(key, tuple) else False
            if taken:
                self.ranks.append(RankRow(None, f"{number} (process {process.pid} on {process.host})"))
            else:
                self.ranks.append(RankRow(number, short(key, str, 60) if number is None else str(number)))
        return row

    def _key(self, process: Process) -> tuple[Any, int | None]:
        """What tells a rank from others, and its number.

        Every process of a world of one calls itself rank 0. Then the file's name tells, as with launchers
        that set no RANK; else the process, as with programs that have nothing to do with each other.
        """
        assert self._file is not None
        source = self._file.source
        if process.world_size == 1 and source.rank is not None:
            return source.rank, source.rank
        if process.world_size == 1 and process.pid:
            return (process.rank, process.host, process.pid), process.rank
        return (source.name, None) if process.rank is None else (process.rank, process.rank)

    def _machine(self, held: dict[str, Any]) -> int:
        key = _digest(held)
        row = self._machine_rows.get(key)
        if row is None:
            if len(self.machines) >= MOST_MACHINES:
                self.dropped["further circumstances (versions, policies, strides)"] += 1
                return _UNKNOWN_MACHINE
            row = self._machine_rows[key] = len(self.machines)
            self.machines.append(in_words(held))
        return row

    def _choose(self, choice: Choice, row: int, machine: int, time: str) -> None:
        key, question = self._question(choice)
        for setback in choice.setbacks:
            self._set_back(setback, key, question.words if question else "", row, time, choice.kernel)
            if question is not None and (failed := self._kernel(question, setback.candidate)) is not None:
                failed.left |= 1 << row
        if question is None or (kernel := self._kernel(question, choice.kernel)) is None:
            return
        mine = 1 << row
        kernel.ranks |= mine
        kernel.calls += choice.calls
        kernel.lines += 1
        if machine in kernel.machines or len(kernel.machines) < MOST_KERNELS:
            kernel.machines[machine] = kernel.machines.get(machine, 0) | mine
        else:
            self.dropped["further circumstances (versions, policies, strides)"] += 1
        if choice.where and len(kernel.places) < _MOST_PLACES:
            kernel.places.add(choice.where)
        slow = choice.slow and (choice.kind != "watch" or self._has_gpu(machine))
        if slow or choice.kernel == NOTHING:
            kernel.slow |= mine
        kernel.why, kernel.fix = kernel.why or choice.why, kernel.fix or choice.fix

    def _has_gpu(self, machine: int) -> bool:
        return machine != _UNKNOWN_MACHINE and "GPU" in self.machines[machine]

    def _question(self, choice: Choice) -> tuple[bytes | str, QuestionRow | None]:
        """Strides are no part of it: they are a circumstance in which ranks may differ."""
        if choice.params is None:
            key: bytes | str = f"{choice.kind}: {choice.words}"
        else:
            asked = {name: value for name, value in choice.params.items() if name != "tensors"}
            key = _digest({"kind": choice.kind, "params": asked})
        row = self.questions.get(key)
        if row is None:
            if len(self.questions) >= MOST_QUESTIONS:
                self.dropped["lines of further questions"] += 1
                return key, None
            words = choice.words if choice.params is None else words_of(choice.params)
            row = self.questions[key] = QuestionRow(choice.kind, words)
        return key, row

    def _kernel(self, question: QuestionRow, name: str) -> KernelRow | None:
        row = question.kernels.get(name)
        if row is None:
            if len(question.kernels) >= MOST_KERNELS:
                self.dropped["lines of further kernels"] += 1
                return None
            row = question.kernels[name] = KernelRow()
        return row

    def _set_back(
        self, setback: Setback, key: bytes | str, question: str, rank: int, time: str, then: str
    ) -> None:
        # Words and figures differ from rank to rank: the first are kept.
        about = (setback.candidate, setback.code, key)
        row = self.setbacks.get(about)
        if row is None:
            if len(self.setbacks) >= MOST_SETBACKS:
                self.dropped["further fall-backs"] += 1
                return
            row = self.setbacks[about] = SetbackRow(setback, question, then, time, rank)
        elif time and time < row.first_time:
            row.first_time, row.first_rank, row.setback, row.then = time, rank, setback, then
        row.ranks |= 1 << rank
        row.lines += 1

    # ---- sets of ranks --------------------------------------------------------------------------------

    def rows_of(self, ranks: int) -> Iterator[RankRow]:
        """The ranks of a set, by number, those without one last."""
        rows = [row for place, row in enumerate(self.ranks) if ranks >> place & 1]
        yield from sorted(rows, key=lambda row: (row.number is None, row.number or 0, row.name))


def _digest(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def words_of(params: dict[str, Any]) -> str:
    """A question as reports say it; of one that this version does not understand the plain fields."""
    try:
        return " ".join(params_words(AttentionParams(**params)))
    except (InvalidInput, ValidationError, TypeError, ValueError, RecursionError):
        plain = {name: value for name, value in params.items() if isinstance(value, (str, int, float))}
        return short(" ".join(f"{name}={value}" for name, value in plain.items()), str, 300)
