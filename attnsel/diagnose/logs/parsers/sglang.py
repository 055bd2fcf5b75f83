"""What SGLang says of an attention backend that was asked for and cannot be had.

Read: sgl-project/sglang python/sglang/srt/layers/attention/attention_registry.py (00a66ebe) and vision.py;
the rest from the issues named.
"""

from __future__ import annotations

from attnsel.diagnose.logs.message import FirstOf, error

_MESSAGES = (
    error(
        "FlashAttention v3 Backend requires SM>=80 and SM<=90",
        known="SGLang's fa3 is FlashAttention 3, compiled for Ampere to Hopper, and the GPU is none of them",
        codes=("FLASH301", "FLASH302"),
        fix="--attention-backend flashinfer, or triton; on B200 trtllm_mha",
        source="sglang/srt/layers/attention/attention_registry.py, create_flashattention_v3_backend",
    ),
    error(
        pattern=r"The '(?P<backend>fa3)' backend is not supported on Blackwell GPUs",
        known="FlashAttention 3 has no code for Blackwell; it is the backend of the vision tower that is "
        "meant",
        codes=("FLASH302",),
        fix="--mm-attention-backend fa4 on B200, triton_attn elsewhere; --attention-backend is for the text",
        source="sglang/srt/layers/attention/vision.py, _determine_attention_backend; "
        "sgl-project/sglang#12360",
    ),
    error(
        pattern=r"Only \{(?P<allowed>[^}\n]{3,120})\} backends are supported on (?P<gpus>[\w ]{3,30}) for "
        r"(?P<what>[\w ]{3,40})\. Got attention_backend=(?P<backend>\w{1,60})",
        known="for {what} on {gpus} SGLang has {allowed} only, and {backend} was asked for",
        fix="--attention-backend triton, or another of those listed",
        source="sglang/srt/layers/attention/attention_registry.py:391 (0.5.17); sgl-project/sglang#35080",
    ),
    error(
        pattern=r"(?P<model>\w{1,60}) requires (?P<allowed>'[\w']{1,40}(?:(?:,| or) ?'\w{1,60}'){0,9}) "
        r"attention backend, but got (?P<backend>\w{1,60})",
        known="{model} runs on {allowed} only, and {backend} was asked for",
        fix="--attention-backend with one of those, or none",
        source="sglang/srt/server_args.py, model_specific_adjustments (0.5); sgl-project/sglang#9028",
    ),
    error(
        pattern=r"Attention backend '(?P<backend>\w{1,60})' is not supported by this attention layer;? "
        r"supported backends: (?P<allowed>\[[^\]\n]{1,120}\])",
        known="one part of the model has no {backend}: it takes {allowed}. An explicit --attention-backend "
        "counts for every part, not for the transformer alone",
        fix="--component-attention-backends.NAME torch_sdpa for that part, or no --attention-backend at all",
        source="sglang/multimodal_gen/runtime/layers/attention/selector.py:188; sgl-project/sglang#35743",
    ),
    error(
        pattern=r"(?P<backend>trtllm_m[hl]a|cutlass_mla|flashmla) backend can only be used with "
        r"(?P<what>(?:non-)?MLA) models",
        known="{backend} is for {what} models, and this is none",
        fix="--attention-backend flashinfer, fa3 (Hopper) or triton",
        source="sglang/srt/layers/attention/attention_registry.py",
    ),
    error(
        "FlashAttention v4 Support is at an early stage",
        known="this SGLang runs FlashAttention 4 with MLA models alone",
        fix="a newer SGLang, or --attention-backend trtllm_mha or triton",
        source="sglang/srt/layers/attention/attention_registry.py, create_flashattention_v4_backend",
    ),
    error(
        "Cross attention is not supported in the triton attention backend",
        known="SGLang's Triton kernels have no cross attention",
        fix="--attention-backend flashinfer",
        source="sglang/srt/layers/attention/attention_registry.py, create_triton_backend",
    ),
)

LIBRARIES = (FirstOf("SGLang", "refusals of --attention-backend", _MESSAGES),)
