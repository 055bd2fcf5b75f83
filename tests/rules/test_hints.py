"""Hints and notes about TransformerEngine: said where they should be, in two lines, and refusing nothing."""

from __future__ import annotations

import json

import pytest

from attnsel.cli import main
from attnsel.decision import select
from attnsel.environment import Environment
from attnsel.params import AttentionParams, Tensors, TensorSpec
from attnsel.policy import Policy
from attnsel.rules import load_all
from attnsel.rules.examples import question
from attnsel.rules.hint import every_hint, hint

load_all()
HINTS = every_hint()
ASKED = [page for page in HINTS if not page.of_tensors]
H100 = Environment.describe("H100", torch="2.13.0")


def by_code(page):
    return page.code


def said(env=H100, policy=None, **fields):
    """By code what is remarked on a call."""
    selection = select(AttentionParams(**fields), env, policy=policy or Policy())
    return {remark.code: remark for remark in selection.hints}


# Every hint.


@pytest.mark.parametrize("page", ASKED, ids=by_code)
def test_it_is_said_of_its_example_and_not_of_the_other(page):
    assert page.advice(*question(page, page.fires_on)) is not None
    assert page.advice(*question(page, page.passes)) is None


@pytest.mark.parametrize("page", ASKED, ids=by_code)
def test_it_takes_two_lines_of_a_report_with_its_code(page):
    selection = select(*question(page, page.fires_on))
    lines = selection.report(80).splitlines()
    first = next(
        number
        for number, line in enumerate(lines)
        if line.startswith("Note: ") and f"[{page.code}]" in " ".join(lines[number : number + 2])
    )
    assert all(len(line) <= 80 for line in lines[first : first + 2])


@pytest.mark.parametrize("page", ASKED, ids=by_code)
def test_it_refuses_nothing(page):
    selection = select(*question(page, page.fires_on))
    assert page.code not in {reason.code for c in selection.candidates for reason in c.reasons}
    assert page.code not in {c.placed_by for c in selection.candidates}


@pytest.mark.parametrize("page", HINTS, ids=by_code)
def test_it_has_a_page(page, capsys):
    assert main(["rule", page.code]) == 0
    told = capsys.readouterr().out
    assert "refuses and orders nothing" in " ".join(told.split())
    assert ("Said of:" in told) == (not page.of_tensors)


def test_a_plain_question_is_left_alone():
    assert said() == {}


def test_evidence_has_to_be_known():
    with pytest.raises(ValueError, match="HINT900: evidence 'hearsay'"):
        hint("HINT900", evidence="hearsay")


def test_hints_are_in_the_json(capsys):
    main(
        [
            "explain",
            "--gpu",
            "H100",
            "--max-seqlen-q",
            "1",
            "--max-seqlen-kv",
            "8192",
            "--inference",
            "--json",
        ]
    )
    (told,) = json.loads(capsys.readouterr().out)["hints"]
    assert told["code"] == "HINT002"
    assert told["instead"] == {"attn_mask_type": "no_mask"}
    assert told["first"] == "sdpa.flash"
    assert told["message"].startswith("one query under top-left causal sees 1 key of 8192")


# Causal masks over unequal lengths.


@pytest.mark.parametrize(
    ("fields", "code", "instead"),
    [
        ({"max_seqlen_q": 128}, "HINT001", "causal_bottom_right"),
        ({"max_seqlen_q": 1}, "HINT002", "no_mask"),
        ({"max_seqlen_q": 1, "window_size": (512, 0)}, "HINT002", "causal_bottom_right"),
        ({"max_seqlen_q": 1, "attn_mask_type": "padding_causal"}, "HINT002", "padding"),
        (
            {"max_seqlen_q": 9, "attn_mask_type": "padding_causal"},
            "HINT001",
            "padding_causal_bottom_right",
        ),
    ],
)
def test_top_left_over_unequal_lengths_names_the_other_way(fields, code, instead):
    found = said(max_seqlen_kv=8192, **fields)
    assert list(found) == [code]
    assert found[code].instead == {"attn_mask_type": instead}
    assert instead in found[code].message


@pytest.mark.parametrize(
    ("q", "kv", "words"),
    [(128, 8192, "no query sees the last 8064 keys"), (300, 200, "the last 100 queries see every key")],
)
def test_what_top_left_means_is_counted(q, kv, words):
    assert words in said(max_seqlen_q=q, max_seqlen_kv=kv)["HINT001"].message


@pytest.mark.parametrize("mask", ["causal_bottom_right", "no_mask", "padding_causal_bottom_right"])
def test_who_says_the_other_way_is_not_asked(mask):
    assert said(max_seqlen_q=1, max_seqlen_kv=8192, attn_mask_type=mask) == {}


def test_the_engine_says_who_is_first_instead():
    fields = {"max_seqlen_q": 1, "max_seqlen_kv": 8192, "num_gqa_groups": 4, "is_training": False}
    b200 = Environment.describe("B200", torch="2.11")
    remark = said(b200, **fields)["HINT002"]
    meant = select(AttentionParams(**fields, attn_mask_type="no_mask"), b200)
    assert remark.first == meant.backend == "sdpa.flash"
    assert remark.message.endswith("(sdpa.flash first)")
    assert select(AttentionParams(**fields), b200).backend != "sdpa.flash"


