"""Draws cases of tests/net/behaviour.py.

    python tests/proof/net/draw_behaviour.py module 25   # 25 cases of DotProductAttention behind the recorded
    python tests/net/behaviour.py --accept               # what they give is recorded

Case n of a door is the same whenever it is drawn, as long as these functions stay.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("net", "support")]

from behaviour import BASE, DOORS, DTYPES, F_SDPA, FLASH, LAYOUTS, Case, Line, read, write  # noqa: E402


def pick(rng: random.Random, *options: Any) -> Any:
    """One of them; by ``random`` alone, whose numbers are promised to stay the same."""
    return options[int(rng.random() * len(options))]


def chance(rng: random.Random, share: float) -> bool:
    return rng.random() < share


def attention_case(rng: random.Random, module: bool) -> Case:
    """A legal call, most of them; each feature is on in a share of them."""
    c: Case = {"fmt": pick(rng, "bshd", "sbhd", "thd", *(() if module else ("bhsd", "bshd")))}
    c["dtype"] = pick(rng, "fp32", "fp32", "bf16", "fp16", "fp64")
    c["b"], c["g"] = pick(rng, 1, 2, 2, 3), pick(rng, 1, 2, 2, 3)
    c["h"] = c["g"] * pick(rng, 1, 1, 2)
    c["sq"] = pick(rng, 1, 3, 5, 8, 17)
    c["skv"] = c["sq"] if chance(rng, 0.55) else pick(rng, 1, 4, 7, 16, 21)
    c["d"] = pick(rng, 4, 8, 8, 16, 12, 5)
    c["e"] = c["d"] if chance(rng, 0.8) else pick(rng, 4, 8, 24, 6)
    if c["fmt"] == "thd" or chance(rng, 0.25):
        c["mask"] = pick(rng, "padding", "padding_causal", "padding_causal_bottom_right")
        _lengths(rng, c)
    elif chance(rng, 0.2):
        c["mask"] = "arbitrary"
        hidden = pick(rng, 0.3, 0.3, 0.3, 0.0)
        c["arb"] = (pick(rng, "bhqk", "qk", "bqk", "bk", "k", "hqk"), pick(rng, "", "", "every-2nd"), hidden)
    else:
        c["mask"] = pick(rng, "no_mask", "no_mask", "causal", "causal", "causal_bottom_right")
    if chance(rng, 0.2):
        c["window"] = pick(rng, (2, 1), (0, 0), (3, -1), (1, 2), (4, 0))
    if chance(rng, 0.15) and "causal" not in c["mask"]:
        c["anchor"] = pick(rng, True, False)
    if chance(rng, 0.15):
        c["scale"] = pick(rng, 0.25, 1.0, 0.1)
    if chance(rng, 0.1):
        c["softcap"] = pick(rng, 1.5, 8.0)
    if chance(rng, 0.2):
        c["sink"] = pick(rng, "off-by-one", "learnable", "learnable")
    kind = rng.random()
    if kind < 0.22 and c["fmt"] != "thd":
        c["bias"] = (
            "post" if c.get("softcap") else pick(rng, "pre", "post"),
            pick(rng, "bhqk", "hqk", "qk", "bqk", "k"),
            pick(rng, "", "", "", "fp32"),
            pick(rng, "", "", "", "every-2nd"),
        )
    elif kind < 0.34:
        c["alibi"] = pick(rng, "computed", "h", "bh")
    if chance(rng, 0.2):
        c["lse"] = not module
    if chance(rng, 0.1):
        c["maxl"] = True
    if chance(rng, 0.07):
        c["drop"] = pick(rng, 0.3, 0.5)
    if chance(rng, 0.1):
        c["det"] = True
    c["grads"] = pick(rng, "qkvbs", "qkvbs", "qkvbs", "", "", "q", "kv", "vb", "s")
    if chance(rng, 0.1) or module:
        c["train"] = pick(rng, True, True, False) if module else True
    _memory(rng, c, module)
    if chance(rng, 0.25):
        c["backend"] = pick(rng, "tiled", "tiled", "tiled", "sdpa.math", "sdpa.flash")
    if chance(rng, 0.06):
        c["adapt"] = pick(rng, "never", "auto")
    c["ctx"] = pick(
        rng, *[""] * 14, "no_grad", "inference", "autocast", "deterministic", "deny-flash", "never"
    )
    if module:
        c["call"] = chance(rng, 0.35)
        c["recompute"] = chance(rng, 0.06)
    return c


def _lengths(rng: random.Random, c: Case) -> None:
    b, same = c["b"], c["sq"] == c["skv"]
    lq = tuple(int(rng.random() * (c["sq"] + 1)) for _ in range(b))
    lkv = lq if same and chance(rng, 0.6) else tuple(int(rng.random() * (c["skv"] + 1)) for _ in range(b))
    c["by"] = "cu"
    if lq == lkv and chance(rng, 0.5):
        c["by"] = "one-cu"
    if c["fmt"] == "thd":
        if not sum(lq) or not sum(lkv):
            lq, lkv = (1,) * b, (1,) * b
        if chance(rng, 0.3):
            c["gaps"] = tuple(tuple(int(rng.random() * 3) for _ in range(b)) for _ in range(2))
            c["by"] = "cu"
        c["longest"] = pick(rng, None, None, 0, 3)
    elif chance(rng, 0.4):
        c["by"] = "one-mask" if same and lq == lkv else "masks"
    c["lens"] = (lq, lkv)
    if chance(rng, 0.12) and c["fmt"] != "bhsd":
        c |= {"pages": pick(rng, 2, 4), "grads": "", "gaps": None}
        c["by"] = c["by"] if "cu" in c["by"] else "cu"


def _memory(rng: random.Random, c: Case, module: bool) -> None:
    if c.get("pages"):
        c |= {"grads": "", "train": False if module else None, "drop": 0.0}
    elif chance(rng, 0.12) and c["fmt"] != "bhsd" and c["d"] == c["e"]:
        c["fused"] = (pick(rng, "qkv", "kv"), pick(rng, -3, -2))
        if c["fused"][0] == "qkv":
            c["h"] = c["g"]
            c["skv"] = c["sq"]
            if c.get("lens"):
                c["lens"], c["by"] = (c["lens"][0],) * 2, "cu" if c["by"] in ("cu", "one-cu") else "one-mask"
                if c.get("gaps"):
                    c["gaps"] = (c["gaps"][0],) * 2
    elif chance(rng, 0.4):
        names = [n for n in LAYOUTS if n not in ("swap12", "expand1", "last-out") or c["fmt"] != "thd"]
        c["lay"] = tuple(pick(rng, "", *names) for _ in range(3))
    c["dout"] = pick(rng, "", "", "ones")


def changed(rng: random.Random, c: Case, module: bool) -> Case:
    """The call that differs from ``c`` in one respect."""
    c = {**BASE, **c}
    options: list[Case] = [
        {"numbers": c["numbers"] + 1},
        {"dtype": pick(rng, *(d for d in DTYPES if d != c["dtype"]))},
        {"scale": 0.5 if c["scale"] is None else None},
        {"window": (1, 0) if c["window"] is None else None},
        {"ctx": pick(rng, *(x for x in CONTEXTS if x != c["ctx"]))},
        {"ctx": pick(rng, *(x for x in CONTEXTS if x != c["ctx"]))},
        {"det": not c["det"]},
        {"maxl": not c["maxl"]},
        {"softcap": 0.0 if c["softcap"] else 2.0},
        {"backend": pick(rng, *(x for x in (None, "tiled", "sdpa.math") if x != c["backend"]))},
        {"adapt": "never" if c["adapt"] is None else None},
        {"train": not c["train"]} if module else {"lse": not c["lse"]},
        {"sink": pick(rng, *(x for x in ("vanilla", "off-by-one", "learnable") if x != c["sink"]))},
    ]
    if not c["pages"]:
        options += [{"grads": pick(rng, *(x for x in ("", "q", "k", "v", "qkvbs") if x != c["grads"]))}] * 2
    if c["fused"] is None and not c["pages"]:
        at = int(rng.random() * 3)
        for layout in (pick(rng, "1-in", "16-in"), pick(rng, "", "every-2nd", "swap01", "slice", "expand0")):
            if layout != c["lay"][at]:
                options += [{"lay": tuple(layout if n == at else old for n, old in enumerate(c["lay"]))}] * 2
        options.append({"h": c["g"] * (1 if c["h"] > c["g"] else 2)})
    if c["lens"] is None:
        options += [{"sq": c["sq"] + 2} if c["fused"] is None else {"b": c["b"] + 1}, {"b": c["b"] + 1}]
    else:
        lq, lkv = c["lens"]
        longer = (lq[0] + 1 if lq[0] < c["sq"] else max(0, lq[0] - 1), *lq[1:])
        if c["fused"] is None and c["by"] in ("cu", "masks"):
            options += [{"lens": (longer, lkv)}] * 4
        else:
            options += [{"lens": (longer, longer)}] * 4
        if c["by"] in ("cu", "one-cu") and lq == lkv and c["gaps"] is None:
            options += [{"by": "cu" if c["by"] == "one-cu" else "one-cu"}] * 4
        if c["fmt"] == "thd":
            options += [{"longest": 5 if c["longest"] is None else None}] * 3
    if c["arb"] is not None:
        dims, layout, share = c["arb"]
        options += [{"arb": (dims, layout, 0.0 if share else 0.4)}] * 4
        options += [{"arb": (pick(rng, *(x for x in ("bhqk", "qk", "k") if x != dims)), layout, share)}] * 3
        options += [{"arb": (dims, "" if layout else "every-2nd", share)}] * 2
    if c["bias"] is not None:
        kind, dims, own, layout = c["bias"]
        options += [
            {"bias": (kind, pick(rng, *(x for x in ("bhqk", "hqk", "qk") if x != dims)), own, layout)}
        ] * 3
        options += [{"bias": (kind, dims, "" if own else "fp64", layout)}] * 2
        options += [{"bias": (kind, dims, own, "" if layout else pick(rng, "every-2nd", "1-in"))}] * 2
        options += [{"bias": ("pre" if kind == "post" and not c["softcap"] else "post", dims, own, layout)}]
        options += [{"bias": None}]
        if not c["pages"]:
            options += [{"grads": "qkv" if "b" in c["grads"] else "qkvb"}] * 4
    if c["alibi"] is not None:
        options += [{"alibi": pick(rng, *(x for x in ("computed", "h", "bh") if x != c["alibi"]))}] * 4
    if c["sink"] == "learnable" and not c["pages"]:
        options += [{"grads": "qkv" if "s" in c["grads"] else "qkvs"}] * 3
    return {**c, **pick(rng, *options)}


def adapted_case(rng: random.Random) -> Case:
    """A call for one of the candidates of ``behaviour_plugin.py``, which need what a CPU's own do not."""
    c = {**attention_case(rng, False), "ctx": "", "drop": 0.0, "pages": None, "det": False, "maxl": False}
    c |= {"dtype": pick(rng, "fp32", "fp32", "fp64"), "grads": pick(rng, "qkvbs", "qkvbs", "")}
    c["backend"] = pick(rng, "net.padded", "net.padded", "net.packed")
    if chance(rng, 0.7):
        c["sink"] = "vanilla"
    if c["backend"] == "net.packed":
        c |= {"arb": None, "bias": None}
        if "padding" not in c["mask"]:
            c |= {
                "mask": pick(rng, "padding", "padding_causal", "padding_causal_bottom_right"),
                "anchor": None,
            }
            _lengths(rng, c)
            c |= {"pages": None}
            if c.get("fused"):
                c["fused"] = None
    return c


