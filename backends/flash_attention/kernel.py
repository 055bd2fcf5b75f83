"""The contract for FlashAttention's packages, and for PyTorch's build of it (backends/sdpa/varlen.py): what
they share, from the contract's tensors and back.

Each package says how its functions are called (``Package``); everything else is the same: bottom-right
windows, padding and gaps as sequences of their own (backends/rows.py), zeros where no sequence is, and
lse as the contract has it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.checks import (
    Five,
    added,
    check_gradients,
    check_tensors,
    misalignment,
    readable,
    with_lse_gradient,
)
from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.rows import (
    Form,
    above_zero,
    bottom_right_window,
    check_rows,
    check_rows_given,
    lse_of_forward,
)

# ---- The functions of the packages, found when they are first needed, and called by name ----------------
# Their arguments differ from release to release, in number and in order; the names have stayed. So a call
# names everything, an argument that a release does not have may only be left out where it says nothing, and
# one that attnsel has never heard of is an error rather than a guess.


class Missing(RuntimeError):
    """A package that cannot be imported, in the words of the import error, or lacks a function."""


def module(name: str, *places: str) -> ModuleType:
    """The first of ``places`` that can be imported. Raises Missing for ``name``, the candidate's."""
    for place in places:
        there = sys.modules.get(place)
        if there is not None:
            return _another_package(name, there)
    found = [_imported(place) for place in places]
    there = next((one for one in found if isinstance(one, ModuleType)), None)
    if there is None:
        raise Missing(f"{name}: {'; '.join(map(str, found))}")
    return _another_package(name, there)


def _another_package(name: str, there: ModuleType) -> ModuleType:
    """Raises Missing where attnsel answers to the name itself: a call would go round in a circle."""
    if there.__name__.partition(".")[0] == "attnsel":
        raise Missing(f"{name}: attnsel's own functions answer to `import flash_attn` in this process")
    return there


def _imported(place: str) -> ModuleType | str:
    """The module, or why it cannot be imported."""
    try:
        return import_module(place)
    except ImportError as error:
        return f"{place}: {error}"


