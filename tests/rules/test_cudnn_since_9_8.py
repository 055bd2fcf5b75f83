"""What attnsel says of cuDNN 9.8 and newer for FP16/BF16: edges that lie within a rule's body."""

from __future__ import annotations

from typing import Any

import pytest

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules import REGISTRY, load_all

load_all()


def fires(code: str, gpu: str, cudnn: str, **fields: Any) -> bool:
    rule, env, p = REGISTRY.rules[code], Environment.describe(gpu=gpu, cudnn=cudnn), AttentionParams(**fields)
    return rule.concerns(p) and rule.applies(env) and rule.find(p, env) is not None


FEW = {"max_seqlen_q": 1, "max_seqlen_kv": 4096, "attention_dropout": 0.1}


@pytest.mark.parametrize(
    ("gpu", "fields", "refused"),
    [
        ("H100", {}, True),
        ("H100", {"is_training": False}, False),
        ("H100", {"core_attention_bias_type": "alibi"}, False),
        ("H100", {"softmax_type": "learnable"}, False),
        ("H100", {"softmax_type": "off-by-one", "core_attention_bias_type": "alibi"}, False),
        ("H100", {"max_seqlen_q": 2}, False),
        ("B200", {"max_seqlen_q": 7}, True),
        ("B200", {"max_seqlen_q": 8}, False),
        ("B200", {"max_seqlen_q": 64, "head_dim_qk": 192, "head_dim_v": 128}, True),
        ("B200", {"max_seqlen_q": 65, "head_dim_qk": 192, "head_dim_v": 128}, False),
    ],
)
def test_9_13_1_has_no_dropout_over_few_queries_but_beside_alibi_or_a_sink(
    gpu: str, fields: dict[str, Any], refused: bool
) -> None:
    assert fires("CUDNN143", gpu, "9.13.1", **{**FEW, **fields}) is refused
