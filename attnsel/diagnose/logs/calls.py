"""Which findings belong to one call, how often that call is in the log, and what its messages mean there.

Findings come in the order of the log. Each stream (rank, container) is followed on its own, where lines name
it. Where they do not, ranks that say the same at the same time come out as one call with a count: a message
that an open call has already, and an end that the last call had too, are taken for another rank's.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import methodcaller
from typing import Any, NamedTuple

from attnsel.diagnose.logs.message import Finding, Variant, elsewhere, for_this_log, harmless
from attnsel.diagnose.logs.reader import Entry, entries
from attnsel.diagnose.logs.vocabulary import gate, likely, more
from attnsel.diagnose.text_files import latin, shape_of
from attnsel.environment import COMPONENTS, Device, describe_device
from attnsel.environment.mentions import the_card
from attnsel.environment.versions import Version
from attnsel.environment.wheels import unlike

SEEN = "seen"  # the library of findings that only say whose code a log shows (``text``), and of exceptions

_Key = tuple[Finding, ...]
_MOST, _MOST_IN_CALL = 2000, 60  # different calls (what is beyond is counted), findings of one
_SHOWN = 5  # line numbers, streams
_BEFORE, _CHAIN = 12, 150  # lines: of an error pasted before its frame, of one raised from another
_LONGEST_MIXED = 2000  # characters of a line that is read between other scripts too: longer ones cost seconds
_NONE = -1000  # the line of a frame that is not there
_EXCLUDED = {"cuda": "mac", "WSL": "windows"}  # no Mac has a card of NVIDIA's, and WSL is Linux
_ABSENT = ("No module named", "cannot import name", "HTTP Error 40")  # of what is only tried first
_NO_ERROR = "no line of an error"  # what a note says where warnings are all that a log has
ANY = "attention"  # the library of errors that are told only where no other is known


class LoggedCall(NamedTuple):
    """One call of a log, as often as it is in it.

    ``findings``: its messages, each once, in their order. ``lines``: the first few line numbers at which it
    ends. ``ranks``: the streams (ranks, containers) in which it was seen, as the log names them.
    """

    findings: tuple[Finding, ...]
    times: int
    lines: tuple[int, ...]
    ranks: tuple[str, ...] = ()

    @property
    def library(self) -> str:
        """Whose call it is: the library that was asked first."""
        return self.findings[0].library

    @property
    def by_weight(self) -> list[Finding]:
        """What another library raised at last comes first, last what takes no mask or needs no repair."""
        told = sorted(self.findings, key=lambda f: f.kind != "error" or f.library == self.library)
        return sorted(told, key=lambda f: (harmless(f.fix), "takes no mask tensor" in f.known))

    @property
    def params(self) -> dict[str, Any]:
        """The stated fields; what is said later wins."""
        return _merged(finding.params for finding in self.findings)

    @property
    def environment(self) -> dict[str, Any]:
        return _merged(finding.environment for finding in self.findings)

    @property
    def supposed(self) -> dict[str, Any]:
        """What must be so and is not stated; of releases the oldest: each is the newest that says so."""
        stated = self.params.keys() | self.environment.keys()
        found: dict[str, Any] = {}
        for name, said in (item for finding in self.findings for item in finding.supposed.items()):
            if name not in found or (name in COMPONENTS and Version.parse(said) < Version.parse(found[name])):
                found[name] = said
        return {name: value for name, value in found.items() if name not in stated}

    @property
    def refused(self) -> tuple[str, ...]:
        """The candidates that messages refuse."""
        against = (f for f in self.findings if f.kind in ("refusal", "error"))
        return tuple(dict.fromkeys(name for finding in against for name in finding.candidates))

    @property
    def chosen(self) -> tuple[str, ...]:
        """The candidates that the log says were chosen."""
        return tuple(name for f in self.findings if f.kind == "chosen" for name in f.candidates)

    @property
    def outcome(self) -> Finding | None:
        """The message that it ended with."""
        return next((f for f in reversed(self.findings) if f.kind in ("error", "chosen")), None)


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


class Gathered(NamedTuple):
    """All calls, the most frequent first; ``machine``: what holds for all; ``left_out``: calls beyond the
    most that are told apart; ``unread``: lines that may say something, and are not read."""

    calls: tuple[LoggedCall, ...]
    machine: tuple[Finding, ...]
    left_out: int
    unread: int = 0


class _Stream:
    """What is known of one stream: open calls by library, and the one that ended last."""

    def __init__(self) -> None:
        self.open: dict[str, list[Finding]] = {}
        self.last: _Key | None = None
        self.frames: dict[str, int] = {}  # by library, line of the last frame of attention in a traceback
        self.waiting: list[tuple[Entry, Finding]] = []  # errors that count if a frame follows soon


class Calls:
    """Takes findings, gives calls."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._counts: dict[str, LoggedCall] = {}
        self._machine: dict[str, Finding] = {}
        self._left_out = 0
        self._other: dict[bool, list[tuple[Finding, Entry]]] = {False: [], True: []}  # last ones of ANY
        self._raised: tuple[Finding, Entry] | None = None  # the last exception that no message is about

    def add(self, entry: Entry, findings: Sequence[Finding]) -> None:
        """What one entry says."""
        stream = self._streams.setdefault(entry.stream, _Stream())
        told = not all(map(_may_be_none, findings))
        for finding in findings:
            if finding.library == SEEN and finding.kind == "note":
                known = "{UNKNOWN}: " + finding.text
                unknown = finding._replace(kind="error", known=known, fix="{TRY_ANOTHER}")
                self._raised = self._raised if told else (unknown._replace(library=ANY), entry)
            elif finding.kind in ("machine", "setting"):
                if len(self._machine) < _MOST_IN_CALL:
                    self._machine.setdefault(_identity(finding), finding)
            elif finding.kind == "frame":
                stream.frames[finding.library] = entry.number
                late = [(there, one) for there, one in stream.waiting if one.library == finding.library]
                stream.waiting = [one for one in stream.waiting if one not in late]
                for there, one in late:
                    if entry.number - there.number <= min(_BEFORE, one.near):
                        self.add(there, (one._replace(near=0),))
            elif finding.near and entry.number - stream.frames.get(finding.library, _NONE) >= finding.near:
                stream.waiting = [*stream.waiting, (entry, finding)][-_SHOWN:]
            elif finding.library == ANY:
                self._other[told] = [(finding, entry), *self._other[told]][:_SHOWN]
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
        told = self._counts.values()
        machine = _with_card([*self._machine.values()], [*told])
        for unknown in filter(None, (*self._other[False], self._raised, *self._other[True])):
            kinds = {one.kind for call in _with_meanings([*told], machine) for one in call.findings}
            there = not kinds if unknown in self._other[True] else kinds or unknown is not self._raised
            # What a shell says of an abort comes of the refusal above it, if there is one.
            tells = {"error", "refusal"} if "(core dumped)" in unknown[0].text else {"error"}
            if kinds.isdisjoint(tells) and there:
                self._count(unknown[:1], unknown[1])
        calls = sorted((c for c in told if c.times), key=lambda c: (c.library != ANY, -c.times, c.lines[:1]))
        # What ended nothing stands last, and behind it that no line is an error.
        calls.sort(
            key=lambda c: (c.findings[-1].kind in ("chosen", "note"), c.findings[-1].text == _NO_ERROR)
        )
        meant = tuple(_notes_behind_errors(_one_incident(_with_meanings(calls, machine))))
        return Gathered(meant, tuple(one for one in machine if one.library != SEEN), self._left_out)

    def _drop_told_twice(self) -> None:
        """An error that stands alone and says nothing, beside a call of its library that did not run: people
        paste the traceback first and then what was logged, or ranks speak at the same time."""
        several = [call for call in self._counts.values() if len(call.findings) > 1]
        failed = {call.library for call in several if call.findings[-1].kind != "chosen"}
        for key, call in list(self._counts.items()):
            if len(call.findings) == 1 and call.library in failed and _says_nothing(call.findings[0]):
                del self._counts[key]

    def _grow(self, stream: _Stream, finding: Finding, entry: Entry) -> None:
        findings = stream.open.setdefault(finding.library, [])
        if finding.kind == "refusal" and not finding.candidates and findings:
            finding = finding._replace(candidates=findings[-1].candidates)
        if any(_identity(finding) == _identity(there) for there in findings):
            return
        if finding.kind == "question" and findings and findings[0].kind == "question":
            self._count(tuple(findings), entry)
            findings.clear()
        if len(findings) < _MOST_IN_CALL:  # refusals that stand above a question, and alone, are its own
            findings.insert(0 if finding.kind == "question" else len(findings), finding)

    def _end(self, stream: _Stream, finding: Finding, entry: Entry) -> None:
        caught = entry.number - stream.frames.pop("caught", _NONE) < _CHAIN  # the program did, and went on
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
            chained = entry.number - stream.frames.get(SEEN, _NONE) < _CHAIN and before.kind == "error"
            caught = caught and before.kind == "error" and any(word in before.text for word in _ABSENT)
            again = before.kind == "chosen" or (same_library and _says_nothing(finding)) or chained or caught
            if finding.kind == "error" and again:
                key = "\x00".join(map(_identity, last))
                if call := self._counts.get(key):
                    self._counts[key] = call._replace(times=call.times - 1)
                findings = [] if caught else list(last)
        ended = (*(findings or ()), finding)
        self._count(ended, entry)
        stream.last = ended

    def _count(self, findings: _Key, entry: Entry) -> None:
        key = "\x00".join(map(_identity, findings))
        if key not in self._counts and len(self._counts) >= _MOST:
            self._left_out += 1
            return
        call = self._counts.get(key) or LoggedCall(findings, 0, ())
        lines = (*call.lines, *([entry.number] if entry.number else []))
        ranks = dict.fromkeys((*call.ranks, *([entry.stream] if entry.stream else [])))
        self._counts[key] = LoggedCall(findings, call.times + 1, lines[:_SHOWN], tuple(ranks)[:_SHOWN])


