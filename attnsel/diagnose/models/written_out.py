"""Attention that a model writes out, as products and a softmax of its own: which queries, keys and values.

On the meta device there are no values to follow, so what is known of a tensor is kept on it and handed from
each function's arguments to its result: a number that it was multiplied by, then the scores that it holds,
then the probabilities, until these are multiplied with values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
_KEEPS = frozenset(
    {
        *(
            "view",
            "reshape",
            "transpose",
            "permute",
            "contiguous",
            "to",
            "type_as",
            "float",
            "half",
            "unsqueeze",
        ),
        *(
            "squeeze",
            "getitem",
            "expand",
            "flatten",
            "clone",
            "repeat",
            "swapaxes",
            "movedim",
            "detach",
            "copy",
        ),
        *("requires_grad", "as_subclass"),
    }
)
"""Functions after which a tensor has the factor that it had."""
_TRIANGLES = frozenset({"tril", "triu", "le", "lt", "ge", "gt"})
_MASKS = _KEEPS | {
    *("where", "masked_fill", "and", "or", "xor", "invert", "bitwise_and", "bitwise_xor", "bool", "rsub"),
    *("sub", "mul", "rmul", "ne", "eq"),
}
"""Functions that make a mask of a mask."""


class Scores(NamedTuple):
    """What is known of a tensor. ``factor`` None: by a number that nobody can read. ``masks``: what hides
    pairs of them. ``bias``: something else is added to them."""

    q: Tensor | None = None
    k: Tensor | None = None
    factor: float | None = 1.0
    masks: tuple[Tensor, ...] = ()
    bias: bool = False
    softcap: float = 0.0
    over: bool = False

    @property
    def mask(self) -> Tensor | None:
        """That which was made by transformers' mask makers, or else the largest."""
        return max(self.masks, key=lambda mask: (hasattr(mask, "attnsel_seen"), mask.numel()), default=None)


def followed(
    function: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    out: Any,
    found: Callable[[Scores, Tensor], None],
    causal: Any,
) -> None:
    """One function that ran. ``found`` gets the scores and the values of a whole one. ``causal``: what a mask
    that is a triangle is marked with."""
    name = str(getattr(function, "__name__", "")).strip("_")
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if not isinstance(out, Tensor) or not given:
        return
    known: list[Scores | None] = [getattr(each, "attnsel_scores", None) for each in given]
    scores = next((each for each in known if each is not None and each.q is not None), None)
    if name in _PRODUCTS and len(given) > 1:
        left, right = _factors(args, given[-2:])
        if scores is not None and scores.over:
            found(scores, right)
        elif min(left.dim(), right.dim()) >= 3:
            factors = [each.factor for each in known[-2:] if each is not None]
            factor = None if None in factors else float(kwargs.get("alpha", 1.0))
            for each in factors:
                factor = None if factor is None or each is None else factor * each
            biased = name == "baddbmm" and bool(kwargs.get("beta", 1)) and given[0].numel() < out.numel()
            out.attnsel_scores = Scores(left, right, factor, bias=biased)  # type: ignore[attr-defined]
        return
    own = known[0]
    seen = next((each.attnsel_seen for each in given if hasattr(each, "attnsel_seen")), None)
    if name in _TRIANGLES and out.dim() > 1 and min(out.shape[-2:]) > 1:
        seen = seen or causal
    if seen is not None and scores is None and name in _MASKS | _TRIANGLES:
        out.attnsel_seen = seen if name in _KEEPS else seen._replace(unknown=True)  # type: ignore[attr-defined]
    if (
        name in ("mul", "div", "truediv", "rmul", "divide", "multiply", "imul", "itruediv")
        and len(given) <= 2
    ):
        own = _times(scores or own or Scores(), args, given, divides="div" in name)
    elif scores is None:
        own = own if name in _KEEPS else None
    elif name == "softmax":
        own = scores._replace(over=True)
    elif name == "tanh":
        own = scores._replace(softcap=1.0)
    else:
        own = _changed(scores, [each for each, its in zip(given, known, strict=True) if its is not scores])
    if own is not None and (own.q is None or out.numel() >= _count(own)):
        out.attnsel_scores = own  # type: ignore[attr-defined]


def _count(scores: Scores) -> int:
    assert scores.q is not None
    assert scores.k is not None
    return scores.q.shape[-2] * scores.k.shape[-2]


def _factors(args: tuple[Any, ...], given: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of a product, as [.., rows, depth] and [.., columns, depth]."""
    left, right = given
    if not isinstance(args[0], str):
        return left, right.mT
    a, b, out = args[0].replace(" ", "").replace("->", ",").split(",")
    depth = "".join(each for each in a if each in b and each not in out)
    both = "".join(each for each in a if each in b and each in out)
    rows, columns = ("".join(each for each in one if each not in both + depth) for one in (a, b))
    if not (len(depth) == len(rows) == len(columns) == 1):
        return left.new_empty(1), right.new_empty(1)
    return torch.einsum(f"{a}->{both}{rows}{depth}", left), torch.einsum(
        f"{b}->{both}{columns}{depth}", right
    )


def _times(own: Scores, args: tuple[Any, ...], given: list[Tensor], *, divides: bool) -> Scores | None:
    """Multiplied, or divided, by a number or by a tensor."""
    number = next((each for each in args if isinstance(each, (int, float))), None)
    if number is None and len(given) == 2:
        others = [each for each in given if getattr(each, "attnsel_scores", None) is not own]
        if any(each.numel() > 1 for each in others):
            return _changed(own, others) if own.q is not None else None
        return own if own.over else own._replace(factor=None)
    if number is None or not number or own.over:
        return own
    if own.softcap == 1.0:
        return own._replace(softcap=float(number))
    return (
        own if own.factor is None else own._replace(factor=own.factor * (1 / number if divides else number))
    )


def _changed(scores: Scores, others: list[Tensor]) -> Scores:
    """Added to, or partly overwritten: by a mask, or by what differs by head and is none."""
    columns = scores.k.shape[-2] if scores.k is not None else 0
    for other in others:
        if scores.over or other.dim() < 2 or other.shape[-1] != columns:
            continue
        by_head = other.dim() > 2 and other.shape[-3] > 1 and not hasattr(other, "attnsel_seen")
        is_bias = by_head and other.dtype != torch.bool
        scores = scores._replace(bias=True) if is_bias else scores._replace(masks=(*scores.masks, other))
    return scores
