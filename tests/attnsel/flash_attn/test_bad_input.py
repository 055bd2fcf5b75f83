"""Invalid input: one error, a RuntimeError like flash_attn's, that names the argument; nothing is ignored."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch

import attnsel
from attnsel import flash_attn
from attnsel.flash_attn import FlashAttentionError, interface
from flash_reference import DENSE, VARLEN

CU = torch.tensor([0, 3, 6], dtype=torch.int32)
TAIL = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"]
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *TAIL, "return_attn_probs"],
    "flash_attn_kvpacked_func": ["q", "kv", *TAIL, "return_attn_probs"],
    "flash_attn_qkvpacked_func": ["qkv", *TAIL, "return_attn_probs"],
    "flash_attn_varlen_func": [
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *(*TAIL, "return_attn_probs", "block_table"),
    ],
    "flash_attn_varlen_kvpacked_func": [
        *("q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *(*TAIL, "return_attn_probs"),
    ],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *TAIL, "return_attn_probs"],
    "flash_attn_with_kvcache": [
        *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"),
        *("cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size"),
        *("softcap", "rotary_interleaved", "alibi_slopes", "num_splits", "return_softmax_lse"),
    ],
}


DEFAULTS = dict(zip(TAIL, (0.0, None, False, (-1, -1), 0.0, None, False), strict=True))


def test_argument_names_and_defaults_in_flash_attns_order() -> None:
    for name, names in SIGNATURES.items():
        parameters = inspect.signature(getattr(flash_attn, name)).parameters
        assert list(parameters) == names
        assert getattr(interface, name) is getattr(flash_attn, name)
        assert name in flash_attn.__all__
        if name in (*DENSE, *VARLEN):
            wanted = {**DEFAULTS, "return_attn_probs": False}
            assert {key: parameters[key].default for key in wanted} == wanted


def test_the_version_is_one_that_clients_take() -> None:
    assert flash_attn.__version__.startswith("2.8.")


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


def raises(field: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(FlashAttentionError) as caught:
        call(*args, **kwargs)
    error = caught.value
    assert error.field == field
    assert isinstance(error, RuntimeError)
    assert isinstance(error, ValueError)
    assert isinstance(error, attnsel.InvalidInput)
    assert str(error).startswith(field)


DENSE_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"q": [[1.0]]}, "q"),
    ({"q": half(2, 3, 16)}, "q.shape"),
    ({"q": torch.randn(2, 3, 4, 16)}, "q.dtype"),
    ({"k": torch.randn(2, 3, 4, 16).bfloat16()}, "k.dtype"),
    ({"k": half(2, 3, 4, 8)}, "k.shape"),
    ({"v": half(2, 3, 4, 8)}, "v.shape"),
    ({"k": half(2, 3, 3, 16), "v": half(2, 3, 3, 16)}, "k.shape"),
    ({"k": half(1, 3, 4, 16), "v": half(1, 3, 4, 16)}, "k.shape"),
    ({"q": half(0, 3, 4, 16)}, "q.shape"),
    ({name: half(2, 3, 4, 264) for name in "qkv"}, "head_dim"),
    ({"dropout_p": 1.0}, "dropout_p"),
    ({"softcap": -1.0}, "softcap"),
    ({"softmax_scale": "half"}, "softmax_scale"),
    ({"softmax_scale": float("nan")}, "softmax_scale"),
    ({"softmax_scale": torch.ones(2)}, "softmax_scale"),
    ({"softcap": torch.tensor(True)}, "softcap"),
    ({"window_size": (2.5, 0)}, "window_size"),
    ({"causal": "no"}, "causal"),
    ({"deterministic": torch.ones(2)}, "deterministic"),
    ({"return_attn_probs": 2}, "return_attn_probs"),
    ({"k": torch.nested.nested_tensor([torch.ones(3, 4, 16)] * 2).half()}, "k.layout"),
    ({"v": half(2, 3, 4, 16).to_sparse()}, "v.layout"),
    ({"window_size": 3}, "window_size"),
    ({"alibi_slopes": torch.ones(3)}, "alibi_slopes"),
    ({"alibi_slopes": torch.ones(4).half()}, "alibi_slopes"),
    ({"alibi_slopes": torch.ones(4, requires_grad=True)}, "alibi_slopes.requires_grad"),
]


def test_dense() -> None:
    for change, field in DENSE_CALLS:
        given = {name: half(2, 3, 4, 16) for name in "qkv"}
        raises(field, flash_attn.flash_attn_func, **{**given, **change})


PACKED_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"q": half(2, 3, 4, 16)}, "q.shape"),
    ({"cu_seqlens_q": CU.long()}, "cu_seqlens_q.dtype"),
    ({"cu_seqlens_k": CU.tolist()}, "cu_seqlens_k"),
    ({"cu_seqlens_k": CU[:2]}, "cu_seqlens_k.shape"),
    ({"cu_seqlens_q": CU[:1], "cu_seqlens_k": CU[:1]}, "cu_seqlens_q.shape"),
    ({"max_seqlen_q": 2}, "cu_seqlens_q"),
    ({"max_seqlen_k": -1}, "max_seqlen_k"),
    ({"max_seqlen_k": None}, "max_seqlen_k"),
    ({"cu_seqlens_k": torch.tensor([0, 4, 3], dtype=torch.int32)}, "cu_seqlens_k"),
    ({"cu_seqlens_k": torch.tensor([0, 3, 7], dtype=torch.int32), "max_seqlen_k": 4}, "cu_seqlens_k"),
]


def test_packed() -> None:
    for change, field in PACKED_CALLS:
        given = {name: half(6, 4, 16) for name in "qkv"}
        given |= {"cu_seqlens_q": CU, "cu_seqlens_k": CU.clone(), "max_seqlen_q": 3, "max_seqlen_k": 3}
        raises(field, flash_attn.flash_attn_varlen_func, **{**given, **change})


def test_parts_that_are_packed_together() -> None:
    raises("kv.shape", flash_attn.flash_attn_kvpacked_func, half(2, 3, 4, 16), half(2, 3, 3, 4, 16))
    raises("qkv.shape", flash_attn.flash_attn_qkvpacked_func, half(2, 3, 2, 4, 16))
    raises("qkv.shape", flash_attn.flash_attn_varlen_qkvpacked_func, half(6, 4, 16), CU, 3)
    raises("kv", flash_attn.flash_attn_varlen_kvpacked_func, half(6, 4, 16), None, CU, CU, 3, 3)


TABLE = torch.zeros(2, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_table": TABLE.long()}, "block_table.dtype"),
        ({"block_table": TABLE[:1]}, "block_table.shape"),
        ({"k": half(2, 128, 4, 16), "v": half(2, 128, 4, 16)}, "page size"),
        ({"k": half(256, 4, 16), "v": half(256, 4, 16)}, "k.shape"),
        (
            {"cu_seqlens_k": torch.tensor([0, 3, 300], dtype=torch.int32), "max_seqlen_k": 297},
            "cu_seqlens_k",
        ),
    ],
)
def test_packed_over_pages(change: dict[str, Any], field: str) -> None:
    given = {"q": half(6, 4, 16).requires_grad_(), "k": half(2, 256, 4, 16), "v": half(2, 256, 4, 16)}
    given |= {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 3, "max_seqlen_k": 3}
    raises(field, flash_attn.flash_attn_varlen_func, **{"block_table": TABLE, **given, **change})


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CACHES: list[tuple[dict[str, Any], str]] = [
    ({"k_cache": half(2, 9, 2, 16)}, "v_cache.shape"),
    ({"k_cache": half(1, 8, 2, 16), "v_cache": half(1, 8, 2, 16)}, "k_cache.shape"),
    ({"k_cache": half(2, 8, 2, 32)[..., ::2]}, "k_cache.stride"),
    ({"k": half(2, 1, 2, 16)}, "v"),
    ({"k": half(2, 1, 4, 16), "v": half(2, 1, 4, 16)}, "k"),
    ({"k": half(2, 1, 2, 16), "v": half(2, 1, 2, 16).bfloat16(), "cache_seqlens": 1}, "v"),
    ({"k": half(2, 1, 2, 16), "v": half(2, 1, 2, 16), "cache_seqlens": None}, "cache_seqlens"),
    ({"k": half(2, 1, 2, 16), "v": half(2, 1, 2, 16), "cache_seqlens": 8}, "cache_seqlens"),
    ({"k": half(2, 4, 2, 16), "v": half(2, 4, 2, 16), "cache_seqlens": int32(1, 5)}, "cache_seqlens"),
    ({"k": half(2, 1, 2, 16), "v": half(2, 1, 2, 16), "q": half(2, 9, 4, 16)}, "q.shape"),
    ({"cache_seqlens": 9}, "cache_seqlens"),
    ({"cache_seqlens": torch.tensor([1, 2])}, "cache_seqlens.dtype"),
    ({"cache_seqlens": int32(1)}, "cache_seqlens.shape"),
    ({"cache_batch_idx": torch.tensor([0, 1])}, "cache_batch_idx.dtype"),
    ({"cache_batch_idx": int32(0, 2)}, "cache_batch_idx"),
    ({"cache_leftpad": int32(0, 1, 2)}, "cache_leftpad.shape"),
    ({"cache_leftpad": int32(0, 4)}, "cache_leftpad"),
    ({"num_splits": 129}, "num_splits"),
    ({"rotary_cos": half(8, 8), "rotary_sin": half(8, 8)}, "rotary_cos"),
    ({"block_table": TABLE}, "page size"),
    ({"alibi_slopes": torch.ones(2)}, "alibi_slopes"),
]


def test_cache() -> None:
    for change, field in CACHES:
        given = {"q": half(2, 1, 4, 16), "k_cache": half(2, 8, 2, 16), "v_cache": half(2, 8, 2, 16)}
        raises(field, flash_attn.flash_attn_with_kvcache, **{"cache_seqlens": 3, **given, **change})


ROTARY: list[tuple[dict[str, Any], str]] = [
    ({"rotary_sin": None}, "rotary_sin"),
    ({"rotary_cos": half(7, 8)}, "rotary_cos.shape"),
    ({"rotary_cos": torch.zeros(8, 8)}, "rotary_cos.dtype"),
    ({"rotary_cos": half(8, 4), "rotary_sin": half(8, 4)}, "rotary_dim"),
    ({"rotary_cos": half(8, 16), "rotary_sin": half(8, 16)}, "rotary_dim"),
    ({"rotary_sin": half(9, 8)}, "rotary_sin.shape"),
]


def test_cache_with_rotary() -> None:
    for change, field in ROTARY:
        given = {"rotary_cos": half(8, 8), "rotary_sin": half(8, 8), **change}
        caches, new = [half(2, 8, 2, 16) for _ in range(2)], half(2, 1, 2, 16)
        raises(
            field,
            flash_attn.flash_attn_with_kvcache,
            half(2, 1, 4, 16),
            *caches,
            new,
            new,
            cache_seqlens=3,
            **given,
        )


@pytest.mark.parametrize("append", [False, True])
def test_a_block_table_that_is_too_short(append: bool) -> None:
    """The package's regression test: lengths beyond what the table leads to, with and without an append."""
    pool, new = half(4, 256, 2, 16), half(2, 4, 2, 16)
    more = {"k": new, "v": new} if append else {}
    lengths = int32(254, 10) if append else int32(257, 10)
    with pytest.raises(RuntimeError, match="block_table"):
        flash_attn.flash_attn_with_kvcache(
            half(2, 1, 4, 16), pool, pool.clone(), cache_seqlens=lengths, block_table=TABLE, **more
        )


