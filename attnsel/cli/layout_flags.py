"""Where tensors lie, said on the command line: ``--stride q=S0,S1,S2,S3`` and ``--misaligned q``.

They fill ``AttentionParams.tensors``, which a call in Python fills from its tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from attnsel.cli.flags import THE_CALL
from attnsel.errors import InvalidInput
from attnsel.params import ITEMSIZE, AttentionParams, Tensors, TensorSpec

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
            order = "bhss" if name == "mask" else _order(name, p)
            raise InvalidInput(
                "--stride", f"{name}={_joined(stride)}", f"must have {len(shape)} numbers, for {order}"
            )
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


def _order(name: str, p: AttentionParams) -> str:
    return p.qkv_format if name == "q" else p.layout.kv_format


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
    return tuple(sizes[letter] for letter in _order(name, p))


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return tuple(reversed(steps))


def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
