"""Ways out: every one that is shown works, none that is cheaper is missed, and each says what to do."""

from __future__ import annotations

import random

import pytest

from attnsel import AttentionParams, Environment, InvalidInput, Policy, select
from attnsel.rules import REGISTRY, Rule
from attnsel.select import Evidence, Refusal, _ask_about
from attnsel.unlock import MOST_CHANGES, MOST_WAYS, Cost, Question, changed, cost_of
from attnsel.unlock.change import grouped
from attnsel.unlock.proposals import SWITCHES, edges, round_size, switched_off, values_against
from attnsel.versions import Version

FIELDS = {
    "dtype": ["bf16", "fp16", "fp32", "fp64", "fp8_e4m3"],
    "qkv_layout": ["bshd", "sbhd", "bhsd", "thd", "bs3hd", "thd_bshd_bshd"],
    "batch_size": [1, 2, 48, 70_000],
    "num_heads": [1, 8, 16, 18],
    "num_gqa_groups": [1, 2, 4, 8],
    "max_seqlen_q": [0, 1, 7, 64, 704, 1000, 4096, 16534, 131072],
    "max_seqlen_kv": [0, 1, 64, 704, 1023, 4096, 131072],
    "head_dim_qk": [1, 8, 59, 64, 128, 192, 200, 256, 512, 576],
    "head_dim_v": [8, 60, 64, 128, 256, 512],
    "attn_mask_type": [
        "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
        "padding_causal_bottom_right", "arbitrary",
    ],
    "window_size": [(-1, -1), (128, 0), (0, 0), (64, 64), (-1, 3)],
    "core_attention_bias_type": ["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"],
    "core_attention_bias_requires_grad": [True, False],
    "softmax_type": ["vanilla", "off-by-one", "learnable"],
    "softcap": [0.0, 30.0],
    "attention_dropout": [0.0, 0.1],
    "is_training": [True, False],
    "deterministic": [True, False],
    "return_lse": [True, False],
    "return_max_logit": [True, False],
    "pad_between_seqs": [True, False],
    "cp_size": [1, 2, 8],
    "cp_comm_type": ["p2p", "all_gather", "a2a", "a2a+p2p"],
    "cuda_graph": [True, False],
    "fp8": [True, False],
    "fp8_meta": [None, {"recipe": {"kind": "delayed", "fp8_dpa": True}}],
}  # fmt: skip
GPUS = ["V100", "T4", "A100", "RTX 4090", "H100", "B200", "B300", "RTX 5090", "GB10", "sm110", "cpu"]
CUDNN = ["8.8.0", "8.9.7", "9.0.0", "9.1.0", "9.3.0", "9.7.1", "9.10.0", "9.14.0", "9.19.0", "9.26.0", None]
TORCH = ["2.2.2", "2.5.0", "2.6.0", "2.9.1", "2.13.0", "2.14.1", None]
POLICIES = [
    *[Policy()] * 4,
    Policy(adapt="never"),
    Policy(backend="cudnn"),
    Policy(allow=("tiled",)),
    Policy(deny=("tiled", "cudnn")),
    Policy(deterministic=True),
    Policy(allow_known_bugs=("all",)),
    Policy(memory_limit="256MiB"),
]


def failing_questions(seed, count, policies=POLICIES):
    """Random selections in which something is refused."""
    rng = random.Random(seed)
    while count:
        fields = {name: rng.choice(FIELDS[name]) for name in rng.sample(list(FIELDS), rng.randint(1, 6))}
        machine = {}
        if rng.random() < 0.7:
            machine["cudnn"] = rng.choice(CUDNN)
        if rng.random() < 0.5:
            machine["torch"] = rng.choice(TORCH)
        env, policy = Environment.describe(rng.choice(GPUS), **machine), rng.choice(policies)
        try:
            selection = select(AttentionParams(**fields), env, policy=policy)
        except InvalidInput:
            continue
        if any(candidate.verdict == "refused" for candidate in selection):
            count -= 1
            yield selection


def ways(selection, name):
    return [unlock for unlock in selection.unlocks if unlock.candidate == name]


