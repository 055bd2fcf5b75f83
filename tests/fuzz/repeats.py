"""One signature with other contents, two or three times: what was bound for the first may hold no number."""

from __future__ import annotations

from typing import Any

from attention_calls import CASE
from attention_numbers import DEFINITION, Choices, as_many_keys, cases, valid_case
from harness import Case, target_of


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
    same = case["lens_kv"] == case["lens_q"] and (case.get("fmt") == "thd" or as_many_keys(CASE | case))
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


TARGET = target_of("repeats", cases(repeated_case), DEFINITION, gate=120)
