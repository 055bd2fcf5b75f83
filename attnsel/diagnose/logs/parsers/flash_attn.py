"""What flash_attn's packages say when they refuse, or do not load: FlashAttention 2, 3 (hopper) and 4 (cute);
and what CUDA says where there is no machine code for the GPU.

Read: Dao-AILab/flash-attention 2.8.4 (commit 0251105a): csrc/flash_attn/flash_api.cpp, hopper/flash_api.cpp,
flash_attn/cute/interface.py; what older releases said instead, from the issues named with it.
"""

from __future__ import annotations

from attnsel.diagnose.logs.message import FirstOf, Variant, declared, error

_API2 = "flash-attention 2.8.4, csrc/flash_attn/flash_api.cpp"

OTHER_KERNEL = (
    'another kernel: in transformers attn_implementation="sdpa", in vLLM --attention-backend TRITON_ATTN, in '
    'diffusers set_attention_backend("native"); or `attnsel run` the program, which answers flash_attn\'s '
    "calls with a kernel that runs here"
)
REBUILD = (
    "install the wheel whose name has this torch, CUDA, Python and C++ ABI (`attnsel doctor` names it), or "
    "build it against this torch: pip install flash-attn --no-build-isolation --no-cache-dir"
)
WHEEL = (
    "the released wheel whose name has this torch, CUDA, Python and C++ ABI (`attnsel doctor` names it), "
    "which needs no compiler"
)
CAST = (
    "cast q, k and v to bf16: load the model with dtype=torch.bfloat16 (torch_dtype before transformers "
    "5), or set bf16=True in the trainer and stay inside torch.autocast; norms and rotary embeddings often "
    "give fp32 back"
)
BLACKWELL_BUILD = (
    "flash-attn 2.7.3 or newer built for the card with CUDA 12.8 or newer: "
    "FLASH_ATTN_CUDA_ARCHS={build_arch} pip install flash-attn --no-build-isolation"
)
OLDER = (0, 79)
BLACKWELL = (100, 129)

_MESSAGES = (
    # ---- the GPU ------------------------------------------------------------------------------------------
    error(
        "FlashAttention only supports Ampere GPUs or newer",
        candidates=("flash_attn.2",),
        variants=(
            Variant(
                "FlashAttention has code for compute capability 8.0 (Ampere) and newer, and the GPU is older",
                OTHER_KERNEL,
                ("FLASH202",),
                archs=OLDER,
            ),
            Variant(
                "this flash-attn is too old for a Blackwell GPU: before 2.7.3 it accepts sm80 to sm90 "
                "only, and words every other card as too old",
                f"{BLACKWELL_BUILD}; where xformers brought it, a newer xformers, or do without it",
                ("FLASH203",),
                archs=BLACKWELL,
            ),
            Variant(
                "the card named here is new enough: q, k and v lie on another device of the machine (an "
                "older card beside it, the wrong CUDA_VISIBLE_DEVICES), for the check asks the device of the "
                "tensors",
                "print torch.cuda.get_device_name(q.device) before the call, and start with "
                'CUDA_VISIBLE_DEVICES on the card that is meant; meanwhile attn_implementation="sdpa" in '
                "from_pretrained, where the model's own code does not call flash_attn",
                archs=(80, 99),
                named=True,
            ),
        ),
        source=f"{_API2}:393; 2.7.2, :370; Dao-AILab/flash-attention#1540, #762, #1485",
    ),
    # ---- the call -----------------------------------------------------------------------------------------
    *declared("flash_attn", "call", CAST=CAST),
    error(
        pattern=r"This flash attention build does not support (?P<what>[\w ]{2,40})",
        variants=(
            Variant(
                "vLLM's own build of FlashAttention (vllm_flash_attn) was compiled without it: {what}",
                "a newer vLLM, or another backend: --attention-backend FLASHINFER or TRITON_ATTN "
                "(VLLM_ATTENTION_BACKEND in older releases), for a vision tower --mm-encoder-attn-backend "
                "TORCH_SDPA; where it took FlashAttention 3, VLLM_FLASH_ATTN_VERSION=2",
                seen=("vllm",),
            ),
            Variant(
                "this build of flash-attn was compiled without {what}",
                "build it without the FLASHATTENTION_DISABLE_… switches, or install the released wheel",
                unseen=("vllm",),
            ),
        ),
        source=f"{_API2}:128 to 351; flash-attention 2.8.4, hopper/flash_api.cpp:143 to 1161; "
        "vllm-project/vllm#25502, modelscope/ms-swift#6617",
    ),
    error(
        pattern=r"(?:cu_seqlens_[qk]|block_table) must have shape \([^)]{1,40}\)",
        candidates=("flash_attn.2",),
        variants=(
            Variant(
                "the mask that transformers was given is not [batch, length]: FlashAttention counts "
                "sequences with it, and a four-dimensional mask gives the wrong number",
                "a two-dimensional padding mask, or packed inputs by position_ids; "
                'attn_implementation="sdpa" or "flex_attention" where the mask is really four-dimensional',
                seen=("transformers",),
            ),
            Variant(
                "cu_seqlens has not one entry more than there are sequences",
                "cu_seqlens of batch + 1 int32 entries that begin with 0 and end with the number of tokens",
                unseen=("transformers",),
            ),
        ),
        source=f"{_API2}:24 (CHECK_SHAPE); Dao-AILab/flash-attention#1857, huggingface/transformers#39608",
    ),
    *declared(
        "flash_attn",
        "installing",
        WHEEL=WHEEL,
        REBUILD=REBUILD,
    ),
    *declared("flash_attn", "package and FlashAttention 4", REBUILD=REBUILD, OTHER_KERNEL=OTHER_KERNEL),
)

