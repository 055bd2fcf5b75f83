"""The SDPA kernels' rules, as a specification: who takes what natively, on which device."""

from __future__ import annotations

import pytest

from attnsel.decision import select
from attnsel.environment import Device, Environment
from attnsel.params import AttentionParams, Tensors, TensorSpec
from attnsel.policy import Policy
from attnsel.verdicts.verdict import Unknown, Violation

H100 = Environment.describe(gpu="H100", torch="2.13.0")
A100 = Environment.describe(gpu="A100", torch="2.13.0")
T4 = Environment.describe(gpu="T4", torch="2.13.0")
B200 = Environment.describe(gpu="B200", torch="2.13.0")
RTX4090 = Environment.describe(gpu="RTX 4090", torch="2.13.0")
CPU = Environment.describe(gpu="cpu", torch="2.13.0")
FUSED = ("sdpa.flash", "sdpa.efficient", "sdpa.cudnn")
ALL = (*FUSED, "sdpa.math")
FP16 = {"dtype": "fp16"}


def mask(**about):
    spec = {"shape": (1, 16, 4096, 4096), "stride": (16 << 24, 1 << 24, 4096, 1), **about}
    return {"attn_mask_type": "arbitrary", "tensors": Tensors(mask=TensorSpec(**spec))}


@pytest.mark.parametrize("candidate", ALL)
def test_causal_half_precision_training_runs_everywhere_on_a_datacenter_gpu(codes, candidate):
    for env in (H100, A100, B200):
        assert codes(candidate, env) == set()


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        ("sdpa.flash", set()),
        ("sdpa.math", set()),
        ("sdpa.efficient", {"SDPA200"}),
        ("sdpa.cudnn", {"SDPA300"}),
    ],
)
def test_cpus_have_flash_and_math(codes, candidate, expected):
    assert codes(candidate, CPU) == expected


@pytest.mark.parametrize(
    ("device", "candidate", "verdict"),
    [
        ("mps", "sdpa.flash", Violation),
        ("xpu", "sdpa.efficient", Violation),
        ("rocm", "sdpa.cudnn", Violation),
        ("rocm", "sdpa.flash", Unknown),
        ("rocm", "sdpa.efficient", Unknown),
        ("rocm", "sdpa.math", None),
        ("mps", "sdpa.math", None),
    ],
)
def test_other_devices(findings, device, candidate, verdict):
    found = list(findings(candidate, CPU.replace(device=Device(type=device))).values())
    assert [type(f) for f in found] == ([verdict] if verdict else [])


@pytest.mark.parametrize(
    ("candidate", "fields", "code"),
    [
        ("sdpa.flash", {}, "SDPA103"),
        ("sdpa.cudnn", {}, "SDPA303"),
        ("sdpa.efficient", {"dtype": "bf16"}, "SDPA202"),
    ],
)
def test_turing_has_only_the_efficient_kernel_and_only_in_fp16(codes, candidate, fields, code):
    assert code in codes(candidate, T4, **{**FP16, **fields})
    assert codes("sdpa.efficient", T4, **FP16) == set()


@pytest.mark.parametrize("candidate", ALL)
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"softcap": 30.0}, "SDPA004"),
        ({"softmax_type": "off-by-one"}, "SDPA005"),
        ({"return_max_logit": True}, "SDPA006"),
        ({"qkv_layout": "thd", "attn_mask_type": "padding"}, "SDPA007"),
        ({"dtype": "fp8_e4m3"}, "SDPA003"),
    ],
)
def test_no_sdpa_kernel_drops_an_argument(codes, candidate, fields, code):
    for env in (H100, CPU):
        assert code in codes(candidate, env, **fields)


