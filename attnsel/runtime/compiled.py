"""Attention under torch.compile, with no graph break.

Static shapes: the choice is made while tracing, and the chosen kernel's own operators go into the graph.
Anything else (a symbolic size, the tiled kernel, a log-sum-exp) goes through one opaque operator,
``attnsel::attend``, that chooses when it runs; so twenty lengths need no more graphs than two.

Its backward, ``attnsel::attend_backward``, runs the forward again on the same kernel: what a kernel saves
differs in number and shape, and an operator's outputs may not. Dropout there comes only from candidates
that replay a seed tensor.
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import has_static_value

from attnsel.runtime.call import NO_EXTRAS, Config, Extras, config, read_config


def attend(cfg: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Any:
    """``attnsel.runtime.run.attend`` as Dynamo traces it."""
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
    need_grad = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or _others_need_grad(extras)
    )
    # Default ALiBi slopes come from a cache that a graph must not hold.
    traceable = extras is NO_EXTRAS and cfg.bias_type == "no_bias"
    if traceable and _static(q) and _static(k) and _static(v):
        name = _choose_while_tracing(cfg.text, _shape(q), _shape(k), _shape(v), need_grad)
        if name:
            return getattr(_traced, name)(q, k, v, extras)
    return opaque(cfg, q, k, v, extras, need_grad)


def opaque(cfg: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, need_grad: bool) -> Any:
    """One call of the operator that chooses when it runs; for tensors without data, their shapes."""
    seed = None
    if cfg.attention_dropout:
        # Made outside the operator, so that backward and recomputation see the same one.
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device=q.device)
    mask = extras.attention_mask
    mask_kv = None
    if isinstance(mask, (tuple, list)):
        mask, mask_kv = mask
    out, lse, max_logit = torch.ops.attnsel.attend(
        q,
        k,
        v,
        mask,
        mask_kv,
        extras.core_attention_bias,
        extras.alibi_slopes,
        extras.softmax_offset,
        extras.cu_seqlens_q,
        extras.cu_seqlens_kv,
        extras.cu_seqlens_q_padded,
        extras.cu_seqlens_kv_padded,
        extras.block_table,
        seed,
        extras.max_seqlen_q,
        extras.max_seqlen_kv,
        cfg.text,
        need_grad,
    )
    results = [out]
    if cfg.return_lse:
        results.append(lse)
    if cfg.return_max_logit:
        results.append(max_logit)
    return results[0] if len(results) == 1 else tuple(results)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t


def _others_need_grad(extras: Extras) -> bool:
    bias, offset = extras.core_attention_bias, extras.softmax_offset
    return (bias is not None and bias.requires_grad) or (offset is not None and offset.requires_grad)


# ---- static shapes ----------------------------------------------------------------------------------

# Closures that graphs were made of. Attributes, because Dynamo guards a dictionary by all of its keys.
_traced = SimpleNamespace()


def _static(t: Tensor) -> bool:
    for n in t.shape:
        if not has_static_value(n):
            return False
    return all(has_static_value(n) for n in t.stride())


def _shape(t: Tensor) -> tuple[Any, ...]:
    # Dynamo cannot trace storage_offset(): a view that starts off a 16-byte boundary is not seen here.
    return tuple(t.shape), tuple(t.stride()), t.dtype, str(t.device), t.requires_grad


@torch.compiler.assume_constant_result
def _choose_while_tracing(
    text: str, q: tuple[Any, ...], k: tuple[Any, ...], v: tuple[Any, ...], need_grad: bool
) -> str:
    """Where ``_traced`` holds the closure eager mode would run; "" when a graph cannot hold its operators.

    Runs while Dynamo traces, on fake tensors of the traced shapes: nothing is allocated.
    """
    from attnsel.backends import sdpa
    from attnsel.runtime.adapted import STEPS
    from attnsel.runtime.run import prepare

    cfg = read_config(text)
    if cfg.return_lse or cfg.return_max_logit:
        return ""
    with torch.set_grad_enabled(need_grad), FakeTensorMode():
        bound = prepare(cfg, *(_empty(*shape) for shape in (q, k, v)))
    chosen = bound.selection.backend
    if chosen not in sdpa.KERNELS or any(a.name in STEPS for a in bound.selection[chosen].adaptations):
        return ""  # steps hold whole questions, which Dynamo would guard field by field
    name = f"run_{hashlib.sha256(repr((text, q, k, v, need_grad)).encode()).hexdigest()}"
    setattr(_traced, name, bound.run)
    return name


def _empty(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str, requires_grad: bool
) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).requires_grad_(requires_grad)


# ---- the opaque operator ----------------------------------------------------------------------------


class _Call(NamedTuple):
    """The operator's arguments, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    mask_kv: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    softmax_offset: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    block_table: Tensor | None
    seed: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    config: str
    need_grad: bool

    def config_for(self, **changes: Any) -> Config:
        """The call's Config with everything returned that the operator returns."""
        cfg = read_config(self.config)
        given = {name: getattr(cfg, name) for name in Config.__slots__ if name != "text"}
        training = cfg.is_training or self.need_grad
        return config(**{**given, "replayable": True, "is_training": training, **changes})

    def extras(self) -> Extras:
        mask: Any = self.mask if self.mask_kv is None else (self.mask, self.mask_kv)
        extras = Extras(
            mask,
            self.bias,
            self.alibi_slopes,
            self.softmax_offset,
            self.cu_seqlens_q,
            self.cu_seqlens_kv,
            self.cu_seqlens_q_padded,
            self.cu_seqlens_kv_padded,
            self.max_seqlen_q,
            self.max_seqlen_kv,
            self.block_table,
            self.seed,
        )
        return NO_EXTRAS if all(extra is None for extra in extras) else extras