_FLASH_ATTN = FirstOf(
    "flash_attn",
    "refusals of FlashAttention 2, 3 and 4; installing and importing them, and calls of another release",
    _MESSAGES,
)

# ---- what CUDA and PyTorch say where a library holds no machine code for the GPU ----------------------
# Read: the CUDA runtime's cudaErrorNoKernelImageForDevice; torch/cuda/__init__.py, 2.0 to 2.13:
# _check_capability.

_NO_CODE = (
    *declared("flash_attn", "CUDA"),
    error(
        ("no kernel image is available for execution on the device", "cudaErrorNoKernelImageForDevice"),
        variants=(
            Variant(
                "FlashAttention 3 (hopper) is compiled for sm80 to sm90a: it has no code for the GPU",
                "do without FlashAttention 3: in xformers a build that has FlashAttention 2 for the card, "
                "or F.sdpa",
                ("FLASH302",),
                seen=("flash_attn_3",),
            ),
            Variant(
                "this build of FlashAttention holds no machine code for the GPU",
                f"{BLACKWELL_BUILD}; or {OTHER_KERNEL}",
                ("FLASH203", "FLASH204", "FLASH202"),
                seen=("flash_attn",),
            ),
            Variant(
                "the library that was called holds no machine code for the GPU",
                "a wheel of torch with code for the GPU (PyTorch's index, another CUDA); `attnsel doctor` "
                "tells",
                ("INSTALL008",),
            ),
        ),
        source="CUDA's cudaErrorNoKernelImageForDevice; flash-attention 2.8.4, setup.py:74; "
        "Dao-AILab/flash-attention#1638, #2168",
    ),
    error(
        pattern=r"with CUDA capability sm_(?P<sm>\d{2,3}) is not compatible with the current PyTorch "
        r"installation",
        read=lambda match: {"environment": {"gpu": f"sm{match['sm']}"}},
        known="this wheel of PyTorch has no machine code for the GPU",
        codes=("INSTALL008",),
        fix="torch 2.7 or newer with CUDA 12.8 (--index-url .../whl/cu128) for Blackwell; CUDA 12.6 for V100",
        source="torch/cuda/__init__.py, _check_capability (2.0 to 2.13); xorbitsai/inference#3603",
    ),
)

_CUDA = FirstOf("CUDA", "'no kernel image', 'sm_120 is not compatible'", _NO_CODE)

LIBRARIES = (_FLASH_ATTN, _CUDA)
