"""``prepare``: what a call will launch is compiled and loaded before anything of it runs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attention_cases import CAUSAL, Case, build
from attnsel import NoBackendError, attention, clear_cache
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.triton import run as triton_run
from attnsel.runtime import kernels

torch.set_num_threads(1)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that were compiled for an sm90 that is not there; nothing is ever launched."""
    names: list[str] = []

    class Compiled:
        run = None

    def warmup(kernel: Any) -> Any:
        def compile_only(*, grid: tuple[int, ...], **arguments: Any) -> Compiled:
            assert all(t.device.type == "meta" for t in arguments.values() if isinstance(t, Tensor))
            assert set(kernel.arg_names) == arguments.keys() - {"num_warps", "num_stages", "enable_fp_fusion"}
            names.append(kernel.fn.__name__)
            return Compiled()

        return compile_only

    # By name: the package's functions hide the modules of the same name.
    modules = [importlib.import_module(f"attnsel.backends.triton.{name}") for name in ("backward", "forward")]
    for module in modules:
        for kernel in vars(module).values():
            if hasattr(kernel, "warmup") and kernel.fn.__name__.endswith("_kernel"):
                monkeypatch.setattr(kernel, "warmup", warmup(kernel), raising=False)
    monkeypatch.setattr(triton_run, "_arch", lambda q: 90)
    monkeypatch.setattr(triton_run, "_processors", lambda device: 132)
    monkeypatch.setattr(triton_run, "_around", lambda *unused: contextlib.nullcontext())
    return names


def call(spec: dict[str, Any], **sizes: int) -> tuple[Spec, Inputs]:
    return build(Case("", {**CAUSAL, **spec}, {"bias": "1 h s_q s_kv"}, {"s_q": 40, **sizes}), torch.float16)


def test_a_call_proves_what_it_will_launch(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, inputs = call({})
    for asked, kernels_of in (
        ((spec, inputs._replace(bias=inputs.bias.requires_grad_())), "forward rows dkdv dq dbias"),
        (call({"need_grad": False}), "forward"),
        (call({"need_grad": False}, s_q=1, s_kv=4096), "decode merge"),
    ):
        seen.clear()
        triton_run.prepare(*asked)
        assert seen == [f"{name}_kernel" for name in kernels_of.split()]
    seen.clear()
    monkeypatch.setattr(triton_run, "_arch", lambda q: 75)
    with pytest.raises(ValueError, match="at most 128"):  # a backward without a tile, before the forward
        triton_run.prepare(*call({}, d=200, e=200))
    assert seen == []


def test_what_triton_refuses_becomes_a_plain_error() -> None:
    from triton.runtime.errors import OutOfResources

    launch = type("Launch", (), {"name": "dkdv"})()
    with pytest.raises(RuntimeError, match=r"refuses the dkdv kernel on sm86.*shared memory"):  # noqa: SIM117
        with triton_run._around(launch, torch.device("cpu"), 86):
            raise OutOfResources(200000, 101376, "shared memory")


def test_a_kernel_that_cannot_be_prepared_is_a_reason_and_nothing_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def refuse(spec: Spec, inputs: Inputs) -> None:
        assert spec.need_grad
        raise RuntimeError("Triton refuses the dkdv kernel on sm86: out of resource")

    kernel = kernels.kernel_of("triton")._replace(
        prepare=refuse, forward=lambda *given: ran.append("forward")
    )
    monkeypatch.setitem(kernels.KERNELS, "triton", kernel)
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    clear_cache()
    with pytest.raises(NoBackendError, match=r"RUNTIME001[\s\S]*dkdv kernel on sm86"):
        attention(q, q, q, backend="triton")
    assert ran == []
    clear_cache()


def test_preparing_draws_no_random_number() -> None:
    """Else checkpointing, whose second run is prepared already, would drop other entries."""
    q = torch.randn(1, 20, 2, 8, requires_grad=True)
    clear_cache()
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(attention(q, q, q, attention_dropout=0.5, backend="triton"))
    assert torch.equal(*results)