@pytest.mark.parametrize("candidate", ALL)
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"window_size": (128, 0)}, "window_size"),
        ({"attn_mask_type": "no_mask", "window_size": (128, 128)}, "window_size"),
        ({"attn_mask_type": "padding_causal"}, "attn_mask_type"),
        ({"core_attention_bias_type": "post_scale_bias"}, "core_attention_bias_type"),
        ({"core_attention_bias_type": "pre_scale_bias"}, "core_attention_bias_type"),
        ({"core_attention_bias_type": "alibi"}, "core_attention_bias_type"),
    ],
)
def test_what_only_a_mask_can_say_is_refused_by_its_own_field(findings, candidate, fields, field):
    for env in (H100, CPU):
        found = findings(candidate, env, **fields).values()
        assert field in {f.field for f in found if isinstance(f, Violation)} or (
            env is CPU and candidate in ("sdpa.efficient", "sdpa.cudnn")
        )


@pytest.mark.parametrize("candidate", ALL)
def test_a_window_that_hides_nothing_is_no_window(codes, candidate):
    assert codes(candidate, H100, window_size=(4095, 0)) == set()
    assert "SDPA010" in codes(candidate, H100, window_size=(4094, 0))


@pytest.mark.parametrize(
    ("candidate", "env", "mask_type", "lengths", "refused"),
    [
        # On CUDA flash is the one with the other corner.
        ("sdpa.flash", H100, "causal", (1024, 4096), True),
        ("sdpa.flash", H100, "causal_bottom_right", (1024, 4096), False),
        ("sdpa.flash", H100, "causal_bottom_right", (4096, 1024), True),
        ("sdpa.flash", CPU, "causal", (1024, 4096), False),
        ("sdpa.flash", CPU, "causal_bottom_right", (1024, 4096), True),
        ("sdpa.efficient", H100, "causal", (1024, 4096), False),
        ("sdpa.efficient", H100, "causal_bottom_right", (1024, 4096), True),
        ("sdpa.cudnn", H100, "causal", (1024, 4096), False),
        ("sdpa.cudnn", H100, "causal_bottom_right", (1024, 4096), True),
        ("sdpa.math", CPU, "causal", (4096, 1024), False),
        ("sdpa.math", CPU, "causal_bottom_right", (1024, 4096), True),
        # Equal lengths and a single query have one corner.
        ("sdpa.flash", H100, "causal_bottom_right", (1024, 1024), False),
        ("sdpa.math", CPU, "causal_bottom_right", (1024, 1024), False),
        ("sdpa.efficient", H100, "causal_bottom_right", (1, 4096), False),
        ("sdpa.flash", H100, "causal_bottom_right", (1, 4096), False),
    ],
)
def test_the_corner_of_the_causal_mask(findings, candidate, env, mask_type, lengths, refused):
    found = findings(
        candidate, env, attn_mask_type=mask_type, max_seqlen_q=lengths[0], max_seqlen_kv=lengths[1]
    )
    assert ("attn_mask_type" in {f.field for f in found.values()}) is refused


@pytest.mark.parametrize(
    ("candidate", "env", "expected"),
    [
        ("sdpa.flash", H100, {"SDPA101"}),
        ("sdpa.flash", CPU, set()),
        ("sdpa.efficient", H100, set()),
        ("sdpa.cudnn", H100, set()),
        ("sdpa.math", CPU, set()),
    ],
)
def test_a_folded_mask_is_taken_by_all_but_flash_on_cuda(codes, candidate, env, expected):
    assert codes(candidate, env, **mask()) == expected


@pytest.mark.parametrize(
    ("candidate", "env", "code"),
    [
        ("sdpa.cudnn", H100, "SDPA326"),
        ("sdpa.flash", CPU, "SDPA502"),
        ("sdpa.efficient", H100, None),
        ("sdpa.math", CPU, None),
    ],
)
def test_who_gives_a_bias_its_gradient(codes, candidate, env, code):
    folded = mask(requires_grad=True)
    assert codes(candidate, env, **folded) == ({code} if code else set())
    assert codes(candidate, env, **folded, is_training=False) == set()


def test_a_mask_must_broadcast(codes):
    assert "SDPA015" in codes("sdpa.math", CPU, **mask(shape=(3, 1, 4096, 4096)))
    assert codes("sdpa.math", CPU, **mask(shape=(4096, 4096), stride=(4096, 1))) == set()


