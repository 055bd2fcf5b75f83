"""The stand-ins for flash-attn 2, 3 and 4: their half-private functions, caches, dropout, sinks, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from emulated_flash_cases import OF_FOUR, OF_THREE, OF_TWO, drawn, expected, functions, near
from emulated_flash_rest import EVERY
from flash_reference import cumulative, one_sequence

NEWER = [version for version in OF_TWO if version >= "2.7"]
CU = {"cu_seqlens_q": cumulative([3, 4]), "cu_seqlens_k": cumulative([5, 2])}
VARLEN = CU | {"max_seqlen_q": 4, "max_seqlen_k": 5}


def two(version: str, **more: Any) -> dict[str, Any]:
    """The arguments of flash-attn 2's half-private functions, as this version says them."""
    given: dict[str, Any] = {"dropout_p": 0.0, "softmax_scale": 0.25, "causal": True}
    bounds = {"window_size_left": -1, "window_size_right": -1}
    given |= bounds if version >= "2.7" else {"window_size": (-1, -1)}
    if version >= "2.4":
        given["alibi_slopes"] = None
    if version >= "2.6":
        given["softcap"] = 0.0
    return given | more


def rows(spare: int, heads: int = 4, d: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(spare, heads, d, generator=generator).half()


# ---- FlashAttention 2 ----


@pytest.mark.parametrize("version", [*OF_TWO[:1], *OF_TWO[-1:]])
def test_what_the_varlen_pair_returns_and_leaves(version: str) -> None:
    package, q, k, v = functions(2, version), rows(9), rows(10, 2), rows(10, 2, seed=1)
    block = {"block_table": None} if version >= "2.5.7" else {}
    made = package._flash_attn_varlen_forward(
        q, k, v, **VARLEN, **two(version, return_softmax=False), **block
    )
    assert len(made) == (4 if version >= "2.7" else 8)
    out, (lse, s_dmask, state) = made[0], made[-3:]
    given = drawn([3, 4], [5, 2])
    given.q, given.k, given.v, given.dout = q[:7], k[:7], v[:7], rows(7, seed=2)
    wanted = expected(given, {"causal": True, "softmax_scale": 0.25})
    near(out[:7], wanted["out"])
    assert out[7:].isnan().all()
    if version >= "2.6":
        assert lse.shape == (4, 9)
        assert lse[:, 7:].isnan().all()
        of_rows = lse[:, :7]
    else:
        assert lse.shape == (2, 4, 4)
        assert lse[0, :, 3:].isnan().all()
        of_rows = torch.cat([lse[0, :, :3], lse[1]], 1)
    torch.testing.assert_close(of_rows.double(), wanted["lse"], rtol=1e-5, atol=1e-5)
    assert s_dmask is None if version < "2.7" else s_dmask.numel() == 0
    assert state.dtype == torch.int64
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    dout = torch.cat([given.dout, rows(2)])
    how = two(version) | ({"deterministic": False} if version >= "2.4.1" else {})
    back = package._flash_attn_varlen_backward(dout, q, k, v, out, lse, dq, dk, dv, **VARLEN, **how)
    assert isinstance(back, Tensor) if version >= "2.7" else len(back) == 4
    for name, made_here in (("dq", dq), ("dk", dk), ("dv", dv)):
        near(made_here[:7], wanted[name])
        assert made_here[7:].isnan().all()


@pytest.mark.parametrize("version", [*OF_TWO[:1], *OF_TWO[-1:]])
def test_dropout_is_replayed_from_its_state(version: str) -> None:
    package = functions(2, version)
    lengths = [20, 20], [30, 30]
    given = drawn(*lengths)
    q, k, v, dout = (t.unflatten(0, (2, -1)) for t in (given.q, given.k, given.v, given.dout))
    how = two(version, dropout_p=0.3, softmax_scale=16**-0.5, causal=False)
    made = package._flash_attn_forward(q, k, v, **how, return_softmax=True)
    out, (lse, s_dmask, state) = made[0], made[-3:]
    assert s_dmask.shape == (2, 4, 128, 128)
    assert s_dmask[:, :, 20:].isnan().all()
    assert s_dmask[..., 30:].isnan().all()
    keep = (s_dmask[:, :, :20, :30] > 0).double()
    assert 0.6 < keep.mean() < 0.8
    wanted = expected(given, {"dropout_p": 0.3}, keep)
    near(out.flatten(0, 1), wanted["out"])
    near(lse.transpose(0, 1).flatten(1), wanted["lse"])
    how |= {"deterministic": False} if version >= "2.4.1" else {}
    first, second = [torch.empty_like(t) for t in (q, k, v)], [torch.empty_like(t) for t in (q, k, v)]
    package._flash_attn_backward(dout, q, k, v, out, lse, *first, **how, rng_state=state)
    for name, grad in zip(("dq", "dk", "dv"), first, strict=True):
        near(grad.flatten(0, 1), wanted[name])
    package._flash_attn_backward(dout, q, k, v, out, lse, *second, **how, rng_state=state + 1)
    assert not torch.equal(first[0], second[0])
    with pytest.raises(RuntimeError, match="rng_state"):
        package._flash_attn_backward(dout, q, k, v, out, lse, *first, **how)


# ---- caches, of 2 and 3 ----

CACHES = [(2, "2.8.3"), (3, "3.0.0")]


@pytest.mark.parametrize(("generation", "version"), CACHES)
@pytest.mark.parametrize("interleaved", [True, False])
def test_new_keys_are_rotated_and_written_into_the_cache(
    generation: int, version: str, interleaved: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).half()

    q, k_new, v_new = random(2, 3, 4, 16), random(2, 3, 2, 16), random(2, 3, 2, 16)
    k_cache, v_cache = random(4, 12, 2, 16), random(4, 12, 2, 16)
    before = k_cache.clone()
    angle = torch.rand(12, 8, generator=generator).double()
    lengths, index = torch.tensor([5, 8], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    out = functions(generation, version).flash_attn_with_kvcache(
        q, k_cache, v_cache, k_new, v_new, rotary_cos=angle.cos().half(), rotary_sin=angle.sin().half(),
        cache_seqlens=lengths, cache_batch_idx=index, causal=True, rotary_interleaved=interleaved,
    )  # fmt: skip

    def turned(x: Tensor, at: int) -> Tensor:
        z = x.double()
        parts = (z[..., 0::2], z[..., 1::2]) if interleaved else z.chunk(2, -1)
        complexes = torch.complex(*parts) * torch.polar(torch.ones(()).double(), angle[at : at + 3])[:, None]
        pair = complexes.real, complexes.imag
        return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

    for n, (entry, length) in enumerate(((2, 5), (0, 8))):
        keys = torch.cat([before[entry, :length].double(), turned(k_new[n], length)])
        values = v_cache[entry, : length + 3].double()
        near(out[n], one_sequence(turned(q[n], length), keys, values, causal=True)[0])
        near(k_cache[entry, : length + 3], keys)
        assert torch.equal(v_cache[entry, length : length + 3], v_new[n])
    assert torch.equal(k_cache[[1, 3]], before[[1, 3]])


@pytest.mark.parametrize(("generation", "version"), CACHES)
def test_paged_and_left_padded_caches(generation: int, version: str) -> None:
    package, q = functions(generation, version), torch.randn(2, 1, 4, 16).half()
    pool, lengths = torch.randn(4, 256, 2, 16).half(), torch.tensor([300, 5], dtype=torch.int32)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    if (generation, version) not in ((2, "2.3.6"), (2, "2.4.2")):
        name = "block_table" if generation == 2 else "page_table"
        out = package.flash_attn_with_kvcache(q, pool, pool, cache_seqlens=lengths, **{name: table})
        keys = torch.cat([pool[2], pool[0, :44]]).double()
        near(out[0], one_sequence(q[0].double(), keys, keys)[0])
    if generation == 3 or version >= "2.6.1":
        pads = torch.tensor([3, 2], dtype=torch.int32)
        lengths = torch.tensor([9, 5], dtype=torch.int32)
        out, lse, *_ = package.flash_attn_with_kvcache(
            q, pool[:2], pool[:2], cache_seqlens=lengths, cache_leftpad=pads, return_softmax_lse=True
        )
        keys = pool[0, 3:9].double()
        wanted, level = one_sequence(q[0].double(), keys, keys)
        near(out[0], wanted)
        near(lse[0], level)


# ---- FlashAttention 3 ----


@pytest.mark.parametrize("version", OF_THREE[-1:])
def test_used_lengths_and_chunks_of_three(version: str) -> None:
    package, early = functions(3, version), version == "3.0.0b1+early"
    q, k = torch.randn(2, 6, 4, 16).half(), torch.randn(2, 8, 2, 16).half()
    used = {
        "seqused_q": torch.tensor([6, 4], dtype=torch.int32),
        "seqused_k": torch.tensor([8, 3], dtype=torch.int32),
    }
    flat = {"cu_seqlens_q": cumulative([6, 6]), "cu_seqlens_k": cumulative([8, 8])}
    flat |= {"max_seqlen_q": 6, "max_seqlen_k": 8}
    leaves = [t.flatten(0, 1).clone().requires_grad_() for t in (q, k, k)]
    more = {} if early or version == "3.0.0b1" else {"return_attn_probs": True}
    made = package.flash_attn_varlen_func(*leaves, **flat, **used, causal=True, **more)
    out = made if isinstance(made, Tensor) else made[0]
    wanted, level = one_sequence(q[1, :4].double(), *[k[1, :3].double()] * 2, causal=True)
    near(out[6:10].detach(), wanted)
    assert out[10:].isnan().all()
    if not isinstance(made, Tensor):
        assert made[1][:, 10:].isnan().all()
        near(made[1][:, 7:10].detach(), level[:, 1:])
        assert (made[1][:, 6] == -math.inf).all()
    grads = torch.autograd.grad(out[:10].sum(), leaves)
    assert grads[0][:10].isfinite().all()
    assert grads[1][:11].isfinite().all()
    assert grads[1][11:].isnan().all()
    if not early:
        out = package.flash_attn_func(q, q, q, causal=True, attention_chunk=4)
        keys = q[0, 4:].double()
        near(out[0, 4:], one_sequence(keys, keys, keys, causal=True)[0])
        out = package.flash_attn_func(q.clone().requires_grad_(), q, q, attention_chunk=4)
        with pytest.raises(AssertionError, match="attention_chunk"):
            out.sum().backward()


@pytest.mark.parametrize("version", ["3.0.0b1", "3.0.0"])
def test_used_lengths_of_dense_rows_of_three(version: str) -> None:
    q, k = torch.randn(2, 6, 4, 16).half(), torch.randn(2, 8, 2, 16).half()
    given = dict.fromkeys((*EVERY, "out_" if version == "3.0.0" else "out"))
    given["seqused_q"], given["seqused_k"] = (torch.tensor(n, dtype=torch.int32) for n in ([6, 4], [8, 3]))
    out, lse, *_ = functions(3, version)._flash_attn_forward(
        q, k, k, **given, softmax_scale=0.25, causal=True
    )
    assert out[1, 4:].isnan().all()
    assert lse[1, :, 4:].isnan().all()
    wanted, level = one_sequence(q[1, :4].double(), *[k[1, :3].double()] * 2, causal=True)
    near(out[1, :4], wanted)
    near(lse[1, :, 1:4], level[:, 1:])


# ---- FlashAttention 4 ----


@pytest.mark.parametrize("version", OF_FOUR)
def test_sinks_and_the_gradient_of_the_lse(version: str) -> None:
    package, later = functions(4, version), version == "4.0.0b36"
    given = drawn([6], [9])
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0]).bfloat16().requires_grad_()
    leaves = [t[None].clone().requires_grad_() for t in (given.q, given.k, given.v)]
    out, lse = package.flash_attn_func(*leaves, learnable_sink=sink, softmax_scale=0.25, return_lse=True)
    dlse = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(3))
    q, k, v, s = (t.detach().double().requires_grad_() for t in (given.q, given.k, given.v, sink))
    x = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, 1)) / 4
    level = torch.cat([x, s[:, None, None].expand(4, 6, 1)], -1).logsumexp(-1)
    attended = torch.einsum("hij,jhd->ihd", torch.exp(x - level[..., None]), v.repeat_interleave(2, 1))
    near(out[0].detach(), attended.detach())
    near(lse[0].detach(), level.detach())
    wanted = torch.autograd.grad([attended, level], [q, k, v, s], [given.dout.double(), dlse[0].double()])
    grads = torch.autograd.grad([out, lse], [*leaves, sink], [given.dout[None], dlse], allow_unused=True)
    for grad, exact in zip(grads[:3], wanted[:3], strict=True):
        near(grad[0], exact)
    if later:
        torch.testing.assert_close(grads[3].double(), wanted[3], rtol=2e-2, atol=2e-2)
    else:
        assert grads[3] is None


