"""The rule ``<FAMILY>000``, or of another code: a candidate takes what its record lists, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import REGISTRY, Example, Registry, rule
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.record import CandidateRecord, Proven
from attnsel.verdicts.requirements import AtLeast, EqualTo, FreeText, OneOf, Requirement

# ---- What a record says its kernel takes, word by word: everything it does not list is refused ---------
# A kernel may be older than an argument of attnsel's. So that such an argument is refused and not dropped,
# its record lists what it takes; its rules then only narrow that down.


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


def _no_dpa(p: AttentionParams) -> Requirement:
    return FreeText("a recipe with fp8_dpa=False")


def _some(p: AttentionParams) -> Requirement:
    return AtLeast(1) if p.max_seqlen_q == 0 else FreeText("a key")


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

# Half precision with a recipe: FP8 tensors are a type, which is named before.
FP8 = Feature("fp8", "FP8 attention", lambda p: p.fp8_attention, "fp8", _no_dpa)

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
    Feature("empty", "calls without queries", lambda p: p.max_seqlen_q == 0, "max_seqlen_q", _some),
    Feature("empty", "calls without keys", lambda p: p.max_seqlen_kv == 0, "max_seqlen_kv", _some),
    FP8,
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


def add_limits(record: CandidateRecord, registry: Registry = REGISTRY) -> None:
    """Add the rule, where rules of its own do not say all of it."""
    if record.limits == "rules":
        return
    takes = frozenset(record.takes)
    features = not_taken(takes)
    dtypes = tuple(word for word in DTYPES if word in takes)
    devices = tuple(word for word in DEVICES if word in takes)

    def said_of(feature: Feature) -> str:
        more = record.not_called.get(feature.text)
        return f"it does not take {feature.text}" if more is None else f"{more}; attnsel does not call it so"

    def only_what_is_listed(p: AttentionParams, env: Environment) -> Violation | None:
        if env.device.type not in takes:
            return Violation("device", env.device.type, OneOf(*devices))
        if p.dtype.startswith("fp8") and "fp8" not in takes:
            return Violation("dtype", p.dtype, FreeText(" or ".join(dtypes)), said_of(FP8))
        if p.dtype not in takes and not p.fp8_attention:
            return Violation("dtype", p.dtype, OneOf(*dtypes))
        for feature in features:
            if feature.asked(p):
                value = _value(p, feature.field)
                return Violation(feature.field, value, feature.without(p), said_of(feature))
        return None

    title = f"{record.name} takes what its maker lists, and nothing else"
    if record.library:
        title = f"attnsel calls {record.name} for what its record lists, and nothing else"
    more = "".join(
        f" Of {what}: {said}; attnsel does not call it so." for what, said in record.not_called.items()
    )
    only_what_is_listed.__doc__ = (
        f"{title}\n\n"
        f"Why: what a kernel does not know of it would drop. It takes {', '.join(sorted(takes))}.{more}\n"
        "Fix: leave out what it does not take, or ask its maker.\n"
        f"Source: {record.source or record.distribution or record.kernel}\n"
    )
    plain = _plain_call(takes)
    rule(
        f"{record.family}000" if record.limits == "takes" else record.limits,
        record.name,
        fp8="both",
        evidence="documented",
        fires_on={**plain, "kv_cache": "contiguous", "is_training": False},
        passes=plain,
        registry=registry,
    )(only_what_is_listed)


def _plain_call(takes: frozenset[str]) -> Example:
    """The default question, as far as a kernel with this list takes it."""
    if "cuda" in takes:
        asked: dict[str, Any] = {"gpu": "H100"}
    elif "cpu" in takes:
        asked = {"gpu": "cpu"}
    else:
        asked = {"device": next(word for word in DEVICES if word in takes)}
    if "bf16" not in takes:
        asked["dtype"] = next((word for word in DTYPES if word in takes), "fp8_e4m3")
    if "training" not in takes:
        asked["is_training"] = False
    if "causal" not in takes:
        asked["attn_mask_type"] = "no_mask"
    return asked


def _value(p: AttentionParams, path: str) -> Any:
    """A field by its dotted name; of a tensor its stride."""
    value: Any = p
    for name in path.split("."):
        value = getattr(value, name)
    return f"stride {value.stride}" if "." in path else value


# --------------------------------------------------------------------------------------------------------
# Whether a candidate is proven for a call: every feature that the call asks for is, where it would run.


_not_among = lru_cache(maxsize=256)(not_taken)
_OVER_RANKS = (*OFFSETS, "lse")  # what steps of a sequence over ranks use, of what a kernel takes


def unproven(record: CandidateRecord, p: AttentionParams, target: str) -> bool:
    """Whether nothing shows such a call right there ("sm90", "cpu"). Asked for every candidate at every
    decision: a look-up, unless the target is proven in part."""
    if record.trusted or target in record.proven_targets:
        return False
    known = record.proven_in_part.get(target)
    return known is None or next(_lacking(record, p, known), None) is not None


def unproven_parts(record: CandidateRecord, p: AttentionParams, target: str) -> list[str]:
    """What of a call is unproven on a target that is proven in part, in words."""
    known = record.proven_in_part.get(target)
    if known is None or record.trusted or target in record.proven_targets:
        return []
    return list(dict.fromkeys(_lacking(record, p, known)))


def _lacking(record: CandidateRecord, p: AttentionParams, known: Proven) -> Iterator[str]:
    if p.dtype not in known.features:
        yield p.dtype
    widest = max(p.head_dim_qk, p.head_dim_v)
    if widest > known.head_dim:
        yield f"head_dim {widest}"
    for feature in _not_among(known.features):
        if feature.asked(p):
            yield feature.text
    if p.context_parallel:
        yield from (word for word in _OVER_RANKS if word in record.takes and word not in known.features)
