"""The page of a rule as a document: ``attnsel rule CODE --markdown``, and a page of the site.

Who arrives from a link in somebody's issue reads the first lines: who refuses what, since and until when, and
what helps. The headings stay as they are, since addresses end in them: #why, #fix, #examples, #source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.decision import Selection, select
from attnsel.environment import Environment, component_name
from attnsel.environment.versions import Version, Versions
from attnsel.errors import InvalidInput
from attnsel.pages.commands import example_commands
from attnsel.pages.figures import figure_blocks
from attnsel.pages.rule import (
    candidates_of,
    cards_of,
    device_types,
    devices_of,
    gpu_words,
    legend_of,
    names_of,
    parts_of,
    replaced_by_it,
    status_of,
    version_gates,
    version_words,
)
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.report.answer import hints, refusals, runs, verdict, ways
from attnsel.report.document import (
    Block,
    Code,
    Document,
    Drawing,
    Facts,
    Fields,
    Inline,
    Item,
    Items,
    Link,
    Paragraph,
    Paste,
    Prose,
    Ref,
    Section,
    Strong,
    codes,
    joined,
)
from attnsel.report.markdown import nowhere
from attnsel.report.text import to_text
from attnsel.rules import REGISTRY, Hint, Page, Placing, PolicyRule, Removed, Rule
from attnsel.rules.codes import question, range_of, split
from attnsel.verdicts.reasons import EVIDENCE


def sentence(text: str) -> str:
    """``text`` with a capital at its beginning, unless it begins with a name that is written small."""
    first = re.match(r"[a-z]+(?=[ ,;:])", text)
    if first is None or first[0] in _SMALL:
        return text
    return text[0].upper() + text[1:]


_SMALL = frozenset({"attnsel", "cudnn", "libcudnn", "libtorch", "pip", "tiled", "torch", "triton"})


# --------------------------------------------------------------------------------------------------------
# What ``attnsel explain`` answers to a rule's examples, as far as the rule goes: asked, never typed.


class ExampleAnswer(NamedTuple):
    """The example that a rule refuses, or a hint is about.

    command: what to paste; "" where no command line says it. blocks: of its report those about this rule, and
    the first way out. adapted: what attnsel changes so that a candidate of the rule runs all the same; "" for
    nothing.
    """

    command: str
    blocks: tuple[Block, ...]
    adapted: str = ""


def answer_to(page: Page) -> ExampleAnswer | None:
    """The report on a page's example, asked of the engine now; None for a page without one."""
    command = example_commands(page).get("fires_on", "")
    if isinstance(page, PolicyRule):
        if not command:
            return None
        policy = Policy(**page.fires_on[1])
        return ExampleAnswer(
            command, _about(page, select(AttentionParams(), Environment.describe("H100"), policy=policy))
        )
    if not isinstance(page, (Rule, Hint)) or (isinstance(page, Hint) and page.of_tensors):
        return None
    policy = Policy(preview=page.status == "preview")
    command += " --preview" if command and policy.preview else ""
    p, env = question(page, page.fires_on)
    selection = select(p, env, policy=policy)
    blocks = _about(page, selection)
    if isinstance(page, Rule) and page.code not in codes(blocks):
        # Of what is not installed, or needs a GPU, a report gives the reasons where it is asked for alone.
        name = page.candidates[0]
        command += f" --backend {name}" if command else ""
        selection = select(p, env, policy=policy.model_copy(update={"backend": name}))
        blocks = _about(page, selection)
    return ExampleAnswer(command, blocks, _adapted(page, selection))


def _about(page: Page, selection: Selection) -> tuple[Block, ...]:
    """The sentence, what is said of this rule, and the first way to one of its candidates."""
    blocks: list[Block] = [Paragraph(Strong(verdict(selection)))]
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
    return tuple(blocks)


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


class Links(NamedTuple):
    """Addresses that a page has among others; "" for what has none, as on a terminal.

    rule: of the page of a code. family: of the list of a family. evidence: of what a word of it means.
    playground: of a command to try.
    """

    rule: Callable[[str], str] = nowhere
    family: Callable[[str], str] = nowhere
    evidence: Callable[[str], str] = nowhere
    playground: Callable[[str], str] = nowhere


