"""Words: what the commands and the errors say, whole, at 80 columns. No torch is needed here.

Each output is a file of ``words/``, named after what was asked; ``test_words_with_torch.py`` has what runs
attention. A changed word fails with a diff of the file. To accept it::

    pytest tests/net/test_words.py --snapshot-update

and read the diff before it is committed. ``tests/net/README.md`` says more.

The net holds while modules move: it knows ``attnsel``, ``attnsel.cli.main`` and ``attnsel.rules``, and what
differs between machines is fixed at the standard library.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import attnsel
from attnsel import AttentionParams, Environment, InvalidInput, NoBackendError, Policy, select
from attnsel.cli import main
from attnsel.rules import REGISTRY, load_all
from attnsel.rules.examples import question

FOLDER = Path(__file__).parent / "words"

# syrupy, where it writes a file that is not named after its test. The names here are what was asked.
pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Can not relate snapshot:UserWarning")

# All private names that this file knows: where the release is printed from, and what is remembered of the
# environment variables, which no public function makes forget.
RELEASE_OF_COMMANDS = "attnsel.cli.__version__"
RELEASE_OF_DOCTOR = "attnsel.cli.doctor.__version__"
NOTHING_READ_YET: dict[str, Any] = {"attnsel.settings._process": None, "attnsel.settings._warned": set()}

OTHERS = (
    *("can-i-use", "rules", "rule", "gpus", "run", "report", "replay", "watch", "doctor", "completion"),
    "prove",
)

# By the name of a file: what is typed.
TYPED = {
    # ---- explain: forms ------------------------------------------------------------------------------
    "explain_h100": "attnsel explain --gpu H100",
    "explain_h100_short": "attnsel explain --gpu H100 --short",
    "explain_h100_markdown": "attnsel explain --gpu H100 --markdown",
    "explain_h100_json": "attnsel explain --gpu H100 --json",
    "explain_h100_sources": "attnsel explain --gpu H100 --cudnn 9.1.0 --head-dim 192,128 --sources",
    "explain_h100_old_cudnn": "attnsel explain --gpu H100 --cudnn 9.1.0 --head-dim 192,128",
    "explain_h100_old_cudnn_short": "attnsel explain --gpu H100 --cudnn 9.1.0 --head-dim 192,128 --short",
    "explain_h100_old_cudnn_markdown": "attnsel explain --gpu H100 --cudnn 9.1.0 --head-dim 192,128"
    " --markdown",
    # ---- explain: questions --------------------------------------------------------------------------
    "explain_h100_fp8": "attnsel explain --gpu H100 --fp8-recipe delayed\n"
    "attnsel explain --gpu H100 --fp8-recipe current --cudnn 9.20.0 --inference --no-causal",
    "explain_h100_softcap_of_cudnn": "attnsel explain --gpu H100 --backend cudnn --softcap 30",
    "explain_h100_paged": "attnsel explain --gpu H100 --inference --kv-cache paged --page-size 16"
    " --layout paged_kv_bshd_bshd_bshd --mask padding_causal --seqlen-q 1 --seqlen-kv 8k --kv-heads 4",
    "explain_h100_files": "cat question.json\ncat machine.json\n"
    "attnsel explain --params question.json --env machine.json --short\n"
    "attnsel explain --params question.json --env machine.json --gpu A100 --head-dim 64 --short",
    "explain_a100_packed": "attnsel explain --gpu A100 --layout thd --mask padding_causal --flash-attn 2.8.3",
    "explain_a100_window_sink": "attnsel explain --gpu A100 --window-size 127 0 --softmax-type learnable",
    "explain_t4_bf16": "attnsel explain --gpu T4",
    "explain_v100_fp32": "attnsel explain --gpu V100 --dtype fp32 --mask arbitrary",
    "explain_b200_mla": "attnsel explain --gpu B200 --head-dim 192,128 --kv-heads 1 --deterministic",
    "explain_rtx5090_decode": "attnsel explain --gpu 'RTX 5090' --seqlen-q 1 --seqlen-kv 8k --kv-heads 4"
    " --inference --no-causal",
    "explain_rtx4090_bias": "attnsel explain --gpu 'RTX 4090' --core-attention-bias-type post_scale_bias",
    "explain_rocm": "attnsel explain --gpu gfx942\nattnsel explain --gpu gfx942 --short",
    "explain_cpu": "attnsel explain --gpu cpu\nattnsel explain --gpu cpu --short",
    "explain_mps": "attnsel explain --gpu mps --short",
    "explain_strides": "attnsel explain --gpu H100 --stride q=1,2048,128,1 --misaligned k --short",
    "explain_no_torch": "attnsel explain --gpu H100 --torch none",
    "explain_impossible_machine": "attnsel explain --gpu B200 --torch 2.5 --cudnn 8.9.7 --missing libnvrtc",
    "explain_nothing_runs": "\n".join(
        f"attnsel explain --gpu A100 --allow sdpa.flash,cudnn --softcap 3 --memory-limit 1MiB {form}".rstrip()
        for form in ("", "--short", "--markdown")
    ),
    "explain_policy": "attnsel explain --gpu H100 --deny cudnn,triton --allow-known-bugs BUG006 --preview\n"
    "attnsel explain --gpu H100 --allow sdpa.math,tiled",
    "explain_adapted": "attnsel explain --gpu H100 --mask arbitrary --window-size 3 0",
    "explain_cp_3_of_another_length": "attnsel explain --gpu H100 --cp-size 3 --seqlen 100",
    "explain_mask_tensor": "attnsel explain --gpu H100 --mask-dtype fp32 --as torch",
    "explain_hints": "attnsel explain --gpu H100 --seqlen-q 128 --seqlen-kv 4096",
    # ---- explain: several ranks ----------------------------------------------------------------------
    "explain_cp_8": "attnsel explain --gpu H100 --cp-size 8 --seqlen 64k --kv-heads 4",
    "explain_cp_2_nodes": "attnsel explain --gpu A100 --cp-size 16 --seqlen 128k --cp-comm-type a2a+p2p"
    " --gpus-per-node 8 --network-gbs 25",
    "explain_cp_8_short": "attnsel explain --gpu H100 --cp-size 8 --seqlen 64k --kv-heads 4 --short",
    "explain_cp_8_markdown": "attnsel explain --gpu H100 --cp-size 8 --seqlen 64k --kv-heads 4 --markdown",
    # ---- explain: other libraries' choices -----------------------------------------------------------
    "explain_as_torch": "attnsel explain --gpu H100 --as torch\n"
    "attnsel explain --gpu T4 --head-dim 100 --as torch --short",
    "explain_as_te": "attnsel explain --gpu H100 --as te\n"
    "attnsel explain --gpu A100 --layout thd --mask padding_causal --as te --switch NVTE_FUSED_ATTN=0",
    "explain_as_transformers": "attnsel explain --gpu H100 --as transformers --switch transformers=5.23.0"
    " --switch kernels=false\n"
    "attnsel explain --gpu A100 --softcap 30 --as transformers --switch transformers=4.57.6"
    " --switch attn_implementation=flash_attention_2 --switch kernels=false",
    "explain_as_torch_markdown": "attnsel explain --gpu H100 --as torch --markdown",
    # ---- explain: logs -------------------------------------------------------------------------------
    "from_log_transformer_engine": "attnsel explain --from-log NVIDIA-TransformerEngine-2285.txt",
    "from_log_flash_attn": "attnsel explain --from-log Dao-AILab-flash-attention-1321.txt",
    "from_log_cudnn": "attnsel explain --from-log NVIDIA-cudnn-frontend-120.txt",
    "from_log_torchtitan": "attnsel explain --from-log pytorch-torchtitan-1610.txt",
    "from_log_vllm": "attnsel explain --from-log vllm-project-vllm-31936.txt",
    "from_log_sglang": "attnsel explain --from-log sgl-project-sglang-12360.txt",
    "from_log_transformers": "attnsel explain --from-log huggingface-transformers-28704.txt",
    "from_log_xformers": "attnsel explain --from-log facebookresearch-xformers-1356.txt",
    "from_log_comfyui": "attnsel explain --from-log Comfy-Org-ComfyUI-10170.txt",
    "from_log_diffusers": "attnsel explain --from-log huggingface-diffusers-11805.txt",
    "from_log_flags": "attnsel explain --from-log Dao-AILab-flash-attention-1321.txt --gpu A100 --torch 2.9",
    "from_log_markdown": "attnsel explain --from-log NVIDIA-TransformerEngine-2285.txt --markdown",
    "from_log_json": "attnsel explain --from-log huggingface-transformers-28704.txt --json",
    "from_log_nothing": "cat nothing_known.txt\nattnsel explain --from-log nothing_known.txt\n"
    "attnsel explain --from-log empty.txt",
    # ---- the other commands --------------------------------------------------------------------------
    "can_i_use": "attnsel can-i-use",
    "can_i_use_softcap": "attnsel can-i-use softcap",
    "can_i_use_fp8_h100": "attnsel can-i-use fp8 --gpu H100 --kernel cudnn,flash_attn.3",
    "can_i_use_paged_markdown": "attnsel can-i-use paged --gpu A100 --markdown",
    "matrix": "attnsel matrix --gpu H100 --rows head_dim=64,100,192,512 --cols dtype=bf16,fp16,fp32",
    "matrix_gpus": "attnsel matrix --rows gpu=T4,A100,H100,B200 --cols max_seqlen_q=1,128,8k --inference",
    "matrix_of_one_candidate": "attnsel matrix --gpu H100 --candidate cudnn --rows cudnn=8.9.7,9.1,9.5,9.20"
    " --cols head_dim=64:256:+64",
    "matrix_as_te": "attnsel matrix --gpu H100 --as te --rows head_dim=64,256 --cols softcap=0,30",
    "matrix_markdown": "attnsel matrix --gpu A100 --rows kv_heads=1,3 --cols dtype=bf16,fp32 --markdown",
    "matrix_json": "attnsel matrix --gpu A100 --rows head_dim=64 --cols dtype=bf16,fp32 --json",
    "rules": "attnsel rules",
    "rules_filtered": "attnsel rules --candidate triton --evidence measured\n"
    "attnsel rules --family HINT --markdown\nattnsel rules --family DEVICE",
    "rule_forms": "attnsel rule CUDNN204 --markdown\nattnsel rule CUDNN204 --json\nattnsel rule cudnn204",
    "gpus": "attnsel gpus",
    "gpus_filtered": "attnsel gpus H100\nattnsel gpus sm89 laptop --markdown\nattnsel gpus B300 --json\n"
    "attnsel gpus 'GRID T4-8Q'",
    "completion_bash": "attnsel completion bash",
    "report_ranks_differ": "attnsel report differ_rank0.jsonl differ_rank1.jsonl differ_rank2.jsonl",
    "report_fall_backs": "attnsel report alike_rank0.jsonl alike_rank1.jsonl",
    "report_watched": "attnsel report watched_rank0.jsonl watched_rank1.jsonl",
    "report_markdown": "attnsel report 'differ_rank*.jsonl' --markdown",
    "report_json": "attnsel report 'alike_rank*.jsonl' --json",
    "report_nothing": "attnsel report nothing_known.txt",
    "help": "attnsel --help\nattnsel",
    "help_explain": "attnsel explain --help",
    "help_others": "\n".join(f"attnsel {name} --help" for name in OTHERS),
    "help_matrix": "attnsel matrix --help",
    # ---- mistakes ------------------------------------------------------------------------------------
    "error_old_torch": "attnsel explain --gpu A100 --torch 2.1.2\nattnsel explain --gpu A100 --triton 2.1",
    "error_command": "attnsel nonsense\nattnsel --gpu H100\nattnsel explain H100\nattnsel explian --gpu H100",
    "error_flag": "attnsel explain --gpu H100 --nonsense\nattnsel explain --gpu H100 --num-head 3\n"
    "attnsel explain --gpu H100 --gpu A100\nattnsel explain --gpu H100 --heads 8 --num-heads 8\n"
    "attnsel explain --gpu\nattnsel matrix --gpu H100 --short\nattnsel rules --nonsense\n"
    "attnsel explain --gpu H100 --causal=maybe",
    "error_unknown_gpu": "attnsel explain --gpu H10O\nattnsel explain --gpu H99\nattnsel explain --gpu sm91\n"
    "attnsel explain --gpu 'RTX 9999'\nattnsel explain --gpu ''\nattnsel can-i-use softcap --gpu H10O\n"
    "attnsel gpus nonsense",
    "error_number": "attnsel explain --gpu H100 --num-heads many\nattnsel explain --gpu H100 --num-heads -3\n"
    "attnsel explain --gpu H100 --seqlen 8q\nattnsel explain --gpu H100 --batch-size 99999999999999999999\n"
    "attnsel explain --gpu H100 --head-dim 1,2,3\nattnsel explain --gpu H100 --dropout 1.5\n"
    "attnsel explain --gpu H100 --softcap -1\nattnsel explain --gpu H100 --window-size 1 2 3\n"
    "attnsel explain --gpu H100 --window-size -5 0\nattnsel explain --gpu H100 --sliding-window 0\n"
    "attnsel explain --gpu H100 --cp-size 2 --link-gbs inf\nattnsel explain --gpu H100 --memory-limit lots",
    "error_value": "attnsel explain --gpu H100 --dtype bf17\nattnsel explain --gpu H100 --mask paded\n"
    "attnsel explain --gpu H100 --layout bhds\nattnsel explain --gpu H100 --fp8-recipe magic\n"
    "attnsel explain --gpu H100 --adapt maybe\nattnsel explain --gpu H100 --cp-size 2 --cp-comm-type ring\n"
    "attnsel explain --gpu H100 --kv-cache pages\nattnsel explain --gpu H100 --platform linus\n"
    "attnsel explain --gpu H100 --torch-flash FA9\nattnsel explain --gpu H100 --missing libfoo\n"
    "attnsel explain --gpu H100 --cudnn nine\nattnsel explain --gpu H100 --softmax-type soft\n"
    "attnsel explain --gpu H100 --core-attention-bias-type post\nattnsel explain --gpu H100 --stride q=1,2\n"
    "attnsel explain --gpu H100 --misaligned x\nattnsel explain --gpu H100 --mask-dtype int9",
    "error_contradiction": "attnsel explain --gpu H100 --num-gqa-groups 3\n"
    "attnsel explain --gpu H100 --kv-cache contiguous\n"
    "attnsel explain --gpu H100 --kv-cache paged --inference\n"
    "attnsel explain --gpu H100 --layout thd --mask causal\n"
    "attnsel explain --gpu H100 --causal --bottom-right-diagonal\n"
    "attnsel explain --gpu H100 --core-attention-bias-shape 1hss\n"
    "attnsel explain --gpu H100 --alibi-slopes-shape 16\nattnsel explain --gpu H100 --pad-between-seqs\n"
    "attnsel explain --gpu H100 --gpus-per-node 8\n"
    "attnsel explain --gpu H100 --short --json\nattnsel explain --gpu H100 --sources --json\n"
    "attnsel explain --gpu H100 --head-dim 64 --head-dim-qk 64",
    "error_candidate": "attnsel explain --gpu H100 --backend cuddn\n"
    "attnsel explain --gpu H100 --deny cudnn,flash\n"
    "attnsel explain --gpu H100 --allow fa3\nattnsel explain --gpu H100 --backend nonsense\n"
    "attnsel explain --gpu H100 --allow-known-bugs BUG99\n"
    "attnsel matrix --gpu H100 --rows head_dim=64 --cols dtype=bf16 --candidate math\n"
    "attnsel can-i-use softcap --kernel flsh\nattnsel rules --candidate nonsense",
    "error_rule": "attnsel rule CUDNN2O4\nattnsel rule CUDNN9999\nattnsel rule nonsense\nattnsel rule\n"
    "attnsel rules --family NONSENSE\nattnsel rules --evidence hearsay\n"
    "attnsel rules --ranges --candidate cudnn",
    "error_as": "attnsel explain --gpu H100 --as jax\nattnsel explain --gpu H100 --switch NVTE_FUSED_ATTN=0\n"
    "attnsel explain --gpu H100 --as te --switch NVTE_FUSED_ATTN\n"
    "attnsel explain --gpu H100 --as te --switch NVTE_NONSENSE=1\n"
    "attnsel explain --gpu H100 --as torch --switch enable_flash_sdp=perhaps\n"
    "attnsel explain --gpu H100 --as transformers --switch transformers=4.30\n"
    "attnsel explain --gpu H100 --as te --switch NVTE_FUSED_ATTN=0 --switch NVTE_FUSED_ATTN=1",
    "error_file": "attnsel explain --gpu H100 --params nowhere.json\nattnsel explain --env nowhere.json\n"
    "cat unknown_field.json\n"
    "attnsel explain --gpu H100 --params unknown_field.json\ncat no_json.json\n"
    "attnsel explain --gpu H100 --params no_json.json\ncat list.json\n"
    "attnsel explain --gpu H100 --params list.json\nattnsel explain --gpu H100 --params empty.txt\n"
    "cat no_device.json\nattnsel explain --env no_device.json\nattnsel explain --env question.json\n"
    "attnsel explain --params - --env -\nattnsel explain --gpu H100 --params -\n"
    "attnsel explain --from-log nowhere.txt\n"
    "attnsel explain --from-log NVIDIA-cudnn-frontend-120.txt --params question.json\n"
    "attnsel explain --from-log NVIDIA-cudnn-frontend-120.txt --short\n"
    "attnsel report nowhere\nattnsel report",
    "error_matrix": "attnsel matrix --gpu H100\nattnsel matrix --gpu H100 --rows head_dim=64\n"
    "attnsel matrix --gpu H100 --rows head_dim --cols dtype=bf16\n"
    "attnsel matrix --gpu H100 --rows nonsense=1 --cols dtype=bf16\n"
    "attnsel matrix --gpu H100 --rows headdim=64 --cols dtype=bf16\n"
    "attnsel matrix --gpu H100 --rows dtype=bf16 --cols dtype=fp16\n"
    "attnsel matrix --gpu H100 --rows head_dim=64:32:+8 --cols dtype=bf16\n"
    "attnsel matrix --gpu H100 --rows head_dim=64:128:8 --cols dtype=bf16\n"
    "attnsel matrix --gpu H100 --rows head_dim=1:400:+1 --cols max_seqlen_q=1:400:+1\n"
    "attnsel matrix --gpu H100 --rows dtype=bf16,bf17 --cols head_dim=64\n"
    "attnsel matrix --gpu H100 --rows num_gqa_groups=3 --cols dtype=bf16",
    "error_other_commands": "attnsel can-i-use sofcap\nattnsel can-i-use nonsense\nattnsel completion tcsh\n"
    "attnsel completion\nattnsel run nowhere.py\nattnsel run -m nowhere.at.all\nattnsel run\n"
    "attnsel run -m ../../x\nattnsel replay nowhere.json\nattnsel replay\nattnsel replay no_json.json\n"
    "attnsel replay question.json\nattnsel watch nowhere.py\nattnsel watch",
}

# Words that other libraries use for flags, commands and fields of ours.
FLAGS_MEANT = """
    nheads n-heads num-query-groups gqa-groups bs b seq-len-q q-len seqlen-k seq-len-kv d-qk hdim-qk
    v-head-dim d-v attn-mask attention-mask dropout-p attn-dropout precision data-type qkv-format format
    sinks sink logits-soft-cap soft-cap bias attn-bias cache paged block-size page-block-size cp
    context-parallel cp-comm ulysses graph cudagraph lse softmax-lse max-logit qk-clip device arch
    cuda-version cu cudnn-version nvidia-cudnn frontend cudnn-fe pytorch torch-version triton-version
    python-version py flash-attention flash fa3 flash-attention-3 fa4 flash-attention-4 force impl disable
    exclude backends enable memory max-memory determinism reproducible seq sequence-length headdim
    head-size is-causal autoregressive swa window eval infer train backward recipe fp8-dpa os system
    config file environment machine as-json output-json md issue brief summary ask library source where
    softmax-scale scale sm-scale scaling-factor model hidden-size tp-size tensor-parallel-size num-layers
    gpuu dtpye cudn no-train max-seqlen-k zzzz
