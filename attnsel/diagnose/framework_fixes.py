"""The fix in the words of the program's own library: lines that a user of that library can paste.

What stands in the way comes as attnsel's reasons, as the changes of an unlock or an adaptation, or as the
refusals of another library's dispatcher. Each is brought to a topic (a mask, grouped heads, a dtype), and
each library has its own way out of a topic. What no change of the call helps against (a GPU, a release) has
none here: that is what ``attnsel.selection.unlock`` is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from attnsel.params import AttentionParams
from attnsel.rules import find_rule
from attnsel.selection.unlock.search import Unlock
from attnsel.verdicts.dispatch import Refusal
from attnsel.verdicts.reasons import Adaptation, Reason
from attnsel.verdicts.requirements import AtMost, EqualTo, Multiple

# ---- What each library's user does about a topic. Figures in braces are those of the call --------------
# Names and arguments were read in torch 2.13, transformers 5.23, diffusers 0.42, flash-attn 2.8 and
# TransformerEngine 2.9.


class Fix(NamedTuple):
    """``text``: what to do and why, a sentence. ``code``: lines to paste; "" where there are none."""

    text: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.text}: {self.code}" if self.code else self.text


TORCH = "F.scaled_dot_product_attention"

_CAST = Fix(
    "fused kernels take half precision", "with torch.autocast(q.device.type, dtype=torch.bfloat16): …"
)
_REPEAT = Fix(
    "a fused kernel without grouped heads runs once keys and values are repeated",
    "k, v = (x.repeat_interleave({repeats}, dim=1) for x in (k, v))  # and enable_gqa=False",
)
_TRANSFORMERS_FLASH = 'model = AutoModel….from_pretrained(name, attn_implementation="flash_attention_2")'
_DIFFUSERS_FLASH = 'pipe.transformer.set_attention_backend("flash")'

_UNWRITTEN: dict[str, Fix] = {
    "transformers": Fix(
        "eager attention stores its scores", 'AutoModel….from_pretrained(name, attn_implementation="sdpa")'
    ),
    "diffusers": Fix("this processor stores its scores", "pipe.unet.set_attn_processor(AttnProcessor2_0())"),
    "nn.MultiheadAttention": Fix(
        "weights are asked for, so scores are stored", "mha(q, k, v, need_weights=False)"
    ),
}


def unwritten(api: str) -> Fix | None:
    """What makes a library run a kernel where it wrote attention out; None for the program's own lines."""
    return _UNWRITTEN.get(api)


