"""What vLLM and SGLang say of the attention backend that they chose, and of those that they did not."""

from __future__ import annotations

import re
from typing import Any

from attnsel.diagnose.logs.message import Facts, FirstOf, Message, error

# ---- vLLM ----------------------------------------------------------------------------------------------
# What vLLM says of the attention backend that it chose, and of those that it did not. Read: vllm-
# project/vllm v1/attention/backend.py (0014ca6b: validate_configuration), platforms/cuda.py (002db495),
# v1/attention/backends/fa_utils.py (00bd1493), and the selector of 0.4 to 0.8 in the issues named.

_SELECTOR = "vllm/platforms/cuda.py, get_attn_backend_cls"
_OLD_SELECTOR = "vllm/attention/selector.py (0.4 to 0.8)"
_VALIDATE = "vllm/v1/attention/backend.py, validate_configuration"

CHOOSE = (
    "--attention-backend NAME (VLLM_ATTENTION_BACKEND in older releases) with one that nothing speaks "
    "against; without the flag vLLM takes the first that is valid"
)
XFORMERS = (
    "not an error: vLLM falls back to another kernel, for this layer alone. In a model of several parts it "
    "is the one with that head size, often the vision tower; the text model keeps FlashAttention"
)

_CONFIG = re.compile(r"\b(\w{4,30})(?:=|: )('[^']{0,40}'|[\w.]{1,40})")
_BACKEND = re.compile(r"(\w{3,40}): \[([^\]\n]{0,400})\]")
_WHY = {
    "head_size": ("the head size", "FLASH210"),
    "dtype": ("the type of q, k and v", "FLASH200"),
    "kv_cache_dtype": ("the type of the cache (--kv-cache-dtype)", ""),
    "block_size": ("the block size (--block-size)", ""),
    "partial multimodal token full attention": ("prefixes of images that see all (mm_prefix)", ""),
    "MLA": ("MLA", ""),
    "non-MLA": ("models without MLA", ""),
    "attention sinks": ("attention sinks", "SDPA005"),
    "sink setting": ("attention sinks", "SDPA005"),
    "sparse": ("sparse attention", ""),
    "non-sparse": ("dense attention", ""),
    "compute capability": ("this GPU", ""),
    "per-head quant scales": ("scales per head", ""),
    "non-causal attention": ("attention that is not causal", ""),
    "batch invariance": ("batch invariance", ""),
    "KV connector": ("a KV connector", ""),
}
"""vLLM's reasons without " not supported", in words, and attnsel's rule where there is one."""


def _configuration(text: str) -> dict[str, Any]:
    """Fields of AttentionParams in vLLM's AttentionSelectorConfig."""
    stated = {name: value.strip("'") for name, value in _CONFIG.findall(text)}
    params: dict[str, Any] = {}
    if stated.get("head_size", "").isdigit():
        params["head_dim_qk"] = int(stated["head_size"])
    if stated.get("use_mla") == "True" and params.get("head_dim_qk") == 576:
        params["head_dim_v"] = 512
    if "dtype" in stated:
        params["dtype"] = stated["dtype"]
    if stated.get("has_sink") == "True":
        params["softmax_type"] = "learnable"
    if params:
        params["is_training"] = False
    return params


def _words(reasons: str) -> tuple[list[str], list[str]]:
    """Reasons as words, and rules that say the same."""
    words, codes = [], []
    for reason in (one.strip(" '\"") for one in reasons.split(",")):
        short, _, rest = reason.partition(" not supported")
        word, code = _WHY.get(short, (reason, "")) if not rest.strip() else (reason, "")
        words.append("a package that does not import" if reason == "ImportError" else word)
        codes += [code] if code else []
    return list(dict.fromkeys(word for word in words if word)), codes


def _every_backend(match: re.Match[str]) -> Facts:
    by_backend = {name: _words(reasons) for name, reasons in _BACKEND.findall(match["reasons"])}
    nearest = sorted(by_backend, key=lambda name: len(by_backend[name][0]))[:2]
    said = "; ".join(f"{name} lacks {', '.join(words)}" for name, (words, _) in by_backend.items())
    return {
        "text": match[0],
        "params": _configuration(match["config"]),
        "codes": tuple(dict.fromkeys(code for _, codes in by_backend.values() for code in codes)),
        "said": said,
        "nearest": " or ".join(f"{name} ({', '.join(by_backend[name][0])})" for name in nearest),
    }


def _one_backend(match: re.Match[str]) -> Facts:
    words, codes = _words(match["reasons"])
    return {"codes": tuple(dict.fromkeys(codes)), "said": ", ".join(words)}


_REASONS = r"with (?P<config>[^{]{0,700}?)\.? ?Reasons: (?P<reasons>\{[^}]{0,3000}\})"

