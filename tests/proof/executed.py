"""The PTX of the Triton kernels, executed, against Triton's own interpreter: two machines that share no code.

Compiling takes seconds, so few kernels are drawn (an architecture, a feature, head dimensions) and many
shapes, strides and numbers for each. Triton compiles a size of 1, or a multiple of 16, anew: these are rare.
"""

from __future__ import annotations

from attention_numbers import Choices, cases
from harness import Case, target_of

import executed_calls
import rounding

ARCHS = (75, 80, 90)
LENGTHS = (75, 33, 5, 17, 50, 100, 131)
SPECIAL = (1, 64, 128)
SHORT = (2, 5, 9)


def executed_case(choose: Choices) -> Case:
    arch = choose.of(ARCHS)
    feature = choose.of(tuple(executed_calls.FEATURES))
    d, e = choose.of(((64, 64), (64, 64), (64, 64), (32, 48)))
    short = feature in executed_calls.FORWARD_ONLY
    case: Case = {
        "arch": arch,
        "dtype": "fp16" if arch == 75 else "bf16",
        "feature": feature,
        "d": d,
        "e": e,
        "b": 2 + choose.upto(1),
        "g": 2 + choose.upto(1),
        "r": choose.of((2, 3, 2, 1)),
        "s_q": choose.rarely(SPECIAL, often=7) or choose.of(SHORT if short else LENGTHS),
        "s_kv": choose.rarely(SPECIAL, often=7) or choose.of(LENGTHS),
        "layout": choose.of(("bhsd", "bshd", "gaps")),
        "backward": choose.upto(3) == 3 and not short,
        "splits": 1 + choose.upto(2),
        "seed": choose.upto(255),
    }
    if feature == "packed":
        for side in ("q", "kv"):
            case[f"lens_{side}"] = [choose.of((*LENGTHS, 0)) for _ in range(1 + case["b"])]
    return case


DEFINITION = (rounding, executed_calls)
TARGET = target_of("executed", cases(executed_case), DEFINITION, gate=3)
