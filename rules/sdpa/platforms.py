"""SDPA8xx: PyTorch's kernels where there is no CUDA: AMD's GPUs, Apple's, Intel's. TORCH0xx: F.sdpa's own.

ROCm builds answer F.sdpa's flash and memory-efficient ops with AOTriton, whose kernels are compiled for some
architectures. Which: the tests of each release know it, torch/testing/_internal/common_cuda.py, "evaluate_
platform_supports_flash_attention", read in the wheels of 2.3.1 to 2.14.1.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from attnsel.environment import Environment
from attnsel.environment.versions import Version, torch
from attnsel.params import ITEMSIZE, AttentionParams
from attnsel.rules.api import Advice, hint, limit, rules_about
from attnsel.rules.sdpa.common import mask_of
from attnsel.verdicts.reasons import Unknown, Violation
from attnsel.verdicts.requirements import AtLeast, AtMost, EqualTo, FreeText, OneOf

ROCM = {"rocm"}
AOTRITON = ("sdpa.flash", "sdpa.efficient")
rule = rules_about(*AOTRITON, device=ROCM)

EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"


class _Compiled(NamedTuple):
    """From which torch on which architectures have kernels, and which only with EXPERIMENTAL."""

    torch: tuple[int, int]
    ready: tuple[str, ...]
    experimental: tuple[str, ...] = ()


_MI = ("gfx90a", "gfx942")
_NEW = (*_MI, "gfx950", "gfx1201")
_COMPILED = (
    _Compiled((2, 11), (*_NEW, "gfx1100"), ("gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200")),
    _Compiled((2, 10), _NEW, ("gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200")),
    _Compiled((2, 8), (*_NEW, "gfx1100"), ("gfx1101", "gfx1150", "gfx1151", "gfx1200")),
    _Compiled((2, 6), _MI, ("gfx1100",)),
    _Compiled((2, 3), _MI),
)


def gfx(env: Environment) -> str | None:
    """``gfx942`` of an AMD GPU, where its name says it."""
    found = re.search(r"gfx\d+[a-z]?", env.device.name.casefold())
    return None if found is None else found[0]


@rule("SDPA801", *AOTRITON, "sdpa.varlen", fires_on={"device": "gfx906"}, passes={"device": "gfx942"})
def aotriton_architectures(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """ROCm's flash and memory-efficient kernels are compiled for some GPUs

    Why: AOTriton brings binaries: MI200 and MI300 (gfx90a, gfx942) since PyTorch 2.3; MI350, RX 7900 and RX
    9070 (gfx950, gfx1100, gfx1201) since 2.8; others only with TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1.
    Elsewhere F.sdpa goes to the math kernel without a word. A build without AOTriton, as some of TheRock's,
    has neither kernel: torch.backends.cuda.is_flash_attention_available() tells.
    Fix: set the variable where it helps; or sdpa.math, tiled.
    Source: common_cuda.py in the wheels of torch 2.3.1 to 2.14.1; check_flash_attention_hardware_support in
    C; unsloth#8821 (gfx1200: no kernel without the variable); ROCm/TheRock#1909; pytorch#112997.
    """
    rows = [row for row in _COMPILED if env.torch is not None and env.torch >= row.torch]
    if not rows:
        return None  # SDPA802
    arch, row = gfx(env), rows[0]
    if arch in row.ready:
        return None
    ready = FreeText(", ".join(row.ready))
    if arch is None:
        return Unknown("device", env.device.name or "rocm", FreeText(f"one of {ready} (--gpu {_MI[1]})"))
    if arch in row.experimental:
        return Unknown("device", arch, FreeText(EXPERIMENTAL))
    return Violation("device", arch, ready)


@rule(
    "SDPA802",
    "sdpa.flash",
    when=torch("<2.3.0"),
    requires={"torch": AtLeast(Version(2, 3))},
    fires_on={"device": "gfx942"},
    passes={"device": "gfx942", "torch": "2.3.0"},
)
def rocm_flash_since_2_3(p: AttentionParams, env: Environment) -> None:
    """On ROCm the flash kernel came with PyTorch 2.3

    Why: before, ROCm builds were compiled without it, and F.sdpa goes to the math kernel.
    Fix: PyTorch 2.3 or newer.
    Source: CMakeLists.txt of v2.0.0, "USE_CUDA AND NOT ROCM"; common_cuda.py in the wheels of 2.2.2 and
    2.3.1; pytorch#112997.
    """


@rule(
    "SDPA803",
    "sdpa.efficient",
    when=torch("<2.4.0"),
    requires={"torch": AtLeast(Version(2, 4))},
    fires_on={"device": "gfx942"},
    passes={"device": "gfx942", "torch": "2.4.0"},
)
def rocm_efficient_since_2_4(p: AttentionParams, env: Environment) -> None:
    """On ROCm the memory-efficient kernel came with PyTorch 2.4

    Fix: PyTorch 2.4 or newer.
    Source: common_cuda.py in the wheels of 2.3.1 ("not TEST_WITH_ROCM") and 2.4.1; v2.4.0 sdp_utils.cpp.
    """


@rule(
    "SDPA804",
    "sdpa.efficient",
    requires={"head_dim_v": EqualTo("head_dim_qk")},
    fires_on={"device": "gfx942", "head_dim_qk": 64, "head_dim_v": 128},
    passes={"device": "gfx942"},
)
def rocm_efficient_head_dims(p: AttentionParams, env: Environment) -> None:
    """On ROCm the memory-efficient kernel wants head_dim_v equal to head_dim_qk

    Why: it is the flash kernel there; AOTriton 0.12 has unequal ones, in builds later than those read.
    Fix: pad the smaller one with zeros, keep the softmax scale of the true head_dim_qk, and cut the output.
    Source: check_head_dim_size_mem_efficient in C (AOTRITON_VERSION < 0.12).
    """


@rule(
    "SDPA805",
    fires_on={"device": "gfx942", "head_dim_qk": 640},
    passes={"device": "gfx942", "head_dim_qk": 256},
)
def rocm_head_dim_limit(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """On ROCm the fused kernels have head_dim up to 256, or 512 with AOTriton 0.9

    Why: which AOTriton a build has, its version does not say.
    Fix: sdpa.math and tiled have no limit.
    Source: aotriton_max_hdim in C; check_head_dim_size_flash in A.
    """
    found = limit(p, "head_dim_qk", AtMost(256))
    return Unknown(*found) if found is not None and p.head_dim_qk <= 512 else found


@rule(
    "SDPA806",
    "sdpa.flash",
    requires={"num_gqa_groups": EqualTo("num_heads")},
    fires_on={"device": "gfx942", "num_gqa_groups": 4},
    passes={"device": "gfx942"},
)
def rocm_flash_equal_heads(p: AttentionParams, env: Environment) -> None:
    """On ROCm the flash kernel wants as many key/value heads as query heads

    Why: releases up to about 2.9 have no groups there; attnsel repeats heads for every one.
    Fix: attnsel repeats the heads (adaptation "expand_gqa"), which costs memory.
    Source: backend_supports_grouped_query_attention in A (false under USE_ROCM) and C (true).
    """


@rule(
    "SDPA810",
    "sdpa.math",
    device={"mps"},
    evidence="reported",
    fires_on={"device": "mps", "max_seqlen_q": 32768},
    passes={"device": "mps", "max_seqlen_q": 1024},
)
def mps_scores_below_4_gib(p: AttentionParams, env: Environment) -> Violation | None:
    """On Apple's GPUs the scores must stay below 4 GiB

    Why: no tensor of Metal Performance Shaders is larger; the process is aborted ("total bytes of NDArray >
    2**32"). The math kernel holds b*h*s_q*s_kv scores at once. F.sdpa itself has Metal kernels for short
    queries since PyTorch 2.8, which attnsel does not call.
    Fix: fewer sequences or heads in a call; tiled holds a part of the scores at a time.
    Source: pytorch#149261 (h 12, s 29640).
    """
    count = p.batch_size * p.num_heads * p.max_seqlen_q * p.max_seqlen_kv
    if count * ITEMSIZE[p.dtype] <= 1 << 32:
        return None
    return Violation("max_seqlen_kv", p.max_seqlen_kv, FreeText("scores of at most 4 GiB"))


@rule(
    "SDPA811",
    "sdpa.flash",
    "sdpa.varlen",
    when=torch(">=2.2.0,<2.15.0"),
    device={"cuda"},
    requires={"platform": OneOf("linux")},
    fires_on={"platform": "windows", "torch": "2.4.1"},
    passes={"torch": "2.4.1"},
)
def no_flash_on_windows(p: AttentionParams, env: Environment) -> None:
    """From PyTorch 2.2 on the Windows builds have no flash kernel

    Why: FlashAttention 2 is left out under Microsoft's compiler. This is what "Torch was not compiled with
    flash attention" says, and why installing flash-attn does not help F.sdpa.
    torch.backends.cuda.flash_sdp_enabled() is True all the same: it is the switch.
    Fix: sdpa.cudnn and sdpa.efficient run on Windows; Linux or WSL has flash.
    Source: CMakeLists.txt ("USE_CUDA OR USE_ROCM;NOT MSVC"); common_cuda.py in the wheels of torch 2.2.2 to
    2.14.1 ("not IS_WINDOWS"); pytorch#108175, pytorch#125070; sam2#48; sd-scripts#1884. pytorch#186343
    (2026-06) builds it, in no release read.
    """


# ---- What F.sdpa has of its own on Apple's GPUs: Metal kernels that its math goes to without a gradient.
# attnsel's sdpa.math calls another op, which has none of these bugs: they are remarks, and stand in the first
# sentence of what F.sdpa or transformers would run.


_METAL = (64, 96, 128)  # head dimensions of the kernels for few queries
_DECODED = {"device": "mps", "is_training": False, "max_seqlen_q": 1, "attn_mask_type": "no_mask"}


def _on_metal(p: AttentionParams, env: Environment) -> bool:
    return env.device.type == "mps" and not p.is_training and not p.dropout


def _few_queries(p: AttentionParams, env: Environment) -> bool:
    """Whether F.sdpa takes its kernels for few queries: supports_fast_sdpa."""
    narrow = p.head_dim_qk == p.head_dim_v and p.head_dim_qk in _METAL
    few = p.max_seqlen_q <= min(8, p.max_seqlen_kv) and not (p.causal and not p.bottom_right)
    return _on_metal(p, env) and narrow and few


def _said(env: Environment, what: str, fixed: str) -> Advice:
    return Advice(f"F.sdpa of torch {env.torch} on MPS {what}; fixed in {fixed}. attnsel's is another op")


@hint(
    "TORCH001",
    when=torch(">=2.8.0,<2.11.0"),
    evidence="reported",
    fires_on={**_DECODED, "torch": "2.10.0", "max_seqlen_kv": 2048, "num_gqa_groups": 2},
    passes={**_DECODED, "torch": "2.10.0", "max_seqlen_kv": 512, "num_gqa_groups": 2},
)
def two_passes_on_metal(p: AttentionParams, env: Environment) -> Advice | None:
    """On Apple's GPUs F.sdpa 2.8 to 2.10 decodes long caches out of bounds

    Why: for at most 8 queries over 1024 keys or more it works in two passes, whose sums are allocated in fp16
    or bf16 and written in fp32: past their end, and over other tensors. Results change from call to call.
    Fix: PyTorch 2.11, fp32, or a mask of numbers, which goes to other kernels.
    Source: pytorch#174861 (32 query heads on 2, 1024 keys), pytorch#174945, transformers#44591.
    """
    if not _few_queries(p, env) or p.dtype == "fp32" or p.max_seqlen_kv < 1024:
        return None
    return _said(env, "writes out of bounds from 1024 keys on (#174861)", "2.11")


@hint(
    "TORCH002",
    when=torch(">=2.5.0,<2.12.0"),
    evidence="reported",
    fires_on={**_DECODED, "torch": "2.11.0", "head_dim_qk": 192, "head_dim_v": 128},
    passes={**_DECODED, "torch": "2.12.0", "head_dim_qk": 192, "head_dim_v": 128},
)
def other_value_width_on_metal(p: AttentionParams, env: Environment) -> Advice | None:
    """On Apple's GPUs F.sdpa before 2.12 corrupts values of another head_dim

    Fix: PyTorch 2.12, or pad the values to the queries' head_dim.
    Source: pytorch#176767; transformers#44591.
    """
    if not _on_metal(p, env) or p.head_dim_qk == p.head_dim_v:
        return None
    return _said(env, "corrupts another head_dim_v (#176767)", "2.12")


@hint(
    "TORCH003",
    when=torch(">=2.8.0,<2.12.0"),
    evidence="reported",
    fires_on={**_DECODED, "torch": "2.11.0", "max_seqlen_kv": 512},
    passes={**_DECODED, "torch": "2.11.0", "max_seqlen_kv": 512, "batch_size": 1},
)
def batches_on_metal(p: AttentionParams, env: Environment) -> Advice | None:
    """On Apple's GPUs F.sdpa before 2.12 mixes up sequences of transposed tensors

    Why: its kernels for few queries step from sequence to sequence as in contiguous tensors [b, h, s, d];
    those that a model transposes from [b, s, h, d] are not.
    Fix: PyTorch 2.12, or .contiguous() after the transpose.
    Source: pytorch#181133, pytorch#181151; pytorch#163597 (2.8.0), pytorch#170837.
    """
    if not _few_queries(p, env) or p.batch_size == 1 or p.layout.kv_format == "bhsd":
        return None
    return _said(env, "mixes up sequences of transposed tensors (#181133)", "2.12")


_OF_A_BATCH = {"attn_mask_type": "arbitrary", "max_seqlen_kv": 512, "qkv_layout": "bhsd_bhsd_bhsd"}


@hint(
    "TORCH004",
    when=torch(">=2.8.0,<2.13.0"),
    evidence="reported",
    fires_on={**_DECODED, **_OF_A_BATCH, "torch": "2.12.1", "tensors": mask_of(2, 1, 1, 512)},
    passes={**_DECODED, **_OF_A_BATCH, "torch": "2.12.1", "tensors": mask_of(2, 16, 1, 512)},
)
def masks_of_a_batch_on_metal(p: AttentionParams, env: Environment) -> Advice | None:
    """On Apple's GPUs F.sdpa before 2.13 gives all sequences the first one's mask

    Why: its kernels for few queries count heads of all sequences alike, and step by heads alone through a
    mask that has one for all heads.
    Fix: PyTorch 2.13, or a mask expanded and copied to every head.
    Source: pytorch#184180 (mask [2, 1, 8, 8]).
    """
    mask = p.tensors.mask
    if not _few_queries(p, env) or mask is None or len(mask.shape) != 4:
        return None
    if p.batch_size == 1 or p.num_heads == 1 or mask.shape[0] == 1 or mask.shape[1] != 1:
        return None
    return _said(env, "gives all sequences the first one's mask (#184180)", "2.13")
