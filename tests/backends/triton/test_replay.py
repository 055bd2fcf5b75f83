"""Launches that are remembered: through Triton's own path, on a driver that writes down what it is given."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton

from attnsel.backends.contract import Inputs, Result, Spec, Steps
from attnsel.backends.triton import run as replay
from attnsel.backends.triton.run import backward, forward
from mock_gpu import Launched, launching
from tables import each

pytestmark = pytest.mark.skipif(not replay.remembers(), reason="not with this Triton")

Made = Callable[[], tuple[Spec, Inputs]]
BATCH, HEADS, GROUPS, ROWS, WIDTH = 2, 4, 2, 48, 64


def heads_of(heads: int, rows: int) -> Tensor:
    return torch.zeros(BATCH, rows, heads, WIDTH, dtype=torch.float16).transpose(1, 2)


def dense(rows_q: int = ROWS, rows_kv: int = ROWS, **tensors: Any) -> Inputs:
    return Inputs(heads_of(HEADS, rows_q), heads_of(GROUPS, rows_kv), heads_of(GROUPS, rows_kv), **tensors)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(alike: bool) -> Inputs:
    q, k, v = (torch.zeros(60, heads, WIDTH, dtype=torch.float16) for heads in (HEADS, GROUPS, GROUPS))
    cu = int32(0, 20, 60)
    other = cu if alike else cu.clone()
    return Inputs(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=other, max_seqlen_q=48, max_seqlen_kv=48)


def spec(**fields: Any) -> Spec:
    return Spec(softmax_scale=0.1, **fields)


TRAINED = spec(need_grad=True)
CAUSAL = spec(need_grad=True, window_right=0)
CALLS: dict[str, Made] = {
    "full": lambda: (TRAINED, dense()),
    "causal, alibi, softcap": lambda: (
        dataclasses.replace(CAUSAL, softcap=2.0), dense(alibi_slopes=torch.zeros(HEADS)),
    ),
    "lengths": lambda: (
        dataclasses.replace(CAUSAL, bottom_right=True),
        dense(seqlens_q=int32(9, 48), seqlens_kv=int32(40, 3)),
    ),
    "packed": lambda: (dataclasses.replace(CAUSAL, packed=True), packed(alike=True)),
    "packed, apart": lambda: (dataclasses.replace(CAUSAL, packed=True), packed(alike=False)),
    "everything": lambda: (
        dataclasses.replace(TRAINED, softmax_type="learnable", dropout_p=0.5, return_max_logit=True),
        dense(
            bias=torch.zeros(1, HEADS, ROWS, ROWS, dtype=torch.float16, requires_grad=True),
            attn_mask=torch.zeros(BATCH, 1, 1, ROWS, dtype=torch.bool),
            softmax_offset=torch.zeros(HEADS, dtype=torch.float16),
            dropout_seed=torch.tensor(1),
            dropout_offset=torch.tensor(2),
        ),
    ),
    "decode": lambda: (spec(bottom_right=True, window_right=0, return_max_logit=True), dense(1, 3000)),
    "decode, pages": lambda: (
        spec(bottom_right=True, window_right=0),
        Inputs(
            heads_of(HEADS, 1), *torch.zeros(2, 40, GROUPS, 16, WIDTH, dtype=torch.float16),
            seqlens_kv=int32(100, 300), block_table=torch.zeros(BATCH, 20, dtype=torch.int32),
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def seen() -> Iterator[list[Launched]]:
    with launching(80, processors=108) as launched:
        yield launched


def launches(made: tuple[Spec, Inputs], seen: list[Launched]) -> list[Launched]:
    """What a call launches: forward and, where it asks for one, backward."""
    of_spec, inputs = made
    seen.clear()
    result = forward(of_spec, inputs)
    if of_spec.need_grad:
        assert result.lse is not None
        backward(of_spec, inputs, result, torch.zeros_like(result.out), torch.zeros_like(result.lse))
    return list(seen)


def assert_same(actual: list[Launched], expected: list[Launched], inputs: Inputs) -> None:
    """Equal but for where results lie, whose shapes are: of what is given, the same memory."""
    given = {t.data_ptr(): name for name, t in inputs._asdict().items() if isinstance(t, Tensor)}
    assert [(a.kernel, a.programs) for a in actual] == [(e.kernel, e.programs) for e in expected]
    for a, e in zip(actual, expected, strict=True):
        assert a.arguments.keys() == e.arguments.keys()
        for name, value in a.arguments.items():
            wanted = e.arguments[name]
            if not isinstance(value, Tensor):
                assert value == wanted, (a.kernel, name)
            elif wanted.data_ptr() in given:
                assert value.data_ptr() == wanted.data_ptr(), (a.kernel, name)
            else:
                # A result: as many bytes behind its address as the kernel was told of.
                assert value.numel() == wanted.numel(), (a.kernel, name)
                assert value.data_ptr() % 16 == wanted.data_ptr() % 16 == 0


@each("name", CALLS)
def test_the_second_call_of_a_kind_launches_what_the_first_would(name: str, seen: list[Launched]) -> None:
    replay.forget()
    launches(CALLS[name](), seen)
    second = CALLS[name]()
    hits = replay._place.cache_info().hits
    again = launches(second, seen)
    assert replay._place.cache_info().hits > hits
    replay.forget()
    assert_same(again, launches(second, seen), second[1])


def test_a_bound_call_launches_what_the_forward_does(seen: list[Launched]) -> None:
    replay.forget()
    made, other = dense(1, 3000), dense(1, 3000)
    call = replay.bind(spec(), made)
    assert call is not None
    call(*made[:3])
    seen.clear()
    out, bound = call(*other[:3]), list(seen)
    replay.forget()
    assert_same(bound, launches((spec(), other), seen), other)
    assert bound[-1].arguments["Out"] is out
    assert not any(replay.bind(*CALLS[name]()) for name in ("lengths", "packed", "decode, pages"))


def test_both_directions_bound_launch_what_forward_and_backward_do(seen: list[Launched]) -> None:
    replay.forget()
    made, other = dense(), dense()
    steps = replay.bind(CAUSAL, made)
    assert isinstance(steps, Steps)
    for given in (made, other):
        seen.clear()
        out, lse = steps.forward(*given[:3])
        douts = torch.zeros_like(out), out.new_zeros(()).expand_as(out)
        for dout in douts:
            steps.backward(*given[:3], out, lse, dout)
    bound = list(seen)
    replay.forget()
    seen.clear()
    result = forward(CAUSAL, other)
    for dout in douts:
        backward(CAUSAL, other, result, dout)
    assert_same(bound, list(seen), other)


def test_tensors_are_looked_for_where_they_are() -> None:
    """Under another name an argument would be found nowhere, and its calls launched the slow way."""
    made = "part_out part_lse part_peak dout dlse lse2 delta dq parts_k dk parts_v dv dbias dsinks"
    known = {*Inputs._fields, *Result._fields, *made.split()}
    assert {name for names in replay._SOURCES.values() for name in names} <= known


def test_what_a_pass_makes_begins_as_it_did(seen: list[Launched]) -> None:
    """Rows of no sequence are nobody's to write: zeros, and an LSE of -inf."""
    replay.forget()
    first, second = (forward(*CALLS["packed"]()) for _ in range(2))
    assert second.lse is not None
    assert not second.out.any()
    assert (second.lse == float("-inf")).all()
    assert (first.out.stride(), first.out.dtype) == (second.out.stride(), second.out.dtype)
    made = CALLS["packed"]()
    grads = [backward(*made, first, torch.zeros_like(first.out)) for _ in range(2)]
    assert not any(t.any() for t in grads[1][:3])
    assert [t.stride() for t in grads[0][:3]] == [t.stride() for t in grads[1][:3]]


