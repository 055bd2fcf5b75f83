"""Ranks that compute together reach a consensus first, so that a difference is an error and never a hang.

Before each exchange every rank tells a fingerprint of what it is about to do: shapes, parameters, the chosen
candidate, or the error it met. It travels with the dropout seed in one small message. Only where fingerprints
differ are the words behind them exchanged, and every rank raises the same sentence.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist

from attnsel.context_parallel.comm import Member
from attnsel.errors import ContextParallelError

ERROR = "error"
BACKEND = "chosen backend"

Refusals = list[tuple[str, str, str]]
"""Candidate, its words and the code of the reason."""


class RanksRefused(Exception):
    """Ranks chose differently because some of their kernels refused; ``by`` is what all of them refused."""

    def __init__(self, by: Refusals) -> None:
        super().__init__("kernels refused on some ranks")
        self.by = by


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


def check_consensus(members: list[Member], fields: Fields, device: torch.device) -> None:
    """Every rank of every member group takes part.

    Raises ContextParallelError naming a rank and a field; Refused where all that differs is the candidate,
    and some rank's kernel refused: on every rank alike.
    """
    on = torch.device("cpu") if all(_takes_cpu(m) for m in members) else device
    gathered = torch.tensor([fields.fingerprint], dtype=torch.int64, device=on)[None]
    for member in members:
        gathered = member.gather(gathered).flatten(0, 1)
    prints = gathered[:, 0].tolist()
    if any(other != prints[0] for other in prints):
        _name_difference(members, fields)


def _takes_cpu(member: Member) -> bool:
    """Whether the group moves CPU tensors: comparing them then waits for no GPU."""
    return member.size == 1 or "cpu:gloo" in dist.get_backend_config(member.group)


def _name_difference(members: list[Member], fields: Fields) -> None:
    every: list[Any] = [(dict(fields), fields.refused)]
    for member in members:
        every = [one for many in member.objects(every) for one in many]
    for rank, (other, _) in enumerate(every):
        if ERROR in other:
            raise ContextParallelError(f"rank {rank} of the context parallel group: {other[ERROR]}")
    first = every[0][0]
    differing = [
        (field, rank, other)
        for rank, (other, _) in enumerate(every)
        for field in {**first, **other}
        if first.get(field) != other.get(field)
    ]
    refused = list(dict.fromkeys(tuple(one) for _, refusals in every for one in refusals))
    if refused and all(field == BACKEND for field, _, _ in differing):
        raise RanksRefused(refused)
    for field, rank, other in differing:
        raise ContextParallelError(
            f"ranks of the context parallel group disagree on {field}: "
            f"{first.get(field)} on rank 0, {other.get(field)} on rank {rank}"
        )
    raise ContextParallelError("ranks of the context parallel group disagree")
