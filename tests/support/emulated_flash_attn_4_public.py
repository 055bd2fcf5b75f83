"""The public functions of FlashAttention 4: how they call the half-private ones, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emulated_flash_attn_4 import FlashAttention4
from emulated_flash_math import Function, Plan

OF_BACKWARD = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k")
OF_BOTH = ("softmax_scale", "causal", "softcap")
AUTOGRADS_OWN = (
    "window_size", "deterministic", "score_mod_bwd", "block_sparse_tensors_bwd", "gather_bwd_token_chunk",
)  # fmt: skip


class PublicFlashAttention4(FlashAttention4):
    def flash_attn_func(self, **given: Any) -> Any:
        tensors = [given.pop(name) for name in ("q", "k", "v", "learnable_sink")]
        return Function.apply(Attention(self, given).plan(), *tensors)

    flash_attn_varlen_func = flash_attn_func

    def flash_attn_combine(self, **given: Any) -> Any:
        raise NotImplementedError("flash_attn_combine")

    def get_scheduler_metadata(self, **given: Any) -> Any:
        raise NotImplementedError("scheduler metadata")


class Attention:
    def __init__(self, package: FlashAttention4, given: dict[str, Any]) -> None:
        self.package, self.given = package, given
        left, right = given["window_size"]
        self.window = {"window_size_left": left, "window_size_right": right}

    def plan(self) -> Plan:
        return Plan(self.forward, self.backward)

    def forward(self, ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Any:
        if self.given.get("score_mod_bwd") is not None:
            raise NotImplementedError("score_mod_bwd")
        given = {name: t for name, t in self.given.items() if name not in AUTOGRADS_OWN}
        forward = self.package.functions["_flash_attn_fwd"]
        out, lse, *_ = forward(q=q, k=k, v=v, learnable_sink=sink, **given, **self.window)
        ctx.save_for_backward(q, k, v, out, lse, sink)
        ctx.set_materialize_grads(False)
        return out, lse

    def backward(self, ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, sink = ctx.saved_tensors
        given = {name: self.given[name] for name in (*OF_BOTH, *OF_BACKWARD) if name in self.given}
        if self.package.later:
            given["learnable_sink"] = sink
        made = self.package.functions["_flash_attn_bwd"](
            q=q, k=k, v=v, out=out, dout=torch.zeros_like(out) if dout is None else dout, lse=lse,
            dlse=dlse if self.given["return_lse"] else None, deterministic=self.given["deterministic"],
            **self.window, **given,
        )  # fmt: skip
        return (*made, None) if len(made) == 3 else tuple(made)  # 4.0.0b20 has none for the sink