def test_one_tensor_in_three_places_says_nothing_of_the_next_call(seen: list[Launched]) -> None:
    replay.forget()
    one = heads_of(HEADS, ROWS)
    launches((spec(), Inputs(one, one, one)), seen)
    other = Inputs(*(heads_of(HEADS, ROWS) for _ in range(3)))
    (launched,) = launches((spec(), other), seen)
    assert [launched.arguments[name].data_ptr() for name in "QKV"] == [t.data_ptr() for t in other[:3]]


def at(t: Tensor, offset: int) -> Tensor:
    """The same numbers that many elements further on in memory."""
    moved = torch.zeros(t.numel() + offset, dtype=t.dtype)[offset:]
    return moved.as_strided(t.shape, t.stride())


ANOTHER: dict[str, Callable[[Spec, Inputs], tuple[Spec, Inputs]]] = {
    "scale": lambda s, i: (dataclasses.replace(s, softmax_scale=0.2), i),
    "mask": lambda s, i: (dataclasses.replace(s, window_right=0), i),
    "alignment": lambda s, i: (s, i._replace(k=at(i.k, 4))),
    "rows": lambda s, i: (s, i._replace(q=heads_of(HEADS, ROWS + 1))),
    "memory order": lambda s, i: (s, i._replace(v=i.v.contiguous())),
    "dtype": lambda s, i: (s, Inputs(*(t.bfloat16() for t in i[:3]))),
    "lengths": lambda s, i: (s, i._replace(seqlens_q=int32(3, 4), seqlens_kv=int32(5, 6))),
    "shared lengths": lambda s, i: (s, i._replace(seqlens_q=(t := int32(3, 4)), seqlens_kv=t)),
}


