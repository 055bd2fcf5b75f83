"""Ways out: every one that is shown works, none that is cheaper is missed, and each says what to do."""

from __future__ import annotations

import pytest

from attnsel import AttentionParams, Environment, InvalidInput, Policy, select
from attnsel.environment.releases import build_with
from attnsel.environment.versions import Version
from attnsel.rules import Rule
from attnsel.selection.unlock import find_unlocks, search
from attnsel.selection.unlock.change import Cost, Scenario, changed, cost_of, grouped
from attnsel.selection.unlock.proposals import SWITCHES, edges, switched_off, values_against
from attnsel.selection.unlock.search import MOST_CHANGES, MOST_WAYS
from attnsel.selection.unlock.software import needs_software, resolve
from attnsel.selection.view import _ask, _ask_about
from attnsel.verdicts.reasons import Evidence, Refusal
from attnsel.verdicts.requirements import AnyBuild
from questions import questions
from tables import each


def failing_questions(seed, count):
    """Random selections in which something is refused."""
    for p, env, policy in questions(seed, 10**6):
        selection = select(p, env, policy=policy)
        if any(candidate.verdict == "refused" for candidate in selection):
            count -= 1
            yield selection
        if not count:
            return


def ways(selection, name):
    return [unlock for unlock in selection.unlocks if unlock.candidate == name]


AS_IT_IS = Policy(adapt="never")  # padding is a way out where attnsel may not pad by itself


# ---- every way out that is shown --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 40), *(pytest.param(seed, 525, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_every_way_out_of_random_questions_keeps_its_promise(seed, count):
    """Some have no way out, most have several. None answers another question, with a smaller head, say."""
    shown = 0
    for selection in failing_questions(seed, count):
        question = Scenario(selection.params, selection.environment, selection.policy)
        for unlock in selection.unlocks:
            p, env, policy = unlock.apply(*question)
            again = select(p, env, policy=policy)
            assert again[unlock.candidate].eligible, unlock
            assert [c.name for c in again.ranked].index(unlock.candidate) + 1 == unlock.rank
            assert len(grouped(question, dict(unlock.changes))) <= MOST_CHANGES
            for field, value in unlock.changes:
                assert field not in ("window_size", "softcap", "is_training", "softmax_type", "kv_cache")
                if field in ("head_dim_qk", "head_dim_v", "max_seqlen_q", "max_seqlen_kv"):
                    assert value > getattr(selection.params, field)
            shown += 1
        for name in {unlock.candidate for unlock in selection.unlocks}:
            sets = [{field for field, _ in unlock.changes} for unlock in ways(selection, name)]
            assert len(sets) <= MOST_WAYS + 1
            assert not any(a < b for a in sets for b in sets), "a set that contains another one shown"
            effects = {unlock.effect for unlock in ways(selection, name)}
            assert "hardware" not in effects or effects <= {"hardware", "risk"}, "beside software that helps"
    assert shown > count


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
    """All sets of one or two proposals after which the candidate is eligible, and which can be installed."""

    def asked(question, name):
        return _ask_about(name, *question)

    eligible, first = set(), []
    for move in all_proposals(base, name, reasons):
        try:
            after = changed(base, move)
        except InvalidInput:
            continue
        answer = asked(after, name)
        if answer.eligible:
            eligible.add(tuple(sorted(move.items())))
        else:
            first.append((move, after, answer.reasons))
    for move, after, left in first:
        for other in all_proposals(after, name, left):
            both = {**move, **other}
            try:
                if asked(changed(base, both), name).eligible:
                    eligible.add(tuple(sorted(both.items())))
            except InvalidInput:
                continue
    unbuilt = any(isinstance(reason.finding.required, AnyBuild) for reason in reasons)
    for changes in eligible:
        env = changed(base, dict(changes)).env
        if unbuilt and build_with(env.torch, env.cuda) is None:
            continue  # nobody publishes that torch for that CUDA: the way is to one that is published
        if base.policy.memory_limit is not None and "num_gqa_groups" in dict(changes):
            continue  # the copy that the limit forbids, made by hand
        software = needs_software(base, dict(changes))
        if not software or resolve(base, name, dict(changes), lambda name, question: asked(question, name)):
            yield changes


