"""Every function of ``attnsel.flash_attn``: dense, packed, paged, with a cache; forward and backward."""

from __future__ import annotations

import flash_calls
from attention_numbers import Choices, cases
from harness import Case, target_of

import flash_reference
import rounding
from flash_reference import CACHE, DENSE, VARLEN

LENGTHS = (3, 1, 0, 2, 5, 8, 9, 16, 17, 24)


def flash_case(choose: Choices) -> Case:
    case: Case = dict(flash_calls.CASE)
    case["function"] = function = choose.of((*DENSE, *VARLEN, CACHE, CACHE))
    case |= {"seed": choose.upto(255), "dtype": choose.of(("float16", "bfloat16"))}
    case |= {"g": choose.of((1, 2)), "d": choose.of((8, 16, 32, 1, 5))}
    case["r"] = 1 if "_qkvpacked" in function else choose.of((1, 2, 3))
    b = choose.of((2, 1, 3))
    if function in VARLEN:
        lens = [[choose.of(LENGTHS) for _ in range(b)] for _ in range(2)]
        case |= {"more": choose.upto(2), "tail": choose.of((0, 0, 2))}
    else:
        lens = [[choose.of(LENGTHS)] * b for _ in range(2)]
    if choose.flag() or "_qkvpacked" in function:
        lens[1] = lens[0]
    case |= {"lens_q": lens[0], "lens_k": lens[1]}
    if function == CACHE:
        cache(choose, case)
    elif function == VARLEN[0] and choose.upto(3) == 3:
        case["pages"] = [[choose.upto(2)] for _ in lens[0]]
    case["scale"] = choose.rarely((0.7, 1.0, -0.7, 0.0))
    case["causal"] = choose.flag()
    bounds = (-1, 0, 1, 3, 9, 30)
    case["window"] = choose.rarely([(a, b) for a in bounds for b in bounds], often=2) or (-1, -1)
    case["softcap"] = choose.rarely((1.3, 30.0)) or 0.0
    case["alibi"] = choose.rarely(("h", "b h"))
    case["deterministic"], case["lse"], case["heads_first"] = choose.flag(), choose.flag(), choose.flag()
    if function != CACHE:
        case["grads"] = bool(choose.upto(3))
        case["drop"] = (choose.rarely((0.3, 0.05)) or 0.0) if case["lse"] else 0.0
    return {name: value for name, value in case.items() if value != flash_calls.CASE[name]}


def cache(choose: Choices, case: Case) -> None:
    """What only a cache has."""
    b = len(case["lens_q"])
    case["new"] = choose.rarely((1, 2, 4)) or 0
    used = [choose.of(LENGTHS) for _ in range(b)]
    case["int_length"] = choose.upto(3) == 3
    used = [used[0]] * b if case["int_length"] else used
    case["lens_k"] = [n + case["new"] for n in used]
    # The package takes no more rows of q than the cache has, where some are appended.
    least = case["lens_q"][0] - max(case["lens_k"]) if case["new"] else 0
    case["room"] = max(least, choose.of((1, 2, 9)))
    kind = choose.of((None, "pages", "batch_idx", "leftpad", "both"))
    if kind == "pages":  # no two sequences write into one page
        case["pages"] = [[n, n + b] for n in range(b)] if choose.flag() else [[b - 1 - n] for n in range(b)]
    if kind in ("batch_idx", "both"):
        first = choose.upto(2)
        case["batch_idx"] = [first + (b - 1 - n) for n in range(b)]
    if kind in ("leftpad", "both"):
        case["leftpad"] = [choose.upto(n) for n in used]
    if case["new"] and case["d"] >= 16 and choose.flag():
        case["room"] += case["lens_q"][0]  # the angles of all rows of q are there
        case |= {"rotary": 16, "interleaved": choose.flag()}


TARGET = target_of("flash", cases(flash_case), (rounding, flash_reference, flash_calls), gate=500)
