"""FLASH24x: flash-attn on AMD's GPUs, which it serves with two back ends of its own.

Composable Kernel (CK, csrc/flash_attn_ck) is what a build has for MI200 and newer; the Triton back end
(flash_attn/flash_attn_triton_amd) is what other GPUs have, and what FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE
puts in place of CK elsewhere, with its limits. Nothing of this was run by attnsel, which plans it. Read at
the tags v2.6.2 to v2.8.3; 0251105a, which no release has, brings CK to RDNA 3 and 4.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import Version, flash_attn
from attnsel.environment.wheels import COMPOSABLE_KERNEL
from attnsel.params import AttentionParams
from attnsel.rules.api import limit, rules_about
from attnsel.rules.flash_attention.common import Finding
from attnsel.rules.flash_attention.two import two_window_open_to_the_right
from attnsel.rules.sdpa.platforms import gfx
from attnsel.verdicts.reasons import Unknown, Violation
from attnsel.verdicts.requirements import AtMost, FreeText, Multiple, OneOf

rule = rules_about("flash_attn.2", device={"rocm"})

SINCE = {**dict.fromkeys(("gfx90a", "gfx942"), "2.6.2"), "gfx950": "2.8.0"}
SINCE |= dict.fromkeys(("gfx908", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201"), "2.7.1")
STEPS = flash_attn("<2.6.2", ">=2.6.2,<2.7.0", ">=2.7.0,<2.7.1", ">=2.7.1,<2.7.3", ">=2.7.3,<2.8.0")
MI300 = {"device": "gfx942", "flash_attn": "2.8.3"}
RX7900 = {"device": "gfx1100", "flash_attn": "2.8.3"}
PAGED = {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged", "is_training": False}


def by_triton(env: Environment) -> bool:
    """Whether the Triton back end alone has something for the GPU."""
    return gfx(env) not in (None, *COMPOSABLE_KERNEL)


@rule("FLASH240", fires_on={**MI300, "device": "gfx906"}, passes=MI300)
def rocm_architectures(p: AttentionParams, env: Environment) -> Unknown | None:
    """flash-attn names some of AMD's GPUs; of others nobody has looked

    Why: Composable Kernel is compiled for MI200, MI300 and MI350. The Triton back end compiles for what is
    there and knows MI100, RX 6800 and 6900, RX 7700 to 7900 and RX 9060 and 9070 by name.
    Fix: name the architecture (--gpu gfx942); elsewhere sdpa.math and tiled run.
    Source: setup.py v2.8.3, line 135; flash_attn_triton_amd/utils.py v2.8.3, lines 768 and 772.
    """
    arch = gfx(env)
    if arch in SINCE:
        return None
    return Unknown("device", arch or env.device.name or "rocm", FreeText(", ".join(SINCE)))


@rule(
    "FLASH241",
    when=STEPS,
    fires_on={"device": "gfx950", "flash_attn": "2.7.4"},
    passes={**MI300, "flash_attn": "2.6.2", "is_training": False},
)
def rocm_since(p: AttentionParams, env: Environment) -> Violation | None:
    """On AMD's GPUs flash-attn has this from a later release on

    Why: MI200 and MI300 from 2.6.2 on, others by Triton from 2.7.1, MI350 from 2.8.0. Before 2.7.0 Composable
    Kernel adds dq up by atomic operations whatever is asked for, and before 2.7.3 it reads no pages. Before
    2.8.0 the Triton back end raises for dropout, and its backward reads ALiBi's slopes nowhere: wrong
    gradients without a word.
    Fix: flash-attn 2.8.3, built for ROCm: no wheel of it is.
    Source: setup.py, allowed_archs at v2.7.4.post1 (line 135) and v2.8.0; csrc/flash_attn_ck at v2.6.2;
    mha_bwd.cpp v2.6.3, "ck use atomic operation on dq"; mha_varlen_fwd.cpp v2.7.2, line 185;
    flash_attn_triton_amd at v2.7.1; interface_fa.py v2.7.4.post1, line 45; bwd_prefill.py there, line 445.
    """
    needs = [SINCE.get(gfx(env) or "", "2.7.1" if by_triton(env) else "2.6.2")]
    if by_triton(env):
        wrong = p.is_training and p.core_attention_bias_type == "alibi"
        needs += ["2.8.0"] * (p.dropout or wrong)
    else:
        needs += ["2.7.0"] * (p.is_training and p.deterministic) + ["2.7.3"] * (p.kv_cache == "paged")
    since = max(map(Version.parse, needs))
    if env.flash_attn is None or env.flash_attn >= since:
        return None
    return Violation("flash_attn", env.flash_attn, FreeText(f"{since} or newer"))


@rule("FLASH242", fires_on={**MI300, "softcap": 30.0}, passes=MI300)
def rocm_drops(p: AttentionParams, env: Environment) -> Finding:
    """On AMD's GPUs flash-attn takes arguments that no kernel is given

    Why: neither back end has softcap, and the Triton one has neither windows nor pages: wrong numbers without
    a word. A causal mask from the top left, between unequal lengths, is a window from the bottom right to
    this package. A bound as large as the number of keys is dropped too, as FLASH225 says.
    Fix: tiled has all of them; pages of 128 rows and windows on MI200 and newer.
    Source: "const float /*softcap*/" in csrc/flash_attn_ck/mha_fwd.cpp v2.8.3, line 156 (0251105a: 180);
    flash_attn_triton_amd/interface_fa.py v2.8.3, fwd and varlen_fwd, whose signatures alone name
    window_size_left, softcap and block_table_ (line 364).
    """
    if p.softcap:
        return Violation("softcap", p.softcap, OneOf(0.0))
    if not by_triton(env):
        return two_window_open_to_the_right(p, env)
    if p.windowed:
        return Violation("window_size", p.window_size, OneOf((-1, 0 if p.causal else -1)))
    if p.causal and not p.bottom_right_diagonal and p.max_seqlen_q != p.max_seqlen_kv:
        return Violation("bottom_right_diagonal", False, OneOf(True))
    return Violation("kv_cache", "paged", OneOf("none")) if p.kv_cache == "paged" else None


@rule("FLASH243", fires_on={**MI300, "head_dim_qk": 320}, passes=MI300)
def rocm_head_dims(p: AttentionParams, env: Environment) -> Finding:
    """On AMD's GPUs flash-attn has head dimensions up to 256

    Why: Composable Kernel checks it, and in training 128 before 2.7.0. The Triton back end checked it before
    2.8.0; what it does above nobody has seen.
    Fix: sdpa.math and tiled have no limit.
    Source: csrc/flash_attn_ck/mha_fwd.cpp v2.8.3, line 184; mha_bwd.cpp v2.6.3, line 227, and v2.7.0, line
    255; check_args in flash_attn_triton_amd/utils.py v2.7.4.post1 and v2.8.0.
    """
    old = env.flash_attn is not None and env.flash_attn < (2, 7)
    widest = AtMost(128 if old and p.is_training else 256)
    found = limit(p, "head_dim_qk", widest) or limit(p, "head_dim_v", widest)
    unseen = by_triton(env) and env.flash_attn is not None and env.flash_attn >= (2, 8)
    return Unknown(*found) if found is not None and unseen else found


@rule(
    "FLASH244",
    requires={"page_size": Multiple(128)},
    fires_on={**MI300, **PAGED, "page_size": 64},
    passes={**MI300, **PAGED, "page_size": 128},
)
def ck_page_size(p: AttentionParams, env: Environment) -> bool:
    """Composable Kernel has pages of a multiple of 128 rows

    Fix: pages of 128 rows.
    Source: csrc/flash_attn_ck/mha_varlen_fwd.cpp v2.8.3, TORCH_CHECK, line 360 (v2.7.3: 356).
    """
    return p.kv_cache == "paged" and not by_triton(env)
