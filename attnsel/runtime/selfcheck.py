"""The first call of a kernel that nobody has proven here, compared with ``tiled`` before it counts.

``ATTNSEL_SELFCHECK``: ``unproven`` (default) checks what is ours (kernels, and the code around cuDNN's) on an
architecture that no committed result shows, and plug-ins where their makers declare no proof; ``all`` checks
every candidate but ``tiled``; ``0`` none. A check runs the bound closure itself on the caller's tensors,
forward and, when a gradient is needed, backward, and compares a few rows with ``reference``. Where they
disagree, that is evidence against the candidate for this question, and the next one runs.

One check covers all lengths of a kind (the same power of two, and a multiple of 128, of 16, or neither): a
decode loop whose keys grow by one would otherwise check at every step.

What it leaves alone: PyTorch's random generators, gradients and saved tensors of the caller; a CUDA graph
under capture (it cannot read results there: such a call runs, and is checked when it next comes outside a
capture). Inputs that a kernel wrote to are put back, and it is found to be wrong. Traced graphs hold
PyTorch's own kernels only; others go through an operator that comes here when it runs. What cannot be
compared: dropout of kernels that keep other entries, so they are checked without; max_logit, which depends on
all rows; numbers that are not finite where the reference's are not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnsel.backends.checks import capturing
from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.backends.registry import CANDIDATES
from attnsel.backends.tiled.tiles import four_dims
from attnsel.debug import SelfCheckWarning
from attnsel.decision import Selection
from attnsel.errors import caller
from attnsel.params import AttentionParams, TensorSpec
from attnsel.runtime import reference
from attnsel.runtime.bind import Bound, bind, bind_gradients, contract_call, to_contract
from attnsel.runtime.cache import BoundedCache
from attnsel.runtime.call import Call, Config
from attnsel.runtime.kernels import Kernel
from attnsel.runtime.reference import Numbers, RowBlock
from attnsel.runtime.refusals import WrongNumbers
from attnsel.settings import Settings

REFERENCE = "tiled"
_CHANGES = 7  # of the inputs at random, at most
_passed: BoundedCache[bool] = BoundedCache(limit=4096)


def check(bound: Bound, call: Call) -> bool:
    """Compare what ``bound`` would give, unless it has passed before. Raises WrongNumbers, or what it raises.

    False: it could not be checked now and should be when it comes again.
    """
    selection = bound.selection
    if not is_wanted(selection, call.settings) or _has_passed(selection, call):
        return True
    if capturing(call.q.device):
        _say(selection, "a CUDA graph is being captured")
        return False
    if not _is_plain(call):
        return True  # a subclass may do anything; autograd refuses inference tensors in its own words
    compare(bound, call)
    return True


def compare(bound: Bound, call: Call) -> None:
    """Compare a call of plain tensors, whatever was compared before. Raises as ``check``."""
    selection, run = bound.selection, bound.run
    if call.config.attention_dropout and not _drops_as_reference(selection):
        run = bind(*_without_dropout(selection, call)).run

    def kernel(call: Call, into: _OutputGradient) -> Numbers:
        return _through_autograd(run, call, into)

    _compare(kernel, selection, call)


def check_gradients(bound: Bound, call: Call, *, carried: bool = False) -> bool:
    """The same for ``run(call, dout)``, forward and backward of an operator's call.

    ``carried``: out and lse go from one to the other and nothing else that the kernel saves, so a check of
    the whole does not cover it.
    """
    selection, run = bound.selection, bound.run
    if not is_wanted(selection, call.settings) or _has_passed(selection, call, carried=carried):
        return True
    if capturing(call.q.device):
        return False
    if call.config.attention_dropout and not _drops_as_reference(selection):
        run = bind_gradients(*_without_dropout(selection, call))

    def kernel(call: Call, into: _OutputGradient) -> Numbers:
        shape = (*call.q.shape[:-1], selection.params.head_dim_v)
        grads = run(call, into.of_shape(shape, call.q, call.config))
        bias = call.extras.core_attention_bias
        asked = bias is not None and bias.requires_grad
        dbias = grads.bias if asked else None
        return into.gradients(call.config, grads._replace(bias=dbias))

    _compare(kernel, selection, call, carried=carried)
    return True


def check_kernel(
    kernel: Kernel, spec: Spec, inputs: Inputs, selection: Selection, settings: Settings
) -> bool:
    """The same for a kernel of the contract with its own inputs: forward and backward called one by one, as
    code that merges partial results does. Raises WrongNumbers, or what the kernel raises."""
    key = (selection.backend, spec, *(_spec_of(t) for t in inputs))
    if not is_wanted(selection, settings) or _passed.items.get(key) is not None:
        return True
    if capturing(inputs.q.device):
        _say(selection, "a CUDA graph is being captured")
        return False
    if spec.dropout_p and not _drops_as_reference(selection):
        return True  # the same entries cannot be named
    if inputs.block_table is None:
        q, k, v = _random_where_alike((inputs.q, inputs.k, inputs.v), 0 if spec.packed else 2)
        inputs = inputs._replace(q=q, k=k, v=v)

    def numbers(into: _OutputGradient) -> Numbers:
        with torch.no_grad():
            result = kernel.forward(spec, inputs)
            found: Numbers = {"out": into.rows(result.out)}
            if result.lse is not None:
                lse = result.lse.transpose(0, 1) if spec.packed else result.lse
                found["lse"] = into.rows(lse)
            if not spec.need_grad:
                return found
            dout = into.in_place(result.out)
            saved = Result(result.out, result.lse, None, result.saved)
            grads = kernel.backward(spec, inputs, saved, dout)
        return {**found, **into.contract_gradients((*grads[:3], None, None))}

    try:
        _require_close(numbers, spec, inputs, selection.params, spec.need_grad, 1.0)
    except torch.OutOfMemoryError:
        _say(selection, "there is no memory for it")
        return True
    _passed.add(key, True)
    return True


def is_wanted(selection: Selection, settings: Settings) -> bool:
    """Whether the chosen candidate's first call is to be compared."""
    chosen = selection.chosen
    if settings.selfcheck == "0" or chosen is None or chosen.name == REFERENCE:
        return False
    return settings.selfcheck == "all" or chosen.unproven


