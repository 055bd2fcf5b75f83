"""A rule's examples as command lines: what its page shows can be pasted into a shell."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from attnsel.environment import COMPONENTS, Environment, describe_device
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.rules import Hint, Page, PolicyRule, Rule
from attnsel.rules.codes import question

Example = Mapping[str, Any]

DESCRIBED_AFTERWARDS = ("platform", "torch_flash", "missing")
"""Fields of an environment that are neither its GPU nor a version."""

WITHOUT_FLAG = frozenset({"tensors", "fp8_meta"})
"""Fields that no flag states: tensor specs come from a file, and a recipe is chosen by name."""

_OTHERWISE = {"is_training": ("--training", "--inference")}


def flag_name(field: str) -> str:
    """The flag that states a field of a question, of its machine or of a policy."""
    return _OTHERWISE[field][0] if field in _OTHERWISE else "--" + field.replace("_", "-")


def negative_name(field: str) -> str:
    """What says no to a field that is true or false."""
    return _OTHERWISE[field][1] if field in _OTHERWISE else "--no-" + field.replace("_", "-")


def example_commands(page: Page) -> dict[str, str]:
    """``{"fires_on": command line, "passes": …}``, without those that no command line can say."""
    commands: dict[str, str | None] = {}
    if isinstance(page, PolicyRule):
        commands["fires_on"] = _of_policy(page.fires_on[1])
    if isinstance(page, (Rule, Hint)) and not (isinstance(page, Hint) and page.of_tensors):
        for name, example in (("fires_on", page.fires_on), ("passes", page.passes)):
            try:
                _, env = question(page, example)
            except (InvalidInput, ValueError):
                continue
            commands[name] = command_of(example, env)
    return {name: command for name, command in commands.items() if command is not None}


def command_of(example: Example, env: Environment) -> str | None:
    """``attnsel explain …`` for an example in its environment; None where none says the same.

    What no flag can say (tensor specs, unusual recipes) goes in as JSON.
    """
    where = _where(example, env)
    if where is None:
        return None
    asked = {name: value for name, value in example.items() if name in AttentionParams.model_fields}
    if env.half != AttentionParams.model_fields["dtype"].default:
        asked.setdefault("dtype", AttentionParams.model_fields["dtype"].default)  # it would be the GPU's
    words = [_flag_words(field, value, asked) for field, value in asked.items()]
    if None in words:
        stdin = shlex.quote(json.dumps(jsonable(asked)))
        return f"echo {stdin} | {shlex.join(['attnsel', 'explain', '--params', '-', *where])}"
    return shlex.join(["attnsel", "explain", *where, *(word for part in words for word in part or ())])


def jsonable(value: Any) -> Any:
    """An example as JSON: tuples as lists, models as objects, versions as text."""
    if isinstance(value, Mapping):
        return {str(name): jsonable(item) for name, item in value.items()}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_defaults=True)
    if type(value) in (tuple, list):
        return [jsonable(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _where(example: Example, env: Environment) -> list[str] | None:
    """The machine as flags; None for a device that --gpu cannot name."""
    device = env.device
    name = device.name.lower() if device.type == "cpu" else device.name
    try:
        if device.type != "cuda" and describe_device(name) != device:
            return None
    except InvalidInput:
        return None
    words = ["--gpu", name]
    stated: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for component in COMPONENTS:
        version = getattr(env, component)
        if component in example or (version is not None and component not in env.assumed):
            words += [flag_name(component), str(version or "none")]
            stated[component] = version
    for field in DESCRIBED_AFTERWARDS:
        if field in example:
            value = getattr(env, field)
            words += [flag_name(field), value if isinstance(value, str) else ",".join(value)]
            others[field] = value
    there = Environment.describe(name, **stated)
    return words if there.replace(**others) == env else None


def _flag_words(field: str, value: Any, asked: Example) -> list[str] | None:
    """One field as words of a command line; None where it cannot be said so."""
    if field == "fp8_meta":
        recipe = value.get("recipe") if isinstance(value, Mapping) else None
        plain = isinstance(recipe, Mapping) and set(recipe) == {"kind", "fp8_dpa"} and recipe["fp8_dpa"]
        return ["--fp8-recipe", recipe["kind"]] if recipe and plain and asked.get("fp8") else None
    if field == "fp8" and value and asked.get("fp8_meta"):
        return []  # --fp8-recipe says both
    if field in WITHOUT_FLAG or value is None:
        return None
    if isinstance(value, bool):
        return [flag_name(field) if value else negative_name(field)]
    if isinstance(value, (tuple, list)):
        return [flag_name(field), *map(str, value)]
    return [flag_name(field), str(value)]


def _of_policy(fields: Example) -> str | None:
    """A policy as flags; None where there is nothing to say or no flag to say it."""
    if not fields or not fields.keys() <= Policy.model_fields.keys():
        return None
    words = ["attnsel", "explain", "--gpu", "H100"]
    for field, value in fields.items():
        words += [flag_name(field), ",".join(value) if isinstance(value, (tuple, list)) else str(value)]
    return shlex.join(words)
