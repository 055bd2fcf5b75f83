"""What ``F.scaled_dot_product_attention`` protects and a direct call of its kernels does not.

``check_call`` raises ValueError with every guard a call breaks. What happens without a guard was measured on
CPU with torch 2.13.0 (tests/backends/sdpa/test_guards.py repeats it, crashes in a child process); for CUDA it
is read in PyTorch's source, not run. "fused": flash, efficient and cuDNN; "CUDA": those three on cuda.

    =================  ===========  ====================================  ====================================
    guard              kernels      refused                               without it
    =================  ===========  ====================================  ====================================
    tensors            all          what ``checks.check_tensors`` does:
                                    q, k, v not 4-D                       flash raises; math runs another
                                                                          problem (3-D, 5-D)
                                    nested or sparse tensors              raises, late and unclear
                                    tensors on different devices          flash CPU reads foreign memory:
                                                                          garbage (F.sdpa too, for masks)
                                    dtypes differ                         flash CPU raises; math takes q fp32
                                                                          beside k, v bf16 silently
                                    batch sizes differ                    flash CPU reads out of bounds:
                                                                          garbage
                                    k and v have different s_kv           flash CPU reads out of bounds:
                                                                          garbage (F.sdpa on CPU too)
                                    k and v head counts differ or do not  flash CPU: h 4 over 3 or k 2, v 1:
                                    divide h                              garbage; h 2 under 4 kills the
                                                                          process (SIGFPE)
                                    d of q and k differ; d or e of 0      raises; math takes 0
                                    attn_mask not bool; bias not          math adds a bool mask as 0 and 1:
                                    floating                              wrong numbers; flash CPU raises
                                    attn_mask or bias not broadcastable   flash CPU ignores an empty mask;
                                    to [b, h, s_q, s_kv]                  otherwise raises
                                    seqlens_* not int [b]; alibi_slopes   wrong entries masked
                                    not [h] or [b, h]
                                    softmax_scale not finite              flash CPU turns NaN into numbers
    dtype              all          not the kernel's: flash CPU and math  raises
                                    fp16 bf16 fp32 fp64; efficient fp16
                                    bf16 fp32; flash CUDA and cuDNN fp16
                                    bf16
    equal_heads        efficient    k and v have fewer heads than q       raises before torch 2.14
    head_dim           flash        e != d                                raises
    empty              fused        a size of 0 anywhere                  flash CPU: s_q, s_kv or h of 0 kills
                                                                          the process (SIGFPE)
    last_stride        fused        stride(-1) != 1; d = e = 1 waived on  flash CPU: garbage, no error; CUDA:
                                    flash and cuDNN                       raises
    result_rows        flash        strides of q that tie at 1 where q    the result, laid out as q, is not
                                    overlaps or is expanded               written in rows: garbage, no error
                                                                          (F.sdpa too)
    alignment          CUDA         address or a stride not a multiple    misaligned address: the CUDA context
                                    of 16 bytes                           is lost; efficient raises
    head_dim_multiple  CUDA         d or e not a multiple of 16 bytes     raises or misaligned address
    head_dim_max       flash CUDA   d > 256                               raises
    kv_single          cuDNN        s_kv = 1; s_q = 1 with dropout        the plan does not build
    grid               cuDNN        b or h above 65535                    the launch fails
    mask_grad          all          under need_grad: bias requires a      flash CPU raises in the call, cuDNN
                                    gradient on flash or cuDNN;           gives none
                                    alibi_slopes requires one
    dropout            flash CPU    dropout_p > 0                         raises
    dropout_range      all          dropout_p below 0 or above 1; fused:  flash CUDA and efficient divide by 0
                                    1
    dropout_seed       all          dropout_seed or dropout_offset given  ignored: the op draws its own
    need_grad          all          a tensor requires a gradient in grad  efficient and cuDNN compute no lse:
                                    mode while need_grad is False         garbage gradients
    deterministic      CUDA         deterministic and need_grad: cuDNN    atomics reorder sums
                                    always; flash and efficient unless
                                    torch's deterministic algorithms are
                                    on
    expressible        all          packed, softcap, sinks, max_logit;    dropped silently
                                    math: need_lse
    (plan)             flash CUDA   anything that needs a mask: window,   no argument to pass it by
                                    seqlens_kv, attn_mask, bias, ALiBi,
                                    causal off the bottom-right corner
    =================  ===========  ====================================  ====================================

Not guards. The direct ops ignore autocast: the runtime casts (``ops`` shields math's inner products).
Expanded (stride 0) and overlapping inputs beyond ``result_rows``, storage offsets, strides beyond 2**31
bytes, fp16 and fp64 give F.sdpa's numbers on flash CPU, and math takes every shape without rows. Alignment
depends on the address, which shapes and strides do not tell: a cache of bound calls keys on
``data_ptr() % 16`` too. NaN in keys that ``attn_mask``
or a causal mask hides reaches the output, as in F.sdpa; padded rows are zeroed (``masks.without_padding``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnsel.backends.checks import ALIGNMENT, check_tensors, misalignment
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.sdpa.ops import CUDNN, EFFICIENT, FLASH_CPU, FLASH_CUDA, MATH, VARLEN
from attnsel.backends.sdpa.plan import Traits

# --------------------------------------------------------------------------------------------------------
# The guards that ``guards.py`` lists, one function each: None, or one line naming the argument.


_HALF = (torch.float16, torch.bfloat16)
_DTYPES = {
    FLASH_CUDA: _HALF,
    VARLEN: _HALF,
    FLASH_CPU: (*_HALF, torch.float32, torch.float64),
    EFFICIENT: (*_HALF, torch.float32),
    CUDNN: _HALF,
    MATH: (*_HALF, torch.float32, torch.float64),
}

Guard = Callable[[Traits, Spec, Inputs], "str | None"]


def expressible(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    if spec.packed or inputs.cu_seqlens_q is not None or inputs.cu_seqlens_kv is not None:
        return "packed (thd) sequences are not expressible"
    if spec.softcap:
        return f"softcap={spec.softcap} is not expressible"
    if spec.softmax_type != "vanilla" or inputs.softmax_offset is not None:
        return f"softmax_type={spec.softmax_type!r} is not expressible"
    if spec.return_max_logit:
        return "return_max_logit: no kernel gives the largest score"
    if spec.need_lse and not traits.returns_lse:
        return "need_lse: this kernel gives no log-sum-exp"
    return None


def tensors(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    try:
        check_tensors(spec, inputs)
    except ValueError as error:
        return str(error)
    return None


def dtype(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    if inputs.q.dtype in _DTYPES[traits]:
        return None
    allowed = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES[traits])
    return f"q, k and v must share one of {allowed}; got {inputs.q.dtype}"


def equal_heads(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    h, g = inputs.q.shape[1], inputs.k.shape[1]
    return None if traits.native_gqa or h == g else f"k and v must have as many heads as q, {h}; got {g}"


def head_dim(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    d, e = inputs.q.shape[3], inputs.v.shape[3]
    return f"head_dim_v {e} must equal head_dim_qk {d}" if traits.equal_head_dims and e != d else None


def empty(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    if traits is MATH:
        return None
    for name, t in zip("qkv", inputs[:3], strict=True):
        if 0 in t.shape:
            return f"{name} has a size of 0: {list(t.shape)}"
    return None


def last_stride(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    if traits is MATH or (traits is not EFFICIENT and inputs.q.shape[3] == inputs.v.shape[3] == 1):
        return None
    for name, t in zip("qkv", inputs[:3], strict=True):
        if t.stride(3) != 1:
            return f"{name}.stride(-1) must be 1; got {t.stride(3)}"
    return None


def result_rows(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    q = inputs.q
    if traits not in (FLASH_CPU, FLASH_CUDA, VARLEN) or q.shape[3] == 1 or 1 not in q.stride()[:3]:
        return None
    laid_out = q if traits is FLASH_CPU else q.transpose(1, 2)  # as the op sees it
    if torch.empty_like(laid_out, device="meta").stride(3) == 1:
        return None
    return f"q of strides {q.stride()} makes a result whose rows do not lie side by side"


def alignment(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    if traits.device != "cuda":
        return None
    for name, t in zip("qkv", inputs[:3], strict=True):
        text = misalignment(t)
        if text is not None:
            return name + text
    return None


def head_dim_multiple(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    if traits.device != "cuda":
        return None
    multiple = ALIGNMENT // inputs.q.element_size()
    d, e = inputs.q.shape[3], inputs.v.shape[3]
    return (
        f"head dims must be multiples of {multiple}; got {d}, {e}" if d % multiple or e % multiple else None
    )


def head_dim_max(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    d = inputs.q.shape[3]
    return f"head_dim must be at most 256; got {d}" if traits in (FLASH_CUDA, VARLEN) and d > 256 else None


def kv_single(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    if traits is not CUDNN:
        return None
    if inputs.k.shape[2] == 1:
        return "s_kv must be above 1"
    return "s_q must be above 1 with dropout" if inputs.q.shape[2] == 1 and spec.dropout_p else None


def grid(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    b, h = inputs.q.shape[:2]
    return f"b and h must be at most 65535; got {b}, {h}" if traits is CUDNN and max(b, h) > 65535 else None


def mask_grad(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    if not spec.need_grad:
        return None
    if inputs.bias is not None and inputs.bias.requires_grad and not traits.mask_grad:
        return "bias requires a gradient, which this kernel does not give"
    slopes = inputs.alibi_slopes
    return "alibi_slopes requires a gradient" if slopes is not None and slopes.requires_grad else None


def dropout(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    return f"dropout_p must be 0; got {spec.dropout_p}" if spec.dropout_p and not traits.dropout else None


def dropout_range(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    if 0.0 <= spec.dropout_p < 1.0 or (traits is MATH and spec.dropout_p == 1.0):
        return None
    return (
        f"dropout_p must be at least 0 and {'at most' if traits is MATH else 'below'} 1; got {spec.dropout_p}"
    )


def dropout_seed(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    given = inputs.dropout_seed is not None or inputs.dropout_offset is not None
    return "dropout_seed and dropout_offset cannot be given: the op draws its own" if given else None


def need_grad(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    if spec.need_grad or not torch.is_grad_enabled():
        return None
    wanting = [name for name, t in _tensors(inputs) if t.requires_grad]
    return f"{', '.join(wanting)} requires a gradient but need_grad is False" if wanting else None


def deterministic(traits: Traits, spec: Spec, inputs: Inputs) -> str | None:
    if not (spec.deterministic and spec.need_grad and traits.device == "cuda"):
        return None
    if traits is CUDNN:
        return "the backward is not deterministic"
    if (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        return None
    return "the backward is deterministic only under torch.use_deterministic_algorithms(True)"


GUARDS: tuple[Guard, ...] = (
    dtype,
    equal_heads,
    head_dim,
    empty,
    last_stride,
    result_rows,
    alignment,
    head_dim_multiple,
    head_dim_max,
    kv_single,
    grid,
    mask_grad,
    dropout,
    dropout_range,
    dropout_seed,
    need_grad,
    deterministic,
)


def _tensors(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    return ((n, t) for n, t in zip(inputs._fields, inputs, strict=True) if isinstance(t, Tensor))


def check_call(traits: Traits, spec: Spec, inputs: Inputs) -> None:
    """Raises ValueError with one line per broken guard."""
    broken = list(violations(traits, spec, inputs))
    if broken:
        device = traits.device or inputs.q.device.type
        raise ValueError(f"{traits.kernel} on {device}: " + "; ".join(broken))


def violations(traits: Traits, spec: Spec, inputs: Inputs) -> Iterator[str]:
    """One ``guard: message`` per broken guard. All but the first two need tensors that fit each other."""
    for guards in ((expressible,), (tensors,), GUARDS):
        broken = False
        for guard in guards:
            text = guard(traits, spec, inputs)
            if text is not None:
                broken = True
                yield f"{guard.__name__}: {text}"
        if broken:
            return
