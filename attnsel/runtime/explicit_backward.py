"""A backward of its own, and dropout whose entries can be named: for whoever merges partial results.

Ring attention runs the forward on each part of the keys, merges outputs and log-sum-exps itself, and runs the
backward on each part with the merged ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.contract import Grads
from attnsel.backends.registry import CANDIDATES
from attnsel.decision import Selection
from attnsel.runtime import selfcheck
from attnsel.runtime.adaptations import Known
from attnsel.runtime.bind import Bound, bind_gradients, binding_of, contract_call
from attnsel.runtime.cache import BoundedCache
from attnsel.runtime.call import Call, Config, Extras
from attnsel.runtime.dispatch import kept, select_for
from attnsel.settings import current, override
from attnsel.verdicts.reasons import Evidence

_bound: BoundedCache[Bound] = BoundedCache(limit=4096)


@contextmanager
def seeded_dropout() -> Iterator[None]:
    """Only candidates that drop by the contract's generator, besides what the policy says.

    On all of those a seed keeps the same entries; cuDNN replays a seed too, but by a generator of its own.
    """
    others = [name for name, record in CANDIDATES.items() if record.dropout != "contract"]
    with override(deny=tuple(dict.fromkeys((*current().policy.deny, *others)))):
        yield


class MergedResult(NamedTuple):
    """What a backward starts from: ``out`` and ``dout`` in the call's format, ``lse`` float32 [b, h, s_q] or
    [h, t_q], -inf where a row saw no key. ``out`` and ``lse`` may be merged from parts of the keys."""

    out: Tensor
    lse: Tensor
    dout: Tensor


def backward(config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, merged: MergedResult) -> Grads:
    """Gradients of q, k and v from an output and log-sum-exp that may be merged from parts of the keys.

    Tensors in ``config.qkv_format``. ``config`` must say is_training, return_lse and adapt "never"; with
    dropout, ``extras.dropout_seed`` and ``seeded_dropout()``. Raises as ``attend`` does.
    """
    call = Call(config, q, k, v, extras, current(), need_grad=True)
    with torch.no_grad():
        grads: Grads = kept(_bound, _ExplicitBackward(merged), call)[1]
    return grads


class _ExplicitBackward:
    """The chosen kernel's backward alone."""

    def __init__(self, merged: MergedResult) -> None:
        self.merged = merged

    def select(self, call: Call, evidence: Evidence) -> Selection:
        return select_for(call, evidence)

    def bind(self, selection: Selection, call: Call) -> Bound:
        return Bound(bind_gradients(selection, call), None, selection, call.settings)

    def check(self, bound: Bound, call: Call) -> bool:
        """Its own forward and backward, for there is no telling what ``merged`` was merged from."""
        if not selfcheck.is_wanted(bound.selection, call.settings):
            return True
        binding = binding_of(bound.selection, call)
        _, inputs = contract_call(call, bound.selection.params, dropout=True)
        return selfcheck.check_kernel(binding.kernel, binding.spec, inputs, bound.selection, call.settings)

    def run(self, bound: Bound, call: Call) -> Any:
        return bound.run(call, self.merged.dout, Known(self.merged.out, self.merged.lse))
