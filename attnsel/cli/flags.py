"""The flags of a question, made from the models: a field's type, description and default live there only."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin

from cyclopts import Group, Parameter
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from attnsel.environment import COMPONENTS, Environment
from attnsel.environment.gpus import catalogue
from attnsel.errors import InvalidInput, short
from attnsel.pages.commands import DESCRIBED_AFTERWARDS, WITHOUT_FLAG, flag_name, negative_name
from attnsel.params import ITEMSIZE, AttentionParams, Tensors, TensorSpec, read_mask_type
from attnsel.params.layout import LAYOUTS, read_layout
from attnsel.params.options import KINDS
from attnsel.policy import Policy
from attnsel.verdicts.measured import Figures

if TYPE_CHECKING:
    from cyclopts import Token


# ---- Numbers as people type them: ``8k`` for 8192, ``128_000``, a window of one number -----------------


IN_HELP = "Numbers: `8k`, `8K` and `8Ki` are 8192, `1M` and `1Mi` 1048576; `128_000` is 128000."

_COUNT = re.compile(r"(-?)([0-9]+(?:_[0-9]+)*)(k|K|Ki|M|Mi)?")
_GROUPED = re.compile(r"[0-9]{1,3}(,[0-9]{3})+")
_WITH_POINT = re.compile(r"([0-9]+)\.0*")
_MOST_DIGITS = 400  # far above every bound, far below what int() refuses
_SIZES = {"": 1, "k": 1 << 10, "M": 1 << 20}


def read_count(name: str, text: str) -> int:
    """A whole number. Raises InvalidInput naming ``name``, with the right spelling where one is meant."""
    found = _COUNT.fullmatch(text)
    if found is not None and len(text) <= _MOST_DIGITS:
        unit = (found[3] or "").removesuffix("i").replace("K", "k")
        return int(found[1] + found[2]) * _SIZES[unit]
    raise InvalidInput(name, text, _hint(text))


def _hint(text: str) -> str:
    if len(text) > _MOST_DIGITS:
        return "is far too large a number"
    if _GROUPED.fullmatch(text):
        return f"must be a whole number without commas: {text.replace(',', '')}"
    point = _WITH_POINT.fullmatch(text)
    if point is not None:
        return f"must be a whole number: {point[1]}"
    return "must be a whole number such as 4096, 128_000 or 8k (8192)"


def read_window(name: str, words: Sequence[str]) -> tuple[int, int]:
    """(left, right) from two numbers, also with a comma between, or one for both sides."""
    parts = [part.strip() for word in words for part in word.split(",")]
    if len(parts) not in (1, 2):
        said = " ".join(words) or None
        raise InvalidInput(name, said, "must be LEFT RIGHT, or one number for both sides")
    numbers = [read_count(name, part) for part in parts]
    return numbers[0], numbers[-1]


# ---- as cyclopts calls them ---------------------------------------------------------------------------


def count_converter(kind: Any, tokens: Sequence[Token]) -> int:
    """One word."""
    return read_count(_name(tokens), tokens[0].value)


def window_converter(kind: Any, tokens: Sequence[Token]) -> tuple[int, int]:
    """Every word behind ``--window-size``."""
    return read_window(_name(tokens), once(tokens))


def counts_converter(kind: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Every word behind a flag that takes several."""
    name = _name(tokens)
    return tuple(read_count(name, part) for word in once(tokens) for part in word.split(","))


def once(tokens: Sequence[Token]) -> list[str]:
    """The words of a flag that takes several. Raises InvalidInput where it was given twice: cyclopts would
    put the words of both behind each other."""
    words = [token.value for token in tokens]
    if sum(token.index == 0 for token in tokens) > 1:
        raise InvalidInput(_name(tokens), " ".join(words), "is given twice")
    return words


def _name(tokens: Sequence[Token]) -> str:
    return (tokens[0].keyword if tokens else None) or "a number"


THE_CALL = Group("The call", help=IN_HELP, sort_key=1)
THE_MACHINE = Group("The machine", sort_key=2)
POLICY = Group("Policy", sort_key=3)
OTHER = Group("Another library's choice", sort_key=4)

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
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()  # what a shell may complete

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
    name, negative = flag_name(field), negative_name(field) if kind is bool else ""
    default = info.get_default(call_default_factory=True)
    if kind is bool:
        default = name if default else None
    extra: dict[str, Any] = {}
    choices: tuple[str, ...] = ()
    if get_origin(kind) is tuple:
        if get_args(kind)[0] is str:
            kind, text = str, f"{text}; commas between"
        else:
            extra = {"consume_multiple": True, "json_list": False, "converter": counts_converter}
            if kind == tuple[int, int]:
                extra["converter"] = window_converter
                kind, text = tuple[int, ...], f"{text}; one number is both"
    if kind is int:
        extra["converter"] = count_converter
    if kind in (ByteSize, Figures):
        kind = str  # the model reads units, and files
    if get_origin(kind) is Literal:
        choices = tuple(map(str, get_args(kind)))
        text += f": {', '.join(choices)}"
        kind = str  # the model knows aliases ("bfloat16") and names what is allowed
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    extra["show_default"] = False if shown in (None, "") else str(shown)
    extra["allow_leading_hyphen"] = kind in (int, float)
    return _flag(part, field, name, kind, text, group, negative, choices, **extra)


