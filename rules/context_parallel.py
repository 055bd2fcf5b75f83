"""CP0xx: one sequence spread over ``cp_size`` ranks.

Lengths and head counts of a question are global. A sequence is cut into ``2 * cp_size`` chunks and rank r
holds chunks r and 2 * cp_size - 1 - r (head and tail, so that all ranks work equally under a causal mask).
Where no score depends on a position the order says nothing, and ``cp_size`` parts will do.

p2p         key/value chunks travel around a ring; partial results are merged by their log-sum-exp
all_gather  every rank gathers all keys and values
a2a         all-to-all: each rank gets whole sequences of some heads
a2a+p2p     a2a within a node, p2p between nodes
"""

from __future__ import annotations

from attnsel.backends.registry import every, where
from attnsel.environment import Environment
from attnsel.environment.versions import cudnn
from attnsel.params import AttentionParams
from attnsel.params.options import exchanges
from attnsel.rules.api import limit, rules_about
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import EqualTo, FreeText, Multiple, OneOf

WITHOUT_OFFSETS = where(lambda record: not record.offsets)  # take no offset of a chunk
WITHOUT_LSE = where(lambda record: not record.gives_lse)
rule = rules_about(every, over_ranks=True)

# Names of exchanges, by what they do.
SWAPS_HEADS = exchanges(lambda record: record.swaps_heads)
KEEPS_HEADS = exchanges(lambda record: not record.swaps_heads)
KEEPS_KEYS = exchanges(lambda record: not record.keys)  # sequences stay whole
RING = exchanges(lambda record: record.keys == "ring")
GATHERS = exchanges(lambda record: record.keys == "gathered")
NESTED = exchanges(lambda record: record.nested)


def _length(p: AttentionParams, of: int) -> Violation | None:
    """An objection to a length that is no multiple. With gaps between sequences the padded lengths count."""
    if p.pad_between_seqs:
        return None
    return limit(p, "max_seqlen_q", Multiple(of)) or limit(p, "max_seqlen_kv", Multiple(of))


def _by_position(p: AttentionParams) -> bool:
    """Whether it matters where in the sequence a row lies."""
    return p.causal or p.windowed or p.core_attention_bias_type != "no_bias" or p.dropout or p.padding


@rule("CP001", fires_on={"cp_size": 2, "max_seqlen_q": 16534}, passes={"cp_size": 2, "max_seqlen_q": 16536})
def head_and_tail_chunks(p: AttentionParams, env: Environment) -> Violation | None:
    """Where positions matter, lengths must divide into 2 * cp_size chunks

    Why: each rank holds one chunk from the head and one from the tail, so that all have the same work.
    Fix: pad the sequence at its end; under a causal mask the padding changes no result.
    Source: TransformerEngine v2.18, context_parallel.py (DualChunkSwap).
    """
    if _by_position(p) and p.cp_comm_type not in GATHERS:
        return _length(p, 2 * p.cp_size)
    return None


@rule(
    "CP002",
    fires_on={"cp_size": 4, "attn_mask_type": "no_mask", "max_seqlen_q": 1022},
    passes={"cp_size": 4, "attn_mask_type": "no_mask", "max_seqlen_q": 1028},
)
def even_chunks(p: AttentionParams, env: Environment) -> Violation | None:
    """Where positions do not matter, lengths must divide into cp_size chunks

    Why: every rank holds as many rows as the others.
    Fix: pad the sequence, with a mask that hides the padding.
    Source: TransformerEngine v2.18, context_parallel.py.
    """
    if not _by_position(p) and p.cp_comm_type not in GATHERS:
        return _length(p, p.cp_size)
    return None


@rule(
    "CP003",
    fires_on={"cp_size": 2, "cp_comm_type": "all_gather", "attn_mask_type": "no_mask", "max_seqlen_q": 1026},
    passes={"cp_size": 2, "cp_comm_type": "all_gather", "attn_mask_type": "no_mask", "max_seqlen_q": 1028},
)
def even_local_lengths(p: AttentionParams, env: Environment) -> Violation | None:
    """With all_gather, the lengths on each rank must be even

    Why: it always cuts a rank's rows into a head and a tail chunk.
    Fix: pad the sequence to a multiple of 2 * cp_size, or use another cp_comm_type.
    Source: TransformerEngine v2.18, context_parallel.py, line 3097.
    """
    if p.cp_comm_type in GATHERS:
        return _length(p, 2 * p.cp_size)
    return None


