"""The ranks a module shares its sequences with, and how they exchange."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from attnsel.errors import ContextParallelError, InvalidInput
from attnsel.params.options import EXCHANGES, exchange_named
from attnsel.runtime.cache import BoundedCache
from attnsel.selection.steps import RankLayout

# --------------------------------------------------------------------------------------------------------
# The exchanges, all of them torch.distributed's: a ring that posts before it computes, gathers, all-to-all.
#
# Row orders. A rank's rows are [head chunk, tail chunk]; concatenating ranks gives them rank by rank, and
# ``sequence_order`` says where each row of the sequence lies in that.


AGAIN = "start again with a new process group"
NEVER_SENT = 0x7E57  # no message has this tag


class Member:
    """This process in one process group; the group of size 1 needs none."""

    def __init__(self, group: Any = None, global_ranks: Any = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        ranks = global_ranks
        if group is not None and ranks is None:
            ranks = dist.get_process_group_ranks(group)
        self.global_ranks: list[int] = list(ranks or [0])

    @property
    def transports(self) -> dict[str, str]:
        """By device type, what moves its tensors. Raises what torch raises once the group was destroyed."""
        config = dist.get_backend_config(self.group)  # "cpu:gloo,cuda:nccl"
        return dict(part.split(":") for part in config.split(","))

    @contextmanager
    def speaking(self, what: str) -> Iterator[None]:
        """Errors of the transport name who was waiting for what."""
        try:
            yield
        except ContextParallelError:
            raise
        except RuntimeError as error:
            lines = str(error).strip().splitlines()
            raise ContextParallelError(
                f"rank {self.rank} (global rank {self.global_ranks[self.rank]}): {what} failed, "
                f"as another rank has died, raised an error or is late; {AGAIN}: "
                f"{lines[0] if lines else error!r}"
            ) from error

    def gather(self, x: Tensor) -> Tensor:
        """[size, ...] of every rank's ``x``."""
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        if self.size == 1:
            return out.copy_(x)
        with self.speaking("gathering from all ranks"):
            dist.all_gather(list(out.unbind(0)), x, group=self.group)
        return out

    def swap(self, x: Tensor) -> Tensor:
        """[size, ...]: part i goes to rank i, part j comes from rank j."""
        x = x.contiguous()
        out = torch.empty_like(x)
        with self.speaking("an all-to-all"):
            dist.all_to_all_single(out, x, group=self.group)
        return out

    def largest(self, x: Tensor) -> Tensor:
        if self.size > 1:
            with self.speaking("an all-reduce"):
                dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def objects(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.speaking("comparing notes"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def break_off(self) -> None:
        """End the group's connections: no rank then waits for this one, or takes its later messages for those
        of now.

        Only Gloo can, in the way in which it ends them after its own timeout: a receive that timed out closes
        the connections to all ranks of the group. Under NCCL ranks wait for NCCL's.
        """
        with suppress(Exception):  # the caller raises an error already; the group may have been destroyed
            if self.transports.get("cpu") != "gloo":
                return
        for rank in self.global_ranks:
            if rank != self.global_ranks[self.rank]:
                with suppress(Exception):  # closed already, or timed out as it should
                    nothing = torch.empty(1, device="cpu")
                    work = dist.irecv(nothing, rank, self.group, tag=NEVER_SENT)
                    assert work is not None
                    work.wait(timedelta(milliseconds=1))


class Ring:
    """Messages around a ring of ranks. On CUDA they are posted from a stream of their own, so that nothing on
    the current one waits for them before their content is needed."""

    def __init__(self, member: Member, stream: Any = None) -> None:
        self.member, self.stream = member, stream

    def post(self, x: Tensor, hop: int, tag: int) -> Callable[[], Tensor]:
        """Send ``x`` ``hop`` ranks on and receive its like from as many back; call the result to wait."""
        m = self.member
        to, come = (m.global_ranks[(m.rank + d) % m.size] for d in (hop, -hop))
        received = torch.empty_like(x)
        on_cuda, what = x.device.type == "cuda", f"sending to global rank {to} and receiving from {come}"
        if on_cuda:
            self.stream = self.stream or torch.cuda.Stream(x.device)
            self.stream.wait_stream(torch.cuda.current_stream(x.device))
        messages = [
            dist.P2POp(dist.isend, x, to, m.group, tag),
            dist.P2POp(dist.irecv, received, come, m.group, tag),
        ]
        with torch.cuda.stream(self.stream) if on_cuda else nullcontext(), m.speaking(what):
            works = dist.batch_isend_irecv(messages)
        for t in (x, received) if on_cuda else ():
            t.record_stream(self.stream)

        def wait() -> Tensor:
            with torch.cuda.stream(self.stream) if on_cuda else nullcontext(), m.speaking(what):
                for work in works:
                    work.wait()
            if on_cuda:
                torch.cuda.current_stream(x.device).wait_stream(self.stream)
            return received

        return wait

    def around(self, block: Tensor, shifts: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
        """(shift, the block of the rank so far back); the next one is on its way while this one is used."""
        for i, shift in enumerate(shifts):
            wait = None
            if i + 1 < len(shifts):
                wait = self.post(block, shifts[i + 1] - shift, tag=0)
            yield shift, block
            if wait is not None:
                block = wait()


# ---- row orders -------------------------------------------------------------------------------------


def sequence_order(rows: int, size: int, device: torch.device, starts: Tensor | None = None) -> Tensor:
    """int64 [size * rows]: where each row of the sequence lies in the ranks' rows, concatenated.

    ``starts`` [b + 1]: where packed sequences start in a rank's rows; every one is cut up on its own.
    """
    if starts is None:
        whole = torch.arange(size * rows, device=device)
        if rows % 2:
            return whole
        starts = torch.tensor([0, rows], device=device)
    starts = starts.to(device=device, dtype=torch.int64)
    row = torch.arange(size * rows, device=device)
    sequence = (torch.searchsorted(starts * size, row, right=True) - 1).clamp_(max=starts.numel() - 2)
    half = (starts.diff() // 2)[sequence].clamp_(min=1)
    within = row - starts[sequence] * size
    number = within // half
    head = number < size
    owner = torch.where(head, number, 2 * size - 1 - number)
    return owner * rows + starts[sequence] + within % half + torch.where(head, 0, half)


def inverse(order: Tensor) -> Tensor:
    out = torch.empty_like(order)
    out[order] = torch.arange(order.numel(), device=order.device)
    return out


def heads_to_rows(member: Member, x: Tensor, order: Tensor, row_dim: int) -> Tensor:
    """All heads of some rows to all rows of some heads: [b, h, s, d] to [b, h / size, size * s, d]."""
    got = member.swap(torch.stack(x.chunk(member.size, 1)))
    return torch.cat(got.unbind(0), row_dim).index_select(row_dim, order)


def rows_to_heads(member: Member, x: Tensor, order: Tensor, row_dim: int) -> Tensor:
    """The way back."""
    rows = x.index_select(row_dim, inverse(order))
    got = member.swap(torch.stack(rows.chunk(member.size, row_dim)))
    return torch.cat(got.unbind(0), 1)


def gather_rows(member: Member, x: Tensor, order: Tensor, row_dim: int) -> Tensor:
    """Every rank's rows, in the sequence's order."""
    return torch.cat(member.gather(x).unbind(0), row_dim).index_select(row_dim, order)


def sum_rows(member: Member, x: Tensor, order: Tensor, row_dim: int) -> Tensor:
    """The way back of gradients: this rank's rows, summed over ranks in their order."""
    rows = x.index_select(row_dim, inverse(order))
    return member.swap(torch.stack(rows.chunk(member.size, row_dim))).sum(0)


# --------------------------------------------------------------------------------------------------------
# Ranks that compute together reach a consensus, so that a difference is an error and never a hang.
#
# Before a forward or a backward exchanges tensors every rank tells a fingerprint of what it is about to do:
# which call it is, shapes, parameters, the chosen candidate, or the error it met. At the end it tells
# another one: of the same call, and whether its kernels failed. A kernel that fails stops no exchange
# (:class:`Attempt`), so all ranks get to that end. Only where fingerprints differ are the words behind them
# exchanged.
#
# Ranks in different calls are out of step. That cannot be mended here: one has left tensors behind, or has
# gone on to the next batch. So no later call over the group runs, and all of them say why. A rank that
# leaves a pass between two exchanges is out of step at once (:func:`exchanging`).


ERROR = "error"
BACKEND = "chosen backend"
FIGURES = "ATTNSEL_FIGURES (digest of the file)"
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
        listed = cp_global_ranks if isinstance(cp_global_ranks, (list, tuple)) else []
        flat = [n for item in listed for n in (item if isinstance(item, (list, tuple)) else [item])]
        if not set(own) <= set(flat):
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
