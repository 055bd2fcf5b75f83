"""The flags of a question, made from the models: a field's type, description and default live there only."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from cyclopts import Group, Parameter
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from attnsel.environment import COMPONENTS, Environment
from attnsel.errors import InvalidInput, short
from attnsel.gpus import CATALOGUE
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.recipes import KINDS

THE_CALL = Group("The call", sort_key=1)
THE_MACHINE = Group("The machine", sort_key=2)
POLICY = Group("Policy", sort_key=3)
OUTPUT = Group("Output", sort_key=4)

Json = Annotated[
    bool, Parameter(group=OUTPUT, negative="", show_default=False, help="print JSON instead of text")
]

CudnnLib = Annotated[
    str | None,
    Parameter(
        name="--cudnn-lib",
        group=THE_MACHINE,
        help="libcudnn, a file or folder; the environment's if left out",
    ),
]


class Flag(NamedTuple):
    """One flag: where its value goes and how it is written."""

    part: Literal["params", "machine", "policy"]
    field: str
    name: str
    negative: str  # what says no to a yes-or-no flag
    parameter: inspect.Parameter


_NAMES = {"is_training": ("--training", "--inference")}
# Tensor specs come from a file, and a recipe is chosen by name.
_LEFT_OUT = frozenset({"tensors", "fp8_meta"})


def plain_type(annotation: Any) -> tuple[Any, bool]:
    """A field's type without None, and whether None was in it."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [arg for arg in get_args(annotation) if arg is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return annotation, False


def _from_field(part: Literal["params", "policy"], field: str, info: FieldInfo, group: Group) -> Flag:
    kind, _ = plain_type(info.annotation)
    text = info.description or ""
    if get_origin(kind) is Literal:
        text += f": {', '.join(map(str, get_args(kind)))}"
    name, negative = _NAMES.get(field, ("--" + field.replace("_", "-"), "--no-" + field.replace("_", "-")))
    default = info.get_default(call_default_factory=True)
    extra: dict[str, Any] = {"negative": negative if kind is bool else ""}
    if kind is bool:
        default = name if default else None
    if get_origin(kind) is tuple and kind != tuple[int, int]:
        if get_args(kind)[0] is str:
            kind, text = str, f"{text}; commas between"
        else:
            extra["consume_multiple"] = True
    if kind is ByteSize:
        kind = str  # the model reads units
    if get_origin(kind) is Literal:
        kind = str  # the model knows aliases ("bfloat16") and names what is allowed
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    extra["show_default"] = False if shown in (None, "") else str(shown)
    extra["allow_leading_hyphen"] = kind in (int, float, tuple[int, int])
    return _flag(part, field, name, negative, kind, text, group, extra)


def _flag(
    part: Literal["params", "machine", "policy"],
    field: str,
    name: str,
    negative: str,
    kind: Any,
    text: str,
    group: Group,
    extra: Mapping[str, Any] = types.MappingProxyType({}),
) -> Flag:
    annotation = Annotated[kind | None, Parameter(name=name, help=text, group=group, **extra)]
    keyword = f"{part}_{field}"
    only = inspect.Parameter.KEYWORD_ONLY
    return Flag(
        part, field, name, negative, inspect.Parameter(keyword, only, default=None, annotation=annotation)
    )


DESCRIBED_AFTERWARDS = ("platform", "torch_flash")
"""Fields of an environment that are neither its GPU nor a version."""


def _all_flags() -> tuple[Flag, ...]:
    calls = [
        _from_field("params", field, info, THE_CALL)
        for field, info in AttentionParams.model_fields.items()
        if field not in _LEFT_OUT
    ]
    masks = "for plain F.sdpa: the element type of its attn_mask, such as fp32 or bool"
    calls.append(_flag("params", "mask_dtype", "--mask-dtype", "", str, masks, THE_CALL))
    rank = "for plain F.sdpa: dimensions of q, k and v; default 4"
    calls.append(_flag("params", "tensor_rank", "--tensor-rank", "", int, rank, THE_CALL))
    recipe = f"attention in FP8 under this recipe: {', '.join(KINDS)}"
    calls.append(_flag("params", "fp8_recipe", "--fp8-recipe", "", str, recipe, THE_CALL))
    cards = ", ".join(card.name for card in CATALOGUE.values())
    gpu = (
        f"{cards}, an architecture such as sm90 or gfx942, cpu, rocm, mps or xpu; this machine's if left out"
    )
    machine = [_flag("machine", "gpu", "--gpu", "", str, gpu, THE_MACHINE)]
    for component in COMPONENTS:
        text = f"version of {component.replace('_', '-')}, or none where it is not installed"
        machine.append(
            _flag("machine", component, "--" + component.replace("_", "-"), "", str, text, THE_MACHINE)
        )
    for field in DESCRIBED_AFTERWARDS:
        info = Environment.model_fields[field]
        text = ", ".join(get_args(info.annotation))
        text = f"{info.description}: {text}" if info.description else text
        machine.append(_flag("machine", field, "--" + field.replace("_", "-"), "", str, text, THE_MACHINE))
    settings = [
        _from_field("policy", field, info, POLICY)
        for field, info in Policy.model_fields.items()
        if field not in AttentionParams.model_fields  # --deterministic asks it of the call
    ]
    return (*calls, *machine, *settings)


FLAGS: tuple[Flag, ...] = _all_flags()
FLAG_OF: dict[str, Flag] = {flag.field: flag for flag in FLAGS}


def blame(error: InvalidInput) -> str:
    """An input error in the words of the command line: the flag, its value, what is allowed."""
    field = error.field.split(".")[0]
    more = str(error).partition(" (also wrong")
    tail = f"{more[1]}{more[2]}"
    flag = FLAG_OF.get(field)
    if flag is None:
        name = error.field if error.field.startswith("--") else f"{error.field} ="
        return f"{name} {_shown(error.value)}: {error.allowed}{tail}"
    if error.value is None:
        return f"{flag.name} is missing: {error.allowed}{tail}"
    if isinstance(error.value, bool) and flag.negative:
        name, other = (flag.name, flag.negative) if error.value else (flag.negative, flag.name)
        return f"{name}: {error.allowed} (say {other}){tail}"
    return f"{flag.name} {_shown(error.value)}: {error.allowed}{tail}"


def _shown(value: Any) -> str:
    return short(value, _spaced if value and isinstance(value, (tuple, list)) else str)


def _spaced(values: Iterable[Any]) -> str:
    return " ".join(map(str, values))
