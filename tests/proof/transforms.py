"""What PyTorch does to and around calls, each tried with each candidate: right, or which error.

    python tests/proof/transforms.py     # records all of them, for docs/reference/pytorch-transforms.md

tests/attnsel/runtime/test_transforms.py holds the record against what happens.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if __name__ == "__main__":
    sys.path[1:1] = [
        str(Path(__file__).resolve().parents[2]),
        str(Path(__file__).resolve().parents[1] / "support"),
    ]

from attnsel import DotProductAttention, attention, clear_cache
from attnsel.runtime.refusals import evidence
from paths import ROOT

RECORD = ROOT / "benchmarks" / "results" / "transforms-cpu.json"
RIGHT = "✔"
COLUMNS: dict[str, dict[str, Any]] = {  # what is chosen, and the arguments that ask for it
    "chosen": {},
    "sdpa.flash": {"backend": "sdpa.flash"},
    "sdpa.math": {"backend": "sdpa.math"},
    "tiled": {"backend": "tiled"},
    "chosen, softcap": {"softcap": 2.0},
}

Arguments = dict[str, Any]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def qkv(*lead: int, seed: int = 1) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(*lead, 2, 5, 2, 8, dtype=torch.float64, generator=gen) for _ in "qkv"]


def ours(arguments: Arguments) -> Attend:
    return lambda q, k, v: attention(q, k, v, attn_mask_type="causal", **arguments)


def definition(arguments: Arguments) -> Attend:
    """Causal attention of [b, s, h, d] as a formula."""
    cap = arguments.get("softcap", 0.0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
        # Not PyTorch's math kernel: ``sdpa_kernel`` sets the process's flags, and threads restore others'.
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = cap * torch.tanh(scores / cap) if cap else scores
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(-3, -2)

    return attend


def loss(attend: Attend) -> Attend:
    return lambda q, k, v: attend(q, k, v).pow(2).sum()


def same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted)


# ---- derivatives ------------------------------------------------------------------------------------


def gradients(arguments: Arguments) -> None:
    found = []
    for attend in (ours(arguments), definition(arguments)):
        leaves = [t.requires_grad_() for t in qkv()]
        found.append(torch.autograd.grad(loss(attend)(*leaves), leaves))
    same(*found)


def second_derivatives(arguments: Arguments) -> None:
    found = []
    for attend in (ours(arguments), definition(arguments)):
        leaves = [t.requires_grad_() for t in qkv()]
        first = torch.autograd.grad(loss(attend)(*leaves), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves))
    same(*found)


def functional_gradients(arguments: Arguments) -> None:
    same(*(torch.func.grad(loss(a), (0, 1, 2))(*qkv()) for a in (ours(arguments), definition(arguments))))


def jvp(arguments: Arguments) -> None:
    given = tuple(qkv()), tuple(qkv(seed=2))
    same(*(torch.func.jvp(attend, *given) for attend in (ours(arguments), definition(arguments))))


def vmap(arguments: Arguments) -> None:
    same(torch.vmap(ours(arguments))(*qkv(3)), definition(arguments)(*qkv(3)))


def hessian(arguments: Arguments) -> None:
    q, k, v = (t[:1, :3, :1, :2] for t in qkv())

    def of(attend: Attend) -> Any:
        return torch.func.hessian(lambda q: loss(attend)(q, k, v))(q)

    same(of(ours(arguments)), of(definition(arguments)))


def checkpointing(arguments: Arguments) -> None:
    wanted = [t.requires_grad_() for t in qkv()]
    loss(definition(arguments))(*wanted).backward()
    for reentrant in (True, False):
        leaves = [t.requires_grad_() for t in qkv()]
        checkpoint(ours(arguments), *leaves, use_reentrant=reentrant).pow(2).sum().backward()
        same([t.grad for t in leaves], [t.grad for t in wanted])


# ---- modules ----------------------------------------------------------------------------------------


def module(arguments: Arguments) -> DotProductAttention:
    return DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type="causal", **arguments)


def flat(arguments: Arguments) -> Tensor:
    return definition(arguments)(*qkv()).flatten(-2)


def functional_call(arguments: Arguments) -> None:
    same(torch.func.functional_call(module(arguments), {}, tuple(qkv())), flat(arguments))


def deepcopy(arguments: Arguments) -> None:
    called = module(arguments)
    called(*qkv())
    same(copy.deepcopy(called)(*qkv()), flat(arguments))


def pickled(arguments: Arguments) -> None:
    called = module(arguments)
    called(*qkv())
    same(pickle.loads(pickle.dumps(called))(*qkv()), flat(arguments))


# ---- graphs -----------------------------------------------------------------------------------------


def compiled(arguments: Arguments) -> None:
    torch._dynamo.reset()
    leaves, again = ([t.requires_grad_() for t in qkv()] for _ in range(2))
    run = torch.compile(loss(ours(arguments)), fullgraph=True, backend="aot_eager")
    same(
        torch.autograd.grad(run(*leaves), leaves),
        torch.autograd.grad(loss(definition(arguments))(*again), again),
    )


def second_derivatives_compiled(arguments: Arguments) -> None:
    torch._dynamo.reset()
    found = []
    run = torch.compile(ours(arguments), fullgraph=True, backend="aot_eager")
    for attend in (run, definition(arguments)):
        leaves = [t.requires_grad_() for t in qkv()]
        first = torch.autograd.grad(loss(attend)(*leaves), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves))
    same(*found)


class _Block(nn.Module):
    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.core = module(arguments)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.core(q, k, v)


def exported(arguments: Arguments) -> None:
    program = torch.export.export(_Block(arguments).eval(), tuple(qkv()))
    same(program.module()(*qkv()), flat(arguments))


# ---- types of tensors, and modes --------------------------------------------------------------------


def autocast(arguments: Arguments) -> None:
    q, k, v = (t.float() for t in qkv())
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(arguments)(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), definition(arguments)(q, k, v), rtol=2e-2, atol=2e-2)


def fake_tensors(arguments: Arguments) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        out = ours(arguments)(*(mode.from_tensor(t) for t in qkv()))
    assert (out.shape, out.dtype) == ((2, 5, 2, 8), torch.float64)


def _with_a_group(job: Callable[[], None]) -> None:
    """``job`` in a process group of this process alone."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            job()
        finally:
            dist.destroy_process_group()


