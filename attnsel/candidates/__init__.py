"""The candidates: the finest things that can be chosen, so that no choice hides inside another.

=================  ====================================================================
file               about
=================  ====================================================================
``record``         what a candidate says about itself
``registry``       which ones there are: attnsel's own, and those that plug-ins add
``capabilities``   the words a record lists under ``takes``, and the rule they make
=================  ====================================================================

Each record of attnsel's own stands beside its kernels, in ``backends/<name>/candidate.py``.
"""

from attnsel.candidates.record import CandidateRecord
from attnsel.candidates.registry import (
    CANDIDATES,
    OLDEST_TORCH,
    Selector,
    complete,
    every,
    needing,
    running,
    where,
)

__all__ = [
    "CANDIDATES",
    "OLDEST_TORCH",
    "CandidateRecord",
    "Selector",
    "complete",
    "every",
    "needing",
    "running",
    "where",
]