def _flag(
    part: Part,
    field: str,
    names: str,
    kind: Any,
    text: str,
    group: Group,
    negative: str = "",
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = (),
    **extra: Any,
) -> Flag:
    """``names``: the flag's own first."""
    written = [*names.split(), *ALIASES.get(field, ())]
    about = Parameter(name=written, help=text, group=group, negative=negative, **extra)
    only, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[kind | None, about]
    parameter = inspect.Parameter(f"{part}_{field}", only, default=None, annotation=annotation)
    return Flag(part, field, written[0], negative, parameter, choices)


def _devices() -> tuple[str, ...]:
    cards = (card.name.replace(" ", "") for card in catalogue().values())
    return (*cards, "cpu", "rocm", "mps", "xpu")


def _all_flags() -> tuple[Flag, ...]:
    calls = [
        _from_field("params", field, info, THE_CALL)
        for field, info in AttentionParams.model_fields.items()
        if field not in WITHOUT_FLAG
    ]
    masks = "for plain F.sdpa: the element type of its attn_mask, such as fp32 or bool"
    rank = "for plain F.sdpa: dimensions of q, k and v; default 4"
    recipe = f"attention in FP8 under this recipe: {', '.join(KINDS)}"
    calls += [
        _flag("params", "mask_dtype", "--mask-dtype", str, masks, THE_CALL),
        _flag("params", "tensor_rank", "--tensor-rank", int, rank, THE_CALL),
        _flag("params", "fp8_recipe", "--fp8-recipe", str, recipe, THE_CALL, choices=KINDS),
    ]
    gpu = (
        "H100, H200, B200, B300, RTX 5090, GB10 and more (attnsel gpus lists them), as drivers and shops "
        "write them; an architecture such as sm90 or gfx942; cpu, rocm, mps or xpu; this machine's if left "
        "out"
    )
    machine = [_flag("machine", "gpu", "--gpu", str, gpu, THE_MACHINE, choices=_devices)]
    for component in COMPONENTS:
        text = f"version of {component.replace('_', '-')}, or none where it is not installed"
        machine.append(_flag("machine", component, flag_name(component), str, text, THE_MACHINE))
    for field in DESCRIBED_AFTERWARDS:
        info = Environment.model_fields[field]
        kind = info.annotation
        choices = tuple(one for one in get_args(kind) if isinstance(one, str))
        if get_origin(kind) is tuple:  # several, with commas between
            kind = get_args(kind)[0]
        text = ", ".join(get_args(kind))
        text = f"{info.description}: {text}" if info.description else text
        machine.append(_flag("machine", field, flag_name(field), str, text, THE_MACHINE, choices=choices))
    settings = [
        _from_field("policy", field, info, POLICY)
        for field, info in Policy.model_fields.items()
        if field not in AttentionParams.model_fields  # --deterministic asks it of the call
    ]
    return (*calls, *machine, *settings)


FLAGS: tuple[Flag, ...] = _all_flags()
FLAG_OF: dict[str, Flag] = {flag.field: flag for flag in FLAGS}


SHORTHANDS: tuple[Flag, ...] = (
    _flag(
        "shorthand",
        "head_dim",
        "--head-dim",
        str,
        "head dimension of queries, keys and values; 192,128 where those of values differ",
        THE_CALL,
        allow_leading_hyphen=True,
    ),
    _flag(
        "shorthand",
        "seqlen",
        "--seqlen --seq-len",
        int,
        "longest sequence, of queries and of keys",
        THE_CALL,
        allow_leading_hyphen=True,
        converter=count_converter,
    ),
    _flag(
        "shorthand",
        "causal",
        "--causal",
        bool,
        "the mask type: causal or no_mask; padding_causal or padding where sequences are packed or padded",
        THE_CALL,
        "--no-causal",
    ),
    _flag(
        "shorthand",
        "sliding_window",
        "--sliding-window",
        int,
        "as transformers has it: a causal query sees N keys, its own among them, which is --window-size N-1 "
        "0; without a causal mask N keys on each side",
        THE_CALL,
        allow_leading_hyphen=True,
        converter=count_converter,
    ),
)
"""Flags that state other fields: ``expand`` says which."""


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
    if value and isinstance(value, (tuple, list)):
        return short(value, lambda values: " ".join(map(str, values)))
    return short(value, str)


