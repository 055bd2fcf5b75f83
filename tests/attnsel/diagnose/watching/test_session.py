"""``attnsel.watch()``: what is counted, that nothing changes, and that nothing stays behind."""

from __future__ import annotations

import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

import attnsel  # noqa: E402
from attnsel.diagnose.watching.by_hand import MOST_PRODUCTS  # noqa: E402
from attnsel.diagnose.watching.observe import (  # noqa: E402
    Places,
    Recorder,
    WatchedCall,
)


def qkv(s=16, **options):
    made = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, s, 8, generator=made).requires_grad_(**options) for _ in range(3)]


def hooks_in_place():
    return (
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        threading.Thread.start,
        torch.autograd.backward,
        torch.utils.checkpoint.checkpoint,
        torch.nn.MultiheadAttention.forward,
        torch.nn.TransformerEncoderLayer.forward,
        torch.nn.TransformerEncoder.forward,
    )


@pytest.fixture(autouse=True)
def nothing_stays():
    before = hooks_in_place()
    yield
    assert hooks_in_place() == before


def test_a_call_that_fails_fails_with_its_own_error_and_is_not_counted():
    q, k, v = qkv()
    with attnsel.watch() as seen, pytest.raises(RuntimeError, match="size"):
        F.scaled_dot_product_attention(q, k[..., :5], v)
    assert seen.sites == ()
    with pytest.raises(ZeroDivisionError), attnsel.watch():  # and hooks are gone
        raise ZeroDivisionError


def raises(*_):
    raise LookupError("planned")


def swallows_and_raises(recorder, call):
    try:
        call.run()
    except ZeroDivisionError:
        raises()


def interrupted():
    raise KeyboardInterrupt


def test_an_observer_that_fails_before_during_or_after_a_call_costs_one_line(tmp_path):
    """Whatever of attnsel's raises: the program's results and errors stay its own, and the report says so."""
    recorder = Recorder(Places(str(tmp_path)))
    call = WatchedCall(lambda x: x + 1, (1,), {})
    assert recorder.watched(raises, call) == 2
    late = WatchedCall(lambda: 3, (), {})
    assert recorder.watched(lambda recorder, call: (call.run(), raises()), late) == 3
    failing = WatchedCall(lambda: 1 // 0, (), {})
    with pytest.raises(ZeroDivisionError):
        recorder.watched(lambda recorder, call: call.run(), failing)
    with pytest.raises(ZeroDivisionError):  # also where attnsel's own comes in between
        recorder.watched(swallows_and_raises, WatchedCall(lambda: 1 // 0, (), {}))
    with pytest.raises(KeyboardInterrupt):
        recorder.watched(swallows_and_raises, WatchedCall(interrupted, (), {}))
    assert len(recorder.unseen) == 3, "the program's own error is no failure of an observer"
    recorder.unseen.clear()
    for _ in range(3):
        recorder.told(raises, len, (), {}, None)
    assert list(recorder.unseen) == [
        "an observer failed and its call was not read: raises: LookupError: planned; it is not asked any more"
    ]
    assert torch._C._is_torch_function_enabled()
    for line in range(60):
        recorder.cannot_see(str(line))
    assert len(recorder.unseen) == 50


def test_threads_of_the_program_are_watched_and_outlive_it_unwatched():
    q, k, v = qkv()
    go, done = threading.Event(), threading.Event()

    def late():
        F.scaled_dot_product_attention(q, k, v)
        done.set()
        go.wait(30)
        F.scaled_dot_product_attention(q, k, v)

    with attnsel.watch() as seen:
        thread = threading.Thread(target=late)
        thread.start()
        assert done.wait(30)
    go.set()
    thread.join()
    assert [site.calls for site in seen.sites] == [1]


def test_a_cache_that_grows_takes_bounded_memory_and_one_line():
    q = torch.randn(1, 2, 1, 8)
    with attnsel.watch() as seen, torch.no_grad():
        for length in range(1, 60):
            kv = torch.randn(1, 2, length, 8)
            F.scaled_dot_product_attention(q, kv, kv)
    assert len(seen.sites) <= 12
    assert sum(site.calls for site in seen.sites) == 59
    assert "s_kv from" in seen.report()


def by_hand(a):
    """At a place that is not known yet."""
    scores = torch.softmax(torch.bmm(a, a), -1)
    torch.bmm(scores, a)


def test_reading_ends_where_everything_runs_in_inference_mode():
    a = torch.randn(1, 8, 8)
    with attnsel.watch() as w:
        watcher = w.recorder.state["by_hand"]
        for _ in range(MOST_PRODUCTS + 50):
            with torch.inference_mode():
                torch.mm(a[0], a[0])
        assert (watcher.products, watcher.reads) == (MOST_PRODUCTS, False)
        with torch.inference_mode():
            for _ in range(3):
                by_hand(a)
    assert [site.api for site in w.sites] == ["by hand"]
    assert torch._C._len_torch_dispatch_stack() == 0


def test_an_optimizers_step_is_not_watched_and_its_closure_is():
    parameter = torch.nn.Parameter(torch.randn(1, 2, 8, 16))

    def attend():
        return F.scaled_dot_product_attention(parameter, parameter, parameter).sum()

    def step(optimizer, *closure):
        optimizer.zero_grad()
        attend().backward()
        optimizer.step(*closure)

    depth = torch._C._len_torch_function_stack
    with attnsel.watch() as w:
        seen = []
        plain = torch.optim.SGD([parameter], lr=0.1)
        plain.register_step_pre_hook(lambda *_: seen.append(depth()))
        step(plain)
        step(plain)
        step(torch.optim.LBFGS([parameter], max_iter=1), attend)
        with w._hooks.paused():  # a step inside does not end it
            plain.step()
            assert depth() == 0
            attend()
        assert depth() == 1
    assert sum(site.calls for site in w.sites) == 4
    assert sum(site.backward_calls for site in w.sites) == 3
    assert 0 in seen
    module = sys.modules["torch.optim.optimizer"]
    assert not module._global_optimizer_pre_hooks
    assert not module._global_optimizer_post_hooks


def test_attnsels_own_functions_say_what_they_chose():
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    core = attnsel.DotProductAttention(2, 16, qkv_format="bshd", attn_mask_type="causal")
    with attnsel.watch() as w:
        core(q, q, q).sum().backward()
        for _ in range(3):  # the first is decided, the others are looked up
            attnsel.attention(q, q, q, window_size=(2, 2))
            attnsel.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert [(site.api, site.calls, site.backward_calls) for site in w.sites] == [
        ("attnsel", 1, 1), ("attnsel", 3, 0), ("attnsel", 3, 0),
    ]  # fmt: skip
    report = w.report()
    for site in w.sites:
        assert site.candidate
        assert site.params is not None
        assert f"{site.candidate}: {site.candidate}" not in report
