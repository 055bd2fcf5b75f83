"""FlashAttention 4 (``flash_attn.cute``, the package flash-attn-4) on CPU tensors.

Checks and conventions are those of flash_attn/cute/interface.py of each release; lines below are of 4.0.0b36.
Not there: qv, top-k gathers, score_mod, mask_mod, block sparsity (NotImplementedError).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from emulated_flash_math import Masked, Rows, backward, check, forward, last_stride_one, paged

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALVES = (torch.float16, torch.bfloat16)
MISSING = (
    "qv", "gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod", "block_sparse_tensors",
    "aux_tensors", "aux_scalars", "scheduler_metadata",
)  # fmt: skip


def demand(condition: object, message: str) -> None:
    check(condition, message, AssertionError)


def aligned(t: Any, to: int = 16) -> Any:
    """What b36 copies: strides or a pointer that a kernel does not take (cute_dsl_utils.py:87)."""
    if t is None or t.is_contiguous():
        return t
    step = max(1, to // t.element_size())
    fits = t.stride(-1) == 1 and all(stride % step == 0 for stride in t.stride()[:-1])
    return t if fits and t.data_ptr() % to == 0 else t.contiguous()


class FlashAttention4:
    def __init__(self, version: str, arch: int) -> None:
        self.arch, self.later = arch, Version(version) >= Version("4.0.0b36")
        self.functions: dict[str, Any] = {}

    # ---- the two functions ----

    def _flash_attn_fwd(self, **given: Any) -> tuple[Any, ...]:
        self._refuse_missing(given)
        grad = any(t is not None and t.requires_grad for t in (given["q"], given["k"], given["v"]))
        if self.later and given["learnable_sink"] is not None:
            grad = grad or given["learnable_sink"].requires_grad
        arch = self.arch if given["_arch"] is None else given["_arch"]
        contiguous = aligned if self.later else last_stride_one
        given |= {name: contiguous(given[name]) for name in ("q", "k", "v")}
        self._check_forward(given, arch, grad)
        with torch.no_grad():
            out, lse = self._attend(given, grad or given["return_lse"])
        return (out, lse, None, None, None) if self.later else (out, lse, None, None)

    def _flash_attn_bwd(self, **given: Any) -> tuple[Any, ...]:
        self._refuse_missing(given)
        demand(self.arch // 10 in (9, 10, 11, 12), "backward: this architecture is not supported")
        sink = given.setdefault("learnable_sink", None)
        if sink is not None:
            demand(self.arch // 10 in (9, 10, 11), "the sink's backward: this architecture is not supported")
        contiguous = aligned if self.later else last_stride_one
        for name in ("q", "k", "v", "out", "dout", "lse", "dlse"):
            given[name] = contiguous(given[name])
        self._check_backward(given)
        with torch.no_grad():
            made, dsink = self._differentiate(given)
        return tuple(made) if sink is None else (*made, dsink)

    @staticmethod
    def _refuse_missing(given: dict[str, Any]) -> None:
        for name in MISSING:
            if given.get(name) is not None:
                raise NotImplementedError(f"the emulation has no {name}")
        for name in ("q", "k"):
            if given[name] is None:
                raise NotImplementedError(f"the emulation needs {name}")

    # ---- forward ----

    def _attend(self, given: dict[str, Any], with_lse: bool) -> tuple[Tensor, Tensor | None]:
        q, sink, out, lse = given["q"], given["learnable_sink"], given["out"], given["lse"]
        if out is None:
            dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
            out = torch.full((*q.shape[:-1], given["v"].shape[-1]), math.nan, dtype=dtype)
        if lse is None and with_lse:
            lse = torch.full(self._lse_shape(given), math.nan)
        if given["k"].numel() == 0 or q.numel() == 0:
            out.zero_()
            if lse is not None:
                lse.fill_(-math.inf)
                if sink is not None and self.later:
                    lse.copy_(sink[:, None])
            return out, lse
        for rows in self._sequences(given):
            k, v = (self._keys(given, name, rows) for name in ("k", "v"))
            made = forward(self._scaled(given, "q", q[rows.q], rows), k, v, self._masked(given))
            out[rows.q] = made.out.to(out.dtype)
            if lse is not None:
                lse[rows.lse] = made.lse.float()
                if sink is not None and not self.later:  # -inf + inf (softmax.py:212 of 4.0.0b20)
                    lse[rows.lse] = lse[rows.lse].masked_fill(made.hidden.all(1), math.nan)
        return out, lse

    def _masked(self, given: dict[str, Any]) -> Masked:
        left, right = self._window(given["causal"], given["window_size_left"], given["window_size_right"])
        scale = given["softmax_scale"]
        scale = given["q"].shape[-1] ** -0.5 if scale is None else scale
        cap = 0.0 if given["softcap"] is None else given["softcap"]
        return Masked(scale, left, right, cap, sink=given["learnable_sink"])

    def _window(self, causal: bool, left: Any, right: Any) -> tuple[Any, Any]:
        """``_resolve_causal_local_window`` (interface.py:438; 4.0.0b20 :275): None is open, -1 may not be."""
        both = left is not None and right is not None
        if self.later and both and left < 0 and right < 0:
            left = right = None
        if causal:
            right = 0
        if not self.later and left is not None and right is not None and left + right < 0:
            left, right = None, 0 if causal else None
        return left, right

    # ---- where sequences lie ----

    @staticmethod
    def _lse_shape(given: dict[str, Any]) -> tuple[int, ...]:
        q = given["q"]
        if given["cu_seqlens_q"] is not None:
            return q.shape[1], q.shape[0]
        return q.shape[0], q.shape[2], q.shape[1]

    @staticmethod
    def _sequences(given: dict[str, Any]) -> Iterator[Rows]:
        q, k, table = given["q"], given["k"], given.get("page_table")
        cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
        size = k.shape[-3] * (1 if table is None else table.shape[1])
        for n in range(q.shape[0] if cu_q is None else cu_q.numel() - 1):
            start, end = (0, q.shape[1]) if cu_q is None else (int(t) for t in cu_q[n : n + 2])
            first, last = (0, size) if cu_k is None else (int(t) for t in cu_k[n : n + 2])
            if given["seqused_q"] is not None:
                end = start + int(given["seqused_q"][n])
            if given["seqused_k"] is not None:
                last = first + int(given["seqused_k"][n])
            longest = given["max_seqlen_q"] if cu_q is not None else None
            demand(longest is None or end - start <= longest, "max_seqlen_q is less: rows would be left out")
            part = slice(start, end)
            keys: tuple[Any, ...] = (slice(first, last),) if cu_k is not None else (n, slice(first, last))
            if table is not None:
                keys = (paged(table[n], k.shape[1], torch.arange(last)),)
            if cu_q is None:
                yield Rows(n, (n, part), keys, (n, slice(None), part))
            else:
                yield Rows(n, (part,), keys, (slice(None), part))

    def _keys(self, given: dict[str, Any], name: str, rows: Rows) -> Tensor:
        t = given[name] if given.get("page_table") is None else given[name].flatten(0, 1)
        return self._scaled(given, name, t[rows.k], rows)

    @staticmethod
    def _scaled(given: dict[str, Any], name: str, t: Tensor, rows: Rows) -> Tensor:
        scale = given.get(f"{name}_descale")
        if scale is None:
            return t
        per_head = scale[rows.number].double().repeat_interleave(t.shape[1] // scale.shape[1])
        return t.double() * per_head[:, None]

    # ---- backward ----

    def _differentiate(self, given: dict[str, Any]) -> tuple[list[Tensor], Tensor | None]:
        inputs, sink = [given[name] for name in ("q", "k", "v")], given["learnable_sink"]
        made = [
            torch.empty_like(t) if given[name] is None else given[name]
            for name, t in zip(("dq", "dk", "dv"), inputs, strict=True)
        ]
        empty = inputs[0].numel() == 0 or inputs[1].numel() == 0
        for t in made:
            t.fill_(0.0 if empty else math.nan)
        total = None if sink is None else torch.zeros(sink.shape, dtype=torch.float64)
        for rows in self._sequences(given):
            if empty:
                if total is not None and given["dlse"] is not None:
                    total += given["dlse"][rows.lse].double().sum(-1)
                continue
            q, k, v = (t[at] for t, at in zip(inputs, (rows.q, rows.k, rows.k), strict=True))
            dlse = None if given["dlse"] is None else given["dlse"][rows.lse]
            lse = given["lse"][rows.lse]
            args = given["dout"][rows.q], q, k, v, given["out"][rows.q], lse
            grads = backward(*args, self._masked(given), dlse=dlse)
            for t, grad, at in zip(made, grads, (rows.q, rows.k, rows.k), strict=False):
                t[at] = grad.to(t.dtype)
            if total is not None:
                total += grads.dsink
        return made, None if sink is None or total is None else total.to(sink.dtype)

    # ---- checks ----

    def _check_shapes(self, given: dict[str, Any]) -> None:
        """What ``_flash_attn_fwd`` and ``_flash_attn_bwd`` both ask of shapes, lengths and the sink."""
        q, k, v, table = given["q"], given["k"], given["v"], given.get("page_table")
        cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
        batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
        demand(q.dim() == (4 if cu_q is None else 3), "q: rank")
        demand(k.dim() == v.dim() == (4 if cu_k is None else 3), "k, v: rank")
        if table is not None:
            demand(cu_k is None, "page_table with cu_seqlens_k")
            demand(table.dtype == torch.int32 and table.stride(-1) == 1, "page_table: int32, contiguous")
            demand(table.dim() == 2 and table.shape[0] == batch, "page_table must have shape (batch, ...)")
        elif cu_k is None:
            demand(k.shape[0] == batch, "k's batch must be q's")
        demand(k.shape[:-1] == v.shape[:-1] and k.shape[-1] == q.shape[-1], "k, v: shape")
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
            t = given[name]
            if t is not None:
                demand(t.shape == (batch + name.startswith("cu"),), f"{name}: shape")
                demand(t.dtype == torch.int32 and t.stride(0) == 1, f"{name} must be int32 and contiguous")
        demand(q.shape[-2] % k.shape[-2] == 0, "heads of keys must divide heads of queries")
        sink = given["learnable_sink"]
        if sink is not None:
            dtypes = (*HALVES, torch.float32) if self.later else (torch.bfloat16,)
            demand(sink.shape == (q.shape[-2],) and sink.dtype in dtypes, "learnable_sink: shape or dtype")

    def _check_head_dims(self, d: int, e: int, arch: int, element: int) -> None:
        alignment = 16 // element
        if arch // 10 in (8, 12):  # left to the compiler; it rounds up to 16, and memory has an end
            demand(d % 8 == 0 and e % 8 == 0, "head dimensions: multiples of 8")
            return
        demand(d % alignment == 0 and e % alignment == 0, f"head dimensions: multiples of {alignment}")
        if arch // 10 == 9:
            demand(8 <= d <= 256 and 8 <= e <= 256, "head dimensions on SM90: 8 to 256")
            return
        latent = (d == 64 or d == e) and e == 512
        fits = (8 <= d <= 128 and 8 <= e <= 128) or (d, e) in ((192, 128), (256, 256)) or latent
        demand(fits, "head dimensions on SM100/SM110: 8 to 128, (192, 128), (256, 256)")

    def _check_forward(self, given: dict[str, Any], arch: int, grad: bool) -> None:
        q, k, v, table = given["q"], given["k"], given["v"], given["page_table"]
        self._check_shapes(given)
        demand(v.dtype in (*HALVES, *FP8) and q.dtype == k.dtype == v.dtype, "q, k, v: dtype")
        demand(arch // 10 in (8, 9, 10, 11, 12), "this architecture is not supported")
        self._check_head_dims(q.shape[-1], v.shape[-1], arch, v.element_size())
        scales = [given[f"{name}_descale"] for name in "qkv"]
        batch = self._lse_shape(given)[0] if given["cu_seqlens_q"] is None else len(given["cu_seqlens_q"]) - 1
        if v.dtype in FP8:
            if grad:
                raise NotImplementedError("fp8 has no backward")
            demand(arch // 10 == 10, "fp8 needs SM100")
            for t in scales:
                fits = t is None or (t.shape == (batch, k.shape[-2]) and t.dtype == torch.float32)
                demand(fits, "descales: [batch, heads of keys], fp32")
        else:
            demand(all(t is None for t in scales), "descales are for fp8")
        self._check_outputs(given)
        splits = given["num_splits"] > 1
        demand(table is None or arch // 10 not in (8, 12), "no pages on SM80 and SM120")
        demand(not splits or arch // 10 not in (8, 9, 12), "no splits on SM80, SM90 and SM120")
        if not self.later and arch // 10 in (10, 11) and q.shape[-1] == v.shape[-1] == 256:
            self._check_hd256(given)

    def _check_hd256(self, given: dict[str, Any]) -> None:
        """The kernel of its own that 4.0.0b20 has for it (its interface.py:885)."""
        for name in ("softcap", "learnable_sink", "seqused_q", "seqused_k"):
            demand(not isinstance(given[name], Tensor) and not given[name], f"head dimension 256 with {name}")

    def _check_outputs(self, given: dict[str, Any]) -> None:
        q, v, out, lse = (given[name] for name in ("q", "v", "out", "lse"))
        if out is not None:
            wanted = torch.bfloat16 if v.dtype in FP8 else q.dtype
            demand(out.shape == (*q.shape[:-1], v.shape[-1]) and out.dtype == wanted, "out: shape or dtype")
            demand(not self.later or aligned(out) is out, "out: strides")
        if lse is not None:
            demand(
                tuple(lse.shape) == self._lse_shape(given) and lse.dtype == torch.float32, "lse: shape, dtype"
            )

    def _check_backward(self, given: dict[str, Any]) -> None:
        q, v, lse, cap = given["q"], given["v"], given["lse"], given["softcap"]
        self._check_shapes(given)
        demand(cap is not None, "softcap: None is taken for a cap here")
        names = ("q", "k", "v", "out", "dout")
        demand(q.dtype in HALVES and all(given[name].dtype == q.dtype for name in names), "dtype")
        for name in ("out", "dout"):
            demand(given[name].shape == (*q.shape[:-1], v.shape[-1]), f"{name}: shape")
        demand(
            tuple(lse.shape) == self._lse_shape(given) and lse.dtype == torch.float32, "lse: shape or dtype"
        )
        for name in ("q", "k", "v"):
            made = given["d" + name]
            demand(made is None or (made.shape == given[name].shape and made.dtype == q.dtype), f"d{name}")
        dlse = given["dlse"]
        demand(
            dlse is None or (dlse.shape == lse.shape and dlse.dtype == torch.float32), "dlse: shape or dtype"
        )
        self._check_head_dims(q.shape[-1], v.shape[-1], self.arch, q.element_size())
        demand(self.arch // 10 != 12 or given["deterministic"] is False, "deterministic backward on SM120")
        varlen = given["cu_seqlens_q"] is not None or given["cu_seqlens_k"] is not None
        demand(self.later or not cap or not varlen, "softcap's backward with cu_seqlens")
        if self.arch // 10 in (10, 11) and q.shape[-1] == v.shape[-1] == 256:
            demand(not cap and dlse is None and given["learnable_sink"] is None, "head dimension 256")
            used = given["seqused_q"] is not None or given["seqused_k"] is not None
            demand(self.later or not used, "head dimension 256 with seqused")
