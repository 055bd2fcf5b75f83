"""What a caller can do about a tensor that is copied on every call, in the words of the API in use."""

from __future__ import annotations

from functools import cache
from math import gcd

from attnsel.base.rows import read_rows
from attnsel.errors import Caller
from attnsel.params import AttentionParams
from attnsel.params.layout import FORMATS
from attnsel.verdicts.reasons import Adaptation


@cache
def _texts() -> dict[tuple[str, str], str]:
    """The rows of ``data/copy_advice.csv``."""
    return {(row["api"], row["case"]): row["text"] for row in read_rows("attnsel.report", "copy_advice")}


_THEIR_NAMES = {"q": "query", "k": "key", "v": "value"}


def is_spared(adaptation: Adaptation) -> bool:
    """Whether a caller can spare it."""
    return ("attnsel", adaptation.name) in _texts()


def advice(a: Adaptation, p: AttentionParams, caller: Caller) -> str:
    """The change of the caller's that spares this copy, which ``is_spared``."""
    names = [name for name, _ in a.changes]
    sizes = list(dict.fromkeys(to for _, to in a.changes if isinstance(to, int)))
    groups = dict(a.changes).get("num_gqa_groups", p.num_heads)
    axis = FORMATS[p.qkv_format].heads
    unpacked = caller.function.replace("_qkvpacked", "").replace("_kvpacked", "")
    square = p.max_seqlen_q == p.max_seqlen_kv
    api, case = "attnsel", a.name
    if caller.module.startswith("attnsel.flash_attn"):
        api = "flash_attn"
        if a.name == "pad_sequence":
            case += ", causal" if p.causal and square else ""
        elif unpacked != caller.function:
            case += ", packed"
    elif caller.module == "attnsel.integrations.transformers":
        api, case = "transformers", f"{a.name}, square" if square else a.name
    known = (_texts().get(place) for place in ((api, case), (api, a.name), ("attnsel", a.name)))
    return next(filter(None, known)).format(
        p=p,
        dense="; ".join(f"{name} = {name}.contiguous()" for name in names),
        theirs=" and ".join(_THEIR_NAMES.get(name, name) for name in names),
        to=", ".join(map(str, sizes)),
        step=gcd(64, *sizes),
        copies=groups // p.num_gqa_groups,
        groups=groups // p.num_gqa_groups * p.num_gqa_groups,
        axis=axis,
        axis_of_kv=axis + 1,
        shape="[total, heads, head_dim]" if p.qkv_format == "thd" else "[batch, seqlen, heads, head_dim]",
        unpacked=unpacked,
        padded=caller.function.replace("_varlen", ""),
    )
