"""SDPA0xx: what no SDPA kernel can express, what only a mask tensor can, and memory layouts."""

from __future__ import annotations

from typing import Any

from attnsel.backends.registry import where
from attnsel.environment import Environment
from attnsel.environment.versions import torch
from attnsel.params import ITEMSIZE, AttentionParams, Tensors, TensorSpec
from attnsel.rules.api import Fields, rules_about
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import AtMost, FreeText, OneOf, Requirement

EVERY_SDPA = where(lambda record: record.family == "SDPA")
rule = rules_about(EVERY_SDPA)
DISPATCHED = where(lambda record: record.f_sdpa)
FUSED = where(lambda record: record.family == "SDPA" and record.kernel_family != "")

CUDA = {"cuda"}
GPUS = {"cuda", "rocm"}
VECTOR = 16  # bytes: the CUDA kernels load 128 bits at a time
GRID_MOST = AtMost(65535)  # of a launch grid's y and z dimensions (CUDA C++ Programming Guide)
GRID: dict[Fields, Requirement] = {"batch_size": GRID_MOST, "num_heads": GRID_MOST}


# Where it runs.


@rule("SDPA003", evidence="measured", fires_on={"dtype": "fp8_e4m3"})
def no_fp8(p: AttentionParams, env: Environment) -> Violation | None:
    """SDPA kernels do not run attention in FP8

    Why: the ops take no scales; the one FP8 path in PyTorch (FlashAttention 3, switched on by hand) has an op
    of its own, which attnsel does not call.
    Fix: cast q, k, v to bf16, or use a recipe without fp8_dpa.
    Source: torch 2.13 native_functions.yaml; sdpa.math on float8 tensors raises "not implemented".
    """
    if p.dtype.startswith("fp8"):
        return Violation("dtype", p.dtype, OneOf("bf16", "fp16"))
    return Violation("fp8", True, FreeText("a recipe with fp8_dpa=False")) if p.fp8_attention else None


# Not expressible at all.


@rule("SDPA004", requires={"softcap": OneOf(0.0)}, fires_on={"softcap": 30.0})
def no_softcap(p: AttentionParams, env: Environment) -> None:
    """SDPA has no softcap

    Why: no op takes one, and an additive mask cannot say tanh.
    Fix: triton and tiled have it.
    Source: torch 2.13 native_functions.yaml, the schemas of _scaled_dot_product_*.
    """


@rule("SDPA005", requires={"softmax_type": OneOf("vanilla")}, fires_on={"softmax_type": "learnable"})
def no_sinks(p: AttentionParams, env: Environment) -> None:
    """SDPA has no attention sinks

    Why: no op adds a term to the softmax denominator.
    Fix: triton, tiled and newer cuDNN have softmax_type off-by-one and learnable.
    Source: torch 2.13 native_functions.yaml, the schemas of _scaled_dot_product_*.
    """


@rule("SDPA006", requires={"return_max_logit": OneOf(False)}, fires_on={"return_max_logit": True})
def no_max_logit(p: AttentionParams, env: Environment) -> None:
    """SDPA kernels do not give back the largest score

    Fix: triton, tiled and newer cuDNN do.
    Source: torch 2.13 native_functions.yaml: no op returns it.
    """


@rule("SDPA007", DISPATCHED, fires_on={"qkv_layout": "thd", "attn_mask_type": "padding_causal"})
def no_packed_sequences(p: AttentionParams, env: Environment) -> Violation | None:
    """F.sdpa's kernels take no packed (thd) sequences

    Why: the ops take [b, h, s, d]. PyTorch's route for packed sequences is another op: sdpa.varlen.
    Fix: sdpa.varlen, triton and tiled run them; or pad the sequences and use a padding mask.
    Source: torch 2.13 native_functions.yaml; attnsel/backends/sdpa/guards.py, "expressible".
    """
    return Violation("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd")) if p.qkv_format == "thd" else None


@rule(
    "SDPA008",
    DISPATCHED,
    fires_on={
        "qkv_layout": "paged_kv_bshd_bshd_bshd",
        "kv_cache": "paged",
        "page_size": 64,
        "is_training": False,
    },
)
def no_paged_cache(p: AttentionParams, env: Environment) -> Violation | None:
    """F.sdpa's kernels read no paged key/value cache

    Why: none of their ops takes a block table.
    Fix: a contiguous cache, or gather the pages first.
    Source: torch 2.13 native_functions.yaml, the schemas of _scaled_dot_product_*.
    """
    return Violation("kv_cache", "paged", OneOf("contiguous")) if p.kv_cache == "paged" else None


# Expressible as a mask tensor only.


