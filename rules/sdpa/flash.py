"""SDPA1xx: PyTorch's FlashAttention 2 kernels on CUDA, whichever op calls them.

Those for CPUs come first, what only the op with lengths has comes last.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import torch
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about, same_head_dims
from attnsel.rules.sdpa.common import CUDA, GPUS, GRID, MASK_GRADIENT, mask_gradient
from attnsel.verdicts.reasons import Unknown, Violation
from attnsel.verdicts.requirements import AtLeast, AtMost, FreeText, Multiple, OneOf

# ---- SDPA5xx: PyTorch's flash kernel for CPUs. Everything here was measured with torch 2.13 ------------


rule_on_cpus = rules_about("sdpa.flash", device={"cpu"})


@rule_on_cpus(
    "SDPA501",
    requires={"attention_dropout": OneOf(0.0)},
    evidence="measured",
    fires_on={"attention_dropout": 0.1},
    passes={"attention_dropout": 0.1, "is_training": False},
)
def cpu_flash_no_dropout(p: AttentionParams, env: Environment) -> bool:
    """The CPU flash kernel has no dropout

    Fix: sdpa.math and tiled have it.
    Source: torch 2.13 raises "Currently do not support dropout > 0"; check_for_dropout, sdp_utils_cpp.h.
    """
    return p.dropout


@rule_on_cpus("SDPA502", **MASK_GRADIENT)
def cpu_flash_mask_gradient(p: AttentionParams, env: Environment) -> Violation | None:
    """The CPU flash kernel gives no gradient to a bias

    Fix: detach the bias if it is not trained; sdpa.math and tiled give its gradient.
    Source: torch 2.13 raises "not differentiable with respect to argument 'attn_mask'";
    check_attn_mask_shape, sdp_utils_cpp.h.
    """
    return mask_gradient(p)


@rule_on_cpus(
    "SDPA503",
    evidence="measured",
    fires_on={"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 4096},
    passes={"max_seqlen_q": 1024, "max_seqlen_kv": 4096},
)
def cpu_flash_causal_corner(p: AttentionParams, env: Environment) -> Violation | None:
    """The CPU flash kernel's causal flag starts at the top left

    Why: unlike the CUDA kernel of the same name it keeps F.sdpa's meaning for unequal lengths.
    Fix: attnsel folds the bottom-right mask into a mask tensor.
    Source: torch 2.13 against sdpa.math, s_q 5 and 9, s_kv 9 and 5, forward and backward.
    """
    if p.bottom_right and not p.padding and 1 < p.max_seqlen_q != p.max_seqlen_kv:
        return Violation(
            "attn_mask_type", p.attn_mask_type, FreeText("causal from the top left, or equal lengths")
        )
    return None


rule = rules_about("sdpa.flash", "sdpa.varlen", device=CUDA)

# Compute capabilities whose 100 KiB of shared memory FA2's widest backward tiles exceed.
SMALL_SHARED_MEMORY = frozenset({86, 87, 88, 89, 120, 121})


@rule("SDPA100", "sdpa.flash", fires_on={"device": "mps"}, passes={"gpu": "cpu"}, device=None)
def flash_devices(p: AttentionParams, env: Environment) -> Violation | None:
    """attnsel calls the flash kernels of NVIDIA's and AMD's GPUs and of CPUs

    Why: F.sdpa has others elsewhere, which have ops of their own and which attnsel does not call. On Intel's
    GPUs these are oneDNN from PyTorch 2.7 on, without a backward at first, and FlashAttention by SYCL-TLA
    from about 2.10 on; on Apple's, Metal kernels inside the math op, from 2.8 on.
    Fix: F.scaled_dot_product_attention as it is; of attnsel's, sdpa.math and tiled run on every device.
    Source: torch 2.13 native_functions.yaml; attnsel/backends/sdpa/ops.py, "TRAITS"; pytorch#147614,
    pytorch#167057, torch-xpu-ops#1749 (XPU); pytorch#131362, pytorch#174861 (MPS).
    """
    needed = OneOf("cuda", "rocm", "cpu")
    return None if needed.holds(env.device.type, p) else Violation("device", env.device.type, needed)


@rule("SDPA101", device=GPUS, fires_on={"attn_mask_type": "arbitrary"})
def flash_takes_no_mask(p: AttentionParams, env: Environment) -> Violation | None:
    """The flash kernel takes no mask tensor on CUDA

    Why: FlashAttention 2 computes its mask from indices; the op has no argument for one, and even an all-True
    mask rules it out in F.sdpa.
    Fix: sdpa.efficient and sdpa.cudnn take masks; say causal or no_mask where the mask is just that.
    Source: check_for_attn_mask, PyTorch sdp_utils_cpp.h (A, B, C, D).
    """
    if p.attn_mask_type != "arbitrary":
        return None
    return Violation(
        "attn_mask_type", "arbitrary", FreeText("no_mask or causal: there is no argument for a mask")
    )


@rule("SDPA102", device=GPUS, requires={"dtype": OneOf("bf16", "fp16")}, fires_on={"dtype": "fp32"})
def flash_half_precision(p: AttentionParams, env: Environment) -> bool:
    """The flash kernel computes in fp16 or bf16 on CUDA

    Fix: cast q, k and v; autocast does.
    Source: check_dtypes_low_precision, PyTorch sdp_utils.cpp (A, B, C).
    """
    return not p.dtype.startswith("fp8")  # SDPA003


@rule(
    "SDPA103",
    when=torch(">=2.2.0"),
    requires={"arch": AtLeast(80)},
    fires_on={"gpu": "T4"},
    passes={"gpu": "A100"},
    device=None,
)
def flash_needs_ampere(p: AttentionParams, env: Environment) -> None:
    """The flash kernel needs Ampere or newer (sm80)

    Why: FlashAttention 2 is built on instructions that Turing and Volta lack.
    Fix: sdpa.efficient runs on Turing and Volta; triton on Turing.
    Source: check_flash_attention_hardware_support, PyTorch sdp_utils.cpp (A, B, C); for 2.2 to 2.5 "[sm80,
    sm90]" in libtorch_cuda.so of their wheels.
    """


@rule(
    "SDPA104",
    evidence="measured",
    fires_on={"head_dim_qk": 192, "head_dim_v": 128},
    passes={"head_dim_qk": 192},
    device=None,
)
def flash_equal_head_dims(p: AttentionParams, env: Environment) -> Violation | None:
    """The flash kernel wants head_dim_v equal to head_dim_qk

    Fix: pad the smaller one with zeros, keep the softmax scale of the true head_dim_qk, and cut the output.
    Source: check_head_dim_size_flash, PyTorch sdp_utils.cpp (A, B, C); the CPU kernel raises "Q/K/V should
    have the same head size" (torch 2.13).
    """
    return same_head_dims(p)


@rule("SDPA105", requires={("head_dim_qk", "head_dim_v"): AtMost(256)}, fires_on={"head_dim_qk": 320})
def flash_head_dim_limit(p: AttentionParams, env: Environment) -> None:
    """The flash kernel has head dimensions up to 256 on CUDA

    Fix: sdpa.efficient has no limit, at a lower speed.
    Source: check_head_dim_size_flash, PyTorch sdp_utils.cpp (A, B, C); flash_api.cpp, "at most 256".
    """


@rule(
    "SDPA106",
    "sdpa.flash",
    when=torch(">=2.2.0"),
    device=GPUS,
    fires_on={"max_seqlen_q": 1024, "max_seqlen_kv": 4096},
    passes={"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 4096},
)
def flash_causal_corner(p: AttentionParams, env: Environment) -> Violation | None:
    """The flash kernel's causal mask ends at the bottom right

    Why: FlashAttention 2.1 and newer align the last query with the last key; F.sdpa promises the top left and
    therefore gives up the kernel when the lengths differ. attnsel calls the op with its own meaning.
    Fix: causal_bottom_right with s_q at most s_kv (decoding, chunked prefill) is native; otherwise another
    kernel takes the mask.
    Source: check_flash_causal_non_square_seqlens in A, B, C; torch/nn/attention/bias.py of torch 2.13, where
    LOWER_RIGHT calls the same op with is_causal=True.
    """
    if not p.causal or p.padding or p.max_seqlen_q == p.max_seqlen_kv:
        return None
    if p.bottom_right and p.max_seqlen_q < p.max_seqlen_kv:
        return None
    needed = "at least as many keys as queries" if p.bottom_right else "equal lengths"
    if not p.bottom_right and p.max_seqlen_q < p.max_seqlen_kv:
        needed += ", or causal_bottom_right"
    return Violation("attn_mask_type", p.attn_mask_type, FreeText(needed))


@rule(
    "SDPA107",
    training=True,
    arch=SMALL_SHARED_MEMORY,
    fires_on={"gpu": "RTX 4090", "head_dim_qk": 224},
    passes={"gpu": "RTX 4090", "head_dim_qk": 256},
)
def flash_wide_backward(p: AttentionParams, env: Environment) -> Violation | None:
    """On sm86 to sm89 and sm12x the flash backward stops at head_dim 192

    Why: its tiles for wider heads want more shared memory than these cards give a block. Above 224 there is a
    smaller variant, without dropout.
    Fix: pad the head to 256 (without dropout), use sdpa.efficient, or an A100- or H100-class card.
    Source: check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 in B and C; A names sm86 to
    sm89 only.
    """
    width = max(p.head_dim_qk, p.head_dim_v)
    if width <= 192:
        return None
    if width <= 224:
        field = "head_dim_qk" if p.head_dim_qk == width else "head_dim_v"
        return Violation(field, width, OneOf(256), "or at most 192; 256 without dropout only")
    return Violation("attention_dropout", p.attention_dropout, OneOf(0.0)) if p.dropout else None


@rule(
    "SDPA108",
    "sdpa.flash",
    "sdpa.varlen",
    "sdpa.efficient",
    training=True,
    evidence="documented",
    fires_on={"deterministic": True},
    passes={"deterministic": True, "is_training": False},
)
def backward_follows_torch(p: AttentionParams, env: Environment) -> Unknown | None:
    """This backward is deterministic only with torch's deterministic algorithms

    Why: the ops have no argument for it; they read PyTorch's global setting, which a plan cannot see. Without
    it (or with warn_only) they add gradients with atomics, in any order. The forward is deterministic.
    Fix: call torch.use_deterministic_algorithms(True); attnsel checks it when the kernel is called.
    Source: pytorch#182551 (table of SDPA determinism); attention_backward.cu, num_splits_key;
    attnsel/backends/sdpa/guards.py, "deterministic".
    """
    if p.deterministic:
        return Unknown(
            "deterministic", True, FreeText("torch.use_deterministic_algorithms(True) when it runs")
        )
    return None


@rule(
    "SDPA109",
    requires=GRID,
    fires_on={"batch_size": 65536, "max_seqlen_q": 16},
    passes={"batch_size": 65535, "max_seqlen_q": 16},
)
def flash_grid(p: AttentionParams, env: Environment) -> None:
    """The flash kernel takes at most 65535 sequences and 65535 heads

    Why: they are the y and z dimensions of its launch grid, which CUDA limits.
    Fix: split the batch.
    Source: flash_fwd_launch_template.h, dim3 grid(num_m_block, b, h); CUDA C++ Programming Guide, maximum y-
    and z-dimension of a grid.
    """


@rule(
    "SDPA110",
    when=torch(">=2.15.0"),
    requires={"platform": OneOf("linux")},
    unknown=True,
    evidence="reported",
    fires_on={"platform": "windows", "torch": "2.15.0"},
    passes={"torch": "2.15.0"},
)
def flash_on_windows(p: AttentionParams, env: Environment) -> bool:
    """Windows wheels of PyTorch after 2.14 may have the flash kernel

    Why: a change that builds it with Microsoft's compiler is proposed, and no wheel with it was read;
    torch.backends.cuda.is_flash_attention_available() tells for one build. Up to 2.14 see SDPA811.
    Fix: use Linux or WSL, sdpa.cudnn or sdpa.efficient.
    Source: pytorch#186343; Comfy-Org/ComfyUI#9299.
    """
    return env.platform == "windows"


@rule(
    "SDPA111",
    requires={("head_dim_qk", "head_dim_v"): Multiple(8)},
    fires_on={"head_dim_qk": 100},
    passes={"head_dim_qk": 104},
)
def flash_head_dim_multiple(p: AttentionParams, env: Environment) -> None:
    """The flash kernel takes head dimensions in multiples of 8 on CUDA

    Why: it loads 16 bytes at a time. F.sdpa copies q, k and v into wider tensors on every call and says
    nothing; a direct call of the op raises.
    Fix: attnsel pads with zeros, keeps the softmax scale of the true head_dim_qk and cuts the output
    (adaptations "pad_head_dim_qk" and "pad_head_dim_v"), which costs memory.
    Source: pad_last_dim in PyTorch's aten/src/ATen/native/transformers/attention.cpp ("FlashAttentionV2
    requires that head dimension be a multiple of 8"); TORCH_CHECK in mha_fwd of its flash_api.cpp ("head_size
    must be a multiple of 8"), read at pytorch 03b7c19d.
    """


# Another implementation in their place: torch.nn.attention.activate_flash_attention_impl.


def _other(env: Environment) -> str:
    """FA3, FA4 or other, where PyTorch's own FlashAttention 2 does not answer; else nothing."""
    return "" if env.torch_flash == "FA2" else env.torch_flash