@pytest.mark.parametrize(
    ("candidate", "native"), [("sdpa.efficient", False), ("sdpa.flash", True), ("sdpa.cudnn", True)]
)
def test_grouped_heads(findings, candidate, native):
    found = findings(candidate, H100, num_gqa_groups=2)
    assert {f.field for f in found.values()} == (set() if native else {"num_gqa_groups"})
    for finding in found.values():
        assert list(finding.required.repairs(2)) == [16]


def spec(stride=(8388608, 2048, 128, 1), **about):
    return {"tensors": Tensors(k=TensorSpec(shape=(2, 4096, 16, 128), stride=stride, **about))}


@pytest.mark.parametrize("candidate", FUSED)
def test_strides_and_alignment_are_part_of_the_question(findings, candidate):
    assert findings(candidate, H100, **spec()) == {}
    for broken in (
        spec(stride=(8388608, 1, 524288, 4096)),
        spec(alignment=2),
        spec(stride=(8388608, 2049, 128, 1)),
    ):
        found = findings(candidate, H100, **broken)
        assert "tensors.k" in {f.field for f in found.values()}


def test_cpu_flash_needs_rows_in_one_piece_but_no_alignment(codes):
    assert codes("sdpa.flash", CPU, **spec(stride=(8388608, 1, 524288, 4096))) == {"SDPA020"}
    assert codes("sdpa.flash", CPU, **spec(alignment=2)) == set()
    assert codes("sdpa.math", CPU, **spec(stride=(8388608, 1, 524288, 4096))) == set()


@pytest.mark.parametrize(
    ("env", "fields", "expected"),
    [
        (H100, {"head_dim_qk": 256}, set()),
        (H100, {"head_dim_qk": 59}, {"SDPA111"}),
        (H100, {"head_dim_qk": 64}, set()),
        (CPU, {"head_dim_qk": 59}, set()),
        (H100, {"head_dim_qk": 264}, {"SDPA105"}),
        (H100, {"head_dim_qk": 192, "head_dim_v": 128}, {"SDPA104"}),
        (RTX4090, {"head_dim_qk": 192}, set()),
        (RTX4090, {"head_dim_qk": 224}, {"SDPA107"}),
        (RTX4090, {"head_dim_qk": 224, "is_training": False}, set()),
        (RTX4090, {"head_dim_qk": 256}, set()),
        (RTX4090, {"head_dim_qk": 256, "attention_dropout": 0.125}, {"SDPA107"}),
        (CPU, {"head_dim_qk": 300}, set()),
        (CPU, {"head_dim_qk": 64, "head_dim_v": 32}, {"SDPA104"}),
    ],
)
def test_head_dimensions_of_flash(codes, env, fields, expected):
    assert codes("sdpa.flash", env, **fields) == expected


def test_flash_on_cuda_refuses_head_dimensions_between_multiples_of_8_where_nothing_may_be_adapted():
    flash = select(AttentionParams(head_dim_qk=100), A100, policy=Policy(adapt="never"))["sdpa.flash"]
    assert flash.verdict == "refused"
    (reason,) = flash.reasons
    assert (reason.code, reason.field, reason.observed) == ("SDPA111", "head_dim_qk", 100)
    assert "needs a multiple of 8" in reason.message


@pytest.mark.parametrize(
    ("dims", "q_k", "v_out"),
    [
        ((100, 100), 2 * 104, 104 + 4),  # columns of the copies of q and k; of v's, and that the output gains
        ((100, 64), 2 * 104, 104 + 40),
        ((96, 100), 2 * 104, 104 + 4),
    ],
)
def test_flash_on_cuda_lists_the_padding_of_head_dimensions_with_its_bytes(dims, q_k, v_out):
    sizes = dict(zip(("head_dim_qk", "head_dim_v"), dims, strict=True))
    p = AttentionParams(batch_size=2, max_seqlen_q=4096, num_heads=16, **sizes)
    flash = select(p, A100)["sdpa.flash"]
    column = 2 * 4096 * 16 * 2  # bytes of a column: b, s, h and two bytes
    assert flash.verdict == "eligible"
    assert [(a.name, a.changes, a.bytes) for a in flash.adaptations] == [
        ("pad_head_dim_qk", (("head_dim_qk", 104),), q_k * column),
        ("pad_head_dim_v", (("head_dim_v", 104),), v_out * column),
    ]


