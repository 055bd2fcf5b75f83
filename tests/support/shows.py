"""What a test of tests/gpu shows if it passes: features by the words of rules/takes.py.

A test says whose kernel it runs by a marker, ``shows("triton")``, with the words that its name stands for and
in ``also`` what its call has besides; the rest is read from its parameters: ``case``, ``spec``, ``dtype``,
``d`` and ``e``. Records of a run keep the answer for each test (benchmarks/proven.py reads them).
"""

from __future__ import annotations

from typing import Any

import pytest

from attention_cases import Case

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def shown_by(item: pytest.Item) -> dict[str, Any] | None:
    """``candidate``, the ``features`` that would be at fault if the test failed, and those it has ``also``.

    No features: a failure would be held against every call. None: it is about no kernel that calls reach.
    """
    marker = item.get_closest_marker("shows")
    if marker is None:
        return None
    candidate, *named = marker.args
    given: dict[str, Any] = getattr(item, "callspec").params if hasattr(item, "callspec") else {}  # noqa: B009
    if candidate is None:
        return None
    words, also = set(named), set(marker.kwargs.get("also", ()))
    case = given.get("case", Case("", given["spec"]) if "spec" in given else None)
    if case is not None:
        words |= words_of(case)
        also |= {"gqa"} if case.sizes.get("g", 2) != case.sizes.get("h", 4) else set()
    dims = [given[name] for name in ("d", "e") if name in given]
    if dims:
        words.add(f"head_dim {max(dims)}")
    if "dtype" in given:
        words.add(DTYPES[str(given["dtype"]).removeprefix("torch.")])
    elif (words or case is not None) and words.isdisjoint(DTYPES.values()):
        words.add("fp16")
    return {"candidate": candidate, "features": sorted(words), "also": sorted(also - words)}


def words_of(case: Case) -> set[str]:
    """What a case asks for beyond a plain call."""
    spec, tensors, sizes = case.spec, case.tensors, case.sizes
    left, right = spec.get("window_left", -1), spec.get("window_right", -1)
    alibi = "alibi_slopes" in tensors or case.name.startswith("alibi")
    asked = {
        "thd": spec.get("packed", False),
        "gaps": "cu_seqlens_padded" in tensors,
        "padding": not {"seqlens_q", "seqlens_kv"}.isdisjoint(tensors),
        "causal": right == 0,
        "window": left >= 0 or right > 0,
        "mask": "attn_mask" in tensors,
        "bias": "bias" in tensors,
        "bias_grad": "bias" in tensors,
        "alibi": alibi,
        "softcap": "softcap" in spec,
        "sinks": "softmax_type" in spec,
        "dropout": "dropout_p" in spec,
        "offsets": "q_offset" in spec or "kv_offset" in spec,
        "head_dim_v": sizes.get("d", 8) != sizes.get("e", 8),
    }
    found = {word for word, has in asked.items() if has}
    if found & {"causal", "window", "alibi"}:
        found.add("bottom_right" if spec.get("bottom_right") else "top_left")
    return found
