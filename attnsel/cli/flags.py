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

from attnsel.cli.numbers import IN_HELP, count_converter, counts_converter, window_converter
from attnsel.environment import COMPONENTS, Environment
from attnsel.environment.gpus import CATALOGUE, FAMILIAR
from attnsel.errors import InvalidInput, short
from attnsel.pages.commands import DESCRIBED_AFTERWARDS, WITHOUT_FLAG, flag_name, negative_name
from attnsel.params import AttentionParams
from attnsel.params.recipes import KINDS
from attnsel.policy import Policy

THE_CALL = Group("The call", help=IN_HELP, sort_key=1)
THE_MACHINE = Group("The machine", sort_key=2)
POLICY = Group("Policy", sort_key=3)
OTHER = Group("Another library's choice", sort_key=4)
OUTPUT = Group("Output", sort_key=5)

Json = Annotated[
    bool, Parameter(group=OUTPUT, negative="", show_default=False, help="print JSON instead of text")
]

Markdown = Annotated[
    bool,
    Parameter(group=OUTPUT, negative="", show_default=False, help="print Markdown, for an issue"),
]


def one_form(**asked: bool) -> None:
    """Raises InvalidInput where two forms of output are asked for at once."""
    names = [f"--{name}" for name, wanted in asked.items() if wanted]
    if len(names) > 1:
        raise InvalidInput(names[0], None, f"cannot go with {' and '.join(names[1:])}: one form at a time")


CudnnLib = Annotated[
    str | None,
    Parameter(
        name="--cudnn-lib",
        group=THE_MACHINE,
        help="libcudnn, a file or folder; the environment's if left out",
    ),
]


Part = Literal["params", "machine", "policy", "shorthand"]


class Flag(NamedTuple):
    """One flag: where its value goes and how it is written."""

    part: Part
    field: str
    name: str
    negative: str  # what says no to a yes-or-no flag
    parameter: inspect.Parameter
    choices: tuple[str, ...] = ()  # what a shell may complete

    @property
    def names(self) -> tuple[str, ...]:
        """Every name: its own first, then those that other libraries have for it."""
        return (self.name, *ALIASES.get(self.field, ()))


ALIASES: dict[str, tuple[str, ...]] = {
    "qkv_layout": ("--layout",),
    "batch_size": ("--batch",),
    "num_heads": ("--heads", "--num-attention-heads"),
    "num_gqa_groups": ("--kv-heads", "--num-kv-heads", "--num-key-value-heads"),
    "max_seqlen_q": ("--seqlen-q",),
    "max_seqlen_kv": ("--seqlen-kv",),
    "attn_mask_type": ("--mask",),
    "attention_dropout": ("--dropout",),
}
"""By field, what else people type for its flag: names of transformers, FlashAttention and vLLM."""


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
    name, negative = flag_name(field), negative_name(field)
    default = info.get_default(call_default_factory=True)
    extra: dict[str, Any] = {"negative": negative if kind is bool else ""}
    if kind is bool:
        default = name if default else None
    choices: tuple[str, ...] = ()
    if get_origin(kind) is tuple:
        if get_args(kind)[0] is str:
            kind, text = str, f"{text}; commas between"
        else:
            extra["consume_multiple"], extra["json_list"] = True, False
            extra["converter"] = counts_converter
            if kind == tuple[int, int]:
                extra["converter"] = window_converter
                kind, text = tuple[int, ...], f"{text}; one number is both"
    if kind is int:
        extra["converter"] = count_converter
    if kind is ByteSize:
        kind = str  # the model reads units
    if get_origin(kind) is Literal:
        choices = tuple(map(str, get_args(kind)))
        kind = str  # the model knows aliases ("bfloat16") and names what is allowed
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    extra["show_default"] = False if shown in (None, "") else str(shown)
    extra["allow_leading_hyphen"] = kind in (int, float)
    return _flag(part, field, name, negative, kind, text, group, extra)._replace(choices=choices)


def _flag(
    part: Part,
    field: str,
    name: str,
    negative: str,
    kind: Any,
    text: str,
    group: Group,
    extra: Mapping[str, Any] = types.MappingProxyType({}),
) -> Flag:
    names = [name, *ALIASES.get(field, ())]
    annotation = Annotated[kind | None, Parameter(name=names, help=text, group=group, **extra)]
    keyword = f"{part}_{field}"
    only = inspect.Parameter.KEYWORD_ONLY
    return Flag(
        part, field, name, negative, inspect.Parameter(keyword, only, default=None, annotation=annotation)
    )


