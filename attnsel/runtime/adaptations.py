"""Adaptations on tensors: into the changed call, and back with the output and the gradients.

A selected candidate lists its adaptations. ``selection/adaptations.py`` has what each makes of the question,
and why that is exact; here each, under the same name and in the same order, is a :class:`TensorStep`.
``adapted`` puts the steps around the kernel of the changed question, whichever kernel that is: autograd flows
through ``into`` and ``out``, which are plain PyTorch operations; where autograd does not record (inside an
operator), ``dout`` and ``grads`` are their transposes, written out.

A mask is folded by the kernel that takes one, so ``fold_mask`` has no step. Nothing here reads a tensor on
the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.contract import Grads
from attnsel.params import AttentionParams, default_softmax_scale
from attnsel.params.layout import FORMATS
from attnsel.runtime.call import Call, Config, Extras
from attnsel.runtime.inputs import mask_pair, real_lengths
from attnsel.selection.adaptations import stages
from attnsel.verdicts.reasons import Adaptation

# --------------------------------------------------------------------------------------------------------
# Where rows lie: those of packed sequences and of a padded batch, those added to it, and its padding.
#
# Nothing here reads a tensor on the host.


class Places:
    """Which rows of packed sequences and of a padded batch are each other's; see ``Unpack``."""

    def __init__(self, cu: Any, cu_padded: Any, rows: int, fmt: str) -> None:
        self.cu, self.starts = cu.long(), (cu if cu_padded is None else cu_padded).long()
        self.rows, self.format = rows, fmt

    def unpacked(self, packed: Tensor, empty: float = 0.0) -> Tensor:
        """[t, ...] -> [b, s, ...] (or the format's order), ``empty`` beyond each length."""
        rows = torch.arange(self.rows, device=packed.device)
        inside = rows < (self.cu[1:] - self.cu[:-1])[:, None]
        packed = lengthened(packed, 0, max(1, packed.shape[0]))  # a row to take, where there is none
        index = (self.starts[:-1, None] + rows).clamp(max=packed.shape[0] - 1)
        if self.format == "sbhd":
            index, inside = index.T, inside.T
        taken = packed.index_select(0, index.flatten())
        taken = taken.masked_fill_(~inside.reshape(-1, *[1] * (packed.dim() - 1)), empty)
        dense = torch.unflatten(taken, 0, index.shape)
        return dense.transpose(1, 2) if self.format == "bhsd" else dense

    def packed(self, dense: Tensor, tokens: int, empty: float = 0.0) -> Tensor:
        """[b, s, ...] (or the format's order) -> [tokens, ...], ``empty`` where no sequence lies."""
        at = torch.arange(tokens, device=dense.device)
        # The last sequence that starts at or before a row; empty ones start where the next does.
        sequence = torch.searchsorted(self.starts, at, right=True) - 1
        inside = (sequence >= 0) & (sequence < self.cu.shape[0] - 1)
        sequence = sequence.clamp(0, self.cu.shape[0] - 2)
        row = at - self.starts[sequence]
        inside &= row < (self.cu[1:] - self.cu[:-1])[sequence]
        row = row.clamp(0, self.rows - 1)
        if self.format == "bhsd":
            dense = dense.transpose(1, 2)
        dense = lengthened(dense, 0 if self.format == "sbhd" else 1, max(1, self.rows))
        taken = dense[row, sequence] if self.format == "sbhd" else dense[sequence, row]
        return taken.masked_fill_(~inside.reshape(-1, *[1] * (taken.dim() - 1)), empty)


def cu_seqlens_of(extras: Any) -> tuple[Tensor, Tensor]:
    """cu_seqlens of q and kv of a padded batch; one tensor where one mask says both."""
    if extras.cu_seqlens_q is not None and extras.cu_seqlens_kv is not None:
        return extras.cu_seqlens_q, extras.cu_seqlens_kv
    made = [
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        for lengths in dict.fromkeys(real_lengths(extras))
        if lengths is not None
    ]
    return made[0], made[-1]


