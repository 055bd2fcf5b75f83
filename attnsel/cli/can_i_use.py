"""``attnsel can-i-use``: which kernels have a feature, on which GPUs, from which release on."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from attnsel.backends.registry import CANDIDATES
from attnsel.base.suggestions import candidate_suggestion
from attnsel.cli.flags import FLAG_OF, OUTPUT, THE_MACHINE, Json, Markdown, one_form
from attnsel.cli.output import FOUND, NO_BACKEND, bar, print_json, print_text, text_width, wrap
from attnsel.environment import describe_device
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput
from attnsel.pages.can_i_use import ANSWERS, GPUS, Cell, Feature, Span, Stated, all_features, cells, find
from attnsel.pages.can_i_use_tables import (
    LOOKS,
    Part,
    as_dict,
    avoided,
    by_gpu,
    codes_of,
    command,
    components_line,
    cost_words,
    evidence_words,
    label,
    legend,
    markdown_lines,
    overview_lines,
    parts,
    range_words,
    sentence,
    span_mark,
    table_lines,
)
from attnsel.plugins import load_plugins
from attnsel.report.text import fold_command
from attnsel.rules import REGISTRY

_DEFAULT_GPU = "sm90"
_STATED = ("torch", "triton", "cudnn", "cudnn_frontend", "cuda", "flash_attn", "flash_attn_3", "flash_attn_4")


def with_releases(run: Callable[..., int]) -> Callable[..., int]:
    """A flag for the release of each component, which ``run`` receives as ``stated``."""
    hints = typing.get_type_hints(run, include_extras=True)
    own = [
        each.replace(annotation=hints[each.name])
        for each in inspect.signature(run).parameters.values()
        if each.name != "stated"
    ]
    flags = [FLAG_OF[component] for component in _STATED]

    def command_of(*words: str, **given: Any) -> int:
        stated = {flag.field: given.pop(flag.parameter.name, None) for flag in flags}
        return run(*words, stated=_stated(stated), **given)

    command_of.__name__, command_of.__doc__ = run.__name__, run.__doc__
    signature = inspect.Signature([*own, *(flag.parameter for flag in flags)])
    command_of.__signature__ = signature  # type: ignore[attr-defined]
    return command_of


def _stated(given: dict[str, str | None]) -> Stated:
    """Raises InvalidInput for what is no release."""
    found: dict[str, Version] = {}
    for component, text in given.items():
        if text is None:
            continue
        try:
            found[component] = Version.parse(text)
        except ValueError as error:
            raise InvalidInput(component, text, str(error)) from None
    return tuple(sorted(found.items()))


@with_releases
def can_i_use(
    *feature: Annotated[
        str, Parameter(help="such as softcap, paged-kv, fp8 or head-dim-256; all if left out")
    ],
    stated: Stated = (),
    gpu: Annotated[
        str | None,
        Parameter(group=THE_MACHINE, help="a GPU or an architecture: what runs there, why not, since when"),
    ] = None,
    kernel: Annotated[str | None, Parameter(group=OUTPUT, help="only these kernels; commas between")] = None,
    markdown: Markdown = False,
    json: Json = False,
) -> int:
    """Which kernels have a feature, on which GPUs, and from which release on.

    Without a feature: all of them, a line each, on one GPU (sm90 unless --gpu names another). With one: a
    table of kernels and architectures; with --gpu each kernel's releases in ranges, and the rules against
    it. A word that begins several names stands for them all: fp8, head-dim, paged.

    Every answer is the engine's own about one question, with all known releases of what decides: cuDNN,
    Triton, flash-attn, or PyTorch with what its wheel brings. What else a kernel needs is the newest. A
    stated release (--cudnn 9.1) is the one at hand.

    --json prints one object: states, features, kernels, gpus, cells (feature, kernel, gpu, at, state, since,
    always, unlocked_at, ranges, modes with the command that asks it) and rules.

    Exit code: 0 some kernel runs some of it, 2 bad input, 3 none does.
    """
    one_form(markdown=markdown, json=json)
    load_plugins()
    asked = find(feature) if feature else tuple(all_features().values())
    gpus = GPUS if feature and gpu is None else (gpu or _DEFAULT_GPU,)
    for name in gpus:
        describe_device(name)
    found = _asked(asked, _kernels(kernel), gpus, stated)
    if json:
        print_json(as_dict(found), indent=None)
    elif markdown:
        print_text("\n".join(markdown_lines(found)))
    elif not feature:
        _print_overview(found)
    else:
        for number, each in enumerate(asked):
            about = [cell for cell in found if cell.feature is each]
            if number:
                print()
            (_print_table if gpu is None else _print_reasons)(each, about, stated)
    return FOUND if any(cell.state in ANSWERS for cell in found) else NO_BACKEND


def _kernels(names: str | None) -> tuple[str, ...]:
    if names is None:
        return tuple(CANDIDATES)
    wanted = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in wanted:
        if name not in CANDIDATES:
            meant = candidate_suggestion(name, CANDIDATES)
            said = f"no such kernel: {meant} Allowed" if meant else "no such kernel; allowed"
            raise InvalidInput("--kernel", name, f"{said}: {', '.join(CANDIDATES)}")
    return wanted or tuple(CANDIDATES)


def _asked(
    features: Sequence[Feature], kernels: Sequence[str], gpus: Sequence[str], stated: Stated
) -> list[Cell]:
    """All cells, with a bar while a person waits."""
    total = len(features) * len(kernels) * len(gpus)
    found: list[Cell] = []
    if total < 500:
        return list(cells(features, kernels, gpus, stated))
    with bar("asking", total) as done:
        for cell in cells(features, kernels, gpus, stated):
            found.append(cell)
            done(len(found))
    return found


# ---- text ---------------------------------------------------------------------------------------------


def _print_overview(found: Sequence[Cell]) -> None:
    where = found[0].environment().device
    heading = f"What runs on {where.name}{_arch(where.name, where.arch)} with the newest releases"
    print_text("\n".join([heading, "", *overview_lines(found), "", *_legend(found)]))
    print_text("\n".join(["", *wrap("One of them, on every GPU: attnsel can-i-use softcap", "  ", "  ")]))


def _arch(name: str, arch: int | None) -> str:
    return "" if arch is None or name == f"sm{arch}" else f" (sm{arch})"


def _print_table(feature: Feature, found: Sequence[Cell], stated: Stated) -> None:
    lines = [*_heading(feature), "", *table_lines(by_gpu(found), text_width()), "", *_legend(found)]
    dated = [cell for cell in found if " " in label(cell)]
    if dated:
        plus = "2.6+  from that release on; 2.6* not with every later one; ≤2.6 with none after it"
        lines += wrap(f"{plus}. Releases of {components_line(dated)}", "  ", " " * 8)
    lines += ["", *wrap(f"Why, and all releases: attnsel can-i-use {feature.name} --gpu H100", "  ", "  ")]
    print_text("\n".join(lines))


def _heading(feature: Feature) -> list[str]:
    modes = " and ".join(feature.modes)
    return [f"{feature.title}  ({feature.name}, asked for {modes})", *wrap(feature.about)]


def _legend(found: Sequence[Cell]) -> list[str]:
    return [line for look in legend(found) for line in wrap(look.means, f"  {look.mark}  ")]


def _print_reasons(feature: Feature, found: Sequence[Cell], stated: Stated) -> None:
    device = found[0].environment().device
    lines = _heading(feature)
    lines[0] += f" on {device.name}{_arch(device.name, device.arch)}"
    order = sorted(found, key=lambda cell: cell.state not in ANSWERS)
    named: set[str] = set()
    for cell in order:
        lines += ["", *wrap(f"{LOOKS[cell.state].mark} {cell.kernel}  {sentence(cell)}", "", "    ")]
        told: set[str] = set()
        for part in parts(cell):
            for span in _shown(cell, part):
                text = _span_text(cell, part, span)
                lines += wrap(text, "    ", "      ") if text and text not in told else []
                named |= {*span.codes, *avoided(span)}
                told.add(text)
    rules = [code for code in codes_of(found) if code in named]
    for code in rules:
        page = REGISTRY.pages[code]
        lines += ["", "Rules"] if code == rules[0] else []
        lines += wrap(f"{page.title}  [{page.evidence}]", f"  {code}  ", " " * 12)
    first = order[0]
    lines += ["", f"Asked{f', of {first.kernel}' if len(order) > 1 else ''}:"]
    asked = (line for mode in first.spans for line in fold_command(command(first, mode), text_width() - 4))
    lines += [f"    {line}" for line in asked]
    print_text("\n".join(lines))


def _shown(cell: Cell, part: Part) -> tuple[Span, ...]:
    """The ranges of releases that are told, the newest first: of what no release runs the one at hand."""
    if cell.state == "never":
        return (cell.span(part.modes[0]),)
    return tuple(reversed(part.spans))


def _span_text(cell: Cell, part: Part, span: Span) -> str:
    """One range of releases: the answer, the rules against it, what is changed and what it rests on."""
    mode = part.modes[0]
    about = ", ".join(dict.fromkeys((*span.codes, *avoided(span))))
    said = [about, *cost_words(cell, mode, span)]
    if cell.at in span:
        said += evidence_words(cell, span)
    words = " · ".join(filter(None, said))
    if cell.state == "never":
        return words
    title = "" if len(part.modes) == len(cell.spans) else f"{part.title}: "
    if len(part.spans) == 1:
        return f"{title}{words}" if words else ""
    return f"{title}{range_words(span)} {span_mark(span)}  {words}".rstrip()
