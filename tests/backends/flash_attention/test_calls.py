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
from attnsel.backends.flash_attention.kernel import Kernel
from attnsel.backends.flash_attention.packages import Function
from attnsel.flash_attn.shim import install, uninstall
from emulated_flash_attn import installed
from flash_attention_cases import EVERY, RELEASES, Release, takes
from forward_checks import pages_of
from reference import attention_reference
from varlen_cases import made

torch.set_num_threads(1)


NEWEST = ("2.8.3", "3.0.0", "4.0.0b36")


def sampled(release: Release) -> list[Case]:
    """What it takes: all of it where the release is the newest of its generation, else about ten cases."""
    taken = [case for case in EVERY if takes(release, case)]
    assert len(taken) >= 30, release
    return taken if release.version in NEWEST else taken[RELEASES.index(release) % 4 :: 4]


PAIRS = [(release, case) for release in RELEASES for case in sampled(release)]


@pytest.fixture
def package(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    release: Release = request.param
    with installed(release.generation, release.version):
        yield release.kernel


def named(release: Release) -> str:
    return f"{release.generation}-{release.version}"


def every(releases: list[Release] = RELEASES) -> Any:
    return pytest.mark.parametrize("package", releases, ids=named, indirect=True)


def half(case: Case) -> tuple[Spec, Inputs]:
    return made(case, torch.float16)


def assert_close(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Within eight units of fp16 of the largest: inputs are the same, results are rounded once or twice."""
    assert actual.keys() == wanted.keys()
    for name, one in wanted.items():
        finite = one[one.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        assert error(actual[name], one) <= 2**-7 * max(largest, 0.1), name


@pytest.mark.parametrize(
    ("package", "case"),
    PAIRS,
    ids=[f"{named(release)}-{case.name}" for release, case in PAIRS],
    indirect=["package"],
)
def test_numbers(package: Kernel, case: Case) -> None:
    spec, inputs = half(case)
    for dlse in (False, True):
        actual, dout, into_lse = carried_out(package.forward, package.backward, spec, inputs, dlse)
        wanted = expected(spec, inputs, dout, into_lse)
        del wanted["max_logit"]
        assert_close(actual, wanted)
        assert not actual["out"].isnan().any()


PADDED = ("self lengths, causal", "packed: gaps, bottom-right", "packed: sinks, gaps")


@pytest.mark.parametrize(
    ("package", "case"),
    [
        (release, case)
        for release in RELEASES
        for case in EVERY
        if case.name in PADDED and takes(release, case)
    ],
    ids=lambda value: value.name if isinstance(value, Case) else named(value),
    indirect=["package"],
)
def test_what_lies_in_padding_reaches_nothing(package: Kernel, case: Case) -> None:
    """NaN in every row of no sequence: the same numbers, and zeros there."""
    spec, inputs = half(case)
    result = package.forward(spec, inputs)
    dout, _ = upstream(result)
    grads = package.backward(spec, inputs, result, dout)

    other = with_garbage(spec, inputs)
    again = package.forward(spec, other)
    spoilt_grads = package.backward(spec, other, again, spoilt(spec, inputs, dout, "q"))
    for one, other_one in zip((*result[:2], *grads), (*again[:2], *spoilt_grads), strict=True):
        assert one is other_one is None or torch.equal(one, other_one)


@every(RELEASES[:4])
@pytest.mark.parametrize("name", ["plain", "packed: plain"])
def test_dropout_is_replayed_by_the_backward(package: Kernel, name: str) -> None:
    """With the forward's random state the backward is its gradient; without it there is none."""
    spec, inputs = half(next(case for case in EVERY if case.name == name))
    spec = dataclasses.replace(spec, dropout_p=0.4, need_grad=True)
    torch.manual_seed(3)
    result = package.forward(spec, inputs)
    # dV alone is linear in what was kept: sum(dV * v) = sum(out * dout).
    dout, _ = upstream(result)
    grads = package.backward(spec, inputs, result, dout)
    assert torch.allclose(
        (grads.v.double() * inputs.v.double()).sum(), (result.out.double() * dout.double()).sum(), rtol=0.02
    )
    torch.manual_seed(4)
    assert not torch.equal(package.forward(spec, inputs).out, result.out)
    with pytest.raises(ValueError, match="random numbers"):
        package.backward(spec, inputs, result._replace(saved=()), dout)


@every()
def test_the_documented_function_is_bound_for_dense_calls(package: Kernel) -> None:
    """PyTorch differentiates it itself, and its numbers are those of forward and backward."""
    spec, inputs = half(Case("causal", CAUSAL, sizes={"s_q": 27}))
    call = package.bind(spec, inputs)
    assert call is not None
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = call(*leaves, *(None,) * 5)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    result = package.forward(dataclasses.replace(spec, need_grad=True), inputs)
    assert torch.equal(out, result.out)
    wanted = package.backward(spec, inputs, result, dout)
    for one, other in zip(grads, wanted[:3], strict=True):
        assert torch.equal(one, other)
    others = {"self lengths, causal", "packed: plain", *(["alibi, causal"] if package is two.KERNEL else [])}
    for case in EVERY:
        if case.name in others:
            assert package.bind(*half(case)) is None, case.name


@every()
@pytest.mark.parametrize("name", ["causal bottom-right", "packed: causal bottom-right"])
def test_pages(package: Kernel, name: str) -> None:
    spec, inputs = half(next(case for case in EVERY if case.name == name))
    paged = pages_of(spec, inputs, 256, lambda pool: pool.transpose(1, 2).contiguous().transpose(1, 2))
    result = package.forward(*paged)
    out, lse, _ = attention_reference(spec, inputs)
    assert_close({"out": result.out, "lse": result.lse}, {"out": out, "lse": lse})


@every()
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_mask": torch.zeros(1, 1, 21, 27, dtype=torch.bool)}, "attn_mask"),
        ({"bias": torch.zeros(1, 1, 21, 27)}, "bias"),
        ({"q": torch.randn(2, 21, 8, 4).half().permute(0, 3, 1, 2)}, r"stride\(-1\)"),
        ({"k": torch.randn(2, 2, 27, 9).half()[..., 1:]}, "multiple of"),
    ],
    ids=["mask", "bias", "stride", "address"],
)
def test_what_no_argument_says_is_refused(package: Kernel, change: dict[str, Tensor], words: str) -> None:
    spec, inputs = half(Case("plain"))
    with pytest.raises(ValueError, match=words):
        package.prepare(spec, inputs._replace(**change))


