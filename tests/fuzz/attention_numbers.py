"""Every argument of ``attnsel.attention`` against the definition, forward and backward.

Not named for its target alone: this folder is on the path, where "numbers" is the standard library's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from harness import Case, target_of
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import attention_calls
import reference
import rounding

BACKENDS = (None, "sdpa.flash", "sdpa.math", "tiled")
LENGTHS = (0, 1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 24)
DENSE_MASKS = ("no_mask", "causal", "causal_bottom_right", "arbitrary")
PADDING_MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")
LAYOUTS = tuple(attention_calls.LAYOUTS)
BYTES = 72  # more than any case asks for


class Choices:
    """Bytes read as choices. One draw of Hypothesis' for all of a case: fifty cost more than the call that is
    tried. Smaller bytes are earlier, simpler options, so a failure still shrinks."""

    def __init__(self, data: bytes) -> None:
        self.data = iter(data)

    def upto(self, most: int) -> int:
        """0 to ``most``, below 256."""
        return next(self.data, 0) % (most + 1)

    def of(self, options: Sequence[Any]) -> Any:
        return options[self.upto(len(options) - 1)]

    def flag(self) -> bool:
        return bool(self.upto(1))

    def rarely(self, options: Sequence[Any], often: int = 3) -> Any:
        """None mostly, else one of ``options``."""
        return self.of(options) if self.upto(often) == often else None

    def dimensions(self) -> str:
        """Names of the dimensions of something that broadcasts to [b, h, s_q, s_kv]."""
        if self.upto(3) == 3:
            return self.of(("s_q s_kv", "h s_q s_kv", "1 s_kv", "s_kv"))
        return " ".join([self.of((name, "1")) for name in ("b", "h", "s_q", "s_kv")])


def lengths(choose: Choices, case: Case) -> None:
    """Lengths of sequences of their own."""
    packed = case["fmt"] == "thd"
    if packed:
        case["b"] = 1 + choose.upto(3)
    case["lengths"] = choose.of(("cu_seqlens", "masks")) if case["b"] and not packed else "masks"
    case["lengths"] = "cu_seqlens" if packed else case["lengths"]
    for which in ("q", "kv"):
        case[f"lens_{which}"] = [
            choose.of(LENGTHS) if packed else choose.upto(case[f"s_{which}"]) for _ in range(case["b"])
        ]
    if (packed or case["s_q"] == case["s_kv"]) and choose.flag():
        case["lens_kv"] = case["lens_q"]
    if packed:
        if choose.flag():
            case["gaps"] = [[choose.upto(3) for _ in case["lens_q"]] for _ in range(2)]
        if choose.flag():
            more = choose.upto(3)
            case |= {
                "max_seqlen": True,
                "s_q": max(case["lens_q"]) + more,
                "s_kv": max(case["lens_kv"]) + more,
            }


def valid_case(
    choose: Choices, formats: Sequence[str] = tuple(attention_calls.FORMATS), **fixed: Any
) -> Case:
    """Any call that is valid. Only what differs from the plain call is kept."""
    case: Case = dict(attention_calls.CASE)
    case |= {
        "seed": choose.upto(255),
        "fmt": choose.of(formats),
        "dtype": choose.of(("float32", "float64", "bfloat16", "float16")),
        "b": choose.of((2, 1, 3, 0, 2, 1)),
        "g": choose.of((1, 2)),
        "r": choose.of((1, 2, 3)),
        "s_q": choose.of(LENGTHS),
        "d": choose.of((4, 8, 16, 1, 3)),
    }
    case["s_kv"] = choose.of(LENGTHS) if choose.flag() else case["s_q"]
    case["e"] = choose.of((4, 8, 1, 5)) if choose.flag() else case["d"]
    padding = case["fmt"] == "thd" or "garbage" in fixed or choose.flag()
    case["mask"] = choose.of(PADDING_MASKS if padding else DENSE_MASKS)
    if padding:
        lengths(choose, case)
    if case["mask"] == "arbitrary":
        case["arbitrary"] = choose.dimensions()
    scores(choose, case)
    case["lse"], case["max_logit"] = choose.flag(), choose.upto(5) == 5
    case["deterministic"] = choose.upto(5) == 5
    case["is_training"] = choose.rarely((True, False))
    case["grads"] = choose.of(("qkvs", "qkv", "", "q", "k", "v", "qk", "kv", "qv", "s"))
    memory(choose, case, shared="garbage" not in fixed)
    case["times"] = choose.of(((1.0, 1.0), (0.1, 1.0), (4.0, 100.0), (0.0, 1.0), (1.0, 1e-3)))
    ours = case["softcap"] or case["softmax"] != "vanilla" or case["max_logit"]  # PyTorch's kernels have none
    case["backend"] = choose.of(("tiled", None) if ours and choose.upto(7) else BACKENDS)
    case["adapt"] = choose.rarely(("auto", "never"), often=5)
    if choose.upto(2) == 2:
        case["blocks"] = choose.of(((1, 1), (4, 4), (8, 3), (3, 8)))
    case |= fixed
    return {name: value for name, value in case.items() if value != attention_calls.CASE[name]}


def scores(choose: Choices, case: Case) -> None:
    """Windows, and everything that is done to a score."""
    causal = "causal" in case["mask"]
    bounds = (-1, 0, 1, 2, 4, 9, 30)
    if choose.upto(2) == 2:
        window = (choose.of(bounds), choose.of(bounds))
        case["window"] = None if window == (-1, 0) and not causal else window
    anchor = choose.of((None, True, False))
    case["anchor"] = ("bottom_right" in case["mask"] if anchor is not None else None) if causal else anchor
    case["scale"] = choose.rarely((0.7, 1.0, -0.7, 0.0, 3.0, 1))
    case["softcap"] = choose.rarely((1.3, 0.5, 30.0, 50, 1e6)) or 0.0
    case["softmax"] = choose.rarely(("off-by-one", "learnable")) or "vanilla"
    kind = choose.rarely(("post_scale_bias", "pre_scale_bias", "alibi"), often=2)
    if kind == "alibi":
        case["alibi"] = choose.of(("computed", "h", "b h"))
    elif kind is not None and not (kind == "pre_scale_bias" and case["softcap"]):
        own = choose.of((None, None, "float32", "float64"))
        case["bias"] = (kind, choose.dimensions(), choose.flag(), own)


def memory(choose: Choices, case: Case, shared: bool) -> None:
    """How q, k, v and dout lie in memory; ``shared``: rows may lie in the same one."""
    if case["fmt"] != "bhsd" and case["e"] == case["d"] and choose.upto(4) == 4:
        whole = choose.flag() and case["r"] == 1 and as_many_keys(case)
        case["fused"] = ("qkv_layer" if whole else "kv_layer", choose.of((-3, -2)))
    elif choose.flag():
        fits = [n for n in LAYOUTS if shared or "expanded" not in n]
        fits = [n for n in fits if n != "expanded 2"] if case["fmt"] == "thd" else fits
        case["layouts"] = tuple(choose.of(fits) for _ in "qkv")
    case["dout"] = choose.of(("random", "random", "ones")) if shared else "random"


def as_many_keys(case: Case) -> bool:
    if case["fmt"] != "thd":
        return bool(case["s_q"] == case["s_kv"])
    return attention_calls.starts_of(case, "q")[-1] == attention_calls.starts_of(case, "kv")[-1]


def cases(build: Callable[[Choices], Case]) -> SearchStrategy[Case]:
    return st.binary(min_size=BYTES, max_size=BYTES).map(lambda data: build(Choices(data)))


# ---- one signature with other contents, two or three times: what was bound for the first holds no number --


def repeated_case(choose: Choices) -> Case:
    case = valid_case(choose, adapt=None)
    case["again"] = [other_contents(choose, case) for _ in range(1 + choose.flag())]
    case["in_place"] = choose.flag()
    return case


def other_contents(choose: Choices, case: Case) -> dict[str, Any]:
    """Other numbers everywhere, and other lengths in as much memory."""
    change: dict[str, Any] = {"seed": 1000 + choose.upto(255)}
    if "lens_q" not in case:
        return change
    same = case["lens_kv"] == case["lens_q"] and (
        case.get("fmt") == "thd" or as_many_keys(attention_calls.CASE | case)
    )
    for number, which in enumerate(("q", "kv")):
        lens = case[f"lens_{which}"]
        if case.get("fmt") != "thd":
            change[f"lens_{which}"] = [choose.upto(case.get(f"s_{which}", 3)) for _ in lens]
        elif "gaps" in case:
            gaps = case["gaps"][number]
            rooms = [length + gap for length, gap in zip(lens, gaps, strict=True)]
            change[f"lens_{which}"] = [min(choose.upto(room), bound(case, which)) for room in rooms]
        else:
            change[f"lens_{which}"] = parts(choose, sum(lens), len(lens), bound(case, which))
    if same and not ("gaps" in case and case["gaps"][0] != case["gaps"][1]):
        change["lens_kv"] = change["lens_q"]
    if "gaps" in case:
        rooms = [
            [a + b for a, b in zip(case[f"lens_{w}"], gaps, strict=True)]
            for w, gaps in zip(("q", "kv"), case["gaps"], strict=True)
        ]
        change["gaps"] = [
            [room - n for room, n in zip(row, change[f"lens_{w}"], strict=True)]
            for w, row in zip(("q", "kv"), rooms, strict=True)
        ]
    return change


def bound(case: Case, which: str) -> int:
    """What max_seqlen says."""
    return int(case.get(f"s_{which}", 3)) if "max_seqlen" in case else 10**6


def parts(choose: Choices, total: int, count: int, most: int) -> list[int]:
    """``count`` lengths of at most ``most`` that make ``total``, which they can."""
    made = []
    for left in range(count - 1, -1, -1):
        least, largest = max(0, total - min(left * most, total)), min(most, total)
        made.append(total if left == 0 else least + choose.upto(max(0, largest - least)))
        total -= made[-1]
    return made


# ---- whatever padded rows hold, in q, k, v and dout, reaches nothing, and is given back as 0 ---------

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


# ---- ATTNSEL_SELFCHECK=all: kernels that are right are never found to be wrong -----------------


def checked_case(choose: Choices) -> Case:
    backend = choose.of((None, "sdpa.flash", None, "sdpa.math", None))
    return valid_case(choose, selfcheck="all", backend=backend)


DEFINITION = (rounding, reference, attention_calls)
TARGETS = [
    target_of("numbers", cases(valid_case), DEFINITION, gate=800),
    target_of("repeats", cases(repeated_case), DEFINITION, gate=120),
    target_of("padding", cases(padded_case), DEFINITION, gate=150),
    target_of("selfcheck", cases(checked_case), DEFINITION, gate=100),
]
