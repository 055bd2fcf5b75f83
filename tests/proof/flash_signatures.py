"""Makes ``flash_signatures.json``: what functions of FlashAttention 2, 3 and 4 take and return, by version.

    python tests/proof/flash_signatures.py CHECKOUT WHEEL...

CHECKOUT is a clone of Dao-AILab/flash-attention with its tags; each WHEEL is a folder with one unpacked
``flash_attn_4`` wheel. Their source is parsed, never imported. Parameters are ``[name, default, kind]`` with
the default as its source text, or null where there is none.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "support" / "flash_signatures.json"
TWO, THREE, FOUR = "flash_attn/flash_attn_interface.py", "hopper/flash_attn_interface.py", "cute/interface.py"
TAGS = {
    "2": {v: f"v{v}" for v in ("2.3.6", "2.4.2", "2.5.9.post1", "2.6.3", "2.7.4.post1", "2.8.3")}
    | {"2.8.4": "HEAD"},
    "3": {"3.0.0b1+early": "v2.7.4.post1", "3.0.0b1": "v2.8.3", "3.0.0": "HEAD"},
}
PRIVATE = (
    "_flash_attn_forward",
    "_flash_attn_varlen_forward",
    "_flash_attn_backward",
    "_flash_attn_varlen_backward",
    "_flash_attn_fwd",
    "_flash_attn_bwd",
)


def wanted(name: str) -> bool:
    return name in PRIVATE or name.startswith("flash_attn_") or name == "get_scheduler_metadata"


def parameters(arguments: ast.arguments) -> Iterator[list[str | None]]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults]
    for parameter, default in zip(plain, defaults, strict=True):
        yield [parameter.arg, default and ast.unparse(default), "positional_or_keyword"]
    for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield [parameter.arg, default and ast.unparse(default), "keyword_only"]


def named(value: ast.expr) -> list[list[str]]:
    """Each thing an expression may be, as the names of its parts."""
    if isinstance(value, ast.IfExp):
        return [*named(value.body), *named(value.orelse)]
    if isinstance(value, ast.Tuple):
        return [[ast.unparse(part) for part in value.elts]]
    return [[ast.unparse(value)]]


def returned(function: ast.FunctionDef, classes: dict[str, ast.ClassDef]) -> list[list[str]]:
    """What its own ``return`` statements give; what ``apply`` of an autograd function gives is that one's."""
    found: list[list[str]] = []
    for node in ast.walk(function):
        if not isinstance(node, ast.Return) or node.value is None:
            continue
        call = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(call, ast.Attribute) and call.attr == "apply" and isinstance(call.value, ast.Name):
            body = classes[call.value.id].body
            forward = next(f for f in body if isinstance(f, ast.FunctionDef) and f.name == "forward")
            found += returned(forward, classes)
        elif call is not None:
            found.append(["result of " + ast.unparse(call)])
        else:
            found += named(node.value)
    return [one for n, one in enumerate(found) if one not in found[:n]]


def functions(text: str) -> dict[str, Any]:
    tree = ast.parse(text)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return {
        node.name: {
            "line": node.lineno,
            "parameters": list(parameters(node.args)),
            "returns": returned(node, classes),
        }
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and wanted(node.name)
    }


def of_tag(checkout: str, tag: str, path: str) -> dict[str, Any]:
    def git(*words: str) -> str:
        command = ["git", "-C", checkout, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    commit = git("rev-parse", f"{tag}^{{commit}}").strip()
    tagged = {} if tag == "HEAD" else {"tag": tag}
    return {"file": path, **tagged, "commit": commit, "functions": functions(git("show", f"{tag}:{path}"))}


def of_wheel(folder: Path) -> tuple[str, dict[str, Any]]:
    version = next(folder.glob("*.dist-info")).name.removesuffix(".dist-info").split("-")[-1]
    text = (folder / "flash_attn" / FOUR).read_text()
    release = {"file": f"flash_attn/{FOUR}", "wheel": f"flash_attn_4-{version}", "functions": functions(text)}
    return version, release


def made(checkout: str, wheels: list[str]) -> dict[str, Any]:
    return {
        "2": {version: of_tag(checkout, tag, TWO) for version, tag in TAGS["2"].items()},
        "3": {version: of_tag(checkout, tag, THREE) for version, tag in TAGS["3"].items()},
        "4": dict(of_wheel(Path(wheel)) for wheel in wheels),
    }


def written(record: Any, indent: int = 0) -> str:
    """JSON with one parameter, and one returned tuple, a line."""
    flat = isinstance(record, list) and not any(isinstance(part, list) for part in record)
    if flat or not isinstance(record, (dict, list)):
        return json.dumps(record)
    pad = " " * (indent + 1)
    if isinstance(record, list):
        return "[\n" + ",\n".join(pad + written(part, indent + 1) for part in record) + f"\n{' ' * indent}]"
    parts = (f"{pad}{json.dumps(key)}: {written(part, indent + 1)}" for key, part in record.items())
    return "{\n" + ",\n".join(parts) + f"\n{' ' * indent}}}"


if __name__ == "__main__":
    FILE.write_text(written(made(sys.argv[1], sys.argv[2:])) + "\n")