def flash_case(rng: random.Random) -> Case:
    fn = pick(
        rng,
        "func",
        "func",
        "varlen",
        "varlen",
        "kvpacked",
        "qkvpacked",
        "varlen_kv",
        "varlen_qkv",
        "kvcache",
        "kvcache",
    )
    c: Case = {"fn": fn, "dtype": pick(rng, "fp16", "bf16"), "b": pick(rng, 1, 2, 3), "g": pick(rng, 1, 2, 3)}
    c["h"] = c["g"] * pick(rng, 1, 1, 2) if "qkv" not in fn else c["g"]
    c["sq"] = pick(rng, 1, 4, 7, 16)
    c["skv"] = c["sq"] if "qkv" in fn or chance(rng, 0.5) else pick(rng, 1, 5, 9, 18)
    c["d"] = pick(rng, 8, 16, 16, 5)
    c["causal"] = chance(rng, 0.45)
    if chance(rng, 0.25):
        c["window"] = pick(rng, (2, 1), (0, 0), (3, -1), (-1, 2), (1, 40))
    if chance(rng, 0.2):
        c["scale"] = pick(rng, 0.25, 1.0)
    if chance(rng, 0.12):
        c["softcap"] = pick(rng, 2.0, 8.0)
    if chance(rng, 0.2):
        c["alibi"] = pick(rng, "h", "bh")
    c["det"] = chance(rng, 0.15)
    c["probs"] = chance(rng, 0.3)
    c["grads"] = pick(rng, "qkv", "qkv", "", "q", "kv")
    c["ctx"] = pick(
        rng, *[""] * 12, "no_grad", "inference", "autocast", "deterministic", "deny-flash", "never"
    )
    if chance(rng, 0.35) and fn in ("func", "varlen", "kvcache"):
        names = ["", "swap01", "slice", "row-slice", "1-in", "16-in", "expand0"] + ["every-2nd"] * (
            fn != "kvcache"
        )
        c["lay"] = tuple(pick(rng, "", *names) for _ in range(3))
        if fn == "kvcache":
            c["lay"] = (c["lay"][0], "", "")
    if chance(rng, 0.05) and fn != "kvcache":
        c["drop"] = 0.4
    if "varlen" in fn:
        lq = tuple(int(rng.random() * (c["sq"] + 1)) for _ in range(c["b"]))
        lkv = lq if "qkv" in fn else tuple(int(rng.random() * (c["skv"] + 1)) for _ in range(c["b"]))
        lq, lkv = (t if sum(t) else (1,) * c["b"] for t in (lq, lkv))
        c["lens"], c["one"] = (lq, lkv), lq == lkv and chance(rng, 0.6)
        c["tail"], c["more"] = pick(rng, 0, 0, 0, 2), pick(rng, 0, 0, 4)
    if fn == "kvcache":
        c["grads"], c["probs"] = "", chance(rng, 0.3)
        c["pages"] = chance(rng, 0.15)
        c["room"] = 256 if c["pages"] else pick(rng, 9, 16, 24)
        if c["pages"]:
            c["b"], c["d"] = min(2, c["b"]), 8
        c["new"] = pick(rng, 0, 0, 1, 3)
        c["sq"] = pick(rng, 1, 1, c["new"] or 2)
        if c["new"] or c["pages"] or chance(rng, 0.7):
            most = min(c["room"], 24) - c["new"]
            each = tuple(int(rng.random() * (most + 1)) for _ in range(c["b"]))
            c["used"] = pick(rng, each, each, each[0])
        if not c["pages"]:
            c["index"] = chance(rng, 0.25)
            if c.get("used") is not None and chance(rng, 0.2):
                used = c["used"] if isinstance(c["used"], tuple) else (c["used"],) * c["b"]
                c["leftpad"] = tuple(int(rng.random() * (n + 1)) for n in used)
    return c


