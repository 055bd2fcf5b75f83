"""Functions of libraries while a program is watched: which ran, with which question, and put back."""

from __future__ import annotations

import importlib
import sys

import pytest

torch = pytest.importorskip("torch")

import attnsel.flash_attn  # noqa: E402, F401
from attnsel.diagnose.watching.session import watch  # noqa: E402

FLASH = """
import torch
def _run(q, k, v):
    F = torch.nn.functional
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                    softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False):
    return _run(q, k, v)
def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False):
    return _run(*qkv.unbind(2))
"""
TE = """
from types import SimpleNamespace
import torch
_attention_backends = {"attention_params": None}
class DotProductAttention(torch.nn.Module):
    def forward(self, query_layer, key_layer, value_layer, attention_mask=None):
        b, s, h, d = query_layer.shape
        _attention_backends.update(
            attention_params=SimpleNamespace(
                qkv_dtype=query_layer.dtype, qkv_layout="bshd_bshd_bshd", batch_size=b, num_heads=h,
                num_gqa_groups=h, max_seqlen_q=s, max_seqlen_kv=s, head_dim_qk=d, head_dim_v=d,
                attn_mask_type="causal", window_size=(-1, 0), fp8=False, fp8_meta=None, is_training=True),
            use_flash_attention=False, use_fused_attention=True, fused_attention_backend=1)
        return torch.nn.functional.scaled_dot_product_attention(query_layer, key_layer, value_layer)
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Stand-ins of two libraries that can be imported, and are gone afterwards."""
    flash = tmp_path / "flash_attn"
    te = tmp_path / "transformer_engine/pytorch/attention/dot_product_attention"
    flash.mkdir()
    te.mkdir(parents=True)
    for folder in (te.parents[2], te.parents[1], te.parents[0], te):
        (folder / "__init__.py").write_text("")
    (flash / "flash_attn_interface.py").write_text(FLASH)
    (flash / "__init__.py").write_text("from flash_attn.flash_attn_interface import *\n")
    (te / "dot_product_attention.py").write_text(TE)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("flash_attn", "transformer_engine")):
            del sys.modules[name]


def qkv(*shape, **options):
    return [torch.randn(*shape, **options) for _ in range(3)]


@pytest.mark.parametrize("early", [True, False])
def test_flash_attn_imported_before_and_after(packages, early):
    if early:
        importlib.import_module("flash_attn")
    q, k, v = qkv(2, 16, 4, 8, requires_grad=True)
    with watch() as w:
        flash_attn = importlib.import_module("flash_attn")
        for _ in range(2):
            flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(4, 0)).sum().backward()
        flash_attn.flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 4, 8))
    flash_attn.flash_attn_func(q, k, v)  # nobody watches by now
    first, second = w.sites
    assert (first.api, first.forward, first.candidate) == ("flash_attn", "flash_attn_func", "flash_attn.2")
    assert (first.calls, first.backward_calls, first.params.window_size) == (2, 2, (4, 0))
    assert first.params.attn_mask_type == "causal_bottom_right"
    assert (second.forward, second.params.num_heads) == ("flash_attn_qkvpacked_func", 4)


def test_transformer_engine_says_what_it_chose(packages):
    with watch() as w:
        name = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
        module = importlib.import_module(name).DotProductAttention()
        for _ in range(3):
            module(*qkv(2, 16, 4, 8, dtype=torch.bfloat16))
    (site,) = w.sites
    assert (site.api, site.candidate) == ("TransformerEngine", "cudnn")
    assert site.forward == "FusedAttention (sub-backend 1)"
    assert (site.calls, site.params.dtype, site.params.attn_mask_type) == (3, "bf16", "causal")
