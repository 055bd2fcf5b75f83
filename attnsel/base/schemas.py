"""The versions of every JSON that attnsel prints. Each is described in docs/schemas/NAME-VERSION.json.

A version is raised with any change of the shape: a field more or less, another type. The document of an
older version stays as it is (tests/docs/test_schemas.py).
"""

from __future__ import annotations

from typing import Any

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
    "doctor": (6, "``attnsel doctor --json``"),
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
