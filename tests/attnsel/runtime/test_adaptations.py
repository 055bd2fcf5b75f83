"""Adaptations carried out: each gives the definition of attention back, and makes what its cost says.

Where no CPU kernel needs a change, it is forced: a selection that lists it is put before the runtime.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnsel import DotProductAttention, InvalidInput, attention, configure, functional, override
from attnsel.decision import select
from attnsel.runtime import dispatch as run
from attnsel.runtime.adaptations import Adapted, adapted
from attnsel.runtime.adapted_rows import lengthened
from attnsel.runtime.call import Call as Operands
from attnsel.runtime.inputs import params_of
from attnsel.runtime.trivial_mask import assume_all_visible, trivial_mask
from attnsel.selection.adaptations.search import ADAPTERS
from attnsel.settings import current
from attnsel.verdicts.verdict import Adaptation
from call_cases import CASES, CU, MASKS, PACKED, PADDED, Call, Case, assert_close, by_name, mask_type

torch.set_num_threads(1)

Forced = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


class DoesNotApply(Exception):
    """The adaptation would not be exact here, or its candidate takes the changed call no better."""


@contextmanager
def forced(monkeypatch: pytest.MonkeyPatch, changes: Forced) -> Iterator[list[Any]]:
    """Selections list ``changes`` besides what the changed question needs; yields the selections made."""
    made: list[Any] = []

    def choose(p: Any, *args: Any, policy: Any, **kwargs: Any) -> Any:
        listed: list[Adaptation] = []
        for name, target in changes:
            changed = ADAPTERS[name].apply(p, target)
            if changed is None:
                raise DoesNotApply(name)
            p = changed[0]
            listed.append(changed[1])
        answer = select(p, *args, policy=policy, **kwargs)
        if answer.backend is None:
            raise DoesNotApply(answer.report())
        chosen = answer[answer.backend]
        chosen = chosen._replace(adaptations=(*listed, *chosen.adaptations))
        asked = answer.narrowed((chosen,)).about(made_for)
        made.append(asked)
        return asked

    def choose_for(p: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal made_for
        made_for = p
        return choose(p, *args, **kwargs)

    made_for: Any = None
    monkeypatch.setattr(run, "select", choose_for)
    run.clear_cache()
    try:
        yield made
    finally:
        monkeypatch.undo()
        run.clear_cache()


def check(monkeypatch: pytest.MonkeyPatch, call: Call, backend: str, changes: Forced) -> None:
    """Output, lse, largest score and every gradient, by autograd and written out, against the definition."""
    wanted = call.expected()
    asked: list[Any] = []
    with forced(monkeypatch, changes) as made:
        monkeypatch.setattr(functional, "attend", lambda *given: asked.extend(given))
        arguments = {**call.arguments, "backend": backend}
        attention(*call.qkv, **arguments)
        static, q, k, v, extras = asked
        result = run.attend(static, q, k, v, extras)
        assert [a.name for a in made[-1].candidates[0].adaptations][: len(changes)] == [n for n, _ in changes]
        results = list(result) if isinstance(result, tuple) else [result]
        actual = {"out": results[0].detach(), **call.gradients(results[0])}
        if call.arguments.get("return_lse"):
            actual["lse"] = results[1]
        if call.arguments.get("return_max_logit"):
            actual["max_logit"] = results[-1]
        assert_close(actual, wanted, call.case.dtype)
        if backend == "sdpa.math":
            return  # it has no backward outside autograd
        with torch.no_grad():
            dout = call.to_caller(call.dout)
            grads = run.gradients(static, q, k, v, extras, dout)
            out, lse, *_ = run.attend_with_lse(static.replace(is_training=True), q, k, v, extras)
            known = run.gradients(static, q, k, v, extras, dout, (out, lse))
    for a, b in zip(known, grads, strict=True):  # from the output and lse of before: the same bits
        assert (a is None and b is None) or torch.equal(a, b)
    order = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3), "thd": (0, 1, 2)}[call.fmt]
    named = {f"d{name}": grad.permute(order) for name, grad in zip("qkv", grads[:3], strict=True)}
    if grads.bias is not None and "dbias" in wanted:
        named["dbias"] = grads.bias
    if grads.softmax_offset is not None and "dsoftmax_offset" in wanted:
        named["dsoftmax_offset"] = grads.softmax_offset
    assert_close(named, wanted, call.case.dtype)


def target(**to: int) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(to.items()))


PADS: dict[str, Forced] = {
    "both lengths": (("pad_sequence", target(max_seqlen_q=16, max_seqlen_kv=16)),),
    "queries": (("pad_sequence", target(max_seqlen_q=16)),),
    "keys": (("pad_sequence", target(max_seqlen_kv=16)),),
    "by different numbers": (("pad_sequence", target(max_seqlen_q=12, max_seqlen_kv=16)),),
    "head_dim_qk": (("pad_head_dim_qk", target(head_dim_qk=16)),),
    "head_dim_v": (("pad_head_dim_v", target(head_dim_v=24)),),
    "everything": (
        ("pad_sequence", target(max_seqlen_q=16, max_seqlen_kv=24)),
        ("pad_head_dim_qk", target(head_dim_qk=24)),
        ("pad_head_dim_v", target(head_dim_v=24)),
    ),
}
# Where a change is not exact, and no other case: an added key would be a visible one, and no mask type says
# its length.
NOT_EXACT = {("arbitrary and window", pads) for pads in ("keys", "by different numbers", "everything")}
SINGLE = [pads for pads in PADS if pads != "everything"]


def with_lse(case: Case, asked: bool = True) -> Case:
    return dataclasses.replace(case, asks={**case.asks, "return_lse": asked})


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].name)
def test_padding_gives_the_definition(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything at once, and one kind of padding of its own: each meets a sixth of the cases."""
    case = CASES[number]
    for pads in ("everything", SINGLE[number % len(SINGLE)]):
        call = Call(with_lse(case), "bshd")
        if (case.name, pads) in NOT_EXACT:
            with pytest.raises(DoesNotApply, match="pad_sequence"):
                check(monkeypatch, call, "tiled", PADS[pads])
        else:
            check(monkeypatch, call, "tiled", PADS[pads])


