"""FLASH4xx: FlashAttention 4, the package flash-attn-4, of which there are betas.

Lines are of flash_attn/cute/interface.py in the wheel 4.0.0b36, and of 4.0.0b20 where both are given. Nearly
all of its checks are asserts, which ``python -O`` leaves out.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import Version, flash_attn_4
from attnsel.params import AttentionParams
from attnsel.rules.api import limit, rules_about, same_head_dims
from attnsel.verdicts.reasons import Unknown, Violation
from attnsel.verdicts.requirements import NEWER, AtLeast, AtMost, EqualTo, FreeText, Multiple, OneOf, size

rule = rules_about("flash_attn.4")

CUDA = {"cuda"}
AMPERE, HOPPER, SM12 = range(80, 90), range(90, 100), range(120, 130)
DATACENTRE = range(100, 120)
BEFORE_B36 = flash_attn_4("<4.0.0b36")
NEW, OLD = {"flash_attn_4": "4.0.0b36"}, {"flash_attn_4": "4.0.0b20"}
PAGED = {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged", "page_size": 128, "is_training": False}


# Releases and architectures.


@rule("FLASH401", when=flash_attn_4("<4.0.0b20"), fires_on={"flash_attn_4": "4.0.0b9"}, passes=NEW)
def four_releases(p: AttentionParams, env: Environment) -> Unknown:
    """flash-attn-4 was read from 4.0.0b20 on

    Fix: pip install --pre 'flash-attn-4>=4.0.0b36'.
    Source: flash_attn/cute/interface.py in the wheels 4.0.0b20 and 4.0.0b36.
    """
    return Unknown("flash_attn_4", env.flash_attn_4, FreeText("4.0.0b20 or newer"))


@rule("FLASH402", requires={"arch": AtLeast(80)}, fires_on={"gpu": "T4", **NEW}, passes=NEW)
def four_needs_ampere(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 4 needs Ampere or newer (sm80)

    Fix: on Turing triton and sdpa.efficient run.
    Source: flash_attn/cute/interface.py 4.0.0b36, assert "Unsupported compute capability", line 845
    (4.0.0b20: 447).
    """


