"""FP16/BF16 attention in cuDNN below 9.8: devices, element types, lengths and head dimensions.

A cuDNN this old cannot be asked without a GPU. What is known comes from two places by the same maker,
TransformerEngine's table and the checks of cudnn-frontend, each at a named release. Where they agree, a
rule refuses; where only one of them refuses a call, the page says which was followed, and the
verdict is Unknown when there is no ground to prefer either.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import Version, cudnn
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about, same_head_dims
from attnsel.rules.cudnn.words import AMPERE_ADA, ANY_BLACKWELL, HOPPER, steps_are_shorter
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import NEWER, AtLeast, AtMost, EqualTo, Multiple, OneOf

rule = rules_about("cudnn", fp8=False, when=cudnn("<9.8.0"))


# The library and the device.


@rule(
    "CUDNN101",
    when=(),
    requires={"cudnn": AtLeast(Version(8, 9))},
    fires_on={"cudnn": "8.8.1"},
    passes={"cudnn": "8.9.7"},
)
def library_too_old(p: AttentionParams, env: Environment) -> None:
    """Fused attention of any length begins with cuDNN 8.9.0

    Why: earlier releases know fused attention up to 512 tokens only, through another interface.
    Fix: install a newer cuDNN; from 9.8 on almost every feature is there.
    Source: TransformerEngine v2.18, fused_attn.cpp, the override "FP16/BF16 fused attention is supported by
    cuDNN 8.9.0+".
    """


@rule(
    "CUDNN102",
    when=cudnn(">=8.9.0,<8.9.3"),
    arch=AMPERE_ADA,
    requires={"arch": OneOf(80, 90)},
    fires_on={"gpu": "RTX 3090"},
    passes={"gpu": "A100"},
)
def first_architectures(p: AttentionParams, env: Environment) -> None:
    """Below cuDNN 8.9.3 only sm80 and sm90 have attention kernels

    Fix: cuDNN 8.9.3 or newer brings the other Ampere and Ada cards.
    Source: TransformerEngine v2.18, fused_attn.cpp, comment "architecture"; v2.3 says the same.
    """


@rule(
    "CUDNN103",
    when=cudnn(">=8.9.0,<8.9.3"),
    arch={80, 90},
    requires={"cudnn": NEWER},
    unknown=True,
    fires_on={},
    passes={"dtype": "fp8_e4m3"},
)
def frontend_starts_at_8_9_3(p: AttentionParams, env: Environment) -> None:
    """For cuDNN 8.9.0 to 8.9.2 TransformerEngine says yes and the frontend no

    Why: TransformerEngine takes these releases on sm80 and sm90. The frontend, which is what builds a plan,
    required 8.9.3 at its release 1.10 and has no such check in 1.23.
    Fix: cuDNN 8.9.3 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, "architecture"; cudnn-frontend v1.10.0,
    scaled_dot_product_flash_attention.h ("requires cudnn version 8.9.3 and above") and test_mhas.py.
    """


@rule(
    "CUDNN104",
    when=(),
    arch=ANY_BLACKWELL,
    requires={"cudnn": AtLeast(Version(9, 7))},
    fires_on={"cudnn": "9.6.0"},
    passes={"cudnn": "9.7.0"},
)
def blackwell_from_9_7(p: AttentionParams, env: Environment) -> None:
    """Blackwell needs cuDNN 9.7.0

    Why: older releases carry no kernels for it.
    Fix: install cuDNN 9.7.0 or newer (9.8 can be checked against the library).
    Source: TransformerEngine v2.18, fused_attn.cpp, "architecture"; cudnn-frontend v1.10.0 release notes name
    9.7.0 as the first backend with Blackwell features.
    """


@rule(
    "CUDNN105",
    when=cudnn(">=9.7.0,<9.8.0"),
    arch=range(101, 130),
    requires={"cudnn": NEWER},
    unknown=True,
    fires_on={},
    passes={"dtype": "fp8_e4m3"},
)
def later_blackwell_on_9_7(p: AttentionParams, env: Environment) -> None:
    """On cuDNN 9.7 only sm100 is known to run; later Blackwell chips are not

    Why: TransformerEngine accepts sm103 like sm100, and refuses sm120 until 9.18.1 although cuDNN 9.8 itself
    accepts it. Nobody could ask 9.7 without a GPU, and CUDA 12.8, its toolkit, predates sm103 and sm121.
    Fix: cuDNN 9.8 or newer, whose answers are checked.
    Source: TransformerEngine v2.18, fused_attn.cpp, "architecture" and the sm_arch_ == 120 override (PR
    #2775).
    """


@rule("CUDNN106", requires={"arch": AtLeast(80)}, fires_on={"gpu": "T4"}, passes={"gpu": "A100"})
def ampere_or_newer(p: AttentionParams, env: Environment) -> None:
    """Fused attention needs an Ampere GPU (sm80) or newer

    Fix: another candidate: no cuDNN release supports older GPUs.
    Source: cudnn-frontend v1.10.0, scaled_dot_product_flash_attention.h ("requires Ampere and above"), and
    cudnn-frontend#116; TransformerEngine d0067d0, utils.py line 569.
    """


# Element type, heads, lengths.


@rule(
    "CUDNN107",
    requires={"dtype": OneOf("bf16", "fp16")},
    evidence="documented",
    fires_on={"dtype": "fp32"},
)
def half_types_only(p: AttentionParams, env: Environment) -> None:
    """The tensors must be float16 or bfloat16

    Fix: cast q, k and v, or run under autocast.
    Source: cudnn-frontend v1.10.0, docs/operations/Attention.md, "Limitations"; TransformerEngine d0067d0,
    utils.py line 628.
    """


@rule(
    "CUDNN108",
    when=cudnn("<8.9.7"),
    requires={"num_gqa_groups": EqualTo("num_heads")},
    evidence="documented",
    fires_on={"num_gqa_groups": 4},
)
def grouped_heads(p: AttentionParams, env: Environment) -> None:
    """Grouped-query attention needs cuDNN 8.9.7

    Fix: a newer cuDNN, or repeat the key and value heads.
    Source: cuDNN 8.9.7 release notes (GQA added); TransformerEngine v2.18, fused_attn.cpp, "number of heads".
    """


@rule(
    "CUDNN109",
    when=cudnn("<9.0.0"),
    requires={"max_seqlen_q": Multiple(64)},
    fires_on={"max_seqlen_q": 16534},
)
def query_length_of_64(p: AttentionParams, env: Environment) -> bool:
    """Below cuDNN 9.0.0 the query length must be a multiple of 64

    Why: the kernels work on whole tiles of 64 rows (inferred).
    Fix: pad the queries, or use cuDNN 9.0.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, "sequence length"; TransformerEngine#1051. The frontend
    is milder for 8.9.7 alone: there it refuses odd lengths only with padding or dropout (v1.10.0, "For cuDNN
    version below 9.0.0"). The stricter one is followed: padding is exact and cheap. Where ranks exchange
    keys it is their steps' lengths that count (CP020, CP021).
    """
    return not steps_are_shorter(p)


@rule(
    "CUDNN110",
    when=cudnn("<9.0.0"),
    requires={"max_seqlen_kv": Multiple(64)},
    fires_on={"max_seqlen_kv": 2049},
)
def key_length_of_64(p: AttentionParams, env: Environment) -> bool:
    """Below cuDNN 9.0.0 the key length must be a multiple of 64

    Why: as for queries (CUDNN109): whole tiles of 64 only.
    Fix: pad keys and values behind a mask, or use cuDNN 9.0.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, "sequence length"; cudnn-frontend v1.10.0 says it for
    s_kv below 8.9.7, and below 9.0.0 with padding or dropout.
    """
    return not steps_are_shorter(p)


# Head dimensions.


@rule("CUDNN111", requires={"head_dim_qk": Multiple(8)}, evidence="documented", fires_on={"head_dim_qk": 100})
def head_dim_qk_of_8(p: AttentionParams, env: Environment) -> None:
    """The head dimension of queries and keys must be a multiple of 8

    Fix: pad q and k with zeros: scores stay the same (keep the softmax scale of the original dimension).
    Source: cudnn-frontend v1.10.0, docs/operations/Attention.md, "Limitations"; TransformerEngine v2.18,
    fused_attn.cpp, "multiples of 8".
    """


@rule("CUDNN112", requires={"head_dim_v": Multiple(8)}, evidence="documented", fires_on={"head_dim_v": 100})
def head_dim_v_of_8(p: AttentionParams, env: Environment) -> None:
    """The head dimension of values must be a multiple of 8

    Fix: pad v with zeros and cut the output.
    Source: cudnn-frontend v1.10.0, docs/operations/Attention.md, "Limitations"; TransformerEngine v2.18,
    fused_attn.cpp, "multiples of 8".
    """


@rule("CUDNN113", when=cudnn("<8.9.6"), requires={"head_dim_qk": Multiple(64)}, fires_on={"head_dim_qk": 96})
def head_dim_of_64(p: AttentionParams, env: Environment) -> None:
    """Below cuDNN 8.9.6 the head dimension must be a multiple of 64

    Fix: pad to 64 or 128, or use cuDNN 8.9.6 or newer.
    Source: cudnn-frontend v1.1.2 to v1.10.0, scaled_dot_product_flash_attention.h ("d not a multiple of 64").
    TransformerEngine asks for a multiple of 8 at every version; the frontend is followed, since it refuses to
    build such a graph.
    """


@rule("CUDNN114", when=cudnn("<8.9.6"), fires_on={"head_dim_v": 64})
def equal_head_dims(p: AttentionParams, env: Environment) -> Violation | None:
    """Below cuDNN 8.9.6 values must have the head dimension of the keys

    Fix: cuDNN 8.9.6 or newer, or pad the smaller of the two with zeros.
    Source: cudnn-frontend v1.3.0 to v1.8.0, test_mhas.py ("d_qk != d_v is only supported on 8.9.6 onwards").
    TransformerEngine has no such clause; the makers' own tests are followed.
    """
    return same_head_dims(p)


@rule(
    "CUDNN115",
    arch=AMPERE_ADA,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 256, "is_training": False},
)
def head_dim_ampere(p: AttentionParams, env: Environment) -> None:
    """On Ampere and Ada the head dimension is at most 128

    Why: the kernels of these releases stop there; 9.10.2 brought a general engine, for the forward pass only.
    Fix: for inference cuDNN 9.10.2 or newer; for training another candidate.
    Source: TransformerEngine v2.18, fused_attn.cpp, "head dimension"; TransformerEngine#1610, #1115;
    cudnn-frontend 1.32, sdpa_support_surface.h (9.9 or below on ampere).
    """


@rule(
    "CUDNN116",
    when=cudnn("<9.1.0"),
    arch=HOPPER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 192, "head_dim_v": 128, "is_training": False},
)
def head_dim_hopper_128(p: AttentionParams, env: Environment) -> None:
    """On Hopper the head dimension is at most 128 below cuDNN 9.1.0

    Fix: cuDNN 9.1.0 for inference up to 256; training above 128 needs 9.5.0 (CUDNN204).
    Source: TransformerEngine v2.18, fused_attn.cpp ("9.1: <= 256 + Hopper + fprop"). TransformerEngine v2.3
    and cudnn-frontend v1.10.0 put the edge at 9.0.0; the later, narrower statement is followed.
    """


@rule(
    "CUDNN117",
    when=cudnn(">=9.1.0,<9.8.0"),
    arch=HOPPER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(256)},
    fires_on={"head_dim_qk": 512, "is_training": False},
    passes={"head_dim_qk": 256, "is_training": False},
)
def head_dim_hopper_256(p: AttentionParams, env: Environment) -> None:
    """On Hopper the head dimension is at most 256

    Fix: for inference cuDNN 9.10.2 or newer takes any multiple of 8; for training another candidate.
    Source: TransformerEngine v2.18, fused_attn.cpp, "head dimension"; cudnn-frontend 1.32,
    sdpa_support_surface.h (9.9 or below on hopper).
    """


@rule(
    "CUDNN118",
    arch=ANY_BLACKWELL,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 192, "head_dim_v": 128},
)
def head_dim_blackwell(p: AttentionParams, env: Environment) -> None:
    """On Blackwell the head dimension is at most 128 in cuDNN 9.7

    Fix: cuDNN 9.9 for inference, 9.11 for training with 192/128.
    Source: TransformerEngine v2.18, fused_attn.cpp, "head dimension"; cudnn-frontend 1.32,
    sdpa_support_surface.h (9.8 or below on blackwell).
    """
