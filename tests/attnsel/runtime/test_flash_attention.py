"""``flash_attn.2``, ``.3`` and ``.4`` on every way of a call: strict stand-ins of their packages carry it out
on the CPU, while the question is asked of a described H100 that has them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attnsel import DotProductAttention, Environment, NoBackendError, attention, override
from attnsel.runtime import dispatch, kernels
from call_cases import CASES, PACKED, Call, Case, assert_close, by_name
from emulated_flash_attn import installed

torch.set_num_threads(1)

RELEASES = [
    ("flash_attn.2", "2.5.9.post1"),
    ("flash_attn.2", "2.6.3"),
    ("flash_attn.2", "2.7.4.post1"),
    ("flash_attn.2", "2.8.3"),
    ("flash_attn.3", "3.0.0b1"),
    ("flash_attn.3", "3.0.0"),
    ("flash_attn.4", "4.0.0b20"),
    ("flash_attn.4", "4.0.0b36"),
]
COMPONENT = {"flash_attn.2": "flash_attn", "flash_attn.3": "flash_attn_3", "flash_attn.4": "flash_attn_4"}


def described(backend: str, version: str) -> Environment:
    return Environment.describe("H100", cudnn_frontend=None, triton=None, **{COMPONENT[backend]: version})


@pytest.fixture(params=RELEASES, ids="-".join)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The candidate, whose package is there in this release."""
    name, version = request.param
    monkeypatch.setattr(dispatch, "environment_of", lambda q: described(name, version))
    dispatch.clear_cache()
    with installed(int(name[-1]), version):
        yield name
    dispatch.clear_cache()


NEWEST = (RELEASES[3], RELEASES[5], RELEASES[7])
only_newest = pytest.mark.parametrize("backend", NEWEST, ids="-".join, indirect=True)


def dense(call: Call) -> tuple[Tensor, ...]:
    """q, k, v of a call, dense in its format as a program's are."""
    return tuple(t.contiguous() for t in call.qkv)


def arguments_of(call: Call, **more: Any) -> dict[str, Any]:
    """As programs have them: one tensor for both lengths, where those are the same."""
    arguments = {**call.arguments, **more}
    if "cross" not in str(call.case.tensors.get("lengths")):
        for name in ("cu_seqlens_kv", "cu_seqlens_kv_padded"):
            if name in arguments:
                arguments[name] = arguments[name.replace("kv", "q")]
    return arguments


# Of the shared cases, those that no generation has an argument for, or whose diagonal none has.
NOBODY = ("arbitrary", "bias", "pre_scale_bias", "max logit", "packed, bias", "softcap and bias")
CROSS = {"causal, fewer queries", "window, rows without keys", "window, top left", "padding_causal, cross",
         "packed, gaps"}  # fmt: skip
OF_TWO = ("alibi", "packed, alibi")
OF_FOUR = ("off-by-one", "learnable", "packed, sinks")


def taken(case: Case, backend: str, version: str) -> bool:
    name = case.name
    if name.startswith(NOBODY) or name in CROSS:
        return False
    if name.startswith(OF_TWO) and backend != "flash_attn.2":
        return False
    if name.startswith(OF_FOUR) and version != "4.0.0b36":
        return False
    lengths = case.tensors.get("lengths") or case in PACKED
    old = version == "2.5.9.post1" or (version == "4.0.0b20" and lengths)
    return not (name.startswith("softcap") and old)


# For releases before the newest: what each generation has grown by, and one of each kind of batch.
OLDER = ("gqa", "causal", "window", "padding_causal", "alibi", "softcap", "learnable", "packed, causal, gqa",
         "packed, window", "packed, sinks")  # fmt: skip


def test_every_call_gives_the_definition_or_says_why_not(
    backend: str, request: pytest.FixtureRequest
) -> None:
    """Of the newest release every case, of each older one ten."""
    _, version = release = request.node.callspec.params["backend"]
    found: dict[str, str] = {}
    for number, case in enumerate(CASES + PACKED):
        if release in NEWEST or case.name in OLDER:
            try:
                honoured(case, backend, version, ("bshd", "sbhd")[number % 2])
            except (AssertionError, pytest.fail.Exception, NoBackendError) as error:
                found[case.name] = str(error).partition("\n")[0]
    assert found == {}


