"""The six functions on whole batches: every feature against the definition in float64, with gradients."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import attnsel
from attnsel import flash_attn
from attnsel.flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_reference import DENSE, VARLEN, Problem, cumulative

INF = float("inf")
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is missing")

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 0.4},
    "causal": {"causal": True},
    "window": {"window_size": (4, 3)},
    "causal window": {"causal": True, "window_size": (5, 9)},
    "left window": {"window_size": (3, -1)},
    "right window": {"window_size": (-1, 2)},
    "window of tensors": {"window_size": tuple(torch.tensor([4, 0]).unbind())},
    "window wider than the keys": {"window_size": (1000, 1000)},
    "softcap": {"softcap": 1.3},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi per sequence, causal": {"causal": True, "alibi_slopes": torch.stack([SLOPES, SLOPES * 3])},
    "dropout": {"dropout_p": 0.3},
    "dropout, causal window, softcap, alibi": {
        "dropout_p": 0.2,
        "causal": True,
        "window_size": (8, -1),
        "softcap": 2.0,
        "alibi_slopes": SLOPES,
    },
    "deterministic": {"causal": True, "deterministic": True},
}


def problem(function: str, args: dict[str, Any], **changes: Any) -> Problem:
    """Lengths that differ from each other as far as the function lets them."""
    sizes: dict[str, Any] = {"heads": 4, "groups": 2, "lengths_q": [21, 21], "lengths_k": [27, 27]}
    if function in VARLEN:
        sizes |= {"lengths_q": [19, 30], "lengths_k": [33, 11]}
    sizes |= changes
    if "qkvpacked" in function:
        sizes |= {"groups": sizes["heads"], "lengths_k": sizes["lengths_q"]}
    return Problem(**sizes, args=args)


def test_every_feature_on_the_cpu() -> None:
    """Every feature through one function, and each of the others with those that it could mix up."""
    for args in FEATURES.values():
        problem("flash_attn_func", args).check("flash_attn_func")
    for function in (*DENSE[1:], *VARLEN):
        for name in ("left window", "alibi per sequence, causal", "dropout, causal window, softcap, alibi"):
            problem(function, FEATURES[name]).check(function)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "tiled"])
def test_every_feature_of_every_function(backend: str | None) -> None:
    with attnsel.override(backend=backend):
        for function in DENSE + VARLEN:
            for args in FEATURES.values():
                problem(function, args, dtype=torch.bfloat16).check(function)


MIXED = "dropout, causal window, softcap, alibi"


@needs_triton
@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("flash_attn_varlen_func", MIXED),
        pytest.param("flash_attn_func", MIXED, marks=pytest.mark.slow),
        pytest.param("flash_attn_kvpacked_func", "alibi per sequence, causal", marks=pytest.mark.slow),
        pytest.param("flash_attn_varlen_qkvpacked_func", "causal", marks=pytest.mark.slow),
    ],
)
def test_triton_interpreted(function: str, name: str) -> None:
    small = {"lengths_q": [9, 14], "lengths_k": [13, 6]} if function in VARLEN else {}
    args = {key: value[..., :2] if key == "alibi_slopes" else value for key, value in FEATURES[name].items()}
    with attnsel.override(backend="triton"):
        problem(function, args, **small, heads=2, groups=1).check(function)


def test_any_head_dim_to_256_scaled_by_its_own_size() -> None:
    for head_dim in (7, 256):
        problem(DENSE[0], {"causal": True}, head_dim=head_dim, heads=2, groups=1).check(DENSE[0])


@pytest.mark.parametrize("function", VARLEN)
def test_unequal_lengths_see_their_own_keys_only(function: str) -> None:
    """Padding that is not masked would move the result by tens of percent; empty sequences count too."""
    lengths_q, lengths_k = [3, 40, 0, 17, 1], [31, 5, 9, 0, 64]
    if "qkvpacked" in function:
        lengths_k = lengths_q = [3, 40, 0, 17, 1]
    problem(function, {"causal": function == VARLEN[0]}, lengths_q=lengths_q, lengths_k=lengths_k).check(
        function
    )


def test_without_probabilities_the_output_comes_alone() -> None:
    for function in DENSE:
        _, arguments, _ = problem(function, {})._arguments(function)
        call = getattr(flash_attn, function)
        assert call(*arguments).shape == (2, 21, 4, 16)
        _, lse, s_dmask = call(*arguments, return_attn_probs=True)
        assert s_dmask.shape == (0,)
        assert not lse.requires_grad


def test_arguments_by_position() -> None:
    p = problem("flash_attn_func", {})
    q, k, v = (t.unflatten(0, (2, -1)) for t in (p.q, p.k, p.v))
    slopes = SLOPES
    by_position = flash_attn_func(q, k, v, 0.0, 0.3, True, (5, 0), 1.5, slopes, True, True)
    by_name = flash_attn_func(
        q, k, v, softmax_scale=0.3, causal=True, window_size=(5, 0), softcap=1.5, alibi_slopes=slopes,
        return_attn_probs=True,
    )  # fmt: skip
    for one, other in zip(by_position, by_name, strict=True):
        assert torch.equal(one, other)


def test_rows_without_keys_are_zero_with_an_lse_of_plus_infinity() -> None:
    q, k = torch.randn(1, 5, 2, 16).half(), torch.randn(1, 2, 2, 16).half()
    out, lse, _ = flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert (out[:, :3] == 0).all()
    assert (out[:, 3:] != 0).any(-1).all()
    assert (lse[..., :3] == INF).all()
    assert lse[..., 3:].isfinite().all()


def test_an_open_right_side_beside_a_left_bound_is_as_wide_as_the_keys() -> None:
    """As in the package; it shows with many more queries than keys: row i sees j <= i + 2 s_k - s_q."""
    q, k = torch.zeros(1, 8, 1, 16).half(), torch.zeros(1, 2, 1, 16).half()
    out = flash_attn_func(q, k, torch.eye(2, 16)[None, :, None].half(), window_size=(1, -1))
    seen = [(row[:2] > 0).tolist() for row in out[0, :, 0]]
    assert seen == [[i + 2 * 2 - 8 >= j >= i + 2 - 8 - 1 for j in range(2)] for i in range(8)]


def test_s_dmask_is_what_the_package_documents() -> None:
    """Rounded to 128, negative where dropped, normalised as the package does: block maxima from the right."""
    q, k, v = (torch.randn(2, s, 2, 32).half() for s in (70, 200, 200))
    _, lse, s_dmask = flash_attn_func(q, k, v, 0.25, causal=True, return_attn_probs=True)
    assert s_dmask.shape == (2, 2, 128, 256)
    assert s_dmask.dtype == torch.float16
    dropped = torch.signbit(s_dmask[:, :, :70, :200])
    visible = torch.ones(70, 200).tril(130).bool().expand(2, 2, -1, -1)
    assert abs(dropped[visible].float().mean() - 0.25) < 0.02
    block = flash_attn.interface._get_block_size_n(q.device, 32, True, True)
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * 32**-0.5
    scores = scores.masked_fill(~visible, -INF)
    factors = [
        (scores[..., first:].amax(-1, keepdim=True) - lse[..., None]).exp().expand(-1, -1, -1, block)
        for first in range(0, 200, block)
    ]
    normalised = s_dmask[:, :, :70, :200].float().abs() * torch.cat(factors, -1)[..., :200]
    torch.testing.assert_close(normalised, scores.softmax(-1), rtol=2e-3, atol=1e-5)


def test_s_dmask_is_exact_under_autocast() -> None:
    """Its scores stay in float32: in bfloat16 they would be off by 0.4%."""
    q = torch.randn(1, 40, 2, 32).half()
    s_dmasks = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            s_dmasks.append(flash_attn_func(q, q, q, 0.25, return_attn_probs=True)[2])
    assert torch.equal(*s_dmasks)


def test_tensors_that_are_not_contiguous() -> None:
    """Heads before rows, a last dimension with gaps, and a packed tensor longer than its sequences."""
    p = problem("flash_attn_func", {})
    q, k, v = (t.unflatten(0, (2, -1)) for t in (p.q, p.k, p.v))
    wanted = flash_attn_func(q, k, v, causal=True)
    across = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.allclose(flash_attn_func(*across, causal=True), wanted, atol=2e-3)
    gaps = [torch.stack([t, t + 1], -1).flatten(-2)[..., ::2] for t in (q, k, v)]
    assert torch.allclose(flash_attn_func(*gaps, causal=True), wanted, atol=2e-3)


def test_rows_behind_the_last_sequence_are_zero() -> None:
    p = problem("flash_attn_varlen_func", {})
    cu_q, cu_k = cumulative(p.lengths_q), cumulative(p.lengths_k)
    wanted, lse, _ = flash_attn_varlen_func(p.q, p.k, p.v, cu_q, cu_k, 30, 33, return_attn_probs=True)
    q, k, v = (torch.cat([t, t[:6]]).requires_grad_() for t in (p.q, p.k, p.v))
    out, longer, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 30, 33, return_attn_probs=True)
    assert torch.equal(out[:49], wanted)
    assert (out[49:] == 0).all()
    assert torch.equal(longer[:, :49], lse)
    out.sum().backward()
    assert (q.grad[49:] == 0).all()
    assert (k.grad[44:] == 0).all()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("args", [{}, {"causal": True, "window_size": (100, 0)}, {"dropout_p": 0.3}], ids=str)
def test_packed_queries_over_pages(args: dict[str, Any], trained: bool) -> None:
    """The same numbers as from packed keys; with a gradient, which goes to the pages."""
    p = problem("flash_attn_varlen_func", args, lengths_q=[5, 40], lengths_k=[270, 130], heads=2)
    pages = torch.full((5, 256, 2, 16), torch.nan).half(), torch.full((5, 256, 2, 16), torch.nan).half()
    table = torch.tensor([[3, 1], [4, -7]], dtype=torch.int32)
    for pool, t in zip(pages, (p.k, p.v), strict=True):
        pool[3], pool[1, :14], pool[4, :130] = t[:256], t[256:270], t[270:]
    k, v = (pool.requires_grad_(trained) for pool in pages)
    q = p.q.clone().requires_grad_(trained)
    out, lse, s_dmask = flash_attn_varlen_func(
        q, k, v, cumulative(p.lengths_q), cumulative(p.lengths_k), 40, 270, **args, return_attn_probs=True,
        block_table=table,
    )  # fmt: skip
    actual = {"out": out.detach(), "lse": lse}
    if trained:
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), p.dout)
        assert (dk[[0, 2]] == 0).all()
        packed = [torch.cat([d[3], d[1, :14], d[4, :130]]) for d in (dk, dv)]
        actual |= {"dq": dq, "dk": packed[0], "dv": packed[1]}
    p.compare(actual, ~torch.signbit(s_dmask) if args.get("dropout_p") else None)


def test_the_inputs_dtype_stays_under_autocast() -> None:
    q = torch.randn(1, 8, 2, 16).half()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attn_func(q, q, q).dtype == torch.float16


def test_torch_compile_in_one_graph() -> None:
    p = problem("flash_attn_func", {})
    q, k, v = (t.unflatten(0, (2, -1)) for t in (p.q, p.k, p.v))

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=True, window_size=(6, 0)) + flash_attn_func(q, k, v)

    wanted = flash_attn_func(q, k, v, causal=True, window_size=(6, 0)) + flash_attn_func(q, k, v)
    torch.testing.assert_close(compiled(q, k, v), wanted)
