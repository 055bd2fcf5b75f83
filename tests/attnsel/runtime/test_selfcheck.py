"""The first call of an unproven kernel is compared with tiled: wrong numbers are caught, right ones pass."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attnsel
from attnsel import NoBackendError, attention, clear_cache, override
from attnsel.backends.tiled import kernel as tiled
from attnsel.debug import FallbackWarning, SelfCheckWarning
from attnsel.runtime import kernels, reference, selfcheck
from attnsel.runtime.refusals import evidence

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def everything_is_checked() -> Iterator[None]:
    clear_cache()
    with override(selfcheck="all"):
        yield
    clear_cache()


def qkv(
    s: int = 40, s_kv: int | None = None, *, grad: bool = True, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """[2, s, 4 or 2, 16]"""
    gen = torch.Generator().manual_seed(0)
    shapes = [(2, s, 4, 16), (2, s_kv or s, 2, 16), (2, s_kv or s, 2, 16)]
    return [torch.randn(shape, generator=gen).to(dtype).requires_grad_(grad) for shape in shapes]


class Kernel:
    """In the place of the Triton kernel: tiled's numbers, unless ``wrong`` changes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forwards = self.backwards = 0
        self.wrong: dict[str, Callable[[Any], Any]] = {}
        self.error: Exception | None = None
        kernel = kernels.Kernel(self.forward, self.backward)
        monkeypatch.setitem(kernels.KERNELS, "triton", kernel)

    def forward(self, spec: Any, inputs: Any) -> Any:
        self.forwards += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        spec = self.wrong.get("spec", lambda spec: spec)(spec)
        return self.wrong.get("forward", lambda result: result)(tiled.forward(spec, inputs))

    def backward(self, spec: Any, inputs: Any, result: Any, dout: Any) -> Any:
        self.backwards += 1
        return self.wrong.get("backward", lambda g: g)(tiled.backward(spec, inputs, result, dout))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def call(tensors: list[Tensor], **arguments: Any) -> Any:
    return attention(*tensors, **{"backend": "triton", **arguments})


def at(t: Tensor, index: Any, value: Tensor | float) -> Tensor:
    t = t.clone()
    t[index] = value
    return t


# What is caught: the part, what it gives instead, what is said

WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    ("forward", lambda r: r._replace(out=torch.zeros_like(r.out)), "out is off by"),
    ("forward", lambda r: r._replace(out=r.out * 1.1), "out is off by"),
    ("forward", lambda r: r._replace(out=at(r.out, (0, 0, 0), 0.3)), "out is off by"),
    ("forward", lambda r: r._replace(out=at(r.out, (1, 3, -1), 0.3)), "out is off by"),
    ("forward", lambda r: r._replace(out=at(r.out, (slice(None), 2), r.out[:, 1])), "out is off by"),
    ("forward", lambda r: r._replace(out=at(r.out, 1, r.out[0])), "out is off by"),
    ("forward", lambda r: r._replace(out=at(r.out, (0, 1, -1, 3), math.nan)), "out is off by"),
    ("spec", lambda s: dataclasses.replace(s, window_right=-1), "out is off by"),
    ("spec", lambda s: dataclasses.replace(s, window_right=1), "out is off by"),
    ("spec", lambda s: dataclasses.replace(s, bottom_right=not s.bottom_right), "out is off by"),
    ("spec", lambda s: dataclasses.replace(s, softcap=0.0), "out is off by"),
    ("spec", lambda s: dataclasses.replace(s, softmax_type="vanilla"), "out is off by"),
    ("backward", lambda g: g._replace(q=g.q * 2.0), "dq is off by"),
    ("backward", lambda g: g._replace(k=at(g.k, (0, 0, -1), 5.0)), "dk is off by"),
    ("backward", lambda g: g._replace(k=at(g.k, (slice(None), 1), g.k[:, 0])), "dk is off by"),
    ("backward", lambda g: g._replace(v=-g.v), "dv is off by"),
    ("backward", lambda g: g._replace(k=at(g.k, (1, 1, 3, 3), math.inf)), "dk is off by"),
]


def refused(tensors: list[Tensor], **arguments: Any) -> str:
    """The words of the refusal, RUNTIME002's. A forced kernel that is wrong teaches nothing."""
    with pytest.raises(NoBackendError) as caught:
        call(tensors, **arguments)
    reasons = caught.value.selection["triton"].reasons
    assert [reason.code for reason in reasons] == ["RUNTIME002"]
    assert evidence().refusals == ()
    return str(reasons[0].observed)


