"""The fix in a library's own words: for every topic, with the figures of the call."""

from __future__ import annotations

from attnsel import select
from attnsel.diagnose import framework_fixes
from attnsel.diagnose.framework_fixes import fixes, known_fixes, topics
from attnsel.dispatchers import Refusal
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from tables import each


def of(**fields):
    return AttentionParams(**{"num_heads": 8, "max_seqlen_q": 256, "head_dim_qk": 64, **fields})


H100 = Environment.describe("H100", torch="2.13.0", cudnn="9.13.0")


def test_every_way_can_be_written_for_every_call():
    for p in (of(), of(num_gqa_groups=2, head_dim_v=32), of(head_dim_qk=59), of(window_size=(16, 0))):
        for topic, api in known_fixes():
            fix = framework_fixes._fix(api, topic, p)
            assert fix.text
            assert "{" not in str(fix)


@each(
    ("fields", "candidate", "topic", "said"),
    [
        ({"attn_mask_type": "arbitrary"}, "sdpa.flash", "mask", "is_causal=True"),
        ({"dtype": "fp32"}, "sdpa.flash", "dtype", "bfloat16"),
        ({"head_dim_v": 32}, "sdpa.flash", "unequal widths", "F.pad(v, (0, 32))"),
        ({"num_gqa_groups": 2}, "sdpa.efficient", "grouped heads", "repeat_interleave(4, dim=1)"),
        ({"head_dim_qk": 60, "head_dim_v": 60}, "sdpa.efficient", "width", "(0, 4)"),
        ({"softcap": 30.0}, "sdpa.flash", "softcap", "score_mod"),
        ({"window_size": (32, 0)}, "sdpa.efficient", "window", "create_block_mask(…)"),
        ({"attention_dropout": 0.3}, "sdpa.cudnn", "dropout", "if self.training else 0.0"),
    ],
)
def test_reasons_become_lines_to_paste(fields, candidate, topic, said):
    p = of(**fields)
    asked = select(p, H100)[candidate]
    reasons = (*asked.reasons, *asked.adaptations)
    assert topic in [found for reason in reasons for found in topics(p, reason)]
    assert any(said in str(fix) for fix in fixes("F.scaled_dot_product_attention", p, reasons))


def test_a_reason_is_read_by_its_code_or_its_switch_and_a_machine_has_no_fix():
    p = of(attn_mask_type="arbitrary")
    for refusal, read in (
        (Refusal("attn_mask is given", "sdp_utils.cpp", code="SDPA101"), ["mask"]),
        (Refusal("flash is off", "sdp_utils.cpp", switch="flash=False"), ["switch"]),
        (Refusal("a GPU of another kind", "sdp_utils.cpp", code="SDPA103"), []),
    ):
        assert topics(p, refusal) == read
    reasons = select(of(), Environment.describe("T4"))["sdpa.flash"].reasons
    of_the_machine = [reason for reason in reasons if reason.field == "arch"]
    assert of_the_machine
    assert not fixes("transformers", of(), of_the_machine)
    p = of(dtype="fp32")  # other libraries have their own words
    reasons = select(p, H100)["sdpa.flash"].reasons
    assert "dtype=torch.bfloat16" in str(fixes("transformers", p, reasons)[0])
    assert "torch_dtype=torch.bfloat16" in str(fixes("diffusers", p, reasons)[0])
