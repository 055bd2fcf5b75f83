"""What flash_attn's packages say when they refuse, or do not load: FlashAttention 2, 3 (hopper) and 4 (cute);
and what CUDA says where there is no machine code for the GPU.

Read: Dao-AILab/flash-attention 2.8.4 (commit 0251105a): csrc/flash_attn/flash_api.cpp, hopper/flash_api.cpp,
flash_attn/cute/interface.py; what older releases said instead, from the issues named with it.
"""

from __future__ import annotations

from attnsel.diagnose.logs.message import FirstOf, Variant, error

_API2 = "flash-attention 2.8.4, csrc/flash_attn/flash_api.cpp"
_API3 = "flash-attention 2.8.4, hopper/flash_api.cpp"
_CUTE = "flash-attention 2.8.4, flash_attn/cute/interface.py"

OTHER_KERNEL = (
    'another kernel: in transformers attn_implementation="sdpa", in vLLM --attention-backend TRITON_ATTN, in '
    'diffusers set_attention_backend("native"); or `attnsel run` the program, which answers flash_attn\'s '
    "calls with a kernel that runs here"
)
REBUILD = (
    "install the wheel whose name has this torch, CUDA, Python and C++ ABI (`attnsel doctor` names it), or "
    "build it against this torch: pip install flash-attn --no-build-isolation --no-cache-dir"
)
CAST = (
    "cast q, k and v to bf16: load the model with dtype=torch.bfloat16 (torch_dtype before transformers "
    "5), or set bf16=True in the trainer and stay inside torch.autocast; norms and rotary embeddings often "
    "give fp32 back"
)
WIDE = (
    'layers of such heads through F.sdpa: attn_implementation="sdpa" (its memory-efficient kernel has no '
    "limit), with key/value heads repeated rather than enable_gqa"
)
BLACKWELL_BUILD = (
    "flash-attn 2.7.3 or newer built for the card with CUDA 12.8 or newer: FLASH_ATTN_CUDA_ARCHS=120 pip "
    "install flash-attn --no-build-isolation"
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
        ),
        source=f"{_API2}:393; 2.7.2, :370; Dao-AILab/flash-attention#1540, #762",
    ),
    # ---- the call -----------------------------------------------------------------------------------------
    error(
        pattern=r"FlashAttention (?:forward|backward)? ?only supports head dimensions? (?:at most|up to) "
        r"(?P<limit>\d{1,9})",
        known="the head dimension is above {limit}, the most that FlashAttention has kernels for",
        codes=("FLASH210",),
        fix=WIDE,
        source=f"{_API2}:416, 868, 1310; {_API3}:780",
    ),
    error(
        pattern=r"head_?size (?:that is|should be) a multiple of (?P<limit>\d{1,9})|Head dim must be a "
        r"multiple of 8",
        known="the head dimension is no multiple of 8",
        codes=("FLASH211",),
        fix="pad q, k and v with zeros to the next multiple of 8 and keep softmax_scale of the true one",
        source=f"{_API2}:417, 867; {_API3}:855",
    ),
    error(
        pattern=r"FlashAttention (?:only|also only) supports? (?:fp16|float16)[^.]{0,60}(?:data "
        r"?types?|dtype)",
        known="q, k and v are fp32: FlashAttention computes in fp16 and bf16",
        params={"dtype": "fp32"},
        codes=("FLASH200", "HINT005"),
        fix=CAST,
        source=f"{_API2}:396; {_API3}:715",
    ),
    error(
        pattern=r"query and (?:key|value) must have the same dtype",
        known="q, k and v are of different types: a cache or a rotary embedding kept another one",
        fix=CAST,
        source=f"{_API2}:398",
    ),
    error(
        pattern=r"[Nn]umber of heads in key/value must divide number of heads in query",
        known="the number of query heads is no multiple of the number of key/value heads",
        fix="look at the order of dimensions: q, k and v are [batch, length, heads, head_dim] here",
        source=f"{_API2}:418",
    ),
    error(
        "Softcapping does not support dropout for now",
        known="softcap and dropout together: FlashAttention 2 has each, not both",
        codes=("FLASH221",),
        fix="attention_dropout=0.0, or eager attention where both are needed",
        source=f"{_API2}:420",
    ),
    error(
        "Paged KV cache block size must be divisible by 256",
        params={"kv_cache": "paged"},
        known="pages of the cache are no multiple of 256 tokens, FlashAttention 2's condition",
        codes=("FLASH222",),
        fix="a page size of 256, or FlashAttention 3 (any size) or a Triton kernel for smaller pages",
        source=f"{_API2}:613",
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
    error(
        "must have contiguous last dimension",
        known="the head dimension is not the innermost one of a tensor",
        codes=("FLASH002",),
        fix="q.contiguous(), or keep head_dim last when heads and length are swapped",
        source=f"{_API2}:403",
    ),
    error(
        pattern=r"This flash attention build does not support (?P<what>[\w ]{2,40})",
        known="this build of flash-attn was compiled without {what}",
        fix="build it without the FLASHATTENTION_DISABLE_… switches, or install the released wheel",
        source=f"{_API2}:128 to 351; {_API3}:143 to 1161",
    ),
    # ---- the package --------------------------------------------------------------------------------------
    error(
        pattern=r"flash_attn(?:_2_cuda|_3[\w.]{0,40})?[^\s:]{0,80}: undefined symbol: (?P<symbol>\w{3,200})",
        known="flash-attn was built for another torch, or for the other C++ ABI: its library asks torch "
        "for a symbol that this torch does not have",
        codes=("INSTALL005",),
        fix=REBUILD,
        source="the dynamic linker on import of flash_attn_2_cuda; Dao-AILab/flash-attention#1832, #723",
    ),
    error(
        pattern=r"No module named ['\"]?flash_attn_2_cuda|DLL load failed while importing flash_attn_2_cuda",
        known="the compiled part of flash-attn is missing or does not load",
        codes=("INSTALL005",),
        fix=REBUILD,
        source="flash_attn/flash_attn_interface.py:15 (2.8.4)",
    ),
    error(
        pattern=r"No module named ['\"]?flash_attn(?:['\"]|$)",
        known="flash-attn is not installed",
        codes=("INSTALL005",),
        fix=(REBUILD, OTHER_KERNEL),
        source="Python's import of flash_attn",
    ),
    error(
        ("Requires Flash-Attention version", "Supported flash-attn versions are"),
        r"(?:Requires Flash-Attention version|Supported flash-attn versions are) "
        r"(?P<range>[<>=][^A-Za-z]{3,60}?"
        r"(?:post\d)?)\.? (?:but got|Found flash-attn) (?P<flash_attn>\d[\w.]{0,30}\w)",
        known="flash-attn {flash_attn} is outside {range}, the range that the library allows",
        fix="flash-attn inside {range}, or a newer release of the library that says so, with a wider range",
        source="xformers/ops/fmha/flash.py:78 (0.0.30); facebookresearch/xformers#1267, "
        "NVIDIA/Megatron-LM#3984",
    ),
    # ---- FlashAttention 4 ---------------------------------------------------------------------------------
    error(
        pattern=r"\(head_dim, head_dim_v\)=\((?P<head_dim_qk>\d{1,9}), (?P<head_dim_v>\d{1,9})\) is not "
        r"supported on SM(?P<sm>\w{1,60})",
        known="FlashAttention 4 has no kernel of head dimensions {head_dim_qk}/{head_dim_v} on sm{sm}",
        codes=("FLASH411", "FLASH412"),
        fix="flash-attn 2 (up to 256), cuDNN, or the head dimensions that the message lists",
        source=f"{_CUTE}:121 to 128",
    ),
    error(
        "self.tmem_total <= SM100_TMEM_CAPACITY_COLUMNS",
        known="the head dimension does not fit the tensor memory of a Blackwell SM: this FlashAttention 4 "
        "has kernels up to 128 there",
        codes=("FLASH412",),
        fix="flash-attn-4 of 4.0.0b20 or newer, which has a kernel of its own for 256; else flash-attn 2 "
        "or cuDNN",
        source="flash_attn/cute/flash_fwd_sm100.py:132 (2.8.3); Dao-AILab/flash-attention#1959",
    ),
    error(
        pattern=r"SM100 (?:forward|backward) with head_dim=256 does not support (?P<what>[\w/ ]{3,40})",
        known="FlashAttention 4's kernel of head dimension 256 on Blackwell takes no {what}",
        params={"head_dim_qk": 256},
        codes=("FLASH430",),
        fix="the model's configuration without {what}, or flash-attn 2 or cuDNN for these layers",
        source=f"{_CUTE}:1309 to 1315, 1970, 2463 to 2469; Dao-AILab/flash-attention#2635",
    ),
    error(
        pattern=r"Unsupported compute capability\. Supported: (?P<range>[\dx., ]{3,60})",
        known="FlashAttention 4 has no such kernel for the GPU: it has {range}",
        codes=("FLASH402", "FLASH403"),
        fix="flash-attn 2, or the kernels of F.sdpa",
        source=f"{_CUTE}:681, 1385, 1854, 2677",
    ),
    error(
        "FP8 is only supported on SM100 (compute capability 10.x) for FA4",
        known="FlashAttention 4 has FP8 on datacentre Blackwell only",
        fix="FlashAttention 3 on Hopper, or bf16",
        source=f"{_CUTE}:765",
    ),
    error(
        "FA4 CuTe FP8 backward is not supported yet",
        known="FlashAttention 4 has FP8 forward only",
        fix="train in bf16, or through TransformerEngine's cuDNN attention",
        source=f"{_CUTE}:699",
    ),
    error(
        pattern=r"(?P<what>paged KV|SplitKV|Block sparsity|Paged KV|deterministic backward|mask_mod "
        r"backward|score_mod backward|Learnable sink backward)[\w ]{0,40} (?:is )?(?:not )?supported on SM "
        r"?(?P<sm>[\d. /SM]+)",
        known="FlashAttention 4 and {what} on sm{sm}: there is no such kernel",
        codes=("FLASH421", "FLASH422", "FLASH424"),
        fix="the call without it, or flash-attn 2 or cuDNN",
        source=f"{_CUTE}:1246 to 1266, 1363 to 1365, 1863, 1912 to 1915",
    ),
)

_FLASH_ATTN = FirstOf(
    "flash_attn", "refusals of FlashAttention 2, 3 and 4, and packages that do not load", _MESSAGES
)

# ---- what CUDA and PyTorch say where a library holds no machine code for the GPU ----------------------
# Read: the CUDA runtime's cudaErrorNoKernelImageForDevice; torch/cuda/__init__.py, 2.0 to 2.13:
# _check_capability.

_NO_CODE = (
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
