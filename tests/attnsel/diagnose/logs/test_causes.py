"""Public issues of libraries: the cause that the thread ended with.

``cases/ORG-REPO-NUMBER.txt`` is what the issue shows, typed again and shortened: messages are the libraries',
and frames, times and names around them are only as long as recognising needs. ``seen`` says what was read:
the text in the thread ("thread", "text"); its title or sentence, with the rest in the form in which that
release prints it ("form"); or its facts alone ("facts"), where the thread has no text, or is a silent
fall-back. Of TransformerEngine and F.scaled_dot_product_attention the end of a thread was read for #1591,
#1821, #455, PR nari-labs/dia#45 and CompVis#850 only; elsewhere the cause is what the issue's own text says,
or what the rules say of it.
"""

# ruff: noqa: E501  what libraries print is not broken into lines

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.backends.registry import CANDIDATES
from attnsel.diagnose.logs.answer import Answer, Explained, _ways, explained
from attnsel.diagnose.logs.calls import gather
from attnsel.diagnose.logs.message import gate
from attnsel.diagnose.logs.parsers import libraries
from attnsel.diagnose.logs.question import Stated
from attnsel.rules import find_rule


class Case(NamedTuple):
    """``cause`` and ``fix``: words that the answer has. ``codes``: rules in it. ``never``: what it must not say."""

    file: str
    seen: str
    cause: tuple[str, ...]
    fix: tuple[str, ...]
    codes: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