def dtensors(arguments: Arguments) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    def job() -> None:
        mesh = init_device_mesh("cpu", (1,))
        shards = [distribute_tensor(t, mesh, [Shard(2)]) for t in qkv()]
        made: Any = ours(arguments)(*shards)
        same(made.full_tensor(), definition(arguments)(*qkv()))

    _with_a_group(job)


def dtensors_mapped(arguments: Arguments) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map

    def job() -> None:
        mesh, heads = init_device_mesh("cpu", (1,)), [Shard(2)]
        shards = [distribute_tensor(t, mesh, heads) for t in qkv()]
        run = local_map(ours(arguments), heads, (heads, heads, heads), device_mesh=mesh)
        same(run(*shards).full_tensor(), definition(arguments)(*qkv()))

    _with_a_group(job)


def fully_sharded(arguments: Arguments) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8, bias=False, dtype=torch.float64)
            self.core = module({**arguments, "softmax_type": "learnable", "backend": None}).double()

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.core(self.project(q), k, v)

    def job() -> None:
        torch.manual_seed(0)
        layer = Layer()
        wanted = copy.deepcopy(layer)
        wanted(*qkv()).pow(2).sum().backward()
        sharded = fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        sharded(*qkv()).pow(2).sum().backward()
        for name, parameter in sharded.named_parameters():  # type: ignore[attr-defined]
            assert parameter.grad is not None
            same(parameter.grad.full_tensor(), wanted.get_parameter(name).grad)

    _with_a_group(job)


# ---- threads and processes --------------------------------------------------------------------------


def threads(arguments: Arguments) -> None:
    troubles: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                gradients(arguments)
        except BaseException as error:
            troubles.append(error)

    every = [threading.Thread(target=work) for _ in range(4)]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join()
    if troubles:
        raise troubles[0]


def fork(arguments: Arguments) -> None:
    same(ours(arguments)(*qkv()), definition(arguments)(*qkv()))

    def work(answers: Any) -> None:
        try:
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
            same(ours(arguments)(*qkv()), definition(arguments)(*qkv()))
            same(
                ours(arguments)(*(t[:, :4] for t in qkv())), definition(arguments)(*(t[:, :4] for t in qkv()))
            )
            answers.put("")
        except BaseException as error:
            answers.put(f"{type(error).__name__}: {error}")
        finally:
            answers.close()
            answers.join_thread()
            os._exit(0)

    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = context.Process(target=work, args=(answers,))
        child.start()
    told = answers.get(timeout=60)
    child.join()
    if told:
        raise RuntimeError(told)


TRANSFORMS: dict[str, Callable[[Arguments], None]] = {
    "gradients": gradients,
    "second derivatives (`create_graph=True`)": second_derivatives,
    "`torch.func.grad`": functional_gradients,
    "`torch.func.jvp`": jvp,
    "`torch.func.hessian`": hessian,
    "`torch.vmap`": vmap,
    "activation checkpointing": checkpointing,
    "`torch.func.functional_call`": functional_call,
    "`copy.deepcopy`": deepcopy,
    "`pickle`": pickled,
    "`torch.compile`, with gradients": compiled,
    "`torch.compile`, second derivatives": second_derivatives_compiled,
    "`torch.export`": exported,
    "autocast": autocast,
    "fake tensors": fake_tensors,
    "FSDP2 (`fully_shard`)": fully_sharded,
    "DTensors": dtensors,
    "DTensors through `local_map`": dtensors_mapped,
    "four threads at once": threads,
    "a forked child": fork,
}


def outcome(transform: str, column: str) -> str:
    """A cell: ``RIGHT``, or the error's type. Wrong numbers raise AssertionError."""
    clear_cache()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            TRANSFORMS[transform](dict(COLUMNS[column]))
    except AssertionError:
        raise
    except Exception as error:
        word = type(error).__name__
    else:
        word = RIGHT
    if transform in _LEARN_NOTHING:
        assert evidence().refusals == (), "a transform says nothing about plain calls"
    clear_cache()
    return word


_LEARN_NOTHING = {
    name for name, tried in TRANSFORMS.items() if tried in (jvp, vmap, functional_gradients, hessian)
}


def record() -> dict[str, Any]:
    """Every cell, and the torch that gave it."""
    cells = {name: {column: outcome(name, column) for column in COLUMNS} for name in TRANSFORMS}
    return {"torch": torch.__version__.partition("+")[0], "outcomes": cells}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written: {RECORD.relative_to(ROOT)}")
