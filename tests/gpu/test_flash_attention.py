"""FlashAttention's packages, as attnsel calls them, on a GPU against float64; those that are installed here.

On a CPU the same cases run on strict stand-ins: tests/backends/flash_attention/test_calls.py.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from attention_cases import DROPOUT, Case, assert_errs_little_more, carried_out, expected, onto
from attnsel import AttentionParams, Environment, select
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.flash_attention.kernel import Kernel
from flash_attention_cases import EVERY, RELEASES, takes
from forward_checks import call_in_pages, check_on_the_cpu
from varlen_cases import made

pytestmark = pytest.mark.cuda_only("the packages are CUDA's")
NEWEST = {release.kernel.package.name: release for release in RELEASES}
both_ways = {"also": ("training", "lse")}


def of_each(*features: str, names: tuple[str, ...] = tuple(NEWEST), **also: tuple[str, ...]):
    """A test for each package, which shows these features of it."""
    return pytest.mark.parametrize(
        "kernel",
        [
            pytest.param(NEWEST[name].kernel, id=name, marks=pytest.mark.shows(name, *features, **also))
            for name in names
        ],
    )


def ready(kernel: Kernel, spec: Spec, inputs: Inputs, device: torch.device) -> None:
    """Skip where the package is not there, or its rules refuse such a call here."""
    name, q = kernel.package.name, inputs.q
    env = Environment.detect(device)
    p = AttentionParams(
        dtype={torch.float16: "fp16", torch.bfloat16: "bf16"}[q.dtype],
        head_dim_qk=q.shape[-1],
        head_dim_v=inputs.v.shape[-1],
        num_heads=q.shape[1],
        num_gqa_groups=inputs.k.shape[1],
        attn_mask_type="no_mask",
        softcap=spec.softcap,
        softmax_type=spec.softmax_type,
        attention_dropout=spec.dropout_p,
        deterministic=spec.deterministic,
        is_training=inputs.block_table is None,
    )
    refused = [reason for reason in select(p, env)[name].reasons if not reason.unknown]
    if refused:
        pytest.skip(f"{refused[0].code}: {refused[0].message}")


def wide(case: Case, d: int = 64) -> Case:
    return dataclasses.replace(case, sizes={"d": d, "e": d, **case.sizes})


def check(kernel: Kernel, spec: Spec, inputs: Inputs, dlse: bool = False) -> None:
    actual, dout, into_lse = carried_out(kernel.forward, kernel.backward, spec, inputs, dlse=dlse)
    wanted, plain = (expected(spec, inputs, dout, into_lse, at) for at in (torch.float64, inputs.q.dtype))
    for side in (wanted, plain):
        side.pop("max_logit")
    assert_errs_little_more(actual, wanted, plain, inputs.q.dtype)


@of_each(**both_ways)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_every_feature(
    kernel: Kernel, case: Case, dtype: torch.dtype, device: torch.device, scale: int
) -> None:
    if not takes(NEWEST[kernel.package.name], case):
        pytest.skip("the package has no argument for it")
    spec, inputs = made(wide(case), dtype, scale)
    ready(kernel, spec, inputs, device)
    check(kernel, spec, onto(device, inputs))


@of_each("bf16", **both_ways)
@pytest.mark.parametrize("d", [32, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["plain", "self lengths, causal", "packed: causal bottom-right"])
def test_head_dims(kernel: Kernel, name: str, d: int, device: torch.device, scale: int) -> None:
    case = next(case for case in EVERY if case.name == name)
    spec, inputs = made(wide(case, d), torch.bfloat16, scale)
    ready(kernel, spec, inputs, device)
    check(kernel, spec, onto(device, inputs))


@of_each("lse", also=("training",))
@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_gradient_of_lse(kernel: Kernel, d: int, device: torch.device, scale: int) -> None:
    spec, inputs = made(
        wide(next(case for case in EVERY if case.name == "packed: plain"), d), torch.float16, scale
    )
    ready(kernel, spec, inputs, device)
    check(kernel, spec, onto(device, inputs), dlse=True)


@of_each("dropout", names=("flash_attn.2",), also=("training", "lse"))
@pytest.mark.parametrize("name", ["plain", "packed: plain"])
def test_dropout_drops_its_share_and_its_backward_the_same_entries(
    kernel: Kernel, name: str, device: torch.device, scale: int
) -> None:
    """With v = 1 an output is the share of its probabilities that is kept, scaled: its mean is 1."""
    spec, inputs = made(wide(next(case for case in EVERY if case.name == name)), torch.float16, scale)
    spec = dataclasses.replace(spec, **DROPOUT)
    ready(kernel, spec, inputs, device)
    inputs = onto(device, inputs._replace(v=torch.ones_like(inputs.v)))
    result = kernel.forward(spec, inputs)
    grads = kernel.backward(spec, inputs, result, torch.ones_like(result.out))
    real = result.lse != -math.inf
    kept = result.out[..., 0].float()
    kept = kept[real.T if spec.packed else real]
    assert abs(kept.mean().item() - 1.0) < 0.02
    assert kept.std() > 0.0
    assert math.isclose(kept.sum().item(), grads.v[..., 0].float().sum().item(), rel_tol=1e-2)


@of_each("deterministic", **both_ways)
def test_two_deterministic_runs_are_bitwise_equal(kernel: Kernel, device: torch.device, scale: int) -> None:
    case = next(case for case in EVERY if case.name == "self lengths, causal")
    spec, inputs = made(wide(case), torch.float16, scale)
    spec = dataclasses.replace(spec, deterministic=True)
    ready(kernel, spec, inputs, device)
    inputs = onto(device, inputs)
    one, other = (carried_out(kernel.forward, kernel.backward, spec, inputs, dlse=False)[0] for _ in range(2))
    assert {name for name in one if not torch.equal(one[name], other[name])} == set()


@of_each("paged")
@pytest.mark.parametrize("s_q", [1, 20])
def test_pages(kernel: Kernel, s_q: int, device: torch.device, scale: int) -> None:
    plain, (paged_spec, paged) = call_in_pages(s_q, scale, 256)
    ready(kernel, paged_spec, paged, device)
    check_on_the_cpu(kernel.forward(paged_spec, onto(device, paged)), *plain)
