"""What ``F.scaled_dot_product_attention`` protects and a direct call of its kernels does not.

``check`` raises ValueError with every guard a call breaks. What happens without a guard was measured on CPU
with torch 2.13.0 (tests/backends/sdpa/test_guards.py repeats it, crashes in a child process); for CUDA it is
read in PyTorch's source, not run. "fused": flash, efficient and cuDNN; "CUDA": those three on cuda.

    =================  ===========  ====================================  ====================================
    guard              kernels      refused                               without it
    =================  ===========  ====================================  ====================================
    rank               all          q, k, v not 4-D                       flash raises; math runs another
                                                                          problem (3-D, 5-D)
    layout             all          nested or sparse tensors              raises, late and unclear
    device             all          tensors on different devices          flash CPU reads foreign memory:
                                                                          garbage (F.sdpa too, for masks)
    dtype              all          dtypes differ, or not the kernel's:   flash CPU raises; math takes q fp32
                                    flash CPU and math fp16 bf16 fp32     beside k, v bf16 silently
                                    fp64; efficient fp16 bf16 fp32;
                                    flash CUDA and cuDNN fp16 bf16
    batch              all          batch sizes differ                    flash CPU reads out of bounds:
                                                                          garbage
    kv_rows            all          k and v have different s_kv           flash CPU reads out of bounds:
                                                                          garbage (F.sdpa on CPU too)
    heads              all          k and v head counts differ or do not  flash CPU: h 4 over 3 or k 2, v 1:
                                    divide h                              garbage; h 2 under 4 kills the
                                                                          process (SIGFPE)
    equal_heads        efficient    k and v have fewer heads than q       raises before torch 2.14
    head_dim           all          d of q and k differ; d or e of 0;     raises; math takes 0
                                    flash: e != d
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
    mask_dtype         all          attn_mask not bool; bias not          math adds a bool mask as 0 and 1:
                                    floating                              wrong numbers; flash CPU raises
    mask_shape         all          attn_mask or bias not broadcastable   flash CPU ignores an empty mask;
                                    to [b, h, s_q, s_kv]                  otherwise raises
    lengths            all          seqlens_* not int [b]; alibi_slopes   wrong entries masked
                                    not [h] or [b, h]
    mask_grad          all          under need_grad: bias requires a      flash CPU raises in the call, cuDNN
                                    gradient on flash or cuDNN;           gives none
                                    alibi_slopes requires one
    dropout            flash CPU    dropout_p > 0                         raises
    dropout_range      all          dropout_p below 0 or above 1; fused:  flash CUDA and efficient divide by 0
                                    1
    dropout_seed       all          dropout_seed or dropout_offset given  ignored: the op draws its own
    scale              all          softmax_scale not finite              flash CPU turns NaN into numbers
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

from collections.abc import Iterator

from torch import Tensor

from attnsel.backends.contract import Inputs, Spec

from .conditions import FIRST, GUARDS
from .ops import resolve
from .plan import Traits


def check(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    bias: Tensor | None = None,
    softmax_scale: float = 1.0,
    need_grad: bool = False,
) -> None:
    """``check_call`` for plain tensors. Raises ValueError naming every argument the kernel cannot take."""
    spec = Spec(softmax_scale=softmax_scale, dropout_p=dropout_p, need_grad=need_grad)
    check_call(resolve(kernel, q.device.type), spec, Inputs(q, k, v, attn_mask=attn_mask, bias=bias))


def check_call(traits: Traits, spec: Spec, inputs: Inputs) -> None:
    """Raises ValueError with one line per broken guard."""
    broken = list(violations(traits, spec, inputs))
    if broken:
        device = traits.device or inputs.q.device.type
        raise ValueError(f"{traits.kernel} on {device}: " + "; ".join(broken))


def violations(traits: Traits, spec: Spec, inputs: Inputs) -> Iterator[str]:
    """One ``guard: message`` per broken guard. All but the first four need 4-D tensors on one device."""
    for guards in (FIRST, GUARDS):
        broken = False
        for guard in guards:
            text = guard(traits, spec, inputs)
            if text is not None:
                broken = True
                yield f"{guard.__name__}: {text}"
        if broken:
            return
