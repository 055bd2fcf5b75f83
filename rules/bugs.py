"""BUG0xx: what is accepted, runs and is wrong, or takes the process down.

Each rule refuses what its report shows and no more; where no fixed release is known, the interval is open.
A policy can allow a known bug by its code. ``sdpa.cudnn`` runs on the same libcudnn as ``cudnn``, so bugs of
the library touch both; there a folded mask is what cuDNN calls a bias.
"""

from __future__ import annotations

from attnsel.backends.registry import running
from attnsel.environment import Environment
from attnsel.environment.versions import cudnn, cudnn_frontend, flash_attn_4, torch
from attnsel.params import ITEMSIZE, AttentionParams, Tensors, TensorSpec
from attnsel.rules.api import limit, rules_about
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import AtLeast, FreeText, Multiple, OneOf

rule = rules_about("cudnn", evidence="reported")

CUDNN_KERNELS = running("cudnn")
HOPPER = frozenset({90})
BLACKWELL = range(100, 110)
_ROW_BIAS = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": "111s"}
PACKED = {"qkv_layout": "thd", "attn_mask_type": "padding_causal"}


def score_tensor(p: AttentionParams) -> bool:
    """cuDNN adds a tensor to the scores: a bias, or the mask that PyTorch passes as one."""
    return p.has_bias or p.attn_mask_type == "arbitrary"


# libcudnn.


@rule(
    "BUG001",
    CUDNN_KERNELS,
    when=cudnn("==9.10.0", "==9.10.1"),
    evidence="source",
    passes={"cudnn": "9.10.2"},
)
def withdrawn_releases(p: AttentionParams, env: Environment) -> Violation | None:
    """cuDNN 9.10.0 and 9.10.1 have known attention bugs

    Why: NVIDIA's own frontend refuses every FP16 and BF16 attention graph on them (FP8 on 9.10.0 only), and
    PyTorch's continuous integration crashed.
    Fix: cuDNN 9.10.2 or newer.
    Source: cudnn-frontend 1.32, sdpa_support_surface.h, lines 215 and 287; TransformerEngine v2.18,
    fused_attn.cpp, line 468; pytorch#168378.
    """
    if p.fp8_attention and env.cudnn is not None and env.cudnn.patch == 1:
        return None
    return Violation("cudnn", env.cudnn, FreeText("9.10.2 or newer, or 9.9 and older"))


@rule(
    "BUG002",
    when=cudnn("==9.14.0"),
    requires={"window_size": OneOf((-1, -1))},
    evidence="source",
    fires_on={"attn_mask_type": "no_mask", "window_size": (512, 512)},
    passes={"attn_mask_type": "causal", "window_size": (512, 0)},
)
def windows_on_9_14_0(p: AttentionParams, env: Environment) -> bool:
    """cuDNN 9.14.0 reads out of bounds with a window over more than 1024 keys

    Why: sliding windows without a causal mask end in an illegal memory access.
    Fix: any other cuDNN.
    Source: cudnn-frontend 1.32, sdpa_support_surface.h, line 294; TransformerEngine#2344.
    """
    return p.window_size[0] != -1 and not p.causal and p.max_seqlen_kv > 1024


@rule(
    "BUG003",
    training=True,
    when=cudnn("<=9.15.0"),
    evidence="source",
    requires={"max_seqlen_kv": Multiple(128)},
    fires_on={"cuda_graph": True, "max_seqlen_q": 1000},
    passes={"cuda_graph": True},
)
def graphs_with_odd_lengths(p: AttentionParams, env: Environment) -> bool:
    """Up to cuDNN 9.15.0 CUDA graphs need keys in multiples of 128 for training

    Why: for other lengths the frontend quietly adds a padding mask, whose lengths a captured graph does not
    hold.
    Fix: pad the keys, give a padding mask yourself, or cuDNN 9.15.1.
    Source: TransformerEngine#2344 and v2.18, fused_attn.cpp, lines 510-522.
    """
    return p.cuda_graph and not p.padding and p.qkv_format in ("bshd", "sbhd")


@rule(
    "BUG004",
    "sdpa.cudnn",
    training=True,
    when=cudnn(">=9.10.0,<=9.15.0"),
    arch=HOPPER | frozenset(BLACKWELL),
    requires={"max_seqlen_q": Multiple(128)},
    fires_on={"cudnn": "9.10.2", "max_seqlen_q": 261},
    passes={"cudnn": "9.10.2"},
)
def odd_lengths_in_pytorch(p: AttentionParams, env: Environment) -> None:
    """cuDNN 9.10 to 9.15.0 in PyTorch: wrong gradients unless s_q % 128 == 0

    Why: the backward reads and writes out of bounds when the number of queries is no multiple of 128.
    Fix: pad the queries, or cuDNN 9.15.1 and newer.
    Source: pytorch#169849, pytorch#167101 (cuDNN <= 9.15.0), pytorch#171627.
    """


