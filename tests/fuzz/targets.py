"""Everything that is fuzzed, by name. A target is a file of this folder with a ``TARGET``."""

from __future__ import annotations

import rank_faults
from harness import Target

TARGETS: dict[str, Target] = {target.name: target for target in (rank_faults.TARGET,)}
