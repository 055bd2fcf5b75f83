"""What to put in the place of attention written by hand."""

from __future__ import annotations

import math

from attnsel.diagnose.framework_fixes.ways import Fix
from attnsel.params import AttentionParams


def replacement(p: AttentionParams, *, scale: float | None, folded: bool = False, cast: bool = False) -> Fix:
    """What to put in the place of attention written by hand, with its arguments filled in.

    ``scale``: what the scores are multiplied by, None where it is a tensor. ``folded``: q, k, v [n, s, d].
    ``cast``: they were cast to float32 first.
    """
    if p.softcap or p.softmax_type != "vanilla":
        return _flexible(p, scale)
    names = [f"{name}.unsqueeze(1)" for name in "qkv"] if folded else ["q", "k", "v"]
    extra: list[str] = []
    notes: list[str] = []
    if scale is None:
        names[0] = "q * temperature"
        extra.append("scale=1.0")
    elif not math.isclose(scale, p.head_dim_qk**-0.5, rel_tol=1e-4):
        extra.append(f"scale={scale:.6g}")
    extra = [*_mask_arguments(p, notes), *extra]
    if p.attention_dropout:
        extra.append(f"dropout_p={p.attention_dropout:g} if self.training else 0.0")
    if p.gqa:
        extra.append("enable_gqa=True")
        notes.append(f"k and v with their {p.num_gqa_groups} heads, not repeated")
    call = f"F.scaled_dot_product_attention({', '.join([*names, *extra])})" + (
        ".squeeze(1)" if folded else ""
    )
    if cast:
        notes.append(f"q, k, v in {p.dtype}: it sums in fp32 itself")
    if not folded:
        notes.insert(0, "q, k, v [b, h, s, d]")
    return Fix("replace these lines", call + (f"  # {'; '.join(notes)}" if notes else ""))


def _mask_arguments(p: AttentionParams, notes: list[str]) -> list[str]:
    kind = p.attn_mask_type
    if p.has_bias or p.core_attention_bias_type == "alibi":
        if kind != "no_mask":
            notes.append("add the mask to the bias")
        return ["attn_mask=bias.to(q.dtype)"]
    if kind == "no_mask" or p.tensors.mask_hides_nothing:
        return []
    if kind == "causal" and not p.windowed:
        return ["is_causal=True"]
    if kind == "causal_bottom_right" and not p.windowed:
        if p.max_seqlen_q == 1:
            return []
        return [f"attn_mask=torch.nn.attention.bias.causal_lower_right({p.max_seqlen_q}, {p.max_seqlen_kv})"]
    notes.append("a bool mask shows where it is True")
    return ["attn_mask=visible"]


def _flexible(p: AttentionParams, scale: float | None) -> Fix:
    """What F.sdpa cannot say."""
    if p.softmax_type != "vanilla":
        said = f"attnsel.attention(q, k, v, softmax_type={p.softmax_type!r}, softmax_offset=sinks"
        said += f", softmax_scale={scale:.6g}" if scale else ""
        mask = f", attn_mask_type={p.attn_mask_type!r}" if p.attn_mask_type in ("causal", "no_mask") else ""
        return Fix("replace these lines", f"{said}{mask})  # q, k, v [b, s, h, d]; F.sdpa has no sinks")
    mod = f"lambda s, b, h, i, j: {p.softcap:g} * torch.tanh(s / {p.softcap:g})"
    block = ", block_mask=causal_block_mask" if p.causal else ""
    scaled = f", scale={scale:.6g}" if scale else ""
    return Fix(
        "replace these lines",
        f"flex_attention(q, k, v, score_mod={mod}{block}{scaled})  # F.sdpa has no soft cap",
    )
