"""The rule ``<FAMILY>000``, or of another code: a candidate takes what its record lists, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import REGISTRY, Example, Registry, rule
from attnsel.rules.features import DEVICES, DTYPES, not_taken
from attnsel.verdicts.requirements import OneOf
from attnsel.verdicts.verdict import Violation

if TYPE_CHECKING:
    from attnsel.verdicts.record import CandidateRecord


def add_limits(record: CandidateRecord, registry: Registry = REGISTRY) -> None:
    """Add the rule, where rules of its own do not say all of it."""
    if record.limits == "rules":
        return
    takes = frozenset(record.takes)
    features = not_taken(takes)
    dtypes = tuple(word for word in DTYPES if word in takes)
    devices = tuple(word for word in DEVICES if word in takes)

    def only_what_is_listed(p: AttentionParams, env: Environment) -> Violation | None:
        if env.device.type not in takes:
            return Violation("device", env.device.type, OneOf(*devices))
        if p.dtype not in takes and not p.fp8_attention:
            return Violation("dtype", p.dtype, OneOf(*dtypes))
        for feature in features:
            if feature.asked(p):
                value = _value(p, feature.field)
                note = f"it does not take {feature.text}"
                return Violation(feature.field, value, feature.without(p), note)
        return None

    title = "takes what its maker lists, and nothing else"
    if record.library:
        title = "takes what its package has arguments for, and nothing else"
    only_what_is_listed.__doc__ = (
        f"{record.name} {title}\n\n"
        f"Why: what a kernel does not know of it would drop. It takes {', '.join(sorted(takes))}.\n"
        "Fix: leave out what it does not take, or ask its maker.\n"
        f"Source: {record.source or record.distribution or record.kernel}\n"
    )
    plain = _plain_call(takes)
    rule(
        f"{record.family}000" if record.limits == "takes" else record.limits,
        record.name,
        fp8="both",
        evidence="documented",
        fires_on={**plain, "kv_cache": "contiguous", "is_training": False},
        passes=plain,
        registry=registry,
    )(only_what_is_listed)


def _plain_call(takes: frozenset[str]) -> Example:
    """The default question, as far as a kernel with this list takes it."""
    if "cuda" in takes:
        asked: dict[str, Any] = {"gpu": "H100"}
    elif "cpu" in takes:
        asked = {"gpu": "cpu"}
    else:
        asked = {"device": next(word for word in DEVICES if word in takes)}
    if "bf16" not in takes:
        asked["dtype"] = next((word for word in DTYPES if word in takes), "fp8_e4m3")
    if "training" not in takes:
        asked["is_training"] = False
    if "causal" not in takes:
        asked["attn_mask_type"] = "no_mask"
    return asked


def _value(p: AttentionParams, path: str) -> Any:
    """A field by its dotted name; of a tensor its stride."""
    value: Any = p
    for name in path.split("."):
        value = getattr(value, name)
    return f"stride {value.stride}" if "." in path else value
