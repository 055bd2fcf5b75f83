"""The answer in a sentence, in a line for a log, and as a document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import COMPONENT_NAMES
from attnsel.environment.versions import component_name
from attnsel.errors import printable
from attnsel.report.document import (
    MARK,
    Block,
    Code,
    Document,
    Drawing,
    Facts,
    Inline,
    Item,
    Items,
    Paragraph,
    Paste,
    Ref,
    Strong,
    joined,
)
from attnsel.report.words import (
    environment_words,
    figure_words,
    on_gpu,
    params_words,
    policy_words,
    tensor_words,
)
from attnsel.rules import REGISTRY, Placing
from attnsel.rules.orders import Lead
from attnsel.rules.takes import unproven_parts
from attnsel.selection.evaluate import memory_parts
from attnsel.selection.f_sdpa import BY_F_SDPA, f_sdpa_order
from attnsel.verdicts.requirements import size

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.environment.read import Unread
    from attnsel.environment.versions import Version
    from attnsel.params import AttentionParams
    from attnsel.selection.assumed import Assumption
    from attnsel.selection.unlock import Unlock
    from attnsel.selection.view import SelectionView
    from attnsel.verdicts.dispatch import Offer
    from attnsel.verdicts.reasons import Adaptation, Candidate, Reason


def verdict(selection: SelectionView, elsewhere: bool = True) -> str:
    """What runs, and the one thing that keeps a better candidate from running. ``elsewhere``: also another
    GPU, where nothing else is fast."""
    better = better_way(selection, elsewhere)
    chosen = selection.chosen
    if chosen is None:
        text = "Nothing runs this call"
        if selection.policy.backend is not None:
            codes = ", ".join(dict.fromkeys(r.code for r in selection[selection.policy.backend].reasons))
            text = f"{selection.policy.backend} cannot run this call ({codes}), and no other is allowed"
        nearest = better or next(iter(selection.unlocks), None)
        return f"{text}." if nearest is None else f"{text}. To get {nearest.candidate}: {nearest.change}."
    by_f_sdpa = chosen.plan_only == BY_F_SDPA
    text = _f_sdpa_runs(selection, chosen) if by_f_sdpa else f"{chosen.name} {verb(chosen)}"
    if CANDIDATES[chosen.name].last_resort and on_gpu(selection.environment):
        text += " slowly"
    if chosen.adaptations:
        changes = ", ".join(made.text for made in chosen.adaptations)
        text += f" if the caller {changes}" if by_f_sdpa else f" and {changes} on every call"
    if not chosen.eligible:
        text += ": nobody has checked"
    text += known_bug_words((bug.code, bug.rule.title) for bug in selection.known_bugs)
    if better is None:
        return f"{text}."
    return f"{text}. To run {better.candidate} instead: {better.change}."


def known_bug_words(bugs: Iterable[tuple[str, str]]) -> str:
    """What belongs into the first sentence about a kernel that runs although it has known bugs in this call:
    codes and titles."""
    found = [f"{code}: {title}" if code else title for code, title in bugs]
    if not found:
        return ""
    return f", with {'a known bug' if len(found) == 1 else 'known bugs'} here ({'; '.join(found)})"


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


def easily_taken_for(ours: str, offers: Iterable[Offer]) -> str:
    """Behind "does not have cudnn": which of the other library's own kernels has nearly that name."""
    library = CANDIDATES[ours].library
    theirs = (name for offer in offers if (name := offer.candidate) and CANDIDATES[name].library == library)
    alike = next(theirs, None) if library else None
    return f": its own kernel of {component_name(library)} is {alike}" if alike else ""


def better_way(selection: SelectionView, elsewhere: bool = True) -> Unlock | None:
    """The cheapest change by which another candidate would be first; another GPU only where nothing else is
    fast, and with ``elsewhere``."""
    chosen = selection.chosen
    slow = chosen is None or CANDIDATES[chosen.name].last_resort
    out = {"risk"} if slow and elsewhere else {"risk", "hardware"}
    return next((u for u in selection.unlocks if u.rank == 1 and u.effect not in out), None)