_RESTORED = FreeText("FA2: torch.nn.attention.restore_flash_attention_impl()")


@rule("SDPA120", fires_on={"gpu": "A100", "torch_flash": "FA3"}, passes={"torch_flash": "FA3"})
def replaced_flash_architectures(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """FA3 and FA4 in the place of torch's flash kernel are for some architectures

    Why: activate_flash_attention_impl puts another library behind the same ops for the whole process. FA3 is
    for sm90, FA4 for sm90 and sm10x; elsewhere they raise. What a program registered itself is not known.
    Fix: torch.nn.attention.restore_flash_attention_impl(), or sdpa.cudnn, sdpa.efficient, triton.
    Source: torch 2.13, torch/nn/attention/_fa3.py and _fa4.py, "_common_support_error".
    """
    other = _other(env)
    if not other or env.arch is None:
        return None
    if other == "other":
        return Unknown("torch_flash", other, _RESTORED)
    taken = env.arch == 90 if other == "FA3" else env.arch == 90 or 100 <= env.arch < 110
    return None if taken else Violation("torch_flash", other, _RESTORED)


@rule("SDPA121", fires_on={"torch_flash": "FA4", "attention_dropout": 0.1}, passes={"torch_flash": "FA4"})
def replaced_flash_dropout(p: AttentionParams, env: Environment) -> Violation | None:
    """FA3 and FA4 in the place of torch's flash kernel have no dropout

    Fix: attention_dropout=0, or torch.nn.attention.restore_flash_attention_impl().
    Source: torch 2.13, torch/nn/attention/_fa3.py and _fa4.py, "dropout_p must be 0".
    """
    if _other(env) in ("FA3", "FA4") and p.dropout:
        return Violation("attention_dropout", p.attention_dropout, OneOf(0.0))
    return None


@rule(
    "SDPA122",
    evidence="documented",
    fires_on={"torch_flash": "FA4", "head_dim_qk": 256},
    passes={"torch_flash": "FA4"},
)
def replaced_flash_unknowns(p: AttentionParams, env: Environment) -> Unknown | None:
    """What else FA3 and FA4 refuse behind torch's ops was not read

    Why: their own checks are those of another package and release: wide heads of FA4, and whether their
    backward gives equal bits every run. Where they refuse, attnsel goes on to the next candidate.
    Fix: torch.nn.attention.restore_flash_attention_impl() for what is known.
    Source: torch 2.13, torch/nn/attention/_fa3.py and _fa4.py call flash_attn_3 and flash_attn.cute.
    """
    other = _other(env)
    wide = other == "FA4" and max(p.head_dim_qk, p.head_dim_v) > 128
    if other in ("FA3", "FA4") and (wide or (p.deterministic and p.is_training)):
        return Unknown("torch_flash", other, _RESTORED)
    return None


# ---- SDPA6xx: PyTorch's FlashAttention 2 by its own op, with lengths, windows and pages ----------------
# What the kernels themselves want stands in ``flash``.


rule_of_varlen = rules_about("sdpa.varlen", device=CUDA)

PAGED = {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged", "page_size": 256, "is_training": False}
_STEPS = "one sequence right behind the other"


@rule_of_varlen("SDPA600", device=None, fires_on={"gpu": "cpu"})
def varlen_devices(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """The op with lengths exists on NVIDIA GPUs

    Why: on a CPU it raises. ROCm builds answer it with AOTriton or CK, whose limits were not read; XPU and
    MPS have other ops.
    Fix: sdpa.math and tiled run on every device.
    Source: torch 2.13 native_functions.yaml, _flash_attention_forward (dispatch: CUDA).
    """
    if env.device.type == "cuda":
        return None
    finding = Unknown if env.device.type == "rocm" else Violation
    return finding("device", env.device.type, OneOf("cuda"))


@rule_of_varlen(
    "SDPA601", device=None, when=torch("<2.6.0"), fires_on={"torch": "2.5.1"}, passes={"torch": "2.6.0"}
)
def varlen_since_2_6(p: AttentionParams, env: Environment) -> Violation:
    """The op takes windows beside lengths from PyTorch 2.6 on

    Why: attnsel runs from 2.6 on, and no earlier wheel was looked at.
    Fix: install PyTorch 2.6 or newer.
    Source: schema of aten::_flash_attention_forward in the wheels of 2.6.0 to 2.13.0.
    """
    return Violation("torch", env.torch, FreeText("2.6.0 or newer"))


@rule_of_varlen(
    "SDPA602",
    fires_on={"max_seqlen_q": 1024, "max_seqlen_kv": 4096},
    passes={"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 4096},
)
def varlen_diagonal(p: AttentionParams, env: Environment) -> Violation | None:
    """The op's diagonal goes to the bottom right of each sequence

    Why: FlashAttention 2.1 and newer align the last query with the last key. Where queries and keys are
    equally long that is the top-left diagonal too: with lengths this is known if one tensor says both. Of a
    dense call the bounds are moved by the difference, as long as they stay on their side of the diagonal.
    Fix: give one tensor for both lengths, or ask for the bottom-right diagonal where that is meant.
    Source: mask.h and flash_api.cpp of FlashAttention 2 in PyTorch 2.13; attnsel/backends/sdpa/varlen.py,
    "window_of".
    """
    if p.bottom_right_diagonal or p.window_size == (-1, -1):
        return None
    if p.padding or p.qkv_format == "thd" or p.kv_cache == "paged":
        if p.same_lengths:
            return None
        needed = FreeText("one tensor for the lengths of queries and keys, or a bottom-right diagonal")
    else:
        left, right = p.window_size
        longer = p.max_seqlen_kv - p.max_seqlen_q
        if (left < 0 or left + longer >= 0) and (right < 0 or right >= longer):
            return None
        needed = FreeText("equal lengths, or a bottom-right diagonal")
    if p.causal:
        return Violation("attn_mask_type", p.attn_mask_type, needed)
    return Violation("bottom_right_diagonal", p.bottom_right_diagonal, needed)


@rule_of_varlen(
    "SDPA603",
    fires_on={"qkv_layout": "sbhd_sbhd_sbhd", "attn_mask_type": "padding"},
    passes={"qkv_layout": "sbhd_sbhd_sbhd"},
)
def varlen_rows(p: AttentionParams, env: Environment) -> Violation | None:
    """With lengths, sequences must lie one behind the other

    Why: the op takes rows [t, h, d] and the first row of each sequence; a padded batch is that as it lies if
    it is bshd. In sbhd and bhsd the rows of a sequence are apart.
    Fix: use bshd; attnsel packs other formats (adaptation "pack") or copies a tensor that steps otherwise.
    Source: attnsel/backends/rows.py.
    """
    if not p.padding or p.layout.q_format == "thd" or p.batch_size == 1:
        return None
    if p.layout.q_format != "bshd" or (p.kv_cache != "paged" and p.layout.kv_format != "bshd"):
        return Violation("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd"))
    tensors = p.tensors
    if tensors.q is tensors.k is tensors.v is None:
        return None
    for name, spec in (("q", tensors.q), ("k", tensors.k), ("v", tensors.v)):
        if spec is None or spec.shape[1] <= 1 or (p.kv_cache == "paged" and name != "q"):
            continue
        if spec.stride[0] != spec.shape[1] * spec.stride[1]:
            return Violation(f"tensors.{name}", spec.stride, FreeText(_STEPS))
    return None


@rule_of_varlen(
    "SDPA604",
    when=torch("<2.12.0"),
    fires_on={**PAGED, "torch": "2.11.0"},
    passes={**PAGED, "torch": "2.12.0"},
)
def varlen_pages_since_2_12(p: AttentionParams, env: Environment) -> Violation | None:
    """The op takes pages from PyTorch 2.12 on

    Fix: install PyTorch 2.12 or newer, or let triton or cudnn read the pages.
    Source: argument block_table in the schema of aten::_flash_attention_forward, wheels 2.11.0 and 2.12.0.
    """
    return Violation("torch", env.torch, FreeText("2.12.0 or newer")) if p.kv_cache == "paged" else None


@rule_of_varlen(
    "SDPA605",
    requires={"page_size": Multiple(256)},
    fires_on={**PAGED, "page_size": 64},
    passes=PAGED,
)
def varlen_page_size(p: AttentionParams, env: Environment) -> bool:
    """Pages have a multiple of 256 rows

    Why: the kernel's tiles of keys must not cross a page.
    Fix: pages of 256 rows, or a kernel with smaller ones: triton, cudnn.
    Source: TORCH_CHECK in mha_varlen_fwd of PyTorch's flash_api.cpp, "Paged KV cache block size must be
    divisible by 256", read at pytorch 03b7c19d.
    """
    return p.kv_cache == "paged"


@rule_of_varlen(
    "SDPA606",
    requires={"batch_size": AtMost(32767)},
    fires_on={"batch_size": 32768, "max_seqlen_q": 16, "attn_mask_type": "padding_causal"},
    passes={"batch_size": 32767, "max_seqlen_q": 16, "attn_mask_type": "padding_causal"},
)
def varlen_grid(p: AttentionParams, env: Environment) -> bool:
    """With padding, or gaps, the op takes at most 32767 sequences

    Why: what lies between two sequences is a sequence to the kernel, and their number is a dimension of its
    launch grid, of which CUDA allows 65535.
    Fix: split the batch.
    Source: flash_fwd_launch_template.h, dim3 grid(num_m_block, b, h); attnsel/backends/rows.py.
    """
    return (p.padding and p.qkv_format != "thd") or p.pad_between_seqs


@rule_of_varlen(
    "SDPA607",
    fires_on={**PAGED, "torch_flash": "FA4"},
    passes={**PAGED, "torch_flash": "FA4", "gpu": "B200"},
)
def varlen_pages_of_fa4(p: AttentionParams, env: Environment) -> Violation | None:
    """FA4 in its place reads pages on datacentre Blackwell alone

    Fix: torch.nn.attention.restore_flash_attention_impl().
    Source: torch 2.13, torch/nn/attention/_fa4.py, "paged KV (block_table) not supported on SM".
    """
    paged = p.kv_cache == "paged" and env.torch_flash == "FA4"
    if not paged or (env.arch is not None and 100 <= env.arch < 110):
        return None
    return Violation("torch_flash", "FA4", FreeText("FA2: torch.nn.attention.restore_flash_attention_impl()"))
