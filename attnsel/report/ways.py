"""The cheapest ways to each refused kernel, with what to paste; last, in one entry, other GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attnsel.backends.registry import CANDIDATES
from attnsel.report.lines import fold
from attnsel.report.reasons import own_package

if TYPE_CHECKING:
    from attnsel.selection.unlock import Unlock
    from attnsel.selection.view import SelectionView

_MOST_WAYS = 3  # shown of the ways to one candidate


def unlock_lines(selection: SelectionView, width: int) -> list[str]:
    """The cheapest ways to each refused fused kernel; another GPU once for all of them."""
    here: dict[str, list[Unlock]] = {}
    elsewhere: list[Unlock] = []
    for name, unlocks in _by_candidate(selection).items():
        ways = [unlock for unlock in unlocks if unlock.effect != "hardware"][:_MOST_WAYS]
        if ways:
            here[name] = ways
        elsewhere += [unlock for unlock in unlocks if unlock.effect == "hardware"]
    alike: dict[tuple[str, str], list[Unlock]] = {}
    for unlock in (unlock for ways in here.values() for unlock in ways):
        alike.setdefault((unlock.change, unlock.paste), []).append(unlock)
    lines: list[str] = []
    for name, ways in here.items():
        lead = f"  To get {name}: "
        for unlock in ways:
            first, *others = alike[unlock.change, unlock.paste]
            if unlock is first:  # a change that opens several kernels is told once
                lines += _way_lines(unlock, selection, width, lead)
                lines += _also_lines(others, width)
                lead = "  or: "
    lines += _gpu_lines(elsewhere, width)
    return ["", *lines] if lines else []


def _by_candidate(selection: SelectionView) -> dict[str, list[Unlock]]:
    shown: dict[str, list[Unlock]] = {}
    for unlock in selection.unlocks:
        if not CANDIDATES[unlock.candidate].last_resort and worth_showing(unlock, selection):
            shown.setdefault(unlock.candidate, []).append(unlock)
    return shown


def worth_showing(unlock: Unlock, selection: SelectionView) -> bool:
    """A package that is not there is worth its installation where it would be first, on this GPU."""
    candidate = selection[unlock.candidate]
    if candidate.name == selection.policy.backend or own_package(candidate) is None:
        return True
    return unlock.rank == 1 and unlock.effect != "hardware"


def _way_lines(unlock: Unlock, selection: SelectionView, width: int, lead: str) -> list[str]:
    """A change, what to paste for it, and why it is this software."""
    name, install = unlock.candidate, unlock.install
    place = "would be first" if unlock.rank == 1 else f"would be number {unlock.rank}"
    text = f"{unlock.change}  [{unlock.effect}; re-checked: {place}]"
    if install is not None and install.built_here and name != selection.policy.backend:
        return fold(f"{text}; --backend {name} shows how", width, lead, "      ")
    lines = fold(text, width, lead, "      ")
    for paste in unlock.paste.splitlines():
        if paste not in unlock.change:
            lines += [f"      {line}" for line in shell_lines(paste, width - 6)]
    for sentence in () if install is None else install.why:
        lines += fold(sentence, width, "      # ", "      # ")
    return lines


def _also_lines(others: Iterable[Unlock], width: int) -> list[str]:
    """``The same opens sdpa.flash (number 2) and triton (number 6)``."""
    names = [f"{unlock.candidate} (number {unlock.rank})" for unlock in others]
    if not names:
        return []
    text = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return fold(f"The same opens {text}.", width, "      ", "      ")


def _gpu_lines(unlocks: Iterable[Unlock], width: int) -> list[str]:
    """``On another GPU: cudnn, sdpa.flash from sm80 on (e.g. A10); triton from sm75 on (e.g. T4)``."""
    names: dict[str, list[str]] = {}
    for unlock in unlocks:
        which = unlock.change.removeprefix("a GPU ")
        which = f"on {which.removeprefix('of ')}" if which.startswith("of ") else which
        names.setdefault(which, []).append(unlock.candidate)
    text = "; ".join(f"{', '.join(found)} {which}" for which, found in names.items())
    return fold(f"On another GPU: {text}", width, "  ", "      ") if text else []


def shell_lines(paste: str, width: int) -> list[str]:
    """A line to paste; one for pip is continued where it does not fit."""
    command, index = "pip install ", " --index-url "
    if len(paste) <= width or not paste.startswith(command):
        return [paste]
    what = f"  {paste.removeprefix(command)}"
    if len(what) <= width or index not in what:
        return [f"{command}\\", what]
    package, url = what.split(index)
    return [f"{command}\\", f"{package} \\", f"  {index.strip()} {url}"]
