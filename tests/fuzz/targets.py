"""Everything that is fuzzed, by name. A target is a file of this folder with a ``TARGET``."""

from __future__ import annotations

import attention_numbers
import commands
import executed
import flash
import json_files
import padding
import rank_faults
import repeats
import selfcheck
import wrong_types
from harness import Target

_FILES = (
    attention_numbers,
    repeats,
    padding,
    flash,
    selfcheck,
    wrong_types,
    commands,
    json_files,
    rank_faults,
    executed,
)
TARGETS: dict[str, Target] = {file.TARGET.name: file.TARGET for file in _FILES}
