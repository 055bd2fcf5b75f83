"""How a kernel of ours is called by the driver: arguments against the parameters that PTX declares."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import re
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import ptx
from gate import Configuration, launch_of

KERNELS = ("rows", "dkdv", "dq")
CALLS = [("forward", "all"), ("dbias", "all"), ("forward", "causal")]  # without a bias there is no dbias pass
CALLS += [(kernel, feature) for kernel in KERNELS for feature in ("all", "causal")]
SOME = [CALLS[0], *(pytest.param(*call, marks=pytest.mark.slow) for call in CALLS[1:])]


def with_memory(args: dict[str, Any]) -> dict[str, Any]:
    """Any memory for tensors that have none: only addresses are looked at."""
    return {
        name: torch.zeros(64, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in args.items()
    }


@pytest.mark.parametrize(("kernel", "feature"), SOME)
def test_arguments_are_the_parameters_of_turings_ptx(kernel: str, feature: str) -> None:
    launch = launch_of(Configuration(kernel, 75, 64, 64, "fp16", feature))
    compiled = ptx.program(launch, 75)
    assert re.search(r"^\.target sm_75$", compiled.ptx, re.MULTILINE)
    assert compiled.threads == 32 * launch.block.warps
    assert f".reqntid {compiled.threads}" in compiled.ptx or f".maxntid {compiled.threads}" in compiled.ptx
    assert compiled.shared_memory <= 64 * 1024
    values = ptx.pack(compiled, with_memory(launch.args))
    assert len(values) == len(ptx.parameters(compiled))
    assert not any(value.value for value in values[len(compiled.arguments) :])
    by_name = dict(zip((name for name, _ in compiled.arguments), values, strict=False))
    for name, value in launch.args.items():
        if name in by_name and not isinstance(value, torch.Tensor):
            assert by_name[name].value == pytest.approx(value), name


def test_arguments_of_another_kernel_are_refused() -> None:
    compiled = ptx.program(launch_of(Configuration("forward", 75, 64, 64, "fp16")), 75)
    args = with_memory(launch_of(Configuration("forward", 75, 64, 64, "fp16")).args)
    with pytest.raises(ValueError, match="declares"):
        ptx.pack(dataclasses.replace(compiled, arguments=compiled.arguments[1:]), args)
    with pytest.raises(ValueError, match="multiples of 16"):
        ptx.pack(compiled, args | {"Q": torch.zeros(64)[1:]})


class Driver:
    """What ``ptx.run`` asks of libcuda; a launch reads its arguments as the hardware would."""

    def __init__(self, compiled: ptx.Program, code: int = 0) -> None:
        self.compiled, self.code = compiled, code
        self.shape: tuple[int, ...] = ()
        self.shared_memory_allowed = 0
        self.values: list[Any] = []

    def cuModuleLoadDataEx(self, module: Any, text: bytes, count: int, options: Any, values: Any) -> int:
        assert text.decode() == self.compiled.ptx
        assert list(options) == [5, 6][:count]
        assert values[1] == 4096
        return self.code

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        assert name.decode() == self.compiled.entry
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        assert attribute == 8
        self.shared_memory_allowed = value
        return 0

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        self.shape, (pointers, extra) = rest[:7], rest[8:]
        assert extra is None
        held: dict[str, Any] = {"u64": ctypes.c_uint64, "u32": ctypes.c_int32, "f32": ctypes.c_float}
        for at, kind in zip(pointers, ptx.parameters(self.compiled), strict=True):
            self.values.append(ctypes.cast(at, ctypes.POINTER(held[kind])).contents.value)
        return 0

    def cuGetErrorString(self, code: int, words: Any) -> int:
        words._obj.value = b"the driver's words"
        return 0


@pytest.mark.parametrize(
    ("kernel", "head_dim", "asks"),
    [("forward", 64, False), pytest.param("dkdv", 128, True, marks=pytest.mark.slow)],
)
def test_the_driver_is_handed_every_argument(
    kernel: str, head_dim: int, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launch_of(Configuration(kernel, 75, head_dim, head_dim, "fp16"))
    launch = dataclasses.replace(launch, args=with_memory(launch.args))
    compiled = ptx.program(launch, 75)
    driver = Driver(compiled)
    monkeypatch.setattr(ptx, "_libcuda", lambda: driver)
    ptx._load.cache_clear()
    ptx.run(launch, 75, stream=0)
    assert driver.shape == (launch.programs, 1, 1, compiled.threads, 1, 1, compiled.shared_memory)
    # Above 48 KiB a kernel has to ask.
    assert (compiled.shared_memory > 48 * 1024) is asks
    assert driver.shared_memory_allowed == (compiled.shared_memory if asks else 0)
    for (name, _), value in zip(compiled.arguments, driver.values, strict=False):
        given = launch.args[name]
        wanted = given.data_ptr() if isinstance(given, torch.Tensor) else given
        assert value == pytest.approx(wanted), name


def test_what_the_driver_refuses_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launch_of(Configuration("forward", 75, 64, 64, "fp16"))
    launch = dataclasses.replace(launch, args=with_memory(launch.args))
    monkeypatch.setattr(ptx, "_libcuda", lambda: Driver(ptx.program(launch, 75), code=218))
    ptx._load.cache_clear()
    with pytest.raises(RuntimeError, match="error 218: the driver's words"):
        ptx.run(launch, 75, stream=0)
