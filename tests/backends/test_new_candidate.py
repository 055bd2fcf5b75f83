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
from plugin_packages import python
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


def said(code: str, tree: Path, *, exits: tuple[int, ...] = (0,), **environ: str) -> str:
    """What ``code`` prints in a process that imports the copy."""
    first = f"import sys; sys.path.insert(0, {str(tree)!r})\n"  # before the working folder
    done = python(first + code, tree, SUPPORT, **environ)
    assert done.returncode in exits, done.stderr + done.stdout
    return done.stdout


def command(tree: Path, *words: str, **options: Any) -> str:
    """What an ``attnsel`` command prints."""
    return said(f"from attnsel.cli import main; sys.exit(main({list(words)!r}))", tree, **options)


def explained(tree: Path, words: str, **environ: str) -> dict[str, Any]:
    asked = ("--gpu", "cpu", "--dtype", "fp32", *words.split())
    return json.loads(command(tree, "explain", "--json", *asked, **environ))


def test_the_copy_is_what_is_imported(tree: Path) -> None:
    modules = ("attnsel", "attnsel.rules", "attnsel.backends", "attnsel.backends.direct")
    code = f"import importlib\nfor name in {modules}: print(importlib.import_module(name).__file__)"
    assert all(Path(file).is_relative_to(tree) for file in said(code, tree).splitlines())


# Planning


@pytest.mark.parametrize(
    ("words", "verdict", "codes", "adaptations"),
    [
        ("", "eligible", [], []),
        ("--cp-size 2", "eligible", [], []),
        ("--head-dim-qk 100", "eligible", [], ["pad_head_dim_qk"]),
        ("--head-dim-qk 100 --adapt never", "refused", ["DIRECT001"], []),
        ("--softcap 30", "refused", ["DIRECT000"], []),
        ("--cp-size 2 --window-size 8 0", "refused", ["DIRECT000", "CP006"], []),
    ],
)
def test_explain_judges_it(
    tree: Path, words: str, verdict: str, codes: list[str], adaptations: list[str]
) -> None:
    seen = next(c for c in explained(tree, words)["candidates"] if c["name"] == "direct")
    assert (seen["verdict"], [reason["code"] for reason in seen["reasons"]]) == (verdict, codes)
    assert [change["name"] for change in seen["adaptations"]] == adaptations
    assert seen["unproven"]


@pytest.mark.parametrize(
    ("words", "environ", "backend"),
    [
        ("", {}, "sdpa.flash"),  # unproven: behind what is proven
        ("--backend direct", {}, "direct"),
        ("--deny sdpa.flash", {}, "direct"),
        ("", {"ATTNSEL_DISABLE": "sdpa.flash"}, "direct"),
        ("", {"ATTNSEL_DISABLE": "sdpa.flash,direct"}, "tiled"),
        ("", {"ATTNSEL_BACKENDS": "direct,sdpa.flash"}, "direct"),
    ],
)
def test_policies_name_it(tree: Path, words: str, environ: dict[str, str], backend: str) -> None:
    assert explained(tree, words, **environ)["backend"] == backend


def test_matrix_asks_about_it(tree: Path) -> None:
    axes = ("--rows", "head_dim_qk=64,100", "--cols", "dtype=fp32,fp16", "--gpu", "cpu", "--adapt", "never")
    _, even, odd = command(tree, "matrix", *axes, "--candidate", "direct", "--csv").splitlines()
    assert even == "64,✔°,✖ DIRECT000"
    assert odd.startswith("100,✖ DIRECT001,")


def test_its_rules_have_pages(tree: Path) -> None:
    listed = json.loads(command(tree, "rules", "--candidate", "direct", "--json"))
    assert {"DIRECT000", "DIRECT001", "INSTALL001", "CP006"} <= {page["code"] for page in listed}
    page = command(tree, "rule", "direct001")
    assert "rows are loaded 32 bytes at a time" in page
    assert "attnsel explain --gpu H100 --head-dim-qk 100" in page


def test_its_rules_pass_the_tests_of_every_rule(tree: Path) -> None:
    asked = (str(ROOT / "tests" / "rules" / "test_every_rule.py"), "-k", "DIRECT", "-p", "no:cacheprovider")
    assert "passed" in said(f"import pytest; sys.exit(pytest.main({list(asked)}))", tree)


def test_the_doctor_judges_it(tree: Path) -> None:
    answer = json.loads(command(tree, "doctor", "--json", exits=(0, 4)))  # 4: something else is wrong here
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


@pytest.mark.parametrize("how", ["forced", "first"])
def test_its_numbers_are_right_and_compared_once(seen: list[dict[str, Any]], how: str) -> None:
    for part in seen:
        assert part[f"nothing {how}"] == [{"right": True, "warned": [], "ran": ran} for ran in part["calls"]]


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_wrong_numbers_are_refused_where_it_is_forced(seen: list[dict[str, Any]], wrong: str) -> None:
    for part in seen:
        assert part[f"{wrong} forced"] == [{"refused": ["RUNTIME002"]}] * 2


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_wrong_numbers_give_way_to_the_next_candidate(seen: list[dict[str, Any]], wrong: str) -> None:
    first, later = zip(*(part[f"{wrong} first"] for part in seen), strict=True)
    assert all(call["right"] for call in (*first, *later))
    warned = [words for call in first for words in call["warned"]]  # of ranks, the first alone speaks
    assert warned
    assert all(words.startswith("direct gave other numbers than tiled: in fp32") for words in warned)
    assert not any(call["warned"] for call in later)
