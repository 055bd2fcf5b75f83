"""Random questions, machines and policies: wide, seeded, and legal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from attnsel import AttentionParams, Environment, InvalidInput, Policy
from attnsel.environment.gpus import ARCHITECTURES
from verdicts import Question, write_fields

GPUS = (
    *(f"sm{arch}" for arch in ARCHITECTURES),
    "H100",
    "A100",
    "RTX 4090",
    "cpu",
    "mps",
    "xpu",
    "gfx942",
    "gfx1100",
)
VERSIONS: tuple[dict[str, Any], ...] = (
    {},
    {"cudnn": "8.9.7"},
    {"cudnn": "9.1.0"},
    {"cudnn": "9.5.1"},
    {"cudnn": "9.10.2"},
    {"cudnn": "9.20.0", "torch": "2.8.0"},
    {"cudnn": "9.28.0", "torch": "2.13.0"},
    {"torch": "2.2.2"},
    {"torch": "2.4.1"},
    {"torch": "2.6.0", "flash_attn": "2.7.4"},
    {"flash_attn": "2.8.3", "flash_attn_3": "3.0.0", "flash_attn_4": "4.0.0b36"},
    {"torch": "2.8.0", "cudnn_frontend": None, "triton": None},
    {"transformer_engine": "2.8.0"},
    {"torch": None},
)
MORE: tuple[dict[str, Any], ...] = ({},) * 12 + (
    {"platform": "windows"},
    {"platform": "darwin"},
    {"torch_flash": "FA3"},
    {"torch_flash": "FA4"},
    {"missing": ["libnvrtc"]},
    {"detected": True},
    {"detected": True},
)
LAYOUTS = (
    "bshd",
    "sbhd",
    "bhsd",
    "thd",
    "bs3hd",
    "sb3hd",
    "bsh3d",
    "t3hd",
    "thd_t2hd",
    "sbhd_sb2hd",
    "bshd_bs2hd",
)
FIELDS: dict[str, tuple[float, tuple[Any, ...]]] = {  # how often it is stated, and the values it then has
    "dtype": (0.5, ("bf16", "fp16", "fp32", "fp64", "fp8_e4m3", "fp8_e5m2")),
    "qkv_layout": (0.5, LAYOUTS),
    "batch_size": (0.3, (1, 3, 48, 70_000)),
    "num_heads": (0.4, (1, 8, 12, 32, 128)),
    "num_gqa_groups": (0.3, (1, 2, 4, 8)),
    "max_seqlen_q": (0.6, (0, 1, 7, 64, 127, 1000, 1024, 16534, 131072)),
    "max_seqlen_kv": (0.3, (0, 1, 64, 1023, 8192, 131072)),
    "head_dim_qk": (0.5, (1, 8, 40, 59, 64, 96, 160, 192, 256, 512, 576)),
    "head_dim_v": (0.2, (8, 64, 100, 128, 256, 512)),
    "attn_mask_type": (
        0.6,
        (
            "no_mask",
            "padding",
            "padding_causal",
            "causal_bottom_right",
            "padding_causal_bottom_right",
            "arbitrary",
        ),
    ),
    "window_size": (0.2, ((128, 0), (64, 64), (-1, 5), (0, 0), (1023, 0))),
    "bottom_right_diagonal": (0.1, (True, False)),
    "core_attention_bias_type": (0.2, ("pre_scale_bias", "post_scale_bias", "alibi")),
    "core_attention_bias_shape": (0.1, ("bhss", "1hss", "b1ss", "11ss", "111s")),
    "core_attention_bias_requires_grad": (0.1, (True,)),
    "alibi_slopes_shape": (0.05, ((16,), (2, 16), (8,))),
    "softmax_type": (0.15, ("off-by-one", "learnable")),
    "softcap": (0.1, (30.0,)),
    "attention_dropout": (0.15, (0.1,)),
    "is_training": (0.5, (False,)),
    "deterministic": (0.15, (True,)),
    "return_lse": (0.1, (True,)),
    "return_max_logit": (0.1, (True,)),
    "kv_cache": (0.1, ("contiguous", "paged")),
    "page_size": (0.1, (1, 16, 64, 256)),
    "pad_between_seqs": (0.15, (True,)),
    "cp_size": (0.1, (2, 8)),
    "cp_comm_type": (0.1, ("p2p", "all_gather", "a2a", "a2a+p2p")),
    "cuda_graph": (0.1, (True,)),
    "fp8": (0.15, (True,)),
    "fp8_meta": (
        0.2,
        tuple(
            {"recipe": {"kind": kind, **more}}
            for kind in ("delayed", "current", "mxfp8", "block")
            for more in ({"fp8_dpa": True}, {}, {"fp8_dpa": True, "fp8_mha": True})
        ),
    ),
    "tensors": (
        0.15,
        (
            {"ragged": True},
            {"lengths_apart": True},
            {"rank": 3},
            {"rank": 5},
            *({name: spec} for name in "qkv" for spec in ("padded row", "last 2", "head 0", "alignment 2")),
            {"mask": "bool"},
            {"mask": "fp32"},
            {"mask": "bool", "mask_hides_nothing": True},
        ),
    ),
    "policy.adapt": (0.1, ("never",)),
    "policy.backend": (0.06, ("cudnn", "triton", "sdpa.flash", "sdpa.math", "flash_attn.2", "tiled")),
    "policy.allow": (0.05, (("triton", "sdpa.flash"), ("tiled", "cudnn"))),
    "policy.deny": (0.06, (("cudnn",), ("sdpa.flash", "tiled"), ("cudnn", "sdpa.cudnn", "triton"))),
    "policy.allow_known_bugs": (0.05, (("all",),)),
    "policy.deterministic": (0.05, (True,)),
    "policy.preview": (0.05, (True,)),
    "policy.memory_limit": (0.06, (0, 1 << 20, 1 << 33)),
    "evidence.many_lengths": (0.04, (True,)),
}


def random_question(draw: random.Random) -> Question | None:
    """One, or None where the fields contradict each other."""
    fields = {name: draw.choice(values) for name, (share, values) in FIELDS.items() if draw.random() < share}
    if fields.get("qkv_layout", "").startswith("t"):  # hardly any other mask is legal
        fields["attn_mask_type"] = draw.choice(("padding", "padding_causal", "padding_causal_bottom_right"))
    if fields.get("kv_cache") == "paged":
        fields |= {"qkv_layout": "paged_kv_bshd_bshd_bshd", "is_training": False}
        fields.setdefault("page_size", 16)
    if "fp8_meta" in fields:
        fields["fp8"] = True
    if "mask" in fields.get("tensors", {}):
        fields["attn_mask_type"] = "arbitrary"
    machine = {"gpu": draw.choice(GPUS), **draw.choice(VERSIONS), **draw.choice(MORE)}
    try:
        if "tensors" in fields:
            fields["tensors"] = tensors_of(fields["tensors"], fields)
        made = Question(write_fields(machine), write_fields(fields))
        _ = made.parts
        return made
    except InvalidInput:
        return None


def tensors_of(wanted: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Specs that fit the call: a stride, an alignment or a mask as it is named."""
    call = {name: value for name, value in fields.items() if name != "tensors" and "." not in name}
    p = AttentionParams(**call)
    made: dict[str, Any] = {}
    for name, what in wanted.items():
        if name == "mask":
            rows, columns = p.max_seqlen_q, p.max_seqlen_kv
            made[name] = {
                "shape": (1, 1, rows, columns),
                "stride": (rows * columns,) * 2 + (columns, 1),
                "dtype": what,
            }
        elif name in ("q", "k", "v"):
            rows = p.max_seqlen_q if name == "q" else p.max_seqlen_kv
            heads = p.num_heads if name == "q" else p.num_gqa_groups
            width = p.head_dim_v if name == "v" else p.head_dim_qk
            last, row = 1 + (what == "last 2"), heads * width + (what == "padded row")
            made[name] = {
                "shape": (p.batch_size, rows, heads, width),
                "stride": (rows * row * last, row * last, 0 if what == "head 0" else width * last, last),
                "dtype": p.dtype,
                "alignment": 2 if what == "alignment 2" else 16,
            }
        else:
            made[name] = what
    return made


def questions(seed: int, count: int) -> Iterator[tuple[AttentionParams, Environment, Policy]]:
    """``count`` legal questions, each on some machine under some policy, drawn as those of the net are."""
    source = random.Random(seed)
    while count:
        drawn = random_question(source)
        if drawn is not None:
            p, env, policy, _ = drawn.parts
            yield p, env, policy
            count -= 1
