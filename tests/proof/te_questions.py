"""Random questions around the bounds of TransformerEngine's filters.

Half of them are a plain call with a few turns, each of which is an edge of some filter: so most filters are
reached by a call that nothing else refuses. The other half draws every field, so that filters meet.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from attnsel import AttentionParams, Environment, InvalidInput

CUDNN = (
    "8.9.0",
    "8.9.3",
    "8.9.5",
    "8.9.7",
    "9.0.0",
    "9.1.0",
    "9.1.1",
    "9.2.0",
    "9.2.1",
    "9.3.0",
    "9.5.0",
    "9.5.1",
    "9.6.0",
    "9.7.0",
    "9.7.1",
    "9.8.0",
    "9.9.0",
    "9.10.0",
    "9.10.1",
    "9.10.2",
    "9.11.0",
    "9.13.0",
    "9.13.1",
    "9.14.0",
    "9.15.0",
    "9.15.1",
    "9.18.0",
    "9.18.1",
    "9.19.0",
    "9.21.0",
    "9.22.0",
    "9.23.0",
    "9.24.0",
    "9.25.0",
    "9.26.0",
    "9.28.0",
)
ARCHS = ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120")
LAYOUTS = (
    "bshd_bshd_bshd",
    "sbhd_sbhd_sbhd",
    "thd_thd_thd",
    "bs3hd",
    "sb3hd",
    "sbh3d",
    "bshd_bs2hd",
    "sbhd_sbh2d",
    "t3hd",
    "th3d",
    "thd_t2hd",
    "bshd_bshd_bshd",
    "sbhd_sbhd_sbhd",
    "thd_thd_thd",
)
SWITCHES = (
    {"NVTE_FLASH_ATTN": "0"},
    {"NVTE_FUSED_ATTN": "0"},
    {"NVTE_UNFUSED_ATTN": "0"},
    {"NVTE_FLASH_ATTN_V2": "0"},
    {"NVTE_FLASH_ATTN_V3": "0"},
    {"NVTE_FLASH_ATTN_V4": "0"},
    {"NVTE_UnfusedDPA_Emulate_FP8": "1"},
    {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
)
FLASH = (
    "2.0.9",
    "2.1.1",
    "2.3.0",
    "2.4.0",
    "2.4.1",
    "2.6.3",
    "2.7.2",
    "2.7.3",
    "2.7.4",
    "2.8.0",
    "2.8.3",
    "2.8.4",
)


def questions(
    seed: int, count: int, te: str
) -> Iterator[tuple[AttentionParams, Environment, dict[str, str]]]:
    draw = random.Random(seed)
    made = 0
    while made < count:
        fields = _call(draw) if made % 2 else _turned(draw)
        where = {
            "gpu": draw.choice(ARCHS),
            "cudnn": draw.choice(CUDNN),
            "flash_attn": draw.choice([None, "2.8.3", "2.7.3", "2.6.3", draw.choice(FLASH)]),
            "flash_attn_3": draw.choice([None, None, "3.0.0"]),
            "flash_attn_4": draw.choice([None, None, "4.0.0b24"]),
        }
        where |= {name: fields.pop(name) for name in where if name in fields}
        switches = fields.pop("switches", draw.choice(SWITCHES) if draw.random() < 0.1 else {})
        try:
            p = AttentionParams(**fields)
        except InvalidInput:
            continue
        if p.kv_cache != "none" and "_" not in p.qkv_layout:
            continue  # its module cannot send it
        if p.cp_size > 1 and (p.max_seqlen_q % (2 * p.cp_size) or p.max_seqlen_kv % (2 * p.cp_size)):
            continue  # nor this: two chunks for each rank
        made += 1
        yield p, Environment.describe(transformer_engine=te, **where), dict(switches)


_PADDED = ("padding", "padding_causal", "padding_causal_bottom_right")
_KINDS = ("delayed", "current", "mxfp8", "block")
_PLAIN: dict[str, tuple[Any, ...]] = {
    "qkv_layout": ("bshd_bshd_bshd", "sbhd_sbhd_sbhd"),
    "attn_mask_type": ("causal", "no_mask", "padding", "padding_causal"),
    "dtype": ("bf16", "fp16"),
    "num_heads": (16,),
    "num_gqa_groups": (16,),
    "max_seqlen_q": (512, 2048),
    "head_dim_qk": (64, 128),
    "is_training": (True, False),
}


def _fp8(kind: str, **fields: Any) -> dict[str, Any]:
    return {"fp8": True, "fp8_meta": {"recipe": {"kind": kind, "fp8_dpa": True}}, **fields}


def _packed(layout: str, mask: str, **fields: Any) -> dict[str, Any]:
    return {"qkv_layout": layout, "attn_mask_type": mask, **fields}


def _cache(kind: str, q: str, kv: str, **fields: Any) -> dict[str, Any]:
    paged = {"page_size": 256} if kind == "paged" else {}
    layout = f"{'paged_kv_' if paged else ''}{q}_{kv}_{kv}"
    common = {
        "kv_cache": kind,
        "qkv_layout": layout,
        "is_training": False,
        "attn_mask_type": "padding_causal",
    }
    return common | paged | fields


_HEADS = (
    (32, 32),
    (60, 60),
    (104, 104),
    (136, 136),
    (160, 160),
    (192, 192),
    (256, 256),
    (264, 264),
    (512, 512),
)
_HEADS += (
    (192, 128),
    (128, 64),
    (64, 128),
    (64, 512),
    (128, 104),
    (160, 136),
    (256, 192),
    (576, 512),
    (136, 128),
)
_TURNS: tuple[tuple[dict[str, Any], ...], ...] = (
    tuple({"dtype": one} for one in ("fp32", "fp16", "fp8_e4m3")),
    tuple({"num_gqa_groups": one} for one in (1, 4, 8)),
    (
        {"num_heads": 15, "num_gqa_groups": 15},
        {"num_heads": 15, "num_gqa_groups": 5},
        {"num_heads": 10, "num_gqa_groups": 5},
    ),
    tuple({"max_seqlen_q": one} for one in (1, 64, 128, 500, 1000, 4096, 8192)),
    tuple({"max_seqlen_kv": one} for one in (64, 1000, 1024, 4096, 8192)),
    tuple({"head_dim_qk": d, "head_dim_v": dv} for d, dv in _HEADS),
    tuple({"attn_mask_type": one} for one in (*_PADDED, "causal_bottom_right", "arbitrary", "no_mask")),
    tuple({"qkv_layout": one} for one in LAYOUTS if not one.startswith("t")),
    tuple(
        _packed(layout, mask)
        for layout in ("thd_thd_thd", "thd_thd_thd", "t3hd", "th3d", "thd_t2hd", "thd_th2d")
        for mask in _PADDED
    ),
    (
        _packed("thd_thd_thd", "padding", pad_between_seqs=True),
        _packed("thd_thd_thd", "padding_causal", pad_between_seqs=True),
        _packed("thd_thd_thd", "padding_causal", deterministic=True, max_seqlen_q=16384, is_training=True),
        _packed("thd_thd_thd", "padding_causal", deterministic=True, max_seqlen_q=4096, is_training=True),
        _packed("thd_thd_thd", "padding", max_seqlen_q=1 << 21),
        _packed("t3hd", "padding", max_seqlen_q=1 << 20),
        _packed("thd_t2hd", "padding", max_seqlen_q=1 << 20),
    ),
    tuple({"is_training": True, "deterministic": True} for _ in range(2)),
    ({"deterministic": True}, {"attention_dropout": 0.1}, {"is_training": False}, {"is_training": True}),
    tuple(
        {"window_size": window, "bottom_right_diagonal": corner}
        for window in ((128, 0), (128, 128), (0, 0), (-1, 64), (-1, 0), (-1, -1))
        for corner in (None, True, False)
    ),
    tuple(
        {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias_shape": shape,
            "core_attention_bias_requires_grad": grad,
            "is_training": True,
        }
        for shape in ("1hss", "bhss", "b1ss", "11ss", "111s")
        for grad in (False, True)
    ),
    ({"core_attention_bias_type": "pre_scale_bias", "core_attention_bias_shape": "1hss"},),
    (
        {"core_attention_bias_type": "alibi"},
        {"core_attention_bias_type": "alibi", "alibi_slopes_shape": (16,)},
        {"core_attention_bias_type": "alibi", "alibi_slopes_shape": (2, 16), "batch_size": 2},
        {"core_attention_bias_type": "alibi", "bottom_right_diagonal": True},
    ),
    tuple({"softmax_type": one} for one in ("off-by-one", "learnable")),
    ({"return_max_logit": True}, {"cuda_graph": True}, {"cuda_graph": True, "max_seqlen_kv": 1000}),
    tuple({"softcap": 30.0, "is_training": training} for training in (True, False)),
    tuple({"cp_size": 2, "cp_comm_type": one} for one in ("p2p", "a2a", "all_gather")),
    tuple({"cp_size": 4, "cp_comm_type": one} for one in ("a2a+p2p", "p2p", "a2a")),
    tuple(_fp8(kind) for kind in _KINDS),
    tuple(
        {"fp8": True, "fp8_meta": {"recipe": {"kind": kind, "fp8_dpa": True, "fp8_mha": True}}}
        for kind in _KINDS
    ),
    ({"fp8": True, "fp8_meta": {"recipe": {"kind": "delayed", "fp8_dpa": False}}},),
    (
        _fp8("delayed", qkv_layout="t3hd", attn_mask_type="padding", max_seqlen_q=512, head_dim_qk=64),
        _fp8("delayed", qkv_layout="thd_thd_thd", attn_mask_type="padding_causal", cp_size=2),
        _fp8("current", qkv_layout="thd_thd_thd", attn_mask_type="padding", is_training=False),
    ),
    tuple(
        _cache(kind, q, kv)
        for kind in ("contiguous", "paged")
        for q in ("bshd", "sbhd", "thd")
        for kv in ("bshd", "sbhd")
    ),
    tuple(_cache("paged", "thd", "bshd", page_size=one) for one in (64, 300, 512)),
    (
        _cache("contiguous", "bshd", "bshd", **_fp8("delayed")),
        _cache("paged", "thd", "bshd", **_fp8("delayed")),
        _cache("contiguous", "bshd", "bshd", cp_size=2),
        _cache("contiguous", "thd", "bshd", pad_between_seqs=True),
        _cache("contiguous", "bshd", "bshd", max_seqlen_kv=1000),
        _cache("contiguous", "bshd", "bshd", max_seqlen_q=1, max_seqlen_kv=4096),
    ),
)


# What needs two things at once.
_TURNS += (
    (
        _cache("paged", "thd", "bshd", flash_attn="2.4.1"),
        {"window_size": (128, 0), "flash_attn": "2.1.1"},
        {"core_attention_bias_type": "alibi", "flash_attn": "2.3.0"},
        {"deterministic": True, "flash_attn": "2.4.0"},
        {"softcap": 30.0, "flash_attn": "2.4.1"},
        {"softcap": 30.0, "attention_dropout": 0.1, "is_training": True, "flash_attn": "2.8.3"},
    ),
    (
        _packed("thd_thd_thd", "padding", cp_size=2, core_attention_bias_type="post_scale_bias"),
        _fp8("delayed", cp_size=2, head_dim_qk=128, head_dim_v=64),
        _fp8("delayed", cp_size=2, core_attention_bias_type="post_scale_bias"),
        {"cp_size": 2, "cp_comm_type": "a2a", "core_attention_bias_type": "post_scale_bias"},
        {"cp_size": 2, "window_size": (128, 0)},
    ),
)


# What needs a machine besides.
_HOPPER_3 = {"gpu": "sm90", "flash_attn_3": "3.0.0"}
_B200_4 = {"gpu": "sm100", "flash_attn_4": "4.0.0b24"}
_DETERMINISTIC = {"is_training": True, "deterministic": True}
_TURNS += (
    (
        _fp8("mxfp8", **_packed("thd_thd_thd", "padding_causal"), gpu="sm100", cudnn="9.22.0"),
        _fp8("mxfp8", gpu="sm100", cudnn="9.23.0"),
        _cache("contiguous", "bshd", "bshd", **_fp8("delayed"), **_HOPPER_3),
        _cache("paged", "thd", "bshd", **_fp8("delayed"), **_HOPPER_3),
        {"head_dim_qk": 512, "head_dim_v": 512, **_HOPPER_3},
        {"head_dim_qk": 64, "head_dim_v": 512, "dtype": "fp8_e4m3", **_HOPPER_3},
        {"head_dim_qk": 256, "head_dim_v": 256, **_DETERMINISTIC, **_HOPPER_3},
        {"head_dim_qk": 128, "head_dim_v": 104, "is_training": True, **_B200_4},
        {"head_dim_qk": 256, "head_dim_v": 256, **_DETERMINISTIC, **_B200_4},
        _fp8("current", softmax_type="learnable", switches={"NVTE_UnfusedDPA_Emulate_FP8": "1"}),
        _fp8("delayed", softmax_type="off-by-one", switches={"NVTE_UnfusedDPA_Emulate_FP8": "1"}),
    ),
)


def _turned(draw: random.Random) -> dict[str, Any]:
    fields = {name: draw.choice(values) for name, values in _PLAIN.items()}
    for turn in draw.sample(_TURNS, draw.choice((0, 1, 1, 2, 2, 3))):
        fields |= draw.choice(turn)
    return fields


def _call(draw: random.Random) -> dict[str, Any]:
    rare = lambda value, usual, chance=0.15: value if draw.random() < chance else usual  # noqa: E731
    layout = draw.choice(LAYOUTS)
    fields: dict[str, Any] = {"qkv_layout": layout}
    packed = layout.startswith("t")
    masks = ["padding", "padding_causal", "padding_causal_bottom_right"]
    if not packed:
        masks += ["no_mask", "causal", "causal", "causal_bottom_right", "arbitrary"]
    fields["attn_mask_type"] = draw.choice(masks)
    fields["dtype"] = rare("fp32", draw.choice(["bf16", "fp16"]), 0.05)
    fields["num_heads"] = draw.choice([8, 16, 15])
    fields["num_gqa_groups"] = rare(draw.choice([1, 4, 5]), fields["num_heads"], 0.3)
    fields["max_seqlen_q"] = draw.choice([1, 64, 128, 500, 512, 1024, 2048, 4096])
    fields["max_seqlen_kv"] = rare(draw.choice([64, 128, 1000, 1024, 4096]), fields["max_seqlen_q"], 0.3)
    head = draw.choice([32, 64, 64, 96, 128, 128, 160, 192, 256, 512, 60, 136])
    fields["head_dim_qk"] = head
    fields["head_dim_v"] = rare(draw.choice([64, 128, 512]), head, 0.2)
    fields["is_training"] = draw.random() < 0.6
    fields["deterministic"] = draw.random() < 0.2
    fields["attention_dropout"] = rare(0.1, 0.0)
    if draw.random() < 0.2:
        fields["window_size"] = draw.choice([(128, 0), (128, 128), (0, 0), (-1, 64)])
        fields["bottom_right_diagonal"] = draw.choice([None, True])
    if draw.random() < 0.2:
        fields["core_attention_bias_type"] = draw.choice(["alibi", "post_scale_bias", "pre_scale_bias"])
        if fields["core_attention_bias_type"] != "alibi":
            fields["core_attention_bias_shape"] = draw.choice(["1hss", "bhss", "b1ss", "11ss", "111s"])
            fields["core_attention_bias_requires_grad"] = fields["is_training"] and draw.random() < 0.4
        elif draw.random() < 0.4:
            fields["alibi_slopes_shape"] = (fields["num_heads"],)
    fields["softmax_type"] = rare(draw.choice(["off-by-one", "learnable"]), "vanilla", 0.1)
    fields["return_max_logit"] = draw.random() < 0.06
    fields["pad_between_seqs"] = packed and draw.random() < 0.2
    fields["cuda_graph"] = draw.random() < 0.1
    if draw.random() < 0.12:
        fields["cp_size"], fields["cp_comm_type"] = 2, draw.choice(["p2p", "a2a", "all_gather", "a2a+p2p"])
    if draw.random() < 0.12:
        fields["fp8"] = True
        kind = draw.choice(["delayed", "current", "mxfp8", "block"])
        fields["fp8_meta"] = {
            "recipe": {"kind": kind, "fp8_dpa": draw.random() < 0.8, "fp8_mha": draw.random() < 0.2}
        }
    if draw.random() < 0.1 and not fields["is_training"]:
        q, kv = draw.choice(["bshd", "sbhd", "thd"]), draw.choice(["bshd", "sbhd"])
        fields |= {"kv_cache": draw.choice(["paged", "contiguous"]), "attn_mask_type": draw.choice(masks[:3])}
        if fields["kv_cache"] == "paged":
            fields["page_size"] = draw.choice([64, 256, 300, 512])
            fields["qkv_layout"] = f"paged_kv_{q}_{kv}_{kv}"
        else:
            fields["qkv_layout"] = f"{q}_{kv}_{kv}"
    return fields
