"""What a candidate allocates while it runs, beyond the call's own tensors, their results and gradients.

Counted: what its record says it holds (stored scores, tiles), and what adaptations make (masks, copies,
repeated heads). Not counted: rows of statistics such as the log-sum-exp, which grow with s and not with
s * s. cuDNN's workspace is known to the library alone, once a plan is built; ``attnsel explain
--ask-library`` prints it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.candidates import CANDIDATES
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.selection.verdict import Adaptation

if TYPE_CHECKING:
    from attnsel.candidates.record import Memory

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
