"""Random questions around the bounds of TransformerEngine's filters."""

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
)
ARCHS = ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120")
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
SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
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
        try:
            p = AttentionParams(**_call(draw))
        except InvalidInput:
            continue
        made += 1
        env = Environment.describe(
            draw.choice(ARCHS),
            cudnn=draw.choice(CUDNN),
            transformer_engine=te,
            flash_attn=draw.choice([None, "2.8.3", "2.7.3", draw.choice(FLASH)]),
            flash_attn_3=draw.choice([None, None, "3.0.0"]),
            flash_attn_4=draw.choice([None, None, "4.0.0b24"]),
        )
        yield p, env, {draw.choice(SWITCHES): "0"} if draw.random() < 0.1 else {}


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
