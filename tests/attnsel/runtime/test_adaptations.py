"""Adaptations carried out: each gives the definition of attention back, and makes what its cost says.

Where no CPU kernel needs a change, it is forced: a selection that lists it is put before the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention_calls import Problem, complaint, make
from attnsel import DotProductAttention, InvalidInput, attention, configure, functional, override
from attnsel.decision import select
from attnsel.runtime import dispatch as run
from attnsel.runtime.adaptations import Adapted, adapted, lengthened
from attnsel.runtime.call import Call as Operands
from attnsel.runtime.call import assume_all_visible, known_to_be_trivial, trivial_mask
from attnsel.runtime.inputs import params_of
from attnsel.selection.adaptations import ADAPTERS
from attnsel.settings import current
from attnsel.verdicts.reasons import Adaptation
from call_cases import PLAIN_AXES, Row, made, rows
from tables import each

torch.set_num_threads(1)

Forced = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


class DoesNotApply(Exception):
    """The adaptation would not be exact here, or its candidate takes the changed call no better."""


def applied(p: Any, changes: Forced) -> tuple[Any, tuple[Adaptation, ...]]:
    listed: list[Adaptation] = []
    for name, target in changes:
        changed = ADAPTERS[name].apply(p, target)
        if changed is None:
            raise DoesNotApply(name)
        p = changed[0]
        listed.append(changed[1])
    return p, tuple(listed)


@contextmanager
def forced(changes: Forced) -> Iterator[list[Any]]:
    """Selections list ``changes`` besides what the changed question needs; yields the selections made."""
    selections: list[Any] = []

    def choose(asked: Any, *args: Any, **kwargs: Any) -> Any:
        p, listed = applied(asked, changes)
        answer = select(p, *args, **kwargs)
        if answer.backend is None:
            raise DoesNotApply(answer.report())
        chosen = answer[answer.backend]
        chosen = chosen._replace(adaptations=(*listed, *chosen.adaptations))
        selections.append(answer.with_candidates((chosen,)).for_params(asked))
        return selections[-1]

    run.clear_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "select", choose)
        patch.setattr("attnsel.runtime.inputs._ragged", lambda *given: False)  # what unpacking may cost
        yield selections
    run.clear_cache()


def asked_of_the_runtime(problem: Problem, **more: Any) -> list[Any]:
    """What ``attention`` hands on for this call: its configuration, q, k, v and the other tensors."""
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "attend_again", lambda *given: asked.extend(given))
        patch.setattr(functional, "attend_anew", lambda *given: None)
        attention(*problem.qkv(problem.leaves), **problem.arguments | more)
    return asked


def check(problem: Problem, backend: str, changes: Forced) -> None:
    """Output, lse, largest score and every gradient, by autograd and written out, against the definition."""
    leaves = {name: t for name, t in problem.leaves.items() if t.requires_grad}
    static, q, k, v, extras = asked_of_the_runtime(problem, backend=backend)
    with forced(changes) as selections:
        result = run.attend(static, q, k, v, extras)
        names = [a.name for a in selections[-1].candidates[0].adaptations]
        assert names[: len(changes)] == [name for name, _ in changes]
        out, *others = result if isinstance(result, tuple) else (result,)
        actual = {"out": out.detach()}
        if problem.case["lse"]:
            actual["lse"] = others[0]
        if problem.case["max_logit"]:
            actual["max_logit"] = others[-1]
        grads = torch.autograd.grad(out, list(leaves.values()), problem.dout)
        actual |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
        assert complaint(problem, actual) == ""
        if backend == "sdpa.math":
            return  # it has no backward outside autograd
        with torch.no_grad():
            written = run.gradients(static, q, k, v, extras, problem.dout)
            before = run.attend_with_lse(static.replace(is_training=True), q, k, v, extras)[:2]
            known = run.gradients(static, q, k, v, extras, problem.dout, before)
    for a, b in zip(known, written, strict=True):  # from the output and lse of before: the same bits
        assert (a is None and b is None) or torch.equal(a, b)
    named = dict(zip(("dq", "dk", "dv", "dcore_attention_bias", "dsoftmax_offset"), written, strict=True))
    held = {name: named.get(name, t) for name, t in actual.items() if name == "out" or name in named}
    assert complaint(problem, held) == ""


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
EXPAND, PART_OF_A_GROUP = (("expand_gqa", ()),), (("expand_gqa", (("num_gqa_groups", 2),)),)


def changes_of(row: Row, problem: Problem) -> Iterator[Forced]:
    """What applies to this call: some of it the planner would not do, for its cost."""
    case = problem.case
    if row["heads"][1] > 1:
        yield PART_OF_A_GROUP if row["heads"] == (1, 6) else EXPAND
    if case["fmt"] == "thd":
        yield (("unpack", ()),)
        return
    yield PADS[row["pads"]]
    if case["lens_q"] is not None:
        yield (("pack", ()),)
        if case["lens_q"] == case["lens_kv"] and "causal" in case["mask"] and not case["max_logit"]:
            yield (("zero_padding", ()),)


def is_exact(problem: Problem, changes: Forced) -> bool:
    """Under a mask an added key is hidden; but not from a largest score, and no diagonal may move, as no mask
    type says both lengths."""
    case, (name, to) = problem.case, changes[0]
    if name != "pad_sequence" or case["mask"] != "arbitrary":
        return True
    more = {
        side: dict(to).get(f"max_seqlen_{side}", case[f"s_{side}"]) - case[f"s_{side}"]
        for side in ("q", "kv")
    }
    diagonal = case["window"] is not None or case["alibi"] is not None
    return not (case["max_logit"] or (diagonal and more["q"] != more["kv"]))


def differs(row: Row, backend: str, **more: Any) -> list[str]:
    """The changes that do not give the definition, or cannot be made where they should be, or the reverse."""
    problem, found = made(row, **more), []
    for changes in changes_of(row, problem):
        refused = ""
        try:
            check(problem, backend, changes)
        except AssertionError as error:
            found.append(f"{changes}: {error!r}")
        except DoesNotApply as error:
            refused = str(error)
        if refused != ("" if is_exact(problem, changes) else "pad_sequence"):
            found.append(f"{changes}: does not apply: {refused}")
    return found


@each("row", rows(pads=list(PADS)))
def test_every_change_gives_the_definition_around_tiled(row: Row) -> None:
    assert differs(row, "tiled") == []


@each("row", rows(**PLAIN_AXES, backend=["sdpa.math", "sdpa.flash"], pads=list(PADS)))
def test_every_change_gives_the_definition_around_any_kernel(row: Row) -> None:
    assert differs(row, row["backend"], lse=row["backend"] == "sdpa.flash" and row["results"] == "lse") == []


def test_lengths_that_may_differ_are_not_taken_for_the_same() -> None:
    """In two tensors. Zeroed padding would not be exact."""
    problem = made({"batch": "cu_seqlens", "band": "causal"})
    problem.tensors["cu_seqlens_kv"] = problem.tensors["cu_seqlens_q"].clone()
    with pytest.raises(DoesNotApply, match="zero_padding"):
        check(problem, "tiled", (("zero_padding", ()),))


@each("fmt, backend", [("sbhd", "tiled"), ("bshd", "sdpa.flash"), ("bhsd", "tiled")])
def test_zeroed_padding_may_hold_anything(fmt: str, backend: str) -> None:
    """Both the rows themselves, and what comes in as the gradient of their output."""
    for garbage in ("0", "nan"):
        problem = made({"batch": "cu_seqlens", "band": "causal", "fmt": fmt}, garbage=garbage)
        check(problem, backend, (("zero_padding", ()),))


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
    found, right = (torch.autograd.grad(t.sum(), (q, leaf, v)) for t in (out, wanted))
    torch.testing.assert_close(found, right)


# ---- masks that hide nothing ------------------------------------------------------------------------


@each(
    "kind, backend",
    [("arbitrary", "sdpa.flash"), ("padding", "tiled"), ("padding_causal_bottom_right", "sdpa.math")],
)
def test_a_cpu_mask_that_hides_nothing_is_dropped_and_one_that_hides_is_not(kind: str, backend: str) -> None:
    core = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type=kind, backend=backend)
    q, k, v = torch.randn(3, 2, 9, 4, 8).unbind(0)
    mask = torch.zeros((2, 1, 9, 9) if kind == "arbitrary" else (2, 1, 1, 9), dtype=torch.bool)
    free = core(q, k, v, attention_mask=mask)
    assert [a.name for a in core.last_selection[backend].adaptations] == ["drop_mask"]
    assert core.last_selection[backend].adaptations[0].bytes == 0
    with override(adapt="never"):
        plain = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type=kind, backend="tiled")
        torch.testing.assert_close(free, plain(q, k, v, attention_mask=mask))
    mask[0, ..., 7:] = True  # the same tensor, another question
    hidden = core(q, k, v, attention_mask=mask)
    assert "drop_mask" not in [a.name for a in core.last_selection[backend].adaptations]
    assert not torch.allclose(hidden[0], free[0])
    torch.testing.assert_close((hidden[1], core(q, k, v, attention_mask=mask.zero_())), (free[1], free))
    assert [a.name for a in core.last_selection[backend].adaptations] == ["drop_mask"]


def test_memory_shared_with_numpy_is_looked_at_each_time() -> None:
    held = torch.zeros(1, 1, 9, 9, dtype=torch.bool).numpy()
    q, k, v = torch.randn(3, 2, 9, 4, 8).unbind(0)
    mask = torch.from_numpy(held)
    first = attention(q, k, v, attn_mask_type="arbitrary", attention_mask=mask)
    held[..., 5:] = True
    second = attention(q, k, v, attn_mask_type="arbitrary", attention_mask=mask)
    torch.testing.assert_close(second, attention(q, k[:, :5], v[:, :5]))
    assert not torch.allclose(first, second)


class NoReading(TorchDispatchMode):
    """Fails on whatever brings a tensor's contents to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = ("_local_scalar_dense", "item", "is_nonzero", "equal")
        assert func.overloadpacket.__name__ not in reads, func
        return func(*args, **(kwargs or {}))


