"""What a user may ask of a kernel, one entry each: its name, what it is, and what it changes in a question.

The question is ``AttentionParams()``: bf16, causal, two sequences of 4096, 16 heads of 128. A feature changes
what it needs and nothing else, so that the answer is about it. Before Ampere (sm80) no kernel but plain
operations takes bf16: there the question is one in fp16. ``NOT_FEATURES`` says why the other fields of
a question are none; tests/attnsel/pages/can_i_use/test_features.py holds the two to AttentionParams.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace

from attnsel.errors import InvalidInput
from attnsel.pages.can_i_use import BOTH, INFERENCE, TRAINING, Feature


def _heads(size: int, about: str) -> Feature:
    also = f"d{size} hdim{size} headdim{size} head-dim={size} {size}"
    name, title = f"head-dim-{size}", f"Head dimension {size}"
    return Feature(name, title, about, {"head_dim_qk": size}, also)


def _fp8(kind: str, about: str, also: str) -> Feature:
    recipe = {"fp8": True, "fp8_meta": {"recipe": {"kind": kind, "fp8_dpa": True}}}
    return Feature(f"fp8-{kind}", f"FP8, {kind} scaling", about, recipe, also)


def _ranks(comm: str, about: str, also: str) -> Feature:
    changes = {"cp_size": 4, "cp_comm_type": comm}
    name = comm.replace("_", "-").replace("+", "-")
    words = f"context-parallel-{name} context-parallelism context-parallel {also}"
    return Feature(f"cp-{name}", f"Context parallelism, {comm}", about, changes, words)


_PAGES = {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged"}
_CHUNK = {"max_seqlen_q": 1024, "max_seqlen_kv": 4096}
_TOKEN = {"max_seqlen_q": 1, "max_seqlen_kv": 4096}
_PACKED = {"qkv_layout": "thd", "attn_mask_type": "padding_causal"}
_BIAS = {"core_attention_bias_type": "post_scale_bias"}
_ALIBI = {"core_attention_bias_type": "alibi"}
_ONE_CARD = {"memory_limit": "80GiB"}

_GROUPS: dict[str, tuple[Feature, ...]] = {
    "Head dimensions": (
        _heads(64, "Heads of 64: GPT-2, BERT, Llama 3.2 1B, most vision transformers."),
        _heads(72, "Heads of 72, as SigLIP has: a multiple of 8 and not of 16."),
        _heads(80, "Heads of 80: ViT-H, Phi-2."),
        _heads(96, "Heads of 96: Phi-3 mini."),
        _heads(128, "Heads of 128: Llama, Mistral, Qwen and most others."),
        _heads(192, "Heads of 192, keys and values alike."),
        _heads(256, "Heads of 256: Gemma."),
        _heads(512, "Heads of 512."),
        Feature(
            "mla",
            "MLA, 192/128",
            "Multi-head latent attention as DeepSeek-V3 trains it and reads a prompt: queries and keys of "
            "192, values of 128.",
            {"head_dim_qk": 192, "head_dim_v": 128},
            "mla-prefill mla-training latent deepseek 192/128 192-128 head-dim-192-128",
        ),
        Feature(
            "mla-absorbed",
            "MLA decode, 576/512",
            "Multi-head latent attention with absorbed weights, one new token: 128 heads read one head of "
            "keys of 576 and values of 512.",
            {
                **_TOKEN, "attn_mask_type": "no_mask", "num_heads": 128, "num_gqa_groups": 1,
                "head_dim_qk": 576, "head_dim_v": 512,
            },
            "mla-decode mla-latent 576/512 576-512 head-dim-576-512",
            INFERENCE,
        ),
    ),
    "Heads and lengths": (
        Feature(
            "gqa", "Grouped queries (GQA)", "Four heads of keys and values for 16 of queries.",
            {"num_gqa_groups": 4}, "grouped-query enable-gqa kv-heads",
        ),
        Feature(
            "mqa", "Multi-query (MQA)", "One head of keys and values for all heads of queries.",
            {"num_gqa_groups": 1}, "multi-query",
        ),
        Feature(
            "cross-attention", "Cross attention", "Queries and keys of different numbers, and no mask.",
            {"max_seqlen_kv": 1024, "attn_mask_type": "no_mask"}, "encoder-decoder",
        ),
        Feature(
            "odd-lengths", "Odd lengths", "Lengths that are no multiple of anything: 1023 queries and keys.",
            {"max_seqlen_q": 1023}, "uneven-lengths unaligned-lengths",
        ),
        Feature(
            "decode", "Decoding one token", "One query against 4096 keys.",
            {**_TOKEN, "attn_mask_type": "no_mask"}, "decoding s-q=1 flash-decoding generation", INFERENCE,
        ),
        Feature(
            "long-128k", "128k tokens",
            "One sequence of 131,072, where the call may take no more than 80 GiB beside its tensors.",
            {"batch_size": 1, "max_seqlen_q": 131072}, "long-context 128k long-sequences", BOTH, _ONE_CARD,
        ),
        Feature(
            "long-1m", "1M tokens",
            "One sequence of 1,048,576, where the call may take no more than 80 GiB beside its tensors.",
            {"batch_size": 1, "max_seqlen_q": 1 << 20}, "million-tokens 1m", BOTH, _ONE_CARD,
        ),
    ),
    "Masks and windows": (
        Feature(
            "no-mask", "No mask", "Every query sees every key.", {"attn_mask_type": "no_mask"},
            "bidirectional full-attention non-causal",
        ),
        Feature(
            "causal", "Causal mask", "A query sees no later key; as many queries as keys.",
            {"attn_mask_type": "causal"}, "is-causal autoregressive",
        ),
        Feature(
            "causal-top-left", "Causal, from the top left",
            "1024 queries, 4096 keys, and a diagonal that begins at the first key: what is_causal of F.sdpa "
            "means.",
            {**_CHUNK, "attn_mask_type": "causal"}, "top-left",
        ),
        Feature(
            "causal-bottom-right", "Causal, to the bottom right",
            "1024 queries, 4096 keys, and a diagonal that ends at the last key: what causal of flash_attn "
            "means since 2.1, and what a chunk of a prompt needs.",
            {**_CHUNK, "attn_mask_type": "causal_bottom_right"}, "bottom-right chunked-prefill",
        ),
        Feature(
            "padding-mask", "Padding mask", "Sequences padded to one length, and a length for each.",
            {"attn_mask_type": "padding"}, "key-padding-mask seqused",
        ),
        Feature(
            "padding-causal", "Padding and causal mask", "The same, causal.",
            {"attn_mask_type": "padding_causal"}, "causal-padding",
        ),
        Feature(
            "arbitrary-mask", "Any mask (a tensor)", "A tensor says of every pair whether it is hidden.",
            {"attn_mask_type": "arbitrary"}, "custom-mask bool-mask attn-mask boolean-mask tree-mask",
        ),
        Feature(
            "sliding-window", "Sliding window", "A causal query sees the 1024 latest keys: Mistral, Gemma.",
            {"window_size": (1023, 0)}, "swa local-attention window window-causal",
        ),
        Feature(
            "symmetric-window", "Window to both sides", "A query sees 512 keys to either side, and no mask.",
            {"attn_mask_type": "no_mask", "window_size": (512, 512)}, "window-both-sides local-window",
        ),
        Feature(
            "window-bottom-right", "Window, other lengths",
            "A causal window of 1024 keys over 1024 queries and 4096 keys, anchored at the last key.",
            {**_CHUNK, "attn_mask_type": "causal_bottom_right", "window_size": (1023, 0)}, "window-chunk",
        ),
    ),
    "Scores and softmax": (
        Feature(
            "bias", "Additive bias", "A bias [1, h, s, s] is added to the scores; it needs no gradient.",
            _BIAS, "attn-bias attention-bias relative-position-bias additive-bias score-bias",
        ),
        Feature(
            "bias-gradient", "Gradient of a bias", "The same bias, which is trained: T5, pair biases.",
            {**_BIAS, "core_attention_bias_requires_grad": True}, "dbias bias-grad trainable-bias", TRAINING,
        ),
        Feature(
            "bias-per-sequence", "Bias per sequence", "A bias [b, h, s, s], another for every sequence.",
            {**_BIAS, "core_attention_bias_shape": "bhss"}, "bhss bias-batch",
        ),
        Feature(
            "bias-of-keys", "Bias of keys alone", "A bias [1, 1, 1, s], the same for all queries and heads.",
            {**_BIAS, "core_attention_bias_shape": "111s"}, "111s broadcast-bias",
        ),
        Feature(
            "pre-scale-bias", "Bias before the scale", "A bias that is added before the scores are scaled.",
            {"core_attention_bias_type": "pre_scale_bias"},
        ),
        Feature(
            "alibi", "ALiBi", "A penalty that grows with distance; slopes as the paper has them.", _ALIBI,
        ),
        Feature(
            "alibi-slopes", "ALiBi, own slopes", "ALiBi with a tensor of slopes [h].",
            {**_ALIBI, "alibi_slopes_shape": (16,)},
        ),
        Feature(
            "softcap", "Softcap", "Scores bent to 50 * tanh(score / 50): Gemma 2.", {"softcap": 50.0},
            "soft-cap logit-softcapping attn-logit-softcapping logits-soft-cap tanh",
        ),
        Feature(
            "sinks", "Attention sinks, learned", "A trained number for each head in the softmax: gpt-oss.",
            {"softmax_type": "learnable"}, "attention-sinks sink s-aux learnable-softmax gpt-oss",
        ),
        Feature(
            "sinks-off-by-one", "Softmax plus one", "The softmax divides by one more: a sink of 0.",
            {"softmax_type": "off-by-one"}, "off-by-one softmax-one",
        ),
        Feature(
            "dropout", "Dropout", "A tenth of the probabilities is dropped.", {"attention_dropout": 0.1},
            "attention-dropout dropout-p", TRAINING,
        ),
    ),
    "Element types": (
        Feature("bf16", "bfloat16", "The default question.", {"dtype": "bf16"}, "bfloat16"),
        Feature("fp16", "float16", "Half precision.", {"dtype": "fp16"}, "float16 half"),
        Feature("fp32", "float32", "Single precision.", {"dtype": "fp32"}, "float32 single-precision tf32"),
        Feature("fp64", "float64", "Double precision.", {"dtype": "fp64"}, "float64 double"),
        _fp8("delayed", "Attention in FP8, scales from a history of maxima.", "delayed-scaling"),
        _fp8("current", "Attention in FP8, scales from the tensors' own maxima.", "current-scaling"),
        _fp8("mxfp8", "Attention in FP8, a scale for each 32 elements.", "mxfp8 mx"),
        _fp8("block", "Attention in FP8, a scale for each block of 128.", "block-scaling"),
    ),
    "Layouts and caches": (
        Feature(
            "sbhd", "Sequence first (sbhd)", "Tensors [s, b, h, d], as Megatron has them.",
            {"qkv_layout": "sbhd"},
        ),
        Feature(
            "bhsd", "Heads first (bhsd)", "Tensors [b, h, s, d], as F.sdpa takes them.",
            {"qkv_layout": "bhsd"},
        ),
        Feature(
            "packed-qkv", "q, k and v in one tensor",
            "One tensor [b, s, 3, h, d]: a fused projection's views.", {"qkv_layout": "bs3hd"},
            "fused-qkv qkvpacked interleaved",
        ),
        Feature(
            "packed-sequences", "Packed sequences (thd)",
            "Sequences of all lengths behind each other in one tensor [t, h, d], causal each.",
            _PACKED, "thd varlen cu-seqlens ragged variable-length document-mask packing",
        ),
        Feature(
            "packed-gaps", "Packed, with gaps", "The same, with room behind each sequence.",
            {**_PACKED, "pad_between_seqs": True}, "pad-between-seqs",
        ),
        Feature(
            "paged-kv", "Paged KV cache, prompt",
            "Keys and values in pages of 64 tokens, read through a table; 1024 new tokens of each sequence.",
            {**_PAGES, **_CHUNK, "page_size": 64, "attn_mask_type": "padding_causal_bottom_right"},
            "paged-attention paged-prefill block-table pages", INFERENCE,
        ),
        Feature(
            "paged-decode", "Paged KV cache, decoding",
            "The same, one new token, pages of 16: vLLM's default.",
            {**_PAGES, **_TOKEN, "page_size": 16, "attn_mask_type": "padding"}, "page-16 vllm", INFERENCE,
        ),
        Feature(
            "paged-decode-256", "Paged decoding, pages of 256", "The same, in pages of 256.",
            {**_PAGES, **_TOKEN, "page_size": 256, "attn_mask_type": "padding"}, "page-256", INFERENCE,
        ),
        Feature(
            "contiguous-cache", "KV cache in one piece", "One new token against a cache in one tensor.",
            {**_TOKEN, "kv_cache": "contiguous", "attn_mask_type": "padding"}, "kv-cache kvcache", INFERENCE,
        ),
    ),
    "Training and results": (
        Feature("training", "Training", "A backward pass of the default question.", {}, "backward", TRAINING),
        Feature(
            "deterministic", "Deterministic backward", "Gradients that are equal bit by bit, run after run.",
            {"deterministic": True}, "determinism reproducible", TRAINING,
        ),
        Feature(
            "lse", "Log-sum-exp", "The log-sum-exp of each row is returned too.", {"return_lse": True},
            "log-sum-exp softmax-lse return-lse",
        ),
        Feature(
            "max-logit", "Largest score", "The largest score of each head is returned too: QK-clip.",
            {"return_max_logit": True}, "qk-clip muon-clip max-score",
        ),
    ),
    "Where it runs": (
        Feature(
            "cuda-graph", "CUDA graph", "The call is captured into a CUDA graph.", {"cuda_graph": True},
            "cuda-graphs graph-capture",
        ),
        _ranks("p2p", "One sequence over four ranks, keys around a ring.", "ring-attention ring"),
        _ranks("all_gather", "One sequence over four ranks, which gather all keys.", "all-gather"),
        _ranks("a2a", "One sequence over four ranks, which swap heads for rows.", "ulysses all-to-all a2a"),
        _ranks("a2a+p2p", "Heads swapped within groups of ranks, keys around a ring.", "hierarchical usp"),
    ),
}  # fmt: skip

FEATURES: dict[str, Feature] = {
    feature.name: replace(feature, group=group) for group, members in _GROUPS.items() for feature in members
}
"""All of them by name, in the order in which they are listed."""

NOT_FEATURES: dict[str, str] = {
    "bottom_right_diagonal": "decided by the causal mask types, which are asked",
    "tensors": "where tensors lie is a property of one program's tensors; layouts are asked by name",
}
"""Fields of AttentionParams that no feature changes, and why."""


def find(words: Iterable[str]) -> tuple[Feature, ...]:
    """The features that these words name, each once: a name, another word for it, or the beginning of several
    names (``fp8``, ``head-dim``, ``paged``). Raises InvalidInput, which names near ones."""
    found: dict[str, Feature] = {}
    for word in words:
        named = _named(word)
        if not named:
            raise InvalidInput(
                "feature", word, f"there is none such: {_near(word)}attnsel can-i-use lists them"
            )
        found |= {feature.name: feature for feature in named}
    return tuple(found.values())


def _named(word: str) -> list[Feature]:
    text = word.strip().casefold().replace("_", "-").replace(" ", "-")
    if text in FEATURES:
        return [FEATURES[text]]
    called = [feature for feature in FEATURES.values() if text in feature.words]
    if called:
        return called
    return [feature for feature in FEATURES.values() if feature.name.startswith(f"{text}-")]


def _near(word: str) -> str:
    called = {name: feature.name for feature in FEATURES.values() for name in feature.words}
    close = difflib.get_close_matches(word.casefold().replace("_", "-"), called, n=3, cutoff=0.6)
    names = dict.fromkeys(called[name] for name in close)
    return f"did you mean {' or '.join(names)}? " if names else ""
