"""Everything that is fuzzed, by name. A target is a file of this folder with a ``TARGET``."""

from __future__ import annotations

import commands
import json_files
import wrong_types
from harness import Target

TARGETS: dict[str, Target] = {
    target.name: target for target in (commands.TARGET, json_files.TARGET, wrong_types.TARGET)
}
