"""The answer in a sentence, and in a line for a log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import COMPONENT_NAMES
from attnsel.errors import printable
from attnsel.report.document import MARK, fold
from attnsel.report.words import on_gpu, params_words
from attnsel.rules import REGISTRY, Preference
from attnsel.rules.takes import unproven_parts
from attnsel.selection.evaluate import memory_parts
from attnsel.selection.f_sdpa import BY_F_SDPA, f_sdpa_order
from attnsel.verdicts.requirements import size

if TYPE_CHECKING:
    from attnsel.environment.versions import Version
    from attnsel.params import AttentionParams
    from attnsel.selection.assumed import Assumption
    from attnsel.selection.unlock import Unlock
    from attnsel.selection.view import SelectionView
    from attnsel.verdicts.reasons import Adaptation, Candidate, Reason


def verdict(selection: SelectionView) -> str:
    """What runs, and the one thing that keeps a better candidate from running."""
    better = better_way(selection)
    chosen = selection.chosen
    if chosen is None:
        text = "Nothing runs this call"
        if selection.policy.backend is not None:
            codes = ", ".join(dict.fromkeys(r.code for r in selection[selection.policy.backend].reasons))
            text = f"{selection.policy.backend} cannot run this call ({codes}), and no other is allowed"
        nearest = better or next(iter(selection.unlocks), None)
        return f"{text}." if nearest is None else f"{text}. To get {nearest.candidate}: {nearest.change}."
    elsewhere = chosen.plan_only == BY_F_SDPA
    text = _f_sdpa_runs(selection, chosen) if elsewhere else f"{chosen.name} {verb(chosen)}"
    if CANDIDATES[chosen.name].last_resort and on_gpu(selection.environment):
        text += " slowly"
    if chosen.adaptations:
        changes = ", ".join(made.text for made in chosen.adaptations)
        text += f" if the caller {changes}" if elsewhere else f" and {changes} on every call"
    if not chosen.eligible:
        text += ": nobody has checked"
    if better is None:
        return f"{text}."
    return f"{text}. To run {better.candidate} instead: {better.change}."


def _f_sdpa_runs(selection: SelectionView, chosen: Candidate) -> str:
    """What F.sdpa runs; where a kernel that is known to be wrong comes first in its own order, that too."""
    for name in f_sdpa_order(selection.environment):
        if name == chosen.name:
            break
        codes = [reason.code for reason in selection[name].reasons]
        if codes and all(code.startswith("BUG") for code in codes):
            return (
                f"F.sdpa by itself runs {name} ({', '.join(codes)}); under sdpa_kernel it runs {chosen.name}"
            )
    return f"F.sdpa {'runs' if chosen.eligible else 'may run'} {chosen.name}"


def verb(candidate: Candidate) -> str:
    if candidate.plan_only == BY_F_SDPA:
        return "F.sdpa runs it" if candidate.eligible else "F.sdpa may run it"
    if candidate.plan_only:
        return "would run"
    return "runs" if candidate.eligible else "may run"


def better_way(selection: SelectionView) -> Unlock | None:
    """The cheapest change by which another candidate would be first; another GPU only where nothing else is
    fast."""
    chosen = selection.chosen
    out = {"risk"} if chosen is None or CANDIDATES[chosen.name].last_resort else {"risk", "hardware"}
    return next((u for u in selection.unlocks if u.rank == 1 and u.effect not in out), None)


def planned_only(selection: SelectionView) -> list[str]:
    """Why what stands here is not run by attnsel; an old PyTorch is named once."""
    whys = dict.fromkeys(c.plan_only for c in selection.ranked if c.plan_only)
    return [BY_F_SDPA] if BY_F_SDPA in whys else list(whys)


def one_line(selection: SelectionView) -> str:
    """Chosen, runner-up, what blocked the better ones, how to fix: for ATTNSEL_DEBUG=1."""
    ranked = [c for c in selection.ranked if c.executable or not selection.environment.detected]
    parts = [f"{selection.backend or 'nothing'} runs"]
    if ranked and ranked[0].adaptations:
        parts[0] += f" ({'; '.join(a.text for a in ranked[0].adaptations)})"
    if len(ranked) > 1:
        parts.append(f"next {ranked[1].name}")
    blocked = [
        f"{c.name} ({', '.join(dict.fromkeys(r.code for r in c.reasons))})"
        for c in selection.candidates
        if c.verdict == "refused" and not CANDIDATES[c.name].last_resort
    ]
    if blocked:
        parts.append("refused: " + ", ".join(blocked))
    better = better_way(selection)
    if better is not None:
        parts.append(f"to get {better.candidate}: {better.change}")
    question = " ".join(params_words(selection.params))
    return printable(f"{'; '.join(parts)} [{question}]")


# ---- What is remarked on the question, before anything is said about candidates ------------------------


def hint_lines(selection: SelectionView, width: int) -> list[str]:
    """Each hint with its code, whose page says more."""
    lines: list[str] = []
    for remark in selection.hints:
        lines += fold(f"Note: {remark.message}  [{remark.code}]", width, "", "  ")
    return lines


# --------------------------------------------------------------------------------------------------------
# The candidates that run, best first: what each does on every call, what it costs and what that avoids.


_ISSUE = re.compile(r"[\w.-]+#\d+")  # as sources name one: pytorch#193893
_NAME = 15  # columns for a candidate's name
_BESIDE_PROOF = ("PREF011", "PREF012", "PREF013")  # said of what is unproven too


def ranked_lines(selection: SelectionView, width: int) -> list[str]:
    lines: list[str] = []
    for place, candidate in enumerate(selection.ranked, 1):
        head = f"{place:>3} {MARK[candidate.verdict]} {candidate.name:<{_NAME}} "
        deeper = " " * len(head)
        texts = [runs_text(candidate, selection), *adaptation_texts(candidate, selection.params)]
        for number, text in enumerate(texts):
            lead, indent = (head, deeper) if not number else (deeper + "  ", deeper + "    ")
            lines += fold(text, width, lead, indent)
    return lines


def runs_text(candidate: Candidate, selection: SelectionView) -> str:
    record, env = CANDIDATES[candidate.name], selection.environment
    notes = [verb(candidate)]
    if record.last_resort and on_gpu(env):
        notes[0] += ", slow"
    if not candidate.eligible:
        notes[0] += ": nobody has checked"
    own = memory_parts(candidate.name, selection.params, env)
    notes += [f"{size(amount)} of {what}" for what, amount in own]
    if candidate.unproven:
        parts = unproven_parts(record, selection.params, env.target)
        where = f"{env.target} with {', '.join(parts)}" if parts else env.target
        notes.append(f"unproven on {where}: {unproven_words(candidate)}")
    if candidate.placed_by is not None and not record.last_resort:
        page = REGISTRY.pages[candidate.placed_by]
        assert isinstance(page, Preference)
        if not candidate.unproven or page.code in _BESIDE_PROOF:
            notes.append(page.short)
    return " · ".join(notes)


def unproven_words(candidate: Candidate) -> str:
    """What was done instead of running it on a GPU, in a few words."""
    record = CANDIDATES[candidate.name]
    if record.plugin:
        return f"{record.distribution} declares no proof"
    return "executed off-GPU" if candidate.executed_off_gpu else record.unproven_note


def adaptation_texts(candidate: Candidate, p: AttentionParams) -> list[str]:
    """A line for each change, with what it costs and what it avoids."""
    return [f"{adaptation_words(made, p)}{_avoided(made)}" for made in candidate.adaptations]


def adaptation_words(made: Adaptation, p: AttentionParams) -> str:
    """A change and what it costs: memory it makes, and work beyond the call's own."""
    words = [made.text]
    if made.bytes:
        words.append(size(made.bytes))
    if made.flops:
        more = made.flops / max(1, p.flops)
        words.append(f"+{100 * more:.2g} % work" if more < 1 else f"{1 + more:.2g} times the work")
    return ", ".join(words)


