"""The SDPA kernels' rules where a body has several edges.

The choosers of torch go by these rules too: head dimensions by GPU and release are judged by what is recorded
of each (tests/attnsel/dispatchers/test_torch_on_gpus.py), what concerns CPUs by torch itself (…_on_cpus.py).
"""

from __future__ import annotations

from attnsel.decision import select
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.verdicts.verdict import Unknown, Violation
from tables import each

H100 = Environment.describe(gpu="H100", torch="2.13.0")
A100 = Environment.describe(gpu="A100", torch="2.13.0")
CPU = Environment.describe(gpu="cpu", torch="2.13.0")
FUSED = ("sdpa.flash", "sdpa.efficient", "sdpa.cudnn")
ALL = (*FUSED, "sdpa.math")


@each("candidate", ALL)
def test_a_window_that_hides_nothing_is_no_window(codes, candidate):
    assert codes(candidate, H100, window_size=(4095, 0)) == set()
    assert "SDPA010" in codes(candidate, H100, window_size=(4094, 0))


@each(
    "candidate, env, mask_type, lengths, refused",
    [
        # On CUDA flash is the one with the other corner.
        ("sdpa.flash", H100, "causal", (1024, 4096), True),
        ("sdpa.flash", H100, "causal_bottom_right", (1024, 4096), False),
        ("sdpa.flash", CPU, "causal", (1024, 4096), False),
        ("sdpa.flash", CPU, "causal_bottom_right", (1024, 4096), True),
        ("sdpa.efficient", H100, "causal_bottom_right", (1024, 4096), True),
        ("sdpa.cudnn", H100, "causal_bottom_right", (1024, 4096), True),
        ("sdpa.math", CPU, "causal", (4096, 1024), False),
        ("sdpa.math", CPU, "causal_bottom_right", (1024, 4096), True),
        # Equal lengths and a single query have one corner.
        ("sdpa.flash", H100, "causal_bottom_right", (1024, 1024), False),
        ("sdpa.efficient", H100, "causal_bottom_right", (1, 4096), False),
        ("sdpa.flash", H100, "causal_bottom_right", (1, 4096), False),
    ],
)
def test_the_corner_of_the_causal_mask(findings, candidate, env, mask_type, lengths, refused):
    found = findings(
        candidate, env, attn_mask_type=mask_type, max_seqlen_q=lengths[0], max_seqlen_kv=lengths[1]
    )
    assert ("attn_mask_type" in {f.field for f in found.values()}) is refused


@each(
    "env, fields, expected",
    [
        (H100, {"head_dim_qk": 256}, set()),
        (H100, {"head_dim_qk": 59}, {"SDPA111"}),
        (H100, {"head_dim_qk": 64}, set()),
        (CPU, {"head_dim_qk": 59}, set()),
        (CPU, {"head_dim_qk": 300}, set()),
        (CPU, {"head_dim_qk": 64, "head_dim_v": 32}, {"SDPA104"}),
    ],
)
def test_head_dimensions_of_flash(codes, env, fields, expected):
    assert codes("sdpa.flash", env, **fields) == expected


def test_flash_on_cuda_lists_the_padding_of_head_dimensions_with_its_bytes():
    column = 2 * 4096 * 16 * 2  # bytes of a column: b, s, h and two bytes
    for dims, v_out in (((100, 100), 104 + 4), ((100, 64), 104 + 40), ((96, 100), 104 + 4)):
        sizes = dict(zip(("head_dim_qk", "head_dim_v"), dims, strict=True))
        p = AttentionParams(batch_size=2, max_seqlen_q=4096, num_heads=16, **sizes)
        flash = select(p, A100)["sdpa.flash"]
        assert flash.verdict == "eligible"
        assert [(a.name, a.changes, a.bytes) for a in flash.adaptations] == [
            ("pad_head_dim_qk", (("head_dim_qk", 104),), 2 * 104 * column),  # the copies of q and k
            ("pad_head_dim_v", (("head_dim_v", 104),), v_out * column),  # v's, and what the output gains
        ]


def test_padding_a_head_dimension_never_shrinks_the_other(findings):
    found = findings("sdpa.flash", H100, head_dim_qk=64, head_dim_v=128)["SDPA104"]
    assert (found.field, list(found.required.repairs(64))) == ("head_dim_qk", [128])


@each("candidate", ["sdpa.flash", "sdpa.efficient"])
@each(
    "gpu, torch, finding",
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
