"""The exchanges, all of them torch.distributed's: a ring that posts before it computes, gathers, all-to-all.

Row orders. A rank's rows are [head chunk, tail chunk]; concatenating ranks gives them rank by rank, and
``sequence_order`` says where each row of the sequence lies in that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnsel.errors import ContextParallelError

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

        def send() -> list[Any]:
            with m.speaking(f"sending to global rank {to} and receiving from {come}"):
                return dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, x, to, m.group, tag),
                        dist.P2POp(dist.irecv, received, come, m.group, tag),
                    ]
                )

        def arrive(works: list[Any]) -> None:
            with m.speaking(f"sending to global rank {to} and receiving from {come}"):
                for work in works:
                    work.wait()

        if x.device.type != "cuda":
            works = send()

            def wait() -> Tensor:
                arrive(works)
                return received

            return wait
        return self._on_stream(x, received, send, arrive)

    def _on_stream(
        self,
        x: Tensor,
        received: Tensor,
        send: Callable[[], list[Any]],
        arrive: Callable[[list[Any]], None],
    ) -> Callable[[], Tensor]:
        stream = self.stream = self.stream or torch.cuda.Stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            works = send()
        for t in (x, received):
            t.record_stream(stream)

        def wait() -> Tensor:
            with torch.cuda.stream(stream):
                arrive(works)
            torch.cuda.current_stream(x.device).wait_stream(stream)
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
