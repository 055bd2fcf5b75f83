"""What may be tried next: the changes that a candidate's failing rules propose, and which rule each silences.

Nothing here knows a constraint. Values come from the rules' own requirements, versions from the ends of their
intervals, and whether a change helps is asked of the rule itself: its body is a pure function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import ceil, log2
from typing import Any

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import COMPONENTS, Environment
from attnsel.environment.gpus import ARCHITECTURES, Gpu, familiar
from attnsel.environment.read import as_read
from attnsel.environment.versions import Version
from attnsel.environment.wheels import Wheel, flash_attn_wheel
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.rules import Rule
from attnsel.selection.adaptations import ADAPTERS, type_without_mask
from attnsel.selection.assumed import edges
from attnsel.selection.evaluate import memory_parts
from attnsel.selection.rule_index import all_read_by, names_read
from attnsel.selection.unlock.change import (
    EFFECT_OF_FIELD,
    LENGTHS,
    RECIPE_FIELDS,
    WIDTHS,
    Changes,
    Scenario,
    changed,
    touched,
)
from attnsel.verdicts.reasons import Reason
from attnsel.verdicts.requirements import AnyBuild, AtLeast, AtLeastBytes, Installed

Move = Mapping[str, Any]
"""Fields and the values they take, on top of what was changed before."""

# What can be switched off without asking anything else of the kernel: worth a try against every rule.
SWITCHES: tuple[tuple[str, Any], ...] = (
    ("deterministic", False),
    ("attention_dropout", 0.0),
    ("return_lse", False),
    ("return_max_logit", False),
    ("cuda_graph", False),
    ("pad_between_seqs", False),
    ("core_attention_bias_requires_grad", False),
)
_ONLY_UPWARDS = frozenset({*LENGTHS, *WIDTHS, "num_gqa_groups"})


def proposals_for(
    name: str, question: Scenario, base: Scenario, reasons: tuple[Reason, ...], hardware: bool
) -> list[Move]:
    """The moves that answer the reason with the fewest answers; none where nothing answers it.

    Every way out has to answer that reason, so trying no others loses none. Reasons that an adaptation may
    meet, and those about a question that adaptations made, need no answer of their own: they count together,
    and only where nothing else is left.
    """
    shared = {tuple(move.items()): move for move in _unasked(question, base, reasons, hardware)}
    moves = list(shared.values())
    fewest: list[Move] | None = None
    loose: list[Reason] = []
    for reason in reasons:
        if _is_loose(name, question, reason):
            loose.append(reason)
            continue
        answers = _answers(name, question, base, reason, moves)
        if fewest is None or len(answers) < len(fewest):
            fewest = answers
        if not fewest:
            return []
    if fewest is not None:
        return fewest
    return [move for reason in loose for move in _answers(name, question, base, reason, moves)]


def may_only_add(question: Scenario, changes: Changes, reasons: tuple[Reason, ...]) -> bool:
    """Whether no move that could answer these reasons is about a field which was changed before, or about one
    that is told with it. Seen without looking for the moves, and False where that does not tell."""
    about = {"attn_mask_type", *(field for field, off in SWITCHES if getattr(question.p, field) != off)}
    if question.p.fp8_attention:
        about.update(RECIPE_FIELDS)
    for reason in reasons:
        if not isinstance(reason.rule, Rule) or isinstance(reason.finding.required, AnyBuild):
            return False
        about.update((reason.field, *(versions.component for versions in reason.rule.when)))
    for together in (LENGTHS, WIDTHS, ("deterministic", "policy.deterministic")):
        if not about.isdisjoint(together):
            about.update(together)
    return all(field not in about and field != "policy.allow_known_bugs" for field, _ in changes)


def _after(question: Scenario, move: Move) -> Scenario | None:
    """The question after a move; None where that contradicts another field, or changes nothing."""
    try:
        after = changed(question, move)
    except InvalidInput:
        return None
    return None if after == question else after


def _is_loose(name: str, question: Scenario, reason: Reason) -> bool:
    """Whether the candidate may become eligible with nothing done about this reason."""
    if question.policy.adapt == "never" or not isinstance(reason.rule, Rule):
        return False
    adaptations = CANDIDATES[name].adaptations
    if any(reason.field in ADAPTERS[adaptation].fields for adaptation in adaptations):
        return True
    return bool(adaptations) and _says(reason.rule, question) is None


def _unasked(
    question: Scenario, base: Scenario, reasons: tuple[Reason, ...], hardware: bool
) -> Iterator[Move]:
    """Moves that may answer a rule whatever field it blames: switches, every rule's values, other GPUs."""
    p = question.p
    for field, off in SWITCHES:
        if getattr(p, field) != off:
            yield switched_off(question, field, off)
    dropped = type_without_mask(p)
    if dropped is not None:
        yield {"attn_mask_type": dropped}
    if _sees_all(p):
        yield {"attn_mask_type": _unmasked(p)}
    if p.fp8_attention:
        yield from _other_recipes(p)
    for reason in reasons:
        if isinstance(reason.rule, Rule):
            yield from values_against(p, reason)
    if hardware and question.env.device == base.env.device:
        for gpu in nearest_gpus(base.env):
            yield {"gpu": gpu.name}


