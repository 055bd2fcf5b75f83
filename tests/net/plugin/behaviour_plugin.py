"""Two candidates from elsewhere, for the adaptations that no candidate of attnsel's needs on a CPU.

``net.padded`` takes whole blocks of rows and columns only, dense, a kv head for each query head;
``net.packed`` takes packed sequences only. ``behaviour_kernel.py`` computes both.
"""

from attnsel.plugins import CandidateRecord, Multiple, OneOf, Registry, Violation, rule

PADDED_RULES, PACKED_RULES = Registry("net.padded"), Registry("net.packed")
_CALL = {"gpu": "cpu", "dtype": "fp32"}
_FIELDS = ("max_seqlen_q", "max_seqlen_kv", "head_dim_qk", "head_dim_v")

for _number, _field in enumerate(_FIELDS):

    @rule(
        f"NETA10{_number}",
        "net.padded",
        requires={_field: Multiple(8)},
        evidence="documented",
        fires_on={**_CALL, _field: 100},
        passes=_CALL,
        registry=PADDED_RULES,
    )
    def whole_blocks(p, env):
        """Sizes are whole blocks

        Why: rows and columns are read eight at a time.
        Fix: pad.
        Source: here.
        """
        return True


@rule(
    "NETB200",
    "net.packed",
    evidence="documented",
    fires_on={**_CALL, "attn_mask_type": "padding"},
    passes={**_CALL, "attn_mask_type": "padding", "qkv_layout": "thd"},
    registry=PACKED_RULES,
)
def packed_rows(p, env):
    """Sequences lie one behind the other

    Why: the kernel knows rows, and where sequences start.
    Fix: pack.
    Source: here.
    """
    return None if p.qkv_format == "thd" else Violation("qkv_layout", p.qkv_layout, OneOf("thd_thd_thd"))


_BOTH = {
    *("cpu", "fp32", "fp64", "training", "causal", "padding", "window", "top_left", "bottom_right", "alibi"),
    *("lse", "softcap", "sinks", "deterministic", "max_logit"),
}

PADDED = CandidateRecord(
    name="net.padded",
    title="blocks of rows and columns",
    family="NETA",
    kernel="behaviour_kernel",
    takes={*_BOTH, "mask", "bias", "bias_grad"},
    rules=PADDED_RULES,
    adaptations=(
        *("drop_mask", "unpack", "pad_sequence", "pad_head_dim_qk", "pad_head_dim_v", "expand_gqa"),
        "contiguous",
    ),
    proven={"cpu"},
)
PACKED = CandidateRecord(
    name="net.packed",
    title="packed rows",
    family="NETB",
    kernel="behaviour_kernel",
    takes={*_BOTH, "thd", "gaps", "gqa", "head_dim_v", "strides"},
    rules=PACKED_RULES,
    adaptations=("drop_mask", "pack"),
    proven={"cpu"},
)
