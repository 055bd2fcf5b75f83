"""The kernel of ``behaviour_plugin.py``: the reference of tests/support, in the dtypes of the contract."""

import torch

from attnsel.backends.contract import Grads, Result
from reference import attention_reference


def forward(spec, inputs):
    wide = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    out, lse, most = attention_reference(spec, inputs)
    return Result(out.to(inputs.q.dtype), lse.to(wide), most.to(wide))


def backward(spec, inputs, result, dout):
    names = [n for n in ("q", "k", "v", "bias", "softmax_offset") if getattr(inputs, n) is not None]
    with torch.enable_grad():
        given = {n: getattr(inputs, n).detach().requires_grad_() for n in names}
        out, _, _ = attention_reference(spec, inputs._replace(**given))
        # Where no sequence has rows, it depends on none.
        out = out + sum(0.0 * t.sum() for t in given.values())
        grads = torch.autograd.grad(
            out, list(given.values()), dout.double(), materialize_grads=True, allow_unused=True
        )
    return Grads(**dict(zip(names, grads, strict=True)))
