"""A selection turned into a closure: everything that can be decided once is decided here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.checks import default_slopes, is_transformed
from attnsel.backends.contract import Grads, Inputs, Result, Spec, Steps
from attnsel.backends.registry import CANDIDATES
from attnsel.decision import Selection
from attnsel.params import AttentionParams, default_softmax_scale
from attnsel.runtime.adaptations import Adapted, Known, RunGradients, adapted
from attnsel.runtime.call import Call, Config, Extras
from attnsel.runtime.inputs import check_contents, lengths_if_given, mask_pair, real_lengths, sizes_of
from attnsel.runtime.kernels import (
    Attend,
    AttendAgain,
    BoundSteps,
    Kernel,
    KernelCall,
    kernel_of,
    prepare_kernel,
    refusing,
)
from attnsel.settings import Settings

Run = Callable[..., Any]
Plain = Callable[[Tensor, Tensor, Tensor], Tensor]
Beside = Callable[[Tensor, Tensor, Tensor, Extras], Tensor]


class Bound(NamedTuple):
    """A closure for one call signature, the selection it carries out and the settings it was made under.

    ``run(call)`` returns what ``attend`` does. ``plain(q, k, v)`` is the same for calls without other
    tensors, ``beside(q, k, v, extras)`` for those with, where there is such a short way. ``guard``: whether
    tensors are like those it was made for (``signature.py``); ``grouped``: whether heads of q share one of k.
    """

    run: Run
    plain: Plain | None
    selection: Selection
    settings: Settings
    beside: Beside | None = None
    guard: Callable[..., bool] | None = None
    grouped: bool = False


class Binding(NamedTuple):
    """The kernel of a selection, and how the call reaches it; ``config`` and ``params`` are those of the call
    after the adaptations, which ``change`` carries out."""

    name: str
    kernel: Kernel
    config: Config
    params: AttentionParams
    spec: Spec
    gather: Callable[[Call], Inputs]
    change: Adapted | None


def binding_of(selection: Selection, call: Call, *, need_grad: bool | None = None) -> Binding:
    """Load the chosen kernel. Raises CannotPrepare where it does not load."""
    chosen = selection.chosen
    assert chosen is not None
    kernel = kernel_of(chosen.name)
    config, p = call.config, selection.params
    change = adapted(config, p, chosen.adaptations)
    if change is not None:
        config, p = change.config, change.params
    spec = make_spec(config, p, call.need_grad if need_grad is None else need_grad)
    gather = make_gather(config, spec, CANDIDATES[chosen.name].dropout != "generator")
    return Binding(chosen.name, kernel, config, p, spec, gather, change)


def make_spec(config: Config, p: AttentionParams, need_grad: bool) -> Spec:
    """The kernel's view of a call."""
    left, right = p.window_size
    scale = config.softmax_scale
    return Spec(
        packed=p.qkv_format == "thd",
        softmax_scale=default_softmax_scale(p.head_dim_qk) if scale is None else float(scale),
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


def bind(selection: Selection, call: Call, *, need_grad: bool | None = None) -> Bound:
    """Prepare the chosen kernel for calls with this signature; ``need_grad`` where the call cannot say it.

    Raises CannotPrepare when the kernel refuses what the rules allowed.
    """
    binding = binding_of(selection, call, need_grad=need_grad)
    if binding.change is None:
        run, plain, beside = _bind(binding, call)
        return Bound(run, plain, selection, call.settings, beside)
    looks = call.config.has_padding or (call.settings.check and call.extras.attention_mask is not None)
    if looks:  # before anything is changed: complaints speak of the caller's own arguments
        check_readable(call)
    run, plain, beside = _bind(binding, binding.change.enter(call)[-1])
    around = binding.change.around(run)
    short = beside if plain is None else lambda q, k, v, extras: plain(q, k, v)
    if short is not None and not looks and binding.change.drops_mask_alone:
        return Bound(around, None, selection, call.settings, _flattened(short, call.config))

    def looking(call: Call) -> Any:
        check_readable(call)
        return around(call)

    return Bound(looking if looks else around, None, selection, call.settings)


def _flattened(run: Beside, config: Config) -> Beside:
    """``run``, which gives [..., h, e], in the caller's format."""
    return (lambda *given: run(*given).flatten(-2)) if config.flatten_heads else run


def bind_gradients(selection: Selection, call: Call) -> RunGradients:
    """``run(call, dout, known)``: the chosen kernel's backward, from the output and log-sum-exp that are
    known, or (None) after its forward.

    For operators (``runtime/compiled.py``): inside one, autograd records nothing.
    """
    binding = binding_of(selection, call, need_grad=True)
    kernel, spec, config, p = binding.kernel, binding.spec, binding.config, binding.params
    inner = call if binding.change is None else binding.change.enter(call)[-1]
    prepare_kernel(kernel, spec, _example(binding, inner))

    contract = partial(_output_to_contract, config, p)

    def run(call: Call, dout: Tensor, known: Known | None = None) -> Grads:
        inputs = binding.gather(call)
        result = Result(contract(known.out), known.lse) if known else kernel.forward(spec, inputs)
        grads = kernel.backward(spec, inputs, result, contract(dout))
        dbias = grads.bias
        if dbias is not None and config.bias_type == "pre_scale_bias":
            dbias = dbias * spec.softmax_scale
        in_callers_format = {name: to_caller(config, getattr(grads, name)) for name in ("q", "k", "v")}
        return grads._replace(bias=dbias, **in_callers_format)

    return run if binding.change is None else binding.change.around_gradients(run)


def _example(binding: Binding, call: Call) -> Inputs:
    """What the kernel will get for calls like this one, with a seed that stands for any other.

    Nothing is drawn here: checkpointing expects the first call to draw what a repeated one does.
    """
    if binding.spec.dropout_p and call.extras.dropout_seed is None:
        seed = torch.zeros((), dtype=torch.int64, device=call.q.device)
        call = call._replace(extras=call.extras._replace(dropout_seed=seed))
    return binding.gather(call)


def _bind(binding: Binding, call: Call) -> tuple[Run, Plain | None, Beside | None]:
    """``bind`` for a call that is as the kernel wants it."""
    kernel, config = binding.kernel, binding.config
    example = _example(binding, call)
    op: Callable[..., Tensor] | Steps | None = None
    if kernel.bind is not None and not (config.return_lse or config.return_max_logit):
        op = refusing(kernel.bind, binding.spec, example)
    if op is None or binding.spec.packed or call.paged:
        prepare_kernel(kernel, binding.spec, example)
        return _through_contract(binding, example), None, None
    finish = _finish(config, example)
    if isinstance(op, Steps):
        return _short(_in_both_directions(binding, op, finish))
    if not any(t is not None for t in _others(example)):
        return _short(_plain(config, op, finish))
    beside = _beside(binding, call, op, finish)
    return lambda call: beside(*call[1:5]), None, beside


def _short(plain: Plain) -> tuple[Run, Plain, None]:
    return lambda call: plain(call.q, call.k, call.v), plain, None


# ---- ways to run ------------------------------------------------------------------------------------


def _plain(config: Config, op: Callable[..., Tensor], finish: Callable[[Tensor], Tensor]) -> Plain:
    """q, k and v alone: views, the kernel, a view back."""
    if config.qkv_format == "bshd":  # a transpose costs less than a permutation
        return lambda q, k, v: finish(op(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)))
    if config.qkv_format == "sbhd":  # numbers that stand there cost a third less than a tuple of them
        return lambda q, k, v: finish(op(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)))
    order = config.form.to_contract
    if order is None:
        return lambda q, k, v: finish(op(q, k, v))
    return lambda q, k, v: finish(op(q.permute(order), k.permute(order), v.permute(order)))