def flash_changed(rng: random.Random, c: Case) -> Case:
    c = {**FLASH, **c}
    options: list[Case] = [
        {"numbers": c["numbers"] + 1},
        {"dtype": "bf16" if c["dtype"] == "fp16" else "fp16"},
        {"causal": not c["causal"]},
        {"window": (1, 1) if c["window"] == (-1, -1) else (-1, -1)},
        {"scale": 0.5 if c["scale"] is None else None},
        {"softcap": 0.0 if c["softcap"] else 3.0},
        {"alibi": "h" if c["alibi"] is None else None},
        {"probs": not c["probs"]},
        {"ctx": pick(rng, *(x for x in CONTEXTS if x != c["ctx"]))},
    ]
    if c["fn"] != "kvcache":
        options += [{"det": not c["det"]}, {"grads": "" if c["grads"] else "qkv"}]
    elif c["used"] is not None and not c["leftpad"]:
        fewer = (
            (max(0, c["used"][0] - 1), *c["used"][1:])
            if isinstance(c["used"], tuple)
            else max(0, c["used"] - 1)
        )
        options += [{"used": fewer}] * 3
    if c["lens"]:
        lq, lkv = c["lens"]
        longer = (lq[0] + 1 if lq[0] < c["sq"] else lq[0] - 1 or 1, *lq[1:])
        options += [{"lens": (longer, longer) if "qkv" in c["fn"] or c["one"] else (longer, lkv)}] * 3
        options += [{"more": 0 if c["more"] else 6}]
        if lq == lkv:
            options += [{"one": not c["one"]}] * 3
    if c["fn"] in ("func", "varlen"):
        at = int(rng.random() * 3)
        layout = pick(rng, "1-in", "16-in", "swap01", "every-2nd")
        if layout != c["lay"][at]:
            options += [{"lay": tuple(layout if n == at else old for n, old in enumerate(c["lay"]))}] * 2
    return {**c, **pick(rng, *options)}


