"""Run our kernels on CPU tensors: Triton's interpreter, entered at run time and left without a trace.

Triton decides at decoration whether a function is compiled or interpreted (TRITON_INTERPRET), and then for
good. Here the same ``@triton.jit`` function serves both: an interpreted twin is made of it, with private
globals in which the functions it calls are twins too; ``triton.language``'s own jitted functions are swapped
for the time of a launch; and what the interpreter patches into ``triton.language`` is put back afterwards, so
that compiling goes on working in the same process. Slow: for tests and for curiosity.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from attnsel.base.processes import ForkSafeLock

with contextlib.suppress(ImportError):
    # The interpreter imports it at the first launch; it must not first see swapped functions.
    import triton.experimental.gluon.language

# The swap is process-wide while a launch lasts.
_lock = ForkSafeLock()
# By id: hashing a JITFunction computes its compilation cache key.
_twins: dict[int, Any] = {}
_library: dict[int, Any] = {}


class _Called(interpreter.InterpretedFunction):  # type: ignore[misc]
    """A function that kernels call: the kernel's launch has patched triton.language already.

    The interpreter patches it anew at every such call, which was a third of the time.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)


def launch(kernel: Any, grid: tuple[int, ...], args: dict[str, Any]) -> None:
    """``kernel[grid](**args)`` on CPU tensors, one program after the other."""
    with _lock, _interpreted_language(), _repaired_index(), _repaired_bf16(), np.errstate(all="ignore"):
        _twin(kernel)[grid](**args)


def _twin(kernel: Any) -> Any:
    """The interpreted counterpart of a jitted function of ours, made once."""
    made = _twins.get(id(kernel))
    if made is None:
        fn = kernel.fn
        own = dict(fn.__globals__)
        copy = types.FunctionType(fn.__code__, own, fn.__name__, fn.__defaults__, fn.__closure__)
        copy.__kwdefaults__, copy.__annotations__ = fn.__kwdefaults__, dict(fn.__annotations__)
        copy.__module__, copy.__qualname__ = fn.__module__, fn.__qualname__
        # The launch patches the modules it sees here; the library's functions use core.
        own["_core"] = tl.core
        made = _twins[id(kernel)] = _Called(copy)
        for name, value in list(own.items()):
            if isinstance(value, JITFunction) and not value.fn.__module__.startswith("triton."):
                own[name] = _twin(value)
    return made


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    """Swap triton.language's jitted functions (tl.max, tl.philox, ...), and restore all of it on leaving."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if module is not None and (name == "triton.language" or name.startswith("triton.language."))
    ]
    classes = [tl.tensor, tl.dtype]
    classes += [c for name in ("tensor_descriptor_base", "condition") if (c := getattr(tl.core, name, None))]
    before = [(owner, dict(vars(owner))) for owner in (*modules, *classes)]
    try:
        for module, names in before[: len(modules)]:
            for name, value in names.items():
                if isinstance(value, JITFunction):
                    if id(value) not in _library:
                        _library[id(value)] = _Called(value.fn)
                    setattr(module, name, _library[id(value)])
        yield
    finally:
        for owner, names in before:
            # Names that rewritten library functions were given in their modules are theirs to keep.
            _restore(owner, names, added=isinstance(owner, type))


def _restore(owner: Any, names: dict[str, Any], added: bool) -> None:
    now = dict(vars(owner))
    for name, value in names.items():
        if now.get(name) is not value:
            with contextlib.suppress(AttributeError, TypeError):
                setattr(owner, name, value)
    for name in now.keys() - names.keys() if added else ():
        with contextlib.suppress(AttributeError, TypeError):
            delattr(owner, name)


@contextlib.contextmanager
def _changed(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of something of Triton's, put back on leaving."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def _repaired_index() -> Iterator[None]:
    """Bounds of loops as integers: up to 3.6 the interpreter gives int() an array of one element, which numpy
    refuses from 2.4 on."""
    before: Callable[..., Any] = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        before(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    with _changed(interpreter, _patch_lang_tensor=patch):
        yield


@contextlib.contextmanager
def _repaired_bf16() -> Iterator[None]:
    """bf16 as hardware has it: the interpreter's dot multiplies bit patterns, its cast to bf16 truncates.

    Seen in every release up to 3.9; triton#11584: not supported there.
    """
    builder = interpreter.InterpreterBuilder
    dot: Callable[..., Any] = builder.create_dot
    cast: Callable[..., Any] = builder.cast_impl
    handle = interpreter.TensorHandle

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return handle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            return handle(_round_to_bf16(source.data), tl.bfloat16)
        return cast(self, source, to)

    casts = dict.fromkeys(("cast_impl", "create_fp_ext", "create_fp_trunc"), cast_impl)
    with _changed(builder, create_dot=create_dot, **casts):
        yield


def _round_to_bf16(data: Any) -> Any:
    """float32 to the bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)


# --------------------------------------------------------------------------------------------------------
# Tensor cores on Turing (sm75) with a current Triton, through the hook it has for its compiler's stages.
#
# From 3.3 on Triton lowers every dot to plain multiply-adds below sm80, because the pass that chooses
# matrix layouts refuses those architectures. What lowers Turing's layouts to machine code (``mma.m16n8k8``)
# is still there. So the middle stage runs as for sm80, without software pipelining (its asynchronous copies
# are sm80's), its matrix layouts are marked as Turing's, and the rest of the compiler runs for sm75.
#
# The hook is process-wide: it is installed around our own compiles only, under a lock, and taken out again.


ARCH = 75
# Part of Triton's cache key while the hook is in: raise it when what follows changes.
_VERSION = "attnsel-turing-1"
_HASH = hashlib.sha256(_VERSION.encode()).hexdigest()
_AMPERE_LAYOUT = "versionMajor = 2, versionMinor = 0"
_TURING_LAYOUT = "versionMajor = 2, versionMinor = 1"

_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def tensor_cores() -> Iterator[None]:
    """Compiles for sm75 inside this block use its tensor cores; those for other targets are unchanged.

    Raises RuntimeError where Triton has neither the hook (3.6 and newer) nor the stages it replaces.
    """
    with _one_at_a_time, _hooked():
        yield


def _hooked() -> contextlib.AbstractContextManager[None]:
    knobs = getattr(triton, "knobs", None)
    if knobs is not None and hasattr(knobs.runtime, "add_stages_inspection_hook"):
        return _through_knob(knobs.runtime)
    if hasattr(CUDABackend, "add_stages"):
        return _through_method()
    raise RuntimeError(f"Triton {triton.__version__} has no stages to hook for sm75")


def _through_knob(runtime: Any) -> contextlib.AbstractContextManager[None]:
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

    return _changed(runtime, add_stages_inspection_hook=hook)


def _through_method() -> contextlib.AbstractContextManager[None]:
    before = CUDABackend.add_stages

    def add_stages(self: Any, stages: Any, options: Any, *rest: Any) -> None:
        before(self, stages, options, *rest)
        _replace(self, stages, options, self.target.arch)

    return _changed(CUDABackend, add_stages=add_stages)


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
