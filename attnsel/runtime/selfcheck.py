"""The first call of a kernel that nobody has proven here, compared with ``tiled`` before it counts.

``ATTNSEL_SELFCHECK``: ``unproven`` (default) checks what is ours (kernels, and the code around cuDNN's) on an
architecture that no committed result shows, and plug-ins where their makers declare no proof; ``all`` checks
every candidate but ``tiled``; ``0`` none. A check runs the bound closure itself on the caller's tensors,
forward and, when a gradient is needed, backward, and holds a few rows against ``yardstick``. Where they
disagree, that is evidence against the candidate for this question, and the next one runs.

One check covers all lengths of a kind (the same power of two, and a multiple of 128, of 16, or neither): a
decode loop whose keys grow by one would otherwise check at every step.

What it leaves alone: PyTorch's random generators, gradients and saved tensors of the caller; a CUDA graph
under capture (it cannot read results there: such a call runs, and is checked when it next comes outside a
capture). Traced graphs hold PyTorch's own kernels only; others go through an operator that comes here when
it runs. What cannot be compared: dropout of kernels that keep other entries, so they are checked without;
max_logit, which depends on all rows; numbers that are not finite where the reference's are not.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnsel.backends.contract import Grads, Inputs, Spec
from attnsel.candidates import CANDIDATES
from attnsel.debug import SelfCheckWarning
from attnsel.params import AttentionParams, TensorSpec
from attnsel.runtime import yardstick
from attnsel.runtime.bind import Bound, bind, bind_gradients, contract_call, to_contract
from attnsel.runtime.cache import BoundedCache
from attnsel.runtime.call import Config, Extras, config
from attnsel.runtime.yardstick import Numbers, Rows
from attnsel.select import Selection
from attnsel.settings import Settings

_passed: BoundedCache[bool] = BoundedCache(limit=4096)


class Disagreement(Exception):
    """A kernel's numbers are not tiled's; the message has the figures."""


def check(
    bound: Bound, cfg: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, need_grad: bool
) -> bool:
    """Compare what ``bound`` would give, unless that is settled. Raises Disagreement, or what it raises.

    False: it could not be checked now and should be when it comes again.
    """
    selection = bound.selection
    if not _wanted(selection, bound.settings) or _settled(selection, q, need_grad):
        return True
    if _capturing(q):
        _say(selection, "a CUDA graph is being captured")
        return False
    if not all(type(t) in (Tensor, torch.nn.Parameter) for t in (q, k, v)) or (
        need_grad and any(t.is_inference() for t in (q, k, v))
    ):
        return True  # a subclass may do anything; autograd refuses inference tensors in its own words
    run = bound.run
    if cfg.attention_dropout and not _drops_as_tiled(selection):
        run = bind(*_without_dropout(selection, cfg), q, k, v, extras, need_grad, bound.settings).run

    def kernel(q: Tensor, k: Tensor, v: Tensor, extras: Extras, douts: _Into) -> Numbers:
        return _through_autograd(run, cfg, q, k, v, extras, need_grad, douts)

    _compare(kernel, selection, cfg, q, k, v, extras, need_grad, bound.settings)
    return True


def check_gradients(
    run: Callable[..., Grads],
    selection: Selection,
    cfg: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    settings: Settings,
) -> None:
    """The same for ``bind_gradients``, which operators that recompute use. Raises Disagreement."""
    if not _wanted(selection, settings) or _settled(selection, q, True) or _capturing(q):
        return
    if cfg.attention_dropout and not _drops_as_tiled(selection):
        run = bind_gradients(*_without_dropout(selection, cfg), settings)

    def kernel(q: Tensor, k: Tensor, v: Tensor, extras: Extras, douts: _Into) -> Numbers:
        p = selection.params
        shape = (*q.shape[:-1], p.head_dim_v)
        grads = run(q, k, v, extras, douts.of_shape(shape, q, cfg))
        bias = extras.core_attention_bias
        asked = bias is not None and bias.requires_grad
        return douts.gradients(
            cfg, grads.q, grads.k, grads.v, grads.bias if asked else None, grads.softmax_offset
        )

    _compare(kernel, selection, cfg, q, k, v, extras, True, settings)


def clear() -> None:
    """Forget what was checked."""
    _passed.clear()


# ---- whether ----------------------------------------------------------------------------------------


def _wanted(selection: Selection, settings: Settings) -> bool:
    name = selection.backend
    if settings.selfcheck == "0" or name is None or name == "tiled":
        return False
    return settings.selfcheck == "all" or selection[name].unproven


def _settled(selection: Selection, q: Tensor, need_grad: bool) -> bool:
    return _passed.items.get(_kind(selection, q, need_grad)) is not None


def _kind(selection: Selection, q: Tensor, need_grad: bool) -> tuple[Any, ...]:
    """What one check stands for: everything about the call but its exact lengths."""
    p = selection.params
    values = [
        tuple(_strides(spec) for spec in (p.tensors.q, p.tensors.k, p.tensors.v, p.tensors.mask))
        if name == "tensors"
        else _length(value)
        if name in ("batch_size", "max_seqlen_q", "max_seqlen_kv")
        else value
        for name in AttentionParams.model_fields
        for value in (getattr(p, name),)
    ]
    adapted = tuple(adaptation.name for adaptation in selection[selection.backend or ""].adaptations)
    return (selection.backend, str(q.device), need_grad, adapted, *values)


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


def _capturing(q: Tensor) -> bool:
    return q.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _say(selection: Selection, why: str) -> None:
    warnings.warn(f"{selection.backend} was not compared with tiled: {why}", SelfCheckWarning, stacklevel=2)


# ---- how --------------------------------------------------------------------------------------------


class _Into:
    """Gradients into the output, zero outside the compared rows, and the way results are cut into rows."""

    def __init__(self, spec: Spec, pieces: list[Rows], dtype: torch.dtype, width: int, heads: int) -> None:
        self.spec, self.pieces = spec, pieces
        generator = torch.Generator().manual_seed(2)
        shapes = [(1, heads, len(piece.rows), width) for piece in pieces]
        self.parts = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    def of_shape(self, shape: tuple[int, ...], q: Tensor, cfg: Config) -> Tensor:
        """As the caller would pass it: in the call's format, heads flattened where its output has them so."""
        dout = torch.zeros(shape, dtype=q.dtype, device=q.device)
        inner = to_contract(cfg, dout)
        for piece, part in zip(self.pieces, self.parts, strict=True):
            piece.of_q(inner, self.spec.packed).copy_(part)
        return dout.flatten(-2) if cfg.flatten_heads else dout

    def rows(self, t: Tensor) -> list[Tensor]:
        return [piece.of_q(t, self.spec.packed) for piece in self.pieces]

    def gradients(
        self,
        cfg: Config,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        dbias: Tensor | None,
        doffset: Tensor | None,
    ) -> Numbers:
        """Gradients in the caller's format, cut; those that nobody needs are None."""
        numbers: Numbers = {} if dq is None else {"dq": self.rows(to_contract(cfg, dq))}
        sequences = list(dict.fromkeys(piece.sequence for piece in self.pieces))
        for name, grad in (("dk", dk), ("dv", dv)):
            if grad is not None:
                inner = to_contract(cfg, grad)
                numbers[name] = [yardstick.of_kv(inner, self.spec.packed, s) for s in sequences]
        if dbias is not None:
            numbers["dbias"] = [dbias[(None,) * (4 - dbias.dim())]]
        if doffset is not None:
            numbers["dsoftmax_offset"] = [doffset.reshape(-1)]
        return numbers


