"""Ranks that compute together reach a consensus, so that a difference is an error and never a hang.

Before a forward or a backward exchanges tensors every rank tells a fingerprint of what it is about to do:
which call it is, shapes, parameters, the chosen candidate, or the error it met. At the end it tells another
one: of the same call, and whether its kernels failed. A kernel that fails stops no exchange
(:class:`Attempt`), so all ranks get to that end. Only where fingerprints differ are the words behind them
exchanged.

Ranks in different calls are out of step. That cannot be mended here: one has left tensors behind, or has gone
on to the next batch. So no later call over the group runs, and all of them say why. A rank that leaves a pass
between two exchanges is out of step at once (:func:`exchanging`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from attnsel.context_parallel.comm import AGAIN, Member
from attnsel.errors import ContextParallelError

if TYPE_CHECKING:
    from attnsel.context_parallel.group import ContextParallel

ERROR = "error"
BACKEND = "chosen backend"
CALL, MODULE, RUNS = "call", "module", "runs"  # of the group: group.Calls
FORWARD, BACKWARD = "forward", "backward"  # values of RUNS

Refusals = list[tuple[str, str, str]]
"""Candidate, its words and the code of the reason."""


class RanksRefused(Exception):
    """Ranks chose differently because some of their kernels refused; ``by`` is what all of them refused."""

    def __init__(self, by: Refusals) -> None:
        super().__init__("kernels refused on some ranks")
        self.by = by


class OutOfStep(Exception):
    """Ranks are in different calls."""


class Fields(dict[str, str]):
    """What a rank is about to do, field by field. Do not change it once it is fingerprinted.

    ``refused``: what its kernels refused of this call before; ranks may differ in that.
    """

    refused: Refusals = []  # noqa: RUF012 - replaced, never changed

    @property
    def fingerprint(self) -> int:
        """63 bits that are the same in every process."""
        if not hasattr(self, "_fingerprint"):
            digest = hashlib.blake2b(json.dumps(self, sort_keys=True).encode(), digest_size=8).digest()
            self._fingerprint = int.from_bytes(digest, "big") >> 1
        return self._fingerprint


class Attempt:
    """``with attempt:`` around what a rank's kernels do: their first exception is kept in ``error``.

    The rank then goes on exchanging, with NaN for what its kernels did not give, and no other rank waits for
    it. ``reach_consensus`` tells them at the end. An interrupt is kept too: what ranks have posted would else
    be taken for messages of the next call. One that comes while this rank waits for others passes.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, (Exception, KeyboardInterrupt)):
            return False
        self.error = self.error or error
        return True


def reach_consensus(
    cp: ContextParallel, fields: Fields, error: BaseException | None, device: torch.device
) -> None:
    """Every rank of every member group takes part. Raises as :func:`_compare`; a rank with an ``error`` tells
    the others, and raises it as it is."""
    calls = cp.calls
    if error is not None:
        fields = Fields(
            {name: fields[name] for name in (CALL, MODULE, RUNS)} | {ERROR: _first_paragraph(error)}
        )
    try:
        if not calls.out_of_step:
            with exchanging(cp, fields):
                every = _gathered(cp.members, fields, device)
            _compare(every)
    except OutOfStep as found:
        calls.out_of_step = str(found)
    except Exception:
        if error is None:
            raise
    if error is not None:
        raise error
    if calls.out_of_step:
        raise ContextParallelError(calls.out_of_step)


@contextmanager
def exchanging(cp: ContextParallel, fields: Fields, attempt: Attempt | None = None) -> Iterator[None]:
    """Around exchanges. Whatever is raised in between, an interrupt too, ends all calls over the group.

    The other ranks still wait for the exchanges that this one has left, and would take those of its next call
    for them. So its connections end: that reaches a rank wherever it waits, and it breaks off as well, for
    ranks that wait for it. What the ``attempt`` met before is what this rank raises.
    """
    try:
        yield
    except BaseException as error:
        cp.calls.out_of_step = (
            f"rank {cp.rank} of the context parallel group left {_where(fields)} in the middle, so messages "
            f"of ranks no longer belong together: {AGAIN}. What it met: {_first_paragraph(error)}"
        )
        for member in cp.members:
            member.break_off()
        if attempt is not None and attempt.error is not None:
            raise attempt.error from error
        raise


def _where(fields: dict[str, str]) -> str:
    return f"call {fields[CALL]} ({fields[RUNS]} of module {fields[MODULE]})"


def _first_paragraph(error: BaseException) -> str:
    """The error for other ranks: its type and its text up to the first empty line."""
    return f"{type(error).__name__}: " + str(error).split("\n\n")[0]


def _gathered(
    members: list[Member], fields: Fields, device: torch.device
) -> list[tuple[dict[str, str], Refusals]]:
    """Every rank's fields and refusals where fingerprints differ; nothing where all are the same."""
    on = _device(members, device)
    prints = torch.tensor([fields.fingerprint], dtype=torch.int64, device=on)[None]
    for member in members:
        prints = member.gather(prints).flatten(0, 1)
    first, *others = prints[:, 0].tolist()
    if all(other == first for other in others):
        return []
    every: list[Any] = [(dict(fields), fields.refused)]
    for member in members:
        every = [one for many in member.objects(every) for one in many]
    return every


def _device(members: list[Member], device: torch.device) -> torch.device:
    """Where fingerprints are exchanged. On the CPU if all groups move its tensors: that waits for no GPU."""
    if all(member.transports.get("cpu") == "gloo" for member in members):
        return torch.device("cpu")
    kinds = list(members[0].transports)
    return device if device.type in kinds else torch.device(kinds[0])  # a call may lack its tensors


def _compare(every: list[tuple[dict[str, str], Refusals]]) -> None:
    """Raises on every rank alike: ContextParallelError naming a rank and a field; RanksRefused where all that
    differs is the candidate, and some rank's kernel refused; OutOfStep."""
    if not every:
        return
    first = every[0][0]
    where = [_where(each) for each, _ in every]
    for rank, at in enumerate(where):
        if at != where[0]:
            raise OutOfStep(
                f"ranks of the context parallel group are in different calls: {where[0]} on rank 0, {at} on "
                f"rank {rank}. Some of them left or made a call that others did not, so their tensors do not "
                f"belong together: {AGAIN}"
            )
    for rank, (other, _) in enumerate(every):
        if ERROR in other:
            raise ContextParallelError(f"rank {rank} of the context parallel group: {other[ERROR]}")
    differing = [
        (field, rank, other)
        for rank, (other, _) in enumerate(every)
        for field in {**first, **other}
        if first.get(field) != other.get(field)
    ]
    refused = list(dict.fromkeys(one for _, refusals in every for one in refusals))
    if refused and all(field == BACKEND for field, _, _ in differing):
        raise RanksRefused(refused)
    for field, rank, other in differing:
        raise ContextParallelError(
            f"ranks of the context parallel group disagree on {field}: "
            f"{first.get(field)} on rank 0, {other.get(field)} on rank {rank}"
        )
    raise ContextParallelError("ranks of the context parallel group disagree")