# ---- whether ----------------------------------------------------------------------------------------


def _is_plain(call: Call) -> bool:
    tensors = (call.q, call.k, call.v)
    if not all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors):
        return False
    return not (call.need_grad and any(t.is_inference() for t in tensors))


def _has_passed(selection: Selection, call: Call, *, carried: bool = False) -> bool:
    return _passed.items.get(_kind(selection, call, carried)) is not None


def _kind(selection: Selection, call: Call, carried: bool) -> tuple[Any, ...]:
    """What one check stands for: everything about the call but its exact lengths."""
    p, chosen = selection.params, selection.chosen
    assert chosen is not None
    values = [
        tuple(_strides(spec) for spec in (p.tensors.q, p.tensors.k, p.tensors.v, p.tensors.mask))
        if name == "tensors"
        else _length(value)
        if name in ("batch_size", "max_seqlen_q", "max_seqlen_kv")
        else value
        for name in AttentionParams.model_fields
        for value in (getattr(p, name),)
    ]
    adapted = tuple(adaptation.name for adaptation in chosen.adaptations)
    return (chosen.name, str(call.q.device), call.need_grad, carried, adapted, *values)


def _spec_of(value: Any) -> Any:
    """The same of one input of a kernel's."""
    if not isinstance(value, Tensor):
        return value
    strides = TensorSpec(shape=tuple(value.shape), stride=tuple(value.stride()), dtype="bf16")
    return tuple(_length(n) for n in value.shape), value.dtype, str(value.device), _strides(strides)


def _length(n: int) -> tuple[int, int]:
    return n.bit_length(), 128 if n % 128 == 0 else 16 if n % 16 == 0 else 1


def _strides(spec: TensorSpec | None) -> Any:
    """The order of a tensor's dimensions in memory, and what alignment its rows have."""
    if spec is None:
        return None
    order = sorted(range(len(spec.stride)), key=lambda dim: spec.stride[dim])
    expanded = tuple(stride == 0 for stride in spec.stride)
    aligned = tuple(stride % 16 == 0 for stride in spec.stride)
    return tuple(order), expanded, aligned, spec.last_stride, spec.alignment, spec.requires_grad


def _say(selection: Selection, why: str) -> None:
    message = f"{selection.backend} was not compared with tiled: {why}"
    warnings.warn(message, SelfCheckWarning, stacklevel=caller().stacklevel)


# ---- how --------------------------------------------------------------------------------------------


_Gradients = Sequence[Tensor | None]  # of q, k, v, the bias and the sinks


