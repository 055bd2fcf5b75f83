"""FlashAttention 3, built from hopper/ of its repository.

One forward for dense batches, rows and pages, one backward. Two snapshots call themselves 3.0.0b1 and differ
in their arguments, so these are read from the functions (``kernel``).

    =====================  =============================================================================
    what                   how the package has it
    =====================  =============================================================================
    module                 flash_attn_3.flash_attn_interface, or flash_attn_interface at the top
    window                 a pair before 3.0.0, then two numbers; -1 for no bound; bottom right
    results                out and lse first; float32 [b, h, s], packed [h, t]
    rows without a key     out 0 and lse -inf; +inf where there is no key at all; the backward takes both
    gradients              returned by 3.0.0b1 and written into what is given; 3.0.0 only writes
    pages                  ``page_table`` and ``seqused_k``, without cumulated lengths of keys; no backward
    causal                 is called ``is_causal`` by the backward of 3.0.0
    =====================  =============================================================================

Sources: hopper/flash_attn_interface.py, flash_api.cpp and softmax.h at the tag v2.8.3 (3.0.0b1) and at
0251105a (3.0.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from attnsel.backends.checks import Five
from attnsel.backends.contract import Inputs, Spec

from .kernel import FlashCall, Forward, Kernel, Package, window_arguments

NAME = "flash_attn.3"


class Three(Package):
    name = NAME
    places = ("flash_attn_3.flash_attn_interface", "flash_attn_interface")
    off: ClassVar[Mapping[str, Any]] = {"softcap": 0.0, "deterministic": False, "page_table": None}
    unused = (
        "k_new", "v_new", "qv", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
        "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos",
        "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "sequed_q", "sequed_k",
    )  # fmt: skip
    without = ("attn_mask", "bias", "alibi_slopes", "softmax_offset", "dropout_seed", "dropout_offset")
    room = 192  # 256 has no backward that gives equal bits every run

    def check(self, spec: Spec, inputs: Inputs, window: tuple[int, int]) -> None:
        super().check(spec, inputs, window)
        if spec.softmax_type != "vanilla":
            raise ValueError(f"{NAME}: softmax_type {spec.softmax_type!r}: it has no sinks")

    def forward(self, call: FlashCall, need_lse: bool) -> Forward:
        run = self.function("_flash_attn_forward")
        arguments = {
            **call.arguments(keys=call.block_table is None),
            "softmax_scale": call.softmax_scale,
            "causal": call.causal,
            **window_arguments(run, call.window_left, call.window_right),
            "softcap": call.softcap,
        }
        if call.block_table is not None:
            arguments |= {"page_table": call.block_table, "seqused_k": call.seqused_kv}
        out, lse, *_ = self.run(run, arguments)
        return Forward(out, lse)

    def backward(
        self, call: FlashCall, five: Five, lse: Tensor, saved: tuple[Any, ...], dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        run = self.function("_flash_attn_backward")
        others = {
            **call.arguments(keys=call.block_table is None),
            "softmax_scale": call.softmax_scale,
            "is_causal" if "is_causal" in run.names else "causal": call.causal,
            **window_arguments(run, call.window_left, call.window_right),
            "softcap": call.softcap,
            "deterministic": call.deterministic,
        }
        return self.gradients(run, five, dlse, lse, others)


KERNEL = Kernel(Three())
