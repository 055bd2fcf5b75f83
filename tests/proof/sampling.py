"""Questions at random, for comparing rules with the library: seeded, and dense where answers change.

Most of a question is plain, so that what is special is seen alone or in pairs; numbers come from both
sides of the limits that rules name. ``near`` holds starting points, such as the rules' own examples. Every
question has a seed of its own, so that one more starting point does not change those it is not about.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.params.layout import LAYOUTS

_LENGTHS = (1, 1, 2, 3, 8, 63, 64, 65, 127, 128, 129, 192, 256, 512, 960, 1000, 1024, 1025, 2048, 4096, 16534)
_WIDTHS = (
    *(8, 16, 40, 64, 64, 72, 96, 120, 128, 128, 128),
    *(136, 144, 160, 192, 200, 248, 256, 264, 384, 512, 520),
)
_PAIRS = (
    *((192, 128), (192, 128), (128, 64), (64, 128), (160, 96)),
    *((136, 64), (136, 72), (256, 128), (100, 64)),
)
_FP8_WIDTHS = (
    *((16, 16), (32, 32), (48, 48), (64, 64), (96, 96), (112, 112), (192, 128), (192, 128), (256, 256)),
    *((128, 64), (64, 128), (160, 128), (128, 192), (144, 144), (72, 72), (128, 120), (256, 128), (64, 48)),
)
_MASKS = (
    *("no_mask", "causal", "causal", "causal", "causal_bottom_right"),
    *("padding", "padding_causal", "padding_causal_bottom_right"),
)
_PADDED = ("padding", "padding_causal", "padding_causal_bottom_right")
_PACKED = tuple(name for name, layout in LAYOUTS.items() if "thd" in layout[:2] and not layout.paged)
_PAGED = tuple(name for name, layout in LAYOUTS.items() if layout.paged)
_DENSE = tuple(name for name in LAYOUTS if name not in _PACKED and name not in _PAGED)

Change = Callable[[random.Random, dict[str, Any]], None]

FP8_SHARE = 0.2
"""Of all questions: FP8 attention has kernels and limits of its own, and fewer features to combine."""


def samples(
    seed: int,
    count: int,
    near: Sequence[Mapping[str, Any]] = (),
    fp8: float = FP8_SHARE,
    more: Sequence[Change] = (),
) -> Iterator[AttentionParams]:
    """``count`` different questions, a share ``fp8`` of them about FP8 attention; equal arguments give equal
    questions. ``more``: changes beside those that every library has an answer to."""
    changes = (*_CHANGES, *more)
    points: dict[bool, list[Mapping[str, Any]]] = {False: [], True: []}
    for fields in near:
        points[_about_fp8(fields)].append(fields)
    seen: set[AttentionParams] = set()
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        kind = rng.random() < fp8
        while len(seen) == number:
            try:
                question = AttentionParams(**_draw(rng, points[kind], kind, changes))
            except InvalidInput:
                continue  # a combination that no call can have
            if question not in seen:
                seen.add(question)
                yield question


def _about_fp8(fields: Mapping[str, Any]) -> bool:
    return bool(fields.get("fp8")) or str(fields.get("dtype", "")).startswith("fp8")


def _draw(
    rng: random.Random, near: Sequence[Mapping[str, Any]], fp8: bool, changes: Sequence[Change]
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if near and rng.random() < 0.4:
        fields.update(rng.choice(near))
        for change in rng.sample(changes, rng.randint(0, 3)):
            change(rng, fields)
        if fp8 and rng.random() < 0.3:
            _recipe(rng, fields)
    else:
        _sizes(rng, fields)
        _head_dims(rng, fields)
        fields["attn_mask_type"] = rng.choice(_MASKS)
        fields["is_training"] = rng.random() < 0.6
        if fp8:
            _recipe(rng, fields)
            _fp8_head_dims(rng, fields)
        for change in changes:
            if rng.random() < (0.07 if fp8 else 0.13):
                change(rng, fields)
    if fp8:
        _settle_fp8(rng, fields)
    _settle(fields)
    return fields


def _settle(fields: dict[str, Any]) -> None:
    """Let go of specs that later changes have made those of another call."""
    specs = fields.get("tensors")
    if specs is None:
        return
    fitting = fields.get("qkv_layout", "bshd_bshd_bshd") == "bshd_bshd_bshd" and all(
        tuple(spec["shape"]) == _shape(name, fields) for name, spec in specs.items()
    )
    if not fitting:
        del fields["tensors"]


def _shape(name: str, fields: dict[str, Any]) -> tuple[int, int, int, int]:
    """[b, s, h, d] of q, k or v."""
    heads, rows = fields.get("num_heads", 16), fields.get("max_seqlen_q", 4096)
    width = fields.get("head_dim_qk", 128)
    if name != "q":
        heads = fields.get("num_gqa_groups") or heads
        rows = fields.get("max_seqlen_kv", rows)
    if name == "v":
        width = fields.get("head_dim_v", width)
    return fields.get("batch_size", 2), rows, heads, width


def _sizes(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["batch_size"] = rng.choice((1, 2, 2, 3, 4))
    heads = rng.choice((1, 2, 4, 6, 8, 16))
    fields["num_heads"] = heads
    if rng.random() < 0.35:
        fields["num_gqa_groups"] = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    _lengths(rng, fields)


def _lengths(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["max_seqlen_q"] = rng.choice(_LENGTHS)
    fields["max_seqlen_kv"] = fields["max_seqlen_q"] if rng.random() < 0.4 else rng.choice(_LENGTHS)


def _no_length(rng: random.Random, fields: dict[str, Any]) -> None:
    if rng.random() < 0.05:
        fields[rng.choice(("max_seqlen_q", "max_seqlen_kv"))] = 0


def _head_dims(rng: random.Random, fields: dict[str, Any]) -> None:
    if rng.random() < 0.2:
        fields["head_dim_qk"], fields["head_dim_v"] = rng.choice(_PAIRS)
        return
    fields["head_dim_qk"] = rng.choice(_WIDTHS)
    fields["head_dim_v"] = fields["head_dim_qk"] if rng.random() < 0.75 else rng.choice(_WIDTHS)


def _dtype(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["dtype"] = rng.choice(("fp16", "fp16", "fp16", "fp32", "fp32", "fp64"))


def _dense(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["qkv_layout"] = rng.choice(_DENSE)
    if LAYOUTS[fields["qkv_layout"]].group in ("3hd", "h3d", "hd_2hd", "hd_h2d"):
        _share(fields)


def _share(fields: dict[str, Any]) -> None:
    """Tensors in one buffer have as many heads, rows and columns as each other."""
    fields.pop("num_gqa_groups", None)
    fields["head_dim_v"] = fields.get("head_dim_qk", 128)
    if LAYOUTS[fields["qkv_layout"]].group in ("3hd", "h3d"):
        fields["max_seqlen_kv"] = fields.get("max_seqlen_q", 4096)


def _packed(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["qkv_layout"] = rng.choice((*_PACKED, "thd_thd_thd", "thd_thd_thd", "t3hd"))
    fields["attn_mask_type"] = rng.choice(_PADDED)
    fields["pad_between_seqs"] = rng.random() < 0.2
    if LAYOUTS[fields["qkv_layout"]].group in ("3hd", "h3d", "hd_2hd", "hd_h2d"):
        _share(fields)


def _cached(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["is_training"] = False
    fields.pop("core_attention_bias_requires_grad", None)
    if rng.random() < 0.2:
        fields["kv_cache"] = "contiguous"
        return
    fields["kv_cache"] = "paged"
    fields["qkv_layout"] = rng.choice(_PAGED)
    fields["page_size"] = rng.choice((1, 8, 16, 32, 48, 64, 128, 200, 256))
    thd = "thd" in fields["qkv_layout"]
    if thd or rng.random() < 0.8:
        fields["attn_mask_type"] = rng.choice(_PADDED)


def _window(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["window_size"] = (rng.choice((-1, 0, 1, 64, 128, 1023, 1024)), rng.choice((-1, -1, 0, 1, 128)))


def _diagonal(rng: random.Random, fields: dict[str, Any]) -> None:
    _window(rng, fields)
    fields["attn_mask_type"] = rng.choice(("no_mask", "padding"))
    fields["bottom_right_diagonal"] = rng.random() < 0.4


def _bias(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["core_attention_bias_type"] = "pre_scale_bias" if rng.random() < 0.03 else "post_scale_bias"
    fields["core_attention_bias_shape"] = rng.choice(("1hss", "1hss", "bhss", "b1ss", "11ss", "111s"))
    fields["core_attention_bias_requires_grad"] = rng.random() < 0.5
    fields.pop("alibi_slopes_shape", None)


def _alibi(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["core_attention_bias_type"] = "alibi"
    fields.pop("core_attention_bias_shape", None)
    fields.pop("core_attention_bias_requires_grad", None)
    if rng.random() < 0.8:
        fields["attn_mask_type"] = rng.choice(("causal", "padding_causal"))
    if rng.random() < 0.05:
        fields["alibi_slopes_shape"] = (fields.get("num_heads", 16),)


def _softmax(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["softmax_type"] = rng.choice(("off-by-one", "learnable", "learnable"))


def _dropout(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["attention_dropout"] = rng.choice((0.1, 0.5))


def _deterministic(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["deterministic"] = True


def _results(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["return_lse"] = rng.random() < 0.5
    fields["return_max_logit"] = rng.random() < 0.6


def _captured(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["cuda_graph"] = True


def _never(rng: random.Random, fields: dict[str, Any]) -> None:
    """What no graph can hold: rare, for every question of this kind has the same answer."""
    if rng.random() < 0.1:
        fields.update(rng.choice(({"attn_mask_type": "arbitrary"}, {"softcap": 30.0})))


def _strides(rng: random.Random, fields: dict[str, Any]) -> None:
    """q, k or v in memory of its own: rows with gaps, one head for all, or the head dimension not last."""
    name = rng.choice("qkv")
    b, s, h, d = _shape(name, fields)
    kind = rng.choice(("gaps", "gaps", "shared", "last"))
    width = h * d + rng.choice((8, 64))
    stride = {
        "gaps": (s * width, width, d, 1),
        "shared": (s * h * d, h * d, 0 if name != "q" else d, 1),
        "last": (h * s * d, 1, s * d, s),
    }[kind]
    fields["tensors"] = {name: {"shape": (b, s, h, d), "stride": stride}}
    fields["qkv_layout"] = "bshd_bshd_bshd"
    for gone in ("kv_cache", "page_size", "pad_between_seqs"):
        fields.pop(gone, None)


def _recipe(rng: random.Random, fields: dict[str, Any]) -> None:
    """FP8 by autocast from half precision, or of FP8 tensors; now and then without a usable recipe."""
    recipe: dict[str, Any] = {"kind": rng.choice(("delayed", "delayed", "current", "mxfp8", "mxfp8"))}
    recipe["fp8_dpa"] = True
    if rng.random() < 0.1:
        recipe["fp8_mha"] = True
    if rng.random() < 0.4:
        recipe["fp8_format"] = rng.choice(("HYBRID", "E4M3"))
    if rng.random() < 0.02:
        recipe["kind"] = "block"
    fields["fp8"] = True
    fields["fp8_meta"] = {"recipe": recipe}
    fields["dtype"] = rng.choice(("bf16", "bf16", "bf16", "fp16", "fp8_e4m3", "fp8_e4m3", "fp8_e5m2"))
    if fields["dtype"].startswith("fp8") and rng.random() < 0.05:
        fields["fp8_meta"] = rng.choice((None, {"recipe": {"kind": "delayed"}}))


def _fp8_head_dims(rng: random.Random, fields: dict[str, Any]) -> None:
    """Mostly what every release takes: one width off the limits is seen once in a while."""
    if rng.random() < 0.5:
        fields["head_dim_qk"] = fields["head_dim_v"] = 128
    elif rng.random() < 0.8:
        fields["head_dim_qk"], fields["head_dim_v"] = rng.choice(_FP8_WIDTHS)


def _settle_fp8(rng: random.Random, fields: dict[str, Any]) -> None:
    """FP8 in spite of what changed after the recipe; and rarely with a bias, which no graph can hold."""
    if not str(fields.get("dtype", "")).startswith("fp8") and not fields.get("fp8"):
        _recipe(rng, fields)
    if fields.get("dtype") in ("fp32", "fp64"):
        fields["dtype"] = "bf16"
    if fields.get("core_attention_bias_type", "no_bias").endswith("scale_bias") and rng.random() < 0.8:
        for field in ("type", "shape", "requires_grad"):
            fields.pop(f"core_attention_bias_{field}", None)


_CHANGES: tuple[Change, ...] = (
    _lengths,
    _no_length,
    _head_dims,
    _dtype,
    _dense,
    _packed,
    _cached,
    _window,
    _diagonal,
    _bias,
    _alibi,
    _softmax,
    _dropout,
    _deterministic,
    _results,
    _captured,
    _never,
    _strides,
)