ROWS = [
    # ---- flash_attn and its wheels
    Case("Dao-AILab-flash-attention-1638", "thread", ("no machine code",), ("FLASH_ATTN_CUDA_ARCHS",), ("FLASH203",)),
    Case("Dao-AILab-flash-attention-2168", "thread", ("FlashAttention 3 (hopper)", "no code for the GPU"), ("do without FlashAttention 3",), ("FLASH302",), ("FLASH_ATTN_CUDA_ARCHS",)),
    Case("Dao-AILab-flash-attention-1540", "thread", ("too old for a Blackwell GPU",), ("newer xformers",), ("FLASH203",), ("the GPU is older",)),
    Case("Dao-AILab-flash-attention-762", "thread", ("the GPU is older",), ('attn_implementation="sdpa"',), ("FLASH202",), ("Blackwell", "FLASH203")),
    Case("Dao-AILab-flash-attention-1832", "thread", ("another torch", "C++ ABI"), ("wheel", "--no-build-isolation")),
    Case("Dao-AILab-flash-attention-1857", "thread", ("four-dimensional mask",), ("position_ids", '"sdpa"'), (), ("one entry more",)),
    Case("Dao-AILab-flash-attention-1959", "thread", ("tensor memory", "up to 128"), ("flash-attn-4",), ("FLASH412",)),
    Case("Dao-AILab-flash-attention-2635", "thread", ("takes no aux_tensors",), ("cuDNN",), ("FLASH430",)),
    Case("facebookresearch-xformers-1267", "thread", ("2.8.0.post2 is outside",), ("newer release",)),
    Case("xorbitsai-inference-3603", "thread", ("PyTorch has no machine code",), ("CUDA 12.8",), ("INSTALL008",)),
    # ---- cuDNN
    Case("huggingface-diffusers-9704", "thread", ("PyTorch 2.5.0 tries cuDNN",), ("2.5.1", "2.4.1"), (), ("Ampere",)),
    Case("Comfy-Org-ComfyUI-10090", "thread", ("libnvrtc is not found",), ("nvidia-cuda-nvrtc",), ("INSTALL009",)),
    Case("Comfy-Org-ComfyUI-10170", "thread", ("of another CUDA",), ("one CUDA",), ("INSTALL009",)),
    Case("Comfy-Org-ComfyUI-9947", "thread", ("does not say which condition failed",), ("enable_cudnn_sdp(False)",), (), ("Ampere (compute",)),
    Case("rdancer-ComfyUI_Florence2SAM2-5", "thread", ("below cuDNN 9.0.0 lengths must be multiples of 64",), ("torch 2.4",), ("CUDNN110",)),
    # ---- vLLM
    Case("vllm-project-vllm-12656", "form", ("no kernel of head size 72",), ("not an error", "vision tower"), (), ("older than Ampere",)),
    Case("vllm-project-vllm-7254", "thread", ("vllm_flash_attn", "CUDA 11.8"), ("CUDA 12",)),
    Case("vllm-project-vllm-9922", "form", ("caps its scores",), ("FLASHINFER",), ("FLASH202",)),
    Case("vllm-project-vllm-22193", "thread", ("has head sizes [576], the model has 40",), ("VLLM_MLA_DISABLE",)),
    Case("vllm-project-vllm-28589", "form", ("FLASHINFER lacks attention sinks", "TRITON_ATTN lacks this GPU"), ("newer vLLM",)),
    Case("vllm-project-vllm-31936", "thread", ("TRITON_MLA (sparse attention) or FLASHMLA_SPARSE (this GPU)",), ("another GPU",), (), ("head size lacks",)),
    Case("vllm-project-vllm-40677", "form", ("FLASHINFER, which was asked for, lacks the head size",), ("unset",)),
    # ---- SGLang
    Case("sgl-project-sglang-35080", "thread", ("hybrid GDN models", "flashinfer"), ("--attention-backend triton",)),
    Case("sgl-project-sglang-12360", "thread", ("vision tower",), ("--mm-attention-backend",), ("FLASH302",)),
    # ---- transformers, diffusers
    Case("huggingface-transformers-28704", "thread", ("FalconForCausalLM has no FlashAttention",), ("newer",)),
    Case("huggingface-transformers-31990", "thread", ("asks for the probabilities",), ('"eager"',)),
    Case("huggingface-transformers-46960", "facts", ("the math kernel does", "4.00 GiB", "enable_gqa"), ("PR 46960", "repeated")),
    Case("huggingface-diffusers-13801", "thread", ("passes a mask", "single prompt"), ('"native"',)),
    Case("PKU-YuanGroup-Helios-140", "thread", ("no longer has the name",), ("newer diffusers", '"native"')),
    # ---- xformers
    Case("facebookresearch-xformers-1263", "thread", ("do not begin at multiples of 8",), ("multiple of 8 and pass a slice",), ("HINT008",)),
    Case("facebookresearch-xformers-1356", "thread", ("fp32, which the operator has not", "so new a GPU"), ("bf16",)),
    # ---- ComfyUI, flex_attention
    Case("Comfy-Org-ComfyUI-7352", "thread", ("64, 96 and 128",), ("nothing to repair",)),
    Case("Comfy-Org-ComfyUI-9671", "thread", ("without its sm89 kernels",), ("SageAttention wheel",)),
    Case("pytorch-pytorch-180278", "thread", ("shared memory",), ("kernel_options", "BLOCK_M")),
    Case("unslothai-unsloth-4036", "thread", ("powers of 2, and it is 72",), ("torch 2.7",)),
    Case("pytorch-pytorch-143117", "thread", ("power of 2 of query heads",), ("FORCE_USE_FLEX_ATTENTION",)),
    # ---- TransformerEngine and its users
    # A100: packed sequences and 192/128 are beyond cuDNN there.
    Case("NVIDIA-TransformerEngine-1821", "form", ("thd",), ("sm90",), ("CUDNN160", "CUDNN170", "FLASH212")),
    # cuDNN 9.10.1 is blocked, and 192/128 trains on Blackwell from 9.11 on.
    Case("NVIDIA-TransformerEngine-2285", "form", ("blocked",), ("cuDNN to ≥ 9.11.0",), ("CUDNN001", "CUDNN236")),
    # cu_seqlens_q_padded was given: gaps between sequences.
    Case("NVIDIA-TransformerEngine-2354", "form", ("gaps between packed",), ("cu_seqlens_q_padded",), ("BUG011",)),
    # The global layers of Gemma 4 have head_dim 512; the sliding ones run.
    Case("NVIDIA-TransformerEngine-3006", "form", ("512",), (), ("FLASH210", "FLASH311", "CUDNN233")),
    # Sinks came with cuDNN 9.13 (CUDNN024); how the thread ended was not read.
    Case("NVIDIA-TransformerEngine-2318", "form", ("sinks",), ("cuDNN to ≥ 9.13.0",), ("CUDNN024",)),
    # "lack of support for bprop with head dimension > 128. Please upgrade to cuDNN 9.5+"
    Case("NVIDIA-TransformerEngine-1591", "facts", ("Backward above head_dim 128",), ("cuDNN to ≥ 9.5.0",), ("CUDNN204",)),
    # gpt-oss under context parallelism: a2a only (TransformerEngine#2541).
    Case("NVIDIA-NeMo-Megatron-Bridge-2298", "text", ("a2a only",), ('cp_comm_type="a2a"',), ("CP007",)),
    Case("NVIDIA-TransformerEngine-455", "form", ("RoPE",), (".contiguous()",)),
    Case("NVIDIA-TransformerEngine-568", "text", ("falls back to unfused",), ("state the call",)),
    # attn_flash with a mask, and the memory-efficient kernel switched off by the library.
    Case("lucidrains-x-transformers-143", "text", ("leaves this kernel out",), ("enable_mem_efficient_sdp",), ("SDPA101",)),
    Case("clessig-atmorep-17", "form", ("arch is 70",), ("enable_mem_efficient_sdp",), ("SDPA103",)),
    Case("lucidrains-denoising-diffusion-pytorch-239", "form", ("dtype is fp32",), ("torch.bfloat16",), ("SDPA102",)),
    Case("mahmoodlab-TITAN-11", "text", ("of the query's type",), ("attn_mask.to(q.dtype)",), ("SDPA016",)),
    Case("nari-labs-dia-45", "text", ("different types",), ("k.to(q.dtype)",)),
    Case("CompVis-stable-diffusion-850", "text", ("Windows wheels",), ("nothing breaks",)),
    Case("pytorch-pytorch-117354", "facts", ("four dimensions",), ("unsqueeze(0)",), ("SDPA017",)),
    Case("pytorch-pytorch-139424", "form", ("expanded or strided",), (".contiguous()",)),
    Case("pytorch-torchtitan-1610", "facts", ("head_dim_v is 128",), ("pad head_dim_v",), ("SDPA104",)),
    Case("Comfy-Org-ComfyUI-15135", "facts", ("writes out the scores",), ("without SDPBackend.MATH",)),
]  # fmt: skip