def one_line(selection: SelectionView) -> str:
    """Chosen, runner-up, what blocked the better ones, how to fix: for ATTNSEL_DEBUG=1."""
    ranked = [c for c in selection.ranked if c.executable or not selection.environment.detected]
    parts = [f"{selection.backend or 'nothing'} runs"]
    if ranked and ranked[0].adaptations:
        parts[0] += f" ({'; '.join(a.text for a in ranked[0].adaptations)})"
    parts[0] += known_bug_words((bug.code, bug.rule.title) for bug in selection.known_bugs)
    if len(ranked) > 1:
        parts.append(f"next {ranked[1].name}")
    elsewhere = needing_gpu(selection)
    blocked = [
        f"{c.name} ({', '.join(dict.fromkeys(r.code for r in c.reasons))})"
        for c in selection.candidates
        if c.verdict == "refused" and not CANDIDATES[c.name].last_resort and c.name not in elsewhere
    ]
    blocked += [f"{len(elsewhere)} that need a GPU"] if elsewhere else []
    if blocked:
        parts.append("refused: " + ", ".join(blocked))
    better = better_way(selection)
    if better is not None:
        parts.append(f"to get {better.candidate}: {better.change}")
    parts += map(str, selection.unread)
    question = " ".join(params_words(selection.params))
    return printable(f"{'; '.join(parts)} [{question}]")


# ---- The whole answer -----------------------------------------------------------------------------------


def answer_document(selection: SelectionView, sources: bool = False) -> Document:
    """What runs, where and what was asked, the candidates in their order, each reason against the others
    once, and the ways out. ``sources``: below each reason where it is written."""
    blocks: list[Block] = [Paragraph(Strong(verdict(selection))), facts(selection)]
    if selection.layout is not None:
        blocks.append(Drawing(selection.layout.describe))
    assumed = (Item(assumption_words(assumption), "?") for assumption in selection.assumptions)
    blocks.append(Items((*runs(selection), *refusals(selection, sources), *assumed), _OTHERS))
    blocks += [Items(found)] if (found := tuple(worth(selection, sources))) else []
    if changes := tuple(ways(selection)):
        blocks.append(Items(changes))
    return Document((*blocks, Items((Item(_closing(selection)),))))


_OTHERS = "Why not the others"


def facts(selection: SelectionView) -> Facts:
    """Where and what was asked, and what is remarked on it before anything is said about candidates."""
    env, p = selection.environment, selection.params
    where = tensor_words(p) if selection.layout is None else []
    policy = policy_words(selection)
    planned = list(dict.fromkeys(c.plan_only for c in selection.ranked if c.plan_only))
    if BY_F_SDPA in planned:  # an old PyTorch is named once
        planned = [BY_F_SDPA]
    return Facts(
        (
            tuple(environment_words(env)),
            (*params_words(p), *where),
            *warnings(env, selection.unread),
            *(Item(f"planned only: {why}", "!") for why in planned),
            *([("policy", *policy)] if policy else []),
            *presumed(selection),
            *hints(selection),
        )
    )


def warnings(env: Environment, newer: tuple[Unread, ...] | None = None) -> tuple[Item, ...]:
    """What cannot be true of one machine, and what of it nobody has read; ``newer``: that, where it is not
    all of the environment's."""
    return (
        *newer_items(env.unread if newer is None else newer),
        *(Item(warning, "!") for warning in env.warnings),
    )


def newer_items(unread: Iterable[Unread]) -> tuple[Item, ...]:
    """The sentences about what is newer than anything that was read."""
    return tuple(Item(f"{one}.", "!") for one in unread)


def presumed(selection: SelectionView) -> tuple[Item, ...]:
    """That the call's dtype is the GPU's, where nobody stated one."""
    env = selection.environment
    if "dtype" not in env.assumed:
        return ()
    gpu = environment_words(env)[0]
    return (Item(f"No dtype was stated: asked in {selection.params.dtype}, as {gpu} has no bf16", "!"),)


def hints(selection: SelectionView) -> tuple[Item, ...]:
    """Each remark on the question with its code, whose page says more."""
    return tuple(Item(f"Note: {remark.message}", tag=Ref(remark.code)) for remark in selection.hints)


def names(candidates: Iterable[str]) -> Inline:
    return joined(map(Code, candidates))


def source(text: str) -> Item:
    return Item(f"Source: {text}")


# ---- The candidates that run, best first: what each does on every call, what it costs, what that avoids ----


_ISSUE = re.compile(r"[\w.-]+#\d+")  # as sources name one: pytorch#193893
_BESIDE_PROOF = ("PREF011", "PREF012", "PREF013")  # said of what is unproven too


def runs(selection: SelectionView) -> Iterator[Item]:
    for place, c in enumerate(selection.ranked, 1):
        changes = tuple(_adaptation(made, selection.params) for made in c.adaptations)
        yield Item(" · ".join(runs_notes(c, selection)), MARK[c.verdict], place, Code(c.name), more=changes)


