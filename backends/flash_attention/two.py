"""FlashAttention 2, the package flash-attn from 2.5.9 on.

``_flash_attn_forward`` and its like are not in its documentation, but they are what everybody builds on who
has to keep forward and backward apart: TransformerEngine, ring attention, this. A call that PyTorch may
differentiate itself goes through the documented ``flash_attn_func``.

    =====================  =============================================================================
    what                   how the package has it
    =====================  =============================================================================
    window                 a pair before 2.7, then two numbers; -1 for no bound; bottom right
    results                before 2.7 eight, of which out, lse and rng_state are 0, 5 and 7; then four
    gradients              before 2.7 returned; then written into what is given, and lost where nothing is
    lse                    float32 [b, h, s]; packed [h, t], before 2.6 [n, h, longest]; its backward reads
                           it by address, unchecked; +inf for rows without a key
    ALiBi under a causal   adds slope * column, without the row: the same probabilities, another lse
    mask
    rows in no sequence    are not written
    =====================  =============================================================================

Sources: flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp and src/{mask,alibi,softmax}.h at
the tags v2.5.9.post1, v2.6.3, v2.7.4.post1 and v2.8.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnsel.backends.checks import Five
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.rows import check_open_right, longest_rows, same_lengths

from .kernel import FlashCall, Forward, Function, Kernel, Package, window_arguments

NAME = "flash_attn.2"


class Two(Package):
    name = NAME
    places = ("flash_attn.flash_attn_interface",)
    off: ClassVar[Mapping[str, Any]] = {
        "softcap": 0.0,
        "alibi_slopes": None,
        "block_table": None,
        "deterministic": False,
    }
    unused = ("block_table", "leftpad_k", "seqused_k")
    without = ("attn_mask", "bias", "softmax_offset")
    room = 192  # wider backwards have no kernel on some GPUs

    @property
    def lse_by_sequence(self) -> bool:
        # 2.6 brought softcap, and lse by rows.
        return "softcap" not in self.function("_flash_attn_varlen_forward").names

    def check(self, spec: Spec, inputs: Inputs, window: tuple[int, int]) -> None:
        if inputs.q.shape[-1] != inputs.v.shape[-1] or inputs.q.shape[-1] % self.multiple:
            raise ValueError(
                f"{NAME}: head_dim must be one multiple of {self.multiple} for q, k and v; got "
                f"{inputs.q.shape[-1]} and {inputs.v.shape[-1]}"
            )
        if spec.softmax_type != "vanilla":
            raise ValueError(f"{NAME}: softmax_type {spec.softmax_type!r}: it has no sinks")
        check_open_right(NAME, *window, *longest_rows(spec, inputs))
        if inputs.alibi_slopes is not None and not spec.bottom_right and not same_lengths(spec, inputs):
            raise ValueError(f"{NAME}: alibi_slopes: ALiBi counts from the bottom-right diagonal")

    def forward(self, call: FlashCall, need_lse: bool) -> Forward:
        packed = call.cu_seqlens_q is not None
        run = self.function("_flash_attn_varlen_forward" if packed else "_flash_attn_forward")
        arguments = {
            **call.arguments(),
            **_settings(run, call),
            "return_softmax": False,
        }
        if packed and call.block_table is not None:
            arguments["block_table"] = call.block_table
        results = self.run(run, arguments)
        out, lse, random = results[0], results[-3], results[-1]  # of eight before 2.7, of four since
        return Forward(out, lse + _alibi_rows(call, -1.0, lse) if _shifted(call) else lse, (random,))

    def backward(
        self, call: FlashCall, five: Five, lse: Tensor, saved: tuple[Any, ...], dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        packed = call.cu_seqlens_q is not None
        run = self.function("_flash_attn_varlen_backward" if packed else "_flash_attn_backward")
        # exp(score - lse) is to be 0 in a row without a key, where -inf would make NaN.
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        if _shifted(call):
            lse = lse + _alibi_rows(call, 1.0, lse)
        # The random state is written to where none is given; without dropout it is not read.
        random = saved[0] if saved else torch.zeros(2, dtype=torch.int64, device=lse.device)
        others = {
            **call.arguments(),
            **_settings(run, call),
            "deterministic": call.deterministic,
            "rng_state": random,
        }
        return self.gradients(run, five, dlse, lse, others)

    def more(self, call: FlashCall) -> dict[str, Any]:
        return {"dropout_p": call.dropout_p}


def _settings(run: Function, call: FlashCall) -> dict[str, Any]:
    return {
        "dropout_p": call.dropout_p,
        "softmax_scale": call.softmax_scale,
        "causal": call.causal,
        **window_arguments(run, call.window_left, call.window_right),
        "softcap": call.softcap,
        "alibi_slopes": call.alibi_slopes,
    }


def _shifted(call: FlashCall) -> bool:
    """Whether lse is off by a number per row: ALiBi in the causal kernels."""
    return call.alibi_slopes is not None and call.causal


def _alibi_rows(call: FlashCall, sign: float, lse: Tensor) -> Tensor:
    """sign * slope * (row + keys - queries of its sequence), shaped as ``lse``."""
    slopes = call.alibi_slopes
    assert slopes is not None
    slopes = slopes * sign
    if call.cu_seqlens_q is None:
        row = torch.arange(call.max_seqlen_q, device=lse.device) + (call.max_seqlen_kv - call.max_seqlen_q)
        return (slopes.unsqueeze(-1) * row).expand_as(lse)
    assert call.cu_seqlens_kv is not None
    starts, ends = call.cu_seqlens_q[:-1], call.cu_seqlens_q[1:]
    longer = call.cu_seqlens_kv.diff() - (ends - starts)
    if lse.dim() == 3:  # [n, h, longest]
        row = torch.arange(lse.shape[2], device=lse.device) + longer.unsqueeze(1)
        return slopes.unsqueeze(-1) * row.unsqueeze(1)
    at = torch.arange(lse.shape[1], device=lse.device, dtype=torch.int32)
    sequence = torch.searchsorted(ends, at, right=True).clamp_(max=starts.shape[0] - 1)
    row = at - starts[sequence] + longer[sequence]
    by_row = slopes.unsqueeze(1) if slopes.dim() == 1 else slopes[sequence].transpose(0, 1)
    return by_row * row


KERNEL = Kernel(Two())
