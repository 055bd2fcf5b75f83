"""Transforms of PyTorch's around a call: right, or an error; and nothing learnt about plain calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import transforms
from attnsel import attention, clear_cache
from attnsel.runtime.refusals import evidence


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    clear_cache()
    yield
    clear_cache()


def qkv(*lead: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(*lead, 2, 5, 2, 8, dtype=torch.float64) for _ in "qkv"]


@pytest.mark.parametrize("name", transforms.TRANSFORMS)
def test_every_cell_of_the_table_holds(name: str) -> None:
    recorded = json.loads(transforms.RECORD.read_text(encoding="utf-8"))["outcomes"][name]
    assert {column: transforms.outcome(name, column) for column in transforms.COLUMNS} == recorded, (
        "python tests/proof/transforms.py, and update_docs.py"
    )


def test_a_hook_that_raises_is_the_callers_affair() -> None:
    def refuse(t: Tensor) -> Tensor:
        raise RuntimeError("not this one")

    q, k, v = (t.requires_grad_() for t in qkv())
    with (
        torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t),
        pytest.raises(RuntimeError, match="not this one"),
    ):
        attention(q, k, v, attn_mask_type="causal")
    assert evidence().refusals == ()


def test_a_mode_that_raises_is_the_callers_affair() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoAttention(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "attention" in str(func):
                raise RuntimeError("no attention here")
            return func(*args, **(kwargs or {}))

    with NoAttention(), pytest.raises(RuntimeError, match="no attention here"):
        attention(*qkv(), attn_mask_type="causal")
    assert evidence().refusals == ()
