"""Whether strided tensors meet in memory: a linear equation in bounded integers, solved exactly.

Two elements share an address iff ``sum(step * x) == target`` has a solution with ``0 <= x <= most`` for each
term. Deciding that is hard in general and easy for the strides tensors have: steps in descending order leave
one or two choices each. The search stops after a number of steps that real layouts stay far below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

_MOST_STEPS = 20_000  # some 10 ms

Term = tuple[int, int]  # (step, most)


@lru_cache(maxsize=512)
def meets_itself(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool | None:
    """Whether two different indices are one element. None: not decided within the steps allowed.

    Strides are at least 0, as in torch.
    """
    if 0 in shape:
        return False
    terms = sorted(((s, n - 1) for n, s in zip(shape, stride, strict=True) if n > 1), reverse=True)
    if terms and terms[-1][0] == 0:
        return True
    reach = 0
    nested = True
    for step, most in reversed(terms):
        nested = nested and step > reach
        reach += step * most
    if nested:
        return False
    undecided = False
    for i, (step, most) in enumerate(terms):
        # The first index that differs, differs by 1 or more; the later ones by anything, so that with
        # x = most - difference all unknowns count from 0.
        rest = terms[i + 1 :]
        target = step * most + sum(s * m for s, m in rest)
        found = _solvable([(step, most - 1), *((s, 2 * m) for s, m in rest)], target)
        if found:
            return True
        undecided = undecided or found is None
    return None if undecided else False


@lru_cache(maxsize=512)
def meet(
    a_start: int,
    a_shape: tuple[int, ...],
    a_stride: tuple[int, ...],
    a_size: int,
    b_start: int,
    b_shape: tuple[int, ...],
    b_stride: tuple[int, ...],
    b_size: int,
) -> bool | None:
    """Whether two tensors share a byte. Starts in bytes from a common origin, strides in elements of
    ``a_size`` and ``b_size`` bytes. None: not decided within the steps allowed.
    """
    if 0 in a_shape or 0 in b_shape:
        return False
    # Where b counts from its far end, both sides of a_address == b_address add up.
    terms = [(s * a_size, n - 1) for n, s in zip(a_shape, a_stride, strict=True)]
    far = [(s * b_size, n - 1) for n, s in zip(b_shape, b_stride, strict=True)]
    target = b_start - a_start + sum(step * most for step, most in far)
    terms += far
    if a_size == b_size and (b_start - a_start) % a_size == 0:
        return _solvable([(step // a_size, most) for step, most in terms], target // a_size)
    return _solvable([*terms, (1, a_size - 1), (1, b_size - 1)], target + b_size - 1)


def _solvable(terms: Iterable[Term], target: int) -> bool | None:
    """Whether ``sum(step * x) == target`` with ``0 <= x <= most``; None after too many steps."""
    merged: dict[int, int] = {}
    for step, most in terms:
        if step and most:
            merged[step] = merged.get(step, 0) + most
    ordered = sorted(merged.items(), reverse=True)
    reach, divisor = [0], [0]  # of the terms from each on
    for step, most in reversed(ordered):
        reach.insert(0, reach[0] + step * most)
        divisor.insert(0, math.gcd(divisor[0], step))
    stack = [(0, target)]
    steps = 0
    while stack:
        i, left = stack.pop()
        if left == 0:
            return True
        if not 0 < left <= reach[i] or left % divisor[i]:
            continue
        steps += 1
        if steps > _MOST_STEPS:
            return None
        step, most = ordered[i]
        least = max(0, -((reach[i + 1] - left) // step))
        most = min(most, left // step)
        if most - least > _MOST_STEPS:
            return None
        stack += [(i + 1, left - step * x) for x in range(least, most + 1)]
    return False