def honoured(case: Case, backend: str, version: str, fmt: str) -> None:
    fmt = "thd" if case in PACKED else fmt
    call = Call(dataclasses.replace(case, dtype=torch.float16), fmt)
    return_lse = fmt != "sbhd"
    arguments = arguments_of(call, backend=backend, return_lse=return_lse)
    if not taken(case, backend, version):
        with pytest.raises(NoBackendError, match=r"FLASH\d"):
            attention(*dense(call), **arguments)
        return
    result = attention(*dense(call), **arguments)
    out = result[0] if return_lse else result
    actual = {"out": out.detach(), **call.gradients(out)}
    if return_lse:
        actual["lse"] = result[1]
    assert_close(actual, call.expected(), torch.float16)


@only_newest
def test_the_module_runs_it_and_compares_its_first_call(backend: str) -> None:
    call = Call(dataclasses.replace(by_name["padding_causal"], dtype=torch.float16), "bshd")
    core = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="padding_causal", backend=backend)
    extras = {name: t for name, t in arguments_of(call).items() if name.startswith("cu_seqlens")}
    out = core(*dense(call), **extras)
    assert core.last_selection.backend == backend
    assert core.last_selection.chosen.adaptations == ()
    out = out.detach().unflatten(-1, (4, 8))
    assert_close({"out": out}, {"out": call.expected()["out"]}, torch.float16)


def spoil(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
    """The package's function gives numbers that are not attention's."""
    right = getattr(module, name)

    def wrong(*given: Any, **keywords: Any) -> Any:
        out, *others = right(*given, **keywords)
        return (out * 1.1, *others)

    wrong.__signature__ = __import__("inspect").signature(right)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, name, wrong)


@only_newest
def test_a_wrong_kernel_is_not_used(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, names = {
        "flash_attn.2": (
            "flash_attn.flash_attn_interface",
            ("_flash_attn_forward", "_flash_attn_varlen_forward"),
        ),
        "flash_attn.3": ("flash_attn_3.flash_attn_interface", ("_flash_attn_forward",)),
        "flash_attn.4": ("flash_attn.cute.interface", ("_flash_attn_fwd",)),
    }[backend]
    for name in names:
        spoil(monkeypatch, sys.modules[place], name)
    call = Call(dataclasses.replace(by_name["padding"], dtype=torch.float16), "bshd")
    with override(allow=(backend, "sdpa.math")), pytest.warns(UserWarning, match=backend):
        out = attention(*dense(call), **arguments_of(call))
    assert_close({"out": out.detach()}, {"out": call.expected()["out"]}, torch.float16)


@only_newest
def test_what_is_saved_may_be_moved(backend: str) -> None:
    call = Call(dataclasses.replace(by_name["packed, causal, gqa"], dtype=torch.float16), "thd")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        out = attention(*dense(call), **arguments_of(call, backend=backend))
    assert_close({"out": out.detach(), **call.gradients(out)}, call.expected(), torch.float16)


@only_newest
def test_a_compiled_step_is_the_eager_one(backend: str) -> None:
    call = Call(dataclasses.replace(by_name["padding_causal"], dtype=torch.float16), "bshd")
    arguments = arguments_of(call, backend=backend)
    leaves = [t.detach().contiguous().requires_grad_() for t in call.qkv]

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, **arguments)

    torch.compiler.reset()
    with override(selfcheck=False):
        eager = step(*leaves)
        wanted = torch.autograd.grad(eager.float().square().sum(), leaves)
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        out = compiled(*leaves)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
    assert torch.equal(out, eager)
    for one, two in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=5e-3)


def test_a_package_that_does_not_import_is_passed_over_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip lists it, its extension was built for another PyTorch: the next candidate runs, in one warning."""
    monkeypatch.setattr(dispatch, "environment_of", lambda q: described("flash_attn.2", "2.8.3"))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(kernels, "KERNELS", {})
    dispatch.clear_cache()
    q = torch.randn(1, 9, 2, 8, dtype=torch.float16)
    try:
        with (
            override(allow=("flash_attn.2", "sdpa.math")),
            pytest.warns(UserWarning, match=r"flash_attn\.2.*No module named"),
        ):
            out = attention(q, q, q, attn_mask_type="causal")
        assert out.isfinite().all()
        with pytest.raises(NoBackendError, match="RUNTIME001"):
            attention(q, q, q, attn_mask_type="causal", backend="flash_attn.2")
    finally:
        dispatch.clear_cache()
