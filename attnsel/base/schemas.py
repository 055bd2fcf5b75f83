"""The versions of every JSON that attnsel prints. Each is described in docs/schemas/NAME-VERSION.json.

A version is raised with any change of the shape: a field more or less, another type. The document of an
older version stays as it is (tests/docs/test_schemas.py).
"""

from __future__ import annotations

from typing import Any

VERSIONS: dict[str, int] = {
    "selection": 5,
    "plan": 2,
    "debug": 5,
    "can-i-use": 1,
    "grid": 1,
    "log": 1,
    "rules": 1,
    "ranges": 1,
    "rule": 2,
    "removed-rule": 1,
    "gpus": 1,
    "doctor": 7,
    "report": 1,
    "replay": 2,
    "conformance": 2,
    "conformance-cudnn": 2,
    "conformance-flash": 1,
    "conformance-executed": 1,
    "watch": 2,
    "watch-process": 1,
    "watch-site": 2,
}

PRINTED_BY: dict[str, str] = {
    "selection": "``attnsel explain --json``, ``Selection.to_json()``",
    "plan": "``attnsel explain --cp-size N --json``, under ``context_parallel``",
    "debug": "each line of ``ATTNSEL_DEBUG_FORMAT=json``",
    "can-i-use": "``attnsel can-i-use --json``; ``can-i-use/matrix.json`` of the site",
    "grid": "``attnsel can-i-use --rows FIELD=VALUES --cols FIELD=VALUES --json``",
    "log": "``attnsel explain --from-log FILE --json``",
    "rules": "each object of ``attnsel rules --json``",
    "ranges": "each object of ``attnsel rules --ranges --json``",
    "rule": "``attnsel rule CODE --json``",
    "removed-rule": "``attnsel rule CODE --json``, of a code that is gone",
    "gpus": "each object of ``attnsel gpus --json``",
    "doctor": "``attnsel doctor --json``",
    "report": "``attnsel report FILE … --json``: the files of many ranks in one answer",
    "replay": "a file of ``ATTNSEL_REPLAY_DIR``",
    "conformance": "``tests/proof/conformance.py --json``",
    "conformance-cudnn": "``tests/proof/conformance.py --backend cudnn --json``",
    "conformance-flash": "``tests/proof/conformance.py --backend flash_attn.4 --json``, and of 2 and 3",
    "conformance-executed": "``tests/proof/conformance.py --execute --json``",
    "watch": "``attnsel watch --json PROGRAM``",
    "watch-process": "the first line of a file of ``attnsel watch --out FOLDER``",
    "watch-site": "each other line of a file of ``attnsel watch --out FOLDER``",
}


def stamped(name: str, said: dict[str, Any]) -> dict[str, Any]:
    """``said`` under the name and the version of its shape, which stand first."""
    rest = {key: value for key, value in said.items() if key != "schema"}  # of what stands inside
    return {"schema": f"attnsel.{name}/{VERSIONS[name]}", **rest}
