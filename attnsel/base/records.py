"""Records as JSON: the one adapter, and the versions of what is printed.

A record's fields are its JSON. Where they are not, ``json_fields`` above its class says what is, in order:
the name of an attribute, or a name beside where its value is found (an attribute's path, or a function of the
record).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

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


# ---- The versions of every JSON that attnsel prints ------------------------------------------------------
# Each is described in docs/schemas/NAME-VERSION.json. A version is raised with any change of the shape: a
# field more or less, another type. The document of an older version stays (tests/docs/test_schemas.py).


_SHAPES: dict[str, tuple[int, str]] = {
    "selection": (5, "``attnsel explain --json``, ``Selection.to_json()``"),
    "plan": (2, "``attnsel explain --cp-size N --json``, under ``context_parallel``"),
    "debug": (5, "each line of ``ATTNSEL_DEBUG_FORMAT=json``"),
    "can-i-use": (1, "``attnsel can-i-use --json``; ``can-i-use/matrix.json`` of the site"),
    "grid": (1, "``attnsel can-i-use --rows FIELD=VALUES --cols FIELD=VALUES --json``"),
    "log": (1, "``attnsel explain --from-log FILE --json``"),
    "rules": (1, "each object of ``attnsel rules --json``"),
    "ranges": (1, "each object of ``attnsel rules --ranges --json``"),
    "rule": (2, "``attnsel rule CODE --json``"),
    "removed-rule": (1, "``attnsel rule CODE --json``, of a code that is gone"),
    "gpus": (1, "each object of ``attnsel gpus --json``"),
    "doctor": (7, "``attnsel doctor --json``"),
    "report": (1, "``attnsel report FILE … --json``: the files of many ranks in one answer"),
    "replay": (2, "a file of ``ATTNSEL_REPLAY_DIR``"),
    "conformance": (2, "``tests/proof/conformance.py --json``"),
    "conformance-cudnn": (2, "``tests/proof/conformance.py --backend cudnn --json``"),
    "conformance-flash": (1, "``tests/proof/conformance.py --backend flash_attn.4 --json``, and of 2 and 3"),
    "conformance-executed": (1, "``tests/proof/conformance.py --execute --json``"),
    "watch": (2, "``attnsel watch --json PROGRAM``"),
    "watch-process": (1, "the first line of a file of ``attnsel watch --out FOLDER``"),
    "watch-site": (2, "each other line of a file of ``attnsel watch --out FOLDER``"),
}
"""By name the version, and what prints it."""

VERSIONS = {name: version for name, (version, _) in _SHAPES.items()}
PRINTED_BY = {name: by for name, (_, by) in _SHAPES.items()}


def stamped(name: str, said: dict[str, Any]) -> dict[str, Any]:
    """``said`` under the name and the version of its shape, which stand first."""
    rest = {key: value for key, value in said.items() if key != "schema"}  # of what stands inside
    return {"schema": f"attnsel.{name}/{VERSIONS[name]}", **rest}
