"""What is said of F.sdpa where torch itself can be asked: an error, and what is set in this process.

Calls, switches, releases and devices: answers.txt.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnsel import AttentionParams, Environment
from attnsel.dispatchers import dispatched_by
from attnsel.dispatchers.torch import held
from attnsel.params import Tensors
from tables import each

CPU = Environment.describe("cpu", torch="2.13.0")


@each("rank", [3, 4])
def test_groups_without_the_flag_raise_what_torch_raises(rank: int) -> None:
    q, k = (torch.zeros(*(1, heads, 8, 8)[4 - rank :]) for heads in (16, 4))
    with pytest.raises(RuntimeError) as raised:
        torch.nn.functional.scaled_dot_product_attention(q, k, k)
    p = AttentionParams(num_gqa_groups=4, batch_size=1, tensors=Tensors(rank=rank))
    dispatch = dispatched_by("torch", p, CPU, {"enable_gqa": "false"})
    assert dispatch.chosen is None
    assert re.search(r"ize of tensor a .*", str(raised.value))[0] in dispatch.error


def test_what_this_process_has_set_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEPRIORITIZED", "PREFERRED"):
        monkeypatch.delenv(f"TORCH_CUDNN_SDPA_{name}", raising=False)
    here = Environment.detect("cpu")
    before = held(here)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        found = held(here)
        assert "sdpa_kernel" not in held(CPU)  # another machine
    assert found["sdpa_kernel"] == "math,mem_efficient"
    assert found["set_priority"] == "true"
    assert found["enable_flash_sdp"] == found["enable_cudnn_sdp"] == "false"
    assert held(here) == before
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    monkeypatch.setenv("TORCH_CUDNN_SDPA_PREFERRED", "maybe")  # PyTorch ignores it, with a warning
    assert held(here) == {**before, "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