def test_no_stride_is_refused_of_rows_that_are_padded_anyway():
    rows = {"shape": (2, 4096, 16, 100), "stride": (4096 * 1601, 1601, 100, 1), "alignment": 2}
    tensors = Tensors(q=TensorSpec(**rows), k=TensorSpec(**rows), v=TensorSpec(**rows))
    p = AttentionParams(head_dim_qk=100, tensors=tensors)
    flash = select(p, A100)["sdpa.flash"]
    assert [a.name for a in flash.adaptations] == ["pad_head_dim_qk", "pad_head_dim_v"]
    never = select(p, A100, policy=Policy(adapt="never"))["sdpa.flash"]
    assert [reason.code for reason in never.reasons] == ["SDPA111"]


def test_padding_a_head_dimension_never_shrinks_the_other(findings):
    found = findings("sdpa.flash", H100, head_dim_qk=64, head_dim_v=128)["SDPA104"]
    assert (found.field, list(found.required.repairs(64))) == ("head_dim_qk", [128])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"head_dim_qk": 512}, set()),
        ({"head_dim_qk": 192, "head_dim_v": 128}, set()),
        ({"head_dim_qk": 60}, {"SDPA203"}),
        ({"head_dim_qk": 60, "dtype": "fp32"}, set()),
        ({"head_dim_qk": 62, "dtype": "fp32"}, {"SDPA203"}),
        ({"dtype": "fp64"}, {"SDPA201"}),
    ],
)
def test_head_dimensions_of_efficient(codes, fields, expected):
    assert codes("sdpa.efficient", A100, **fields) == expected


@pytest.mark.parametrize(
    ("gpu", "torch", "cudnn", "dims", "training", "refused"),
    [
        ("A100", "2.13.0", "9.20.0", (192, 192), True, True),
        ("H100", "2.7.1", "9.10.2", (192, 192), True, True),
        ("H100", "2.9.1", "9.8.0", (192, 192), True, True),
        ("H100", "2.9.1", "9.10.2", (256, 256), True, False),
        ("H100", "2.13.0", "9.20.0", (192, 128), True, False),
        ("H100", "2.13.0", "9.20.0", (256, 128), True, True),
        ("H100", "2.13.0", "9.20.0", (256, 128), False, False),
        ("H100", "2.14.1", "9.20.0", (256, 256), False, True),
        ("H100", "2.14.1", "9.20.0", (192, 128), True, False),
        ("H100", "2.14.1", "9.24.0", (256, 256), True, False),
        ("H100", "2.14.1", "9.24.0", (192, 192), True, True),
        ("H100", "2.14.1", "9.24.0", (192, 192), False, False),
        ("B200", "2.9.1", "9.12.0", (192, 128), False, True),
        ("B200", "2.13.0", "9.20.0", (192, 128), True, False),
        ("B200", "2.13.0", "9.20.0", (256, 256), False, True),
        ("B200", "2.14.1", "9.24.0", (256, 256), True, False),
        ("H100", "2.14.1", "9.24.0", (320, 320), False, True),
    ],
)
def test_head_dimensions_of_cudnn_depend_on_torch_and_library(
    findings, gpu, torch, cudnn, dims, training, refused
):
    env = Environment.describe(gpu=gpu, torch=torch, cudnn=cudnn)
    found = findings("sdpa.cudnn", env, head_dim_qk=dims[0], head_dim_v=dims[1], is_training=training)
    assert bool({f.field for f in found.values()} & {"head_dim_qk", "head_dim_v"}) is refused


