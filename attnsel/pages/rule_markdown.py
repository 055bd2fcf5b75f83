"""The page of a rule as Markdown: ``attnsel rule CODE --markdown``, and a page of the site.

Who arrives from a link in somebody's issue reads the first lines: who refuses what, since and until when, and
what helps. The headings stay as they are, since addresses end in them: #why, #fix, #examples, #source.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.decision import Selection, select
from attnsel.environment import Environment, component_name
from attnsel.environment.versions import Version, Versions
from attnsel.errors import InvalidInput, printable
from attnsel.pages.commands import example_commands, folded_command
from attnsel.pages.rule import (
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
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.report.answer import hints, refusals, runs, verdict, ways
from attnsel.report.document import Block, Code, Document, Facts, Item, Items, Paragraph, Ref, codes
from attnsel.report.markdown import code, fenced, table
from attnsel.report.text import to_text
from attnsel.rules import REGISTRY, Hint, Page, PolicyRule, Preference, Removed, Rule
from attnsel.rules.codes import question, range_of, split
from attnsel.verdicts.reasons import EVIDENCE

# --------------------------------------------------------------------------------------------------------
# Sentences of rules as Markdown: names of code as code, codes of rules and numbers of issues as links.
#
# What it writes reads the same on GitHub and in Python-Markdown: a character with a meaning becomes an
# entity.


REPOSITORIES = {
    "ComfyUI": "Comfy-Org/ComfyUI",
    "TransformerEngine": "NVIDIA/TransformerEngine",
    "cudnn-frontend": "NVIDIA/cudnn-frontend",
    "flash-attention": "Dao-AILab/flash-attention",
    "flashinfer": "flashinfer-ai/flashinfer",
    "pytorch": "pytorch/pytorch",
    "sam2": "facebookresearch/sam2",
    "sd-scripts": "kohya-ss/sd-scripts",
    "sglang": "sgl-project/sglang",
    "torch-xpu-ops": "intel/torch-xpu-ops",
    "transformers": "huggingface/transformers",
    "triton": "triton-lang/triton",
    "trl": "huggingface/trl",
    "unsloth": "unslothai/unsloth",
}
"""Where the issues of a repository are that a source names by its last name alone."""

_TOKEN = re.compile(
    r"""
      (?P<quoted>``?[^`\n]+``?)
    | (?P<url>https?://[^\s,;)"]+)
    | (?P<pip>\bpip\ install(?:\ -\S+)*\ (?:'[^']+'|[\w.-]*\w))
    | (?P<issue>(?P<repository>(?:[A-Za-z][\w.-]*/)?[A-Za-z][\w.-]*)?(?P<pr>(?:\bPR\ )?\#)(?P<number>\d+)\b)
    | (?P<rule>\b[A-Z]+\d{3}\b)
    | (?P<flag>(?<![\w-])--[a-z][\w-]*)
    | (?P<name>
          (?<![\w.])(?:[\w.-]+/)*(?:\w+\.)*\w*[A-Za-z0-9]_[\w.]*\w(?:\(\))?(?:=\w+)?   # head_dim_qk, a/b_c.py
        | (?<![\w./])(?:sdpa|flash_attn)\.\w+
        | (?<![\w./])F\.sdpa\b
        | (?<![\w./])(?:[\w-]+/)+[\w-]+\.\w+ | (?<![\w./])[\w-]+\.(?:py|h|cpp|cu|so|toml|md)\b
      )
    """,
    re.VERBOSE,
)
_KNOWN_REPOSITORY = re.compile(rf"\b(?:{'|'.join(map(re.escape, REPOSITORIES))})\b")
_MARKUP = re.compile(r"[&<>*`\[\]|\\~^{}$]|(?<!\w)_|_(?!\w)|(?<=\w)@(?=\w)|^(?:\d+(?=[.)] )|[#+=-](?=\s))")


def _no_link(code: str) -> str:
    return ""


def prose(text: str, rule_at: Callable[[str], str] = _no_link) -> str:
    """``text`` as one line of Markdown. ``rule_at``: the address of a rule's page, or nothing."""
    text = printable(" ".join(text.split()))
    repository = ""
    done, end = [], 0
    for found in _TOKEN.finditer(text):
        between = text[end : found.start()]
        named = _KNOWN_REPOSITORY.findall(between)
        repository = REPOSITORIES[named[-1]] if named else repository
        done.append(plain(between))
        end = found.end()
        whole = found[0]
        if found["issue"]:
            name = found["repository"] or ""
            repository = (name if "/" in name else REPOSITORIES.get(name, "")) if name else repository
            address = f"https://github.com/{repository}/issues/{found['number']}" if repository else ""
            done.append(link(plain(whole), address))
        elif found["rule"]:
            done.append(link(whole, rule_at(whole)))
        elif found["url"]:
            done.append(link(plain(whole), whole))
        else:
            done.append(code(whole.strip("`")))
    done.append(plain(text[end:]))
    return "".join(done)


def plain(text: str) -> str:
    """``text`` as it stands: nothing in it is markup."""
    return _MARKUP.sub(lambda found: "".join(f"&#{ord(sign)};" for sign in found[0]), text)


def link(text: str, address: str) -> str:
    """``text``, already Markdown, as a link where there is an address."""
    return f"[{text}]({address})" if address else text


def words(items: list[str], last: str = "and") -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}" if items else ""


def sentence(text: str) -> str:
    """``text`` with a capital at its beginning, unless it begins with a name that is written small."""
    first = re.match(r"[a-z]+(?=[ ,;:])", text)
    if first is None or first[0] in _SMALL:
        return text
    return text[0].upper() + text[1:]


_SMALL = frozenset({"attnsel", "cudnn", "libcudnn", "libtorch", "pip", "tiled", "torch", "triton"})


# --------------------------------------------------------------------------------------------------------
# What ``attnsel explain`` answers to a rule's examples, as far as the rule goes: asked, never typed.


WIDTH = 80


class Answer(NamedTuple):
    """The example that a rule refuses, or a hint is about.

    command: what to paste; "" where no command line says it. lines: of its report those about this rule, and
    the first way out. adapted: what attnsel changes so that a candidate of the rule runs all the same; "" for
    nothing.
    """

    command: str
    lines: list[str]
    adapted: str = ""


def answer_to(page: Page) -> Answer | None:
    """The report on a page's example, asked of the engine now; None for a page without one."""
    command = example_commands(page).get("fires_on", "")
    if isinstance(page, PolicyRule):
        if not command:
            return None
        policy = Policy(**page.fires_on[1])
        return Answer(
            command, _lines(page, select(AttentionParams(), Environment.describe("H100"), policy=policy))
        )
    if not isinstance(page, (Rule, Hint)) or (isinstance(page, Hint) and page.of_tensors):
        return None
    policy = Policy(preview=page.status == "preview")
    command += " --preview" if command and policy.preview else ""
    p, env = question(page, page.fires_on)
    selection = select(p, env, policy=policy)
    lines = _lines(page, selection)
    if isinstance(page, Rule) and not any(page.code in line for line in lines):
        # Of what is not installed, or needs a GPU, a report gives the reasons where it is asked for alone.
        name = page.candidates[0]
        command += f" --backend {name}" if command else ""
        selection = select(p, env, policy=policy.model_copy(update={"backend": name}))
        lines = _lines(page, selection)
    return Answer(command, lines, _adapted(page, selection))


def _lines(page: Page, selection: Selection) -> list[str]:
    """The sentence, what is said of this rule, and the first way to one of its candidates."""
    blocks: list[Block] = [Paragraph(verdict(selection), strong=True)]
    remarks = hints(selection)
    blocks += [Facts(remarks)] if page.code in codes(remarks) else []
    for item in (*runs(selection), *refusals(selection)):
        if page.code in codes(item):
            below = tuple(
                one
                for one in item.below
                if not (isinstance(one, Item) and isinstance(one.label, Ref)) or one.label.code == page.code
            )
            blocks.append(Items((item._replace(below=below),)))
    if isinstance(page, Rule):
        leads = [("To get ", Code(name)) for name in page.candidates]
        blocks += [Items((way,)) for way in [way for way in ways(selection) if way.label in leads][:1]]
    return to_text(Document(tuple(blocks)), WIDTH).split("\n")


def _adapted(page: Page, selection: Selection) -> str:
    for candidate in selection.ranked:
        for made in candidate.adaptations:
            if any(reason.code == page.code for reason in made.avoids):
                return f"{candidate.name} runs, and {made.text}"
    return ""


class Edge(NamedTuple):
    """What the rule's example comes to with a version beyond one end of its gates: ``where``, such as
    ``cuDNN 9.5.0``; ``codes`` are those that refuse it there; none, and ``runs``, where it runs."""

    where: str
    codes: tuple[str, ...]
    runs: bool


def beyond(page: Page) -> list[Edge]:
    """The example of a rule at the versions next to its gates, put to the engine."""
    edges: list[Edge] = []
    for component, gate in version_gates(page):
        low, high = gate.intervals[0][0], gate.intervals[-1][1]
        before = None if low is None else Versions(component, ((None, low),)).sample()
        for version in (before, high):
            found = None if version is None else _asked_with(page, component, version)
            if version is not None and found is not None:
                edges.append(Edge(f"{component_name(component)} {version}", *found))
    return edges


def _asked_with(page: Page, component: str, version: Version) -> tuple[tuple[str, ...], bool] | None:
    """Who refuses the example with another version, and whether a candidate of the rule runs it."""
    if not isinstance(page, Rule):
        return None
    try:
        p, env = question(page, {**page.fires_on, component: str(version)})
    except (InvalidInput, ValueError):
        return None
    selection = select(p, env, policy=Policy(adapt="never"))
    candidates = [selection[name] for name in page.candidates]
    if any(candidate.verdict == "eligible" for candidate in candidates):
        return (), True
    return tuple(dict.fromkeys(reason.code for reason in candidates[0].reasons)), False


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
        said += ["The answer, as far as it is about this rule:", fenced(answer.lines, "text")]
    return said + _command("A call that passes", passes, links)


def _command(lead: str, command: str, links: Links) -> list[str]:
    if not command:
        return []
    address = links.playground(command)
    there = f' (<a href="{address}">open it in the playground</a>)' if address else ""
    return [f"{lead}{there}:", fenced(folded_command(command, 80), "sh")]


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
