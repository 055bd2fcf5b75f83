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
from attnsel.report.copy_advice import COPIES, advice
from attnsel.verdicts.verdict import Adaptation

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


def adaptation(name: str) -> Adaptation:
    changes: dict[str, tuple[tuple[str, Any], ...]] = {
        "contiguous": (("q", None), ("k", None)),
        "pad_head_dim_qk": (("head_dim_qk", 80),),
        "pad_head_dim_v": (("head_dim_v", 80),),
        "pad_sequence": (("max_seqlen_q", 1024), ("max_seqlen_kv", 1024)),
        "expand_gqa": (("num_gqa_groups", 8),),
        "unpack": (),
    }
    return Adaptation(name, "copies", 0, changes=changes[name])


def question(**fields: Any) -> AttentionParams:
    sizes = {"num_heads": 8, "num_gqa_groups": 2, "max_seqlen_q": 1000, "head_dim_qk": 72}
    return AttentionParams(**{**sizes, **fields})


FLASH = "attnsel.flash_attn.functions"
MODEL = "attnsel.integrations.transformers"


@pytest.mark.parametrize(
    ("module", "function", "name", "fields", "words"),
    [
        (FLASH, "flash_attn_func", "contiguous", {}, "emit [batch, seqlen, heads, head_dim] in dense memory"),
        (FLASH, "flash_attn_qkvpacked_func", "contiguous", {}, "dense in memory: flash_attn_func"),
        (FLASH, "flash_attn_func", "pad_head_dim_qk", {}, "q, k and v 80 wide per head"),
        (FLASH, "flash_attn_func", "pad_sequence", {}, "pad to 1024 rows at the end where batches are made"),
        (
            FLASH,
            "flash_attn_func",
            "pad_sequence",
            {"attn_mask_type": "no_mask"},
            "cannot be told which rows",
        ),
        (FLASH, "flash_attn_func", "expand_gqa", {}, "keep k.repeat_interleave(4, dim=2), and v alike"),
        (FLASH, "flash_attn_kvpacked_func", "expand_gqa", {}, "keep kv.repeat_interleave(4, dim=3)"),
        (MODEL, "attention_forward", "pad_head_dim_v", {}, "v_proj and o_proj 80 wide per head"),
        (MODEL, "attention_forward", "pad_sequence", {}, "pass pad_to_multiple_of=64 to the tokenizer"),
        (
            MODEL,
            "attention_forward",
            "pad_sequence",
            {"max_seqlen_q": 1, "max_seqlen_kv": 1000},
            "StaticCache",
        ),
        (
            MODEL,
            "attention_forward",
            "expand_gqa",
            {},
            "num_key_value_heads=8, k_proj and v_proj repeated",
        ),
        (MODEL, "attention_forward", "unpack", {}, "not DataCollatorWithFlattening"),
        ("attnsel.module", "forward", "unpack", {}, "qkv_format='bshd' with the same cu_seqlens"),
    ],
)
def test_each_api_has_its_own_way(
    module: str, function: str, name: str, fields: dict[str, Any], words: str
) -> None:
    assert words in advice(adaptation(name), question(**fields), Caller(1, module, function))


@pytest.mark.parametrize("module", [FLASH, MODEL])
def test_nobody_is_told_to_set_what_their_api_has_not(module: str) -> None:
    foreign = ["qkv_format", "bshd", "cu_seqlens", "adapt=", *(["softmax_scale"] if module == MODEL else [])]
    for name in COPIES:
        text = advice(adaptation(name), question(), Caller(1, module, "flash_attn_varlen_func"))
        assert [word for word in foreign if word in text] == [], name


def made_in(module: str, source: str, **known: Any) -> Callable[[], Any]:
    """The function ``f`` of ``source``, as if a module of that name held it."""
    space: dict[str, Any] = {"__name__": module, **known}
    exec(source, space)
    made: Callable[[], Any] = space["f"]
    return made


def below(modules: tuple[str, ...]) -> Callable[[], Any]:
    """A warning, below calls through these modules."""
    warn = (
        "def f():\n    who = caller()\n    warnings.warn('here', stacklevel=who.stacklevel)\n    return who"
    )
    inner = made_in(modules[-1], warn, caller=caller, warnings=warnings)
    for module in reversed(modules[:-1]):
        inner = made_in(module, "def f():\n    return inner()", inner=inner)
    return inner


@pytest.mark.parametrize(
    ("modules", "module"),
    [
        (("attnsel.functional", "attnsel.debug"), "attnsel.functional"),
        (("torch.nn", "attnsel.module", "attnsel.debug"), "attnsel.module"),
        (("", "torch.compiler", "attnsel.runtime.compiled"), "attnsel.runtime.compiled"),
        (("transformers.models.llama", "torch.nn", MODEL, "attnsel.debug"), MODEL),
    ],
)
def test_torch_and_transformers_are_no_callers(modules: tuple[str, ...], module: str) -> None:
    with pytest.warns(UserWarning, match="here") as told:
        who = below(modules)()
    assert told[0].filename == __file__
    assert who.module == module