def texts(name, fields=None, gpu="H100", policy=None, **versions):
    selection = select(
        AttentionParams(**fields or {}), Environment.describe(gpu, **versions), policy=policy or Policy()
    )
    assert selection[name].verdict == "refused"
    return [unlock.change for unlock in ways(selection, name)]


# ---- every way out that is shown --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_every_way_out_of_random_questions_keeps_its_promise(seed):
    """Four times 550 failing questions; some have no way out, most have several."""
    shown = 0
    for selection in failing_questions(seed, 550):
        question = (selection.params, selection.environment, selection.policy)
        for unlock in selection.unlocks:
            p, env, policy = unlock.apply(*question)
            again = select(p, env, policy=policy)
            assert again[unlock.candidate].eligible, unlock
            assert [c.name for c in again.ranked].index(unlock.candidate) + 1 == unlock.rank
            assert len(grouped(Question(*question), dict(unlock.changes))) <= MOST_CHANGES
            shown += 1
        for name in {unlock.candidate for unlock in selection.unlocks}:
            sets = [{field for field, _ in unlock.changes} for unlock in ways(selection, name)]
            assert len(sets) <= MOST_WAYS + 1
            assert not any(a < b for a in sets for b in sets), "a set that contains another one shown"
    assert shown > 1000


def test_a_head_is_never_made_smaller_and_a_window_never_moved():
    for selection in failing_questions(99, 300):
        for unlock in selection.unlocks:
            for field, value in unlock.changes:
                assert field not in ("window_size", "softcap", "is_training", "softmax_type", "kv_cache")
                if field in ("head_dim_qk", "head_dim_v", "max_seqlen_q", "max_seqlen_kv"):
                    assert value > getattr(selection.params, field)


# ---- nothing cheaper is missed ----------------------------------------------------------------------


def all_proposals(question, name, reasons):
    """What the rules behind ``reasons`` propose, with nothing pruned: every newer version, every value."""
    for reason in reasons:
        if not isinstance(reason.rule, Rule):
            continue
        yield from values_against(question.p, reason)
        for component in {gate.component for gate in reason.rule.when}:
            current = question.value(component)
            yield from ({component: v} for v in edges(name, component) if current and v > current)
        if reason.code.startswith("BUG"):
            yield {"policy.allow_known_bugs": (reason.code,)}
    for field, off in SWITCHES:
        if getattr(question.p, field) != off:
            yield switched_off(question, field, off)


def brute_force(base, name, reasons):
    """All sets of one or two proposals after which the candidate is eligible."""
    eligible, first = set(), []
    for move in all_proposals(base, name, reasons):
        try:
            after = changed(base, move)
        except InvalidInput:
            continue
        answer = _ask_about(name, *after)
        if answer.eligible:
            eligible.add(tuple(sorted(move.items())))
        else:
            first.append((move, after, answer.reasons))
    for move, after, left in first:
        for other in all_proposals(after, name, left):
            both = {**move, **other}
            try:
                if _ask_about(name, *changed(base, both)).eligible:
                    eligible.add(tuple(sorted(both.items())))
            except InvalidInput:
                continue
    return eligible


@pytest.mark.parametrize("seed", [1, 2])
def test_no_cheaper_set_is_missed(seed):
    compared = 0
    for selection in failing_questions(seed, 30, [Policy(), Policy(deterministic=True)]):
        base = Question(selection.params, selection.environment, selection.policy)
        for candidate in selection:
            if candidate.verdict != "refused":
                continue
            shown = sorted(ways(selection, candidate.name), key=lambda unlock: unlock.cost)
            for changes in brute_force(base, candidate.name, candidate.reasons):
                cost, fields = cost_of(base, dict(changes)), {field for field, _ in changes}
                within = [u for u in shown if fields.issuperset(field for field, _ in u.changes)]
                full = len(shown) >= MOST_WAYS and shown[-1].cost <= cost
                assert full or any(u.cost <= cost for u in within), (candidate.name, changes, shown, base)
                compared += 1
    assert compared > 200
