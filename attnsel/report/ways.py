"""The cheapest ways to each refused kernel, with what to paste."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.candidates import CANDIDATES
from attnsel.report.lines import fold
from attnsel.report.reasons import own_package

if TYPE_CHECKING:
    from attnsel.selection.select import Selection
    from attnsel.unlock import Unlock

_MOST_WAYS = 3  # shown of the ways to one candidate
_NO_WHEEL = "# No "  # how attnsel/wheels.py begins where a package would have to be compiled


def _worth_showing(unlock: Unlock, selection: Selection) -> bool:
    """A package that is not there is worth its installation where it would be first, on this GPU."""
    candidate = selection[unlock.candidate]
    if candidate.name == selection.policy.backend or own_package(candidate) is None:
        return True
    return unlock.rank == 1 and unlock.effect != "hardware"


def unlock_lines(selection: Selection, width: int) -> list[str]:
    """The cheapest ways to each refused fused kernel."""
    shown: dict[str, list[Unlock]] = {}
    for unlock in selection.unlocks:
        if not CANDIDATES[unlock.candidate].last_resort and _worth_showing(unlock, selection):
            shown.setdefault(unlock.candidate, []).append(unlock)
    lines: list[str] = []
    for name, unlocks in shown.items():
        for unlock in unlocks[:_MOST_WAYS]:
            lead = f"  To get {name}: " if unlock is unlocks[0] else "  or: "
            place = "would be first" if unlock.rank == 1 else f"would be number {unlock.rank}"
            text = f"{unlock.change}  [{unlock.effect}; re-checked: {place}]"
            if unlock.paste.startswith(_NO_WHEEL) and name != selection.policy.backend:
                text += f"; no wheel is known: --backend {name} shows how it is built"
                lines += fold(text, width, lead, "      ")
                continue
            lines += fold(text, width, lead, "      ")
            lines += [
                f"      {line}"
                for paste in unlock.paste.splitlines()
                if paste not in unlock.change
                for line in _shell_lines(paste, width - 6)
            ]
    return ["", *lines] if lines else []


def _shell_lines(paste: str, width: int) -> list[str]:
    """A line to paste; a comment is folded, one for pip is continued, where they do not fit."""
    if paste.startswith("# "):
        return fold(paste.removeprefix("# "), width, "# ", "# ")
    command = "pip install "
    if len(paste) <= width or not paste.startswith(command):
        return [paste]
    return [f"{command}\\", f"  {paste.removeprefix(command)}"]
