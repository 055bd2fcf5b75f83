"""Any call of the contract, drawn at random, on the interpreter: shapes, strides, tiles, types, features."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_cases import STRIDES, Case, build, calls, error, expected, upstream

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton import Block, Tiles, backward, forward

torch.set_num_threads(1)

LAYOUTS = {
    "as made": STRIDES["as made"],
    "rows before heads": lambda t: t.transpose(-3, -2).contiguous().transpose(-3, -2),
    "at an odd offset": STRIDES["at an odd offset"],
    "rows with a gap": lambda t: torch.cat([t, t], dim=-1)[..., : t.shape[-1]],
}
sizes = st.sampled_from([16, 32, 64])
tiles = st.builds(Tiles, *[st.builds(Block, m=sizes, n=sizes, split=st.booleans())] * 4)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    case=calls(),
    layouts=st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3),
    tiles=tiles,
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_any_call_errs_little_more_than_plain_pytorch(
    case: Case, layouts: tuple[str, ...], tiles: Tiles, dtype: torch.dtype
) -> None:
    spec, inputs = build(case, dtype)
    inputs = inputs._replace(
        **{name: LAYOUTS[kind](getattr(inputs, name)) for name, kind in zip("qkv", layouts, strict=True)}
    )
    if inputs.bias is not None:
        inputs = inputs._replace(bias=inputs.bias.detach().requires_grad_())
    result = forward(spec, inputs, tiles=tiles)
    dout, dlse = upstream(result)
    grads = backward(spec, inputs, result, dout, dlse, tiles=tiles)
    actual = {"out": result.out, "lse": result.lse, "max_logit": result.max_logit}
    actual |= {f"d{name}": grad for name, grad in grads._asdict().items() if grad is not None}
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, dtype))
    assert actual.keys() == wanted.keys()
    for name, exact in wanted.items():
        got = actual[name]
        assert got is not None
        assert got.shape == exact.shape
        # Gradients may cancel: what they are the difference of is of order 1.
        finite = exact[exact.isfinite()].abs()
        unit = torch.finfo(dtype).eps * max(1.0, finite.max().item() if finite.numel() else 0.0)
        factor = 3 if name.startswith("d") else 2
        assert error(got, exact) <= factor * error(plain[name], exact) + 8 * unit, name
