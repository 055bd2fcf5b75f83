"""The grid that is executed: what a case is, features and their pairs, and the lengths of calls.

Most of a case's time goes into compiling its kernels, so that it makes many calls of them (``also``).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

_OWN = ("lengths", "heads", "splits")  # what a further call may have of its own, beside what is in ``spec``


@dataclass(frozen=True, slots=True)
class Case:
    """One call. ``tensors``: optional inputs, with the letters of their shape where they have a choice."""

    name: str
    spec: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    head_dims: tuple[int, int] = (64, 64)
    lengths: tuple[int, int] = (150, 201)  # s_q, s_kv
    dtypes: tuple[str, ...] = ("bf16",)  # on Turing fp16 only
    page_size: int = 0  # the keys lie in pages
    splits: int | None = None  # of decode; None: as the call would choose
    backward: bool = True
    heads: tuple[int, int] = (2, 1)  # of queries, of keys and values
    also: tuple[dict[str, Any], ...] = ()  # more calls: what of a case or of its ``spec`` is another
    quick: bool = False  # one of the representative part

    def calls(self) -> list[Case]:
        """This one, and with each entry of ``also`` in place of its own."""
        made = [dataclasses.replace(self, also=())]
        for other in self.also:
            own = {name: value for name, value in other.items() if name in _OWN}
            spec = {**self.spec, **{name: value for name, value in other.items() if name not in _OWN}}
            made.append(dataclasses.replace(self, also=(), spec=spec, **own))
        return made

    def shortened(self) -> Case:
        return dataclasses.replace(self, also=self.also[:2])

    def dtypes_on(self, arch: int) -> tuple[str, ...]:
        return ("fp16",) if arch < 80 else self.dtypes


CAUSAL = {"window_right": 0}
BOTTOM_RIGHT = {"window_right": 0, "bottom_right": True}
BOTH = ("bf16", "fp16")
PACKED = {"packed": True}
ALL = {**BOTTOM_RIGHT, "window_left": 70, "softcap": 1.5, "softmax_type": "learnable", "dropout_p": 0.3}
DECODED: dict[str, Any] = {"spec": BOTTOM_RIGHT, "lengths": (3, 300), "backward": False}


def _columns(i: int, other: int) -> int:
    """A length that ends in the i-th 8 of a tile of 128; ``other`` makes odd ones even."""
    return 8 * i + ((1, 3, 5, 7)[i // 2 % 4] if (i + i // 8 + other) % 2 else (2, 4, 6)[i % 3])


# Lengths of every remainder that a lane's own column or row can have in a tile, for calls of one kernel: a
# comparison is only seen to be strict where both sides are equal. None is a multiple of 16, for which Triton
# makes another kernel. The first two end in the first tile, which is loaded before the loop.
SWEEP: tuple[dict[str, Any], ...] = (
    {"lengths": (9, 13), "splits": 0},
    {"lengths": (21, 37), "splits": 0},
    *({"lengths": (64 + _columns(5 * i % 16, 0), 128 * (i % 2) + _columns(i, 0))} for i in range(16)),
)
# The columns that SWEEP leaves out of tiles of 128.
WIDE_SWEEP = (*SWEEP, *({"lengths": (67, _columns(i, 1))} for i in range(16)))
# Every remainder: rows that are not aligned are loaded by element, a few of them by one instruction.
ALL_REMAINDERS = tuple({"lengths": (s_q, s_q + 49)} for s_q in range(17, 81) if s_q % 16 and (s_q + 49) % 16)
# A lane's rows and columns may meet on a diagonal that is not the first.
DIAGONALS = ({"window_right": 8}, *SWEEP)
WIDE_DIAGONALS = ({"window_right": 8}, *WIDE_SWEEP)
# Of several sequences, one that ends with a tile (``tensors.py``).
WHOLE = ({"lengths": (134, 198)}, {"lengths": (193, 129)}, {"lengths": (195, 257)})
# Decoded rows are those of a group's heads: five fill more of a tile. Parts are many, or long.
DECODED_SWEEP: tuple[dict[str, Any], ...] = (
    {"lengths": (3, 16500), "splits": 128},
    {"lengths": (3, 2005), "splits": 2},
    {"heads": (5, 1)},
    *({"splits": splits} for splits in (7, 13, 21, 30)),
    *({"lengths": (3, s_kv)} for s_kv in (13, 37, 90)),
    *({"lengths": (3, 128 + each["lengths"][1])} for each in SWEEP[2:]),
)
# Bounds of the window on the edges of tiles and beside them.
_EDGES = ((64, 0), (63, 1), (32, 0), (33, 31), (0, 0), (127, 64), (128, 128), (65, 32))
WINDOWS = tuple(
    {**each, "window_left": left, "window_right": right}
    for each, (left, right) in zip(SWEEP[2:], 2 * _EDGES, strict=True)
)


# -- pairs of features ---------------------------------------------------------------------------------------
# What a feature adds to a case; "lengths" and "groups" are the case's own.
_FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "window": {"spec": {"window_left": 60, "window_right": 9}},
    "bottom-right": {"spec": BOTTOM_RIGHT},
    "softcap": {"spec": {"softcap": 1.2}},
    "alibi": {"tensors": {"alibi_slopes": "b h"}},
    "bias": {"tensors": {"bias": "1 h s_q s_kv"}},
    "mask": {"tensors": {"attn_mask": "b 1 s_q s_kv"}},
    "dropout": {"spec": {"dropout_p": 0.3}},
    "sinks": {"spec": {"softmax_type": "learnable"}, "tensors": {"softmax_offset": "h"}},
    "packed": {"spec": PACKED},
    "offsets": {"spec": {"q_offset": 100, "kv_offset": 50}},
    "lengths": {},
    "groups": {},
}
# Every two features stand together in one of these: a test counts them.
_TOGETHER = (
    "mask sinks groups offsets",
    "window softcap bias offsets",
    "bottom-right softcap sinks packed",
    "softcap alibi lengths groups",
    "bias mask lengths packed",
    "window bottom-right dropout lengths",
    "alibi dropout packed offsets",
    "bias dropout sinks groups",
    "window alibi mask sinks",
    "bottom-right alibi bias groups",
    "bottom-right softcap mask dropout",
    "bottom-right sinks lengths offsets",
    "window sinks packed groups",
)
_HEAD_DIMS = ((64, 64), (128, 128), (64, 64), (192, 128), (64, 64), (256, 256))


# Tiles that no bound of a window crosses, more of them than are loaded before the loop.
_WIDE_WINDOW = ({"lengths": (300, 600), "window_left": 320, "window_right": 280},)


def _together(number: int, names: str) -> Case:
    features = names.split()
    spec: dict[str, Any] = {}
    tensors: dict[str, str] = {}
    for name in features:
        spec |= _FEATURES[name].get("spec", {})
        tensors |= _FEATURES[name].get("tensors", {})
    if "lengths" in features:  # of packed sequences: they lie apart
        tensors |= {"padded": ""} if "packed" in features else {"seqlens_q": "b", "seqlens_kv": "b"}
    return Case(
        " + ".join(features),
        spec,
        tensors,
        head_dims=_HEAD_DIMS[number % len(_HEAD_DIMS)],
        dtypes=(BOTH[number % 2],),
        heads=(4, 2) if "groups" in features else (2, 1),
        also=(*SWEEP, *_WIDE_WINDOW) if "window" in features else SWEEP,
    )


PAIRS = tuple(_together(number, names) for number, names in enumerate(_TOGETHER))
