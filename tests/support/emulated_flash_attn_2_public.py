"""The public functions of flash-attn 2: how they call the half-private ones, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from emulated_flash_attn_2 import FlashAttention2
from emulated_flash_attn_2_cache import Cache
from emulated_flash_math import Function, Plan, check, last_stride_one

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class PublicFlashAttention2(FlashAttention2):
    def flash_attn_func(self, **given: Any) -> Any:
        return self._attention(["q", "k", "v"], given)

    def flash_attn_varlen_func(self, **given: Any) -> Any:
        return self._attention(["q", "k", "v"], given)

    def flash_attn_kvpacked_func(self, **given: Any) -> Any:
        return self._attention(["q", "kv"], given)

    def flash_attn_varlen_kvpacked_func(self, **given: Any) -> Any:
        return self._attention(["q", "kv"], given)

    def flash_attn_qkvpacked_func(self, **given: Any) -> Any:
        return self._attention(["qkv"], given)

    def flash_attn_varlen_qkvpacked_func(self, **given: Any) -> Any:
        cu, longest = given.pop("cu_seqlens"), given.pop("max_seqlen")
        return self._attention(["qkv"], given | dict(zip(LENGTHS, (cu, cu, longest, longest), strict=True)))

    def flash_attn_with_kvcache(self, **given: Any) -> Any:
        k_cache, v_cache = given["k_cache"], given["v_cache"]
        for t in (k_cache, v_cache):
            check(t.stride(-1) == 1, "caches must have a contiguous last dimension", AssertionError)
        given |= {name: last_stride_one(given[name]) for name in ("q", "k", "v")}
        if given["softmax_scale"] is None:
            given["softmax_scale"] = given["q"].shape[-1] ** -0.5
        if isinstance(given["cache_seqlens"], int):
            rows = (given["q"] if self.since("2.8.4") else k_cache).shape[0]
            given["cache_seqlens"] = torch.full((rows,), given["cache_seqlens"], dtype=torch.int32)
        with torch.no_grad():
            out, lse = Cache(self, given).run()
        return (out, lse) if given.get("return_softmax_lse") else out

    def _attention(self, names: list[str], given: dict[str, Any]) -> Any:
        tensors = [given.pop(name) for name in names]
        return Function.apply(Attention(self, given).plan(), *tensors)


class Attention:
    def __init__(self, package: FlashAttention2, given: dict[str, Any]) -> None:
        self.package, self.given = package, dict(given)
        self.returned = self.given.pop("return_attn_probs")
        self.deterministic = (
            {"deterministic": self.given.pop("deterministic")} if package.since("2.4.1") else {}
        )
        if package.since("2.7"):
            left, right = self.given.pop("window_size")
            self.given |= {"window_size_left": left, "window_size_right": right}
        self.varlen = "cu_seqlens_q" in self.given
        self.table = {"block_table": self.given.pop("block_table", None)}
        if not (self.varlen and package.since("2.5.7")):
            self.table = {}
        self.middle = "varlen_" if self.varlen else ""

    def plan(self) -> Plan:
        return Plan(self.forward, self.backward)

    @staticmethod
    def parts(tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """q, k and v of what may be packed along the dimension before the heads."""
        *first, last = tensors
        return [*first, last] if len(tensors) == 3 else [*first, *last.detach().unbind(-3)]

    def forward(self, ctx: Any, *tensors: Tensor) -> Any:
        if self.given["softmax_scale"] is None:
            self.given["softmax_scale"] = tensors[0].shape[-1] ** -0.5
        q, k, v = (t.detach() for t in self.parts(tensors))
        d = q.shape[-1]
        newer = self.package.since("2.7")
        if newer and d % 8:
            q, k, v = (pad(t, (0, 8 - d % 8)) for t in (q, k, v))
        given = self.given | {"return_softmax": self.returned and self.given["dropout_p"] > 0} | self.table
        made = self.package.functions[f"_flash_attn_{self.middle}forward"](q=q, k=k, v=v, **given)
        if newer:
            padded, lse, s_dmask, state = made
            out = padded[..., :d]
        else:
            out, q, k, v, padded, lse, s_dmask, state = made
        ctx.save_for_backward(q, k, v, padded, lse, state)
        ctx.packed = len(tensors)
        return (out, lse, s_dmask) if self.returned else out

    def backward(self, ctx: Any, dout: Tensor, *unused: Any) -> tuple[Tensor, ...]:
        """Gradients of the lse and of S_dmask, if somebody has them, are not used."""
        q, k, v, out, lse, state = ctx.saved_tensors
        d = dout.shape[-1]
        if self.package.since("2.7") and d % 8:
            dout = pad(dout, (0, 8 - d % 8))
        dq, dk, dv = results = [torch.empty_like(t) for t in (q, k, v)]
        packed = [dq, dk, dv]
        if ctx.packed < 3:
            sources = (q, k, v)[ctx.packed - 1 :]
            joined = q.new_empty(*sources[0].shape[:-2], len(sources), *sources[0].shape[-2:])
            packed = [*results[: ctx.packed - 1], joined]
            dq, dk, dv = [*results[: ctx.packed - 1], *joined.unbind(-3)]
        self.package.functions[f"_flash_attn_{self.middle}backward"](
            dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv, rng_state=state,
            **self.given, **self.deterministic,
        )  # fmt: skip
        return tuple(t[..., :d] for t in packed)
