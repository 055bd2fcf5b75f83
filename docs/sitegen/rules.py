"""A page for every code: what a rule says, why, what helps, where it holds; and lists to find one in.

Everything comes from the rules themselves, by way of ``attnsel rule CODE --markdown``
(attnsel/pages/rule_markdown.py). A rule that is added is on the site when it is built again.
"""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterable, Iterator
from urllib.parse import urlencode

from attnsel.backends.registry import CANDIDATES
from attnsel.pages.rule import candidates_of, names_of
from attnsel.pages.rule_markdown import Links, page_document
from attnsel.report.document import Code, joined
from attnsel.report.markdown import code, escape, inline, table, to_markdown
from attnsel.rules import REGISTRY, Page, Removed, load_all
from attnsel.rules.codes import Range, range_of, split
from attnsel.verdicts.reasons import EVIDENCE
from sitegen.model import File

EVIDENCE_PAGE = "../explanation/evidence.md"
PLAYGROUND = "playground/index.html"
TRAIL = (("Rules", "rules/index.md"),)
_ABOUT = {
    "INSTALL": "what must be installed",
    "DEVICE": "what every kernel needs of a device and of a call",
    "POLICY": "what you allowed or forbade",
    "MEMORY": "what does not fit the GPU",
    "RUNTIME": "what this process saw refuse, or go wrong",
    "CP": "one sequence over many ranks",
    "BUG": "known bugs: what compiles, runs and is wrong",
    "PREF": "which of several kernels goes first",
    "HINT": "questions that may not be what was meant",
    "TE": "TransformerEngine's own attention",
    "TORCH": "F.sdpa's own kernels where there is no CUDA",
}
"""Families that are about no kernel of their own; the others are named by their kernels."""


def files(playground: bool = True) -> Iterator[File]:
    """The page of every code that is, or was, in use; a list for each family; the list of families.

    playground: whether the site has one, to which pages link.
    """
    load_all()
    links = _links(playground)
    for page in (*REGISTRY.pages.values(), *REGISTRY.removed.values()):
        yield page_file(page, links)
    for family in families():
        yield File(f"rules/{family.lower()}.md", family_page(family), trail=TRAIL)
    yield File("rules/index.md", index_page(), title="Rules")


def page_file(page: Page | Removed, links: Links) -> File:
    """The page of one code."""
    family = split(page.code)[0]
    trail = (*TRAIL, (family, f"rules/{family.lower()}.md"))
    return File(
        f"rules/{page.code}.md", to_markdown(page_document(page, links), links.rule) + "\n", trail=trail
    )


def families() -> dict[str, list[str]]:
    """Codes by family, in the order in which rules are asked; those that were removed last."""
    found: dict[str, list[str]] = {}
    for code_ in (*REGISTRY.pages, *REGISTRY.removed):
        found.setdefault(split(code_)[0], []).append(code_)
    return found


# ---- links ------------------------------------------------------------------------------------------------


def _links(playground: bool) -> Links:
    return Links(
        rule=lambda code_: f"{code_}.md" if code_ in REGISTRY.pages or code_ in REGISTRY.removed else "",
        family=lambda family: f"{family.lower()}.md",
        evidence=lambda word: f"{EVIDENCE_PAGE}#{word}",
        playground=playground_address if playground else lambda command: "",
    )


def playground_address(command: str) -> str:
    """``attnsel explain --gpu H100 --training`` as a link from a rule's file, which Zensical moves along.

    The playground reads flags without their dashes: ``?gpu=H100&training``. "" for what is no such command.
    """
    name, explain, *rest = shlex.split(command)
    if (name, explain) != ("attnsel", "explain"):
        return ""  # a question in JSON, which no address holds
    pairs: list[tuple[str, list[str]]] = []
    for word in rest:
        if word.startswith("--"):
            pairs.append((word.removeprefix("--"), []))
        else:
            pairs[-1][1].append(word)
    query = "&".join(
        urlencode({flag: ",".join(values)}, safe=",") if values else flag for flag, values in pairs
    )
    return f"../{PLAYGROUND}?{html.escape(query)}"


# ---- lists ------------------------------------------------------------------------------------------------