def _in_both_directions(binding: Binding, steps: Steps, finish: Callable[[Tensor], Tensor]) -> Plain:
    """The same for a kernel that has bound both."""
    config, name, kernel = binding.config, binding.name, binding.kernel
    enter, leave_grad = partial(to_contract, config), partial(to_caller, config)
    enter_dout = partial(_output_to_contract, config, binding.params)
    bound = BoundSteps(name, kernel, binding.spec, steps, enter, finish, enter_dout, leave_grad)
    return partial(AttendAgain.apply, bound)


def _beside(
    binding: Binding, example: Call, op: Callable[..., Tensor], finish: Callable[[Tensor], Tensor]
) -> Beside:
    """q, k and v with what else the op takes. Of calls like the example only contents are read again."""
    config = binding.config
    order, swapped = config.form.to_contract, config.qkv_format == "bshd"
    arbitrary = config.attn_mask_type == "arbitrary"
    pre_scale = binding.spec.softmax_scale if config.bias_type == "pre_scale_bias" else None
    heads, device = example.q.shape[config.form.heads], example.q.device
    default = config.bias_type == "alibi" and example.extras.alibi_slopes is None
    lengths = padded_lengths(example) if config.has_padding else None

    def beside(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Tensor:
        seqlens_q, seqlens_kv = (None, None) if lengths is None else lengths(q, k, extras)
        bias = extras.core_attention_bias
        if bias is not None and pre_scale is not None:
            bias = bias * pre_scale
        slopes = default_slopes(heads, device) if default else extras.alibi_slopes
        mask = extras.attention_mask if arbitrary else None
        if swapped:  # a transpose costs less than a permutation
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        elif order is not None:
            q, k, v = q.permute(order), k.permute(order), v.permute(order)
        return finish(op(q, k, v, mask, bias, slopes, seqlens_q, seqlens_kv))

    return beside


def _others(i: Inputs) -> tuple[Tensor | None, ...]:
    """What a bound op takes besides q, k and v."""
    return i.attn_mask, i.bias, i.alibi_slopes, i.seqlens_q, i.seqlens_kv


def _through_contract(binding: Binding, example: Inputs) -> Run:
    """Our own autograd around the kernel's forward and backward; the way to lse and max_logit too.

    Where nothing of the example is recorded, the forward alone: an autograd function takes the host longer.
    """
    kernel, spec, gather, config = binding.kernel, binding.spec, binding.gather, binding.config
    recorded = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in example)
    finish = _finish(config, example)

    def run(call: Call) -> Any:
        inputs = gather(call)
        if not recorded and not is_transformed():
            out, lse, max_logit = kernel.forward(spec, inputs)[:3]
            return config.results(finish(out), lse, max_logit)
        out, lse, max_logit = Attend.apply(
            KernelCall(binding.name, kernel, spec, inputs),
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.bias,
            inputs.softmax_offset,
        )
        return config.results(finish(out), lse, max_logit)

    return run


