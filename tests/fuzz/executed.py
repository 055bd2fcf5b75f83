"""The PTX of the Triton kernels, executed, against Triton's own interpreter: two machines that share no code.

Compiling takes seconds, so few kernels are drawn (an architecture, a feature, a head dimension) and many
shapes, strides and numbers for each.
"""

from __future__ import annotations

import executed_calls
import rounding
from attention_numbers import Choices, cases
from harness import Case, target_of

ARCHS = (75, 80, 90)
LENGTHS = (75, 33, 1, 17, 50, 64, 100, 131)
SHORT = (1, 2, 5, 9)


def executed_case(choose: Choices) -> Case:
    arch = choose.of(ARCHS)
    feature = choose.of(tuple(executed_calls.FEATURES))
    d, e = choose.of(((64, 64), (64, 64), (128, 128), (32, 48)))
    case: Case = {
        "arch": arch,
        "dtype": "fp16" if arch == 75 else "bf16",
        "feature": feature,
        "d": d,
        "e": e,
        "b": 1 + choose.upto(1),
        "g": 1 + choose.upto(1),
        "r": 1 + choose.upto(2),
        "s_q": choose.of(SHORT if feature in executed_calls.FORWARD_ONLY else LENGTHS),
        "s_kv": choose.of(LENGTHS),
        "layout": choose.of(("bhsd", "bshd", "gaps")),
        "backward": feature not in executed_calls.FORWARD_ONLY and choose.upto(2) == 0,
        "splits": 1 + choose.upto(2),
        "seed": choose.upto(255),
    }
    if feature == "packed":
        for side in ("q", "kv"):
            case[f"lens_{side}"] = [choose.of((*LENGTHS, 0)) for _ in range(1 + case["b"])]
    return case


DEFINITION = (rounding, executed_calls)
TARGET = target_of("executed", cases(executed_case), DEFINITION, gate=3)