# --------------------------------------------------------------------------------------------------------
# Short ways to say several fields of a call: ``--head-dim 192,128``, ``--seqlen 8k``, ``--causal``.


Fields = dict[str, Any]


class Expanded(NamedTuple):
    """The fields that shorthands state, and which of them stated each."""

    fields: Fields
    said_by: dict[str, str]


def expand(shorthands: Mapping[str, Any], stated: Mapping[str, Any], base: Mapping[str, Any]) -> Expanded:
    """Shorthands written out, beside what other flags state and above what a file states.

    Raises InvalidInput where a shorthand and a flag state the same.
    """
    found = Expanded({}, {})
    for name, value in shorthands.items():  # the mask comes before the window, which depends on it
        flag = next(flag for flag in SHORTHANDS if flag.field == name)
        written = flag.negative if value is False else flag.name
        fields = _READ[name](written, value, {**base, **stated, **found.fields})
        for place, (field, meant) in enumerate(fields.items()):
            if field in stated and (place == 0 or fields.keys() != _FOLLOWED.get(name) or _pair(value)):
                raise _both(written, value, field, stated[field])
            if field not in stated:
                found.fields[field] = meant
                found.said_by[field] = written
    return found


_FOLLOWED = {"head_dim": {"head_dim_qk", "head_dim_v"}, "seqlen": {"max_seqlen_q", "max_seqlen_kv"}}
"""Of one number the first field is meant, and the second unless its own flag says something else."""


def _pair(value: Any) -> bool:
    return isinstance(value, str) and "," in value


def _both(written: str, value: Any, field: str, other: Any) -> InvalidInput:
    flag = FLAG_OF[field]
    meant = " ".join(map(str, other)) if isinstance(other, tuple) else short(other, str)
    shown = None if isinstance(value, bool) else value
    return InvalidInput(written, shown, f"{flag.name} {meant} states {field} too; leave out one of them")


# ---- what each says -----------------------------------------------------------------------------------


def _head_dim(name: str, value: str, _: Mapping[str, Any]) -> Fields:
    parts = [part.strip() for part in value.split(",")]
    if len(parts) > 2:
        raise InvalidInput(name, value, "must be one number, or two: of queries and keys, of values")
    numbers = [read_count(name, part) for part in parts]
    return {"head_dim_qk": numbers[0], "head_dim_v": numbers[-1]}


def _seqlen(name: str, value: int, _: Mapping[str, Any]) -> Fields:
    return {"max_seqlen_q": value, "max_seqlen_kv": value}


def _mask(name: str, causal: bool, known: Mapping[str, Any]) -> Fields:
    before = read_mask_type(known.get("attn_mask_type"))
    before = before if isinstance(before, str) else ""
    if before and causal == ("causal" in before):
        return {"attn_mask_type": before}  # of a file
    padding = "padding" in before or _packed(known.get("qkv_layout"))
    if causal:
        return {"attn_mask_type": "padding_causal" if padding else "causal"}
    return {"attn_mask_type": "padding" if padding else "no_mask"}


def _packed(layout: Any) -> bool:
    try:
        return LAYOUTS[read_layout(layout)].q_format == "thd"
    except Exception:  # no layout: its own field says so
        return False


def _window(name: str, keys: int, known: Mapping[str, Any]) -> Fields:
    # transformers, masking_utils.py: a causal query at i sees j > i - N; another one |i - j| <= N.
    if keys < 1:
        raise InvalidInput(name, keys, "must be at least 1: the query's own key counts")
    mask = read_mask_type(known.get("attn_mask_type", AttentionParams.model_fields["attn_mask_type"].default))
    causal = isinstance(mask, str) and "causal" in mask
    return {"window_size": (keys - 1, 0) if causal else (keys, keys)}


_READ: dict[str, Callable[[str, Any, Mapping[str, Any]], Fields]] = {
    "head_dim": _head_dim,
    "seqlen": _seqlen,
    "causal": _mask,
    "sliding_window": _window,
}


# --------------------------------------------------------------------------------------------------------
# Where tensors lie, said on the command line: ``--stride q=S0,S1,S2,S3`` and ``--misaligned q``.
#
# They fill ``AttentionParams.tensors``, which a call in Python fills from its tensors.


_NAMES = ("q", "k", "v", "mask")
_ALIGNED = 16  # bytes; what TensorSpec.alignment counts up to

_STRIDE = Annotated[
    list[str] | None,
    Parameter(
        name="--stride",
        group=THE_CALL,
        negative="",
        help="q=S0,S1,S2,S3: steps in elements, in the layout's order, 0 for expanded; also k, v, mask",
    ),
]
_MISALIGNED = Annotated[
    str | None,
    Parameter(
        name="--misaligned",
        group=THE_CALL,
        help="q,k,v,mask: tensors that begin one element off a 16-byte boundary; q=4: at 4 bytes",
    ),
]


