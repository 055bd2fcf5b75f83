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
from attnsel.errors import caller
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
    from attnsel.integrations.transformers import attention_forward  # half a second, for one row

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


MODEL = "attnsel.integrations.transformers"


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