def _avoided(made: Adaptation) -> str:
    if not made.avoids:
        return ""
    first, *others = made.avoids
    issue = _ISSUE.search(first.source) if first.code.startswith("BUG") else None
    more = f" and {', '.join(reason.code for reason in others)}" if others else ""
    known = f" [{issue[0]}]" if issue else ""
    return f" · avoids {first.code}{more}: {first.rule.title}{known}"


# ---- Every reason once, below the names of all candidates that it refuses ------------------------------


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


# ---- The cheapest ways to each refused kernel, with what to paste; last, in one entry, other GPUs ------


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


# --------------------------------------------------------------------------------------------------------
# What an answer assumes where another value would change a verdict, as a question to the reader.


def versions_in_words(versions: tuple[Version, ...], among: tuple[Version, ...]) -> str:
    """``1.27 and 1.28``, ``1.20 to 1.26``: neighbours among ``among`` are written as a range."""
    runs: list[list[Version]] = []
    for version in sorted(versions):
        after = runs and among.index(version) == among.index(runs[-1][-1]) + 1
        if after:
            runs[-1].append(version)
        else:
            runs.append([version])
    words: list[str] = []
    for run in runs:
        ends = [f"{version.major}.{version.minor}" for version in (run[0], run[-1])]
        words += [f"{ends[0]} to {ends[1]}"] if len(run) > 2 else list(dict.fromkeys(ends))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def assumption_words(assumption: Assumption) -> str:
    """What is refused with which version, what runs with which, and the question that decides."""
    product = COMPONENT_NAMES.get(assumption.component, assumption.component)
    every = tuple(sorted({*assumption.runs_with, *assumption.refused_with}))
    runs = versions_in_words(assumption.runs_with, every)
    refused = versions_in_words(assumption.refused_with, every)
    codes = f" ({', '.join(assumption.codes)})" if assumption.codes else ""
    first, second = f"runs with {product} {runs}", f"is refused with {refused}{codes}"
    if not assumption.runs:
        first, second = f"is refused with {product} {refused}{codes}", f"runs with {runs}"
    shown = f"{assumption.assumed.major}.{assumption.assumed.minor}"
    return f"{assumption.candidate} {first}, {second}: which do you have? {shown} is assumed"
