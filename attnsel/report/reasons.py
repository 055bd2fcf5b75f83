"""Every reason once, below the names of all candidates that it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnsel.backends.registry import CANDIDATES
from attnsel.report.lines import MARK, fold
from attnsel.report.words import on_gpu

if TYPE_CHECKING:
    from attnsel.selection.view import SelectionView
    from attnsel.verdicts.verdict import Candidate, Reason

_STAYS = ("arch", "device", "platform")  # whatever is installed
_OTHER_GPUS = ("mps", "xpu")
_TOO_OLD = "INSTALL011"  # torch: what else attnsel's own kernels lack there is beside the point


def reason_lines(selection: SelectionView, width: int, sources: bool) -> list[str]:
    """Every reason once, below the names of all candidates that it refuses."""
    without_gpu, absent = needing_gpu(selection), absent_packages(selection)
    lines: list[str] = []
    told = [c for c in selection.candidates if c.name not in without_gpu]
    for names, reasons in grouped(told, absent).items():
        refused = selection[names[0]].verdict == "refused"
        lines += fold(", ".join(names), width, f"  – {MARK['refused' if refused else 'unknown']} ", "      ")
        for message, reason in reasons:
            text = f"{reason.code}  {message}  [{reason.evidence}]"
            lines += fold(text, width, "      ", "        ")
            if sources:
                lines += fold(f"Source: {reason.source}", width, "        ", "          ")
    if absent:
        codes = ", ".join(absent.values())
        lines += fold(f"{', '.join(absent)}: not installed ({codes})", width, "  – ✖ ", "      ")
    if without_gpu:
        here = selection.environment.device.type
        other = here in _OTHER_GPUS
        text = f"{', '.join(without_gpu)}: need a{' CUDA' if other else ''} GPU, and this is {here}"
        lines += fold(text, width, "  – ✖ ", "      ")
        if other:
            text = (
                f"F.sdpa has kernels of its own on {here}, which attnsel does not call: attnsel rule SDPA100"
            )
            lines += fold(text, width, "      ", "      ")
    return lines


def needing_gpu(selection: SelectionView) -> list[str]:
    """Off a GPU, the candidates whose reasons come to that; those of a forced one are always shown."""
    if on_gpu(selection.environment):
        return []
    forced = selection.policy.backend
    return [
        c.name
        for c in selection.candidates
        if c.name != forced and any(r.field == "device" for r in c.reasons)
    ]


def absent_packages(selection: SelectionView) -> dict[str, str]:
    """The candidates, but for a forced one, whose own package is not there, and the code that says so."""
    without_gpu = needing_gpu(selection)
    missing = {
        c.name: own_package(c)
        for c in selection.candidates
        if c.name not in (selection.policy.backend, *without_gpu)
    }
    return {name: reason.code for name, reason in missing.items() if reason is not None}


def own_package(candidate: Candidate) -> Reason | None:
    """The reason that its own package is not installed."""
    library = CANDIDATES[candidate.name].library
    return next((r for r in candidate.reasons if r.field == library and r.observed is None), None)


def grouped(
    candidates: list[Candidate], told: Mapping[str, str]
) -> dict[tuple[str, ...], list[tuple[str, Reason]]]:
    """Reasons by the candidates that share them, in the order in which they are met. Of a candidate in
    ``told``, which is not installed, those that stay when it is: what this GPU is not."""
    sharing: dict[tuple[str, str], list[str]] = {}
    first: dict[tuple[str, str], Reason] = {}
    for candidate in candidates:
        for reason in candidate.reasons:
            if candidate.name in told and (reason.code == told[candidate.name] or reason.field not in _STAYS):
                continue
            if reason.code != _TOO_OLD and any(other.code == _TOO_OLD for other in candidate.reasons):
                continue
            key = (reason.code, _of_any(candidate.name, reason))
            if candidate.name not in sharing.setdefault(key, []):
                sharing[key].append(candidate.name)
            first.setdefault(key, reason)
    groups: dict[tuple[str, ...], list[tuple[str, Reason]]] = {}
    for key, names in sharing.items():
        reason = first[key]
        text = reason.message if len(names) == 1 else key[1]
        groups.setdefault(tuple(names), []).append((text, reason))
    return groups


def _of_any(name: str, reason: Reason) -> str:
    """A reason's message; that of a policy, which asks for each candidate by its name, without that name."""
    if reason.evidence != "policy":
        return reason.message
    return re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.])", "one of these", reason.message)


def closing_lines(selection: SelectionView, width: int) -> list[str]:
    unshown = needing_gpu(selection)
    codes = [r.code for c in selection.candidates if c.name not in unshown for r in c.reasons]
    avoided = [r.code for c in selection.candidates for a in c.adaptations for r in a.avoids]
    bugs = [code for code in dict.fromkeys(codes) if code.startswith("BUG")]
    bugs += [
        f"{code} (avoided)" for code in dict.fromkeys(avoided) if code.startswith("BUG") and code not in codes
    ]
    text = f"Known bugs that touch this: {', '.join(bugs) or 'none'}."
    why = next(iter((*codes, *avoided)), None)
    if why is not None:
        text += f"  Why a rule: attnsel rule {why}"
    return ["", *fold(text, width, "  ", "  ")]