def with_room(cu: Tensor, rows: int) -> Tensor:
    """Starts of packed sequences whose memory goes on to ``rows`` after the last of them."""
    return torch.cat([cu[:-1], cu.new_full((1,), rows)])


def lengthened(t: Tensor, axis: int, to: int, value: float = 0.0) -> Tensor:
    """``t`` with ``value`` behind what it holds along one axis; dense, and itself where nothing is added."""
    return enlarged(t, {axis: to}, value)


def enlarged(t: Tensor, to: dict[int, int], value: float = 0.0) -> Tensor:
    """``lengthened`` along several axes at once, in one piece of memory.

    ``torch.nn.functional.pad`` would keep channels-last strides, which some shapes seem to have.
    """
    shape = list(t.shape)
    for axis, length in to.items():
        shape[axis] = length
    if shape == list(t.shape):
        return t
    held = made = t.new_full(shape, value)
    for axis in to:
        held = held.narrow(axis, 0, t.shape[axis])
    held.copy_(t)
    return made


def outside(extras: Any, rows: int) -> Tensor:
    """Bool [b, rows], True for the padding of a batch whose queries and keys are equally long."""
    lengths, _ = real_lengths(extras)
    assert lengths is not None
    beyond: Tensor = torch.arange(rows, device=lengths.device) >= lengths[:, None]
    return beyond


STEPS: dict[str, type[TensorStep]] = {}


class TensorStep:
    """One adaptation. ``before`` and ``after`` are the questions on its two sides.

    ``into`` changes the call; ``out`` and ``lse`` bring results back, ``grads`` the gradients (its own
    transpose), and ``dout`` is the transpose of ``out``. All but ``into`` are given the call before the step.
    The defaults change nothing.

    Where a backward starts from the results of a forward that ran before, they take the way of ``dout``:
    ``out`` enters a backward only as rowsum(dout * out), so zeros may stand where the step cut it off, as
    dout is zero there. ``inner_lse`` has what makes probabilities finite in rows that were cut off.
    """

    def __init_subclass__(cls, name: str) -> None:
        STEPS[name] = cls

    def __init__(self, adaptation: Adaptation, before: AttentionParams, after: AttentionParams) -> None:
        self.changes = dict(adaptation.changes)
        self.before, self.after = before, after
        self.form = FORMATS[before.qkv_format]

    def into(self, call: Call) -> Call:
        return call

    def out(self, out: Tensor, call: Call) -> Tensor:
        return out

    def lse(self, lse: Tensor, call: Call) -> Tensor:
        return lse

    def inner_lse(self, lse: Tensor, call: Call) -> Tensor:
        return lse

    def dout(self, dout: Tensor, call: Call) -> Tensor:
        return dout

    def grads(self, grads: Grads, call: Call) -> Grads:
        return grads


class DropMask(TensorStep, name="drop_mask"):
    def into(self, call: Call) -> Call:
        return call._replace(extras=call.extras._replace(attention_mask=None))