def runs_notes(candidate: Candidate, selection: SelectionView, memory: bool = True) -> list[str]:
    """What it does, and what is to be known of it: the ``memory`` it takes, its proof, its place."""
    record, env = CANDIDATES[candidate.name], selection.environment
    notes = [verb(candidate)]
    if record.last_resort and on_gpu(env):
        notes[0] += ", slow"
    if not candidate.eligible:
        notes[0] += ": nobody has checked"
    own = memory_parts(candidate.name, selection.params, env) if memory else ()
    notes += [f"{size(amount)} of {what}" for what, amount in own]
    if candidate.unproven:
        parts = unproven_parts(record, selection.params, env.target)
        where = f"{env.target} with {', '.join(parts)}" if parts else env.target
        notes.append(f"unproven on {where}: {unproven_words(candidate)}")
    if candidate.placed_by is not None and not record.last_resort:
        page = REGISTRY.pages[candidate.placed_by]
        assert isinstance(page, Placing)
        if not candidate.unproven or page.code in _BESIDE_PROOF or isinstance(page, Lead):
            notes.append(page.short)
    return notes


def unproven_words(candidate: Candidate) -> str:
    """What was done instead of running it on a GPU, in a few words."""
    record = CANDIDATES[candidate.name]
    if record.plugin:
        return f"{record.distribution} declares no proof"
    return "executed on a CPU only" if candidate.executed_off_gpu else record.unproven_note


def adaptation_words(made: Adaptation, p: AttentionParams) -> str:
    """A change and what it costs: memory it makes, and work beyond the call's own."""
    words = [made.text]
    if made.bytes:
        words.append(size(made.bytes))
    if made.flops:
        more = made.flops / max(1, p.flops)
        words.append(f"+{100 * more:.2g} % work" if more < 1 else f"{1 + more:.2g} times the work")
    return ", ".join(words)


def _adaptation(made: Adaptation, p: AttentionParams) -> Inline:
    """A change, what it costs and what it avoids."""
    words = adaptation_words(made, p)
    if not made.avoids:
        return words
    first, *others = made.avoids
    issue = _ISSUE.search(first.source) if first.code.startswith("BUG") else None
    more = (" and ", joined(Ref(reason.code) for reason in others)) if others else ""
    known = f" [{issue[0]}]" if issue else ""
    return (words, " · avoids ", Ref(first.code), more, f": {first.rule.title}{known}")


def worth(selection: SelectionView, sources: bool = False) -> Iterator[Item]:
    """What was measured here, and published of the choice beside the next; where nobody has, that."""
    for one in selection.figures:
        who = one.source["source"] if one.here else one.source["title"].split("@")[0].split(" benchmark/")[0]
        below = (source(one.source["source"]),) if sources else ()
        label = f"Measured here ({one.name})" if one.here else "Published"
        yield Item(f"{figure_words(one)} ({who}, {one.source['date']})", label=label, below=below)
    if selection.policy.figures is not None and not any(one.here for one in selection.figures):
        yield Item(f"nothing near this call in {selection.policy.figures.path}", label="Measured here")
    families = {
        CANDIDATES[c.name].kernel_family for c in selection.ranked if not CANDIDATES[c.name].last_resort
    }
    if len(families) > 1 and not selection.figures and selection.environment.device.type == "cuda":
        nobody = f"nobody has published two kernels on {selection.environment.target} for such a call"
        yield Item(nobody, label="No figure for this")


# ---- Every reason once, below the names of all candidates that it refuses ------------------------------


_STAYS = ("arch", "device", "platform")  # whatever is installed
_OTHER_GPUS = ("mps", "xpu")
_TOO_OLD = "INSTALL011"  # torch: what else attnsel's own kernels lack there is beside the point


def refusals(selection: SelectionView, sources: bool = False) -> Iterator[Item]:
    """Every reason once, below the names of all candidates that it refuses."""
    without_gpu, absent = needing_gpu(selection), absent_packages(selection)
    told = [c for c in selection.candidates if c.name not in without_gpu]
    for among, reasons in grouped(told, absent).items():
        mark = MARK["refused" if selection[among[0]].verdict == "refused" else "unknown"]
        below = tuple(
            Item(message, label=Ref(r.code), tag=r.evidence, below=(source(r.source),) if sources else ())
            for message, r in reasons
        )
        yield Item(names(among), mark, "–", below=below)
    if absent:
        text = (names(absent), ": not installed (", joined(map(Ref, absent.values())), ")")
        yield Item(text, MARK["refused"], "–")
    if without_gpu:
        here = selection.environment.device.type
        other = here in _OTHER_GPUS
        own = f"F.sdpa has kernels of its own on {here}, which attnsel does not call: attnsel rule "
        need = f": need a{' CUDA' if other else ''} GPU, and this is {here}"
        more = (Paragraph((own, Ref("SDPA100"))),) if other else ()
        yield Item((names(without_gpu), need), MARK["refused"], "–", below=more)


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


