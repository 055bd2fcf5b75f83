"""What transformers passes to F.scaled_dot_product_attention: a mask or is_causal, kv heads repeated."""

from __future__ import annotations

from typing import Any, NamedTuple

from attnsel.dispatchers.transformers.releases import source
from attnsel.dispatchers.transformers.switches import Asked
from attnsel.environment import Environment
from attnsel.params import AttentionParams

_ENABLED = ", enable_gqa=True"


class SdpaCall(NamedTuple):
    """The call, as a question about F.sdpa; ``notes``: what became of the model's question on the way."""

    params: AttentionParams
    text: str
    notes: tuple[str, ...]


def sdpa_call(p: AttentionParams, env: Environment, asked: Asked) -> SdpaCall:
    """Source: sdpa_attention_forward and sdpa_mask (see ``releases``)."""
    masked, why = _mask(p, asked)
    causal = p.causal and not masked and p.max_seqlen_q > 1
    notes = [f"{why} [{source('mask', asked.release)}]"] if why else []
    changes, heads, note = _heads(p, env, asked, masked)
    if note:
        notes.append(f"{note} [{source('heads', asked.release)}]")
    if asked.release < (4, 56):
        notes.append("q, k and v are copied where they are not contiguous")
    mask = "attn_mask=bool [b, 1, s_q, s_kv]" if masked else "attn_mask=None"
    kind: dict[str, Any] = {"attn_mask_type": "causal" if causal else "no_mask"}
    if masked and asked.release >= (4, 53):
        kind = {"attn_mask_type": "arbitrary"}
    elif masked:
        mask = "attn_mask=float [b, 1, s_q, s_kv]"
        kind |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": "b1ss"}
    if asked.release >= (5, 13) and causal and p.max_seqlen_kv > p.max_seqlen_q:
        kind["max_seqlen_kv"] = p.max_seqlen_q
        notes.append(f"keys after the last row are cut off [{source('is_causal', asked.release)}]")
    text = f"F.scaled_dot_product_attention(q, k, v, {mask}, is_causal={causal}{heads})"
    return SdpaCall(_derived(p, {**kind, **changes}), text, tuple(notes))


def _mask(p: AttentionParams, asked: Asked) -> tuple[bool, str]:
    """Whether a mask is made, and why, or why not where one might be expected."""
    if p.attn_mask_type == "arbitrary":
        return True, "the model's own mask is passed on"
    if p.has_bias:
        return True, "the bias and causality go into one mask"
    if p.qkv_format == "thd":
        return True, "packed sequences become one row with a block-diagonal mask of s * s elements"
    if p.padding:
        return True, "padding becomes a mask of s_q * s_kv elements"
    if _window_binds(p):
        return (
            True,
            f"the window ({p.window_size[0]}, {p.window_size[1]}) becomes a mask of s_q * s_kv elements",
        )
    if p.causal and p.max_seqlen_q not in (1, p.max_seqlen_kv) and p.bottom_right:
        return True, "rows that begin after the first key (a chunk with a cache) need a mask"
    if asked.compiled and asked.release >= (4, 53) and p.causal:
        return True, "a compiled graph cannot read whether there is padding, so that the mask is made"
    if p.causal:
        return False, "no padding: the mask is skipped"
    return False, ""


def _window_binds(p: AttentionParams) -> bool:
    left = p.window_size[0]
    return p.windowed and not 0 <= p.max_seqlen_kv <= left and p.window_size not in ((-1, -1), (-1, 0))


def _heads(
    p: AttentionParams, env: Environment, asked: Asked, masked: bool
) -> tuple[dict[str, Any], str, str]:
    """(changes of the question, the text of enable_gqa, the note) for fewer kv heads than query heads.

    Source: use_gqa_in_sdpa, since 4.54; head dimensions since 5.13 (transformers#46960); pack_gqa and the
    variable in 5.23.
    """
    if asked.release < (4, 54):
        return _repeated(p, "") if p.gqa else ({}, "", "")
    if not p.gqa and asked.release >= (5, 13):
        return {}, "", ""  # before, a model without groups was given enable_gqa too
    if asked.force_gqa and asked.release >= (5, 23):
        return {}, _ENABLED, ""
    why = " and ".join(_against_gqa(p, env, asked, masked))
    if not why or not p.gqa:
        return {}, "" if why else _ENABLED, ""
    if asked.release >= (5, 23) and p.max_seqlen_q == 1 and not asked.compiled:
        packed = {"num_heads": p.num_gqa_groups, "max_seqlen_q": p.num_heads // p.num_gqa_groups}
        return packed, "", f"no enable_gqa, as {why}: the heads of a group become rows of one kv head"
    return _repeated(p, f"no enable_gqa, as {why}: ")


def _repeated(p: AttentionParams, why: str) -> tuple[dict[str, Any], str, str]:
    times = p.num_heads // p.num_gqa_groups
    return (
        {"num_gqa_groups": p.num_heads},
        "",
        f"{why}kv heads are repeated {times} times, a copy on every call",
    )


def _against_gqa(p: AttentionParams, env: Environment, asked: Asked, masked: bool) -> list[str]:
    """use_gqa_in_sdpa: every reason for not passing enable_gqa."""
    torch = env.torch
    if env.device.type == "xpu":
        return ["torch is older than 2.8"] if torch is not None and torch < (2, 8) else []
    if env.device.type == "mps" and asked.release >= (5, 18):
        return ["torch is older than 2.13"] if torch is not None and torch < (2, 13) else []
    reasons = ["there is a mask"] if masked else []
    if asked.release < (5, 18) and torch is not None and torch < (2, 5):
        reasons.append("torch is older than 2.5")
    if asked.release >= (5, 13) and not p.head_dim_qk == p.head_dim_v <= 256:
        reasons.append(f"head dimensions {p.head_dim_qk}/{p.head_dim_v} are not one of at most 256")
    return reasons


def _derived(p: AttentionParams, changes: dict[str, Any]) -> AttentionParams:
    """The question that F.sdpa gets: dense, without a window, lengths, soft cap or sinks."""
    dense: dict[str, Any] = {
        "qkv_layout": "bshd_bshd_bshd",
        "window_size": (-1, -1),
        "bottom_right_diagonal": None,
        "softcap": 0.0,
        "softmax_type": "vanilla",
        "kv_cache": "none",
        "page_size": None,
        "pad_between_seqs": False,
        "core_attention_bias_type": "no_bias",
        "core_attention_bias_shape": None,
        "core_attention_bias_requires_grad": False,
        "alibi_slopes_shape": None,
        "max_seqlen_kv": p.max_seqlen_kv,
    }
    if p.qkv_format == "thd":
        dense |= {"batch_size": 1, "max_seqlen_q": p.batch_size * p.max_seqlen_q}
        dense["max_seqlen_kv"] = p.batch_size * p.max_seqlen_kv
    if p.has_bias and "core_attention_bias_type" not in changes and p.core_attention_bias_type != "alibi":
        dense |= {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias_shape": p.core_attention_bias_shape or "1hss",
            "core_attention_bias_requires_grad": p.core_attention_bias_requires_grad,
        }
        changes = {**changes, "attn_mask_type": "no_mask"}
    return AttentionParams(**{**_stated(p), **dense, **changes})


def _stated(p: AttentionParams) -> dict[str, Any]:
    names = (
        "dtype", "batch_size", "num_heads", "num_gqa_groups", "max_seqlen_q", "head_dim_qk", "head_dim_v",
        "attention_dropout", "is_training", "deterministic",
    )  # fmt: skip
    return {name: getattr(p, name) for name in names}
