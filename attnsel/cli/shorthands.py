"""Short ways to say several fields of a call: ``--head-dim 192,128``, ``--seqlen 8k``, ``--causal``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attnsel.cli.flags import FLAG_OF, SHORTHANDS
from attnsel.cli.numbers import read_count
from attnsel.errors import InvalidInput, short
from attnsel.params import AttentionParams, read_mask_type
from attnsel.params.layout import LAYOUTS, read_layout

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