@rule(
    "CP004",
    fires_on={"cp_size": 4, "cp_comm_type": "a2a", "num_heads": 18},
    passes={"cp_size": 4, "cp_comm_type": "a2a", "num_heads": 16, "num_gqa_groups": 4},
)
def heads_over_ranks(p: AttentionParams, env: Environment) -> Violation | None:
    """With a2a, query heads and key/value heads must divide over the ranks

    Why: each rank gets whole heads of both kinds. With a2a+p2p only the a2a part counts, whose size a
    question does not say: both counts must be even.
    Fix: another cp_comm_type, or fewer ranks.
    Source: TransformerEngine v2.18, context_parallel.py, line 4246.
    """
    if p.cp_comm_type not in SWAPS_HEADS:
        return None
    whole = Multiple(2 if p.cp_comm_type in NESTED else p.cp_size)
    return limit(p, "num_heads", whole) or limit(p, "num_gqa_groups", whole)


@rule(
    "CP005",
    WITHOUT_LSE,
    requires={"cp_comm_type": OneOf(*KEEPS_KEYS)},
    evidence="measured",
    fires_on={"cp_size": 2},
    passes={"cp_size": 2, "cp_comm_type": "a2a"},
)
def merging_needs_lse(p: AttentionParams, env: Environment) -> None:
    """Except with a2a, a kernel must give its log-sum-exp

    Why: partial results of different keys can only be merged with it; sdpa.math has none.
    Fix: a2a, or any other kernel.
    Source: torch 2.13, _scaled_dot_product_attention_math returns (output, probabilities).
    """


@rule(
    "CP006",
    WITHOUT_OFFSETS,
    requires={"cp_comm_type": OneOf(*KEEPS_KEYS)},
    fires_on={"cp_size": 2, "window_size": (256, 0)},
    passes={"cp_size": 2, "window_size": (256, 0), "cp_comm_type": "a2a"},
)
def windows_need_offsets(p: AttentionParams, env: Environment) -> bool:
    """Except with a2a, a window needs a kernel with position offsets

    Why: kernels without offsets can run a chunk pair only when it is fully visible or on the diagonal; the
    edge of a window crosses other pairs.
    Fix: triton and tiled take offsets; a2a keeps positions together.
    Source: attnsel/backends/contract.py (q_offset, kv_offset); TransformerEngine v2.18, context_parallel.py,
    line 5057.
    """
    return p.windowed


@rule(
    "CP007",
    "cudnn",
    requires={"cp_comm_type": OneOf(*KEEPS_KEYS)},
    fires_on={"cp_size": 2, "softmax_type": "learnable"},
    passes={"cp_size": 2, "softmax_type": "learnable", "cp_comm_type": "a2a"},
)
def sinks_once(p: AttentionParams, env: Environment) -> bool:
    """With attention sinks, cuDNN's context parallelism is a2a only

    Why: a sink belongs into a row's denominator once; partial softmaxes would each count it. Kernels with
    offsets leave it out of the parts and add it when merging.
    Fix: cp_comm_type a2a, or triton or tiled.
    Source: TransformerEngine v2.18, utils.py, lines 1148-1155; TransformerEngine#2541.
    """
    return p.softmax_type != "vanilla"


@rule(
    "CP008",
    WITHOUT_OFFSETS,
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={"cp_size": 2, "attention_dropout": 0.125},
    passes={"cp_size": 2, "attention_dropout": 0.125, "is_training": False},
)
def dropout_by_counter(p: AttentionParams, env: Environment) -> bool:
    """Dropout over ranks needs a generator that counts by position

    Why: the same pair must be dropped whichever rank computes it, forward and backward; these kernels draw
    from the generator of their own device.
    Fix: triton and tiled number every pair; or leave dropout out.
    Source: attnsel/backends/tiled/tiles.py; attnsel/backends/sdpa/ops.py (random numbers per call).
    """
    return p.dropout


@rule(
    "CP009",
    requires={"kv_cache": OneOf("none")},
    fires_on={"cp_size": 2, "kv_cache": "contiguous", "is_training": False},
    passes={"cp_size": 1, "kv_cache": "contiguous", "is_training": False},
)
def no_cache(p: AttentionParams, env: Environment) -> None:
    """Context parallelism and a key/value cache exclude each other

    Why: the cache of one sequence would have to live on several ranks.
    Fix: cp_size 1 for inference with a cache.
    Source: TransformerEngine v2.18, utils.py, lines 852-856; attnsel's design.
    """


