"""Records as JSON: the one adapter, and the versions of what is printed.

A record's fields are its JSON. Where they are not, ``json_fields`` above its class says what is, in order:
the name of an attribute, or a name beside where its value is found (an attribute's path, or a function of the
record).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from attnsel.base.rows import read_rows

R = TypeVar("R")
JsonField = str | tuple[str, str | Callable[[Any], Any]]
_JSON = "_json_fields"
_BESIDE = "_json_beside"


def json_fields(*fields: JsonField) -> Callable[[type[R]], type[R]]:
    """What the JSON of a class of records has, where that is not its fields."""

    def mark(cls: type[R]) -> type[R]:
        setattr(cls, _JSON, fields)
        return cls

    return mark


def json_beside(*names: str) -> Callable[[type[R]], type[R]]:
    """Properties of a model that stand in its JSON behind the fields."""

    def mark(cls: type[R]) -> type[R]:
        setattr(cls, _BESIDE, names)
        return cls

    return mark


def to_json(value: Any) -> Any:
    """A record and all that is in it in JSON's own types; a version, and what is odd, as its text."""
    kind = type(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    fields: tuple[JsonField, ...] | None = getattr(kind, _JSON, None)
    if fields is None and hasattr(kind, "_fields") and "__str__" not in vars(kind):
        fields = kind._fields
    if fields is not None:
        pairs = ((field, field) if isinstance(field, str) else field for field in fields)
        return {name: to_json(_found(value, where)) for name, where in pairs}
    if hasattr(kind, "model_dump"):
        beside: tuple[str, ...] = getattr(kind, _BESIDE, ())
        return {**value.model_dump(mode="json"), **{name: to_json(getattr(value, name)) for name in beside}}
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if kind in (tuple, list):
        return [to_json(item) for item in value]
    return str(value)


def _found(record: Any, where: str | Callable[[Any], Any]) -> Any:
    if callable(where):
        return where(record)
    for name in where.split("."):
        record = getattr(record, name)
    return record


@lru_cache(maxsize=1)
def versions() -> dict[str, int]:
    """Of every JSON that attnsel prints, by the name of its shape: ``data/shapes.csv``."""
    return {row["name"]: int(row["version"]) for row in read_rows("attnsel.base", "shapes")}


def stamped(name: str, said: dict[str, Any]) -> dict[str, Any]:
    """``said`` under the name and the version of its shape, which stand first."""
    rest = {key: value for key, value in said.items() if key != "schema"}  # of what stands inside
    return {"schema": f"attnsel.{name}/{versions()[name]}", **rest}
