"""HINT0xx: questions that are answered as they stand and may not be what was meant."""

from __future__ import annotations

from typing import Any

from attnsel.base.rows import read_rows
from attnsel.environment import Environment
from attnsel.environment.releases import OLDEST_INSTALLED, bundled_frontend
from attnsel.environment.versions import Version, cudnn, transformer_engine
from attnsel.params import AttentionParams, MaskType
from attnsel.rules.api import REGISTRY, Advice, Rule, archs_of, gates_of, hint

_MANY_HEADS = 256  # Falcon-180B has 232
_NARROW, _MOST_KEY_HEADS = 96, (72, 128)  # of narrow heads OPT-66B's 72 are a bound, of wider ones T5-11B's
_SHORT_ROWS = {  # how many sequences, by their rows, are more than a batch
    "sbhd": {1: 32, 2: 16, 3: 24, 4: 32, 5: 320, 6: 384, 7: 448, 8: 512},
    "bshd": {2: 128, 3: 192, 4: 256},
}
_MASK_STEP = 8  # elements; mem_eff_alignment in PyTorch's attention.cpp
_BOUNDARY = 16  # bytes
_UNMASKED: dict[str, MaskType] = {"causal": "no_mask", "padding_causal": "padding"}


def _top_left(p: AttentionParams) -> bool:
    """A causal mask anchored at the top left, over sequences of different lengths."""
    return p.causal and not p.bottom_right and p.max_seqlen_q != p.max_seqlen_kv


@hint("HINT001", fires_on={"max_seqlen_q": 128, "max_seqlen_kv": 8192}, passes={"max_seqlen_q": 128})
def aligned_top_left(p: AttentionParams, env: Environment) -> Advice | None:
    """Causal masks over unequal lengths are aligned top left here

    Why: query i sees keys 0 to i, as with F.sdpa's is_causal and TransformerEngine's "causal". FlashAttention
    2.1 and newer, and causal_bottom_right, align bottom right: the last query sees every key, as new tokens
    behind a cache should.
    Fix: attn_mask_type="causal_bottom_right" (or padding_causal_bottom_right) where that was meant.
    Source: torch 2.13, documentation of scaled_dot_product_attention, is_causal; flash-attention v2.8.3,
    README.md, "2.1: Change behavior of causal flag"; Dao-AILab/flash-attention#1778.
    """
    q, kv = p.max_seqlen_q, p.max_seqlen_kv
    if not _top_left(p) or q <= 1 or not kv:
        return None
    other = f"{p.attn_mask_type}_bottom_right"
    sees = f"no query sees the last {kv - q} keys" if q < kv else f"the last {q - kv} queries see every key"
    text = f"{p.attn_mask_type} aligns top left: {sees}. FlashAttention's way is {other}"
    return Advice(text, {"attn_mask_type": other})


@hint(
    "HINT002",
    fires_on={"max_seqlen_q": 1, "max_seqlen_kv": 8192, "is_training": False},
    passes={"max_seqlen_q": 1, "max_seqlen_kv": 8192, "attn_mask_type": "no_mask", "is_training": False},
)
def one_query_sees_one_key(p: AttentionParams, env: Environment) -> Advice | None:
    """A single query under a top-left causal mask sees the first key alone

    Why: a decoding step wants the newest token to see the whole cache. A single query that sees everything
    needs no mask, and then kernels that take none are open too.
    Fix: attn_mask_type="no_mask" ("padding" with lengths); with a window "causal_bottom_right".
    Source: torch 2.13, documentation of scaled_dot_product_attention, is_causal; pytorch#103749.
    """
    if not _top_left(p) or p.max_seqlen_q != 1:
        return None
    cornered = f"{p.attn_mask_type}_bottom_right"
    other = cornered if p.windowed else _UNMASKED[p.attn_mask_type]
    say = cornered if p.windowed else f"{cornered} or {other}"
    text = (
        f"one query under top-left {p.attn_mask_type} sees 1 key of {p.max_seqlen_kv}. To decode, say {say}"
    )
    return Advice(text, {"attn_mask_type": other})


