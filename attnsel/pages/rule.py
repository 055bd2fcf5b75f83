"""What is said on the page of a rule: its facts, for the terminal, for JSON and for Markdown alike."""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterable, Iterator
from typing import Any, get_args

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import stamped
from attnsel.environment import COMPONENTS, Device, component_name
from attnsel.environment.gpus import ARCHITECTURES, familiar
from attnsel.environment.versions import Version, Versions
from attnsel.pages.commands import example_commands, jsonable
from attnsel.rules import REGISTRY, Hint, Page, Placing, PolicyRule, Removed, Rule
from attnsel.rules.codes import split
from attnsel.rules.cudnn.words import what_was_asked
from attnsel.verdicts.requirements import AtLeast

STATUS = {
    "active": "in force",
    "preview": "preview: tried out, and refuses only with ATTNSEL_PREVIEW=1 (--preview)",
    "deprecated": "deprecated: {} took over, and this one goes in a later release",
}

# Names of architectures that people use; the first ones that fit a whole run of them are taken.
_GENERATIONS = (
    (range(100, 130), "Blackwell"),
    (range(80, 90), "Ampere and Ada"),
    (range(70, 75), "Volta"),
    (range(75, 80), "Turing"),
    (range(80, 89), "Ampere"),
    (range(89, 90), "Ada"),
    (range(90, 100), "Hopper"),
    (range(100, 110), "datacentre Blackwell"),
    (range(110, 120), "Thor"),
    (range(120, 130), "consumer Blackwell"),
)


# ---- facts ------------------------------------------------------------------------------------------------


def candidates_of(page: Page) -> tuple[str, ...]:
    """The candidates a page is about; a preference, a policy rule or a hint is about them all."""
    return page.candidates if isinstance(page, Rule) else tuple(CANDIDATES)


def names_of(candidates: Iterable[str]) -> list[str]:
    """Candidates in few words."""
    among = list(candidates)
    if set(among) == set(CANDIDATES):
        return ["all"]
    if set(among) == {name for name, info in CANDIDATES.items() if not info.plugin}:
        return ["all but plug-ins"]
    sdpa = [name for name in CANDIDATES if name.startswith("sdpa.")]
    if set(sdpa) <= set(among):
        return ["sdpa.*", *(name for name in among if name not in sdpa)]
    return among


def status_of(page: Page) -> str:
    """Where a rule stands in its life, in a sentence without a full stop."""
    return STATUS[page.status].format(page.replaced_by)


def devices_of(page: Page) -> list[str]:
    """The device types of a rule that is about others than CUDA's; empty for one of CUDA's or of all."""
    kinds = device_types(page)
    return [] if "cuda" in kinds else kinds


def device_types(page: Page) -> list[str]:
    """The device types that a rule is about; empty for all of them."""
    if not isinstance(page, Rule) or page.device is None:
        return []
    return [kind for kind in get_args(Device.model_fields["type"].annotation) if kind in page.device]


def text_of(page: Page) -> str:
    """What a page says, and what libcudnn answered when it was asked about it."""
    asked = what_was_asked().get(page.code)
    if asked is None:
        return page.text
    where = f", on {asked.on}" if asked.on else ""
    return f"{page.text}\nAsked: cuDNN {asked.answers}{where}. {asked.remark}".rstrip()


def parts_of(page: Page) -> dict[str, str]:
    """A page's text by its labels: Why, Fix, Source and others, each one paragraph without its label."""
    labelled: dict[str, str] = {}
    for paragraph in paragraphs(text_of(page)):
        label, colon, text = paragraph.partition(": ")
        named = bool(colon) and label.isalpha() and label[:1].isupper()
        key, text = (label, text) if named else ("", paragraph)
        labelled[key] = f"{labelled[key]} {text}" if key in labelled else text
    return labelled


def legend_of(page: Page) -> str:
    """What abbreviations in its source stand for, where its folder has some; "" otherwise."""
    folder = sys.modules.get(page.module.rpartition(".")[0])
    legend: str = getattr(folder, "SOURCES", "")
    return legend if re.search(r"(?<![\w/])[A-D]\b(?!')", page.source) else ""


def paragraphs(text: str) -> list[str]:
    """A page's text: each labelled part (Why:, Fix:, Source:) a paragraph of its own."""
    parts: list[str] = []
    fresh = True
    for line in text.splitlines():
        label = line.split(":")[0]
        starts = fresh or (":" in line and label.isalpha() and label[:1].isupper())
        if line.strip() and starts:
            parts.append(line.strip())
        elif line.strip():
            parts[-1] += " " + line.strip()
        fresh = not line.strip()
    return parts


# ---- where it holds, in words -----------------------------------------------------------------------------