@rule(
    "FLASH403",
    arch=AMPERE,
    requires={"is_training": OneOf(False)},
    fires_on={"gpu": "A100", **NEW},
    passes={"gpu": "A100", "is_training": False, **NEW},
)
def four_trains_from_hopper_on(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 4 has no backward on Ampere and Ada

    Fix: flash_attn.2 or sdpa.flash for training there.
    Source: flash_attn/cute/interface.py 4.0.0b36, assert arch // 10 in [9, 10, 11, 12], line 2288
    (4.0.0b20: 1337).
    """


@rule(
    "FLASH404",
    when=BEFORE_B36,
    arch=SM12,
    requires={"flash_attn_4": NEWER},
    evidence="compiler",
    fires_on={"gpu": "RTX 5090", **OLD},
    passes={"gpu": "RTX 5090", **NEW},
)
def four_on_sm12(p: AttentionParams, env: Environment) -> None:
    """4.0.0b20 does not build for sm12x

    Why: its forward takes a path of Hopper's there, and its backward fails before it is compiled.
    Fix: pip install --pre 'flash-attn-4>=4.0.0b36'.
    Source: flash_fwd.py 4.0.0b20, line 406, and interface.py, line 1708 (UnboundLocalError); compiled for
    sm120 with nvidia-cutlass-dsl 4.6.0.dev0.
    """


@rule(
    "FLASH405",
    when=BEFORE_B36,
    arch=AMPERE,
    requires={"flash_attn_4": NEWER},
    evidence="compiler",
    fires_on={"gpu": "A100", "is_training": False, "num_gqa_groups": 4, **OLD},
    passes={"gpu": "A100", "is_training": False, **OLD},
)
def four_on_ampere(p: AttentionParams, env: Environment) -> bool:
    """On sm8x 4.0.0b20 builds neither grouped heads nor windows

    Fix: pip install --pre 'flash-attn-4>=4.0.0b36', or flash_attn.2.
    Source: pack_gqa.py 4.0.0b20, line 139, and interface.py, line 1015; compiled for sm80 with
    nvidia-cutlass-dsl 4.6.0.dev0.
    """
    return p.gqa or p.windowed


# Features.


@rule(
    "FLASH420",
    when=BEFORE_B36,
    device=CUDA,
    requires={"softmax_type": OneOf("vanilla")},
    fires_on={"softmax_type": "learnable", **OLD},
    passes={"softmax_type": "learnable", **NEW},
)
def four_sinks_since_b36(p: AttentionParams, env: Environment) -> None:
    """attnsel uses FlashAttention 4's sinks from 4.0.0b36 on

    Why: 4.0.0b20 takes them in bf16 only, gives them no gradient without a word, and NaN where a row sees no
    key. Which release between the two mended it was not read.
    Fix: pip install --pre 'flash-attn-4>=4.0.0b36'.
    Source: interface.py of 4.0.0b20, lines 424 and 425, and of 4.0.0b36, line 820; softmax.py, finalize.
    """


@rule(
    "FLASH421",
    arch=(*AMPERE, *SM12),
    requires={"softmax_type": OneOf("vanilla")},
    fires_on={"gpu": "RTX 5090", "softmax_type": "learnable", **NEW},
    passes={"gpu": "RTX 5090", **NEW},
)
def four_sinks_from_hopper_on(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 4 has sinks on Hopper and datacentre Blackwell only

    Fix: triton has sinks everywhere.
    Source: "Learnable sink is not supported in this kernel", flash_fwd.py 4.0.0b36, line 651 (4.0.0b20: 649).
    """


@rule(
    "FLASH422",
    arch=(*AMPERE, *SM12),
    requires={"kv_cache": OneOf("none")},
    fires_on={"gpu": "RTX 5090", **PAGED, **NEW},
    passes={"gpu": "H100", **PAGED, **NEW},
)
def four_pages(p: AttentionParams, env: Environment) -> bool:
    """FlashAttention 4 reads pages on Hopper and datacentre Blackwell only

    Fix: flash_attn.2 (pages of 256 rows), sdpa.varlen, triton.
    Source: flash_attn/cute/interface.py 4.0.0b36, asserts on page_table, lines 1611 and 1753 (4.0.0b20:
    824 and 942).
    """
    return p.kv_cache == "paged"


@rule(
    "FLASH423",
    arch=(*HOPPER, *DATACENTRE),
    requires={("head_dim_qk", "head_dim_v"): Multiple(16)},
    fires_on={**PAGED, "head_dim_qk": 72, **NEW},
    passes={**PAGED, "head_dim_qk": 80, **NEW},
)
def four_pages_want_even_heads(p: AttentionParams, env: Environment) -> bool:
    """With pages FlashAttention 4 takes head dimensions in multiples of 16

    Why: pages that are not of the tile's size are gathered by a copy that has no bounds in that dimension.
    Fix: attnsel pads with zeros.
    Source: "Paged KV does not support irregular head dim", flash_fwd_sm90.py, line 66, and
    flash_fwd_sm100.py, line 265 (4.0.0b20: 223).
    """
    return p.kv_cache == "paged"


@rule(
    "FLASH424",
    training=True,
    arch=SM12,
    requires={"deterministic": OneOf(False)},
    fires_on={"gpu": "RTX 5090", "deterministic": True, **NEW},
    passes={"gpu": "RTX 5090", "deterministic": True, "is_training": False, **NEW},
)
def four_deterministic_on_sm12(p: AttentionParams, env: Environment) -> None:
    """On sm12x FlashAttention 4's backward is not deterministic

    Fix: flash_attn.2 is; or deterministic=False.
    Source: flash_attn/cute/interface.py 4.0.0b36, assert on deterministic, line 2352 (4.0.0b20: 1373).
    """


@rule(
    "FLASH425",
    training=True,
    when=BEFORE_B36,
    device=CUDA,
    requires={"softcap": OneOf(0.0)},
    fires_on={"softcap": 30.0, "qkv_layout": "thd", "attn_mask_type": "padding_causal", **OLD},
    passes={"softcap": 30.0, **OLD},
)
def four_softcap_with_lengths(p: AttentionParams, env: Environment) -> bool:
    """4.0.0b20 has no backward with softcap and lengths

    Fix: pip install --pre 'flash-attn-4>=4.0.0b36'.
    Source: flash_attn/cute/interface.py 4.0.0b36, assert "varlen + score_mod not supported in bwd yet",
    line 1510 of 4.0.0b20.
    """
    return p.padding or p.qkv_format == "thd"


# ---- FLASH410 to 419 and 430 to 439: which head dimensions FlashAttention 4 has kernels for ------------
# Lines are of flash_attn/cute/interface.py in the wheel 4.0.0b36, and of 4.0.0b20 where both are given. Where
# nothing is checked before a kernel is built, both releases were built for the architecture.


@rule(
    "FLASH410",
    requires={("head_dim_qk", "head_dim_v"): Multiple(8)},
    fires_on={"head_dim_qk": 100, **NEW},
    passes={"head_dim_qk": 104, **NEW},
    device=CUDA,
)
def four_head_dim_multiple(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 4 takes head dimensions in multiples of 8

    Why: 16 bytes of half precision; it pads nothing itself, and on sm8x and sm12x nothing checks it.
    Fix: attnsel pads with zeros, keeps the softmax scale of the true head_dim_qk and cuts the output.
    Source: flash_attn/cute/interface.py 4.0.0b36, _validate_head_dims, lines 121 to 138 (4.0.0b20: 97 to
    112).
    """


@rule(
    "FLASH411",
    arch=HOPPER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(256)},
    fires_on={"head_dim_qk": 320, **NEW},
    passes=NEW,
)
def four_head_dims_on_hopper(p: AttentionParams, env: Environment) -> None:
    """On Hopper FlashAttention 4 has head dimensions up to 256

    Fix: sdpa.efficient and tiled have no limit, at a lower speed.
    Source: flash_attn/cute/interface.py 4.0.0b36, _validate_head_dims, line 130 (4.0.0b20: 105).
    """


@rule(
    "FLASH412",
    arch=DATACENTRE,
    fires_on={"gpu": "B200", "head_dim_qk": 160, **NEW},
    passes={"gpu": "B200", "head_dim_qk": 192, "head_dim_v": 128, **NEW},
)
def four_head_dims_on_blackwell(p: AttentionParams, env: Environment) -> Violation | None:
    """On datacentre Blackwell FlashAttention 4 has head_dim to 128, 192/128, 256

    Why: 512 passes its check too, and is for calls that attnsel does not make (qv).
    Fix: pad to (256, 256), which attnsel does; or cudnn.
    Source: flash_attn/cute/interface.py 4.0.0b36, _validate_head_dims, line 135 (4.0.0b20: 109).
    """
    d, e = p.head_dim_qk, p.head_dim_v
    if (d <= 128 and e <= 128) or (d, e) in ((192, 128), (256, 256)):
        return None
    if d > 256 or e > 256:
        field = "head_dim_qk" if d >= e else "head_dim_v"
        return limit(p, field, AtMost(256))
    return limit(p, "head_dim_qk", OneOf(256)) or limit(p, "head_dim_v", EqualTo("head_dim_qk"))


def _rounded(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple


def _forward_tiles(p: AttentionParams) -> int:
    """Bytes of shared memory of a forward on sm8x and sm12x: 128 queries, 64 keys and values."""
    d, e = _rounded(p.head_dim_qk, 16), _rounded(p.head_dim_v, 16)
    return 2 * (128 * d + 64 * d + 64 * e)


@rule(
    "FLASH413",
    arch=(*AMPERE, *SM12),
    evidence="compiler",
    fires_on={"gpu": "RTX 5090", "head_dim_qk": 256, **NEW},
    passes={"gpu": "RTX 5090", **NEW},
)
def four_forward_fits(p: AttentionParams, env: Environment) -> Violation | None:
    """On sm8x and sm12x wide heads do not fit the shared memory of a block

    Why: nothing checks it (can_implement of the kernel is never called): the launch fails. 192 fits 99 KiB
    (sm86, sm89, sm12x), 264 fits 163 KiB (sm80).
    Fix: flash_attn.2 and sdpa.flash go to 256 there.
    Source: flash_fwd.py 4.0.0b36, whose kernels ask for 2 * (192 * head_dim_qk + 64 * head_dim_v) bytes;
    built
    for sm80, sm86 and sm120 with nvidia-cutlass-dsl 4.8.1.
    """
    there, asked = env.device.shared_memory, _forward_tiles(p)
    if there is None or asked <= there:
        return None
    field = "head_dim_qk" if p.head_dim_qk >= p.head_dim_v else "head_dim_v"
    return Violation(field, getattr(p, field), FreeText(f"tiles of at most {size(there)}, not {size(asked)}"))


@rule(
    "FLASH414",
    training=True,
    arch=(*HOPPER, *DATACENTRE),
    fires_on={"head_dim_qk": 192, "head_dim_v": 128, "num_gqa_groups": 4, **NEW},
    passes={"head_dim_qk": 192, "head_dim_v": 128, **NEW},
)
def four_grouped_heads_apart(p: AttentionParams, env: Environment) -> Violation | None:
    """The backward of grouped heads wants equal head dimensions (192/128 on B200)

    Fix: attnsel pads the smaller one and cuts the output.
    Source: flash_bwd_sm90.py, line 116 (4.0.0b20 and 4.0.0b36); flash_bwd_sm100.py 4.0.0b36, line 981, and
    4.0.0b20, line 759, built for (128, 64).
    """
    d, e = p.head_dim_qk, p.head_dim_v
    if not p.gqa or (env.arch != 90 and (d, e) == (192, 128)):
        return None
    return same_head_dims(p)


@rule(
    "FLASH415",
    training=True,
    arch=HOPPER,
    evidence="compiler",
    fires_on={"head_dim_qk": 64, "head_dim_v": 128, **NEW},
    passes={"head_dim_qk": 128, "head_dim_v": 64, **NEW},
)
def four_wide_values_on_hopper(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper the backward wants head_dim_v no wider than head_dim_qk

    Why: (64, 128), (128, 192) and (64, 256) ask for 243 to 339 KiB of shared memory, of 227.
    Fix: attnsel pads head_dim_qk.
    Source: flash_bwd_sm90.py 4.0.0b36, line 688, and 4.0.0b20; built for sm90 with nvidia-cutlass-dsl 4.8.1
    and 4.6.0.dev0.
    """
    if p.head_dim_v > p.head_dim_qk:
        return limit(p, "head_dim_qk", EqualTo("head_dim_v"))
    return None


@rule(
    "FLASH416",
    training=True,
    arch=HOPPER,
    evidence="compiler",
    fires_on={"head_dim_qk": 104, **NEW},
    passes={"head_dim_qk": 112, **NEW},
)
def four_one_width_on_hopper(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper the backward of head_dim 104 does not build

    Fix: attnsel pads to 112.
    Source: flash_bwd_sm90.py 4.0.0b36, line 1210 ("failed to partition input (112,80)"); 4.0.0b20 builds
    fewer widths still (FLASH418).
    """
    if p.head_dim_qk == 104:
        return Violation("head_dim_qk", 104, OneOf(112))
    if p.head_dim_v == 104:
        return Violation("head_dim_v", 104, OneOf(112))
    return None


@rule(
    "FLASH417",
    training=True,
    arch=SM12,
    evidence="compiler",
    fires_on={"gpu": "RTX 5090", "head_dim_qk": 192, **NEW},
    passes={"gpu": "RTX 5090", "head_dim_qk": 160, **NEW},
)
def four_backward_fits(p: AttentionParams, env: Environment) -> Violation | None:
    """On sm12x the backward ends at head_dim 160

    Why: its tiles take 17 KiB and 256 bytes for each of head_dim_qk and head_dim_v, rounded to 32; a block
    has 99 KiB.
    Fix: flash_attn.2 goes to 256 without dropout.
    Source: flash_bwd_sm120.py 4.0.0b36, built for sm120 with nvidia-cutlass-dsl 4.8.1: 82944 bytes at 128,
    99328 at 160 and at (192, 128), 115712 at 192.
    """
    if _rounded(p.head_dim_qk, 32) + _rounded(p.head_dim_v, 32) <= 320:
        return None
    field, other = "head_dim_qk", "head_dim_v"
    if p.head_dim_qk < p.head_dim_v:
        field, other = other, field
    room = 320 - _rounded(getattr(p, other), 32)
    note = f"{other} is {getattr(p, other)}; 320 for both, each rounded up to 32"
    return Violation(field, getattr(p, field), FreeText(f"at most {room}"), note)


# Widths of q, k and v alike, and pairs, whose backward 4.0.0b20 builds: on Hopper, and on B200.
_BUILT_BY_B20: dict[bool, tuple[tuple[int, ...], frozenset[tuple[int, int]]]] = {
    True: (
        (32, 64, 72, 80, 96, 128, 192, 256),
        frozenset({(192, 128), (128, 64), (96, 64), (192, 64), (256, 128)}),
    ),
    False: ((32, 64, 96, 128, 256), frozenset({(192, 128), (128, 64), (64, 128), (96, 64)})),
}


@rule(
    "FLASH418",
    training=True,
    when=BEFORE_B36,
    arch=(*HOPPER, *DATACENTRE),
    evidence="compiler",
    fires_on={"head_dim_qk": 40, **OLD},
    passes={"head_dim_qk": 64, **OLD},
)
def four_widths_of_b20(p: AttentionParams, env: Environment) -> Violation | None:
    """4.0.0b20 builds the backward of few head dimensions

    Why: the others fail while they are compiled; 200 on Hopper ends the process.
    Fix: pip install --pre 'flash-attn-4>=4.0.0b36'; attnsel pads to the next width that is built.
    Source: flash_bwd_preprocess.py 4.0.0b20, line 381, flash_bwd_sm90.py, lines 1179 and 1671; every multiple
    of 8 and common pair built for sm90 and sm100 with nvidia-cutlass-dsl 4.6.0.dev0.
    """
    d, e = p.head_dim_qk, p.head_dim_v
    alike, pairs = _BUILT_BY_B20[env.arch == 90]
    if (d, e) in pairs or max(d, e) > alike[-1]:
        return None
    return same_head_dims(p) or limit(p, "head_dim_qk", OneOf(*(width for width in alike if width >= d)))


@rule(
    "FLASH430",
    arch=DATACENTRE,
    fires_on={"gpu": "B200", "head_dim_qk": 256, "softcap": 30.0, **NEW},
    passes={"gpu": "B200", "head_dim_qk": 256, **NEW},
)
def four_wide_on_blackwell(p: AttentionParams, env: Environment) -> Violation | None:
    """On datacentre Blackwell head_dim 256 trains without softcap, sink, window

    Why: its backward is a kernel of its own, which has none of them. In 4.0.0b20 its forward has none either,
    takes no lengths, and gives no deterministic backward.
    Fix: cudnn or triton; or head dimensions up to 128.
    Source: flash_attn/cute/interface.py 4.0.0b36, lines 2454 and 2958 of 4.0.0b36, 887 to 899 and 1841 to
    1846 of 4.0.0b20; sm100_hd256_2cta_fmha_backward.py, lines 60 and 70.
    """
    if max(p.head_dim_qk, p.head_dim_v) != 256:
        return None
    old = env.flash_attn_4 is not None and env.flash_attn_4 < Version.parse("4.0.0b36")
    if not (old or p.is_training):
        return None
    if p.softcap:
        return Violation("softcap", p.softcap, OneOf(0.0))
    if p.softmax_type != "vanilla":
        return Violation("softmax_type", p.softmax_type, OneOf("vanilla"))
    moved = p.causal and not p.bottom_right_diagonal and p.max_seqlen_q != p.max_seqlen_kv
    if p.windowed:
        return Violation("window_size", p.window_size, OneOf((-1, 0 if p.causal else -1)))
    if moved:  # a top-left diagonal is a window from the bottom right
        return Violation("bottom_right_diagonal", False, OneOf(True))
    if old and p.kv_cache == "paged":
        return Violation("kv_cache", "paged", OneOf("none"))
    if old and p.deterministic and p.is_training:
        return Violation("deterministic", True, OneOf(False))
    return None


@rule(
    "FLASH431",
    when=BEFORE_B36,
    arch=DATACENTRE,
    requires={"flash_attn_4": NEWER},
    unknown=True,
    fires_on={"gpu": "B200", "head_dim_qk": 256, "attn_mask_type": "padding", **OLD},
    passes={"gpu": "B200", "head_dim_qk": 256, **OLD},
)
def four_wide_with_lengths(p: AttentionParams, env: Environment) -> bool:
    """On datacentre Blackwell 4.0.0b20 leaves head_dim 256 with lengths open

    Fix: pip install --pre 'flash-attn-4>=4.0.0b36'.
    Source: flash_attn/cute/interface.py 4.0.0b36, lines 887 to 899 of 4.0.0b20 (seqused is refused,
    cu_seqlens is not).
    """
    return max(p.head_dim_qk, p.head_dim_v) == 256 and (p.padding or p.qkv_format == "thd")
