"""Attention that a model writes out, as products and a softmax of its own: which queries, keys and values.

On the meta device there are no values to follow, so what is known of a tensor is kept on it and handed from
each function's arguments to its result: a number that it was multiplied by, then the scores that it holds,
then the probabilities, until these are multiplied with values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.base.rows import read_rows


class Scores(NamedTuple):
    """What is known of a tensor. ``factor`` None: by a number that nobody can read. ``masks``: what hides
    pairs of them. ``bias``: something else is added to them. ``over``: these are probabilities."""

    q: Tensor
    k: Tensor
    factor: float | None
    masks: tuple[Tensor, ...] = ()
    bias: bool = False
    softcap: float = 0.0
    over: bool = False

    @property
    def mask(self) -> Tensor | None:
        """That which was made by transformers' mask makers, or else the largest."""
        return max(self.masks, key=lambda mask: (hasattr(mask, "attnsel_seen"), mask.numel()), default=None)


@cache
def _roles() -> dict[str, str]:
    return {row["function"]: row["role"] for row in read_rows("attnsel.diagnose.models", "operators")}


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
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if not isinstance(out, Tensor) or not given:
        return
    name = str(getattr(function, "__name__", "")).strip("_")
    role = _roles().get(name, "")
    scores = next((each for tensor in given if (each := getattr(tensor, "attnsel_scores", None))), None)
    if role == "product" and len(given) > 1:
        left, right = _factors(args, given[-2:])
        if scores is not None and scores.over:
            found(scores, right if getattr(given[-2], "attnsel_scores", None) is scores else left)
        elif min(left.dim(), right.dim()) >= 3:
            factor: float | None = kwargs.get("alpha", 1.0)
            for each in given[-2:]:
                its = getattr(each, "attnsel_factor", 1.0)
                factor = None if factor is None or its is None else factor * its
            biased = name == "baddbmm" and bool(kwargs.get("beta", 1)) and given[0].numel() < out.numel()
            out.attnsel_scores = Scores(left, right, factor, bias=biased)  # type: ignore[attr-defined]
        return
    number = next((each for each in args if isinstance(each, (int, float)) and each), None)
    if scores is None:
        _marked(role, given, number if "div" not in name or number is None else 1 / number, out, causal)
        return
    others = [each for each in given if getattr(each, "attnsel_scores", None) is not scores]
    if role == "times" and not scores.over and all(each.numel() == 1 for each in others):
        by = None if others or number is None else 1 / number if "div" in name else number
        if scores.softcap == 1.0 and by is not None:
            scores = scores._replace(softcap=by)
        else:
            own = scores.factor
            scores = scores._replace(factor=None if own is None or by is None else own * by)
    elif name in ("softmax", "tanh"):
        scores = scores._replace(over=True) if name == "softmax" else scores._replace(softcap=1.0)
    else:
        scores = _changed(scores, others)
    if out.numel() >= scores.q.shape[-2] * scores.k.shape[-2]:
        out.attnsel_scores = scores  # type: ignore[attr-defined]


def _marked(role: str, given: list[Tensor], by: float | None, out: Any, causal: Any) -> None:
    """What is known of a tensor that holds no scores: its factor, and the mask that it is."""
    factor = getattr(given[0], "attnsel_factor", 1.0)
    if role == "times" and len(given) == 1 and by is not None and factor is not None:
        out.attnsel_factor = factor * by
    elif role == "keeps":
        out.attnsel_factor = factor
    elif role == "times" and min(each.numel() for each in given) == 1:
        out.attnsel_factor = None
    seen = next((each.attnsel_seen for each in given if hasattr(each, "attnsel_seen")), None)
    if role == "triangle" and out.dim() > 1 and min(out.shape[-2:]) > 1:
        seen = seen or causal
    if seen is not None and role:
        out.attnsel_seen = seen if role == "keeps" else seen._replace(unknown=True)


def _factors(args: tuple[Any, ...], given: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of a product, as [.., rows, depth] and [.., columns, depth]."""
    left, right = given
    if not isinstance(args[0], str):
        return left, right.mT
    a, b, out = args[0].replace(" ", "").replace("->", ",").split(",")
    depth, both = ("".join(each for each in a if each in b and (each in out) == of) for of in (False, True))
    rows, columns = ("".join(each for each in one if each not in both + depth) for one in (a, b))
    if not (len(depth) == len(rows) == len(columns) == 1):
        return left.new_empty(1), right.new_empty(1)
    q, k = (f"{one}->{both}{each}{depth}" for one, each in ((a, rows), (b, columns)))
    return torch.einsum(q, left), torch.einsum(k, right)


def _changed(scores: Scores, others: list[Tensor]) -> Scores:
    """Added to, or partly overwritten: by a mask, or by what differs by head and is none."""
    for other in others:
        if scores.over or other.dim() < 2 or other.shape[-1] != scores.k.shape[-2]:
            continue
        by_head = other.dim() > 2 and other.shape[-3] > 1 and not hasattr(other, "attnsel_seen")
        is_bias = by_head and other.dtype != torch.bool
        scores = scores._replace(bias=True) if is_bias else scores._replace(masks=(*scores.masks, other))
    return scores