@rule(
    "BUG005",
    CUDNN_KERNELS,
    when=cudnn(">=9.19.0"),
    arch=BLACKWELL,
    requires={"num_gqa_groups": AtLeast(8)},
    fires_on={"is_training": False, "max_seqlen_q": 1, "max_seqlen_kv": 2048, "num_gqa_groups": 4},
    passes={"is_training": False, "max_seqlen_q": 1, "max_seqlen_kv": 2048, "num_gqa_groups": 8},
)
def few_kv_heads_decoding(p: AttentionParams, env: Environment) -> bool:
    """On B200 decoding with fewer than 8 key/value heads is silently wrong

    Why: single-query attention loses accuracy in a way that only long generations show (92 % of them damaged,
    36 points on one benchmark). sm120 is not affected.
    Fix: repeat the key/value heads to 8 or more, or use sdpa.efficient. No fixed cuDNN is known.
    Source: pytorch#193893 (cuDNN 9.19 and 9.20), pytorch#194927 (blocks single queries from 9.19 on).
    """
    return p.max_seqlen_q == 1


@rule(
    "BUG006",
    CUDNN_KERNELS,
    training=True,
    when=cudnn(">=9.19.0,<9.26.0"),
    arch=HOPPER,
    requires={"max_seqlen_kv": Multiple(128)},
    fires_on={"attn_mask_type": "arbitrary", "max_seqlen_q": 704},
    passes={"attn_mask_type": "arbitrary", "max_seqlen_q": 640},
)
def half_filled_key_tile(p: AttentionParams, env: Environment) -> bool:
    """On Hopper a mask or bias over s_kv % 128 == 64 keys gives NaN in dQ

    Why: the empty half of the last tile of 128 keys is scored 0 instead of -inf; a row whose log-sum-exp is
    below -88.7 overflows there. Forward, dK and dV are right.
    Fix: pad the keys to a multiple of 128 (masked), use a causal flag instead of a mask, or cuDNN 9.26.
    Source: pytorch#196678 (torch 2.11 to 2.13, cuDNN 9.19 and 9.20), pytorch#196861 (up to 9.25.1), trl#7181.
    """
    return score_tensor(p) and p.max_seqlen_kv % 128 == 64


@rule(
    "BUG007",
    training=True,
    when=(cudnn(">=9.12.0,<=9.15.0"), cudnn_frontend("<1.15.0")),
    arch=HOPPER,
    requires={"max_seqlen_kv": Multiple(128)},
    fires_on={"max_seqlen_q": 1000},
)
def odd_key_lengths(p: AttentionParams, env: Environment) -> bool:
    """cuDNN 9.12 to 9.15.0 with an old frontend: NaN gradients at odd lengths

    Why: the backward goes wrong when the keys are no multiple of 128 and there is no padding mask. From 1.15
    on the frontend adds the mask by itself.
    Fix: nvidia-cudnn-frontend 1.15 or newer, or a padding mask.
    Source: NVIDIA/cudnn-frontend#160.
    """
    return p.qkv_format != "thd" and not p.padding


ONE_QUERY = {"max_seqlen_q": 1, "max_seqlen_kv": 128, "attn_mask_type": "no_mask"}


