"""What each library's user does about a topic. Figures in braces are those of the call.

Names and arguments were read in torch 2.13, transformers 5.23, diffusers 0.42, flash-attn 2.8 and
TransformerEngine 2.9.
"""

from __future__ import annotations

from typing import NamedTuple


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
