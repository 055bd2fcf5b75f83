"""What is said of plain torch on NVIDIA's GPUs is what the source of each release says, line by line.

No C++ check of these runs without a GPU: fake CUDA tensors reach Python's and the meta side of torch alone.
So the answers are held against a second writing of each release's chooser (support/f_sdpa_chooser.py), and
both against rows written by hand.
"""

from __future__ import annotations

import pytest

from attnsel import AttentionParams, Environment
from attnsel.dispatchers import Dispatch, dispatched_by
from attnsel.environment.versions import Version
from attnsel.params import Tensors, TensorSpec
from f_sdpa_chooser import RELEASES, Case, Choice, Release, choose
from f_sdpa_rows import ROWS, Row, cases
from tables import each

CASES = cases()
IN_THE_GATE = 25  # every so many


def question(c: Case) -> AttentionParams:
    shape = (c.b, c.s_q, c.h, c.d)
    row = c.h * c.d * c.step
    q = TensorSpec(shape=shape, stride=(c.s_q * row, row, c.d * c.step, c.step), alignment=c.offset or 16)
    mask = None
    if c.mask is not None:
        sizes, dtype, grad = c.mask
        stride = (*(1,) * (len(sizes) - 1), c.mask_step)
        mask = TensorSpec(shape=sizes, stride=stride, dtype=dtype, requires_grad=grad)
    return AttentionParams(
        dtype=c.dtype,
        batch_size=c.b,
        num_heads=c.h,
        num_gqa_groups=c.groups,
        max_seqlen_q=c.s_q,
        max_seqlen_kv=c.s_kv,
        head_dim_qk=c.d,
        head_dim_v=c.e,
        attn_mask_type="arbitrary" if mask is not None else "causal" if c.causal else "no_mask",
        attention_dropout=c.dropout,
        is_training=c.grad,
        deterministic=c.deterministic,
        tensors=Tensors(q=q, mask=mask, rank=c.rank),
    )


def answer(release: Release, c: Case) -> Dispatch:
    env = Environment.describe(
        f"sm{c.arch}",
        torch=".".join(map(str, release)),
        cudnn=str(Version.parse(c.cudnn)),
        cuda=f"{c.cuda}.0",
    )
    switches = dict(c.env) | {f"enable_{kernel}_sdp": "false" for kernel in c.off}
    if not c.gqa:
        switches["enable_gqa"] = "false"
    return dispatched_by("torch", question(c), env, switches)


def said(release: Release, c: Case, dispatch: Dispatch) -> tuple[str, set[str]]:
    """The kernel that it goes to, also where that one raises, and those that it passes over."""
    passed_over = {
        offer.name
        for offer in dispatch.offers
        if any(not refusal.text.startswith(f"{offer.name} is taken") for refusal in offer.refusals)
    }
    return next((o.name for o in dispatch.offers if o.name not in passed_over), ""), passed_over


def differs(release: Release, c: Case) -> str:
    expected: Choice = choose(release, c)
    dispatch = answer(release, c)
    if release >= (2, 12, 0) and 0 in (c.s_q, c.s_kv):
        assert dispatch.offers[0] is dispatch.chosen
        dispatch = dispatch._replace(offers=dispatch.offers[1:])
    taken, refused = said(release, c, dispatch)
    order = tuple(offer.name for offer in dispatch.offers)
    if (taken, refused, order) == (expected.taken, set(expected.against), expected.order):
        return ""
    return f"{release} {c}: says {taken} {refused}, its source {expected}"


@each("release", RELEASES)
def test_edges_of_each_check(release: Release) -> None:
    chosen = CASES[RELEASES.index(release) % IN_THE_GATE :: IN_THE_GATE]
    assert len(chosen) >= 200
    assert not [text for c in chosen if (text := differs(release, c))]


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES, ids=lambda r: ".".join(map(str, r)))
def test_every_edge_of_each_check(release: Release) -> None:
    assert len(CASES) >= 200
    assert not [text for c in CASES if (text := differs(release, c))]


@each("row", ROWS)
def test_rows_by_hand(row: Row) -> None:
    within = [r for r in RELEASES if row.since <= r < row.before and not (row.late and r == (2, 5, 0))]
    assert within
    for release in within:
        assert choose(release, row.case).taken == row.taken, release
        assert not differs(release, row.case)
