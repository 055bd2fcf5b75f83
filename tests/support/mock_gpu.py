"""Triton's own launching path, up to the call of the driver, with no GPU: what a launch would be given.

``launching(arch)`` lets ``run.forward`` and ``run.backward`` of CPU tensors compile for a GPU of ``arch`` and
launch on a driver that only writes down. It holds each launch against the kernel's signature, as the real
launcher does when it packs the arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from attnsel.backends.triton import backward, forward, run
from attnsel.backends.triton import forward as decode
from attnsel.backends.triton import run as replay
from attnsel.environment.gpus import ARCHITECTURES

_POINTEES = {
    "*fp16": (torch.float16,),
    "*bf16": (torch.bfloat16,),
    "*fp32": (torch.float32,),
    "*i32": (torch.int32,),
    "*i64": (torch.int64,),
    "*u8": (torch.uint8, torch.bool),
}
_INTEGERS = {"i32": 2**31, "i64": 2**63}
_KERNELS = [
    kernel
    for module in (forward, decode, backward)
    for name, kernel in vars(module).items()
    if name.endswith("_kernel")
]


class Launched(NamedTuple):
    """One launch as the driver got it; ``arguments``: by name, of those that are not constants."""

    kernel: str
    programs: int
    arguments: dict[str, Any]


class _Launcher:
    def __init__(self, seen: list[Launched], src: Any) -> None:
        self.seen, self.name, self.signature = seen, src.fn.__name__, src.signature

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        assert (y, z, stream) == (1, 1, 0)
        values = rest[4:]  # after metadata twice and two hooks
        assert len(values) == len(self.signature), "as many as the kernel's signature has, constants too"
        arguments = {}
        for (name, kind), value in zip(self.signature.items(), values, strict=True):
            if kind in _POINTEES:
                assert isinstance(value, Tensor), f"{name} is no tensor: {value!r}"
                assert value.dtype in _POINTEES[kind], (name, kind, value.dtype)
            elif kind in _INTEGERS:
                assert -_INTEGERS[kind] <= value < _INTEGERS[kind], (name, kind, value)
            elif kind == "fp32":
                assert isinstance(value, float), (name, value)
            else:
                assert kind == "constexpr", (name, kind)
                continue
            arguments[name] = value
        self.seen.append(Launched(self.name, x, arguments))


class Driver:
    def __init__(self, arch: int, processors: int) -> None:
        self.seen: list[Launched] = []
        self.target = GPUTarget("cuda", arch, 32)
        shared = ARCHITECTURES[arch].shared_memory
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (object(), 1, 64, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": shared, "multiprocessor_count": processors},
        )

    def launcher_cls(self, src: Any, metadata: Any) -> _Launcher:
        return _Launcher(self.seen, src)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def launching(arch: int, processors: int = 132) -> Iterator[list[Launched]]:
    """What is launched inside. Results hold whatever memory held."""
    driver: Any = Driver(arch, processors)
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    _forget()
    try:
        with (
            mock.patch.object(run, "_arch", return_value=arch),
            mock.patch.object(run, "_processors", return_value=processors),
        ):
            yield driver.seen
    finally:
        triton.runtime.driver._active = before
        _forget()


def _forget() -> None:
    """What is compiled for one driver, and known of its GPU, is not for another."""
    replay.forget()
    triton.compiler.compiler.max_shared_mem.cache_clear()
    for kernel in _KERNELS:
        kernel.device_caches.clear()


def compiled() -> int:
    """Kernels that were compiled since ``launching`` began."""
    return sum(len(caches[0]) for kernel in _KERNELS for caches in kernel.device_caches.values())