@hint(
    "HINT003",
    fires_on={"fp8": True},
    passes={"fp8": True, "fp8_meta": {"recipe": {"kind": "delayed", "fp8_dpa": True}}},
)
def fp8_without_recipe(p: AttentionParams, env: Environment) -> Advice | None:
    """FP8 autocast without a recipe leaves attention in the dtype of q, k and v

    Why: FP8 training runs linear layers in FP8; attention itself is in FP8 only where a recipe has fp8_dpa
    (or fp8_mha).
    Fix: --fp8-recipe delayed, current, mxfp8 or block; in Python a recipe in fp8_meta with fp8_dpa=True.
    Source: TransformerEngine v2.18, common/recipe/__init__.py, fp8_dpa.
    """
    if not p.fp8 or p.recipe is not None or p.fp8_attention:
        return None
    return Advice(
        f"fp8 without a recipe: attention stays in {p.dtype}. --fp8-recipe (delayed, …) puts it in FP8"
    )


@hint(
    "HINT004",
    evidence="documented",
    fires_on={"num_heads": 4096, "max_seqlen_q": 16},
    passes={"num_heads": 16, "max_seqlen_q": 4096},
)
def heads_and_rows_swapped(p: AttentionParams, env: Environment) -> Advice | None:
    """Heads that look like a length, over few rows: h and s are perhaps swapped

    Why: both orders are four numbers and both run, each over the wrong dimension. F.sdpa takes [b, h, s, d];
    TransformerEngine and FlashAttention take [b, s, h, d]. Told are more than 256 heads over fewer rows; and
    in self attention, over a quarter as many rows or fewer, more key and value heads than any model that is
    known has: 128, and 72 where a head has at most 96 dimensions.
    Fix: qkv_format="bhsd" for tensors made for F.sdpa, or q.transpose(1, 2).
    Source: the argument documentation of the three; Falcon-180B has 232 heads in 8 groups (litgpt 0.5.13,
    config.py), T5-11B 128 of 128 (t5 0.9.4, bi_v1_11B.gin), OPT-66B 72 (llm-analysis 0.2.2, model_configs).
    """
    heads, rows = p.num_heads, p.max_seqlen_q
    if p.qkv_format == "thd" or not 0 < rows < heads:
        return None
    own = heads == p.num_gqa_groups and rows == p.max_seqlen_kv and 4 * rows <= heads
    if heads <= (_MOST_KEY_HEADS[p.head_dim_qk > _NARROW] if own else _MANY_HEADS):
        return None
    whose = "TransformerEngine's order is bshd" if p.qkv_format == "bhsd" else "F.sdpa's order is bhsd"
    text = f"{heads} heads of {rows} queries: are h and s swapped? This is {p.qkv_format}; {whose}"
    instead: dict[str, Any] = {}
    if not p.gqa and p.max_seqlen_kv == rows:
        instead = {"num_heads": rows, "num_gqa_groups": rows, "max_seqlen_q": heads, "max_seqlen_kv": heads}
    return Advice(text, instead)


@hint("HINT005", evidence="source", fires_on={"dtype": "fp32", "gpu": "H100"}, passes={"dtype": "bf16"})
def wide_numbers(p: AttentionParams, env: Environment) -> Advice | None:
    """The fastest kernels take fp16 and bf16, not fp32

    Why: FlashAttention, and cuDNN in training, run on tensor cores in half precision.
    Fix: call under torch.autocast("cuda", dtype=torch.bfloat16), or cast q, k and v; fp16 below sm80.
    Source: check_dtypes_low_precision, PyTorch sdp_utils.cpp; README.md of flash-attention v2.8.3.
    """
    if p.dtype not in ("fp32", "fp64") or env.device.type != "cuda" or env.arch is None:
        return None
    half = "bf16" if env.arch >= 80 else "fp16"
    text = f"{p.dtype}: FlashAttention takes fp16 and bf16. Under torch.autocast this would be {half}"
    return Advice(text, {"dtype": half})


