"""What a model hands to attention: the kinds of calls in it, and the layers that are no softmax attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from attnsel.base.records import json_fields

Stack = Literal["text", "vision", "encoder", "decoder", "speech encoder"]
Attn = Literal["self", "cross"]
Mask = Literal["none", "implied", "tensor"]

BY_HAND = "by hand"
"""What stands instead of a kernel where a model writes attention out."""


class Grid(NamedTuple):
    """Of how many tokens a picture is: ``frames`` of ``side`` pixels, one token for ``pixels`` on each side,
    and ``text`` beside them."""

    side: int
    pixels: int
    frames: int
    text: int

    def image_tokens(self, side: int | None) -> int:
        return self.frames * ((side or self.side) // self.pixels) ** 2


@json_fields(
    *("layers", "stack", "attn", "q_heads", "kv_heads", "head_dim_qk", "head_dim_v", "causal", "window"),
    *("window_left", "window_right", "chunk", "softcap", "sinks", "scale", "bias", "calls_per_layer", "mask"),
    *("by_hand", "reaches"),
)
class Call(NamedTuple):
    """One kind of attention. ``layers``: their indices in the stack.

    ``kv_heads``: before any repeat. ``window_left`` and ``window_right``: keys beside the token's own that it
    sees, as flash-attn counts; None no bound. ``chunk``: tokens of a chunk, inside which alone they see each
    other. ``softcap``: 0 is off. ``scale``: the scores are multiplied by it. ``bias``: something is added to
    them. ``mask``: "tensor" where one of size queries x keys is always made, "implied" where sizes and
    flags say it all, "none". ``by_hand``: its code writes out the products and the softmax, so that no kernel
    is asked, except by the ``attn_implementation`` that it ``reaches``. ``grid``: of a diffusion transformer,
    whose lengths follow from a picture's size; ``joint``: its text and its picture are one sequence.
    """

    stack: Stack
    attn: Attn
    q_heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    causal: bool
    scale: float
    window_left: int | None = None
    window_right: int | None = None
    chunk: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    bias: bool = False
    mask: Mask = "none"
    calls_per_layer: int = 1
    by_hand: bool = False
    reaches: str = ""
    layers: tuple[int, ...] = ()
    grid: Grid | None = None
    joint: bool = False

    @property
    def window(self) -> int | None:
        """Of a causal call, the keys that a token sees with its own."""
        return None if self.window_left is None or not self.causal else self.window_left + 1


class Other(NamedTuple):
    """Layers that mix tokens otherwise. ``package``: what has a fast kernel for them; "" none that is known.
    ``without``: what runs where it is not installed. ``thread``: the address of one about that."""

    layers: tuple[int, ...]
    stack: Stack
    kind: str
    package: str
    without: str = ""
    thread: str = ""


class Layers(NamedTuple):
    """All of a model. ``by``: who said it, such as "transformers 5.23.0". ``unread``: what was not
    understood, in words; ``assumed``: lengths that nobody stated."""

    model_type: str
    by: str
    calls: tuple[Call, ...]
    other: tuple[Other, ...] = ()
    unread: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def layer_count(calls: Iterable[Call]) -> int:
    """Layers that make one of these calls, or several."""
    return len({(call.stack, layer) for call in calls for layer in call.layers})


def grouped(calls: Iterable[tuple[int, Call]]) -> tuple[Call, ...]:
    """Equal calls of several layers as one, in the order in which they came; of a layer that makes one twice
    ``calls_per_layer`` is 2."""
    layers: dict[Call, list[int]] = {}
    for layer, call in calls:
        layers.setdefault(call, []).append(layer)
    found = []
    for call, indices in layers.items():
        own = tuple(sorted(set(indices)))
        found.append(call._replace(layers=own, calls_per_layer=max(1, len(indices) // len(own))))
    return tuple(found)