@pytest.mark.parametrize(
    ("torch", "candidate", "refused"),
    [("2.6.0", "sdpa.flash", True), ("2.6.0", "sdpa.math", False), ("2.7.1", "sdpa.efficient", False)],
)
def test_blackwell_begins_with_torch_2_7(codes, torch, candidate, refused):
    env = Environment.describe(gpu="RTX 5090", torch=torch, cudnn="9.8.0")
    assert ("SDPA022" in codes(candidate, env)) is refused


@pytest.mark.parametrize(
    ("candidate", "env", "p", "code"),
    [
        ("sdpa.flash", H100, 0.1, None),
        ("sdpa.efficient", H100, 0.1, None),
        ("sdpa.math", CPU, 0.1, None),
        ("sdpa.flash", CPU, 0.1, "SDPA501"),
        ("sdpa.cudnn", H100, 0.1, "SDPA324"),
        ("sdpa.cudnn", H100, 0.125, None),
        ("sdpa.cudnn", Environment.describe(gpu="H100", torch="2.9.1", cudnn="9.13.0"), 0.125, "SDPA323"),
    ],
)
def test_dropout(codes, candidate, env, p, code):
    assert codes(candidate, env, attention_dropout=p) == ({code} if code else set())
    assert codes(candidate, env, attention_dropout=p, is_training=False) == set()


def test_determinism(findings, codes):
    for candidate in ("sdpa.flash", "sdpa.efficient"):
        found = findings(candidate, H100, deterministic=True)
        assert [type(f) for f in found.values()] == [Unknown]
        assert codes(candidate, H100, deterministic=True, is_training=False) == set()
    assert codes("sdpa.cudnn", H100, deterministic=True) == {"SDPA325"}
    assert codes("sdpa.math", H100, deterministic=True) == set()
    assert codes("sdpa.flash", CPU, deterministic=True) == set()


def test_only_math_has_no_lse(codes):
    assert codes("sdpa.math", H100, return_lse=True) == {"SDPA401"}
    assert all(codes(candidate, H100, return_lse=True) == set() for candidate in FUSED)


def test_single_keys_and_queries_in_cudnn(codes):
    one = {"attn_mask_type": "no_mask", "is_training": False}
    assert "SDPA320" in codes("sdpa.cudnn", H100, max_seqlen_kv=1, **one)
    assert codes("sdpa.cudnn", H100, max_seqlen_q=1, max_seqlen_kv=512, **one) == set()


def test_grids_end_at_65535(codes):
    huge = {"batch_size": 65536, "max_seqlen_q": 16, "is_training": False}
    assert codes("sdpa.flash", H100, **huge) == {"SDPA109"}
    assert codes("sdpa.cudnn", H100, **huge) == {"SDPA327"}
    assert codes("sdpa.math", H100, **huge) == set()


def test_the_cpu_rules_say_what_the_op_does(codes):
    """Each refusal of the CPU kernel that can be provoked without killing the process."""
    torch = pytest.importorskip("torch")
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def call(d=8, e=8, g=4, dropout=0.0, **more):
        return op(torch.ones(1, 4, 5, d), torch.ones(1, g, 9, d), torch.ones(1, g, 9, e), dropout, **more)[0]

    for d, g in ((1, 4), (59, 2), (300, 1)):
        assert call(d, d, g).shape == (1, 4, 5, d)
        lengths = {"max_seqlen_q": 5, "max_seqlen_kv": 9}
        fields = {"num_heads": 4, "num_gqa_groups": g, "head_dim_qk": d, "dtype": "fp32", **lengths}
        assert codes("sdpa.flash", CPU, **fields) == set()
    with pytest.raises(RuntimeError, match="same head size"):
        call(e=16)
    with pytest.raises(RuntimeError, match="dropout"):
        call(dropout=0.1)
    with pytest.raises(RuntimeError, match="not differentiable"):
        call(attn_mask=torch.zeros(5, 9, requires_grad=True))
    q = torch.ones(1, 4, 8, 8)
    with pytest.raises(NotImplementedError):
        torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True)
