"""The public functions of FlashAttention 3: how they call the half-private ones, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emulated_flash_attn_3 import FlashAttention3
from emulated_flash_math import Function, Plan, check

EVERY = (
    "k_new", "v_new", "qv", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k",
    "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
    "seqlens_rotary", "q_descale", "k_descale", "v_descale",
)  # fmt: skip
OF_BACKWARD = {"cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None, "max_seqlen_k": None}


class PublicFlashAttention3(FlashAttention3):
    def call(self, given: dict[str, Any]) -> tuple[Any, ...]:
        """``_flash_attn_forward`` with what this version's has, None for what is not given."""
        given = dict(given)
        names = set(EVERY) - ({"qv", "seqlens_rotary"} if self.early else set())
        given["out_" if self.stable else "out"] = None
        made = dict.fromkeys(names) | {name: t for name, t in given.items() if name in names or t is not None}
        made.setdefault("out_" if self.stable else "out", None)
        result: tuple[Any, ...] = self.functions["_flash_attn_forward"](**self.windowed(made))
        return result

    def windowed(self, given: dict[str, Any]) -> dict[str, Any]:
        if self.stable:
            left, right = given.pop("window_size")
            given |= {"window_size_left": left, "window_size_right": right}
        return given

    def scale(self, given: dict[str, Any], q: Tensor) -> float:
        """Of qv's features too, where there are any."""
        qv = given.get("qv")
        if given["softmax_scale"] is not None:
            return float(given["softmax_scale"])
        return float((q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5)

    def flash_attn_func(self, **given: Any) -> Any:
        tensors = [given.pop(name) for name in ("q", "k", "v")]
        return Function.apply(Attention(self, given).plan(), *tensors)

    flash_attn_varlen_func = flash_attn_func

    def flash_attn_qkvpacked_func(self, **given: Any) -> Any:
        if self.early:  # its caller passes six of the arguments that have no default: TypeError
            q, k, v = given["qkv"].unbind(-3)
            self.functions["_flash_attn_forward"](q, k, v, given["softmax_scale"], causal=given["causal"])
        return Function.apply(
            Attention(self, given | {"heads": given.pop("num_heads_q")}).plan(), given["qkv"]
        )

    def flash_attn_with_kvcache(self, **given: Any) -> Any:
        q, k_cache, v_cache = given.pop("q"), given.pop("k_cache"), given.pop("v_cache")
        for t in (k_cache, v_cache):
            check(t.stride(-1) == 1, "caches must have a contiguous last dimension", AssertionError)
        returned = given.pop("return_softmax_lse")
        lengths = given.pop("cache_seqlens")
        if isinstance(lengths, int):
            lengths = torch.full(((q if self.stable else k_cache).shape[0],), lengths, dtype=torch.int32)
        given["softmax_scale"] = self.scale(given, q)
        names = {"k": "k_new", "v": "v_new", "cache_batch_idx": "kv_batch_idx", "cache_leftpad": "leftpad_k"}
        names["rotary_seqlens"] = "seqlens_rotary"
        given = {names.get(name, name): t for name, t in given.items()}
        out, *more = self.call(given | {"q": q, "k": k_cache, "v": v_cache, "seqused_k": lengths})
        return (out, *more) if returned else out

    def flash_attn_combine(
        self, *, out_partial: Tensor, lse_partial: Tensor, out: Any, out_dtype: Any
    ) -> Any:
        """out_partial [splits, b, s, h, d], lse_partial [splits, b, s, h] -> out, lse [b, s, h]."""
        for t in (out_partial, lse_partial):
            check(t.dtype == torch.float32, "parts must be fp32")
        check(out_partial.stride(-1) == 1 and lse_partial.stride(-2) == 1, "parts: strides")
        check(out_partial.shape[:-1] == lse_partial.shape and len(out_partial) <= 256, "parts: shape")
        lse = lse_partial.double().logsumexp(0)
        level = lse.masked_fill(lse == -torch.inf, 0.0)
        weights = torch.exp(lse_partial.double() - level).unsqueeze(-1)
        joined = (out_partial.double() * weights).nan_to_num(0.0).sum(0)
        made = torch.empty_like(joined, dtype=out_dtype or torch.float32) if out is None else out
        return made.copy_(joined), lse.float()

    def get_scheduler_metadata(self, **given: Any) -> Any:
        raise NotImplementedError("scheduler metadata")


class Attention:
    """Forward and backward of a public function; ``given`` holds its arguments but for the tensors."""

    def __init__(self, package: PublicFlashAttention3, given: dict[str, Any]) -> None:
        self.package, self.given = package, dict(given)
        self.given.pop("qkv", None)
        self.heads = self.given.pop("heads", None)
        self.returned = package.early or self.given.pop("return_attn_probs", False)
        self.deterministic = self.given.pop("deterministic")
        self.lengths = OF_BACKWARD | {name: t for name, t in given.items() if name in OF_BACKWARD}
        self.lengths |= {f"sequed_{of}": given.get(f"seqused_{of}") for of in "qk"}

    def plan(self) -> Plan:
        return Plan(self.forward, self.backward)

    def parts(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        if len(tensors) == 3:
            return list(tensors)
        (qkv,) = tensors
        if qkv.dim() == 5:
            check(qkv.shape[-3] == 3, "qkv: shape", AssertionError)
            return list(qkv.unbind(-3))
        check(
            qkv.dim() == 4 and self.heads is not None, "qkv of 4 dimensions needs num_heads_q", AssertionError
        )
        groups = (qkv.shape[2] - self.heads) // 2
        check(2 * groups + self.heads == qkv.shape[2], "qkv: heads", AssertionError)
        return list(qkv.split([self.heads, groups, groups], dim=-2))

    def forward(self, ctx: Any, *tensors: Tensor) -> Any:
        self.given["softmax_scale"] = self.package.scale(self.given, tensors[0])
        q, k, v = (t.detach() for t in self.parts(tensors))
        out, lse, *_ = self.package.call(self.given | {"q": q, "k": k, "v": v})
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packed = tensors[0].dim() if len(tensors) == 1 else 0
        return (out, lse) if self.returned else out

    def backward(self, ctx: Any, dout: Tensor, *unused: Any) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        check(self.given.get("attention_chunk", 0) == 0, "no backward of attention_chunk", AssertionError)
        made = dq, dk, dv = [torch.empty_like(t) for t in (q, k, v)]
        if ctx.packed == 5:
            joined = q.new_empty(*q.shape[:-2], 3, *q.shape[-2:])
            made, (dq, dk, dv) = [joined], joined.unbind(-3)
        elif ctx.packed:
            h, g = q.shape[2], k.shape[2]
            joined = q.new_empty(*q.shape[:-2], h + 2 * g, q.shape[-1])
            made, (dq, dk, dv) = [joined], joined.split([h, g, g], dim=-2)
        known = ("softmax_scale", "causal", "window_size", "softcap", "sm_margin", "sink_token_length")
        given = self.package.windowed({name: self.given[name] for name in known if name in self.given})
        if self.package.stable:
            given["is_causal"] = given.pop("causal")
        self.package.functions["_flash_attn_backward"](
            dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv,
            deterministic=self.deterministic, **self.lengths, **given,
        )  # fmt: skip
        return tuple(made)
