"""Bad input: one InvalidInput that names the argument, before anything runs or is remembered.

What is named: recorded_calls/bad_calls.txt. Values of any other kind: the fuzz target ``wrong_types``.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from attnsel import InvalidInput, attention, cache_info

torch.set_num_threads(1)


def cu(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


GOOD: dict[str, Any] = {name: torch.randn(2, 5, 4, 8) for name in "qkv"}
LENGTHS = {"cu_seqlens_q": cu(0, 3, 7), "cu_seqlens_kv": cu(0, 3, 7)}
PACKED = {name: torch.randn(7, 4, 8) for name in "qkv"} | {"qkv_format": "thd", "attn_mask_type": "padding"}
PACKED |= LENGTHS


def test_bad_input_leaves_nothing_behind() -> None:
    before = cache_info().size
    for call, field in (
        (GOOD | {"v": torch.randn(2, 5, 4, 8).half()}, "value_layer.dtype"),
        (GOOD | {"softcap": -1.0}, "softcap"),
        (PACKED | {"cu_seqlens_q": cu(0, 8, 7)}, "cu_seqlens_q"),
        (GOOD | {"attention_mask": torch.zeros(5, 5, dtype=torch.bool)}, "attention_mask"),
    ):
        for _ in range(2):  # the second time, nothing may have been remembered
            with pytest.raises(InvalidInput) as caught:
                attention(**call)
            error = pickle.loads(pickle.dumps(caught.value))
            assert error.field == field
            assert error.allowed
            assert str(error).startswith(f"{field} = ")
    assert cache_info().size == before
    assert torch.isfinite(attention(**GOOD)).all()


def test_contents_are_checked_on_every_call_of_a_known_signature() -> None:
    good = attention(**PACKED)
    with pytest.raises(InvalidInput, match="cu_seqlens_q"):
        attention(**PACKED | {"cu_seqlens_q": cu(0, 8, 7)})
    assert torch.equal(attention(**PACKED), good)


def test_lengths_on_a_cpu_are_read_at_every_call() -> None:
    lengths = cu(0, 3, 8)
    given = GOOD | {"attn_mask_type": "padding", "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    for ends in ((0, 3, 8), (0, 3, 8), (0, 5, 7), (0, 6, 7), (0, 5, 7)):
        lengths.copy_(cu(*ends))
        if ends != (0, 6, 7):  # of 5 rows
            torch.testing.assert_close(attention(**given), attention(**given, backend="tiled"))
        else:
            with pytest.raises(InvalidInput, match="cu_seqlens_q"):
                attention(**given)


def test_lengths_under_fake_tensors_are_not_read() -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {name: mode.from_tensor(t) for name, t in {**GOOD, **LENGTHS}.items()}
        assert attention(**fakes, attn_mask_type="padding").shape == (2, 5, 4, 8)
