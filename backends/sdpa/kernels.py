"""PyTorch's four kernels as kernels of the contract, each with the fast way that autograd already knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.sdpa.run import bind as _bind

from . import run as _run


@dataclass(frozen=True, slots=True)
class SdpaKernel:
    """``bind`` gives a differentiable call of the op itself; it does not give the log-sum-exp."""

    name: str
    forward: Callable[[Spec, Inputs], Result]
    backward: Callable[..., Grads]  # (spec, inputs, result, dout, dlse=None)
    bind: Callable[[Spec, Inputs], Callable[..., Tensor]]


def _kernel(name: str) -> SdpaKernel:
    return SdpaKernel(name, partial(_run.forward, name), partial(_run.backward, name), partial(_bind, name))


CUDNN = _kernel("sdpa.cudnn")
FLASH = _kernel("sdpa.flash")
EFFICIENT = _kernel("sdpa.efficient")
MATH = _kernel("sdpa.math")
KERNELS = {kernel.name: kernel for kernel in (CUDNN, FLASH, EFFICIENT, MATH)}
