"""Two tables of the gate against one another: a kernel that became slower is seen without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# What a recompile with another release moves by itself; beyond, somebody's change made the loop longer.
SLACK = 0.03
_NAMED = ("arch", "kernel", "head_dim_qk", "head_dim_v", "dtype", "feature", "rows")


@dataclass(frozen=True, slots=True)
class Change:
    """What differs between two reports of one kernel."""

    kernel: str  # "sm90 dkdv 128/128 bf16 packed"
    worse: bool  # a longer loop, spills, or a fault that was not there
    words: tuple[str, ...]


def changes(now: Iterable[dict[str, Any]], before: Iterable[dict[str, Any]]) -> list[Change]:
    """Kernels of both tables (``KernelReport.as_json``) whose reports differ, worse ones first."""
    known = {_name(report): report for report in before}
    both = [(report, known[_name(report)]) for report in now if _name(report) in known]
    found = [change for report, old in both if (change := _change(report, old)) is not None]
    return sorted(found, key=lambda change: not change.worse)


def unknown(now: Iterable[dict[str, Any]], before: Iterable[dict[str, Any]]) -> list[str]:
    """Kernels that the table before has not, or of whose loop it says nothing."""
    known = {_name(report): report for report in before}
    return [
        name_in_words(report)
        for report in now
        if (old := known.get(_name(report))) is None or (report["loop"] and not old.get("loop"))
    ]


def _name(report: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(report.get(name) for name in _NAMED)


def name_in_words(report: dict[str, Any]) -> str:
    arch, kernel, d, e, dtype, feature, rows = _name(report)
    tile = f" {rows} rows" if rows else ""
    return f"sm{arch} {kernel} {d}/{e} {dtype} {feature}{tile}"


def _change(now: dict[str, Any], before: dict[str, Any]) -> Change | None:
    words, worse = [], False
    for fault in now.get("faults", ()):
        if fault not in before.get("faults", ()):
            words.append(fault)
            worse = True
    if now["ok"] and not before["ok"]:
        words.append(f"no longer: {'; '.join(before.get('faults') or ['a fault'])}")
    factor = _longer(now, before)
    if factor is not None and not 1 - SLACK <= factor <= 1 + SLACK:
        words.append(_loop_words(now, before, factor))
        # What was repaired may take more instructions: those it had waited, or did not fit.
        worse = worse or (factor > 1 and before["ok"])
    for name in ("spills", "registers"):
        if now[name] != before[name] and not now["error"] and not before["error"]:
            words.append(f"{name} {before[name]} → {now[name]}")
            worse = worse or (name == "spills" and now[name] > before[name])
    return Change(name_in_words(now), worse, tuple(words)) if words else None


def _longer(now: dict[str, Any], before: dict[str, Any]) -> float | None:
    """By what factor the hottest loop grew, for the same scores; None where there are no two loops."""
    new, old = now.get("loop"), before.get("loop")
    if not new or not old:
        return None
    return float(new["instructions"] * _work(before) / (old["instructions"] * _work(now)))


def _work(report: dict[str, Any]) -> float:
    """A warp's share of a tile: what one pass through the loop gets done."""
    m, n = report["block"]
    return float(m * n / report["warps"])


def _loop_words(now: dict[str, Any], before: dict[str, Any], factor: float) -> str:
    new, old = now["loop"]["instructions"], before["loop"]["instructions"]
    tiles = ["{}x{}".format(*report["block"]) for report in (before, now)]
    warps = now["warps"], before["warps"]
    moved = f", tile {tiles[0]} → {tiles[1]}" if tiles[0] != tiles[1] else ""
    moved += f", warps {warps[1]} → {warps[0]}" if warps[0] != warps[1] else ""
    return f"loop {old} → {new} instructions{moved}: {factor - 1:+.0%} for the same scores"
