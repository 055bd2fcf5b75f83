"""PyTorch: what F.scaled_dot_product_attention warns of, raises, and what goes wrong inside it.

Read: aten/src/ATen/native/transformers/ of PyTorch 2.4 (cuda/sdp_utils.cpp, sdp_utils_cpp.h,
sdp_utils_cpp.cpp, attention.cpp) and cuda/sdp_utils.cpp of about 2.9; the texts of 2.0 from
lucidrains/x-transformers#143. Ends of ranges beyond these are inferred; texts of MHA.cpp, of attention.cu and
of the allocator are as issues show them. The
reasons of a kernel stand below its header ("Flash attention kernel not used because:"); Python shows each
once per line of code. Most state what they saw, from which the rules say why; the fix stands with the
message. What cuDNN itself says inside F.sdpa: ``cudnn.py``.
"""

from __future__ import annotations

import re

from attnsel.diagnose.logs.message import Facts, Library, Message, error
from attnsel.params import read_dtype

_FUSED = ("sdpa.flash", "sdpa.efficient", "sdpa.cudnn")
_CPP = "transformers/sdp_utils_cpp.h, 2.0 to 2.14"
_ATTENTION = "transformers/attention.cpp, 2.0 to 2.14"
_DIM = (
    r"Got Query\.size\(-1\): (?P<head_dim_qk>\d+),? ?, Key\.size\(-1\): \d+,? ?, "
    r"Value\.size\(-1\): (?P<head_dim_v>\d+)"
)
_SIZES = re.compile(r"\[([\d, ]+)\]")


def dtype_of(text: str) -> str | None:
    """attnsel's name for a dtype as C++ prints it ("struct c10::BFloat16", "Half", "float")."""
    name = read_dtype(text.strip().removeprefix("struct ").removeprefix("c10::").lower())
    return name if name in ("bf16", "fp16", "fp32", "fp64") else None


def _on_gpu(match: re.Match[str]) -> Facts:
    """A range that ends at sm90 was written before PyTorch 2.7."""
    return {"supposed": {"torch": "2.6.0"} if match["last"] == "90" else {}}


def _dtype(match: re.Match[str]) -> Facts:
    dtype = dtype_of(match["q"])
    return {"params": {} if dtype is None else {"dtype": dtype}}


def _mask_dtype(match: re.Match[str]) -> Facts:
    dtype, mask = dtype_of(match["q"]), dtype_of(match["mask"])
    params: dict[str, object] = {"attn_mask_type": "arbitrary"}
    params |= {} if dtype is None else {"dtype": dtype}
    if mask is not None:
        params["tensors"] = {"mask": {"shape": (1, 1, 1, 1), "stride": (1, 1, 1, 1), "dtype": mask}}
    return {"params": params}


def _shapes(match: re.Match[str]) -> Facts | None:
    """Batch, heads, lengths and head dimensions from the sizes of q, k and v, [b, h, s, d]."""
    found = [[int(n) for n in sizes.split(",")] for sizes in _SIZES.findall(match[0])[:3]]
    if len(found) < 3 or any(len(sizes) != 4 for sizes in found):
        return {}
    q, k, v = found
    params = {
        "batch_size": q[0],
        "num_heads": q[1],
        "max_seqlen_q": q[2],
        "head_dim_qk": q[3],
        "num_gqa_groups": k[1],
        "max_seqlen_kv": k[2],
        "head_dim_v": v[3],
    }
    return {"params": params}


def _not_compiled(match: re.Match[str]) -> Facts:
    """A place with backslashes is a Windows build."""
    where = match["where"] or ""
    told: dict[str, object] = {"text": "Torch was not compiled with flash attention."}
    if "\\" in where:
        told["environment"] = {"platform": "windows"}
    return told


def _header(words: str, candidate: str) -> Message:
    return Message(f"{words} not used because", rf"{words} not used because:?", candidates=(candidate,))


_HEADERS = (
    _header("Memory efficient kernel", "sdpa.efficient"),
    _header("Flash attention kernel", "sdpa.flash"),
    _header("CuDNN attention kernel", "sdpa.cudnn"),
    _header("cuDNN attention kernel", "sdpa.cudnn"),
    _header("Overrideable attention kernel", "sdpa.overrideable"),
)

