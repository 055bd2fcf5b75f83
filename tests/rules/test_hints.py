"""Hints and notes about TransformerEngine: said where they should be, in two lines, and refusing nothing."""

from __future__ import annotations

import pytest

from attnsel.decision import select
from attnsel.environment import Environment
from attnsel.params import AttentionParams, Tensors, TensorSpec
from attnsel.policy import Policy
from attnsel.rules import load_all
from attnsel.rules.api import every_hint, hint
from attnsel.rules.codes import question
from tables import each

load_all()
HINTS = every_hint()
ASKED = [page for page in HINTS if not page.of_tensors]
H100 = Environment.describe("H100", torch="2.13.0")


def said(env=H100, policy=None, **fields):
    """By code what is remarked on a call."""
    selection = select(AttentionParams(**fields), env, policy=policy or Policy())
    return {remark.code: remark for remark in selection.hints}


@pytest.mark.parametrize("page", ASKED, ids=lambda page: page.code)
def test_a_hint(page):
    """Said of its example and not of the other, in two lines with its code; and it refuses nothing."""
    assert page.advice(*question(page, page.passes)) is None
    assert page.advice(*question(page, page.fires_on)) is not None
    selection = select(*question(page, page.fires_on))
    assert page.code not in {reason.code for c in selection.candidates for reason in c.reasons}
    assert page.code not in {c.placed_by for c in selection.candidates}
    lines = selection.report(80).splitlines()
    pairs = [lines[n : n + 2] for n, line in enumerate(lines) if line.startswith("Note: ")]
    (told,) = [pair for pair in pairs if f"[{page.code}]" in " ".join(pair)]
    assert all(len(line) <= 80 for line in told)


def test_evidence_has_to_be_known():
    with pytest.raises(ValueError, match="HINT900: evidence 'hearsay'"):
        hint("HINT900", evidence="hearsay")


def test_the_engine_says_who_is_first_instead_unless_a_backend_is_forced():
    fields = {"max_seqlen_q": 1, "max_seqlen_kv": 8192, "num_gqa_groups": 4, "is_training": False}
    b200 = Environment.describe("B200", torch="2.11")
    remark = said(b200, **fields)["HINT002"]
    meant = select(AttentionParams(**fields, attn_mask_type="no_mask"), b200)
    assert remark.first == meant.backend == "sdpa.flash"
    assert remark.message.endswith("(sdpa.flash first)")
    assert select(AttentionParams(**fields), b200).backend != "sdpa.flash"
    assert said(policy=Policy(backend="tiled"), max_seqlen_q=1, max_seqlen_kv=8)["HINT002"].first is None


@each(
    "mask, expected",
    [
        (None, True),
        (TensorSpec(shape=(157, 157), stride=(160, 1), dtype="bool"), False),
        (TensorSpec(shape=(157, 157), stride=(157, 1), dtype="bool"), True),
        (TensorSpec(shape=(157, 157), stride=(160, 1), dtype="bool", alignment=2), True),
        (TensorSpec(shape=(157, 1), stride=(1, 1), dtype="bool"), False),
    ],
)
def test_mask_rows_off_the_grid_are_named(mask, expected):
    found = said(attn_mask_type="arbitrary", max_seqlen_q=157, tensors=Tensors(mask=mask))
    assert ("HINT008" in found) == expected
    if expected:
        assert "attn_bias is not correctly aligned" in found["HINT008"].message


def engine(version, gpu="H100", **versions):
    return Environment.describe(gpu, transformer_engine=version, **versions)


def test_rules_about_our_frontend_do_not_touch_transformer_engines():
    """TransformerEngine#2354: what an assumed frontend 1.28 refuses is not TransformerEngine's matter."""
    packed = {"qkv_layout": "thd", "num_heads": 1, "max_seqlen_q": 2208, "attn_mask_type": "padding_causal"}
    packed |= {"head_dim_qk": 192, "head_dim_v": 128}
    new = {"cudnn": "9.8.0", "cudnn_frontend": "1.28.0"}
    message = said(engine("2.3", **new), **packed)["TE001"].message
    assert "cudnn-frontend 1.11.0 compiled in" in message
    assert "CUDNN232 (1.28.0) does not touch it" in message
    old = {"cudnn": "9.8.0", "cudnn_frontend": "1.23.0"}
    assert "CUDNN232" not in said(engine("2.3", **old), **packed)["TE001"].message


@each("version", ["2.4", "2.18"])
def test_where_it_is_installed_its_frontend_is_told_only_if_it_matters(version):
    assert "TE001" in said(engine(version))
    assert "TE001" not in said(engine(version).replace(detected=True))
    old = engine("2.8", cudnn="9.14.0", cudnn_frontend="1.28.0").replace(detected=True)
    assert "BUG007 would" in said(old, max_seqlen_q=1000)["TE001"].message
