"""Random questions, machines and policies: wide, seeded, and legal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from attnsel import AttentionParams, Environment, InvalidInput, Policy
from attnsel.environment.gpus import ARCHITECTURES
from tables import cells_of
from verdicts import Question, write_fields

# By field: how often it is stated, and the values it then has.
FIELDS: dict[str, tuple[float, tuple[Any, ...]]] = {
    name: (float(share), eval(f"({values},)", {"ARCHITECTURES": ARCHITECTURES}))
    for name, share, values in cells_of(__file__, "questions.txt")
}
GPUS, VERSIONS, MORE = (FIELDS.pop(f"machine.{name}")[1] for name in ("gpu", "versions", "more"))


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
