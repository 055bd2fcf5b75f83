r"""How a library's message is declared, and how a text is held against the declarations.

A parser is a module in ``attnsel/diagnose/logs/parsers/`` with ``MESSAGES``. To teach a message, add one::

    Message(
        "Invalid attention frobnication",          # must stand in the text as it is: the quick test
        r"Invalid attention frobnication: head size (?P<head_dim_qk>\d+)",
        kind="refusal",
        candidates=("flash_attn.2",),
        codes=("FA205",),
        fix="pad q, k and v to a multiple of 8",
        source="library/file.py, 1.2 to 1.9",
    )

Groups of the pattern named as a field of AttentionParams, as a component of an environment or ``gpu`` are
what the message states. What needs more than that is a function: ``read=``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attnsel.diagnose.logs.found import NOTHING, Finding, Kind
from attnsel.diagnose.logs.scrub import scrub
from attnsel.environment import COMPONENTS
from attnsel.errors import short
from attnsel.params import AttentionParams

Facts = Mapping[str, Any]
"""Fields of a Finding that a message gives beside what is declared."""

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

_LONGEST_SHOWN = 300

More = Literal["", "indented", "brackets"]


@dataclass(frozen=True)
class Message:
    """One text of a library's.

    ``quick``: stands in the text literally, in this case. ``pattern``: searched in the text; without one
    ``quick`` is enough. ``more``: which of the lines that follow belong to it: those that are "indented", or
    all until its "brackets" are closed; the pattern is searched in all of them, joined by line ends.
    ``read``: from the match, fields of Finding beside those declared, or None where it is not meant after
    all. The others: see Finding.
    """

    quick: str
    pattern: str = ""
    kind: Kind = "refusal"
    more: More = ""
    read: Callable[[re.Match[str]], Facts | None] | None = None
    params: Facts = field(default_factory=dict)
    environment: Facts = field(default_factory=dict)
    supposed: Facts = field(default_factory=dict)
    candidates: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    known: str = ""
    link: str = ""
    fix: str = ""
    source: str = ""
    near: bool = False
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pattern = re.compile(self.pattern or re.escape(self.quick), re.DOTALL)
        object.__setattr__(self, "_compiled", pattern)

    def find(self, library: str, text: str) -> Finding | None:
        """What ``text`` says if it holds this message."""
        match = self._compiled.search(text) if self.quick in text else None
        if match is None:
            return None
        told = {} if self.read is None else self.read(match)
        if told is None:
            return None
        params, environment = _named(match)
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("kind", "supposed", "candidates", "codes", "known", "link", "fix", "source", "near")
        }
        given["text"] = match[0]
        given |= told
        given["params"] = {**self.params, **params, **told.get("params", NOTHING)}
        given["environment"] = {**self.environment, **environment, **told.get("environment", NOTHING)}
        given["text"] = short(scrub(" ".join(given["text"].split())), str, _LONGEST_SHOWN)
        given["unread"] = tuple(scrub(one) for one in given.get("unread", ()))
        return Finding(library, **given)


def _named(match: re.Match[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    params: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    for name, value in match.groupdict().items():
        if value is None:
            continue
        if name == "gpu" or name in COMPONENTS:
            environment[name] = value
        elif name in AttentionParams.model_fields:
            params[name] = value
    return params, environment


class Library:
    """All messages of one module.

    ``name``: the library, as its makers write it. ``looked_for``: what is recognised, for people.
    ``candidates``: the kernels that it chooses among, refused where it says only that none runs.
    ``dispatcher``: its own chooser in ``attnsel/dispatchers/``, if attnsel knows it. ``usual``: fields that
    its users leave as they are, taken where nothing is said. ``ask``: how to make it say more, in a sentence.
    """

    def __init__(
        self,
        name: str,
        looked_for: str,
        messages: Iterable[Message],
        candidates: tuple[str, ...] = (),
        dispatcher: str = "",
        usual: Facts = NOTHING,
        ask: str = "",
    ) -> None:
        self.name = name
        self.looked_for = looked_for
        self.messages = tuple(messages)
        self.candidates = candidates
        self.dispatcher = dispatcher
        self.usual = usual
        self.ask = ask

    def findings(self, text: str) -> Iterator[Finding]:
        """Everything that ``text``, one entry of a log, says."""
        for message in self.messages:
            found = message.find(self.name, text)
            if found is not None:
                yield found

    def more(self, line: str) -> More:
        """Which of the lines that follow ``line`` belong to it."""
        return next((m.more for m in self.messages if m.more and m.quick in line), "")


def gate(known: Iterable[Library]) -> tuple[str, ...]:
    """In lower case, texts one of which is in every line that any message is about."""
    quick = {message.quick.lower() for library in known for message in library.messages}
    return (*WORDS, *sorted(text for text in quick if not any(word in text for word in WORDS)))
