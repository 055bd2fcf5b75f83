"""What transformers says of an attention implementation that it cannot give.

Read: transformers 5.23.0 (modeling_utils.py, integrations/sdpa_attention.py, flash_attention.py,
flex_attention.py, hub_kernels.py); older wordings from the issues named.
"""

from __future__ import annotations

from attnsel.diagnose.logs.message import FirstOf, declared
from attnsel.diagnose.logs.parsers.flash_attn import CAST, REBUILD

SDPA = 'attn_implementation="sdpa" in from_pretrained'
EAGER = 'attn_implementation="eager" in from_pretrained, or model.set_attn_implementation("eager")'

_MESSAGES = declared("transformers", "transformers", REBUILD=REBUILD, SDPA=SDPA, EAGER=EAGER, CAST=CAST)


LIBRARIES = (FirstOf("transformers", "refusals of attn_implementation", _MESSAGES),)
