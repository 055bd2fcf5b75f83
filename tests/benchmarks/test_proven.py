"""What committed results show: proven by the GPU suite, executed off-GPU by the executor, by nothing else."""

from __future__ import annotations

import json
from typing import Any

import sources
from proven import proven_by

from attnsel.backends.registry import CANDIDATES
from attnsel.verdicts.record import Executed, Proven
from paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def row(*features: str, outcome: str = "passed") -> dict[str, Any]:
    """A test of Triton's with these features."""
    return {
        "test": f"test_it[{'-'.join(features)}]",
        "outcome": outcome,
        "candidate": "triton",
        "features": sorted(features),
        "also": ["gqa", "training"],
    }


GRID = [
    row(*words.split(", "))
    for words in (
        "fp16", "bf16", "causal, fp16", "causal, bf16", "alibi, causal, fp16", "alibi, causal, bf16",
        "softcap, fp16", "alibi, causal, softcap, fp16", "head_dim 128, fp16", "head_dim 256, fp16",
        "head_dim 256, causal, fp16",
    )
] + [row()]  # fmt: skip
ALL = {"fp16", "bf16", "causal", "alibi", "softcap", "gqa", "training"}


def run_of(*rows: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """A record of a run that proves Triton on sm90. Rows take the place of those with the same features."""
    instead = {row["test"]: row for row in rows}
    tests = {
        "selected": ["tests/gpu"],
        "collected": True,
        "complete": True,
        "rows": [instead.get(row["test"], row) for row in GRID],
    }
    return {
        "benchmark": "gpu",
        "device": {"type": "cuda", "arch": 90},
        "commit": "0" * 40,
        "modified": False,
        "sources": "a digest",
        "tests": tests | {key: changed.pop(key) for key in tests if key in changed},
    } | changed


def shown(*records: dict[str, Any]) -> Proven | None:
    """What is proven of Triton on sm90."""
    return proven_by(records, known=lambda digest: False).get(("triton", "sm90"))


def test_proven_is_what_committed_results_show() -> None:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("gpu-*.json"))]
    stated = {
        (name, target): proven
        for name, record in CANDIDATES.items()
        if not record.trusted and not record.plugin
        for target, proven in record.proven_in_part.items()
    }
    assert proven_by(records, known=sources.in_history) == stated
    wholly = {target for record in CANDIDATES.values() for target in record.proven_targets}
    assert not {target for target in wholly if target.startswith("sm")}, "a run shows features, not all calls"


def shown_executed(cases: list[dict[str, Any]]) -> Executed:
    """Of a record of ``tests/proof/conformance.py --execute``: where every call of the grid is right and
    faultless.
    """
    of_arch: dict[int, list[dict[str, Any]]] = {}
    for case in cases:
        of_arch.setdefault(case["arch"], []).append(case)
    whole = {arch: of_it for arch, of_it in of_arch.items() if all(case["ok"] for case in of_it)}
    dtypes = [{case["dtype"] for case in of_it} for arch, of_it in whole.items() if arch != 75]  # fp16 alone
    widest = [max(max(case["head_dims"]) for case in of_it) for of_it in whole.values()]
    targets = frozenset(f"sm{arch}" for arch in whole)
    return Executed(targets, frozenset(set.intersection(*dtypes) if dtypes else ()), min(widest, default=0))


def test_executed_is_what_the_committed_record_shows() -> None:
    record = json.loads((RESULTS / "triton-executed.json").read_text(encoding="utf-8"))
    stated = {name: each.executed for name, each in CANDIDATES.items() if each.executed is not None}
    assert stated == {"triton": shown_executed(record["cases"])}


def test_a_run_that_passed_proves_its_features_on_its_own_architecture_alone() -> None:
    assert shown(run_of()) == Proven("sm90", frozenset(ALL), 256)
    other = proven_by([run_of(device={"type": "cuda", "arch": 86})], known=lambda digest: False)
    assert other == {("triton", "sm86"): Proven("sm86", frozenset(ALL), 256)}


def test_a_failure_is_held_against_what_did_not_pass_without_it() -> None:
    told: list[tuple[list[str], set[str], int]] = [
        (["softcap, fp16"], {"softcap"}, 256),
        (["alibi, causal, fp16"], {"alibi"}, 256),
        (["bf16", "causal, bf16", "alibi, causal, bf16"], {"bf16"}, 256),
        (["causal, fp16", "head_dim 256, causal, fp16"], {"causal"}, 256),
        (["head_dim 256, fp16"], set(), 128),
        (["head_dim 128, fp16"], set(), 64),
        # Each passed without the others: together they fail.
        (["alibi, causal, softcap, fp16"], {"alibi", "causal", "softcap", "fp16"}, 256),
    ]
    for features, lost, head_dim in told:
        for outcome in ("failed", "unfinished"):
            record = run_of(*(row(*words.split(", "), outcome=outcome) for words in features))
            assert shown(record) == Proven("sm90", frozenset(ALL - lost), head_dim), features
    assert shown(run_of(row(outcome="failed"))) is None, "of no feature: held against all"
    skipped = run_of(*(row(*words.split(", "), outcome="skipped") for words in told[2][0]))
    assert shown(skipped) == Proven("sm90", frozenset(ALL - {"bf16"}), 256), "proves nothing, refutes nothing"
    # Cards of one architecture count together: what failed on one is not proven, however often it passed.
    both = shown(run_of(), run_of(row("softcap", "fp16", outcome="failed")))
    assert both == Proven("sm90", frozenset(ALL - {"softcap"}), 256)


def test_a_part_of_the_suite_and_a_version_nobody_knows_prove_nothing() -> None:
    changes: list[dict[str, Any]] = [
        {"rows": []},
        {"collected": False},
        {"selected": ["tests/gpu/test_triton_modes.py"]},
        {"commit": None},
        {"modified": True},
        {"device": {"type": "cpu", "arch": None}},
        {"benchmark": "kernels"},
    ]
    assert [shown(run_of(**changed)) for changed in changes] == [None] * len(changes)
    record = run_of(commit=None, modified=None, sources="told")
    assert proven_by([record], known=lambda digest: digest == "told").keys() == {("triton", "sm90")}
