"""Random questions, machines and policies: wide, seeded, and legal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from attnsel import AttentionParams, Environment, InvalidInput, Policy, Tensors, TensorSpec
from attnsel.environment import Device
from attnsel.params.recipes import KINDS

GPUS = ("V100", "T4", "A100", "RTX 3090", "L4", "H100", "B200", "B300", "RTX 5090", "GB10")
VERSIONS: tuple[dict[str, Any], ...] = (
    {},
    {"cudnn": "8.9.7"},
    {"cudnn": "9.1.0"},
    {"cudnn": "9.5.1"},
    {"cudnn": "9.10.2"},
    {"cudnn": "9.13.1"},
    {"cudnn": "9.20.0"},
    {"cudnn": "9.28.0", "torch": "2.13.0"},
    {"torch": "2.4.1"},
    {"torch": "2.8.0", "cudnn_frontend": None},
    {"triton": None},
)
NAMES = ("cudnn", "triton", "sdpa.cudnn", "sdpa.flash", "sdpa.varlen", "sdpa.efficient", "sdpa.math", "tiled")

# Field: how often it is stated, and the values it then has.
FIELDS: dict[str, tuple[float, tuple[Any, ...]]] = {
    "dtype": (0.4, ("bf16", "fp16", "fp32", "fp64", "fp8_e4m3")),
    "batch_size": (0.4, (1, 2, 3, 8)),
    "max_seqlen_q": (0.7, (0, 1, 2, 16, 64, 127, 128, 333, 1000, 1024, 4096, 16534, 65536)),
    "max_seqlen_kv": (0.3, (0, 1, 16, 100, 128, 192, 700, 1024, 8192, 16534)),
    "head_dim_qk": (0.6, (8, 16, 40, 64, 80, 96, 100, 128, 160, 192, 256, 512, 576)),
    "head_dim_v": (0.2, (16, 64, 100, 128, 192, 256, 512)),
    "attn_mask_type": (
        0.6,
        ("no_mask", "causal", "padding", "padding_causal", "causal_bottom_right", "arbitrary"),
    ),
    "window_size": (0.2, ((128, 0), (64, 64), (-1, 5), (0, 0), (1023, 0))),
    "bottom_right_diagonal": (0.1, (True, False)),
    "core_attention_bias_type": (0.2, ("pre_scale_bias", "post_scale_bias", "alibi")),
    "softmax_type": (0.15, ("off-by-one", "learnable")),
    "softcap": (0.1, (30.0,)),
    "attention_dropout": (0.15, (0.1,)),
    "is_training": (0.5, (True, False)),
    "deterministic": (0.15, (True,)),
    "return_lse": (0.1, (True,)),
    "return_max_logit": (0.07, (True,)),
    "qkv_layout": (0.5, ("bshd", "sbhd", "bhsd", "thd", "bs3hd", "t3hd", "thd_t2hd", "sbhd_sb2hd")),
    "cp_size": (0.06, (2, 4)),
    "cp_comm_type": (0.3, ("p2p", "all_gather", "a2a", "a2a+p2p")),
    "cuda_graph": (0.08, (True,)),
}


def questions(seed: int, count: int) -> Iterator[tuple[AttentionParams, Environment, Policy]]:
    """``count`` legal questions, each on some machine under some policy."""
    draw = random.Random(seed)
    machines = list(environments())
    made = 0
    while made < count:
        try:
            p = _params(draw)
        except InvalidInput:
            continue
        made += 1
        yield p, draw.choice(machines), _policy(draw)


def environments() -> Iterator[Environment]:
    for gpu in GPUS:
        for versions in VERSIONS:
            yield Environment.describe(gpu, **versions)
    cpu = Environment.describe("cpu")
    yield cpu
    yield Environment.describe(None, torch=None)
    yield Environment.describe("H100").replace(platform="windows")
    yield cpu.replace(device=Device(type="mps", name="mps"))
    yield cpu.replace(device=Device(type="rocm", name="MI300"))
    yield Environment.describe("H100", torch="2.13.0").replace(detected=True)
    yield Environment.describe("H100", torch="2.4.1").replace(detected=True)


def _params(draw: random.Random) -> AttentionParams:
    fields = {name: draw.choice(values) for name, (share, values) in FIELDS.items() if draw.random() < share}
    heads = fields["num_heads"] = draw.choice((1, 2, 4, 8, 12, 16, 32))
    if draw.random() < 0.3:
        fields["num_gqa_groups"] = draw.choice([g for g in (1, 2, 4, 8, heads) if heads % g == 0])
    if fields.get("core_attention_bias_type") in ("pre_scale_bias", "post_scale_bias"):
        fields["core_attention_bias_shape"] = draw.choice(("bhss", "1hss", "b1ss", "11ss", "111s"))
        fields["core_attention_bias_requires_grad"] = draw.random() < 0.4
    if fields.get("qkv_layout", "").startswith("t"):
        fields["attn_mask_type"] = draw.choice(("padding", "padding_causal", "padding_causal_bottom_right"))
        fields["pad_between_seqs"] = draw.random() < 0.3
    if draw.random() < 0.05:
        fields |= {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged", "is_training": False}
        fields["page_size"] = draw.choice((1, 16, 64, 256))
    if draw.random() < 0.15:
        recipe = {"kind": draw.choice(list(KINDS)), "fp8_dpa": draw.random() < 0.8}
        fields |= {"fp8": True, "fp8_meta": {"recipe": recipe}}
    p = AttentionParams(**fields)
    return p.replace(tensors=_tensors(draw, p)) if draw.random() < 0.2 else p


def _tensors(draw: random.Random, p: AttentionParams) -> Tensors:
    """Strides that kernels object to, an alignment, a mask that hides nothing."""
    specs: dict[str, Any] = {}
    sizes = {
        "q": (p.max_seqlen_q, p.num_heads, p.head_dim_qk),
        "k": (p.max_seqlen_kv, p.num_gqa_groups, p.head_dim_qk),
        "v": (p.max_seqlen_kv, p.num_gqa_groups, p.head_dim_v),
    }
    for name, (rows, heads, width) in sizes.items():
        if p.qkv_format != "bshd" or draw.random() < 0.4:
            continue
        row = heads * width + draw.choice((0, 1, 8))
        last = draw.choice((1, 1, 1, 2))
        specs[name] = TensorSpec(
            shape=(p.batch_size, rows, heads, width),
            stride=(rows * row * last, row * last, draw.choice((0, width * last, width * last)), last),
            dtype=p.dtype,
            alignment=draw.choice((16, 16, 2, 8)),
        )
    if p.attn_mask_type == "arbitrary":
        pairs = (p.max_seqlen_q, p.max_seqlen_kv)
        stride = (pairs[0] * pairs[1],) * 2 + (pairs[1], 1)
        specs["mask"] = TensorSpec(shape=(1, 1, *pairs), stride=stride, dtype="bool")
        specs["mask_hides_nothing"] = draw.random() < 0.3
    specs["ragged"] = p.qkv_format == "thd" and draw.random() < 0.5
    return Tensors(**specs)


def _policy(draw: random.Random) -> Policy:
    if draw.random() < 0.6:
        return Policy()
    fields: dict[str, Any] = {}
    for name, share, values in (
        ("adapt", 0.4, ("never",)),
        ("backend", 0.15, NAMES),
        ("allow", 0.2, (("triton", "sdpa.flash"), ("tiled", "cudnn"), ("sdpa.math",))),
        ("deny", 0.2, (("cudnn",), ("sdpa.flash", "tiled"))),
        ("deterministic", 0.2, (True,)),
        ("memory_limit", 0.3, (0, 1 << 20, 1 << 28, 1 << 33)),
        ("allow_known_bugs", 0.15, (("all",),)),
    ):
        if draw.random() < share:
            fields[name] = draw.choice(values)
    return Policy(**fields)