@torch.library.custom_op("attnsel::attend", mutates_args=())
def _attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_kv: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softmax_offset: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    block_table: Tensor | None,
    seed: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    config: str,
    need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call(
        q, k, v, mask, mask_kv, bias, alibi_slopes, softmax_offset, cu_seqlens_q, cu_seqlens_kv,
        cu_seqlens_q_padded, cu_seqlens_kv_padded, block_table, seed, max_seqlen_q, max_seqlen_kv, config,
        need_grad,
    )  # fmt: skip
    return _forward(call)


def _forward(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logit); the last two are empty unless the config asks for them."""
    from attnsel.runtime.run import attend

    cfg = call.config_for()
    results = attend(cfg, call.q, call.k, call.v, call.extras())
    parts = list(results) if isinstance(results, tuple) else [results]
    out = parts.pop(0)
    lse = parts.pop(0) if cfg.return_lse else call.q.new_empty(0, dtype=torch.float32)
    max_logit = parts.pop(0) if cfg.return_max_logit else call.q.new_empty(0, dtype=torch.float32)
    return out.contiguous(), lse.contiguous(), max_logit


def _shapes(call: _Call) -> tuple[Any, Any, Any, torch.dtype]:
    """Shapes of out, lse and max_logit, and the type of the last two."""
    cfg = read_config(call.config)
    q, e = call.q, call.v.shape[-1]
    b, s, h = _axes(cfg.qkv_format, q)
    out = (*q.shape[:-2], h * e) if cfg.flatten_heads else (*q.shape[:-1], e)
    lse: Any = (h, q.shape[0]) if cfg.qkv_format == "thd" else (b, h, s)
    wide = torch.promote_types(q.dtype, torch.float32)
    asked = cfg.return_lse or cfg.return_max_logit
    return (
        out,
        lse if cfg.return_lse else (0,),
        (h,) if cfg.return_max_logit else (0,),
        wide if asked else torch.float32,
    )


def _axes(qkv_format: str, q: Tensor) -> tuple[Any, Any, Any]:
    if qkv_format == "thd":
        return 1, q.shape[0], q.shape[1]
    b, s, h = {"bshd": (0, 1, 2), "sbhd": (1, 0, 2), "bhsd": (0, 2, 1)}[qkv_format]
    return q.shape[b], q.shape[s], q.shape[h]


@_attend_op.register_fake
def _attend_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call(*arguments)
    out, lse, max_logit, dtype = _shapes(call)
    q = call.q
    return q.new_empty(out), q.new_empty(lse, dtype=dtype), q.new_empty(max_logit, dtype=dtype)


@torch.library.custom_op("attnsel::attend_backward", mutates_args=())
def _backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_kv: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softmax_offset: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    block_table: Tensor | None,
    seed: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    config: str,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _Call(
        q, k, v, mask, mask_kv, bias, alibi_slopes, softmax_offset, cu_seqlens_q, cu_seqlens_kv,
        cu_seqlens_q_padded, cu_seqlens_kv_padded, block_table, seed, max_seqlen_q, max_seqlen_kv, config,
        True,
    )  # fmt: skip
    return _backward(call, dout, bias_grad)


def _backward(call: _Call, dout: Tensor, bias_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias and softmax_offset; empty where there is none."""
    from attnsel.runtime.run import recompute_gradients

    cfg = call.config_for(return_lse=False, return_max_logit=False)
    extras = call.extras()
    if call.bias is not None:  # inside an operator tensors have lost their requires_grad
        extras = extras._replace(core_attention_bias=call.bias.detach().requires_grad_(bias_grad))
    grads = recompute_gradients(cfg, call.q, call.k, call.v, extras, dout)
    # One empty tensor for each: an operator's outputs may not be the same tensor.
    dbias = grads.bias if bias_grad and grads.bias is not None else call.q.new_empty(0)
    doffset = call.q.new_empty(0)
    if call.softmax_offset is not None and grads.softmax_offset is not None:
        doffset = grads.softmax_offset.reshape(call.softmax_offset.shape)
    return (
        grads.q.contiguous(),
        grads.k.contiguous(),
        grads.v.contiguous(),
        dbias.contiguous(),
        doffset.contiguous(),
    )


@_backward_op.register_fake
def _backward_fake(dout: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    call, bias_grad = _Call._make((*rest[:-1], True)), rest[-1]
    dbias = call.bias if call.bias is not None and bias_grad else None
    return tuple(
        call.q.new_empty(0) if t is None else t.new_empty(t.shape)
        for t in (call.q, call.k, call.v, dbias, call.softmax_offset)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    call = _Call(*inputs)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call[:14])
    ctx.plain = call[14:17]
    ctx.bias_grad = call.bias is not None and ctx.needs_input_grad[5]


def _autograd(ctx: Any, dout: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    none = (None,) * len(_Call._fields)
    if dout is None:
        return none
    call = _Call._make((*ctx.saved_tensors, *ctx.plain, True))
    dq, dk, dv, dbias, doffset = torch.ops.attnsel.attend_backward(dout, *call[:-1], ctx.bias_grad)
    return (
        dq,
        dk,
        dv,
        None,
        None,
        dbias if ctx.bias_grad else None,
        None,
        doffset if call.softmax_offset is not None else None,
        *none[8:],
    )


_attend_op.register_autograd(_autograd, setup_context=_setup_context)
