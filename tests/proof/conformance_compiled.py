"""``conformance.py``: what Triton's compiler makes of the kernels, and what changed."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnsel.base.records import stamped
from attnsel.cli.output import CHECK_FAILED, FOUND, bar, print_text
from attnsel.errors import InvalidInput
from printed import print_json, wrap

if TYPE_CHECKING:
    from gate import Configuration, KernelReport

# Of LoopMix, in the order they are told.
_KINDS = (
    *("matrix", "waits", "mufu", "fp", "integer", "uniform"),
    *("shared", "memory", "barriers", "shuffles", "control", "local"),
)


def conformance_compiled(
    wanted: list[Configuration], jobs: int, compare: str, loops: bool, json: bool
) -> int:
    """See ``conformance.py``. ``compare``: a file of an earlier --json, or empty."""
    import gate
    from gate_changes import changes, unknown

    before = read_kernels(compare) if compare else []
    with bar("compiling", len(wanted)) as move:
        reports = gate.reports(wanted, lambda done, *_: move(done), jobs)
    kernels = json_module.loads(json_module.dumps([report.as_json() for report in reports]))
    found = changes(kernels, before)
    if json:
        said = {"kernels": kernels}
        if compare:
            said["changes"] = [
                {"kernel": one.kernel, "worse": one.worse, "words": one.words} for one in found
            ]
        print_json(stamped("conformance", said))
    else:
        _print(reports, loops)
        if compare:
            _print_changes(found, unknown(kernels, before), compare)
    failed = any(one.worse for one in found) or not all(report.ok for report in reports)
    return CHECK_FAILED if failed else FOUND


def read_kernels(path: str) -> list[dict[str, Any]]:
    """The reports in a file that --json wrote."""
    from gate_changes import changes

    try:
        kernels = list(json_module.loads(Path(path).read_text(encoding="utf-8"))["kernels"])
        changes(kernels, kernels)  # reads whatever is compared later, after minutes of compiling
    except (
        OSError,
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        words = f"must be a file that conformance.py --json wrote ({type(error).__name__})"
        raise InvalidInput("--compare", path, words) from None
    return kernels


def _print(reports: list[KernelReport], loops: bool) -> None:
    """One line per kernel, 80 columns, then what is wrong in words."""
    line = "{:>3} {:10} {:>7} {:5} {:9} {:>7} {:>2} {:>2} {:>4} {:>6} {:>7} {:>4} {}"
    head = ("sm", "kernel", "d", "dtype", "feature", "tile", "w", "s", "regs", "spills", "KiB", "loop", "")
    print_text(line.format(*head))
    for r in reports:
        tile = "-" if r.block is None else f"{r.block[0]}x{r.block[1]}"
        used = f"{r.shared_memory // 1024}/{r.shared_memory_limit // 1024}"
        dims = f"{r.head_dim_qk}/{r.head_dim_v}"
        loop = r.loop.instructions if r.loop else "-"
        found = (tile, r.warps, r.stages, r.registers, r.spills, used, loop, "✔" if r.ok else "✖")
        print_text(line.format(r.arch, r.kernel, dims, r.dtype, r.feature, *found))
        if loops and r.loop:
            print_text("\n".join(wrap(loop_words(r), "      ")))
    bad = [r for r in reports if not r.ok]
    print_text(
        f"{len(reports) - len(bad)} of {len(reports)} compile, fit, do not spill, are not serialised\n"
        "and use the tensor cores; loop: instructions of the hottest one"
    )
    for r in bad:
        named = f"sm{r.arch} {r.kernel} {r.head_dim_qk}/{r.head_dim_v} {r.dtype} {r.feature}"
        print_text("\n".join(wrap(f"{named}: {'; '.join(r.faults)}", "  ✖ ", "    ")))


def loop_words(r: KernelReport) -> str:
    """What the hottest loop's instructions are, and how long the others are."""
    assert r.loop is not None
    mix = r.loop
    counted = ", ".join(f"{getattr(mix, name)} {name}" for name in _KINDS if getattr(mix, name))
    ratio = f"; {mix.matrix_per_wait} matrix per wait" if mix.matrix_per_wait is not None else ""
    work = f"; {r.matrix_work} times the matrix work needed" if (r.matrix_work or 0) > 1 else ""
    others = list(r.loops)
    others.remove(mix.instructions)
    also = f"; other loops {', '.join(map(str, others))}" if others else ""
    return f"{mix.instructions}: {counted}{ratio}{work}{also}"


def _print_changes(found: list[Any], missing: list[str], path: str) -> None:
    worse = sum(one.worse for one in found)
    print_text(f"\nagainst {path}: {worse} worse, {len(found) - worse} otherwise changed")
    for one in found:
        lead = "  ✖ " if one.worse else "  · "
        print_text("\n".join(wrap(f"{one.kernel}: {'; '.join(one.words)}", lead, "    ")))
    if missing:
        print_text(f"  {len(missing)} kernels, or their loops, are not in it; the first is {missing[0]}")
