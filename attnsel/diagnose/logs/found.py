"""The values: what one message in a log says (``Finding``), and what one call comes to (``LoggedCall``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from attnsel.environment import COMPONENTS
from attnsel.environment.versions import Version

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


class Finding(NamedTuple):
    """What one message says. Every text in it is scrubbed.

    ``library``: whose message it is, as its makers write it. ``text``: the message, shortened. ``params``:
    fields of AttentionParams, and ``environment``: ``gpu`` and components of Environment.describe, that are
    stated. ``supposed``: the same two together for what must be so for this message, where it is not stated
    (the newest release that prints it). ``candidates``: attnsel's names of the kernels it is about.
    ``codes``: rules that are the cause. ``known``: the cause in a sentence, where no rule computes it, and
    ``link``, where that is written. ``fix``: what to change, in that library's own API. ``unread``: what
    stands there and attnsel has no field for. ``source``: where the message is written: file and releases.
    ``near``: an error of many causes (memory, a failed launch), which counts only below a frame of attention.
    ``variants``: causes of which the rest of the log decides (attnsel/diagnose/logs/settled.py).
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
    near: bool = False
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
    def refused(self) -> dict[str, tuple[Finding, ...]]:
        """By candidate, the messages that refuse it."""
        found: dict[str, tuple[Finding, ...]] = {}
        for finding in self.findings:
            if finding.kind in ("refusal", "error"):
                for name in finding.candidates:
                    found[name] = (*found.get(name, ()), finding)
        return found

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