def test_who_forces_a_backend_is_not_told_of_another():
    remark = said(policy=Policy(backend="tiled"), max_seqlen_q=1, max_seqlen_kv=8)["HINT002"]
    assert remark.first is None


# FP8, swapped dimensions, windows, masks.


def test_fp8_without_a_recipe_names_the_flag():
    assert "--fp8-recipe" in said(fp8=True)["HINT003"].message
    delayed = {"recipe": {"kind": "delayed", "fp8_dpa": True}}
    assert "HINT003" not in said(fp8=True, fp8_meta=delayed)
    assert "HINT003" not in said(fp8=True, dtype="fp8_e4m3")


@pytest.mark.parametrize(
    ("layout", "words"), [("bshd", "F.sdpa's order is bhsd"), ("bhsd", "TransformerEngine's order is bshd")]
)
def test_swapped_heads_and_rows_name_the_other_order(layout, words):
    remark = said(qkv_layout=layout, num_heads=4096, max_seqlen_q=16)["HINT004"]
    assert words in remark.message
    assert remark.instead["num_heads"] == 16


def test_many_heads_alone_are_no_mistake():
    assert "HINT004" not in said(num_heads=512, max_seqlen_q=4096)
    assert "HINT004" not in said(num_heads=128, max_seqlen_q=16)


@pytest.mark.parametrize(
    ("fields", "hides"),
    [
        ({"max_seqlen_q": 1024, "window_size": (1023, 0)}, False),
        ({"max_seqlen_q": 1024, "window_size": (1022, 0)}, True),
        ({"max_seqlen_q": 8, "attn_mask_type": "no_mask", "window_size": (7, 7)}, False),
        ({"max_seqlen_q": 8, "attn_mask_type": "no_mask", "window_size": (7, 6)}, True),
    ],
)
def test_a_window_that_hides_one_pair_is_one(fields, hides):
    assert ("HINT006" not in said(**fields)) == hides


@pytest.mark.parametrize(
    ("mask", "expected"),
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


# TransformerEngine.


def engine(version, gpu="H100", **versions):
    return Environment.describe(gpu, transformer_engine=version, **versions)


def test_rules_about_our_frontend_do_not_touch_transformer_engines():
    """TransformerEngine#2354: what an assumed frontend 1.28 refuses is not TransformerEngine's matter."""
    packed = {
        "qkv_layout": "thd",
        "num_heads": 1,
        "max_seqlen_q": 2208,
        "head_dim_qk": 192,
        "head_dim_v": 128,
        "attn_mask_type": "padding_causal",
    }
    new = {"cudnn": "9.8.0", "cudnn_frontend": "1.28.0"}
    message = said(engine("2.3", **new), **packed)["TE001"].message
    assert "cudnn-frontend 1.11.0 compiled in" in message
    assert "CUDNN232 (1.28.0) does not touch it" in message
    old = {"cudnn": "9.8.0", "cudnn_frontend": "1.23.0"}
    assert "CUDNN232" not in said(engine("2.3", **old), **packed)["TE001"].message


def test_a_rule_about_transformer_engines_frontend_is_named():
    found = said(engine("2.8", cudnn="9.14.0", cudnn_frontend="1.28.0"), max_seqlen_q=1000)
    assert "BUG007 would" in found["TE001"].message


@pytest.mark.parametrize("version", ["2.4", "2.18"])
def test_where_it_is_installed_its_frontend_is_told_only_if_it_matters(version):
    assert "TE001" in said(engine(version))
    assert "TE001" not in said(engine(version).replace(detected=True))
    old = engine("2.8", cudnn="9.14.0", cudnn_frontend="1.28.0").replace(detected=True)
    assert "BUG007 would" in said(old, max_seqlen_q=1000)["TE001"].message


def test_from_2_18_on_the_frontend_is_of_where_it_was_built():
    assert "built with a frontend of 1.25.0 or newer" in said(engine("2.18"))["TE001"].message


@pytest.mark.parametrize(
    ("code", "version", "gpu", "fields", "expected"),
    [
        ("TE002", "2.14", "RTX 5090", {"deterministic": True}, True),
        ("TE002", "2.13", "RTX 5090", {"deterministic": True}, False),
        ("TE002", "2.14", "B200", {"deterministic": True}, False),
        ("TE003", "2.17", "RTX 5090", {"qkv_layout": "thd", "attn_mask_type": "padding"}, True),
        ("TE003", "2.18", "RTX 5090", {"qkv_layout": "thd", "attn_mask_type": "padding"}, False),
        ("TE003", "2.17", "H100", {"qkv_layout": "thd", "attn_mask_type": "padding"}, False),
        ("TE004", "1.11", "H100", {"window_size": (1024, 0)}, True),
        ("TE004", "1.12", "H100", {"window_size": (1024, 0)}, False),
        ("TE004", "1.11", "H100", {}, False),
    ],
)
def test_a_bug_is_told_of_the_releases_that_have_it(code, version, gpu, fields, expected):
    assert (code in said(engine(version, gpu), **fields)) == expected


def test_nothing_is_said_of_transformer_engine_where_nobody_named_it():
    assert said(Environment.describe("RTX 5090"), deterministic=True) == {}
