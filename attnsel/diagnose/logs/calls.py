"""Which findings belong to one call, and how often that call is in the log.

Findings come in the order of the log. Each stream (rank, container) is followed on its own, where lines name
it. Where they do not, ranks that say the same at the same time come out as one call with a count: a message
that an open call has already, and an end that the last call had too, are taken for another rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from attnsel.diagnose.logs.message import (
    NEAR,
    Finding,
    Library,
    LoggedCall,
    Message,
    More,
    gate,
    resolve_ambiguous,
    shape_of,
)
from attnsel.diagnose.logs.parsers import libraries
from attnsel.diagnose.logs.reader import Entry, entries

_MOST = 2000  # different calls; what is beyond is counted
_MOST_IN_CALL = 60
_SHOWN = 5  # line numbers, streams
_BEFORE = 12  # lines between an error and a frame of attention where people paste the error first
ANY = "attention"  # the library of errors that are told only where no other is known


class Gathered(NamedTuple):
    """All calls, the most frequent first; ``machine``: what holds for all; ``left_out``: calls beyond the
    most that are told apart."""

    calls: tuple[LoggedCall, ...]
    machine: tuple[Finding, ...]
    left_out: int


class _Stream:
    """What is known of one stream: open calls by library, and the one that ended last."""

    def __init__(self) -> None:
        self.open: dict[str, list[Finding]] = {}
        self.last: _Key | None = None
        self.frames: dict[str, int] = {}  # by library, line of the last frame of attention in a traceback
        self.waiting: list[tuple[Entry, Finding]] = []  # errors that count if a frame follows soon


_Key = tuple[Finding, ...]


class Calls:
    """Takes findings, gives calls."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._counts: dict[str, tuple[_Key, list[int], list[str], list[int]]] = {}
        self._machine: dict[str, Finding] = {}
        self._left_out = 0
        self._others: list[tuple[Finding, Entry]] = []

    def add(self, entry: Entry, findings: Iterable[Finding]) -> None:
        """What one entry says."""
        stream = self._streams.setdefault(entry.stream, _Stream())
        for finding in findings:
            if finding.kind in ("machine", "setting"):
                if len(self._machine) < _MOST_IN_CALL:
                    self._machine.setdefault(_identity(finding), finding)
            elif finding.kind == "frame":
                stream.frames[finding.library] = entry.number
                late = [(there, told) for there, told in stream.waiting if told.library == finding.library]
                stream.waiting = [one for one in stream.waiting if one not in late]
                for there, told in late:
                    if entry.number - there.number <= min(_BEFORE, told.near):
                        self.add(there, (told._replace(near=0),))
            elif finding.near and entry.number - stream.frames.get(finding.library, -NEAR) >= finding.near:
                stream.waiting = [*stream.waiting, (entry, finding)][-_SHOWN:]
            elif finding.library == ANY:
                self._others = [*self._others, (finding, entry)][-1:]
            elif finding.kind in ("chosen", "error"):
                self._end(stream, finding, entry)
            elif finding.kind == "note" and not stream.open:
                self._count((finding,), entry)
            else:
                self._grow(stream, finding, entry)

    def gathered(self) -> Gathered:
        """What came to an end, and what is still open."""
        for name, stream in self._streams.items():
            for findings in stream.open.values():
                self._count(tuple(findings), Entry(0, name, ""))
            stream.open.clear()
        self._drop_told_twice()
        if not any(f.kind in ("error", "refusal") for counted in self._counts.values() for f in counted[0]):
            for finding, entry in self._others:
                self._count((finding,), entry)
        calls = [
            LoggedCall(findings, count[0], tuple(line for line in lines if line), tuple(streams))
            for findings, count, streams, lines in self._counts.values()
            if count[0] > 0
        ]
        calls.sort(key=lambda call: (-call.times, call.lines[:1]))
        told, machine = resolve_ambiguous(calls, self._machine.values())
        return Gathered(tuple(_one_incident(told)), machine, self._left_out)

    def _drop_told_twice(self) -> None:
        """An error that stands alone and says nothing, beside a call of its library that did not run: people
        paste the traceback first and then what was logged, or ranks speak at the same time."""
        kept = [key for key, counted in self._counts.items() if len(counted[0]) > 1]
        ended = [self._counts[key][0] for key in kept]
        failed = {findings[0].library for findings in ended if findings[-1].kind != "chosen"}
        for key, (findings, *_) in list(self._counts.items()):
            if len(findings) == 1 and findings[0].library in failed and _says_nothing(findings[0]):
                del self._counts[key]

    def _grow(self, stream: _Stream, finding: Finding, entry: Entry) -> None:
        findings = stream.open.setdefault(finding.library, [])
        if finding.kind == "refusal" and not finding.candidates and findings:
            finding = finding._replace(candidates=findings[-1].candidates)
        if any(_identity(finding) == _identity(there) for there in findings):
            return
        if finding.kind == "question" and findings:
            self._count(tuple(findings), entry)
            findings.clear()
        if len(findings) < _MOST_IN_CALL:
            findings.append(finding)

    def _end(self, stream: _Stream, finding: Finding, entry: Entry) -> None:
        findings = stream.open.pop(finding.library, None)
        if findings is None and finding.kind == "error" and stream.open:
            findings = stream.open.popitem()[1]  # a library above it says at last what became of the call
        if findings is None and stream.last is not None:
            last, before = stream.last, stream.last[-1]
            same_library = before.library == finding.library
            if _identity(before) == _identity(finding):
                self._count(last, entry)
                return
            both_chose = before.kind == finding.kind == "chosen" and before.candidates == finding.candidates
            if both_chose and same_library and before.text != finding.text:
                return  # it names the choice once more, in other words
            # An error is of the call that ended last where what was chosen failed, or where the same library
            # tells it once more, in words that say no more.
            again = before.kind == "chosen" or (same_library and _says_nothing(finding))
            if finding.kind == "error" and again:
                self._uncount(last)
                findings = list(last)
        ended = (*(findings or ()), finding)
        self._count(ended, entry)
        stream.last = ended

    def _count(self, findings: _Key, entry: Entry) -> None:
        key = "\x00".join(map(_identity, findings))
        if key not in self._counts:
            if len(self._counts) >= _MOST:
                self._left_out += 1
                return
            self._counts[key] = (findings, [0], [], [])
        _, count, streams, lines = self._counts[key]
        count[0] += 1
        if len(lines) < _SHOWN:
            lines.append(entry.number)
        if entry.stream and entry.stream not in streams and len(streams) < _SHOWN:
            streams.append(entry.stream)

    def _uncount(self, findings: _Key) -> None:
        counted = self._counts.get("\x00".join(map(_identity, findings)))
        if counted is not None:
            counted[1][0] -= 1