WAYS: dict[str, dict[str, Fix]] = {
    "mask that hides nothing": {
        TORCH: Fix("the mask hides nothing and rules fused kernels out", "attn_mask=None"),
        "nn.MultiheadAttention": Fix("the mask hides nothing", "attn_mask=None, key_padding_mask=None"),
        "transformers": Fix(
            "no token is padding, so leave the mask out", "model(input_ids, attention_mask=None)"
        ),
        "diffusers": Fix("the mask hides nothing", "encoder_attention_mask=None"),
        "TransformerEngine": Fix("the mask hides nothing", 'attn_mask_type="no_mask", attention_mask=None'),
        "flex_attention": Fix("the block mask hides nothing", "block_mask=None"),
    },
    "mask": {
        TORCH: Fix(
            "the flash kernels take no mask tensor; if it is causal, say so",
            "F.scaled_dot_product_attention(q, k, v, is_causal=True)  # and no attn_mask",
        ),
        "nn.MultiheadAttention": Fix(
            "a causal mask may be named, and is then not read",
            "mha(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)",
        ),
        "transformers": Fix(
            "a 4-D mask of your own rules flash kernels out; give the padding alone, [batch, tokens]",
            'model(input_ids, attention_mask=tokenizer(…, padding=True, return_tensors="pt").attention_mask)',
        ),
        "diffusers": Fix(
            "flash backends take no mask; encode prompts one by one, so that none has padding",
            "encoder_attention_mask=None",
        ),
        "TransformerEngine": Fix(
            "a mask tensor is for UnfusedDotProductAttention; name it",
            'attn_mask_type="causal"  # or "padding_causal" with cu_seqlens_q, cu_seqlens_kv',
        ),
        "flash_attn": Fix("flash_attn takes no mask tensor", "flash_attn_func(q, k, v, causal=True)"),
    },
    "padding": {
        TORCH: Fix(
            "padding reaches F.sdpa only as a mask; packed sequences need none",
            "torch.nn.attention.varlen.varlen_attn(q, k, v, cu_seq_q, cu_seq_k, …)  # [tokens, heads, d]",
        ),
        "nn.MultiheadAttention": Fix(
            "padding takes the flash kernels away; sort by length, or use packed sequences",
            "key_padding_mask=None",
        ),
        "transformers": Fix(
            "pack sequences instead of padding them",
            f"DataCollatorWithFlattening()  # with {_TRANSFORMERS_FLASH}",
        ),
        "diffusers": Fix(
            "encode prompts one by one, so that none has padding", "encoder_attention_mask=None"
        ),
        "TransformerEngine": Fix(
            "packed sequences need no padding",
            'qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=…',
        ),
    },
    "corner": {
        TORCH: Fix(
            "is_causal starts at the top left; {s_q} queries behind {s_kv} keys need the other corner",
            "attn_mask=torch.nn.attention.bias.causal_lower_right({s_q}, {s_kv}), is_causal=False",
        ),
        "nn.MultiheadAttention": Fix(
            "is_causal starts at the top left: give as many keys as queries, or a mask", "is_causal=False"
        ),
        "TransformerEngine": Fix("causal starts at the top left", 'attn_mask_type="causal_bottom_right"'),
    },
    "window": {
        TORCH: Fix(
            "F.sdpa has windows only as a mask; flex_attention skips what is outside",
            "flex_attention(q, k, v, block_mask=create_block_mask("
            "lambda b, h, i, j: (j <= i) & (i - j <= {left}), None, None, {s_q}, {s_kv}))",
        ),
        "transformers": Fix("sdpa makes a mask of the window; flash kernels take it", _TRANSFORMERS_FLASH),
    },
    "bias": {
        TORCH: Fix(
            "a bias is a mask tensor to F.sdpa, which the flash kernels do not take",
            "flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[{bias_at}])",
        ),
        "TransformerEngine": Fix(
            "fused attention takes a bias after the scale", 'core_attention_bias_type="post_scale_bias"'
        ),
    },
    "bias gradient": {
        TORCH: Fix(
            "fused kernels give no gradient to a mask, and one that needs it rules them out without a word",
            "attn_mask=mask.detach()  # if it is not learned",
        ),
    },
    "grouped heads": {
        TORCH: _REPEAT,
        "transformers": Fix(
            "sdpa repeats keys and values, or goes to math; flash kernels take grouped heads",
            _TRANSFORMERS_FLASH,
        ),
        "diffusers": Fix("flash backends take grouped heads", _DIFFUSERS_FLASH),
        "flex_attention": Fix("keys and values are fewer heads", "flex_attention(…, enable_gqa=True)"),
    },
    "dropout": {
        TORCH: Fix(
            "the probability is {p} here; outside training it must be 0",
            "dropout_p=self.dropout if self.training else 0.0",
        ),
        "nn.MultiheadAttention": Fix(
            "dropout keeps fused kernels away", "nn.MultiheadAttention(…, dropout=0.0)"
        ),
        "transformers": Fix("dropout keeps fused kernels away", "config.attention_dropout = 0.0"),
        "TransformerEngine": Fix("dropout keeps this kernel away", "attention_dropout=0.0"),
        "flash_attn": Fix("outside training the probability must be 0", "dropout_p=0.0"),
    },
    "dtype": {
        TORCH: _CAST,
        "nn.MultiheadAttention": Fix("fused kernels take half precision", "model.to(torch.bfloat16)"),
        "transformers": Fix(
            "the model is in {dtype}; flash kernels take half precision",
            "model = AutoModel….from_pretrained(name, dtype=torch.bfloat16)",
        ),
        "diffusers": Fix(
            "the model is in {dtype}; flash kernels take half precision",
            "pipe = DiffusionPipeline.from_pretrained(name, torch_dtype=torch.bfloat16)",
        ),
        "flash_attn": Fix(
            "flash_attn takes fp16 and bf16", "q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))"
        ),
        "flex_attention": _CAST,
        "varlen_attn": _CAST,
        "TransformerEngine": Fix("fused attention takes half precision", "params_dtype=torch.bfloat16"),
    },
    "memory": {
        TORCH: Fix(
            "the last dimension must have stride 1, and every start be a multiple of 16 bytes",
            "q, k, v = (x.contiguous() for x in (q, k, v))",
        ),
        "flash_attn": Fix(
            "the last dimension must have stride 1", "q, k, v = (x.contiguous() for x in (q, k, v))"
        ),
        "flex_attention": Fix(
            "the last dimension must have stride 1", "q, k, v = (x.contiguous() for x in (q, k, v))"
        ),
        "TransformerEngine": Fix(
            "q, k and v must lie in one of its layouts", 'qkv_format="bshd", and q, k, v as .contiguous()'
        ),
    },
    "rank": {
        TORCH: Fix(
            "with {rank} dimensions F.sdpa goes to math; give it [b, h, s, d]",
            "F.scaled_dot_product_attention(*({to_four} for x in (q, k, v))){from_four}",
        ),
    },
    "mask rank": {
        TORCH: Fix(
            "a mask of {mask_rank} dimensions goes to math; give it two or four",
            "attn_mask=mask{mask_to_four}",
        ),
    },
    "no enable_gqa": {
        TORCH: Fix(
            "one key/value head for {heads} of the query is broadcast in math alone; say that it is a group",
            "F.scaled_dot_product_attention(q, k, v, enable_gqa=True)",
        ),
    },
    "batch of one": {
        TORCH: Fix(
            "a batch of one is broadcast in math alone",
            "q, k, v = (x.expand({b}, -1, -1, -1) for x in (q, k, v))",
        ),
    },
    "width": {
        TORCH: Fix(
            "head_dim {d} is no multiple of 8",
            "q, k, v = (F.pad(x, (0, {more})) for x in (q, k, v))  # scale={scale}; output [..., :{dv}]",
        ),
        "flash_attn": Fix(
            "head_dim {d} is no multiple of 8",
            "q, k, v = (F.pad(x, (0, {more})) for x in (q, k, v))  # softmax_scale={scale}; [..., :{dv}]",
        ),
        "nn.MultiheadAttention": Fix("choose embed_dim / num_heads as a multiple of 8", "num_heads=…"),
    },
    "unequal widths": {
        TORCH: Fix(
            "head_dim of v and of q, k differ: pad {narrow}",
            "{narrow} = F.pad(…, (0, {missing}))  # scale={scale}, and [..., :{dv}] of the output",
        ),
        "flash_attn": Fix(
            "head_dim of v and of q, k differ: pad {narrow}",
            "{narrow} = F.pad(…, (0, {missing}))  # softmax_scale={scale}, output [..., :{dv}]",
        ),
    },
    "softcap": {
        TORCH: Fix(
            "F.sdpa has no soft cap",
            "flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: cap * torch.tanh(s / cap))",
        ),
        "transformers": Fix(
            "sdpa leaves out the soft cap, and eager has it", 'attn_implementation="flex_attention"'
        ),
    },
    "sinks": {
        TORCH: Fix(
            "F.sdpa has no sinks", "attnsel.attention(…, softmax_type='learnable', softmax_offset=sinks)"
        ),
        "transformers": Fix("sdpa has no sinks", 'attn_implementation="flex_attention"'),
    },
    "weights": {
        "nn.MultiheadAttention": Fix(
            "weights are asked for, so scores are stored", "mha(q, k, v, need_weights=False)"
        ),
        "transformers": Fix("weights are asked for, so eager runs", "output_attentions=False"),
    },
    "deterministic": {
        TORCH: Fix(
            "deterministic algorithms rule this kernel out",
            "torch.use_deterministic_algorithms(False)",
        ),
        "TransformerEngine": Fix("this kernel is not deterministic", "NVTE_ALLOW_NONDETERMINISTIC_ALGO=1"),
    },
    "layout": {
        "TransformerEngine": Fix("this kernel takes another layout", 'qkv_format="bshd"'),
    },
    "switch": {
        TORCH: Fix(
            "this kernel is switched off",
            "with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]): …",
        ),
        "TransformerEngine": Fix("this kernel is switched off", "NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=1"),
        "diffusers": Fix("slicing computes heads one after the other", "pipe.disable_attention_slicing()"),
    },
}