def read(log: str, stated: Stated | None = None) -> Explained:
    return explained(gather(log.splitlines(keepends=True)), stated or Stated())


def answers_of(file: str) -> tuple[Answer, ...]:
    return read((Path(__file__).parent / "cases" / f"{file}.txt").read_text(encoding="utf-8")).answers


def words(answers: tuple[Answer, ...]) -> tuple[str, str, set[str]]:
    """Causes, what helps, and codes."""
    causes = [cause for answer in answers for cause in answer.causes]
    helps = [fix for answer in answers for fix in (*answer.fixes, *(way.change for way in answer.ways))]
    return "\n".join(one.text for one in causes), "\n".join(helps), {one.code for one in causes}


def answered_wrongly(case):
    said = causes, helps, codes = words(answers_of(case.file))
    wrong = [f"{case.file} has no cause {one!r}: {causes}" for one in case.cause if one not in causes]
    wrong += [f"{case.file} has no fix {one!r}: {helps}" for one in case.fix if one not in helps]
    wrong += [f"{case.file} lacks {code}: {codes}" for code in set(case.codes) - codes]
    return wrong + [f"{case.file} says {one!r}" for one in case.never if any(one in part for part in said)]


def test_the_cause_is_the_one_that_the_thread_ended_with():
    assert not [wrong for case in ROWS for wrong in answered_wrongly(case)]


def test_where_nothing_is_wrong_or_known_no_cause_is_told():
    """#3006: the global layers of Gemma 4 have head_dim 512; the sliding ones run."""
    sliding, heads = answers_of("NVIDIA-TransformerEngine-3006")
    assert (sliding.call.times, sliding.causes, heads.call.times) == (2, (), 1)
    assert {cause.code for cause in heads.causes} >= {"FLASH210", "FLASH311", "CUDNN233"}
    (outcome,) = answers_of("EvolvingLMMs-Lab-LLaVA-OneVision-2-85")  # and nothing else: how to learn more
    assert not outcome.rebuilt.described
    assert (outcome.causes, outcome.ways, outcome.against) == ((), (), ())


