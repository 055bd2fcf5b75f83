"""FlashAttention's packages, those that are installed here, and PyTorch's flash op with lengths, windows and
pages, as attnsel calls them, on a GPU against float64.

On a CPU the same cases run on strict stand-ins: tests/backends/flash_attention/test_calls.py and
tests/backends/sdpa/test_varlen.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from attention_cases import (
    DROPOUT,
    Case,
    assert_errs_little_more,
    carried_out,
    error,
    expected,
    onto,
    poison,
    upstream,
)
from attnsel import AttentionParams, Environment, attention, select
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.sdpa import varlen
from flash_attention_cases import EVERY, RELEASES, takes
from forward_checks import call_in_pages, check_on_the_cpu
from varlen_cases import USED, made

pytestmark = pytest.mark.cuda_only("the packages and the op are CUDA's")
VARLEN = "sdpa.varlen"
NEWEST = {release.kernel.package.name: release for release in RELEASES}
NAMED = {case.name: case for case in EVERY}
both_ways = {"also": ("training", "lse")}


def of_each(*features: str, names: tuple[str, ...] = (VARLEN, *NEWEST), **also: tuple[str, ...]) -> Any:
    """A test for each of them, which shows these features of it."""
    shown = [pytest.param(n, id=n, marks=pytest.mark.shows(n, *features, **also)) for n in names]
    return pytest.mark.parametrize("name", shown)


def kernel_of(name: str) -> Any:
    return varlen if name == VARLEN else NEWEST[name].kernel


def ready(name: str, spec: Spec, inputs: Inputs, device: torch.device, arch: int | None) -> Inputs:
    """The inputs there. Skips where the package is not there, or its rules refuse such a call here."""
    q = inputs.q
    if name == VARLEN:
        if arch is not None and arch < 80:
            pytest.skip("SDPA103: the flash kernel needs Ampere or newer")
        if q.shape[-1] > 192 and arch in (86, 87, 88, 89, 120, 121):
            pytest.skip("SDPA107: the backward stops at head_dim 192 there")
        return onto(device, inputs)
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
    refused = [reason for reason in select(p, Environment.detect(device))[name].reasons if not reason.unknown]
    if refused:
        pytest.skip(f"{refused[0].code}: {refused[0].message}")
    return onto(device, inputs)


def asked(case: Case, scale: int, dtype: torch.dtype = torch.float16, d: int = 64) -> tuple[Spec, Inputs]:
    return made(dataclasses.replace(case, sizes={"d": d, "e": d, **case.sizes}), dtype, scale)


def check(name: str, spec: Spec, inputs: Inputs, dlse: bool = False) -> None:
    kernel = kernel_of(name)
    actual, dout, into_lse = carried_out(kernel.forward, kernel.backward, spec, inputs, dlse=dlse)
    wanted, plain = (expected(spec, inputs, dout, into_lse, at) for at in (torch.float64, inputs.q.dtype))
    for side in (wanted, plain):
        side.pop("max_logit")
    assert_errs_little_more(actual, wanted, plain, inputs.q.dtype)


@of_each(**both_ways)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_every_feature(
    name: str, case: Case, dtype: torch.dtype, device: torch.device, arch: int | None, scale: int
) -> None:
    if not (case in USED if name == VARLEN else takes(NEWEST[name], case)):
        pytest.skip("the package has no argument for it")
    spec, inputs = asked(case, scale, dtype)
    check(name, spec, ready(name, spec, inputs, device, arch))


@of_each("bf16", **both_ways)
@pytest.mark.parametrize("d", [32, 96, 128, 192, 256])
@pytest.mark.parametrize("named", ["plain", "self lengths, causal", "packed: causal bottom-right"])
def test_head_dims(name: str, named: str, d: int, device: torch.device, arch: int | None, scale: int) -> None:
    spec, inputs = asked(NAMED[named], scale, torch.bfloat16, d)
    check(name, spec, ready(name, spec, inputs, device, arch))


@of_each("lse", also=("training",))
@pytest.mark.parametrize(
    ("named", "d"),
    [("packed: plain", 64), ("packed: plain", 128), ("packed: plain", 256), ("plain", 64), ("padding", 64)],
)
def test_the_gradient_of_lse(
    name: str, named: str, d: int, device: torch.device, arch: int | None, scale: int
) -> None:
    spec, inputs = asked(NAMED[named], scale, d=d)
    check(name, spec, ready(name, spec, inputs, device, arch), dlse=True)


@of_each("dropout", names=(VARLEN, "flash_attn.2"), also=("training", "lse"))
@pytest.mark.parametrize("named", ["plain", "packed: plain"])
def test_dropout_drops_its_share_and_its_backward_the_same_entries(
    name: str, named: str, device: torch.device, arch: int | None, scale: int
) -> None:
    """With v = 1 an output is the share of its probabilities that is kept, scaled: its mean is 1. Where dout
    is the same for all, dV says of each key what was kept of it, and both sums are of the same entries."""
    spec, inputs = asked(NAMED[named], scale)
    spec = dataclasses.replace(spec, **DROPOUT)
    inputs = ready(name, spec, inputs._replace(v=torch.ones_like(inputs.v)), device, arch)
    result = kernel_of(name).forward(spec, inputs)
    grads = kernel_of(name).backward(spec, inputs, result, torch.ones_like(result.out))
    real = result.lse != -math.inf
    kept = result.out[..., 0].float()
    kept = kept[real.T if spec.packed else real]
    assert abs(kept.mean().item() - 1.0) < 0.02
    assert kept.std() > 0.0
    assert math.isclose(kept.sum().item(), grads.v[..., 0].float().sum().item(), rel_tol=1e-2)


@of_each("deterministic", **both_ways)
def test_two_deterministic_runs_are_bitwise_equal(
    name: str, device: torch.device, arch: int | None, scale: int
) -> None:
    spec, inputs = asked(NAMED["padding" if name == VARLEN else "self lengths, causal"], scale)
    spec = dataclasses.replace(spec, deterministic=True)
    inputs, kernel = ready(name, spec, inputs, device, arch), kernel_of(name)
    torch.use_deterministic_algorithms(name == VARLEN)
    try:
        one, other = (
            carried_out(kernel.forward, kernel.backward, spec, inputs, dlse=False)[0] for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert {name for name in one if not torch.equal(one[name], other[name])} == set()


@of_each("paged")
@pytest.mark.parametrize("s_q", [1, 20])
def test_pages(name: str, s_q: int, device: torch.device, arch: int | None, scale: int) -> None:
    plain, (paged_spec, paged) = call_in_pages(s_q, scale, varlen.PAGE_MULTIPLE)
    paged = ready(name, paged_spec, paged, device, arch)
    try:
        result = kernel_of(name).forward(paged_spec, paged)
    except ValueError as refused:
        if name != VARLEN or "takes no pages" not in str(refused):
            raise
        pytest.skip(str(refused))
    check_on_the_cpu(result, *plain)


@pytest.mark.shows("sdpa.varlen", "padding", also=("training", "lse"))
def test_what_lies_in_padding_reaches_nothing(device: torch.device, arch: int | None, scale: int) -> None:
    spec, inputs = asked(NAMED["padding"], scale)
    q, k, v = (
        poison(t, lengths.tolist()).transpose(1, 2).contiguous().transpose(1, 2)
        for t, lengths in zip(inputs[:3], (inputs.seqlens_q, *[inputs.seqlens_kv] * 2), strict=True)
    )
    clean = ready(VARLEN, spec, inputs, device, arch)
    spoilt = onto(device, inputs._replace(q=q, k=k, v=v))
    result, other = varlen.forward(spec, clean), varlen.forward(spec, spoilt)
    assert torch.equal(result.out, other.out)
    dout, _ = upstream(result)
    grads = [varlen.backward(spec, *of, dout) for of in ((clean, result), (spoilt, other))]
    for one, two in zip(*grads, strict=True):
        if one is not None:
            assert two.isfinite().all()
            assert error(two, one) < 1e-2  # dQ is summed in any order


@pytest.mark.shows(None)
def test_it_runs_a_window_where_pytorch_is_alone(device: torch.device, arch: int | None) -> None:
    """The whole way: chosen, compared on its first call, and nothing copied."""
    if arch is not None and arch < 80:
        pytest.skip("SDPA103: the flash kernel needs Ampere or newer")
    q, k, v = (torch.randn(2, 512, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    q.requires_grad_()
    out = attention(q, k, v, attn_mask_type="causal", window_size=(64, 0), backend="sdpa.varlen")
    out.float().sum().backward()
    assert Environment.detect(device).torch_flash == "FA2"
    tiled = attention(q, k, v, attn_mask_type="causal", window_size=(64, 0), backend="tiled")
    assert error(out, tiled) < 2e-2
