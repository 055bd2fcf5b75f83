"""``attnsel explain --from-log``: its order, and flags beside it. Its forms are in tests/net."""

from __future__ import annotations

import json
from pathlib import Path

CASES = Path(__file__).parents[1] / "diagnose" / "logs" / "cases"


def test_a_report_of_many_calls_has_the_most_frequent_first_and_counts_the_rest(run, written) -> None:
    call = "Running with config={{'compute_capability': 'sm90', 'head_dim_qk': {}}}\nSelected backend = {}\n"
    dims = [64, *(7 * [512]), *(3 * [72]), 96, 104, 112, 120]
    log = written("".join(call.format(dim, "UnfusedDotProductAttention") for dim in dims))
    code, out, _ = run(f"explain --from-log {log}")
    assert code == 0
    assert out.startswith("7 things in this log are about attention.")
    assert out.index("head_dim_qk 512") < out.index("head_dim_qk 72") < out.index("head_dim_qk 64")
    assert "Different calls that are not shown: 2 (--json has them all)." in out
    assert len(json.loads(run(f"explain --from-log {log} --json")[1])["calls"]) == 7


def test_flags_state_what_the_log_does_not_and_win_over_it(run) -> None:
    def explain(log: str, flags: str = "") -> str:
        return run(f"explain --from-log {CASES / log} {flags}")[1]

    te, bare = "NVIDIA-TransformerEngine-2285.txt", "EvolvingLMMs-Lab-LLaVA-OneVision-2-85.txt"
    assert "CUDNN001" not in explain(te, "--cudnn 9.11.0")
    assert "d64/64" in explain(te, "--head-dim 64 --head-dim-v 64")
    assert "GPU: not in the log" in explain(bare)
    asked = explain(bare, "--gpu A100 --head-dim 512 --qkv-layout bshd")
    assert "A100 (sm80)" in asked
    assert "512" in asked
    assert "[CUDNN" in asked


def test_a_torch_that_is_too_old_to_be_known_is_said_and_the_rest_answered(run, written) -> None:
    log = written("PyTorch version: 2.1.2\nRuntimeError: No available kernel. Aborting execution.\n")
    code, out, _ = run(f"explain --from-log {log}")
    assert code == 0
    assert "not used: torch = 2.1.2: older than any rule" in " ".join(out.split())
    assert "✖ No available kernel" in out