@rule(
    "CP010",
    WITHOUT_OFFSETS,
    requires={"max_seqlen_q": EqualTo("max_seqlen_kv")},
    fires_on={"cp_size": 2, "max_seqlen_q": 2048, "max_seqlen_kv": 4096},
    passes={"cp_size": 2, "max_seqlen_q": 2048, "max_seqlen_kv": 4096, "attn_mask_type": "no_mask"},
)
def causal_over_equal_lengths(p: AttentionParams, env: Environment) -> bool:
    """Causal chunks without position offsets need equal lengths

    Why: only then does the diagonal run through the corners of the chunks.
    Fix: triton and tiled take offsets; a2a keeps sequences whole.
    Source: TransformerEngine v2.18, utils.py, lines 1177-1280 (causal cross attention).
    """
    return p.causal and p.cp_comm_type not in KEEPS_KEYS


@rule(
    "CP011",
    evidence="policy",
    fires_on={"cp_size": 2, "attn_mask_type": "arbitrary"},
    passes={"cp_size": 2, "attn_mask_type": "padding_causal"},
)
def masks_over_ranks(p: AttentionParams, env: Environment) -> Violation | None:
    """Mask tensors are not spread over ranks

    Why: each rank would need its rows of the mask and the columns as they travel; lengths, windows and a bias
    say the same in less memory.
    Fix: a causal or padding mask type, or a bias of -inf (post_scale_bias).
    Source: attnsel/context_parallel/parts.py; TransformerEngine v2.18, utils.py, lines 1177-1280.
    """
    if p.attn_mask_type == "arbitrary":
        return Violation("attn_mask_type", p.attn_mask_type, FreeText("a causal or padding type, or no_mask"))
    return None


@rule(
    "CP013",
    fires_on={"cp_size": 2, "core_attention_bias_type": "post_scale_bias", "cp_comm_type": "a2a"},
    passes={"cp_size": 2, "core_attention_bias_type": "post_scale_bias"},
)
def bias_stays_with_its_rows(p: AttentionParams, env: Environment) -> Violation | None:
    """A bias goes with p2p and all_gather, and with dense tensors

    Why: a rank holds its rows of the bias and all columns. After an all-to-all it would need other rows, as
    many numbers as there are scores; of packed sequences the columns of each start anew.
    Fix: p2p or all_gather, bshd or sbhd.
    Source: attnsel/context_parallel/parts.py; TransformerEngine v2.18, context_parallel.py, lines 3083, 4229.
    """
    if not p.has_bias:
        return None
    found = limit(p, "cp_comm_type", OneOf(*KEEPS_HEADS))
    if found is None and p.qkv_format == "thd":
        return Violation("qkv_layout", p.qkv_layout, FreeText("dense tensors"))
    return found


@rule(
    "CP014",
    where(lambda record: record.dropout == "contract" and "head_offset" not in record.takes),
    requires={"cp_comm_type": OneOf(*KEEPS_HEADS)},
    fires_on={"cp_size": 2, "attention_dropout": 0.125, "cp_comm_type": "a2a"},
    passes={"cp_size": 2, "attention_dropout": 0.125},
)
def dropout_counts_heads(p: AttentionParams, env: Environment) -> bool:
    """Without an offset for heads, dropout goes with p2p and all_gather

    Why: the generator counts heads, and after an all-to-all a rank's first head is not the first of all: the
    kernels, which have no offset for heads, would drop other entries than one process does.
    Fix: p2p or all_gather; tiled has such an offset.
    Source: attnsel/backends/contract.py (Spec.head_offset).
    """
    return p.dropout


