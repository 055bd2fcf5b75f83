"""F.sdpa's kernels where there is no CUDA or no Linux, and what only a call of F.sdpa itself has."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from attnsel.decision import select
from attnsel.environment import Device, Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams, Tensors, TensorSpec
from attnsel.verdicts.verdict import Unknown, Violation

FUSED = ("sdpa.flash", "sdpa.efficient", "sdpa.cudnn")


@pytest.mark.parametrize(
    ("gpu", "kind"),
    [("gfx942", "rocm"), ("GFX90a", "rocm"), ("rocm", "rocm"), ("MPS", "mps"), ("xpu", "xpu")],
)
def test_other_makers_devices_can_be_described(gpu, kind):
    env = Environment.describe(gpu)
    assert (env.device.type, env.device.arch, env.cudnn, env.cuda) == (kind, None, None, None)


@pytest.mark.parametrize("gpu", ["gfx", "gfx94", "gfx942x9", "rocm5"])
def test_what_is_no_architecture_is_refused(gpu):
    with pytest.raises(InvalidInput):
        Environment.describe(gpu)


@pytest.mark.parametrize("candidate", ["sdpa.flash", "sdpa.efficient"])
@pytest.mark.parametrize(
    ("gpu", "torch", "finding"),
    [
        ("gfx942", "2.4.1", None),
        ("gfx90a", "2.14.1", None),
        ("gfx1100", "2.5.1", Violation),
        ("gfx1100", "2.6.0", Unknown),  # with a variable
        ("gfx1100", "2.8.0", None),
        ("gfx1100", "2.10.0", Unknown),
        ("gfx1100", "2.11.0", None),
        ("gfx1201", "2.7.1", Violation),
        ("gfx950", "2.8.0", None),
        ("gfx1151", "2.8.0", Unknown),
        ("gfx1102", "2.9.1", Violation),
        ("gfx906", "2.14.1", Violation),
        ("rocm", "2.14.1", Unknown),
    ],
)
def test_amd_s_gpus_that_aotriton_has_kernels_for(findings, candidate, gpu, torch, finding):
    found = findings(candidate, Environment.describe(gpu, torch=torch))
    assert [(code, type(f)) for code, f in found.items()] == ([("SDPA801", finding)] if finding else [])


def test_the_variable_is_named(findings):
    found = findings("sdpa.flash", Environment.describe("gfx1200", torch="2.11.0"))["SDPA801"]
    assert "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1" in str(found.required)


def test_an_architecture_in_a_card_s_name_is_read(codes):
    env = Environment.describe("rocm", torch="2.8.0")
    card = env.replace(device=Device(type="rocm", name="AMD Instinct MI300X gfx942"))
    assert codes("sdpa.flash", card) == set()


@pytest.mark.parametrize(
    ("candidate", "torch", "code"),
    [
        ("sdpa.flash", "2.2.2", "SDPA802"),
        ("sdpa.efficient", "2.2.2", "SDPA803"),
        ("sdpa.efficient", "2.3.1", "SDPA803"),
        ("sdpa.flash", "2.3.1", None),
    ],
)
def test_when_rocm_got_the_kernels(codes, candidate, torch, code):
    assert codes(candidate, Environment.describe("gfx942", torch=torch)) == ({code} if code else set())


@pytest.mark.parametrize(
    ("candidate", "fields", "code"),
    [
        ("sdpa.flash", {"attn_mask_type": "arbitrary"}, "SDPA101"),
        ("sdpa.flash", {"dtype": "fp32"}, "SDPA102"),
        ("sdpa.flash", {"max_seqlen_q": 64, "max_seqlen_kv": 128}, "SDPA106"),
        ("sdpa.flash", {"num_gqa_groups": 4}, "SDPA806"),
        ("sdpa.flash", {"head_dim_qk": 640}, "SDPA805"),
        ("sdpa.efficient", {"head_dim_qk": 64, "head_dim_v": 128}, "SDPA804"),
        ("sdpa.efficient", {"head_dim_qk": 60}, "SDPA203"),
        ("sdpa.efficient", {"num_gqa_groups": 4}, "SDPA204"),
        ("sdpa.efficient", {"dtype": "fp32", "attn_mask_type": "arbitrary"}, None),
    ],
)
def test_limits_on_rocm(codes, candidate, fields, code):
    assert codes(candidate, Environment.describe("gfx942", torch="2.13.0"), **fields) == (
        {code} if code else set()
    )


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_apple_s_and_intel_s_own_kernels_are_not_called(codes, kind):
    env = Environment.describe(kind)
    for candidate in FUSED:
        assert codes(candidate, env)
    text = " ".join(select(AttentionParams(max_seqlen_q=128), env).report().split())
    assert f"F.sdpa has kernels of its own on {kind}" in text
    assert f"need a CUDA GPU, and this is {kind}" in text


@pytest.mark.parametrize(("s", "refused"), [(9459, False), (9460, True), (29640, True)])
def test_scores_on_apple_s_gpus_stay_below_4_gib(codes, s, refused):
    """pytorch#149261: 12 heads in fp32."""
    fields = {"batch_size": 1, "num_heads": 12, "dtype": "fp32", "max_seqlen_q": s, "max_seqlen_kv": s}
    assert ("SDPA810" in codes("sdpa.math", Environment.describe("mps"), **fields)) is refused


