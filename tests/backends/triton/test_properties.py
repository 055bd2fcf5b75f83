"""Any call of the contract, drawn at random, on the interpreter: shapes, strides, tiles, types, features."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_cases import STRIDES, Case, assert_errs_little_more, build, calls, carried_out, expected

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton.blocks import Block, Tiles
from attnsel.backends.triton.run import backward, forward

torch.set_num_threads(1)

LAYOUTS = {
    "as made": STRIDES["as made"],
    "rows before heads": lambda t: t.transpose(-3, -2).contiguous().transpose(-3, -2),
    "at an odd offset": STRIDES["at an odd offset"],
    "rows with a gap": lambda t: torch.cat([t, t], dim=-1)[..., : t.shape[-1]],
}
sizes = st.sampled_from([16, 32, 64])
blocks = st.builds(
    Block,
    m=sizes,
    n=sizes,
    warps=st.just(4),
    stages=st.just(1),
    masks=st.sampled_from(["all", "edges", "branch"]),
    always_right=st.booleans(),
    ahead=st.booleans(),
)
tiles = st.builds(Tiles, *[blocks] * len(Tiles._fields))


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    case=calls(),
    layouts=st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3),
    tiles=tiles,
    splits=st.sampled_from([None, 0, 1, 3]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_any_call_errs_little_more_than_plain_pytorch(
    case: Case, layouts: tuple[str, ...], tiles: Tiles, splits: int | None, dtype: torch.dtype
) -> None:
    spec, inputs = build(case, dtype)
    inputs = inputs._replace(
        **{name: LAYOUTS[kind](getattr(inputs, name)) for name, kind in zip("qkv", layouts, strict=True)}
    )
    actual, dout, dlse = carried_out(
        partial(forward, tiles=tiles, splits=splits), partial(backward, tiles=tiles), spec, inputs
    )
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, dtype))
    # Gradients may cancel: what they are the difference of is of order 1.
    assert_errs_little_more(actual, wanted, plain, dtype, ulps=8, scale=1.0)
