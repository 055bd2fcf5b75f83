"""Tensor cores on Turing (sm75) with a current Triton, through the hook it has for its compiler's stages.

From 3.3 on Triton lowers every dot to plain multiply-adds below sm80, because the pass that chooses matrix
layouts refuses those architectures. What lowers Turing's layouts to machine code (``mma.m16n8k8``) is still
there. So the middle stage runs as for sm80, without software pipelining (its asynchronous copies are sm80's),
its matrix layouts are marked as Turing's, and the rest of the compiler runs for sm75.

The hook is process-wide: it is installed around our own compiles only, under a lock, and taken out again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.nvidia.compiler import CUDABackend

ARCH = 75
# Part of Triton's cache key while the hook is in: raise it when what follows changes.
_VERSION = "attnsel-turing-1"
_HASH = hashlib.sha256(_VERSION.encode()).hexdigest()
_AMPERE_LAYOUT = "versionMajor = 2, versionMinor = 0"
_TURING_LAYOUT = "versionMajor = 2, versionMinor = 1"

_lock = threading.RLock()


@contextlib.contextmanager
def tensor_cores() -> Iterator[None]:
    """Compiles for sm75 inside this block use its tensor cores; those for other targets are unchanged.

    Raises RuntimeError where Triton has neither the hook (3.6 and newer) nor the stages it replaces.
    """
    with _lock, _hooked():
        yield


def _hooked() -> contextlib.AbstractContextManager[None]:
    knobs = getattr(triton, "knobs", None)
    if knobs is not None and hasattr(knobs.runtime, "add_stages_inspection_hook"):
        return _through_knob(knobs.runtime)
    if hasattr(CUDABackend, "add_stages"):
        return _through_method()
    raise RuntimeError(f"Triton {triton.__version__} has no stages to hook for sm75")


@contextlib.contextmanager
def _through_knob(runtime: Any) -> Iterator[None]:
    before = runtime.add_stages_inspection_hook

    def hook(
        backend: Any = None,
        stages: Any = None,
        options: Any = None,
        language: Any = None,
        capability: Any = None,
    ) -> Any:
        # Called with nothing, it names itself for the cache key.
        if backend is None:
            return _VERSION, _HASH
        if before is not None:
            before(backend, stages, options, language, capability)
        _replace(backend, stages, options, capability)
        return None

    runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        runtime.add_stages_inspection_hook = before


@contextlib.contextmanager
def _through_method() -> Iterator[None]:
    before = CUDABackend.add_stages

    def add_stages(self: Any, stages: Any, options: Any, *rest: Any) -> None:
        before(self, stages, options, *rest)
        _replace(self, stages, options, self.target.arch)

    CUDABackend.add_stages = add_stages
    try:
        yield
    finally:
        CUDABackend.add_stages = before


def _replace(backend: Any, stages: dict[str, Any], options: Any, capability: int) -> None:
    if capability == ARCH:
        stages["ttgir"] = lambda source, metadata: _turing_layouts(backend, source, metadata, options)


def _turing_layouts(backend: Any, source: Any, metadata: Any, options: Any) -> Any:
    """The GPU dialect as for sm80, its matrix layouts rewritten to Turing's."""
    context = source.context
    unpipelined = dataclasses.replace(options, num_stages=1)
    module = backend.make_ttgir(source, metadata, unpipelined, 80)
    text = str(module)
    if "async_copy" in text:
        raise RuntimeError("an asynchronous copy, which Turing does not have, in a kernel compiled for sm75")
    text = text.replace(_AMPERE_LAYOUT, _TURING_LAYOUT).replace('"cuda:80"', f'"cuda:{ARCH}"')
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir", delete=False) as file:
        file.write(text)
    try:
        module = ir.parse_mlir_module(file.name, context)
    finally:
        os.unlink(file.name)
    module.context = context
    return module
