"""What attnsel plans with. Nothing here imports torch: plans are made where there is none."""

from __future__ import annotations

from attnsel.plugins import AtMost, CandidateRecord, Multiple, Registry, rule

RULES = Registry("sample.plain")


@rule(
    "SAMPLE001",
    "sample.plain",
    requires={"head_dim_qk": Multiple(8)},
    registry=RULES,
    evidence="documented",
    fires_on={"head_dim_qk": 100, "gpu": "cpu"},
)
def head_dim_in_vectors(p, env):
    """The head dimension must be a multiple of 8

    Why: a rule of the sample's, so that there is one.
    Fix: pad the heads with zeros.
    Source: sample_attention's README.
    """
    return True


@rule(
    "SAMPLE002",
    "sample.plain",
    requires={"max_seqlen_q": AtMost(32768)},
    registry=RULES,
    evidence="measured",
    fires_on={"max_seqlen_q": 65536, "gpu": "cpu"},
)
def all_scores_at_once(p, env):
    """Up to 32768 queries: every score is stored

    Why: there are no tiles in it.
    Fix: another candidate.
    Source: sample_attention's README.
    """
    return True


def stored_scores(p, env):
    """Bytes beyond the call's own tensors: three matrices of scores at a time, forward and backward."""
    element = 8 if p.dtype == "fp64" else 4
    return "scores", 3 * element * p.batch_size * p.num_heads * p.max_seqlen_q * p.max_seqlen_kv


CANDIDATE = CandidateRecord(
    name="sample.plain",
    title="attention in two matrix products",
    family="SAMPLE",
    kernel="sample_attention.kernel",
    takes={"cpu", "cuda", "fp32", "fp64", "bf16", "training", "causal", "top_left", "gqa", "head_dim_v"}
    | {"lse", "deterministic", "strides"},
    rules=RULES,
    memory=stored_scores,
    place="before sdpa.flash",
    proven={"cpu"},
    source="sample_attention's README",
)
