"""FP16/BF16/FP32 attention in cuDNN 9.8 and newer: masks, windows and what their diagonal decides.

From 9.8 on cuDNN can be asked without a GPU, and was: what it answered stands in ``data/asked.csv``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn
from attnsel.params import AttentionParams
from attnsel.rules.api import limit, rules_about
from attnsel.rules.cudnn.before_9_8_masks import anchored_bottom_right, wants_top_left
from attnsel.rules.cudnn.words import WINDOW
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import AtMost, FreeText, OneOf, Requirement

SINCE_9_8 = cudnn(">=9.8.0")
rule = rules_about("cudnn", fp8=False, when=SINCE_9_8)
asked = rules_about("cudnn", fp8=False, when=SINCE_9_8, evidence="library")

BOTTOM_RIGHT = {"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 4096}


def bounded_left(p: AttentionParams) -> bool:
    """A window that ends somewhere left of the diagonal."""
    return p.window_size[0] >= 0


def bounded_right(p: AttentionParams) -> bool:
    """What the frontend calls causal-like: a causal mask type, or a window with a right bound."""
    return p.window_size[1] >= 0


# Masks.


@rule("CUDNN004", fires_on={"attn_mask_type": "arbitrary"})
def mask_tensor(p: AttentionParams, env: Environment) -> Violation | None:
    """An arbitrary mask is not an input of cuDNN attention

    Fix: write it into a post_scale_bias with -inf where attention is forbidden.
    Source: cudnn-frontend 1.23 and 1.28, pygraph.sdpa: the inputs are bias, lengths and bounds, no mask.
    """
    if p.attn_mask_type == "arbitrary":
        return Violation(
            "attn_mask_type", "arbitrary", FreeText("a mask type, or the mask as post_scale_bias")
        )
    return None


@asked(
    "CUDNN010",
    fires_on={"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 4096, "max_seqlen_kv": 1024},
    passes=BOTTOM_RIGHT,
)
def bottom_right_more_queries(p: AttentionParams, env: Environment) -> Violation | None:
    """A bottom-right diagonal takes no more queries than keys

    Why: the first queries would see nothing at all. With padding the lengths are only known on the device,
    and the check does not apply.
    Fix: leave out the queries in front, whose result is empty.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("does not support max_s_q > max_s_kv").
    """
    if p.padding or not anchored_bottom_right(p):
        return None
    return limit(p, "max_seqlen_q", AtMost(p.max_seqlen_kv), "max_seqlen_kv")


@asked(
    "CUDNN011",
    fires_on={**BOTTOM_RIGHT, "core_attention_bias_type": "post_scale_bias"},
    passes=BOTTOM_RIGHT,
)
def bottom_right_bias(p: AttentionParams, env: Environment) -> Violation | None:
    """A bottom-right diagonal takes no bias and no ALiBi

    Fix: with equal lengths and no padding the top-left diagonal is the same one; or write the mask into the
    bias and ask for no_mask.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("only supported with is_bias=False, is_alibi=False,
    is_dropout=False").
    """
    if p.core_attention_bias_type == "no_bias" or not anchored_bottom_right(p):
        return None
    if p.max_seqlen_q == p.max_seqlen_kv and not p.padding:
        return wants_top_left(p)
    return Violation("core_attention_bias_type", p.core_attention_bias_type, OneOf("no_bias"))


@asked("CUDNN012", fires_on={**BOTTOM_RIGHT, "attention_dropout": 0.1}, passes=BOTTOM_RIGHT)
def bottom_right_dropout(p: AttentionParams, env: Environment) -> Violation | None:
    """A bottom-right diagonal takes no dropout

    Fix: with equal lengths and no padding the top-left diagonal is the same one.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("only supported with is_bias=False, is_alibi=False,
    is_dropout=False").
    """
    if not p.dropout or not anchored_bottom_right(p):
        return None
    if p.max_seqlen_q == p.max_seqlen_kv and not p.padding:
        return wants_top_left(p)
    return Violation("attention_dropout", p.attention_dropout, OneOf(0.0))


@asked("CUDNN013", when=cudnn(">=9.8.0,<9.10.0"), fires_on={"max_seqlen_q": 1, "max_seqlen_kv": 4096})
def one_query_causal(p: AttentionParams, env: Environment) -> Violation | None:
    """Up to cuDNN 9.9 a single query takes no causal mask

    Why: one query anchored at the bottom right sees every key, so no_mask says the same.
    Fix: cuDNN 9.10.2 or newer; or no_mask (padding) where the diagonal is anchored at the bottom right.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("decode only mode … not supported with masking").
    """
    if p.max_seqlen_q != 1 or not bounded_right(p):
        return None
    if p.bottom_right and not p.windowed:
        return Violation("attn_mask_type", p.attn_mask_type, OneOf("padding" if p.padding else "no_mask"))
    return Violation("attn_mask_type", p.attn_mask_type, FreeText("no bound at the right"))


# Windows.


@asked("CUDNN014", fires_on={**WINDOW, "max_seqlen_q": 4096, "max_seqlen_kv": 1024}, passes=WINDOW)
def window_more_queries(p: AttentionParams, env: Environment) -> Violation | None:
    """A sliding window takes no more queries than keys

    Why: queries past the last key would look into an empty window. With padding the check does not apply.
    Fix: leave those queries out; their result is empty.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("Sliding window attention is only supported with
    max_s_q <= max_s_kv").
    """
    if p.padding or not bounded_left(p):
        return None
    return limit(p, "max_seqlen_q", AtMost(p.max_seqlen_kv), "max_seqlen_kv")


@asked(
    "CUDNN015",
    when=cudnn(">=9.8.0,<9.10.2"),
    fires_on={"attn_mask_type": "no_mask", "window_size": (128, -1)},
    passes=WINDOW,
)
def window_without_right_bound(p: AttentionParams, env: Environment) -> Violation | None:
    """Below cuDNN 9.10.2 a window bounded on the left needs a right bound too

    Fix: cuDNN 9.10.2 or newer; or a right bound as large as the sequence, which hides nothing.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h.
    """
    if bounded_left(p) and not bounded_right(p):
        required: Requirement = OneOf((p.window_size[0], p.max_seqlen_kv))
        return Violation("window_size", p.window_size, required, "a bound that hides nothing")
    return None


@asked(
    "CUDNN016",
    when=cudnn(">=9.8.0,<9.10.2"),
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={**WINDOW, "core_attention_bias_type": "post_scale_bias"},
    passes=WINDOW,
)
def window_bias(p: AttentionParams, env: Environment) -> bool:
    """Below cuDNN 9.10.2 a window takes no bias

    Fix: cuDNN 9.10.2 or newer; or write the window into the bias.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("bounds are only supported with is_dropout=False,
    is_bias=False").
    """
    return bounded_left(p) and p.has_bias


@asked(
    "CUDNN017",
    when=cudnn(">=9.8.0,<9.10.2"),
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={**WINDOW, "attention_dropout": 0.1},
    passes=WINDOW,
)
def window_dropout(p: AttentionParams, env: Environment) -> bool:
    """Below cuDNN 9.10.2 a window takes no dropout

    Fix: cuDNN 9.10.2 or newer.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("bounds are only supported with is_dropout=False,
    is_bias=False").
    """
    return bounded_left(p) and p.dropout


@asked(
    "CUDNN018",
    when=cudnn(">=9.8.0,<9.10.0"),
    arch=range(90, 100),
    fires_on={"attn_mask_type": "causal_bottom_right", **WINDOW},
    passes={**BOTTOM_RIGHT, **WINDOW},
)
def window_bottom_right_square(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper up to cuDNN 9.9 a square bottom-right window is refused

    Why: with equal lengths both anchors are the same diagonal unless sequences are padded, and the library
    has no kernel for the second spelling.
    Fix: cuDNN 9.10.2 or newer; without padding, the top-left diagonal.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("this specific combination of s_q, s_kv, and
    left_bound + right_bound + bottom right").
    """
    if bounded_left(p) and anchored_bottom_right(p) and p.max_seqlen_q == p.max_seqlen_kv:
        return wants_top_left(p)
    return None


@asked(
    "CUDNN019",
    when=cudnn("==9.14.0"),
    requires={"max_seqlen_kv": AtMost(1024)},
    fires_on={"attn_mask_type": "no_mask", "window_size": (128, -1)},
    passes=WINDOW,
)
def window_in_9_14_0(p: AttentionParams, env: Environment) -> bool:
    """In cuDNN 9.14.0 a window without a right bound ends at 1024 keys

    Why: a bug of that release; the frontend blocks it.
    Fix: another release of cuDNN; or a right bound as large as the sequence, which hides nothing.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("cuDNN 9.14.0 has a known bug with non-causal + s_kv
    > 1024 + sliding window").
    """
    return bounded_left(p) and not bounded_right(p)
