"""What an op's backward is handed."""

from __future__ import annotations

import torch

from attnsel.backends.sdpa.plan import Traits
from attnsel.backends.sdpa.run import alike

CUDNN, FLASH = Traits("sdpa.cudnn", "cuda"), Traits("sdpa.flash", "cuda")


def test_cudnn_gets_a_result_and_its_gradient_with_the_same_strides():
    """pytorch#176915: a rank's part of the result, and a gradient that lies otherwise."""
    out = torch.randn(2, 4, 8, 16)[:, :, 4:]
    dout = torch.randn(2, 4, 16, 4).transpose(2, 3)
    mine, grad = alike(CUDNN, out, dout)
    assert mine.stride() == grad.stride() == (256, 64, 16, 1)
    assert torch.equal(mine, out)
    assert torch.equal(grad, dout)


def test_what_lies_alike_or_goes_elsewhere_is_not_copied():
    out, dout = (torch.randn(2, 8, 4, 16).transpose(1, 2) for _ in range(2))
    mine, grad = alike(CUDNN, out, dout)
    assert mine is out
    assert grad is dout
    other = dout.contiguous()
    mine, grad = alike(FLASH, out, other)
    assert mine is out
    assert grad is other