@rule(
    "SDPA010",
    DISPATCHED,
    requires={"window_size": OneOf((-1, -1))},
    note="or a kernel that takes a mask tensor",
    fires_on={"window_size": (256, 0)},
    passes={"window_size": (4096, 0)},
)
def no_window_argument(p: AttentionParams, env: Environment) -> bool:
    """A sliding window reaches F.sdpa's kernels only as a mask tensor

    Why: the ops take one causal flag. A window that hides nothing at these lengths is no window.
    Fix: sdpa.varlen has windows; attnsel folds them into a mask for the kernels that take one, which
    sdpa.flash on CUDA does not.
    Source: torch 2.13 native_functions.yaml; attnsel/backends/sdpa/plan.py, "band".
    """
    return window_hides(p)


def window_hides(p: AttentionParams) -> bool:
    """Whether a window hides keys that the diagonal of a causal mask leaves."""
    left, right = p.window_size
    diagonal = p.max_seqlen_kv - p.max_seqlen_q if p.bottom_right_diagonal else 0
    hides_left = left >= 0 and diagonal - left > 1 - p.max_seqlen_q
    hides_right = right >= 0 and not p.causal and diagonal + right < p.max_seqlen_kv - 1
    return p.windowed and (hides_left or hides_right)


@rule("SDPA011", DISPATCHED, fires_on={"attn_mask_type": "padding_causal"})
def no_lengths(p: AttentionParams, env: Environment) -> Violation | None:
    """Padding reaches F.sdpa's kernels only as a mask tensor

    Why: the ops take no sequence lengths.
    Fix: sdpa.varlen takes lengths. Under a causal mask padded rows are zeroed instead, where queries and keys
    are equally long; otherwise attnsel folds the lengths into a mask for the kernels that take one, which
    sdpa.flash on CUDA does not. Where all sequences are full, say no_mask or causal.
    Source: torch 2.13 native_functions.yaml; attnsel/backends/sdpa/plan.py.
    """
    if not p.padding:
        return None
    return Violation(
        "attn_mask_type", p.attn_mask_type, FreeText("no_mask, causal, or a kernel that takes a mask tensor")
    )


