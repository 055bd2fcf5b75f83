"""What flex_attention and Triton say: tiles too large for a card, shapes that are not there yet.

Read: torch 2.13.0 nn/attention/flex_attention.py, _inductor/kernel/flex/; triton 3.7.1 runtime/errors.py;
older wordings from the issues named.
"""

from __future__ import annotations

import re
from typing import Any

from attnsel.diagnose.logs.message import FirstOf, error

_FLEX = "torch 2.13, nn/attention/flex_attention.py"
SMALLER = (
    'smaller tiles: flex_attention(…, kernel_options={"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 1}), and '
    "for "
    "the backward BLOCK_M1, BLOCK_N1, BLOCK_M2, BLOCK_N2 of 32"
)


def _sizes(match: re.Match[str]) -> dict[str, Any]:
    need, limit = match["need"], match["limit"]
    dims = re.search(r"QK_HEAD_DIM=(\d{1,4})\b.{0,400}?\bV_HEAD_DIM=(\d{1,4})\b", match.string)
    return {
        "sizes": f" ({need} bytes of {limit})" if need else "",
        "params": {"head_dim_qk": int(dims[1]), "head_dim_v": int(dims[2])} if dims else {},
    }


_MESSAGES = (
    error(
        pattern=r"out of resource: ?(?P<kernel>triton_\w{0,60}flex_attention\w{0,60})(?:,? Required: "
        r"?(?P<need>\d{1,9}),? +Hardware limit: ?(?P<limit>\d{1,9}))?",
        read=_sizes,
        known="flex_attention's tiles need more shared memory than a block of this GPU has{sizes}: they "
        "are too large for this head dimension on this card",
        fix=(SMALLER, "bf16 rather than fp32, which halves it"),
        source="torch/_inductor/select_algorithm.py; pytorch/pytorch#180278, #133254, "
        "pytorch/torchtitan#1437",
    ),
    error(
        pattern=r"out of resource: shared memory, Required: (?P<need>\d{1,9}), Hardware limit: "
        r"(?P<limit>\d{1,9})",
        known="a Triton kernel needs {need} bytes of shared memory, the GPU gives a block {limit}",
        fix=(SMALLER, "in a kernel of one's own: smaller blocks, num_stages=1"),
        source="triton/runtime/errors.py, OutOfResources; meta-pytorch/attention-gym#14",
    ),
    error(
        pattern=r"NYI: Currently non power of 2 embedding dimension are not supported\. Got "
        r"E=(?P<head_dim_qk>\d{1,9}) and Ev=(?P<head_dim_v>\d{1,9})",
        known="this flex_attention takes head dimensions that are powers of 2, and it is {head_dim_qk}",
        fix="torch 2.7 or newer, compiled; or pad q, k and v with zeros and keep scale of the true dimension",
        source="torch 2.5 to 2.6, nn/attention/flex_attention.py:1121; unslothai/unsloth#4036",
    ),
    error(
        "Number of shared query heads sharing the same KV head must be power of 2",
        known="flex_attention's decoding kernel wants a power of 2 of query heads for each key/value head",
        fix="a newer torch, which takes the main kernel there; "
        'kernel_options={"FORCE_USE_FLEX_ATTENTION": True}; '
        "or key/value heads repeated",
        source="torch 2.5 to 2.13, _inductor/kernel/flex_decoding.py (flex/flex_decoding.py:202); "
        "pytorch/pytorch#143117",
    ),
    error(
        "NYI: embedding dimension of the query, key, and value must be at least 16",
        known="flex_attention needs head dimensions of 16 and more",
        fix="pad q, k and v with zeros to 16",
        source="torch 2.7 and newer, _inductor/kernel/flex; pytorch/pytorch#147765",
    ),
    error(
        "flex_attention called without torch.compile()",
        known="flex_attention runs uncompiled: it writes out all scores",
        fix="torch.compile(flex_attention)",
        source=_FLEX,
    ),
    error(
        "Unsupported for now if query, key, value are the same buffer",
        known="flex_attention on CPU refuses q, k and v that are one tensor",
        fix="a .clone() of one of them",
        source="torch/_inductor/kernel/flex_attention.py:1135; pytorch/pytorch#157612",
    ),
)


LIBRARIES = (FirstOf("flex_attention", "'No valid triton configs', 'out of resource', NYI", _MESSAGES),)
