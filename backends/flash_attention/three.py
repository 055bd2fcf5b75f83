"""FlashAttention 3, built from hopper/ of its repository.

One forward for dense batches, rows and pages, one backward. Two snapshots call themselves 3.0.0b1 and differ
in their arguments, so these are read from the functions (``packages``).

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

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from attnsel.backends.checks import Five, with_lse_gradient
from attnsel.backends.contract import Inputs, Spec

from . import packages
from .kernel import FlashCall, Forward, Kernel, check_heads, gradients
from .packages import function, window_arguments

NAME = "flash_attn.3"
HEAD_DIM_MULTIPLE, HEAD_DIM_ROOM = 8, 192  # 256 has no backward that gives equal bits every run
OFF = {"softcap": 0.0, "deterministic": False, "page_table": None}
_NO_ARGUMENT = (
    "k_new", "v_new", "qv", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
    "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos",
    "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "sequed_q", "sequed_k",
)  # fmt: skip


def interface() -> ModuleType:
    """The package's functions. Raises Missing."""
    return packages.module(NAME, "flash_attn_3.flash_attn_interface", "flash_attn_interface")


class Three:
    name = NAME
    without = ("attn_mask", "bias", "alibi_slopes", "softmax_offset", "dropout_seed", "dropout_offset")
    lse_by_sequence = False

    def check(self, spec: Spec, inputs: Inputs, window: tuple[int, int]) -> None:
        interface()
        check_heads(NAME, spec, inputs, HEAD_DIM_MULTIPLE)
        if spec.softmax_type != "vanilla":
            raise ValueError(f"{NAME}: softmax_type {spec.softmax_type!r}: it has no sinks")

    def forward(self, call: FlashCall, need_lse: bool) -> Forward:
        run = function(interface(), "_flash_attn_forward")
        arguments = {
            **call.arguments(keys=call.block_table is None),
            "softmax_scale": call.softmax_scale,
            "causal": call.causal,
            **window_arguments(run, call.window_left, call.window_right),
            "softcap": call.softcap,
        }
        if call.block_table is not None:
            arguments |= {"page_table": call.block_table, "seqused_k": call.seqused_kv}
        out, lse, *_ = run(arguments, OFF, _NO_ARGUMENT)
        return Forward(out, lse)

    def backward(
        self, call: FlashCall, five: Five, lse: Tensor, saved: tuple[Any, ...], dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        run = function(interface(), "_flash_attn_backward")
        parts = [five] if dlse is None else _with_lse_gradient(five, dlse)
        others = {
            **call.arguments(keys=call.block_table is None),
            "softmax_scale": call.softmax_scale,
            "is_causal" if "is_causal" in run.names else "causal": call.causal,
            **window_arguments(run, call.window_left, call.window_right),
            "softcap": call.softcap,
            "deterministic": call.deterministic,
        }
        return gradients(lambda given: run(given, OFF, _NO_ARGUMENT), parts, lse, others)

    def public(self, call: FlashCall) -> Callable[[Tensor, Tensor, Tensor], Any]:
        run = function(interface(), "flash_attn_func")
        settings = {
            "softmax_scale": call.softmax_scale,
            "causal": call.causal,
            "window_size": (call.window_left, call.window_right),
            "softcap": call.softcap,
            "deterministic": call.deterministic,
        }
        return run.bound(settings, OFF)


def _with_lse_gradient(five: Five, dlse: Tensor) -> list[Five]:
    """With head dimensions of their own, only some pairs have a kernel: none is widened then."""
    equal = five.q.shape[-1] == five.v.shape[-1]
    return with_lse_gradient(
        five,
        dlse,
        multiple=HEAD_DIM_MULTIPLE,
        room=HEAD_DIM_ROOM if equal else 0,
        equal_head_dims=equal,
    )


KERNEL = Kernel(Three())
