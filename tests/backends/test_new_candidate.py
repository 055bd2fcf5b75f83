"""A new candidate is one folder, its rules and one line of the registry: all else serves it as it stands.

A copy of the tree gets one, and processes that import the copy explain it, choose it and run it: eagerly,
compiled, and as two ranks.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ranks
from attnsel import DotProductAttention, NoBackendError, clear_cache, override
from attnsel.backends.contract import Inputs, Spec
from attnsel.context_parallel import shard_sequence
from attnsel.debug import FallbackWarning
from attnsel.runtime.kernels import KERNELS, kernel_of
from paths import ROOT
from plugin_packages import Answer, answers, python
from reference import attention_reference

SUPPORT = ROOT / "tests" / "support"
FILES = {
    "backends/direct/__init__.py": '"""Attention in two matrix products."""\n',
    "backends/direct/kernel.py": (ROOT / "examples/plugin/sample_attention/kernel.py").read_text(),
    "backends/direct/candidate.py": '''"""What ``direct`` is."""

from attnsel.verdicts.record import CandidateRecord

CANDIDATES = (
    CandidateRecord(
        name="direct",
        title="attention in two matrix products",
        family="DIRECT",
        kernel="attnsel.backends.direct.kernel",
        takes=("fp32", "cpu", "training", "causal", "top_left", "gqa", "head_dim_v", "lse", "strides"),
        rules=("attnsel.rules.direct",),
        adaptations=("pad_head_dim_qk",),
        place="before sdpa.flash",
    ),
)
''',
    "rules/direct.py": '''"""DIRECT0xx: what attention in two matrix products cannot do."""

from attnsel.rules.api import rule
from attnsel.verdicts.requirements import Multiple


@rule("DIRECT001", "direct", requires={"head_dim_qk": Multiple(8)}, fires_on={"head_dim_qk": 100})
def whole_vectors(p, env):
    """The head dimension must be a multiple of 8

    Why: rows are loaded 32 bytes at a time.
    Fix: pad the heads.
    Source: attnsel/backends/direct/kernel.py.
    """
    return True
''',
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy, as a checkout: with the new folder, the new rules and the line."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("attnsel", "backends", "rules"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for path, text in FILES.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)
    registry = root / "backends" / "registry.py"
    text, lines = re.subn(r"(?m)^(BUILT_IN = \(.*)\)$", r'\1, "direct")', registry.read_text())
    assert lines == 1
    registry.write_text(text)
    return root


def said(code: str, tree: Path) -> str:
    """What ``code`` prints in a process that imports the copy."""
    first = f"import sys; sys.path.insert(0, {str(tree)!r})\n"  # before the working folder
    done = python(first + code, tree, SUPPORT)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


CPU = "explain --json --gpu cpu --dtype fp32"
JUDGED: dict[str, tuple[str, list[str], list[str]]] = {  # verdict, codes, adaptations
    "": ("eligible", [], []),
    "--cp-size 2": ("eligible", [], []),
    "--head-dim-qk 100": ("eligible", [], ["pad_head_dim_qk"]),
    "--head-dim-qk 100 --adapt never": ("refused", ["DIRECT001"], []),
    "--softcap 30": ("refused", ["DIRECT000"], []),
    "--cp-size 2 --window-size 8 0": ("refused", ["DIRECT000", "CP006"], []),
}
CHOSEN = {"": "sdpa.flash", "--backend direct": "direct", "--deny sdpa.flash": "direct"}  # it is unproven
MATRIX = (
    "matrix --rows head_dim_qk=64,100 --cols dtype=fp32,fp16 --gpu cpu --adapt never --candidate direct --csv"
)
ASKED = [*(f"{CPU} {words}" for words in (*JUDGED, *CHOSEN)), MATRIX, "doctor --json", "rule direct001"]
ASKED.append("rules --candidate direct --json")


@pytest.fixture(scope="module")
def told(tree: Path) -> dict[str, Answer]:
    return answers(ASKED, tree, SUPPORT, first=f"import sys; sys.path.insert(0, {str(tree)!r})\n")


def test_the_copy_is_what_is_imported(tree: Path) -> None:
    modules = ("attnsel", "attnsel.rules", "attnsel.backends", "attnsel.backends.direct")
    code = f"import importlib\nfor name in {modules}: print(importlib.import_module(name).__file__)"
    assert all(Path(file).is_relative_to(tree) for file in said(code, tree).splitlines())


# Planning


def test_explain_judges_and_ranks_it(told: dict[str, Answer]) -> None:
    for words, wanted in JUDGED.items():
        seen = next(c for c in told[f"{CPU} {words}"].json()["candidates"] if c["name"] == "direct")
        codes = [reason["code"] for reason in seen["reasons"]]
        adaptations = [change["name"] for change in seen["adaptations"]]
        assert (seen["verdict"], codes, adaptations) == wanted, words
        assert seen["unproven"]
    assert {words: told[f"{CPU} {words}"].json()["backend"] for words in CHOSEN} == CHOSEN


def test_matrix_asks_about_it(told: dict[str, Answer]) -> None:
    _, even, odd = told[MATRIX].stdout.splitlines()
    assert even == "64,✔°,✖ DIRECT000"
    assert odd.startswith("100,✖ DIRECT001,")


def test_its_rules_have_pages(told: dict[str, Answer]) -> None:
    codes = {page["code"] for page in told["rules --candidate direct --json"].json()}
    assert {"DIRECT000", "DIRECT001", "INSTALL001", "CP006"} <= codes
    page = told["rule direct001"].stdout
    assert "rows are loaded 32 bytes at a time" in page
    assert "attnsel explain --gpu H100 --head-dim-qk 100" in page


def test_its_rules_pass_the_tests_of_every_rule(tree: Path) -> None:
    asked = (str(ROOT / "tests" / "rules" / "test_every_rule.py"), "-k", "DIRECT", "-p", "no:cacheprovider")
    assert "passed" in said(f"import pytest; sys.exit(pytest.main({list(asked)}))", tree)


def test_the_doctor_judges_it(told: dict[str, Answer]) -> None:
    answer = told["doctor --json"].json()
    verdicts = {call["dtype"]: call["verdicts"]["direct"] for call in answer["calls"] if not call["device"]}
    assert verdicts["fp16"]["code"] == "DIRECT000"
    if answer["devices"][0]["device"]["type"] == "cpu":
        assert verdicts["fp32"]["verdict"] == "eligible"


WAYS_OUT = """
import json
from attnsel import AttentionParams, Environment, Policy, select
asked = AttentionParams(dtype="bf16", head_dim_qk=100), Environment.describe("cpu"), Policy(adapt="never")
for way in select(*asked[:2], policy=asked[2]).unlocks:
    if way.candidate == "direct":
        p, env, policy = way.apply(*asked)
        print(json.dumps([dict(way.changes), select(p, env, policy=policy)["direct"].verdict]))
