"""cuDNN's workspace without the library: the estimate beside figures that libcudnn's own plans had, what it
makes of a choice, and how the backward that needs less is asked for."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.backends.cudnn.build import workspace_bounded
from attnsel.backends.cudnn.candidate import DP_LIMIT, DP_LIMIT_VARIABLE, adds_in_order, workspace
from attnsel.backends.cudnn.graph import Graph, backward, forward, planned
from paths import ROOT
from tables import each

RECORD = json.loads((ROOT / "benchmarks/results/cudnn-workspaces.json").read_text())
GIB = 1 << 30
LONG: dict[str, Any] = {
    "batch_size": 1,
    "num_heads": 128,
    "max_seqlen_q": 32768,
    "head_dim_qk": 192,
    "head_dim_v": 128,
    "deterministic": True,
}
NEEDS_LESS = {"cudnn": "9.25.0", "cudnn_frontend": "1.27.0"}


def on(gpu: str = "H200", **versions: str) -> Environment:
    return Environment.describe(gpu, **{"cudnn": "9.19.1", "cudnn_frontend": "1.23.0", **versions})


NEWER = on(cudnn="9.28.0", cudnn_frontend="1.28.0")


def test_plans_of_random_questions_take_what_is_estimated() -> None:
    """Off by at most 1 MiB or 1 %, all but a few by less than 4 KiB. Rows without a plan say nothing."""
    frontend = RECORD["cudnn_frontend"]
    rows = [row for row in RECORD["rows"] if row["planned"] is not None]
    assert len(rows) >= 500
    assert {row["gpu"] for row in rows} == {"A100", "RTX 4090", "H200", "B200", "RTX 5090"}
    off = []
    for row in rows:
        env = on(row["gpu"], cudnn=row["cudnn"], cudnn_frontend=frontend)
        estimate = workspace(AttentionParams(**row["params"]), env)[1]
        wrong = abs(estimate - row["planned"])
        assert wrong <= max(1 << 20, 0.01 * row["planned"]), row
        off.append(wrong)
    assert sum(wrong > 4096 for wrong in off) <= len(off) // 50


def test_what_the_library_said_of_128_heads_on_hopper() -> None:
    p, then = AttentionParams(**LONG), on("H100", cudnn="9.19.0")
    assert workspace(p.replace(deterministic=False), then) == ("workspace", 3_238_002_944)
    assert workspace(p.replace(max_seqlen_q=4096), then)[1] == 4_297_064_704
    for versions in ({"cudnn": "9.19.0"}, {"cudnn": "9.28.0"}):  # frontend 1.23
        assert workspace(p, on(**versions))[1] == 274_894_684_416
    for mask in ("causal", "no_mask"):  # the backward that adds up in order
        assert workspace(p.replace(attn_mask_type=mask), NEWER)[1] == 3_238_527_232


@each("mask", ["causal", "no_mask"])
def test_256_gib_are_refused_with_the_figure_and_run_from_the_releases_that_need_less(mask: str) -> None:
    p = AttentionParams(**LONG, attn_mask_type=mask)
    refused = select(p, on())["cudnn"]
    assert refused.verdict == "refused"
    (reason,) = refused.reasons
    assert reason.code == "MEMORY001"
    assert reason.message.endswith(
        "device.memory is 141 GiB, needs at least 266 GiB (256 GiB workspace, 10.0 GiB tensors)"
    )
    for versions in ({"cudnn": "9.25.0"}, {"cudnn_frontend": "1.27.0"}):
        assert select(p, on(**versions))["cudnn"].verdict == "refused", versions
    assert select(p, on(**NEEDS_LESS))["cudnn"].eligible


def test_a_gradient_of_the_bias_is_made_from_dp_in_every_release_and_a_small_dp_is_the_faster_one() -> None:
    bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": "11ss"}
    p = AttentionParams(**LONG, **bias, core_attention_bias_requires_grad=True)
    assert not adds_in_order(p, NEWER)
    assert workspace(p, NEWER)[1] > 256 * GIB
    assert adds_in_order(AttentionParams(**LONG, **bias), NEWER)
    p = AttentionParams(**{**LONG, "max_seqlen_q": 4096})  # 4 GiB of dP
    assert not adds_in_order(p, NEWER)
    assert adds_in_order(p.replace(batch_size=2), NEWER)


def test_a_limit_of_the_policy_refuses_a_workspace_too() -> None:
    p = AttentionParams(**{**LONG, "max_seqlen_q": 4096})
    assert select(p, on(), policy=Policy(memory_limit="4.1GiB"))["cudnn"].eligible
    refused = select(p, on(), policy=Policy(memory_limit="4GiB"))["cudnn"]
    assert [reason.code for reason in refused.reasons] == ["POLICY004"]
    assert "4.0 GiB workspace" in refused.reasons[0].message


def graph(**fields: Any) -> Graph:
    return backward(planned(AttentionParams(**{**LONG, **fields})))


def seen(made: Graph, arch: int = 90, **versions: str) -> str | None:
    with workspace_bounded(made, arch, {**NEEDS_LESS, **versions}):
        return os.environ.get(DP_LIMIT_VARIABLE)


def test_the_variable_is_there_for_the_graph_that_needs_it_and_gone_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(DP_LIMIT_VARIABLE, raising=False)
    assert seen(graph()) == str(DP_LIMIT)
    assert DP_LIMIT_VARIABLE not in os.environ
    with pytest.raises(RuntimeError), workspace_bounded(graph(), 90, NEEDS_LESS):
        raise RuntimeError("no plan")
    assert DP_LIMIT_VARIABLE not in os.environ
    monkeypatch.setenv(DP_LIMIT_VARIABLE, "0")  # a limit that the user has set stands
    assert seen(graph()) == os.environ[DP_LIMIT_VARIABLE] == "0"


@each(
    "made, arch, versions",
    [
        (graph(deterministic=False), 90, {}),
        (graph(max_seqlen_q=4096), 90, {}),
        (graph(), 100, {}),
        (graph(), 90, {"cudnn": "9.24.1"}),
        (graph(), 90, {"cudnn_frontend": "1.26.0"}),
        (forward(planned(AttentionParams(**LONG))), 90, {}),
    ],
)
def test_no_other_graph_sees_it(
    made: Graph, arch: int, versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DP_LIMIT_VARIABLE, raising=False)
    assert seen(made, arch, **versions) is None
