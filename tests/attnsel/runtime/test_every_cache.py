"""Whatever remembers is bounded, and ``clear_cache()`` empties it: found by looking at every module."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from paths import ROOT
from tables import cells_of

PACKAGES = {"attnsel": "attnsel", "rules": "attnsel.rules", "backends": "attnsel.backends"}


def modules() -> Iterator[tuple[str, str]]:
    """Every module of ours and its source."""
    for folder, package in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            if parts[-1] != "__main__":
                yield name, file.read_text(encoding="utf-8")


# Imports every module and lists its memos; then fills caches by calls of many kinds, and clears them.
LOOK = """
import functools, importlib, inspect, json, sys, warnings
warnings.simplefilter("ignore")
import torch, attnsel
memos = {}
for name in json.loads(sys.argv[1]):
    try:
        module = importlib.import_module(name)
    except ImportError:  # of a library that is not installed here
        continue
    classes = [(n, v) for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == name]
    for owner, holder in [(name, module), *((f"{name}.{n}", v) for n, v in classes)]:
        for attribute, value in vars(holder).items():
            value = getattr(value, "__func__", value)
            if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == name:
                memos[f"{owner}.{attribute}"] = value

from attnsel import AttentionParams, DotProductAttention, Environment, Policy, attention, select
from attnsel.context_parallel.plan import plan
from attnsel.flash_attn import flash_attn_func
from attnsel.runtime import cache, compiled, dispatch, refusals
from attnsel.runtime.call import NO_EXTRAS, config
h100 = Environment.describe("H100", cudnn="9.1.0")
for fields in ({"head_dim_qk": 192, "head_dim_v": 128}, {"max_seqlen_q": 1000}):
    select(AttentionParams(**fields), h100, policy=Policy(allow_known_bugs=("BUG006",))).report()
plan(AttentionParams(num_heads=8, cp_size=4), h100).blocks()
cache.record_length(select(AttentionParams(is_training=False), h100))
with attnsel.override(selfcheck="all"):
    q, k, v = (torch.randn(2, 8, 2, 16).requires_grad_() for _ in range(3))
    attention(q, k, v, core_attention_bias_type="alibi", attn_mask_type="causal").sum().backward()
    attention(q.detach()[:, ::2], q.detach()[:, 1::2], v.detach()[:, 1::2], backend="tiled")
    core = DotProductAttention(2, 16, qkv_format="bshd")
    core(q, k, v)
    flash_attn_func(*(t.half() for t in (q, k, v))).sum().backward()
    static = config(is_training=True, return_lse=True, adapt="never")
    out, lse = attention(q, k, v, return_lse=True, backend="tiled")
    merged = dispatch.MergedResult(out, lse, torch.ones_like(out))
    dispatch.merged_gradients(static, q, k, v, NO_EXTRAS, merged)
    static = config(is_training=True, replayable=True)
    out, lse = dispatch.attend_with_lse(static, q, k, v, NO_EXTRAS)
    dispatch.gradients(static, q, k, v, NO_EXTRAS, torch.ones_like(out), (out.detach(), lse))
torch.compile(lambda *t: attention(*t), backend="eager")(q.detach(), k.detach(), v.detach())

def state():
    return {
        "memos": {name: memo.cache_info().currsize for name, memo in memos.items()},
        "caches": [len(each.items) for each in cache._every],
        "traced": len(vars(compiled._traced)),
        "refusals": len(refusals.evidence().refusals),
    }

refusals.record_refusals([refusals.Refusal("tiled", AttentionParams(), "no")], attnsel.configure())
before = state()
attnsel.clear_cache()
bounds = {name: memo.cache_parameters()["maxsize"] for name, memo in memos.items()}
limits = [each.limit for each in cache._every]
print(json.dumps({"bounds": bounds, "limits": limits, "before": before, "after": state()}))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    names = [name for name, _ in modules()]
    done = subprocess.run(
        [sys.executable, "-c", LOOK, json.dumps(names)], capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


BOUNDED_BY_WHAT_IS_ASKED = dict(cells_of(__file__, "unbounded_memos.txt"))


def test_every_memo_is_bounded(seen: dict[str, Any]) -> None:
    assert len(seen["bounds"]) > 25
    without = {name for name, most in seen["bounds"].items() if most is None}
    assert without <= set(BOUNDED_BY_WHAT_IS_ASKED), "say in unbounded_memos.txt what bounds them"
    assert all(most <= 8192 for name, most in seen["bounds"].items() if name not in without)
    assert all(0 < limit <= 4096 for limit in seen["limits"])


def test_clear_cache_empties_what_remembers(seen: dict[str, Any]) -> None:
    before, after = seen["before"], seen["after"]
    filled = {name for name, size in before["memos"].items() if size}
    assert len(filled) > 20, "else nothing is shown"
    assert len(before["caches"]) >= 5
    assert all(before["caches"])
    assert before["traced"]
    assert before["refusals"]
    assert after["caches"] == [0] * len(after["caches"])
    assert (after["traced"], after["refusals"]) == (0, 0)
    kept = {name for name, size in after["memos"].items() if size}
    # A CUDA graph that was captured may still read what backends made: default slopes, for one.
    assert all(name.startswith("attnsel.backends.") for name in kept), kept


FILLED_LATER = dict(cells_of(__file__, "empty_containers.txt"))
CONTAINERS = {
    "dict", "set", "list", "defaultdict", "OrderedDict", "Counter", "deque", "SimpleNamespace", "WeakSet",
    "WeakKeyDictionary", "WeakValueDictionary",
}  # fmt: skip


def empty_containers(tree: ast.Module) -> Iterator[str]:
    """Names that a module gives an empty container, which some function may fill."""
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and _is_empty(node.value):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield ast.unparse(target)


def _is_empty(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict):
        return not value.values
    if isinstance(value, ast.List):
        return not value.elts
    if not isinstance(value, ast.Call) or value.keywords:
        return False
    kind = ast.unparse(value.func).split(".")[-1]
    return kind in CONTAINERS and (not value.args or kind == "defaultdict")


def test_every_container_of_a_module_is_bounded() -> None:
    found = {f"{name}.{held}" for name, text in modules() for held in empty_containers(ast.parse(text))}
    assert found == set(FILLED_LATER), (
        "say in empty_containers.txt what bounds it, or remember it in a BoundedCache"
    )
