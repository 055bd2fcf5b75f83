"""What users write down and expect to find again: names, flags, variables, codes, exit codes, schemas.

``tests/surface.json`` is the record of it, and ``tests/test_surface.py`` holds the product to the record.

    python tests/proof/surface.py     # adds what is new; what has gone is named, and stays in the record

Only a person takes something out, by hand, in the release that docs/explanation/versioning.md allows.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[1:1] = [
        str(Path(__file__).resolve().parents[2]),
        str(Path(__file__).resolve().parents[1] / "support"),
    ]

import attnsel
from attnsel import plugins
from attnsel.backends.registry import CANDIDATES
from attnsel.base.schemas import VERSIONS
from attnsel.cli import COMMANDS, build_app, output
from attnsel.rules import REGISTRY, load_families
from attnsel.settings import VARIABLES
from paths import ROOT

RECORD = ROOT / "tests" / "surface.json"
Surface = dict[str, dict[str, Any]]
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters(thing: Any) -> list[str]:
    """What may be given to it by name: fields of a model, or arguments."""
    fields = getattr(thing, "model_fields", None)
    if fields is not None:
        return sorted(fields)
    try:
        found = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):  # no function
        return []
    return sorted(p.name for p in found if p.kind not in _ANY and not p.name.startswith("_"))


def methods(thing: Any) -> list[str]:
    """Public methods and properties of a class of ours, inherited from ours too."""
    if not isinstance(thing, type):
        return []
    ours = [c for c in thing.__mro__ if c.__module__.startswith("attnsel")]
    return sorted({name for c in ours for name in vars(c) if not name.startswith(("_", "model_"))})


def named(module: Any, names: list[str]) -> dict[str, Any]:
    """Each public name with its parameters and its methods. Names that need torch are left out without it."""
    found = {}
    for name in names:
        try:
            thing = getattr(module, name)
        except ImportError:
            continue
        if callable(thing):
            about = {"parameters": parameters(thing), "methods": methods(thing)}
            found[name] = {key: value for key, value in about.items() if value}
        else:
            found[name] = {}
    return found


def commands() -> dict[str, Any]:
    """Each command with the flags that it takes, spelled in every way."""
    app = build_app(())
    found = {}
    for name, (target, _) in COMMANDS.items():
        module, _, function = target.partition(":")
        del app[name]
        app.command(getattr(importlib.import_module(module), function), name=name)
        arguments = app[name].assemble_argument_collection(parse_docstring=False)
        found[name] = {"flags": sorted({f for a in arguments for f in a.names if f.startswith("--")})}
    return found


def surface() -> Surface:
    """Everything, as it is now."""
    load_families()
    codes = {*REGISTRY.pages, *REGISTRY.removed}
    exits = {
        name: {"code": value} for name, value in vars(output).items() if name.isupper() and name in _EXITS
    }
    return {
        "python": named(attnsel, dir(attnsel)),
        "plugins": named(plugins, plugins.__all__),
        "commands": commands(),
        "variables": {name: {"field": field} for name, field in VARIABLES.items()},
        "exit_codes": exits,
        "candidates": {name: {} for name in CANDIDATES},
        "rules": {code: {} for code in sorted(codes)},
        "schemas": {name: {} for name in VERSIONS},
    }


_EXITS = ("FOUND", "BAD_INPUT", "NO_BACKEND", "CHECK_FAILED", "CANNOT_WRITE", "INTERRUPTED", "BROKEN_PIPE")


def missing(recorded: Any, now: Any, where: str = "") -> list[str]:
    """What ``recorded`` has and ``now`` has not, or has otherwise: as paths."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        return [
            gone
            for key, value in recorded.items()
            for gone in (missing(value, now[key], f"{where}/{key}") if key in now else [f"{where}/{key}"])
        ]
    if isinstance(recorded, list) and isinstance(now, list):
        return [f"{where}/{one}" for one in recorded if one not in now]
    return [] if recorded == now else [f"{where} was {recorded!r} and is {now!r}"]


def joined(recorded: Any, now: Any) -> Any:
    """Both. Where they differ the record stays."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        keys = sorted({*recorded, *now})
        return {
            key: joined(recorded[key], now[key])
            if key in recorded and key in now
            else {**now, **recorded}[key]
            for key in keys
        }
    return sorted({*recorded, *now}) if isinstance(recorded, list) else recorded


def main() -> int:
    now = surface()
    recorded = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    gone = missing(recorded, now)
    RECORD.write_text(json.dumps(joined(recorded, now), indent=1) + "\n", encoding="utf-8")
    for path in gone:
        print(f"in the record, and not there: {path}", file=sys.stderr)
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
