"""The public calls against the definition of attention: every feature, on every candidate a CPU can run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnsel import DotProductAttention, NoBackendError, attention
from call_cases import (
    BACKENDS,
    CASES,
    PACKED,
    Call,
    Case,
    assert_close,
    by_name,
    mask_type,
)

torch.set_num_threads(1)


def check(call: Call, backend: str | None) -> None:
    if backend is not None and call.refused(backend):
        with pytest.raises(NoBackendError) as caught:
            attention(*call.qkv, **call.arguments, backend=backend)
        selection = caught.value.selection
        assert selection.backend is None
        assert selection[backend].reasons
        assert all(reason.code in str(caught.value) for reason in selection[backend].reasons)
        return
    result = attention(*call.qkv, **call.arguments, backend=backend)
    out = result[0] if isinstance(result, tuple) else result
    actual = {"out": out.detach(), **call.gradients(out)}
    if call.arguments.get("return_lse"):
        actual["lse"] = result[1]
    if call.arguments.get("return_max_logit"):
        actual["max_logit"] = result[-1]
    assert out.dtype == call.case.dtype
    assert_close(actual, call.expected(), call.case.dtype)


def formats(case: Case) -> Iterator[str]:
    return iter(("thd",) if case in PACKED else ("bshd", "sbhd", "bhsd"))


GRID = [pytest.param(case, fmt, id=f"{case.name}-{fmt}") for case in CASES + PACKED for fmt in formats(case)]


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(("case", "fmt"), GRID)
def test_every_candidate_gives_the_definition_or_all_its_reasons(
    case: Case, fmt: str, backend: str | None
) -> None:
    check(Call(case, fmt), backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [
        "causal",
        "gqa",
        "head_dim_v larger",
        "padding_causal, cross",
        "arbitrary",
        "bias with gradient",
        "pre_scale_bias",
        "alibi slopes",
        "causal window, gqa",
        "learnable",
        "softcap",
    ],
)
def test_lower_precision_agrees_within_its_rounding(name: str, backend: str, dtype: torch.dtype) -> None:
    check(Call(replace(by_name[name], dtype=dtype), "bshd"), backend)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("plain", "bshd"),
        ("causal_bottom_right, rows without keys", "sbhd"),
        ("padding_causal, cross", "bhsd"),
        ("gqa", "bhsd"),
        ("learnable", "bshd"),
        ("packed, cross", "thd"),
    ],
)
def test_lse_is_the_natural_log_of_the_softmax_denominator(name: str, fmt: str, backend: str | None) -> None:
    case = by_name[name]
    check(Call(replace(case, asks={**case.asks, "return_lse": True}), fmt), backend)


def test_lse_and_max_logit_come_in_this_order() -> None:
    call = Call(Case("", {"return_lse": True, "return_max_logit": True}), "bshd")
    out, lse, max_logit = attention(*call.qkv, **call.arguments)
    assert (out.shape, lse.shape, max_logit.shape) == ((2, 9, 4, 8), (2, 4, 9), (4,))
    assert not lse.requires_grad
    assert not max_logit.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_keys_give_exact_zeros(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, s, 2, 8, dtype=dtype, requires_grad=True) for s in (6, 4, 4))
    out = attention(q, k, v, attn_mask_type="causal_bottom_right", backend=backend)
    out.sum().backward()
    assert (out[:, :2] == 0).all()
    assert q.grad is not None
    assert (q.grad[:, :2] == 0).all()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize(
    "sizes",
    [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2)],
    ids=["no sequence", "no query", "no key"],
)
@pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
def test_empty_tensors_give_empty_or_zero_results(sizes: tuple[int, ...]) -> None:
    b, s_q, s_kv, h = sizes
    q = torch.randn(b, s_q, h, 8, requires_grad=True)
    k, v = torch.randn(2, b, s_kv, h, 8, requires_grad=True).unbind(0)
    out = attention(q, k, v)
    assert out.shape == q.shape
    assert (out == 0).all()
    out.sum().backward()
    assert q.grad is not None
    assert (q.grad == 0).all()


NOTHING = torch.zeros(3, dtype=torch.int32)  # two sequences without a row


@pytest.mark.parametrize("backend", [None, "sdpa.math", "tiled"])
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
def test_a_padded_batch_may_have_no_query(mask: str, backend: str | None) -> None:
    """sdpa.math failed inside: a mask of shape [b, 1, 0, 1] was taken for one row."""
    q = torch.randn(2, 0, 2, 8, requires_grad=True)
    k, v = torch.randn(2, 2, 1, 2, 8).unbind(0)
    lengths = {"cu_seqlens_q": NOTHING, "cu_seqlens_kv": NOTHING.clone()}
    out = attention(q, k, v, attn_mask_type=mask, **lengths, backend=backend)
    assert out.shape == q.shape
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize(("rows", "longest"), [(2, None), (0, 3)], ids=["gaps alone", "no row at all"])
@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
def test_packed_sequences_may_all_be_empty(backend: str | None, rows: int, longest: int | None) -> None:
    """Unpacking them took a row where there was none."""
    starts = torch.tensor([0, 0, rows], dtype=torch.int32)
    q, k, v = (torch.randn(rows, 2, 8, requires_grad=True) for _ in range(3))
    out = attention(
        q, k, v, qkv_format="thd", attn_mask_type="padding", cu_seqlens_q=NOTHING, cu_seqlens_kv=NOTHING,
        cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts, max_seqlen_q=longest,
        max_seqlen_kv=longest, backend=backend,
    )  # fmt: skip
    assert out.shape == q.shape
    assert (out == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
def test_no_sequence_may_have_slopes_of_its_own() -> None:
    q = torch.randn(0, 3, 2, 8)
    slopes = torch.ones(0, 2)
    assert attention(q, q, q, core_attention_bias_type="alibi", alibi_slopes=slopes).shape == q.shape


@pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
def test_the_sign_of_the_scale_is_nothing_against_a_kernel() -> None:
    """sdpa.flash refused scales below 0 under a causal mask, and was passed over for other scales then."""
    q, k, v = torch.randn(3, 2, 6, 2, 8).unbind(0)
    for scale in (-0.5, 0.0, 0.5):
        out = attention(q, k, v, attn_mask_type="causal", softmax_scale=scale, backend="sdpa.flash")
        wanted = attention(q, k, v, attn_mask_type="causal", softmax_scale=scale, backend="tiled")
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)


# The module


MODULE_CASES = [case for case in CASES + PACKED if "max_seqlen_q" not in case.asks]


@pytest.mark.parametrize(
    ("case", "fmt"),
    [
        pytest.param(case, fmt, id=f"{case.name}-{fmt}")
        for case in MODULE_CASES
        for fmt in formats(case)
        if fmt != "bhsd"
    ],
)
def test_module_gives_the_definition_with_heads_side_by_side(case: Case, fmt: str) -> None:
    call = Call(case, fmt)
    arguments = dict(call.arguments)
    built = {
        name: arguments.pop(name)
        for name in (
            "qkv_format",
            "attn_mask_type",
            "window_size",
            "softcap",
            "softmax_scale",
            "softmax_type",
            "return_max_logit",
            "bottom_right_diagonal",
        )
        if name in arguments
    }
    built.setdefault("attn_mask_type", "no_mask")
    size = call.size
    module = DotProductAttention(size["h"], (size["d"], size["e"]), size["g"], **built)
    sink = arguments.pop("softmax_offset", None)
    if sink is not None:
        module.softmax_offset = torch.nn.Parameter(sink.detach().reshape(1, -1, 1, 1))
    result = module(*call.qkv, **arguments)
    out = result[0] if isinstance(result, tuple) else result
    wanted = call.expected()
    assert module.last_selection is not None
    assert module.last_selection.backend in BACKENDS
    actual = {"out": out.detach()}
    if sink is not None:
        (dsink,) = torch.autograd.grad(
            out, [module.softmax_offset], call.to_caller(call.dout).reshape(out.shape), retain_graph=True
        )
        actual["dsoftmax_offset"] = dsink.flatten()
        del call.leaves["softmax_offset"]
    actual |= call.gradients(out)
    wanted["out"] = wanted["out"].flatten(-2)
    assert_close(actual, wanted, case.dtype)


# Memory layouts


def shifted(t: Tensor, by: int) -> Tensor:
    """The same numbers, ``by`` elements into their storage."""
    return torch.cat([t.new_zeros(by), t.flatten()])[by:].view(t.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t.contiguous(),
    "second and third dimension swapped": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "first two dimensions swapped": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "head_dim outermost": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second element": lambda t: torch.stack([t, t + 1], dim=-1).flatten(-2)[..., ::2],
    "every second row": lambda t: torch.stack([t, t + 1], dim=2).flatten(1, 2)[:, ::2],
    "a slice of wider rows": lambda t: torch.cat([t + 1, t, t + 2], dim=-1)[
        ..., t.shape[-1] : 2 * t.shape[-1]
    ],
    "a slice of more heads": lambda t: torch.cat([t + 1, t, t + 2], dim=2)[:, :, t.shape[2] : 2 * t.shape[2]],
    "one element in": lambda t: shifted(t, 1),
    "eight elements in": lambda t: shifted(t, 8),
}
EXPANDED = {"batch": 0, "second dimension": 1, "third dimension": 2}


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    layouts=st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3),
    expanded=st.none() | st.sampled_from(sorted(EXPANDED)),
    fmt=st.sampled_from(["bshd", "sbhd", "bhsd"]),
    mask=st.sampled_from(["no_mask", "causal"]),
    backend=st.sampled_from([None, *BACKENDS]),
    dtype=st.sampled_from([torch.float64, torch.bfloat16]),
    d=st.sampled_from([1, 3, 8]),
    g=st.sampled_from([1, 4]),
)
def test_any_strides_give_the_same_numbers(
    layouts: tuple[str, ...],
    expanded: str | None,
    fmt: str,
    mask: str,
    backend: str | None,
    dtype: torch.dtype,
    d: int,
    g: int,
) -> None:
    call = Call(Case("", mask_type(mask), sizes={"d": d, "e": d, "g": g}, dtype=dtype), fmt)
    for name in "qkv":
        t = call.leaves[name].detach()
        if expanded is not None:
            # Expansion happens in the caller's order, so the leaf takes it in the kernel's.
            axis = EXPANDED[expanded]
            t = call.to_caller(t).narrow(axis, 0, 1).expand_as(call.to_caller(t))
            t = back(t, fmt)
        call.leaves[name] = t.contiguous().requires_grad_()
    strided = []
    for name, layout in zip("qkv", layouts, strict=True):
        t = call.to_caller(call.leaves[name])
        if expanded is not None:
            axis = EXPANDED[expanded]
            strided.append(t.narrow(axis, 0, 1).expand_as(t))
        else:
            strided.append(LAYOUTS[layout](t))
    out = attention(*strided, **call.arguments, backend=backend)
    wanted = call.expected()
    actual = {"out": out.detach()}
    if expanded is None:  # else a gradient is a sum over the expanded dimension
        actual |= call.gradients(out)
    assert_close(actual, wanted, dtype)


def back(t: Tensor, fmt: str) -> Tensor:
    """The caller's order brought to [b, h, s, d]."""
    return t.permute({"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}[fmt])


@pytest.mark.parametrize("packing", ["bs3hd", "bsh3d", "sb3hd"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_of_one_packed_tensor_need_no_copy_by_the_caller(packing: str, backend: str) -> None:
    b, s, h, d = 2, 7, 3, 8
    shape = {"bs3hd": (b, s, 3, h, d), "bsh3d": (b, s, h, 3, d), "sb3hd": (s, b, 3, h, d)}[packing]
    packed = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    q, k, v = packed.unbind(packing.index("3"))
    fmt = packing.replace("3", "")
    apart = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = attention(q, k, v, qkv_format=fmt, attn_mask_type="causal", backend=backend)
    wanted = attention(*apart, qkv_format=fmt, attn_mask_type="causal", backend="tiled")
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    out.square().sum().backward()
    wanted.square().sum().backward()
    assert packed.grad is not None
    grads = [t.grad for t in apart]
    torch.testing.assert_close(packed.grad, torch.stack(grads, dim=packing.index("3")), rtol=0, atol=1e-12)


def test_result_of_a_head_dim_of_one_is_finite() -> None:
    q, k, v = torch.randn(3, 2, 5, 2, 1).unbind(0)
    wanted = torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1), -1) @ v.transpose(1, 2)
    out = attention(q, k, v)
    assert math.isfinite(out.sum().item())
    torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd"])
def test_repeated_kv_heads_give_their_gradients_back(fmt: str) -> None:
    """No CPU kernel needs kv heads repeated; sdpa.efficient on a GPU does. Carried out here by hand."""
    from attnsel.runtime.bind import bind, bind_gradients
    from attnsel.runtime.call import NO_EXTRAS, config
    from attnsel.runtime.dispatch import explain, make_call
    from attnsel.settings import current
    from attnsel.verdicts.verdict import Adaptation

    call = Call(Case("", mask_type("causal"), sizes={"g": 2}), fmt)
    static = config(qkv_format=fmt, attn_mask_type="causal")
    selection = explain(static, *call.qkv)
    flash = selection["sdpa.flash"]._replace(adaptations=(Adaptation("expand_gqa", "", 0),))
    adapted = selection.narrowed((flash,))
    asked = make_call(static, *call.qkv, NO_EXTRAS, current())
    wanted = call.expected()
    out = bind(adapted, asked).run(asked)
    assert_close({"out": out.detach(), **call.gradients(out)}, wanted, torch.float64)
    with torch.no_grad():
        grads = bind_gradients(adapted, asked)(asked, call.to_caller(call.dout))
    named = {f"d{name}": back(grad, fmt) for name, grad in zip("qkv", grads[:3], strict=True)}
    assert_close(named, wanted, torch.float64)
