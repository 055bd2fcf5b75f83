"""TransformerEngine's configuration as it prints it under NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2.

One line per selection, "Running with config={…}": a dictionary of versions, the fields of its AttentionParams
and a few variables, in Python's spelling with class names, ``torch.bfloat16``, tensors and recipes as they
print themselves. (TransformerEngine 1.9 to 2.20, pytorch/attention/dot_product_attention/utils.py,
get_attention_backend; common/recipe/__init__.py for the recipes.) Nothing in it is evaluated but literals.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from attnsel.environment import COMPONENTS
from attnsel.environment.versions import Version
from attnsel.errors import short
from attnsel.params import AttentionParams
from attnsel.params.layout import LAYOUTS


class TeConfig(NamedTuple):
    """One configuration in attnsel's words.

    ``params``: fields of AttentionParams; ``gpu`` ("sm90") and ``versions`` of components, None where not
    installed: what Environment.describe takes. ``unread``: what it says beside these, "name = value".
    """

    params: dict[str, Any]
    gpu: str | None
    versions: dict[str, str | None]
    unread: tuple[str, ...]


_LONGEST = 256 << 10  # characters of one configuration
_LONGEST_LITERAL = 200
_START = re.compile(r"\{\s*'(?:transformer_engine_version|compute_capability|qkv_type|qkv_dtype)'\s*:")
_STEP = re.compile(r"'(?:\\.|[^'\\]){0,500}'|\"(?:\\.|[^\"\\]){0,500}\"|[\[{(\]}),]", re.DOTALL)
_ITEM = re.compile(r"\s*(['\"])([^'\"]{1,80})\1\s*:(.*)", re.DOTALL)
_SIZE = re.compile(r"torch\.Size\((\[[0-9, ]*\])\)")
_SCALAR = re.compile(r"tensor\((-?[0-9]+)(?:,.*)?\)", re.DOTALL)
_VERSION = re.compile(r"<Version\('([^']+)'\)>")  # packaging's, in releases before 2.0


def configs(text: str) -> Iterator[TeConfig]:
    """Every configuration in ``text``, which may be a whole log, in its order."""
    place = 0
    while (start := _START.search(text, place)) is not None:
        items, place = _items(text, start.start())
        if items is not None:
            yield _translated(items)


# ---- Python's spelling --------------------------------------------------------------------------------


def _items(text: str, start: int) -> tuple[dict[str, str] | None, int]:
    """The dictionary that begins at ``start``, values as they stand there; None where it does not end.
    And where to go on."""
    depth, begin, parts = 0, start + 1, []
    for step in _STEP.finditer(text, start, start + _LONGEST):
        mark = step[0]
        if mark in "[{(":
            depth += 1
        elif mark in "]})":
            depth -= 1
        if (mark == "," and depth == 1) or depth == 0:
            parts.append(text[begin : step.start()])
            begin = step.end()
        if depth == 0:
            return _named(parts), step.end()
    return None, min(start + _LONGEST, len(text))


def _named(parts: list[str]) -> dict[str, str]:
    items: dict[str, str] = {}
    name = None
    for part in parts:
        item = _ITEM.fullmatch(part)
        if item is not None:
            name = "".join(item[2].split())  # a log that was folded breaks names too
            items[name] = " ".join(item[3].split())
        elif name is not None and part.strip():
            items[name] += f",{part}"  # a recipe's fields stand between commas, in no bracket
    return items


def _value(text: str) -> Any:
    """A value as Python, or its text where it is no literal."""
    for pattern in (_SIZE, _SCALAR, _VERSION):
        found = pattern.fullmatch(text)
        if found is not None:
            text = repr(found[1]) if pattern is _VERSION else found[1]
    if len(text) <= _LONGEST_LITERAL:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return text
        return tuple(value) if isinstance(value, list) else value
    return text


# ---- TransformerEngine's names in attnsel's -----------------------------------------------------------

_COMPONENTS = {
    "transformer_engine_version": "transformer_engine",
    "cudnn_version": "cudnn",
    "cuda_version": "cuda",
    "flash_attn_version": "flash_attn",
    "flash_attn_3_version": "flash_attn_3",
    "flash_attn_4_version": "flash_attn_4",
}
_ALSO = {"qkv_dtype": "dtype"}
_USUAL: dict[str, Any] = {
    "qkv_type": "<class 'torch.Tensor'>",
    "num_splits": 1,
    "fp8_output": False,
    "checkpoint_core_attention": False,
    "has_score_mod": False,
    "has_score_mod_bprop": False,
    "NVTE_FP8_DPA_BWD": 1,
    "NVTE_DPA_FP8CS_O_in_F16": 1,
    "NVTE_DPA_FP8_RECIPE": "",
    "NVTE_UnfusedDPA_Emulate_FP8": 0,
}
"""What attnsel has no field for, and the value that changes nothing."""


def _translated(items: Mapping[str, str]) -> TeConfig:
    values = {name: _value(text) for name, text in items.items()}
    params: dict[str, Any] = {}
    versions: dict[str, str | None] = {}
    unread: list[str] = []
    gpu = values.pop("compute_capability", None)
    meta, cache = values.pop("fp8_meta", None), values.pop("inference_params", None)
    ranks = values.pop("context_parallel", None)
    for name, value in values.items():
        if _COMPONENTS.get(name) in COMPONENTS:
            _read_version(name, value, versions, unread)
        elif (field := _ALSO.get(name, name)) in AttentionParams.model_fields:
            if value is not None:
                params[field] = value
        elif name not in _COMPONENTS and (name not in _USUAL or _USUAL[name] != value):
            unread.append(_said(name, value))
    _fit(params)
    if params.get("fp8"):
        _read_recipe(meta, params, unread)
    if cache is not None:
        layout = str(params.get("qkv_layout", ""))
        params["kv_cache"] = "paged" if layout.startswith("paged_kv_") else "contiguous"
    if ranks is True and "cp_size" not in params:  # printed since 2.15
        params["cp_size"] = 2
        unread.append("context_parallel = True without a cp_size, which is taken as 2")
    if gpu is not None and not isinstance(gpu, str):
        unread.append(_said("compute_capability", gpu))
        gpu = None
    return TeConfig(params, gpu, versions, tuple(unread))


def _said(name: str, value: Any) -> str:
    return f"{short(name, str)} = {short(value, limit=60)}"


def _read_version(name: str, value: Any, versions: dict[str, str | None], unread: list[str]) -> None:
    component = _COMPONENTS[name]
    if value in (None, "not installed", "0"):
        versions[component] = None
        return
    try:
        versions[component] = str(Version.parse(value))
    except (ValueError, TypeError):
        unread.append(_said(name, value))


def _fit(params: dict[str, Any]) -> None:
    """Leave out what TransformerEngine prints whether or not it says something."""
    if "causal" in str(params.get("attn_mask_type", "")):
        params.pop("bottom_right_diagonal", None)  # the mask type decides it
    if params.get("core_attention_bias_type", "no_bias") in ("no_bias", "alibi"):
        params.pop("core_attention_bias_shape", None)
        params.pop("core_attention_bias_requires_grad", None)
    layout = LAYOUTS.get(str(params.get("qkv_layout")))
    if layout is not None and layout.q_format != "thd":
        params.pop("pad_between_seqs", None)


def _read_recipe(meta: Any, params: dict[str, Any], unread: list[str]) -> None:
    """The recipe of an ``fp8_meta``, whose fields print themselves without brackets around them."""
    text = meta if isinstance(meta, str) else str(meta)
    written = re.search(r"['\"]\s*recipe\s*['\"]\s*:(.*)", text, re.DOTALL)
    if written is None:
        return
    facts = dict(re.findall(r"\b(recipe_type|format|fp8_dpa|fp8_mha|amax_history_len)=(\w+)", written[1]))
    kind = facts.get("recipe_type")
    if kind is None:  # before 2.4; of the two recipes of that time DelayedScaling prints a history
        kind = "DelayedScaling" if "amax_history_len" in facts else "MXFP8BlockScaling"
    if kind not in _KINDS:
        unread.append(_said("recipe_type", kind))
        return
    recipe: dict[str, Any] = {"kind": _KINDS[kind]}
    for name in ("fp8_dpa", "fp8_mha"):
        recipe[name] = facts.get(name) == "True"
    if "fp8_dpa" not in facts:
        unread.append(f"the {kind} recipe does not print fp8_dpa, which is taken as False")
    if facts.get("format") in ("HYBRID", "E4M3"):
        recipe["fp8_format"] = facts["format"]
    params["fp8_meta"] = {"recipe": recipe}


_KINDS = {
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "current",
    "MXFP8BlockScaling": "mxfp8",
    "Float8BlockScaling": "block",
}
