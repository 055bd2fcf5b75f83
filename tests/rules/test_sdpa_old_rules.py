"""PyTorch 2.2 to 2.5, as a specification: what F.sdpa's kernels take in each release."""

from __future__ import annotations

from attnsel.decision import select
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.selection.f_sdpa import BY_F_SDPA
from tables import each

KERNELS = ("sdpa.flash", "sdpa.efficient", "sdpa.cudnn", "sdpa.math")
OWN = ("cudnn", "triton", "tiled", "sdpa.varlen")


def on(gpu: str, torch: str) -> Environment:
    return Environment.describe(gpu, torch=torch)


def runs(env: Environment, **fields) -> set[str]:
    """The kernels that take the call as it is."""
    selection = select(AttentionParams(**fields), env)
    return {c.name for c in selection.candidates if c.name in KERNELS and c.eligible and not c.adaptations}


@each(
    "gpu, torch, fields, expected",
    [
        # Causal, lengths that differ: the corner is the bottom right; causal_lower_right is of 2.3.
        ("A100", "2.2.2", {"max_seqlen_q": 64}, {"sdpa.efficient"}),
        ("A100", "2.2.2", {"max_seqlen_q": 64, "attn_mask_type": "causal_bottom_right"}, set()),
        ("A100", "2.3.1", {"max_seqlen_q": 64, "attn_mask_type": "causal_bottom_right"}, {"sdpa.flash"}),
    ],
)
def test_what_each_release_takes(gpu, torch, fields, expected):
    found = runs(on(gpu, torch), max_seqlen_kv=512, **{"max_seqlen_q": 512, **fields})
    assert found - {"sdpa.math"} == expected - {"sdpa.math"}


@each("torch, groups, takes", [("2.4.1", 4, False), ("2.4.1", 1, True), ("2.5.0", 4, True)])
def test_plain_operations_broadcast_one_head(torch, groups, takes):
    assert ("sdpa.math" in runs(on("A100", torch), num_gqa_groups=groups)) is takes


@each(
    "torch, fields, takes",
    [
        ("2.2.2", {"attn_mask_type": "arbitrary"}, False),
        ("2.3.1", {"attn_mask_type": "arbitrary"}, True),
        ("2.2.2", {"dtype": "fp16"}, False),
        ("2.3.1", {"dtype": "fp16"}, True),
    ],
)
def test_the_flash_kernel_for_cpus(codes, torch, fields, takes):
    assert (codes("sdpa.flash", on("cpu", torch), **fields) == set()) is takes


@each("gpu", ["A100", "H100", "cpu"])
def test_of_an_older_torch_that_is_installed_nothing_is_known(gpu):
    here = Environment.describe(gpu, torch="2.2.2").replace(detected=True, torch="2.1.2")
    selection = select(AttentionParams(), here)
    assert selection.backend is None
    for name in KERNELS:
        assert "INSTALL001" in {reason.code for reason in selection[name].reasons}
    assert "torch is 2.1.2" in selection.report()


@each("torch", ["2.2.2", "2.5.1"])
def test_kernels_of_attnsel_s_own_do_not_run_there(torch):
    selection = select(AttentionParams(head_dim_qk=64), on("A100", torch))
    for name in OWN:
        assert selection[name].verdict == "refused"
        assert "INSTALL011" in {reason.code for reason in selection[name].reasons}
    assert selection.chosen.plan_only == BY_F_SDPA
    text = selection.report()
    assert text.startswith("F.sdpa runs sdpa.flash")
    assert "✔ sdpa.flash      F.sdpa runs it" in text
    assert "would run" not in text
    assert "TRITON010  The Triton kernels are built" not in text


def test_a_torch_that_nobody_stated_takes_no_kernel_away():
    env = Environment.describe("H100", cudnn="8.9.2")
    assert env.torch < (2, 6)
    assert "torch" in env.assumed
    assert "INSTALL011" not in {r.code for r in select(AttentionParams(), env)["cudnn"].reasons}


@each(
    "gpu, torch, fields, first",
    [
        ("A100", "2.2.2", {"head_dim_qk": 128, "batch_size": 2}, "sdpa.flash"),
        ("H100", "2.5.0", {"is_training": False}, "sdpa.cudnn"),
        ("A100", "2.5.0", {"is_training": False}, "sdpa.flash"),
        ("H100", "2.5.1", {"is_training": False}, "sdpa.flash"),
    ],
)
def test_the_first_is_the_one_that_f_sdpa_tries_first(gpu, torch, fields, first):
    policy = Policy(allow_known_bugs=("all",) if torch == "2.5.0" else ())
    assert select(AttentionParams(**fields), on(gpu, torch), policy=policy).backend == first


def test_a_wrong_kernel_that_f_sdpa_prefers_is_named():
    text = " ".join(select(AttentionParams(), on("H100", "2.5.0")).report().split())
    assert "F.sdpa by itself runs sdpa.cudnn (BUG030); under sdpa_kernel it runs sdpa.flash" in text


def test_cudnn_behind_f_sdpa_has_no_single_query_before_2_9(codes):
    for torch, refused in (("2.6.0", True), ("2.8.0", True), ("2.9.1", False)):
        found = codes("sdpa.cudnn", on("H100", torch), max_seqlen_q=1, max_seqlen_kv=512)
        assert ("SDPA322" in found) is refused


def test_a_mask_of_any_length_trains_with_the_cudnn_of_torch_2_6():
    """pytorch#137347: the frontend of some nightlies said it of every mask, that of 2.6.0 of dBias only."""
    lengths = {"max_seqlen_q": 157, "max_seqlen_kv": 6404}
    p = AttentionParams(qkv_layout="bhsd", attn_mask_type="arbitrary", num_heads=32, **lengths)
    assert select(p, on("H100", "2.6.0"))["sdpa.cudnn"].eligible
