"""Public issues of TransformerEngine and of F.scaled_dot_product_attention: the cause that the thread ended with.

``cases/ORG-REPO-NUMBER.txt`` is what the issue shows, typed again and shortened. ``seen`` says what was read of
the thread: its text, in which the cause stands or from which it follows ("text"); a part of it, the rest being
in the form that the release prints ("form"); or facts told of it, text and values being made up ("facts").
The end of a thread was read for #1591, #1821, #455, PR nari-labs/dia#45 and CompVis#850 only; elsewhere the
cause is what the issue's own text says, or what the rules say of it.
"""

# ruff: noqa: E501  what libraries print is not broken into lines

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.backends.registry import CANDIDATES
from attnsel.diagnose.logs.answer import Answer, _ways, explained
from attnsel.diagnose.logs.calls import gather
from attnsel.diagnose.logs.message import gate
from attnsel.diagnose.logs.parsers import libraries
from attnsel.diagnose.logs.question import Stated
from attnsel.rules import find_rule

CASES = Path(__file__).parent / "cases"


class Case(NamedTuple):
    """One call of a log: how often, which rules compute the cause, words of a cause and of what helps."""

    file: str
    count: int
    codes: tuple[str, ...]
    cause: str
    helps: str
    place: int = 0  # among the calls of the log
    seen: str = "text"


ROWS = [
    # A100: packed sequences and 192/128 are beyond cuDNN there.
    Case("NVIDIA-TransformerEngine-1821", 1, ("CUDNN160", "CUDNN170", "FLASH212"), "thd", "sm90", seen="form"),
    # cuDNN 9.10.1 is blocked, and 192/128 trains on Blackwell from 9.11 on.
    Case("NVIDIA-TransformerEngine-2285", 1, ("CUDNN001", "CUDNN236"), "blocked", "cuDNN to ≥ 9.11.0", seen="form"),
    # cu_seqlens_q_padded was given: gaps between sequences.
    Case("NVIDIA-TransformerEngine-2354", 1, ("BUG011",), "gaps between packed", "cu_seqlens_q_padded", seen="form"),
    # The global layers of Gemma 4 have head_dim 512; the sliding ones run.
    Case("NVIDIA-TransformerEngine-3006", 1, ("FLASH210", "FLASH311", "CUDNN233"), "512", "", place=1, seen="form"),
    Case("NVIDIA-TransformerEngine-3006", 2, (), "", "", seen="form"),
    # Sinks came with cuDNN 9.13 (CUDNN024); how the thread ended was not read.
    Case("NVIDIA-TransformerEngine-2318", 1, ("CUDNN024",), "sinks", "cuDNN to ≥ 9.13.0", seen="form"),
    # "lack of support for bprop with head dimension > 128. Please upgrade to cuDNN 9.5+"
    Case("NVIDIA-TransformerEngine-1591", 1, ("CUDNN204",), "Backward above head_dim 128", "cuDNN to ≥ 9.5.0", seen="facts"),
    # gpt-oss under context parallelism: a2a only (TransformerEngine#2541).
    Case("NVIDIA-NeMo-Megatron-Bridge-2298", 1, ("CP007",), "a2a only", 'cp_comm_type="a2a"'),
    # Nothing but the outcome: the answer is how to learn more.
    Case("EvolvingLMMs-Lab-LLaVA-OneVision-2-85", 1, (), "", ""),
    Case("NVIDIA-TransformerEngine-455", 1, (), "RoPE", ".contiguous()", seen="form"),
    Case("NVIDIA-TransformerEngine-568", 1, (), "falls back to unfused", "state the call"),
    # attn_flash with a mask, and the memory-efficient kernel switched off by the library.
    Case("lucidrains-x-transformers-143", 1, ("SDPA101",), "leaves this kernel out", "enable_mem_efficient_sdp"),
    Case("Dao-AILab-flash-attention-1321", 1, ("SDPA101",), "leaves this kernel out", "EFFICIENT_ATTENTION"),
    Case("clessig-atmorep-17", 1, ("SDPA103",), "arch is 70", "enable_mem_efficient_sdp", seen="form"),
    Case("lucidrains-denoising-diffusion-pytorch-239", 1, ("SDPA102",), "dtype is fp32", "torch.bfloat16", seen="form"),
    Case("mahmoodlab-TITAN-11", 1, ("SDPA016",), "of the query's type", "attn_mask.to(q.dtype)"),
    Case("Comfy-Org-ComfyUI-8118", 1, ("SDPA016",), "tensors.mask is bf16", "attn_mask.to(q.dtype)"),
    Case("nari-labs-dia-45", 1, (), "different types", "k.to(q.dtype)"),
    Case("CompVis-stable-diffusion-850", 1, (), "Windows wheels", "nothing breaks"),
    Case("pytorch-pytorch-117354", 1, ("SDPA017",), "four dimensions", "unsqueeze(0)", seen="facts"),
    Case("pytorch-pytorch-139424", 1, (), "expanded or strided", ".contiguous()", seen="form"),
    Case("pytorch-torchtitan-1610", 1, ("SDPA104",), "head_dim_v is 128", "pad head_dim_v", seen="facts"),
    Case("Comfy-Org-ComfyUI-15135", 1, (), "writes out the scores", "without SDPBackend.MATH", seen="facts"),
]  # fmt: skip


