"""The half-private functions of the package flash-attn (2.3.6 and later), on CPU tensors.

Checks and conventions are those of flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of
each version; lines below are of the latter at tag v2.8.3 unless another is named. The public functions are in
emulated_flash_attn_2_public.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor

from emulated_flash_math import (
    Forward,
    Masked,
    Rows,
    backward,
    check,
    forward,
    last_stride_one,
    paged,
    unwritten,
)


class Call(NamedTuple):
    """What ``fwd``, ``varlen_fwd`` and their backwards are told, the same in every version."""

    q: Tensor
    k: Tensor
    v: Tensor
    dropout_p: float
    softmax_scale: float
    causal: bool
    left: int
    right: int
    softcap: float
    alibi_slopes: Tensor | None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    block_table: Tensor | None = None
    leftpad_k: Tensor | None = None
    seqused_k: Tensor | None = None

    @property
    def dense(self) -> bool:
        return self.cu_seqlens_q is None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.numel() - 1

    @property
    def swapped(self) -> bool:
        """One query a sequence and fewer heads of keys: cu_seqlens_q is not read (flash_api.cpp:592)."""
        open_right = self.right < 0 and not (self.causal and not self.one_query)
        return (
            self.max_seqlen_q == 1
            and self.q.shape[-2] > self.k.shape[-2]
            and self.left < 0
            and open_right
            and not self.dropout_p
            and self.alibi_slopes is None
            and self.q.shape[-1] % 8 == 0
        )

    @property
    def one_query(self) -> bool:
        return self.max_seqlen_q == 1 and self.alibi_slopes is None


class FlashAttention2:
    def __init__(self, version: str, arch: int) -> None:
        self.version, self.arch = Version(version), arch
        self.functions: dict[str, Any] = {}

    def since(self, version: str) -> bool:
        return self.version >= Version(version)

    # ---- the four functions ----

    def _flash_attn_forward(self, *, return_softmax: bool, **given: Any) -> tuple[Any, ...]:
        return self._forward(self._call(given), return_softmax)

    def _flash_attn_varlen_forward(self, *, return_softmax: bool, **given: Any) -> tuple[Any, ...]:
        zero_tensors = given.pop("zero_tensors", False)
        splits = given.pop("num_splits", 0)
        check(given.get("block_table") is None or splits <= 1, "pages are not split by varlen_fwd")
        return self._forward(self._call(given), return_softmax, zero_tensors)

    def _flash_attn_backward(self, **given: Any) -> Any:
        return self._backward(given)

    def _flash_attn_varlen_backward(self, **given: Any) -> Any:
        return self._backward(given, given.pop("zero_tensors", False))

    def _call(self, given: dict[str, Any]) -> Call:
        given = dict(given)
        if "window_size" in given:
            left, right = given.pop("window_size")
        else:
            left, right = given.pop("window_size_left"), given.pop("window_size_right")
        if self.since("2.7"):  # operators of torch: their schema's types
            ints = (left, right, *(given[name] for name in ("max_seqlen_q", "max_seqlen_k") if name in given))
            check(not any(t is None or isinstance(t, float) for t in ints), "an int was expected")
            check(given["softmax_scale"] is not None, "softmax_scale: a float was expected")
        q, k, v = (last_stride_one(given.pop(name)) for name in ("q", "k", "v"))
        if "cu_seqlens_q" not in given:
            given |= {"max_seqlen_q": q.shape[1], "max_seqlen_k": k.shape[1]}
        known = {name: given[name] for name in Call._fields if name in given}
        known.setdefault("softcap", 0.0)
        known.setdefault("alibi_slopes", None)
        return Call(q, k, v, left=int(left), right=int(right), **known)

    # ---- forward ----

    def _forward(self, call: Call, return_softmax: bool, zero_tensors: bool = False) -> tuple[Any, ...]:
        self._check_inputs(call)
        check(call.dense or call.block_table is None or call.leftpad_k is None, "leftpad_k with pages")
        d = call.q.shape[-1]
        if self.since("2.7"):
            check(d % 8 == 0, "the head dimension must be a multiple of 8")
        else:
            padding = (0, -d % 8)
            call = call._replace(**{
                name: torch.nn.functional.pad(getattr(call, name), padding) if d % 8 else getattr(call, name)
                for name in ("q", "k", "v")
            })  # fmt: skip
        check(not return_softmax or call.dropout_p > 0, "return_softmax needs dropout")
        check(call.max_seqlen_q > 0 or call.max_seqlen_k == 0, "CUDA error: invalid configuration argument")
        with torch.no_grad():
            out, lse, s_dmask, state = self._attend(call, return_softmax, zero_tensors)
        if self.since("2.7"):
            return out, lse, s_dmask, state
        return out[..., :d], call.q, call.k, call.v, out, lse, s_dmask, state

    def _attend(self, call: Call, return_softmax: bool, zero: bool) -> tuple[Tensor, Tensor, Any, Tensor]:
        out = unwritten(call.q)
        lse = torch.full(self._lse_shape(call), math.nan)
        s_dmask = self._s_dmask(call, return_softmax)
        if zero:
            out.zero_()
            lse.fill_(-math.inf)
            if return_softmax:
                s_dmask.zero_()
        state = torch.full((2,), -1)  # what no kernel writes without dropout
        if call.dropout_p:
            state = torch.randint(0, 2**31, (2,))
        if call.max_seqlen_k == 0:  # no kernel runs (flash_api.cpp:737); not guarded for varlen in 2.3.6
            out.zero_()
            lse.fill_(math.inf)
            return out, lse, s_dmask, state
        for rows in self._rows(call):
            one, how = self._one(call, rows), self._masked(call, rows.number)
            keep = self._keep(call, state, rows.number, one[0].shape[0], one[1].shape[0])
            made = forward(*one, how, keep)
            out[rows.q][: call.max_seqlen_q] = made.out.to(out.dtype)[: call.max_seqlen_q]
            level = made.lse.masked_fill(made.lse == -math.inf, math.inf).float()
            lse[rows.lse][:, : call.max_seqlen_q] = level[:, : call.max_seqlen_q]
            if return_softmax:
                self._encode(s_dmask[rows.number], made, keep)
        return out, lse, s_dmask, state

    def _lse_shape(self, call: Call) -> tuple[int, ...]:
        h = call.q.shape[-2]
        if call.dense:
            return call.batch, h, call.q.shape[1]
        if self.since("2.6"):
            return h, call.q.shape[0]
        return call.batch, h, call.max_seqlen_q

    def _s_dmask(self, call: Call, wanted: bool) -> Any:
        """[b, h, s_q and s_k up to a multiple of 128]; without it nothing (2.7 on: an empty tensor)."""
        if not wanted:
            return call.q.new_empty(0) if self.since("2.7") else None
        up = [-(-n // 128) * 128 for n in (call.max_seqlen_q, call.max_seqlen_k)]
        return call.q.new_full((call.batch, call.q.shape[-2], *up), math.nan)

    @staticmethod
    def _encode(s_dmask: Tensor, made: Forward, keep: Tensor) -> None:
        """Numerators of the softmax, negative where dropped; their scale is nothing to rely on."""
        m, n = made.hidden.shape
        values = made.p / made.p.amax(-1, keepdim=True).clamp_min(1e-30)
        values = torch.where(keep > 0, values, -values).masked_fill(made.hidden, math.nan)
        part = s_dmask[:, :m, :n]
        part.copy_(values[:, : part.shape[1], : part.shape[2]])

    # ---- backward ----

    def _backward(self, given: dict[str, Any], zero_tensors: bool = False) -> Any:
        call = self._call(given)
        dout, out = last_stride_one(given["dout"]), last_stride_one(given["out"])
        lse, made = given["softmax_lse"], [given[name] for name in ("dq", "dk", "dv")]
        self._check_inputs(call, out=out, dout=dout, **{n: given[n] for n in ("dq", "dk", "dv")})
        self._check_backward(call, dout, out, lse, made, given["rng_state"])
        with torch.no_grad():
            dout = torch.nn.functional.pad(dout, (0, call.q.shape[-1] - dout.shape[-1]))
            made = [torch.empty_like(t) if g is None else g for g, t in zip(made, call[:3], strict=True)]
            for t in made:
                t.fill_(0.0 if zero_tensors else math.nan)
            softmax_d = self._differentiate(call, dout, out, lse, made, given["rng_state"])
        return softmax_d if self.since("2.7") else (*made, softmax_d)

    def _differentiate(
        self, call: Call, dout: Tensor, out: Tensor, lse: Tensor, made: list[Tensor], state: Any
    ) -> Tensor:
        b, h = call.batch, call.q.shape[-2]
        shape: tuple[int, ...] = (b, h, -(-call.max_seqlen_q // 128) * 128)
        if not call.dense and self.since("2.6"):
            shape = (h, call.q.shape[0] + 128 * b)
        softmax_d = torch.full(shape, math.nan)
        if call.max_seqlen_q == 0:
            made[1].zero_()
            made[2].zero_()
            return softmax_d.zero_()
        longest = (call.max_seqlen_q, call.max_seqlen_k, call.max_seqlen_k)
        for rows in self._rows(call):
            q, k, v = self._one(call, rows)
            m, n = q.shape[0], k.shape[0]
            keep = self._keep(call, state, rows.number, m, n)
            level = torch.nn.functional.pad(lse[rows.lse], (0, m - lse[rows.lse].shape[1]), value=math.nan)
            how = self._masked(call, rows.number)
            grads = backward(dout[rows.q], q, k, v, out[rows.q], level, how, keep)
            for t, grad, most, where in zip(made, grads, longest, (rows.q, rows.k, rows.k), strict=False):
                t[where][:most] = grad.to(t.dtype)[:most]
            if n > call.max_seqlen_k or m > call.max_seqlen_q:  # blocks past the longest are left out
                for t, where in zip(made, (rows.q, rows.k, rows.k), strict=True):
                    t[where] = math.nan
            at = rows.lse if len(shape) == 3 else (slice(None), slice(*self._padded(rows, m)))
            softmax_d[at][:, :m] = grads.delta.float()[:, : softmax_d[at].shape[1]]
        return softmax_d

    @staticmethod
    def _padded(rows: Rows, m: int) -> tuple[int, int]:
        start = rows.q[0].start + 128 * rows.number
        return start, start + m

    # ---- where sequences lie ----

    def _rows(self, call: Call) -> Iterator[Rows]:
        for n in range(call.batch):
            if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
                yield Rows(n, (n,), (n,), (n,))
                continue
            a, b = (int(t) for t in call.cu_seqlens_q[n : n + 2])
            if call.swapped and self.since("2.5.9"):
                a, b = n, n + 1
            by_sequence = (n, slice(None), slice(0, b - a))
            lse = (slice(None), slice(a, b)) if self.since("2.6") else by_sequence
            yield Rows(n, (slice(a, b),), (self._keys(call, n),), lse)

    def _keys(self, call: Call, n: int) -> Any:
        assert call.cu_seqlens_k is not None
        start, end = (int(t) for t in call.cu_seqlens_k[n : n + 2])
        pad = 0 if call.leftpad_k is None else int(call.leftpad_k[n])
        length = (end - start if call.seqused_k is None else int(call.seqused_k[n])) - pad
        if call.block_table is not None:
            return paged(call.block_table[n], call.k.shape[1], torch.arange(length))
        return slice(start + pad, start + pad + length)

    @staticmethod
    def _one(call: Call, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (t if call.block_table is None else t.flatten(0, 1) for t in (call.k, call.v))
        return call.q[rows.q], k[rows.k], v[rows.k]

    def _masked(self, call: Call, number: int) -> Masked:
        """Windows as ``mha_fwd`` and ``set_params_fprop`` leave them (flash_api.cpp:141, 399)."""
        left, right = call.left, call.right
        if self.since("2.4"):
            left, right = (-1 if side >= call.max_seqlen_k else side for side in (left, right))
        if call.causal:
            right = 0
        causal_kernel = left < 0 and right == 0
        if left < 0 <= right:
            left = call.max_seqlen_k
        elif right < 0 <= left:
            right = call.max_seqlen_k
        slopes = call.alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[number]
        return Masked(
            call.softmax_scale,
            None if left < 0 or causal_kernel else left,
            None if right < 0 else right,
            call.softcap,
            slopes=slopes,
            slopes_by_column=causal_kernel,
        )

    def _keep(self, call: Call, state: Any, number: int, m: int, n: int) -> Any:
        """Bytes up to floor(255 (1 - p)) are kept (flash_api.cpp:129), and scaled."""
        if not call.dropout_p:
            return None
        seed = (int(state[0]) * 1_000_003 + int(state[1]) * 997 + number) % 2**63
        shape = (call.q.shape[-2], m, n)
        drawn = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))
        return (drawn <= math.floor((1 - call.dropout_p) * 255)).double() / (1 - call.dropout_p)

    # ---- checks ----

    def _check_inputs(self, call: Call, **more: Any) -> None:
        self._check_tensors(q=call.q, k=call.k, v=call.v, **more)
        q, k, v = call.q, call.k, call.v
        rank = 4 if call.dense else 3
        check(q.dim() == rank and k.dim() == v.dim() == (4 if call.block_table is not None else rank), "rank")
        check(call.batch > 0, "the batch must not be empty")
        check(q.shape[-1] <= 256, "the head dimension is at most 256")
        check(q.shape[-2] % k.shape[-2] == 0, "heads of keys must divide heads of queries")
        check(k.shape == v.shape and q.shape[-1] == k.shape[-1], "k and v must have one shape, and q's d")
        check(not call.dense or k.shape[0] == q.shape[0], "k must have shape (batch_size, ...)")
        check(0 <= call.dropout_p < 1, "dropout_p must be less than 1")
        check(not (call.softcap > 0 and call.dropout_p), "softcap with dropout")
        self._check_lengths(call)
        self._check_slopes(call.alibi_slopes, call.batch, q.shape[-2])

    def _check_tensors(self, **tensors: Tensor | None) -> None:
        newer = self.since("2.7")
        check(self.arch >= 80 if newer else self.arch // 10 == 8 or self.arch == 90, "Ampere or newer")
        for name, t in tensors.items():
            if t is None:
                continue
            check(t.dtype in (torch.float16, torch.bfloat16), f"{name}: fp16 and bf16 alone")
            check(t.dtype == tensors["q"].dtype, f"{name} must have q's dtype")
            check(t.stride(-1) == 1, f"{name} must have a contiguous last dimension")

    def _check_lengths(self, call: Call) -> None:
        lengths = {"leftpad_k": call.leftpad_k, "seqused_k": call.seqused_k}
        cumulative = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
        for name, t in (cumulative | lengths).items():
            if t is not None:
                check(t.dtype == torch.int32, f"{name} must have dtype int32")
                check(t.is_contiguous(), f"{name} must be contiguous")
                check(t.shape == (call.batch + (name in cumulative),), f"{name}: shape")
        if call.swapped and not call.dense and self.since("2.5.9"):
            check(call.q.shape[0] == call.batch, "shape is invalid for input of this size")
        if call.block_table is not None:
            self._check_pages(call.block_table, call.k, call.batch)

    @staticmethod
    def _check_pages(table: Tensor, k: Tensor, batch: int) -> None:
        check(table.dtype == torch.int32, "block_table must have dtype int32")
        check(table.stride(-1) == 1, "block_table must have a contiguous last dimension")
        check(k.shape[1] % 256 == 0, "a page must have a multiple of 256 rows")
        check(table.dim() == 2 and table.shape[0] == batch, "block_table must have shape (batch_size, ...)")

    @staticmethod
    def _check_slopes(slopes: Tensor | None, batch: int, heads: int) -> None:
        if slopes is not None:
            check(slopes.dtype == torch.float32, "alibi_slopes must be fp32")
            check(slopes.stride(-1) == 1, "alibi_slopes must have a contiguous last dimension")
            check(tuple(slopes.shape) in ((heads,), (batch, heads)), "alibi_slopes: shape")

    def _check_backward(
        self, call: Call, dout: Tensor, out: Tensor, lse: Tensor, made: list[Any], state: Any
    ) -> None:
        d = call.q.shape[-1]
        check(d % 8 == 0, "the head dimension must be a multiple of 8")
        least = d if self.since("2.7") else d - 7
        check(least <= dout.shape[-1] <= d, "dout must have the head dimension before padding, or q's")
        check(out.shape == call.q.shape and dout.shape[:-1] == call.q.shape[:-1], "out, dout: shape")
        for t, wanted in zip(made, call[:3], strict=True):
            check(t is None or t.shape == wanted.shape, "dq, dk, dv: shape")
        check(call.max_seqlen_k > 0, "CUDA error: invalid configuration argument")
        # What C++ reads by its pointer, and does not look at: a wrong one is this emulation's error to tell.
        shape = self._lse_shape(call)
        check(tuple(lse.shape) == shape and lse.dtype == torch.float32, "softmax_lse read as what it is not")
        check(lse.is_contiguous(), "softmax_lse is read as if contiguous")
        if call.dropout_p:
            check(state is not None and state.dtype == torch.int64, "dropout's backward without rng_state")
            check(tuple(state.shape) == (2,), "rng_state: shape")
        self._check_backward_arch(d, call.dropout_p > 0)

    def _check_backward_arch(self, d: int, dropout: bool) -> None:
        """v2.3.6 :691, v2.5.9.post1 :824, v2.6.3 :879; none from 2.7."""
        if self.arch in (80, 90) or d <= 192 or self.since("2.7"):
            return
        if self.since("2.6"):
            check(not dropout, "backward above d 192 with dropout needs sm80 or sm90")
        else:
            old = not self.since("2.5.9")
            check(not (old or d <= 224 or dropout), "backward above d 192 needs sm80 or sm90")
