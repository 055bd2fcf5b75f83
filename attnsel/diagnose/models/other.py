"""Layers that are no softmax attention: which they are, and what has a fast kernel for them."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from attnsel.base.rows import read_rows


class Kind(NamedTuple):
    """``package``: as it is installed; "" where none is known. ``without``: what runs in its place."""

    kind: str
    package: str
    without: str


@cache
def _kinds() -> tuple[tuple[re.Pattern[str], re.Pattern[str], Kind], ...]:
    found = []
    for row in read_rows("attnsel.diagnose.models", "other_layers"):
        kind = Kind(row["mixes"], row["package"], row["without"])
        found.append((re.compile(row["module"]), re.compile(row["layer_type"]), kind))
    return tuple(found)


def other_layer(module: str) -> Kind | None:
    """By the class of a module, such as Qwen3NextGatedDeltaNet; None of one that is none of them."""
    return next((kind for of_module, _, kind in _kinds() if of_module.search(module)), None)


def other_layer_type(layer_type: str, model_type: str) -> Kind | None:
    """By the word in a config's ``layer_types``, which some models use for one kind and some for another."""
    word = f"{model_type}.{layer_type}"
    return next((kind for _, of_type, kind in _kinds() if of_type.search(word)), None)