def f_sdpa_case(rng: random.Random) -> Case:
    c: Case = {"lead": pick(rng, (2, 2), (1, 4), (2, 4), (2, 4), (3,), (), (2, 2, 2))}
    c["dtype"] = pick(rng, "fp32", "fp32", "bf16", "fp16", "fp64")
    c["sq"] = pick(rng, 1, 3, 5, 8, 17)
    c["skv"] = c["sq"] if chance(rng, 0.5) else pick(rng, 1, 4, 7, 16)
    c["d"] = pick(rng, 8, 8, 16, 5)
    c["e"] = c["d"] if chance(rng, 0.8) else pick(rng, 4, 24)
    if len(c["lead"]) >= 2 and chance(rng, 0.25):
        c["g"] = 1 if c["lead"][-1] == 2 else 2
    kind = rng.random()
    if kind < 0.22:
        c["causal"] = True
    elif kind < 0.72:
        c["mask"] = pick(rng, *MASKS)
    if chance(rng, 0.2):
        c["scale"] = pick(rng, 0.25, 1.0)
    if chance(rng, 0.05):
        c["drop"] = 0.3
    c["grads"] = pick(rng, "qkv", "qkv", "qkvm", "", "", "q", "m")
    if chance(rng, 0.4) and len(c["lead"]) == 2:
        names = [
            "",
            "swap01",
            "swap12",
            "last-out",
            "every-2nd",
            "row-slice",
            "slice",
            "1-in",
            "16-in",
            "expand0",
            "expand1",
        ]
        c["lay"] = tuple(pick(rng, "", *names) for _ in range(3))
    c["ctx"] = pick(
        rng, *[""] * 12, "no_grad", "inference", "autocast", "deterministic", "deny-flash", "never", "math"
    )
    return c


