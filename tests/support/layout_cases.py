"""Tensors cut from packed buffers in every way, and what attention makes of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from attention_calls import FROM_KERNEL, TO_KERNEL
from attnsel.backends.contract import Inputs, Spec
from reference import attention_reference
from rounding import error

HAS_TRITON = importlib.util.find_spec("triton") is not None
BACKENDS = ["tiled", "sdpa.math", "sdpa.flash", *(["triton"] if HAS_TRITON else [])]
B, S, D = 2, 6, 64
H = 16
LEAD = {"bshd": (B, S), "sbhd": (S, B), "thd": (B * S,), "bhsd": (B,)}
INNER = {"bshd": (D,), "sbhd": (D,), "thd": (D,), "bhsd": (S, D)}


def about_lengths(fmt: str, *lengths: int) -> dict[str, Any]:
    """What a packed call says besides its tensors."""
    if fmt != "thd":
        return {}
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "attn_mask_type": "padding"}


def reference(fmt: str, q: Tensor, k: Tensor, v: Tensor, about: dict[str, Any], right: int = -1) -> Tensor:
    """In q's dtype, by the definition."""
    spec = Spec(softmax_scale=q.shape[-1] ** -0.5, packed=fmt == "thd", window_right=right)
    lengths = {name: about[name] for name in ("cu_seqlens_q", "cu_seqlens_kv") if name in about}
    inputs = Inputs(*(t.permute(TO_KERNEL[fmt]) for t in (q, k, v)), **lengths)
    return attention_reference(spec, inputs, q.dtype)[0].permute(FROM_KERNEL[fmt])


def assert_rounding(actual: Tensor, wanted: Tensor, ulps: float = 64) -> None:
    """Nothing but rounding of float32; a layout that is mistaken errs by the size of the numbers."""
    scale = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    assert actual.shape == wanted.shape
    assert error(actual, wanted) <= ulps * torch.finfo(torch.float32).eps * scale


class Copies(TorchDispatchMode):
    """What copies a tensor on the way to a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("clone", "copy_", "_to_copy", "contiguous", "cat", "index"):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[Copies]:
    """Copies made inside. Those of Triton's interpreter, which carries tensors into numpy, do not count."""
    mode = Copies()
    if not HAS_TRITON:
        with mode:
            yield mode
        return
    from attnsel.backends.triton import compiler as interpret

    launch = interpret.launch

    def unwatched(*args: Any) -> None:
        with _disable_current_modes():
            launch(*args)

    interpret.launch = unwatched
    try:
        with mode:
            yield mode
    finally:
        interpret.launch = launch


def buffers_of(fmt: str, packing: str, g: int) -> list[Tensor]:
    """What a projection would give: float32 leaves that q, k and v are cut from."""
    heads: list[tuple[int, ...]] = {
        "3hd": [(3, H)],
        "h3d": [(H, 3)],
        "hd_2hd": [(H,), (2, g)],
        "hd_h2d": [(H,), (g, 2)],
        "(h+2hg)d": [(H + 2 * g,)],
        "hg(h/hg+2)d": [(g, H // g + 2)],
        "hd_hd_hd": [(H,), (g,), (g,)],
    }[packing]
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(*LEAD[fmt], *n, *INNER[fmt], generator=gen).requires_grad_() for n in heads]


def cut(fmt: str, packing: str, g: int, buffers: list[Tensor]) -> tuple[Tensor, ...]:
    """q, k and v as views; grouped queries excepted, whose heads no stride reaches."""
    axis, first, last = len(LEAD[fmt]), buffers[0], buffers[-1]
    if packing in ("3hd", "h3d"):
        return first.unbind(axis + (packing == "h3d"))
    if packing in ("hd_2hd", "hd_h2d"):
        return first, *last.unbind(axis + (packing == "hd_h2d"))
    if packing == "(h+2hg)d":
        return first.split([H, g, g], axis)
    if packing == "hd_hd_hd":
        return tuple(buffers)
    q, k, v = first.split([H // g, 1, 1], axis + 1)
    return q.flatten(axis, axis + 1), k.squeeze(axis + 1), v.squeeze(axis + 1)


PACKINGS = [("3hd", H), ("h3d", H)]
PACKINGS += [(name, g) for name in ("hd_2hd", "hd_h2d", "(h+2hg)d", "hg(h/hg+2)d") for g in (1, 4)]
