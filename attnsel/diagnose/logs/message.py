r"""How a library's message is declared, and how a text is held against the declarations.

A parser is a module in ``attnsel/diagnose/logs/parsers/`` with ``LIBRARIES``, and a file of the same name in
``data/``, where a message is a row (``declared``). To teach a message, add one: its pattern, such as
``Invalid attention frobnication: head size (?P<head_dim_qk>\d+)``, what it does, the cause and the fix.

Groups of the pattern named as a field of AttentionParams, as a component of an environment or ``gpu`` are
what the message states, and ``major`` and ``minor`` its GPU's compute capability. What needs more than that
is a function (``read``); what has several meanings is a ``Message`` in the module, with its ``variants``.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from attnsel.base.records import json_fields
from attnsel.base.rows import read_rows
from attnsel.diagnose.scrub import scrub
from attnsel.environment import COMPONENTS, describe_device
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput, printable, short
from attnsel.params import AttentionParams

# --------------------------------------------------------------------------------------------------------
# The values: what one message in a log says (``Finding``), and what one call comes to (``LoggedCall``).


Kind = Literal["question", "refusal", "chosen", "error", "note", "frame", "machine", "setting"]
"""What a message does:

- ``question``: describes a call before anything is chosen (TransformerEngine's configuration). Begins a call.
- ``refusal``: says why a kernel is not taken. The call goes on. Without candidates it is about those of the
  refusal before it (PyTorch's reasons stand below "Flash attention kernel not used because:").
- ``chosen``: names what runs. Ends a call; an error that follows belongs to it.
- ``error``: what is raised, or what a user is told at last. Ends a call.
- ``note``: worth telling and no refusal: a slow path, a copy. A call of its own where no call is open.
- ``frame``: a line of a traceback inside attention: it says only that an error below it is about attention.
- ``machine``: a GPU, versions. ``setting``: a variable or an argument that decides. They hold for all calls
  of the log, wherever they stand: people paste what is installed above or below an error.
"""

NOTHING: Mapping[str, Any] = MappingProxyType({})


@json_fields("library", "kind", "text", "candidates", "source")
class Finding(NamedTuple):
    """What one message says. Every text in it is scrubbed.

    ``library``: whose message it is, as its makers write it. ``text``: the message, shortened. ``params``:
    fields of AttentionParams, and ``environment``: ``gpu`` and components of Environment.describe, that are
    stated. ``supposed``: the same two together for what must be so for this message, where it is not stated
    (the newest release that prints it). ``candidates``: attnsel's names of the kernels it is about.
    ``codes``: rules that are the cause. ``known``: the cause in a sentence, where no rule computes it, and
    ``link``, where that is written. ``fix``: what to change, in that library's own API. ``unread``: what
    stands there and attnsel has no field for. ``source``: where the message is written: file and releases.
    ``near``: an error of many causes (memory, a failed launch), which counts only below a frame of attention of
    the same library, and no more lines below it.
    ``variants``: causes of which the rest of the log decides (attnsel/diagnose/logs/message.py).
    """

    library: str
    kind: Kind
    text: str
    params: Mapping[str, Any] = NOTHING
    environment: Mapping[str, Any] = NOTHING
    supposed: Mapping[str, Any] = NOTHING
    candidates: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    known: str = ""
    link: str = ""
    fix: str = ""
    unread: tuple[str, ...] = ()
    source: str = ""
    near: int = 0
    variants: tuple[Any, ...] = ()


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
        for name, value in (item for finding in self.findings for item in finding.supposed.items()):
            if name not in found or (
                name in COMPONENTS and Version.parse(value) < Version.parse(found[name])
            ):
                found[name] = value
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


def _merged(parts: Any) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


Facts = Mapping[str, Any]
"""Fields of a Finding that a message gives beside what is declared."""

Reader = Callable[[re.Match[str]], "Facts | None"]

WORDS = (
    "attention",
    "attn",
    "sdp",
    "cudnn",
    "kernel",
    "backend",
    "flash",
    "triton",
    "nvte",
    "memory",
    "torch",
    "cuda",
    "nvidia",
    "head",
    "mask",
    "stride",
    "tensor",
    "transformer",
    "gpu",
    "support",
    "multiple of",
    "running with",
    "disabling",
)
"""What most messages have one of. A line with none of these, in any case, and with none of the quick texts
that have none of them either, is passed over unread."""

NEAR = 150  # lines between a frame of attention and the error that ends its traceback
_LONGEST_SHOWN = 300
_LONGEST_WORD = 400

More = Literal["", "indented", "brackets"]


@dataclass(frozen=True)
class Message:
    """One text of a library's.

    ``quick``: stands in the text literally, in this case; of several one. ``pattern``: searched in the text;
    without one ``quick`` is enough. Where ``quick`` is left out it is taken from the pattern. ``more``: which
    of the lines that follow belong to it: those that are "indented", or all until its "brackets" are closed;
    the pattern is searched in all of them, joined by line ends. ``read``: from the match, fields of Finding
    beside those declared and words of the sentences; None where it is not meant after all. ``variants``:
    causes of which the rest of the log decides, in the place of ``known``. ``fix``: of several ways one is
    enough. The others: see Finding.

    Words of ``known`` and ``fix`` may come from the message: ``{head_dim_qk}`` is the group of that name, or
    what ``read`` gives under it.
    """

    quick: str | tuple[str, ...] = ""
    pattern: str = ""
    kind: Kind = "refusal"
    more: More = ""
    read: Reader | None = None
    params: Facts = field(default_factory=dict)
    environment: Facts = field(default_factory=dict)
    supposed: Facts = field(default_factory=dict)
    candidates: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    known: str = ""
    link: str = ""
    fix: str | tuple[str, ...] = ()
    variants: tuple[Variant, ...] = ()
    source: str = ""
    near: int = 0
    quicks: tuple[str, ...] = field(init=False)
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        quicks = (self.quick,) if isinstance(self.quick, str) else self.quick
        if not self.quick:
            quicks = tuple(max(runs, key=len) for runs in literals(self.pattern))
        object.__setattr__(self, "quicks", quicks)
        pattern = re.compile(self.pattern or "|".join(map(re.escape, quicks)), re.DOTALL)
        object.__setattr__(self, "_compiled", pattern)

    def find(self, library: str, text: str) -> Finding | None:
        """What ``text`` says if it holds this message."""
        match = self._compiled.search(text) if any(quick in text for quick in self.quicks) else None
        if match is None:
            return None
        told = {} if self.read is None else self.read(match)
        if told is None:
            return None
        stated = {name: value for name, value in match.groupdict().items() if value is not None}
        params = {name: value for name, value in stated.items() if name in AttentionParams.model_fields}
        environment = {name: value for name, value in stated.items() if name == "gpu" or name in COMPONENTS}
        if "major" in stated:
            environment["gpu"] = f"sm{stated['major']}{stated['minor']}"
        words = {**match.groupdict(""), **told}
        fix = self.fix if isinstance(self.fix, str) else "; ".join(self.fix)
        variants = (
            one._replace(known=_filled(one.known, words), fix=_filled(one.fix, words))
            for one in self.variants
        )
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("kind", "supposed", "candidates", "codes", "link", "source", "near")
        }
        given |= {
            "known": _filled(self.known, words),
            "fix": _filled(fix, words),
            "variants": tuple(variants),
        }
        given |= {
            "text": match[0],
            **{name: value for name, value in told.items() if name in Finding._fields},
        }
        given["params"] = {**self.params, **params, **told.get("params", NOTHING)}
        given["environment"] = {**self.environment, **environment, **told.get("environment", NOTHING)}
        given["text"] = short(scrub(" ".join(given["text"].split())), str, _LONGEST_SHOWN)
        given["unread"] = tuple(scrub(one) for one in given.get("unread", ()))
        return Finding(library, **given)


def error(quick: str | tuple[str, ...] = "", pattern: str = "", **declared: Any) -> Message:
    """What is raised, or what a user is told at last."""
    return Message(quick, pattern, "error", **declared)


def declared(
    module: str, part: str, readers: Mapping[str, Reader] = NOTHING, **texts: str
) -> tuple[Message, ...]:
    """Messages of a library: the rows of ``data/MODULE.csv`` with this ``part``, in their order.

    The columns are fields of Message: ``does`` is its kind, ``issue`` its link, of several quick texts " | "
    stands between, of codes and candidates a space, and ``params``, ``environment`` and ``supposed`` are
    Python literals (dtype='fp32'; softcap=50.0). readers: functions that read a match, by the names in the
    column ``reader``; under "" that of rows which name none. texts: what rows share; they have its name in
    braces.
    """

    def text(row: dict[str, str], column: str) -> str:
        return re.sub(r"\{([A-Z][A-Z_0-9]+)\}", lambda name: texts[name[1]], row[column])

    def facts(row: dict[str, str], column: str) -> Facts:
        given = (one.partition("=") for one in row[column].split("; ") if one)
        return {name: literal_eval(value) for name, _, value in given}

    return tuple(
        Message(
            tuple(row["quick"].split(" | ")) if row["quick"] else "",
            text(row, "pattern"),
            row["does"],  # type: ignore[arg-type]  # tests hold the column against Kind
            read=readers[row["reader"]] if row["reader"] else readers.get(""),
            params=facts(row, "params"),
            environment=facts(row, "environment"),
            supposed=facts(row, "supposed"),
            candidates=tuple(row["candidates"].split()),
            codes=tuple(row["codes"].split()),
            known=text(row, "known"),
            link=row["issue"],
            fix=text(row, "fix"),
            source=row["source"],
            near=NEAR if row["near"] == "yes" else int(row["near"] or 0),
        )
        for row in read_rows("attnsel.diagnose.logs", module)
        if row["part"] == part
    )


_STEP = re.compile(
    r"\\(?P<escaped>.)|\[(?:\\.|[^\]\\])+\]|(?P<times>\{[\d,]+\}|[?*+])|(?P<sign>[()|.^$])|(?P<plain>.)"
)


def literals(pattern: str) -> list[list[str]]:
    """Of each of the alternatives of a pattern, the texts that stand in all that it matches: what lies in no
    group, no class of characters and before no quantifier."""
    branches, depth = [[""]], 0
    for step in _STEP.finditer(pattern):
        runs, sign, escaped = branches[-1], step["sign"], step["escaped"]
        depth += (sign == "(") - (sign == ")")
        if depth:
            runs += [""] if runs[-1] else []
        elif sign == "|":
            branches.append([""])
        elif step["plain"] or (escaped and not escaped.isalnum()):
            runs[-1] += step["plain"] or escaped
        else:
            if step["times"] and step["times"] != "+":
                runs[-1] = runs[-1][:-1]
            runs.append("")
    return branches


def clean(value: str | int) -> str:
    """A word of the log's as it may stand in a report: without paths and secrets, on one line, not long."""
    return short(printable(scrub(" ".join(str(value).split()))), str, _LONGEST_WORD)


def _filled(sentence: str, words: Mapping[str, Any]) -> str:
    """With the words in the place of their names in braces; other braces stay."""

    def word(name: re.Match[str]) -> str:
        value = words.get(name[1])
        return clean(value) if isinstance(value, (str, int)) else name[0]

    return re.sub(r"\{(\w+)\}", word, sentence)


@dataclass(frozen=True)
class Library:
    """All messages of one module.

    ``name``: the library, as its makers write it. ``looked_for``: what is recognised, for people.
    ``candidates``: the kernels that it chooses among, refused where it says only that none runs.
    ``dispatcher``: its own chooser in ``attnsel/dispatchers/``, if attnsel knows it. ``usual``: fields that
    its users leave as they are, taken where nothing is said. ``ask``: how to make it say more, in a sentence.
    ``source``: where messages are written that do not say it themselves.
    """

    name: str
    looked_for: str
    messages: tuple[Message, ...]
    candidates: tuple[str, ...] = ()
    dispatcher: str = ""
    usual: Facts = field(default_factory=dict)
    ask: str = ""
    source: str = ""

    def findings(self, text: str, among: tuple[Message, ...] | None = None) -> Iterator[Finding]:
        """All that ``text``, one entry of a log, says; ``among``: messages that it can hold, if known."""
        for message in self.messages if among is None else among:
            found = message.find(self.name, text)
            if found is not None:
                yield found if found.source else found._replace(source=self.source)

    def more(self, line: str, among: tuple[Message, ...] | None = None) -> More:
        """Which of the lines that follow ``line`` belong to it."""
        messages = self.messages if among is None else among
        return next((m.more for m in messages if m.more and any(quick in line for quick in m.quicks)), "")

    def likely(self, shape: str) -> tuple[Message, ...]:
        """The messages that a text of this ``shape`` (``shape_of``) can hold."""
        return tuple(m for m in self.messages if any(shape_of(quick) in shape for quick in m.quicks))


class FirstOf(Library):
    """A library one of whose messages is in a text: the first that fits, so that the general come last."""

    def findings(self, text: str, among: tuple[Message, ...] | None = None) -> Iterator[Finding]:
        for found in super().findings(text, among):
            yield found
            return


_DIGITS = re.compile(r"\d+")


def shape_of(text: str) -> str:
    """A text with one figure for each number: the steps of a log print one shape over and over."""
    return _DIGITS.sub("0", text)


def gate(known: Iterable[Library]) -> tuple[str, ...]:
    """In lower case, texts one of which is in every line that any message is about."""
    quick = {one.lower() for library in known for message in library.messages for one in message.quicks}
    return (*WORDS, *sorted(text for text in quick if not any(word in text for word in WORDS)))


# --------------------------------------------------------------------------------------------------------
# What a message means beside the rest of its log: the same words have another cause on another GPU.
#
# "FlashAttention only supports Ampere GPUs or newer" says that a Turing card is too old, or that flash-attn
# is too old for a Blackwell card. Such a message has variants (``Variant``), and which of them holds is
# known once the whole log is read: people paste what is installed above or below an error.


SEEN = "seen"
"""The library of findings that only say whose code a log shows; ``text`` is its name."""


class Variant(NamedTuple):
    """One meaning. ``archs``: of GPUs between the two, both included; a GPU that nobody named is any, unless
    ``named``.
    ``seen``, ``unseen``: names of ``SEEN`` one of which is in the log, or none of them. ``torch``: a release.
    """

    known: str
    fix: str
    codes: tuple[str, ...] = ()
    archs: tuple[int, int] | None = None
    named: bool = False
    seen: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    torch: str = ""

    def holds(self, log: _Log) -> bool:
        if self.named and log.arch is None:
            return False
        if self.archs and log.arch is not None and not self.archs[0] <= log.arch <= self.archs[1]:
            return False
        if self.torch and not log.torch.startswith(self.torch):
            return False
        return (not self.seen or bool(log.seen & set(self.seen))) and not log.seen & set(self.unseen)


class _Log(NamedTuple):
    arch: int | None
    torch: str
    seen: set[str]


def resolve_ambiguous(
    calls: Iterable[LoggedCall], machine: Iterable[Finding]
) -> tuple[tuple[LoggedCall, ...], tuple[Finding, ...]]:
    """Calls with one meaning for each message, and what is said of the machine."""
    kept = tuple(calls)
    told = tuple(machine)
    log = _log([*told, *(finding for call in kept for finding in call.findings)])
    meant = (
        call._replace(
            findings=tuple(one for one in (_resolved(f, log) for f in call.findings) if one is not None)
        )
        for call in kept
    )
    return (
        tuple(call for call in meant if call.findings),
        tuple(one for one in told if one.library != SEEN),
    )


def _log(findings: list[Finding]) -> _Log:
    environment: dict[str, Any] = {}
    for finding in findings:
        environment |= finding.environment
    seen = {finding.text for finding in findings if finding.library == SEEN}
    missing = environment.get("missing") or ()
    try:
        arch = describe_device(str(environment["gpu"])).arch if environment.get("gpu") else None
    except InvalidInput:
        arch = None
    return _Log(
        arch,
        str(environment.get("torch") or ""),
        seen | ({missing} if isinstance(missing, str) else set(missing)),
    )


def _resolved(finding: Finding, log: _Log) -> Finding | None:
    """With the meaning that holds: several joined where the log does not tell them apart, None for none."""
    if not finding.variants:
        return finding
    holding = [one for one in finding.variants if one.holds(log)]
    if not holding:
        return None
    certain = [one for one in holding if one.seen or one.torch or (one.archs and log.arch is not None)]
    chosen = certain[:1] or holding
    codes = tuple(dict.fromkeys(code for one in chosen for code in one.codes))
    # flash-attn's setup.py has one name for each family of Blackwell: 100, 110, 120 (setup.py:74, 2.8.4).
    build = "NN (100 for B200 and B300, 110 for Thor, 120 for RTX 50 and RTX PRO)"
    if log.arch is not None:
        build = str(log.arch // 10 * 10)
    return finding._replace(
        known="; or ".join(dict.fromkeys(one.known for one in chosen)),
        fix="; or ".join(dict.fromkeys(one.fix for one in chosen)).replace("{build_arch}", build),
        codes=codes,
        variants=(),
    )