def _all_flags() -> tuple[Flag, ...]:
    calls = [
        _from_field("params", field, info, THE_CALL)
        for field, info in AttentionParams.model_fields.items()
        if field not in WITHOUT_FLAG
    ]
    masks = "for plain F.sdpa: the element type of its attn_mask, such as fp32 or bool"
    calls.append(_flag("params", "mask_dtype", "--mask-dtype", "", str, masks, THE_CALL))
    rank = "for plain F.sdpa: dimensions of q, k and v; default 4"
    calls.append(_flag("params", "tensor_rank", "--tensor-rank", "", int, rank, THE_CALL))
    recipe = f"attention in FP8 under this recipe: {', '.join(KINDS)}"
    calls.append(
        _flag("params", "fp8_recipe", "--fp8-recipe", "", str, recipe, THE_CALL)._replace(choices=KINDS)
    )
    cards = ", ".join(card.name for card in FAMILIAR[-6:])
    gpu = (
        f"{cards} and more (attnsel gpus lists them), as drivers and shops write them; an architecture such "
        "as sm90 or gfx942; cpu, rocm, mps or xpu; this machine's if left out"
    )
    known = (*(card.name.replace(" ", "") for card in CATALOGUE.values()), "cpu", "rocm", "mps", "xpu")
    machine = [_flag("machine", "gpu", "--gpu", "", str, gpu, THE_MACHINE)._replace(choices=known)]
    for component in COMPONENTS:
        text = f"version of {component.replace('_', '-')}, or none where it is not installed"
        machine.append(_flag("machine", component, flag_name(component), "", str, text, THE_MACHINE))
    for field in DESCRIBED_AFTERWARDS:
        info = Environment.model_fields[field]
        kind = info.annotation
        if get_origin(kind) is tuple:  # several, with commas between
            kind = get_args(kind)[0]
        text = ", ".join(get_args(kind))
        text = f"{info.description}: {text}" if info.description else text
        flag = _flag("machine", field, flag_name(field), "", str, text, THE_MACHINE)
        choices = tuple(one for one in get_args(info.annotation) if isinstance(one, str))
        machine.append(flag._replace(choices=choices))
    settings = [
        _from_field("policy", field, info, POLICY)
        for field, info in Policy.model_fields.items()
        if field not in AttentionParams.model_fields  # --deterministic asks it of the call
    ]
    return (*calls, *machine, *settings)


FLAGS: tuple[Flag, ...] = _all_flags()
FLAG_OF: dict[str, Flag] = {flag.field: flag for flag in FLAGS}


def _shorthand(field: str, names: str, negative: str, kind: Any, text: str, **extra: Any) -> Flag:
    names_ = names.split()
    parameter = Parameter(name=names_, help=text, group=THE_CALL, negative=negative, **extra)
    only = inspect.Parameter.KEYWORD_ONLY
    annotation = Annotated[kind | None, parameter]
    return Flag(
        "shorthand",
        field,
        names_[0],
        negative,
        inspect.Parameter(f"shorthand_{field}", only, default=None, annotation=annotation),
    )


SHORTHANDS: tuple[Flag, ...] = (
    _shorthand(
        "head_dim",
        "--head-dim",
        "",
        str,
        "head dimension of queries, keys and values; 192,128 where those of values differ",
        allow_leading_hyphen=True,
    ),
    _shorthand(
        "seqlen",
        "--seqlen --seq-len",
        "",
        int,
        "longest sequence, of queries and of keys",
        allow_leading_hyphen=True,
        converter=count_converter,
    ),
    _shorthand(
        "causal",
        "--causal",
        "--no-causal",
        bool,
        "the mask type: causal or no_mask; padding_causal or padding where sequences are packed or padded",
    ),
    _shorthand(
        "sliding_window",
        "--sliding-window",
        "",
        int,
        "as transformers has it: a causal query sees N keys, its own among them, which is --window-size N-1 "
        "0; without a causal mask N keys on each side",
        allow_leading_hyphen=True,
        converter=count_converter,
    ),
)
"""Flags that state other fields: attnsel/cli/shorthands.py says which."""


def blame(error: InvalidInput) -> str:
    """An input error in the words of the command line: the flag, its value, what is allowed."""
    field = error.field.split(".")[0]
    more = str(error).partition(" (also wrong")
    tail = f"{more[1]}{more[2]}"
    flag = FLAG_OF.get(field)
    if flag is None:
        if error.field.startswith("--") and error.value is None:
            return f"{error.field}: {error.allowed}{tail}"
        name = error.field if error.field.startswith("--") else f"{error.field} ="
        return f"{name} {_shown(error.value)}: {error.allowed}{tail}"
    if error.value is None:
        return f"{flag.name} is missing: {error.allowed}{tail}"
    if isinstance(error.value, bool) and flag.negative:
        name, other = (flag.name, flag.negative) if error.value else (flag.negative, flag.name)
        return f"{name}: {error.allowed} (say {other}){tail}"
    return f"{flag.name} {_shown(error.value)}: {error.allowed}{tail}"


def _shown(value: Any) -> str:
    if value == "":
        return "''"
    return short(value, _spaced if value and isinstance(value, (tuple, list)) else str)


def _spaced(values: Iterable[Any]) -> str:
    return " ".join(map(str, values))
