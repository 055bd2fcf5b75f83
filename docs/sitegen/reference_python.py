"""``reference/python*.md``: what programs import from attnsel, made from signatures and docstrings.

The source is read, not run (griffe), so that a page about what needs PyTorch is made without it. Only the
models of a question are imported: their fields carry types, defaults and descriptions.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import griffe
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sitegen import docstring
from sitegen.model import File
from sitegen.tables import table

ROOT = Path(__file__).resolve().parents[2]
# The modules that programs and plug-ins import from; a name is public if it is one of its module's.
MODULES = (
    "attnsel",
    "attnsel.flash_attn",
    "attnsel.context_parallel",
    "attnsel.integrations.transformers",
    "attnsel.plugins",
)
FIELDS = ("field", "type", "default", "meaning")
_INTERNAL = "for the engine's"
_ERRORS = re.compile(r"(?<![\w`.\[])(?:InvalidInput|NoBackendError|UnsupportedArgument)(?![\w`\]])")
_LONGEST = 88  # columns of a signature in one line

Object: TypeAlias = griffe.Object


def files() -> Iterator[File]:
    """The page of each public module; that of attnsel leads to the others."""
    for module in MODULES:
        yield File(path_of(module), page(module), title="Python: attnsel" if module == "attnsel" else module)


def path_of(module: str) -> str:
    """Where a module's page stands: ``reference/python-flash-attn.md`` of ``attnsel.flash_attn``."""
    inside = module.removeprefix("attnsel").replace(".", "-").replace("_", "-")
    return f"reference/python{inside}.md"


@functools.cache
def _package() -> griffe.Module:
    """The package as it is written, with rules/ and backends/ in their places."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], allow_inspection=False)
    package = loader.load("attnsel")
    for name in ("rules", "backends"):
        package.set_member(name, loader.load(name))
    assert isinstance(package, griffe.Module)
    return package


def _find(path: str) -> Object:
    found: Any = _package()
    for name in path.split(".")[1:]:
        found = found[name]
        found = found.final_target if found.is_alias else found
    assert isinstance(found, griffe.Object)
    return found


def public(module: str) -> list[str]:
    """The public names of a module, in the order of the alphabet, classes and functions alike."""
    source = _find(module)
    if "__dir__" in source.members:  # names that are imported when they are asked for
        names = [name for name in dir(importlib.import_module(module)) if name in source.members]
    elif source.exports:
        names = [str(name) for name in source.exports]
    else:
        names = [name for name, member in source.members.items() if not member.is_alias and _kind(member)]
    return sorted((name for name in names if not name.startswith("_")), key=str.casefold)


def _kind(member: Any) -> bool:
    return bool(member.is_function or member.is_class)


@functools.cache
def _places() -> dict[str, tuple[str, str]]:
    """Of every documented object, by the path where it is defined: its page's module and its public name."""
    found: dict[str, tuple[str, str]] = {}
    for module in MODULES:
        for name in public(module):
            found.setdefault(_find(f"{module}.{name}").path, (module, name))
    return found


def _link(here: str, name: str) -> str:
    """The address of an object that a docstring on the page of ``here`` refers to; "" where it is on none."""
    owner, _, last = name.rpartition(".")
    for path, part in ((name, ""), (owner, f".{last}")):
        module, _, short = path.rpartition(".")
        if module in MODULES and short in public(module):
            module, short = _places()[_find(path).path]
            page = "" if module == here else path_of(module).rpartition("/")[2]
            return f"{page}#{module}.{short}{part if _is_member(path, part[1:]) else ''}"
    return ""


def _is_member(path: str, name: str) -> bool:
    found = _find(path)
    return bool(name) and isinstance(found, griffe.Class) and name in dict(_members(found))


def page(module: str) -> str:
    """The page of one module: what it is for, then each public name."""
    names = [name for name in public(module) if _places()[_find(f"{module}.{name}").path][0] == module]
    parts = [f"# `{module}`", _text(_find(module), module)]
    if module == "attnsel":
        parts.append(_modules())
    rows = [(f"[`{name}`](#{module}.{name})", _first(_find(f"{module}.{name}"))) for name in names]
    parts.append(table(("name", "what it is"), rows))
    parts += [part for name in names for part in _object(module, name)]
    if module == "attnsel":
        parts += _warnings()
    return "\n\n".join(part for part in parts if part) + "\n"


def _modules() -> str:
    rows = [
        (f"[`{module}`]({path_of(module).rpartition('/')[2]})", _first(_find(module)))
        for module in MODULES[1:]
    ]
    return table(("module", "what it is"), rows)


def _first(found: Object) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    text = found.docstring.value.partition("\n\n")[0] if found.docstring else ""
    return docstring.inline(" ".join(text.split()), lambda name: "")


def _text(found: Object, module: str, names: Any = ()) -> str:
    if found.docstring is None:
        return ""
    text = docstring.rendered(found.docstring.value, names, functools.partial(_link, module))
    return _ERRORS.sub(lambda error: f"[{error[0]}]({_link(module, f'attnsel.{error[0]}')})", text)


def _object(module: str, name: str) -> Iterator[str]:
    """One name: its signature, what it says, its fields, then its members."""
    found = _find(f"{module}.{name}")
    yield f"## {name} {{#{module}.{name}}}"
    if isinstance(found, griffe.Function):
        yield signature(found, name)
        yield _text(found, module, _arguments(found))
    elif isinstance(found, griffe.Class):
        model = _model(found)
        start = found.members.get("__init__")
        if model is None and isinstance(start, griffe.Function):
            yield signature(start, name, method=True)
        yield _text(found, module, [*_arguments(start), *found.members])
        if model is not None:
            yield fields(model)
        elif values := _values(found):
            yield values
        for member, what in _members(found):
            yield f"### {name}.{member} {{#{module}.{name}.{member}}}"
            if isinstance(what, griffe.Function):
                yield signature(what, member, method=not _is_static(what))
            elif what.annotation is not None:
                yield f"```python\n{member}: {what.annotation}\n```"
            yield _text(what, module, _arguments(what))
    else:
        yield f"```python\n{name} = {found.value}\n```" if isinstance(found, griffe.Attribute) else ""
        yield _text(found, module)


