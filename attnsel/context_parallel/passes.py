"""Forward and backward over ranks: exchanges around kernel calls, and one autograd function around both.

Whatever a kernel raises, a rank makes every exchange of its pass, with NaN in the place of what is missing.
How the pass went is told at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.contract import Result
from attnsel.context_parallel.group import (
    BACKWARD,
    CALL,
    FORWARD,
    MODULE,
    RUNS,
    Attempt,
    ContextParallel,
    Fields,
    exchanging,
    gather_rows,
    heads_to_rows,
    reach_consensus,
    rows_to_heads,
    sum_rows,
)
from attnsel.context_parallel.parts import (
    Batch,
    RunningMerge,
    Slot,
    accumulation_dtype,
    pairs_of,
    sink_gradient,
    whole_part,
)
from attnsel.runtime.kernels import Kernel, NotTwice
from attnsel.selection.steps import KernelCall, gathered_parts, ring_parts, shifts


@dataclass(frozen=True)
class RankCall:
    """One attention call on this rank. Tensors are as in the contract, this rank's rows of them."""

    cp: ContextParallel
    kernel: Kernel
    batch: Batch
    fields: Fields
    order_q: Tensor | None = None  # rows of the a2a group in their order; None without one
    order_kv: Tensor | None = None
    order_all: Tensor | None = None  # rows of all keys in the sequence's order; all_gather only

    @property
    def row_dim(self) -> int:
        return 0 if self.batch.spec.packed else 2

    @property
    def gathers(self) -> bool:
        return self.order_all is not None

    def parts(self, shift: int, q: Tensor, k: Tensor) -> Iterator[tuple[Slot, KernelCall]]:
        """The kernel calls for the keys of the rank ``shift`` back; of all ranks if keys are gathered."""
        ring = self.cp.ring
        for slot in self.batch.slots:
            if ring.size == 1:
                yield slot, whole_part(q, k, self.batch.spec.packed)
                return
            if self.gathers:
                parts = gathered_parts(slot.sizes, ring.rank)
            else:
                parts = ring_parts(slot.sizes, ring.rank, (ring.rank - shift) % ring.size)
            for part in parts:
                yield slot, part

    @property
    def shifts(self) -> tuple[int, ...]:
        if self.gathers or self.cp.ring.size == 1:
            return (0,)
        return tuple(sorted({d for slot in self.batch.slots for d in shifts(slot.sizes)}))

    def with_seed(self, seed: Tensor | None) -> RankCall:
        return replace(self, batch=replace(self.batch, dropout_seed=seed))

    def end(self, which: str, attempt: Attempt, device: torch.device) -> None:
        """Raises on every rank if some rank's attempt failed."""
        fields = Fields({name: self.fields[name] for name in (CALL, MODULE)} | {RUNS: f"end of {which}"})
        reach_consensus(self.cp, fields, attempt.error, device)

    def my_heads(self, x: Tensor) -> Tensor:
        """[h] to those of this rank."""
        return x.chunk(self.cp.a2a.size)[self.cp.a2a.rank]

    def all_heads(self, x: Tensor, fill: float) -> Tensor:
        """[h] with this rank's heads in their place."""
        a2a = self.cp.a2a
        out = x.new_full((a2a.size, x.numel()), fill)
        out[a2a.rank] = x
        return out.flatten()


