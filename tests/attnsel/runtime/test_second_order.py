"""Derivatives of gradients: right, or an error that says what to use instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from attnsel import DotProductAttention, attention, override

THD = torch.tensor([0, 2, 5], dtype=torch.int32)
LENGTHS = torch.tensor([0, 4, 7], dtype=torch.int32)
CU = ("cu_seqlens_q", "cu_seqlens_kv")
PACKED = {"qkv_format": "thd", "attn_mask_type": "padding_causal", **dict.fromkeys(CU, THD)}
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {  # arguments; b, s_q, s_kv, h, g, d, e
    "causal": ({}, (1, 5, 5, 2, 2, 3, 3)),
    "cross, head dims": ({"attn_mask_type": "no_mask"}, (2, 4, 6, 2, 2, 3, 4)),
    "grouped window": ({"window_size": (2, 0)}, (1, 6, 6, 4, 2, 3, 3)),
    "softcap": ({"softcap": 3.0}, (1, 5, 5, 2, 2, 3, 3)),
    "rows that see nothing": ({"attn_mask_type": "causal_bottom_right"}, (1, 6, 4, 2, 2, 3, 3)),
    "alibi": ({"core_attention_bias_type": "alibi"}, (1, 5, 5, 2, 2, 3, 3)),
    "off-by-one": ({"softmax_type": "off-by-one"}, (1, 5, 5, 2, 2, 3, 3)),
    "packed": (PACKED, (0, 5, 5, 2, 2, 3, 3)),
    "padded": ({"attn_mask_type": "padding", **dict.fromkeys(CU, LENGTHS)}, (2, 4, 4, 2, 2, 3, 3)),
}


def make(sizes: tuple[int, ...]) -> list[Any]:
    b, s_q, s_kv, h, g, d, e = sizes
    torch.manual_seed(1)
    shapes = ((s_q, h, d), (s_kv, g, d), (s_kv, g, e))
    return [torch.randn((b, *s) if b else s, dtype=torch.float64, requires_grad=True) for s in shapes]


MATHS = ["cross, head dims", "grouped window", "rows that see nothing", "padded"]


@pytest.mark.parametrize(
    ("backend", "name"), [*(("tiled", name) for name in CASES), *(("sdpa.math", name) for name in MATHS)]
)
def test_second_derivatives_are_right(backend: str, name: str) -> None:
    """sdpa.math's are PyTorch's own autograd. What others say: test_transforms.py."""
    arguments, sizes = CASES[name]
    arguments = {"attn_mask_type": "causal", **arguments, "backend": backend}
    assert torch.autograd.gradgradcheck(
        lambda *tensors: attention(*tensors, **arguments), make(sizes), fast_mode=backend == "sdpa.math"
    )


def test_the_gradient_of_v_depends_on_that_of_the_output_alone() -> None:
    q, k, v = make((1, 5, 5, 2, 2, 3, 3))
    q, k = q.detach(), k.detach()
    assert torch.autograd.gradgradcheck(lambda v: attention(q, k, v, backend="tiled"), v)


def test_second_derivatives_of_a_bias_and_of_sinks_under_dropout() -> None:
    """Which drops the same entries again."""
    module = DotProductAttention(
        2, 3, attention_dropout=0.3, softmax_type="learnable", qkv_format="bshd", backend="tiled"
    ).double()
    q, k, v = make((1, 4, 4, 2, 2, 3, 3))
    bias = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)

    def call(q: Any, k: Any, v: Any, bias: Any, sink: Any) -> Any:
        torch.manual_seed(7)
        return torch.func.functional_call(
            module,
            {"softmax_offset": sink.view_as(module.softmax_offset)},
            (q, k, v),
            {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias},
        )

    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(call, (q, k, v, bias, sink))


def test_a_memory_limit_holds_for_second_derivatives() -> None:
    q, k, v = make((1, 64, 64, 2, 2, 3, 3))
    with override(memory_limit="200KiB"):
        out = attention(q, k, v, attn_mask_type="causal", backend="tiled")
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(
            NotImplementedError, match=r"score matrices, 1.1 MiB here, above the memory_limit"
        ):
            torch.autograd.grad(grad.sum(), q)


def over_ranks(rank: int, size: int) -> list[str]:
    said = []
    for comm in ("p2p", "all_gather", "a2a"):
        q, k, v = (t[:, :4].detach().requires_grad_() for t in make((1, 8, 8, 2, 2, 4, 4)))
        module = DotProductAttention(
            2,
            4,
            qkv_format="bshd",
            backend="tiled",
            cp_group=torch.distributed.group.WORLD,
            cp_comm_type=comm,
        )
        (grad,) = torch.autograd.grad(module(q, k, v).sum(), q, create_graph=True)
        try:
            torch.autograd.grad(grad.sum(), k)
        except NotImplementedError as error:
            said.append(str(error))
    return said


def test_over_ranks_the_error_says_what_to_use(tmp_path: Path) -> None:
    for said in ranks.run(over_ranks, 2, tmp_path):
        assert len(said) == 3, said
        assert all("without a cp_group" in text for text in said)