def index_page() -> str:
    """The families, how a code is read, and what the words of the lists mean."""
    rows = []
    count = len(REGISTRY.pages)
    for family, codes in families().items():
        held = [code_ for code_ in codes if code_ in REGISTRY.pages]
        rows.append((f"[{family}]({family.lower()}.md)", about(family), str(len(held))))
    rests = [
        (
            f"[{code(word)}]({EVIDENCE_PAGE}#{word})",
            escape(text),
            str(sum(p.evidence == word for p in _pages())),
        )
        for word, text in EVIDENCE.items()
    ]
    families_ = table(("family", "about", "rules"), rows)
    words_ = table(("word", "meaning", "rules"), rests)
    return _INDEX.format(count=count, families=families_, words=words_)


_INDEX = """# Rules

Why does a kernel not run, and what helps? {count} rules answer, each with a code that stays. A report names
them, and each has a page: who refuses what, since and until when, what helps, on what that rests, and a call
to try. The search of this site finds a rule by its code, by words of its title, and by the number of an issue
that it rests on.

On a terminal `attnsel rule CUDNN204` prints the same, and `attnsel rules` lists them all.

## Families

The letters of a code are its family. The number says only which of them it is.

{families}

## What they rest on

{words}

## What becomes of a code

A code lives as long as the project. A rule that is tried out is a *preview*: it is shown, and refuses only
where it is asked to. One that another took over from is *deprecated*, and refuses as before; a release later
it is removed. Its page stays and says what to read instead, and no other rule is given its code.
"""


def about(family: str) -> str:
    """What a family is about: its kernels, or what it says of them all."""
    if family in _ABOUT:
        return _ABOUT[family]
    records = [record for record in CANDIDATES.values() if record.family == family]
    if len(records) == 1:
        return escape(records[0].title)
    return inline(joined((Code(record.name) for record in records), last=" and ")) or "a kernel of a plug-in"


def family_page(family: str) -> str:
    """The rules of a family, a table for each range of codes."""
    codes = families()[family]
    held = [REGISTRY.pages[code_] for code_ in codes if code_ in REGISTRY.pages]
    said = [f"# {family}: {about(family)}"]
    count = "1 rule" if len(held) == 1 else f"{len(held)} rules"
    said.append(f"{count}. [All families](index.md).")
    for heading, pages in _by_range(held):
        said += [f"## {heading}", table(("code", "rule", "kernels", "holds"), map(_row, pages))]
    gone = [REGISTRY.removed[code_] for code_ in codes if code_ in REGISTRY.removed]
    if gone:
        rows = [(f"[{one.code}]({one.code}.md)", one.release, escape(one.why)) for one in gone]
        said += ["## Removed", table(("code", "removed in", "why"), rows)]
    return "\n\n".join(said) + "\n"


def _by_range(pages: Iterable[Page]) -> list[tuple[str, list[Page]]]:
    """Rules under what the ranges of their codes are about, in the order of the codes."""
    found: dict[str, list[Page]] = {}
    for page in sorted(pages, key=lambda page: split(page.code)):
        found.setdefault(_heading(range_of(page), page), []).append(page)
    return list(found.items())


def _heading(codes: Range | None, page: Page) -> str:
    if codes is None:
        return "What a kernel takes" if page.module.endswith(".capabilities") else "Others"
    about_ = codes.about[:1].upper() + codes.about[1:]
    if split(page.code)[0] != "CUDNN" or "FP8" in codes.about:
        return escape(about_)
    return escape(f"{about_} ({'below cuDNN 9.8' if 'before_9_8' in codes.file else 'cuDNN 9.8 and newer'})")


def _row(page: Page) -> tuple[str, str, str, str]:
    kernels = ", ".join(
        name if name.startswith("all") else code(name) for name in names_of(candidates_of(page))
    )
    status = "" if page.status == "active" else f" *({page.status})*"
    title = f"{escape(page.title)}{status}"
    return f"[{page.code}]({page.code}.md)", title, kernels, escape(page.when_text) or "everywhere"


def _pages() -> list[Page]:
    return list(REGISTRY.pages.values())