class Saved(NamedTuple):
    """What the forward leaves for the backward; ``of_kernels`` is what each kernel call saved."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    result: Result
    of_kernels: list[Any]


_NOT_TWICE = (
    "second derivatives are not computed over ranks: compute them on one rank, without a cp_group (backend "
    "'tiled' has them for every feature)"
)


def anchor_of(tensors: Sequence[Tensor | None]) -> Tensor:
    """An empty tensor that depends on all of these, for a backward that saves none of them as they came."""
    q, *rest = (t[:0].reshape(0) for t in tensors if t is not None)
    return torch.cat([q, *(t.to(q.dtype) for t in rest)])


class OverRanks(torch.autograd.Function):
    """``OverRanks.apply(call, anchor, q, k, v, bias, softmax_offset) -> (out, max_logit)``."""

    @staticmethod
    def forward(
        ctx: Any, call: RankCall, anchor: Tensor | None, *tensors: Any
    ) -> tuple[Tensor, Tensor | None]:
        attempt = Attempt()
        with exchanging(call.cp, call.fields, attempt):
            out, max_logit = OverRanks._outputs(ctx, call, attempt, anchor, *tensors)
        call.end(FORWARD, attempt, out.device)
        return out, max_logit

    @staticmethod
    def _outputs(
        ctx: Any, call: RankCall, attempt: Attempt, anchor: Tensor | None, *tensors: Any
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v, bias, sink = tensors
        a2a, dim = call.cp.a2a, call.row_dim
        if call.order_q is not None and call.order_kv is not None:
            q = heads_to_rows(a2a, q, call.order_q, dim)
            k, v = (heads_to_rows(a2a, t, call.order_kv, dim) for t in (k, v))
        my_sink = None if sink is None else call.my_heads(sink)
        if call.batch.spec.softmax_type == "off-by-one":
            my_sink = torch.zeros(q.shape[1], dtype=accumulation_dtype(q.dtype), device=q.device)
        out, lse, max_logit, saved = _forward(call, q, k, v, bias, my_sink, attempt)
        ctx.call, ctx.saved, ctx.learns = call, saved, sink is not None
        ctx.save_for_backward(anchor, q, k, v, bias, my_sink, out, lse)
        ctx.set_materialize_grads(False)
        if max_logit is not None:
            max_logit = call.all_heads(max_logit, float("-inf"))
            for member in call.cp.members:
                max_logit = member.largest(max_logit)
            ctx.mark_non_differentiable(max_logit)
        if call.order_q is not None:
            out = rows_to_heads(a2a, out, call.order_q, dim)
        return out, max_logit

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *unused: Any) -> tuple[Any, ...]:
        if dout is None:
            return (None,) * 7
        with torch.no_grad():
            grads = OverRanks._backward(ctx, dout)
        if torch.is_grad_enabled():  # create_graph
            grads = NotTwice.apply(_NOT_TWICE, len(grads), *grads, dout, ctx.saved_tensors[0])
        return None, None, *grads

    @staticmethod
    def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        call: RankCall = ctx.call
        attempt, fields = Attempt(), Fields(call.fields | {RUNS: BACKWARD})
        with attempt:  # raises where they were changed since, and where hooks of the caller do
            saved = ctx.saved_tensors
        reach_consensus(call.cp, fields, attempt.error, dout.device)
        with exchanging(call.cp, fields, attempt):
            grads = OverRanks._gradients(ctx, attempt, dout, *saved[1:])
        call.end(BACKWARD, attempt, dout.device)
        return grads

    @staticmethod
    def _gradients(ctx: Any, attempt: Attempt, dout: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
        call: RankCall = ctx.call
        q, k, v, bias, sink, out, lse = saved
        a2a, dim = call.cp.a2a, call.row_dim
        if call.order_q is not None:
            dout = heads_to_rows(a2a, dout, call.order_q, dim)
        kept = Saved(q, k, v, bias, Result(out, lse), ctx.saved)
        dq, dk, dv, dbias = _backward(call, kept, dout, attempt, learns_bias=ctx.needs_input_grad[5])
        dsink = None
        if ctx.learns:
            with attempt:
                mine = sink_gradient(sink, out, lse, dout, call.batch.spec.packed)
                dsink = call.all_heads(mine, 0.0).to(sink.dtype)
        if call.order_q is not None and call.order_kv is not None:
            dq = rows_to_heads(a2a, dq, call.order_q, dim)
            dk, dv = (rows_to_heads(a2a, t, call.order_kv, dim) for t in (dk, dv))
        return dq, dk, dv, dbias, dsink


def _forward(
    call: RankCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    attempt: Attempt,
) -> tuple[Tensor, Tensor | None, Tensor | None, list[Any]]:
    """out, lse and largest scores of this rank's queries, and what each kernel call saved."""
    sums = _Outputs(call)
    for shift, keys, values in _blocks(call, k, v):
        if attempt.error is None:
            with attempt:
                sums.add_step(shift, (q, keys, values), bias)
    with attempt:
        if attempt.error is None:
            return *sums.finished(q, sink), sums.saved
    out = q.new_full((*q.shape[:-1], v.shape[-1]), float("nan"))
    return out, None, _no_logits(q) if call.batch.spec.return_max_logit else None, []