def _answers(
    name: str,
    question: Scenario,
    base: Scenario,
    reason: Reason,
    shared: list[Move],
) -> list[Move]:
    """What silences this reason, or at least moves it on to another value."""
    rule = reason.rule
    if not isinstance(rule, Rule):
        loosened = list(_loosened(name, question, reason))
        if isinstance(reason.finding.required, AtLeastBytes):
            loosened += _with_less_memory(name, question, shared)
        return loosened
    found: list[Move] = []
    if _says(rule, question) is None:
        # It is about an adapted question: only the engine knows what helps.
        found += [move for move in shared if _after(question, move) is not None]
    else:
        own = list(values_against(question.p, reason))
        reads = all_read_by(rule)
        for move in shared:
            mine = move in own
            # It says the same of a question that differs in fields which it does not read.
            if not mine and reads.isdisjoint(touched(tuple(move))):
                continue
            after = _after(question, move)
            if after is not None:
                said = _says(rule, after)
                if said is None or (mine and said != reason.finding):
                    found.append(move)
    found += _versions(name, question, base, reason, rule)
    if question.policy.adapt == "never" and CANDIDATES[name].adaptations:
        found.append({"policy.adapt": "auto"})
    if rule.family == "BUG":
        allowed = (*question.policy.allow_known_bugs, rule.code)
        found.append({"policy.allow_known_bugs": tuple(sorted(set(allowed)))})
    return found


def _says(rule: Rule, question: Scenario) -> Any:
    """The rule's finding, None where it is silent."""
    env = as_read(question.env)
    if not rule.applies(env) or not rule.concerns(question.p):
        return None
    return rule.find(question.p, env)


# ---- values -----------------------------------------------------------------------------------------


def switched_off(question: Scenario, field: str, off: Any) -> Move:
    if field == "deterministic" and question.policy.deterministic:
        return {field: off, "policy.deterministic": off}  # the policy would switch it on again
    return {field: off}


def _other_recipes(p: AttentionParams) -> Iterator[Move]:
    """Another kind of FP8 recipe, one that covers less, or attention in the tensors' own 16 bits."""
    for kind in ("delayed", "current", "mxfp8"):
        yield {"fp8_recipe": kind}
    if p.recipe is not None and p.recipe.fp8_mha:
        yield {"fp8_mha": False}
    if p.recipe is not None and not p.recipe.attention_in_fp8:
        yield {"fp8_dpa": True}
    if not p.dtype.startswith("fp8"):
        yield {"fp8_dpa": False}


def _sees_all(p: AttentionParams) -> bool:
    """One query under a mask whose diagonal ends in the last corner: it sees every key."""
    return p.max_seqlen_q == 1 and p.bottom_right and not p.windowed


def _unmasked(p: AttentionParams) -> str:
    return "padding" if p.padding else "no_mask"