# ---- What to put in the place of attention written by hand ---------------------------------------------


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


__all__ = ["TOPICS", "Fix", "Hindrance", "fixes", "replacement", "topics", "ways_out"]

Hindrance = Reason | Unlock | Refusal | Adaptation


def ways_out(api: str, p: AttentionParams, topics: Iterable[str]) -> tuple[Fix, ...]:
    """What a user of ``api`` does about each of ``topics`` (among ``TOPICS``), where there is a way."""
    found = (_fix(api, topic, p) for topic in topics)
    return tuple(dict.fromkeys(fix for fix in found if fix is not None))


def fixes(api: str, p: AttentionParams, hindrances: Iterable[Hindrance]) -> tuple[Fix, ...]:
    """The ways out of ``hindrances`` for a user of ``api`` (``record.Api``), each once, in their order."""
    found: dict[Fix, None] = {}
    for hindrance in hindrances:
        for topic in topics(p, hindrance):
            fix = _fix(api, topic, p)
            if fix is not None:
                found[fix] = None
    return tuple(found)


# ---- topics -----------------------------------------------------------------------------------------

_OF_FIELD = {
    "attn_mask_type": "mask",
    "tensors.mask": "mask",
    "core_attention_bias_type": "bias",
    "core_attention_bias_shape": "bias",
    "core_attention_bias_requires_grad": "bias gradient",
    "window_size": "window",
    "num_gqa_groups": "grouped heads",
    "attention_dropout": "dropout",
    "dtype": "dtype",
    "fp8": "dtype",
    "tensors.rank": "rank",
    "bottom_right_diagonal": "corner",
    "softcap": "softcap",
    "softmax_type": "sinks",
    "return_lse": "weights",
    "deterministic": "deterministic",
    "qkv_layout": "layout",
    "torch_flash": "switch",
}
TOPICS = frozenset(WAYS)


