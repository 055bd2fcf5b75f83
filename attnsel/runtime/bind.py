"""A selection turned into a closure: everything that can be decided once is decided here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends import sdpa, tiled
from attnsel.backends.contract import Grads, Inputs, Spec
from attnsel.backends.slopes import default_slopes
from attnsel.candidates import CANDIDATES
from attnsel.params import AttentionParams
from attnsel.runtime.adapted import Call, adapted
from attnsel.runtime.autograd import Attend, ContractKernel
from attnsel.runtime.call import Config, Extras
from attnsel.runtime.contents import check_contents
from attnsel.runtime.foreign import kernel_of_plugin
from attnsel.runtime.inputs import check_tensors, mask_pair
from attnsel.runtime.sizes import lengths_of
from attnsel.select import Selection
from attnsel.settings import Settings

Run = Callable[..., Any]  # (q, k, v, extras) -> what ``attend`` returns

KERNELS: dict[str, ContractKernel] = {
    "tiled": ContractKernel(tiled.forward, tiled.backward),
    **{name: ContractKernel(kernel.forward, kernel.backward) for name, kernel in sdpa.KERNELS.items()},
}
# These drop from a seed that is given to them (tiled and triton the very same entries), so a repeated call
# can drop what the first one did.
REPLAY_DROPOUT = frozenset({"tiled", "triton", "cudnn"})


# Their libraries take long to import, or are not there.
_LOADED_WHEN_CHOSEN = {"triton": "attnsel.backends.triton", "cudnn": "attnsel.backends.cudnn.run"}


class Bound(NamedTuple):
    """A closure for one call signature, the selection it carries out and the settings it was made under."""

    run: Run
    selection: Selection
    settings: Settings


class CannotPrepare(Exception):
    """The chosen kernel refuses this call when it is prepared, in these words."""


def kernel_of(name: str) -> ContractKernel:
    """The kernel behind a candidate. Raises CannotPrepare where its library does not load."""
    if name not in KERNELS:
        try:
            if CANDIDATES[name].plugin:
                KERNELS[name] = kernel_of_plugin(name)
            else:
                module = import_module(_LOADED_WHEN_CHOSEN[name])
                KERNELS[name] = ContractKernel(module.forward, module.backward, module.prepare)
        except ImportError as error:
            raise CannotPrepare(str(error)) from error
    return KERNELS[name]


def replays_dropout(name: str) -> bool:
    """Whether a candidate drops by the contract's generator: all that take the contract do."""
    return name in REPLAY_DROPOUT or bool(CANDIDATES[name].plugin)


def make_spec(config: Config, p: AttentionParams, need_grad: bool) -> Spec:
    """The kernel's view of a call."""
    left, right = p.window_size
    scale = config.softmax_scale
    return Spec(
        packed=p.qkv_format == "thd",
        softmax_scale=1.0 / math.sqrt(p.head_dim_qk) if scale is None else float(scale),
        window_left=left,
        window_right=right,
        bottom_right=bool(p.bottom_right_diagonal),
        softcap=p.softcap,
        softmax_type=p.softmax_type,
        dropout_p=p.attention_dropout,
        deterministic=p.deterministic,
        return_max_logit=p.return_max_logit,
        need_lse=p.return_lse,
        need_grad=need_grad,
    )


def bind(
    selection: Selection,
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    need_grad: bool,
    settings: Settings,
) -> Bound:
    """Prepare the chosen kernel for calls with this signature.

    Raises CannotPrepare when the kernel refuses what the rules allowed.
    """
    assert selection.backend is not None
    name, p = selection.backend, selection.params
    change = adapted(config, p, selection[name].adaptations)
    if change is None:
        return Bound(_bind(name, config, p, q, k, v, extras, need_grad, settings), selection, settings)
    looks = "padding" in config.attn_mask_type or (settings.check and extras.attention_mask is not None)

    def check(call: Call) -> None:
        if looks:  # before anything is changed: complaints speak of the caller's own arguments
            check_readable(config, *call, settings)

    asked = Call(q, k, v, extras)
    check(asked)
    run = _bind(name, change.config, change.params, *change.enter(asked)[-1], need_grad, settings)
    return Bound(change.around(run, check), selection, settings)


def _bind(
    name: str,
    config: Config,
    p: AttentionParams,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    need_grad: bool,
    settings: Settings,
) -> Run:
    """``bind`` for tensors that are as the kernel wants them."""
    spec = make_spec(config, p, need_grad)
    gather = _gather(config, spec, replays_dropout(name), settings)
    if name not in sdpa.KERNELS or config.return_lse or config.return_max_logit:
        kernel = kernel_of(name)
        if kernel.prepare is not None:
            _prove(kernel.prepare, spec, gather, q, k, v, extras)
        return _through_contract(kernel, spec, gather, config)
    example = gather(q, k, v, extras)
    try:
        call = sdpa.bind(name, spec, example)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise CannotPrepare(str(error)) from error
    finish = _finish(config, example)
    if any(other is not None for other in _others(example)):
        return _with_others(call, gather, finish)
    return _fast(config, call, finish)