def values_against(p: AttentionParams, reason: Reason) -> Iterator[Move]:
    """Values that the failing rule would accept for the field it blames."""
    field = reason.field
    if field not in EFFECT_OF_FIELD or field == "deterministic":
        return
    observed = getattr(p, field)
    if field in LENGTHS and not observed:
        return  # an empty sequence is no sequence to round up
    for value in _steps_to(p, field, reason.finding.required.repairs(observed)):
        if value == observed or (field in _ONLY_UPWARDS and not value > observed):
            continue
        if _same_question(p, field, value):
            yield from _together(p, field, value)


def _steps_to(p: AttentionParams, field: str, values: Iterator[Any]) -> Iterator[Any]:
    """The values of a repair; of kv heads every number on the way too, since fewer copies may be enough."""
    for value in values:
        if field == "num_gqa_groups" and value > p.num_gqa_groups:
            yield from range(2 * p.num_gqa_groups, value, p.num_gqa_groups)
        yield value


def _same_question(p: AttentionParams, field: str, value: Any) -> bool:
    """Whether the call still asks for the same attention, where that depends on the value."""
    square = p.max_seqlen_q == p.max_seqlen_kv and not p.padding
    if field == "bottom_right_diagonal":
        return square  # the two corners are one only where both lengths are the same
    if field == "core_attention_bias_type":
        return (p.core_attention_bias_type, value) == ("pre_scale_bias", "post_scale_bias")
    if field == "core_attention_bias_shape":
        return True  # rules ask for the same bias, expanded
    if field == "num_gqa_groups":
        return bool(value % p.num_gqa_groups == 0 and p.num_heads % value == 0)
    if field != "attn_mask_type":
        return True
    if square and {p.attn_mask_type, value} == {"causal", "causal_bottom_right"}:
        return True
    if _sees_all(p) and value == _unmasked(p):
        return True
    return bool(value == ("padding" if p.attn_mask_type == "no_mask" else f"padding_{p.attn_mask_type}"))


def _together(p: AttentionParams, field: str, value: Any) -> Iterator[Move]:
    """The field alone, and with its sibling where both are one number to the user."""
    if field in LENGTHS:
        if _end_padding_is_exact(p):
            both = p.max_seqlen_q == p.max_seqlen_kv
            yield dict.fromkeys(LENGTHS, value) if both else {field: value}
        return
    yield {field: value}
    if field in WIDTHS and p.head_dim_qk == p.head_dim_v:
        yield dict.fromkeys(WIDTHS, value)


def _end_padding_is_exact(p: AttentionParams) -> bool:
    """Whether rows appended at the end of the sequence cannot change what was there.

    A padding mask hides them; a top-left causal mask over equal lengths does too. Elsewhere the padding
    would need a mask of its own, which is a second change. Packed sequences have no end to append to.
    """
    if p.qkv_format == "thd":
        return False
    return p.padding or (p.causal and not p.bottom_right and p.max_seqlen_q == p.max_seqlen_kv)


# ---- versions ---------------------------------------------------------------------------------------


def _versions(name: str, question: Scenario, base: Scenario, reason: Reason, rule: Rule) -> Iterator[Move]:
    """Per component the nearest version at which the rule is silent: newer, or older where none is newer.

    Taken again and again, such steps end at the lowest version without any refusal: no step leads past it.
    """
    if isinstance(reason.finding.required, AnyBuild):
        for build in reason.finding.required.repairs(reason.observed):
            yield {name: version for name, version in build.items() if version != question.value(name)}
        return
    components = {gate.component for gate in rule.when}
    if reason.field in COMPONENTS:
        components.add(reason.field)
    for component in sorted(components - {"python"}):
        current: Version | None = question.value(component)
        stated = reason.finding.required
        if current is None:
            if reason.field == component and isinstance(stated, (AtLeast, Installed)):
                limit: Version = stated.limit  # of flash-attn an older release, where newer have no wheel
                wheel = flash_attn_wheel(question.env) if component == "flash_attn" else None
                older_wheel = Version.parse(wheel.release) if isinstance(wheel, Wheel) else limit
                yield {component: min(limit, older_wheel)}
            continue
        before: Version | None = base.value(component)
        if before is None or current >= before:
            newer = [version for version in edges(name, component) if version > current]
            if reason.field == component and isinstance(stated, (AtLeast, Installed)):
                newer = sorted({*newer, stated.limit}) if stated.limit > current else newer
            up = _first_silent(question, rule, component, newer)
            if up is not None:
                yield {component: up}
                continue
        if before is not None and current <= before:
            older = [_just_below(version) for version in edges(name, component) if version <= current]
            down = _first_silent(question, rule, component, [v for v in reversed(older) if v is not None])
            if down is not None:
                yield {component: down}