def test_what_is_wrong_is_caught(kernel: Kernel) -> None:
    for part, wrong, words in WRONG:
        kernel.wrong = {part: wrong}
        asked: dict[str, Any] = {"attn_mask_type": "causal"}
        if part == "spec":
            asked |= {"attn_mask_type": "causal_bottom_right", "softcap": 2.0, "softmax_type": "off-by-one"}
        s_kv = 60 if part == "spec" else 40
        said = refused(qkv(40, s_kv, grad=part == "backward", dtype=torch.bfloat16), **asked)
        assert said.startswith("in bf16 ")
        assert words in said
        assert "where rounding explains" in said


def test_numbers_of_a_warm_up_call_hide_nothing(kernel: Kernel) -> None:
    kernel.wrong["forward"] = lambda r: r._replace(out=r.out * 1.1)
    refused([torch.zeros_like(t) for t in qkv()])


def test_gradients_of_bias_and_sinks_are_compared(kernel: Kernel) -> None:
    kernel.wrong["backward"] = lambda g: g._replace(bias=g.bias * 1.2)
    bias = torch.randn(1, 4, 40, 40, requires_grad=True)
    asked = {"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": bias}
    assert "dbias is off" in refused(qkv(), **asked)
    kernel.wrong["backward"] = lambda g: g._replace(softmax_offset=g.softmax_offset * 1.2)
    sinks = torch.randn(4, requires_grad=True)
    words = refused(qkv(), softmax_type="learnable", softmax_offset=sinks)
    assert "dsoftmax_offset is off" in words


# What follows


def test_the_next_candidate_runs_with_one_warning_that_has_the_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = kernels.kernel_of("sdpa.flash")

    def binding(spec: Any, inputs: Any) -> Any:
        bound = loaded.bind(spec, inputs)
        return lambda *tensors: bound(*tensors) * 1.25

    monkeypatch.setitem(kernels.KERNELS, "sdpa.flash", loaded._replace(bind=binding))
    core = attnsel.DotProductAttention(4, 16, 4, qkv_format="bshd")
    tensors = [qkv()[0] for _ in "qkv"]
    words = (
        r"sdpa.flash gave other numbers than tiled: in fp32 .*out is off by 0.25 .*; the next candidate runs"
    )
    with pytest.warns(FallbackWarning, match=words) as caught:
        out = core(*tensors)
    assert len(caught) == 1
    assert core.last_selection is not None
    assert core.last_selection.backend == "sdpa.math"
    torch.testing.assert_close(out, attention(*tensors, attn_mask_type="causal", backend="tiled").flatten(2))
    core(*tensors)  # remembered: nothing more is said
    reason = core.explain(*tensors)["sdpa.flash"].reasons[0]
    assert (reason.code, reason.evidence) == ("RUNTIME002", "runtime")
    assert "off by 0.25" in reason.message
    assert "RUNTIME002" in core.explain(*tensors).report()


# What passes: in every feature but dropout, the fuzz target ``selfcheck``

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def passes(tensors: list[Tensor], **arguments: Any) -> None:
    """The call runs and was compared; nothing is said."""
    before = len(selfcheck._passed.items)
    call(tensors, **arguments)
    assert len(selfcheck._passed.items) == before + 1


@pytest.mark.parametrize(
    "backend", ["sdpa.math", *(["triton"] if importlib.util.find_spec("triton") else [])]
)
def test_a_right_kernel_passes_with_dropout_and_where_it_is_peaked(backend: str) -> None:
    for asked in (
        {"attention_dropout": 0.3, "attn_mask_type": "causal_bottom_right"},
        {"softmax_scale": 2.0},
    ):
        passes(qkv(dtype=torch.bfloat16), backend=backend, **asked)