def layout_flags() -> list[inspect.Parameter]:
    """The flags, as parameters of a command."""
    only = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter("stride", only, default=None, annotation=_STRIDE),
        inspect.Parameter("misaligned", only, default=None, annotation=_MISALIGNED),
    ]


class Lying(NamedTuple):
    """What was said of tensors: strides, and bytes that addresses are multiples of (0: of one element)."""

    strides: Mapping[str, tuple[int, ...]]
    alignments: Mapping[str, int]

    def of(self, p: AttentionParams) -> AttentionParams:
        """The question about tensors that lie so. Raises InvalidInput."""
        named = [name for name in _NAMES if name in self.strides or name in self.alignments]
        if not named:
            return p
        if "mask" in named and p.attn_mask_type != "arbitrary":
            flag = "--stride" if "mask" in self.strides else "--misaligned"
            raise InvalidInput(flag, "mask", "says nothing without --attn-mask-type arbitrary")
        specs = {name: self._spec(name, p) for name in named}
        return p.replace(tensors=Tensors(**{**dict(p.tensors), **specs}))

    def _spec(self, name: str, p: AttentionParams) -> TensorSpec:
        shape = _shape(name, p)
        stride = self.strides.get(name)
        known: TensorSpec | None = getattr(p.tensors, name)
        if stride is None:
            stride = known.stride if known is not None else _dense(shape)
        if name == "mask" and len(stride) < len(shape):
            shape = shape[-len(stride) :]  # it broadcasts
        if len(stride) != len(shape):
            order = {"mask": "bhss", "q": p.qkv_format}.get(name, p.layout.kv_format)
            given = f"{name}={','.join(map(str, stride))}"
            raise InvalidInput("--stride", given, f"must have {len(shape)} numbers, for {order}")
        dtype = "bool" if name == "mask" else p.dtype
        size = 1 if name == "mask" else ITEMSIZE[p.dtype]
        alignment = self.alignments.get(name, known.alignment if known is not None else _ALIGNED)
        return TensorSpec(shape=shape, stride=stride, dtype=dtype, alignment=alignment or size)


def read_lying(strides: list[str] | None, misaligned: str | None) -> Lying:
    """What the flags say. Raises InvalidInput naming the flag and what is wrong with it."""
    said: dict[str, tuple[int, ...]] = {}
    for text in strides or ():
        name, equals, numbers = text.replace(" ", "").partition("=")
        steps = numbers.split(",")
        if name not in _NAMES or not equals or not all(step.isascii() and step.isdecimal() for step in steps):
            raise InvalidInput("--stride", text, "must be q=S0,S1,S2,S3 (or k=, v=, mask=), none below 0")
        if name in said:
            raise InvalidInput("--stride", text, f"{name} was stated before")
        said[name] = tuple(_number("--stride", text, step) for step in steps)
    alignments: dict[str, int] = {}
    for text in filter(None, (misaligned or "").replace(" ", "").split(",")):
        name, equals, number = text.partition("=")
        if name not in _NAMES or (equals and not (number.isascii() and number.isdecimal())):
            raise InvalidInput("--misaligned", text, "must be q, k, v or mask, or q=2 with a number of bytes")
        alignments[name] = _number("--misaligned", text, number) if equals else 0
        if equals and alignments[name] not in (1, 2, 4, 8):
            raise InvalidInput("--misaligned", text, "must be 1, 2, 4 or 8 bytes; 16 are aligned")
    if misaligned is not None and not alignments:
        raise InvalidInput("--misaligned", misaligned, "must name q, k, v or mask")
    return Lying(said, alignments)


def _number(flag: str, text: str, digits: str) -> int:
    if len(digits) > 19:
        raise InvalidInput(flag, text, "is larger than any tensor")
    return int(digits)


def _shape(name: str, p: AttentionParams) -> tuple[int, ...]:
    """The tensor's shape in its layout's order; packed sequences are taken to be full."""
    rows = p.max_seqlen_q if name == "q" else p.max_seqlen_kv
    if name == "mask":
        return p.batch_size, p.num_heads, p.max_seqlen_q, p.max_seqlen_kv
    sizes: dict[str, Any] = {
        "b": p.batch_size,
        "h": p.num_heads if name == "q" else p.num_gqa_groups,
        "s": rows,
        "t": p.batch_size * rows,
        "d": p.head_dim_v if name == "v" else p.head_dim_qk,
    }
    if p.page_size is not None and name != "q":  # [pages, page_size, h, d]
        sizes |= {"b": p.batch_size * -(-rows // p.page_size), "s": p.page_size}
        return tuple(sizes[letter] for letter in "bshd")
    return tuple(sizes[letter] for letter in (p.qkv_format if name == "q" else p.layout.kv_format))


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return tuple(reversed(steps))
