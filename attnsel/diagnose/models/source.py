"""A model, as whoever asks has it: its configuration as a dictionary, a preset's name, or an object."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from attnsel.base.rows import read_rows
from attnsel.base.suggestions import near
from attnsel.diagnose.models.calls import Call, Layers, grouped
from attnsel.diagnose.models.table import tabled
from attnsel.errors import InvalidInput


@cache
def presets() -> dict[str, Mapping[str, Any]]:
    """Configurations of public models, by the names that people use."""
    return {row["name"]: json.loads(row["config"]) for row in read_rows("attnsel.diagnose.models", "presets")}


def preset(name: str) -> Mapping[str, Any]:
    """Raises InvalidInput for a name that is none."""
    key = name.casefold().rpartition("/")[2]
    known = presets()
    if key not in known:
        meant = near(key, known)
        also = "" if meant is None else f"did you mean {meant}? "
        raise InvalidInput(
            "--model", name, f"is no file, no folder and no preset; {also}presets: {', '.join(known)}"
        )
    return known[key]


def config_of(model: Any) -> Mapping[str, Any]:
    """The configuration of whatever is given as a model. Raises InvalidInput."""
    if isinstance(model, str):
        return preset(model)
    held = getattr(model, "config", model)
    as_dictionary = getattr(held, "to_dict", None)
    found = as_dictionary() if callable(as_dictionary) else held
    if not isinstance(found, Mapping):
        raise InvalidInput(
            "model", type(model).__name__, "must be a model, its config, a dictionary or the name of a preset"
        )
    return found


def layers_of(config: Mapping[str, Any]) -> Layers:
    """By transformers' own code where it is installed and knows the model, by the table otherwise; of a part
    that transformers' code could not be asked about, what the table says. Raises InvalidInput."""
    by_table = tabled(config)
    if not _asks_transformers():
        return by_table
    from attnsel.diagnose.models.recorded import recorded_config, recorded_denoiser  # with torch

    if "_class_name" in config:
        return _with_denoiser(by_table, recorded_denoiser(config))
    recorded = recorded_config(config)
    if recorded is None:
        return by_table
    if not recorded.unread:
        return recorded
    stacks = {call.stack for call in recorded.calls}
    rest = tuple(call for call in by_table.calls if call.stack not in stacks)
    unread = tuple(
        f"{text}; the table of families was read for it" if rest else text for text in recorded.unread
    )
    return recorded._replace(calls=(*recorded.calls, *rest), unread=unread)


def _with_denoiser(by_table: Layers, calls: list[tuple[int, Call]] | None) -> Layers:
    """What diffusers' own code hands on, with the picture's size of the table's row."""
    if calls is None:
        return by_table
    grid = next((call.grid for call in by_table.calls), None)
    own = grouped((layer, call._replace(grid=grid)) for layer, call in calls)
    unread = by_table.unread if grid else ("how many tokens a picture has",)
    return Layers(by_table.model_type, "diffusers' own code", own, by_table.other, unread)


def _asks_transformers() -> bool:
    return all(map(importlib.util.find_spec, ("torch", "transformers")))
