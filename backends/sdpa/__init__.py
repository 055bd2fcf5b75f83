"""PyTorch's scaled-dot-product kernels behind attnsel's contract, their aten ops called directly.

Entering ``torch.nn.attention.sdpa_kernel`` costs more than a small attention call, and ``F.sdpa`` chooses for
itself; here the kernel is the caller's choice and ``guards`` does what F.sdpa's chooser protected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from attnsel.backends.contract import Grads, Inputs, Result, Spec

from . import plan as _plan
from . import run as _run
from .bound import bind
from .guards import check, check_call, violations
from .masks import Folded, fold
from .ops import NAMES, resolve
from .plan import MaskPlan, Traits, plan_mask


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: the contract's two functions. ``returns_lse`` False: it cannot take part in merging."""

    name: str
    forward: Callable[[Spec, Inputs], Result]
    backward: Callable[..., Grads]  # (spec, inputs, result, dout, dlse=None)
    returns_lse: bool


KERNELS: dict[str, Kernel] = {
    name: Kernel(name, partial(_run.forward, name), partial(_run.backward, name), name != "sdpa.math")
    for name in NAMES
}


def folded_mask_bytes(kernel: str, spec: Spec, inputs: Inputs) -> int:
    """Bytes of the mask that folding this call allocates, 0 when none; only shapes and dtypes are read.

    Raises ValueError when the kernel takes no mask and one is needed.
    """
    return _plan.folded_mask_bytes(resolve(kernel, inputs.q.device.type), spec, inputs)


__all__ = [
    "KERNELS",
    "Folded",
    "Kernel",
    "MaskPlan",
    "Traits",
    "bind",
    "check",
    "check_call",
    "fold",
    "folded_mask_bytes",
    "plan_mask",
    "resolve",
    "violations",
]
