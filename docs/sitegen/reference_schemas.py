"""``reference/schemas.md`` and a page for each JSON that attnsel prints, made from the schemas themselves."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from attnsel.base.records import versions
from attnsel.base.rows import read_rows
from attnsel.environment import Device, Environment
from attnsel.params import AttentionParams, Fp8Meta, Tensors, TensorSpec
from attnsel.policy import Policy
from attnsel.settings import Settings
from sitegen import docstring
from sitegen.model import File
from sitegen.tables import table

_PRINTED_BY = {row["name"]: row["by"] for row in read_rows("attnsel.base", "shapes")}

FOLDER = Path(__file__).resolve().parents[1] / "schemas"
PATH = "reference/schemas.md"
_TOP = """\
# JSON

The first key of each object is `schema`, such as `attnsel.selection/8`: a name and a version. Any change of a
shape, even a field more, raises the version. The document of an earlier version stays as it is.

The documents are [JSON Schema](https://json-schema.org/draft/2020-12), to be had from here or from
`docs/schemas/`. An object holds exactly the keys that stand on its page, unless its keys are said to be data.
"""
_MODELS: tuple[type[BaseModel], ...] = (
    AttentionParams, Environment, Device, Policy, Settings, Tensors, TensorSpec, Fp8Meta,
)  # fmt: skip


def files() -> Iterator[File]:
    """The page of all shapes, then one for each at its present version."""
    rows = [
        (f"[`{name}`](schemas/{name}.md)", docstring.inline(_PRINTED_BY[name]), documents(name, "../schemas"))
        for name in versions()
    ]
    top = f"{_TOP}\n{table(('name', 'printed by', 'documents'), rows)}\n"
    yield File(PATH, top, title="JSON")
    for name, version in versions().items():
        yield File(f"reference/schemas/{name}.md", page(name, version), title=name)


def documents(name: str, folder: str) -> str:
    """Links to every version of a schema, the present one first."""
    return ", ".join(
        f"[{version}]({folder}/{name}-{version}.json)" for version in range(versions()[name], 0, -1)
    )


def page(name: str, version: int) -> str:
    """One shape: where it is printed, then its keys with type and meaning, and those of what it shares."""
    document = json.loads((FOLDER / f"{name}-{version}.json").read_text(encoding="utf-8"))
    shared: dict[str, Any] = document.get("$defs", {})
    parts = [
        f"# `{name}`, version {version}",
        f"{docstring.inline(_PRINTED_BY[name])}. [All shapes](../schemas.md).",
        f"Documents: {documents(name, '../../schemas')}.",
        keys(name, document),
    ]
    for inner, shape in shared.items():
        parts += [f"## {inner.strip('_')} {{#{inner}}}", keys(inner, shape)]
    return "\n\n".join(part for part in parts if part) + "\n"


def keys(owner: str, shape: dict[str, Any]) -> str:
    """The keys of an object, those inside it below it: ``candidates[].name``."""
    rows = [
        (f"`{path}`", kind_of(inner, required), docstring.inline(meaning(owner, path)))
        for path, inner, required in _walk(shape, "")
    ]
    return table(("key", "type", "meaning"), rows) if rows else ""


def _walk(shape: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    for name, inner in shape.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield here, inner, name in shape.get("required", ())
        yield from _walk(inner, here)
    for inner in (shape.get("items"), *shape.get("prefixItems", ())):
        if isinstance(inner, dict):
            yield from _walk(inner, f"{path}[]")
    more = shape.get("additionalProperties")
    if isinstance(more, dict) and more:
        yield from _walk(more, f"{path}.*")
    for inner in shape.get("anyOf", ()):
        yield from _walk(inner, path)


def kind_of(shape: dict[str, Any], required: bool = True) -> str:
    """A shape's type in words, with a link where it stands by itself."""
    return _kind(shape) + ("" if required else "; may be missing")


def _kind(shape: dict[str, Any]) -> str:
    if "$ref" in shape:
        name = shape["$ref"].rpartition("/")[2]
        return f"[{name.strip('_')}](#{name})"
    if "const" in shape:
        return f"`{json.dumps(shape['const'])}`"
    if "enum" in shape:
        return ", ".join(f"`{json.dumps(value)}`" for value in shape["enum"])
    if "anyOf" in shape:
        return " or ".join(dict.fromkeys(_kind(inner) for inner in shape["anyOf"]))
    named = shape.get("type", [])
    kinds = [named] if isinstance(named, str) else named
    words = [_word(kind, shape) for kind in sorted(kinds, key=lambda kind: kind == "null")]
    return " or ".join(words) or "any value"


def _word(kind: str, shape: dict[str, Any]) -> str:
    if kind == "array":
        items = shape.get("items") or {}
        return f"list of {_kind(items)}" if items else "list"
    if kind == "object" and "properties" not in shape:
        return "object whose keys are data"
    return kind


@functools.cache
def _of_models() -> dict[str, dict[str, str]]:
    """By class and field, what the models say of their fields."""
    return {
        model.__name__: {name: info.description or "" for name, info in model.model_fields.items()}
        for model in _MODELS
    }


def meaning(owner: str, path: str) -> str:
    """What a key means, where the model that it is a field of says so."""
    model = {"params": "AttentionParams", "environment": "Environment", "policy": "Policy"}.get(owner, owner)
    model = {"devices": "Device", "settings": "Settings"}.get(model, model)
    return _of_models().get(model, {}).get(path, "")