def page_document(page: Page | Removed, links: Links = Links()) -> Document:  # noqa: B008 (it is a constant)
    """The whole page."""
    if isinstance(page, Removed):
        return _removed(page, links)
    text = parts_of(page)
    answer = answer_to(page)
    parts: list[Block] = list(map(Paragraph, _first_lines(page, answer)))
    if "Fix" in text:
        parts.append(_section("Fix", Prose(sentence(text["Fix"]))))
    others = [Prose(f"{label}: {more}") for label, more in text.items() if label not in _LABELS]
    parts.append(_section("Why", Prose(sentence(text.get("Why", _NONE_RECORDED))), *others))
    if isinstance(page, Placing) and (figures := figure_blocks(page)):
        parts.append(Section("Figures", figures))
    parts.append(Section("Where it holds", (Fields(tuple(_where(page, links))),)))
    if shown := tuple(_examples(page, answer, links)):
        parts.append(Section("Examples", shown))
    legend = [Prose(legend_of(page))] if legend_of(page) else []
    file = f"{page.module.removeprefix('attnsel.').replace('.', '/')}.py"
    written = ("Written in ", Code(file), ", ", Code(page.name), ".")
    source = Prose(sentence(text.get("Source", page.source)))
    asked = [Prose(f"Asked: {text['Asked']}")] if "Asked" in text else []
    parts.append(_section("Source", source, *asked, *legend, written))
    if also := tuple(_see_also(page, links)):
        parts.append(Section("See also", (Items(also),)))
    return Document(tuple(parts), f"{page.code}: {page.title}")


def _section(title: str, *texts: Inline) -> Section:
    return Section(title, tuple(map(Paragraph, texts)))


_LABELS = ("Why", "Fix", "Source", "Asked")


# ---- first lines ------------------------------------------------------------------------------------------


def _first_lines(page: Page, answer: ExampleAnswer | None) -> Iterator[Inline]:
    yield _who(page)
    if page.status == "preview":
        how = Prose(" it is shown, and refuses only with `ATTNSEL_PREVIEW=1` (`--preview`).")
        yield (Strong("A preview:"), " ", how)
    if page.status == "deprecated":
        yield (Strong("Deprecated:"), " ", Ref(page.replaced_by), " took over.")
    if answer is not None and answer.adapted:
        how = Prose(f"in the example {answer.adapted}.")
        yield (Strong("attnsel changes such a call where it can:"), " ", how)


def _who(page: Page) -> Inline:
    """Who refuses, since and until when, in a line."""
    at = _at(page)
    if isinstance(page, Placing):
        short = f" Of one that stands lower for it a report says: “{page.short}”." if page.short else ""
        return (Strong("Orders kernels that can run, and refuses none."), short)
    if isinstance(page, Hint):
        return (Strong(("A remark on the question", at, ".")), " It refuses nothing, and orders nothing.")
    if isinstance(page, PolicyRule):
        return (Strong(_POLICY.get(page.family, "Refused")), ", whichever the kernel.")
    who = _kernels(candidates_of(page))
    if page.family == "INSTALL":
        return (Strong(("Without it ", who, " cannot run")), at, ".")
    at = at or ", in every version"
    if page.family == "BUG":
        lets = Code(f"--allow-known-bugs {page.code}")
        refused = ". attnsel refuses such a call; "
        return (Strong(("A known bug of ", who)), at, refused, lets, " lets it through.")
    if isinstance(page, Rule) and page.unknown:
        why = ": nobody has looked, or the sources differ. What is known to run goes first."
        return (Strong(("Not known for ", who)), at, why)
    return (Strong(("Refused by ", who)), at, ".")


_POLICY = {
    "POLICY": "Refused because you asked for it",
    "MEMORY": "Refused for want of memory",
    "RUNTIME": "Refused after what this process saw",
}


def _at(page: Page) -> Inline:
    """`` with cuDNN below 9.5.0, on Hopper (sm90)``; nothing where there is no gate."""
    versions = [version_words(*gate) for gate in version_gates(page)]
    places: list[Inline] = [("with ", joined(versions, last=" and "))] if versions else []
    if gpu_words(page):
        places.append(f"on {gpu_words(page)}")
    if devices_of(page):
        places.append(("on ", joined(devices_of(page), last=" or ")))
    return (" ", joined(places)) if places else ""