def cu(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize(("kind", "dropout"), [("padding", 0.25), ("padding_causal_bottom_right", 0.0)])
def test_padded_and_packed_batches_pass(kernel: Kernel, kind: str, dropout: float) -> None:
    asked = {"attn_mask_type": kind, "attention_dropout": dropout}
    lengths = {"cu_seqlens_q": cu(30, 9), "cu_seqlens_kv": cu(21, 40)}
    tensors = qkv(40)
    with torch.no_grad():
        for t, n in zip(tensors, (30, 21, 21), strict=True):
            t[0, n:] = math.nan  # what nobody has written
    passes(tensors, **asked, **lengths)
    packed = [torch.randn(n, h, 16, requires_grad=True) for n, h in ((39, 4), (61, 2), (61, 2))]  # [t, h, d]
    passes(packed, qkv_format="thd", return_lse=True, **asked, **lengths)
    kernel.wrong["forward"] = lambda r: r._replace(
        out=at(r.out, -1, 0.1) if r.out.dim() == 3 else r.out * 1.2
    )
    clear_cache()
    if dropout == 0.0:
        refused(packed, qkv_format="thd", **asked, **lengths)
    refused(tensors, **asked, **lengths)


def test_what_the_caller_brings_is_not_the_kernels_fault(kernel: Kernel) -> None:
    for number, value in enumerate((math.nan, math.inf, math.nan)):
        tensors = [t.detach() for t in qkv()]
        tensors[number][0, 3, 1, 2] = value
        clear_cache()
        passes([t.requires_grad_() for t in tensors], attn_mask_type="causal")


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_kernels_stay_well_below_what_is_allowed(
    kernel: Kernel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it: the margin that UNITS and TIMES_CHANGED were chosen for, on kernels that round."""
    ratios: list[float] = []
    original = reference.differences

    def spy(*arguments: Any, **named: Any) -> Any:
        found = original(*arguments, **named)
        ratios.extend(difference.ratio for difference in found)
        return found

    monkeypatch.setattr(reference, "differences", spy)
    for backend in ("sdpa.flash", "sdpa.math"):
        for lengths in ((130, 130), (33, 200)):
            for kind in ("no_mask", "causal_bottom_right"):
                call(qkv(*lengths, dtype=dtype), backend=backend, attn_mask_type=kind)
    assert ratios
    assert max(ratios) < 0.5


# What it leaves alone


def test_no_random_number_of_the_callers_is_used(kernel: Kernel) -> None:
    outputs, states = [], []
    for mode in ("all", "0"):
        clear_cache()
        torch.manual_seed(7)
        with override(selfcheck=mode):
            outputs.append(call(qkv(), attention_dropout=0.5))
        states.append(torch.get_rng_state())
    assert torch.equal(*outputs)
    assert torch.equal(*states)


# When it happens


def test_nothing_is_checked_twice(kernel: Kernel) -> None:
    call(qkv(40))
    assert (kernel.forwards, kernel.backwards) == (2, 1)
    call(qkv(40))
    attention(*qkv(40), backend="triton", softmax_scale=0.25)  # the default's own value: the same question
    assert (kernel.forwards, kernel.backwards) == (4, 1)
    call(qkv(48))  # a multiple of 16
    assert (kernel.forwards, kernel.backwards) == (6, 2)
    for s in range(41, 47):
        call(qkv(s))
    assert (kernel.forwards, kernel.backwards) == (12, 2)
    call(qkv(40, grad=False))
    assert (kernel.forwards, kernel.backwards) == (14, 2)


def test_the_setting_says_who_is_checked(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, runs in (("0", 1), ("unproven", 2)):
        with override(selfcheck=mode):  # without a GPU's architecture there is nothing to be unproven on
            call(qkv(grad=False))
        assert kernel.forwards == runs
    clear_cache()
    original = selfcheck.is_wanted

    def on_a_gpu(selection: Any, settings: Any) -> bool:
        candidates = tuple(c._replace(unproven=c.name == "triton") for c in selection.candidates)
        return original(selection.with_candidates(candidates), settings)

    monkeypatch.setattr(selfcheck, "is_wanted", on_a_gpu)
    with override(selfcheck="unproven"):
        passes(qkv())
    clear_cache()
    with override(selfcheck="0"):
        call(qkv())
    assert not selfcheck._passed.items


def test_during_a_capture_it_waits(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "capturing", lambda device: True)
    with pytest.warns(SelfCheckWarning, match="CUDA graph is being captured"):
        call(qkv(grad=False))
    assert kernel.forwards == 1
    monkeypatch.setattr(selfcheck, "capturing", lambda device: False)
    call(qkv(grad=False))
    assert kernel.forwards == 3


def test_memory_that_runs_out_in_the_check_is_no_refusal(kernel: Kernel) -> None:
    kernel.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.warns(SelfCheckWarning, match="no memory"):
        call(qkv())
    assert evidence().refusals == ()


# Rows


def test_more_changes_are_asked_before_a_kernel_is_found_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One change at random may move few numbers by less than rounding does: a right kernel was refused."""
    asked = []
    whole = reference.compute

    def compute(
        spec: Any, inputs: Any, pieces: Any, douts: Any, unit: float, scale: float, seed: int = 1
    ) -> Any:
        asked.append(seed if unit else 0)
        moves = unit and seed != 1  # by the first one nothing moves
        return whole(spec, inputs, pieces, douts, 0.2 if moves else 0.0, scale, seed)

    def slightly_off(result: Any) -> Any:
        return result._replace(out=result.out * 1.01)

    monkeypatch.setattr(reference, "compute", compute)
    off = kernels.Kernel(lambda spec, inputs: slightly_off(tiled.forward(spec, inputs)), tiled.backward)
    monkeypatch.setitem(kernels.KERNELS, "triton", off)
    call(qkv(grad=False))
    assert asked == [0, 1, 2, 3, 4, 5, 6, 7]
