"""What a plug-in's maker tests: that it is chosen, that its rules refuse, and that its numbers are right.

``pytest examples/plugin``, where attnsel, torch and this package are installed.
"""

import pytest
import torch
from sample_attention.planning import RULES

from attnsel import AttentionParams, Environment, NoBackendError, attention, select

CPU = Environment.describe("cpu")


def test_it_is_first_where_it_says_it_is_proven():
    assert select(AttentionParams(dtype="fp32"), CPU).backend == "sample.plain"


@pytest.mark.parametrize("rule", RULES.rules.values(), ids=lambda rule: rule.code)
def test_a_rule_refuses_its_example(rule):
    call = {"dtype": "fp32", **rule.fires_on}
    answer = select(AttentionParams(**{name: call[name] for name in call if name != "gpu"}), CPU)
    assert [reason.code for reason in answer["sample.plain"].reasons] == [rule.code]


def test_what_it_does_not_take_is_refused_and_not_left_out():
    with pytest.raises(NoBackendError, match="SAMPLE000"):
        attention(*torch.randn(3, 1, 8, 2, 16), softcap=30.0, backend="sample.plain")


@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_out_and_gradients_are_those_of_float64(mask):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, heads, d, requires_grad=True) for heads, d in ((4, 16), (2, 16), (2, 24)))
    out = attention(q, k, v, attn_mask_type=mask, backend="sample.plain")  # [b, s, h, e]

    wide = [t.detach().double().transpose(1, 2).requires_grad_() for t in (q, k, v)]  # [b, h, s, d]
    right = torch.nn.functional.scaled_dot_product_attention(
        *wide, is_causal=mask == "causal", enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)

    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    wanted = torch.autograd.grad(right, wide, dout.double())
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.transpose(1, 2), rtol=1e-4, atol=1e-5)
