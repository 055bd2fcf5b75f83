"""A new candidate is one folder, its rules and one line of the registry: all else serves it as it stands.

A copy of the tree gets one, and processes that import the copy explain it, choose it and run it.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from paths import ROOT
from plugin_packages import Answer, answers, python

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


def test_every_command_judges_and_ranks_it(told: dict[str, Answer]) -> None:
    for words, wanted in JUDGED.items():
        seen = next(c for c in told[f"{CPU} {words}"].json()["candidates"] if c["name"] == "direct")
        codes = [reason["code"] for reason in seen["reasons"]]
        adaptations = [change["name"] for change in seen["adaptations"]]
        assert (seen["verdict"], codes, adaptations) == wanted, words
        assert seen["unproven"]
    assert {words: told[f"{CPU} {words}"].json()["backend"] for words in CHOSEN} == CHOSEN
    _, even, odd = told[MATRIX].stdout.splitlines()
    assert even == "64,✔°,✖ DIRECT000"
    assert odd.startswith("100,✖ DIRECT001,")
    codes = {page["code"] for page in told["rules --candidate direct --json"].json()}
    assert {"DIRECT000", "DIRECT001", "INSTALL001", "CP006"} <= codes
    assert "rows are loaded 32 bytes at a time" in told["rule direct001"].stdout
    answer = told["doctor --json"].json()
    verdicts = {call["dtype"]: call["verdicts"]["direct"] for call in answer["calls"] if not call["device"]}
    assert verdicts["fp16"]["code"] == "DIRECT000"


def test_its_rules_pass_the_tests_of_every_rule(tree: Path) -> None:
    asked = (str(ROOT / "tests" / "rules" / "test_every_rule.py"), "-k", "DIRECT", "-p", "no:cacheprovider")
    assert "passed" in said(f"import pytest; sys.exit(pytest.main({list(asked)}))", tree)


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


RUNS = """
import json, warnings, torch
from collections import Counter
from dataclasses import replace
from attnsel import DotProductAttention, NoBackendError, clear_cache, override
from attnsel.backends.contract import Inputs, Spec
from attnsel.debug import FallbackWarning
from attnsel.runtime.kernels import KERNELS, kernel_of
from reference import attention_reference

torch.set_num_threads(1)
kernel, wrong, ran, warned, found = kernel_of("direct"), "", Counter(), [], {}

def scaled(name):
    def function(spec, *others):
        ran[name] += 1
        off = 1.02 if name == wrong else 1.0
        return getattr(kernel, name)(replace(spec, softmax_scale=spec.softmax_scale * off), *others)
    return function

def gradients(out, leaves):
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

def outcome(d):
    ran.clear()
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, 24, heads, d, generator=draw).requires_grad_() for heads in (4, 2, 2)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    inputs = Inputs(*(t.transpose(1, 2) for t in exact))
    wanted = attention_reference(Spec(softmax_scale=d**-0.5, window_right=0), inputs)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            got = gradients(DotProductAttention(4, d, 2, qkv_format="bshd")(*leaves), leaves)
        except NoBackendError as error:
            return [reason.code for reason in error.selection["direct"].reasons]
    told = [str(w.message)[:38] for w in caught if w.category is FallbackWarning]
    pairs = zip(got, gradients(wanted.transpose(1, 2).flatten(2), exact), strict=True)
    right = all(torch.allclose(a.double(), b, atol=1e-5) for a, b in pairs)
    return [right, told, ran["forward"], ran["backward"]]

KERNELS["direct"] = kernel._replace(forward=scaled("forward"), backward=scaled("backward"))
for wrong in ("nothing", "forward", "backward"):
    for how, policy in {"forced": {"backend": "direct"}, "first": {"deny": ("sdpa.flash",)}}.items():
        for d in (16, 12):  # as the kernel takes it, and padded for it
            clear_cache()
            with override(**policy):
                found[f"{wrong} {how} {d}"] = [outcome(d) for _ in range(2)]
print(json.dumps(found))
"""


def test_it_runs_is_compared_once_and_gives_way_where_its_numbers_are_wrong(tree: Path) -> None:
    """Of wrong ones a scale is off by 2 %. Two calls each: the first is compared as well."""
    seen = json.loads(said(RUNS, tree))
    told = "direct gave other numbers than tiled: in fp32"[:38]
    for d in (16, 12):
        for how in ("forced", "first"):
            assert seen[f"nothing {how} {d}"] == [[True, [], 2, 2], [True, [], 1, 1]]
        for wrong in ("forward", "backward"):
            assert seen[f"{wrong} forced {d}"] == [["RUNTIME002"]] * 2
            first, later = seen[f"{wrong} first {d}"]
            assert (first[:2], later[:2]) == ([True, [told]], [True, []])