@rule(
    "CP015",
    requires={"bottom_right_diagonal": OneOf(False)},
    fires_on={
        "cp_size": 2,
        "attention_dropout": 0.125,
        "attn_mask_type": "causal_bottom_right",
        "max_seqlen_kv": 8192,
        "window_size": (64, 0),
    },
    passes={
        "cp_size": 2,
        "attention_dropout": 0.125,
        "attn_mask_type": "causal_bottom_right",
        "max_seqlen_kv": 8192,
    },
)
def dropout_on_a_moved_diagonal(p: AttentionParams, env: Environment) -> bool:
    """Dropout and a bottom-right diagonal over unequal lengths do not go together

    Why: a part of the sequence moves its diagonal by an offset, and dropout counts from there. Without a
    left bound and ALiBi the right bound moves instead, if it does not move below 0; padded batches and packed
    sequences have a diagonal each.
    Fix: a2a, which keeps sequences whole; a diagonal from the top left, equal lengths, or no dropout.
    Source: attnsel/backends/contract.py (Spec: visibility and dropout share q_offset).
    """
    if p.cp_comm_type in KEEPS_KEYS or not p.dropout:
        return False
    alibi = p.core_attention_bias_type == "alibi"
    if not (p.causal or p.windowed or alibi):
        return False
    left, right = p.window_size
    moves = p.padding or p.max_seqlen_q != p.max_seqlen_kv
    expressible = left == -1 and not alibi and not p.padding and right + p.max_seqlen_kv >= p.max_seqlen_q
    return moves and not expressible


@rule(
    "CP012",
    WITHOUT_OFFSETS,
    requires={"cp_comm_type": OneOf(*KEEPS_KEYS)},
    fires_on={"cp_size": 2, "core_attention_bias_type": "alibi"},
    passes={"cp_size": 2, "core_attention_bias_type": "alibi", "cp_comm_type": "a2a"},
)
def alibi_needs_offsets(p: AttentionParams, env: Environment) -> bool:
    """ALiBi over ranks needs a kernel with position offsets

    Why: its penalty is a distance in the whole sequence, not within a chunk.
    Fix: triton and tiled take offsets; a2a keeps positions together.
    Source: attnsel/backends/contract.py (q_offset, kv_offset); TransformerEngine v2.18, utils.py, line 1177.
    """
    return p.core_attention_bias_type == "alibi"


@rule(
    "CP020",
    "cudnn",
    when=cudnn("<9.0.0"),
    fires_on={"cp_size": 2, "max_seqlen_q": 16576, "cudnn": "8.9.7"},
    passes={"cp_size": 2, "max_seqlen_q": 16640, "cudnn": "8.9.7"},
)
def old_cudnn_causal_chunks(p: AttentionParams, env: Environment) -> Violation | None:
    """Below cuDNN 9.0 the causal chunks of every step must be multiples of 64

    Why: every step of the exchange is a cuDNN call of its own, on chunks of s / (2 * cp_size) rows, and
    cuDNN 8 wants multiples of 64. So s must be a multiple of 128 * cp_size: with cp_size 2, 16534 is not
    divisible at all, 16576 / 4 is not a multiple of 64, and 16640 is the next that works. With a2a+p2p only
    the p2p part counts, whose size a question does not say: two ranks at least.
    Fix: pad the sequence, or cuDNN 9.
    Source: TransformerEngine v2.18, fused_attn.cpp, comment "sequence length"; TransformerEngine#1051.
    """
    chunked = p.causal or p.cp_comm_type in GATHERS
    if chunked and p.cp_comm_type not in KEEPS_KEYS:
        return _length(p, 64 * 2 * _ring_ranks(p))
    return None


@rule(
    "CP021",
    "cudnn",
    when=cudnn("<9.0.0"),
    fires_on={"cp_size": 2, "max_seqlen_q": 4160, "attn_mask_type": "no_mask", "cudnn": "8.9.7"},
    passes={"cp_size": 2, "max_seqlen_q": 4224, "attn_mask_type": "no_mask", "cudnn": "8.9.7"},
)
def old_cudnn_chunks(p: AttentionParams, env: Environment) -> Violation | None:
    """Below cuDNN 9.0 the ranks' parts in every step must be multiples of 64

    Why: around a ring every step is a cuDNN call on s / cp_size rows, and cuDNN 8 wants multiples of 64.
    Fix: pad the sequence to a multiple of 64 * cp_size, or cuDNN 9.
    Source: TransformerEngine v2.18, fused_attn.cpp, comment "sequence length"; TransformerEngine#1051.
    """
    if not p.causal and p.cp_comm_type in RING:
        return _length(p, 64 * _ring_ranks(p))
    return None


def _ring_ranks(p: AttentionParams) -> int:
    """Ranks that keys travel between, at least."""
    return 2 if p.cp_comm_type in NESTED else p.cp_size