def answers(log: str) -> tuple[Answer, ...]:
    return explained(gather(log.splitlines(keepends=True)), Stated()).answers


def test_the_cause_is_the_one_that_the_thread_ended_with() -> None:
    for case in ROWS:
        answer = answers((CASES / f"{case.file}.txt").read_text(encoding="utf-8"))[case.place]
        causes = "\n".join(cause.text for cause in answer.causes)
        helps = "\n".join([*answer.fixes, *(way.change for way in answer.ways)])
        assert answer.call.times == case.count, case.file
        assert set(case.codes) <= {cause.code for cause in answer.causes}, case.file
        assert case.cause in causes, case.file
        assert case.helps in helps, case.file
        assert bool(answer.causes) == bool(case.cause), case.file


def test_four_ways_help_and_none_that_is_not_worth_showing() -> None:
    """flash_attn.2 would be installed only to come behind others."""
    p = AttentionParams(head_dim_qk=192, head_dim_v=128)
    plain = select(p, Environment.describe("H100", cudnn="9.1.0", torch="2.9.1"))
    assert "flash_attn.2" in [way.candidate for way in plain.unlocks]
    shown = [way.candidate for way in _ways(plain, list(CANDIDATES))]
    assert shown == ["cudnn", "flash_attn.3", "flash_attn.4", "sdpa.cudnn"]
    assert [way.candidate for way in _ways(plain, ["flash_attn.2", "cudnn"])] == ["cudnn"]
    denied = select(p, Environment.describe("H100", cudnn="9.1.0"), policy=Policy(deny=("flash_attn.3",)))
    assert not list(_ways(denied, ["flash_attn.3"])), "what a user's policy rules out is no way"


def test_a_log_that_says_only_the_outcome_is_answered_with_how_to_learn_more() -> None:
    (answer,) = answers((CASES / "EvolvingLMMs-Lab-LLaVA-OneVision-2-85.txt").read_text(encoding="utf-8"))
    assert not answer.rebuilt.described
    assert (answer.causes, answer.ways, answer.against) == ((), (), ())


def test_question_and_machine_are_rebuilt_as_far_as_the_text_goes() -> None:
    (answer,) = answers((CASES / "NVIDIA-TransformerEngine-1821.txt").read_text(encoding="utf-8"))
    p, env = answer.rebuilt.params, answer.rebuilt.environment
    assert (p.qkv_layout, p.head_dim_qk, p.head_dim_v, p.num_heads) == ("thd_thd_thd", 192, 128, 64)
    assert (env.arch, str(env.cudnn), str(env.flash_attn)) == (80, "9.8.0", "2.7.4")
    assert str(env.cudnn_frontend) == "1.11.0"  # the one inside TransformerEngine 2.3
    assert answer.rebuilt.assumed == ()