def _with_card(machine: list[Finding], calls: list[LoggedCall]) -> tuple[Finding, ...]:
    """The card that people name, where no program prints one, and all that they name is one."""
    named = [name for one in machine for name in one.environment.get("named", ())]
    rest = tuple(one for one in machine if "named" not in one.environment)
    printed = (*rest, *(finding for call in calls for finding in call.findings))
    cards = [str(one.environment["gpu"]) for one in printed if "gpu" in one.environment]
    bare = named and all(card.startswith("sm") for card in cards)  # architectures, and no names
    card = the_card([*cards, *named]) if bare else None
    found = Finding("the machine", "machine", f"named {card}", environment={"gpu": card})
    return (found, *rest) if card else rest


def _with_meanings(calls: list[LoggedCall], machine: Iterable[Finding]) -> Iterator[LoggedCall]:
    """Calls with one meaning for each message, by the whole log: what is installed is pasted anywhere."""
    told = [*machine, *(finding for call in calls for finding in call.findings)]
    environment = _merged(finding.environment for finding in told)
    card = the_card(one.environment["gpu"] for one in told if "gpu" in one.environment)
    device = describe_device(card) if card else Device()  # of several nobody says which one it was
    arch, kind = device.arch or None, device.type if card else ""
    missing = environment.get("missing") or ()
    absent = [missing] if isinstance(missing, str) else missing
    seen = {kind, *absent, *(finding.text for finding in told if finding.library == SEEN)}
    loud = (one for one in told if one.kind not in ("machine", "setting", "chosen"))
    fixes = [v.fix if one.kind == "note" else "" for one in loud for v in one.variants or (one,)]
    seen |= {"warnings alone"} if len(fixes) > 1 and all(map(harmless, fixes)) else set()
    holds = methodcaller("holds", arch, environment, seen - {_EXCLUDED.get(one) for one in seen})
    apart = unlike(environment)
    for call in calls:
        if findings := tuple(filter(None, (_meant(one, arch, holds, apart) for one in call.findings))):
            yield call._replace(findings=findings)


