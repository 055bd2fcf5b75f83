"""The page of a rule as Markdown: ``attnsel rule CODE --markdown``, and a page of the site.

Who arrives from a link in somebody's issue reads the first lines: who refuses what, since and until when, and
what helps. The headings stay as they are, since addresses end in them: #why, #fix, #examples, #source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.pages.commands import example_commands, folded_command
from attnsel.pages.rule_answer import Answer, answer_to, beyond
from attnsel.pages.rule_facts import (
    call_words,
    candidates_of,
    cards_of,
    device_types,
    devices_of,
    gpu_words,
    legend_of,
    names_of,
    needed_of,
    parts_of,
    replaced_by_it,
    status_of,
    version_gates,
    version_words,
)
from attnsel.pages.rule_prose import link, plain, prose, sentence, words
from attnsel.report.markdown import code, fenced, table
from attnsel.rules import REGISTRY, Hint, Page, PolicyRule, Preference, Removed, Rule
from attnsel.rules.ranges import range_of, split
from attnsel.verdicts.verdict import EVIDENCE

_NEAR = 6  # other rules of the same range that are named
_NONE_RECORDED = "No reason is recorded; the source below says what holds."


def _nowhere(_: str) -> str:
    return ""


class Links(NamedTuple):
    """Addresses that a page has among others; "" for what has none, as on a terminal.

    rule: of the page of a code. family: of the list of a family. evidence: of what a word of it means.
    playground: of a command to try.
    """

    rule: Callable[[str], str] = _nowhere
    family: Callable[[str], str] = _nowhere
    evidence: Callable[[str], str] = _nowhere
    playground: Callable[[str], str] = _nowhere


def page_markdown(page: Page | Removed, links: Links = Links()) -> str:  # noqa: B008 (it is a constant)
    """The whole page, ending in a newline."""
    if isinstance(page, Removed):
        return _removed(page, links)
    text = parts_of(page)
    answer = answer_to(page)
    said = [f"# {page.code}: {plain(page.title)}", *_first_lines(page, answer, links)]
    if "Fix" in text:
        said += ["## Fix", prose(sentence(text["Fix"]), links.rule)]
    said += ["## Why", prose(sentence(text.get("Why", _NONE_RECORDED)), links.rule)]
    said += [prose(f"{label}: {more}", links.rule) for label, more in text.items() if label not in _LABELS]
    head, *rows = _where(page, links)
    said += ["## Where it holds", table(head, rows)]
    said += _examples(page, answer, links)
    said += ["## Source", prose(sentence(text.get("Source", page.source)), links.rule)]
    said += [prose(legend_of(page))] if legend_of(page) else []
    said.append(f"Written in {code(_file(page))}, {code(page.name)}.")
    said += _see_also(page, links)
    return "\n\n".join(said) + "\n"


_LABELS = ("Why", "Fix", "Source")


# ---- first lines ------------------------------------------------------------------------------------------


def _first_lines(page: Page, answer: Answer | None, links: Links) -> list[str]:
    lines = [_who(page)]
    if page.status == "preview":
        lines.append("**A preview:** it is shown, and refuses only with `ATTNSEL_PREVIEW=1` (`--preview`).")
    if page.status == "deprecated":
        lines.append(f"**Deprecated:** {prose(page.replaced_by, links.rule)} took over.")
    if answer is not None and answer.adapted:
        lines.append(f"**attnsel changes such a call where it can:** in the example {prose(answer.adapted)}.")
    return lines


def _who(page: Page) -> str:
    """Who refuses, since and until when, in a line."""
    at = _at(page)
    if isinstance(page, Preference):
        short = (
            f" Of one that stands lower for it a report says: *{plain(page.short)}*." if page.short else ""
        )
        return f"**Orders kernels that can run, and refuses none.**{short}"
    if isinstance(page, Hint):
        return f"**A remark on the question{at}.** It refuses nothing, and orders nothing."
    if isinstance(page, PolicyRule):
        return f"**{_POLICY.get(page.family, 'Refused')}**, whichever the kernel."
    who = words([_kernel_word(name) for name in names_of(candidates_of(page))])
    if page.family == "INSTALL":
        return f"**Without it {who} cannot run**{at}."
    at = at or ", in every version"
    if page.family == "BUG":
        lets = f"`--allow-known-bugs {page.code}` lets it through"
        return f"**A known bug of {who}**{at}. attnsel refuses such a call; {lets}."
    if isinstance(page, Rule) and page.unknown:
        why = "nobody has looked, or the sources differ. What is known to run goes first."
        return f"**Not known for {who}**{at}: {why}"
    return f"**Refused by {who}**{at}."


_POLICY = {
    "POLICY": "Refused because you asked for it",
    "MEMORY": "Refused for want of memory",
    "RUNTIME": "Refused after what this process saw",
}


def _at(page: Page) -> str:
    """`` with cuDNN below 9.5.0, on Hopper (sm90)``; nothing where there is no gate."""
    versions = [plain(version_words(*gate)) for gate in version_gates(page)]
    places = [f"with {words(versions)}"] if versions else []
    if gpu_words(page):
        places.append(f"on {gpu_words(page)}")
    if devices_of(page):
        places.append(f"on {words(devices_of(page), 'or')}")
    return f" {', '.join(places)}" if places else ""


def _kernel_word(name: str) -> str:
    return _SEVERAL.get(name) or code(name)


_SEVERAL = {"all": "every kernel", "all but plug-ins": "every kernel but those of plug-ins"}


# ---- where it holds ---------------------------------------------------------------------------------------


def _where(page: Page, links: Links) -> list[tuple[str, str]]:
    """The gates of a rule, one row each, and what becomes of its example beyond them."""
    names = candidates_of(page)
    if isinstance(page, Rule) and len(names) <= 4:
        kernels = "<br>".join(f"{code(name)}: {plain(CANDIDATES[name].title)}" for name in names)
    else:
        kernels = words([_kernel_word(name) for name in names_of(names)])
    rows = [("Kernels", kernels)]
    gates = [plain(version_words(*gate)) for gate in version_gates(page)]
    rows.append(("Versions", "<br>".join(gates) or "every one"))
    gpus, cards = gpu_words(page), cards_of(page)
    if gpus and cards:
        gpus += f"<br>such as {', '.join(cards)}"
    rows.append(("GPUs", gpus or words([code(kind) for kind in device_types(page)]) or "every one"))
    if call_words(page):
        rows.append(("Calls", "; ".join(call_words(page))))
    for fields, needed in needed_of(page):
        rows.append(("It wants", f"{words([code(name) for name in fields])}: {plain(needed)}"))
    for edge in beyond(page):
        codes = words([prose(one, links.rule) for one in edge.codes])
        found = "the example runs" if edge.runs else f"the example is refused by {codes}"
        rows.append((f"With {plain(edge.where)}", found))
    word = link(code(page.evidence), links.evidence(page.evidence))
    rows.append(("Rests on", f"{word}: {EVIDENCE[page.evidence]}"))
    rows.append(("Status", prose(status_of(page), links.rule)))
    return rows


# ---- examples ---------------------------------------------------------------------------------------------


def _examples(page: Page, answer: Answer | None, links: Links) -> list[str]:
    """Commands to paste, with what the engine answers to the first; nothing for a page without one."""
    passes = example_commands(page).get("passes", "")
    if answer is None and not passes:
        return []
    said = ["## Examples"]
    if answer is not None:
        lead = "A call that it is said of" if isinstance(page, Hint) else "A call that trips it"
        said += _command(lead, answer.command, links)
        if not answer.command:
            said.append("No command line describes the device of the example.")
        said += ["The answer, as far as it is about this rule:", fenced("\n".join(answer.lines), "text")]
    return said + _command("A call that passes", passes, links)


def _command(lead: str, command: str, links: Links) -> list[str]:
    if not command:
        return []
    address = links.playground(command)
    there = f' (<a href="{address}">open it in the playground</a>)' if address else ""
    return [f"{lead}{there}:", fenced("\n".join(folded_command(command, 80)), "sh")]


# ---- others -----------------------------------------------------------------------------------------------


def _file(page: Page) -> str:
    return f"{page.module.removeprefix('attnsel.').replace('.', '/')}.py"


def _see_also(page: Page, links: Links) -> list[str]:
    """What it replaces, what its text names, its neighbours in the same range, and its family."""
    rows = [f"- {_named(code, links)}, which it replaces" for code in replaced_by_it(page.code)]
    rows += [f"- {_named(code, links)}" for code in near(page)]
    family = links.family(page.family)
    if family:
        rows.append(f"- [all rules of the family {page.family}]({family})")
    return ["## See also", "\n".join(rows)] if rows else []


def near(page: Page) -> list[str]:
    """The codes of the same range that stand next to this one, in order."""
    codes = range_of(page)
    if codes is None:
        among = [other.code for other in REGISTRY.pages.values() if other.module == page.module]
    else:
        among = [code for code in REGISTRY.pages if codes.has(code)]
    among = sorted(among, key=split)
    if page.code not in among:
        return among[:_NEAR]
    here = among.index(page.code)
    start = max(0, min(here - _NEAR // 2, len(among) - _NEAR - 1))
    return [code for code in among[start : start + _NEAR + 1] if code != page.code]


def _named(code: str, links: Links) -> str:
    title = REGISTRY.pages[code].title if code in REGISTRY.pages else "removed"
    return f"{link(code, links.rule(code))}: {plain(title)}"


def _removed(gone: Removed, links: Links) -> str:
    """The page of a code that no rule has any more."""
    said = [f"# {gone.code}: removed in {gone.release}"]
    lines = ["**No rule has this code any more**, and none will be given it again."]
    if gone.replaced_by:
        lines.append(f"**Read instead:** {_named(gone.replaced_by, links)}.")
    said += ["\\\n".join(lines), "## Why", prose(gone.why, links.rule)]
    family = links.family(split(gone.code)[0])
    if family:
        said += ["## See also", f"- [all rules of the family {gone.code.rstrip('0123456789')}]({family})"]
    return "\n\n".join(said) + "\n"