MASKS = (
    "bool-qk", "bool-full", "bool-k", "float-qk", "float-full", "float-qk", "float32-qk", "tril", "tril--inf",
    "none-hidden", "zeros", "one", "upper-left", "lower-right", "band", "all-but-a-row",
)  # fmt: skip


def f_sdpa_changed(rng: random.Random, c: Case) -> Case:
    c = {**F_SDPA, **c}
    options: list[Case] = [
        {"numbers": c["numbers"] + 1},
        {"dtype": pick(rng, *(d for d in DTYPES if d != c["dtype"]))},
        {"scale": 0.5 if c["scale"] is None else None},
        {"ctx": pick(rng, *(x for x in (*CONTEXTS, "math") if x != c["ctx"]))},
        {"sq": c["sq"] + 1},
        {"grads": "" if c["grads"] else "qkv"},
        {"grads": "qkv" if "m" in c["grads"] else "qkvm"},
        {"causal": not c["causal"], "mask": None} if c["mask"] is None else {"mask": None},
    ]
    options += [{"mask": pick(rng, *(x for x in MASKS if x != c["mask"])), "causal": False}] * 5
    if len(c["lead"]) == 2:
        at = int(rng.random() * 3)
        layout = pick(rng, "1-in", "16-in", "swap12", "every-2nd", "expand0")
        if layout != c["lay"][at]:
            options += [{"lay": tuple(layout if n == at else old for n, old in enumerate(c["lay"]))}] * 3
    return {**c, **pick(rng, *options)}


CONTEXTS = ("", "no_grad", "inference", "autocast", "deterministic", "deny-flash", "never", "allow-tiled")


class Drawn(NamedTuple):
    first: Callable[[random.Random], Case]
    next: Callable[[random.Random, Case], Case]


DRAWN = {
    "attention": Drawn(partial(attention_case, module=False), partial(changed, module=False)),
    "module": Drawn(partial(attention_case, module=True), partial(changed, module=True)),
    "flash_attn": Drawn(flash_case, flash_changed),
    "f_sdpa": Drawn(f_sdpa_case, f_sdpa_changed),
    "adapted": Drawn(adapted_case, partial(changed, module=False)),
}


def calls(door: str, number: int) -> list[Case]:
    """The calls of a case, in a row."""
    rng, drawn = random.Random(f"{door} {number}"), DRAWN[door]
    row = [{**DOORS[door].base, **drawn.first(rng)}]
    for _ in range(pick(rng, 0, 1, 1, 1, 2)):
        row.append(drawn.next(rng, row[-1]))
    return row


def _word(name: str, value: Any) -> str:
    if value is True:
        return name
    if isinstance(value, tuple):
        of_tuples = any(isinstance(one, tuple) for one in value)
        value = ("/" if of_tuples else ",").join(_word("", one)[1:] for one in value) or "none"
    return f"{name}={value}"


def description(door: str, row: list[Case]) -> str:
    """The first call's values that are not the usual ones, and what changes after it."""
    base = DOORS[door].base
    parts = [" ".join(_word(n, v) for n, v in row[0].items() if v != base[n] or n in ("dtype", "fmt", "fn"))]
    for before, after in itertools.pairwise(row):
        parts.append(" ".join(_word(n, v) for n, v in after.items() if v != before[n]))
    return " then ".join(parts)


def main(door: str, count: str) -> None:
    lines = read(door).lines
    numbers = range(len(lines), len(lines) + int(count))
    write(
        door, [*lines, *(Line(description(door, calls(door, n)), "not run yet", "-", "-") for n in numbers)]
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
