"""What a candidate allocates while it runs, beyond the call's own tensors, their results and gradients.

Counted: what its record says it holds (stored scores, tiles, cuDNN's workspace), and what adaptations make
(masks, copies, repeated heads). Not counted: rows of statistics such as the log-sum-exp, which grow with s
and not with s * s. cuDNN's workspace is an estimate (attnsel/backends/cudnn/workspace.py); ``attnsel explain
--ask-library`` has libcudnn build the plans, and prints theirs.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import Environment
from attnsel.params import ITEMSIZE, AttentionParams
from attnsel.selection.adaptations.transforms import bias_shape
from attnsel.verdicts.verdict import Adaptation

if TYPE_CHECKING:
    from attnsel.verdicts.record import Memory

_MADE: dict[str, str] = {
    "fold_mask": "mask",
    "contiguous": "copies",
    "expand_gqa": "repeated heads",
}


def memory_parts(
    name: str, p: AttentionParams, env: Environment, adaptations: tuple[Adaptation, ...] = ()
) -> tuple[Memory, ...]:
    """What candidate ``name`` allocates for ``p``, the candidate's own first; empty when nothing counts."""
    own = CANDIDATES[name].memory
    parts = [] if own is None else [own(p, env)]
    parts += [(_MADE.get(made.name, made.name), made.bytes) for made in adaptations]
    return tuple(part for part in parts if part[1])


def tensor_bytes(p: AttentionParams) -> int:
    """The call's own tensors: q, k, v and what comes out; in training each has a gradient beside it. A bias
    counts as it is."""
    b, d, e = p.batch_size, p.head_dim_qk, p.head_dim_v
    elements = b * p.num_heads * p.max_seqlen_q * (d + e) + b * p.num_gqa_groups * p.max_seqlen_kv * (d + e)
    if p.is_training:
        elements *= 2
    if p.has_bias:
        copies = 2 if p.is_training and p.core_attention_bias_requires_grad else 1
        elements += copies * prod(bias_shape(p))
    return elements * ITEMSIZE[p.dtype]


def room(p: AttentionParams, env: Environment) -> int | None:
    """Bytes that the GPU has beside the call's own tensors.

    None where that is no measure of a candidate: nobody knows how much memory there is, the tensors alone do
    not fit and no candidate could help, or each of several GPUs holds a part of the call.
    """
    total = env.device.memory
    if not total or p.context_parallel:
        return None
    left = total - tensor_bytes(p)
    return left if left > 0 else None
