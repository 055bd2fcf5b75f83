"""The drop-in where it is more than numbers: what goes to PyTorch, errors, autocast, compiled code, modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnsel
from attnsel import debug, override, scaled_dot_product_attention
from attnsel.f_sdpa import function
from corners import corner
from tables import each

B, H, S, D = 2, 4, 6, 8


@pytest.fixture
def q() -> torch.Tensor:
    return torch.randn(B, H, S, D, generator=torch.Generator().manual_seed(0), requires_grad=True)


def noted(monkeypatch: pytest.MonkeyPatch, name: str, what: Callable[[Any], Any]) -> list[Any]:
    """``what`` of the first argument of each call of this function of the drop-in's."""
    found: list[Any] = []
    real = getattr(function, name)
    monkeypatch.setattr(
        function, name, lambda *given, **more: found.append(what(given[0])) or real(*given, **more)
    )
    return found


@pytest.fixture
def handed_over(monkeypatch) -> list[str]:
    """The reasons for which calls went to PyTorch's function."""
    return noted(monkeypatch, "hand_over", str)


@pytest.fixture
def kinds(monkeypatch) -> list[tuple[str, str]]:
    """(attn_mask_type, bias_type) of the calls that went attnsel's way."""
    return noted(monkeypatch, "attend", lambda config: (config.attn_mask_type, config.bias_type))


TRIANGLE = torch.ones(S, S, dtype=torch.bool).tril()
MASKS = [
    (TRIANGLE, ("causal", "no_bias")),
    (TRIANGLE.expand(B, H, S, S), ("causal", "no_bias")),
    (torch.zeros(S, S).masked_fill(~TRIANGLE, -torch.inf), ("causal", "no_bias")),
    (torch.ones(B, 1, 1, S, dtype=torch.bool), ("no_mask", "no_bias")),
    (torch.zeros(S, S), ("no_mask", "no_bias")),
    (TRIANGLE.T, ("arbitrary", "no_bias")),
    (TRIANGLE.expand(B, H, S, S).index_fill(0, torch.tensor(1), True), ("arbitrary", "no_bias")),
    (torch.zeros(S, S).masked_fill(~TRIANGLE, -3e38), ("no_mask", "post_scale_bias")),
    (torch.zeros(S, S, requires_grad=True), ("no_mask", "post_scale_bias")),
    (torch.ones(S, S + 3, dtype=torch.bool).tril(3), ("causal_bottom_right", "no_bias")),
]  # fmt: skip


def test_what_a_mask_becomes(q, kinds, handed_over):
    corners = [
        (corner("upper_left", S, S), ("causal", "no_bias")),
        (corner("lower_right", S, S + 3), ("causal_bottom_right", "no_bias")),
    ]
    for mask, kind in MASKS + corners:
        k = torch.randn(B, H, mask.shape[-1], D)
        found = scaled_dot_product_attention(q, k, k, mask)
        plain = mask._materialize() if type(mask).__name__ == "CausalBias" else mask
        torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, k, plain))
        assert (kinds.pop(), handed_over) == (kind, [])
    for mask in (corner("lower_right", S, S - 1), corner("upper_left", S - 1, S)):  # PyTorch's words or NaN
        k = torch.randn(B, H, mask.seq_len_kv, D)
        with contextlib.suppress(RuntimeError):
            scaled_dot_product_attention(q, k, k, mask)
        assert handed_over.pop()
    mask = TRIANGLE.clone()  # its contents may change between calls
    scaled_dot_product_attention(q, q, q, mask)
    scaled_dot_product_attention(q, q, q, mask.fill_(True))
    assert [kind for kind, _ in kinds] == ["causal", "no_mask"]


def test_a_note_of_attnsels_polarity_means_nothing_here(q):
    """attnsel.assume_all_visible speaks of masks in which True is masked out."""
    mask = attnsel.assume_all_visible(torch.zeros(S, S, dtype=torch.bool))
    assert scaled_dot_product_attention(q, q, q, mask).eq(0).all()


IN_PLACE = ("query", "key", "value")


def test_errors_are_pytorchs(q):
    """Type and words; where PyTorch takes what is given, its shape."""
    for line in Path(__file__).with_name("errors.txt").read_text().splitlines()[1:]:
        given = eval(f"dict({line})", {"torch": torch, "corner": corner})
        told = []
        for sdpa in (F.scaled_dot_product_attention, scaled_dot_product_attention):
            try:
                more = {name: value for name, value in given.items() if name not in IN_PLACE}
                told.append(sdpa(*(given.get(name, q) for name in IN_PLACE), **more).shape)
            except Exception as error:  # whatever PyTorch raises
                told.append((type(error), str(error)))
        assert told[0] == told[1], line


