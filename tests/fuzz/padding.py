"""Whatever padded rows hold, in q, k, v and dout, reaches nothing, and is given back as 0."""

from __future__ import annotations

from attention_numbers import DEFINITION, Choices, cases, valid_case
from harness import Case, target_of

GARBAGE = ("nan", "inf", "-inf", "1e30", "-1e30", "random")


def padded_case(choose: Choices) -> Case:
    case = valid_case(choose, garbage=choose.of(GARBAGE))
    if case.get("fmt") == "thd" and "gaps" not in case:  # all rows belong to a sequence
        gaps = [[1 + choose.upto(2) for _ in case["lens_q"]] for _ in range(2)]
        if case.get("fused", ("",))[0] != "qkv_layer":
            case["gaps"] = gaps
        elif case["lens_q"] == case["lens_kv"]:
            case["gaps"] = [gaps[0], gaps[0]]
    return case


TARGET = target_of("padding", cases(padded_case), DEFINITION, gate=150)
