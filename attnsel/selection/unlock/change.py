"""A change of a question: how it is made, what it costs, which of its parts belong together.

A change is a mapping from fields to new values: fields of AttentionParams, ``fp8_recipe`` (its kind),
``fp8_dpa`` and ``fp8_mha`` of its recipe, components of an Environment, ``gpu``, and fields of a Policy
behind ``policy.``. Everything else that has to follow (a padded tensor is a
new, dense one) follows here and nowhere else, so that what was checked is what ``Unlock.apply`` makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from attnsel.environment import COMPONENT_NAMES, COMPONENTS, Device, Environment, describe_device
from attnsel.environment.gpus import ARCHITECTURES, familiar
from attnsel.environment.versions import Version
from attnsel.params import AttentionParams, Fp8Meta
from attnsel.params.layout import FORMATS
from attnsel.params.options import RECIPE_NAMES, read_recipe
from attnsel.policy import Policy
from attnsel.selection.adaptations import type_without_mask
from attnsel.verdicts.requirements import size

Changes = tuple[tuple[str, Any], ...]
"""Sorted by field, so that equal changes are equal."""

LENGTHS = ("max_seqlen_q", "max_seqlen_kv")
WIDTHS = ("head_dim_qk", "head_dim_v")
RECIPE_FIELDS = {"fp8_recipe": "kind", "fp8_dpa": "attention_in_fp8", "fp8_mha": "fp8_mha"}
"""What may be changed of an FP8 recipe: the field of a change, and what it is of the recipe."""


class Scenario(NamedTuple):
    """What the engine is asked."""

    p: AttentionParams
    env: Environment
    policy: Policy

    def value(self, field: str) -> Any:
        """What ``field`` of a change is now."""
        if field == "gpu":
            return self.env.device.name
        if field.startswith("policy."):
            return getattr(self.policy, field.removeprefix("policy."))
        if field in RECIPE_FIELDS:
            return getattr(self.p.recipe, RECIPE_FIELDS[field], None)
        return getattr(self.env if field in COMPONENTS else self.p, field)


def changed(question: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """The question after a change. Raises InvalidInput when the fields then contradict each other."""
    return _changed(question, tuple(sorted(changes.items())))


@lru_cache(maxsize=1024)
def _changed(question: Scenario, changes: Changes) -> Scenario:
    """Ways to several candidates begin alike, and what a set costs is asked before its verdict."""
    values: dict[str, Any] = {}
    machine: list[tuple[str, Any]] = []
    policy_changes: dict[str, Any] = {}
    for field, value in changes:
        if field == "gpu" or field in COMPONENTS:
            machine.append((field, value))
        elif field.startswith("policy."):
            policy_changes[field.removeprefix("policy.")] = value
        else:
            values[field] = value
    p, env, policy = question
    of_recipe = {field: values.pop(field) for field in RECIPE_FIELDS if field in values}
    if of_recipe:
        values |= _with_recipe(p, of_recipe)
    if values:
        p = p.derive(**_with_consequences(p, values))
    if machine:
        env = another(env, tuple(machine))
    return Scenario(p, env, policy.replace(**policy_changes) if policy_changes else policy)


@lru_cache(maxsize=256)
def touched(fields: tuple[str, ...]) -> frozenset[str]:
    """The fields of a question and of an environment that a change of these may change: they, and whatever
    may follow."""
    return frozenset(fields).union(*(_FOLLOWING.get(field, ()) for field in fields))


_RECIPE = ("fp8", "fp8_meta")
_FOLLOWING: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*LENGTHS, *WIDTHS, "num_gqa_groups", "dtype"), ("tensors",)),
    **dict.fromkeys(RECIPE_FIELDS, _RECIPE),
    "qkv_layout": ("tensors", "pad_between_seqs"),
    "attn_mask_type": ("tensors", "bottom_right_diagonal", "window_size"),
    "core_attention_bias_type": ("core_attention_bias_shape",),
    **dict.fromkeys(COMPONENTS, ("assumed",)),
    "gpu": ("device", "detected", "assumed"),
}
"""What may follow a change of a field: here, in ``another`` and where a question is made."""


def _with_recipe(p: AttentionParams, of_recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a question whose FP8 recipe is of another kind, or covers less of attention.

    Of the old recipe stays which parts of attention it covers; the numbers of another kind are its own.
    """
    old = p.recipe
    covers = {"fp8_dpa": True, "fp8_mha": False}
    if old is not None and old.attention_in_fp8:
        covers = {"fp8_dpa": old.fp8_dpa, "fp8_mha": old.fp8_mha}
    if "fp8_mha" in of_recipe:
        covers = {"fp8_dpa": True, "fp8_mha": of_recipe["fp8_mha"]}
    if of_recipe.get("fp8_dpa") is False:
        covers = {"fp8_dpa": False, "fp8_mha": False}
    kind = of_recipe.get("fp8_recipe")
    if kind is None and old is not None:
        return {"fp8": True, "fp8_meta": Fp8Meta(recipe=old.derive(**covers))}
    recipe = read_recipe({"kind": kind or "delayed", **covers})
    return {"fp8": True, "fp8_meta": Fp8Meta(recipe=recipe)}


