"""The kernels of plug-ins: imported when they are first chosen, and never trusted to fail politely."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from attnsel.candidates import CANDIDATES
from attnsel.runtime.autograd import ContractKernel


def kernel_of_plugin(name: str) -> ContractKernel:
    """Import it. Raises ImportError, whatever goes wrong in a stranger's module."""
    info = CANDIDATES[name]
    try:
        module = import_module(info.kernel)
        forward, backward = _refusing(module.forward), _refusing(module.backward)
        prepare = getattr(module, "prepare", None)
    except Exception as error:
        raise ImportError(f"{info.kernel} of {info.plugin}: {type(error).__name__}: {error}") from error
    return ContractKernel(forward, backward, None if prepare is None else _refusing(prepare))


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose odder errors count as refusals too: the next candidate may well run."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (RuntimeError, ValueError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return call
