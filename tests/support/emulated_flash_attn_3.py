"""FlashAttention 3 (the folder hopper/ of flash-attention) on CPU tensors.

Checks and conventions are those of hopper/flash_attn_interface.py and hopper/flash_api.cpp of each version;
lines below are of the latter at tag v2.8.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emulated_flash_math import (
    Masked,
    Rows,
    backward,
    check,
    forward,
    last_stride_one,
    paged,
    rotated,
)

FP8 = torch.float8_e4m3fn
HALVES = (torch.float16, torch.bfloat16)
CUMULATIVE = ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new")
BY_SEQUENCE = ("seqused_q", "seqused_k", "leftpad_k")


class Lengths(NamedTuple):
    q: int
    before: int  # keys that are there, from ``start`` on
    start: int  # leftpad
    new: int


class FlashAttention3:
    def __init__(self, version: str, arch: int) -> None:
        self.arch = arch
        self.early, self.stable = version == "3.0.0b1+early", version == "3.0.0"
        self.functions: dict[str, Any] = {}

    # ---- the two functions ----

    def _flash_attn_forward(self, **given: Any) -> tuple[Any, ...]:
        given = self._settled(given)
        given["out"] = given.pop("out_", None) if self.stable else given["out"]
        for name in ("q", "k", "k_new", "v_new"):
            given[name] = last_stride_one(given[name])
        v = given["v"]
        given["v"] = v.contiguous() if v.stride(-1) != 1 and v.stride(-3) != 1 else v
        for name in (*CUMULATIVE, *BY_SEQUENCE, "page_table", "kv_batch_idx", "rotary_cos", "rotary_sin"):
            given[name] = last_stride_one(given[name])
        self._check_forward(given)
        with torch.no_grad():
            return self._attend(given)

    def _flash_attn_backward(self, **given: Any) -> Any:
        given = self._settled(given)
        given |= {"seqused_q": given.pop("sequed_q"), "seqused_k": given.pop("sequed_k")}
        given["causal"] = given.pop("is_causal", given.get("causal"))
        for name in ("dout", "q", "k", "v", "out"):
            given[name] = last_stride_one(given[name])
        self._check_backward(given)
        with torch.no_grad():
            made, softmax_d = self._differentiate(given)
        return softmax_d if self.stable else (*made, softmax_d)

    def _settled(self, given: dict[str, Any]) -> dict[str, Any]:
        given = dict(given)
        if "window_size" in given:
            given["left"], given["right"] = (int(side) for side in given.pop("window_size"))
        else:
            given["left"], given["right"] = given.pop("window_size_left"), given.pop("window_size_right")
            ints = given["left"], given["right"]
            check(not any(t is None or isinstance(t, float) for t in ints), "an int was expected")
        check(given.get("sink_token_length", 0) == 0, "sink_token_length", AssertionError)
        return given

    # ---- forward ----

    def _attend(self, given: dict[str, Any]) -> tuple[Any, ...]:
        q, out = given["q"], given["out"]
        if out is None:
            dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
            out = torch.full((*q.shape[:-1], given["v"].shape[-1]), math.nan, dtype=dtype)
        lse = torch.full(self._lse_shape(q, given["cu_seqlens_q"]), math.nan)
        splits = given["num_splits"]
        accumulated: tuple[Any, Any] = (None, None)
        if self.stable:
            accumulated = torch.tensor([]), torch.tensor([])
        if splits > 1:
            shape = (splits, *lse.shape)
            accumulated = torch.full((*shape, out.shape[-1]), math.nan), torch.full(shape, math.nan)
        if self._empty(given):  # not the kernels' -inf (flash_api.cpp:1142)
            return out.zero_(), lse.fill_(math.inf), *accumulated
        for rows, lengths in self._sequences(given):
            one, qv = self._append(given, rows, lengths), given.get("qv")
            longest = most, _ = self._longest(given)
            how = self._masked(given, *longest)
            made = forward(one, *self._keys(given, rows, lengths), how, qv=None if qv is None else qv[rows.q])
            scaled = made.out * self._scale_of_values(given, rows.number, made.out.shape[1])
            out[rows.q][:most] = scaled.to(out.dtype)[:most]
            lse[rows.lse][:, :most] = made.lse.float()[:, :most]
        return out, lse, *accumulated

    @staticmethod
    def _empty(given: dict[str, Any]) -> bool:
        new = given["k_new"]
        rows = given["k"].shape[0] * (1 if given["cu_seqlens_k"] is not None else given["k"].shape[1])
        return rows + (0 if new is None else new.numel()) == 0

    @staticmethod
    def _lse_shape(q: Tensor, cu_seqlens_q: Any) -> tuple[int, ...]:
        if cu_seqlens_q is not None:
            return q.shape[1], q.shape[0]
        return q.shape[0], q.shape[2], q.shape[1]

    @staticmethod
    def _scale_of_values(given: dict[str, Any], n: int, heads: int) -> Any:
        scale = given.get("v_descale") if given["q"].dtype == FP8 else None
        if scale is None:
            return 1.0
        return scale[n].double().repeat_interleave(heads // scale.shape[1])[:, None]

    def _longest(self, given: dict[str, Any]) -> tuple[int, int]:
        q, k, table = given["q"], given["k"], given.get("page_table")
        longest_q = q.shape[1] if given["cu_seqlens_q"] is None else given["max_seqlen_q"]
        if given["cu_seqlens_k"] is not None:
            return longest_q, given["max_seqlen_k"]
        return longest_q, k.shape[1] * (1 if table is None else table.shape[1])

    def _masked(self, given: dict[str, Any], longest_q: int, longest_k: int) -> Masked:
        """Bounds as flash_api.cpp:761 leaves them: an open side is as long as a sequence can be."""
        left, right = given["left"], given["right"]
        left = -1 if left >= longest_k - 1 else left
        right = -1 if right >= longest_q - 1 else right
        right = 0 if given["causal"] else right
        scale = given["softmax_scale"]
        scale = given["q"].shape[-1] ** -0.5 if scale is None else scale
        chunk = given.get("attention_chunk", 0)
        sides = [None if side < 0 else side for side in (left, right)]
        return Masked(scale, *sides, softcap=given["softcap"], chunk=chunk)

    # ---- where sequences lie ----

    def _sequences(self, given: dict[str, Any]) -> Iterator[tuple[Rows, Lengths]]:
        q = given["q"]
        cu_q, cu_k, cu_new = (given.get(name) for name in CUMULATIVE)
        for n in range(q.shape[0] if cu_q is None else cu_q.numel() - 1):
            start, end = (0, q.shape[1]) if cu_q is None else (int(t) for t in cu_q[n : n + 2])
            m = end - start if given["seqused_q"] is None else int(given["seqused_q"][n])
            first, last = (0, self._longest(given)[1]) if cu_k is None else (int(t) for t in cu_k[n : n + 2])
            pad = 0 if given.get("leftpad_k") is None else int(given["leftpad_k"][n])
            before = (last - first if given["seqused_k"] is None else int(given["seqused_k"][n])) - pad
            new = given.get("k_new")
            added = 0 if new is None else new.shape[1] if cu_new is None else int(cu_new[n + 1] - cu_new[n])
            part = slice(start, start + m)
            dense = cu_q is None
            rows = Rows(
                n,
                (n, part) if dense else (part,),
                (n, slice(pad, pad + before))
                if cu_k is None
                else (slice(first + pad, first + pad + before),),
                (n, slice(None), part) if dense else (slice(None), part),
            )
            yield rows, Lengths(m, before, pad, added)

    def _keys(self, given: dict[str, Any], rows: Rows, lengths: Lengths) -> tuple[Tensor, Tensor]:
        k, v = given["k"], given["v"]
        if given["cu_seqlens_k"] is not None:
            k, v = k[rows.k], v[rows.k]
        else:
            at = self._places(given, rows.number, lengths.start + torch.arange(lengths.before + lengths.new))
            k, v = (t[at[0], at[1]] for t in (k, v))
        scale = given.get("k_descale") if given["q"].dtype == FP8 else None
        return (k if scale is None else k.double() * scale[rows.number].double()[:, None]), v

    @staticmethod
    def _places(given: dict[str, Any], n: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Entry and row in the cache of positions of a sequence."""
        size, table = given["k"].shape[1], given.get("page_table")
        if table is not None:
            flat = paged(table[n], size, positions)
            return flat // size, flat % size
        index = given.get("kv_batch_idx")
        check(len(positions) == 0 or int(positions[-1]) < size, "past the cache: memory of others")
        return torch.full_like(positions, n if index is None else int(index[n])), positions

    def _append(self, given: dict[str, Any], rows: Rows, lengths: Lengths) -> Tensor:
        """The queries, rotated if need be, after the new keys are in the cache."""
        q: Tensor = given["q"][rows.q]
        scale = given.get("q_descale") if q.dtype == FP8 else None
        if scale is not None:
            repeated = scale[rows.number].double().repeat_interleave(q.shape[1] // scale.shape[1])
            q = q.double() * repeated[:, None]
        if given.get("k_new") is None:
            return q
        cu, n = given["cu_seqlens_k_new"], rows.number
        new = [
            given[name][n if cu is None else slice(int(cu[n]), int(cu[n + 1]))] for name in ("k_new", "v_new")
        ]
        end = lengths.start + lengths.before
        if given["rotary_cos"] is not None:
            at = given.get("seqlens_rotary")
            first = end if at is None else int(at[n])
            angles, inter = (given["rotary_cos"], given["rotary_sin"]), given["rotary_interleaved"]
            how = self._masked(given, *self._longest(given))
            moving = how.left is not None or how.right is not None or how.chunk > 0
            new[0] = rotated(new[0], *angles, first + torch.arange(lengths.new), inter)
            q = rotated(q, *angles, first + torch.arange(len(q)) * moving, inter)
        entry, row = self._places(given, n, end + torch.arange(lengths.new))
        for cache, rows_of_it in zip((given["k"], given["v"]), new, strict=True):
            cache[entry, row] = rows_of_it
        return q

    # ---- backward ----

    def _differentiate(self, given: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
        inputs = [given[name] for name in ("q", "k", "v")]
        made = [
            torch.empty_like(t) if given[name] is None else given[name]
            for name, t in zip(("dq", "dk", "dv"), inputs, strict=True)
        ]
        for t in made:
            t.fill_(math.nan)
        softmax_d = torch.full_like(given["softmax_lse"], math.nan)  # rounded up there, by what fits a tile
        longest = self._longest(given)
        for rows, lengths in self._sequences(given):
            q, k, v = (t[at] for t, at in zip(inputs, (rows.q, rows.k, rows.k), strict=True))
            how = self._masked(given, *longest)
            lse = given["softmax_lse"][rows.lse]
            grads = backward(given["dout"][rows.q], q, k, v, given["out"][rows.q], lse, how)
            fits = lengths.q <= longest[0] and lengths.before <= longest[1]
            for t, grad, at in zip(made, grads, (rows.q, rows.k, rows.k), strict=False):
                t[at] = grad.to(t.dtype) if fits else math.nan
            softmax_d[rows.lse] = grads.delta.float()
        return made, softmax_d

    # ---- checks ----

    def _check_tensors(self, dtypes: tuple[torch.dtype, ...], **tensors: Any) -> None:
        check(self.arch >= 80, "Ampere or newer")
        for name, t in tensors.items():
            if t is not None:
                check(t.dtype in dtypes, f"{name}: dtype")
                check(t.dtype == tensors["q"].dtype, f"{name} must have q's dtype")
                check(t.stride(-1) == 1, f"{name} must have a contiguous last dimension")

    def _check_shapes(self, given: dict[str, Any]) -> None:
        q, k, v, table = given["q"], given["k"], given["v"], given.get("page_table")
        cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
        batch = q.shape[0] if cu_q is None else cu_q.numel() - 1
        for name in (*CUMULATIVE, *BY_SEQUENCE):
            t = given.get(name)
            if t is not None:
                check(t.dtype == torch.int32 and t.is_contiguous(), f"{name} must be int32 and contiguous")
                check(t.shape == (batch + (name in CUMULATIVE),), f"{name}: shape")
        check(cu_q is None or given["max_seqlen_q"] is not None, "cu_seqlens_q without max_seqlen_q")
        check(cu_k is None or given["max_seqlen_k"] is not None, "cu_seqlens_k without max_seqlen_k")
        check(
            q.dim() == (4 if cu_q is None else 3) and k.dim() == v.dim() == (4 if cu_k is None else 3), "rank"
        )
        check(k.shape[:-1] == v.shape[:-1] and k.shape[-1] == q.shape[-1], "k, v: shape")
        if self.early:
            check(k.shape == v.shape, "v must have the head dimension of k")
        if given.get("kv_batch_idx") is None and table is None:
            check(batch == (k.shape[0] if cu_k is None else cu_k.numel() - 1), "k's batch must be q's")
        check(q.shape[-2] % k.shape[-2] == 0, "heads of keys must divide heads of queries")
        check(q.shape[-1] <= 256, "the head dimension is at most 256")
        alignment = 16 if q.dtype == FP8 else 8
        check(
            q.shape[-1] % alignment == 0 and v.shape[-1] % alignment == 0,
            f"head dims: multiples of {alignment}",
        )

    def _check_forward(self, given: dict[str, Any]) -> None:
        q, k, v, new = given["q"], given["k"], given["v"], given["k_new"]
        dtypes = (*HALVES, FP8) if self.arch >= 90 else HALVES
        self._check_tensors(dtypes, q=q, k=k, v=v, k_new=new, v_new=given["v_new"], qv=given.get("qv"))
        self._check_shapes(given)
        self._check_value_head_dim(given)
        table, index = given["page_table"], given["kv_batch_idx"]
        if table is not None:
            check(
                table.dtype == torch.int32 and table.stride(-1) == 1,
                "page_table must be int32 and contiguous",
            )
            check(given["cu_seqlens_k"] is None, "pages with cu_seqlens_k")
            batch = q.shape[0] if given["cu_seqlens_q"] is None else given["cu_seqlens_q"].numel() - 1
            check(table.dim() == 2 and table.shape[0] == batch, "page_table must have shape (batch, ...)")
        if index is not None:
            check(given["cu_seqlens_k"] is None, "kv_batch_idx with cu_seqlens_k")
            check(index.dtype == torch.int32 and index.is_contiguous(), "kv_batch_idx: int32 and contiguous")
        out = given["out"]
        if out is not None:
            wanted = torch.bfloat16 if q.dtype == FP8 else q.dtype
            check(out.dtype == wanted and out.stride(-1) == 1, "out: dtype, contiguous last dimension")
            check(out.shape == (*q.shape[:-1], v.shape[-1]), "out: shape")
        check(given["num_splits"] <= 256, "num_splits is at most 256")
        self._check_new(given)
        for name in ("q_descale", "k_descale", "v_descale"):
            if given[name] is not None and q.dtype == FP8:
                check(given[name].dtype == torch.float32 and given[name].shape[1] == k.shape[-2], name)

    def _check_value_head_dim(self, given: dict[str, Any]) -> None:
        d, e, qv = given["q"].shape[-1], given["v"].shape[-1], given.get("qv")
        if d != e:  # flash_api.cpp:747
            fits = (128 < d <= 192 and 96 < e <= 128) or (d <= 64 and e <= 512)
            check(fits, "this head dimension of v is not supported with q's")
            check(self.arch // 10 == 9, "a head dimension of v of its own needs Hopper")
            check(e <= 256 or given["q"].dtype in HALVES, "v of more than 256 needs fp16 or bf16")
        if qv is not None:
            check(d <= 64 and self.arch == 90 and qv.dtype in HALVES, "qv: d up to 64, Hopper, fp16 or bf16")
            check(not self.stable or e >= 256, "qv needs a head dimension of v from 256 on")
            check(qv.shape == (*given["q"].shape[:-1], e), "qv: shape")

    def _check_new(self, given: dict[str, Any]) -> None:
        new, v_new, cos, sin = (given[name] for name in ("k_new", "v_new", "rotary_cos", "rotary_sin"))
        q, k, v = given["q"], given["k"], given["v"]
        if new is not None:
            check(v_new is not None and given["seqused_k"] is not None, "k_new needs v_new and seqused_k")
            longest_q, longest_k = self._longest(given)
            check(longest_q <= longest_k, "more queries than the cache has rows")
            check(new.shape[:-1] == v_new.shape[:-1], "v_new: shape")
            check(new.shape[-2:] == k.shape[-2:] and v_new.shape[-1] == v.shape[-1], "k_new, v_new: shape")
            check(new.dim() == (4 if given["cu_seqlens_k_new"] is None else 3), "k_new: rank")
        if cos is not None:
            check(new is not None and sin is not None, "rotary needs new keys, and sin")
            check(2 * cos.shape[1] <= q.shape[-1] and cos.shape[1] % 8 == 0, "rotary_dim")
            check(cos.shape == sin.shape and cos.dtype == sin.dtype == q.dtype, "cos, sin: shape and dtype")
            check(cos.is_contiguous() and sin.is_contiguous(), "cos and sin must be contiguous")

    def _check_backward(self, given: dict[str, Any]) -> None:
        q, v, lse = given["q"], given["v"], given["softmax_lse"]
        names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
        self._check_tensors(HALVES, **{name: given[name] for name in names})
        self._check_shapes(given)
        check(v.shape[-1] <= 256, "the head dimension is at most 256")
        for name in ("out", "dout"):
            check(given[name].shape == (*q.shape[:-1], v.shape[-1]), f"{name}: shape")
        for name in ("q", "k", "v"):
            made = given["d" + name]
            check(made is None or made.shape == given[name].shape, f"d{name}: shape")
        if self.stable:
            d = max(q.shape[-1], v.shape[-1])
            check(not given["deterministic"] or d <= 192, "deterministic above head dimension 192")
        # Read by its pointer, and not looked at: a wrong one is this emulation's error to tell.
        check(tuple(lse.shape) == self._lse_shape(q, given["cu_seqlens_q"]), "softmax_lse: shape")
        check(lse.is_contiguous() and lse.dtype == torch.float32, "softmax_lse is read as contiguous fp32")