class _OutputGradient:
    """Gradients into the output, zero outside the compared rows, and the way results are cut into rows."""

    def __init__(self, spec: Spec, pieces: list[RowBlock], inputs: Inputs, head_dim_v: int) -> None:
        self.spec, self.pieces = spec, pieces
        self.head_dim_v = head_dim_v
        generator = torch.Generator().manual_seed(2)
        heads = inputs.q.shape[1]
        shapes = [(1, heads, len(piece.rows), head_dim_v) for piece in pieces]
        self.parts = [torch.randn(shape, generator=generator).to(inputs.q.dtype) for shape in shapes]

    def of_shape(self, shape: tuple[int, ...], q: Tensor, config: Config) -> Tensor:
        """As the caller would pass it: in the call's format, heads flattened where its output has them so."""
        dout = torch.zeros(shape, dtype=q.dtype, device=q.device)
        self._fill(to_contract(config, dout))
        return dout.flatten(-2) if config.flatten_heads else dout

    def in_place(self, out: Tensor) -> Tensor:
        """As the contract has it, for an output of this shape."""
        dout = torch.zeros_like(out)
        self._fill(dout)
        return dout

    def _fill(self, dout: Tensor) -> None:
        for piece, part in zip(self.pieces, self.parts, strict=True):
            piece.of_q(dout, self.spec.packed).copy_(part)

    def rows(self, t: Tensor) -> list[Tensor]:
        return [piece.of_q(t, self.spec.packed) for piece in self.pieces]

    def gradients(self, config: Config, grads: _Gradients) -> Numbers:
        """Gradients in the caller's format, cut; those that nobody needs are None."""
        inner = (None if t is None else to_contract(config, t) for t in grads[:3])
        return self.contract_gradients((*inner, *grads[3:]))

    def contract_gradients(self, grads: _Gradients) -> Numbers:
        dq, dk, dv, dbias, doffset = grads
        numbers: Numbers = {} if dq is None else {"dq": self.rows(dq)}
        sequences = list(dict.fromkeys(piece.sequence for piece in self.pieces))
        for name, grad in (("dk", dk), ("dv", dv)):
            if grad is not None:
                numbers[name] = [reference.of_kv(grad, self.spec.packed, s) for s in sequences]
        if dbias is not None:
            numbers["dbias"] = [four_dims(dbias)]
        if doffset is not None:
            numbers["dsoftmax_offset"] = [doffset.reshape(-1)]
        return numbers


def _compare(
    kernel: Callable[[Call, _OutputGradient], Numbers],
    selection: Selection,
    call: Call,
    *,
    carried: bool = False,
) -> None:
    """Hold what ``kernel`` makes of the call against the reference, and remember that it passed."""
    if call.config.attention_dropout and call.extras.dropout_seed is None:
        seed = torch.tensor(3, dtype=torch.int64, device=call.q.device)
        call = call._replace(extras=call.extras._replace(dropout_seed=seed))
    try:
        if not call.paged:
            q, k, v = _random_where_alike((call.q, call.k, call.v), call.config.form.rows)
            call = call._replace(q=q, k=k, v=v)
        dropout = _drops_as_reference(selection)
        spec, inputs = contract_call(call, selection.params, dropout=dropout)
        scale = spec.softmax_scale if call.config.bias_type == "pre_scale_bias" else 1.0
        held = _require_close(
            lambda into: kernel(call, into), spec, inputs, selection.params, call.need_grad, scale
        )
    except torch.OutOfMemoryError:
        _say(selection, "there is no memory for it")
        return
    if held:
        _passed.add(_kind(selection, call, carried), True)


def _require_close(
    numbers: Callable[[_OutputGradient], Numbers],
    spec: Spec,
    inputs: Inputs,
    p: AttentionParams,
    need_grad: bool,
    bias_scale: float,
) -> bool:
    """Compare a few rows of what ``numbers`` gives with the reference. False: there is nothing to compare.

    Raises WrongNumbers with the figures.
    """
    pieces = reference.choose_rows(spec, inputs)
    if not pieces or not _comparable(inputs):
        return False
    into = _OutputGradient(spec, pieces, inputs, inputs.v.shape[-1])
    before = {name: t.detach().clone() for name, t in inputs._asdict().items() if isinstance(t, Tensor)}
    try:
        # Inner hooks win: those of checkpointing or offloading, around us, see none of our tensors.
        with torch.autograd.graph.saved_tensors_hooks(_unwrapped, _unwrapped):
            actual = numbers(into)
    finally:
        written = _put_back(inputs, before)
    if written:
        raise WrongNumbers(f"it changes its inputs: {', '.join(written)}")
    unit = reference.unit_of(inputs.q)
    douts = [part.to(inputs.q.device) for part in into.parts] if need_grad else None
    with torch.no_grad(), torch.autocast(inputs.q.device.type, enabled=False):
        exact = reference.compute(spec, inputs, pieces, douts, 0.0, bias_scale)
        changed: list[Numbers] = []
        biased = inputs.bias is not None
        # One change at random may move few numbers by less than rounding does: before a kernel is found to
        # be wrong, more of them are asked.
        for seeds in (range(1, 2), range(2, _CHANGES + 1)):
            changed += [reference.compute(spec, inputs, pieces, douts, unit, bias_scale, n) for n in seeds]
            found = reference.differences(actual, exact, changed, unit, pieces, biased=biased)
            if not found or found[0].ratio <= 1.0:
                return True
    raise WrongNumbers(_words(found, p))