@each("what", ANOTHER)
def test_another_kind_of_call_is_not_mistaken_for_it(what: str, seen: list[Launched]) -> None:
    replay.forget()
    launches(CALLS["full"](), seen)
    other = ANOTHER[what](*CALLS["full"]())
    again = launches(other, seen)
    replay.forget()
    assert_same(again, launches(other, seen), other[1])


@each(
    "tensors",
    [
        {"alibi_slopes": torch.zeros(2 * HEADS)[::2]},
        {"dropout_seed": torch.tensor(1, dtype=torch.int32), "dropout_offset": torch.tensor(2)},
    ],
)
def test_what_is_copied_for_a_call_is_copied_for_the_next(
    tensors: dict[str, Tensor], seen: list[Launched]
) -> None:
    replay.forget()
    call = (spec(dropout_p=0.5 if "dropout_seed" in tensors else 0.0), dense(**tensors))
    launches(call, seen)
    launched = launches(call, seen)
    name = "Seed" if "dropout_seed" in tensors else "Slopes"
    (copied,) = [each.arguments[name] for each in launched]
    assert copied.data_ptr() not in [t.data_ptr() for t in tensors.values()]
    assert replay.place_for("forward", *call) == []


def test_a_repeated_call_with_a_wrong_tensor_is_refused_all_the_same(seen: list[Launched]) -> None:
    replay.forget()
    of_spec, inputs = CALLS["full"]()
    forward(of_spec, inputs)
    with pytest.raises(ValueError, match="share"):
        forward(of_spec, inputs._replace(k=inputs.k.bfloat16()))
    with pytest.raises(ValueError, match="must be dense"):
        forward(of_spec, inputs._replace(v=inputs.v.contiguous().to_sparse()))


def test_chosen_tiles_and_launches_of_a_triton_that_nobody_read_are_not_remembered(
    seen: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay.forget()
    call = CALLS["full"]()
    forward(*call, splits=0)
    assert replay.place_for("forward", *call) == []
    for release in ("3.2.0", "3.10.0"):
        monkeypatch.setattr(triton, "__version__", release)
        forward(*call)
        assert replay.place_for("forward", *call) == []
