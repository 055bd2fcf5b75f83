"""``conformance.py --execute``: the Triton kernels' PTX, executed on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import date
from typing import TYPE_CHECKING, Any

from attnsel.base.records import stamped
from attnsel.cli.output import BAD_INPUT, CHECK_FAILED, FOUND, bar, complain, print_text
from attnsel.errors import InvalidInput
from printed import print_json, wrap

if TYPE_CHECKING:
    from ptx_interpreter.cases import CaseReport

# sm100 is asked for by name: its tensor memory is not executed, which would hide what else is missing.
DEFAULT = (75, 80, 86, 89, 90, 120)
_SHOWN = 5  # faults written out per case; --json holds all of them


def conformance_executed(archs: tuple[int, ...], case: str, quick: bool, jobs: int, json: bool) -> int:
    """See ``conformance.py``."""
    try:
        import triton

        from ptx_interpreter import cases
    except ImportError as error:
        complain(f"{error}; planning (attnsel explain, matrix) works without it")
        return BAD_INPUT
    words = tuple(word.strip() for word in case.split(",") if word.strip())
    wanted = cases.wanted_cases(archs, words, quick)
    if not wanted:
        named = ", ".join(f"{each.name!r}" for each in cases.CASES if each.quick or not quick)
        raise InvalidInput("--case", case, f"must be part of a case's name: {named}")
    with bar("executing", len(wanted)) as move:
        reports = cases.reports(wanted, move, jobs)
    about = {"date": date.today().isoformat(), "triton": triton.__version__}
    if json:
        said = {**about, "architectures": summaries(reports), "cases": [r.as_json() for r in reports]}
        print_json(stamped("conformance-executed", said))
    else:
        _print(reports, about)
    return CHECK_FAILED if any(r.failed for r in reports) else FOUND


def summaries(reports: Iterable[CaseReport]) -> dict[str, dict[str, Any]]:
    """By architecture: what was executed, the largest error over what is allowed, faults, what is missing."""
    made: dict[str, dict[str, Any]] = {}
    for r in reports:
        one = made.setdefault(
            f"sm{r.arch}",
            {"calls": 0, "kernels": 0, "blocks": 0, "instructions": 0, "seconds": 0.0, "compiling": 0.0,
             "largest_error": 0.0, "faults": 0, "not_executed": 0, "opcodes_not_covered": []},
        )  # fmt: skip
        one["calls"] += 1
        one["kernels"] += len(r.kernels)
        one["blocks"] += r.blocks
        one["instructions"] += r.instructions
        one["seconds"] = round(one["seconds"] + r.seconds, 1)
        one["compiling"] = round(one["compiling"] + r.compiling, 1)
        one["largest_error"] = max(one["largest_error"], round(min(r.largest, 1e9), 4))
        one["faults"] += len(r.faults)
        one["not_executed"] += bool(r.unsupported or r.refused)
        one["opcodes_not_covered"] = sorted({*one["opcodes_not_covered"], *r.unsupported})
    return made


def _print(reports: list[CaseReport], about: dict[str, Any]) -> None:
    """One line per case, 80 columns, then what is wrong in words, then a line per architecture."""
    line = "{:>3} {:32} {:7} {:5} {:>6} {:>7} {:>5} {:>6} {}"
    print_text(line.format("sm", "case", "d", "dtype", "blocks", "instr.", "error", "faults", ""))
    for r in reports:
        dims = f"{r.head_dims[0]}/{r.head_dims[1]}"
        mark = "?" if r.unsupported else "✖" if r.failed else "✔"
        largest = f"{r.largest:.2f}" if r.errors else "-"
        found = (r.blocks, _short(r.instructions), largest, len(r.faults), mark)
        print_text(line.format(r.arch, r.case[:32], dims, r.dtype, *found))
    for r in reports:
        if r.ok:
            continue
        print_text(f"\nsm{r.arch} {r.case} {r.dtype}:")
        if r.refused:
            print_text("\n".join(wrap(r.refused, "  ✖ ", "    ")))
        for name, error in r.errors.items():
            if not error <= 1:
                print_text(f"  ✖ {name} errs {error:.3g} times what is allowed")
        for fault in r.faults[:_SHOWN]:
            print_text("\n".join(wrap(f"{fault} ({fault.threads} threads)", "  ✖ ", "    ")))
        if len(r.faults) > _SHOWN:
            print_text(f"  and {len(r.faults) - _SHOWN} more: --json has them")
        if r.unsupported:
            print_text("\n".join(wrap(f"not executed: {', '.join(r.unsupported)}", "  ? ", "    ")))
    print_text(f"\nTriton {about['triton']}; 1 is the error allowed: 2 or 3 times that of plain PyTorch")
    kinds = Counter(fault.kind for r in reports for fault in r.faults)
    for name, one in summaries(reports).items():
        ended = f", {one['not_executed']} not executed" if one["not_executed"] else ""
        counted = f"{one['calls']} calls, {one['blocks']} blocks, {_short(one['instructions'])} instructions"
        outcome = f"error {one['largest_error']:.2f}, {one['faults']} faults, {one['seconds']:.0f} s{ended}"
        print_text("\n".join(wrap(f"{name}: {counted}, {outcome}", "", "  ")))
    if kinds:
        print_text("faults: " + ", ".join(f"{number} {kind}" for kind, number in kinds.most_common()))


def _short(n: int) -> str:
    """12345678 as 12.3 M."""
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.1f}{unit}"
    return str(n)
