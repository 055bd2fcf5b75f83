"""FlashAttention 4, the package flash-attn-4: kernels in CuTe DSL, compiled when first needed.

    =====================  =============================================================================
    what                   how the package has it
    =====================  =============================================================================
    window                 None for no bound: -1 means something else in each release; bottom right
    results                out and lse first, the rest differs; lse only where it is asked for; float32
                           [b, h, s], packed [h, t]
    rows without a key     out 0 and lse -inf; with sinks lse is the sink's logit from 4.0.0b36 on
    softcap                None or 0.0 is none to the forward, only 0.0 to the backward
    gradient of lse        taken by the backward, but for head_dim 256 on datacentre Blackwell
    gradient of sinks      from 4.0.0b36 on, the fourth result where sinks are given
    pages                  ``page_table`` and ``seqused_k``, without cumulated lengths of keys; no backward
    =====================  =============================================================================

Sources: flash_attn/cute/interface.py, mask.py and softmax.py in the wheels 4.0.0b20 and 4.0.0b36.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from attnsel.backends.checks import Five, added
from attnsel.backends.contract import Inputs, Spec

from .kernel import FlashCall, Forward, Kernel, Package

NAME = "flash_attn.4"
WIDE = 256  # whose backward on datacentre Blackwell takes no gradient of lse


class Four(Package):
    name = NAME
    places = ("flash_attn.cute.interface",)
    off: ClassVar[Mapping[str, Any]] = {"page_table": None, "learnable_sink": None}
    without = ("attn_mask", "bias", "alibi_slopes", "dropout_seed", "dropout_offset")
    room = WIDE

    def check(self, spec: Spec, inputs: Inputs, window: tuple[int, int]) -> None:
        super().check(spec, inputs, window)
        sinks = spec.softmax_type != "vanilla"
        if sinks and "learnable_sink" not in self.function("_flash_attn_bwd").names:
            raise ValueError(
                f"{NAME}: softmax_type {spec.softmax_type!r}: this release rounds sinks to bf16, has no "
                "gradient for them and gives NaN where a row sees no key; 4.0.0b36 does not"
            )

    def forward(self, call: FlashCall, need_lse: bool) -> Forward:
        arguments = {
            **_tensors(call),
            **_settings(call),
            "softcap": call.softcap or None,
            "learnable_sink": call.sinks,
            "return_lse": need_lse,
        }
        if call.block_table is not None:
            arguments |= {
                "page_table": call.block_table,
                "seqused_k": call.seqused_kv,
                "max_seqlen_k": call.max_seqlen_kv,
            }
        out, lse, *_ = self.run(self.function("_flash_attn_fwd"), arguments)
        return Forward(out, lse)

    def backward(
        self, call: FlashCall, five: Five, lse: Tensor, saved: tuple[Any, ...], dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        run = self.function("_flash_attn_bwd")
        by_columns = dlse is not None and five.q.shape[-1] == five.v.shape[-1] == WIDE
        parts = []
        for part in self.parts(five, dlse if by_columns else None):
            arguments = {
                **_tensors(call),
                **_settings(call),
                **part._asdict(),
                "lse": lse.contiguous(),
                "softcap": call.softcap,
                "deterministic": call.deterministic,
                "learnable_sink": call.sinks,
            }
            if dlse is not None and not by_columns:
                by_head = dlse.transpose(-1, -2)  # [b, h, s] or [h, t], as lse
                arguments["dlse"] = by_head.float().contiguous()
            parts.append(self.run(run, arguments))
        dq, dk, dv, *sinks = added(parts)
        return dq, dk, dv, sinks[0] if sinks else None

    def more(self, call: FlashCall) -> dict[str, Any]:
        left, right = _bound(call.window_left), _bound(call.window_right)
        return {"window_size": (None, None) if call.causal else (left, right)}


def _tensors(call: FlashCall) -> dict[str, Any]:
    # The longest shape the grid, which must reach every row.
    return call.arguments(keys=call.block_table is None, longest=not call.gaps)


def _settings(call: FlashCall) -> dict[str, Any]:
    return {
        "softmax_scale": call.softmax_scale,
        "causal": call.causal,
        # A causal call has no bounds of its own.
        "window_size_left": None if call.causal else _bound(call.window_left),
        "window_size_right": None if call.causal else _bound(call.window_right),
    }


def _bound(side: int) -> int | None:
    return None if side < 0 else side


KERNEL = Kernel(Four())
