"""Attention under torch.compile, with no graph break.

Static shapes: the choice is made while tracing, and the chosen kernel's own operators go into the graph.
Anything else (a symbolic size, the tiled kernel, a log-sum-exp) goes through one opaque operator,
``attnsel::attend2``, that chooses when it runs; so twenty lengths need no more graphs than two.

Its backward, ``attnsel::attend2_backward``, starts from the output and the log-sum-exp, which the forward
gives where a gradient is needed: what a kernel saves differs in number and shape, and an operator's outputs
may not, but these two every fused kernel's backward starts from. They may come from another candidate than
the one that then runs, as settings and refusals may change in between. Where they would not do
(``runtime/dispatch.py``), the forward is run again. Dropout comes only from candidates that replay a seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnsel.backends.contract import Grads
from attnsel.runtime.call import (
    NO_EXTRAS,
    Call,
    Config,
    Extras,
    constant_when_traced,
    is_static,
    needs_grad,
    read_config,
)
from attnsel.runtime.selfcheck import is_wanted


class Runtime(NamedTuple):
    """What the operators call when they run, and tracing when it chooses: functions of ``dispatch``, which
    hands traced calls to this module and is connected here, so that neither imports the other's insides."""

    attend: Callable[..., Any]
    prepare: Callable[..., Any]
    attend_with_lse: Callable[..., tuple[Tensor, ...]]
    gradients: Callable[..., Grads]
    carries_lse: Callable[[Config, Tensor], bool]


_runtime: Runtime | None = None


def connect(runtime: Runtime) -> None:
    global _runtime
    _runtime = runtime


def _connected() -> Runtime:
    assert _runtime is not None
    return _runtime


def attend(config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Any:
    """``attnsel.runtime.dispatch.attend`` as Dynamo traces it."""
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
    need_grad = needs_grad(q, k, v, extras)
    # Default ALiBi slopes come from a cache that a graph must not hold.
    traceable = extras is NO_EXTRAS and config.bias_type == "no_bias"
    if traceable and _static(q) and _static(k) and _static(v):
        name = _choose_while_tracing(config.text, _shape(q), _shape(k), _shape(v), need_grad)
        if name:
            return getattr(_traced, name)(q, k, v)
    return _through_operator(config, q, k, v, extras, need_grad)


def opaque(call: Call) -> Any:
    """One call of the operator that chooses when it runs; for tensors without data, their shapes."""
    return _through_operator(call.config, call.q, call.k, call.v, call.extras, call.need_grad)


def _through_operator(
    config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, need_grad: bool
) -> Any:
    seed = extras.dropout_seed
    if config.attention_dropout and seed is None:
        # Made outside the operator, so that backward and recomputation see the same one.
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device=q.device)
    mask = extras.attention_mask
    mask_kv = None
    if isinstance(mask, (tuple, list)):
        mask, mask_kv = mask
    out, lse, max_logit = torch.ops.attnsel.attend2(
        q, k, v, mask, mask_kv, *extras[1:-1], seed, config.text, need_grad
    )
    return config.results(out, lse, max_logit)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t


# ---- static shapes ----------------------------------------------------------------------------------

# Closures that graphs were made of. Attributes, because Dynamo guards a dictionary by all of its keys; the
# oldest make room, and a graph that meets its closure gone is traced again.
_traced = SimpleNamespace()
traced: dict[str, Any] = {}  # their selections, by the same names
_MOST_TRACED = 1024


def forget_traced() -> None:
    """Forget the closures; graphs that hold one are traced again."""
    vars(_traced).clear()
    traced.clear()


def _static(t: Tensor) -> bool:
    for n in t.shape:
        if not is_static(n):
            return False
    return all(is_static(n) for n in t.stride())


def _shape(t: Tensor) -> tuple[Any, ...]:
    # Dynamo cannot trace storage_offset(): a view that starts off a 16-byte boundary is not seen here.
    return tuple(t.shape), tuple(t.stride()), t.dtype, str(t.device), t.requires_grad


