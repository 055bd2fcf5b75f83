"""What messages of flex_attention and of Triton need beside their rows."""

from __future__ import annotations

import re

from attnsel.diagnose.logs.message import Facts


def sizes(match: re.Match[str]) -> Facts:
    """How much shared memory a kernel needs, and the head dimensions that its constants state."""
    need, limit = match["need"], match["limit"]
    dims = re.search(r"QK_HEAD_DIM=(\d{1,4})\b.{0,400}?\bV_HEAD_DIM=(\d{1,4})\b", match.string)
    return {
        "sizes": f" ({need} bytes of {limit})" if need else "",
        "params": {"head_dim_qk": int(dims[1]), "head_dim_v": int(dims[2])} if dims else {},
    }