def _compare(
    kernel: Callable[[Tensor, Tensor, Tensor, Extras, _Into], Numbers],
    selection: Selection,
    cfg: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    need_grad: bool,
    settings: Settings,
) -> None:
    if cfg.attention_dropout and extras.dropout_seed is None:
        extras = extras._replace(dropout_seed=torch.tensor(3, dtype=torch.int64, device=q.device))
    try:
        q, k, v = _telling(cfg, q, k, v, paged=extras.block_table is not None)
        dropout = _drops_as_tiled(selection)
        spec, inputs = contract_call(cfg, selection.params, q, k, v, extras, settings, dropout=dropout)
        pieces = yardstick.choose_rows(spec, inputs)
        if not pieces or not _comparable(inputs):
            return
        into = _Into(spec, pieces, q.dtype, selection.params.head_dim_v, inputs.q.shape[1])
        # Inner hooks win: those of checkpointing or offloading, around us, see none of our tensors.
        with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
            actual = kernel(q, k, v, extras, into)
        found = _against_tiled(spec, inputs, into, cfg, need_grad, actual)
    except torch.OutOfMemoryError:
        _say(selection, "there is no memory for it")
        return
    if found and not found[0].ratio <= 1.0:
        raise Disagreement(_words(found, selection.params))
    _passed.add(_kind(selection, q, need_grad), True)