HEALTHY = """
INFO 04-17 20:54:12 [cuda.py:367] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER', 'TRITON_ATTN', 'FLEX_ATTENTION'].
INFO 04-17 20:54:12 [topk_topp_sampler.py:36] Using FlashInfer for top-p & top-k sampling.
INFO 04-17 20:54:30 [kv_cache_utils.py:634] GPU KV cache size: 182,304 tokens
You have loaded a model with attn_implementation="flash_attention_2"; torch_dtype=torch.bfloat16
{'loss': 1.8123, 'grad_norm': 0.91, 'learning_rate': 1.9e-05, 'epoch': 0.01}
[2026-06-15 10:00:01] Attention backend not specified. Use fa3 backend by default.
Device: cuda:0 NVIDIA GeForce RTX 4090 : cudaMallocAsync
Using pytorch attention
Traceback (most recent call last):
  File "/opt/venv/lib/python3.12/site-packages/flash_attn/flash_attn_interface.py", line 96, in _flash_attn_forward
ValueError: too many values to unpack (expected 2)
  Building wheel for flash-attn (setup.py) ... done
Successfully installed einops-0.8.1 flash-attn-2.8.3
  File "/opt/venv/lib/python3.12/site-packages/torch/optim/adamw.py", line 171, in _init_group
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total capacity of 79.11 GiB
"""


def test_a_log_without_trouble_is_not_blamed():
    found = gather(HEALTHY.splitlines(keepends=True))
    assert not [one for call in found.calls for one in call.findings if one.kind in ("error", "refusal")]
    assert not words(explained(found, Stated()).answers)[0]


ALSO = [
    ("RuntimeError: Head dim must be a multiple of 8", "no multiple of 8"),
    ("ImportError: DLL load failed while importing flash_attn_2_cuda: The specified module", "does not load"),
    ("AssertionError: (head_dim, head_dim_v)=(512, 512) is not supported on SM100/SM110. head_dim", "dimensions 512/512 on sm100"),
    ("AssertionError: Unsupported compute capability. Supported: 9.x, 10.x, 11.x, 12.x", "it has 9.x, 10.x"),
    ("cuDNN Error: [cudnn_frontend] Error: Some Condition that nobody has declared yet", "refuses the graph: Some"),
    ("cuDNN Error: SDPA FP16/BF16 forward is not supported on cuDNN 9.10.0/9.10.1 due to known bugs. Please", "known bugs"),
    ("OSError: libcudnn_graph.so.9: cannot open shared object file: No such file or directory", "piece of cuDNN"),
    ("INFO cuda.py:100] Cannot use FlashAttention-2 backend for FP8 KV cache.", "no FP8 cache"),
    ("AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use", "compiled for Ampere to Hopper"),
    ("AssertionError: GptOssForCausalLM requires 'triton' or 'trtllm_mha' attention backend, but got flashinfer", "GptOssForCausalLM runs on 'triton' or 'trtllm_mha' only"),
    ("AssertionError: NVTE_FLASH_ATTN set to 0, but expected 1 for attention backend type flash. unset", "NVTE_FLASH_ATTN=0 is set"),
    ("RuntimeError: Sage Attention backend 'sage' is not usable because of missing package or the version is " "too old. Please install `sageattention>=2.1.1`.", 'set_attention_backend("sage") needs'),
    ("ImportError: FlashAttention3 requires compute capability >= 8, but found (7, 5) with compute capability 7.x", "the GPU has 7.5"),
    ("UserWarning: flex_attention called without torch.compile() - this will use an unfused implementation", "writes out all scores"),
]  # fmt: skip


def test_a_message_alone_is_understood():
    assert not [line for line, cause in ALSO if cause not in words(read(line + "\n").answers)[0]]


def test_what_the_rest_of_the_log_says_decides():
    said = "RuntimeError: FlashAttention only supports Ampere GPUs or newer.\n"
    older, newer = "the GPU is older", "too old for a Blackwell GPU"
    unknown = words(read(said).answers)[0]
    assert older in unknown
    assert newer in unknown
    for card, right, wrong in (("Tesla T4", older, newer), ("NVIDIA GeForce RTX 5090", newer, older)):
        for log in (f"GPU 0: {card}\n{said}", f"{said}GPU 0: {card}\n"):
            causes = words(read(log).answers)[0]
            assert right in causes
            assert wrong not in causes


def test_a_library_without_code_for_the_gpu_is_not_flash_attention():
    """Unless the log names it: whatever was called holds none, and its installation is to blame."""
    log = "    out = F.scaled_dot_product_attention(q, k, v)\nRuntimeError: CUDA error: no kernel image is available for execution on the device\n"
    causes, _, codes = words(read(log).answers)
    assert "the library that was called holds no machine code" in causes
    assert "INSTALL008" in codes