def _with_consequences(p: AttentionParams, values: dict[str, Any]) -> dict[str, Any]:
    """The fields that follow from ``values``; nothing else follows."""
    whole = dict(values)
    copied = set()  # a tensor that was padded, cast or repeated is a new one, dense in its layout
    if "max_seqlen_q" in values or "head_dim_qk" in values:
        copied.add("q")
    if "max_seqlen_kv" in values or "head_dim_qk" in values or "num_gqa_groups" in values:
        copied.add("k")
    if "max_seqlen_kv" in values or "head_dim_v" in values or "num_gqa_groups" in values:
        copied.add("v")
    if "dtype" in values or "qkv_layout" in values:
        copied |= {"q", "k", "v"}
    held = {name for name in copied if getattr(p.tensors, name) is not None}
    if held:
        whole["tensors"] = p.tensors.derive(**dict.fromkeys(held))
    if "attn_mask_type" in values:
        if values["attn_mask_type"] == type_without_mask(p):
            tensors = whole.get("tensors", p.tensors)
            whole["tensors"] = tensors.derive(mask=None, mask_hides_nothing=False)
        causal = "causal" in values["attn_mask_type"]
        whole["bottom_right_diagonal"] = None if causal else p.bottom_right_diagonal
        if not causal and p.window_size == (-1, 0):
            whole["window_size"] = (-1, -1)  # the right bound was the causal mask's own
    if p.pad_between_seqs and "thd" not in values.get("qkv_layout", "thd"):
        whole["pad_between_seqs"] = False
    return whole


@lru_cache(maxsize=512)
def another(env: Environment, machine: Changes) -> Environment:
    """Another machine; what was changed is no longer assumed. Few are asked about, and often."""
    parts = dict(machine)
    gpu = parts.pop("gpu", None)
    if gpu is not None:
        # Its memory does not count among what a rule may read, and the machine is not in front of us.
        parts |= {"device": _device(gpu), "detected": False}
    assumed = tuple(name for name in env.assumed if name not in parts)
    return env.derive(assumed=assumed, **parts)


@lru_cache(maxsize=32)
def _device(gpu: str) -> Device:
    return describe_device(gpu)


# ---- cost -------------------------------------------------------------------------------------------

# exact: same numbers; config: changes what is computed or allowed; install: other software; hardware: another
# GPU; risk: a known bug is accepted. In order of cost.
EFFECTS = ("exact", "config", "install", "hardware", "risk")

# What may be proposed for a parameter, and what kind of change it is. What is not here is the question
# itself (a window, a softcap): changing it would answer another question.
EFFECT_OF_FIELD: dict[str, str] = {
    "max_seqlen_q": "exact",
    "max_seqlen_kv": "exact",
    "head_dim_qk": "exact",
    "head_dim_v": "exact",
    "num_gqa_groups": "exact",
    "qkv_layout": "exact",
    "attn_mask_type": "exact",
    "bottom_right_diagonal": "exact",
    "core_attention_bias_type": "exact",
    "core_attention_bias_shape": "exact",
    "cp_comm_type": "exact",
    "fp8_recipe": "config",
    "fp8_dpa": "config",
    "fp8_mha": "config",
    "dtype": "config",
    "deterministic": "config",
    "attention_dropout": "config",
    "return_lse": "config",
    "return_max_logit": "config",
    "cuda_graph": "config",
    "page_size": "config",
    "pad_between_seqs": "config",
    "core_attention_bias_requires_grad": "config",
}


