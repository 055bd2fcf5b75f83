"""Files as many ranks leave them, made from real answers: for tests of ``attnsel compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.base.records import stamped
from attnsel.decision import Selection
from attnsel.verdicts.reasons import NO_EVIDENCE, Refusal

QUESTION = AttentionParams(num_heads=16, max_seqlen_q=2048)


def environment(**changes: Any) -> Environment:
    return Environment.describe("H100", **{"torch": "2.9.1", "cudnn": "9.10.2", **changes})


def answer(
    question: AttentionParams = QUESTION,
    env: Environment | None = None,
    refusals: tuple[tuple[str, str, str], ...] = (),
    **policy: Any,
) -> Selection:
    """``refusals``: (candidate, code, message) that running gave."""
    evidence = NO_EVIDENCE
    for name, code, message in refusals:
        evidence = evidence.plus(Refusal(name, question, message, code=code))
    return select(question, env or environment(), policy=Policy(**policy), evidence=evidence)


def debug_line(selection: Selection, rank: int, **fields: Any) -> str:
    record = {
        "event": "selection",
        "label": "",
        "rank": rank,
        "world_size": 64,
        "host": f"node{rank // 8}",
        "pid": 1000 + rank,
        "time": f"2026-11-23T06:00:{rank % 60:02d}.000+00:00",
        "attnsel": "0.1.0",
        **fields,
    }
    return json.dumps(stamped("debug", {**record, **selection.as_dict()}))


def watch_lines(rank: int, sites: list[dict[str, Any]], *, ended: int | None = 0, world_size: int = 2) -> str:
    env = environment().model_dump(mode="json")
    about = {"attnsel": "0.1.0", "program": "train.py", "rank": rank, "world_size": world_size}
    process = {
        "schema": "attnsel.watch-process/1",
        **about,
        "environment": env,
        "exit_code": ended,
        "unseen": [],
    }
    made = [json.dumps({"schema": "attnsel.watch-site/1", **site}) for site in sites]
    return "".join(line + "\n" for line in (json.dumps(process), *made))


def site(kernel: str, candidate: str = "", **fields: Any) -> dict[str, Any]:
    return {
        "where": "model.py:12 in forward",
        "api": "F.scaled_dot_product_attention",
        "params": QUESTION.model_dump(mode="json"),
        "forward": kernel,
        "candidate": candidate,
        "calls": 10,
        **fields,
    }


def write_ranks(folder: Path, ranks: int = 64, dissenter: int | None = 17, **policy: Any) -> None:
    """One file a rank; the ``dissenter`` chose under another policy, or another environment."""
    usual = answer()
    other = answer(**policy) if policy else answer(env=environment(cudnn=None))
    for rank in range(ranks):
        chosen = other if rank == dissenter else usual
        (folder / f"rank{rank}.jsonl").write_text(debug_line(chosen, rank, world_size=ranks) + "\n")