@constant_when_traced
def _choose_while_tracing(
    text: str, q: tuple[Any, ...], k: tuple[Any, ...], v: tuple[Any, ...], need_grad: bool
) -> str:
    """Where ``_traced`` holds the closure eager mode would run; "" when a graph cannot hold its operators.

    Runs while Dynamo traces, on fake tensors of the traced shapes: nothing is allocated.
    """
    config = read_config(text)
    if config.return_lse or config.return_max_logit:
        return ""
    with torch.set_grad_enabled(need_grad), FakeTensorMode():
        bound = _connected().prepare(config, *(_empty(*shape) for shape in (q, k, v)))
    # Dynamo goes into PyTorch's own operators; other packages' Python is theirs, and stays behind ours.
    theirs = not str(bound.selection.backend).startswith("sdpa.")
    if bound.plain is None or theirs or is_wanted(bound.selection, bound.settings):
        # Steps hold whole questions, which Dynamo would guard field by field; our own autograd function is
        # no operator; and what is to be compared must run first.
        return ""
    name = f"run_{hashlib.sha256(repr((text, q, k, v, need_grad)).encode()).hexdigest()}"
    held = vars(_traced)
    while len(held) >= _MOST_TRACED:
        oldest = next(iter(held))
        del held[oldest], traced[oldest]
    setattr(_traced, name, bound.plain)
    traced[name] = bound.selection
    return name


def _empty(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str, requires_grad: bool
) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).requires_grad_(requires_grad)


# ---- the opaque operator ----------------------------------------------------------------------------

# Compilers keep what they made on disk by the names of operators, not by their schemas or derivatives: with
# either of these another, the number in both names goes up, or an older attnsel's graph answers.


class Arguments(NamedTuple):
    """The operator's arguments, in its order; the annotations are those of its schema.

    Between q, k, v with their masks and the seed stand the fields of Extras, in its order.
    """

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
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    block_table: Tensor | None
    seed: Tensor | None
    config: str
    need_grad: bool

    def config_for(self, **changes: Any) -> Config:
        """The call's Config with everything returned that the operator returns."""
        config = read_config(self.config)
        return config.replace(
            **{"replayable": True, "is_training": config.is_training or self.need_grad, **changes}
        )

    def extras(self) -> Extras:
        mask: Any = self.mask if self.mask_kv is None else (self.mask, self.mask_kv)
        extras = Extras(mask, *self[5:16])
        return NO_EXTRAS if all(extra is None for extra in extras) else extras


_KINDS = {name: kind.__forward_arg__ for name, kind in Arguments.__annotations__.items()}
_TENSORS = tuple(number for number, kind in enumerate(_KINDS.values()) if kind.startswith("Tensor"))
_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int | None": "SymInt?",
    "str": "str",
    "bool": "bool",
}


def _schema(**before: str) -> str:
    """The arguments as PyTorch writes them; ``before``: those that stand first."""
    own = {name: _SCHEMA_TYPES[kind] for name, kind in _KINDS.items()}
    return ", ".join(f"{kind} {name}" for name, kind in {**before, **own}.items())


