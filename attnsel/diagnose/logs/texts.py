"""Messages whose cause is known in a sentence: a shorter way to declare them.

``Message`` (attnsel/diagnose/logs/message.py) leaves the cause to attnsel's rules. Most libraries say
something that is its own cause, or one that depends on what stands around it: a wheel, a flag, a fall-back.
``text`` is for those. Words of the sentence may come from the message: ``{head_dim_qk}`` is the group of that
name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attnsel.diagnose.logs.found import Finding, Kind
from attnsel.diagnose.logs.message import Facts, Library, Message
from attnsel.diagnose.logs.scrub import scrub
from attnsel.diagnose.logs.settled import Variant
from attnsel.errors import printable, short

Read = Callable[[re.Match[str]], Mapping[str, Any] | None]
"""From a match, what else the sentences name; as ``params``, ``environment``, ``unread`` what is stated."""

_LONGEST_WORD = 400

_FACTS = ("params", "environment", "supposed", "unread", "candidates", "codes", "kind", "text")


def text(
    quick: str | tuple[str, ...],
    pattern: str = "",
    *,
    cause: str = "",
    fix: tuple[str, ...] = (),
    variants: tuple[Variant, ...] = (),
    read: Read | None = None,
    kind: Kind = "error",
    **declared: Any,
) -> tuple[Message, ...]:
    """One message for each of ``quick``, one of which stands in every text that is meant.

    ``variants``: causes of which the rest of the log decides, in the place of ``cause``. ``declared``: the
    rest, as Message has it.
    """

    def facts(match: re.Match[str]) -> Facts | None:
        more = {} if read is None else read(match)
        if more is None:
            return None
        named = {name: value or "" for name, value in match.groupdict().items()} | dict(more)
        words = {name: clean(value) for name, value in named.items() if isinstance(value, (str, int))}
        told: dict[str, Any] = {name: more[name] for name in _FACTS if name in more}
        said = tuple(
            one._replace(known=_filled(one.known, words), fix=_filled(one.fix, words)) for one in variants
        )
        return told | {
            "known": "" if kind == "chosen" else _filled(cause, words),
            "fix": _filled("; ".join(fix), words),
            "variants": said,
        }

    quicks = (quick,) if isinstance(quick, str) else quick
    return tuple(Message(one, pattern or re.escape(one), kind=kind, read=facts, **declared) for one in quicks)


def clean(value: str | int) -> str:
    """A word of the log's as it may stand in a report: without paths and secrets, on one line, not long."""
    return short(printable(scrub(" ".join(str(value).split()))), str, _LONGEST_WORD)


def _filled(sentence: str, words: Mapping[str, Any]) -> str:
    """With the words in the place of their names in braces; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda name: str(words.get(name[1], name[0])), sentence)


class FirstOf(Library):
    """A library one of whose messages is in a text: the first that fits, so that the general come last."""

    def findings(self, text: str) -> Iterator[Finding]:
        for found in super().findings(text):
            yield found
            return
