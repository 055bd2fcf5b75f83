"""``flash_attn.2``, ``.3``, ``.4`` and ``sdpa.varlen`` on every way of a call: strict stand-ins of packages
and of PyTorch's op carry it out on the CPU, while the question is asked of a described H100."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from attention_calls import Problem, carried_out, complaint
from attnsel import DotProductAttention, Environment, NoBackendError, attention, override
from attnsel.backends.sdpa import varlen
from attnsel.runtime import dispatch
from call_cases import PLAIN_AXES, Row, made, rows
from emulated_flash_attn import installed
from flash_op import FlashOp

torch.set_num_threads(1)

VARLEN = ("sdpa.varlen", "")
NEWEST = [VARLEN, ("flash_attn.2", "2.8.3"), ("flash_attn.3", "3.0.0"), ("flash_attn.4", "4.0.0b36")]
OLDER = [
    ("flash_attn.2", "2.5.9.post1"),
    ("flash_attn.2", "2.6.3"),
    ("flash_attn.2", "2.7.4.post1"),
    ("flash_attn.3", "3.0.0b1"),
    ("flash_attn.4", "4.0.0b20"),
]
COMPONENT = {"flash_attn.2": "flash_attn", "flash_attn.3": "flash_attn_3", "flash_attn.4": "flash_attn_4"}


def described(name: str, version: str) -> Environment:
    package = {COMPONENT[name]: version} if version else {}
    return Environment.describe("H100", cudnn_frontend=None, triton=None, **package)


@pytest.fixture(params=NEWEST, ids="-".join)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The candidate, whose package is there in this release."""
    name, version = request.param
    monkeypatch.setattr(dispatch, "environment_of", lambda q: described(name, version))
    op = FlashOp()
    monkeypatch.setattr(varlen, "forward_op", lambda: op.forward)
    monkeypatch.setattr(varlen, "backward_op", lambda: op.backward)
    monkeypatch.setattr(varlen, "_lse_by_sequence", lambda: False)
    dispatch.clear_cache()
    with installed(int(name[-1]), version) if version else nullcontext():
        yield name
    dispatch.clear_cache()


def half(row: Row, **more: Any) -> Problem:
    return made(row, dtype="float16", **more)


def taken(row: Row, backend: str, version: str) -> bool:
    """Whether the generation has an argument for all of it, and the diagonal."""
    band, rows = row.get("band", "full"), row.get("rows", "as many")
    if rows != "as many" and band in ("causal", "causal window", "window, top left"):
        return (band, rows, row["batch"]) == ("causal", "more queries", "dense")
    if rows == "more queries" and band == "window, no right bound":
        return backend in ("flash_attn.3", "flash_attn.4")
    if row.get("band") == "mask" or "bias" in row.get("scores", "") or row.get("results") == "max_logit":
        return False
    if "alibi" in row.get("scores", ""):
        return backend == "flash_attn.2"
    if row.get("scores") == "softcap":
        return backend != "sdpa.varlen" and version != "2.5.9.post1"
    return row.get("softmax", "vanilla") == "vanilla" or version == "4.0.0b36"


# One feature each, that not every kernel has.
OTHERS: list[Row] = [
    {"band": "mask"},
    {"scores": "bias"},
    {"scores": "pre_scale_bias"},
    {"scores": "alibi", "band": "causal"},
    {"scores": "alibi slopes", "batch": "packed"},
    {"scores": "softcap", "band": "causal window", "heads": (2, 2)},
    {"softmax": "off-by-one", "band": "causal, bottom right", "rows": "fewer queries"},
    {"softmax": "learnable", "batch": "packed"},
    {"results": "max_logit"},
]
PLAIN = rows(**PLAIN_AXES)


@pytest.mark.parametrize("backend", NEWEST + OLDER, ids="-".join, indirect=True)
def test_every_call_gives_the_definition_or_says_why_not(
    backend: str, request: pytest.FixtureRequest
) -> None:
    """Of an older release, every third: what a generation has grown by is among the others."""
    _, version = release = request.node.callspec.params["backend"]
    found = []
    for row in [*PLAIN[:: 1 if release in NEWEST else 3], *OTHERS]:
        problem = half(row, backend=backend)
        try:
            wrong = complaint(problem, carried_out(problem))
        except NoBackendError as error:
            wrong = "" if re.search(r"(FLASH|SDPA)\d", str(error)) else str(error)
            refused = True
        else:
            refused = False
        if wrong or refused is taken(row, backend, version):
            found.append((row, "refused" if refused else "taken", wrong))
    assert not found, "\n".join(map(str, found))


CAUSAL = {"band": "causal", "batch": "cu_seqlens"}
PACKED = {"band": "causal", "batch": "packed", "heads": (2, 2)}


def test_the_module_runs_it_and_compares_its_first_call(backend: str) -> None:
    problem = half(CAUSAL)
    core = DotProductAttention(
        4, 8, qkv_format="bshd", attn_mask_type="padding_causal", backend=backend, name="core"
    )
    out = core(*problem.qkv(problem.leaves), **problem.tensors)
    assert core.last_selection.backend == backend
    assert core.last_selection.chosen.adaptations == ()
    assert complaint(problem, {"out": out.detach().unflatten(-1, (4, 8))}) == ""


def test_what_is_saved_may_be_moved(backend: str) -> None:
    """Offloading makes tensors anew; two for what was one would be lengths that may differ."""
    problem = half(PACKED, backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        assert complaint(problem, carried_out(problem)) == ""


@pytest.mark.parametrize("backend", [VARLEN], indirect=True)
def test_dropout_is_drawn_anew_and_two_tensors_of_lengths_are_not_taken_for_one(backend: str) -> None:
    q = torch.randn(1, 9, 2, 8, dtype=torch.float16, requires_grad=True)
    with override(selfcheck=False):
        asked = {"window_size": (3, 3), "attention_dropout": 0.5, "backend": backend}
        outs = [attention(q, q, q, **asked) for _ in range(2)]
    assert not torch.equal(*outs)
    assert torch.autograd.grad(outs[0].float().sum(), q)[0].isfinite().all()
    problem = half(CAUSAL, backend=backend)
    problem.tensors["cu_seqlens_kv"] = problem.tensors["cu_seqlens_q"].clone()
    with pytest.raises(NoBackendError, match="SDPA602"):  # the kernel would put the diagonal elsewhere
        carried_out(problem)
