"""SDPA7xx: what F.sdpa's kernels could before PyTorch 2.5, and which of them was its own first choice.

Read in the wheels of 2.0.1, 2.1.2, 2.2.2, 2.3.1, 2.5.0 and 2.5.1 for Linux and CUDA (what libtorch_cuda.so
warns of), in the sources of 2.0.0 and 2.4.0 (commits fb30dd01 and 37348663 of MetaX-MACA/mcPytorch, whose
chooser is PyTorch's), and, for CPUs, in libtorch_cpu of the wheels for macOS. Up to 2.1 the flash kernel is
FlashAttention 1.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import Version, torch
from attnsel.params import AttentionParams
from attnsel.rules.api import limit, rules_about
from attnsel.rules.sdpa.common import CUDA
from attnsel.verdicts.requirements import AtLeast, AtMost, EqualTo, FreeText, OneOf
from attnsel.verdicts.verdict import Unknown, Violation

rule = rules_about("sdpa.flash", device=CUDA)

CPU = {"cpu"}
FLASH_1 = torch("<2.2.0")
HOPPER = range(90, 100)
TURING = range(75, 80)
NOT_A100 = frozenset({*TURING, *range(81, 90)})  # of those that FlashAttention 1 runs on
_NO_MASK = FreeText("no_mask or causal: there is no argument for a mask")


def _corners_differ(p: AttentionParams) -> bool:
    return p.bottom_right and not p.padding and 1 < p.max_seqlen_q != p.max_seqlen_kv


# FlashAttention 1: PyTorch 2.0 and 2.1.


@rule(
    "SDPA701",
    when=FLASH_1,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 256},
    passes={"head_dim_qk": 128},
)
def flash_1_head_dims(p: AttentionParams, env: Environment) -> None:
    """Before PyTorch 2.2 the flash kernel stops at head_dim 128

    Why: it is FlashAttention 1, and F.sdpa does not pad for it: other widths than multiples of 8 are refused.
    Fix: PyTorch 2.2 has 256; sdpa.efficient has no limit.
    Source: "a multiple of 8 and less than or equal to 128" in libtorch_cuda.so, wheels 2.0.1 and 2.1.2;
    check_head_dim_size, v2.0.0 sdp_utils.h, line 244.
    """


@rule(
    "SDPA702",
    when=torch("<2.1.0"),
    arch=HOPPER,
    requires={"torch": AtLeast(Version(2, 1))},
    passes={"torch": "2.1.0"},
)
def flash_1_on_hopper(p: AttentionParams, env: Environment) -> None:
    """The flash kernel runs on Hopper from PyTorch 2.1 on

    Fix: PyTorch 2.1; sdpa.efficient runs there.
    Source: "only supports sm75 and sm8x" in libtorch_cuda.so, wheel 2.0.1; "[sm75, sm90]", wheel 2.1.2.
    """


@rule(
    "SDPA703",
    when=FLASH_1,
    requires={"arch": AtLeast(75)},
    fires_on={"gpu": "V100"},
    passes={"gpu": "T4", "dtype": "fp16", "head_dim_qk": 64},
)
def flash_1_needs_turing(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 1 needs Turing or newer (sm75)

    Why: it is the last one that runs on Turing; FlashAttention 2 begins with Ampere (SDPA103).
    Fix: sdpa.efficient runs on Volta.
    Source: check_gpu_sm75_or_greater, v2.0.0 sdp_utils.h, line 345; "[sm75, sm90]", wheel 2.1.2.
    """


@rule(
    "SDPA704",
    when=FLASH_1,
    arch=TURING,
    requires={"dtype": OneOf("fp16")},
    fires_on={"gpu": "T4"},
    passes={"gpu": "T4", "dtype": "fp16"},
)
def flash_1_on_turing_in_fp16(p: AttentionParams, env: Environment) -> bool:
    """On Turing FlashAttention 1 computes in fp16

    Fix: cast to fp16.
    Source: use_flash_attention, v2.0.0 sdp_utils.h, line 419.
    """
    return p.dtype == "bf16"


