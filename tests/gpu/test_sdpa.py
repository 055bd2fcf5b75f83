"""PyTorch's own kernels as attnsel calls them, against float64; and what the chooser does on this GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attention_cases import (
    CAUSAL,
    Case,
    assert_errs_little_more,
    build,
    carried_out,
    error,
    expected,
    onto,
)
from attnsel import (
    AttentionParams,
    DotProductAttention,
    Environment,
    Policy,
    select,
)
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.sdpa.guards import check_call
from attnsel.backends.sdpa.ops import resolve
from attnsel.backends.sdpa.plan import plan_mask
from attnsel.backends.sdpa.run import KERNELS
from reference import attention_reference

DTYPES = [
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.cuda_only("one 16-bit type shows it")),
]
PADDED = {"seqlens_q": "b", "seqlens_kv": "b"}
CASES = [
    Case("plain"),
    Case("mha", sizes={"g": 4}),
    Case("causal", CAUSAL, sizes={"s_kv": 21}),
    Case("causal bottom-right", {**CAUSAL, "bottom_right": True}),
    Case("window", {"window_left": 5, "window_right": 0}, sizes={"s_kv": 21}),
    Case("bias", {}, {"bias": "1 h s_q s_kv"}),
    Case("mask", {}, {"attn_mask": "b 1 s_q s_kv"}),
    Case("alibi", CAUSAL, {"alibi_slopes": "h"}),
    Case("padding", {}, PADDED),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["sdpa.flash", "sdpa.efficient", "sdpa.cudnn"])
def test_kernel_against_the_reference(
    name: str, case: Case, d: int, dtype: torch.dtype, device: torch.device, scale: int
) -> None:
    case = dataclasses.replace(
        case,
        spec={**case.spec, "return_max_logit": False},
        sizes={"d": d, "e": d, **case.sizes},
    )
    spec, inputs = build(case, dtype, scale=scale)
    inputs = onto(device, inputs)
    if inputs.bias is not None:
        inputs.bias.requires_grad_()
    why = refusal(name, spec, inputs)
    if why:
        pytest.skip(why)
    kernel = KERNELS[name]
    actual, dout, _ = carried_out(kernel.forward, kernel.backward, spec, inputs, dlse=False)
    wanted, plain = (expected(spec, inputs, dout, None, at) for at in (torch.float64, dtype))
    # The kernels give no max_logit, and a gradient of the bias where they have one.
    wanted, plain = ({n: t for n, t in side.items() if n in actual} for side in (wanted, plain))
    assert {"out", "lse", "dq", "dk", "dv"} <= actual.keys()
    assert_errs_little_more(actual, wanted, plain, dtype)


def refusal(name: str, spec: Spec, inputs: Inputs) -> str:
    """Why attnsel would not run this kernel for this call here; empty where it would."""
    b, h, s_q, d = inputs.q.shape
    bias = "alibi" if inputs.alibi_slopes is not None else "post_scale_bias"
    p = AttentionParams(
        dtype={torch.float16: "fp16", torch.bfloat16: "bf16"}[inputs.q.dtype],
        batch_size=b,
        num_heads=h,
        num_gqa_groups=inputs.k.shape[1],
        max_seqlen_q=s_q,
        max_seqlen_kv=inputs.k.shape[2],
        head_dim_qk=d,
        head_dim_v=d,
        attn_mask_type="no_mask" if inputs.attn_mask is None else "arbitrary",
        core_attention_bias_type="no_bias" if inputs.alibi_slopes is inputs.bias is None else bias,
        is_training=True,
    )
    chosen = select(p, Environment.detect(inputs.q.device), policy=Policy(backend=name))[name]
    if chosen.verdict == "refused":
        return "; ".join(f"{reason.code} {reason.message}" for reason in chosen.reasons)
    try:
        traits = resolve(name, inputs.q.device.type)
        check_call(traits, spec, inputs)
        plan_mask(traits, spec, inputs)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"attn_mask_type": "causal"},
    "window": {"attn_mask_type": "causal", "window_size": (9, 0)},
    "softcap": {"softcap": 5.0},
}


@pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS)
def test_the_chooser_chooses_and_what_it_chose_is_right(
    arguments: dict[str, Any], device: torch.device
) -> None:
    s, d = (512, 64) if device.type == "cuda" else (24, 8)
    gen = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, s, n, d, generator=gen).to(device, torch.float16).requires_grad_() for n in (4, 2, 2)
    )
    given = {"attn_mask_type": "no_mask", **arguments, "window_size": arguments.get("window_size")}
    module = DotProductAttention(4, d, 2, qkv_format="bshd", **given)
    out = module(q, k, v)
    out.float().sum().backward()
    spec = Spec(
        softmax_scale=d**-0.5,
        window_left=arguments.get("window_size", (-1,))[0],
        window_right=0 if "attn_mask_type" in arguments else -1,
        softcap=arguments.get("softcap", 0.0),
    )
    wanted = attention_reference(spec, Inputs(*[t.detach().transpose(1, 2) for t in (q, k, v)]))[0]
    assert error(out, wanted.transpose(1, 2).flatten(2)) < 1e-2, module.last_selection.report()
    assert module.last_selection.backend not in (None, "sdpa.math")