def _prove(
    prepare: Callable[[Spec, Inputs], None],
    spec: Spec,
    gather: Gather,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
) -> None:
    """Forward and backward get ready before the first forward runs: later is too late for another kernel."""
    if spec.dropout_p and extras.dropout_seed is None:
        # Nothing is drawn here: checkpointing expects the first call to draw what a repeated one does.
        extras = extras._replace(dropout_seed=torch.zeros((), dtype=torch.int64, device=q.device))
    inputs = gather(q, k, v, extras)
    try:
        prepare(spec, inputs)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise CannotPrepare(str(error)) from error


# ---- ways to run ------------------------------------------------------------------------------------


def _fast(config: Config, call: Callable[..., Tensor], finish: Callable[[Tensor], Tensor]) -> Run:
    """q, k and v alone: two views, the kernel, a view back."""
    if config.qkv_format == "bshd":

        def run(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Tensor:
            return finish(call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)))

    elif config.qkv_format == "sbhd":

        def run(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Tensor:
            return finish(call(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)))

    else:

        def run(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Tensor:
            return finish(call(q, k, v))

    return run


def _others(i: Inputs) -> tuple[Tensor | None, ...]:
    """What a bound SDPA call takes besides q, k and v."""
    return i.attn_mask, i.bias, i.alibi_slopes, i.seqlens_q, i.seqlens_kv


def _with_others(call: Callable[..., Tensor], gather: Gather, finish: Callable[[Tensor], Tensor]) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Tensor:
        inputs = gather(q, k, v, extras)
        return finish(call(*inputs[:3], *_others(inputs)))

    return run


def _through_contract(kernel: ContractKernel, spec: Spec, gather: Gather, config: Config) -> Run:
    """Our own autograd around the kernel's forward and backward; the way to lse and max_logit too."""

    def run(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Any:
        inputs = gather(q, k, v, extras)
        out, lse, max_logit = Attend.apply(
            kernel, spec, inputs, inputs.q, inputs.k, inputs.v, inputs.bias, inputs.softmax_offset
        )
        results = [_finish(config, inputs)(out)]
        if config.return_lse:
            results.append(lse)
        if config.return_max_logit:
            results.append(max_logit)
        return results[0] if len(results) == 1 else tuple(results)

    return run


def bind_gradients(selection: Selection, config: Config, settings: Settings) -> Callable[..., Grads]:
    """``run(q, k, v, extras, dout)``: forward and backward of the chosen kernel in one go.

    For operators that recompute (``runtime/compiled.py``): inside one, autograd records nothing.
    """
    assert selection.backend is not None
    name, p = selection.backend, selection.params
    change = adapted(config, p, selection[name].adaptations)
    if change is None:
        return _bind_gradients(name, config, p, settings)
    return change.around_gradients(_bind_gradients(name, change.config, change.params, settings))


def _bind_gradients(
    name: str, config: Config, p: AttentionParams, settings: Settings
) -> Callable[..., Grads]:
    kernel = kernel_of(name)
    spec = make_spec(config, p, need_grad=True)
    gather = _gather(config, spec, replays_dropout(name), settings)
    to_kernel, to_caller = _TO_KERNEL[config.qkv_format], _TO_CALLER[config.qkv_format]

    def run(q: Tensor, k: Tensor, v: Tensor, extras: Extras, dout: Tensor) -> Grads:
        inputs = gather(q, k, v, extras)
        if config.flatten_heads:
            dout = dout.unflatten(-1, (p.num_heads, p.head_dim_v))
        grads = kernel.backward(spec, inputs, kernel.forward(spec, inputs), to_kernel(dout))
        dbias = grads.bias
        if dbias is not None and config.bias_type == "pre_scale_bias":
            dbias = dbias * spec.softmax_scale
        return Grads(to_caller(grads.q), to_caller(grads.k), to_caller(grads.v), dbias, grads.softmax_offset)

    return run


def contract_call(
    config: Config,
    p: AttentionParams,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    settings: Settings,
    *,
    dropout: bool,
) -> tuple[Spec, Inputs]:
    """The call as the contract states it, with nothing adapted; ``dropout`` False leaves dropout out."""
    spec = make_spec(config, p, need_grad=False)
    if not dropout:
        spec = replace(spec, dropout_p=0.0)
    return spec, _gather(config, spec, dropout, settings)(q, k, v, extras)


def to_contract(config: Config, t: Tensor) -> Tensor:
    """A tensor in the caller's format, as a view with the contract's dimensions."""
    return _TO_KERNEL[config.qkv_format](t)


# ---- tensors on their way in and out ----------------------------------------------------------------

Gather = Callable[[Tensor, Tensor, Tensor, Extras], Inputs]

_TO_KERNEL: dict[str, Callable[[Tensor], Tensor]] = {
    "bshd": lambda t: t.transpose(1, 2),
    "sbhd": lambda t: t.permute(1, 2, 0, 3),
    "bhsd": lambda t: t,
    "thd": lambda t: t,
}

_TO_CALLER: dict[str, Callable[[Tensor], Tensor]] = {
    "bshd": lambda t: t.transpose(1, 2),
    "sbhd": lambda t: t.permute(2, 0, 1, 3),
    "bhsd": lambda t: t,
    "thd": lambda t: t,
}


def _gather(config: Config, spec: Spec, own_dropout: bool, settings: Settings) -> Gather:
    """The call's tensors as the kernel takes them; contents of lengths checked where that is free."""
    to_kernel = _TO_KERNEL[config.qkv_format]
    padding = "padding" in config.attn_mask_type
    arbitrary = config.attn_mask_type == "arbitrary"
    alibi = config.bias_type == "alibi"
    pre_scale = spec.softmax_scale if config.bias_type == "pre_scale_bias" else None
    pool_to_kernel = _TO_KERNEL["bshd"]

    def gather(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Inputs:
        if padding:
            check_readable(config, q, k, v, extras, settings)
        table = extras.block_table
        kv_to_kernel = to_kernel if table is None else pool_to_kernel
        q, k, v = to_kernel(q), kv_to_kernel(k), kv_to_kernel(v)
        seqlens_q = seqlens_kv = None
        if table is not None:
            seqlens_q = None if spec.packed else _lengths_if_given(extras.cu_seqlens_q)
            seqlens_kv = _lengths_if_given(extras.cu_seqlens_kv)
        elif padding and not spec.packed:
            seqlens_q, seqlens_kv = real_lengths(extras)
        bias = extras.core_attention_bias
        if bias is not None and pre_scale is not None:
            bias = bias * pre_scale  # (x + bias) * scale = x * scale + bias * scale
        slopes = extras.alibi_slopes
        if slopes is None and alibi:
            slopes = default_slopes(q.shape[1], q.device)
        seed = offset = None
        if own_dropout and spec.dropout_p:
            # Drawn from the device's generator, so that checkpointing and manual_seed replay it.
            seed = extras.dropout_seed
            if seed is None:
                seed = torch.randint(0, 2**62, (), dtype=torch.int64, device=q.device)
            offset = torch.zeros((), dtype=torch.int64, device=q.device)
        sink = extras.softmax_offset
        return Inputs(
            q=q,
            k=k,
            v=v,
            attn_mask=extras.attention_mask if arbitrary else None,
            bias=bias,
            alibi_slopes=slopes,
            softmax_offset=None if sink is None else sink.reshape(-1),
            seqlens_q=seqlens_q,
            seqlens_kv=seqlens_kv,
            cu_seqlens_q=extras.cu_seqlens_q if spec.packed else None,
            cu_seqlens_kv=extras.cu_seqlens_kv if spec.packed and table is None else None,
            cu_seqlens_q_padded=extras.cu_seqlens_q_padded,
            cu_seqlens_kv_padded=extras.cu_seqlens_kv_padded,
            dropout_seed=seed,
            dropout_offset=offset,
            max_seqlen_q=extras.max_seqlen_q if spec.packed else None,
            max_seqlen_kv=extras.max_seqlen_kv if spec.packed or table is not None else None,
            block_table=None if table is None else table.contiguous(),
        )

    return gather


def check_readable(
    config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, settings: Settings
) -> None:
    """What length tensors and masks hold, where reading them waits for nothing or was asked for."""
    if settings.check or _readable(extras):
        check_contents(config, check_tensors(config, q, k, v, extras), q, k, extras)


def _readable(extras: Extras) -> bool:
    """Whether length tensors and padding masks lie on the CPU, where reading them waits for nothing."""
    held = [extras.cu_seqlens_q, extras.cu_seqlens_kv, extras.block_table, *mask_pair(extras)]
    return all(t is None or (t.device.type == "cpu" and type(t) is Tensor) for t in held)


def _lengths_if_given(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else lengths_of(cu_seqlens)


def real_lengths(extras: Extras) -> tuple[Tensor | None, Tensor | None]:
    """int32 [b] real rows of q and kv, on their device and without reading them back."""
    if extras.cu_seqlens_q is not None:
        lengths_q = _lengths_if_given(extras.cu_seqlens_q)
        if extras.cu_seqlens_kv is extras.cu_seqlens_q:
            return lengths_q, lengths_q
        return lengths_q, _lengths_if_given(extras.cu_seqlens_kv)
    masks = mask_pair(extras)
    lengths = [(~mask).flatten(1).sum(1, dtype=torch.int32) for mask in dict.fromkeys(masks)]
    return lengths[0], lengths[-1]


def _finish(config: Config, example: Inputs) -> Callable[[Tensor], Tensor]:
    """The kernel's output in the caller's format: [..., h, e], or [..., h * e] for modules."""
    if config.qkv_format == "thd":
        if not config.flatten_heads:
            return lambda out: out
        width = example.q.shape[1] * example.v.shape[-1]
        return lambda out: out.reshape(out.shape[0], width)
    b, h, s, _ = example.q.shape
    e = example.v.shape[-1]
    if config.qkv_format == "bshd":
        if config.flatten_heads:
            return lambda out: out.transpose(1, 2).reshape(b, s, h * e)
    elif config.qkv_format == "sbhd" and config.flatten_heads:
        return lambda out: out.permute(2, 0, 1, 3).reshape(s, b, h * e)
    return _TO_CALLER[config.qkv_format]