def _first_silent(question: Scenario, rule: Rule, component: str, versions: list[Version]) -> Version | None:
    """The first of these versions at which the rule has nothing to say."""
    adapted = _says(rule, question) is None  # by its body it is silent already; its gates must close
    gates = [opens for field, opens in rule.gates if field == component]
    reads = not adapted and not touched((component,)).isdisjoint(names_read(rule.body))
    for version in versions:
        if not all(opens(version) for opens in gates):
            return version
        if reads and _says(rule, changed(question, {component: version})) is None:
            return version
    return None


def _just_below(version: Version) -> Version | None:
    """A release before an edge. It may never have been published; whatever was lies on the same side."""
    if version.before is not None:
        return version.before
    return Version(version.major, version.minor - 1, 0) if version.minor else None


# ---- machines and policies ---------------------------------------------------------------------------


@lru_cache(maxsize=64)
def nearest_gpus(env: Environment) -> tuple[Gpu, ...]:
    """One well-known card of every other architecture, the nearest; none where there is no NVIDIA GPU.

    Leaving a CPU or another maker's GPU would change the software too, in ways nobody stated.
    """
    if env.device.type != "cuda":
        return ()
    found: dict[int, Gpu] = {}
    for gpu in sorted(familiar(), key=lambda gpu: gpu_distance(env, gpu)):
        if gpu.arch != env.arch:
            found.setdefault(gpu.arch, gpu)
    return tuple(found.values())


def gpu_distance(env: Environment, gpu: Gpu) -> float:
    """How unlike this machine's GPU a card is: octaves of memory, and four architectures for an octave."""
    archs = list(ARCHITECTURES)
    apart = 0.0
    if env.arch in archs:
        apart = abs(archs.index(env.arch) - archs.index(gpu.arch)) / 4
    if env.device.memory and gpu.memory_gib:
        apart += abs(log2((gpu.memory_gib << 30) / env.device.memory))
    return apart


def _loosened(name: str, question: Scenario, reason: Reason) -> Iterator[Move]:
    """Loosen what the policy forbids, by exactly what stands in the way."""
    policy = question.policy
    if reason.code == "POLICY001":
        yield {"policy.backend": name}
    elif reason.code == "POLICY002":
        yield {"policy.allow": (*policy.allow, name)}
    elif reason.code == "POLICY003":
        yield {"policy.deny": tuple(other for other in policy.deny if other != name)}
    elif reason.code == "POLICY004" and isinstance(reason.finding.required, AtLeastBytes):
        yield {"policy.memory_limit": round_size(reason.finding.required.bytes)}


def _with_less_memory(name: str, question: Scenario, shared: list[Move]) -> Iterator[Move]:
    """Moves after which the call takes less, or the GPU has more; releases by what the record says."""
    before, record = _taken(name, question), CANDIDATES[name]
    has = question.env.device.memory or 0
    for move in shared:
        after = _after(question, move)
        if after is None:
            continue
        if _taken(name, after) < before or (after.env.device.memory or 0) > has:
            yield move
    for versions in record.less_memory:
        move = {}
        for component, first in versions.items():
            there = question.value(component)
            if there is None or there < first:
                move[component] = first
        if move and _taken(name, changed(question, move)) < before:
            yield move


def _taken(name: str, question: Scenario) -> int:
    return sum(amount for _, amount in memory_parts(name, question.p, question.env))


def round_size(count: int) -> int:
    """Bytes rounded up to two digits of their unit: what a person would write."""
    unit = 1
    while count >= 1024 * unit and unit < 1 << 40:
        unit <<= 10
    return ceil(count / unit * 10) * unit // 10 if count < 10 * unit else ceil(count / unit) * unit
