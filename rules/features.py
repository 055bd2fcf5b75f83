"""What a record says its kernel takes, word by word: everything it does not list is refused.

A kernel may be older than an argument of attnsel's. So that such an argument is refused and not dropped, its
record lists what it takes; its rules then only narrow that down.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from attnsel.params import AttentionParams
from attnsel.verdicts.requirements import AtLeast, EqualTo, FreeText, OneOf, Requirement


class Feature(NamedTuple):
    """Something a call may ask for, under the word a record lists for it.

    ``asked``: whether a call does; ``field`` says so, and would have to be what ``without`` returns.
    """

    word: str
    text: str
    asked: Callable[[AttentionParams], bool]
    field: str
    without: Callable[[AttentionParams], Requirement]


def _no(value: Any) -> Callable[[AttentionParams], Requirement]:
    return lambda p: OneOf(value)


def _dense(p: AttentionParams) -> Requirement:
    return FreeText("dense memory")


def _anchored(p: AttentionParams) -> bool:
    """Something hangs on the diagonal, and its two anchors differ."""
    hangs = p.causal or p.windowed or p.core_attention_bias_type == "alibi"
    return hangs and (p.padding or p.max_seqlen_q != p.max_seqlen_kv)


def _top_left(p: AttentionParams) -> bool:
    return _anchored(p) and not p.bottom_right_diagonal


def _bottom_right(p: AttentionParams) -> bool:
    return _anchored(p) and bool(p.bottom_right_diagonal)


def _bias_grad(p: AttentionParams) -> bool:
    return p.is_training and p.core_attention_bias_requires_grad


def _alibi(p: AttentionParams) -> bool:
    return p.core_attention_bias_type == "alibi"


_BIAS, _DIAGONAL = "core_attention_bias_type", "bottom_right_diagonal"
_MASK, _GRAD = "attn_mask_type", "core_attention_bias_requires_grad"

FEATURES: tuple[Feature, ...] = (
    Feature("thd", "packed sequences", lambda p: p.qkv_format == "thd", "qkv_layout", _no("bshd_bshd_bshd")),
    Feature("paged", "keys in pages", lambda p: p.kv_cache == "paged", "kv_cache", _no("none")),
    Feature("training", "a backward pass", lambda p: p.is_training, "is_training", _no(False)),
    Feature("deterministic", "equal bits every run", lambda p: p.deterministic, "deterministic", _no(False)),
    Feature("gqa", "grouped queries", lambda p: p.gqa, "num_gqa_groups", lambda p: OneOf(p.num_heads)),
    Feature(
        "head_dim_v",
        "a head_dim_v of its own",
        lambda p: p.head_dim_v != p.head_dim_qk,
        "head_dim_v",
        lambda p: EqualTo("head_dim_qk", p.head_dim_qk),
    ),
    Feature("causal", "causal masks", lambda p: p.causal, _MASK, _no("no_mask")),
    Feature("padding", "padding", lambda p: p.padding, _MASK, lambda p: FreeText("a type without padding")),
    Feature("mask", "mask tensors", lambda p: p.attn_mask_type == "arbitrary", _MASK, _no("no_mask")),
    Feature("window", "windows", lambda p: p.windowed, "window_size", _no((-1, -1))),
    Feature("top_left", "a diagonal from the top left", _top_left, _DIAGONAL, _no(True)),
    Feature("bottom_right", "a diagonal to the bottom right", _bottom_right, _DIAGONAL, _no(False)),
    Feature("bias", "a bias", lambda p: p.has_bias, _BIAS, _no("no_bias")),
    Feature("bias_grad", "a bias's gradient", _bias_grad, _GRAD, _no(False)),
    Feature("alibi", "ALiBi", _alibi, _BIAS, _no("no_bias")),
    Feature("softcap", "softcap", lambda p: p.softcap != 0.0, "softcap", _no(0.0)),
    Feature("sinks", "sinks", lambda p: p.softmax_type != "vanilla", "softmax_type", _no("vanilla")),
    Feature("dropout", "dropout", lambda p: p.dropout, "attention_dropout", _no(0.0)),
    Feature("lse", "the log-sum-exp as a result", lambda p: p.return_lse, "return_lse", _no(False)),
    Feature("max_logit", "the largest score", lambda p: p.return_max_logit, "return_max_logit", _no(False)),
    Feature("strides", "strides of q", lambda p: p.tensors.q is not None, "tensors.q", _dense),
    Feature("strides", "strides of k", lambda p: p.tensors.k is not None, "tensors.k", _dense),
    Feature("strides", "strides of v", lambda p: p.tensors.v is not None, "tensors.v", _dense),
    Feature("gaps", "gaps between sequences", lambda p: p.pad_between_seqs, "pad_between_seqs", _no(False)),
    Feature("cuda_graph", "capture into a graph", lambda p: p.cuda_graph, "cuda_graph", _no(False)),
    Feature("empty", "no queries", lambda p: p.max_seqlen_q == 0, "max_seqlen_q", lambda p: AtLeast(1)),
    Feature("empty", "no keys", lambda p: p.max_seqlen_kv == 0, "max_seqlen_kv", lambda p: FreeText("a key")),
    Feature("fp8", "FP8 attention", lambda p: p.fp8_attention, "fp8", _no(False)),
)

# No word stands for this: nothing of attnsel's runs it.
NEVER = (Feature("", "a contiguous cache", lambda p: p.kv_cache == "contiguous", "kv_cache", _no("none")),)
DTYPES = ("bf16", "fp16", "fp32", "fp64")
DEVICES = ("cuda", "rocm", "cpu", "mps", "xpu")
OFFSETS = ("offsets", "head_offset")  # no call asks for them, the steps of context parallelism do
WORDS = tuple(dict.fromkeys((*DTYPES, *DEVICES, *(feature.word for feature in FEATURES), *OFFSETS)))


def not_taken(takes: Collection[str]) -> tuple[Feature, ...]:
    """The features that a kernel with this list refuses."""
    return (*NEVER, *(feature for feature in FEATURES if feature.word not in takes))
