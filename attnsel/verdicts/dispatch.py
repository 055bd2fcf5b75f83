"""What another library's own chooser would run: the values its answer is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from attnsel.base.records import json_fields
from attnsel.base.rows import read_rows
from attnsel.environment.read import Unread

DispatcherName = Literal["torch", "te", "transformers"]


class Switch(NamedTuple):
    """Something of the dispatcher's that a user can set: a variable, a context manager, an argument.

    ``values``: what it may be set to, for a message; empty where anything goes. ``meaning``: what it does.
    ``source``: where that is written.
    """

    name: str
    values: tuple[str, ...]
    meaning: str
    source: str


def switches_in(package: str) -> tuple[Switch, ...]:
    """The rows of a dispatcher's ``data/switches.csv``."""
    return tuple(
        Switch(row["name"], tuple(row["values"].split()), row["meaning"], row["source"])
        for row in read_rows(package, "switches")
    )


class Refusal(NamedTuple):
    """One reason why the dispatcher does not take a kernel for this call.

    ``text``: the condition with the value seen and what is wanted, in words. ``code``: the rule of attnsel's
    that says the same, if there is one. ``switch``: the switch that does it, as NAME=VALUE, if one does.
    ``source``: file, lines and release. ``told``: whether the dispatcher itself tells it, and when.
    """

    text: str
    source: str
    code: str = ""
    switch: str = ""
    told: str = ""


@json_fields("name", ("candidate", lambda o: o.candidate or None), "refusals", "note")
class Offer(NamedTuple):
    """One kernel among those that the dispatcher has, in its own name for it.

    ``candidate``: attnsel's candidate that is the same kernel, "" where it has none. ``refusals``: all of
    them; the dispatcher takes the kernel if there are none. ``note``: what it does to the call on the way (a
    copy, a pad, heads repeated).
    """

    name: str
    candidate: str
    refusals: tuple[Refusal, ...] = ()
    note: str = ""

    @property
    def taken(self) -> bool:
        return not self.refusals


@json_fields(
    "dispatcher", "release", "read", "call", "offers", ("chosen", lambda d: d.chosen and d.chosen.name),
    "order_source", "inferred", "error", ("switches", lambda d: dict(d.switches)), "notes",
    ("candidate", lambda d: (d.chosen and d.chosen.candidate) or None), "known_bugs",
)  # fmt: skip
class Dispatch(NamedTuple):
    """The whole answer of one dispatcher to one question.

    ``release``: the version asked about, as text. ``read``: the release whose source says so; ``inferred``
    is why that is another one, "" where it is the same. ``call``: what the question is in the dispatcher's
    own words (the call of its function). ``offers``: its kernels in the order in which it tries them.
    ``chosen``: the one that it takes; None where it raises, and then ``error`` is what it says.
    ``switches``: those that hold, as (name, value). ``order_source``: where the order is written.
    ``notes``: what else a reader has to know. ``known_bugs``: of the chosen one in this very call, each with
    the title of its page: a wrong result, NaN or a crash. One without a code is the library's own doing: what
    it leaves out of the call without a word. ``unread``: what is said of a release newer than any that was
    read, which is then why another answers.
    """

    dispatcher: DispatcherName
    release: str
    read: str
    call: str
    offers: tuple[Offer, ...]
    chosen: Offer | None
    order_source: str
    inferred: str = ""
    error: str = ""
    switches: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    unread: Unread | None = None
    known_bugs: tuple[Refusal, ...] = ()


Switches = Mapping[str, str]
