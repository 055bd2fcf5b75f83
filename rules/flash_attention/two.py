"""FLASH2xx: FlashAttention 2, the package flash-attn, by release.

Lines are of csrc/flash_attn/flash_api.cpp at v2.8.3 unless another file or tag is named.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import Version, cuda, flash_attn
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about, same_head_dims
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import NEWER, AtLeast, AtMost, FreeText, Multiple, OneOf

CUDA, GPUS = {"cuda"}, {"cuda", "rocm"}
rule = rules_about("flash_attn.2", device=CUDA)
BLACKWELL = range(100, 130)
SMALL_SHARED_MEMORY = frozenset({86, 88, 89, 120, 121})  # below 144 KiB in a block
PAGED = {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged", "page_size": 256, "is_training": False}
NEWEST = "2.8.3"
OLD = {"flash_attn": "2.6.3"}
_2 = {"flash_attn": NEWEST}


# Which releases, and where they run.


@rule(
    "FLASH201",
    device=None,
    when=flash_attn("<2.5.9", ">=3.0.0b1"),
    fires_on={"flash_attn": "2.3.6"},
    passes=_2,
)
def releases_that_are_called(p: AttentionParams, env: Environment) -> Violation:
    """attnsel calls flash-attn from 2.5.9 on

    Why: older releases lack pages, and nobody has held attnsel's calls to their functions; a flash-attn of
    3.0.0 is FlashAttention 3 under the old name.
    Fix: install flash-attn 2.8.3 (torch 2.6, which attnsel needs, has wheels from 2.7.4 on).
    Source: flash_attn/flash_attn_interface.py at the tags v2.5.9.post1 to v2.8.3; hopper/setup.py at
    v2.7.4.post1, line 36.
    """
    return Violation("flash_attn", env.flash_attn, FreeText("2.5.9 to 2.8.3"))


@rule(
    "FLASH202",
    device=None,
    requires={"arch": AtLeast(80)},
    fires_on={"gpu": "T4", **_2},
    passes={"gpu": "A100", **_2},
)
def two_needs_ampere(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 2 needs Ampere or newer (sm80)

    Why: it is built on asynchronous copies and bf16 instructions that Turing and Volta lack.
    Fix: on Turing triton and sdpa.efficient run; flash-attention-turing is another package with another
    interface.
    Source: flash_api.cpp of flash-attn v2.8.3, TORCH_CHECK "FlashAttention only supports Ampere GPUs or
    newer", line 370 (v2.5.9.post1: 335).
    """


@rule(
    "FLASH203",
    when=flash_attn("<2.7.3"),
    arch=BLACKWELL,
    requires={"flash_attn": NEWER},
    fires_on={"gpu": "B200", **OLD},
    passes={"gpu": "B200", **_2},
)
def two_on_blackwell(p: AttentionParams, env: Environment) -> None:
    """flash-attn runs on Blackwell from 2.7.3 on

    Why: before 2.7.3 it asks for sm8x or sm90 exactly, and is not compiled for anything newer.
    Fix: flash-attn 2.8.3.
    Source: flash_api.cpp of flash-attn v2.8.3, TORCH_CHECK(is_sm90 || is_sm8x) at v2.7.2; setup.py at
    v2.7.2 and v2.7.3 (compute_100, compute_120 since).
    """


@rule(
    "FLASH204",
    when=cuda("<12.8"),
    arch=BLACKWELL,
    fires_on={"gpu": "RTX 5090", "cuda": "12.6", **_2},
    passes={"gpu": "RTX 5090", "cuda": "12.8", **_2},
)
def two_on_blackwell_cuda(p: AttentionParams, env: Environment) -> Violation:
    """flash-attn's code for Blackwell is compiled with CUDA 12.8 or newer

    Why: its build leaves sm100 and sm120 out with an older nvcc, and there is no PTX to fall back on: "no
    kernel image is available".
    Fix: PyTorch for CUDA 12.8 or newer, and flash-attn built with that.
    Source: setup.py v2.8.3, lines 186 to 191.
    """
    return Violation("cuda", env.cuda, FreeText("12.8 or newer"))


@rule(
    "FLASH205",
    when=flash_attn("<2.8.4"),
    arch=range(110, 120),
    fires_on={"gpu": "sm110", **_2},
    passes={"gpu": "B200", **_2},
)
def two_on_thor(p: AttentionParams, env: Environment) -> Violation:
    """flash-attn has no code for sm110 before 2.8.4

    Why: its build names sm100 and sm120, and neither runs on Jetson Thor; its own check lets it through.
    Fix: triton, sdpa.flash or cudnn; or flash-attn built from its repository.
    Source: setup.py v2.8.3, lines 179 to 191, and 0251105a, line 74 ("80;90;100;110;120").
    """
    return Violation("arch", env.arch, FreeText("sm80 to sm90, sm100, sm103 or sm120"))


