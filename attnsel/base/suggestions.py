"""What people write for a name that is another one here: by its meaning first, then by its spelling.

Names of other libraries for fields, arguments, components and candidates. Looked up where a name is unknown
and an error is on its way, never before.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, NamedTuple

MEANT: dict[str, str] = {
    "num_heads": "nheads n_heads num_q_heads q_heads nhead num_query_heads attention_heads n_head",
    "num_gqa_groups": "num_query_groups gqa_groups gqa enable_gqa n_kv_heads nheads_k nheads_kv kv_groups "
    "num_heads_kv num_heads_k num_kv_groups groups heads_kv heads_k mqa n_head_kv num_kv num_gqa",
    "batch_size": "bs b batchsize bsz micro_batch_size mbs num_seqs",
    "max_seqlen_q": "seq_len_q q_len query_length sq s_q q_length target_length max_seq_len_q q_seqlen",
    "max_seqlen_kv": "seqlen_k seq_len_kv seq_len_k kv_len kv_length skv s_kv k_len key_length "
    "source_length max_seqlen_k max_seq_len_kv past_length kv_seqlen cache_len",
    "head_dim_qk": "d_qk hdim_qk head_dim_q head_dim_k",
    "head_dim_v": "v_head_dim d_v hdim_v headdim_v dv",
    "attn_mask_type": "attn_mask attention_mask mask_type attn_mask_types padding padding_mask "
    "attention_mask_type",
    "attention_dropout": "dropout_p attn_dropout p_dropout dropout_prob attention_probs_dropout_prob",
    "dtype": "precision data_type torch_dtype bf16 fp16 half qkv_dtype element_type bfloat16 float16",
    "qkv_layout": "qkv_format format input_layout memory_format tensor_layout varlen thd bshd sbhd bhsd",
    "softmax_type": "sinks sink attention_sinks s_aux attention_sink softmax off_by_one",
    "softcap": "logits_soft_cap soft_cap attn_logit_softcapping logit_softcap logit_cap softcapping",
    "core_attention_bias_type": "bias attn_bias alibi bias_type attention_bias score_mod",
    "kv_cache": "cache paged paged_kv kvcache kv_cache_type use_cache",
    "page_size": "block_size page_block_size kv_block_size paged_block_size page",
    "cp_size": "cp context_parallel context_parallel_size ring world_size cp_ranks",
    "cp_comm_type": "cp_comm ulysses comm_type cp_type",
    "cuda_graph": "graph cudagraph cuda_graphs enable_cuda_graph graphs",
    "return_lse": "lse softmax_lse return_softmax_lse need_weights return_attn_probs return_softmax",
    "return_max_logit": "max_logit qk_clip muon_clip",
    "gpu": "device arch compute_capability sm card gpu_name cc device_name gpu_type accelerator",
    "cuda": "cuda_version cu cudatoolkit toolkit",
    "cudnn": "cudnn_version nvidia_cudnn cudnn_backend",
    "cudnn_frontend": "frontend cudnn_fe fe nvidia_cudnn_frontend",
    "torch": "pytorch torch_version pytorch_version",
    "triton": "triton_version",
    "python": "python_version py",
    "flash_attn": "flash_attention flash flash_attn_version fa2 fa flash_attn_2 flash_attention_2",
    "flash_attn_3": "fa3 flash_attention_3",
    "flash_attn_4": "fa4 flash_attention_4",
    "backend": "force impl kernel attn_implementation attn_impl attention_backend use_backend only",
    "deny": "disable exclude without forbid",
    "allow": "backends enable include",
    "memory_limit": "memory max_memory mem workspace mem_limit",
    "deterministic": "determinism reproducible",
}
"""By a name of ours: what other libraries and tools call it."""

_MEANT_IN_CODE: dict[str, str] = {
    "num_attention_heads": f"num_heads heads {MEANT['num_heads']}",
    "num_heads": "heads num_attention_heads",
    "attention_dropout": "dropout",
    "num_gqa_groups": "kv_heads num_kv_heads num_key_value_heads",
    "kv_channels": "head_dim headdim head_size d_head dim_head embed_dim",
    "head_dim_qk": "head_dim headdim head_size d dim d_head kv_channels dim_head",
    "max_seqlen_q": "seqlen seq_len seq seq_length sequence_length max_seqlen max_seq_len ctx s",
    "qkv_format": f"layout qkv_layout {MEANT['qkv_layout']}",
    "qkv_layout": "layout",
    "window_size": "window sliding_window sliding_window_size local_window attention_window swa",
    "softmax_scale": "scale scaling sm_scale attn_scale scaling_factor",
    "is_training": "training train requires_grad",
    "attention_mask": "mask attn_mask attention_masks key_padding_mask",
    "core_attention_bias": "bias attn_bias attention_bias",
    "softmax_offset": "sinks sink s_aux attention_sinks",
    "query_layer": "q query",
    "key_layer": "k key",
    "value_layer": "v value",
    "q": "query query_layer",
    "k": "key key_layer",
    "v": "value value_layer",
    "cu_seqlens_q": "cu_seqlens cu_seq_lens_q",
    "cu_seqlens_kv": "cu_seqlens_k cu_seq_lens_k",
    "max_seqlen_kv": "max_length_k",
    "block_table": "block_tables page_table",
    "environment": "env machine",
    "params": "call question config",
}
"""The same for arguments of functions, and for what the command line says in shorthands of its own."""


class _Said(NamedTuple):
    """``write`` is what to write where ``argument`` exists; ``why`` follows."""

    argument: str
    write: str
    why: str = ""


_OPPOSITE = (
    "True means masked OUT here, the opposite of F.sdpa: attention_mask=~attn_mask with "
    'attn_mask_type="arbitrary"; a floating-point mask is core_attention_bias'
)
_CAUSAL = (_Said("attn_mask_type", 'attn_mask_type="causal"'),)
_MASK = (
    _Said("attention_mask", "attention_mask", _OPPOSITE),
    _Said(
        "attn_mask_type",
        'attn_mask_type="arbitrary"',
        "The tensor is attention_mask of the call, True = masked OUT",
    ),
)
_WINDOW = (
    _Said(
        "window_size",
        "window_size=(left, right)",
        "Keys on each side of the query's own; the last N keys are (N - 1, 0)",
    ),
)
_NO_SCALE = _Said("head_dim_qk", "", "the scale of the scores decides nothing, so there is no field for it")
_SCALE = (_Said("softmax_scale", "softmax_scale"), _NO_SCALE)
_GQA = (
    _Said("num_gqa_groups", "num_gqa_groups", "The number of key/value heads"),
    _Said("q", "", "leave it out: the heads of k and v say it"),
    _Said("query_layer", "", "leave it out: the heads of k and v say it"),
)

# What needs more than another name.
_SAID: dict[str, tuple[_Said, ...]] = {
    **dict.fromkeys(("is_causal", "causal", "use_causal_mask", "causal_mask"), _CAUSAL),
    **dict.fromkeys(("attn_mask", "mask"), _MASK),
    **dict.fromkeys(("window", "sliding_window", "sliding_window_size", "attention_window"), _WINDOW),
    **dict.fromkeys(("scale", "softmax_scale", "sm_scale", "scaling"), _SCALE),
    "enable_gqa": _GQA,
}

_CANDIDATES_MEANT: dict[str, str] = {
    "sdpa.flash": "flash flash_attention flash_sdp torch_flash pytorch_flash",
    "sdpa.efficient": "efficient mem_efficient memory_efficient efficient_attention mem_efficient_sdp",
    "sdpa.math": "math math_sdp unfused eager unfuseddotproductattention",
    "sdpa.cudnn": "cudnn_attention cudnn_sdp torch_cudnn",
    "cudnn": "fused fused_attention fusedattention cudnn_frontend cudnn_fe",
    "flash_attn.2": "flash_attn fa2 flash2 flash_attn_2 flash_attn2 flash_attention_2 flashattention",
    "flash_attn.3": "fa3 flash3 flash_attn_3 flash_attn3 flash_attention_3",
    "flash_attn.4": "fa4 flash4 flash_attn_4 flash_attn4 flash_attention_4",
    "sdpa.varlen": "varlen varlen_attn",
    "tiled": "reference",
}


def suggestion(name: str, known: Iterable[str]) -> str:
    """What was meant by ``name`` where ``known`` exist, as the end of a sentence; empty where nothing is."""
    names = list(known)
    word = name.casefold().replace("-", "_")
    for said in _SAID.get(word, ()):
        if said.argument in names:
            return f"did you mean {said.write}? {said.why}".rstrip() if said.write else said.why
    meant = near(word, names, _MEANT_IN_CODE, MEANT)
    return "" if meant is None else f"did you mean {meant}?"


def candidate_suggestion(name: str, known: Iterable[str]) -> str:
    """``suggestion`` for the name of a candidate."""
    meant = near(name.casefold().replace("-", "_"), known, _CANDIDATES_MEANT)
    return "" if meant is None else f"did you mean {meant}?"


def near(word: str, known: Iterable[str], *tables: dict[str, str]) -> str | None:
    """The one of ``known`` that some table says ``word`` for, or else is spelt much like it."""
    names = list(known)
    for table in tables:
        for name in names:
            if word in table.get(name, "").split():
                return name
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return close[0] if close else None


def unknown_argument(
    function: str, name: str, known: Iterable[str], place: str = "", there: Iterable[str] = ()
) -> TypeError:
    """The error about an argument that ``function`` does not take.

    ``there``: arguments that ``place`` takes, for those who looked for them here.
    """
    there = list(there)
    meant = f"it is an argument of {place}" if name in there else suggestion(name, known)
    if not meant and (meant := suggestion(name, there)):
        meant += f" It is an argument of {place}"
    return TypeError(f"{function} got an unexpected argument {name!r}" + (f": {meant}" if meant else ""))


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """The arguments that a function has names for."""
    parameters = signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