@pytest.mark.parametrize(("seed", "count"), [(1, 12), pytest.param(2, 50, marks=pytest.mark.slow)])
def test_no_cheaper_set_is_missed(seed, count):
    compared = 0
    for selection in failing_questions(seed, count):
        base = Scenario(selection.params, selection.environment, selection.policy)
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
    assert compared > count


def test_a_full_set_that_is_not_extended_would_have_led_nowhere(monkeypatch):
    for selection in failing_questions(7, 25):
        found = selection.unlocks
        with monkeypatch.context() as patched:
            patched.setattr(search, "may_only_add", lambda *asked: False)
            assert find_unlocks(selection, _ask, _ask_about) == found


def test_what_was_asked_of_an_equal_machine_changes_no_way_out():
    def machine():
        return Environment.describe("A100", cudnn="8.9.7")

    assert select(AttentionParams(head_dim_qk=60), machine(), policy=AS_IT_IS).unlocks
    p = AttentionParams(num_heads=18, num_gqa_groups=18, max_seqlen_q=16536, cp_size=2)
    (way,) = ways(select(p, machine()), "flash_attn.4")
    assert dict(way.changes).keys() == {"gpu", "flash_attn_4"}


# ---- the order of cost ------------------------------------------------------------------------------


def test_padding_costs_less_than_a_setting_than_an_upgrade_than_a_gpu_than_a_bug():
    base = Scenario(
        AttentionParams(attention_dropout=0.1), Environment.describe("A100", cudnn="9.1.0"), Policy()
    )
    rising = [
        {"qkv_layout": "bs3hd"},
        {"max_seqlen_q": 4160, "max_seqlen_kv": 4160},
        {"head_dim_v": 192},
        {"deterministic": True},
        {"attention_dropout": 0.0},
        {"head_dim_v": 192, "attention_dropout": 0.0},
        {"head_dim_v": 1024},
        {"cudnn": Version(9, 2)},
        {"cudnn": Version(9, 5)},
        {"cudnn": Version(9, 5), "torch": Version(2, 9)},
        {"gpu": "H100"},
        {"gpu": "B200"},
        {"policy.allow_known_bugs": ("BUG006",)},
    ]
    costs = [cost_of(base, changes) for changes in rising]
    assert costs == sorted(costs)
    assert len(set(costs)) == len(costs)

    longer = cost_of(base, {"max_seqlen_q": 5120, "max_seqlen_kv": 5120})
    assert longer == Cost(0, 0, 0, 0, pytest.approx(1.25**2 - 1), 1, 0), "a share of the multiplications"
    assert cost_of(base, {"head_dim_v": 192}).work == pytest.approx(0.25)


# ---- texts and pastes -------------------------------------------------------------------------------


@each("fmt, shape", [("bshd", (2, 1000, 16, 60)), ("sbhd", (1000, 2, 16, 60)), ("bhsd", (2, 16, 1000, 60))])
def test_what_is_pasted_for_padding_runs(fmt, shape):
    torch = pytest.importorskip("torch")
    p = AttentionParams(qkv_layout=fmt, batch_size=2, max_seqlen_q=1000, head_dim_qk=60)
    found = ways(select(p, Environment.describe("A100", cudnn="8.9.7"), policy=AS_IT_IS), "cudnn")
    unlock = next(u for u in found if {"max_seqlen_q", "head_dim_qk"} <= dict(u.changes).keys())
    space = {"torch": torch, "x": torch.ones(shape, device="meta")}
    for line in unlock.paste.splitlines():
        exec(line, space)
    assert list(space["x"].shape) == [{1000: 1024, 60: 64}.get(n, n) for n in shape]


def test_what_refused_when_it_ran_has_no_way_out_that_anyone_knows():
    p, env = AttentionParams(), Environment.describe("H100")
    evidence = Evidence().plus(Refusal("sdpa.cudnn", p, "no plan"))
    assert not ways(select(p, env, evidence=evidence), "sdpa.cudnn")
