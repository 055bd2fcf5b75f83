"""The signature cache: a repeated call builds nothing, no choice outlives the policy it was made under."""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnsel import (
    AttentionParams,
    DotProductAttention,
    NoBackendError,
    attention,
    cache_info,
    clear_cache,
    configure,
    override,
)
from attnsel.runtime import dispatch as run
from attnsel.runtime import signature
from attnsel.runtime.cache import BoundedCache
from attnsel.runtime.call import misaligned
from tables import each

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    clear_cache()
    yield
    configure()
    clear_cache()


def qkv(*shape: int, **about: Any) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape or (2, 6, 4, 8), **about) for _ in "qkv")


def build(**arguments: Any) -> DotProductAttention:
    return DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="no_mask", **arguments)


def ran(module: DotProductAttention, *tensors: Tensor) -> str | None:
    module(*(tensors or qkv()))
    assert module.last_selection is not None
    return module.last_selection.backend


def foreign(t: Tensor, skipped: int) -> Tensor:
    """The same numbers in memory of another library's, ``skipped`` bytes behind a multiple of 64."""
    memory = torch.empty(t.nbytes + 128, dtype=torch.uint8)
    first = -memory.data_ptr() % 64 + skipped
    borrowed = torch.frombuffer(memory.numpy(), dtype=t.dtype, count=t.numel(), offset=first)
    return borrowed.view(t.shape).copy_(t)


def test_memory_that_begins_anywhere_is_another_call() -> None:
    """Its storage begins there, with an offset of 0: on a GPU the vector loads of the first would fault."""
    q, k, v = qkv(dtype=torch.float16)
    assert attention(q, k, v, qkv_format="bshd") is not None
    misses = cache_info().misses
    moved = foreign(k, 4)
    assert (moved.storage_offset(), moved.data_ptr() % 16) == (0, 4)
    attention(q, moved, v, qkv_format="bshd")
    assert cache_info().misses == misses + 1
    attention(q, foreign(k, 16), v, qkv_format="bshd")
    assert cache_info().misses == misses + 1
    module = build()
    module(q, moved, v)
    assert module.last_selection is not None
    assert module.last_selection.params.tensors.k is not None
    assert module.last_selection.params.tensors.k.alignment == 4


def test_without_memory_the_offset_says_where_a_tensor_begins() -> None:
    with FakeTensorMode():
        t = torch.empty(20, dtype=torch.float16)
        assert [misaligned(t[n:]) for n in (0, 1, 8, 12)] == [0, 2, 0, 8]


# What is counted, built and kept


def test_repeated_call_builds_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    module, tensors = build(), qkv()
    module(*tensors)
    attention(*tensors)

    def forbidden(self: Any, **data: Any) -> None:
        raise AssertionError("a repeated call must not describe itself again")

    monkeypatch.setattr(AttentionParams, "__init__", forbidden)
    module(*tensors)
    attention(*tensors)
    with pytest.raises(AssertionError, match="describe itself again"):
        module(*qkv(2, 9, 4, 8))


