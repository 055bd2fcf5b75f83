"""F.scaled_dot_product_attention as attnsel's, in a process that then has PyTorch's again."""

from __future__ import annotations

import multiprocessing.spawn
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attnsel import scaled_dot_product_attention
from attnsel.f_sdpa import function, shim

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture
def _installed() -> Iterator[None]:
    assert shim.install()
    yield
    shim.uninstall()
    assert F.scaled_dot_product_attention is ORIGINAL


@pytest.fixture
def calls(monkeypatch) -> list[Any]:
    asked: list[Any] = []
    real = function.attend
    monkeypatch.setattr(function, "attend", lambda *given: asked.append(given[0]) or real(*given))
    return asked


def test_it_undoes_itself(monkeypatch):
    preparation = multiprocessing.spawn.get_preparation_data
    assert shim.install()
    assert not shim.install()
    assert F.scaled_dot_product_attention is scaled_dot_product_attention
    assert shim.uninstall()
    assert not shim.uninstall()
    assert F.scaled_dot_product_attention is ORIGINAL
    assert multiprocessing.spawn.get_preparation_data is preparation
    shim.install()
    monkeypatch.setattr(F, "scaled_dot_product_attention", len)  # what other code put there since stays
    assert shim.uninstall()
    assert F.scaled_dot_product_attention is len
    monkeypatch.undo()
    F.scaled_dot_product_attention = ORIGINAL


@pytest.mark.usefixtures("_installed")
def test_what_calls_it_and_what_has_a_protocol_of_its_own(calls):
    from torch.nn.attention.bias import (
        causal_upper_left,  # loads Dynamo: a second that collecting need not take
    )

    q = torch.randn(2, 2, 4, 8)
    ragged = torch.nested.as_nested_tensor([q[0], q[1]], layout=torch.jagged)
    assert F.scaled_dot_product_attention(ragged, ragged, ragged).is_nested
    found = F.scaled_dot_product_attention(q, q, q, causal_upper_left(4, 4))
    torch.testing.assert_close(found, ORIGINAL(q, q, q, is_causal=True))
    with pytest.raises(ValueError, match="CausalBias"):  # PyTorch's own words
        F.scaled_dot_product_attention(q, q, q, causal_upper_left(4, 4), is_causal=True)
    assert calls[-1].attn_mask_type == "causal"
    core = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)
    asked = len(calls)
    core(x, x, x, need_weights=False)
    assert len(calls) == asked + 1

    @torch.jit.script
    def program(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    torch.testing.assert_close(program(q), ORIGINAL(q, q, q, is_causal=True))