@rule(
    "BUG008",
    CUDNN_KERNELS,
    training=True,
    when=cudnn(">=9.25.0"),
    arch=HOPPER,
    fires_on=ONE_QUERY,
    passes={**ONE_QUERY, "attn_mask_type": "padding"},
)
def one_query_backward(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper cuDNN 9.25 and newer give NaN in dK, dV for a single query

    Why: strongly negative scores over keys in multiples of 128 come back as NaN; 97 keys, or a padding mask,
    are right.
    Fix: a padding mask with the full lengths. No fixed cuDNN is known.
    Source: NVIDIA/cudnn-frontend#1072 (9.25.1 and 9.26.0 on H200).
    """
    if p.max_seqlen_q == 1 and p.max_seqlen_kv % 128 == 0 and not p.padding:
        return Violation("max_seqlen_q", 1, FreeText("more than one query, or a padding mask"))
    return None


@rule(
    "BUG009",
    CUDNN_KERNELS,
    training=True,
    when=cudnn(">=9.26.0"),
    fires_on={**ONE_QUERY, "batch_size": 1, "num_heads": 1},
    passes={**ONE_QUERY, "batch_size": 2, "num_heads": 1},
)
def planner_crash(p: AttentionParams, env: Environment) -> Violation | None:
    """cuDNN 9.26 and newer crash while planning a backward of one row

    Why: with one sequence, one query head and one query the planner segfaults, and the process with it.
    Fix: any other shape (two queries, say), or an older cuDNN. No fixed cuDNN is known.
    Source: NVIDIA/cudnn-frontend#1071; reproduced without a GPU on 9.26.0 and 9.28.0, not on 9.18.1.
    """
    if p.batch_size == p.num_heads == p.max_seqlen_q == 1:
        return Violation("max_seqlen_q", 1, FreeText("more than one query, head or sequence"))
    return None


@rule(
    "BUG010",
    when=cudnn(">=9.26.0"),
    fires_on={**PACKED, "max_seqlen_q": 1, "max_seqlen_kv": 300, "num_gqa_groups": 4, "return_lse": True},
    passes={**PACKED, "max_seqlen_q": 2, "max_seqlen_kv": 300, "num_gqa_groups": 4, "return_lse": True},
)
def lse_of_packed_single_queries(p: AttentionParams, env: Environment) -> Violation | None:
    """cuDNN 9.26 and newer lose log-sum-exps of packed single queries

    Why: with grouped heads and one query per sequence only the first head of each group is written; the
    output is right, whatever uses the log-sum-exp (backward, merging) is not.
    Fix: padded sequences. No fixed cuDNN is known.
    Source: NVIDIA/cudnn-frontend#1083 (9.26 and 9.27, every architecture); flashinfer-ai/flashinfer#5245.
    """
    needs_lse = p.return_lse or p.is_training
    if needs_lse and p.qkv_format == "thd" and p.max_seqlen_q == 1:
        return limit(p, "num_gqa_groups", OneOf(p.num_heads))
    return None


@rule(
    "BUG011",
    training=True,
    when=cudnn("<9.18.0"),
    arch=HOPPER,
    requires={"pad_between_seqs": OneOf(False)},
    fires_on={**PACKED, "pad_between_seqs": True},
    passes={**PACKED},
)
def gaps_between_sequences(p: AttentionParams, env: Environment) -> None:
    """On Hopper gaps between packed sequences give NaN gradients below cuDNN 9.18

    Why: the backward's workspace is not initialised where no token lies. Blackwell is not affected.
    Fix: cuDNN 9.18, or sequences packed without gaps.
    Source: NVIDIA/TransformerEngine#2186 (seen with 9.7.1).
    """


@rule(
    "BUG012",
    training=True,
    when=cudnn("<9.26.0"),
    requires={"head_dim_v": OneOf(64, 128, 256)},
    fires_on={**PACKED, "softmax_type": "learnable", "head_dim_qk": 192},
    passes={**PACKED, "softmax_type": "learnable"},
)
def sink_gradient_of_packed(p: AttentionParams, env: Environment) -> bool:
    """Below cuDNN 9.26 packed sequences give learned sinks a wrong gradient

    Why: the generic kernel reads the saved log-sum-exps as if they were dense, even past their end. Value
    head dimensions 64, 128 and 256 have kernels of their own.
    Fix: cuDNN 9.26, or pad head_dim_v to one of those.
    Source: NVIDIA/TransformerEngine#3249, NVIDIA/TransformerEngine#3470.
    """
    return p.qkv_format == "thd" and p.softmax_type == "learnable"


@rule(
    "BUG013",
    arch=frozenset({89, 120}),
    evidence="source",
    requires={"kv_cache": OneOf("none")},
    fires_on={"kv_cache": "contiguous", "is_training": False, "attn_mask_type": "padding_causal"},
)
def caches_on_ada(p: AttentionParams, env: Environment) -> None:
    """On sm89 and sm120 cuDNN is wrong with a key/value cache

    Why: TransformerEngine found a numerical error on sm89 and switched the combination off for every version
    until it is resolved.
    Fix: sdpa.efficient, triton or tiled for decoding.
    Source: NVIDIA/TransformerEngine#1776, NVIDIA/TransformerEngine#2121; v2.18, utils.py, lines 845-847.
    """


@rule(
    "BUG014",
    evidence="source",
    fires_on={"tensors": {"q": {"shape": (2, 4096, 16, 128), "stride": (8650752, 2112, 132, 1)}}},
    passes={"tensors": {"q": {"shape": (2, 4096, 16, 128), "stride": (8912896, 2176, 136, 1)}}},
)
def rows_between_16_bytes(p: AttentionParams, env: Environment) -> Violation | None:
    """cuDNN is wrong where q, k or v steps by no multiple of 16 bytes

    Why: its kernels move 16 bytes at a time, and libcudnn does not compare strides with the alignment that
    was declared: results are wrong on Hopper and Blackwell, and Ampere and Ada fault. cudnn-frontend refuses
    such strides from 1.32 on.
    Fix: attnsel copies the tensor (adaptation "contiguous"). A row of heads whose width is no multiple of 8
    half-precision numbers is the usual cause.
    Source: cudnn-frontend 1.32, sdpa_support_surface.h, lines 20 to 45; node_interface.h, line 38 (#1571).
    """
    tensors, width = p.tensors, 16 // ITEMSIZE[p.dtype]
    if tensors.q is tensors.k is tensors.v is None or p.head_dim_qk % width or p.head_dim_v % width:
        return None  # rows of other widths are refused for that, and dense once they are padded
    for name, spec in (("q", tensors.q), ("k", tensors.k), ("v", tensors.v)):
        if spec is not None and not spec.steps_by(width):
            return Violation(f"tensors.{name}", spec.stride, FreeText("contiguous: steps of whole 16 bytes"))
    return None


@rule(
    "BUG015",
    evidence="measured",
    requires={"is_training": OneOf(False)},
    fires_on={"is_training": True, **_ROW_BIAS},
    passes={"is_training": False, **_ROW_BIAS},
)
def gradients_of_a_row_of_bias(p: AttentionParams, env: Environment) -> bool:
    """cuDNN's backward is wrong where one row of bias serves all queries (111s)

    Why: libcudnn plans it, and gives gradients of q, k, v and of the bias that are off by their own size, or
    an illegal access that ends the process's CUDA context; the forward is right. Shapes that span queries and
    keys are right in both.
    Fix: expand the bias to 11ss (attnsel sums its gradient over the queries), or triton.
    Source: tests/gpu on an H200, cuDNN 9.19.0, frontend 1.28.0, 2026-11-26: bf16 and fp16, d 64 and 128, with
    and without the bias's own gradient; cudnn-frontend's documentation lists no such shape for dBias.
    """
    return p.has_bias and p.core_attention_bias_shape == "111s"


# PyTorch.


@rule(
    "BUG030",
    "sdpa.cudnn",
    when=torch("==2.5.0"),
    arch=HOPPER,
    requires={"is_training": OneOf(False)},
    passes={"is_training": False},
)
def nan_in_torch_2_5_0(p: AttentionParams, env: Environment) -> None:
    """PyTorch 2.5.0's cuDNN attention trains into NaN

    Why: 2.5.0 made it the default on Hopper; gradients turned to NaN, and 2.5.1 put it last again.
    Fix: PyTorch 2.5.1 or newer.
    Source: huggingface/diffusers#9768, pytorch#138649, pytorch#139298.
    """


def _shared_kv_head(rows: int) -> Tensors:
    kv = TensorSpec(shape=(1, rows, 64, 64), stride=(rows * 64, 64, 0, 1))
    return Tensors(k=kv, v=kv)


_HEAD_AXIS = {"bshd": 2, "sbhd": 2, "bhsd": 1}


def _one_kv_head_in_memory(p: AttentionParams) -> bool:
    """k and v are views that repeat one head (stride 0), as ``expand`` makes them."""
    axis = _HEAD_AXIS.get(p.layout.kv_format)
    specs = (p.tensors.k, p.tensors.v)
    return axis is not None and all(
        s is not None and len(s.shape) == 4 and s.stride[axis] == 0 for s in specs
    )


@rule(
    "BUG031",
    "sdpa.efficient",
    when=torch("<2.14.0"),
    device={"cuda"},
    evidence="source",
    fires_on={
        "is_training": False,
        "batch_size": 1,
        "num_heads": 64,
        "head_dim_qk": 64,
        "max_seqlen_q": 1,
        "max_seqlen_kv": 512,
        "tensors": _shared_kv_head(512),
    },
    passes={"is_training": False, "max_seqlen_q": 1, "max_seqlen_kv": 512},
)
def heads_taken_for_rows(p: AttentionParams, env: Environment) -> Violation | None:
    """Before PyTorch 2.14 the efficient kernel misreads a repeated key/value head

    Why: when k and v repeat one head by stride 0 and the last tile holds one query, it treats heads as rows.
    It then reads past the end above 32 heads, forgets a causal mask over more keys than queries, and takes
    the wrong row of a mask tensor.
    Fix: copy k and v (adaptation "contiguous"), or PyTorch 2.14.
    Source: kernel_forward.h of the 2.13.0 and 2.14.1 wheels ("iterate over heads instead of queries");
    pytorch#192138, pytorch#191984.
    """
    if p.is_training or p.return_lse or p.max_seqlen_q % 32 != 1 or not _one_kv_head_in_memory(p):
        return None
    misread = p.num_heads > 32 or (p.causal and p.max_seqlen_kv > p.max_seqlen_q)
    if not misread and (p.attn_mask_type != "arbitrary" or p.max_seqlen_q == 1):
        return None
    return Violation(
        "tensors.k", p.tensors.k.stride if p.tensors.k else None, FreeText("contiguous key/value heads")
    )


LONG_MASK = {
    "attn_mask_type": "arbitrary",
    "batch_size": 1,
    "num_heads": 1,
    "is_training": False,
    "max_seqlen_q": 65537,
    "max_seqlen_kv": 65537,
}


@rule(
    "BUG032",
    "sdpa.efficient",
    training=True,
    device={"cuda"},
    fires_on={"attn_mask_type": "arbitrary", "batch_size": 1, "max_seqlen_q": 53936},
    passes={"attn_mask_type": "arbitrary", "batch_size": 1, "max_seqlen_q": 46344},
)
def long_masks_backward(p: AttentionParams, env: Environment) -> Violation | None:
    """The efficient backward fails with a mask of more than 2**31 scores

    Why: lengths above 46344 with a mask end in an error in the backward, after the forward has run.
    Fix: no mask (causal is free), or triton or tiled.
    Source: pytorch#147585 (s = 53936 fails, 46344 runs). No fixed release is known.
    """
    if p.attn_mask_type == "arbitrary" and p.max_seqlen_q * p.max_seqlen_kv > 46344**2:
        return Violation("attn_mask_type", "arbitrary", FreeText("no mask tensor above 46344 x 46344"))
    return None


@rule(
    "BUG033",
    "sdpa.efficient",
    when=torch("<2.13.0"),
    device={"cuda"},
    evidence="source",
    fires_on={**LONG_MASK, "torch": "2.12.1"},
    passes={**LONG_MASK, "max_seqlen_q": 65536, "max_seqlen_kv": 65536, "torch": "2.12.1"},
)
def long_masks(p: AttentionParams, env: Environment) -> Violation | None:
    """Before PyTorch 2.13 the efficient kernel misreads masks over 2**32 scores

    Why: row times row length is a product of 32 bits, so that rows from 2**32 / s_kv on read an earlier row:
    from 65537 x 65537 on. No error, no NaN. One row for all queries, and a causal flag, are right.
    Fix: PyTorch 2.13, a causal flag in place of the mask, or triton.
    Source: pytorch#187225, pytorch#162588, pytorch#187227; kernel_forward.h in the wheels of 2.8.0 to 2.12.1
    ("query_start * p.bias_strideM" of uint32_t and int32_t) and of 2.13.0 (int64_t(query_start)).
    """
    mask = p.tensors.mask
    one_row = mask is not None and (len(mask.shape) < 2 or mask.shape[-2] == 1)
    if p.attn_mask_type != "arbitrary" or one_row or p.max_seqlen_q * p.max_seqlen_kv <= 1 << 32:
        return None
    return Violation("attn_mask_type", "arbitrary", FreeText("no mask tensor above 2**32 scores"))


# FlashAttention's packages. A backward that launches nothing on small cards: FLASH214.


@rule(
    "BUG060",
    "flash_attn.4",
    training=True,
    when=flash_attn_4("<4.0.0b20"),
    arch=BLACKWELL,
    fires_on={"gpu": "B200", "flash_attn_4": "4.0.0b11", "head_dim_qk": 256},
    passes={"gpu": "B200", "flash_attn_4": "4.0.0b11"},
)
def wide_heads_of_a_batch(p: AttentionParams, env: Environment) -> Violation | None:
    """Early flash-attn-4 gives wrong gradients at head_dim 256 on B200

    Why: with two sequences or more dQ came out five times too large and nearly reversed; the forward was
    right. Which beta mended it nobody says; 4.0.0b20 has another backward for that width.
    Fix: pip install --pre 'flash-attn-4>=4.0.0b36'.
    Source: TransformerEngine#3216 (4.0.0b11 on a B200).
    """
    if p.batch_size > 1 and max(p.head_dim_qk, p.head_dim_v) == 256:
        return Violation("flash_attn_4", env.flash_attn_4, FreeText("4.0.0b36 or newer"))
    return None
