"""The question that planning asks about a step is about the very call that a kernel then gets."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("no torch.distributed", allow_module_level=True)

from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.registry import CANDIDATES
from attnsel.context_parallel.group import ContextParallel, Member
from attnsel.runtime import kernels
from attnsel.runtime.call import NO_EXTRAS, Call, Extras, config
from attnsel.runtime.dispatch import make_call
from attnsel.selection.steps import step_question, step_shapes
from attnsel.settings import current
from attnsel.verdicts.reasons import NO_EVIDENCE
from tables import each

torch.set_num_threads(1)

RANKS = {"p2p": (1, 4), "all_gather": (1, 4), "a2a": (4, 1), "a2a+p2p": (2, 2)}  # of a2a, of the ring


class Rank(Member):
    """A rank of a group that is not there: nothing is exchanged."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size, self.global_ranks = rank, size, list(range(size))


def made(softmax_type: str = "vanilla", **arguments: Any) -> Call:
    """A rank's call: 32 of 128 rows, 8 heads on 4 groups."""
    q, k, v = (torch.randn(2, 32, heads, 16) for heads in (8, 4, 4))
    extras = NO_EXTRAS
    if softmax_type == "learnable":
        extras = Extras(softmax_offset=torch.randn(8))
    static = config(**{"attn_mask_type": "causal", **arguments}, softmax_type=softmax_type)
    return make_call(static, q, k, v, extras, current())


def call_of(spec: Spec, i: Inputs) -> tuple[Any, ...]:
    q, k = i.q.shape, i.k.shape
    return q[1], k[1], q[2], k[2], spec.softmax_type, spec.need_lse, spec.window_left, spec.window_right


PLAIN: list[dict[str, Any]] = [{}, {"attn_mask_type": "no_mask"}, {"return_lse": True}]
FOR_TILED: list[dict[str, Any]] = [  # sinks are added in the merge; a window around a ring needs offsets
    {"softmax_type": "learnable"},
    {"softmax_type": "off-by-one", "attn_mask_type": "no_mask"},
    {"window_size": (40, 0)},
]
ASKED = [
    (backend, arguments, comm)
    for backend, every in (("sdpa.flash", PLAIN), ("tiled", PLAIN + FOR_TILED))
    for arguments in every
    for comm in RANKS
]


@each(("backend", "arguments", "comm"), ASKED)
def test_a_step_is_planned_as_it_is_run(backend: str, arguments: dict[str, Any], comm: str) -> None:
    from attnsel.context_parallel.run import OnRanks, select_for_ranks  # loads Dynamo: a second

    seen: set[tuple[Any, ...]] = set()
    stand_in = kernels.Kernel(len, len, lambda spec, inputs: seen.add(call_of(spec, inputs)))
    call = made(**arguments, backend=backend)
    a2a, ring = RANKS[comm]
    with mock.patch.dict(kernels.KERNELS, {backend: stand_in}):
        for rank in range(ring):
            cp = ContextParallel(comm, Rank(0, a2a), Rank(rank, ring))
            selection = select_for_ranks(cp, call, NO_EVIDENCE).require()
            OnRanks(cp).bind(selection, call)
    p, offsets = selection.params, CANDIDATES[backend].offsets
    asked = [step_question(p, cp.layout, step) for step in step_shapes(p, cp.layout, offsets)]
    sizes = ("num_heads", "num_gqa_groups", "max_seqlen_q", "max_seqlen_kv", "softmax_type", "return_lse")
    assert seen == {(*(getattr(q, size) for size in sizes), *q.window_size) for q in asked}
