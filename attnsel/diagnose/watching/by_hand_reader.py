"""Attention written by hand, found by its operators: a softmax between two products.

A reader of aten operators, as a TorchDispatchMode sees them: scores are followed from the product of queries
and keys through scales, masks, casts and dropout to the product with the values. What is followed is known by
its storage, so views cost nothing. A product with a weight of the model gives no scores: a classifier's
logits, a router's, or a codebook's are not attention, and neither is log_softmax.

Not found: scores made without a matrix product, and probabilities that a function of another library (a
Triton kernel, a C++ extension) makes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnsel.diagnose.watching.by_hand_call import Call, Found, Operand, Role
from attnsel.diagnose.watching.by_hand_operators import HANDLERS

MOST_ROLES = 4096
"""Storages that are followed at a time; beyond it all is forgotten but the newest call."""

HELD_CALLS = 8
"""Calls whose masks are kept alive until their softmax."""


class ByHand:
    """Reads operators one after the other, and calls ``found`` with each attention, at its last product.

    ``softmax`` is told of each softmax of scores, and whether it is one over keys; it says whether
    to go on.
    """

    def __init__(
        self,
        found: Callable[[Call, Found], None],
        softmax: Callable[[Call, bool], bool] = lambda call, attention: attention,
    ) -> None:
        self._found, self._softmax = found, softmax
        self._roles: dict[int, Role] = {}
        self._held: deque[Call] = deque()

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One operator that ran: ``func(*args, **kwargs)`` gave ``out``."""
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        handler = HANDLERS.get(name)
        role = None
        if handler is not None and args:
            role = handler(self, args, kwargs, out)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(first, Tensor):
            return
        where = _storage(first)
        if role is not None:
            if len(self._roles) > MOST_ROLES:
                self._roles.clear()
            self._roles[where] = role
        elif where in self._roles and not any(
            isinstance(one, Tensor) and _storage(one) == where for one in args
        ):
            del self._roles[where]  # memory that something else was written to

    def forget(self) -> None:
        """All that is followed."""
        self._roles.clear()
        self._held.clear()

    def role(self, value: Any) -> Role | None:
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
            return self._roles.get(_storage(value))
        return None

    def operand(self, value: Tensor) -> Operand:
        if isinstance(value, torch.nn.Parameter):
            return Operand(parameter=True)
        role = self._roles.get(_storage(value))
        own = role.operand if role is not None and role.kind == "operand" else Operand()
        return own._replace(parameter=own.parameter or isinstance(value._base, torch.nn.Parameter))

    def softmaxed(self, call: Call, x: Tensor, dim: int) -> bool:
        attention = call.softmaxed(x, dim)
        call.shape = tuple(x.shape)
        return self._softmax(call, attention)

    def hold(self, call: Call) -> None:
        """Keep the masks of the newest calls; those of older ones are let go."""
        if call not in self._held:
            self._held.append(call)
            if len(self._held) > HELD_CALLS:
                self._held.popleft().additions.clear()

    def finish(self, call: Call, values: Tensor, head_dim_v: int, operator: str) -> None:
        if call.shape and not call.done:
            call.done = True  # its backward multiplies the same probabilities again
            repeats = self.operand(values).repeats
            if repeats > 1:
                call.key = call.key._replace(repeats=max(repeats, call.key.repeats))
            call.operators.append(operator)
            self._found(call, call.found(head_dim_v))


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse tensors, and those of other libraries
        return -id(tensor)
