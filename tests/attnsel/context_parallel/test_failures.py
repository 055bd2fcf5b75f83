"""What ranks cannot do together ends in the same error on all of them, and never in a hang."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
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
from attnsel.errors import ContextParallelError, InvalidInput, NoBackendError
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


# ---- disagreements: (what the other rank does, the field that is named) ------------------------------


def other_rows(second: bool) -> Any:
    return build()(*tensors(12 if second else 8))


def other_rows_in_a_later_call(second: bool) -> Any:
    core = build()
    core(*tensors(8))
    return core(*tensors(12 if second else 8))


def another_parameter(second: bool) -> Any:
    return build(softcap=2.0 if second else 0.0)(*tensors())


def another_exchange(second: bool) -> Any:
    return build("a2a" if second else "p2p")(*tensors())


def another_type(second: bool) -> Any:
    return build()(*tensors(dtype=torch.float64 if second else torch.float32))


def a_backward_on_one_rank(second: bool) -> Any:
    return build()(*(t.requires_grad_(second) for t in tensors()))


def another_choice(second: bool) -> Any:
    with attnsel.override(policy=Policy(deny=("sdpa.flash",) if second else ())):
        return build(backend=None)(*tensors())


def other_lengths(second: bool) -> Any:
    real = torch.tensor([0, 9 if second else 10, 20], dtype=torch.int32)
    return build(attn_mask_type="padding")(*tensors(), cu_seqlens_q=real, cu_seqlens_kv=real)


DISAGREEMENTS: dict[Callable[[bool], Any], str] = {
    other_rows: "query_layer.shape",
    other_rows_in_a_later_call: "query_layer.shape",
    another_parameter: "softcap",
    another_exchange: "cp_comm_type",
    another_type: "query_layer.dtype",
    a_backward_on_one_rank: "requires_grad",
    another_choice: "chosen backend",
    other_lengths: "cu_seqlens_q (contents)",
}


# ---- refusals: (comm, module, rows, code) ------------------------------------------------------------

REFUSALS: list[tuple[str, dict[str, Any], int, str]] = [
    ("p2p", {}, 7, "CP001"),
    ("a2a", {"heads": 3}, 8, "CP004"),
    ("all_gather", {"backend": "sdpa.math"}, 8, "CP005"),
    ("p2p", {"backend": "sdpa.flash", "attention_dropout": 0.5}, 8, "CP008"),
]


def refused(comm: str, module: dict[str, Any], rows: int, code: str) -> Any:
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
    for function in DISAGREEMENTS:
        found[function.__name__] = told(lambda f=function: f(rank == 1))
        build()(*tensors())  # the ranks are still in step
    for each in REFUSALS:
        found[each[-1]] = told(lambda each=each: refused(*each))
    found["invalid"] = told(lambda: an_invalid_call_on_one_rank(rank))
    found["groups"] = groups(rank)
    found["kept"] = groups_that_outlive_their_module(rank)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(job, 2, tmp_path_factory.mktemp("failures"))


def test_a_disagreement_names_the_field_and_the_rank(found: list[dict[str, Any]]) -> None:
    for function, field in DISAGREEMENTS.items():
        first, second = (part[function.__name__] for part in found)
        assert first == second, "all ranks say the same"
        assert first.kind == ContextParallelError.__name__, function
        assert f"disagree on {field}: " in first.text
        assert first.text.endswith("on rank 1")


def test_what_rules_refuse_is_refused_on_all_ranks_alike(found: list[dict[str, Any]]) -> None:
    for *_, code in REFUSALS:
        first, second = (part[code] for part in found)
        assert first == second
        assert first.kind == NoBackendError.__name__
        assert code in first.text


def test_an_error_on_one_rank_is_told_to_the_others(found: list[dict[str, Any]]) -> None:
    first, second = (part["invalid"] for part in found)
    assert second.kind == InvalidInput.__name__
    assert first.kind == ContextParallelError.__name__
    assert "rank 1" in first.text
    assert "key_layer.dtype" in first.text


def test_groups_meshes_and_ranks_stand_for_the_same(found: list[dict[str, Any]]) -> None:
    for part in found:
        made = part["groups"]
        for name, out in made.items():
            torch.testing.assert_close(out, made["group"], msg=lambda text, name=name: f"{name}: {text}")


def test_a_group_is_freed_with_the_modules_that_use_it(found: list[dict[str, Any]]) -> None:
    """One that is left to the shutdown of the interpreter ends the process: its threads want the GIL."""
    for part in found:
        assert part["kept"] == []


# ---- a rank that is gone ----------------------------------------------------------------------------


def dying(rank: int, size: int) -> Any:
    """Rank 1 dies in its second kernel call, when keys are on their way around the ring."""
    from attnsel.backends.tiled import kernel as tiled
    from attnsel.runtime.kernels import KERNELS

    core = build()
    core(*tensors())
    if rank == 1:
        calls = []

        def forward(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                os._exit(17)
            return tiled.forward(*arguments)

        KERNELS["tiled"] = KERNELS["tiled"]._replace(forward=forward)

    def twice() -> None:  # who has got all keys already meets the dead rank in the next call
        for _ in range(2):
            core(*tensors())

    return told(twice)


def late(rank: int, size: int) -> Any:
    """Rank 1 never makes the call, and lives: only the group's timeout ends it."""
    core = build(group=dist.new_group(timeout=timedelta(seconds=1)))
    found = None if rank == 1 else told(lambda: core(*tensors()))
    ranks.wait_for_all("told", size)
    return found


@pytest.mark.parametrize(("job", "size"), [(dying, 3), (late, 2)])
def test_ranks_do_not_wait_for_ever(job: Callable[[int, int], Any], size: int, tmp_path: Path) -> None:
    every = ranks.run(job, size, tmp_path)
    assert every[1] is None
    for rank in (n for n in range(size) if n != 1):
        kind, text = every[rank]
        assert kind == ContextParallelError.__name__, text
        assert f"rank {rank} " in text
        assert "another rank has died" in text