@rule(
    "SDPA012",
    "sdpa.efficient",
    "sdpa.cudnn",
    "sdpa.math",
    fires_on={"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 4096},
    passes={"attn_mask_type": "causal_bottom_right"},
)
def causal_from_the_top_left(p: AttentionParams, env: Environment) -> Violation | None:
    """These kernels' causal flag starts at the top left

    Why: is_causal means "key index at most query index" there; with unequal lengths a bottom-right mask hides
    other pairs. For a single query it hides nothing, so decoding needs no mask.
    Fix: attnsel folds it into a mask; with equal lengths both corners are one.
    Source: PyTorch documentation of scaled_dot_product_attention, is_causal; CausalFromTopLeft in C.
    """
    if p.bottom_right and not p.padding and 1 < p.max_seqlen_q != p.max_seqlen_kv:
        return Violation(
            "attn_mask_type", p.attn_mask_type, FreeText("causal from the top left, or equal lengths")
        )
    return None


@rule(
    "SDPA013",
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={"core_attention_bias_type": "post_scale_bias"},
    passes={"core_attention_bias_type": "alibi"},
)
def bias_is_a_mask(p: AttentionParams, env: Environment) -> bool:
    """A bias reaches an SDPA kernel only as a mask tensor

    Why: the ops add one tensor to the scaled scores, which must hold the mask too.
    Fix: attnsel folds bias and mask into one for the kernels that take one; sdpa.flash on CUDA does not.
    Source: torch 2.13 native_functions.yaml (attn_mask, attn_bias); attnsel/backends/sdpa/masks.py.
    """
    return p.has_bias


@rule(
    "SDPA014",
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={"core_attention_bias_type": "alibi"},
    passes={"core_attention_bias_type": "post_scale_bias"},
)
def alibi_is_a_mask(p: AttentionParams, env: Environment) -> bool:
    """ALiBi reaches an SDPA kernel only as a mask tensor

    Why: none of the SDPA ops takes slopes.
    Fix: attnsel folds it into a mask for the kernels that take one, which costs b*h*s_q*s_kv elements; triton
    and tiled compute it.
    Source: torch 2.13 native_functions.yaml; attnsel/backends/sdpa/masks.py.
    """
    return p.core_attention_bias_type == "alibi"


def mask_of(*shape: int, **about: object) -> Tensors:
    """A dense mask, for examples."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= size
    return Tensors(mask=TensorSpec.model_validate({"shape": shape, "stride": tuple(stride), **about}))


@rule(
    "SDPA015",
    evidence="measured",
    fires_on={"attn_mask_type": "arbitrary", "tensors": mask_of(3, 1, 4096, 4096)},
    passes={"attn_mask_type": "arbitrary", "tensors": mask_of(2, 1, 4096, 4096)},
)
def mask_broadcasts(p: AttentionParams, env: Environment) -> Violation | None:
    """A mask must broadcast to [b, h, s_q, s_kv]

    Why: some ops raise, and the CPU kernel ignores an empty mask.
    Fix: give each of the last four dimensions its full size or 1.
    Source: check_attn_mask_shape, torch 2.13 sdp_utils_cpp.h; attnsel/backends/sdpa/guards.py, "mask_shape".
    """
    mask = p.tensors.mask
    if mask is None:
        return None
    full = (p.batch_size, p.num_heads, p.max_seqlen_q, p.max_seqlen_kv)
    shape = (1,) * (4 - len(mask.shape)) + mask.shape
    if len(shape) == 4 and all(n in (1, m) for n, m in zip(shape, full, strict=True)):
        return None
    return Violation("tensors.mask", mask.shape, FreeText(f"a shape that broadcasts to {list(full)}"))


@rule(
    "SDPA016",
    DISPATCHED,
    fires_on={"attn_mask_type": "arbitrary", "tensors": mask_of(1, 1, 1, 1, dtype="fp16")},
    passes={"attn_mask_type": "arbitrary", "tensors": mask_of(1, 1, 1, 1, dtype="bool")},
)
def mask_dtype(p: AttentionParams, env: Environment) -> Violation | None:
    """F.sdpa takes a mask that is bool, fp32, or of the query's type

    Why: it raises for others ("Expected attn_mask dtype to be bool or float or to match query dtype"), and
    before PyTorch 2.4 for fp32 beside half precision too. attnsel's own call takes bool (True = masked out)
    and a bias of any floating type, and writes the mask that a kernel wants.
    Fix: mask.to(query.dtype), or a bool mask (F.sdpa's True = takes part).
    Source: validate_sdpa_input, v2.0.0 and v2.4.0 attention.cpp; the message in libtorch_cpu of the wheels
    2.3.1 and 2.5.1; measured on CPU, torch 2.13; pytorch#191612.
    """
    mask = p.tensors.mask
    if mask is None or mask.dtype in ("bool", p.dtype):
        return None
    if mask.dtype == "fp32" and env.torch is not None and env.torch >= (2, 4):
        return None
    return Violation("tensors.mask", mask.dtype, OneOf("bool", p.dtype))


@rule(
    "SDPA017",
    where(lambda record: record.f_sdpa and record.kernel_family != ""),
    fires_on={"torch": "2.13.0", "tensors": Tensors(rank=3)},
    passes={"torch": "2.14.1", "tensors": Tensors(rank=3)},
)
def four_dimensions(p: AttentionParams, env: Environment) -> Violation | None:
    """F.sdpa's fused kernels want tensors of four dimensions

    Why: for q, k and v of other dimensions F.sdpa goes to the math kernel without a word, whatever they hold;
    from 2.14 on it puts a batch of one before three. attnsel's own call takes four (b, s, h, d in some order)
    and packed rows of three (thd).
    Fix: q.unsqueeze(0), or unflatten(0, (b, h)) where batch and heads are one: a view, nothing is copied.
    Source: check_tensor_shapes, PyTorch sdp_utils_cpp.h (A to D), v2.0.0 sdp_utils.h, line 198; measured on
    CPU, torch 2.13; normalize_unbatched_input, sdp_utils_cpp.h of the 2.14.1 wheel, line 50; pytorch#117354.
    """
    rank, unbatched = p.tensors.rank, env.torch is not None and env.torch >= (2, 14)
    if rank == 4 or (rank == 3 and unbatched):
        return None
    return Violation("tensors.rank", rank, OneOf(3, 4) if unbatched else OneOf(4))


MASK_GRADIENT: dict[str, Any] = {
    "evidence": "measured",
    "fires_on": {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_requires_grad": True},
    "passes": {"core_attention_bias_type": "post_scale_bias"},
}


def mask_gradient(p: AttentionParams) -> Violation | None:
    """An objection when the bias, or the mask that it was folded into, needs a gradient."""
    mask = p.tensors.mask
    if p.is_training and (p.core_attention_bias_requires_grad or (mask is not None and mask.requires_grad)):
        return Violation("core_attention_bias_requires_grad", True, OneOf(False))
    return None


# How q, k and v lie in memory.


def _q(stride: tuple[int, ...], **about: object) -> Tensors:
    spec = {"shape": (2, 4096, 16, 128), "stride": stride, **about}
    return Tensors(q=TensorSpec.model_validate(spec))


@rule("SDPA020", FUSED, evidence="measured", fires_on={"tensors": _q((8388608, 1, 524288, 4096))})
def last_dimension_contiguous(p: AttentionParams, env: Environment) -> Violation | None:
    """The head dimension of q, k and v must have stride 1

    Why: the fused kernels read rows of head_dim elements. Called directly, the CPU kernel gives garbage
    without an error for other strides; the CUDA kernels raise.
    Fix: attnsel copies the tensor (adaptation "contiguous").
    Source: check_last_dim_stride_equals_1_dense, torch 2.13 sdp_utils_cpp.h; measured on CPU, torch 2.13.
    """
    tensors = p.tensors
    if tensors.q is tensors.k is tensors.v is None:
        return None
    for name, spec in (("q", tensors.q), ("k", tensors.k), ("v", tensors.v)):
        if spec is not None and spec.last_stride != 1:
            return Violation(f"tensors.{name}", spec.stride, FreeText("a contiguous last dimension"))
    return None


@rule(
    "SDPA021",
    FUSED,
    device=CUDA,
    fires_on={"tensors": _q((8388608, 2048, 128, 1), alignment=2)},
    passes={"tensors": _q((8388608, 2048, 128, 1))},
)
def sixteen_byte_rows(p: AttentionParams, env: Environment) -> Violation | None:
    """q, k and v must start, and step, at multiples of 16 bytes on CUDA

    Why: FlashAttention 2, CUTLASS and cuDNN load 128 bits at a time. On an H200 with torch 2.11 and cuDNN
    9.19 a misaligned address loses the CUDA context in flash, raises in the memory-efficient kernel (from a
    multiple of 8 bytes on it loses the context too), and gives wrong numbers without a word in cuDNN. F.sdpa
    checks it for the memory-efficient kernel alone, from 2.13 on, and there the address only.
    Fix: attnsel copies the tensor (adaptation "contiguous"). A view that begins in the middle of a row of
    heads, or a row length that is no multiple of 8 half-precision numbers, is the usual cause.
    Source: TORCH_CHECK "not correctly aligned" in torch 2.13 kernel_forward.h; storage-offset check in C;
    cudnn-frontend 1.32 sdpa_support_surface.h, line 35; measured, tests/proof/f_sdpa_on_card.py.
    """
    tensors, size = p.tensors, ITEMSIZE[p.dtype]
    if tensors.q is tensors.k is tensors.v is None or p.head_dim_qk * size % VECTOR:
        return None  # rows of other widths are refused for that, and dense once they are padded
    for name, spec in (("q", tensors.q), ("k", tensors.k), ("v", tensors.v)):
        if spec is None:
            continue
        if spec.alignment < VECTOR:
            return Violation(
                f"tensors.{name}", spec.alignment, FreeText("contiguous from a 16-byte boundary on")
            )
        if not spec.steps_by(VECTOR // size):
            return Violation(f"tensors.{name}", spec.stride, FreeText("contiguous: steps of whole 16 bytes"))
    return None


@rule(
    "SDPA023",
    "sdpa.flash",
    "sdpa.varlen",
    evidence="measured",
    fires_on={"tensors": _q((16384, 1, 128, 1))},
    passes={"tensors": _q((8388608, 2048, 128, 1))},
)
def head_dim_alone_steps_by_one(p: AttentionParams, env: Environment) -> Violation | None:
    """No dimension of q but head_dim may have stride 1 on the flash kernels

    Why: their result is allocated with q's strides. Where q overlaps itself or is expanded, and two strides
    tie at 1, the result's rows do not lie side by side, and the kernels write as if they did: wrong numbers
    without an error, from F.sdpa too. A dimension of size 1 with stride 1 counts.
    Fix: attnsel copies the tensor (adaptation "contiguous").
    Source: measured on CPU, torch 2.13: q [1, 2, 1, 3] of strides (1, 1, 2, 1) errs by 0.9; empty_like(query)
    in PyTorch's attention.cpp, out = at::empty_like(q_padded) in its flash_api.cpp for CUDA.
    """
    q = p.tensors.q
    if q is not None and q.shape[-1] > 1 and 1 in q.stride[:-1]:
        return Violation("tensors.q", q.stride, FreeText("stride 1 in head_dim alone"))
    return None


@rule("SDPA022", FUSED, when=torch("<2.7.0"), arch=range(100, 130), passes={"torch": "2.7.0"})
def blackwell_needs_torch_2_7(p: AttentionParams, env: Environment) -> Violation:
    """SDPA's fused kernels run on Blackwell from PyTorch 2.7 on

    Why: up to 2.6 their checks end at sm90, and the wheels carry no code for sm100 or sm120.
    Fix: install PyTorch 2.7 or newer, built for CUDA 12.8 or newer.
    Source: check_sm_version<sm80, sm90> in A (2.5.1), <sm80, sm121> in B (about 2.9); PyTorch 2.7 release
    notes ("Blackwell support"); where between the two the range grew was not read.
    """
    return Violation("torch", env.torch, FreeText("2.7.0 or newer"))
