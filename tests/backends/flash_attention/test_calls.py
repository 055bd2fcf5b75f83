"""What attnsel makes of FlashAttention's packages, on their stand-ins (tests/support/emulated_flash_attn.py),
which are strict about every release's arguments, against the definition of attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import CAUSAL, Case, carried_out, error, expected, spoilt, upstream, with_garbage
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.flash_attention import four, three, two
from attnsel.backends.flash_attention.kernel import Function
from attnsel.flash_attn.shim import install, uninstall
from emulated_flash_attn import installed
from flash_attention_cases import EVERY, RELEASES, Release, takes
from forward_checks import pages_of
from reference import attention_reference
from varlen_cases import made

torch.set_num_threads(1)

NEWEST = ("2.8.3", "3.0.0", "4.0.0b36")
BY_NAME = {case.name: case for case in EVERY}


@pytest.fixture(params=RELEASES, ids=lambda release: f"{release.generation}-{release.version}")
def release(request: pytest.FixtureRequest) -> Iterator[Release]:
    """A release that is there."""
    with installed(request.param.generation, request.param.version):
        yield request.param


def half(case: Case | str, **changes: Any) -> tuple[Spec, Inputs]:
    torch.manual_seed(0)
    spec, inputs = made(BY_NAME[case] if isinstance(case, str) else case, torch.float16)
    return dataclasses.replace(spec, **changes), inputs


def differences(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """What is off by more than eight units of fp16 of the largest: results are rounded once or twice."""
    assert actual.keys() == wanted.keys()
    wrong = []
    for name, one in wanted.items():
        finite = one[one.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        if not error(actual[name], one) <= 2**-7 * max(largest, 0.1):
            wrong.append(name)
    return wrong


EXPECTED: dict[tuple[str, bool], dict[str, Tensor]] = {}  # the releases get the same numbers


def test_numbers(release: Release) -> None:
    """What it takes: all of it where the release is the newest of its generation, else about ten cases."""
    taken = [case for case in EVERY if takes(release, case)]
    assert len(taken) >= 30
    if release.version not in NEWEST:
        taken = taken[RELEASES.index(release) % 4 :: 4]
    found = {}
    for case in taken:
        spec, inputs = half(case)
        for dlse in (False, True):
            kernel = release.kernel
            actual, dout, into_lse = carried_out(kernel.forward, kernel.backward, spec, inputs, dlse)
            if (case.name, dlse) not in EXPECTED:
                EXPECTED[case.name, dlse] = expected(spec, inputs, dout, into_lse)
                del EXPECTED[case.name, dlse]["max_logit"]
            found[case.name, dlse] = differences(actual, EXPECTED[case.name, dlse])
    assert {case: wrong for case, wrong in found.items() if wrong} == {}


def test_what_lies_in_padding_reaches_nothing(release: Release) -> None:
    """NaN in every row of no sequence: the same numbers, and zeros there."""
    for name in ("self lengths, causal", "packed: gaps, bottom-right", "packed: sinks, gaps"):
        if not takes(release, BY_NAME[name]):
            continue
        spec, inputs = half(name)
        result = release.kernel.forward(spec, inputs)
        dout, _ = upstream(result)
        grads = release.kernel.backward(spec, inputs, result, dout)

        other = with_garbage(spec, inputs)
        again = release.kernel.forward(spec, other)
        spoilt_grads = release.kernel.backward(spec, other, again, spoilt(spec, inputs, dout, "q"))
        for one, other_one in zip((*result[:2], *grads), (*again[:2], *spoilt_grads), strict=True):
            assert one is other_one is None or torch.equal(one, other_one), name


@pytest.mark.parametrize("release", RELEASES[:4], ids=lambda release: release.version, indirect=True)
def test_dropout_is_replayed_by_the_backward(release: Release) -> None:
    """With the forward's random state the backward is its gradient; without it there is none."""
    kernel = release.kernel
    for name in ("plain", "packed: plain"):
        spec, inputs = half(name, dropout_p=0.4, need_grad=True)
        torch.manual_seed(3)
        result = kernel.forward(spec, inputs)
        # dV alone is linear in what was kept: sum(dV * v) = sum(out * dout).
        dout, _ = upstream(result)
        grads = kernel.backward(spec, inputs, result, dout)
        of_v, of_out = (
            (grads.v.double() * inputs.v.double()).sum(),
            (result.out.double() * dout.double()).sum(),
        )
        assert torch.allclose(of_v, of_out, rtol=0.02)
        torch.manual_seed(4)
        assert not torch.equal(kernel.forward(spec, inputs).out, result.out)
        with pytest.raises(ValueError, match="random numbers"):
            kernel.backward(spec, inputs, result._replace(saved=()), dout)


