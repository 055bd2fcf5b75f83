"""The versions of every JSON that attnsel prints. Each is described in docs/schemas/NAME-VERSION.json.

A version is raised with any change of the shape: a field more or less, another type. The document of an
older version stays as it is (tests/docs/test_schemas.py).
"""

from __future__ import annotations

from typing import Any

VERSIONS: dict[str, int] = {
    "selection": 4,  # Selection.as_dict, attnsel explain
    "plan": 2,  # Plan.as_dict, inside attnsel explain --cp-size
    "debug": 4,  # a line of ATTNSEL_DEBUG_FORMAT=json
    "matrix": 1,
    "rules": 1,  # one row of attnsel rules
    "ranges": 1,  # one row of attnsel rules --ranges
    "rule": 1,
    "removed-rule": 1,  # attnsel rule, of a code that is gone
    "gpus": 1,  # one row of attnsel gpus
    "doctor": 4,
    "conformance": 2,
    "conformance-cudnn": 2,
    "conformance-flash": 1,
    "conformance-executed": 1,
}


def stamped(name: str, said: dict[str, Any]) -> dict[str, Any]:
    """``said`` under the name and the version of its shape, which stand first."""
    rest = {key: value for key, value in said.items() if key != "schema"}  # of what stands inside
    return {"schema": f"attnsel.{name}/{VERSIONS[name]}", **rest}