SAID = [
    ("Flash attention requires q,k,v to have the same last dimension and to be less than or equal to 256. Got Query.size(-1): 320, Key.size(-1): 320, Value.size(-1): 320 instead.", "SDPA105"),
    ("Mem efficient attention requires last dimension of inputs to be divisible by 8. Got Query.size(-1): 59, Key.size(-1): 59, Value.size(-1): 59 instead.", "SDPA203"),
    ("Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. Got seqlen_q: 1 seqlen_k: 77. If you would like to", "SDPA106"),
    ("Flash attention currently doesn't support training with head_dim ∈ (192, 224] or (head_dim ∈ (224, 256] and dropout > 0.0) on gpu architectures in the range[sm86, sm89].Attempting to run with dropout set to: 0and head_dim: 216 on a sm 8.6 gpu.", "SDPA107"),
    ("cuDNN MHA only supports gpu architectures in the range [sm80, sm121]. Attempting to run on a sm 7.5 gpu.", "SDPA303"),
    ("cuDNN SDPA is not deterministic.", "SDPA325"),
    ("cudnn SDPA does not support key/value sequence length 1.", "SDPA320"),
    ("90100 cuDNN version does not support droppout in SDPA (9.11 - 9.13).", "SDPA323"),
]  # fmt: skip
_HEADER = {"Flash": "Flash attention", "Mem e": "Memory efficient"}


def test_each_warning_of_a_kernel_is_a_rule() -> None:
    place = "(Triggered internally at ../aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:600.)"
    for said, code in SAID:
        header = f"{_HEADER.get(said[:5], 'cuDNN attention')} kernel not used because:"
        log = f"UserWarning: {header} {place}\nUserWarning: {said} {place}\nRuntimeError: No available kernel. Aborting execution.\n"
        (answer,) = answers(log)
        assert code in {cause.code for cause in answer.causes}, said


def test_sizes_in_a_warning_are_the_question() -> None:
    log = "UserWarning: For dense inputs, both fused kernels require query, key and value to have the same batch_size and num_heads. Query.sizes(): [2, 32, 8192, 128], Key sizes(): [2, 8, 8192, 128], Value sizes(): [2, 8, 8192, 128] instead. To broadcast dense inputs, try using unsqueeze and expand_to"
    (answer,) = answers(log)
    p = answer.rebuilt.params
    assert (p.batch_size, p.num_heads, p.num_gqa_groups, p.max_seqlen_q, p.head_dim_qk) == (
        2,
        32,
        8,
        8192,
        128,
    )


def test_memory_that_runs_out_counts_below_a_frame_of_attention_only() -> None:
    ran_out = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB.\n"
    assert not answers("  File 'optim/adamw.py', line 171, in step\n" + ran_out)
    assert answers("    out = F.scaled_dot_product_attention(q, k, v)\n" + ran_out)
    assert not answers("    out = F.scaled_dot_product_attention(q, k, v)\n" + 400 * "step\n" + ran_out)


def test_a_traceback_shows_the_source_line_and_the_error_which_are_one() -> None:
    text = "No dot product attention backend is available for the provided inputs."
    (answer,) = answers(f'    raise ValueError("{text}")\nValueError: {text}\n')
    assert answer.call.times == 1


def test_a_configuration_that_was_folded_is_one_question() -> None:
    log = "Running with config={'transformer_engine_version': '2.8.0', 'compute_capability': 'sm90',\n 'cudnn_version': '9.10.2', 'head_dim_\nqk': 64,\n 'attn_mask_type': 'causal'}\nDEBUG:x:Selected backend = FusedAttention (sub-backend 1)\n"
    (answer,) = answers(log)
    assert answer.call.chosen == ("cudnn",)
    assert answer.rebuilt.params.head_dim_qk == 64


def test_every_message_can_be_reached_and_names_rules_that_exist() -> None:
    words = gate(libraries())
    for library in libraries():
        for message in library.messages:
            assert any(word in message.quick.lower() for word in words), message.quick
            for code in message.codes:
                find_rule(code)
            assert message.source or message.kind == "machine", message.quick