@hint(
    "HINT006",
    evidence="documented",
    fires_on={"max_seqlen_q": 1024, "window_size": (4096, 0)},
    passes={"max_seqlen_q": 8192, "window_size": (4096, 0)},
)
def window_hides_nothing(p: AttentionParams, env: Environment) -> Advice | None:
    """A window as wide as the sequence hides nothing and rules kernels out

    Why: the same pairs are visible without it.
    Fix: leave window_size out for sequences this short.
    Source: the definition of window_size; AttentionParams.visible_pairs.
    """
    if not p.windowed or not p.max_seqlen_q or not p.max_seqlen_kv or _top_left(p):
        return None  # of unequal lengths the corner is in question first
    plain: tuple[int, int] = (-1, 0) if p.causal else (-1, -1)
    if p.replace(window_size=plain).visible_pairs != p.visible_pairs:
        return None
    left, right = p.window_size
    text = f"window {left},{right} hides nothing of {p.max_seqlen_q} × {p.max_seqlen_kv}: leave it out"
    return Advice(text, {"window_size": plain})


@hint(
    "HINT007",
    fires_on={"attention_dropout": 0.1, "is_training": False},
    passes={"attention_dropout": 0.1, "is_training": True},
)
def dropout_outside_training(p: AttentionParams, env: Environment) -> Advice | None:
    """Dropout takes place in training alone; F.sdpa applies it whenever given

    Why: F.sdpa reads dropout_p and nothing else, so that models pass 0.0 in eval mode themselves.
    Fix: nothing for inference; is_training=True (--training) where dropout was meant.
    Source: torch 2.13, documentation of scaled_dot_product_attention, the note on dropout_p.
    """
    if p.is_training or not p.attention_dropout:
        return None
    return Advice(f"inference: dropout {p.attention_dropout:g} does not take place (F.sdpa would apply it)")