@pytest.mark.parametrize("guarded", [True, False])
@each("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_call_like_the_last_makes_no_signature(
    mode: Any, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch has guards; where it has none, its signature finds it."""
    made: list[Any] = []
    real = signature.signature_of
    monkeypatch.setattr(signature, "signature_of", lambda *given: made.append(given) or real(*given))
    if not guarded:
        monkeypatch.setattr(signature, "_Guards", None)
    clear_cache()
    module, tensors, bias = build(), qkv(), torch.randn(1, 4, 6, 6)
    more = {"core_attention_bias": bias, "core_attention_bias_type": "post_scale_bias"}
    for around in (torch.enable_grad, torch.no_grad, torch.inference_mode, mode):
        with around():
            for call in (lambda: module(*tensors), lambda: module(*tensors, **more)):
                wanted = call(), call()
                made.clear()
                hits = cache_info().hits
                torch.testing.assert_close(call(), wanted[0])
                assert (len(made), cache_info().hits) == (0 if guarded else 1, hits + 1)


def test_cache_holds_no_tensor() -> None:
    tensors = qkv(requires_grad=True)
    bias = torch.randn(1, 4, 6, 6)
    attention(*tensors, core_attention_bias_type="post_scale_bias", core_attention_bias=bias).sum().backward()
    alive = [weakref.ref(t) for t in (*tensors, bias)]
    del tensors, bias
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


def test_new_kinds_of_calls_do_not_pile_up() -> None:
    from attnsel.runtime import call

    gc.collect()
    before = len(call._by_text)
    for n in range(4200):  # a scale that is learned
        call.config(softmax_scale=1.0 + n)
    gc.collect()
    assert len(call._by_text) - before <= 4100


def test_bounded_cache_drops_the_oldest_quarter() -> None:
    cache: BoundedCache[int] = BoundedCache(limit=8)
    for n in range(9):
        cache.add(n, n)
    assert [cache.get(n) for n in range(9)] == [None, None, 2, 3, 4, 5, 6, 7, 8]
    assert cache.info() == (7, 9, 7, 8)


# Policies


def test_override_holds_inside_its_block_and_thread_only() -> None:
    module, seen = build(), []
    assert ran(module) == "sdpa.flash"
    for _ in range(2):
        with override(backend="tiled"):
            assert ran(module) == "tiled"
            with override(backend="sdpa.math"):
                assert ran(module) == "sdpa.math"
            thread = threading.Thread(target=lambda: seen.append(ran(build())))
            thread.start()
            thread.join()
            assert ran(module) == "tiled"
        assert ran(module) == "sdpa.flash"
    assert seen == ["sdpa.flash"] * 2
    with override(backend="sdpa.math"):
        assert ran(build(backend="tiled")) == "tiled"
    with override(deny=("tiled",)), pytest.raises(NoBackendError, match="POLICY003"):
        build(backend="tiled")(*qkv())


def test_a_policy_that_died_is_never_mistaken_for_another() -> None:
    """Keys hold a settings object's id: an id that is used again must not find the old object's closures."""
    module = build()
    for n in range(50):
        backend = ("tiled", "sdpa.math", "sdpa.flash")[n % 3]
        with override(backend=backend):
            assert ran(module) == backend
        gc.collect(0)


def test_sixteen_threads_get_right_results_and_one_closure_each() -> None:
    torch.manual_seed(0)
    inputs = {s: qkv(1, s, 4, 8) for s in range(1, 9)}
    wanted = {s: attention(*t, backend="tiled").flatten(-2) for s, t in inputs.items()}
    clear_cache()
    module, wrong, start = build(), [], threading.Barrier(16)

    def hammer(number: int) -> None:
        start.wait()
        for n in range(60):
            s = 1 + (n * (number + 1)) % 8
            try:
                if (n + number) % 5 == 0:
                    with override(backend="sdpa.math"):
                        out = module(*inputs[s])
                else:
                    out = module(*inputs[s])
                if not torch.allclose(out, wanted[s], atol=1e-5):
                    wrong.append((number, s, "numbers"))
            except Exception as error:
                wrong.append((number, s, repr(error)))

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache_info().size == 16  # eight lengths under two policies


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_forked_child_attends_although_a_lock_was_held() -> None:
    module = build()
    tensors = qkv()
    wanted = module(*tensors)
    with run._bound._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn about forking beside threads
        child = os.fork()
        if child == 0:
            known = torch.equal(module(*tensors), wanted)
            fresh = bool(torch.isfinite(module(*qkv(2, 3, 4, 8))).all())
            os._exit(0 if known and fresh else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# What lies in the tensors: the next call of the same shapes may hold something else


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_lengths_that_were_read_bind_no_later_call(compiled: bool) -> None:
    def call(q: Tensor, cu: Tensor, **more: Any) -> Tensor:
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "attn_mask_type": "padding_causal"}
        return attention(q, q, q, qkv_format="thd", **lengths, **more)

    q = torch.randn(12, 2, 8)
    under_test = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of copies
        for ends in ([0, 6, 12], [0, 9, 12], [0, 1, 12], [0, 0, 12]):
            cu = torch.tensor(ends, dtype=torch.int32)
            torch.testing.assert_close(under_test(q, cu), call(q, cu, backend="tiled"))