# Types and head dimensions.


@rule(
    "FLASH210",
    requires={("head_dim_qk", "head_dim_v"): AtMost(256)},
    fires_on={"head_dim_qk": 320, **_2},
    passes=_2,
)
def two_head_dim_limit(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 2 has head dimensions up to 256

    Fix: sdpa.efficient has no limit, at a lower speed; flash_attn.3 takes (64, 512) forward.
    Source: flash_api.cpp of flash-attn v2.8.3, TORCH_CHECK "only supports head dimension at most 256",
    lines 393 and 604.
    """


@rule(
    "FLASH211",
    device=GPUS,
    requires={("head_dim_qk", "head_dim_v"): Multiple(8)},
    fires_on={"head_dim_qk": 100, **_2},
    passes={"head_dim_qk": 104, **_2},
)
def two_head_dim_multiple(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 2 takes head dimensions in multiples of 8

    Why: it loads 16 bytes at a time. flash_attn_func copies q, k and v into wider tensors on every call and
    says nothing; so did the C++ of releases before 2.7 in a forward.
    Fix: attnsel pads with zeros, keeps the softmax scale of the true head_dim_qk and cuts the output.
    Source: flash_api.cpp of flash-attn v2.8.3, TORCH_CHECK "must have a head_size that is a multiple of
    8", lines 394 and 605, and 829 for the backward; F.pad in FlashAttnFunc, flash_attn_interface.py.
    """


@rule("FLASH212", device=GPUS, fires_on={"head_dim_qk": 192, "head_dim_v": 128, **_2}, passes=_2)
def two_equal_head_dims(p: AttentionParams, env: Environment) -> Violation | None:
    """FlashAttention 2 wants head_dim_v equal to head_dim_qk

    Fix: attnsel pads the smaller one with zeros and cuts the output; flash_attn.3 and .4 take (192, 128).
    Source: flash_api.cpp of flash-attn v2.8.3, CHECK_SHAPE(v, batch_size, seqlen_k, num_heads_k,
    head_size), mha_fwd.
    """
    return same_head_dims(p)


@rule(
    "FLASH213",
    training=True,
    when=flash_attn("<2.7.3"),
    fires_on={"gpu": "RTX 4090", "head_dim_qk": 256, "attention_dropout": 0.1, **OLD},
    passes={"gpu": "RTX 4090", "head_dim_qk": 256, **OLD},
)
def two_wide_backward(p: AttentionParams, env: Environment) -> Violation | None:
    """Off A100 and H100 the backward above head_dim 192 has limits before 2.7.3

    Why: its tiles want more shared memory than other cards give a block: no dropout there, and before 2.6 no
    head_dim from 200 to 224 at all.
    Fix: attention_dropout=0, or head_dim 256 by padding.
    Source: TORCH_CHECK "FlashAttention backward for head dim", flash_api.cpp v2.5.9.post1 line 825, v2.6.3
    line 873; the same in v2.7.0 to v2.7.2.
    """
    width = max(p.head_dim_qk, p.head_dim_v)
    if width <= 192 or env.arch in (80, 90):
        return None
    if p.dropout:
        return Violation("attention_dropout", p.attention_dropout, OneOf(0.0))
    if width <= 224 and env.flash_attn is not None and env.flash_attn < Version(2, 6):
        field = "head_dim_qk" if p.head_dim_qk == width else "head_dim_v"
        return Violation(field, width, OneOf(256), "or at most 192")
    return None


@rule(
    "FLASH214",
    training=True,
    when=flash_attn(">=2.7.3"),
    arch=SMALL_SHARED_MEMORY,
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={"gpu": "RTX 4090", "head_dim_qk": 256, "attention_dropout": 0.1, **_2},
    passes={"gpu": "RTX 4090", "head_dim_qk": 256, **_2},
)
def two_wide_backward_since_2_7_3(p: AttentionParams, env: Environment) -> bool:
    """With dropout no backward above head_dim 192 where shared memory is small

    Why: the check went away with 2.7.3, and the template has no kernel with dropout that fits less than 144
    KiB of shared memory: it launches nothing, and dq, dk and dv stay as memory was. Wrong gradients without a
    word.
    Fix: attention_dropout=0, or a card with more shared memory (A100, H100, B200).
    Source: run_mha_bwd_hdim256 in csrc/flash_attn/src/flash_bwd_launch_template.h v2.8.3, "max smem is 99 KB.
    Only works without dropout".
    """
    return p.dropout and max(p.head_dim_qk, p.head_dim_v) > 192


# Features.


@rule(
    "FLASH220",
    when=flash_attn("<2.6.0"),
    requires={"softcap": OneOf(0.0)},
    fires_on={"softcap": 30.0, "flash_attn": "2.5.9"},
    passes={"flash_attn": "2.5.9"},
)
def two_softcap_since_2_6(p: AttentionParams, env: Environment) -> None:
    """flash-attn has softcap from 2.6 on

    Fix: install flash-attn 2.6 or newer; triton and tiled have it.
    Source: argument softcap of flash_attn_func at v2.5.9.post1 and v2.6.0; README.md, "2.6".
    """


@rule("FLASH221", fires_on={"softcap": 30.0, "attention_dropout": 0.1, **_2}, passes={"softcap": 30.0, **_2})
def two_softcap_without_dropout(p: AttentionParams, env: Environment) -> Violation | None:
    """FlashAttention 2 has softcap without dropout only

    Fix: attention_dropout=0; triton and tiled take both.
    Source: flash_api.cpp of flash-attn v2.8.3, TORCH_CHECK "Softcapping does not support dropout for
    now", lines 397, 578, 838, 1048.
    """
    if p.softcap and p.dropout:
        return Violation("attention_dropout", p.attention_dropout, OneOf(0.0))
    return None


@rule(
    "FLASH222",
    requires={"page_size": Multiple(256)},
    fires_on={**PAGED, "page_size": 64, **_2},
    passes={**PAGED, **_2},
)
def two_page_size(p: AttentionParams, env: Environment) -> bool:
    """FlashAttention 2 has pages of a multiple of 256 rows

    Why: the kernel's tiles of keys must not cross a page.
    Fix: pages of 256 rows, or a kernel with smaller ones: flash_attn.3, triton, cudnn.
    Source: flash_api.cpp of flash-attn v2.8.3, TORCH_CHECK "Paged KV cache block size must be divisible
    by 256", line 583 (v2.5.9.post1: 568).
    """
    return p.kv_cache == "paged"


@rule(
    "FLASH223",
    requires={("batch_size", "num_heads"): AtMost(65535)},
    fires_on={"batch_size": 65536, "max_seqlen_q": 16, **_2},
    passes={"batch_size": 65535, "max_seqlen_q": 16, **_2},
)
def two_grid(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 2 takes at most 65535 sequences and 65535 heads

    Why: they are the y and z dimensions of its launch grid, which CUDA limits.
    Fix: split the batch.
    Source: src/flash_fwd_launch_template.h v2.8.3, dim3 grid(num_m_block, params.b, params.h); CUDA C++
    Programming Guide, maximum y- and z-dimension of a grid.
    """


@rule(
    "FLASH224",
    requires={"batch_size": AtMost(32767)},
    fires_on={"batch_size": 32768, "max_seqlen_q": 16, "attn_mask_type": "padding_causal", **_2},
    passes={"batch_size": 32767, "max_seqlen_q": 16, "attn_mask_type": "padding_causal", **_2},
)
def two_grid_of_padded(p: AttentionParams, env: Environment) -> bool:
    """With padding, or gaps, FlashAttention 2 takes at most 32767 sequences

    Why: what lies between two sequences is a sequence to the kernel, and their number is a dimension of its
    launch grid, of which CUDA allows 65535.
    Fix: split the batch.
    Source: src/flash_fwd_launch_template.h v2.8.3; backends/rows.py.
    """
    return (p.padding and p.qkv_format != "thd") or p.pad_between_seqs


@rule(
    "FLASH225",
    "flash_attn.2",
    "sdpa.varlen",
    fires_on={
        "attn_mask_type": "no_mask",
        "window_size": (64, -1),
        "bottom_right_diagonal": True,
        "max_seqlen_q": 4096,
        "max_seqlen_kv": 1024,
        **_2,
    },
    passes={"attn_mask_type": "no_mask", "window_size": (64, -1), **_2},
)
def two_window_open_to_the_right(p: AttentionParams, env: Environment) -> Violation | None:
    """With more queries than keys a window must be bounded on the right

    Why: FlashAttention 2 gives a side without a bound the number of keys for one, and drops a bound that is
    as large. Where queries outnumber keys by two or more that hides keys, or shows some: wrong numbers
    without a word.
    Fix: a bound on the right below the number of keys, or triton and tiled.
    Source: flash_api.cpp of flash-attn v2.8.3, set_params_fprop and mha_fwd, lines 143 to 146 and 399 to
    400; the same in PyTorch's copy.
    """
    left, right = p.window_size
    if p.max_seqlen_q <= p.max_seqlen_kv + 1 or (left < 0 and right < 0):
        return None
    if not p.bottom_right_diagonal and right >= 0:
        right += p.max_seqlen_q - p.max_seqlen_kv  # as it is from the bottom right, where it is known
    if right < 0 or p.max_seqlen_kv <= right < p.max_seqlen_q - 1:
        needed = f"a bound on the right, below {p.max_seqlen_kv} from the bottom-right diagonal"
        note = f"it is {right} there" if right >= 0 else ""
        return Violation("window_size", p.window_size, FreeText(needed), note)
    return None
