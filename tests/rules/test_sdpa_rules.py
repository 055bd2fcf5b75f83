"""What padding of head dimensions costs for PyTorch's flash kernel. The edges of SDPA rules: edges.txt."""

from __future__ import annotations

from attnsel.decision import select
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules import REGISTRY, load_all

load_all()
H100 = Environment.describe(gpu="H100", torch="2.13.0")
A100 = Environment.describe(gpu="A100", torch="2.13.0")


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


def test_padding_a_head_dimension_never_shrinks_the_other():
    found = REGISTRY.rules["SDPA104"].find(AttentionParams(head_dim_qk=64, head_dim_v=128), H100)
    assert (found.field, list(found.required.repairs(64))) == ("head_dim_qk", [128])
