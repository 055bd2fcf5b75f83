"""A change in words, and as lines of Python to paste. What is installed is in ``install``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from attnsel.environment import COMPONENT_NAMES, COMPONENTS
from attnsel.environment.gpus import FAMILIAR
from attnsel.environment.versions import Version
from attnsel.params import AttentionParams
from attnsel.params.layout import FORMATS
from attnsel.params.recipes import RECIPE_NAMES
from attnsel.selection.adaptations.transforms import type_without_mask
from attnsel.selection.unlock.change import LENGTHS, RECIPE_FIELDS, WIDTHS, Scenario, grouped
from attnsel.verdicts.requirements import size


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
    return [
        _render_part(question, parts, changes[parts[0]], applicability, changes)
        for parts in grouped(question, changes)
    ]


def _render_part(
    question: Scenario,
    parts: tuple[str, ...],
    value: Any,
    applicability: Applicability,
    changes: Mapping[str, Any],
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


def _setting(p: AttentionParams, field: str, value: Any) -> Instruction:
    old = getattr(p, field)
    paste = f"params = params.replace({field}={value!r})"
    if field == "dtype":
        caveat = _CAVEATS.get(value)
        paste = f"q, k, v = (x.to(torch.{_TORCH_NAMES[value]}) for x in (q, k, v))"
        return Instruction(f"cast to {value}" + (f" ({caveat})" if caveat else ""), paste)
    note = ""
    if field == "attn_mask_type":
        if value == type_without_mask(p):
            return Instruction("drop attention_mask: it hides nothing", "attention_mask=None")
        note = "with every length full" if "padding" in value and not p.padding else "the same pairs"
    elif field == "bottom_right_diagonal":
        note = "the same for equal lengths"
    elif field == "core_attention_bias_type":
        note = "the bias times softmax_scale"
    elif field == "core_attention_bias_shape":
        note = "the same bias, expanded"
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
    every = sorted({gpu.arch for gpu in FAMILIAR})
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