@torch.library.custom_op(
    "attnsel::attend2", mutates_args=(), schema=f"({_schema()}) -> (Tensor, Tensor, Tensor)"
)
def _attend_op(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logit); the last is empty unless the config asks for it, and so is the log-sum-exp
    unless the backward needs it. Where that will run the forward again, its place is held by zeros."""
    arguments = Arguments(*given)
    config, q = arguments.config_for(), arguments.q
    runtime, tensors = _connected(), (q, arguments.k, arguments.v, arguments.extras())
    carries = arguments.need_grad and runtime.carries_lse(config, q)
    results = (runtime.attend_with_lse if carries else runtime.attend)(config, *tensors)
    parts = list(results) if isinstance(results, tuple) else [results]
    out = parts.pop(0)
    if carries or config.return_lse:
        lse = parts.pop(0)
    else:
        lse = q.new_zeros(_lse_shape(arguments, config), dtype=_statistics(q))
    max_logit = parts.pop(0) if config.return_max_logit else q.new_empty(0, dtype=_statistics(q))
    return out.contiguous(), lse.contiguous(), max_logit


@_attend_op.register_fake
def _attend_fake(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    arguments = Arguments(*given)
    config, q, e = read_config(arguments.config), arguments.q, arguments.v.shape[-1]
    h, dtype = q.shape[config.form.heads], _statistics(q)
    out = (*q.shape[:-2], h * e) if config.flatten_heads else (*q.shape[:-1], e)
    lse = q.new_empty(_lse_shape(arguments, config), dtype=dtype)
    max_logit: Any = (h,) if config.return_max_logit else (0,)
    return q.new_empty(out), lse, q.new_empty(max_logit, dtype=dtype)


def _lse_shape(arguments: Arguments, config: Config) -> tuple[Any, ...]:
    """[b, h, s_q] or [h, t_q]; [0] where nobody needs it. From what is known while tracing alone."""
    if not (config.return_lse or arguments.need_grad):
        return (0,)
    form, shape = config.form, arguments.q.shape
    rows = (shape[form.heads], shape[form.rows])
    return rows if form.batch is None else (shape[form.batch], *rows)


def _statistics(q: Tensor) -> torch.dtype:
    """The type of what is said about scores."""
    return torch.promote_types(q.dtype, torch.float32)


@torch.library.custom_op(
    "attnsel::attend2_backward",
    mutates_args=(),
    schema=f"({_schema(dout='Tensor', out='Tensor?', lse='Tensor?', bias_grad='bool')})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(
    dout: Tensor, out: Tensor | None, lse: Tensor | None, bias_grad: bool, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias and softmax_offset; empty where there is none.

    ``out`` and ``lse``: what the forward gave under ``need_grad``, or None.
    """
    arguments = Arguments(*given)
    extras = arguments.extras()
    if arguments.bias is not None:  # inside an operator tensors have lost their requires_grad
        extras = extras._replace(core_attention_bias=arguments.bias.detach().requires_grad_(bias_grad))
    config = arguments.config_for(return_lse=False, return_max_logit=False)
    q, k, v = arguments[:3]
    runtime = _connected()
    known = None if out is None or lse is None or not runtime.carries_lse(config, q) else (out, lse)
    grads = runtime.gradients(config, q, k, v, extras, dout, known)
    # One empty tensor for each: an operator's outputs may not be the same tensor.
    dbias = grads.bias if bias_grad and grads.bias is not None else arguments.q.new_empty(0)
    doffset = arguments.q.new_empty(0)
    if arguments.softmax_offset is not None and grads.softmax_offset is not None:
        doffset = grads.softmax_offset.reshape(arguments.softmax_offset.shape)
    found = (grads.q, grads.k, grads.v, dbias, doffset)
    return tuple(t.contiguous() for t in found)  # type: ignore[return-value]


@_backward_op.register_fake
def _backward_fake(
    dout: Tensor, out: Tensor | None, lse: Tensor | None, bias_grad: bool, *given: Any
) -> tuple[Tensor, ...]:
    arguments = Arguments(*given)
    q, bias = arguments.q, arguments.bias if bias_grad else None
    return tuple(
        q.new_empty(0) if t is None else t.new_empty(t.shape)
        for t in (q, arguments.k, arguments.v, bias, arguments.softmax_offset)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    arguments = Arguments(*inputs)
    known = output[:2] if arguments.need_grad else (None, None)
    ctx.save_for_backward(*(inputs[number] for number in _TENSORS), *known)
    ctx.plain = tuple(value for number, value in enumerate(inputs) if number not in _TENSORS)
    ctx.bias_grad = arguments.bias is not None and ctx.needs_input_grad[Arguments._fields.index("bias")]


def _autograd(ctx: Any, dout: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    grads = dict.fromkeys(Arguments._fields)
    if dout is None:
        return tuple(grads.values())
    *saved, out, lse = ctx.saved_tensors
    tensors, plain = iter(saved), iter(ctx.plain)
    arguments = Arguments(
        *(next(tensors) if number in _TENSORS else next(plain) for number in range(len(grads)))
    )
    arguments = arguments._replace(need_grad=True)
    dq, dk, dv, dbias, doffset = torch.ops.attnsel.attend2_backward(dout, out, lse, ctx.bias_grad, *arguments)
    grads |= {"q": dq, "k": dk, "v": dv}
    if ctx.bias_grad:
        grads["bias"] = dbias
    if arguments.softmax_offset is not None:
        grads["softmax_offset"] = doffset
    return tuple(grads.values())


_attend_op.register_autograd(_autograd, setup_context=_setup_context)
