"""FLASH24x and 25x: flash-attn on AMD's GPUs, which it serves with two back ends of its own.

Composable Kernel (CK, csrc/flash_attn_ck) is what a build has for MI200 and newer; the Triton back end
(flash_attn/flash_attn_triton_amd) is what other GPUs have, and what FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE
puts in place of CK elsewhere: FLASH249 to FLASH254 hold there too. Nothing of this was run by attnsel, which
plans it. Read at the tags v2.6.2 to v2.8.3; 0251105a, which no release has, brings CK to RDNA 3 and 4.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import flash_attn
from attnsel.environment.wheels import COMPOSABLE_KERNEL
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.flash_attention.common import Finding
from attnsel.rules.flash_attention.two import two_window_open_to_the_right
from attnsel.rules.sdpa.platforms import gfx
from attnsel.verdicts.reasons import Unknown, Violation
from attnsel.verdicts.requirements import NEWER, AtMost, FreeText, Multiple, OneOf

rule = rules_about("flash_attn.2", device={"rocm"})

CK = COMPOSABLE_KERNEL
TRITON = ("gfx908", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201")
MI300 = {"device": "gfx942", "flash_attn": "2.8.3"}
RX7900 = {"device": "gfx1100", "flash_attn": "2.8.3"}
PAGED = {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged", "is_training": False}


def by_ck(env: Environment) -> bool:
    """Whether Composable Kernel runs there, unless the build was asked for Triton."""
    return gfx(env) in CK


def by_triton(env: Environment) -> bool:
    """Whether the Triton back end alone has something for the GPU."""
    return gfx(env) is not None and not by_ck(env)


# Which GPUs, from which release on.


@rule(
    "FLASH240",
    when=flash_attn("<2.6.2"),
    requires={"flash_attn": NEWER},
    fires_on={**MI300, "flash_attn": "2.6.1"},
    passes=MI300,
)
def rocm_since_2_6_2(p: AttentionParams, env: Environment) -> None:
    """flash-attn runs on AMD's GPUs from 2.6.2 on

    Fix: flash-attn 2.8.3, built for ROCm: no wheel of it is.
    Source: csrc/flash_attn_ck, at v2.6.2 and not at v2.6.1; setup.py there, BUILD_TARGET.
    """


@rule(
    "FLASH241",
    when=flash_attn("<2.8.0"),
    requires={"flash_attn": NEWER},
    fires_on={"device": "gfx950", "flash_attn": "2.7.4"},
    passes={"device": "gfx950", "flash_attn": "2.8.0"},
)
def mi350_since_2_8(p: AttentionParams, env: Environment) -> bool:
    """flash-attn has code for MI350 and MI355 from 2.8.0 on

    Fix: flash-attn 2.8.3, built for ROCm with GPU_ARCHS=gfx950.
    Source: setup.py, allowed_archs at v2.7.4.post1 (line 135: gfx940 to gfx942) and v2.8.0 (gfx950).
    """
    return gfx(env) == "gfx950"


@rule(
    "FLASH242",
    when=flash_attn("<2.7.1"),
    requires={"flash_attn": NEWER},
    fires_on={**RX7900, "flash_attn": "2.6.3"},
    passes=RX7900,
)
def triton_since_2_7_1(p: AttentionParams, env: Environment) -> bool:
    """On RDNA and MI100 flash-attn runs from 2.7.1 on, by Triton

    Fix: flash-attn 2.8.3, built with FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE, which is set when it runs too.
    Source: flash_attn/flash_attn_triton_amd, at v2.7.1 and not at v2.7.0; is_cdna and is_rdna in its
    utils.py.
    """
    return gfx(env) in TRITON


@rule("FLASH243", fires_on={**MI300, "device": "gfx906"}, passes=MI300)
def rocm_architectures(p: AttentionParams, env: Environment) -> Unknown | None:
    """flash-attn names some of AMD's GPUs; of others nobody has looked

    Why: Composable Kernel is compiled for MI200, MI300 and MI350. The Triton back end compiles for what is
    there and knows MI100, RX 6800 and 6900, RX 7700 to 7900 and RX 9060 and 9070 by name.
    Fix: name the architecture (--gpu gfx942); elsewhere sdpa.math and tiled run.
    Source: setup.py v2.8.3, line 135; flash_attn_triton_amd/utils.py v2.8.3, lines 768 and 772.
    """
    arch = gfx(env)
    if arch in CK or arch in TRITON:
        return None
    return Unknown("device", arch or env.device.name or "rocm", FreeText(", ".join((*CK, *TRITON))))


# What both back ends lack.


@rule(
    "FLASH244",
    requires={"softcap": OneOf(0.0)},
    fires_on={**MI300, "softcap": 30.0},
    passes=MI300,
)
def rocm_without_softcap(p: AttentionParams, env: Environment) -> None:
    """On AMD's GPUs flash-attn drops softcap without a word

    Why: its functions take the argument and neither back end hands it to a kernel: wrong numbers, no error.
    Fix: softcap=0; tiled has it.
    Source: "const float /*softcap*/" in csrc/flash_attn_ck/mha_fwd.cpp v2.8.3, line 156 (0251105a: 180);
    flash_attn_triton_amd/interface_fa.py v2.8.3, where fwd passes it to nothing.
    """


@rule(
    "FLASH245",
    fires_on={
        **MI300,
        "attn_mask_type": "no_mask",
        "window_size": (64, -1),
        "bottom_right_diagonal": True,
        "max_seqlen_q": 4096,
        "max_seqlen_kv": 1024,
    },
    passes={**MI300, "attn_mask_type": "no_mask", "window_size": (64, -1)},
)
def rocm_window_open_to_the_right(p: AttentionParams, env: Environment) -> Finding:
    """On AMD's GPUs too a window must be bounded on the right if queries are more

    Why: as FLASH225: a bound as large as the number of keys is dropped before a kernel sees it.
    Fix: a bound on the right below the number of keys, or tiled.
    Source: csrc/flash_attn_ck/mha_fwd.cpp at 0251105a, lines 212 and 213.
    """
    return two_window_open_to_the_right(p, env)


@rule(
    "FLASH246",
    training=True,
    when=flash_attn("<2.7.0"),
    requires={"flash_attn": NEWER},
    fires_on={**MI300, "deterministic": True, "flash_attn": "2.6.3"},
    passes={**MI300, "deterministic": True},
)
def ck_deterministic_since_2_7(p: AttentionParams, env: Environment) -> bool:
    """On AMD's GPUs the backward is deterministic from 2.7.0 on

    Why: before, Composable Kernel adds dq up by atomic operations, whatever is asked for.
    Fix: flash-attn 2.8.3.
    Source: csrc/flash_attn_ck/mha_bwd.cpp v2.6.3, "ck use atomic operation on dq", and v2.7.0, dq_accum.
    """
    return p.deterministic


# Composable Kernel.


@rule(
    "FLASH247",
    training=True,
    when=flash_attn("<2.7.0"),
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={**MI300, "head_dim_qk": 192, "flash_attn": "2.6.3"},
    passes={**MI300, "head_dim_qk": 192},
)
def ck_wide_backward_since_2_7(p: AttentionParams, env: Environment) -> None:
    """On AMD's GPUs the backward stops at head_dim 128 before 2.7.0

    Fix: flash-attn 2.8.3.
    Source: csrc/flash_attn_ck/mha_bwd.cpp v2.6.3, TORCH_CHECK, line 227; v2.7.0, line 255 (256).
    """


@rule(
    "FLASH248",
    when=flash_attn("<2.7.3"),
    requires={"flash_attn": NEWER},
    fires_on={**MI300, **PAGED, "page_size": 128, "flash_attn": "2.7.2"},
    passes={**MI300, **PAGED, "page_size": 128},
)
def ck_pages_since_2_7_3(p: AttentionParams, env: Environment) -> bool:
    """Composable Kernel reads pages from flash-attn 2.7.3 on

    Fix: flash-attn 2.8.3.
    Source: csrc/flash_attn_ck/mha_varlen_fwd.cpp v2.7.2, TORCH_CHECK "CK does not support paged_KV yet", line
    185.
    """
    return p.kv_cache == "paged" and by_ck(env)


@rule(
    "FLASH255",
    when=flash_attn(">=2.7.3"),
    requires={"page_size": Multiple(128)},
    fires_on={**MI300, **PAGED, "page_size": 64},
    passes={**MI300, **PAGED, "page_size": 128},
)
def ck_page_size(p: AttentionParams, env: Environment) -> bool:
    """Composable Kernel has pages of a multiple of 128 rows

    Fix: pages of 128 rows.
    Source: csrc/flash_attn_ck/mha_varlen_fwd.cpp v2.8.3, TORCH_CHECK, line 360 (v2.7.3: 356).
    """
    return p.kv_cache == "paged" and by_ck(env)


# The Triton back end.


@rule(
    "FLASH249",
    requires={"kv_cache": OneOf("none")},
    fires_on={**RX7900, **PAGED, "page_size": 256},
    passes={**RX7900, "is_training": False},
)
def triton_without_pages(p: AttentionParams, env: Environment) -> bool:
    """flash-attn's Triton back end reads no pages

    Why: varlen_fwd takes block_table_ and hands it to nothing: keys would be read as if they were packed.
    0251105a, which no release has, takes the back end from aiter, which has pages.
    Fix: tiled.
    Source: flash_attn_triton_amd/interface_fa.py v2.8.3, varlen_fwd, line 364.
    """
    return p.kv_cache == "paged" and by_triton(env)


@rule(
    "FLASH250",
    fires_on={**RX7900, "window_size": (128, 0)},
    passes=RX7900,
)
def triton_without_windows(p: AttentionParams, env: Environment) -> Violation | None:
    """flash-attn's Triton back end drops a window without a word

    Why: it takes the bounds and hands them to nothing. A causal mask from the top left, between unequal
    lengths, is a window from the bottom right to this package.
    Fix: no window, or tiled.
    Source: flash_attn_triton_amd/interface_fa.py v2.8.3, fwd, where window_size_left is named in its
    signature and nowhere below; its README.md, "working on".
    """
    if not by_triton(env):
        return None
    if p.windowed:
        return Violation("window_size", p.window_size, OneOf((-1, 0 if p.causal else -1)))
    if p.causal and not p.bottom_right_diagonal and p.max_seqlen_q != p.max_seqlen_kv:
        return Violation("bottom_right_diagonal", False, OneOf(True))
    return None


@rule(
    "FLASH251",
    when=flash_attn("<2.8.0"),
    requires={"flash_attn": NEWER},
    fires_on={**RX7900, "attention_dropout": 0.1, "flash_attn": "2.7.4"},
    passes={**RX7900, "attention_dropout": 0.1},
)
def triton_dropout_since_2_8(p: AttentionParams, env: Environment) -> bool:
    """flash-attn's Triton back end has dropout from 2.8.0 on

    Fix: flash-attn 2.8.3, or attention_dropout=0.
    Source: flash_attn_triton_amd/interface_fa.py v2.7.4.post1, ValueError about dropout, line 45.
    """
    return p.dropout and by_triton(env)


@rule(
    "FLASH252",
    training=True,
    when=flash_attn("<2.8.0"),
    requires={"flash_attn": NEWER},
    fires_on={**RX7900, "core_attention_bias_type": "alibi", "flash_attn": "2.7.4"},
    passes={**RX7900, "core_attention_bias_type": "alibi"},
)
def triton_alibi_trains_since_2_8(p: AttentionParams, env: Environment) -> bool:
    """flash-attn's Triton back end trains with ALiBi from 2.8.0 on

    Why: before, its backward takes the slopes and reads them nowhere: wrong gradients without a word.
    Fix: flash-attn 2.8.3.
    Source: flash_attn_triton_amd/bwd_prefill.py v2.7.4.post1, lines 445 and 468; bwd_prefill_split.py v2.8.0,
    line 166.
    """
    return p.core_attention_bias_type == "alibi" and by_triton(env)


@rule(
    "FLASH253",
    requires={("head_dim_qk", "head_dim_v"): AtMost(256)},
    fires_on={**MI300, "head_dim_qk": 320},
    passes=MI300,
)
def rocm_head_dim_limit(p: AttentionParams, env: Environment) -> bool:
    """On AMD's GPUs flash-attn has head dimensions up to 256

    Fix: sdpa.math and tiled have no limit.
    Source: csrc/flash_attn_ck/mha_fwd.cpp v2.8.3, TORCH_CHECK, line 184; flash_attn_triton_amd/utils.py
    v2.7.4.post1, "assert head_size <= 256".
    """
    return not by_triton(env) or env.flash_attn is None or env.flash_attn < (2, 8)


@rule(
    "FLASH254",
    when=flash_attn(">=2.8.0"),
    requires={("head_dim_qk", "head_dim_v"): AtMost(256)},
    unknown=True,
    fires_on={**RX7900, "head_dim_qk": 320},
    passes=RX7900,
)
def triton_wide_heads(p: AttentionParams, env: Environment) -> bool:
    """Nobody has run flash-attn's Triton back end above head_dim 256

    Why: from 2.8.0 on it checks no bound; its tiles grow to the next power of two.
    Fix: sdpa.math and tiled have no limit.
    Source: flash_attn_triton_amd/utils.py v2.8.0, check_args; fwd_prefill.py v2.8.3, line 596.
    """
    return by_triton(env)
