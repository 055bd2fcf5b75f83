"""Attention written by hand is found, whatever form it has, and nothing else is taken for it."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from attnsel.diagnose.watching.by_hand_reader import ByHand  # noqa: E402
from attnsel.diagnose.watching.operators import composite  # noqa: E402
from by_hand_cases import NEGATIVE, POSITIVE  # noqa: E402


class Reading(TorchDispatchMode):
    def __init__(self, reader):
        super().__init__()
        self.reader = reader

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self.reader.read(func, args, kwargs, out)
        return out


def found_in(run):
    torch.manual_seed(0)
    found = []
    with Reading(ByHand(lambda call, one: found.append(one))):
        run()
    return found


@pytest.mark.parametrize("name", POSITIVE)
def test_attention_is_found(name):
    case = POSITIVE[name]
    found = found_in(case.run)
    assert found
    for call in found:
        p = call.params
        assert p is not None, call.unread
        shape = (p.batch_size, p.num_heads, p.max_seqlen_q, p.max_seqlen_kv, p.head_dim_qk, p.head_dim_v)
        assert shape == case.shape
        assert p.attn_mask_type == case.mask
        fields = dict(case.fields)
        assert p.tensors.mask_hides_nothing is fields.pop("hides_nothing", False)
        assert {field: getattr(p, field) for field in fields} == fields
        if case.scale is None:
            assert call.scale is None
        else:
            wanted = case.shape[4] ** -0.5 if case.scale == -1.0 else case.scale
            assert call.scale is not None
            assert math.isclose(call.scale, wanted, rel_tol=1e-5)


@pytest.mark.parametrize("name", NEGATIVE)
def test_what_is_no_attention_is_not_found(name):
    assert not found_in(NEGATIVE[name])
