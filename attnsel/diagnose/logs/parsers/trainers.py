"""What trainers say of the attention that they set up: unsloth, LlamaFactory, axolotl and TRL.

Read: unsloth 2026.10.9, LlamaFactory 0.9.5, axolotl 0.19.0, TRL 1.16.0, the modules named with each message.
"""

from __future__ import annotations

from attnsel.diagnose.logs.message import FirstOf, declared
from attnsel.diagnose.logs.parsers.flash_attn import REBUILD

LIBRARIES = tuple(
    FirstOf(name, "what it says of attention", declared("trainers", name, REBUILD=REBUILD))
    for name in ("unsloth", "LlamaFactory", "axolotl", "TRL")
)
