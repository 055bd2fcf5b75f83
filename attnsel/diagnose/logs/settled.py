"""What a message means beside the rest of its log: the same words have another cause on another GPU.

"FlashAttention only supports Ampere GPUs or newer" says that a Turing card is too old, or that flash-attn is
too old for a Blackwell card. Such a message has variants (``Variant``), and which of them holds is known once
the whole log is read: people paste what is installed above or below an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from attnsel.diagnose.logs.found import Finding, LoggedCall
from attnsel.environment import describe_device
from attnsel.errors import InvalidInput

SEEN = "seen"
"""The library of findings that only say whose code a log shows; ``text`` is its name."""


class Variant(NamedTuple):
    """One meaning. ``archs``: of GPUs between the two, both included; a GPU that nobody named is any.
    ``seen``, ``unseen``: names of ``SEEN`` one of which is in the log, or none of them. ``torch``: a release.
    """

    known: str
    fix: str
    codes: tuple[str, ...] = ()
    archs: tuple[int, int] | None = None
    seen: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    torch: str = ""

    def holds(self, log: _Log) -> bool:
        if self.archs and log.arch is not None and not self.archs[0] <= log.arch <= self.archs[1]:
            return False
        if self.torch and not log.torch.startswith(self.torch):
            return False
        return (not self.seen or bool(log.seen & set(self.seen))) and not log.seen & set(self.unseen)


class _Log(NamedTuple):
    arch: int | None
    torch: str
    seen: set[str]


def settled(
    calls: Iterable[LoggedCall], machine: Iterable[Finding]
) -> tuple[tuple[LoggedCall, ...], tuple[Finding, ...]]:
    """Calls with one meaning for each message, and what is said of the machine."""
    kept = tuple(calls)
    told = tuple(machine)
    log = _log([*told, *(finding for call in kept for finding in call.findings)])
    meant = (
        call._replace(
            findings=tuple(one for one in (_settle(f, log) for f in call.findings) if one is not None)
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
    return _Log(
        _arch(environment.get("gpu")),
        str(environment.get("torch") or ""),
        seen | ({missing} if isinstance(missing, str) else set(missing)),
    )


def _arch(gpu: Any) -> int | None:
    try:
        return None if gpu is None else describe_device(str(gpu)).arch
    except InvalidInput:
        return None


def _settle(finding: Finding, log: _Log) -> Finding | None:
    """With the meaning that holds: several joined where the log does not tell them apart, None for none."""
    if not finding.variants:
        return finding
    holding = [one for one in finding.variants if one.holds(log)]
    if not holding:
        return None
    certain = [one for one in holding if one.seen or one.torch or (one.archs and log.arch is not None)]
    chosen = certain[:1] or holding
    codes = tuple(dict.fromkeys(code for one in chosen for code in one.codes))
    return finding._replace(
        known="; or ".join(dict.fromkeys(one.known for one in chosen)),
        fix="; or ".join(dict.fromkeys(one.fix for one in chosen)),
        codes=codes,
        variants=(),
    )
