"""Layers that are no softmax attention: which they are, and what has a fast kernel for them."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from attnsel.base.rows import read_rows
from attnsel.diagnose.models.calls import Call


class Kind(NamedTuple):
    """``package``: as it is installed; "" where none is known. ``without``: what runs in its place.
    ``thread``: a public one about that."""

    kind: str
    package: str
    without: str
    thread: str


@cache
def _kinds() -> tuple[tuple[re.Pattern[str], re.Pattern[str], Kind], ...]:
    found = []
    for row in read_rows("attnsel.diagnose.models", "other_layers"):
        kind = Kind(row["mixes"], row["package"], row["without"], row["thread"])
        found.append((re.compile(row["module"]), re.compile(row["layer_type"]), kind))
    return tuple(found)


def thread_of(call: Call) -> str:
    """The address of a public thread about layers that ask what this one does; "" where none is known."""
    for row in read_rows("attnsel.diagnose.models", "threads"):
        more, _, less = row["field"].partition("-")
        if (getattr(call, more) or 0) - (getattr(call, less) if less else 0) > int(row["above"]):
            return row["source"]
    return ""


def other_layer(module: str) -> Kind | None:
    """By the class of a module, such as Qwen3NextGatedDeltaNet; None of one that is none of them."""
    return next((kind for of_module, _, kind in _kinds() if of_module.search(module)), None)


def other_layer_type(layer_type: str, model_type: str) -> Kind | None:
    """By the word in a config's ``layer_types``, which some models use for one kind and some for another."""
    word = f"{model_type}.{layer_type}"
    return next((kind for _, of_type, kind in _kinds() if of_type.search(word)), None)
