"""FP16/BF16 attention in cuDNN below 9.8: masks, windows, and what happens to the scores.

Sources as in ``before_9_8_forward``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.cudnn.words import AMPERE_ADA, ANY_BLACKWELL, HOPPER, WINDOW
from attnsel.verdicts.reasons import Unknown, Violation
from attnsel.verdicts.requirements import AtMostField, EqualTo, FreeText, Multiple, OneOf, Requirement

rule = rules_about("cudnn", fp8=False, when=cudnn("<9.8.0"))

BOTTOM_RIGHT = {"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024}


def anchored_bottom_right(p: AttentionParams) -> bool:
    """The frontend's bottom-right alignment: a right bound whose diagonal ends in the last corner."""
    return p.bottom_right or (p.windowed and p.window_size[1] >= 0 and p.bottom_right_diagonal is True)


def wants_top_left(p: AttentionParams) -> Violation:
    """Objects to the bottom-right anchor; for square, unpadded attention both anchors are the same."""
    if not p.causal:
        return Violation("bottom_right_diagonal", True, OneOf(False))
    same = p.max_seqlen_q == p.max_seqlen_kv and not p.padding
    required: Requirement = OneOf("causal") if same else FreeText("a diagonal anchored at the top left")
    return Violation("attn_mask_type", p.attn_mask_type, required)


# Masks.


@rule("CUDNN401", fires_on={"attn_mask_type": "arbitrary"})
def no_arbitrary_mask(p: AttentionParams, env: Environment) -> Violation | None:
    """An arbitrary mask is not an input of cuDNN attention

    Fix: write it into a post_scale_bias with -inf where attention is forbidden.
    Source: cudnn-frontend v1.10.0, docs/operations/Attention.md, "Tensors" (no mask tensor);
    TransformerEngine d0067d0, utils.py line 1300.
    """
    if p.attn_mask_type == "arbitrary":
        return Violation(
            "attn_mask_type", "arbitrary", FreeText("a mask type, or the mask as post_scale_bias")
        )
    return None


@rule("CUDNN402", when=cudnn("<8.9.6"), fires_on={"attn_mask_type": "no_mask"})
def only_causal(p: AttentionParams, env: Environment) -> Violation | None:
    """Below cuDNN 8.9.6 the mask must be causal

    Fix: cuDNN 8.9.6 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, "pre-8.9.6: causal"; cudnn-frontend v1.10.0 ("Only causal
    mask is supported in cudnn versions below 8.9.6").
    """
    if p.attn_mask_type != "causal":
        return Violation("attn_mask_type", p.attn_mask_type, FreeText("causal"))
    return None


@rule("CUDNN403", when=cudnn(">=8.9.6,<9.3.0"), fires_on=BOTTOM_RIGHT)
def bottom_right_from_9_3(p: AttentionParams, env: Environment) -> Violation | None:
    """A bottom-right causal mask needs cuDNN 9.3.0

    Fix: cuDNN 9.3.0 or newer; with equal lengths and no padding plain causal is the same mask.
    Source: TransformerEngine#1276; TransformerEngine v2.18, fused_attn.cpp ("9.3: adds ...
    causal_bottom_right"); cudnn-frontend v1.10.0 ("Causal bottom right masking requires cudnn 9.3.0").
    """
    return wants_top_left(p) if p.bottom_right else None


@rule(
    "CUDNN404",
    when=cudnn(">=9.3.0,<9.6.0"),
    fires_on={"attn_mask_type": "padding_causal_bottom_right"},
    passes=BOTTOM_RIGHT,
)
def padded_bottom_right(p: AttentionParams, env: Environment) -> Violation | None:
    """Bottom-right causal with padding needs cuDNN 9.6.0

    Fix: cuDNN 9.6.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp ("9.6: adds ... padding_causal_bottom_right"; its row for
    paged caches says 9.5); cudnn-frontend v1.5.2 to v1.8.0 refuse the pair, v1.9.0 (for 9.6) takes it.
    """
    if p.bottom_right and p.padding:
        return Violation("attn_mask_type", p.attn_mask_type, FreeText("causal_bottom_right, without padding"))
    return None