# ---- refusals ----

Q = torch.zeros(2, 4, 4, 16).half()
KV = torch.zeros(2, 4, 2, 16).half()
REFUSED: list[tuple[int, str, int, type[Exception], Callable[[Any], Any]]] = [
    (2, "2.8.3", 75, RuntimeError, lambda p: p.flash_attn_func(Q, KV, KV)),
    (2, "2.6.3", 100, RuntimeError, lambda p: p.flash_attn_func(Q, KV, KV)),
    (2, "2.8.3", 90, RuntimeError, lambda p: p.flash_attn_func(Q.float(), KV.float(), KV.float())),
    (2, "2.8.3", 90, RuntimeError, lambda p: p.flash_attn_func(Q, KV.bfloat16(), KV.bfloat16())),
    (2, "2.8.3", 90, RuntimeError, lambda p: p.flash_attn_func(Q[:, :, :3], KV, KV)),
    (2, "2.8.3", 90, RuntimeError, lambda p: p.flash_attn_func(*[torch.zeros(1, 2, 1, 264).half()] * 3)),
    (2, "2.8.3", 90, RuntimeError, lambda p: p.flash_attn_func(Q, KV, KV, softcap=1.0, dropout_p=0.1)),
    (2, "2.8.3", 90, RuntimeError, lambda p: p.flash_attn_func(Q, KV, KV, alibi_slopes=torch.ones(3))),
    (2, "2.8.3", 90, RuntimeError, lambda p: p.flash_attn_func(Q, KV, KV, alibi_slopes=torch.ones(4).half())),
    (2, "2.8.3", 90, RuntimeError, lambda p: p.flash_attn_func(Q, KV, KV[:, :3])),
    (2, "2.8.3", 90, RuntimeError, lambda p: p.flash_attn_func(Q[:, :0], KV, KV)),
    (2, "2.8.3", 90, RuntimeError,
     lambda p: p.flash_attn_varlen_func(Q[0], KV[0], KV[0], *[cumulative([4]).long()] * 2, 4, 4)),
    (2, "2.8.3", 90, RuntimeError,
     lambda p: p._flash_attn_forward(Q, KV, KV, **two("2.8.3", softmax_scale=None), return_softmax=False)),
    (2, "2.8.3", 90, RuntimeError,
     lambda p: p._flash_attn_forward(Q, KV, KV, **two("2.8.3", window_size_left=None), return_softmax=False)),
    (2, "2.8.3", 90, RuntimeError,
     lambda p: p._flash_attn_forward(Q, KV, KV, **two("2.8.3"), return_softmax=True)),
    (2, "2.8.3", 90, RuntimeError, lambda p: p.flash_attn_with_kvcache(
        Q, KV, KV, cache_seqlens=2, block_table=torch.zeros(2, 1, dtype=torch.int32))),
    (2, "2.8.3", 90, RuntimeError, lambda p: p.flash_attn_with_kvcache(Q, KV, KV, KV, KV)),
    (2, "2.8.3", 90, AssertionError, lambda p: p.flash_attn_with_kvcache(Q, KV.mT.contiguous().mT, KV)),
    (3, "3.0.0", 75, RuntimeError, lambda p: p.flash_attn_func(Q, KV, KV)),
    (3, "3.0.0", 90, RuntimeError, lambda p: p.flash_attn_func(Q[..., :12], KV[..., :12], KV[..., :12])),
    (3, "3.0.0", 80, RuntimeError, lambda p: p.flash_attn_func(Q, KV, KV[..., :8])),
    (3, "3.0.0b1+early", 90, RuntimeError, lambda p: p.flash_attn_func(Q, KV, KV[..., :8])),
    (3, "3.0.0", 90, RuntimeError, lambda p: p.flash_attn_func(Q, KV, KV, qv=Q)),
    (3, "3.0.0", 90, RuntimeError, lambda p: p._flash_attn_forward(Q, KV, KV, num_splits=257)),
    (3, "3.0.0", 90, RuntimeError, lambda p: p._flash_attn_forward(Q[0], KV[0], KV[0], **{
        name: cumulative([4]) for name in ("cu_seqlens_q", "cu_seqlens_k")})),
    (4, "4.0.0b36", 75, AssertionError, lambda p: p.flash_attn_func(Q, KV, KV)),
    (4, "4.0.0b36", 90, AssertionError, lambda p: p.flash_attn_func(Q[..., :12], KV[..., :12], KV[..., :12])),
    (4, "4.0.0b36", 100, AssertionError, lambda p: p.flash_attn_func(*[rows(2, 1, 160)[None]] * 3)),
    (4, "4.0.0b36", 90, AssertionError, lambda p: p._flash_attn_fwd(Q, KV, KV, num_splits=2)),
    (4, "4.0.0b20", 90, AssertionError, lambda p: p.flash_attn_func(Q, KV, KV, learnable_sink=torch.ones(4))),
    (4, "4.0.0b36", 90, AssertionError, lambda p: p.flash_attn_func(Q.float(), KV.float(), KV.float())),
    (4, "4.0.0b36", 90, AssertionError, lambda p: p._flash_attn_bwd(Q, KV, KV, Q, Q, Q[..., 0])),
    (4, "4.0.0b36", 90, AssertionError,
     lambda p: p._flash_attn_bwd(Q, KV, KV, Q, Q, torch.zeros(2, 4, 4), softcap=None)),
    (4, "4.0.0b36", 80, AssertionError, lambda p: p._flash_attn_bwd(Q, KV, KV, Q, Q, torch.zeros(2, 4, 4))),
    (4, "4.0.0b36", 120, AssertionError,
     lambda p: p._flash_attn_bwd(Q, KV, KV, Q, Q, torch.zeros(2, 4, 4), deterministic=True)),
    (4, "4.0.0b20", 90, AssertionError, lambda p: p._flash_attn_bwd(
        Q[0], KV[0], KV[0], Q[0], Q[0], torch.zeros(4, 4), softcap=1.0, cu_seqlens_q=cumulative([4]))),
    (4, "4.0.0b36", 90, NotImplementedError, lambda p: p.flash_attn_func(Q, KV, KV, mask_mod=max)),
]  # fmt: skip


@pytest.mark.parametrize(("generation", "version", "arch", "error", "call"), REFUSED)
def test_refusals(
    generation: int, version: str, arch: int, error: type[Exception], call: Callable[[Any], Any]
) -> None:
    with pytest.raises(error):
        call(functions(generation, version, arch))