def _one_incident(calls: Iterable[LoggedCall]) -> Iterator[LoggedCall]:
    """Calls whose messages say one and the same in other words are one: a library and the one below it, or
    both lines of an error."""
    seen: dict[tuple[object, ...], LoggedCall] = {}
    for call in calls:
        facts = sorted({**call.params, **call.environment}.items(), key=lambda item: item[0])
        key = (call.library, str(facts), *(f.known + f.fix or f.text for f in call.findings))
        first = seen.get(key)
        if first is None:
            seen[key] = call
        else:
            lines = tuple(sorted({*first.lines, *call.lines}))[:_SHOWN]
            seen[key] = first._replace(times=max(first.times, call.times), lines=lines)
    yield from seen.values()


def _says_nothing(finding: Finding) -> bool:
    """Whether a message is an error without any cause or fact."""
    facts = finding.params or finding.candidates or finding.codes or finding.known or finding.variants
    return finding.kind == "error" and not facts


def _identity(finding: Finding) -> str:
    """Equal for findings that say the same."""
    facts = sorted({**finding.params, **finding.environment}.items(), key=lambda item: item[0])
    return f"{finding.library}|{finding.kind}|{finding.text}|{finding.candidates}|{facts}"


def gather(lines: Iterable[str]) -> Gathered:
    """The calls in a log's lines, which may be any number."""
    known, calls = libraries(), Calls()

    @lru_cache(maxsize=4096)
    def likely(shape: str) -> tuple[tuple[Library, tuple[Message, ...]], ...]:
        return tuple((library, among) for library in known if (among := library.likely(shape)))

    def more(line: str) -> More:
        found = (library.more(line, among) for library, among in likely(shape_of(line)))
        return next((how for how in found if how), "")

    @lru_cache(maxsize=4096)  # ranks and steps print the same thing over and over
    def findings(text: str) -> tuple[Finding, ...]:
        """Of every library; what two of them print is the first one's."""
        found: list[Finding] = []
        every = likely(shape_of(text))
        for one in (one for library, among in every for one in library.findings(text, among)):
            if not any(one.text in there.text and one.library != there.library for there in found):
                found.append(one)
        return tuple(found)

    for entry in entries(lines, gate(known), more):
        calls.add(entry, findings(entry.text))
    return calls.gathered()