_ALLOW = "with sdpa_kernel([…, SDPBackend.{0}]) or torch.backends.cuda.enable_{1}_sdp(True)"
_DISABLED = tuple(
    Message(
        f"{words} has been runtime disabled",
        candidates=(candidate,),
        known="the program itself leaves this kernel out (sdpa_kernel, sdp_kernel or enable_…_sdp(False))",
        fix=f"allow it: {_ALLOW.format(member, function)}",
        source=_CPP,
    )
    for words, candidate, member, function in (
        ("Flash attention", "sdpa.flash", "FLASH_ATTENTION", "flash"),
        ("Memory Efficient attention", "sdpa.efficient", "EFFICIENT_ATTENTION", "mem_efficient"),
        ("CuDNN attention", "sdpa.cudnn", "CUDNN_ATTENTION", "cudnn"),
        ("cuDNN attention", "sdpa.cudnn", "CUDNN_ATTENTION", "cudnn"),
    )
)

_MACHINE = (
    Message(
        pattern=r"(?:Flash attention|Mem Efficient [Aa]ttention|cuDNN MHA) only supports gpu architectures "
        r"in the range \[sm\d+, sm(?P<last>\d+)\]\. Attempting to run on a sm (?P<major>\d+)\.(?P<minor>\d+)",
        read=_on_gpu,
    ),
    Message(
        pattern=r"1?Torch was not compiled with flash attention\.?(?P<where> ?\(Triggered internally at "
        r"[^)\n]*)?",
        read=_not_compiled,
        candidates=("sdpa.flash",),
        known="this build of PyTorch has no flash kernel: Windows wheels have had none from 2.2 on, and "
        "F.sdpa goes on with another kernel, slower",
        link="pytorch/pytorch#108175",
        fix="nothing breaks: the memory-efficient kernel runs where it can. For flash use Linux or WSL, or "
        "an attention of the library on top (flash-attn's Windows wheels, xformers)",
    ),
    Message(
        pattern=r"(?:Flash|Mem Efficient) attention was not compiled for current AMD GPU architecture"
        r"(?:\. Attempting to run on architecture (?P<gpu>gfx\w+))?",
    ),
    Message(
        pattern=r"(?:Flash|Mem) Efficient attention on Current AMD GPU is still experimental",
        environment={"gpu": "rocm"},
        candidates=("sdpa.flash", "sdpa.efficient"),
        known="AOTriton's kernels for this GPU are behind a variable, and F.sdpa goes to math",
        fix="TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1",
    ),
    Message(
        pattern=r"The CuDNN backend needs to be enabled by setting[^\n]*?TORCH_CUDNN_SDPA_ENABLED=1",
        candidates=("sdpa.cudnn",),
        known="in PyTorch 2.4 the cuDNN kernel is off unless a variable is set",
        fix="TORCH_CUDNN_SDPA_ENABLED=1, or PyTorch 2.5 and newer",
        supposed={"torch": "2.4.0"},
        source="transformers/cuda/sdp_utils.cpp, 2.4",
    ),
    Message(
        pattern=r"\d* ?cuDNN version too old to use cuDNN Attention \(< v9\.0\.0\)",
        candidates=("sdpa.cudnn",),
        codes=("SDPA302",),
        supposed={"cudnn": "8.9.7"},
    ),
    Message(
        "cuDNN version does not support droppout",
        candidates=("sdpa.cudnn",),
        codes=("SDPA323",),
        supposed={"cudnn": "9.12.0", "attention_dropout": 0.1},
    ),
)

_NO_MASK = (
    "is_causal=True, or no mask, where the mask says no more than that; else let the memory-efficient "
    "kernel run: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])"
)

