"""``bert_padding`` and ``layers.rotary``: round trips, gradients, and rotation as complex numbers do it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnsel.flash_attn import FlashAttentionError
from attnsel.flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from attnsel.flash_attn.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)
from flash_reference import turned
from tables import each

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 0, 0, 0, 0]])


def test_unpad_and_pad_again() -> None:
    x = torch.randn(3, 5, 2, 4)
    rows, indices, cu_seqlens, longest, seqused = unpad_input(x, MASK)
    assert indices.tolist() == [0, 1, 2, 6, 7, 8, 9, 10]
    assert torch.equal(rows, x.flatten(0, 1)[indices])
    assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 3, 7, 8], torch.int32)
    assert longest == 4
    assert (seqused.tolist(), seqused.dtype) == ([3, 4, 1], torch.int32)
    for kind in (torch.int64, torch.int32):  # transformers pads the rows of a decoding step by int32
        assert torch.equal(pad_input(rows, indices.to(kind), 3, 5), x * MASK[..., None, None])


def test_unused_rows_count_in_memory_only() -> None:
    unused = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
    for kind in (torch.int64, torch.bool):
        rows, _, cu_seqlens, longest, used = unpad_input(torch.ones(3, 5, 4), MASK.to(kind), unused.to(kind))
        assert (len(rows), cu_seqlens.tolist()) == (10, [0, 4, 8, 10])
        assert (longest, used.tolist()) == (4, [3, 4, 1])


def test_concatenated_sequences() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 4)
    rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16]
    assert longest == 6
    assert torch.equal(rows, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]


def test_gradients_of_padding() -> None:
    wide = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    narrow = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    for kind in (torch.int64, torch.int32):
        indices = torch.tensor([4, 0, 3], dtype=kind)
        assert torch.equal(index_first_axis(wide, indices), wide[indices.long()])
        assert torch.autograd.gradcheck(index_first_axis, (wide, indices))
        assert torch.autograd.gradcheck(index_put_first_axis, (narrow, indices, 6))
        assert torch.autograd.gradcheck(index_first_axis_residual, (wide, indices))
    for call, field in (
        (lambda: index_first_axis(wide[0], indices), "input.shape"),
        (lambda: index_put_first_axis(narrow[0], indices, 6), "indices.shape"),
        (lambda: index_put_first_axis(narrow, indices[None], 6), "indices.shape"),
    ):
        with pytest.raises(FlashAttentionError, match=field):
            call()


def angles(rows: int, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, half, dtype=torch.float64) * 6
    return angle.cos(), angle.sin()


@each(
    "half, offsets, interleaved",
    [(2, 0, False), (4, 0, True), (4, 3, False), (2, [5, 0], True)],
)
def test_rotation(half: int, offsets: int | list[int], interleaved: bool) -> None:
    cos, sin = angles(12, half)
    x = torch.randn(2, 6, 3, 8, dtype=torch.float64, requires_grad=True)
    given = torch.tensor(offsets) if isinstance(offsets, list) else offsets
    first = offsets if isinstance(offsets, list) else [offsets] * 2
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=given)
    rows = zip(x, first, strict=True)
    wanted = torch.stack([turned(row, cos, sin, range(at, at + 6), interleaved) for row, at in rows])
    torch.testing.assert_close(out, wanted)
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, dout), torch.autograd.grad(wanted, x, dout))


def test_rotation_in_place_and_of_packed_sequences() -> None:
    cos, sin = angles(12, 4)
    x = torch.randn(9, 2, 8, dtype=torch.float64)
    where = {"cu_seqlens": torch.tensor([0, 4, 4, 9], dtype=torch.int32), "max_seqlen": 5}
    where["seqlen_offsets"] = torch.tensor([2, 0, 7])
    parts = turned(x[:4], cos, sin, range(2, 6), False), turned(x[4:], cos, sin, range(7, 12), False)
    torch.testing.assert_close(apply_rotary_emb(x, cos, sin, **where), torch.cat(parts))
    same = apply_rotary_emb(x, cos, sin, inplace=True, **where)
    assert same.data_ptr() == x.data_ptr()
    torch.testing.assert_close(x, torch.cat(parts))


def test_places_past_the_table_are_left_alone_and_16_bits_rounded_once() -> None:
    cos, sin = (t.half() for t in angles(4, 8))
    x = torch.randn(1, 6, 2, 16).half()
    places = torch.tensor([0])
    out = apply_rotary_emb(x, cos, sin, seqlen_offsets=places)
    exact = apply_rotary_emb(x.double(), cos.double(), sin.double(), seqlen_offsets=places)
    assert torch.equal(out, exact.half())
    assert torch.equal(out[:, 4:], x[:, 4:])
    assert not (out[:, 1:4] == x[:, 1:4]).all(-1).any()


@each("interleaved, scale_base", [(False, 512.0), (True, None)])
def test_rotary_embedding_of_packed_projections(interleaved: bool, scale_base: float | None) -> None:
    module = RotaryEmbedding(8, interleaved=interleaved, scale_base=scale_base)
    qkv = torch.randn(2, 6, 3, 2, 8)
    leaf = qkv.clone().requires_grad_()
    out = module(leaf * 1, seqlen_offset=2)
    place = torch.arange(8, dtype=torch.float64)
    angle = torch.outer(place, 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8))
    scale = torch.ones(8, 4, dtype=torch.float64)
    if scale_base:
        base = (torch.arange(0, 8, 2, dtype=torch.float64) + 0.4 * 8) / (1.4 * 8)
        scale = base ** ((place - 4) / scale_base)[:, None]
    wanted = qkv.double()
    for part, power in ((0, scale), (1, 1 / scale)):
        pair = angle.cos() * power, angle.sin() * power
        for n in range(2):
            wanted[n, :, part] = turned(wanted[n, :, part], *pair, range(2, 8), interleaved)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[:, :, 2], qkv[:, :, 2])
    out.square().sum().backward()
    if not scale_base:  # a rotation keeps lengths
        torch.testing.assert_close(leaf.grad, 2 * qkv, rtol=1e-5, atol=1e-5)
    q, kv = module(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=2)
    torch.testing.assert_close(torch.cat([q[:, :, None], kv], 2), out.detach())
    module = RotaryEmbedding(8, interleaved=interleaved, scale_base=scale_base)
    same = module(qkv.clone(), seqlen_offset=torch.tensor([2, 2]), max_seqlen=8)
    torch.testing.assert_close(same, out.detach())


def test_grouped_heads_and_tensor_offsets() -> None:
    cos, sin = angles(12, 4)
    x = torch.randn(2, 6, 4 + 2 * 2, 8, dtype=torch.float64)
    offsets = torch.tensor([0, 5])
    wanted = torch.cat([apply_rotary_emb(x[:, :, :6], cos, sin, seqlen_offsets=offsets), x[:, :, 6:]], 2)
    out = apply_rotary_emb_qkv_(x.clone(), cos, sin, seqlen_offsets=offsets, num_heads_q=4)
    torch.testing.assert_close(out, wanted)
    kv = x.unflatten(2, (2, 4)).clone()
    k = apply_rotary_emb(kv[:, :, 0], cos, sin, True, seqlen_offsets=offsets)
    torch.testing.assert_close(apply_rotary_emb_kv_(kv.clone(), cos, sin, True, offsets)[:, :, 0], k)
    k = apply_rotary_emb(kv[:, :, 0], cos, sin)  # halves, not pairs, where nothing is said
    torch.testing.assert_close(apply_rotary_emb_kv_(kv, cos, sin)[:, :, 0], k)
    for num_heads_q in (None, 3, 8, 10):  # nothing to split by, an odd rest, no rest
        with pytest.raises(FlashAttentionError, match="num_heads_q"):
            apply_rotary_emb_qkv_(x, cos, sin, num_heads_q=num_heads_q)
    for call, field in ((apply_rotary_emb_qkv_, "qkv.shape"), (apply_rotary_emb_kv_, "kv.shape")):
        with pytest.raises(FlashAttentionError, match=field):
            call(x[0], cos, sin)


def test_a_module_cast_to_sixteen_bits_keeps_its_angles() -> None:
    tables = []
    for module in (RotaryEmbedding(8), RotaryEmbedding(8).half()):
        module._update_cos_sin_cache(1000, dtype=torch.float16, device=torch.device("cpu"))
        tables.append(module._cos_cached)
    assert torch.equal(*tables)
