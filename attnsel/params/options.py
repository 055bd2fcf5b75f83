"""FP8 recipes: how tensors are scaled into FP8. The only part of an ``fp8_meta`` that selection reads.

The names and fields follow TransformerEngine's recipes, so that one of its objects can be read into ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from attnsel.base.model import FrozenModel
from attnsel.errors import InvalidInput


class _Recipe(FrozenModel):
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    fp8_dpa: bool = Field(default=False, description="run dot-product attention itself in FP8")
    fp8_mha: bool = Field(default=False, description="keep FP8 across the whole multi-head attention block")

    @property
    def attention_in_fp8(self) -> bool:
        # TransformerEngine forces fp8_dpa when fp8_mha is set (dot_product_attention.py, 1681-1688).
        return self.fp8_dpa or self.fp8_mha


class DelayedScaling(_Recipe):
    """Per-tensor scales from a history of past maxima."""

    kind: Literal["delayed"] = "delayed"
    margin: int = 0
    amax_history_len: int = Field(default=1024, gt=0)
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True


class Float8CurrentScaling(_Recipe):
    """Per-tensor scales from the tensor's own maximum."""

    kind: Literal["current"] = "current"


class MXFP8BlockScaling(_Recipe):
    """One power-of-two scale per 32 elements."""

    kind: Literal["mxfp8"] = "mxfp8"
    fp8_format: Literal["HYBRID", "E4M3"] = "E4M3"


class Float8BlockScaling(_Recipe):
    """Scales per 1x128 or 128x128 block."""

    kind: Literal["block"] = "block"
    fp8_format: Literal["HYBRID", "E4M3"] = "E4M3"


Recipe = Annotated[
    DelayedScaling | Float8CurrentScaling | MXFP8BlockScaling | Float8BlockScaling,
    Field(discriminator="kind"),
]

_ADAPTER: TypeAdapter[Any] = TypeAdapter(Recipe)
_BY_NAME: dict[str, type[_Recipe]] = {
    cls.__name__: cls for cls in (DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling)
}
RECIPE_NAMES = {str(cls.model_fields["kind"].default): name for name, cls in _BY_NAME.items()}
"""TransformerEngine's name of each kind."""
KINDS = tuple(RECIPE_NAMES)


def read_recipe(value: Any) -> _Recipe | None:
    """A recipe from one of ours, its JSON, its kind as a word, or a TransformerEngine recipe object.

    Raises ValueError when it is none of these: an unknown recipe is never guessed at.
    """
    if value is None or isinstance(value, _Recipe):
        return value
    if isinstance(value, str):
        value = {"kind": value}
    if isinstance(value, Mapping):
        recipe: _Recipe = _ADAPTER.validate_python(dict(value))
        return recipe
    cls = _BY_NAME.get(type(value).__name__)
    if cls is None:
        raise ValueError(
            f"unknown FP8 recipe {type(value).__name__!r}; allowed: {', '.join(_BY_NAME)} or one of {KINDS}"
        )
    fields: dict[str, Any] = {}
    for name in cls.model_fields:
        if name == "kind" or not hasattr(value, name):
            continue
        field = getattr(value, name)
        # TransformerEngine's Format is an enum whose member names are E4M3 and HYBRID.
        fields[name] = getattr(field, "name", field) if name == "fp8_format" else field
    return cls(**fields)


# ---- How ranks may exchange what they hold, a line each. No torch --------------------------------------
# Whoever plans, judges or runs an exchange reads its record and asks for no name. One that moves data in a
# way of its own needs that in ``context_parallel/passes.py``; what limits it is in
# ``rules/context_parallel.py``.


CpCommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]


class ExchangeRecord(NamedTuple):
    """``swaps_heads``: ranks of a group hand each other their rows of some heads (all-to-all), so that each
    has some heads of all the group's rows. ``keys``: whether keys and values then travel around a ring block
    by block, are gathered by every rank, or stay where they are (the group is all ranks)."""

    swaps_heads: bool
    keys: Literal["ring", "gathered", ""]

    @property
    def nested(self) -> bool:
        """Two groups: heads are swapped in the inner one, keys go between the inner ones."""
        return self.swaps_heads and bool(self.keys)


EXCHANGES: dict[str, ExchangeRecord] = {
    "p2p": ExchangeRecord(swaps_heads=False, keys="ring"),
    "all_gather": ExchangeRecord(swaps_heads=False, keys="gathered"),
    "a2a": ExchangeRecord(swaps_heads=True, keys=""),
    "a2a+p2p": ExchangeRecord(swaps_heads=True, keys="ring"),
}


def exchange_named(cp_comm_type: str) -> ExchangeRecord:
    """Raises InvalidInput."""
    if cp_comm_type not in EXCHANGES:
        raise InvalidInput("cp_comm_type", cp_comm_type, f"must be one of {', '.join(EXCHANGES)}")
    return EXCHANGES[cp_comm_type]


def exchanges(test: Callable[[ExchangeRecord], bool]) -> tuple[str, ...]:
    """The names of those whose records pass ``test``."""
    return tuple(name for name, record in EXCHANGES.items() if test(record))
