"""docs/how-to/from-transformer-engine.md says of every argument and switch what is true of both libraries."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from paths import ROOT

torch = pytest.importorskip("torch")

import attnsel  # noqa: E402
from attnsel import DotProductAttention, UnsupportedArgument  # noqa: E402
from attnsel.dispatchers import switches_of  # noqa: E402

PAGE = (ROOT / "docs/how-to/from-transformer-engine.md").read_text(encoding="utf-8")

# TransformerEngine 2.20.0.dev0, commit d0067d0da6cb01811b8072a7d304f0e00344ce2b,
# transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py
REQUIRED = inspect.Parameter.empty
INIT: dict[str, Any] = {
    "num_attention_heads": REQUIRED, "kv_channels": REQUIRED, "num_gqa_groups": None,
    "attention_dropout": 0.0, "qkv_format": "sbhd", "attn_mask_type": "causal", "window_size": None,
    "bottom_right_diagonal": None,
    "sequence_parallel": False, "tp_size": 1, "get_rng_state_tracker": None, "tp_group": None,
    "layer_number": None, "attention_type": "self", "cp_group": None, "cp_global_ranks": None,
    "cp_stream": None, "cp_comm_type": "p2p", "softmax_scale": None, "softmax_type": "vanilla",
    "return_max_logit": False, "name": None,
}  # fmt: skip
FORWARD: dict[str, Any] = {
    "query_layer": None, "key_layer": None, "value_layer": None, "attention_mask": None, "qkv_format": None,
    "cu_seqlens_q": None, "cu_seqlens_kv": None, "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None,
    "max_seqlen_q": None, "max_seqlen_kv": None, "attn_mask_type": None, "window_size": None,
    "bottom_right_diagonal": None, "checkpoint_core_attention": False, "core_attention_bias_type": "no_bias",
    "core_attention_bias": None, "alibi_slopes": None, "fast_zero_fill": True, "inference_params": None,
    "pad_between_seqs": None, "fp8_output": False, "bf16_backward": False, "num_splits": 1, "score_mod": None,
    "score_mod_bprop": None, "score_mod_tensors": None, "score_mod_bprop_tensors": None, "qkv_layer": None,
    "kv_layer": None, "qkv_interleave_dim": -3,
}  # fmt: skip


def defaults(function: Any) -> dict[str, Any]:
    """By argument, without ``self`` and what takes all others."""
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.name != "self" and p.kind is not p.VAR_KEYWORD}


def rows(after: str) -> dict[str, str]:
    """Names in code of the first column of the first table behind ``after``, and what the row says."""
    table = re.search(r"(?:^\|.*\n)+", PAGE.partition(after)[2], re.MULTILINE)
    assert table is not None
    said: dict[str, str] = {}
    for line in table[0].splitlines()[2:]:
        first, second = (cell.strip() for cell in line.strip("|").split("|"))
        said |= dict.fromkeys(re.findall(r"`([^`]+)`", first), second)
    return said


def own_names(after: str) -> list[str]:
    """Names behind the "In addition" that follows ``after``."""
    sentence = PAGE.partition(after)[2].partition("In addition: ")[2].partition("\n")[0]
    return re.findall(r"`([^`]+)`", sentence)


def test_the_constructor_is_theirs_in_order_and_defaults():
    assert f"The constructor has all {len(INIT)}," in PAGE
    ours = defaults(DotProductAttention.__init__)
    assert list(ours)[: len(INIT)] == list(INIT)
    assert {name: ours[name] for name in INIT} == INIT
    assert set(rows("The constructor has all")) == set(INIT)
    assert list(ours)[len(INIT) :] == own_names("The constructor has all")


def test_forward_has_theirs_by_name_or_refuses_them():
    said, ours = rows("`forward`, whose first"), defaults(DotProductAttention.forward)
    assert set(said) == set(FORWARD)
    refused = {name for name, text in said.items() if text.startswith("refused")}
    assert refused == set(FORWARD) - set(ours)
    kept = {name: default for name, default in FORWARD.items() if name not in refused}
    assert {name: ours[name] for name in kept} == kept
    assert sorted(set(ours) - set(FORWARD)) == sorted(own_names("`forward`, whose first"))
    same = next(i for i, (theirs, own) in enumerate(zip(FORWARD, ours, strict=False)) if theirs != own)
    assert re.findall(r"whose first (\d+) arguments", PAGE) == [str(same)]
    core, q = DotProductAttention(2, 8), torch.randn(4, 1, 2, 8)
    for name in refused:
        core(q, q, q, **{name: FORWARD[name]})
        with pytest.raises(UnsupportedArgument, match=name):
            core(q, q, q, **{name: object()})


def test_a_switch_of_theirs_is_one_that_is_known_and_ours_is_read(monkeypatch):
    said = rows("## Switches")
    assert set(switches_of("te")) <= {part.partition("=")[0] for cell in said for part in cell.split()}
    for setting in re.findall(r"`(ATTNSEL_[^`]+)`", "\n".join(said.values())):
        variable, _, value = setting.partition("=")
        monkeypatch.setenv(variable, value)
        settings = attnsel.configure()
        monkeypatch.delenv(variable)
        if variable == "ATTNSEL_DISABLE":
            assert list(settings.policy.deny) == value.split(",")
        else:
            assert (settings.debug or settings.policy.deterministic) == int(value)
    attnsel.configure()


def test_weights_of_theirs_are_loaded_as_the_page_shows():
    names: dict[str, Any] = {}
    exec(re.search(r"```python\n(import torch\n.*?)```", PAGE, re.DOTALL)[1], names)
    core = torch.nn.ModuleDict({"core_attention": DotProductAttention(4, 8, softmax_type="learnable")})
    theirs = {
        "core_attention.softmax_offset": torch.arange(4.0),
        "core_attention._extra_state": torch.empty(0, dtype=torch.uint8),
    }
    core.load_state_dict(names["state_from_te"](theirs))
    assert core["core_attention"].softmax_offset.flatten().tolist() == [0, 1, 2, 3]
