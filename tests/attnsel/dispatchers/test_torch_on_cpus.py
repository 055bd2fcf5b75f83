"""What is said of plain torch on CPUs is what it runs: operators recorded over random calls."""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from attnsel import AttentionParams, Environment
from attnsel.dispatchers import dispatched_by
from attnsel.environment.versions import Version
from attnsel.params import Tensors, TensorSpec

HERE = Environment.describe("cpu", torch=torch.__version__)
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.filterwarnings("ignore:.*")  # PyTorch tells reasons where no kernel is left


class Recorder(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(function))
        return function(*args, **(kwargs or {}))


class RandomCall(NamedTuple):
    """Tensors and arguments of a call, and the same as a question with the switches that it stands for."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    arguments: dict[str, Any]
    question: AttentionParams
    switches: dict[str, str]

    def ran(self) -> str:
        """The kernel that ran, or "" where it raised: without the recorder, as a mode changes what math
        does with a mask that is larger than the scores."""
        recorder = Recorder()
        try:
            self.run()
        except (RuntimeError, IndexError):
            return ""
        with recorder:
            self.run()
        if FLASH in recorder.operators:
            return "flash"
        return "math" if any("softmax" in name for name in recorder.operators) else "zeros"

    def run(self) -> None:
        F.scaled_dot_product_attention(*self.tensors, **self.arguments)


def laid_out(
    generator: random.Random, shape: tuple[int, ...], dtype: torch.dtype, grad: bool
) -> torch.Tensor:
    """A tensor [b, h, s, d] in one of the ways in which people hand them over."""
    b, h, s, d = shape
    zeros = functools.partial(torch.zeros, dtype=dtype)
    ways = (
        zeros(shape),
        zeros(b, s, h, d).transpose(1, 2),
        zeros(s, b, h, d).permute(1, 2, 0, 3),
        zeros(b, h, d, s).transpose(2, 3),  # head_dim is not the last in memory
        zeros(b, h, s, 2 * d)[..., ::2],  # gaps
        zeros(1, h, s, d).expand(b, h, s, d),
        zeros(b, h, s, d + 3)[..., 1 : d + 1],
    )
    return generator.choice(ways).detach().requires_grad_(grad)


def a_mask(generator: random.Random, b: int, h: int, s_q: int, s_kv: int, dtype: torch.dtype) -> torch.Tensor:
    """One of any rank, type and layout, and some that do not fit."""
    sizes = [generator.choice([n, n, 1]) if generator.random() < 0.95 else n + 1 for n in (b, h, s_q, s_kv)]
    shape = sizes[4 - generator.choice([4, 4, 4, 2, 2, 3, 1]) :]
    kind = generator.choice([torch.bool, torch.bool, dtype, dtype, torch.float32, torch.float64])
    mask = torch.zeros(*shape, dtype=kind)
    if generator.random() < 0.15 and len(shape) >= 2:
        mask = torch.zeros(*shape[:-2], shape[-1], shape[-2], dtype=kind).transpose(-1, -2)
    return mask.requires_grad_(kind is not torch.bool and generator.random() < 0.25)


def spec(tensor: torch.Tensor) -> TensorSpec:
    offset = tensor.storage_offset() * tensor.element_size()
    return TensorSpec(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype="bool" if tensor.dtype is torch.bool else str(tensor.dtype),
        alignment=min(16, offset & -offset) if offset else 16,
        requires_grad=tensor.requires_grad,
    )


def a_call(generator: random.Random) -> RandomCall:
    dtype = generator.choice(DTYPES)
    b, groups = generator.choice([1, 2, 3]), generator.choice([1, 1, 2, 3])
    repeats = generator.choice([1, 1, 2, 4])
    h = groups * repeats
    s_q = generator.choice([0, 1, 1, 2, 5, 8, 16]) if generator.random() < 0.5 else 8
    s_kv = s_q if generator.random() < 0.6 else generator.choice([0, 1, 3, 8, 17])
    d = generator.choice([1, 3, 8, 16, 17, 64])
    e = d if generator.random() < 0.8 else generator.choice([1, 4, 8, 32])
    grad = generator.random() < 0.4
    q, k, v = (
        laid_out(generator, shape, dtype, grad)
        for shape in ((b, h, s_q, d), (b, groups, s_kv, d), (b, groups, s_kv, e))
    )
    rank = 3 if generator.random() < 0.12 else 4
    enable_gqa = generator.random() < (0.75 if repeats > 1 else 0.2)
    dropout = generator.choice([0.0, 0.0, 0.0, 0.25])
    arguments: dict[str, Any] = {"enable_gqa": enable_gqa}
    if dropout:
        arguments["dropout_p"] = dropout
    kind = generator.choice(["no_mask", "no_mask", "causal", "arbitrary", "arbitrary"])
    laid = (spec(tensor.transpose(1, 2)) for tensor in (q, k, v))
    tensors = Tensors(rank=rank, **dict(zip("qkv", laid, strict=True)))
    if kind == "causal":
        arguments["is_causal"] = True
    elif kind == "arbitrary":
        mask = a_mask(generator, 1 if rank == 3 else b, h, s_q, s_kv, dtype)
        arguments["attn_mask"] = mask
        tensors = tensors.replace(mask=spec(mask))
    if rank == 3:
        q, k, v = q[0], k[0], v[0]
    switches = {} if enable_gqa else {"enable_gqa": "false"}
    question = AttentionParams(
        dtype=str(dtype),
        batch_size=1 if rank == 3 else b,
        num_heads=h,
        num_gqa_groups=groups,
        max_seqlen_q=s_q,
        max_seqlen_kv=s_kv,
        head_dim_qk=d,
        head_dim_v=e,
        attn_mask_type=kind,
        attention_dropout=dropout,
        is_training=grad or dropout > 0,
        tensors=tensors,
    )
    return RandomCall((q, k, v), arguments, question, switches)


@pytest.mark.skipif(
    not (2, 13) <= Version.parse(torch.__version__) < (2, 14), reason="compared with torch 2.13"
)
def test_the_answer_is_what_torch_runs() -> None:
    generator = random.Random(1)
    differences = []
    for number in range(150):
        call = a_call(generator)
        answer = dispatched_by("torch", call.question, HERE, call.switches)
        said = answer.chosen.name if answer.chosen is not None else ""
        if said != (ran := call.ran()):
            differences.append(
                f"{number}: says {said or answer.error!r}, ran {ran!r}: {answer.call} {call.question!r}"
            )
    assert not differences
