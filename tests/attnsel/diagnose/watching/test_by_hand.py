"""Attention written by hand is found, whatever form it has, and nothing else is taken for it."""

from __future__ import annotations

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


def read_wrongly(name):
    """What is read of a case otherwise than it is."""
    case, wrong = POSITIVE[name], []
    found = found_in(case.run)
    if not found:
        wrong.append(f"{name} is not found")
    for call in found:
        p = call.params
        if p is None:
            wrong.append(f"{name}: {call.unread}")
            continue
        told = {field: getattr(p, field) for field in case.fields if field != "hides_nothing"}
        heads = (p.max_seqlen_q, p.max_seqlen_kv, p.head_dim_qk, p.head_dim_v)
        told |= {"shape": (p.batch_size, p.num_heads, *heads), "mask": p.attn_mask_type}
        told["hides_nothing"] = p.tensors.mask_hides_nothing
        wanted = {"hides_nothing": False, **case.fields, "shape": case.shape, "mask": case.mask}
        wrong += [f"{name}: {told} is not {wanted}"] * (told != wanted)
        scale = case.shape[4] ** -0.5 if case.scale == -1.0 else case.scale
        if call.scale != (scale if None in (scale, call.scale) else pytest.approx(scale, rel=1e-5)):
            wrong.append(f"{name}: scale {call.scale} is not {scale}")
    return wrong


def test_attention_is_found():
    assert not [wrong for name in POSITIVE for wrong in read_wrongly(name)]


def test_what_is_no_attention_is_not_found():
    assert not [name for name in NEGATIVE if found_in(NEGATIVE[name])]