@rule(
    "SDPA705",
    when=FLASH_1,
    arch=NOT_A100,
    requires={("head_dim_qk", "head_dim_v"): AtMost(64)},
    fires_on={"gpu": "RTX 3090", "head_dim_qk": 128},
    passes={"gpu": "RTX 3090", "head_dim_qk": 128, "is_training": False},
)
def flash_1_backward(p: AttentionParams, env: Environment) -> bool:
    """FlashAttention 1 trains heads wider than 64 on A100 and H100 only

    Why: elsewhere its backward raises. On Turing, and in 2.0.0 everywhere, F.sdpa chooses it all the same and
    the backward fails.
    Fix: sdpa.efficient in PyTorch 2.1, or PyTorch 2.2.
    Source: TORCH_CHECK(is_sm80) in v2.0.0 fmha_api.cpp, line 420; "training with head_dim greater than 64 on
    sm86 or newer", wheel 2.0.1, and "[sm86, sm89]", wheel 2.1.2; pytorch#99736.
    """
    return p.is_training


@rule(
    "SDPA706",
    when=FLASH_1,
    fires_on={"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 4096},
    passes={"max_seqlen_q": 1024, "max_seqlen_kv": 4096},
)
def flash_1_causal_corner(p: AttentionParams, env: Environment) -> Violation | None:
    """FlashAttention 1's causal mask starts at the top left

    Why: the corner changed in FlashAttention 2.1, which came with PyTorch 2.2.
    Fix: equal lengths, or causal from the top left.
    Source: pytorch, check_flash_causal_non_square_seqlens, whose comment names FlashAttention's commit
    9e5e8bc91e; v2.0.0 has no such check.
    """
    if not _corners_differ(p):
        return None
    needed = FreeText("causal from the top left, or equal lengths")
    return Violation("attn_mask_type", p.attn_mask_type, needed)


# FlashAttention 2, before what the newer releases have.


@rule(
    "SDPA707",
    when=torch(">=2.2.0,<2.3.0"),
    fires_on={"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 4096},
    passes={"attn_mask_type": "causal_bottom_right"},
)
def bottom_right_since_2_3(p: AttentionParams, env: Environment) -> Violation | None:
    """F.sdpa has a bottom-right causal mask from PyTorch 2.3 on

    Why: is_causal means the top left, and the flash kernel's corner is the other one, so F.sdpa gives it up
    where lengths differ. torch.nn.attention.bias.causal_lower_right came with 2.3.
    Fix: PyTorch 2.3, and causal_lower_right as attn_mask.
    Source: torch/nn/attention/bias.py, in the wheel of 2.3.1 and not in that of 2.2.2.
    """
    if not _corners_differ(p):
        return None
    return Violation("attn_mask_type", p.attn_mask_type, FreeText("equal lengths, or PyTorch 2.3"))


@rule(
    "SDPA708",
    when=torch(">=2.2.0,<2.3.0"),
    arch=range(86, 90),
    requires={("head_dim_qk", "head_dim_v"): AtMost(192)},
    fires_on={"gpu": "RTX 4090", "head_dim_qk": 256},
    passes={"gpu": "RTX 4090", "head_dim_qk": 192},
)
def flash_backward_in_2_2(p: AttentionParams, env: Environment) -> bool:
    """In PyTorch 2.2 the flash backward stops at head_dim 192 on sm86 to sm89

    Fix: PyTorch 2.3 has 256 without dropout; sdpa.efficient has no limit.
    Source: "training with head_dim greater than 192 on gpu architectures in the range[sm86, sm89]",
    libtorch_cuda.so, wheel 2.2.2.
    """
    return p.is_training


@rule(
    "SDPA709",
    "sdpa.flash",
    "sdpa.cudnn",
    when=torch("<2.5.0"),
    device=None,
    requires={"num_gqa_groups": EqualTo("num_heads")},
    fires_on={"num_gqa_groups": 4},
)
def gqa_since_2_5(p: AttentionParams, env: Environment) -> None:
    """F.sdpa has grouped heads from PyTorch 2.5 on

    Why: its argument enable_gqa came with 2.5; before, the fused kernels want as many key/value heads as
    query heads, and F.sdpa goes to the math kernel, or raises.
    Fix: repeat the heads (repeat_interleave) before the call, or PyTorch 2.5 with enable_gqa=True.
    Source: signature of scaled_dot_product_attention in the wheels of 2.4.1 and 2.5.1;
    check_batch_size_and_num_heads_dense, v2.4.0 sdp_utils_cpp.h.
    """


@rule(
    "SDPA710",
    "sdpa.math",
    when=torch("<2.5.0"),
    device=None,
    requires={"num_gqa_groups": EqualTo("num_heads")},
    fires_on={"num_gqa_groups": 4},
    passes={"num_gqa_groups": 1},
)
def math_gqa_since_2_5(p: AttentionParams, env: Environment) -> bool:
    """Before PyTorch 2.5 the math kernel takes equal heads, or one key/value head

    Why: a single one broadcasts in a matrix product; other numbers raise.
    Fix: repeat the heads before the call, or PyTorch 2.5 with enable_gqa=True.
    Source: _scaled_dot_product_attention_math, v2.4.0 attention.cpp, line 715 (matmul without repeats).
    """
    return p.num_gqa_groups > 1


# The memory-efficient kernel in 2.0.


@rule(
    "SDPA711",
    "sdpa.efficient",
    when=torch("<2.1.0"),
    fires_on={"attn_mask_type": "arbitrary"},
)
def efficient_masks_since_2_1(p: AttentionParams, env: Environment) -> Violation | None:
    """The memory-efficient kernel takes a mask from PyTorch 2.1 on

    Fix: PyTorch 2.1; in 2.0 a mask means the math kernel.
    Source: "Both fused kernels do not support non-null attn_mask", v2.0.0 sdp_utils.h, line 188; attn_bias in
    the op's signature, torch/_meta_registrations.py of the wheel of 2.1.2, line 4901.
    """
    if p.attn_mask_type != "arbitrary":
        return None
    return Violation("attn_mask_type", "arbitrary", _NO_MASK)


@rule(
    "SDPA712",
    "sdpa.efficient",
    when=torch("<2.1.0"),
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={"attention_dropout": 0.1},
    passes={"attention_dropout": 0.1, "is_training": False},
)
def efficient_dropout_since_2_1(p: AttentionParams, env: Environment) -> bool:
    """The memory-efficient kernel has dropout from PyTorch 2.1 on

    Fix: leave dropout out, or PyTorch 2.1.
    Source: check_for_non_zero_dropout, v2.0.0 sdp_utils.h, line 108; its warning is not in that of 2.1.2.
    """
    return p.dropout


@rule(
    "SDPA713",
    "sdpa.efficient",
    when=torch("<2.1.0"),
    requires={"deterministic": OneOf(False)},
    fires_on={"deterministic": True},
)
def efficient_deterministic_since_2_1(p: AttentionParams, env: Environment) -> None:
    """In PyTorch 2.0 deterministic algorithms rule the efficient kernel out

    Fix: PyTorch 2.1, where the forward is allowed.
    Source: check_use_deterministic_algorithms, v2.0.0 sdp_utils.h, line 398.
    """


@rule(
    "SDPA714",
    "sdpa.efficient",
    when=torch("<2.1.0"),
    arch=range(86, 91),
    fires_on={"gpu": "RTX 3090", "torch": "2.0.1"},
    passes={"gpu": "RTX 3090", "torch": "2.0.1", "head_dim_qk": 64},
)
def efficient_wide_heads_in_2_0(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """In PyTorch 2.0 the efficient kernel has no wide heads on sm86 and newer

    Why: an illegal memory access. 2.0.0 refuses head_dim 128 on sm86, 2.0.1 everything above 64 on sm86 and
    newer; whether its "newer" includes Hopper was not read.
    Fix: PyTorch 2.1 has no such limit.
    Source: check_gpu_sm86_head_dim_128, v2.0.0 sdp_utils.h, line 382; "does not currently support head_dim
    greater than 64 on sm86 or newer", libtorch_cuda.so, wheel 2.0.1; pytorch#99736.
    """
    if env.torch is None or env.torch < (2, 0, 1):
        if env.arch != 86 or p.head_dim_qk != 128:
            return None
        return Violation("head_dim_qk", 128, FreeText("another head_dim, or PyTorch 2.1"))
    found = limit(p, "head_dim_qk", AtMost(64))
    return Unknown(*found) if found is not None and env.arch == 90 else found


# cuDNN.


@rule(
    "SDPA720",
    "sdpa.cudnn",
    when=torch("<2.5.0"),
    requires={"torch": AtLeast(Version(2, 5))},
    passes={"torch": "2.5.0"},
)
def cudnn_since_2_5(p: AttentionParams, env: Environment) -> None:
    """Before PyTorch 2.5 F.sdpa never goes to cuDNN by itself

    Why: 2.2 and older have no such kernel. 2.3 and 2.4 have an experiment behind the variable
    TORCH_CUDNN_SDPA_ENABLED=1; that of 2.4 has no backward, and F.sdpa calls it without the mask it is given.
    Fix: PyTorch 2.5 or newer.
    Source: libtorch_cuda.so of the wheels 2.2.2 and 2.3.1; check_runtime_enabled_cudnn and
    check_cudnn_requires_grad, v2.4.0 sdp_utils.cpp; scaled_dot_product_attention, v2.4.0 attention.cpp, line
    668.
    """


# CPUs.


@rule(
    "SDPA730",
    device=CPU,
    when=torch("<2.1.0"),
    requires={"torch": AtLeast(Version(2, 1))},
    passes={"torch": "2.1.0"},
)
def cpu_flash_since_2_1(p: AttentionParams, env: Environment) -> None:
    """The flash kernel for CPUs came with PyTorch 2.1

    Fix: PyTorch 2.1; in 2.0 F.sdpa computes with plain operations on a CPU.
    Source: _fused_sdp_choice_cpp, v2.0.0 attention.cpp, which always returns math; libtorch_cpu, wheel 2.1.2.
    """


@rule(
    "SDPA731",
    device=CPU,
    when=torch("<2.3.0"),
    fires_on={"attn_mask_type": "arbitrary", "torch": "2.2.2"},
    passes={"torch": "2.2.2"},
)
def cpu_flash_masks_since_2_3(p: AttentionParams, env: Environment) -> Violation | None:
    """The flash kernel for CPUs takes a mask from PyTorch 2.3 on

    Fix: PyTorch 2.3.
    Source: "Both fused kernels do not support non-null attn_mask" in libtorch_cpu of the wheels 2.1.2 and
    2.2.2; the op's argument attn_mask in that of 2.3.1.
    """
    if p.attn_mask_type != "arbitrary":
        return None
    return Violation("attn_mask_type", "arbitrary", _NO_MASK)


@rule(
    "SDPA732",
    device=CPU,
    when=torch("<2.3.0"),
    requires={"dtype": OneOf("bf16", "fp32")},
    fires_on={"dtype": "fp16", "torch": "2.2.2"},
    passes={"dtype": "fp32", "torch": "2.2.2"},
)
def cpu_flash_fp16_since_2_3(p: AttentionParams, env: Environment) -> bool:
    """The flash kernel for CPUs has fp16 from PyTorch 2.3 on

    Fix: PyTorch 2.3, or bf16.
    Source: "Expected data type in FP32, FP64, BF16, but got" in libtorch_cpu of the wheels 2.1.2 and 2.2.2;
    FP16 is named in that of 2.3.1.
    """
    return p.dtype == "fp16"
