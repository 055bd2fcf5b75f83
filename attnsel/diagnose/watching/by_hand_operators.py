"""What each aten operator does to what is followed: scores, probabilities, and the tensors they are made of.

A function takes the reader, the operator's arguments and its result, and returns the role of the result's
storage; None where it has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnsel.diagnose.watching.by_hand_call import (
    Addition,
    Operand,
    Role,
    TracedProduct,
    first_value,
    zeros_and_ones,
)
from attnsel.diagnose.watching.by_hand_tried import heads_of

Handler = Callable[["ByHand", tuple[Any, ...], dict[str, Any], Any], "Role | None"]

FAR = 1e4
"""A bound that no score comes to, but one that hides its pair."""

HIDING = -50.0
"""A value that overwrites a score and is below this hides the pair."""


def _made(role: Role, what: str, x: Tensor, out: Tensor) -> None:
    same = isinstance(x, Tensor) and isinstance(out, Tensor) and x.data_ptr() == out.data_ptr()
    if role.call is not None and not role.call.done and not same:
        role.call.made_of(what, out)


# ---- products ---------------------------------------------------------------------------------------


def _bmm(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    return _product(reader, "bmm", args[0], args[1], out)


def _matmul(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    """As it comes in inference mode, where a mode is not given its pieces."""
    a, b = args[0], args[1]
    if min(a.dim(), b.dim()) < 2 or (a.dim() > 2 and b.dim() > 2 and a.shape[:-2] != b.shape[:-2]):
        return None
    return _product(reader, "mm" if b.dim() == 2 else "bmm", a, b, out)


def _mm(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    return _product(reader, "mm", args[0], args[1], out)


def _baddbmm(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    role = _product(reader, "baddbmm", args[1], args[2], out)
    if role is not None and role.kind == "scores" and role.call is not None:
        if not role.call.multiplied(first_value(kwargs.get("alpha", 1))):
            return None
        times = first_value(kwargs.get("beta", 1)) or 0.0
        if times:
            role.call.additions.append(Addition(args[0], None, times))
    return role


def _product(reader: ByHand, operator: str, a: Tensor, b: Tensor, out: Tensor) -> Role | None:
    """Probabilities times values end a call; else it may be the scores of another."""
    left, right = reader.role(a), reader.role(b)
    for role, (p, v, o), contracted in (
        (left, (a, b, out), a.shape[-1]),
        (right, (b, a.mT, out.mT), b.shape[-2]),
    ):
        if role is None or role.call is None or role.call.done:
            continue
        call, name = role.call, f"aten::{operator}"
        if "probabilities" in (role.kind, role.of):
            if contracted == call.s_kv:
                call.between += role.path
                call.ended(p, v, o)
                reader.finish(call, v, v.shape[-1], name)
                return None
            if out.numel() == p.numel():  # heads that are mixed
                return role._replace(kind="other", of="probabilities", path=(*role.path, name))
        if role.kind == "exponentials" and contracted in (call.rows, call.columns):
            call.operators.append(name)
            call.ended(p, v, o)
            return Role("output", call, number=v.shape[-1])
    operands = reader.operand(a), reader.operand(b)
    if operator == "mm" and (operands[0].parameter or operands[1].parameter):
        return None
    call = TracedProduct(f"aten::{operator}", a, b, *operands)
    call.made_of("scores", out)
    reader.hold(call)
    return Role("scores", call)


# ---- arithmetic -------------------------------------------------------------------------------------


def _mul(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    x, y = args[0], args[1]
    if (reader.role(x) is None or not isinstance(x, Tensor)) and reader.role(y) is not None:
        x, y = y, x
    return _times(reader, x, y, out, inverse=False)


def _div(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    x, y = args[0], args[1]
    role, by = reader.role(x), reader.role(y)
    if role is not None and by is not None and by.kind == "sum" and by.call is role.call is not None:
        if role.kind == "exponentials":
            _made(role, "probabilities", x, out)
            return role._replace(kind="probabilities")
        if role.kind == "output" and role.call.shape:
            role.call.out = heads_of(out, role.call.batch)
            reader.finish(role.call, out, int(role.number), "aten::div")
            return None
    return _times(reader, x, y, out, inverse=True)


def _times(reader: ByHand, x: Any, y: Any, out: Tensor, *, inverse: bool) -> Role | None:
    role, other = reader.role(x), reader.role(y)
    number = first_value(y) if not isinstance(y, Tensor) or y.numel() == 1 else None
    if number is not None and inverse:
        number = 1.0 / number if number else None
    if role is None or role.kind == "operand":
        if number is None or not isinstance(x, Tensor):
            return None
        own = reader.operand(x)
        return Role("operand", operand=own._replace(factor=own.factor * number))
    if role.kind == "scores" and role.call is not None and (other is None or other.kind == "operand"):
        learned = isinstance(y, Tensor) and not role.call.is_default(number)
        if number is not None and not learned:
            said = role.call.multiplied(number)
        elif number is None and isinstance(y, Tensor) and zeros_and_ones(y):  # w * mask + -1e4 * (1 - mask)
            role.call.zeroed.append(y)
            said = True
        else:
            said = isinstance(y, Tensor) and role.call.tempered(y, inverse=inverse)
        _made(role, "scores, scaled", x, out)
        return role if said else None
    if role.kind == "probabilities" and role.call is not None:
        if other is not None and other.kind == "noise":
            role.call.dropped(other.number, x)
            _made(role, "probabilities, dropped", x, out)
            return role
        _made(role, "probabilities, multiplied", x, out)
        return None
    return role if role.kind == "noise" else None


def _sub(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    by = reader.role(args[1])
    role = reader.role(args[0])
    if by is not None and by.kind == "logsumexp" and role is not None and by.call is role.call is not None:
        role.call.normalised = True
        _made(role, "scores less their log-sum-exp", args[0], out)
        return role
    return _plus(reader, args, kwargs, out, sign=-1.0)


def _plus(
    reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, *, sign: float = 1.0
) -> Role | None:
    x, y = args[0], args[1]
    role, other = reader.role(x), reader.role(y)
    if sign > 0 and (role is None or role.kind != "scores") and other is not None:
        x, y, role, other = y, x, other, role
    if role is None or role.call is None:
        return None
    if role.kind == "sum":  # a small number against division by zero
        number = first_value(y)
        return role if number is not None and abs(number) <= 1e-6 else None
    if role.kind != "scores" or role.call.sink or (other is not None and other.call is role.call):
        return None
    if isinstance(y, Tensor) and y.numel() > 1:
        if y.dim() > out.dim() or y.shape[-1] not in (1, out.shape[-1]):
            return None
        times = sign * (first_value(kwargs.get("alpha", 1)) or 1.0)
        role.call.additions.append(Addition(y, None, times))
        if y.shape[-1] > 1:
            _made(role, "scores with mask or bias", x, out)
            return role
    _made(role, "scores, shifted", x, out)
    return role


def _tanh(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    role = reader.role(args[0])
    if role is None or role.kind != "scores" or role.call is None:
        return None
    _made(role, "scores, capped", args[0], out)
    return role if role.call.capped() else None


# ---- masks ------------------------------------------------------------------------------------------


def _masked_fill(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    x, mask, value = args[0], args[1], args[2]
    return _hidden(reader, x, Addition(mask, True), value, out)


def _where(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    if len(args) < 3:
        return None
    condition, x, y = args[0], args[1], args[2]
    if reader.role(x) is not None:
        return _hidden(reader, x, Addition(condition, False), y, out)
    return _hidden(reader, y, Addition(condition, True), x, out)


def _hidden(reader: ByHand, x: Any, mask: Addition, value: Any, out: Tensor) -> Role | None:
    role = reader.role(x)
    if role is None or role.call is None or role.kind not in ("scores", "probabilities"):
        return None
    _made(role, f"{role.kind}, masked", x, out)
    number, made_of = first_value(value), reader.role(mask.tensor)
    derived = made_of is not None and made_of.call is not None
    if role.kind != "scores" or number is None or number > HIDING or derived:
        return None
    role.call.additions.append(mask)
    return role


def _kept(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Role | None:
    """A clamp far from any score, a nan_to_num of rows that see nothing: what it was, it is still."""
    role = reader.role(args[0])
    if role is None or role.call is None or role.kind not in ("scores", "probabilities"):
        return None
    _made(role, f"{role.kind}, once more", args[0], out)
    return role


def _clamp(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Role | None:
    bounds = [*map(first_value, args[1:]), *map(first_value, kwargs.values())]
    far = all(bound is None or abs(bound) >= FAR for bound in bounds)
    return _kept(reader, args, kwargs, out) if far else None


def _nan_to_num(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Role | None:
    role = reader.role(args[0])
    plain = role is not None and role.kind == "probabilities" and not (len(args) > 1 and args[1])
    return _kept(reader, args, kwargs, out) if plain else None


# ---- softmax ----------------------------------------------------------------------------------------


def _softmax(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    role = reader.role(args[0])
    if role is None or "scores" not in (role.kind, role.of) or role.call is None:
        return None
    if not reader.softmaxed(role.call, args[0], int(args[1])):
        return None
    role.call.between += role.path
    role.call.operators.append("aten::_softmax")
    role.call.made_of("probabilities", out)
    return Role("probabilities", role.call)


def _exp(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    role = reader.role(args[0])
    if role is None or role.kind != "scores" or role.call is None:
        return None
    if role.call.normalised:
        if not reader.softmaxed(role.call, args[0], role.call.dim):
            return None
        role.call.operators.append("aten::exp")
        role.call.made_of("probabilities", out)
        return role._replace(kind="probabilities")
    role.call.operators.append("aten::exp")
    role.call.made_of("exponentials", out)
    return role._replace(kind="exponentials")


def _sum(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    """The sum over keys: of exponentials, it is softmax's denominator."""
    role, dim = reader.role(args[0]), _one_dim(args)
    if role is None or role.kind != "exponentials" or role.call is None or dim is None:
        return None
    if not role.call.shape and not reader.softmaxed(role.call, args[0], dim):
        return None
    return role._replace(kind="sum")