def topics(p: AttentionParams, hindrance: Hindrance) -> list[str]:
    """What ``hindrance`` is about; empty where no change of the call would help."""
    if isinstance(hindrance, Adaptation):  # what attnsel would change by itself
        return [topic for reason in hindrance.avoids for topic in topics(p, reason)]
    if isinstance(hindrance, Unlock):
        return [topic for field, _ in hindrance.changes for topic in _topic(p, field, None)]
    if isinstance(hindrance, Refusal):
        if hindrance.switch:
            return ["switch"]
        return _of_code(p, hindrance.code) if hindrance.code else []
    return _topic(p, hindrance.field, hindrance.finding.required)


def _topic(p: AttentionParams, field: str, required: Any) -> list[str]:
    if field in ("tensors.q", "tensors.k", "tensors.v"):
        return ["memory"]
    if field in ("head_dim_qk", "head_dim_v"):
        if isinstance(required, EqualTo):
            return ["unequal widths"]
        if required is None:  # a rule that says so in words
            wide = max(p.head_dim_qk, p.head_dim_v)
            return ["unequal widths"] if p.head_dim_qk != p.head_dim_v else ["width"] if wide % 8 else []
        return ["width"] if isinstance(required, Multiple) else []
    if field in ("max_seqlen_q", "max_seqlen_kv"):
        return ["corner"] if p.causal and isinstance(required, (EqualTo, AtMost)) else []
    topic = _OF_FIELD.get(field)
    if topic == "mask":
        if p.tensors.mask_hides_nothing:
            return ["mask that hides nothing"]
        if p.padding:
            return ["padding"]
        return ["mask"] if p.attn_mask_type == "arbitrary" else ["corner"] if p.causal else []
    return [] if topic is None else [topic]


