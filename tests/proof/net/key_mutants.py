"""Drops each field that calls are remembered by, in turn: two calls of the net that differ in it must notice.

    python tests/proof/net/key_mutants.py        # a line for each field: the pair that noticed; 1 if none did

A field is an element of a tuple in the functions of ``attnsel/runtime/signature.py`` that make keys, an
operand of ``and`` in what compares them, or a condition of F.sdpa's place. A constant takes its place.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("net", "support")]

import pytest  # noqa: E402

import test_behaviour as net  # noqa: E402
from attnsel.runtime import dispatch  # noqa: E402

PLACES = {
    "attnsel.runtime.signature": ("signature_of", "facts", "_beside", "_beside_guarded", "find"),
    "attnsel.f_sdpa.function": ("surroundings", "_chosen_by_the_program", "_asked", "_without_mask"),
}
NOT_OF_A_KEY = ("is not None", "Error", "InvalidInput")  # what is there at all, and what may be raised
IN_F_SDPA = {"attn_mask_type": "no_mask", "softmax_scale": None, "attention_dropout": 0.0}


def constant(node: ast.expr, value: Any) -> ast.expr:
    return ast.copy_location(ast.Constant(value), node)


def fields(function: ast.FunctionDef) -> Iterator[tuple[str, ast.AST, str, int | None, ast.expr]]:
    """What may be dropped: its text, where it stands, and what stands there instead."""
    for node in ast.walk(function):
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) > 2:
            for n, one in enumerate(node.elts):
                dropped = constant(one, None)
                if isinstance(one, ast.Starred):
                    dropped = ast.copy_location(ast.Starred(constant(one, ()), ast.Load()), one)
                yield ast.unparse(one), node, "elts", n, dropped
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            for n, one in enumerate(node.values):
                yield ast.unparse(one), node, "values", n, constant(one, True)
        elif isinstance(node, ast.If) and isinstance(node.test, (ast.Name, ast.Call)):
            yield f"if {ast.unparse(node.test)}", node, "test", None, constant(node.test, False)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd) and function.name == "find":
            yield ast.unparse(node), node, "left", None, constant(node, 0)
        elif (
            isinstance(node, ast.Call) and ast.unparse(node.func) == "_kinds"
        ):  # what stands for types tells it
            yield ast.unparse(node.args[1]), node, "args", 1, constant(node.args[1], False)
        elif isinstance(node, ast.keyword) and function.name == "_asked" and node.arg in IN_F_SDPA:
            yield ast.unparse(node), node, "value", None, constant(node.value, IN_F_SDPA[node.arg])


def mutants(module: ModuleType) -> Iterator[tuple[str, ast.Module]]:
    tree = ast.parse(inspect.getsource(module))
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        if function.name in PLACES[module.__name__]:
            for text, node, attribute, n, dropped in fields(function):
                if text.endswith(NOT_OF_A_KEY):
                    continue
                held = getattr(node, attribute)
                setattr(node, attribute, dropped if n is None else [*held[:n], dropped, *held[n + 1 :]])
                yield f"{function.name}: {text}", copy.deepcopy(tree)
                setattr(node, attribute, held)


def noticed(field: str) -> bool:
    try:
        net.test_calls_that_differ_in_one_field_are_told_apart(field)
    except (Exception, pytest.fail.Exception):
        return True
    return False


def killer(module: ModuleType, tree: ast.Module, order: list[str]) -> str:
    """The first pair that notices; "" where none does."""
    before, cache = dict(vars(module)), type(dispatch._bound)
    find, made = cache.find, dispatch.signature_of
    try:
        exec(compile(ast.fix_missing_locations(tree), str(module.__file__), "exec"), vars(module))
        if module.__name__.endswith("signature"):
            cache.find, dispatch.signature_of = vars(module)["CallCache"].find, vars(module)["signature_of"]
        else:
            net.attnsel.scaled_dot_product_attention = vars(module)["scaled_dot_product_attention"]
        return next((field for field in order if noticed(field)), "")
    finally:
        vars(module).update(before)
        cache.find, dispatch.signature_of = find, made
        if "scaled_dot_product_attention" in before:
            net.attnsel.scaled_dot_product_attention = before["scaled_dot_product_attention"]


def main() -> int:
    order, survivors = list(net.FIELDS), 0
    assert not any(map(noticed, order)), "the net fails with nothing dropped"
    for name in PLACES:
        module = importlib.import_module(name)
        for what, tree in mutants(module):
            field = killer(module, tree, order)
            survivors += not field
            if field:
                order.sort(key=lambda one: one != field)
            print(f"{what:70}  {field or 'SURVIVES'}", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    raise SystemExit(main())