@pytest.mark.parametrize(
    ("torch", "finding"),
    [("2.2.2", Violation), ("2.4.1", Violation), ("2.14.1", Violation), ("2.15.0", Unknown)],
)
def test_flash_in_the_windows_builds(findings, torch, finding):
    """pytorch#125070, sam2#48, sd-scripts#1884."""
    env = Environment.describe("A100", torch=torch).replace(platform="windows")
    found = {code: f for code, f in findings("sdpa.flash", env).items() if f.field == "platform"}
    assert [type(f) for f in found.values()] == ([finding] if finding else [])


def masked(dtype: str) -> dict:
    spec = TensorSpec(shape=(1, 1, 1, 1), stride=(1, 1, 1, 1), dtype=dtype)
    return {"attn_mask_type": "arbitrary", "tensors": Tensors(mask=spec)}


@pytest.mark.parametrize(
    ("candidate", "dtype", "mask", "torch", "code"),
    [
        ("sdpa.math", "bf16", "bool", "2.13.0", None),
        ("sdpa.math", "bf16", "bf16", "2.13.0", None),
        ("sdpa.math", "bf16", "fp32", "2.13.0", None),
        ("sdpa.math", "bf16", "fp32", "2.9.1", "SDPA402"),
        ("sdpa.math", "bf16", "fp32", "2.3.1", "SDPA016"),
        ("sdpa.math", "bf16", "fp16", "2.13.0", "SDPA016"),
        ("sdpa.math", "fp32", "fp64", "2.13.0", "SDPA016"),
        ("sdpa.math", "fp64", "fp32", "2.13.0", None),
        ("sdpa.efficient", "bf16", "fp32", "2.13.0", "SDPA206"),
        ("sdpa.efficient", "fp32", "fp32", "2.13.0", None),
        ("sdpa.efficient", "bf16", "bool", "2.13.0", None),
        ("sdpa.cudnn", "bf16", "fp32", "2.13.0", None),
        ("sdpa.cudnn", "bf16", "fp16", "2.13.0", "SDPA016"),
    ],
)
def test_the_element_type_of_a_mask(codes, candidate, dtype, mask, torch, code):
    """pytorch#191612."""
    found = codes(candidate, Environment.describe("A100", torch=torch), dtype=dtype, **masked(mask))
    assert found & {"SDPA016", "SDPA206", "SDPA402"} == ({code} if code else set()) or (
        code == "SDPA016" and found >= {code}
    )


@pytest.mark.parametrize("query", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("mask", ["bool", "bf16", "fp16", "fp32", "fp64"])
def test_torch_itself_raises_for_just_those(codes, query, mask):
    torch = pytest.importorskip("torch")
    types = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "bool": "bool"}
    q = torch.zeros(1, 2, 3, 4, dtype=getattr(torch, types[query]))
    attn_mask = torch.ones(3, 3).to(getattr(torch, types[mask]))
    env = Environment.detect("cpu")
    refused = "SDPA016" in codes("sdpa.math", env, dtype=query, **masked(mask))
    raises = pytest.raises(RuntimeError, match="Expected attn_mask dtype") if refused else nullcontext()
    with raises:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=attn_mask)


def test_three_dimensions_mean_plain_operations(codes):
    """pytorch#117354; F.sdpa says the same of its own choice, on a CPU too."""
    torch = pytest.importorskip("torch")
    three = {"tensors": Tensors(rank=3)}
    for candidate in FUSED:
        assert "SDPA017" in codes(candidate, Environment.describe("A100", torch="2.13.0"), **three)
    assert codes("sdpa.math", Environment.detect("cpu"), **three) == set()
    q = torch.zeros(2, 8, 16)
    math, flash = 0, 1
    assert torch._fused_sdp_choice(q, q, q) == math
    assert torch._fused_sdp_choice(q[None], q[None], q[None]) == flash


def test_a_mask_that_attnsel_folds_has_the_query_s_type(codes):
    p = AttentionParams(dtype="fp16", window_size=(16, 0), max_seqlen_q=64, max_seqlen_kv=64)
    efficient = select(p, Environment.describe("A100", torch="2.13.0"))["sdpa.efficient"]
    assert efficient.eligible
    assert [made.name for made in efficient.adaptations] == ["fold_mask"]