def test_what_broadcasts_and_any_scale_have_pytorchs_numbers_and_gradients(q):
    """Of its math kernel: that of flash for CPUs gives NaN for causal with a negative scale.

    All else: tests/net/behaviour/f_sdpa.txt.
    """
    for line in Path(__file__).with_name("broadcast.txt").read_text().splitlines()[1:]:
        torch.manual_seed(0)
        given = dict.fromkeys(IN_PLACE, q.detach()) | eval(
            f"dict({line})", {"torch": torch, "corner": corner}
        )
        mask = given.get("attn_mask")
        leaves = [
            *IN_PLACE,
            *(["attn_mask"] if type(mask) is torch.Tensor and mask.is_floating_point() else []),
        ]
        results = []
        for sdpa, around in (
            (F.scaled_dot_product_attention, sdpa_kernel(SDPBackend.MATH)),
            (scaled_dot_product_attention, contextlib.nullcontext()),
        ):
            made = {name: given[name].double().detach().requires_grad_() for name in leaves}
            with around:
                out = sdpa(**{**given, **made})
            results.append((out.detach(), *torch.autograd.grad(out.sin().sum(), list(made.values()))))
        for found, wanted in zip(*results[::-1], strict=True):
            torch.testing.assert_close(
                found, wanted, rtol=1e-9, atol=1e-9, msg=lambda said, line=line: f"{line}: {said}"
            )


@each(
    ("make", "reason"),
    [
        (lambda q: torch.nested.as_nested_tensor([q[0], q[1]], layout=torch.jagged), "a NestedTensor"),
        (lambda q: q.to("meta"), "a tensor on meta"),
        (lambda q: q[:0], "an empty tensor"),
        (lambda q: torch._neg_view(q.detach()), "a view that is negated when it is read"),
        (lambda q: q.detach().to(torch.complex64), "tensors of torch.complex64"),
    ],
)
def test_tensors_that_are_pytorchs(q, make, reason, handed_over):
    given = make(q)
    raises = pytest.raises(
        (NotImplementedError, RuntimeError)
    )  # PyTorch has no kernel for complex ones either
    with raises if given.is_complex() else contextlib.nullcontext():
        scaled_dot_product_attention(given, given, given)
    assert handed_over.pop() == reason


def test_a_choice_of_the_programs_stands(q, handed_over):
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    for order, more in ((SDPBackend.MATH, {}), ([*kernels, SDPBackend.MATH], {"set_priority": True})):
        with sdpa_kernel(order, **more):
            scaled_dot_product_attention(q, q, q)
        assert handed_over.pop()
    scaled_dot_product_attention(q, q, q)
    assert handed_over == []
    torch._dynamo.reset()
    graphs = []

    def program(q: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, q, q)

    torch.compile(program, backend=lambda graph, _: graphs.append(str(graph.graph)) or graph, fullgraph=True)(
        q
    )
    assert "torch._C._nn.scaled_dot_product_attention" in graphs[0]


def test_a_reason_is_said_once(q, caplog):
    debug._announced.clear()
    with override(debug=1), caplog.at_level("INFO", "attnsel"):
        for _ in range(3):
            scaled_dot_product_attention(q.to("meta"), q.to("meta"), q.to("meta"))
    assert caplog.messages == [
        "attnsel: scaled_dot_product_attention: PyTorch's own takes it: a tensor on meta"
    ]


def test_transforms_are_pytorchs(q, handed_over):
    t = q.detach()
    found = torch.vmap(lambda one: scaled_dot_product_attention(one, one, one))(t)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(t, t, t))
    torch.func.grad(lambda one: scaled_dot_product_attention(one, one, one).sum())(t)
    with sdpa_kernel(SDPBackend.MATH):  # no other kernel has a forward derivative
        torch.func.jvp(lambda one: scaled_dot_product_attention(one, one, one), (t,), (t,))
    assert len(handed_over) == 3
    assert all("transform" in reason for reason in handed_over)


def test_autocast(q, handed_over):
    mask = torch.randn(S, S)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = scaled_dot_product_attention(q, q, q, mask)
        wanted = F.scaled_dot_product_attention(q, q, q, mask)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2)
    assert handed_over == []


def test_compiled_without_a_graph_break(q):
    torch._dynamo.reset()
    mask, bias = TRIANGLE.T, torch.randn(1, H, S, S, requires_grad=True)

    def program(sdpa: Any, q: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        causal = sdpa(q[0], q[0, :2], q[0, :2], is_causal=True, enable_gqa=True)
        return causal + sdpa(q, q, q, mask) + sdpa(q, q, q, bias, scale=0.3)

    results = []
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for run, sdpa in ((program, F.scaled_dot_product_attention), (compiled, scaled_dot_product_attention)):
        out = run(sdpa, q, mask, bias)
        results.append((out, *torch.autograd.grad(out.sin().sum(), (q, bias))))
    for found, wanted in zip(*results[::-1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
