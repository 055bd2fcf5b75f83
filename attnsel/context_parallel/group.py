"""The ranks a module shares its sequences with, and how they exchange."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from attnsel.context_parallel.comm import Member, Ring
from attnsel.context_parallel.consensus import CALL, FORWARD, MODULE, RUNS, Fields
from attnsel.errors import InvalidInput
from attnsel.params.exchanges import EXCHANGES, exchange_named
from attnsel.runtime.cache import BoundedCache
from attnsel.selection.steps import RankLayout


class Calls:
    """How many calls were begun over the same process groups, by how many modules.

    What a rank sends is told from what it sent before by its order alone, and that order is the group's. So
    the count belongs to the group, and includes calls that fail. Modules are numbered by their first call:
    ranks may make other modules than these, each in its own order.
    """

    def __init__(self) -> None:
        self.begun = self.modules = 0
        self.out_of_step = ""  # in which calls the ranks were, once that differed


_CALLS: WeakKeyDictionary[Any, WeakKeyDictionary[Any, Calls]] = WeakKeyDictionary()  # by inner, outer group


class ContextParallel:
    """``a2a`` exchanges heads for rows and ``ring`` exchanges keys; one of them has size 1 unless both do.

    Rank of the whole group: ``ring.rank * a2a.size + a2a.rank``, so neighbours share an a2a group.
    """

    def __init__(self, comm_type: str, a2a: Member, ring: Member, stream: Any = None) -> None:
        self.a2a, self.ring = a2a, ring
        self.size = a2a.size * ring.size
        record = EXCHANGES[comm_type]
        if record.nested and 1 in (a2a.size, ring.size):  # as in TransformerEngine
            record = record._replace(swaps_heads=False) if a2a.size == 1 else record._replace(keys="")
            comm_type = next(name for name, other in EXCHANGES.items() if other == record)
        self.comm_type, self.record = comm_type, record
        self.exchange = Ring(ring, stream)
        self.number = 0  # of this module among those over the same groups, from its first call on
        self.chosen: BoundedCache[Any] = BoundedCache(limit=256)  # choices by call signature, see run.py

    @property
    def layout(self) -> RankLayout:
        """How these ranks are laid out."""
        return RankLayout(self.comm_type, self.a2a.size, self.ring.size)

    @property
    def rank(self) -> int:
        """Of the whole group."""
        return self.ring.rank * self.a2a.size + self.a2a.rank

    @property
    def members(self) -> list[Member]:
        """Inner groups first: gathering over them in this order numbers ranks as the whole group does."""
        return [member for member in (self.a2a, self.ring) if member.size > 1]

    @property
    def calls(self) -> Calls:
        """Shared by all modules with these process groups."""
        members = self.members
        over_outer = _CALLS.setdefault(members[0].group, WeakKeyDictionary())
        return over_outer.setdefault(members[-1].group, Calls())

    def begin(self) -> Fields:
        """The next call over these ranks."""
        calls = self.calls
        calls.begun += 1
        if not self.number:
            calls.modules += 1
            self.number = calls.modules
        return Fields({CALL: str(calls.begun), MODULE: str(self.number), RUNS: FORWARD})

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        made = copy.copy(self)  # talks to the same ranks
        made.number = 0
        return made


def resolve(
    cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
) -> ContextParallel | None:
    """None without a group, and for a group of one rank: that is plain attention.

    ``cp_group``: a ProcessGroup or a DeviceMesh of one dimension; with a2a+p2p a pair [a2a group, p2p group]
    or a DeviceMesh of two dimensions, p2p outside and a2a inside. Raises InvalidInput for anything else.
    """
    record = exchange_named(cp_comm_type)
    if cp_group is None:
        for name, value in (("cp_global_ranks", cp_global_ranks), ("cp_stream", cp_stream)):
            if value is not None:
                raise InvalidInput(name, value, "must be left out without a cp_group")
        return None
    groups = _groups(cp_group, record.nested, cp_comm_type)
    members = [Member(group) for group in groups]
    for member, group in zip(members, groups, strict=True):
        if member.rank < 0:
            raise InvalidInput("cp_group", group, "must hold this process")
    if cp_global_ranks is not None:
        own = [rank for member in members[::-1] for rank in member.global_ranks]
        if not isinstance(cp_global_ranks, (list, tuple)) or not set(own) <= set(_flat(cp_global_ranks)):
            raise InvalidInput("cp_global_ranks", cp_global_ranks, f"must hold the group's ranks, {own}")
    one = Member()
    if record.nested:
        a2a, ring = members
    else:
        a2a, ring = (members[0], one) if record.swaps_heads else (one, members[0])
    made = ContextParallel(cp_comm_type, a2a, ring, cp_stream)
    return None if made.size == 1 else made


def _groups(cp_group: Any, both: bool, comm_type: str) -> list[Any]:
    pair = f"[a2a group, p2p group] with cp_comm_type {comm_type!r}"
    wanted = f"must be {pair if both else 'a process group'}"
    if isinstance(cp_group, dist.device_mesh.DeviceMesh):
        if cp_group.ndim != 1 + both:
            raise InvalidInput("cp_group", cp_group, f"a DeviceMesh must have {1 + both} dimensions here")
        return [cp_group.get_group(dim) for dim in reversed(range(cp_group.ndim))]
    groups = list(cp_group) if isinstance(cp_group, (list, tuple)) else [cp_group]
    if len(groups) != 1 + both or not all(isinstance(group, dist.ProcessGroup) for group in groups):
        raise InvalidInput("cp_group", cp_group, f"{wanted}, or a DeviceMesh")
    return groups


def _flat(ranks: Any) -> list[int]:
    return [n for item in ranks for n in (item if isinstance(item, (list, tuple)) else [item])]
