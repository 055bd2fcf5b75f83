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
from tables import each


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
ROWS: list[tuple[str, dict[str, Any], str]] = [
    (DENSE, {"q": [[1.0]]}, "q"),
    (DENSE, {"q": half(2, 3, 16)}, "q.shape"),
    (DENSE, {"q": torch.randn(2, 3, 4, 16)}, "q.dtype"),
    (DENSE, {"k": torch.randn(2, 3, 4, 16).bfloat16()}, "k.dtype"),
    (DENSE, {"k": half(2, 3, 4, 8)}, "k.shape"),
    (DENSE, {"v": half(2, 4, 4, 16)}, "v.shape"),
    (DENSE, {"k": half(2, 3, 3, 16), "v": half(2, 3, 3, 16)}, "k.shape"),
    (DENSE, {"q": half(0, 3, 4, 16)}, "q.shape"),
    (DENSE, {name: half(2, 3, 4, 264) for name in "qkv"}, "head_dim"),
    (DENSE, {"dropout_p": 1.0}, "dropout_p"),
    (DENSE, {"softcap": -1.0}, "softcap"),
    (DENSE, {"softmax_scale": "half"}, "softmax_scale"),
    (DENSE, {"window_size": (2.5, 0)}, "window_size"),
    (DENSE, {"causal": "no"}, "causal"),
    (DENSE, {"return_attn_probs": 2}, "return_attn_probs"),
    (DENSE, {"k": torch.nested.nested_tensor([torch.ones(3, 4, 16)] * 2).half()}, "k.layout"),
    (DENSE, {"alibi_slopes": torch.ones(3)}, "alibi_slopes"),
    (DENSE, {"alibi_slopes": torch.ones(4, requires_grad=True)}, "alibi_slopes.requires_grad"),
    (VARLEN, {"q": half(2, 3, 4, 16)}, "q.shape"),
    (VARLEN, {"cu_seqlens_q": CU.long()}, "cu_seqlens_q.dtype"),
    (VARLEN, {"cu_seqlens_k": CU.tolist()}, "cu_seqlens_k"),
    (VARLEN, {"cu_seqlens_k": CU[:2]}, "cu_seqlens_k.shape"),
    (VARLEN, {"cu_seqlens_q": CU[:1], "cu_seqlens_k": CU[:1]}, "cu_seqlens_q.shape"),
    (VARLEN, {"max_seqlen_q": 2}, "cu_seqlens_q"),
    (VARLEN, {"max_seqlen_k": -1}, "max_seqlen_k"),
    (VARLEN, {"cu_seqlens_k": int32(0, 4, 3)}, "cu_seqlens_k"),
    (VARLEN, {"cu_seqlens_k": int32(0, 3, 7), "max_seqlen_k": 4}, "cu_seqlens_k"),
    (PAGED, {"block_table": TABLE.long()}, "block_table.dtype"),
    (PAGED, {"block_table": TABLE[:1]}, "block_table.shape"),
    (PAGED, {"k": half(2, 128, 4, 16), "v": half(2, 128, 4, 16)}, "page size"),
    (PAGED, {"k": half(256, 4, 16), "v": half(256, 4, 16)}, "k.shape"),
    (PAGED, {"cu_seqlens_k": int32(0, 3, 300), "max_seqlen_k": 297}, "cu_seqlens_k"),
    (CACHE, {"k_cache": half(2, 9, 2, 16)}, "v_cache.shape"),
    (CACHE, {"k_cache": half(1, 8, 2, 16), "v_cache": half(1, 8, 2, 16)}, "k_cache.shape"),
    (CACHE, {"k_cache": half(2, 8, 2, 32)[..., ::2]}, "k_cache.stride"),
    (CACHE, {"k": NEW["k"]}, "v"),
    (CACHE, {"k": half(2, 1, 4, 16), "v": half(2, 1, 4, 16)}, "k"),
    (CACHE, {"k": NEW["k"][0], "v": NEW["v"]}, "k.shape"),
    (CACHE, NEW | {"v": NEW["v"].bfloat16()}, "v"),
    (CACHE, NEW | {"cache_seqlens": None}, "cache_seqlens"),
    (CACHE, {"k": half(2, 4, 2, 16), "v": half(2, 4, 2, 16), "cache_seqlens": int32(1, 5)}, "cache_seqlens"),
    (CACHE, NEW | {"q": half(2, 9, 4, 16)}, "q.shape"),
    (CACHE, {"cache_seqlens": 9}, "cache_seqlens"),
    (CACHE, {"cache_seqlens": -1}, "cache_seqlens"),
    (CACHE, {"cache_seqlens": torch.tensor([1, 2])}, "cache_seqlens.dtype"),
    (CACHE, {"cache_seqlens": int32(1)}, "cache_seqlens.shape"),
    (CACHE, {"cache_batch_idx": int32(0, 2)}, "cache_batch_idx"),
    (CACHE, {"cache_leftpad": int32(0, 1, 2)}, "cache_leftpad.shape"),
    (CACHE, {"cache_leftpad": int32(0, 4)}, "cache_leftpad"),
    (CACHE, {"num_splits": 129}, "num_splits"),
    (CACHE, {"block_table": TABLE}, "page size"),
    (CACHE, POOLS | {"cache_batch_idx": int32(0, 0)}, "cache_batch_idx"),
    (CACHE, POOLS | {"cache_leftpad": int32(0, 0)}, "cache_leftpad"),
    (CACHE, {"rotary_cos": half(8, 8), "rotary_sin": half(8, 8)}, "rotary_cos"),
    (CACHE, ANGLES | {"rotary_sin": None}, "rotary_sin"),
    (CACHE, ANGLES | {"rotary_cos": half(7, 8)}, "rotary_cos.shape"),
    (CACHE, ANGLES | {"rotary_cos": torch.zeros(8, 8)}, "rotary_cos.dtype"),
    (CACHE, ANGLES | {"rotary_cos": half(8, 4), "rotary_sin": half(8, 4)}, "rotary_dim"),
    (CACHE, ANGLES | {"rotary_sin": half(9, 8)}, "rotary_sin.shape"),
    (BACK, {"out": half(2, 3, 4, 8)}, "out"),
    (BACK, {"dout": torch.randn(2, 3, 4, 16)}, "dout"),
    (BACK, {"softmax_lse": torch.zeros(2, 3, 4)}, "softmax_lse.shape"),
    (BACK, {"dk": half(2, 3, 2, 16)}, "dk.shape"),
    (BACK, {"dropout_p": 0.3}, "rng_state"),
    (VARLEN_BACK, {"max_seqlen_k": 2}, "cu_seqlens_k"),
    (VARLEN_BACK, {"max_seqlen_q": -1}, "max_seqlen_q"),
]


@each("function, change, field", ROWS)
def test_what_is_wrong_is_named(function: str, change: dict[str, Any], field: str) -> None:
    """Errors of the call, and of the self-check that comes before it, have flash_attn's names."""
    call = getattr(interface, function.split()[0])
    given = {**RIGHT[function], **change}
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
