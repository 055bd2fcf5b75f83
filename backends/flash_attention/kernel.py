"""The contract for FlashAttention's packages: what they share, from the contract's tensors and back.

Each package says how its functions are called (``Package``); everything else is the same: bottom-right
windows, padding and gaps as sequences of their own (backends/rows.py), zeros where no sequence is, and
lse as the contract has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attnsel.backends.checks import Five, added, check_gradients, check_tensors, misalignment, readable
from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.rows import (
    Form,
    above_zero,
    bottom_right_window,
    check_rows,
    check_rows_given,
    lse_of_forward,
)


class FlashCall(NamedTuple):
    """One call as the packages see it: q, k and v [b, s, h, d], or rows [t, h, d] with cu_seqlens.

    With ``block_table`` k and v are pools [pages, page_size, g, d], ``seqused_kv`` says how many keys each
    sequence has, and ``cu_seqlens_kv`` says the same in another way. ``gaps``: some of the sequences are room
    between others, and may be longer than ``max_seqlen_q`` and ``max_seqlen_kv``; their results are nobody's.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    max_seqlen_q: int
    max_seqlen_kv: int
    seqused_kv: Tensor | None
    block_table: Tensor | None
    softmax_scale: float
    window_left: int  # from the bottom-right diagonal, -1 for no bound
    window_right: int
    softcap: float
    dropout_p: float
    deterministic: bool
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    gaps: bool

    @property
    def causal(self) -> bool:
        return self.window_left < 0 and self.window_right == 0

    def arguments(self, *, keys: bool = True, longest: bool = True) -> dict[str, Any]:
        """q, k, v and where sequences lie, by the names that all generations have; of keys, and the longest,
        where that is to be said."""
        given: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v}
        if self.cu_seqlens_q is None:
            return given
        q, k = ("q", self.cu_seqlens_q, self.max_seqlen_q), ("k", self.cu_seqlens_kv, self.max_seqlen_kv)
        for side, cu_seqlens, most in (q, k) if keys else (q,):
            given[f"cu_seqlens_{side}"] = cu_seqlens
            if longest:
                given[f"max_seqlen_{side}"] = most
        return given


class Forward(NamedTuple):
    """``lse`` [b, h, s] or [h, t]; ``saved`` goes back to the backward."""

    out: Tensor
    lse: Tensor | None
    saved: tuple[Any, ...] = ()