_VLLM_MESSAGES = (
    error(
        pattern=rf"No valid attention backend found for \w{{1,60}} {_REASONS}",
        read=_every_backend,
        known="every backend of vLLM's lacks something that this model needs: {said}. Nearest: {nearest}",
        fix="what the nearest lacks decides: another --kv-cache-dtype or --block-size is yours to choose; "
        "sinks, sparse MLA and head sizes come with the model and want a newer vLLM or another GPU",
        source=f"{_SELECTOR}; {_VALIDATE}; vllm-project/vllm#31936, #32732",
    ),
    Message(
        pattern=rf"Some attention backends are not valid for \w{{1,60}} {_REASONS}",
        read=_every_backend,
        known="backends that vLLM does not take here: {said}",
        fix="nothing to repair where another one is chosen below",
        source=f"{_SELECTOR}, at debug level; vllm-project/vllm#40153",
    ),
    error(
        pattern=r"Selected backend (?:AttentionBackendEnum\.)?(?P<backend>\w{1,60}) is not valid for this "
        r"configuration\. Reason: \[(?P<reasons>[^\]\n]{0,600})\]",
        read=_one_backend,
        known="{backend}, which was asked for, lacks {said}",
        fix="no --attention-backend (unset VLLM_ATTENTION_BACKEND): vLLM then takes the first that is "
        "valid and logs it; TRITON_ATTN has most head sizes and sinks",
        source=f"{_SELECTOR}; vllm-project/vllm#40677",
    ),
    Message(
        pattern=r"Using (?P<backend>FLASH_ATTN|FLASHINFER|TRITON_ATTN|FLEX_ATTENTION|TREE_ATTN|"
        r"\w{1,60}_MLA\w{0,60}|FLASHMLA\w{0,60}) attention backend out of potential backends: "
        r"(?P<others>\[[^\]\n]{0,300}\])",
        kind="chosen",
        source=f"{_SELECTOR} (0.11 and newer)",
    ),
    Message(
        pattern=r"Using (?:AttentionBackendEnum\.)?(?P<backend>Flash ?Attention|FlashInfer|Triton|XFormers|"
        r"FLASH_ATTN|FLASHINFER|TRITON_ATTN|Torch SDPA|ROCmFlashAttention)(?:-2)? backend",
        kind="chosen",
        source=f"{_OLD_SELECTOR}; {_SELECTOR}",
    ),
    Message(
        pattern=r"Cannot use FlashAttention(?:-2)? backend for head size (?P<head_dim_qk>\d{1,9})",
        candidates=("flash_attn.2",),
        known="vLLM's FlashAttention has no kernel of head size {head_dim_qk}",
        fix=(XFORMERS, "a newer vLLM, whose FlashAttention takes any multiple of 8 up to 256"),
        source="vllm/platforms/cuda.py:184 (0.7.1); vllm-project/vllm#12656, #16808",
    ),
    Message(
        pattern=r"Cannot use FlashAttention(?:-2)? backend for Volta and Turing",
        supposed={"gpu": "T4"},
        candidates=("flash_attn.2",),
        known="FlashAttention 2 has no code for Volta and Turing; vLLM takes another kernel",
        codes=("FLASH202",),
        fix="nothing to repair; on newer vLLM --attention-backend TRITON_ATTN or FLASHINFER on Turing",
        source=f"{_OLD_SELECTOR}",
    ),
    Message(
        pattern=r"Cannot use FlashAttention(?:-2)? backend for dtype other than",
        params={"dtype": "fp32"},
        candidates=("flash_attn.2",),
        known="FlashAttention 2 computes in fp16 and bf16",
        codes=("FLASH200", "HINT005"),
        fix="--dtype bfloat16 (half before Ampere)",
        source=f"{_OLD_SELECTOR}",
    ),
    Message(
        pattern=r"Cannot use FlashAttention(?:-2)? backend for FP8 KV cache",
        candidates=("flash_attn.2",),
        known="vLLM's FlashAttention 2 reads no FP8 cache, and its fall-back is much slower",
        fix="--attention-backend FLASHINFER (VLLM_ATTENTION_BACKEND=FLASHINFER), or --kv-cache-dtype auto",
        source=f"{_OLD_SELECTOR} (0.6 to 0.7)",
    ),
    Message(
        pattern=r"Cannot use FlashAttention(?:-2)? backend because the (?P<package>(?:vllm_)?flash_attn) "
        r"package is not found",
        candidates=("flash_attn.2",),
        known="vLLM looks for its own build, vllm_flash_attn, which is not there (it was never built for "
        "CUDA 11.8); the flash-attn package does not stand in for it",
        codes=("INSTALL005",),
        fix="a vLLM wheel for CUDA 12, which carries it; pip install vllm-flash-attn before 0.6",
        source=f"{_OLD_SELECTOR}; vllm-project/vllm#7254, #7112, #4906",
    ),
    Message(
        pattern=r"Cannot use FlashAttention(?:-2)? backend due to (?P<why>[^\n]{3,80})",
        candidates=("flash_attn.2",),
        known="vLLM leaves FlashAttention out: {why}",
        fix=CHOOSE,
        source=f"{_OLD_SELECTOR}",
    ),
    Message(
        pattern=r"Cannot use FA version (?P<version>\d) is not supported due to (?P<why>FA\d[^\n]{3,140})",
        candidates=("flash_attn.2",),
        known="vLLM has no FlashAttention for this GPU: {why}",
        codes=("FLASH202", "FLASH302"),
        fix="--attention-backend TRITON_ATTN, or FLASHINFER where the release has it for the card; in fp16 "
        "on Turing: --dtype half",
        source="vllm/v1/attention/backends/fa_utils.py, get_flash_attn_version; vllm-project/vllm#52181",
    ),
    Message(
        pattern=r"Cannot use FA version 3 on Blackwell|FA4 on Blackwell does not support "
        r"head_size=(?P<head_dim_qk>\d{1,9})",
        candidates=("flash_attn.2",),
        known="vLLM asked for a FlashAttention that Blackwell does not have and takes another version of it",
        codes=("FLASH302", "FLASH412"),
        fix="nothing to repair; --attention-backend FLASHINFER may be faster on B200",
        source="vllm/v1/attention/backends/fa_utils.py, get_flash_attn_version",
    ),
    error(
        "Sinks are only supported in FlashAttention 3",
        params={"softmax_type": "learnable"},
        known="the model has attention sinks (gpt-oss), which vLLM's FlashAttention takes in version 3 "
        "alone, on Hopper",
        fix="a newer vLLM with --attention-backend TRITON_ATTN, which has sinks before Hopper too",
        source="vllm/v1/attention/backends/flash_attn.py:419 (0.10.1); vllm-project/vllm#22331, #22714",
    ),
    error(
        pattern=r"Head size (?P<head_dim_qk>\d{1,9}) is not supported by (?P<backend>\w{1,60})\. Supported "
        r"head sizes are: (?P<sizes>\[[\d, ]{1,200}\])",
        known="{backend} has head sizes {sizes}, the model has {head_dim_qk}",
        fix="check that the model is the one meant: MLA backends have 576 only, so that another size "
        "points to a configuration (kv_lora_rank, qk_rope_head_dim) that vLLM misreads; "
        "VLLM_MLA_DISABLE=1 runs it without MLA",
        source="vllm/v1/attention/backends/*.py, validate_head_size (0.10); vllm-project/vllm#22193",
    ),
    error(
        pattern=r"XFormers does not support attention logits soft ?capping",
        supposed={"softcap": 50.0},
        known="the model caps its scores (Gemma 2), which xformers has not, and vLLM fell back to xformers",
        codes=("SDPA004",),
        fix="--attention-backend FLASHINFER or TRITON_ATTN (VLLM_ATTENTION_BACKEND=FLASHINFER); "
        "FlashAttention 2 has softcap too, on Ampere and newer",
        source="vllm/attention/backends/xformers.py (0.5 to 0.8); vllm-project/vllm#9922, #8189",
    ),
    error(
        pattern=r"Backend (?P<backend>[\w.]{1,40}) is not supported for vit attention",
        known="vLLM's vision towers do not run {backend}",
        fix="--mm-encoder-attn-backend FLASH_ATTN or TORCH_SDPA",
        source="vllm/platforms/cuda.py, get_vit_attn_backend",
    ),
    error(
        "Invalid attention backend for cuda",
        known="vLLM knows the name, but has no such backend for CUDA (TORCH_SDPA is for CPUs)",
        fix=CHOOSE,
        source="vllm/platforms/cuda.py (0.6 to 0.10); vllm-project/vllm#14320",
    ),
)


# ---- SGLang --------------------------------------------------------------------------------------------
# What SGLang says of an attention backend that was asked for and cannot be had. Read: sgl-project/sglang
# python/sglang/srt/layers/attention/attention_registry.py (00a66ebe) and vision.py; the rest from the
# issues named.

_SGLANG_MESSAGES = (
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


LIBRARIES = (
    FirstOf(
        "vLLM",
        "its backend, or the reasons against each ('No valid attention backend found')",
        _VLLM_MESSAGES,
    ),
    FirstOf("SGLang", "refusals of --attention-backend", _SGLANG_MESSAGES),
)