def _logsumexp(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    role, dim = reader.role(args[0]), _one_dim(args)
    if role is None or role.kind != "scores" or role.call is None or dim is None:
        return None
    role.call.dim = dim
    return role._replace(kind="logsumexp")


def _one_dim(args: tuple[Any, ...]) -> int | None:
    dims = args[1] if len(args) > 1 else None
    if isinstance(dims, (list, tuple)):
        return int(dims[0]) if len(dims) == 1 else None
    return int(dims) if isinstance(dims, int) else None


def _cat(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    """Scores of several pieces, or scores and a column of sinks."""
    tensors = args[0]
    role = reader.role(tensors[0]) if tensors else None
    if role is None or role.kind not in ("scores", "probabilities") or role.call is None:
        return None
    dim = int(args[1]) if len(args) > 1 else 0
    if role.kind == "scores" and len(tensors) == 2 and dim % out.dim() == out.dim() - 1:
        role.call.sink = tensors[1].shape[-1] == 1 and reader.role(tensors[1]) is None
        role.call.sinks = tensors[1].detach().clone() if role.call.sink else None
    role.call.pieces = role.call.pieces or not role.call.sink
    role.call.made_of(f"{role.kind}, put together", out)
    return role


# ---- dropout ----------------------------------------------------------------------------------------


def _native_dropout(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Role | None:
    role = reader.role(args[0])
    if role is None or role.kind != "probabilities" or role.call is None:
        return None
    if len(args) < 3 or args[2]:
        role.call.dropped(float(args[1]), args[0])
    _made(role, "probabilities, dropped", args[0], out[0])
    return role


def _bernoulli(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    keep = args[1] if len(args) > 1 else 0.5 if out is args[0] else None  # bernoulli_'s own default
    return Role("noise", number=round(1.0 - keep, 9)) if isinstance(keep, float) else None


# ---- copies -----------------------------------------------------------------------------------------


def _copied(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    """A cast or a copy: of what is followed, or of q, k or v, where it may repeat heads."""
    x = args[0]
    if not isinstance(x, Tensor) or not isinstance(out, Tensor):
        return None
    role = reader.role(x)
    if role is not None and role.kind not in ("operand",):
        dtype = str(out.dtype).removeprefix("torch.")
        what = f"{role.kind} as {dtype}" if out.dtype != x.dtype else f"{role.kind}, copied"
        _made(role, what, x, out)
        return role
    own = reader.operand(x)
    repeats = _repeats(x) * (out.numel() // x.numel() if x.numel() else 1)
    if out.element_size() > x.element_size() and x.is_floating_point():
        own = own._replace(dtype=own.dtype or x.dtype)
    if repeats > 1:
        own = own._replace(repeats=own.repeats * repeats)
    return Role("operand", operand=own) if own != Operand() else None


def _repeats(x: Tensor) -> int:
    """How often each number of ``x`` stands in it."""
    times = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        times *= size if stride == 0 and size > 1 else 1
    return times


def _copy(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Role | None:
    """dst.copy_(src): pieces of scores or probabilities, written to where all of them will be."""
    role = reader.role(args[1])
    if role is None or role.call is None or role.kind not in ("scores", "probabilities"):
        return reader.role(args[0])
    role.call.pieces = True
    return role


def _view(reader: ByHand, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Role | None:
    """A view of a weight is a weight; what else is viewed is known by its storage."""
    x = args[0]
    if isinstance(x, torch.nn.Parameter) and isinstance(out, Tensor):
        return Role("operand", operand=Operand(parameter=True))
    return reader.role(x)


HANDLERS: dict[str, Handler] = {
    "bmm": _bmm,
    "matmul": _matmul,
    "mm": _mm,
    "baddbmm": _baddbmm,
    "mul": _mul,
    "div": _div,
    "add": _plus,
    "sub": _sub,
    "tanh": _tanh,
    "masked_fill": _masked_fill,
    "where": _where,
    "_softmax": _softmax,
    "softmax": _softmax,
    "_safe_softmax": _softmax,
    "exp": _exp,
    "sum": _sum,
    "logsumexp": _logsumexp,
    "cat": _cat,
    "native_dropout": _native_dropout,
    "bernoulli": _bernoulli,
    "copy": _copy,
    **dict.fromkeys(("_to_copy", "clone", "repeat", "contiguous", "repeat_interleave"), _copied),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "maximum"), _clamp),
    "nan_to_num": _nan_to_num,
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "expand", "permute", "transpose", "t"), _view),
    **dict.fromkeys(("unsqueeze", "squeeze", "slice", "select", "split", "unbind", "as_strided"), _view),
    **dict.fromkeys(("detach", "alias"), _view),
}
"""By an operator's name, without the underscore of its form that works in place."""


# ---- Attention written by hand, found by its operators: a softmax between two products -----------------
# A reader of aten operators, as a TorchDispatchMode sees them: scores are followed from the product of
# queries and keys through scales, masks, casts and dropout to the product with the values. What is followed
# is known by its storage, so views cost nothing. A product with a weight of the model gives no scores: a
# classifier's logits, a router's, or a codebook's are not attention, and neither is log_softmax.
#
# Not found: scores made without a matrix product, and probabilities that a function of another library (a
# Triton kernel, a C++ extension) makes.


MOST_ROLES = 4096
"""Storages that are followed at a time; beyond it all is forgotten but the newest call."""

MOST_UNREAD = 4
"""Operators that are named of those that were not read."""

_FOLLOWED = ("scores", "probabilities", "exponentials", "other")
_PRODUCTS = ("bmm", "mm", "baddbmm", "addmm", "matmul", "linear")

HELD_CALLS = 8
"""Calls of which masks, and copies of a few heads, are kept until they are over."""


class ByHand:
    """Reads operators one after the other, and tells ``found`` of each attention, at its last product.

    ``softmax`` is told of each softmax of scores, and whether it is one over keys; it says whether
    to go on.
    """

    def __init__(
        self,
        found: Callable[[TracedProduct], None],
        softmax: Callable[[TracedProduct, bool], bool] = lambda call, attention: attention,
    ) -> None:
        self._found, self._softmax = found, softmax
        self._roles: dict[int, Role] = {}
        self._held: deque[TracedProduct] = deque()

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One operator that ran: ``func(*args, **kwargs)`` gave ``out``."""
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(first, Tensor) or first.is_nested:
            return
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        handler = HANDLERS.get(name)
        role = handler(self, args, kwargs, out) if handler is not None and args else None
        where = _storage(first)
        if role is None and name not in _PRODUCTS:
            role = self._unread(func, name, args, first)
        if role is not None:
            if len(self._roles) > MOST_ROLES:
                self._roles.clear()
            self._roles[where] = role
        elif where in self._roles and not any(
            isinstance(one, Tensor) and _storage(one) == where for one in args
        ):
            del self._roles[where]  # memory that something else was written to

    def _unread(self, func: Any, name: str, args: tuple[Any, ...], out: Tensor) -> Role | None:
        """What an operator that is not read made of scores or probabilities: it may be all of them."""
        if name.endswith("_like") or name.startswith("new_"):
            return None  # of their shape alone
        for one in (part for arg in args for part in (arg if isinstance(arg, (list, tuple)) else (arg,))):
            role = self.role(one)
            if role is None or role.call is None or role.call.done or role.kind not in _FOLLOWED:
                continue
            if _storage(one) == _storage(out) and not func._schema.is_mutable:
                return role  # a view
            if one.numel() == out.numel():
                path = dict.fromkeys((*role.path, f"aten::{name}"))
                return Role("other", role.call, of=role.of or role.kind, path=tuple(path)[:MOST_UNREAD])
        return None

    def passed_by(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """A function of torch's whose operators were not read gave ``out``."""
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(first, Tensor):
            return
        where, role = _storage(first), None
        for one in (arg for arg in args if isinstance(arg, Tensor)):
            known = self.role(one)
            same = _storage(one) == where
            if same and (known is None or not name.endswith("_")):
                return  # a view
            if known is None or known.call is None or known.call.done or known.kind not in _FOLLOWED:
                continue
            if same or one.numel() == first.numel():
                path = (*known.path, name.strip("_"))[:MOST_UNREAD]
                role = Role("other", known.call, of=known.of or known.kind, path=path)
                break
        self._roles.pop(where, None)  # memory that something else was written to
        if role is not None:
            self._roles[where] = role

    def forget(self) -> None:
        """All that is followed."""
        self._roles.clear()
        self._held.clear()

    def role(self, value: Any) -> Role | None:
        if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
            return self._roles.get(_storage(value))
        return None

    def operand(self, value: Tensor) -> Operand:
        if isinstance(value, torch.nn.Parameter):
            return Operand(parameter=True)
        role = self._roles.get(_storage(value))
        own = role.operand if role is not None and role.kind == "operand" else Operand()
        return own._replace(parameter=own.parameter or isinstance(value._base, torch.nn.Parameter))

    def softmaxed(self, call: TracedProduct, x: Tensor, dim: int) -> bool:
        attention = call.softmaxed(x, dim)
        call.shape = tuple(x.shape)
        return self._softmax(call, attention)

    def hold(self, call: TracedProduct) -> None:
        """Keep the tensors of the newest calls; those of older ones are let go."""
        if call not in self._held:
            self._held.append(call)
            if len(self._held) > HELD_CALLS:
                self._held.popleft().let_go()

    def finish(self, call: TracedProduct, values: Tensor, head_dim_v: int, operator: str) -> None:
        if call.shape and not call.done:
            repeats = self.operand(values).repeats
            if repeats > 1:
                call.key = call.key._replace(repeats=max(repeats, call.key.repeats))
            call.operators.append(operator)
            call.finish(head_dim_v)
            self._found(call)


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse tensors, and those of other libraries
        return -id(tensor)