def test_what_is_known_of_a_mask_elsewhere_is_what_was_said() -> None:
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
    """Bytes of the floating-point memory that operations make."""

    def __init__(self, *given: Tensor | None) -> None:
        super().__init__()
        self.seen = {t.untyped_storage().data_ptr() for t in given if t is not None}
        self.kept: list[Tensor] = []  # or an address would be used again
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            storage = result.untyped_storage()
            if storage.data_ptr() not in self.seen:
                self.seen.add(storage.data_ptr())
                self.kept.append(result)
                self.bytes += storage.nbytes()
        return result


def measured(change: Adapted, call: Operands) -> int:
    """What a forward makes on the way in and out, and what the kernel's output holds more."""
    p, asked = change.params, change.steps[0].before
    tokens = (p.batch_size * p.max_seqlen_q,) if p.qkv_format == "thd" else (p.batch_size, p.max_seqlen_q)
    inner = torch.zeros(*tokens, p.num_heads, p.head_dim_v, dtype=torch.float64)
    with Made(call.q, call.k, call.v, call.extras.core_attention_bias, inner) as seen:
        change.around(lambda call: inner)(call)
    held = asked.batch_size * asked.max_seqlen_q * asked.num_heads * asked.head_dim_v * 8
    return seen.bytes + inner.untyped_storage().nbytes() - held