def _is_static(found: griffe.Function) -> bool:
    return "staticmethod" in found.labels


def _arguments(found: Any) -> list[str]:
    return [parameter.name for parameter in found.parameters] if isinstance(found, griffe.Function) else []


def _members(found: griffe.Class) -> list[tuple[str, Any]]:
    """Public methods and properties that say what they do, also those of a base of attnsel's own."""
    members = {**found.inherited_members, **found.members}
    done = []
    for name, member in members.items():
        what = member.final_target if member.is_alias else member
        said = what.docstring.value if what.docstring else ""
        shown = isinstance(what, griffe.Function) or "property" in what.labels or _is_lazy(what)
        ours = not name.startswith("_") and not hasattr(BaseModel, name)
        if ours and shown and said and _INTERNAL not in " ".join(said.lower().split()):
            done.append((name, what))
    return done


def _is_lazy(what: Any) -> bool:
    return any(str(decorator.value) == "lazy" for decorator in getattr(what, "decorators", ()))


def signature(found: griffe.Function, name: str, method: bool = False) -> str:
    """A function as it is called, one argument to a line where it is long."""
    if _is_lazy(found):
        return f"```python\n{name}: {found.returns}\n```"
    given = list(found.parameters)[1:] if method else list(found.parameters)
    words: list[str] = []
    keyword_only = False
    for parameter in given:
        if str(parameter.annotation) == "NoReturn":
            continue  # takes what is misspelt, and says what was meant
        if parameter.kind is griffe.ParameterKind.var_positional:
            keyword_only = True
        if parameter.kind is griffe.ParameterKind.keyword_only and not keyword_only:
            words.append("*")
            keyword_only = True
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(str(parameter.kind.value), "")
        word = f"{stars}{parameter.name}"
        word += f": {parameter.annotation}" if parameter.annotation is not None else ""
        if parameter.default is not None and not stars:
            word += f" = {parameter.default}" if parameter.annotation is not None else f"={parameter.default}"
        words.append(word)
        if parameter.kind is griffe.ParameterKind.positional_only and parameter is given[-1]:
            words.append("/")
    returns = f" -> {found.returns}" if found.returns is not None and found.name != "__init__" else ""
    line = f"{name}({', '.join(words)}){returns}"
    if len(line) > _LONGEST:
        line = "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){returns}"])
    return f"```python\n{line}\n```"


# ---- fields ---------------------------------------------------------------------------------------------


def _model(found: griffe.Class) -> type[BaseModel] | None:
    """The class itself where it is one of pydantic's, which no model of attnsel needs torch for."""
    if not any("Model" in str(base) for base in found.bases):
        return None
    module, _, name = found.path.rpartition(".")
    made = getattr(importlib.import_module(module), name)
    return made if isinstance(made, type) and issubclass(made, BaseModel) else None


def fields(model: type[BaseModel]) -> str:
    """The fields of a model as a table: name, type, default, meaning."""
    rows = [
        (f"`{name}`", type_words(info.annotation), default_of(info), docstring.inline(info.description or ""))
        for name, info in model.model_fields.items()
    ]
    return table(FIELDS, rows)


def default_of(info: FieldInfo) -> str:
    """A field's default as code, or that there is none."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return f"`{type(value).__name__}()`"
    return f"`{value!r}`"


def type_words(annotation: Any) -> str:
    """A type as a reader writes it: the values of a Literal, "or none" for an optional one."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_words(inner[0])
    if origin is typing.Literal:
        return ", ".join(f"`{value!r}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        rest = [type_words(part) for part in inner if part is not type(None)]
        return " or ".join([*rest, "`None`"] if type(None) in inner else rest)
    if origin is tuple:
        return f"tuple of {type_words(inner[0])}" if Ellipsis in inner else _pair(inner)
    if inspect.isclass(annotation) and origin is None:
        return f"`{annotation.__name__}`"
    return f"`{str(annotation).replace('typing.', '')}`"


def _pair(inner: tuple[Any, ...]) -> str:
    return f"({', '.join(type_words(part) for part in inner)})"


def _values(found: griffe.Class) -> str:
    """The fields of a named tuple or another class that declares its attributes."""
    rows = []
    for name, member in found.members.items():
        if name.startswith("_") or not isinstance(member, griffe.Attribute) or member.annotation is None:
            continue
        if "property" in member.labels:
            continue
        default = f"`{member.value}`" if member.value is not None else "required"
        said = docstring.inline(" ".join(member.docstring.value.split())) if member.docstring else ""
        rows.append((f"`{name}`", f"`{member.annotation}`", default, said))
    return table(FIELDS, rows) if rows else ""


def _warnings() -> Iterator[str]:
    """Every category of warning, which a program may filter by."""
    yield "## Warnings {#warnings}"
    found = sorted(_warning_classes(_package()), key=lambda warning: warning.name)
    yield table(("category", "when"), [(f"`{warning.path}`", _first(warning)) for warning in found])


def _warning_classes(module: griffe.Module) -> Iterator[griffe.Class]:
    for member in module.members.values():
        if member.is_alias:
            continue
        if isinstance(member, griffe.Class) and any(str(base).endswith("Warning") for base in member.bases):
            yield member
        elif isinstance(member, griffe.Module) and member.name not in ("rules", "backends"):
            yield from _warning_classes(member)