def test_question_and_machine_are_rebuilt_as_far_as_the_text_goes():
    (answer,) = answers_of("NVIDIA-TransformerEngine-1821")
    p, env = answer.rebuilt.params, answer.rebuilt.environment
    assert (p.qkv_layout, p.head_dim_qk, p.head_dim_v, p.num_heads) == ("thd_thd_thd", 192, 128, 64)
    assert (env.arch, str(env.cudnn), str(env.flash_attn)) == (80, "9.8.0", "2.7.4")
    assert str(env.cudnn_frontend) == "1.11.0"  # the one inside TransformerEngine 2.3
    assert answer.rebuilt.assumed == ()
    p = answers_of("facebookresearch-xformers-1263")[0].rebuilt.params  # shapes alone
    assert (p.batch_size, p.num_heads, p.max_seqlen_q, p.head_dim_qk) == (2, 8, 498, 32)
    assert (p.dtype, p.core_attention_bias_type) == ("fp16", "post_scale_bias")
    log = "UserWarning: For dense inputs, both fused kernels require query, key and value to have the same batch_size and num_heads. Query.sizes(): [2, 32, 8192, 128], Key sizes(): [2, 8, 8192, 128], Value sizes(): [2, 8, 8192, 128] instead. To broadcast dense inputs, try using unsqueeze and expand_to"
    p = read(log).answers[0].rebuilt.params
    assert (p.batch_size, p.num_heads, p.num_gqa_groups, p.max_seqlen_q) == (2, 32, 8, 8192)
    assert p.head_dim_qk == 128
    log = "Running with config={'transformer_engine_version': '2.8.0', 'compute_capability': 'sm90',\n 'cudnn_version': '9.10.2', 'head_dim_\nqk': 64,\n 'attn_mask_type': 'causal'}\nDEBUG:x:Selected backend = FusedAttention (sub-backend 1)\n"
    (answer,) = read(log).answers  # a configuration that was folded is one question
    assert answer.call.chosen == ("cudnn",)
    assert answer.rebuilt.params.head_dim_qk == 64


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


SAID = [
    ("Flash attention requires q,k,v to have the same last dimension and to be less than or equal to 256. Got Query.size(-1): 320, Key.size(-1): 320, Value.size(-1): 320 instead.", "SDPA105"),
    ("Mem efficient attention requires last dimension of inputs to be divisible by 8. Got Query.size(-1): 59, Key.size(-1): 59, Value.size(-1): 59 instead.", "SDPA203"),
    ("Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. Got seqlen_q: 1 seqlen_k: 77. If you would like to", "SDPA106"),
    ("Flash attention currently doesn't support training with head_dim ∈ (192, 224] or (head_dim ∈ (224, 256] and dropout > 0.0) on gpu architectures in the range[sm86, sm89].Attempting to run with dropout set to: 0and head_dim: 216 on a sm 8.6 gpu.", "SDPA107"),
    ("cudnn SDPA does not support key/value sequence length 1.", "SDPA320"),
    ("90100 cuDNN version does not support droppout in SDPA (9.11 - 9.13).", "SDPA323"),
]  # fmt: skip
_HEADER = {"Flash": "Flash attention", "Mem e": "Memory efficient"}


def test_each_warning_of_a_kernel_is_a_rule() -> None:
    place = "(Triggered internally at ../aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:600.)"
    for said, code in SAID:
        header = f"{_HEADER.get(said[:5], 'cuDNN attention')} kernel not used because:"
        log = f"UserWarning: {header} {place}\nUserWarning: {said} {place}\nRuntimeError: No available kernel. Aborting execution.\n"
        (answer,) = read(log).answers
        assert code in {cause.code for cause in answer.causes}, said


def test_memory_that_runs_out_counts_below_a_frame_of_attention_only():
    frame = "    out = F.scaled_dot_product_attention(q, k, v)\n"
    ran_out = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB.\n"
    assert read(frame + ran_out).answers
    assert not read(frame + 400 * "step\n" + ran_out).answers
    source = "No dot product attention backend is available for the provided inputs."
    (answer,) = read(f'    raise ValueError("{source}")\nValueError: {source}\n').answers
    assert answer.call.times == 1, "the source line that a traceback shows and the error are one"


def test_every_message_can_be_reached_and_names_rules_that_exist() -> None:
    words = gate(libraries())
    for library in libraries():
        for message in library.messages:
            assert any(word in message.quick.lower() for word in words), message.quick
            for code in message.codes:
                find_rule(code)
            assert message.source or message.kind == "machine", message.quick