class _Outputs:
    """Results of the kernel calls of a forward."""

    def __init__(self, call: RankCall) -> None:
        self.call = call
        self.merged: RunningMerge | None = None
        self.alone: Result | None = None
        self.largest: Tensor | None = None
        self.saved: list[Any] = []

    def add_step(self, shift: int, qkv: tuple[Tensor, Tensor, Tensor], bias: Tensor | None) -> None:
        batch, (q, keys, values) = self.call.batch, qkv
        if self.merged is None and batch.merges:
            self.merged = RunningMerge(q, values.shape[-1], batch.spec.packed)
        for slot, part in self.call.parts(shift, q, keys):
            inputs = batch.inputs(slot, part, qkv, bias, gathered=self.call.gathers)
            result = self.call.kernel.forward(batch.spec_of(slot, part), inputs)
            self.saved.append(result.saved)
            if result.max_logit is not None:
                highest = result.max_logit
                self.largest = highest if self.largest is None else torch.maximum(self.largest, highest)
            if self.merged is None:
                self.alone = result
            else:
                assert result.lse is not None
                self.merged.add(result.out, result.lse, part.q_rows)

    def finished(self, q: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """out, lse and largest scores."""
        largest = None
        if self.call.batch.spec.return_max_logit:
            largest = _no_logits(q) if self.largest is None else self.largest
        if self.merged is None:
            assert self.alone is not None
            return self.alone.out, self.alone.lse, largest
        if sink is not None:
            self.merged.add_sink(sink)
        out, lse = self.merged.finished()
        return out, lse, largest


def _no_logits(q: Tensor) -> Tensor:
    return torch.full((q.shape[1],), float("-inf"), dtype=accumulation_dtype(q.dtype), device=q.device)


class _Sums:
    """Gradients of this rank's queries and bias, which the kernel calls of a backward add up to."""

    def __init__(self, call: RankCall, kept: Saved, dout: Tensor, *, learns_bias: bool) -> None:
        self.call, self.kept, self.dout = call, kept, dout
        q, bias, dtype = kept.q, kept.bias, accumulation_dtype(kept.q.dtype)
        self.dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        self.dbias: Tensor | None = None
        if learns_bias and bias is not None:
            self.dbias = torch.zeros(bias.shape, dtype=dtype, device=q.device)
        self.of_kernels = iter(kept.of_kernels)

    def add_step(self, shift: int, keys: Tensor, values: Tensor, dk: Tensor, dv: Tensor) -> None:
        """One step's; those of its keys and values are added to dk and dv."""
        call, (q, _, _, bias, result, _) = self.call, self.kept
        for slot, part in call.parts(shift, q, keys):
            inputs = call.batch.inputs(slot, part, (q, keys, values), bias, gathered=call.gathers)
            if self.dbias is not None and inputs.bias is not None:
                inputs = inputs._replace(bias=inputs.bias.detach().requires_grad_())
            rows, cols = _slices(call, part)
            lse = None if result.lse is None else result.lse[rows]
            mine = Result(result.out[rows], lse, None, next(self.of_kernels))
            grads = call.kernel.backward(call.batch.spec_of(slot, part), inputs, mine, self.dout[rows])
            self.dq[rows] += grads.q
            dk[cols] += grads.k
            dv[cols] += grads.v
            if self.dbias is not None and grads.bias is not None:
                self.dbias[pairs_of(self.dbias, part)] += grads.bias

    def finished(self) -> tuple[Tensor, Tensor | None]:
        """dq and dbias."""
        q, bias = self.kept.q, self.kept.bias
        dbias = None if self.dbias is None or bias is None else self.dbias.to(bias.dtype)
        return self.dq.to(q.dtype), dbias


def _backward(
    call: RankCall, kept: Saved, dout: Tensor, attempt: Attempt, *, learns_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of this rank's q, k, v and bias. Those of keys travel on with the keys, one step behind."""
    q, k, v = kept[:3]
    ring, dtype, order = call.cp.ring, accumulation_dtype(q.dtype), call.shifts
    with attempt:
        sums = _Sums(call, kept, dout, learns_bias=learns_bias)
    wait = None
    dkv = k.new_zeros(0)
    for step, (shift, keys, values) in enumerate(_blocks(call, k, v)):
        dkv = torch.zeros(keys.numel() + values.numel(), dtype=dtype, device=k.device)
        if attempt.error is None:
            with attempt:
                sums.add_step(shift, keys, values, *_unpacked(dkv, keys, values))
        if attempt.error is not None:
            dkv.fill_(float("nan"))
        if wait is not None:
            dkv += wait()
            wait = None
        hop = (order[step + 1] if step + 1 < len(order) else ring.size) - shift
        if hop % ring.size and not call.gathers:
            wait = call.cp.exchange.post(dkv, hop, tag=1)
    if wait is not None:
        dkv = wait()
    if call.order_all is not None:
        whole = _like_gathered(call, k), _like_gathered(call, v)
        dk, dv = (sum_rows(ring, t, call.order_all, call.row_dim) for t in _unpacked(dkv, *whole))
    else:
        dk, dv = _unpacked(dkv, k, v)
    with attempt:
        if attempt.error is None:
            dq, dbias = sums.finished()
            return dq, dk.to(k.dtype), dv.to(v.dtype), dbias
    return torch.full_like(q, float("nan")), dk.to(k.dtype), dv.to(v.dtype), None


def _blocks(call: RankCall, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Keys and values step by step: the rank's own, then those that arrive; or all gathered in one step."""
    if call.order_all is not None:
        ring = call.cp.ring
        keys, values = (gather_rows(ring, t, call.order_all, call.row_dim) for t in (k, v))
        yield 0, keys, values
    elif call.cp.ring.size == 1:
        yield 0, k, v
    else:
        block = torch.cat([k.reshape(-1), v.reshape(-1)])
        for shift, arrived in call.cp.exchange.around(block, call.shifts):
            keys, values = _unpacked(arrived, k, v)
            yield shift, keys, values


def _unpacked(block: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A flat buffer as views of the shapes of k and v."""
    return block[: k.numel()].view(k.shape), block[k.numel() :].view(v.shape)


def _like_gathered(call: RankCall, t: Tensor) -> Tensor:
    shape = list(t.shape)
    shape[call.row_dim] *= call.cp.ring.size
    return t.new_empty(1).expand(shape)


def _slices(call: RankCall, part: KernelCall) -> tuple[Any, Any]:
    """Where a part's rows and columns lie; kernels give packed gradients for all rows, 0 outside the part."""
    if call.batch.spec.packed:
        return slice(None), slice(None)
    rows, cols = part.q_rows, part.kv_rows
    every = slice(None)
    return (every, every, slice(rows.start, rows.stop)), (every, every, slice(cols.start, cols.stop))