SDPA_CASES = ["plain", "gqa", "causal", "causal_bottom_right, fewer queries", "window", "padding, cross",
              "padding_causal mask", "arbitrary", "arbitrary, whole rows", "bias with gradient",
              "pre_scale_bias with gradient", "alibi and padding", "head_dim_v smaller, gqa"]  # fmt: skip
NO_GRADIENT_OF_A_BIAS = "sdpa.flash"


@pytest.mark.parametrize("number", range(len(SDPA_CASES)), ids=SDPA_CASES.__getitem__)
def test_padding_gives_the_definition_around_any_kernel(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = SDPA_CASES[number]
    for turn, backend in enumerate(("sdpa.math", "sdpa.flash")):
        if "with gradient" in name and backend == NO_GRADIENT_OF_A_BIAS:
            continue
        for fmt, pads in (("sbhd", "everything"), ("bhsd", SINGLE[(number + turn) % len(SINGLE)])):
            check(monkeypatch, Call(by_name[name], fmt), backend, PADS[pads])


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_unpacking_gives_the_definition(case: Case) -> None:
    """Ragged as these are, the planner would not; what a change may cost is not what makes it exact."""
    for backend in ("tiled", "sdpa.math", "sdpa.flash"):
        if case.name == "packed, sinks" and backend != "tiled":
            continue  # no kernel of PyTorch's has sinks
        if case.name == "packed, bias" and backend == NO_GRADIENT_OF_A_BIAS:
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("attnsel.runtime.inputs._ragged", lambda *given: False)
            check(patch, Call(with_lse(case, backend == "tiled"), "thd"), backend, (("unpack", ()),))


@pytest.mark.parametrize("case", [c for c in CASES if "lengths" in c.tensors], ids=lambda case: case.name)
def test_packing_gives_the_definition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for fmt in ("bshd", "sbhd", "bhsd"):
        check(monkeypatch, Call(with_lse(case), fmt), "tiled", (("pack", ()),))


SELF = [
    Case("causal", mask_type("padding_causal"), CU, PADDED),
    Case("causal mask", mask_type("padding_causal"), MASKS, PADDED),
    Case("bottom right", mask_type("padding_causal_bottom_right"), CU, {**PADDED, "g": 2}),
    Case("window", mask_type("padding_causal", window_size=(2, 0)), CU, PADDED),
    Case("window without causal", mask_type("padding", window_size=(3, 0)), CU, PADDED),
    Case("bias", mask_type("padding_causal"), {**CU, "post_scale_bias": "b 1 s_q s_kv", "bias_grad": True},
         PADDED),
    Case("alibi", mask_type("padding_causal"), {**CU, "alibi_slopes": "h"}, PADDED),
]  # fmt: skip


@pytest.mark.parametrize("case", SELF, ids=lambda case: case.name)
def test_zeroed_padding_gives_the_definition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for fmt, backend in (("bshd", "sdpa.math"), ("sbhd", "tiled"), ("bhsd", "sdpa.flash")):
        if case.name == "bias" and backend == NO_GRADIENT_OF_A_BIAS:
            continue
        call = Call(with_lse(case, backend == "tiled"), fmt)
        if "cu_seqlens_q" in call.arguments:  # two tensors might differ, and the change would not be exact
            with pytest.raises(DoesNotApply, match="zero_padding"):
                check(monkeypatch, call, backend, (("zero_padding", ()),))
            call.arguments["cu_seqlens_kv"] = call.arguments["cu_seqlens_q"]
        check(monkeypatch, call, backend, (("zero_padding", ()),))


@pytest.mark.parametrize(("fmt", "backend"), [("sbhd", "tiled"), ("bshd", "sdpa.flash"), ("bhsd", "tiled")])
def test_zeroed_padding_may_hold_anything(fmt: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the rows themselves, and what comes in as the gradient of their output."""
    form = {"bshd": (0, 1, 2), "sbhd": (1, 0, 2), "bhsd": (0, 2, 1)}[fmt]
    lengths = torch.tensor([7, 3])
    q, k, v, dout = (torch.randn(2, 7, 4, 8, dtype=torch.float64) for _ in range(4))
    spoilt = torch.arange(7) >= lengths[:, None]
    given: dict[str, list[Tensor]] = {}
    for name in ("zeros", "NaN"):
        fill = 0.0 if name == "zeros" else torch.nan
        filled = [t.masked_fill(spoilt[..., None, None], fill) for t in (q, k, v, dout)]
        leaves = [t.permute(*form, 3).contiguous().requires_grad_() for t in filled[:3]]
        cu = torch.tensor([0, 7, 10], dtype=torch.int32)
        with forced(monkeypatch, (("zero_padding", ()),)):
            out = attention(
                *leaves, qkv_format=fmt, attn_mask_type="padding_causal", cu_seqlens_q=cu, cu_seqlens_kv=cu,
                backend=backend,
            )  # fmt: skip
            grads = torch.autograd.grad(out, leaves, filled[3].permute(*form, 3).reshape(out.shape))
        given[name] = [out, *grads]
    for one, two in zip(given["zeros"], given["NaN"], strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd"])
def test_repeated_kv_heads_give_the_definition(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, name in (("tiled", "gqa"), ("sdpa.math", "mqa, causal"), ("sdpa.flash", "padding, gqa")):
        check(monkeypatch, Call(by_name[name], fmt), backend, (("expand_gqa", ()),))
    parts_of_a_group: Forced = (("expand_gqa", (("num_gqa_groups", 2),)),)
    check(monkeypatch, Call(by_name["mqa, causal"], fmt), "tiled", parts_of_a_group)


def test_a_kernel_gets_copies_of_the_blamed_tensors_alone() -> None:
    q, k, v = (torch.randn(2, 9, 4, 16, dtype=torch.float64)[..., ::2] for _ in range(3))
    q, v = q.contiguous().requires_grad_(), v.contiguous().requires_grad_()
    leaf = k.detach().requires_grad_()
    core = DotProductAttention(4, 8, qkv_format="bshd", backend="sdpa.flash")
    out = core(q, leaf, v)
    listed = core.last_selection["sdpa.flash"].adaptations
    assert [(a.name, a.changes) for a in listed] == [("contiguous", (("k", "dense"),))]
    assert listed[0].bytes == k.numel() * 8
    wanted = DotProductAttention(4, 8, qkv_format="bshd", backend="tiled")(q, leaf, v)
    for a, b in zip(
        torch.autograd.grad(out.sum(), (q, leaf, v)),
        torch.autograd.grad(wanted.sum(), (q, leaf, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


# ---- masks that hide nothing ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("arbitrary", "sdpa.flash"), ("padding", "tiled"), ("padding_causal_bottom_right", "sdpa.math")],
)
def test_a_cpu_mask_that_hides_nothing_is_dropped_and_one_that_hides_is_not(kind: str, backend: str) -> None:
    core = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type=kind, backend=backend)
    q, k, v = torch.randn(3, 2, 9, 4, 8).unbind(0)
    shape = (2, 1, 9, 9) if kind == "arbitrary" else (2, 1, 1, 9)
    mask = torch.zeros(shape, dtype=torch.bool)
    free = core(q, k, v, attention_mask=mask)
    assert [a.name for a in core.last_selection[backend].adaptations] == ["drop_mask"]
    assert core.last_selection[backend].adaptations[0].bytes == 0
    with override(adapt="never", backend="tiled"):
        wanted = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type=kind)(
            q, k, v, attention_mask=mask
        )
    torch.testing.assert_close(free, wanted)
    mask[0, ..., 7:] = True  # the same tensor, another question
    hidden = core(q, k, v, attention_mask=mask)
    assert "drop_mask" not in [a.name for a in core.last_selection[backend].adaptations]
    assert not torch.allclose(hidden[0], free[0])
    torch.testing.assert_close(hidden[1], free[1])


def test_memory_shared_with_numpy_is_looked_at_each_time() -> None:
    import numpy as np

    held = np.zeros((1, 1, 9, 9), dtype=bool)
    mask = torch.from_numpy(held)
    q, k, v = torch.randn(3, 2, 9, 4, 8).unbind(0)
    first = attention(q, k, v, attn_mask_type="arbitrary", attention_mask=mask)
    held[..., 5:] = True
    second = attention(q, k, v, attn_mask_type="arbitrary", attention_mask=mask)
    torch.testing.assert_close(second, attention(q, k[:, :5], v[:, :5]))
    assert not torch.allclose(first, second)


class NoReading(TorchDispatchMode):
    """Fails on whatever brings a tensor's contents to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "item", "is_nonzero", "equal"), (
            func
        )
        return func(*args, **(kwargs or {}))


def test_what_is_known_of_a_mask_elsewhere_is_what_was_said() -> None:
    from attnsel.runtime.trivial_mask import known_to_be_trivial

    with NoReading():
        elsewhere = torch.empty(1, 1, 4, 4, dtype=torch.bool, device="meta")
        assert not known_to_be_trivial(elsewhere)
        assert known_to_be_trivial(assume_all_visible(elsewhere))
        elsewhere.logical_not_()  # an in-place change: no longer what was spoken of
        assert not known_to_be_trivial(elsewhere)
        assert known_to_be_trivial(trivial_mask(2, 1, 8, 8, device="meta"))
        assert known_to_be_trivial((trivial_mask(2, 1, 1, 8), trivial_mask(2, 1, 1, 4)))
        assert not known_to_be_trivial((trivial_mask(2, 1, 1, 8), elsewhere))
    assert known_to_be_trivial(torch.zeros(1, dtype=torch.bool).expand(3, 1, 5, 5))
    assert not known_to_be_trivial(torch.ones(1, dtype=torch.bool).expand(3, 1, 5, 5))


def test_a_wrong_word_about_a_mask_is_caught_where_checks_are_asked_for() -> None:
    q, k, v = torch.randn(3, 2, 9, 4, 8).unbind(0)
    lie = assume_all_visible(torch.ones(1, 1, 9, 9, dtype=torch.bool).triu(1))
    with override(check=True), pytest.raises(InvalidInput, match="must hide nothing"):
        attention(q, k, v, attn_mask_type="arbitrary", attention_mask=lie)
    configure()


# ---- costs ------------------------------------------------------------------------------------------


class Made(TorchDispatchMode):
    """Bytes of the floating-point and mask memory that operations make."""

    def __init__(self, *given: Tensor | None) -> None:
        super().__init__()
        self.seen = {t.untyped_storage().data_ptr() for t in given if t is not None}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            storage = result.untyped_storage()
            if storage.data_ptr() not in self.seen:
                self.seen.add(storage.data_ptr())
                self.keep = [*getattr(self, "keep", []), result]  # or its address would be used again
                self.bytes += storage.nbytes()
        return result


def measured(change: Adapted, call: Operands) -> int:
    """What a forward makes on the way in and out, and what the kernel's output holds more."""
    p, asked = change.params, change.steps[0].before
    tokens = (p.batch_size * p.max_seqlen_q,) if p.qkv_format == "thd" else (p.batch_size, p.max_seqlen_q)
    inner = torch.zeros(*tokens, p.num_heads, p.head_dim_v, dtype=torch.float64)
    made = Made(call.q, call.k, call.v, call.extras.core_attention_bias, inner)
    with made:
        change.around(lambda call: inner)(call)
    rows = asked.batch_size * asked.max_seqlen_q * asked.num_heads * asked.head_dim_v * 8
    return made.bytes + inner.untyped_storage().nbytes() - rows


COSTS: dict[str, tuple[Case, str, Forced]] = {
    "both lengths": (by_name["causal"], "bshd", PADS["both lengths"]),
    "queries": (by_name["gqa"], "bshd", PADS["queries"]),
    "keys, as lengths": (by_name["gqa"], "bshd", PADS["keys"]),
    "with a bias": (by_name["bias with gradient"], "bshd", PADS["both lengths"]),
    "head_dim_qk": (by_name["gqa"], "sbhd", PADS["head_dim_qk"]),
    "head_dim_v": (by_name["gqa"], "bhsd", PADS["head_dim_v"]),
    "everything": (by_name["gqa"], "bshd", PADS["everything"]),
    "heads": (by_name["gqa"], "bshd", (("expand_gqa", ()),)),
    "heads of a wider v": (by_name["gqa"], "bshd", (*PADS["head_dim_v"], ("expand_gqa", ()))),
}


@pytest.mark.parametrize("name", COSTS)
def test_the_bytes_of_a_cost_are_those_that_are_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, fmt, changes = COSTS[name]
    planned, made = cost(Call(case, fmt), changes, monkeypatch)
    assert planned == made


def cost(call: Call, changes: Forced, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    asked: list[Any] = []
    monkeypatch.setattr(functional, "attend", lambda *given: asked.extend(given))
    attention(*call.qkv, **call.arguments)
    monkeypatch.undo()
    static, q, k, v, extras = asked
    with torch.no_grad():
        dense = run.make_call(static, q.contiguous(), k.contiguous(), v.contiguous(), extras, current())
        p = params_of(dense)
        listed = applied(p, changes)
        return sum(a.bytes for a in listed), measured(adapted(static, p, listed), dense)


def applied(p: Any, changes: Forced) -> tuple[Adaptation, ...]:
    listed: list[Adaptation] = []
    for name, to in changes:
        changed = ADAPTERS[name].apply(p, to)
        assert changed is not None
        p = changed[0]
        listed.append(changed[1])
    return tuple(listed)


@settings(max_examples=60)
@given(
    b=st.integers(1, 3), g=st.integers(1, 2), group=st.integers(1, 2), s_q=st.integers(1, 9),
    s_kv=st.integers(1, 9), d=st.integers(1, 9), e=st.integers(1, 9), more=st.integers(1, 7),
)  # fmt: skip
def test_the_bytes_of_any_padding_are_those_that_are_made(
    b: int, g: int, group: int, s_q: int, s_kv: int, d: int, e: int, more: int
) -> None:
    sizes = {"b": b, "g": g, "h": g * group, "s_q": s_q, "s_kv": s_kv, "d": d, "e": e}
    call = Call(Case("drawn", sizes=sizes), "bshd")
    changes: Forced = (
        ("pad_sequence", target(max_seqlen_q=s_q + more, max_seqlen_kv=s_kv + 2 * more)),
        ("pad_head_dim_qk", target(head_dim_qk=d + more)),
        ("pad_head_dim_v", target(head_dim_v=e + more)),
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        planned, made = cost(call, changes, monkeypatch)
    assert planned == made


@pytest.mark.parametrize(("name", "fmt"), [("unpack", "thd"), ("pack", "bshd"), ("zero_padding", "bshd")])
def test_the_bytes_of_packing_are_those_that_are_made_for_equal_lengths(
    name: str, fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, s, h, d, e = 3, 5, 4, 8, 6
    shape = (b * s,) if fmt == "thd" else (b, s)
    q, k, v = (torch.randn(*shape, h, n, dtype=torch.float64) for n in (d, d, e))
    cu = torch.arange(0, (b + 1) * s, s, dtype=torch.int32)
    call = Call(Case("", mask_type("padding_causal")), "bshd")
    call.fmt, call.arguments = fmt, {
        "qkv_format": fmt, "attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu,
    }  # fmt: skip
    monkeypatch.setattr(Call, "qkv", property(lambda self: (q, k, v)))
    planned, made = cost(call, ((name, ()),), monkeypatch)
    assert planned == made == b * s * h * 8 * (d + d + e + e)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_padding_a_tensor_keeps_it_dense(shape: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    t = torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    more = data.draw(st.integers(1, 3))
    padded = lengthened(t, axis, t.shape[axis] + more)
    assume(t.numel())
    assert padded.is_contiguous()
    torch.testing.assert_close(padded.narrow(axis, 0, t.shape[axis]), t)
    assert not padded.narrow(axis, t.shape[axis], more).any()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_an_adapted_call_compiles_in_one_graph(dynamic: bool) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, attn_mask_type="causal", backend="sdpa.flash")

    q, k, v = (torch.randn(2, 9, h, d, requires_grad=True) for h, d in ((4, 8), (2, 8), (2, 5)))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    wanted, out = call(q, k, v), compiled(q, k, v)
    torch.testing.assert_close(out, wanted)
    grads, expected = (torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (out, wanted))
    torch.testing.assert_close(grads, expected)