class Unpack(TensorStep, name="unpack"):
    """thd to bshd and back."""

    def into(self, call: Call) -> Call:
        extras = call.extras
        to_q, to_kv = self._places(extras, 0), self._places(extras, 1)
        kept = extras._replace(
            cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None
        )
        return call._replace(
            q=to_q.unpacked(call.q), k=to_kv.unpacked(call.k), v=to_kv.unpacked(call.v), extras=kept
        )

    def out(self, out: Tensor, call: Call) -> Tensor:
        return self._places(call.extras, 0).packed(out, call.q.shape[0])

    def lse(self, lse: Tensor, call: Call) -> Tensor:
        rows = self._places(call.extras, 0).packed(lse.transpose(1, 2), call.q.shape[0], -torch.inf)
        return rows.transpose(0, 1)

    def inner_lse(self, lse: Tensor, call: Call) -> Tensor:
        return self._places(call.extras, 0).unpacked(lse.transpose(0, 1), -torch.inf).transpose(1, 2)

    def dout(self, dout: Tensor, call: Call) -> Tensor:
        return self._places(call.extras, 0).unpacked(dout)

    def grads(self, grads: Grads, call: Call) -> Grads:
        kv = self._places(call.extras, 1)
        return grads._replace(
            q=self._places(call.extras, 0).packed(grads.q, call.q.shape[0]),
            k=kv.packed(grads.k, call.k.shape[0]),
            v=kv.packed(grads.v, call.k.shape[0]),
        )

    def _places(self, extras: Extras, side: int) -> Places:
        if side == 0:
            return Places(extras.cu_seqlens_q, extras.cu_seqlens_q_padded, self.before.max_seqlen_q, "bshd")
        return Places(extras.cu_seqlens_kv, extras.cu_seqlens_kv_padded, self.before.max_seqlen_kv, "bshd")


class ZeroPadding(TensorStep, name="zero_padding"):
    """Padded rows of q, k and v as zeros, and of what comes back as what the contract says of them."""

    def into(self, call: Call) -> Call:
        beyond = self._beyond(call)
        dense = {"memory_format": torch.contiguous_format}
        zeroed = {n: getattr(call, n).clone(**dense).masked_fill_(beyond, 0.0) for n in ("q", "k", "v")}
        extras = call.extras._replace(
            attention_mask=None, cu_seqlens_q=None, cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None
        )
        return call._replace(**zeroed, extras=extras)

    def out(self, out: Tensor, call: Call) -> Tensor:
        return out.masked_fill(self._beyond(call), 0.0)

    def lse(self, lse: Tensor, call: Call) -> Tensor:
        return lse.masked_fill(outside(call.extras, self.before.max_seqlen_q)[:, None], -torch.inf)

    def inner_lse(self, lse: Tensor, call: Call) -> Tensor:
        return lse.masked_fill(outside(call.extras, self.before.max_seqlen_q)[:, None], torch.inf)

    def dout(self, dout: Tensor, call: Call) -> Tensor:
        return dout.masked_fill(self._beyond(call), 0.0)

    def grads(self, grads: Grads, call: Call) -> Grads:
        beyond = self._beyond(call)
        return grads._replace(
            **{name: getattr(grads, name).masked_fill(beyond, 0.0) for name in ("q", "k", "v")}
        )

    def _beyond(self, call: Call) -> Tensor:
        """Bool, broadcastable to q and to k, which are equally long."""
        beyond = outside(call.extras, self.before.max_seqlen_q)
        if self.form.name == "sbhd":
            return beyond.T[:, :, None, None]
        return beyond[:, None, :, None] if self.form.name == "bhsd" else beyond[:, :, None, None]