@pytest.mark.parametrize("page", [-1, 4])
def test_a_page_outside_the_pool(page: int) -> None:
    pool = half(4, 256, 2, 16)
    table = torch.tensor([[0, 7], [page, 7]], dtype=torch.int32)
    with pytest.raises(FlashAttentionError, match=r"block_table\[1, 0\]"):
        flash_attn.flash_attn_with_kvcache(
            half(2, 1, 4, 16), pool, pool, cache_seqlens=int32(3, 3), block_table=table
        )


@pytest.mark.parametrize("other", ["cache_batch_idx", "cache_leftpad"])
def test_pages_and_what_is_for_contiguous_caches(other: str) -> None:
    pool = half(4, 256, 2, 16)
    raises(
        other, flash_attn.flash_attn_with_kvcache, half(2, 1, 4, 16), pool, pool, cache_seqlens=3,
        block_table=TABLE, **{other: int32(0, 0)},
    )  # fmt: skip


BACKWARDS: list[tuple[dict[str, Any], str]] = [
    ({"out": half(2, 3, 4, 8)}, "out"),
    ({"dout": torch.randn(2, 3, 4, 16)}, "dout"),
    ({"softmax_lse": torch.zeros(2, 3, 4)}, "softmax_lse.shape"),
    ({"dk": half(2, 3, 2, 16)}, "dk.shape"),
    ({"dropout_p": 0.3}, "rng_state"),
]