def version_gates(page: Page) -> Iterator[tuple[str, Versions]]:
    """Components and the versions at which a rule or a hint speaks, from its own gates."""
    if not isinstance(page, (Rule, Hint)):
        return
    for gate in page.when:
        yield gate.component, gate
    gated = {gate.component for gate in page.when}
    for limit in page.limits if isinstance(page, Rule) else ():
        (field, *_), needed = limit.fields, limit.requirement
        if field in COMPONENTS and field not in gated and isinstance(needed, AtLeast):
            yield field, Versions(field, ((None, needed.limit),))


def version_words(component: str, versions: Versions) -> str:
    """``cuDNN from 9.1.0 to below 9.6.0``."""
    intervals = [_interval_words(low, high) for low, high in versions.intervals]
    return f"{component_name(component)} {' or '.join(intervals)}"


def _interval_words(low: Version | None, high: Version | None) -> str:
    if low is None:
        return "of any version" if high is None else f"below {high}"
    if high is None:
        return f"{low} and newer"
    return str(low) if high == low.after else f"from {low} to below {high}"


def architectures_of(page: Page) -> tuple[int, ...] | None:
    """The known architectures where a rule or a hint speaks; None where it is about every one."""
    if not isinstance(page, (Rule, Hint)):
        return None
    gate: Container[int] | None = page.arch
    for limit in page.limits if isinstance(page, Rule) else ():
        if limit.fields == ("arch",) and isinstance(limit.requirement, AtLeast):
            gate = range(limit.requirement.limit)
    return None if gate is None else tuple(arch for arch in ARCHITECTURES if arch in gate)


def generations(architectures: Iterable[int]) -> list[tuple[str, str]]:
    """Architectures as people name them, and as ``sm`` says them: ``[("Hopper", "sm90")]``."""
    left = list(architectures)
    named: list[tuple[str, str]] = []
    for span, name in _GENERATIONS:
        members = [arch for arch in ARCHITECTURES if arch in span]
        if members and set(members) <= set(left):
            left = [arch for arch in left if arch not in members]
            ends = f"sm{members[0]}" if len(members) == 1 else f"sm{members[0]} to sm{members[-1]}"
            named.append((name, ends))
    for arch in left:  # some of a generation
        name = next((name for span, name in _GENERATIONS[2:] if arch in span), "")
        named.append((name, f"sm{arch}"))
    merged: dict[str, list[str]] = {}
    for name, ends in sorted(named, key=lambda one: int(one[1].split()[0][2:])):
        merged.setdefault(name, []).append(ends)
    return [(name, ", ".join(ends)) for name, ends in merged.items()]


def gpu_words(page: Page) -> str:
    """``Hopper (sm90)``; empty where it is about every GPU."""
    architectures = architectures_of(page)
    if architectures is None:
        return ""
    return ", ".join(f"{name} ({ends})" for name, ends in generations(architectures))


def cards_of(page: Page) -> list[str]:
    """Cards that people know, of the architectures that a page is about."""
    architectures = architectures_of(page) or ()
    return [gpu.name for gpu in familiar() if gpu.arch in architectures]


# ---- as JSON ----------------------------------------------------------------------------------------------


def as_dict(page: Page) -> dict[str, Any]:
    """A row of ``attnsel rules --json``."""
    return {
        "code": page.code,
        "kind": type(page).__name__.lower(),
        "family": page.family,
        "title": page.title,
        "candidates": list(candidates_of(page)),
        "when": page.when_text,
        "evidence": page.evidence,
        "source": page.source,
        "status": page.status,
        "replaced_by": page.replaced_by or None,
    }


def whole_page(page: Page | Removed, figures: Iterable[Any] = ()) -> dict[str, Any]:
    """``attnsel rule CODE --json``, also of a code that was removed. ``figures``: of a rule that orders."""
    if isinstance(page, Removed):
        gone = {"code": page.code, "family": split(page.code)[0], "status": "removed", **page._asdict()}
        return stamped("removed-rule", gone | {"replaced_by": page.replaced_by or None})
    examples: dict[str, Any] = {"fires_on": None, "passes": None}
    if isinstance(page, (Rule, Hint)):
        examples = {"fires_on": dict(page.fires_on), "passes": dict(page.passes)}
    if isinstance(page, PolicyRule):
        examples["fires_on"] = {"candidate": page.fires_on[0], "policy": dict(page.fires_on[1])}
    text = {"name": page.name, "text": text_of(page), "module": page.module}
    more = {**text, **jsonable(examples), "commands": example_commands(page), "figures": list(figures)}
    return stamped("rule", as_dict(page) | more)


# ---- which others -----------------------------------------------------------------------------------------


def replaced_by_it(code: str) -> list[str]:
    """Codes, deprecated or removed, that a rule took over from."""
    before = [page.code for page in REGISTRY.pages.values() if page.replaced_by == code]
    return before + [gone.code for gone in REGISTRY.removed.values() if gone.replaced_by == code]


def does(page: Page) -> str:
    """What a page of another kind than a rule does; empty for one that refuses."""
    if isinstance(page, Placing):
        return "orders candidates that can run; refuses none"
    return "remarks on a question; refuses and orders nothing" if isinstance(page, Hint) else ""
