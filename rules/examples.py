"""The examples a rule carries, as questions: what its page shows and its test asks."""

from __future__ import annotations

from typing import Any

from attnsel.environment import COMPONENTS, Device, Environment
from attnsel.environment.gpus import ARCHITECTURES
from attnsel.environment.versions import Version, Versions
from attnsel.params import AttentionParams
from attnsel.rules.api import Example, Rule
from attnsel.rules.hint import Hint

_COMMON_FIRST = (90, 80, 100, 75, 89, 86, 120, 103, 121, 70, 87, 110)


def question(rule: Rule | Hint, example: Example) -> tuple[AttentionParams, Environment]:
    """``example`` inside the rule's gates: fields of AttentionParams, ``gpu``, ``device`` and versions.

    Raises InvalidInput for an example that contradicts itself, ValueError for gates that nothing passes.
    """
    given: dict[str, Any] = dict(example)
    machine: dict[str, Any] = {name: given.pop(name) for name in COMPONENTS if name in given}
    gpu = given.pop("gpu", None) or _some_gpu(rule)
    device = given.pop("device", None)
    for component in {versions.component for versions in rule.when} - set(machine):
        machine[component] = _some_version([v for v in rule.when if v.component == component])
    env = Environment.describe(gpu, **machine)
    more = {name: given.pop(name) for name in ("platform", "torch_flash", "missing") if name in given}
    if device is not None:
        kind: Any = "rocm" if device.startswith("gfx") else device
        env = env.replace(device=Device(type=kind, name=device))
    if more:
        env = env.replace(**more)
    return AttentionParams(**given), env


def _some_gpu(rule: Rule | Hint) -> str:
    if rule.arch is not None:
        for arch in (*_COMMON_FIRST, *ARCHITECTURES):
            if arch in rule.arch:
                return f"sm{arch}"
        raise ValueError(f"{rule.code}: no known architecture passes its gate")
    if rule.device is not None and "cuda" not in rule.device:
        return "cpu"
    return "H100"


def _some_version(gates: list[Versions]) -> Version:
    """A version inside all gates: some edge, or some gate's own sample."""
    candidates = sorted({gate.sample() for gate in gates} | {e for gate in gates for e in gate.edges()})
    for version in candidates:
        if all(version in gate for gate in gates):
            return version
    raise ValueError(f"no version lies in all of {[str(gate) for gate in gates]}")