class PadSequence(TensorStep, name="pad_sequence"):
    def __init__(self, adaptation: Adaptation, before: AttentionParams, after: AttentionParams) -> None:
        super().__init__(adaptation, before, after)
        self.axis = self.form.rows
        self.rows = (before.max_seqlen_q, before.max_seqlen_kv)
        self.to = (after.max_seqlen_q, after.max_seqlen_kv)

    def into(self, call: Call) -> Call:
        q = lengthened(call.q, self.axis, self.to[0])
        k, v = (lengthened(t, self.axis, self.to[1]) for t in (call.k, call.v))
        extras = call.extras
        if extras.core_attention_bias is not None:
            extras = extras._replace(core_attention_bias=self._bias(extras.core_attention_bias))
        if extras.attention_mask is not None:
            extras = extras._replace(attention_mask=self._mask(extras))
        elif self.after.padding and not self.before.padding:
            cu_q, cu_kv = self._lengths(q.device)
            extras = extras._replace(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
        return call._replace(q=q, k=k, v=v, extras=extras)

    def _bias(self, bias: Tensor) -> Tensor:
        """Zeros behind the dimensions that are not broadcast."""
        axes = [axis for axis in (-2, -1) if bias.dim() >= -axis and bias.shape[axis] != 1]
        return enlarged(bias, {axis: self.to[axis] for axis in axes})

    def _mask(self, extras: Extras) -> Any:
        """Added keys masked out; added rows of a padding mask are padding."""
        mask = extras.attention_mask
        if self.before.padding:
            pair = mask_pair(extras)
            longer = [lengthened(m, -1, to, True) for m, to in zip(pair, self.to, strict=True)]
            if isinstance(mask, (tuple, list)):
                return tuple(longer)
            return longer[0] if self.to[0] == self.to[1] else tuple(longer)
        to: dict[int, int] = {}
        if self.to[1] > self.rows[1]:
            mask = mask.expand(*mask.shape[:-1], self.rows[1]) if mask.dim() else mask.expand(self.rows[1])
            to[-1] = self.to[1]
        if mask.dim() > 1 and mask.shape[-2] != 1:
            to[-2] = self.to[0]
        return enlarged(mask, to, True)

    def _lengths(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The real lengths; one tensor for both where they are equal, which some kernels profit from."""
        ends = torch.arange(self.before.batch_size + 1, dtype=torch.int32, device=device)
        cu = [ends * rows for rows in dict.fromkeys(self.rows)]
        return cu[0], cu[-1]

    def out(self, out: Tensor, call: Call) -> Tensor:
        return out.narrow(self.axis, 0, self.rows[0])

    def lse(self, lse: Tensor, call: Call) -> Tensor:
        return lse.narrow(2, 0, self.rows[0])

    def inner_lse(self, lse: Tensor, call: Call) -> Tensor:
        """Added rows are padding (-inf), or rows that see keys: exp(score - inf) is 0 for every score."""
        return lengthened(lse, 2, self.to[0], -torch.inf if self.after.padding else torch.inf)

    def dout(self, dout: Tensor, call: Call) -> Tensor:
        return lengthened(dout, self.axis, self.to[0])

    def grads(self, grads: Grads, call: Call) -> Grads:
        bias, given = grads.bias, call.extras.core_attention_bias
        if bias is not None and given is not None:
            for axis in range(-min(2, given.dim()), 0):
                bias = bias.narrow(axis, 0, given.shape[axis])
        return grads._replace(
            q=grads.q.narrow(self.axis, 0, self.rows[0]),
            k=grads.k.narrow(self.axis, 0, self.rows[1]),
            v=grads.v.narrow(self.axis, 0, self.rows[1]),
            bias=bias,
        )


class PadHeadDimQK(TensorStep, name="pad_head_dim_qk"):
    def into(self, call: Call) -> Call:
        to = self.after.head_dim_qk
        return call._replace(q=lengthened(call.q, -1, to), k=lengthened(call.k, -1, to))

    def grads(self, grads: Grads, call: Call) -> Grads:
        d = self.before.head_dim_qk
        return grads._replace(q=grads.q.narrow(-1, 0, d), k=grads.k.narrow(-1, 0, d))


class PadHeadDimV(TensorStep, name="pad_head_dim_v"):
    def into(self, call: Call) -> Call:
        return call._replace(v=lengthened(call.v, -1, self.after.head_dim_v))

    def out(self, out: Tensor, call: Call) -> Tensor:
        return out.narrow(-1, 0, self.before.head_dim_v)

    def dout(self, dout: Tensor, call: Call) -> Tensor:
        return lengthened(dout, -1, self.after.head_dim_v)

    def grads(self, grads: Grads, call: Call) -> Grads:
        return grads._replace(v=grads.v.narrow(-1, 0, self.before.head_dim_v))


class ExpandGqa(TensorStep, name="expand_gqa"):
    def into(self, call: Call) -> Call:
        copies, axis = self.after.num_gqa_groups // self.before.num_gqa_groups, self._axis
        return call._replace(
            k=call.k.repeat_interleave(copies, dim=axis), v=call.v.repeat_interleave(copies, dim=axis)
        )

    def grads(self, grads: Grads, call: Call) -> Grads:
        return grads._replace(k=self._sum(grads.k), v=self._sum(grads.v))

    @property
    def _axis(self) -> int:
        return self.form.heads

    def _sum(self, grad: Tensor) -> Tensor:
        """The gradient of repeated kv heads, summed over the copies of each in float32 or better."""
        copies = torch.unflatten(grad, self._axis, (self.before.num_gqa_groups, -1))
        wide = torch.promote_types(grad.dtype, torch.float32)
        return copies.sum(self._axis + 1, dtype=wide).to(grad.dtype)


class Contiguous(TensorStep, name="contiguous"):
    def into(self, call: Call) -> Call:
        dense = {
            name: getattr(call, name).clone(memory_format=torch.contiguous_format)
            for name in ("q", "k", "v")
            if name in self.changes and getattr(self.before.tensors, name) is not None
        }
        return call._replace(**dense)


class Pack(TensorStep, name="pack"):
    """A padded batch to thd, in room for all its rows, and back."""

    def into(self, call: Call) -> Call:
        cu = cu_seqlens_of(call.extras)
        to_q, to_kv = self._places(cu[0], 0), self._places(cu[1], 1)
        rows_q, rows_kv = self._room
        extras = call.extras._replace(
            attention_mask=None,
            cu_seqlens_q=cu[0],
            cu_seqlens_kv=cu[1],
            cu_seqlens_q_padded=with_room(cu[0], rows_q),
            cu_seqlens_kv_padded=with_room(cu[1], rows_kv),
            max_seqlen_q=self.before.max_seqlen_q,
            max_seqlen_kv=self.before.max_seqlen_kv,
        )
        return call._replace(
            q=to_q.packed(call.q, rows_q),
            k=to_kv.packed(call.k, rows_kv),
            v=to_kv.packed(call.v, rows_kv),
            extras=extras,
        )

    def out(self, out: Tensor, call: Call) -> Tensor:
        return self._places(cu_seqlens_of(call.extras)[0], 0).unpacked(out)

    def lse(self, lse: Tensor, call: Call) -> Tensor:
        return self._places_of_lse(call).unpacked(lse.transpose(0, 1), -torch.inf).transpose(1, 2)

    def inner_lse(self, lse: Tensor, call: Call) -> Tensor:
        rows = self._places_of_lse(call).packed(lse.transpose(1, 2), self._room[0], -torch.inf)
        return rows.transpose(0, 1)

    def dout(self, dout: Tensor, call: Call) -> Tensor:
        return self._places(cu_seqlens_of(call.extras)[0], 0).packed(dout, self._room[0])

    def grads(self, grads: Grads, call: Call) -> Grads:
        cu = cu_seqlens_of(call.extras)
        kv = self._places(cu[1], 1)
        return grads._replace(
            q=self._places(cu[0], 0).unpacked(grads.q), k=kv.unpacked(grads.k), v=kv.unpacked(grads.v)
        )

    @property
    def _room(self) -> tuple[int, int]:
        p = self.before
        return p.batch_size * p.max_seqlen_q, p.batch_size * p.max_seqlen_kv

    def _places(self, cu: Tensor, side: int) -> Places:
        rows = self.before.max_seqlen_kv if side else self.before.max_seqlen_q
        return Places(cu, None, rows, self.form.name)

    def _places_of_lse(self, call: Call) -> Places:
        """The same for [b, s, h], whatever the call's format."""
        return Places(cu_seqlens_of(call.extras)[0], None, self.before.max_seqlen_q, "bshd")


# ---- around a kernel --------------------------------------------------------------------------------


class Known(NamedTuple):
    """What a backward may start from: ``out`` as the caller has it, ``lse`` [b, h, s_q] or [h, t_q]."""

    out: Tensor
    lse: Tensor


RunGradients = Callable[..., Grads]  # (call, dout, known: Known | None = None)


class Adapted(NamedTuple):
    """The steps of one selection, and the question and static side that the kernel is bound for."""

    steps: tuple[TensorStep, ...]
    config: Config
    params: AttentionParams
    asked: Config

    @property
    def drops_mask_alone(self) -> bool:
        """Whether the kernel's call is the caller's but for a mask, which it does not look at."""
        return all(isinstance(step, DropMask) for step in self.steps)

    def enter(self, call: Call) -> list[Call]:
        """The call as it was made, then after each step; the last one is the kernel's."""
        calls = [call]
        for step in self.steps:
            calls.append(step.into(calls[-1]))
        calls[-1] = calls[-1]._replace(config=self.config)
        return calls

    def around(self, run: Callable[[Call], Any]) -> Callable[[Call], Any]:
        """``run(call)`` of the changed question, as one of the question that was asked."""
        asked, has_lse = self.asked, self.asked.return_lse

        def adapted_run(call: Call) -> Any:
            calls = self.enter(call)
            given = run(calls[-1])
            results = list(given) if isinstance(given, tuple) else [given]
            for step, before in zip(reversed(self.steps), reversed(calls[:-1]), strict=True):
                results[0] = step.out(results[0], before)
                if has_lse:
                    results[1] = step.lse(results[1], before)
            if asked.flatten_heads:
                results[0] = results[0].flatten(-2)
            return results[0] if len(results) == 1 else tuple(results)

        return adapted_run

    def around_gradients(self, run: RunGradients) -> RunGradients:
        """The same for ``run(call, dout, known) -> Grads``, where autograd does not record; ``known`` is the
        output and log-sum-exp of a forward that ran before, or None."""
        asked, p = self.asked, self.steps[0].before

        def adapted_run(call: Call, dout: Tensor, known: Known | None = None) -> Grads:
            calls = self.enter(call)
            if asked.flatten_heads:
                dout = torch.unflatten(dout, -1, (p.num_heads, p.head_dim_v))
                if known is not None:
                    known = known._replace(out=torch.unflatten(known.out, -1, (p.num_heads, p.head_dim_v)))
            for step, before in zip(self.steps, calls[:-1], strict=True):
                dout = step.dout(dout, before)
                if known is not None:
                    known = Known(step.dout(known.out, before), step.inner_lse(known.lse, before))
            grads = run(calls[-1], dout, known)
            for step, before in zip(reversed(self.steps), reversed(calls[:-1]), strict=True):
                grads = step.grads(grads, before)
            return grads

        return adapted_run


def adapted(config: Config, p: AttentionParams, adaptations: tuple[Adaptation, ...]) -> Adapted | None:
    """The steps that a selection lists; None where the kernel takes the call as it is, or folds a mask."""
    steps: list[TensorStep] = []
    inner = p
    for adaptation, before, after in stages(p, adaptations):
        if adaptation.name in STEPS:
            steps.append(STEPS[adaptation.name](adaptation, before, after))
            inner = after
    if not steps:
        return None
    given = config.softmax_scale
    changed = config.replace(
        qkv_format=inner.qkv_format,
        attn_mask_type=inner.attn_mask_type,
        # A scale that follows from the head dimension follows from the real one.
        softmax_scale=default_softmax_scale(p.head_dim_qk) if given is None else given,
        flatten_heads=False,
        # What a module was built for was held against the caller's tensors.
        num_attention_heads=None,
        num_gqa_groups=None,
        head_dim_qk=None,
        head_dim_v=None,
    )
    return Adapted(tuple(steps), changed, inner, config)