def _itself(t: Tensor) -> Tensor:
    return t


def _against_tiled(
    spec: Spec, inputs: Inputs, into: _Into, cfg: Config, need_grad: bool, actual: Numbers
) -> list[yardstick.Difference]:
    unit = yardstick.unit_of(inputs.q)
    douts = [part.to(inputs.q.device) for part in into.parts] if need_grad else None
    scale = spec.softmax_scale if cfg.bias_type == "pre_scale_bias" else 1.0
    with torch.no_grad(), torch.autocast(inputs.q.device.type, enabled=False):
        exact, changed = (
            yardstick.compute(spec, inputs, into.pieces, douts, by, scale) for by in (0.0, unit)
        )
        biased = inputs.bias is not None
        return yardstick.differences(actual, exact, changed, unit, into.pieces, biased=biased)


def _through_autograd(
    run: Callable[..., Any],
    cfg: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    need_grad: bool,
    into: _Into,
) -> Numbers:
    """The closure on leaves that share the caller's memory, so that no graph of the caller's grows."""
    bias, offset = extras.core_attention_bias, extras.softmax_offset
    given = (q, k, v, bias, offset)
    leaves = [t if t is None else t.detach().requires_grad_(need_grad and t.requires_grad) for t in given]
    if bias is not None or offset is not None:
        extras = extras._replace(core_attention_bias=leaves[3], softmax_offset=leaves[4])
    with torch.set_grad_enabled(need_grad):
        results = run(*leaves[:3], extras)
        out, *others = results if isinstance(results, tuple) else (results,)
        width = into.parts[0].shape[-1]
        whole = out.unflatten(-1, (-1, width)) if cfg.flatten_heads else out
        numbers: Numbers = {"out": into.rows(to_contract(cfg, whole.detach()))}
        if cfg.return_lse:
            lse = others[0].transpose(0, 1) if into.spec.packed else others[0]
            numbers["lse"] = into.rows(lse)
        if not need_grad:
            return numbers
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        dout = into.of_shape(tuple(whole.shape), q, cfg)
        grads = iter(torch.autograd.grad(out, wanted, dout, allow_unused=True))
    told = [None if t is None or not t.requires_grad else next(grads) for t in leaves]
    return {**numbers, **into.gradients(cfg, *told)}


def _drops_as_tiled(selection: Selection) -> bool:
    """Whether the candidate drops the very entries that the contract's generator names."""
    name = selection.backend or ""
    return name in ("tiled", "triton") or bool(CANDIDATES[name].plugin)


def _without_dropout(selection: Selection, cfg: Config) -> tuple[Selection, Config]:
    given = {name: getattr(cfg, name) for name in Config.__slots__ if name != "text"}
    params = selection.params.derive(attention_dropout=0.0)
    return dataclasses.replace(selection, params=params), config(**{**given, "attention_dropout": 0.0})


def _telling(cfg: Config, q: Tensor, k: Tensor, v: Tensor, *, paged: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors; a random stand-in with the same strides for one whose numbers would prove nothing.

    Those are numbers that are not finite (unwritten padding), and rows that are all alike (zeros of a warm-up
    call). Pools of pages are left as they are: they may be as large as the memory.
    """
    if paged:
        return q, k, v
    rows = {"bshd": 1, "sbhd": 0, "bhsd": 2, "thd": 0}[cfg.qkv_format]
    made = []
    for number, t in enumerate((q, k, v)):
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


def _words(found: list[yardstick.Difference], p: AttentionParams) -> str:
    """The figures of what is wrong: of each result the worst place."""
    told: dict[str, str] = {}
    for d in found:
        if not d.ratio <= 1.0:
            told.setdefault(
                d.name,
                f"{d.name} is off by {d.error:.2g} of its size ({d.where}), where rounding explains "
                f"{d.allowed:.2g}",
            )
    return f"in {p.dtype} " + "; ".join(told.values())