def _closing(selection: SelectionView) -> Inline:
    """Known bugs, and where more is said of a rule."""
    unshown = needing_gpu(selection)
    against = [r.code for c in selection.candidates if c.name not in unshown for r in c.reasons]
    avoided = [r.code for c in selection.candidates for a in c.adaptations for r in a.avoids]
    bugs: list[Inline] = [(Ref(bug.code), " (allowed)") for bug in selection.known_bugs]
    bugs += [Ref(code) for code in dict.fromkeys(against) if code.startswith("BUG")]
    bugs += [
        (Ref(code), " (avoided)")
        for code in dict.fromkeys(avoided)
        if code.startswith("BUG") and code not in against
    ]
    text: list[Inline] = ["Known bugs that touch this: ", joined(bugs) if bugs else "none", "."]
    why = next(iter((*against, *avoided)), None)
    return tuple(text) if why is None else (*text, "  Why a rule: ", Code(f"attnsel rule {why}"))


# ---- The cheapest ways to each refused kernel, with what to paste; last, in one entry, other GPUs ------


_MOST_WAYS = 3  # shown of the ways to one candidate
_OF_A_SHELL = {"pip", "git", "cd", "export", "unset", "conda", "apt-get"}


def ways(selection: SelectionView) -> Iterator[Item]:
    """The cheapest ways to each refused fused kernel; another GPU once for all of them."""
    here: dict[str, list[Unlock]] = {}
    elsewhere: dict[str, list[str]] = {}
    for way in selection.unlocks:
        if CANDIDATES[way.candidate].last_resort or not worth_showing(way, selection):
            continue
        if way.effect == "hardware":
            which = way.change.removeprefix("a GPU ")
            which = f"on {which.removeprefix('of ')}" if which.startswith("of ") else which
            elsewhere.setdefault(which, []).append(way.candidate)
        elif len(here.setdefault(way.candidate, [])) < _MOST_WAYS:
            here[way.candidate].append(way)
    alike: dict[tuple[str, str], list[Unlock]] = {}
    for way in (way for found in here.values() for way in found):
        alike.setdefault((way.change, way.paste), []).append(way)
    for name, found in here.items():
        label: Inline = ("To get ", Code(name))
        for way in found:
            first, *others = alike[way.change, way.paste]
            if way is first:  # a change that opens several kernels is told once
                yield way_item(way, others, label, selection)
                label = "or"
    if elsewhere:
        text = joined(((names(found), f" {which}") for which, found in elsewhere.items()), "; ")
        yield Item(text, label="On another GPU")


def way_item(way: Unlock, others: Sequence[Unlock], label: Inline, selection: SelectionView) -> Item:
    """A change, what to paste for it, why it is this software, and what else it opens."""
    install = way.install
    place = "would be first" if way.rank == 1 else f"would be number {way.rank}"
    tag = f"{way.effect}; re-checked: {place}"
    if install is not None and install.built_here and way.candidate != selection.policy.backend:
        shows = Code(f"--backend {way.candidate}")
        return Item((f"{way.change}  [{tag}]; ", shows, " shows how"), label=label)
    below: list[Block] = []
    lines = paste_of(way)
    why = () if install is None else tuple(install.why)
    if lines or why:
        below.append(to_paste(lines, why))
    if others:
        also = joined(((Code(other.candidate), f" (number {other.rank})") for other in others), last=" and ")
        below.append(Paragraph(("The same opens ", also, ".")))
    return Item(way.change, label=label, tag=tag, below=tuple(below))


def paste_of(way: Unlock) -> list[str]:
    """What is to be pasted for a change, but for what the change says itself."""
    return [line for line in way.paste.splitlines() if line not in way.change]


def to_paste(lines: Sequence[str], why: tuple[str, ...] = ()) -> Paste:
    """Lines of a shell or of Python. ``why``: sentences about them."""
    shell = _OF_A_SHELL.intersection(line.split(maxsplit=1)[0] for line in lines if line.strip())
    return Paste(tuple(lines), "sh" if shell else "python", why)


def worth_showing(unlock: Unlock, selection: SelectionView) -> bool:
    """A package that is not there is worth its installation where it would be first, on this GPU."""
    candidate = selection[unlock.candidate]
    if candidate.name == selection.policy.backend or own_package(candidate) is None:
        return True
    return unlock.rank == 1 and unlock.effect != "hardware"


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
