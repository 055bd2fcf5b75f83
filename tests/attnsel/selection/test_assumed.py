"""What nobody stated takes no blame, and is told where the answer rests on it."""

from __future__ import annotations

import random

import pytest

from attnsel import AttentionParams, Environment, InvalidInput, Policy, select
from attnsel.rules import REGISTRY
from attnsel.rules.codes import question
from attnsel.selection.assumed import _alike, _named, _reads, alternatives, resolve_assumed
from attnsel.selection.evaluate import NONE_WAIVED, Waivers, findings
from attnsel.selection.inquiry import waivers_of
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


def voted_over_everything(p: AttentionParams, env: Environment, waivers: Waivers) -> Environment:
    """What most of the alternatives agree with, by everything that any rule says in each of them."""

    def said(there: Environment) -> set[tuple[str, str]]:
        found = findings(p, there, waivers).items()
        return {(name, reason.code) for name, reasons in found for reason in reasons if not reason.unknown}

    for component in ("torch", "cudnn_frontend"):
        here = said(env)
        if not any(_reads(code, component, env) for _, code in here):
            continue
        groups = {there: (said(there), weight) for there, weight, _ in _alike(env, component)}
        most = sum(size for _, size in groups.values())
        every = set().union(*(those for those, _ in groups.values()))
        refused = {one for one in every if 2 * sum(n for those, n in groups.values() if one in those) > most}
        fewest = min((len(those ^ refused) for those, _ in groups.values()), default=0)
        if groups and len(here ^ refused) > fewest:
            env = next(there for there, (those, _) in groups.items() if len(those ^ refused) == fewest)
    return env


STATED = {
    "torch": ("2.6.0", "2.8.0", "2.11.0"),
    "cudnn": ("8.9.7", "9.1.0", "9.8.0", "9.10.0", "9.13.0", "9.19.0", "9.25.0", None),
    "cuda": ("12.6", "12.8", "13.0"),
    "triton": ("3.3.0", "3.5.0", None),
    "cudnn_frontend": ("1.24.0", "1.28.0", None),
}


@pytest.mark.parametrize(
    ("seed", "count"), [(12, 150), *(pytest.param(seed, 2000, marks=pytest.mark.slow) for seed in (13, 14))]
)
def test_rules_that_say_the_same_everywhere_have_no_vote(seed: int, count: int) -> None:
    """Whatever was stated of a machine, what is assumed of it is what a vote over every rule gives."""
    rng = random.Random(seed)
    moved = 0
    for p, _, policy in questions(seed, count):
        if rng.random() < 0.2:
            policy = Policy(allow_known_bugs=("all",))
        waivers = waivers_of(policy)
        for gpu in ("H100", "A100", "B200", rng.choice(("T4", "sm120", "sm103", "cpu", "gfx942"))):
            stated = {n: rng.choice(versions) for n, versions in STATED.items() if rng.random() < 0.25}
            try:
                env = Environment.describe(gpu, **stated)
            except InvalidInput:
                continue
            found = resolve_assumed(p, env, waivers)
            assert found == voted_over_everything(p, env, waivers), (p, env, policy)
            moved += found != env
    assert moved > count // 50


def test_the_vote_is_that_of_all_about_rules_that_read_a_version() -> None:
    """Their own examples, where only the GPU and cuDNN are stated."""
    for rule in REGISTRY.rules.values():
        if any(rule.edges("cudnn_frontend")) or not _named(rule.body).isdisjoint(Environment.model_fields):
            p, there = question(rule, rule.fires_on)
            for gpu in {there.device.name, "H100", "B200", "A100"} - {""}:
                for cudnn in (there.cudnn, "9.1.0", "9.8.0", "9.19.0"):
                    env = Environment.describe(gpu, cudnn=cudnn)
                    assert resolve_assumed(p, env, NONE_WAIVED) == voted_over_everything(p, env, NONE_WAIVED)


def test_what_is_assumed_may_be_missing() -> None:
    """As in the JSON of a machine without Triton, all of which was assumed."""
    env = Environment.describe("H100", torch="2.14.1", triton=None)
    env = env.replace(assumed=frozenset({"torch", "cuda", "cudnn", "triton"}))
    assert select(AttentionParams(), env).backend == "cudnn"