@rule(
    "CUDNN405",
    when=cudnn(">=9.3.0,<9.6.0"),
    requires={"max_seqlen_q": Multiple(64)},
    fires_on={"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1000, "max_seqlen_kv": 2048},
    passes=BOTTOM_RIGHT,
)
def bottom_right_query_length(p: AttentionParams, env: Environment) -> bool:
    """Below cuDNN 9.6.0 bottom-right causal needs a query length multiple of 64

    Fix: pad the queries at the front, or cuDNN 9.6.0.
    Source: cudnn-frontend v1.10.0 to 1.32 ("multiple of 64 ... for cudnn version below 9.6.0").
    TransformerEngine v2.18 keeps the clause until 9.7.0; the frontend, which builds the plan, is followed.
    """
    return p.bottom_right


@rule(
    "CUDNN406",
    when=cudnn(">=9.3.0,<9.6.0"),
    requires={"max_seqlen_kv": Multiple(64)},
    fires_on={"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 2000},
    passes=BOTTOM_RIGHT,
)
def bottom_right_key_length(p: AttentionParams, env: Environment) -> bool:
    """Below cuDNN 9.6.0 bottom-right causal needs a key length multiple of 64

    Fix: pad keys and values at the front behind a bias, or cuDNN 9.6.0.
    Source: as for queries (CUDNN405): cudnn-frontend v1.10.0 to 1.32; TransformerEngine until 9.7.0.
    """
    return p.bottom_right


@rule(
    "CUDNN407",
    when=cudnn(">=9.3.0,<9.8.0"),
    requires={"max_seqlen_q": AtMostField("max_seqlen_kv")},
    fires_on={"attn_mask_type": "causal_bottom_right", "max_seqlen_kv": 1024},
    passes=BOTTOM_RIGHT,
)
def bottom_right_more_queries(p: AttentionParams, env: Environment) -> bool:
    """A bottom-right diagonal cannot have more queries than keys

    Why: the first queries would see no key. Beside padding the true lengths decide, and 9.7 takes it.
    Fix: cut those queries off.
    Source: cudnn-frontend v1.5.2 to v1.10.0 ("Bottom right causal mask does not support s_q > s_kv"), 1.32
    unless padded; TransformerEngine v2.18, fused_attn.cpp, "mask type" (lifted with padding at 9.7.0).
    """
    lifted = p.padding and env.cudnn is not None and env.cudnn >= (9, 7, 0)
    return anchored_bottom_right(p) and not lifted


@rule(
    "CUDNN408",
    when=cudnn(">=9.3.0,<9.8.0"),
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={"attn_mask_type": "causal_bottom_right", "core_attention_bias_type": "alibi"},
    passes=BOTTOM_RIGHT,
)
def bottom_right_bias(p: AttentionParams, env: Environment) -> bool:
    """A bottom-right diagonal takes no bias and no ALiBi

    Fix: write the mask into the bias; with equal lengths and no padding plain causal is the same mask.
    Source: cudnn-frontend v1.5.2 to 1.32 ("Bottom right causal mask is only supported with is_bias=False");
    TransformerEngine v2.18, fused_attn.cpp, "mask type", until 9.6 (from 9.7 on it lets the pair pass; the
    frontend is followed).
    """
    return anchored_bottom_right(p)


@rule(
    "CUDNN409",
    when=cudnn(">=9.3.0,<9.8.0"),
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={"attn_mask_type": "causal_bottom_right", "attention_dropout": 0.1},
    passes=BOTTOM_RIGHT,
)
def bottom_right_dropout(p: AttentionParams, env: Environment) -> bool:
    """A bottom-right diagonal takes no dropout

    Fix: no dropout; with equal lengths and no padding plain causal is the same mask.
    Source: as for a bias (CUDNN408): cudnn-frontend v1.5.2 to 1.32 (is_dropout=False); TransformerEngine
    until 9.6.
    """
    return anchored_bottom_right(p) and p.dropout


@rule(
    "CUDNN410",
    fires_on={"max_seqlen_q": 1, "max_seqlen_kv": 4096, "is_training": False},
    passes={"max_seqlen_q": 1, "max_seqlen_kv": 4096, "is_training": False, "attn_mask_type": "no_mask"},
)
def single_query_causal(p: AttentionParams, env: Environment) -> Violation | None:
    """A single query takes no causal mask

    Why: the decode kernel of these releases has no mask.
    Fix: bottom right, one query sees every key: ask for no_mask (or padding), which is the same.
    Source: cudnn-frontend 1.23 and 1.32, sdpa_support_surface.h ("decode only mode ... not supported with
    masking ... for backend version 9.9 or below"). Frontends of the time and TransformerEngine do not say it;
    the frontend that attnsel runs with does.
    """
    if p.max_seqlen_q != 1 or not (p.causal or p.window_size[1] >= 0):
        return None
    if not p.causal:
        return Violation("window_size", p.window_size, OneOf((p.window_size[0], -1)))
    required: Requirement = FreeText("no_mask or padding: a right bound needs more than one query")
    if p.bottom_right and not p.windowed:
        required = OneOf("padding" if p.padding else "no_mask")
    return Violation("attn_mask_type", p.attn_mask_type, required)


# Windows.


@rule("CUDNN411", when=cudnn("<9.2.0"), requires={"window_size": OneOf((-1, -1))}, fires_on=WINDOW)
def window_from_9_2(p: AttentionParams, env: Environment) -> bool:
    """A sliding window needs cuDNN 9.2.0

    Fix: cuDNN 9.2.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, "pre-9.2: full attn, causal"; cudnn-frontend v1.5.2 to
    v1.10.0 ("For cuDNN version below 9.2.0, sliding window attention is not supported").
    """
    return p.windowed


@rule(
    "CUDNN412",
    when=cudnn(">=9.2.0,<9.6.0"),
    fires_on={**WINDOW, "attn_mask_type": "padding_causal"},
    passes=WINDOW,
)
def window_with_padding(p: AttentionParams, env: Environment) -> Violation | None:
    """Below cuDNN 9.6.0 a window takes no padding, hence no packed sequences

    Fix: cuDNN 9.6.0 or newer.
    Source: cudnn-frontend v1.5.2 to v1.8.0 ("Sliding window attention is only supported with
    padding_mask=False"); TransformerEngine v2.18, fused_attn.cpp ("9.2: SWA (left, 0) + top-left diagonal").
    """
    if p.windowed and p.padding:
        return Violation("attn_mask_type", p.attn_mask_type, FreeText("causal, without padding"))
    return None


@rule(
    "CUDNN413",
    when=cudnn(">=9.2.0,<9.6.0"),
    fires_on={**WINDOW, "attn_mask_type": "causal_bottom_right"},
    passes=WINDOW,
)
def window_bottom_right(p: AttentionParams, env: Environment) -> Violation | None:
    """Below cuDNN 9.6.0 a window must hang on the top-left diagonal

    Fix: cuDNN 9.6.0 or newer; with equal lengths both diagonals are the same, so say causal.
    Source: cudnn-frontend v1.5.2 to v1.8.0 (causal_mask=True, which excludes bottom right); v1.9.0, for 9.6,
    adds the pair. TransformerEngine v2.18 takes causal_bottom_right with equal lengths, because it is plain
    causal then; the frontend is followed, and saying causal is the way out.
    """
    return wants_top_left(p) if p.windowed and anchored_bottom_right(p) else None


@rule(
    "CUDNN414",
    when=cudnn(">=9.2.0,<9.6.0"),
    fires_on={"window_size": (128, 128), "attn_mask_type": "no_mask"},
    passes=WINDOW,
)
def window_to_the_right(p: AttentionParams, env: Environment) -> Violation | None:
    """A window that reaches past the diagonal needs cuDNN 9.6.0

    Fix: cuDNN 9.6.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, "sliding window" (right bound 0 only until 9.6). The
    frontend has an argument for it since v1.10.0, made for 9.7, and names no version.
    """
    if p.window_size[1] > 0:
        return Violation("window_size", p.window_size, FreeText("a right bound of 0"))
    return None


@rule(
    "CUDNN415",
    when=cudnn(">=9.2.0,<9.8.0"),
    fires_on={"window_size": (128, -1), "attn_mask_type": "no_mask"},
    passes=WINDOW,
)
def window_without_right_bound(p: AttentionParams, env: Environment) -> Violation | None:
    """A window bounded on the left must be bounded on the right too

    Fix: a causal mask, or from cuDNN 9.6.0 a right bound as long as the sequence, which bounds nothing.
    Source: cudnn-frontend 1.23 and 1.32 (below 9.10.2 a left bound needs causal-like masking, which means a
    right bound). TransformerEngine v2.18 allows the open side from 9.6; the frontend would refuse the graph.
    """
    left, right = p.window_size
    if left >= 0 and right < 0:
        return Violation("window_size", p.window_size, OneOf((left, p.max_seqlen_kv)))
    return None


@rule(
    "CUDNN416",
    when=cudnn(">=9.2.0,<9.8.0"),
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={**WINDOW, "attention_dropout": 0.1},
    passes=WINDOW,
)
def window_with_dropout(p: AttentionParams, env: Environment) -> bool:
    """A window takes no dropout

    Fix: no dropout, or cuDNN 9.10.2, where the frontend lifts it.
    Source: cudnn-frontend v1.5.2 to v1.10.0, and 1.32 for versions below 9.10.2; TransformerEngine d0067d0,
    utils.py line 1344.
    """
    return p.windowed and p.dropout


@rule(
    "CUDNN417",
    when=cudnn(">=9.2.0,<9.8.0"),
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={**WINDOW, "core_attention_bias_type": "post_scale_bias"},
    passes=WINDOW,
)
def window_with_bias(p: AttentionParams, env: Environment) -> bool:
    """A window takes no bias and no ALiBi

    Fix: write the window into the bias.
    Source: TransformerEngine v2.18, fused_attn.cpp, "sliding window"; cudnn-frontend 1.32 for versions below
    9.10.2 (a bias tensor; it says nothing of ALiBi, for which TransformerEngine is followed).
    """
    return p.windowed


@rule(
    "CUDNN418",
    when=cudnn(">=9.2.0,<9.8.0"),
    requires={"max_seqlen_q": AtMostField("max_seqlen_kv")},
    fires_on={**WINDOW, "max_seqlen_kv": 1024},
    passes=WINDOW,
)
def window_more_queries(p: AttentionParams, env: Environment) -> bool:
    """A window cannot have more queries than keys

    Fix: cut off the queries that see no key.
    Source: cudnn-frontend v1.7.0 to v1.10.0 ("Sliding window attention is only supported with s_q <= s_kv");
    TransformerEngine d0067d0, utils.py line 1363.
    """
    return p.windowed


@rule(
    "CUDNN419",
    when=cudnn(">=9.6.0,<9.8.0"),
    arch=HOPPER,
    fires_on={**WINDOW, "attn_mask_type": "causal_bottom_right"},
    passes={**WINDOW, "attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 4096},
)
def square_window_hopper(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper a bottom-right window needs more keys than queries

    Fix: with equal lengths the top-left diagonal is the same: causal, or bottom_right_diagonal=False.
    Source: cudnn-frontend 1.23 and 1.32, sdpa_support_surface.h ("On Hopper architecture, this specific
    combination of s_q, s_kv ... 9.9 or below"). TransformerEngine has no such clause; the frontend refuses
    the graph.
    """
    square = p.max_seqlen_q == p.max_seqlen_kv and p.window_size[0] >= 0
    return wants_top_left(p) if p.windowed and square and anchored_bottom_right(p) else None


@rule(
    "CUDNN420",
    when=cudnn("==9.7.0"),
    arch=ANY_BLACKWELL,
    requires={"max_seqlen_q": EqualTo("max_seqlen_kv")},
    fires_on={**WINDOW, "attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 4096},
    passes={**WINDOW, "attn_mask_type": "causal_bottom_right"},
)
def cross_window_blackwell(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell cuDNN 9.7.0 takes bottom-right windows with equal lengths only

    Fix: cuDNN 9.7.1 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, "fix bug for BRCM + cross-attention on sm100".
    """
    return p.windowed and anchored_bottom_right(p)


# Bias.


@rule(
    "CUDNN119",
    when=cudnn("<8.9.6"),
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={"core_attention_bias_type": "post_scale_bias"},
)
def bias_from_8_9_6(p: AttentionParams, env: Environment) -> None:
    """A bias needs cuDNN 8.9.6

    Fix: a newer cuDNN.
    Source: TransformerEngine v2.18, fused_attn.cpp, "bias type"; cudnn-frontend v1.10.0 ("Bias mask is not
    supported below cudnn version 8.9.6"), which holds ALiBi to the same version.
    """


@rule(
    "CUDNN120",
    when=cudnn(">=8.9.6,<9.0.0"),
    arch=AMPERE_ADA,
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={"core_attention_bias_type": "post_scale_bias"},
)
def bias_before_hopper(p: AttentionParams, env: Environment) -> bool:
    """Before Hopper a bias needs cuDNN 9.0.0

    Fix: cuDNN 9.0.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, "bias type"; cudnn-frontend v1.10.0 ("Post scale Bias
    mask is not supported below Hopper").
    """
    return p.has_bias


@rule(
    "CUDNN121",
    requires={"core_attention_bias_type": OneOf("post_scale_bias")},
    fires_on={"core_attention_bias_type": "pre_scale_bias"},
    passes={"core_attention_bias_type": "post_scale_bias"},
)
def no_pre_scale_bias(p: AttentionParams, env: Environment) -> bool:
    """A bias is added after the softmax scale, never before it

    Fix: multiply the bias by the softmax scale and pass it as post_scale_bias: the same scores.
    Source: TransformerEngine v2.18, fused_attn.cpp, "bias type": no row has pre_scale_bias.
    """
    return p.core_attention_bias_type == "pre_scale_bias"


@rule(
    "CUDNN122",
    when=cudnn(">=8.9.6,<9.8.0"),
    fires_on={"core_attention_bias_type": "post_scale_bias", "attn_mask_type": "padding"},
    passes={"core_attention_bias_type": "post_scale_bias", "attn_mask_type": "no_mask"},
)
def bias_with_padding(p: AttentionParams, env: Environment) -> Unknown | None:
    """Nobody agrees on a bias together with padding

    Why: TransformerEngine refuses the pair at every version. The frontend allows it forward from 8.9.6 and
    backward from 9.5.0 (below that, CUDNN207 refuses the bias gradient).
    Fix: write the padding into the bias as -inf, with an unpadded mask type.
    Source: TransformerEngine v2.18, fused_attn.cpp, "bias + mask combination"; cudnn-frontend v1.10.0 ("Bias
    + padding or causal mask is only supported in 8.9.6 and above").
    """
    if p.has_bias and p.padding:
        return Unknown("attn_mask_type", p.attn_mask_type, FreeText("no padding beside a bias"))
    return None


@rule(
    "CUDNN123",
    when=cudnn(">=8.9.6,<9.8.0"),
    arch=AMPERE_ADA,
    requires={"core_attention_bias_type": OneOf("no_bias")},
    unknown=True,
    fires_on={"core_attention_bias_type": "alibi"},
)
def alibi_before_hopper(p: AttentionParams, env: Environment) -> bool:
    """ALiBi before Hopper: TransformerEngine says no, the frontend tests it

    Why: TransformerEngine gives ALiBi to sm90 and newer only; the frontend has no such check and its tests
    ran ALiBi on Ampere.
    Fix: pass the ALiBi values as a post_scale_bias (stores them), or another candidate.
    Source: TransformerEngine v2.18, fused_attn.cpp, "bias type"; cudnn-frontend v1.8.0, test_mhas.py.
    """
    return p.core_attention_bias_type == "alibi"


@rule(
    "CUDNN124",
    when=cudnn(">=8.9.6,<9.8.0"),
    fires_on={"core_attention_bias_type": "alibi", "attn_mask_type": "no_mask"},
    passes={"core_attention_bias_type": "alibi"},
)
def alibi_is_causal(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """ALiBi needs a causal mask

    Why: the kernel computes the distance below the diagonal only. With padding_causal the frontend builds it
    and TransformerEngine refuses it, so that case is unknown.
    Fix: a causal mask, or the ALiBi values as post_scale_bias.
    Source: cudnn-frontend v1.10.0 ("When alibi mask is used, diagonal_band_right_bound needs to be set to
    0"); TransformerEngine v2.18, fused_attn.cpp, "bias type".
    """
    if p.core_attention_bias_type != "alibi" or p.attn_mask_type == "causal" or p.bottom_right:
        return None  # the bottom-right masks: CUDNN408
    finding = Unknown if p.causal else Violation
    return finding("attn_mask_type", p.attn_mask_type, OneOf("causal"))


@rule(
    "CUDNN125",
    requires={"alibi_slopes_shape": OneOf(None)},
    fires_on={"core_attention_bias_type": "alibi", "alibi_slopes_shape": (16,)},
    passes={"core_attention_bias_type": "alibi"},
)
def alibi_slopes(p: AttentionParams, env: Environment) -> None:
    """ALiBi slopes cannot be given: they are computed from the number of heads

    Fix: leave the slopes out if they are the usual ones, else pass the values as post_scale_bias.
    Source: cudnn-frontend v1.10.0, scaled_dot_product_flash_attention.h (slopes made from h_q);
    TransformerEngine d0067d0, utils.py line 1425, turns explicit slopes into a bias.
    """


# Softmax.


@rule("CUDNN126", requires={"softmax_type": OneOf("vanilla")}, fires_on={"softmax_type": "learnable"})
def attention_sinks(p: AttentionParams, env: Environment) -> None:
    """Attention sinks need cuDNN 9.13.0

    Fix: cuDNN 9.13.0 or newer.
    Source: cudnn-frontend 1.32 (sink token), and libcudnn asked (CUDNN024). TransformerEngine v2.18,
    fused_attn.cpp, "softmax type", waits for 9.13.1.
    """


@rule("CUDNN127", requires={"return_max_logit": OneOf(False)}, fires_on={"return_max_logit": True})
def maximal_logit(p: AttentionParams, env: Environment) -> None:
    """The largest score is returned from cuDNN 9.13.0 on

    Fix: cuDNN 9.13.0 or newer, or compute it beside the call.
    Source: libcudnn asked (CUDNN141). TransformerEngine v2.18, fused_attn.cpp, "max_logit", waits for 9.21.0.
    """


@rule("CUDNN128", requires={"softcap": OneOf(0.0)}, fires_on={"softcap": 30.0})
def soft_capping(p: AttentionParams, env: Environment) -> None:
    """Soft-capped scores are not built here

    Why: the frontend can express tanh as a score modifier, but then refuses every mask beside it.
    Fix: another candidate.
    Source: cudnn-frontend v1.10.0, scaled_dot_product_flash_attention.h ("Attention score mod enabled and
    hence other subgraphs are disabled").
    """