@hint(
    "HINT008",
    evidence="source",
    fires_on={"attn_mask_type": "arbitrary", "max_seqlen_kv": 157},
    passes={"attn_mask_type": "arbitrary", "max_seqlen_kv": 160},
)
def mask_rows_unaligned(p: AttentionParams, env: Environment) -> Advice | None:
    """The efficient kernel wants mask rows on multiples of 8, or copies them

    Why: it reads 16 bytes of a mask or bias at a time. F.sdpa and attnsel pad a copy; called through an op
    that checks and does not pad, as by Inductor or xFormers, it says "attn_bias is not correctly aligned".
    Fix: slice the mask from a tensor whose last dimension is rounded up to a multiple of 8.
    Source: pad_bias and mem_eff_alignment, torch 2.13 attention.cpp; pytorch#121943,
    facebookresearch/xformers#813; attnsel/backends/sdpa/masks.py, align.
    """
    if env.device.type != "cuda" or not (p.attn_mask_type == "arbitrary" or p.has_bias):
        return None
    mask, step, end = p.tensors.mask, p.max_seqlen_kv, 'raw ops say "attn_bias is not correctly aligned"'
    if mask is not None and mask.alignment < _BOUNDARY:
        return Advice(f"the mask is not on a {_BOUNDARY}-byte boundary: sdpa.efficient gets a copy; {end}")
    if mask is not None and len(mask.stride) > 1:
        step = mask.stride[-2] if mask.shape[-1] > 1 else 0
    if not step % _MASK_STEP:
        return None
    wide = -(-step // _MASK_STEP) * _MASK_STEP
    return Advice(f"mask rows of {step} elements: sdpa.efficient gets a copy with rows of {wide}; {end}")


@hint("HINT009", of_tensors=True)
def mask_polarity(p: AttentionParams, env: Environment) -> Advice | None:
    """A bool mask that hides each query's own key, or whole rows, may be inverted

    Why: True means masked out here, as in TransformerEngine. In F.sdpa, and in most of transformers, True
    means visible. An inverted mask runs and gives wrong numbers. Told, of a mask on the CPU, is one that
    hides each query's own key and a set that models show (a triangle, a window, documents), and one that
    hides every key: from all rows of a sequence, or from a row that is not padding.
    Fix: attn_mask=mask for one that was made for F.sdpa, or attention_mask=~mask.
    Source: TransformerEngine v2.18, DotProductAttention.forward, attention_mask; torch 2.13, documentation of
    scaled_dot_product_attention, attn_mask.
    """
    return None


@hint(
    "HINT010",
    when=cudnn("<9.5.1"),
    evidence="reported",
    fires_on={"cp_size": 2, "num_heads": 8},
    passes={"cp_size": 2, "num_heads": 8, "is_training": False},
)
def torchs_own_ranks(p: AttentionParams, env: Environment) -> Advice | None:
    """PyTorch's context_parallel fails in the backward of a cuDNN below 9.5.1

    Why: such a build asserts that the result and its gradient have equal strides, and merged results have
    others. attnsel's exchanges between ranks are its own, and give cuDNN both with the same strides.
    Fix: sdpa_kernel without CUDNN_ATTENTION around context_parallel, or a torch built with newer cuDNN (2.7).
    Source: pytorch#176915; run_cudnn_SDP_bprop in torch's MHA.cpp, CUDNN_VERSION < 90501.
    """
    if not (p.context_parallel and p.is_training) or env.device.type != "cuda":
        return None
    return Advice(
        "PyTorch's own context_parallel fails with cuDNN here: same_strides(o, dO_) in backward (#176915); "
        "attnsel's does not use it"
    )


@hint(
    "HINT011",
    fires_on={"qkv_layout": "sbhd", "batch_size": 128, "max_seqlen_q": 2},
    passes={"qkv_layout": "sbhd", "batch_size": 2, "max_seqlen_q": 128},
)
def batch_and_rows_swapped(p: AttentionParams, env: Environment) -> Advice | None:
    """A large batch of very short sequences: b and s are perhaps swapped

    Why: TransformerEngine's default is [s, b, h, d], most others' is [b, s, h, d]; both run. Told is self
    attention over 2 to 4 rows, in sbhd with 8 times as many sequences or more (16 at least), in bshd with 64
    times as many; in sbhd over 5 to 8 rows with 64 times as many, and in training over a
    single row of 32 sequences or more, which sees itself alone.
    Fix: qkv_format="bshd" for [b, s, h, d], "sbhd" for [s, b, h, d].
    Source: TransformerEngine v2.18, dot_product_attention.py, DotProductAttention, qkv_format = "sbhd";
    flash-attention v2.8.3, flash_attn_interface.py, flash_attn_func, q.
    """
    batch, rows, fmt = p.batch_size, p.max_seqlen_q, p.qkv_format
    fewest = _SHORT_ROWS.get(fmt, {}).get(rows)
    if fewest is None or batch < fewest or rows != p.max_seqlen_kv or (rows == 1 and not p.is_training):
        return None
    other = "[b, s, h, d] is bshd" if fmt == "sbhd" else "[s, b, h, d] is sbhd"
    plural = "" if rows == 1 else "s"
    return Advice(f"{batch} sequences of {rows} row{plural}: are b and s swapped? This is {fmt}; {other}")


@hint("HINT012", of_tensors=True)
def slopes_below_zero(p: AttentionParams, env: Environment) -> Advice | None:
    """ALiBi slopes below 0 favour what is far away

    Why: -slope * distance is added to the scores here, as in FlashAttention and TransformerEngine, so slopes
    are above 0. Code that adds slope * (j - i) itself has them with either sign. Told of slopes on the CPU.
    Fix: alibi_slopes=-slopes.
    Source: flash-attention v2.8.3, flash_attn_interface.py, flash_attn_func, alibi_slopes; TransformerEngine
    v2.18, dot_product_attention.py, DotProductAttention.forward, alibi_slopes.
    """
    return None


# ---- What is right, and takes the square of the length where a window should bound it: data/slow_paths.csv

_MANY_TIMES = 4  # windows in a sequence: below, all keys are hardly more than those that are seen
_LONG: dict[str, Any] = {"window_size": (128, 0), "max_seqlen_q": 8192, "max_seqlen_kv": 8192}
_MXFP8: dict[str, Any] = {"fp8": True, "fp8_meta": {"recipe": {"kind": "mxfp8", "fp8_dpa": True}}}


def _slow_path(row: dict[str, str]) -> None:
    """Register a row: said of long sequences with a window that leaves out most of the keys."""
    fields = {"training": "is_training", "deterministic": "deterministic", "fp8": "fp8_attention"}
    asked = {field: row[name] == "yes" for name, field in fields.items() if row[name]}
    other = {row["without"]: False} if row["without"] else {}

    def said(p: AttentionParams, env: Environment) -> Advice | None:
        left, right = p.window_size
        seen = left + 1 + (0 if p.causal else max(right, 0))
        small = p.windowed and left >= 0 and seen * _MANY_TIMES <= p.max_seqlen_kv
        if not small or any(getattr(p, field) != value for field, value in asked.items()):
            return None
        return Advice(row["text"], other)

    said.__name__ = row["name"]
    said.__doc__ = f"{row['title']}\n\nWhy: {row['why']}\nFix: {row['fix']}\nSource: {row['source']}"
    fires_on = {**_LONG, "deterministic": row["deterministic"] == "yes"}
    hint(
        row["code"],
        when=gates_of(row["when"]),
        arch=archs_of(row["arch"]),
        evidence="reported",
        fires_on={**fires_on, **(_MXFP8 if row["fp8"] == "yes" else {})},
        passes={**fires_on, "window_size": (-1, -1)},
    )(said)


for _row in read_rows("attnsel.rules", "slow_paths"):
    _slow_path(_row)


# ---- TE0xx: what is known of TransformerEngine's own attention, where its version was stated -----------
# attnsel does not choose for TransformerEngine: these are notes beside the answer. Bugs of libcudnn itself
# are rules (rules/bugs.py), whoever calls it.


_SM120 = frozenset({120})


@hint(
    "TE001",
    when=transformer_engine(">=1.0"),
    fires_on={"transformer_engine": "2.4"},
    passes={"transformer_engine": None},
)
def own_frontend(p: AttentionParams, env: Environment) -> Advice | None:
    """TransformerEngine brings its own cudnn-frontend, in C++

    Why: up to 2.17 it is compiled in from a submodule, and from 2.18 on from the headers that were installed
    where it was built. The Python package nvidia-cudnn-frontend, which attnsel calls, changes nothing there.
    Fix: read rules about the frontend with --cudnn-frontend at the version that TransformerEngine has.
    Source: 3rdparty/cudnn-frontend at the tags v1.0 to v2.17.1; NVIDIA/TransformerEngine#3169;
    attnsel/environment/releases.py.
    """
    version = env.transformer_engine
    assert version is not None
    inside = bundled_frontend(version)
    if inside is None:
        if env.detected:
            return None  # it is here, and nobody asked about it
        return Advice(f"TransformerEngine {version} was built with a frontend of {OLDEST_INSTALLED} or newer")
    here = _about_frontend(p, env, env.cudnn_frontend)
    there = _about_frontend(p, env, inside)
    text = f"TransformerEngine {version} has cudnn-frontend {inside} compiled in"
    gone = [code for code in here if code not in there]
    new = [code for code in there if code not in here]
    if gone:
        text += f"; {', '.join(gone)} ({env.cudnn_frontend}) does not touch it"
    if new:
        text += f"; {', '.join(new)} would"
    return Advice(text) if gone or new or not env.detected else None


def _about_frontend(p: AttentionParams, env: Environment, frontend: Version | None) -> list[str]:
    """The rules against cuDNN whose verdict hangs on the frontend, at one version of it."""
    other = env.replace(cudnn_frontend=frontend)
    return [
        rule.code
        for rule in REGISTRY.rules.values()
        if _asks_for_frontend(rule) and rule.concerns(p) and rule.applies(other) and rule.find(p, other)
    ]


def _asks_for_frontend(rule: Rule) -> bool:
    """Whether it holds for some releases of the frontend. Being installed is asked of Python's alone."""
    return "cudnn" in rule.candidates and any(gate.component == "cudnn_frontend" for gate in rule.when)


@hint(
    "TE002",
    when=transformer_engine(">=2.14"),
    arch=_SM120,
    evidence="source",
    fires_on={"deterministic": True},
    passes={"deterministic": True, "is_training": False},
)
def deterministic_on_sm120(p: AttentionParams, env: Environment) -> Advice | None:
    """On sm120 TransformerEngine has no deterministic fused training

    Why: nvte_get_fused_attn_backend returns no backend there from 2.14 on, though libcudnn accepts it.
    Earlier releases missed the case.
    Fix: flash-attn, which TransformerEngine takes then where it is installed.
    Source: NVIDIA/TransformerEngine#2798; common/fused_attn/fused_attn.cpp of v2.14 to v2.18.
    """
    if not (p.deterministic and p.is_training):
        return None
    return Advice(
        f"TransformerEngine {env.transformer_engine} has no deterministic cuDNN training on sm120 "
        "(#2798), whatever libcudnn accepts"
    )


@hint(
    "TE003",
    when=transformer_engine(">=2.14,<2.18"),
    arch=_SM120,
    evidence="reported",
    fires_on={"qkv_layout": "thd", "attn_mask_type": "padding_causal"},
    passes={"qkv_layout": "thd", "attn_mask_type": "padding_causal", "is_training": False},
)
def packed_gradients_on_sm120(p: AttentionParams, env: Environment) -> Advice | None:
    """On sm120 TransformerEngine below 2.18 has wrong packed cuDNN gradients

    Why: the forward is right and the backward is not; its own unfused attention is right.
    Fix: TransformerEngine 2.18, or NVTE_FUSED_ATTN=0.
    Source: NVIDIA/TransformerEngine#3333 (2.17.0, cuDNN 9.25); fixed by 70957ad5a, first in v2.18.
    """
    if p.qkv_format != "thd" or not p.is_training:
        return None
    return Advice(
        f"TransformerEngine {env.transformer_engine}: thd gradients of its cuDNN attention are wrong on "
        "sm120 (#3333); fixed in 2.18"
    )


@hint(
    "TE004",
    when=transformer_engine(">=1.9,<1.12"),
    evidence="source",
    fires_on={"window_size": (1024, 0)},
    passes={},
)
def window_one_short(p: AttentionParams, env: Environment) -> Advice | None:
    """TransformerEngine 1.9 to 1.11 gives cuDNN a window that is one key short

    Why: cuDNN's left bound is exclusive and TransformerEngine's is inclusive; one was handed on as the other.
    FlashAttention and the unfused attention are right. attnsel hands on left + 1.
    Fix: TransformerEngine 1.12.
    Source: NVIDIA/TransformerEngine#1197, fixed by #1212, first in v1.12; windows came with #992, in v1.9.
    """
    if p.window_size[0] < 0:
        return None
    return Advice(
        f"TransformerEngine {env.transformer_engine}: cuDNN's windows are one key short, unlike its other "
        "backends' (#1197); fixed in 1.12"
    )


@hint(
    "TE005",
    when=(transformer_engine(">=1.0"), cudnn("<9.18.0")),
    arch=frozenset({90}),
    evidence="reported",
    fires_on={"qkv_layout": "thd", "attn_mask_type": "padding_causal", "num_heads": 8, "cp_size": 2},
    passes={"qkv_layout": "thd", "attn_mask_type": "padding_causal", "num_heads": 8},
)
def padded_over_ranks(p: AttentionParams, env: Environment) -> Advice | None:
    """TransformerEngine's padding over ranks: NaN on Hopper below cuDNN 9.18

    Why: the gaps that the padding leaves are what BUG011 is about, and a short sequence can be all gap on
    one rank.
    Fix: cuDNN 9.18; say --pad-between-seqs here, so that the rule is asked.
    Source: NVIDIA/TransformerEngine#2186 (2.6, cuDNN 9.7.1, Hopper).
    """
    packed = p.qkv_format == "thd" and p.is_training and p.context_parallel
    if not packed or p.pad_between_seqs:
        return None
    return Advice(
        "TransformerEngine pads packed sequences to 2 × cp_size; gaps give NaN gradients on Hopper below "
        "cuDNN 9.18 (#2186): --pad-between-seqs"
    )