def _meant(said: Finding, arch: int | None, holds: Callable[[Variant], bool], apart: str) -> Finding | None:
    """The meaning that holds: several joined where nothing tells them apart. ``apart``: what no build is."""
    meanings = said.variants or (Variant(said.known, said.fix, said.codes),)
    wheel = any(one.fix.startswith(("{REBUILD}", "{WHEEL}")) for one in meanings)  # of flash-attn
    there = (one for library, one in elsewhere() if library in (said.library, wheel and "flash_attn"))
    platform = [*filter(holds, there)][:1] if said.kind in ("error", "refusal") else []
    if not (holding := [*filter(holds, meanings)]):
        return said.instead and _meant(said.instead, arch, holds, apart)
    holding = platform or holding
    chosen = [one for one in holding if one.seen or one.at or (one.archs and arch is not None)][:1] or holding
    known = for_this_log("; or ".join(dict.fromkeys(one.known for one in chosen if one.known)), holds)
    return said._replace(
        known=f"{known}; {apart}" if apart and ("built for" in known or "for another" in known) else known,
        fix=for_this_log("; or ".join(dict.fromkeys(one.fix for one in chosen)), holds),
        codes=tuple(dict.fromkeys(code for one in chosen for code in one.codes)),
        variants=(),
    )


def _one_incident(calls: Iterable[LoggedCall]) -> list[LoggedCall]:
    """Calls that say the same are one: a library and the one below it, lines or readings of one error."""
    seen: dict[tuple[object, ...], LoggedCall] = {}
    for call in calls:
        ends = [one.findings[-1] for one in seen.values() if one.lines == call.lines and call.lines]
        if any(e.kind == "error" and ((t := call.findings[-1].text) in e.text or e.text in t) for e in ends):
            continue  # the same words, read by two libraries
        facts = sorted({**call.params, **call.environment}.items(), key=lambda item: item[0])
        told = [one for one in call.findings if one.kind != "chosen"] or call.findings
        key = (str(facts), *(f.known + f.fix or call.library + f.text for f in told))
        if (first := seen.setdefault(key, call)) is not call:
            lines = tuple(sorted({*first.lines, *call.lines}))[:_SHOWN]
            whole = max(first, call, key=lambda one: len(one.findings))  # with what ran, where one says it
            seen[key] = whole._replace(times=max(first.times, call.times), lines=lines)
    return [*seen.values()]


