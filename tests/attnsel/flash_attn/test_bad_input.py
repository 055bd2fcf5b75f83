"""Invalid input: one error, a RuntimeError like flash_attn's, that names the argument; nothing is ignored."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch

import attnsel
import emulated_flash_attn
from attnsel import flash_attn
from attnsel.flash_attn import FlashAttentionError, interface
from tables import cells_of, each


def test_arguments_and_defaults_are_those_of_the_package() -> None:
    """Of 2.8.3, and a version that clients take for one of its line."""
    assert flash_attn.__version__.startswith("2.8.")
    for name in emulated_flash_attn.RECORD["2"]["2.8.3"]["functions"]:
        wanted = emulated_flash_attn.signature(2, "2.8.3", name).parameters.values()
        ours = inspect.signature(getattr(interface, name)).parameters.values()
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in wanted], name
        if not name.startswith("_"):
            assert getattr(interface, name) is getattr(flash_attn, name)
            assert name in flash_attn.__all__


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def raises(field: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(FlashAttentionError) as caught:
        call(*args, **kwargs)
    error = caught.value
    assert error.field == field
    assert isinstance(error, RuntimeError)
    assert isinstance(error, ValueError)
    assert isinstance(error, attnsel.InvalidInput)
    assert str(error).startswith(field)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), type(again)) == (str(error), FlashAttentionError)


CU, TABLE = int32(0, 3, 6), torch.zeros(2, 1, dtype=torch.int32)
NEW = {"k": half(2, 1, 2, 16), "v": half(2, 1, 2, 16)}
ANGLES = {**NEW, "rotary_cos": half(8, 8), "rotary_sin": half(8, 8)}
POOLS = {"k_cache": half(2, 256, 2, 16), "v_cache": half(2, 256, 2, 16), "block_table": TABLE}
LENGTHS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU.clone(), "max_seqlen_q": 3, "max_seqlen_k": 3}
BACKWARD = {
    **{"dropout_p": 0.0, "softmax_scale": 0.25, "causal": False, "window_size_left": -1},
    **{"window_size_right": -1, "softcap": 0.0, "alibi_slopes": None, "deterministic": False},
}
OF_BACKWARD = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
DENSE = "flash_attn_func"
VARLEN = "flash_attn_varlen_func"
PAGED = "flash_attn_varlen_func over pages"
CACHE = "flash_attn_with_kvcache"
BACK = "_flash_attn_backward"
VARLEN_BACK = "_flash_attn_varlen_backward"
RIGHT: dict[str, dict[str, Any]] = {
    DENSE: {name: half(2, 3, 4, 16) for name in "qkv"},
    VARLEN: {name: half(6, 4, 16) for name in "qkv"} | LENGTHS,
    PAGED: {
        **{"q": half(6, 4, 16).requires_grad_(), "k": half(2, 256, 4, 16), "v": half(2, 256, 4, 16)},
        **LENGTHS, "block_table": TABLE,
    },
    CACHE: {
        **{"q": half(2, 1, 4, 16), "k_cache": half(2, 8, 2, 16), "v_cache": half(2, 8, 2, 16)},
        "cache_seqlens": 3,
    },
    BACK: {
        **{name: half(2, 3, 4, 16) for name in OF_BACKWARD},
        **BACKWARD, "softmax_lse": torch.zeros(2, 4, 3),
    },
    VARLEN_BACK: {
        **{name: half(6, 4, 16) for name in OF_BACKWARD},
        **LENGTHS, **BACKWARD, "softmax_lse": torch.zeros(4, 6),
    },
}  # fmt: skip


def changes(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What stands in a cell of wrong_calls.txt."""
    return {name: value for part in (*parts, more) for name, value in part.items()}


@each("function, wrong, field", cells_of(__file__, "wrong_calls.txt"))
def test_what_is_wrong_is_named(function: str, wrong: str, field: str) -> None:
    """Errors of the call, and of the self-check that comes before it, have flash_attn's names."""
    function = globals()[function]
    call = getattr(interface, function.split()[0])
    given = {**RIGHT[function], **eval(f"changes({wrong})")}
    raises(field, call, **given)
    if function == VARLEN_BACK:
        with attnsel.override(selfcheck="all"):
            raises(field, call, **given)


def test_parts_that_are_packed_together() -> None:
    raises("kv.shape", flash_attn.flash_attn_kvpacked_func, half(2, 3, 4, 16), half(2, 3, 3, 4, 16))
    raises("qkv.shape", flash_attn.flash_attn_qkvpacked_func, half(2, 3, 2, 4, 16))
    raises("qkv.shape", flash_attn.flash_attn_varlen_qkvpacked_func, half(6, 4, 16), CU, 3)
    raises("kv", flash_attn.flash_attn_varlen_kvpacked_func, half(6, 4, 16), None, CU, CU, 3, 3)


def test_a_block_table_that_leads_nowhere() -> None:
    """The package's regression test: lengths beyond what the table leads to, with and without an append; and
    a page outside the pool."""
    pool, new = half(4, 256, 2, 16), half(2, 4, 2, 16)
    q, call = half(2, 1, 4, 16), flash_attn.flash_attn_with_kvcache
    for lengths, more in ((int32(257, 10), {}), (int32(254, 10), {"k": new, "v": new})):
        with pytest.raises(RuntimeError, match="block_table"):
            call(q, pool, pool.clone(), cache_seqlens=lengths, block_table=TABLE, **more)
    for page in (-1, 4):
        table = torch.tensor([[0, 7], [page, 7]], dtype=torch.int32)
        with pytest.raises(FlashAttentionError, match=r"block_table\[1, 0\]"):
            call(q, pool, pool, cache_seqlens=int32(3, 3), block_table=table)
