"""What nobody stated takes no blame, and is told where the answer rests on it."""

from __future__ import annotations

import random

from attnsel import AttentionParams, Environment, select
from attnsel.selection.assumed import alternatives
from questions import questions

THD = {"qkv_layout": "thd", "batch_size": 2, "num_heads": 1, "max_seqlen_q": 2208, "head_dim_qk": 192}
THD |= {"head_dim_v": 128, "attn_mask_type": "padding_causal"}  # TransformerEngine#2354


def test_nothing_is_asked_where_all_was_stated() -> None:
    stated = {"torch": "2.7.1", "triton": "3.3.1", "cuda": "12.6", "python": "3.12"}
    env = Environment.describe("H100", cudnn="9.8.0", cudnn_frontend="1.28.0", **stated)
    assert env.assumed == ()
    assert alternatives(env, "torch") == alternatives(env, "cudnn_frontend") == ()
    selection = select(AttentionParams(**THD), env)
    assert selection.assumptions == ()
    assert selection.environment is env


def test_each_side_of_an_assumption_is_what_the_engine_says_and_what_was_stated_never_moves() -> None:
    rng = random.Random(11)
    asked = 0
    for p, _, policy in questions(11, 150):
        versions = {"cudnn": rng.choice(["9.8.0", "9.9.0", "9.11.0", "9.20.0"])}
        if rng.random() < 0.3:
            versions["torch"] = rng.choice(["2.6.0", "2.8.0", "2.11.0"])
        env = Environment.describe(rng.choice(["A100", "H100", "B200"]), **versions)
        selection = select(p, env, policy=policy)
        found = selection.environment
        moved = {name for name in type(env).model_fields if getattr(found, name) != getattr(env, name)}
        assert moved <= set(env.assumed), moved
        for said in selection.assumptions:
            asked += 1
            assert said.assumed in said.runs_with + said.refused_with
            standing = selection[said.candidate].verdict != "refused"
            assert standing == said.runs == (said.assumed not in said.refused_with)
            if said.component == "cudnn_frontend":
                for version in said.runs_with + said.refused_with:
                    there = found.replace(cudnn_frontend=version, assumed=())
                    verdict = select(p, there, policy=policy)[said.candidate].verdict
                    assert (verdict != "refused") == (version in said.runs_with)
    assert asked > 5


def test_the_answer_settles() -> None:
    """Asked again with what was chosen, the same is chosen."""
    for p in (AttentionParams(**THD), AttentionParams(), AttentionParams(head_dim_qk=192)):
        for gpu in ("H100", "B200", "T4"):
            first = select(p, Environment.describe(gpu, cudnn="9.8.0"))
            assert select(p, first.environment).environment == first.environment
