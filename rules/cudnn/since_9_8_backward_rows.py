"""FP16/BF16 training in cuDNN 9.8 and newer: a single query or a single key.

Sources as in ``since_9_8_masks``. Where a page says that the process is killed, that is what happened to a
child process that asked.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.cudnn.since_9_8_backward import BIAS, BIAS_GRADIENT, ROW_WISE, bias_gradient
from attnsel.rules.cudnn.since_9_8_masks import SINCE_9_8
from attnsel.rules.cudnn.vocabulary import BLACKWELL_THOR
from attnsel.verdicts.requirements import FreeText, OneOf
from attnsel.verdicts.verdict import Violation

rule = rules_about("cudnn", fp8=False)

ONE_KEY = {"max_seqlen_kv": 1, "attn_mask_type": "no_mask"}


@rule(
    "CUDNN250",
    when=SINCE_9_8,
    evidence="library",
    fires_on={"max_seqlen_q": 1},
    passes={"max_seqlen_q": 1, "is_training": False},
)
def one_query_one_key(p: AttentionParams, env: Environment) -> Violation | None:
    """There is no backward for one query and one key

    Fix: nothing needs computing: the output is v, and so are the gradients.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("s_q = s_kv = 1 is not supported");
    asked 9.8.0 to 9.28.0, all refuse.
    """
    if p.is_training and p.max_seqlen_q == 1 and p.max_seqlen_kv == 1:
        return Violation("max_seqlen_kv", 1, FreeText("at least 2"))
    return None


@rule(
    "CUDNN251",
    when=cudnn(">=9.10.0"),
    arch=ROW_WISE,
    requires={"core_attention_bias_type": OneOf("no_bias")},
    evidence="library",
    fires_on={**ONE_KEY, **BIAS},
    passes=ONE_KEY,
)
def one_key_bias(p: AttentionParams, env: Environment) -> bool:
    """On sm8x and sm12x the backward for a single key takes no bias

    Fix: pad the keys to 2, with padding or -inf in the bias.
    Source: asked 9.8.0 and 9.9.0 (accepted), 9.10.2 to 9.28.0 (no engine); a bias of shape 111s is
    accepted.
    """
    return p.is_training and p.max_seqlen_kv == 1 and p.has_bias and p.core_attention_bias_shape != "111s"


@rule(
    "CUDNN252",
    when=cudnn(">=9.10.0"),
    arch=BLACKWELL_THOR,
    requires={"core_attention_bias_requires_grad": OneOf(False)},
    evidence="library",
    fires_on={**ONE_KEY, **BIAS_GRADIENT},
    passes={**ONE_KEY, **BIAS},
)
def one_key_bias_gradient(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell a bias has no gradient when there is a single key

    Fix: a bias without gradient; with one key its gradient is zero.
    Source: asked 9.8.0 and 9.9.0 (accepted), 9.10.2 to 9.28.0 (no engine); a bias of shape 111s is
    accepted.
    """
    return p.is_training and p.max_seqlen_kv == 1 and p.core_attention_bias_shape != "111s"


@rule(
    "CUDNN253",
    when=cudnn(">=9.8.0,<9.10.0"),
    arch=BLACKWELL_THOR,
    evidence="library",
    fires_on=ONE_KEY,
    passes={**ONE_KEY, **BIAS_GRADIENT},
)
def one_key_crash(p: AttentionParams, env: Environment) -> Violation | None:
    """On Blackwell up to cuDNN 9.9 a single key's backward kills the process

    Why: the library's planner crashes; nothing can be caught.
    Fix: cuDNN 9.10.2 or newer; or pad the keys to 2.
    Source: asked 9.8.0 and 9.9.0 (segmentation fault), 9.10.2 (accepted). With a bias gradient it is
    accepted.
    """
    if p.is_training and p.max_seqlen_kv == 1 and not bias_gradient(p):
        return Violation("max_seqlen_kv", 1, FreeText("at least 2"))
    return None


@rule(
    "CUDNN254",
    when=cudnn(">=9.8.0,<9.13.1"),
    arch=BLACKWELL_THOR,
    evidence="library",
    fires_on={"max_seqlen_q": 1, "max_seqlen_kv": 4096, "batch_size": 1, "attn_mask_type": "no_mask"},
    passes={"max_seqlen_q": 1, "max_seqlen_kv": 4096, "attn_mask_type": "no_mask"},
)
def one_query_crash(p: AttentionParams, env: Environment) -> Violation | None:
    """On Blackwell below cuDNN 9.13.1 a lone query's backward kills the process

    Why: with one query and a batch or head count of 1 the library's planner crashes; nothing can be caught.
    Fix: cuDNN 9.13.1 or newer; or pad the queries to 2.
    Source: asked 9.8.0 to 9.13.0 (segmentation fault), 9.13.1 (accepted). With a bias gradient it is
    accepted.
    """
    if p.is_training and p.max_seqlen_q == 1 and 1 in (p.batch_size, p.num_heads) and not bias_gradient(p):
        return Violation("max_seqlen_q", 1, FreeText("at least 2"))
    return None


@rule(
    "CUDNN255",
    when=cudnn(">=9.26.0"),
    evidence="library",
    fires_on={
        "max_seqlen_q": 1,
        "max_seqlen_kv": 4096,
        "batch_size": 1,
        "num_heads": 1,
        "attn_mask_type": "no_mask",
    },
    passes={"max_seqlen_q": 1, "max_seqlen_kv": 4096, "batch_size": 1, "attn_mask_type": "no_mask"},
)
def one_row_crash(p: AttentionParams, env: Environment) -> Violation | None:
    """From cuDNN 9.26 on one query, head and batch kill the process in training

    Why: the library's planner crashes; nothing can be caught.
    Fix: cuDNN 9.25; or pad the queries to 2.
    Source: cudnn-frontend#1071 (9.26.0); asked 9.25.1 (accepted), 9.26.1 and 9.28.0 (segmentation fault with
    any mask, layout and number of keys; some calls with dropout on Blackwell or head dimension 256 pass).
    """
    if p.is_training and p.max_seqlen_q == 1 and p.batch_size == 1 and p.num_heads == 1:
        return Violation("max_seqlen_q", 1, FreeText("at least 2"))
    return None
