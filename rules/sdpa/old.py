"""SDPA7xx: what F.sdpa's kernels could before PyTorch 2.5, and which of them was its own first choice.

Read in the wheels of 2.2.2, 2.3.1, 2.5.0 and 2.5.1 for Linux and CUDA (what libtorch_cuda.so warns of), in
the source of 2.4.0 (commit 37348663 of MetaX-MACA/mcPytorch, whose chooser is PyTorch's), and, for CPUs, in
libtorch_cpu of the wheels for macOS. Of 2.1 and older nothing is said: INSTALL001.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import Version, torch
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.sdpa.common import CUDA
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import AtLeast, AtMost, EqualTo, FreeText, OneOf

rule = rules_about("sdpa.flash", device=CUDA)

CPU = {"cpu"}
_NO_MASK = FreeText("no_mask or causal: there is no argument for a mask")


def _corners_differ(p: AttentionParams) -> bool:
    return p.bottom_right and not p.padding and 1 < p.max_seqlen_q != p.max_seqlen_kv


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
    training=True,
    when=torch(">=2.2.0,<2.3.0"),
    arch=range(86, 90),
    requires={("head_dim_qk", "head_dim_v"): AtMost(192)},
    fires_on={"gpu": "RTX 4090", "head_dim_qk": 256},
    passes={"gpu": "RTX 4090", "head_dim_qk": 192},
)
def flash_backward_in_2_2(p: AttentionParams, env: Environment) -> None:
    """In PyTorch 2.2 the flash backward stops at head_dim 192 on sm86 to sm89

    Fix: PyTorch 2.3 has 256 without dropout; sdpa.efficient has no limit.
    Source: "training with head_dim greater than 192 on gpu architectures in the range[sm86, sm89]",
    libtorch_cuda.so, wheel 2.2.2.
    """


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

    Why: 2.2 has no such kernel. 2.3 and 2.4 have an experiment behind the variable
    TORCH_CUDNN_SDPA_ENABLED=1; that of 2.4 has no backward, and F.sdpa calls it without the mask it is given.
    Fix: PyTorch 2.5 or newer.
    Source: libtorch_cuda.so of the wheels 2.2.2 and 2.3.1; check_runtime_enabled_cudnn and
    check_cudnn_requires_grad, v2.4.0 sdp_utils.cpp; scaled_dot_product_attention, v2.4.0 attention.cpp, line
    668.
    """


# CPUs.


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
    Source: "Both fused kernels do not support non-null attn_mask" in libtorch_cpu of the wheel 2.2.2; the
    op's argument attn_mask in that of 2.3.1.
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
    Source: "Expected data type in FP32, FP64, BF16, but got" in libtorch_cpu of the wheel 2.2.2; FP16 is
    named in that of 2.3.1.
    """
    return p.dtype == "fp16"
