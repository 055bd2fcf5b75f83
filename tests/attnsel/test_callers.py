"""Warnings point at the line that called attnsel, in the words of the API that was called."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attnsel import DotProductAttention, attention, clear_cache, debug, flash_attn, override
from attnsel.errors import Caller, caller
from attnsel.integrations.transformers import attention_forward
from attnsel.params import AttentionParams
from attnsel.report.copy_advice import advice
from attnsel.verdicts.verdict import Adaptation
from tables import each

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(debug, "_announced", set())
    clear_cache()
    with override(backend="sdpa.flash"):
        yield
    clear_cache()


def sparse(*shape: int) -> Tensor:
    return torch.randn(*shape, 16).half()[..., ::2]


def through_attention() -> Any:
    return attention(*[sparse(2, 9, 2)] * 3)  # here


def through_the_module() -> Any:
    return DotProductAttention(2, 8, qkv_format="bshd")(*[sparse(2, 9, 2)] * 3)  # here


def through_flash_attn() -> Any:
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    q = sparse(9, 2).contiguous()
    return flash_attn.flash_attn_varlen_func(q, q, q, lengths, lengths, 5, 5)  # here


def through_transformers() -> Any:
    module = torch.nn.Module()
    return attention_forward(module, *[sparse(2, 2, 9)] * 3, None, is_causal=False)  # here


CALLS: list[tuple[Callable[[], Any], str]] = [
    (through_attention, "k = k.contiguous()"),
    (through_the_module, "or make the projection emit bshd in dense memory"),
    (through_flash_attn, "sequences of one length can go to flash_attn_func as [batch, seqlen, ...]"),
    (through_transformers, "where the model's attention layer or its cache makes key"),
]


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_a_copy_is_told_at_the_callers_line_in_its_words(call: Callable[[], Any], words: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    copies = [one for one in told if one.category is debug.CopyWarning]
    assert copies
    for one in copies:
        assert one.filename == __file__
        assert linecache.getline(one.filename, one.lineno).rstrip().endswith("# here")
    assert any(words in str(one.message) for one in copies)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_speaks_flash_attns_words_as_well() -> None:
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    run = torch.compile(flash_attn.flash_attn_varlen_func, backend="aot_eager")
    q = torch.randn(9, 2, 8).half()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(q, q, q, lengths, lengths, 5, 5)
    (copy,) = [one for one in told if one.category is debug.CopyWarning]
    assert copy.filename == __file__
    assert "can go to flash_attn_func as [batch, seqlen, ...]" in str(copy.message)


CHANGES: dict[str, tuple[tuple[str, Any], ...]] = {
    "contiguous": (("q", None), ("k", None)),
    "pad_head_dim_qk": (("head_dim_qk", 80),),
    "pad_head_dim_v": (("head_dim_v", 80),),
    "pad_sequence": (("max_seqlen_q", 1024), ("max_seqlen_kv", 1024)),
    "expand_gqa": (("num_gqa_groups", 8),),
    "unpack": (),
}
MODEL = "attnsel.integrations.transformers"
DECODING = {"max_seqlen_q": 1, "max_seqlen_kv": 1000}


def advised(name: str, function: str, **fields: Any) -> str:
    module = MODEL if function == "attention_forward" else "attnsel.flash_attn.functions"
    module = "attnsel.module" if function == "forward" else module
    sizes = {"num_heads": 8, "num_gqa_groups": 2, "max_seqlen_q": 1000, "head_dim_qk": 72}
    adaptation = Adaptation(name, "copies", 0, changes=CHANGES[name])
    return advice(adaptation, AttentionParams(**{**sizes, **fields}), Caller(1, module, function))


@each("function, name, fields, words", [
    ("flash_attn_func", "contiguous", {}, "emit [batch, seqlen, heads, head_dim] in dense memory"),
    ("flash_attn_qkvpacked_func", "contiguous", {}, "dense in memory: flash_attn_func"),
    ("flash_attn_func", "pad_head_dim_qk", {}, "q, k and v 80 wide per head"),
    ("flash_attn_func", "pad_sequence", {}, "pad to 1024 rows at the end where batches are made"),
    ("flash_attn_func", "pad_sequence", {"attn_mask_type": "no_mask"}, "cannot be told which rows"),
    ("flash_attn_func", "expand_gqa", {}, "keep k.repeat_interleave(4, dim=2), and v alike"),
    ("flash_attn_kvpacked_func", "expand_gqa", {}, "keep kv.repeat_interleave(4, dim=3)"),
    ("attention_forward", "pad_head_dim_v", {}, "v_proj and o_proj 80 wide per head"),
    ("attention_forward", "pad_sequence", {}, "pass pad_to_multiple_of=64 to the tokenizer"),
    ("attention_forward", "pad_sequence", DECODING, "StaticCache"),
    ("attention_forward", "expand_gqa", {}, "num_key_value_heads=8, k_proj and v_proj repeated"),
    ("attention_forward", "unpack", {}, "not DataCollatorWithFlattening"),
    ("forward", "unpack", {}, "qkv_format='bshd' with the same cu_seqlens"),
])  # fmt: skip
def test_each_api_has_its_own_way(function: str, name: str, fields: dict[str, Any], words: str) -> None:
    assert words in advised(name, function, **fields)


@each("modules, module", [
    (("attnsel.functional", "attnsel.debug"), "attnsel.functional"),
    (("torch.nn", "attnsel.module", "attnsel.debug"), "attnsel.module"),
    (("", "torch.compiler", "attnsel.runtime.compiled"), "attnsel.runtime.compiled"),
    (("transformers.models.llama", "torch.nn", MODEL, "attnsel.debug"), MODEL),
])  # fmt: skip
def test_torch_and_transformers_are_no_callers(modules: tuple[str, ...], module: str) -> None:
    """A warning, below calls through functions as if modules of these names held them."""
    warn = (
        "def f():\n    who = caller()\n    warnings.warn('here', stacklevel=who.stacklevel)\n    return who"
    )
    inner: Any = None
    for name in reversed(modules):
        space: dict[str, Any] = {"__name__": name, "inner": inner, "caller": caller, "warnings": warnings}
        exec(warn if inner is None else "def f():\n    return inner()", space)
        inner = space["f"]
    with pytest.warns(UserWarning, match="here") as told:
        who = inner()
    assert told[0].filename == __file__
    assert who.module == module
