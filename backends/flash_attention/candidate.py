"""What the three ``flash_attn.*`` candidates are: FlashAttention's own packages, by generation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attnsel.verdicts.record import CandidateRecord, Efficiency, Memory

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams

# Every call that some release of theirs runs; which release and GPU takes which, rules/flash_attention knows.
_EVERY = (
    "bf16", "fp16", "cuda", "training", "causal", "window", "top_left", "bottom_right", "padding", "thd",
    "gaps", "paged", "gqa", "softcap", "deterministic", "lse", "strides", "cuda_graph",
)  # fmt: skip

FLASH_2_EFFICIENCY = (
    Efficiency(range(80, 90), 0.6, "50 to 73 % of an A100's peak (FlashAttention-2 paper)"),
    Efficiency({90}, 0.37, "362 of 989 TFLOP/s on an H100 (FlashAttention-3 paper)"),
)
WRITTEN_FOR_FLASH_2 = (*range(80, 90), *range(120, 130))
_FLOAT32 = 4
_TILE = 128  # rows, to which queries are rounded up


def ordered_sums(p: AttentionParams, env: Environment) -> Memory:
    """What the deterministic backward of FlashAttention 2 adds up in: dq in float32, once for each of the
    blocks that would otherwise race, which are as many as keep every multiprocessor busy.

    Source: mha_bwd in csrc/flash_attn/flash_api.cpp v2.8.3, lines 888 to 900: dq_accum [nsplits, b, s_q, h,
    d], nsplits = ceil(multiprocessors / (b * h)), s_q rounded to 128 and d to 32.
    """
    what = "float32 gradients of q"
    if not (p.is_training and p.deterministic and env.device.sm_count):
        return what, 0
    sequences = p.batch_size * p.num_heads
    splits = -(-env.device.sm_count // max(1, sequences))
    rows, width = -(-p.max_seqlen_q // _TILE) * _TILE, -(-p.head_dim_qk // 32) * 32
    return what, _FLOAT32 * splits * sequences * rows * width


_package = partial(
    CandidateRecord,
    family="FLASH",
    unproven_last=False,  # the kernels are their maker's; the code around them is checked on its first call
)
_CACHE, _FP8 = "a contiguous cache", "FP8 attention"
_ADAPTED = ("drop_mask", "pad_head_dim_qk", "pad_head_dim_v", "contiguous", "pack")

CANDIDATES = (
    _package(
        name="flash_attn.2",
        title="FlashAttention 2, the package flash-attn",
        kernel="attnsel.backends.flash_attention.two:KERNEL",
        limits="FLASH200",
        source="flash_attn/flash_attn_interface.py, 2.5.9.post1 to 2.8.3: arguments of its functions",
        takes=(*_EVERY, "rocm", "head_dim_v", "alibi", "dropout"),  # head_dim_v: FLASH212
        not_called={_CACHE: "flash_attn_with_kvcache takes one, flash_attn_interface.py v2.8.3, line 1464"},
        planned_on=("rocm",),
        rules=(
            "attnsel.rules.flash_attention.common",
            "attnsel.rules.flash_attention.two",
            "attnsel.rules.flash_attention.rocm",
        ),
        needs=("torch", "flash_attn"),
        library="flash_attn",
        adaptations=_ADAPTED,
        memory=ordered_sums,
        dropout="generator",
        kernel_family="flash",
        efficiency=FLASH_2_EFFICIENCY,
        written_for=WRITTEN_FOR_FLASH_2,
    ),
    _package(
        name="flash_attn.3",
        title="FlashAttention 3, built from hopper/ of its repository",
        kernel="attnsel.backends.flash_attention.three:KERNEL",
        limits="FLASH300",
        source="hopper/flash_attn_interface.py at v2.8.3 and 0251105a: arguments of its functions",
        takes=(*_EVERY, "head_dim_v"),
        not_called={
            _CACHE: "flash_attn_with_kvcache takes one, hopper/flash_attn_interface.py at 0251105a, line 942",
            _FP8: "its forward takes e4m3 on sm90, hopper/flash_api.cpp at 0251105a, line 715",
        },
        rules=("attnsel.rules.flash_attention.common", "attnsel.rules.flash_attention.three"),
        needs=("torch", "flash_attn_3"),
        library="flash_attn_3",
        adaptations=_ADAPTED,
        kernel_family="flash3",
        efficiency=(
            Efficiency({90}, 0.67, "660 of 989 TFLOP/s on an H100, causal 8k (flash-attention#1893)"),
        ),
        written_for=(90,),
    ),
    _package(
        name="flash_attn.4",
        title="FlashAttention 4, the package flash-attn-4",
        kernel="attnsel.backends.flash_attention.four:KERNEL",
        limits="FLASH400",
        source="flash_attn/cute/interface.py, 4.0.0b20 and 4.0.0b36: arguments of its functions",
        takes=(*_EVERY, "head_dim_v", "sinks"),
        not_called={_FP8: "its forward takes FP8 on sm10x, cute/interface.py 4.0.0b36, line 801"},
        rules=("attnsel.rules.flash_attention.common", "attnsel.rules.flash_attention.four"),
        needs=("torch", "flash_attn_4"),
        library="flash_attn_4",
        adaptations=_ADAPTED,
        kernel_family="flash4",
        compiled_here=True,  # by CuTe DSL: 14 s and more of a first training call on an H200, 4.0.0b36
        efficiency=(Efficiency({100, 103}, 0.71, "1605 of 2250 TFLOP/s on a B200 (FlashAttention-4 paper)"),),
        written_for=(90, *range(100, 120)),
    ),
)