_CALL = (
    Message(
        "last dimension",
        r"(?:Flash|Mem efficient) attention requires (?:q,k,v to have the same last dimension"
        rf"|last dimension of inputs to be divisible by \d+)[^\n]*?{_DIM}",
    ),
    Message(
        pattern=r"Flash attention currently doesn't support training with head_dim[^\n]*?and head_dim: "
        r"(?P<head_dim_qk>\d+) on a sm (?P<major>\d+)\.(?P<minor>\d+)",
        params={"is_training": True},
        candidates=("sdpa.flash",),
    ),
    Message(
        pattern=r"does not support the is_causal flag when seqlen_q != seqlen_k\. "
        r"Got seqlen_q: (?P<max_seqlen_q>\d+) seqlen_k: (?P<max_seqlen_kv>\d+)",
        params={"attn_mask_type": "causal"},
        candidates=("sdpa.flash",),
        fix="attn_mask=torch.nn.attention.bias.causal_lower_right(seqlen_q, seqlen_k) if the last query sees "
        "every key, as in decoding with a cache",
    ),
    Message(
        "Both fused kernels do not support non-null attn_mask",
        params={"attn_mask_type": "arbitrary"},
        fix=_NO_MASK,
        source="transformers/cuda/sdp_utils.h, 2.0",
    ),
    Message(
        "Flash Attention does not support non-null attn_mask",
        params={"attn_mask_type": "arbitrary"},
        candidates=("sdpa.flash",),
        fix=_NO_MASK,
        source=_CPP,
    ),
    Message(
        pattern=r"Expected query, key and value to all be of dtype: \{[\w:, ]*\}\. Got Query dtype: "
        r"(?P<q>(?:struct )?[\w:]+), Key dtype: [\w: ]+, and Value dtype: [\w: ]+",
        read=_dtype,
        fix="q, k, v = (x.to(torch.bfloat16) for x in (q, k, v)), or torch.autocast around the call",
        source=_CPP,
    ),
    Message(
        pattern=r"query, key and value to be 4 dimensional, but got Query dim: (?P<rank>\d), Key dim: \d, "
        r"Value dim: \d",
        read=lambda match: {"params": {"tensors": {"rank": int(match["rank"])}}},
        codes=("SDPA017",),
        fix="F.scaled_dot_product_attention(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)).squeeze(0): "
        "[b, h, s, d]",
        source=_CPP,
    ),
    Message(
        pattern=r"to have the same batch_size and num_heads\.[^\n]*?Query\.sizes\(\): \[[\d, ]+\][^\n]*",
        read=_shapes,
        known="q, k and v differ in batch or heads, and this kernel repeats nothing",
        fix="k, v = (x.expand(q.shape[0], …) or x.repeat_interleave(h_q // h_kv, 1) for x in (k, v)), or "
        "enable_gqa=True (PyTorch 2.5), which the flash and cuDNN kernels take",
        source=_CPP,
    ),
    Message(
        pattern=r"require the last dimension of the input to have stride 1\.[^\n(]*",
        codes=("SDPA020",),
        fix="q, k, v = (x.contiguous() for x in (q, k, v))",
        source=_CPP,
    ),
    Message(
        "do not support zero seq_len_q or seq_len_kv",
        known="one of the tensors has no rows",
        fix="leave the call out where a sequence is empty",
        source=_CPP,
    ),
    Message(
        "fused kernels do not support non-zero dropout",
        params={"attention_dropout": 0.1},
        fix="dropout_p=0.0 outside training: F.sdpa does not look at module.eval()",
        source=_CPP,
    ),
    Message(
        "cuDNN SDPA is not deterministic",
        params={"deterministic": True},
        candidates=("sdpa.cudnn",),
        codes=("SDPA325",),
        fix="torch.use_deterministic_algorithms(False), or warn_only=True",
    ),
    Message(
        pattern=r"head_dim should be (?:a multiple of 8|no more than \d+)(?: and no more than \d+)?",
        candidates=("sdpa.cudnn",),
        known="head_dim is beyond what PyTorch lets its cuDNN kernel run on this GPU",
    ),
    Message(
        "cudnn SDPA does not support key/value sequence length 1",
        params={"max_seqlen_kv": 1},
        candidates=("sdpa.cudnn",),
        codes=("SDPA320",),
    ),
    Message(
        "Query tensor was not in cuDNN-supported",
        candidates=("sdpa.cudnn",),
        known="q, k and v do not lie in a layout that this release hands to cuDNN",
        fix="q, k, v = (x.contiguous() for x in (q, k, v))",
        source="transformers/cuda/sdp_utils.cpp, 2.4 to 2.9",
    ),
    Message(
        pattern=r"All tensors need to be on cuda device\. Got query on device: (?P<gpu>cpu)\b",
    ),
)

