"""Everything that is fuzzed, by name."""

from __future__ import annotations

import attention_numbers
import command_lines
import f_sdpa_calls
import flash
import rank_faults
import wrong_types
from harness import Target

import executed  # in tests/proof, with the interpreter of PTX

_EACH = (
    *attention_numbers.TARGETS,
    flash.TARGET,
    f_sdpa_calls.TARGET,
    wrong_types.TARGET,
    *command_lines.TARGETS,
)
TARGETS: dict[str, Target] = {one.name: one for one in (*_EACH, rank_faults.TARGET, executed.TARGET)}