# ---- tensors on their way in and out ----------------------------------------------------------------


def to_contract(config: Config, t: Tensor) -> Tensor:
    """A tensor in the caller's format, as a view with the contract's dimensions."""
    order = config.form.to_contract
    return t if order is None else t.permute(order)


def _output_to_contract(config: Config, p: AttentionParams, t: Tensor) -> Tensor:
    """The same for an output, or its gradient."""
    return to_contract(config, t.unflatten(-1, (p.num_heads, p.head_dim_v)) if config.flatten_heads else t)


def to_caller(config: Config, t: Tensor) -> Tensor:
    """The way back."""
    order = config.form.from_contract
    return t if order is None else t.permute(order)


def contract_call(call: Call, p: AttentionParams, *, dropout: bool) -> tuple[Spec, Inputs]:
    """The call as the contract states it, with nothing adapted; ``dropout`` False leaves dropout out."""
    spec = make_spec(call.config, p, need_grad=False)
    if not dropout:
        spec = replace(spec, dropout_p=0.0)
    return spec, make_gather(call.config, spec, dropout)(call)


def make_gather(config: Config, spec: Spec, seeded_dropout: bool) -> Callable[[Call], Inputs]:
    """``gather(call)``: the call's tensors as the kernel takes them; contents of lengths checked where that
    is free."""
    padding = config.has_padding
    arbitrary = config.attn_mask_type == "arbitrary"
    alibi = config.bias_type == "alibi"
    pre_scale = spec.softmax_scale if config.bias_type == "pre_scale_bias" else None
    needs_seed = seeded_dropout and spec.dropout_p > 0.0

    def gather(call: Call) -> Inputs:
        extras = call.extras
        if padding:
            check_readable(call)
        q = to_contract(call.config, call.q)
        if call.paged:  # pools of pages are [pages, page_size, g, d] in any format
            k, v = call.k.transpose(1, 2), call.v.transpose(1, 2)
        else:
            k, v = to_contract(call.config, call.k), to_contract(call.config, call.v)
        bias = extras.core_attention_bias
        if bias is not None and pre_scale is not None:
            bias = bias * pre_scale  # (x + bias) * scale = x * scale + bias * scale
        slopes = extras.alibi_slopes
        if slopes is None and alibi:
            slopes = default_slopes(q.shape[1], q.device)
        table, sink = extras.block_table, extras.softmax_offset
        seqlens_q, seqlens_kv = _dense_lengths(call) if padding else (None, None)
        seed = offset = None
        if needs_seed:  # from the device's generator, so that checkpointing and manual_seed replay it
            seed = draw_seed(q.device) if extras.dropout_seed is None else extras.dropout_seed
            offset = torch.zeros((), dtype=torch.int64, device=q.device)
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


