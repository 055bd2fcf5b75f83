"""The form of the playground as HTML, from the flags of ``attnsel explain`` and ``attnsel can-i-use``.

A control stands for one flag and has its name. What the flag may hold, its default and its help are the
command's own: a flag that is added there is in the form too.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from html import escape
from typing import Any, NamedTuple, get_args, get_origin

from attnsel.backends.registry import CANDIDATES
from attnsel.cli.can_i_use import can_i_use
from attnsel.cli.explain import explain
from attnsel.cli.flags import FLAGS, SHORTHANDS
from attnsel.cli.form import PageForm
from attnsel.diagnose.models.source import presets
from attnsel.dispatchers import DISPATCHERS
from attnsel.environment.gpus import catalogue
from attnsel.environment.releases import torch_builds
from attnsel.environment.versions import Version
from attnsel.environment.wheels import on_pypi

_FIRST = (
    "gpu",
    "model",
    "training",
    "num-heads",
    "num-gqa-groups",
    "seqlen",
    "head-dim",
    "dtype",
    "attn-mask-type",
    "cudnn",
    "torch",
)
"""What nearly every question states: always in view."""

_GRID = ("rows", "cols", "kernel")
_ASIDE = re.compile(r"[;:]| \(")


class Field(NamedTuple):
    """A flag as a form shows it. Names are without dashes.

    names: its own first, then others that mean the same. negative: what says no to a yes-or-no flag. many: it
    may stand more than once. choices: all that it may be, or nothing. suggestions: some of what it may be.
    """

    names: tuple[str, ...]
    negative: str
    yes_or_no: bool
    many: bool
    group: str
    help: str
    default: str
    choices: tuple[str, ...]
    suggestions: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0]


def fields(left_out: Iterable[str]) -> list[Field]:
    """Every flag of both commands except those ``left_out``, in the order of their help."""
    found: dict[str, Field] = {}
    choices = {flag.parameter.name: flag.choices for flag in (*SHORTHANDS, *FLAGS)}
    for command in (explain, can_i_use):
        for parameter in _flags(command):
            field = _field(parameter, choices.get(parameter.name, ()))
            if field.name not in left_out:
                found.setdefault(field.name, field)
    return list(found.values())


def _flags(command: Callable[..., int]) -> Iterator[inspect.Parameter]:
    """What a command's flags are made of, those of its form among them."""
    forms = typing.get_type_hints(PageForm, include_extras=True).items()
    for parameter in inspect.signature(command).parameters.values():
        if parameter.annotation in (PageForm, "PageForm"):
            yield from (parameter.replace(name=name, annotation=kind) for name, kind in forms)
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            yield parameter


def _field(parameter: inspect.Parameter, choices: tuple[str, ...]) -> Field:
    kind, about = parameter.annotation.__origin__, parameter.annotation.__metadata__[0]
    names = tuple(name.removeprefix("--") for name in _texts(about.name)) or (
        parameter.name.replace("_", "-"),
    )
    negative = next((name.removeprefix("--") for name in _texts(about.negative)), "")
    default = about.show_default if isinstance(about.show_default, str) else ""
    name = names[0]
    if name == "as":
        choices = tuple(DISPATCHERS)
    elif name == "kernel":
        choices = tuple(CANDIDATES)
    suggestions = known(name)
    if name == "gpu":
        choices, suggestions = (), tuple(card.name for card in catalogue().values())
    group = about.group[0].name if about.group else ""
    help_ = (about.help or "").removesuffix("; this machine's if left out")  # a page has no machine
    kinds = {kind, *get_args(kind)}
    many = any(get_origin(one) is list for one in kinds)
    if name == default.removeprefix("--"):
        default = name
    return Field(names, negative, bool in kinds, many, group, help_, default, choices, suggestions)


def _texts(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


def known(component: str) -> tuple[str, ...]:
    """Releases of a component, newest first; names of models; nothing for a field that is neither."""
    if component == "model":
        return tuple(presets())
    package = {"cudnn-frontend": "nvidia-cudnn-frontend"}.get(component, component)
    if component == "torch":
        found = {str(build.torch) for build in torch_builds()}
    elif component == "cuda":
        found = {f"{build.cuda.major}.{build.cuda.minor}" for build in torch_builds()}
    elif component == "cudnn":
        names = [name for name in on_pypi() if re.fullmatch(r"nvidia-cudnn-cu\d+", name)]
        found = {".".join(text.split(".")[:3]) for name in names for text in on_pypi()[name]}
    else:
        found = set(on_pypi().get(package, ()))
    if component == "flash-attn":
        found = {text for text in found if not text.startswith("1.")}
    return tuple(sorted(found, key=lambda text: (Version.parse(text), text), reverse=True))


def html(fields: list[Field]) -> str:
    """The controls: those of nearly every question, and the others folded away."""
    by_name = {field.name: field for field in fields}
    first = [by_name[name] for name in _FIRST]
    parts = [f'<div class="controls first">{"".join(map(control, first))}</div>']
    for title, group in _groups([field for field in fields if field not in first]):
        parts.append(f'<details><summary>{escape(title)}</summary><div class="controls">')
        parts += map(control, group)
        parts.append("</div></details>")
    return "\n".join(parts)


def _groups(fields: list[Field]) -> Iterator[tuple[str, list[Field]]]:
    titles = {"The call": "More of the call", "The machine": "More of the machine"}
    for name in dict.fromkeys(field.group for field in fields if field.name not in _GRID):
        group = [field for field in fields if field.group == name and field.name not in _GRID]
        yield titles.get(name, name), group
    yield "A grid of two fields", [field for field in fields if field.name in _GRID]


def control(field: Field) -> str:
    """A label, which says what is meant, and its control."""
    name, help_ = field.name, field.help
    if field.choices and ": " in help_:
        help_ = help_.rpartition(": ")[0]  # the choices themselves are in the control
    if name in _FIRST:
        help_ = _ASIDE.split(help_, maxsplit=1)[0]  # all of it is what the pointer sees
    label = f'<label for="f-{name}"><code>{name}</code> <span>{escape(help_)}</span></label>'
    more = f'id="f-{name}" name="{name}" title="{escape(field.help)}" data-names="{" ".join(field.names)}"'
    if field.yes_or_no:
        return f'<div class="field">{label}{_select(more, _yes_or_no(field), "yes-or-no")}</div>'
    if field.choices:
        first = ("", f"{field.default} (default)" if field.default else "not stated")
        options = [first, *((choice, choice) for choice in field.choices)]
        return f'<div class="field">{label}{_select(more, options)}</div>'
    listed = "".join(f'<option value="{escape(text)}">' for text in field.suggestions)
    suggestions = f'<datalist id="l-{name}">{listed}</datalist>' if listed else ""
    more += f' list="l-{name}"' if listed else ""
    more += ' data-kind="many"' if field.many else ""
    plain = (
        f'autocomplete="off" autocapitalize="off" spellcheck="false" placeholder="{escape(field.default)}"'
    )
    return f'<div class="field">{label}<input type="text" {more} {plain}>{suggestions}</div>'


def _yes_or_no(field: Field) -> list[tuple[str, str]]:
    default = f"{field.default} (default)" if field.default else "not stated"
    return [("", default), *((name, name) for name in (field.name, field.negative) if name)]


def _select(more: str, options: list[tuple[str, str]], kind: str = "choice") -> str:
    made = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in options)
    return f'<select {more} data-kind="{kind}">{made}</select>'