"""


def test_ways_out_make_it_eligible(tree: Path) -> None:
    ways = [json.loads(line) for line in said(WAYS_OUT, tree).splitlines()]
    assert [{"dtype": "fp32", "policy.adapt": "auto"}, "eligible"] in ways
    assert [{"dtype": "fp32", "head_dim_qk": 104}, "eligible"] in ways


# Running: these functions are called in processes that import the copy.


def tensors(head_dim: int) -> list[Tensor]:
    """q, k and v, [b, s, h or g, d]"""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 24, heads, head_dim, generator=generator) for heads in (4, 2, 2)]


def with_gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def expected(head_dim: int) -> list[Tensor]:
    """The output and the gradients of q, k and v by the definition of attention, in float64."""
    leaves = [t.double().requires_grad_() for t in tensors(head_dim)]
    inputs = Inputs(*(t.transpose(1, 2) for t in leaves))
    out = attention_reference(Spec(softmax_scale=head_dim**-0.5, window_right=0), inputs)[0]
    return with_gradients(out.transpose(1, 2).flatten(2), leaves)


def module(head_dim: int, **over_ranks: Any) -> DotProductAttention:
    return DotProductAttention(4, head_dim, 2, qkv_format="bshd", **over_ranks)


def behaviour(core: Any, head_dim: int, part_of: Callable[[Tensor], Tensor] = torch.clone) -> dict[str, Any]:
    """What comes of two calls where the new kernel is forced, and where it is the first choice: of the kernel
    as it is, and of one whose forward, or backward, has a scale that is off by 2 %."""
    torch.set_num_threads(1)
    KERNELS.pop("direct", None)
    kernel, ran, found = kernel_of("direct"), Counter[str](), {}

    def counted(name: str) -> Callable[..., Any]:
        def function(spec: Spec, *others: Any) -> Any:
            ran[name] += 1
            scale = spec.softmax_scale * (1.02 if name == wrong else 1.0)
            return getattr(kernel, name)(replace(spec, softmax_scale=scale), *others)

        return function

    def outcome() -> dict[str, Any]:
        ran.clear()
        leaves = [part_of(t).requires_grad_() for t in tensors(head_dim)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                got = with_gradients(core(*leaves), leaves)
            except NoBackendError as error:
                return {"refused": [reason.code for reason in error.selection["direct"].reasons]}
        wanted = [part_of(t) for t in expected(head_dim)]
        right = all(torch.allclose(a.double(), b, atol=1e-5) for a, b in zip(got, wanted, strict=True))
        warned = [str(w.message) for w in caught if w.category is FallbackWarning]
        return {"right": right, "warned": warned, "ran": [ran["forward"], ran["backward"]]}

    KERNELS["direct"] = kernel._replace(forward=counted("forward"), backward=counted("backward"))
    for wrong in ("nothing", "forward", "backward"):
        for how, policy in {"forced": {"backend": "direct"}, "first": {"deny": ("sdpa.flash",)}}.items():
            clear_cache()
            with override(**policy):
                found[f"{wrong} {how}"] = [outcome() for _ in range(2)]
    return found


def eager() -> list[dict[str, Any]]:
    """With heads as the kernel takes them, and with heads that are padded for it."""
    return [behaviour(module(head_dim), head_dim) for head_dim in (16, 12)]


def compiled() -> list[dict[str, Any]]:
    return [behaviour(torch.compile(module(16), fullgraph=True, backend="aot_eager"), 16)]


def one_rank(rank: int, size: int) -> dict[str, Any]:
    core = module(16, cp_group=torch.distributed.group.WORLD)
    return behaviour(core, 16, lambda t: shard_sequence(t, (size, rank)))


def two_ranks() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return ranks.run(one_rank, 2, Path(folder))


# [forwards, backwards] of the first call, which is compared as well, and of a later one. A rank makes two
# steps. A compiled call's backward is compared apart from its forward, after one more forward.
CALLS = {
    "eager": ([2, 2], [1, 1]),
    "compiled": ([3, 2], [1, 1]),
    "two_ranks": ([4, 4], [2, 2]),
}


@pytest.fixture(scope="module", params=CALLS)
def seen(request: pytest.FixtureRequest, tree: Path) -> list[dict[str, Any]]:
    """The behaviour in each way of calling, or on each rank."""
    code = f"import json, runpy; print(json.dumps(runpy.run_path({__file__!r})[{request.param!r}]()))"
    parts = json.loads(said(code, tree))
    assert not any("crash" in part for part in parts), parts
    return [{**part, "calls": CALLS[request.param]} for part in parts]


def test_its_numbers_are_right_and_compared_once_and_wrong_ones_refused(seen: list[dict[str, Any]]) -> None:
    for part in seen:
        for how in ("forced", "first"):
            right = [{"right": True, "warned": [], "ran": ran} for ran in part["calls"]]
            assert part[f"nothing {how}"] == right
        for wrong in ("forward", "backward"):
            assert part[f"{wrong} forced"] == [{"refused": ["RUNTIME002"]}] * 2


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_wrong_numbers_give_way_to_the_next_candidate(seen: list[dict[str, Any]], wrong: str) -> None:
    first, later = zip(*(part[f"{wrong} first"] for part in seen), strict=True)
    assert all(call["right"] for call in (*first, *later))
    warned = [words for call in first for words in call["warned"]]  # of ranks, the first alone speaks
    assert warned
    assert all(words.startswith("direct gave other numbers than tiled: in fp32") for words in warned)
    assert not any(call["warned"] for call in later)