def test_private_backward() -> None:
    for change, field in BACKWARDS:
        given = {name: half(2, 3, 4, 16) for name in ("dout", "q", "k", "v", "out", "dq", "dk", "dv")}
        given |= {
            "softmax_lse": torch.zeros(2, 4, 3),
            "dropout_p": 0.0,
            "softmax_scale": 0.25,
            "causal": False,
        }
        given |= {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
        raises(field, interface._flash_attn_backward, **{**given, "deterministic": False, **change})


@pytest.mark.parametrize("selfcheck", ["0", "all"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"cu_seqlens_k": torch.tensor([0, 4, 3], dtype=torch.int32)}, "cu_seqlens_k"),
        ({"max_seqlen_k": 2}, "cu_seqlens_k"),
        ({"max_seqlen_q": -1}, "max_seqlen_q"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes"),
    ],
)
def test_private_packed_backward(change: dict[str, Any], field: str, selfcheck: str) -> None:
    """Errors of the call and of its self-check have flash_attn's names too."""
    given = {name: half(6, 4, 16) for name in ("dout", "q", "k", "v", "out", "dq", "dk", "dv")}
    given |= {"cu_seqlens_q": CU, "cu_seqlens_k": CU.clone(), "max_seqlen_q": 3, "max_seqlen_k": 3}
    given |= {"softmax_lse": torch.zeros(4, 6), "dropout_p": 0.0, "softmax_scale": 0.25, "causal": False}
    given |= {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
    with attnsel.override(selfcheck=selfcheck):
        raises(field, interface._flash_attn_varlen_backward, **{**given, "deterministic": False, **change})


def test_the_error_survives_pickling() -> None:
    error = FlashAttentionError("q.dtype", "torch.float32", "FlashAttention takes float16 and bfloat16")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), type(again)) == (str(error), FlashAttentionError)
