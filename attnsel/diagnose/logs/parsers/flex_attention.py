"""What flex_attention and Triton say: tiles too large for a card, shapes that are not there yet.

Read: torch 2.13.0 nn/attention/flex_attention.py, _inductor/kernel/flex/; triton 3.7.1 runtime/errors.py;
older wordings from the issues named.
"""

from __future__ import annotations

import re
from typing import Any

from attnsel.diagnose.logs.message import FirstOf, declared

SMALLER = (
    'smaller tiles: flex_attention(…, kernel_options={"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 1}), and '
    "for the backward BLOCK_M1, BLOCK_N1, BLOCK_M2, BLOCK_N2 of 32"
)


def _sizes(match: re.Match[str]) -> dict[str, Any]:
    need, limit = match["need"], match["limit"]
    dims = re.search(r"QK_HEAD_DIM=(\d{1,4})\b.{0,400}?\bV_HEAD_DIM=(\d{1,4})\b", match.string)
    return {
        "sizes": f" ({need} bytes of {limit})" if need else "",
        "params": {"head_dim_qk": int(dims[1]), "head_dim_v": int(dims[2])} if dims else {},
    }


_MESSAGES = declared("flex_attention", "flex_attention", {"sizes": _sizes}, SMALLER=SMALLER)


LIBRARIES = (FirstOf("flex_attention", "'No valid triton configs', 'out of resource', NYI", _MESSAGES),)
