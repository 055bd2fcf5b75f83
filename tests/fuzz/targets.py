"""Everything that is fuzzed, by name. A target is a file of this folder with a ``TARGET``."""

from __future__ import annotations

import attention_numbers
import flash
import padding
import repeats
import selfcheck
from harness import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (attention_numbers.TARGET, repeats.TARGET, padding.TARGET, flash.TARGET, selfcheck.TARGET)
}