def effect_of(field: str) -> str:
    """The effect of changing one field."""
    if field == "gpu":
        return "hardware"
    if field in COMPONENTS:
        return "install"
    if field == "policy.allow_known_bugs":
        return "risk"
    return "config" if field.startswith("policy.") else EFFECT_OF_FIELD[field]


class Cost(NamedTuple):
    """What a change costs, dearest part first; compared in that order. A further change never costs less."""

    risks: int
    gpus: int
    installs: int
    tier: int  # 0: the same numbers for at most twice the work; 1: another setting, or more work than that
    work: float  # share of work and tensor memory that is added: 0.5 is half as much again
    n_changes: int  # 2 for what changes the numbers that are computed, 1 for every other
    distance: int  # of versions, then of architectures: the nearest that works is enough


def cost_of(question: Scenario, changes: Mapping[str, Any]) -> Cost:
    """The cost of a change. Raises InvalidInput when it cannot be made."""
    together = [parts[0] for parts in grouped(question, changes)]
    effects = [effect_of(field) for field in together]
    work = extra_work(question.p, changed(question, changes).p)
    return Cost(
        risks=effects.count("risk"),
        gpus=effects.count("hardware"),
        installs=effects.count("install"),
        tier=int("config" in effects or work > 1.0),
        work=work,
        n_changes=sum(2 if field in _OTHER_NUMBERS else 1 for field in together),
        distance=sum(_distance(question, field, value) for field, value in changes.items()),
    )


_OTHER_NUMBERS = frozenset({"dtype", "attention_dropout", *RECIPE_FIELDS})


def extra_work(before: AttentionParams, after: AttentionParams) -> float:
    """The share by which multiplications or tensor memory grow, whichever grows more."""
    if after is before:
        return 0.0
    pairs = (_multiplications(after), _multiplications(before)), (_elements(after), _elements(before))
    return max(0.0, *(new / max(old, 1) - 1.0 for new, old in pairs))


def _multiplications(p: AttentionParams) -> int:
    return p.max_seqlen_q * p.max_seqlen_kv * (p.head_dim_qk + p.head_dim_v)


def _elements(p: AttentionParams) -> int:
    rows = p.num_heads * p.max_seqlen_q + p.num_gqa_groups * p.max_seqlen_kv
    return rows * (p.head_dim_qk + p.head_dim_v)


def _distance(question: Scenario, field: str, value: Any) -> int:
    if field == "gpu":
        archs, here, there = list(ARCHITECTURES), question.env.arch, _device(value).arch
        if here not in archs or there not in archs:
            return 0
        steps = archs.index(there) - archs.index(here)
        return steps if steps >= 0 else len(archs) - steps  # an older one only where no newer one does
    if field not in COMPONENTS:
        return 0
    old, new = question.value(field), value
    steps = version_number(new) - version_number(old or Version(0))
    return steps if steps >= 0 else 1_000_000 - steps  # going back is a last thing to try


def version_number(version: Version) -> int:
    """A number that grows with the version, for distances."""
    return 10_000 * version.major + 100 * version.minor + version.patch


# ---- what belongs together --------------------------------------------------------------------------


