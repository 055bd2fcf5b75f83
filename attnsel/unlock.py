"""Ways out: what the failing rules propose, kept only when the engine agrees.

Nothing here knows a constraint. Versions to try are the edges of the rules' own intervals, values to
try come from the rules' requirements, and each change is put to the engine as a new question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from attnsel.candidates import CANDIDATES
from attnsel.environment import COMPONENTS
from attnsel.errors import InvalidInput
from attnsel.rules import REGISTRY, Rule
from attnsel.verdict import AtLeast, Reason
from attnsel.versions import Version

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams
    from attnsel.policy import Policy
    from attnsel.select import Selection

    Ask = Callable[[AttentionParams, Environment, Policy], Selection]

# config: changes what is computed or wished; exact: same numbers; install: other software; risk: a known
# bug is accepted. In order of cost.
EFFECTS = ("config", "exact", "install", "risk")


class Unlock(NamedTuple):
    """One change after which ``candidate`` is eligible, checked by asking the engine again.

    ``changes`` maps fields (``max_seqlen_q``, ``cudnn``, ``policy.deny``) to their new values; ``paste`` is a
    line for a shell or for Python. ``rank`` is the place the candidate would take, 1 being first.
    """

    candidate: str
    change: str
    effect: str
    paste: str
    changes: tuple[tuple[str, Any], ...]
    rank: int

    def as_dict(self) -> dict[str, Any]:
        changes = {name: _plain(value) for name, value in self.changes}
        return {**self._asdict(), "changes": changes}


class _Proposal(NamedTuple):
    change: str
    effect: str
    paste: str
    changes: tuple[tuple[str, Any], ...]
    p: AttentionParams
    env: Environment
    policy: Policy


def find_unlocks(selection: Selection, ask: Ask) -> tuple[Unlock, ...]:
    """Single changes that make a refused candidate eligible, cheapest first."""
    found: dict[tuple[str, tuple[tuple[str, Any], ...]], Unlock] = {}
    for candidate in selection.candidates:
        if candidate.verdict != "refused":
            continue
        for options in _proposals(selection, candidate.name, candidate.reasons):
            for option in options:  # alternatives in rising order: the first that works is minimal
                answer = ask(option.p, option.env, option.policy)
                standing = [c.name for c in answer.candidates if c.verdict == "eligible"]
                if candidate.name in standing:
                    unlock = Unlock(
                        candidate.name,
                        option.change,
                        option.effect,
                        option.paste,
                        option.changes,
                        standing.index(candidate.name) + 1,
                    )
                    found.setdefault((candidate.name, option.changes), unlock)
                    break
    return tuple(sorted(found.values(), key=lambda u: (EFFECTS.index(u.effect), u.rank, u.candidate)))


def _proposals(selection: Selection, name: str, reasons: tuple[Reason, ...]) -> Iterator[Iterator[_Proposal]]:
    """Groups of alternatives; within a group only the first that works is wanted."""
    p, env, policy = selection.params, selection.environment, selection.policy
    components: list[str] = []
    for reason in reasons:
        if isinstance(reason.rule, Rule):
            components += [versions.component for versions in reason.rule.when]
        if reason.field in COMPONENTS:
            components.append(reason.field)
    for component in dict.fromkeys(components):
        if component != "python":
            yield _versions(selection, name, component, reasons)
    for reason in reasons:
        if not reason.unknown:
            yield _repairs(p, env, policy, reason)
    yield _policies(p, env, policy, name, reasons)


# ---- versions ---------------------------------------------------------------------------------------


def _versions(
    selection: Selection, name: str, component: str, reasons: tuple[Reason, ...]
) -> Iterator[_Proposal]:
    """Newer versions of one component at which any rule of this candidate changes its mind."""
    p, env, policy = selection.params, selection.environment, selection.policy
    current: Version | None = getattr(env, component)
    edges: set[Version] = set()
    for rule in REGISTRY.rules.values():
        if name in rule.candidates:
            for versions in rule.when:
                if versions.component == component:
                    edges.update(versions.edges())
    stated = [
        reason.finding.required.limit
        for reason in reasons
        if reason.field == component and isinstance(reason.finding.required, AtLeast)
    ]
    lowest = max(stated, default=None)  # a rule that names a minimum knows more than where gates end
    edges.update(stated)
    for version in sorted(edges):
        if (current is not None and version <= current) or (lowest is not None and version < lowest):
            continue
        changed = env.replace(
            **{component: version, "assumed": tuple(n for n in env.assumed if n != component)}
        )
        yield _Proposal(
            f"{component} ≥ {version}",
            "install",
            _install_line(component, version, env),
            ((component, version),),
            p,
            changed,
            policy,
        )


def _install_line(component: str, version: Version, env: Environment) -> str:
    if component == "cudnn":
        toolkit = 13 if env.cuda is not None and env.cuda.major >= 13 else 12
        return f"pip install 'nvidia-cudnn-cu{toolkit}>={version}'"
    if component == "cudnn_frontend":
        return f"pip install 'nvidia-cudnn-frontend>={version},<1.29'"
    if component == "cuda":
        return f"install a torch build for CUDA {version.major}.{version.minor} or newer"
    return f"pip install '{component.replace('_', '-')}>={version}'"


# ---- values -----------------------------------------------------------------------------------------

# What may be proposed for a parameter, and what kind of change it is. What is not here is the question
# itself (a mask, a window, a softcap): changing it would answer another question.
_EFFECT_OF_FIELD: dict[str, str] = {
    "max_seqlen_q": "exact",
    "max_seqlen_kv": "exact",
    "head_dim_qk": "exact",
    "head_dim_v": "exact",
    "qkv_layout": "exact",
    "bottom_right_diagonal": "exact",
    "cp_comm_type": "exact",
    "dtype": "config",
    "deterministic": "config",
    "attention_dropout": "config",
    "return_lse": "config",
    "return_max_logit": "config",
    "cuda_graph": "config",
    "core_attention_bias_requires_grad": "config",
}
_ONLY_UPWARDS = frozenset({"max_seqlen_q", "max_seqlen_kv", "head_dim_qk", "head_dim_v"})


def _repairs(p: AttentionParams, env: Environment, policy: Policy, reason: Reason) -> Iterator[_Proposal]:
    """Values the failing rule would accept for the field it blames."""
    field = reason.field
    effect = _EFFECT_OF_FIELD.get(field)
    if effect is None:
        return
    observed = getattr(p, field)
    for value in reason.finding.required.repairs(observed):
        if value == observed or (field in _ONLY_UPWARDS and not value > observed):
            continue
        if field == "bottom_right_diagonal" and (p.padding or p.max_seqlen_q != p.max_seqlen_kv):
            continue  # the two corners are one only where both lengths are the same
        for changes in _together(p, field, value):
            try:
                changed = p.derive(**changes)  # nothing else may follow along
            except InvalidInput:
                continue
            text, paste = _describe(p, field, observed, value, tuple(changes))
            yield _Proposal(text, effect, paste, tuple(changes.items()), changed, env, policy)


def _together(p: AttentionParams, field: str, value: Any) -> Iterator[dict[str, Any]]:
    """The field alone, and with its sibling where both are one number to the user."""
    if field.startswith("max_seqlen"):
        if _end_padding_is_exact(p):
            both = p.max_seqlen_q == p.max_seqlen_kv
            yield {"max_seqlen_q": value, "max_seqlen_kv": value} if both else {field: value}
        return
    yield {field: value}
    if field in ("head_dim_qk", "head_dim_v") and p.head_dim_qk == p.head_dim_v:
        yield {"head_dim_qk": value, "head_dim_v": value}


def _end_padding_is_exact(p: AttentionParams) -> bool:
    """Whether rows appended at the end of the sequence cannot change what was there.

    A padding mask hides them; a top-left causal mask over equal lengths does too. Elsewhere the padding
    would need a mask of its own, which is a second change. Packed sequences have no end to append to.
    """
    if p.qkv_format == "thd":
        return False
    return p.padding or (p.causal and not p.bottom_right and p.max_seqlen_q == p.max_seqlen_kv)


def _describe(
    p: AttentionParams, field: str, observed: Any, value: Any, changed: tuple[str, ...]
) -> tuple[str, str]:
    """The change in words, and as a line of Python."""
    if field.startswith("max_seqlen"):
        more = value - observed
        behind = {"bshd": 2, "sbhd": 3, "bhsd": 1}[p.qkv_format]  # dimensions after the sequence's
        pads = ", ".join(["0, 0"] * behind + [f"0, {more}"])
        share = f"+{100 * more / max(observed, 1):.2g} %"
        return (
            f"round the sequence {observed} up to {value} ({share})",
            f"x = torch.nn.functional.pad(x, ({pads}))  # q, k, v; cut the output back",
        )
    if field in ("head_dim_qk", "head_dim_v"):
        name = field if len(changed) == 1 else "head_dim"
        tensors = {"head_dim_v": "v", "head_dim_qk": "q, k"}.get(name, "q, k, v")
        paste = f"x = torch.nn.functional.pad(x, (0, {value - observed}))  # {tensors}; keep softmax_scale"
        if "head_dim_v" in changed:
            paste += ", cut the output back"
        return f"pad {name} {observed} → {value} (+{100 * (value - observed) / observed:.0f} %)", paste
    text = f"{field} {observed} → {value}"
    if field == "dtype":
        text = f"cast to {value}"
        if value == "fp16":
            text += " (range ±65504: watch for overflow)"
    return text, f"params = params.replace({field}={value!r})"


# ---- policy -----------------------------------------------------------------------------------------


def _policies(
    p: AttentionParams, env: Environment, policy: Policy, name: str, reasons: tuple[Reason, ...]
) -> Iterator[_Proposal]:
    """Loosen what the policy forbids, by exactly what stands in the way."""
    codes = {reason.code for reason in reasons}
    changes: dict[str, Any] = {}
    lines: list[str] = []
    if "POLICY001" in codes:
        changes["backend"] = name
        lines.append(f"backend={name!r}")
    if "POLICY002" in codes:
        changes["allow"] = (*policy.allow, name)
        lines.append(f"ATTNSEL_BACKENDS={','.join(changes['allow'])}")
    if "POLICY003" in codes:
        changes["deny"] = tuple(n for n in policy.deny if n != name)
        lines.append(f"ATTNSEL_DISABLE={','.join(changes['deny'])}")
    if changes:
        yield _policy_change(p, env, policy, changes, lines, "config")
    if policy.adapt == "never" and CANDIDATES[name].adaptations:
        yield _policy_change(p, env, policy, {"adapt": "auto"}, ["ATTNSEL_ADAPT=auto"], "config")
    bugs = sorted(code for code in codes if code.startswith("BUG"))
    if bugs:
        allowed = (*policy.allow_known_bugs, *bugs)
        line = f"ATTNSEL_ALLOW_KNOWN_BUGS={','.join(allowed)}"
        yield _policy_change(p, env, policy, {"allow_known_bugs": allowed}, [line], "risk")


def _policy_change(
    p: AttentionParams,
    env: Environment,
    policy: Policy,
    changes: dict[str, Any],
    lines: list[str],
    effect: str,
) -> _Proposal:
    named = tuple((f"policy.{field}", value) for field, value in changes.items())
    text = " ".join(lines)
    return _Proposal(text, effect, text, named, p, env, policy.replace(**changes))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Version) else value