"""
COMMANDS_MEANT = """
    ask plan select why-not what which choose select-backend choice query predict show run-plan why code
    page describe list ls codes all-rules constraints list-rules grid table compare sweep support
    support-matrix env environment info check diagnose collect-env versions version status bench benchmark
    test test-gpu selftest verify exec launch python start validate audit conform completions
    install-completion complete shell gpu cards devices list-gpus catalogue explian matrx zzz gpu-s
"""
FIELDS_MEANT = """
    nheads n_heads num_q_heads q_heads nhead num_query_heads attention_heads n_head num_query_groups
    gqa_groups gqa enable_gqa n_kv_heads nheads_k nheads_kv kv_groups num_heads_kv num_heads_k
    num_kv_groups groups heads_kv heads_k mqa n_head_kv num_kv num_gqa bs b batchsize bsz micro_batch_size
    mbs num_seqs seq_len_q q_len query_length sq s_q q_length target_length max_seq_len_q q_seqlen
    seqlen_k seq_len_kv seq_len_k kv_len kv_length skv s_kv k_len key_length source_length max_seqlen_k
    max_seq_len_kv past_length kv_seqlen cache_len d_qk hdim_qk head_dim_q head_dim_k v_head_dim d_v
    hdim_v headdim_v dv attn_mask attention_mask mask_type attn_mask_types padding padding_mask
    attention_mask_type dropout_p attn_dropout p_dropout dropout_prob attention_probs_dropout_prob
    precision data_type torch_dtype bf16 fp16 half qkv_dtype element_type bfloat16 float16 qkv_format
    format input_layout memory_format tensor_layout varlen thd bshd sbhd bhsd sinks sink attention_sinks
    s_aux attention_sink softmax off_by_one logits_soft_cap soft_cap attn_logit_softcapping logit_softcap
    logit_cap softcapping bias attn_bias alibi bias_type attention_bias score_mod cache paged paged_kv
    kvcache kv_cache_type use_cache block_size page_block_size kv_block_size paged_block_size page cp
    context_parallel context_parallel_size ring world_size cp_ranks cp_comm ulysses comm_type cp_type
    graph cudagraph cuda_graphs enable_cuda_graph graphs lse softmax_lse return_softmax_lse need_weights
    return_attn_probs return_softmax max_logit qk_clip muon_clip device arch compute_capability sm card
    gpu_name cc device_name gpu_type accelerator cuda_version cu cudatoolkit toolkit cudnn_version
    nvidia_cudnn cudnn_backend frontend cudnn_fe fe nvidia_cudnn_frontend pytorch torch_version
    pytorch_version triton_version python_version py flash_attention flash flash_attn_version fa2 fa
    flash_attn_2 flash_attention_2 fa3 flash_attention_3 fa4 flash_attention_4 force impl kernel
    attn_implementation attn_impl attention_backend use_backend only disable exclude without forbid
    backends enable include memory max_memory mem workspace mem_limit determinism reproducible heads
    num_attention_heads dropout kv_heads num_kv_heads num_key_value_heads head_dim headdim head_size
    d_head dim_head embed_dim d dim kv_channels seqlen seq_len seq seq_length sequence_length max_seqlen
    max_seq_len ctx s layout window sliding_window sliding_window_size local_window attention_window swa
    scale scaling sm_scale attn_scale scaling_factor training train requires_grad mask attention_masks
    key_padding_mask q query k key v value query_layer key_layer value_layer cu_seqlens cu_seq_lens_q
    cu_seqlens_k cu_seq_lens_k max_length_k block_tables page_table env machine call question config
    softcapp attn_mask_typ zzz