def _put_back(inputs: Inputs, before: dict[str, Tensor]) -> list[str]:
    """The inputs that a kernel wrote to; they are as before again, for the reference and the next kernel."""
    written = []
    for name, kept in before.items():
        t = getattr(inputs, name).detach()
        same = (t == kept) | ((t != t) & (kept != kept))
        if not bool(same.all()):
            written.append(name)
            with torch.no_grad():
                t.copy_(kept)
    return written


def _unwrapped(t: Tensor) -> Tensor:
    return t


def _through_autograd(run: Callable[[Call], Any], call: Call, into: _OutputGradient) -> Numbers:
    """The closure on leaves that share the caller's memory, so that no graph of the caller's grows."""
    config, q, k, v, extras = call[:5]
    need_grad = call.need_grad
    bias, offset = extras.core_attention_bias, extras.softmax_offset
    given = (q, k, v, bias, offset)
    leaves: list[Any] = [
        t if t is None else t.detach().requires_grad_(need_grad and t.requires_grad) for t in given
    ]
    if bias is not None or offset is not None:
        extras = extras._replace(core_attention_bias=leaves[3], softmax_offset=leaves[4])
    with torch.set_grad_enabled(need_grad):
        results = run(call._replace(q=leaves[0], k=leaves[1], v=leaves[2], extras=extras))
        out, *others = results if isinstance(results, tuple) else (results,)
        whole = out.unflatten(-1, (-1, into.head_dim_v)) if config.flatten_heads else out
        numbers: Numbers = {"out": into.rows(to_contract(config, whole.detach()))}
        if config.return_lse:
            lse = others[0].transpose(0, 1) if into.spec.packed else others[0]
            numbers["lse"] = into.rows(lse)
        if not need_grad:
            return numbers
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        dout = into.of_shape(tuple(whole.shape), q, config)
        grads = iter(torch.autograd.grad(out, wanted, dout, allow_unused=True))
    made = [None if t is None or not t.requires_grad else next(grads) for t in leaves]
    return {**numbers, **into.gradients(config, made)}


def _drops_as_reference(selection: Selection) -> bool:
    """Whether the candidate drops the very entries that the contract's generator names."""
    return CANDIDATES[selection.backend or ""].dropout == "contract"


def _without_dropout(selection: Selection, call: Call) -> tuple[Selection, Call]:
    config = call.config.replace(attention_dropout=0.0)
    params = selection.params.derive(attention_dropout=0.0)
    return selection.for_params(params), call._replace(config=config)


def _random_where_alike(tensors: tuple[Tensor, Tensor, Tensor], rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; a random stand-in with the same strides for one whose numbers would prove nothing.

    Those are numbers that are not finite (unwritten padding), and rows that are all alike (zeros of a warm-up
    call). ``rows``: the dimension of rows. Not for pools of pages: they may be as large as the memory.
    """
    made = []
    for number, t in enumerate(tensors):
        least, most = torch.aminmax(t.detach(), dim=rows) if t.numel() else (t, t)
        finite = (least.isfinite() & most.isfinite()).all()
        differ = (least < most).any() if t.shape[rows] > 1 else (least != 0).any()
        made.append(t if bool(finite & differ) or not t.numel() else _stand_in(t, number))
    return made[0], made[1], made[2]


def _stand_in(t: Tensor, seed: int) -> Tensor:
    """Normal numbers in memory of the same shape, strides and alignment."""
    # From 64 bytes on every allocator aligns; the remainder is where the original began.
    skipped = t.data_ptr() % 64 // t.element_size()
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    generator = torch.Generator(t.device).manual_seed(seed)
    memory = torch.empty(skipped + span, dtype=t.dtype, device=t.device).normal_(generator=generator)
    return memory.as_strided(t.shape, t.stride(), skipped).requires_grad_(t.requires_grad)


def _comparable(inputs: Inputs) -> bool:
    """No NaN in what has no stand-in."""
    return not any(
        bool(t.isnan().any())
        for t in (inputs.bias, inputs.softmax_offset, inputs.alibi_slopes)
        if t is not None
    )


def _words(found: list[reference.Difference], p: AttentionParams) -> str:
    """The figures of what is wrong: of each result the worst place."""
    by_tensor: dict[str, str] = {}
    for d in found:
        if not d.ratio <= 1.0:
            by_tensor.setdefault(
                d.name,
                f"{d.name} is off by {d.error:.2g} of its size ({d.where}), where rounding explains "
                f"{d.allowed:.2g}",
            )
    return f"in {p.dtype} " + "; ".join(by_tensor.values())