class Function(NamedTuple):
    """One of their functions, with the names of its arguments."""

    call: Callable[..., Any]
    where: str
    names: frozenset[str]
    required: frozenset[str]

    def __call__(self, arguments: Mapping[str, Any], off: Mapping[str, Any], unused: Collection[str]) -> Any:
        """Call it with ``arguments``, those of ``off`` among them that say nothing when they have that value.

        ``unused``: what a release may want to be given and attnsel has no use for; it gets None. Raises
        RuntimeError for anything else that is missing on either side, and for whatever else the package
        raises.
        """
        return self._run(self._known(arguments, off, unused))

    def bound(self, settings: Mapping[str, Any], off: Mapping[str, Any]) -> Callable[[Any, Any, Any], Any]:
        """The same for calls of q, k and v whose other arguments stay as they are: looked at once."""
        known = self._known({"q": None, "k": None, "v": None, **settings}, off, ())
        return lambda q, k, v: self._run({**known, "q": q, "k": k, "v": v})

    def _known(
        self, arguments: Mapping[str, Any], off: Mapping[str, Any], unused: Collection[str]
    ) -> dict[str, Any]:
        lacking = [name for name in arguments if name not in self.names]
        for name in lacking:
            if name not in off or arguments[name] != off[name]:
                raise RuntimeError(f"{self.where} has no argument {name} in this release")
        given = {name: value for name, value in arguments.items() if name in self.names}
        for name in self.required.difference(given):
            if name not in unused:
                raise RuntimeError(f"{self.where} wants an argument that attnsel does not know: {name}")
            given[name] = None
        return given

    def _run(self, given: dict[str, Any]) -> Any:
        try:
            return self.call(**given)
        except (RuntimeError, ValueError):
            raise
        except Exception as error:
            if type(error).__module__.partition(".")[0] == "torch":
                raise  # PyTorch's own, some of which are no errors: checkpointing stops a forward by one
            # Their checks are asserts for the most part, some without a word, and compilers raise what they
            # like: to the caller all of it says no.
            raise RuntimeError(f"{self.where}: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=32)
def function(module: ModuleType, name: str) -> Function:
    """A function of a package. Raises Missing."""
    call = getattr(module, name, None)
    where = f"{module.__name__}.{name}"
    if call is None:
        raise Missing(f"{where} is not there in this release")
    # A custom operator hides the signature of the function that it was made of.
    parameters = inspect.signature(getattr(call, "_init_fn", call)).parameters.values()
    return Function(
        call,
        where,
        frozenset(p.name for p in parameters),
        frozenset(p.name for p in parameters if p.default is inspect.Parameter.empty),
    )


def window_arguments(function: Function, left: int, right: int) -> dict[str, Any]:
    """A window as this release takes it: one pair, or two numbers."""
    if "window_size" in function.names:
        return {"window_size": (left, right)}
    return {"window_size_left": left, "window_size_right": right}


# ---- The contract --------------------------------------------------------------------------------------


class FlashCall(NamedTuple):
    """One call as the packages see it: q, k and v [b, s, h, d], or rows [t, h, d] with cu_seqlens.

    With ``block_table`` k and v are pools [pages, page_size, g, d], ``seqused_kv`` says how many keys each
    sequence has, and ``cu_seqlens_kv`` says the same in another way. ``gaps``: some of the sequences are room
    between others, and may be longer than ``max_seqlen_q`` and ``max_seqlen_kv``; their results are nobody's.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    max_seqlen_q: int
    max_seqlen_kv: int
    seqused_kv: Tensor | None
    block_table: Tensor | None
    softmax_scale: float
    window_left: int  # from the bottom-right diagonal, -1 for no bound
    window_right: int
    softcap: float
    dropout_p: float
    deterministic: bool
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    gaps: bool

    @property
    def causal(self) -> bool:
        return self.window_left < 0 and self.window_right == 0

    def arguments(self, *, keys: bool = True, longest: bool = True) -> dict[str, Any]:
        """q, k, v and where sequences lie, by the names that all generations have; of keys, and the longest,
        where that is to be said."""
        given: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v}
        if self.cu_seqlens_q is None:
            return given
        q, k = ("q", self.cu_seqlens_q, self.max_seqlen_q), ("k", self.cu_seqlens_kv, self.max_seqlen_kv)
        for side, cu_seqlens, most in (q, k) if keys else (q,):
            given[f"cu_seqlens_{side}"] = cu_seqlens
            if longest:
                given[f"max_seqlen_{side}"] = most
        return given


class Forward(NamedTuple):
    """``lse`` [b, h, s] or [h, t]; ``saved`` goes back to the backward."""

    out: Tensor
    lse: Tensor | None
    saved: tuple[Any, ...] = ()


class Package:
    """How one of them is called.

    name: the candidate's. places: its modules, of which the first that can be imported has the functions.
    off: arguments that a release may lack, with the value at which they say nothing. unused: what a release
    may want to be given, and gets None for. without: inputs that no argument says. multiple: of a head_dim.
    room: a head_dim whose backward every release and GPU has.
    """

    name: str
    places: tuple[str, ...]
    off: ClassVar[Mapping[str, Any]]
    unused: tuple[str, ...] = ()
    without: tuple[str, ...]
    multiple = 8
    room: int

    def function(self, name: str) -> Function:
        """One of the package's functions. Raises Missing."""
        return function(module(self.name, *self.places), name)

    def run(self, function: Function, arguments: Mapping[str, Any]) -> Any:
        return function(arguments, self.off, self.unused)

    @property
    def lse_by_sequence(self) -> bool:
        """Whether a packed call's lse is [n, h, longest]."""
        return False

    def window(self, spec: Spec, inputs: Inputs) -> tuple[int, int]:
        """The bounds from the bottom-right diagonal.

        Raises ValueError for what the package cannot take, or would take and get wrong; Missing where it is
        not there.
        """
        window = bottom_right_window(self.name, spec, inputs)
        module(self.name, *self.places)
        self.check(spec, inputs, window)
        for field in self.without:
            if getattr(inputs, field) is not None:
                raise ValueError(f"{self.name}: {field}: there is no argument for it")
        if spec.q_offset or spec.kv_offset:
            raise ValueError(f"{self.name}: q_offset, kv_offset: there is no argument for them")
        if spec.return_max_logit:
            raise ValueError(f"{self.name}: return_max_logit: it does not give the largest score")
        for which in ("q", "k", "v"):
            t = getattr(inputs, which)
            if t.stride(-1) != 1:
                raise ValueError(f"{self.name}: {which}.stride(-1) must be 1; got {t.stride(-1)}")
            wrong = misalignment(t)
            if wrong is not None:
                raise ValueError(f"{self.name}: {which}{wrong}")
        return window

    def check(self, spec: Spec, inputs: Inputs, window: tuple[int, int]) -> None:
        """Raise ValueError for what this package alone does not take: here, what 3 and 4 do not."""
        for which, t in (("q", inputs.q), ("v", inputs.v)):
            if t.shape[-1] % self.multiple:
                raise ValueError(
                    f"{self.name}: head_dim of {which} must be a multiple of {self.multiple}; "
                    f"got {t.shape[-1]}"
                )
        if spec.dropout_p:
            raise ValueError(f"{self.name}: dropout_p {spec.dropout_p}: it has no dropout")

    def forward(self, call: FlashCall, need_lse: bool) -> Forward:
        raise NotImplementedError

    def backward(
        self, call: FlashCall, five: Five, lse: Tensor, saved: tuple[Any, ...], dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k, v and the sinks; ``dlse`` is [b, s, h] or [t, h]."""
        raise NotImplementedError

    def parts(self, five: Five, dlse: Tensor | None) -> list[Five]:
        """What the plain backward is called with, once or twice, for these gradients.

        With head dimensions of their own, only some pairs have a kernel: none is widened then.
        """
        equal = five.q.shape[-1] == five.v.shape[-1]
        room = self.room if equal else 0
        return with_lse_gradient(five, dlse, multiple=self.multiple, room=room, equal_head_dims=equal)

    def gradients(
        self, run: Function, five: Five, dlse: Tensor | None, lse: Tensor, others: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """What a backward of 2 or 3 writes into the memory it is given.

        ``lse`` is read by its address: it is contiguous here. ``others``: the arguments beside these.
        """
        lse, made = lse.contiguous(), []
        for part in self.parts(five, dlse):
            grads = {
                f"d{name}": torch.empty_like(t, memory_format=torch.contiguous_format)
                for name, t in zip("qkv", part[:3], strict=True)
            }
            self.run(run, {**others, **part._asdict(), "softmax_lse": lse, **grads})
            made.append(tuple(grads.values()))
        dq, dk, dv = added(made)
        return dq, dk, dv, None

    def public(self, call: FlashCall) -> Callable[[Tensor, Tensor, Tensor], Any]:
        """The package's own differentiable function for a dense call of these settings: out, or a tuple that
        begins with it."""
        settings = {
            "softmax_scale": call.softmax_scale,
            "causal": call.causal,
            "window_size": (call.window_left, call.window_right),
            "softcap": call.softcap,
            "deterministic": call.deterministic,
        }
        return self.function("flash_attn_func").bound(settings | self.more(call), self.off)

    def more(self, call: FlashCall) -> dict[str, Any]:
        """What ``public`` takes besides, or in another way."""
        return {}


class Kernel:
    """The contract's functions for one package."""

    def __init__(self, package: Package) -> None:
        self.package = package

    def prepare(self, spec: Spec, inputs: Inputs) -> None:
        """Raises ValueError, naming the argument, for what the package cannot take or would misunderstand,
        and RuntimeError where it does not import."""
        self._window(spec, inputs)

    def _window(self, spec: Spec, inputs: Inputs) -> tuple[int, int]:
        """The bounds of a call that was looked at as ``prepare`` does."""
        check_tensors(spec, inputs)
        check_rows_given(spec, inputs)
        window = self.package.window(spec, inputs)
        check_rows(self.package.name, spec, inputs)
        return window

    def forward(self, spec: Spec, inputs: Inputs) -> Result:
        """The contract's forward. Raises as ``prepare`` does."""
        window = self._window(spec, inputs)
        with torch.no_grad():
            form = Form(spec, inputs, self.package.lse_by_sequence)
            call, _ = _call(spec, inputs, form, window)
            need_lse = spec.need_lse or spec.need_grad
            out, lse, saved = self.package.forward(call, need_lse)
            if not need_lse:
                return Result(form.out(out), None, None, saved)
            assert lse is not None
            # Of a real row, only one without a key has +inf.
            lse = lse.masked_fill_(lse == torch.inf, -torch.inf)
            return Result(form.out(out), form.lse(lse), None, saved)

    def backward(
        self, spec: Spec, inputs: Inputs, result: Result, dout: Tensor, dlse: Tensor | None = None
    ) -> Grads:
        """The contract's backward, from ``result.out`` and ``result.lse`` (which may be merged ones).

        Raises ValueError as ``prepare`` does, and for a forward without ``lse``, or with dropout and without
        ``saved``.
        """
        window = self._window(spec, inputs)
        lse = lse_of_forward(spec, result)
        check_gradients(spec, inputs, result, dout, dlse)
        with torch.no_grad():
            form = Form(spec, inputs, self.package.lse_by_sequence)
            call, factor = _call(spec, inputs, form, window)
            out, dout, lse = form.rows(result.out), form.rows(dout), form.lse_of_op(lse)
            outside = None if form.sequences is None else form.sequences.q.outside
            if call.sinks is not None and outside is not None:
                # What is no sequence's must not reach the sinks' gradient, which is summed over all rows.
                dout = dout.masked_fill(outside.view(-1, 1, 1), 0.0)
                lse = lse.masked_fill(outside, torch.inf)
            five = Five(call.q, call.k, call.v, readable(out), readable(dout))
            rows = None if dlse is None else form.lse_rows(dlse)
            dq, dk, dv, dsinks = self.package.backward(call, five, lse, result.saved, rows)
            dq, dk, dv = (
                grad.narrow(-1, 0, t.shape[-1]) for grad, t in zip((dq, dk, dv), five, strict=False)
            )
            return Grads(
                form.out(dq if factor == 1.0 else dq * factor),
                form.kv_grad(dk),
                form.kv_grad(dv),
                None,
                None if dsinks is None or inputs.softmax_offset is None else dsinks.to(inputs.softmax_offset),
            )

    def bind(self, spec: Spec, inputs: Inputs) -> Callable[..., Tensor] | None:
        """The package's own differentiable function, for dense batches of q, k and v alone; None for
        others."""
        window = self._window(spec, inputs)
        if spec.packed or spec.softmax_type != "vanilla" or any(t is not None for t in inputs[3:]):
            return None
        call, factor = _call(spec, inputs, Form(spec, inputs), window)
        function = self.package.public(call)

        def bound(q: Tensor, k: Tensor, v: Tensor, *others: None) -> Tensor:
            if any(other is not None for other in others):
                raise ValueError("this call was bound for q, k and v alone")
            q = q.transpose(1, 2)
            out = function(q if factor == 1.0 else q * factor, k.transpose(1, 2), v.transpose(1, 2))
            first: Tensor = out[0] if isinstance(out, tuple) else out
            return first.transpose(1, 2)

        return bound


def _call(spec: Spec, inputs: Inputs, form: Form, window: tuple[int, int]) -> tuple[FlashCall, float]:
    """The call, and what q was multiplied by so that the scale is above 0."""
    factor, scale = above_zero(spec.softmax_scale)
    q, k, v = form.qkv()
    cu_q, cu_kv, longest_q, longest_kv = form.lengths()
    sequences, slopes = form.sequences, inputs.alibi_slopes
    if slopes is not None and slopes.dim() == 2 and cu_q is not None:
        # Padding and gaps doubled the sequences.
        slopes = slopes.repeat_interleave((cu_q.shape[0] - 1) // slopes.shape[0], 0)
    return FlashCall(
        q if factor == 1.0 else q * factor,
        k,
        v,
        cu_q,
        cu_kv,
        longest_q,
        longest_kv,
        None if sequences is None else sequences.seqused_kv,
        None if sequences is None else sequences.block_table,
        scale,
        *window,
        spec.softcap,
        spec.dropout_p,
        spec.deterministic,
        slopes,
        _sinks(spec, inputs),
        inputs.cu_seqlens_q_padded is not None or inputs.cu_seqlens_kv_padded is not None,
    ), factor


def _sinks(spec: Spec, inputs: Inputs) -> Tensor | None:
    if spec.softmax_type == "vanilla":
        return None
    if spec.softmax_type == "off-by-one":
        return inputs.q.new_zeros(inputs.q.shape[1], dtype=torch.float32)
    if inputs.softmax_offset is None:
        raise ValueError("softmax_type 'learnable' needs inputs.softmax_offset")
    return inputs.softmax_offset.float().contiguous()