def test_the_documented_function_is_bound_for_dense_calls(release: Release) -> None:
    """PyTorch differentiates it itself, and its numbers are those of forward and backward."""
    kernel = release.kernel
    spec, inputs = half(Case("causal", CAUSAL, sizes={"s_q": 27}))
    call = kernel.bind(spec, inputs)
    assert call is not None
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = call(*leaves, *(None,) * 5)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    result = kernel.forward(dataclasses.replace(spec, need_grad=True), inputs)
    assert torch.equal(out, result.out)
    for one, other in zip(grads, kernel.backward(spec, inputs, result, dout)[:3], strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="bound for q, k and v alone"):
        call(*leaves, torch.zeros(4))
    for name in ("self lengths, causal", "packed: plain", *(["alibi, causal"] * (kernel is two.KERNEL))):
        assert kernel.bind(*half(name)) is None, name


def test_pages(release: Release) -> None:
    for name in ("causal bottom-right", "packed: causal bottom-right"):
        spec, inputs = half(name)
        paged = pages_of(spec, inputs, 256, lambda pool: pool.transpose(1, 2).contiguous().transpose(1, 2))
        result = release.kernel.forward(*paged)
        out, lse, _ = attention_reference(spec, inputs)
        assert differences({"out": result.out, "lse": result.lse}, {"out": out, "lse": lse}) == [], name


def test_what_no_argument_says_is_refused(release: Release) -> None:
    spec, inputs = half("plain")
    wide = inputs.v[..., :4].repeat(1, 1, 1, 3)
    for words, settings, tensors in (
        ("attn_mask", {}, {"attn_mask": torch.zeros(1, 1, 21, 27, dtype=torch.bool)}),
        ("bias", {}, {"bias": torch.zeros(1, 1, 21, 27)}),
        (r"stride\(-1\)", {}, {"q": torch.randn(2, 21, 8, 4).half().permute(0, 3, 1, 2)}),
        ("multiple of", {}, {"k": torch.randn(2, 2, 27, 9).half()[..., 1:]}),
        ("head_dim", {}, {"v": wide}),
        ("return_max_logit", {"return_max_logit": True}, {}),
        ("q_offset, kv_offset", {"kv_offset": 3}, {}),
    ):
        with pytest.raises(ValueError, match=words):
            release.kernel.prepare(dataclasses.replace(spec, **settings), inputs._replace(**tensors))
    if release.generation == 2:  # it would widen this window
        with pytest.raises(ValueError, match="would hide other pairs"):
            release.kernel.prepare(
                *half(Case("", {"window_left": 3, "bottom_right": True}, sizes={"s_q": 40}))
            )
    if release.version == "2.5.9.post1":
        with pytest.raises(RuntimeError, match="no argument softcap in this release"):
            release.kernel.forward(*half(Case("", {"softcap": 2.0})))


def test_determinism_is_asked_of_the_backward(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    run = Function.__call__
    monkeypatch.setattr(
        Function, "__call__", lambda self, a, *others: given.append(a) or run(self, a, *others)
    )
    for wanted in (True, False):
        spec, inputs = half("plain", deterministic=wanted)
        result = release.kernel.forward(spec, inputs)
        release.kernel.backward(spec, inputs, result, result.out)
        assert given[-1]["deterministic"] is wanted


def test_wide_heads_on_blackwell_get_the_gradient_of_lse_in_two_backwards() -> None:
    """There the package's backward for head_dim 256 takes none."""
    spec, inputs = half(Case("", CAUSAL, sizes={"s_q": 27, "d": 256, "e": 256}))
    with installed(4, NEWEST[2], arch=100):
        actual, *upward = carried_out(four.KERNEL.forward, four.KERNEL.backward, spec, inputs, dlse=True)
    wanted = expected(spec, inputs, *upward)
    del wanted["max_logit"]
    assert differences(actual, wanted) == []


def test_a_package_that_is_not_there_says_so_and_attnsels_own_is_none() -> None:
    """Where attnsel took the name for a program, a call would go round in a circle."""
    for kernel, words in ((two.KERNEL, "flash_attn"), (three.KERNEL, "flash_attn_3"), (four.KERNEL, "cute")):
        with pytest.raises(RuntimeError, match=f"No module named '{words}|{words}"):
            kernel.prepare(*half("plain"))
    install(force=True)
    try:
        with pytest.raises(RuntimeError, match="attnsel's own functions answer to `import flash_attn`"):
            two.KERNEL.prepare(*half("plain"))
    finally:
        uninstall()