class Package(Protocol):
    """How one of them is called.

    name: the candidate's. without: inputs that no argument says. lse_by_sequence: whether a packed call's
    lse is [n, h, longest].
    """

    @property
    def name(self) -> str: ...

    @property
    def without(self) -> tuple[str, ...]: ...

    def check(self, spec: Spec, inputs: Inputs, window: tuple[int, int]) -> None:
        """Raise ValueError for what the package would take and get wrong, Missing where it is not there.

        ``window``: the bounds from the bottom-right diagonal.
        """

    @property
    def lse_by_sequence(self) -> bool: ...

    def forward(self, call: FlashCall, need_lse: bool) -> Forward: ...

    def backward(
        self, call: FlashCall, five: Five, lse: Tensor, saved: tuple[Any, ...], dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k, v and the sinks; ``dlse`` is [b, s, h] or [t, h]."""

    def public(self, call: FlashCall) -> Callable[[Tensor, Tensor, Tensor], Any]:
        """The package's own differentiable function for a dense call of these settings: out, or a tuple that
        begins with it."""


class Kernel:
    """The contract's functions for one package."""

    def __init__(self, package: Package) -> None:
        self.package = package

    def prepare(self, spec: Spec, inputs: Inputs) -> None:
        """Raises ValueError, naming the argument, for what the package cannot take or would misunderstand,
        and RuntimeError where it does not import."""
        self._window(spec, inputs)

    def _window(self, spec: Spec, inputs: Inputs) -> tuple[int, int]:
        """The bounds of a call that was looked at as ``prepare`` does."""
        name = self.package.name
        check_tensors(spec, inputs)
        check_rows_given(spec, inputs)
        window = bottom_right_window(name, spec, inputs)
        self.package.check(spec, inputs, window)
        for field in self.package.without:
            if getattr(inputs, field) is not None:
                raise ValueError(f"{name}: {field}: there is no argument for it")
        if spec.q_offset or spec.kv_offset:
            raise ValueError(f"{name}: q_offset, kv_offset: there is no argument for them")
        if spec.return_max_logit:
            raise ValueError(f"{name}: return_max_logit: it does not give the largest score")
        for which in ("q", "k", "v"):
            t = getattr(inputs, which)
            if t.stride(-1) != 1:
                raise ValueError(f"{name}: {which}.stride(-1) must be 1; got {t.stride(-1)}")
            wrong = misalignment(t)
            if wrong is not None:
                raise ValueError(f"{name}: {which}{wrong}")
        check_rows(name, spec, inputs)
        return window

    def forward(self, spec: Spec, inputs: Inputs) -> Result:
        """The contract's forward. Raises as ``prepare`` does."""
        window = self._window(spec, inputs)
        with torch.no_grad():
            form = Form(spec, inputs, self.package.lse_by_sequence)
            call, _ = _call(spec, inputs, form, window)
            need_lse = spec.need_lse or spec.need_grad
            out, lse, saved = self.package.forward(call, need_lse)
            if not need_lse:
                return Result(form.out(out), None, None, saved)
            assert lse is not None
            # Of a real row, only one without a key has +inf.
            lse = lse.masked_fill_(lse == torch.inf, -torch.inf)
            return Result(form.out(out), form.lse(lse), None, saved)

    def backward(
        self, spec: Spec, inputs: Inputs, result: Result, dout: Tensor, dlse: Tensor | None = None
    ) -> Grads:
        """The contract's backward, from ``result.out`` and ``result.lse`` (which may be merged ones).

        Raises ValueError as ``prepare`` does, and for a forward without ``lse``, or with dropout and without
        ``saved``.
        """
        window = self._window(spec, inputs)
        lse = lse_of_forward(spec, result)
        check_gradients(spec, inputs, result, dout, dlse)
        with torch.no_grad():
            form = Form(spec, inputs, self.package.lse_by_sequence)
            call, factor = _call(spec, inputs, form, window)
            out, dout, lse = form.rows(result.out), form.rows(dout), form.lse_of_op(lse)
            outside = None if form.sequences is None else form.sequences.q.outside
            if call.sinks is not None and outside is not None:
                # What is no sequence's must not reach the sinks' gradient, which is summed over all rows.
                dout = dout.masked_fill(outside.view(-1, 1, 1), 0.0)
                lse = lse.masked_fill(outside, torch.inf)
            five = Five(call.q, call.k, call.v, readable(out), readable(dout))
            rows = None if dlse is None else form.lse_rows(dlse)
            dq, dk, dv, dsinks = self.package.backward(call, five, lse, result.saved, rows)
            dq, dk, dv = (
                grad.narrow(-1, 0, t.shape[-1]) for grad, t in zip((dq, dk, dv), five, strict=False)
            )
            return Grads(
                form.out(dq if factor == 1.0 else dq * factor),
                form.kv_grad(dk),
                form.kv_grad(dv),
                None,
                None if dsinks is None or inputs.softmax_offset is None else dsinks.to(inputs.softmax_offset),
            )

    def bind(self, spec: Spec, inputs: Inputs) -> Callable[..., Tensor] | None:
        """The package's own differentiable function, for dense batches of q, k and v alone; None for
        others."""
        window = self._window(spec, inputs)
        if spec.packed or spec.softmax_type != "vanilla" or any(t is not None for t in inputs[3:]):
            return None
        call, factor = _call(spec, inputs, Form(spec, inputs), window)
        function = self.package.public(call)

        def bound(q: Tensor, k: Tensor, v: Tensor, *others: None) -> Tensor:
            if any(other is not None for other in others):
                raise ValueError("this call was bound for q, k and v alone")
            q = q.transpose(1, 2)
            out = function(q if factor == 1.0 else q * factor, k.transpose(1, 2), v.transpose(1, 2))
            first: Tensor = out[0] if isinstance(out, tuple) else out
            return first.transpose(1, 2)

        return bound


def check_heads(name: str, spec: Spec, inputs: Inputs, multiple: int) -> None:
    """ValueError for head dimensions that are no multiple, and for dropout: what 3 and 4 have in common."""
    for which, t in (("q", inputs.q), ("v", inputs.v)):
        if t.shape[-1] % multiple:
            raise ValueError(
                f"{name}: head_dim of {which} must be a multiple of {multiple}; got {t.shape[-1]}"
            )
    if spec.dropout_p:
        raise ValueError(f"{name}: dropout_p {spec.dropout_p}: it has no dropout")


def gradients(
    run: Callable[[Mapping[str, Any]], Any], parts: Iterable[Five], lse: Tensor, others: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor, None]:
    """What a backward of 2 or 3 writes into the memory it is given, summed over ``parts``.

    ``lse`` is read by its address: it is contiguous here. ``others``: the arguments beside these.
    """
    lse, made = lse.contiguous(), []
    for part in parts:
        grads = {
            f"d{name}": torch.empty_like(t, memory_format=torch.contiguous_format)
            for name, t in zip("qkv", part[:3], strict=True)
        }
        run({**others, **part._asdict(), "softmax_lse": lse, **grads})
        made.append(tuple(grads.values()))
    dq, dk, dv = added(made)
    return dq, dk, dv, None


def _call(spec: Spec, inputs: Inputs, form: Form, window: tuple[int, int]) -> tuple[FlashCall, float]:
    """The call, and what q was multiplied by so that the scale is above 0."""
    factor, scale = above_zero(spec.softmax_scale)
    q, k, v = form.qkv()
    cu_q, cu_kv, longest_q, longest_kv = form.lengths()
    sequences, slopes = form.sequences, inputs.alibi_slopes
    if slopes is not None and slopes.dim() == 2 and cu_q is not None:
        # Padding and gaps doubled the sequences.
        slopes = slopes.repeat_interleave((cu_q.shape[0] - 1) // slopes.shape[0], 0)
    return FlashCall(
        q if factor == 1.0 else q * factor,
        k,
        v,
        cu_q,
        cu_kv,
        longest_q,
        longest_kv,
        None if sequences is None else sequences.seqused_kv,
        None if sequences is None else sequences.block_table,
        scale,
        *window,
        spec.softcap,
        spec.dropout_p,
        spec.deterministic,
        slopes,
        _sinks(spec, inputs),
        inputs.cu_seqlens_q_padded is not None or inputs.cu_seqlens_kv_padded is not None,
    ), factor


def _sinks(spec: Spec, inputs: Inputs) -> Tensor | None:
    if spec.softmax_type == "vanilla":
        return None
    if spec.softmax_type == "off-by-one":
        return inputs.q.new_zeros(inputs.q.shape[1], dtype=torch.float32)
    if inputs.softmax_offset is None:
        raise ValueError("softmax_type 'learnable' needs inputs.softmax_offset")
    return inputs.softmax_offset.float().contiguous()