def _notes_behind_errors(calls: list[LoggedCall]) -> list[LoggedCall]:
    """Notes and choices stand below an error or a call's refusals, and choices below any refusal."""
    ends = {"question": ("error", "refusal")}
    failed = [c for c in calls if c.findings[-1].kind in ends.get(c.findings[0].kind, ("error",))]
    aside = {"note", "chosen"} if failed else {"chosen"}
    others = [call for call in calls if not {one.kind for one in call.findings} <= aside]
    first = failed or [c for c in others if any(one.kind in ("refusal", "note") for one in c.findings)]
    if not first:
        return calls
    told = (one for call in calls if call not in others for one in call.findings)
    said = [Finding(one.library, "note", one.text, source=one.source) for one in told]
    others[others.index(first[0])] = first[0]._replace(findings=(*first[0].findings, *said))
    return others


def _tells(finding: Finding) -> bool:
    """Whether it says what happened, by more than where, and more than any error of attention says."""
    return finding.kind not in ("machine", "setting", "frame") and finding.library not in (ANY, SEEN)


def _may_be_none(finding: Finding) -> bool:
    """Whether the rest of the log decides if it is meant at all."""
    return not _tells(finding) or finding.near > 0 or any(one.seen for one in finding.variants[-1:])


def _says_nothing(finding: Finding) -> bool:
    """Whether a message is an error without any cause or fact."""
    elsewhere = finding.variants and finding.variants[-1].known  # the meaning where the log decides nothing
    facts = finding.params or finding.candidates or finding.codes or finding.known or elsewhere
    return finding.kind in ("error", "question") and not facts


def _identity(finding: Finding) -> str:
    """Equal for findings that say the same."""
    facts = sorted({**finding.params, **finding.environment}.items(), key=lambda item: item[0])
    return f"{finding.library}|{finding.kind}|{finding.text}|{finding.candidates}|{facts}"


# Texts that are read at a log's beginning and end, 1 to 3 ms each, and of one shape that says nothing.
FIRST_TEXTS, LAST_TEXTS, ENOUGH = 450, 200, 20


def gather(lines: Iterable[str]) -> Gathered:
    """The calls in a log's lines, which may be any number."""
    calls = Calls()

    @lru_cache(maxsize=4096)  # ranks and steps print the same thing over and over
    def findings(text: str) -> tuple[Finding, ...]:
        """Of every library; what two of them print is the first one's."""
        found: list[Finding] = []
        for library, among in likely(shape_of(text)):
            others = [one.text for one in found if one.library != library.name and not _may_be_none(one)]
            said = library.findings(text, among)
            found += [one for one in said if not any(one.text in other for other in others)]
        return tuple(found)

    def take(entry: Entry) -> bool:
        found = findings(entry.text)
        if entry.below and len(told) < 500 and not any(map(_tells, found)):  # a terminal wraps lines
            both = findings(f"{entry.text} {entry.below.strip()}")
            if any(map(_tells, both)) and not any(map(_tells, findings(entry.below))):
                found = both
        if len(entry.text) < _LONGEST_MIXED and not entry.text.isascii():
            silent, parts = not any(map(_tells, found)), map(findings, latin(entry.text))
            said = (one for part in parts for one in part if one not in found)
            found += tuple(one for one in said if one.library == SEEN or (silent and _tells(one)))
        if found:
            calls.add(entry, found)
        return bool(found)

    told, last, unread, quiet = set[int](), deque[Entry](maxlen=LAST_TEXTS), 0, Counter[int]()
    for entry in entries(lines, gate(), more):
        text, shape = hash(entry.text), hash(shape_of(entry.text))
        if quiet[shape] >= ENOUGH:
            continue
        if text not in told and len(told) >= FIRST_TEXTS:
            unread += len(last) == LAST_TEXTS
            last.append(entry)
        else:
            told.add(text)
            quiet[shape] += not take(entry)
    for entry in last:
        take(entry)
    return calls.gathered()._replace(unread=unread)