def _kernels(candidates: Iterable[str]) -> Inline:
    return joined((_SEVERAL.get(name) or Code(name) for name in names_of(candidates)), last=" and ")


_SEVERAL = {"all": "every kernel", "all but plug-ins": "every kernel but those of plug-ins"}


# ---- where it holds ---------------------------------------------------------------------------------------


def _where(page: Page, links: Links) -> Iterator[tuple[str, tuple[Inline, ...]]]:
    """The gates of a rule, one row each, and what becomes of its example beyond them."""
    names = candidates_of(page)
    few = isinstance(page, Rule) and len(names) <= 4
    titled = tuple((Code(name), f": {CANDIDATES[name].title}") for name in names)
    yield "Kernels", titled if few else (_kernels(names),)
    yield "Versions", tuple(version_words(*gate) for gate in version_gates(page)) or ("every one",)
    gpus, cards = gpu_words(page), cards_of(page)
    such = (f"such as {', '.join(cards)}",) if gpus and cards else ()
    kinds = joined(map(Code, device_types(page)), last=" and ")
    yield "GPUs", (gpus or kinds or "every one", *such)
    if isinstance(page, Rule):
        calls = {True: ["attention in FP8"], False: ["attention in other types than FP8"], None: []}[page.fp8]
        calls += ["one sequence over several ranks"] if page.over_ranks else []
        if calls:
            yield "Calls", ("; ".join(calls),)
        for limit in page.limits:
            yield "It wants", ((joined(map(Code, limit.fields), last=" and "), f": {limit.requirement}"),)
    for edge in beyond(page):
        refused = ("the example is refused by ", joined(map(Ref, edge.codes), last=" and "))
        yield f"With {edge.where}", ("the example runs" if edge.runs else refused,)
    word = Link(Code(page.evidence), links.evidence(page.evidence))
    yield "Rests on", ((word, f": {EVIDENCE[page.evidence]}"),)
    yield "Status", (Prose(status_of(page)),)


# ---- examples ---------------------------------------------------------------------------------------------


def _examples(page: Page, answer: ExampleAnswer | None, links: Links) -> Iterator[Block]:
    """Commands to paste, with what the engine answers to the first; nothing for a page without one."""
    if answer is not None:
        lead = "A call that it is said of" if isinstance(page, Hint) else "A call that trips it"
        yield from _command(lead, answer.command, links)
        if not answer.command:
            yield Paragraph("No command line describes the device of the example.")
        yield Paragraph("The answer, as far as it is about this rule:")
        yield Drawing(partial(to_text, Document(answer.blocks)))
    yield from _command("A call that passes", example_commands(page).get("passes", ""), links)


def _command(lead: str, command: str, links: Links) -> Iterator[Block]:
    if command:
        address = links.playground(command)
        there = (" (", Link("open it in the playground", address), ")") if address else ""
        yield Paragraph((lead, there, ":"))
        yield Paste((command,))


# ---- others -----------------------------------------------------------------------------------------------


def _see_also(page: Page, links: Links) -> Iterator[Item]:
    """What it replaces, what its text names, its neighbours in the same range, and its family."""
    for code in replaced_by_it(page.code):
        yield Item((*_named(code), ", which it replaces"))
    for code in near(page):
        yield Item(_named(code))
    yield from _family(page.family, links)


def _family(family: str, links: Links) -> Iterator[Item]:
    address = links.family(family)
    if address:
        yield Item(Link(f"all rules of the family {family}", address))


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


def _named(code: str) -> tuple[Inline, ...]:
    return (Ref(code), f": {REGISTRY.pages[code].title if code in REGISTRY.pages else 'removed'}")


def _removed(gone: Removed, links: Links) -> Document:
    """The page of a code that no rule has any more."""
    parts: list[Block] = [
        Paragraph((Strong("No rule has this code any more"), ", and none will be given it again."))
    ]
    if gone.replaced_by:
        parts.append(Paragraph((Strong("Read instead:"), " ", *_named(gone.replaced_by), ".")))
    parts.append(_section("Why", Prose(gone.why)))
    if also := tuple(_family(split(gone.code)[0], links)):
        parts.append(Section("See also", (Items(also),)))
    return Document(tuple(parts), f"{gone.code}: removed in {gone.release}")
