"""The kernels behind candidates: imported when they are first chosen."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.registry import CANDIDATES
from attnsel.errors import in_words
from attnsel.runtime.plugin_kernels import held_to_the_contract


class CannotPrepare(Exception):
    """The chosen kernel refuses this call when it is prepared, in these words."""


class Kernel(NamedTuple):
    """A candidate's functions (attnsel/backends/contract.py).

    ``prepare`` raises where a forward or the backward that follows would, and runs nothing. ``bind`` gives a
    call that PyTorch differentiates itself: ``call(q, k, v, attn_mask, bias, alibi_slopes, seqlens_q,
    seqlens_kv) -> out``; without one, or where it gives None, autograd is wrapped around forward and
    backward.
    """

    forward: Callable[[Spec, Inputs], Result]
    backward: Callable[..., Grads]
    prepare: Callable[[Spec, Inputs], None] | None = None
    bind: Callable[[Spec, Inputs], Callable[..., torch.Tensor] | None] | None = None


KERNELS: dict[str, Kernel] = {}  # loaded once; as many as there are candidates


def kernel_of(name: str) -> Kernel:
    """A candidate's kernel. Raises CannotPrepare where it does not load, whatever its module raises; but what
    says that memory or the device is gone as it is."""
    kernel = KERNELS.get(name)
    return KERNELS.setdefault(name, _load(name)) if kernel is None else kernel


def prepare_kernel(kernel: Kernel, spec: Spec, inputs: Inputs) -> None:
    """Forward and backward get ready before the first forward runs: later is too late for another kernel.

    Raises CannotPrepare in the kernel's own words.
    """
    if kernel.prepare is None:
        return
    try:
        kernel.prepare(spec, inputs)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise_if_no_refusal(error)
        raise CannotPrepare(str(error)) from error


def raise_if_no_refusal(error: BaseException) -> None:
    """Raise ``error`` again where it says nothing about the kernel: memory, or the device itself, is gone."""
    if not says_no(error):
        raise error


def says_no(error: BaseException) -> bool:
    """Whether an error of a kernel's is a refusal of this call, which another kernel may well take."""
    if isinstance(error, (torch.OutOfMemoryError, _DEVICE_ERROR)):
        return False
    text = str(error)
    # Before torch 2.8 a lost device is a RuntimeError; every later call on it fails in the same words.
    if isinstance(error, RuntimeError) and text.startswith(("CUDA error", "HIP error")):
        return False
    # Triton's launcher hands on the driver's words about a kernel, and about the device.
    return not (text.startswith("Triton Error [") and any(words in text for words in _DEVICE_WORDS))


_DEVICE_ERROR: type[BaseException] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
# cuGetErrorString of CUDA_ERROR_OUT_OF_MEMORY and of the errors after which a context cannot be used.
_DEVICE_WORDS = (
    "out of memory",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "global/shared address space",
    "invalid program counter",
    "hardware stack error",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "uncorrectable ECC error",
)


def _no_backward(*arguments: Any) -> Grads:
    """In the place of what a kernel that takes no training need not have."""
    raise NotImplementedError("its record lists no training")


def _load(name: str) -> Kernel:
    record = CANDIDATES[name]
    module, _, attribute = record.kernel.partition(":")
    try:
        held: Any = import_module(module)
        if attribute:
            held = getattr(held, attribute)
        trains = not record.plugin or "training" in record.takes
        functions = [held.forward, held.backward if trains else getattr(held, "backward", _no_backward)]
        functions += [getattr(held, part, None) for part in ("prepare", "bind")]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever another package's module raises, SystemExit included
        if isinstance(error, (RuntimeError, _DEVICE_ERROR)):
            raise_if_no_refusal(error)
        whose = f" of {record.distribution}" if record.plugin else ""
        text = str(error) if isinstance(error, ImportError) and not record.plugin else ""
        raise CannotPrepare(text or f"{record.kernel}{whose}: {in_words(error)}") from error
    kernel = Kernel(*functions)
    return held_to_the_contract(kernel, record) if record.plugin else kernel