def _of_code(p: AttentionParams, code: str) -> list[str]:
    """The topics of a rule's requirements; of a rule without any, those of what its page fires on."""
    rule = find_rule(code)
    required = dict(getattr(rule, "requires", {}) or {})
    fields = {
        name: need
        for names, need in required.items()
        for name in ((names,) if isinstance(names, str) else names)
    }
    fires_on = getattr(rule, "fires_on", {}) or {}
    fields = fields or dict.fromkeys(fires_on)
    if "core_attention_bias_requires_grad" in fields:
        fields.pop("core_attention_bias_type", None)  # there for the gradient's sake
    tensors = fires_on.get("tensors")
    if tensors is not None and any(getattr(tensors, name) is not None for name in ("q", "k", "v")):
        fields["tensors.q"] = None
    return list(dict.fromkeys(topic for field, need in fields.items() for topic in _topic(p, field, need)))


# ---- in a library's words ---------------------------------------------------------------------------

_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_LIKE_TORCH = (TORCH, "aten", "by hand")


def _fix(api: str, topic: str, p: AttentionParams) -> Fix | None:
    table = WAYS.get(topic, {})
    way = table.get(api) or (table.get(TORCH) if api in _LIKE_TORCH else None)
    if way is None:
        return None
    return Fix(way.text.format_map(_Words(p)), way.code.format_map(_Words(p)))


class _Words(dict[str, Any]):
    """The figures of a call that the lines below name."""

    def __init__(self, p: AttentionParams) -> None:
        wide = max(p.head_dim_qk, p.head_dim_v)
        to = -(-wide // 8) * 8
        rank, of_mask = p.tensors.rank, len(p.tensors.mask.shape) if p.tensors.mask is not None else 0
        super().__init__(
            s_q=p.max_seqlen_q,
            s_kv=p.max_seqlen_kv,
            heads=p.num_heads,
            groups=p.num_gqa_groups,
            repeats=p.num_heads // p.num_gqa_groups,
            d=p.head_dim_qk,
            dv=p.head_dim_v,
            to=to,
            more=to - p.head_dim_qk,
            more_v=wide - p.head_dim_v,
            more_qk=wide - p.head_dim_qk,
            narrow="v" if p.head_dim_v < p.head_dim_qk else "q, k",
            missing=wide - min(p.head_dim_qk, p.head_dim_v),
            scale=f"{1 / math.sqrt(p.head_dim_qk):.6g}",
            left=p.window_size[0],
            dtype=_NAMES.get(p.dtype, p.dtype),
            p=p.attention_dropout,
            b=p.batch_size,
            bias_at=_bias_at(p),
            rank=rank,
            to_four="x[None, None]" if rank == 2 else "x[None]" if rank < 4 else "x.flatten(0, -4)",
            from_four="[0, 0]" if rank == 2 else "[0]" if rank < 4 else ".unflatten(0, q.shape[:-3])",
            mask_rank=of_mask,
            mask_to_four="[None]" if of_mask == 3 else "[None, None, None]",
        )


def _bias_at(p: AttentionParams) -> str:
    """Where in a bias, or a mask of numbers, the score of (b, h, i, j) finds its own."""
    mask, shape = p.tensors.mask, p.core_attention_bias_shape or "1hss"
    sizes: tuple[int | str, ...]
    if mask is not None and mask.dtype != "bool":
        sizes = mask.shape
    elif shape in ("11ss", "111s"):
        sizes = (1 if shape == "111s" else "s", "s")
    else:
        sizes = tuple(1 if letter == "1" else letter for letter in shape)[0 if shape[0] == "b" else 1 :]
    names = "bhij"[len("bhij") - len(sizes) :]
    return ", ".join("0" if size == 1 else name for size, name in zip(sizes, names, strict=True))