def grouped(question: Scenario, changes: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The fields of a change, those that are one change to the user side by side."""
    left = dict.fromkeys(sorted(changes, key=_reading_order))
    groups: list[tuple[str, ...]] = []
    for pair in (LENGTHS, WIDTHS, ("deterministic", "policy.deterministic")):
        first, second = pair
        if (
            first in left
            and second in left
            and (changes[first], question.value(first)) == (changes[second], question.value(second))
        ):
            groups.append(pair)
            left.pop(first)
            left.pop(second)
    groups += [(field,) for field in left]
    return sorted(groups, key=lambda parts: _reading_order(parts[0]))


def _reading_order(field: str) -> tuple[int, str]:
    """Costly changes come first."""
    return -EFFECTS.index(effect_of(field)), field


# ---- A change in words, and as lines of Python to paste. What is installed is in ``install`` -----------


class Instruction(NamedTuple):
    """One change: what to do, and what to paste for it."""

    text: str
    paste: str


class VersionRange(NamedTuple):
    """How far the version that was found holds: ``below`` another, and without ``9.8`` or ``9.10.1``."""

    below: Version | None = None
    without: tuple[str, ...] = ()


class Applicability(NamedTuple):
    """What only the engine can say about a change: where else it would work."""

    reach: Mapping[str, VersionRange]  # by component
    archs: frozenset[int]  # architectures that do as well as the one that was chosen


def render_change(
    question: Scenario, changes: Mapping[str, Any], applicability: Applicability
) -> list[Instruction]:
    """Every part of a change, the dearest first."""
    groups = grouped(question, changes)
    return [_render_part(question, parts, changes[parts[0]], applicability) for parts in groups]


def _render_part(
    question: Scenario, parts: tuple[str, ...], value: Any, applicability: Applicability
) -> Instruction:
    field, p = parts[0], question.p
    if field == "gpu":
        text = gpu_text(value, applicability.archs)
        return Instruction(text, text)
    if field in COMPONENTS:
        return Instruction(_version(question, field, value, applicability.reach[field]), "")
    if field in LENGTHS:
        return _length(p, parts, value)
    if field in WIDTHS:
        return _width(p, parts, value)
    if field == "num_gqa_groups":
        return _repeat(p, value)
    if field in RECIPE_FIELDS:
        return _recipe(question, field, value)
    if field.startswith("policy.") or "policy.deterministic" in parts:
        text = _VARIABLES[parts[-1].removeprefix("policy.")](value)
        return Instruction(text, text)
    return _setting(p, field, value)


# ---- values -----------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """``+0.25 %``; two digits."""
    amount = 100 * share
    return f"+{amount:.2g} %" if amount < 10 else f"+{amount:.0f} %"


def _length(p: AttentionParams, parts: tuple[str, ...], value: int) -> Instruction:
    old = getattr(p, parts[0])
    what = "the sequence" if len(parts) == 2 else parts[0]
    by_format: dict[str, str] = {}  # q may lie in another format than k and v
    for field, tensors, name in (
        ("max_seqlen_q", "q", p.layout.q_format),
        ("max_seqlen_kv", "k, v", p.layout.kv_format),
    ):
        if field in parts:
            by_format[name] = ", ".join(filter(None, (by_format.get(name), tensors)))
    bias = "; the bias likewise" if p.has_bias else ""
    return Instruction(
        f"round {what} {old} up to {value} ({percent(value / max(old, 1) - 1)})",
        "\n".join(
            f"x = torch.nn.functional.pad(x, ({_behind(name)}0, {value - old}))  # {tensors}{bias}"
            + ("; cut the output back" if tensors.startswith("q") else "")
            for name, tensors in by_format.items()
        ),
    )


def _behind(qkv_format: str) -> str:
    """No padding in the dimensions behind the sequence's."""
    form = FORMATS[qkv_format]
    return "0, 0, " * (form.rank - 1 - form.rows)


def _width(p: AttentionParams, parts: tuple[str, ...], value: int) -> Instruction:
    old = getattr(p, parts[0])
    what = "head_dim" if len(parts) == 2 else parts[0]
    tensors = {"head_dim_v": "v", "head_dim_qk": "q, k"}.get(what, "q, k, v")
    paste = f"x = torch.nn.functional.pad(x, (0, {value - old}))  # {tensors}; keep softmax_scale"
    if "head_dim_v" in parts:
        paste += ", cut the output back"
    return Instruction(f"pad {what} {old} → {value} ({percent(value / old - 1)} {tensors.upper()})", paste)


def _repeat(p: AttentionParams, value: int) -> Instruction:
    old, axis = p.num_gqa_groups, FORMATS[p.layout.kv_format].heads
    return Instruction(
        f"repeat {old} kv head{'s' * (old > 1)} to {value} ({percent(value / old - 1)} K, V)",
        f"x = x.repeat_interleave({value // old}, dim={axis})  # k, v",
    )


def _recipe(question: Scenario, field: str, value: Any) -> Instruction:
    """Another recipe as TransformerEngine writes it, or one that covers another part of attention."""
    old, kind = question.value(field), question.value("fp8_recipe")
    if field == "fp8_recipe":
        whole = ", fp8_mha=True" if question.value("fp8_mha") else ""
        text = f"FP8 recipe {value}" if old is None else f"FP8 recipe {old} → {value} (other numbers)"
        return Instruction(text, f'fp8_meta["recipe"] = {RECIPE_NAMES[value]}(fp8_dpa=True{whole})')
    what = "its output" if field == "fp8_mha" else "attention"
    note = f"{what} in {'FP8' if value else '16 bits'}"
    covers = "fp8_dpa=True" if field == "fp8_mha" else f"fp8_dpa={value}"
    return Instruction(f"{field}={value} ({note})", f'fp8_meta["recipe"] = {RECIPE_NAMES[kind]}({covers})')


_CAVEATS = {"fp16": "range ±65504: watch for overflow", "bf16": "about 3 digits"}
_TORCH_NAMES = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


_NOTES = {
    "bottom_right_diagonal": "the same for equal lengths",
    "core_attention_bias_type": "the bias times softmax_scale",
    "core_attention_bias_shape": "the same bias, expanded",
}


def _setting(p: AttentionParams, field: str, value: Any) -> Instruction:
    old = getattr(p, field)
    paste = f"params = params.replace({field}={value!r})"
    if field == "dtype":
        caveat = _CAVEATS.get(value)
        paste = f"q, k, v = (x.to(torch.{_TORCH_NAMES[value]}) for x in (q, k, v))"
        return Instruction(f"cast to {value}" + (f" ({caveat})" if caveat else ""), paste)
    note = _NOTES.get(field, "")
    if field == "attn_mask_type":
        if value == type_without_mask(p):
            return Instruction("drop attention_mask: it hides nothing", "attention_mask=None")
        note = "with every length full" if "padding" in value and not p.padding else "the same pairs"
    elif field == "qkv_layout":
        note = "pad the sequences" if p.qkv_format == "thd" else "a copy"
    return Instruction(f"{field} {old} → {value}" + (f" ({note})" if note else ""), paste)


# ---- software and hardware --------------------------------------------------------------------------

_PRODUCTS = {**COMPONENT_NAMES, "torch": "PyTorch", "triton": "Triton"}


def _version(question: Scenario, component: str, version: Version, reach: VersionRange) -> str:
    current = question.value(component)
    product = _PRODUCTS.get(component, component.replace("_", "-"))
    if current is not None and version < current:
        return f"go back to {product} {version}"
    verb = f"install {product}" if current is None else f"upgrade {product} to"
    text = f"{verb} ≥ {version}"
    if reach.below is not None:
        text += f", below {reach.below}"
    minors = [release for release in reach.without if release.count(".") == 1]
    if minors:  # single patches are left out too, but not named
        text += f", not {', '.join(minors[:-1])} or {minors[-1]}" if minors[1:] else f", not {minors[0]}"
    return text


def gpu_text(name: str, archs: frozenset[int]) -> str:
    """``a GPU from sm80 on (e.g. A10)``, where ``archs`` are all architectures that would do."""
    every = sorted({gpu.arch for gpu in familiar()})
    fit = [arch for arch in every if arch in archs]
    if len(fit) == 1:
        which = f"of sm{fit[0]}"
    elif fit == [arch for arch in every if arch >= fit[0]]:
        which = f"from sm{fit[0]} on"
    elif fit == [arch for arch in every if fit[0] <= arch <= fit[-1]]:
        which = f"of sm{fit[0]} to sm{fit[-1]}"
    else:
        which = f"of {', '.join(f'sm{arch}' for arch in fit[:-1])} or sm{fit[-1]}"
    return f"a GPU {which} (e.g. {name})"


# ---- policy -----------------------------------------------------------------------------------------


def _listed(variable: str, names: Sequence[str]) -> str:
    return f"{variable}={','.join(names)}"


_VARIABLES: dict[str, Any] = {
    "backend": lambda name: f"backend={name!r}",
    "allow": lambda names: _listed("ATTNSEL_BACKENDS", names),
    "deny": lambda names: _listed("ATTNSEL_DISABLE", names),
    "adapt": lambda value: f"ATTNSEL_ADAPT={value}",
    "allow_known_bugs": lambda codes: _listed("ATTNSEL_ALLOW_KNOWN_BUGS", codes),
    "deterministic": lambda value: f"ATTNSEL_DETERMINISTIC={int(value)}",
    "preview": lambda value: f"ATTNSEL_PREVIEW={int(value)}",
    "memory_limit": lambda count: f"ATTNSEL_MEMORY_LIMIT={size(count).replace(' ', '')}",
}
"""By field of a Policy: the variable that sets it."""