def _dense_lengths(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """int32 [b] real rows of a padded batch, and of keys in pages; None for packed ones."""
    packed = call.config.form.packed
    if call.paged:
        lengths_q = None if packed else lengths_if_given(call.extras.cu_seqlens_q)
        return lengths_q, lengths_if_given(call.extras.cu_seqlens_kv)
    return (None, None) if packed else real_lengths(call.extras)


def draw_seed(device: torch.device) -> Tensor:
    """An int64 scalar from the device's generator, for ``Extras.dropout_seed``."""
    return torch.randint(0, 2**62, (), dtype=torch.int64, device=device)


def check_readable(call: Call) -> None:
    """What length tensors and masks hold, where reading them waits for nothing or was asked for."""
    if call.settings.check or _readable(call.extras):
        check_contents(call.config, sizes_of(call), call.q, call.k, call.extras)


Lengths = tuple[Tensor | None, Tensor | None]


def padded_lengths(example: Call) -> Callable[[Tensor, Tensor, Extras], Lengths]:
    """``real_lengths`` of dense calls like the example, their contents checked as by ``check_readable``.

    On the CPU length tensors and masks are read at every call, and checked where they hold something new.
    """
    config, sizes, extras = example.config, sizes_of(example), example.extras
    checked = example.settings.check or _readable(extras)
    on_cpu = checked and example.q.device.type == "cpu"
    last: tuple[list[Tensor], Lengths] | None = None

    def lengths(q: Tensor, k: Tensor, extras: Extras) -> Lengths:
        nonlocal last
        given: Any = mask_pair(extras) or (extras.cu_seqlens_q, extras.cu_seqlens_kv)
        known = last
        if on_cpu and known is not None and all(map(torch.equal, given, known[0])):
            return known[1]
        if checked:
            check_contents(config, sizes, q, k, extras)
        made = real_lengths(extras)
        last = ([t.clone() for t in given], made) if on_cpu else None
        return made

    return lengths


def _readable(extras: Extras) -> bool:
    """Whether length tensors and padding masks lie on the CPU, where reading them waits for nothing."""
    held = [extras.cu_seqlens_q, extras.cu_seqlens_kv, extras.block_table, *mask_pair(extras)]
    return all(t is None or (t.device.type == "cpu" and type(t) is Tensor) for t in held)


def _finish(config: Config, example: Inputs) -> Callable[[Tensor], Tensor]:
    """The kernel's output in the caller's format: [..., h, e], or [..., h * e] for modules."""
    e = example.v.shape[-1]
    if config.qkv_format == "thd":
        if not config.flatten_heads:
            return lambda out: out
        width = example.q.shape[1] * e
        return lambda out: out.reshape(out.shape[0], width)
    b, h, s, _ = example.q.shape
    back = config.form.from_contract
    if config.qkv_format == "bshd":
        if config.flatten_heads:
            return lambda out: out.transpose(1, 2).reshape(b, s, h * e)
        return lambda out: out.transpose(1, 2)
    if back is None:
        return lambda out: out
    if config.qkv_format == "sbhd" and config.flatten_heads:
        return lambda out: out.permute(2, 0, 1, 3).reshape(s, b, h * e)
    if config.flatten_heads:
        shape = (s, b, h * e) if config.form.rows == 0 else (b, s, h * e)
        return lambda out: out.permute(back).reshape(shape)
    return lambda out: out.permute(back)
