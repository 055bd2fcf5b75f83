"""What ranks cannot do together ends in the same error on all of them, and never in a hang."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no Gloo", allow_module_level=True)

import attnsel
import ranks
from attnsel import DotProductAttention, Policy
from attnsel.backends.tiled import kernel as tiled
from attnsel.errors import ContextParallelError, InvalidInput, NoBackendError
from attnsel.runtime.kernels import KERNELS
from ranks import told

torch.set_num_threads(1)


def build(comm: str = "p2p", **arguments: Any) -> DotProductAttention:
    given: dict[str, Any] = {"qkv_format": "bshd", "backend": "tiled"} | arguments
    group = given.pop("group", None)
    heads = given.pop("heads", 4)
    if group is None:
        group = ranks.groups_of(comm, dist.get_rank(), dist.get_world_size(), {})
    return DotProductAttention(heads, 8, cp_group=group, cp_comm_type=comm, **given)


def tensors(rows: int = 8, heads: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    return [torch.randn(2, rows, heads, 8, generator=gen).to(dtype) for _ in range(3)]


def other_rows_in_a_later_call(second: bool) -> Any:
    core = build()
    core(*tensors(8))
    return core(*tensors(12 if second else 8))


def another_choice(second: bool) -> Any:
    with attnsel.override(policy=Policy(deny=("sdpa.flash",) if second else ())):
        return build(backend=None)(*tensors())


def other_lengths(second: bool) -> Any:
    real = torch.tensor([0, 9 if second else 10, 20], dtype=torch.int32)
    return build(attn_mask_type="padding")(*tensors(), cu_seqlens_q=real, cu_seqlens_kv=real)


DISAGREEMENTS: dict[str, Callable[[bool], Any]] = {  # by the field that is named: what the ranks do
    "query_layer.shape": other_rows_in_a_later_call,
    "softcap": lambda second: build(softcap=2.0 if second else 0.0)(*tensors()),
    "cp_comm_type": lambda second: build("a2a" if second else "p2p")(*tensors()),
    "query_layer.dtype": lambda second: build()(*tensors(dtype=torch.float64 if second else torch.float32)),
    "requires_grad": lambda second: build()(*(t.requires_grad_(second) for t in tensors())),
    "chosen backend": another_choice,
    "cu_seqlens_q (contents)": other_lengths,
}
REFUSALS: dict[str, tuple[str, dict[str, Any], int]] = {  # by code: comm, module, rows
    "CP001": ("p2p", {}, 7),
    "CP004": ("a2a", {"heads": 3}, 8),
    "CP005": ("all_gather", {"backend": "sdpa.math"}, 8),
    "CP008": ("p2p", {"backend": "sdpa.flash", "attention_dropout": 0.5}, 8),
}


def refused(comm: str, module: dict[str, Any], rows: int) -> Any:
    return build(comm, **module)(*tensors(rows, module.get("heads", 4)))


def an_invalid_call_on_one_rank(rank: int) -> Any:
    q, k, v = tensors()
    return build()(q, k.double() if rank else k, v)


def groups(rank: int) -> dict[str, Any]:
    """Whatever may stand for a group gives the same output."""
    from torch.distributed.device_mesh import init_device_mesh

    made = {"group": build(group=dist.group.WORLD)(*tensors())}
    made["ranks"] = build(cp_global_ranks=[0, 1])(*tensors())
    made["mesh"] = build(group=init_device_mesh("cpu", (2,)))(*tensors())
    late = build(group=init_device_mesh("cpu", (2,)))
    late.set_context_parallel_group(None)
    plain = DotProductAttention(4, 8, qkv_format="bshd", backend="tiled")(*tensors())
    assert torch.equal(late(*tensors()), plain), "None takes the group away"
    late.set_context_parallel_group(dist.group.WORLD, [0, 1], None, "p2p")
    made["set later"] = late(*tensors())
    made["copied"] = copy.deepcopy(late)(*tensors())
    for name, shape, degraded in (("1x2", (1, 2), "a2a"), ("2x1", (2, 1), "p2p")):
        core = build("a2a+p2p", group=init_device_mesh("cpu", shape))
        made[name] = core(*tensors())
        assert core.last_selection is not None
        assert core.last_selection.params.cp_comm_type == degraded
    alone = [dist.new_group([n]) for n in range(2)][rank]
    core = build(group=alone)
    assert torch.equal(core(*tensors()), plain), "a group of one rank is plain attention"
    assert core.last_selection is not None
    assert core.last_selection.params.cp_size == 1
    return made


def groups_that_outlive_their_module(rank: int) -> list[str]:
    """Exchanges of which something still holds the group when the last module is gone."""
    kept = []
    gc.disable()  # what only it can free is freed too late
    try:
        for comm in ("p2p", "all_gather", "a2a"):
            group = dist.new_group([0, 1])
            q, k, v = (t.requires_grad_() for t in tensors())
            core = build(comm, group=group)
            core(q, k, v).sum().backward()
            dist.destroy_process_group(group)
            alive = weakref.ref(group)
            del core, group
            if alive() is not None:
                kept.append(comm)
    finally:
        gc.enable()
    return kept


def job(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, function in DISAGREEMENTS.items():
        found[field] = told(lambda function=function: function(rank == 1))
        build()(*tensors())  # the ranks are still in step
    for code, how in REFUSALS.items():
        found[code] = told(lambda how=how: refused(*how))
    found["invalid"] = told(lambda: an_invalid_call_on_one_rank(rank))
    found["groups"] = groups(rank)
    found["kept"] = groups_that_outlive_their_module(rank)
    return found


def test_all_ranks_meet_the_same_end(tmp_path: Path) -> None:
    first, second = ranks.run(job, 2, tmp_path)
    for field in DISAGREEMENTS:  # the field and the rank are named
        assert first[field] == second[field]
        assert first[field].kind == ContextParallelError.__name__, field
        assert f"disagree on {field}: " in first[field].text
        assert first[field].text.endswith("on rank 1")
    for code in REFUSALS:
        assert first[code] == second[code]
        assert first[code].kind == NoBackendError.__name__
        assert code in first[code].text
    assert second["invalid"].kind == InvalidInput.__name__
    assert first["invalid"].kind == ContextParallelError.__name__
    assert "rank 1" in first["invalid"].text
    assert "key_layer.dtype" in first["invalid"].text
    for part in (first, second):
        for name, out in part["groups"].items():
            torch.testing.assert_close(
                out, part["groups"]["group"], msg=lambda text, name=name: f"{name}: {text}"
            )
        # A group left to the shutdown of the interpreter ends the process: its threads want the GIL.
        assert part["kept"] == [], "a group is freed with the modules that use it"


# ---- a rank that is gone ----------------------------------------------------------------------------


def dying(rank: int, size: int) -> Any:
    """Rank 1 dies in its second kernel call, when keys are on their way around the ring."""
    core = build()
    core(*tensors())
    if rank == 1:
        steps = iter((tiled.forward, lambda *arguments: os._exit(17)))
        KERNELS["tiled"] = KERNELS["tiled"]._replace(forward=lambda *given: next(steps)(*given))

    def twice() -> None:  # who has got all keys already meets the dead rank in the next call
        for _ in range(2):
            core(*tensors())

    return told(twice)


def test_ranks_do_not_wait_for_one_that_died(tmp_path: Path) -> None:
    every = ranks.run(dying, 3, tmp_path)
    assert every[1] is None
    for rank in (0, 2):
        kind, text = every[rank]
        assert kind == ContextParallelError.__name__, text
        assert f"rank {rank} " in text
        assert "another rank has died" in text