def cost(problem: Problem, changes: Forced) -> tuple[int, int]:
    """The bytes that are planned, and those that are made."""
    static, q, k, v, extras = asked_of_the_runtime(problem)
    with torch.no_grad():
        dense = run.make_call(static, q.contiguous(), k.contiguous(), v.contiguous(), extras, current())
        p = params_of(dense)
        _, listed = applied(p, changes)
        return sum(a.bytes for a in listed), measured(adapted(static, p, listed), dense)


SMALL = st.integers(1, 9)


@settings(max_examples=60)
@given(
    b=st.integers(1, 3), g=st.integers(1, 2), r=st.integers(1, 2), s_q=SMALL, s_kv=SMALL, d=SMALL, e=SMALL,
    more=st.integers(1, 7),
)  # fmt: skip
def test_the_bytes_of_any_padding_are_those_that_are_made(more: int, **sizes: int) -> None:
    changes: Forced = (
        ("pad_sequence", target(max_seqlen_q=sizes["s_q"] + more, max_seqlen_kv=sizes["s_kv"] + 2 * more)),
        ("pad_head_dim_qk", target(head_dim_qk=sizes["d"] + more)),
        ("pad_head_dim_v", target(head_dim_v=sizes["e"] + more)),
    )
    problem = make({"dtype": "float64", **sizes})
    for changed in (
        changes,
        changes[:1],
        changes[1:],
        *([EXPAND, changes + EXPAND] if sizes["r"] > 1 else []),
    ):
        planned, made_of_it = cost(problem, changed)
        assert planned == made_of_it


@each("name, fmt", [("unpack", "thd"), ("pack", "bshd"), ("zero_padding", "bshd")])
def test_the_bytes_of_packing_are_those_that_are_made_for_equal_lengths(name: str, fmt: str) -> None:
    b, s, h, d, e = 3, 5, 4, 8, 6
    problem = make({
        "dtype": "float64", "fmt": fmt, "b": b, "s_q": s, "s_kv": s, "g": h, "d": d, "e": e,
        "mask": "padding_causal", "lengths": "cu_seqlens", "lens_q": [s] * b, "lens_kv": [s] * b,
    })  # fmt: skip
    problem.tensors["cu_seqlens_kv"] = problem.tensors["cu_seqlens_q"]
    planned, made_of_it = cost(problem, ((name, ()),))
    assert planned == made_of_it == b * s * h * 8 * (d + d + e + e)


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


@each("dynamic", [False, True])
def test_an_adapted_call_compiles_in_one_graph(dynamic: bool) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, attn_mask_type="causal", backend="sdpa.flash")

    q, k, v = (torch.randn(2, 9, h, d, requires_grad=True) for h, d in ((4, 8), (2, 8), (2, 5)))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    wanted, out = call(q, k, v), compiled(q, k, v)
    torch.testing.assert_close(out, wanted)
    grads, expected = (torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (out, wanted))
    torch.testing.assert_close(grads, expected)