_RAISED = (
    error(
        pattern=r"No available kernel\.\s+Aborting execution",
        fix="let more than one kernel run: with sdpa_kernel([SDPBackend.FLASH_ATTENTION, "
        "SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])",
    ),
    error(
        "No viable backend for scaled_dot_product_attention",
        candidates=(*_FUSED, "sdpa.math"),
        known="every kernel is switched off, math too",
        fix="leave sdpa_kernel at least one kernel that can run the call",
        source=_ATTENTION,
    ),
    error(
        pattern=r"Expected attn_mask dtype to be bool(?: or float)? or to match query dtype, but got "
        r"attn_mask\.dtype: (?P<mask>(?:struct )?[\w:]+) and\s+query\.dtype: (?P<q>(?:struct )?[\w:]+)",
        read=_mask_dtype,
        candidates=(*_FUSED, "sdpa.math"),
        codes=("SDPA016",),
        fix="attn_mask=attn_mask.to(q.dtype), or .bool() for a mask of 0 and 1 (True is what may be seen)",
        source=_ATTENTION,
    ),
    error(
        pattern=r"Expected query, key, and value to have the same dtype, but got query\.dtype: "
        r"(?P<q>(?:struct )?[\w:]+) key\.dtype: [\w: ]+ and value\.dtype: [\w: ]+? instead",
        read=_dtype,
        candidates=(*_FUSED, "sdpa.math"),
        known="q, k and v have different types: often a norm or RoPE in fp32 on q and k only",
        fix="k, v = k.to(q.dtype), v.to(q.dtype)",
        source=_ATTENTION,
    ),
    error(
        "Explicit attn_mask should not be set when is_causal=True",
        candidates=(*_FUSED, "sdpa.math"),
        known="a mask and is_causal=True exclude each other",
        fix="put the causal part into the mask, or leave the mask out",
        source=_ATTENTION,
    ),
    error(
        "(*bias): last dimension must be contiguous",
        params={"attn_mask_type": "arbitrary"},
        candidates=("sdpa.efficient",),
        known="the mask's last dimension is expanded or strided, and under torch.compile nothing copies it",
        link="pytorch/pytorch#139424",
        fix="attn_mask=attn_mask.contiguous(), with its last dimension padded to a multiple of 8",
        source="transformers/cuda/attention.cu, 2.1 to 2.14",
    ),
    error(
        pattern=r"(?:RuntimeError: |Error: )Invalid backend\b",
        known="SDPBackend.OVERRIDEABLE is for devices of other makers: on CUDA it is no kernel",
        fix="leave SDPBackend.OVERRIDEABLE out of sdpa_kernel",
    ),
    error(
        pattern=r"cuDNN error: CUDNN_STATUS_\w+",
        near=True,
        candidates=("sdpa.cudnn",),
        known="cuDNN failed inside attention",
        fix="torch.backends.cuda.enable_cudnn_sdp(False) shows whether another kernel runs it",
        source="aten/src/ATen/cudnn/Exceptions.h, 2.4 to 2.14",
    ),
    error(
        pattern=r"out of memory\. Tried to allocate (?P<size>[\d.]+ [KMGT]i?B)",
        near=True,
        candidates=("sdpa.math",),
        known="F.sdpa asked for {size} at once, as the math kernel does, which writes out the scores, "
        "[b, h, s_q, s_kv]: no fused kernel took the call, and F.sdpa says nothing of it. Known reasons: "
        "enable_gqa with head_dim above 256 or unequal ones, fp32, a mask beside grouped heads",
        link="huggingface/transformers#46960",
        fix="sdpa_kernel without SDPBackend.MATH turns the silent fall-back into an error that says why. "
        "Against enable_gqa with wide or unequal heads: key/value heads repeated "
        "(k.repeat_interleave(h_q // h_kv, 1)), in transformers by a release with PR 46960",
        source="c10/cuda/CUDACachingAllocator.cpp, 2.0 to 2.14",
    ),
)

_NOTES = (
    Message(
        pattern=r"cuDNN SDPA backward got [^\n(]*",
        kind="note",
        candidates=("sdpa.cudnn",),
        known="the gradient of the output is copied before the backward",
        fix="let the gradient be contiguous: out.backward(grad.contiguous()); .sum() gives one of stride 0",
        source="native/cudnn/MHA.cpp, 2.5 to 2.14",
    ),
    Message(
        "scaled_dot_product_attention",
        r"(?:torch\.nn\.functional|\bF)\.scaled_dot_product_attention\(|"
        r"in scaled_dot_product_attention|aten::_?scaled_dot_product|File \"[^\"]*sdpa_attention[^\"]*\"",
        kind="frame",
        source="a frame of a traceback",
    ),
)

_PYTORCH = Library(
    "PyTorch",
    '"No available kernel" of F.scaled_dot_product_attention, the warnings of each kernel, what it raises, '
    "and running out of memory inside it",
    (*_HEADERS, *_DISABLED, *_MACHINE, *_CALL, *_RAISED, *_NOTES),
    candidates=_FUSED,
    dispatcher="torch",
    usual={"qkv_layout": "bhsd", "attn_mask_type": "no_mask"},
    source="transformers/cuda/sdp_utils.cpp, 2.0 to 2.14",
    ask="The warnings of each kernel stand above the first such error only: look there",
)

LIBRARIES = (_PYTORCH,)