@every(RELEASES[:4])
def test_a_window_that_two_would_widen_is_refused(package: Kernel) -> None:
    spec, inputs = half(Case("", {"window_left": 3, "bottom_right": True}, sizes={"s_q": 40}))
    with pytest.raises(ValueError, match="would hide other pairs"):
        package.prepare(spec, inputs)


@every(RELEASES[:1])
def test_what_a_release_has_not_is_no_guess(package: Kernel) -> None:
    spec, inputs = half(Case("", {"softcap": 2.0}))
    with pytest.raises(RuntimeError, match="no argument softcap in this release"):
        package.forward(spec, inputs)


@every()
def test_determinism_is_asked_of_the_backward(package: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    run = Function.__call__
    monkeypatch.setattr(
        Function, "__call__", lambda self, a, *others: given.append(a) or run(self, a, *others)
    )
    spec, inputs = half(Case("plain"))
    for wanted in (True, False):
        spec = dataclasses.replace(spec, deterministic=wanted, return_max_logit=False)
        result = package.forward(spec, inputs)
        package.backward(spec, inputs, result, result.out)
        assert given[-1]["deterministic"] is wanted


@every()
def test_what_it_cannot_give_is_refused(package: Kernel) -> None:
    spec, inputs = half(Case("plain"))
    for words, changes in {
        "return_max_logit": {"return_max_logit": True},
        "q_offset, kv_offset": {"kv_offset": 3},
        "head_dim": {},
    }.items():
        odd = inputs if changes else inputs._replace(v=inputs.v[..., :4].repeat(1, 1, 1, 3))
        with pytest.raises(ValueError, match=words):
            package.prepare(dataclasses.replace(spec, **changes), odd)


def test_a_package_that_is_not_there_says_so() -> None:
    spec, inputs = half(Case("plain"))
    for kernel, words in ((two.KERNEL, "flash_attn"), (three.KERNEL, "flash_attn_3"), (four.KERNEL, "cute")):
        with pytest.raises(RuntimeError, match=f"No module named '{words}|{words}"):
            kernel.prepare(spec, inputs)


def test_attnsels_own_flash_attn_is_not_called_in_a_circle() -> None:
    """Where attnsel took the name for a program, the candidate says so."""
    install(force=True)
    try:
        with pytest.raises(RuntimeError, match="attnsel's own functions answer to `import flash_attn`"):
            two.KERNEL.prepare(*half(Case("plain")))
    finally:
        uninstall()
