"""Ranks that compute together agree first, so that a difference is an error and never a hang.

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
from torch import Tensor

from attnsel.context_parallel.comm import Member
from attnsel.errors import ContextParallelError

ERROR = "error"


class Fields(dict[str, str]):
    """What a rank is about to do, field by field. Do not change it once it is fingerprinted."""

    @property
    def fingerprint(self) -> int:
        """63 bits that are the same in every process."""
        if not hasattr(self, "_fingerprint"):
            digest = hashlib.blake2b(json.dumps(self, sort_keys=True).encode(), digest_size=8).digest()
            self._fingerprint = int.from_bytes(digest, "big") >> 1
        return self._fingerprint


def agree(members: list[Member], fields: Fields, device: torch.device, seed: int = 0) -> Tensor:
    """int64 scalar on ``device`` where it is the transport's: the first rank's seed.

    Every rank of every member group takes part. Raises ContextParallelError naming a rank and a field.
    """
    on = torch.device("cpu") if all(_takes_cpu(m) for m in members) else device
    mine = torch.tensor([fields.fingerprint, seed], dtype=torch.int64, device=on)
    told = mine[None]
    for member in members:
        told = member.gather(told).flatten(0, 1)
    prints = told[:, 0].tolist()
    if any(other != prints[0] for other in prints):
        _raise(members, fields)
    return told[0, 1]


def _takes_cpu(member: Member) -> bool:
    """Whether the group moves CPU tensors: comparing them then waits for no GPU."""
    return member.size == 1 or "cpu:gloo" in dist.get_backend_config(member.group)


def _raise(members: list[Member], fields: Fields) -> None:
    every: list[Any] = [dict(fields)]
    for member in members:
        every = [one for many in member.objects(every) for one in many]
    for rank, other in enumerate(every):
        if ERROR in other:
            raise ContextParallelError(f"rank {rank} of the context parallel group: {other[ERROR]}")
    first = every[0]
    for rank, other in enumerate(every):
        for field in {**first, **other}:
            if first.get(field) != other.get(field):
                raise ContextParallelError(
                    f"ranks of the context parallel group disagree on {field}: "
                    f"{first.get(field)} on rank 0, {other.get(field)} on rank {rank}"
                )
    raise ContextParallelError("ranks of the context parallel group disagree")