"""


# One mistake each, as an expression; what it raises is the words.
RAISES = {
    "error_python_select": """
        select(AttentionParams(), H100, head_dim=64)
        select(AttentionParams(), H100, gpu="A100")
        select(AttentionParams(), H100, deny=("cudnn",))
        select(AttentionParams(), H100, nonsense=1)
        select({"head_dim_qk": 64}, H100)
        select(AttentionParams(), "H100")
        select(AttentionParams(), H100, policy="never")
        select(AttentionParams(), H100, dispatcher="jax")
        select(AttentionParams(), H100, switches={"NVTE_FUSED_ATTN": "0"})
        select(AttentionParams(), H100, dispatcher="te", switches={"NVTE_NONSENSE": "1"})
        select(AttentionParams(), H100)["cudn"]
    """,
    "error_python_environment": """
        Environment.describe("H10O")
        Environment.describe("sm91")
        Environment.describe(90)
        Environment.describe("H100", cuddn="9.1")
        Environment.describe("H100", pytorch="2.9")
        Environment.describe("H100", nonsense="1")
        Environment.describe("H100", torch="two")
        Environment(torch="2.9")
        Environment(device={"type": "gpu"})
        Environment(device={"type": "cuda", "arch": -1})
    """,
    "error_python_policy": """
        Policy(backend="cuddn")
        Policy(deny=("cudnn", "flash"))
        Policy(allow=("nonsense",))
        Policy(adapt="maybe")
        Policy(memory_limit="lots")
        Policy(memory_limit=-1)
        Policy(bakend="cudnn")
        attnsel.configure(debug=7)
        attnsel.configure(debg=1)
        attnsel.configure(debug_format="yaml")
        attnsel.configure(debug_ranks="some")
        attnsel.configure(selfcheck="yes")
        attnsel.configure(memory_limit="2 elephants")
    """,
    "error_python_params": """
        AttentionParams(dtype="bf17")
        AttentionParams(num_heads=0)
        AttentionParams(num_heads="many")
        AttentionParams(num_heads=8, num_gqa_groups=3)
        AttentionParams(attn_mask_type="paded", qkv_layout="bhds")
        AttentionParams(qkv_layout="thd_thd_thd")
        AttentionParams(attn_mask_type="causal", bottom_right_diagonal=True)
        AttentionParams(window_size=(-5, 0))
        AttentionParams(kv_cache="contiguous")
        AttentionParams(core_attention_bias_type="alibi", core_attention_bias_requires_grad=True)
        AttentionParams(cp_size=2, attention_dropout=1.0)
        AttentionParams(pad_between_seqs=True)
    """,
}

# Rules whose examples show, between them, every kind of way out: exact, config, install, hardware, risk.
WAYS_OUT = """
    CUDNN171 CUDNN403 CUDNN210 CUDNN121 CP013 CP003 CP001 BUG012 CUDNN433 CUDNN250 CUDNN302 CUDNN313 CUDNN301
    CUDNN211 CUDNN107 CUDNN003 CUDNN106 CUDNN381 CUDNN202 CUDNN201 CUDNN317 BUG011 CUDNN172 SDPA401 CUDNN127
    INSTALL008 CUDNN431 FLASH422 CUDNN235 SDPA022 BUG013 CUDNN001 CUDNN255 CUDNN204 TRITON014
"""


@pytest.mark.parametrize("name", TYPED)
def test_a_command_says(name, at_a_prompt, says):
    says(name, at_a_prompt(TYPED[name]))


def test_the_version(at_a_prompt, says, monkeypatch):
    monkeypatch.setattr(RELEASE_OF_COMMANDS, "1.2.3")
    says("version", at_a_prompt("attnsel --version"))


# ---- what was meant ----------------------------------------------------------------------------------


def test_the_flag_that_was_meant(same_machine, capsys, says):
    says("did_you_mean_a_flag", meant(FLAGS_MEANT, "explain --gpu H100 --", capsys))


def test_the_command_that_was_meant(same_machine, capsys, says):
    says("did_you_mean_a_command", meant(COMMANDS_MEANT, "", capsys))


def meant(words: str, before: str, capsys: Any) -> str:
    """A line for each word: what is said of ``attnsel``, ``before`` and the word."""
    told = []
    for word in words.split():
        code = main(f"{before}{word}".split())
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        told.append(f"attnsel {before}{word}: {err}")
    return "".join(told)


def test_the_field_that_was_meant(same_machine, says):
    told = []
    for word in FIELDS_MEANT.split():
        with pytest.raises(InvalidInput) as caught:
            AttentionParams(**{word: 1})
        told.append(f"AttentionParams({word}=1): {caught.value}\n")
    says("did_you_mean_a_field", "".join(told))


@pytest.mark.parametrize("name", RAISES)
def test_a_mistake_in_python(name, same_machine, says):
    says(name, raised(RAISES[name]))


def raised(lines: str) -> str:
    """Each line evaluated, with the error that it raises below it."""
    names = {"attnsel": attnsel, "H100": Environment.describe("H100", torch="2.9.1"), "select": select}
    names |= {kind.__name__: kind for kind in (AttentionParams, Environment, Policy)}
    told = []
    for line in map(str.strip, lines.strip().splitlines()):
        with pytest.raises((InvalidInput, TypeError, KeyError)) as caught:
            eval(line, names)
        told.append(f">>> {line}\n{caught.type.__name__}: {caught.value}\n")
    return "\n".join(told)


# ---- variables of the environment --------------------------------------------------------------------


def test_mistakes_in_variables(at_a_prompt, says, monkeypatch):
    told = []
    for name, value in (
        ("ATTNSEL_DEBUG", "3"),
        ("ATTNSEL_BACKENDS", "cuddn"),
        ("ATTNSEL_DISABLE", "nonsense"),
        ("ATTNSEL_ADAPT", "maybe"),
        ("ATTNSEL_MEMORY_LIMIT", "lots"),
        ("ATTNSEL_DETERMINISTIC", "perhaps"),
        ("ATTNSEL_ALLOW_KNOWN_BUGS", "BUG99"),
        ("ATTNSEL_PREVIEW", "x"),
        ("ATTNSEL_DEBUG_FORMAT", "yaml"),
        ("ATTNSEL_DEBUG_RANKS", "some"),
        ("ATTNSEL_CHECK", "2"),
        ("ATTNSEL_SELFCHECK", "yes"),
    ):
        with monkeypatch.context() as only:
            only.setenv(name, value)
            for private, nothing in NOTHING_READ_YET.items():
                only.setattr(private, copy.copy(nothing))
            told.append(f"$ export {name}={value}\n" + at_a_prompt("attnsel explain --gpu H100 --short"))
    says("error_variable", "\n".join(told))


def test_a_variable_that_nothing_reads(same_machine, says, monkeypatch):
    told = []
    for name in ("ATTNSEL_BACKEND", "ATTNSEL_DEUBG", "ATTNSEL_NONSENSE"):
        with monkeypatch.context() as only:
            only.setenv(name, "1")
            for private, nothing in NOTHING_READ_YET.items():
                only.setattr(private, copy.copy(nothing))
            with pytest.warns(UserWarning, match=name) as warned:
                attnsel.configure()
        told += [f"$ export {name}=1\n>>> attnsel.configure()\n"]
        told += [f"{warning.category.__name__}: {warning.message}\n\n" for warning in warned]
    says("warning_variable", "".join(told))


def test_wishes_in_variables(at_a_prompt, says, monkeypatch):
    monkeypatch.setenv("ATTNSEL_BACKENDS", "sdpa.flash,tiled")
    monkeypatch.setenv("ATTNSEL_ADAPT", "never")
    attnsel.configure()
    told = "$ export ATTNSEL_BACKENDS=sdpa.flash,tiled ATTNSEL_ADAPT=never\n"
    says("explain_wishes", told + at_a_prompt("attnsel explain --gpu H100 --head-dim 192,128"))


# ---- selections in Python ----------------------------------------------------------------------------


def test_no_backend_error_says_the_whole_report(same_machine, says):
    refused = select(
        AttentionParams(softcap=30.0, head_dim_qk=100),
        Environment.describe("H100", torch="2.9.1"),
        policy=Policy(backend="cudnn", adapt="never"),
    )
    with pytest.raises(NoBackendError) as caught:
        refused.require()
    says("no_backend_error", f"NoBackendError: {caught.value}\n")


def test_every_kind_of_way_out(same_machine, says):
    load_all()
    told, kinds = [], set()
    for code in WAYS_OUT.split():
        rule = REGISTRY.rules[code]
        policy = Policy(preview=rule.status == "preview")
        asked = select(*question(rule, rule.fires_on), policy=policy)
        told.append(f"\n{code}  {rule.title}")
        for way in asked.as_dict()["unlocks"]:
            kinds.add(way["effect"])
            told.append(f"  {way['candidate']}: {way['change']}  [{way['effect']}; rank {way['rank']}]")
            told += [f"      {line}" for line in (way["paste"] or "").splitlines()]
            told += [f"      # {line}" for line in (way["install"] or {}).get("why", ())]
    assert kinds == {"exact", "config", "install", "hardware", "risk"}
    says("ways_out", "\n".join(told).lstrip() + "\n")


# ---- rules -------------------------------------------------------------------------------------------


def test_every_reason(same_machine, says):
    """The message of each rule for its own example."""
    load_all()
    lines = []
    for _, rule in sorted(REGISTRY.rules.items()):  # not as modules are loaded: they move
        asked = question(rule, rule.fires_on)
        answer = select(*asked, policy=Policy(adapt="never", preview=rule.status == "preview"))
        messages = {
            reason.message
            for name in rule.candidates
            for reason in answer[name].reasons
            if reason.code == rule.code
        }
        assert messages, rule.code
        lines += [f"{rule.code}  {message}" for message in sorted(messages)]
    says("reasons", "\n".join(lines) + "\n")


def test_every_page(at_a_prompt, says):
    """All that ``attnsel rule CODE`` prints, without the line that names a module: modules move."""
    load_all()
    lines = at_a_prompt("\n".join(f"attnsel rule {code}" for code in sorted(REGISTRY.pages))).splitlines()
    says("rule_pages", "\n".join(line for line in lines if not line.startswith("  Written in:")) + "\n")


# ---- the doctor, of a machine that is described ------------------------------------------------------


@pytest.fixture
def described(same_machine, monkeypatch) -> Callable[..., None]:
    """``described({"torch": "2.9.1"}, answers)``: these packages are installed, and a child process gives the
    first of ``answers`` whose key stands in its program; a text is what it dies of."""

    def describe(packages: dict[str, str], answers: dict[str, Any]) -> None:
        def distributions(name: str = "", **_: Any) -> Iterator[Any]:
            for package, version in packages.items():
                if name in ("", package):
                    yield SimpleNamespace(version=version, files=(), requires=(), metadata={"Name": package})

        def run(command: list[str], **_: Any) -> Any:
            program = " ".join(command)
            said = next((said for words, said in answers.items() if words in program), {})
            if isinstance(said, str):
                return SimpleNamespace(returncode=1, stdout="", stderr=f"Traceback:\n{said}\n")
            return SimpleNamespace(returncode=0, stdout=json.dumps(said) + "\n", stderr="")

        monkeypatch.setattr(importlib.metadata, "distributions", distributions)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
        monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {})
        # nvidia-ml-py is there, so that nobody looks for a driver's files.
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *_: object() if name == "pynvml" else None
        )
        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(RELEASE_OF_DOCTOR, "1.2.3")

    return describe


def torch_on(gpu: str, **versions: str) -> dict[str, Any]:
    """What torch says of itself on a machine with this GPU."""
    cuda = versions.get("cuda")
    env = Environment.describe(gpu, **versions).replace(detected=True, assumed=())
    return {
        "version": versions["torch"],
        "cuda_build": cuda,
        "hip_build": None,
        "cuda_available": cuda is not None,
        "new_abi": True,
        "arch_list": ["sm_80", "sm_90", "sm_100"] if cuda else [],
        "devices": [env.model_dump(mode="json")],
    }


def doctor(name: str, says: Any, capsys: Any, *words: str) -> None:
    code = main(["doctor", *words])
    out, err = capsys.readouterr()
    assert not err
    says(name, f"$ attnsel doctor {' '.join(words)}".rstrip() + f"\n--- exit code {code} ---\n{out}")


HEALTHY = {
    "torch": "2.13.0",
    "triton": "3.7.1",
    "nvidia-cudnn-cu13": "9.20.0.48",
    "nvidia-cudnn-frontend": "1.28.0",
}


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_doctor_of_a_healthy_machine(form, described, says, capsys):
    env = {"torch": "2.13.0", "triton": "3.7.1", "cudnn": "9.20.0", "cuda": "13.0", "python": "3.12.3"}
    described(
        HEALTHY,
        {
            "import json, torch": torch_on("H100", **env),
            "import json, triton": {"version": "3.7.1"},
            "import json, cudnn": {"version": "1.28.0", "cudnn": 92000},
            "pynvml": {"gpus": ["NVIDIA H100 80GB HBM3"]},
        },
    )
    doctor(f"doctor_healthy_{form}", says, capsys, *(["--json"] if form == "json" else []))


def test_the_doctor_of_a_broken_machine(described, says, capsys, monkeypatch):
    monkeypatch.setenv("ATTNSEL_DEUBG", "1")
    monkeypatch.setenv("ATTNSEL_BACKENDS", "sdpa.flsh")
    described(
        {"torch": "2.13.0+cpu", "triton": "3.1.0", "flash-attn": "2.8.3", "nvidia-cudnn-cu12": "9.10.2.21"},
        {
            "flash_attn_2_cuda": "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E",
            "import json, torch": torch_on("cpu", torch="2.13.0+cpu", triton="3.1.0", python="3.12.3"),
            "import json, triton": "ImportError: libLLVM.so: cannot open shared object file",
            "pynvml": {"gpus": ["NVIDIA H100 80GB HBM3"]},
        },
    )
    doctor("doctor_broken", says, capsys)


def test_the_doctor_without_torch(described, says, capsys):
    described({}, {"pynvml": {"gpus": []}})
    doctor("doctor_without_torch", says, capsys)


# ---- files -------------------------------------------------------------------------------------------


def test_every_file_is_of_an_output():
    """syrupy tells of a file that nothing reads only where no path is given to pytest."""
    single = """
        version did_you_mean_a_flag did_you_mean_a_command did_you_mean_a_field error_variable
        warning_variable explain_wishes no_backend_error ways_out reasons rule_pages doctor_healthy_text
        doctor_healthy_json doctor_broken doctor_without_torch
    """
    assert {path.name for path in FOLDER.iterdir()} == {
        f"{name}.txt" for name in (*TYPED, *RAISES, *single.split())
    }
