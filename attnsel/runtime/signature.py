"""By what a call is remembered: its signature, and a short cut to the last call that was like it.

A signature is all that a choice, or a closure made for it, may depend on; making one costs more than to look
it up. So a call is first held against the last ones that were like it in what is cheap to ask, its outline.
Whether its tensors are like theirs PyTorch's own guards say, one call in C++. They are private: where they do
not tell apart what they are relied on for, there is no such short cut.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attnsel.backends.checks import is_transformed
from attnsel.errors import InvalidInput
from attnsel.runtime.cache import BoundedCache
from attnsel.runtime.call import NO_EXTRAS, Call, Config, Extras, known_to_be_trivial, misaligned
from attnsel.runtime.inputs import lengths_read, params_of

if TYPE_CHECKING:
    from attnsel.runtime.bind import Bound
    from attnsel.settings import Settings

Guard = Callable[..., bool]

_grad_enabled = torch.is_grad_enabled

_deterministic: Callable[[], bool] = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)


def signature_of(
    config: Config, settings: Settings, q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> tuple[Any, ...]:
    """All that a choice, or a closure made for it, may depend on. Raises InvalidInput for no tensor."""
    try:
        return (
            config,
            id(settings),  # hashing a model costs microseconds; the entry keeps this object alive
            _grad_enabled(),
            _deterministic(),
            torch.is_inference_mode_enabled(),  # guards that were made outside hold for no call inside
            is_transformed(),  # tensors that a transform wraps must not meet closures made for plain ones
            facts(q),
            facts(k),
            facts(v),
            None if extras is NO_EXTRAS else (*_beside(extras), *lengths_read(config, extras)),
        )
    except (AttributeError, TypeError, RuntimeError):  # no tensor, or one without strides
        params_of(Call(config, q, k, v, extras, settings, config.is_training))  # lets the checks name it
        raise


def facts(t: Tensor) -> tuple[Any, ...]:
    """All of a tensor but its contents.

    Of its address the part below 16 bytes: memory that another library made may begin anywhere.
    """
    kind = type(t)  # tensors without data must not meet closures made for those with
    try:
        lies = misaligned(t) if kind is FakeTensor else t.data_ptr() & 15
    except RuntimeError:  # one that a transform wraps
        lies = misaligned(t)
    return kind, t.shape, t.stride(), lies, t.dtype, t.device, t.requires_grad, t.is_neg()


def _beside(extras: Extras) -> tuple[Any, ...]:
    """What of the other tensors a choice may depend on: everything but their contents."""
    # One tensor for both lengths is more than two equal ones: some kernels then need no mask.
    same = extras.cu_seqlens_q is extras.cu_seqlens_kv
    mask = extras.attention_mask
    return (same, mask is not None and known_to_be_trivial(mask), *[_told(value) for value in extras])


def _told(value: Any) -> Any:
    if value is None or type(value) is int:
        return value
    if isinstance(value, int):
        return type(value), int(value)  # True is refused, whether or not 1 came before
    if isinstance(value, (tuple, list)):
        return tuple(_told(item) for item in value)
    return facts(value)


# ---- The short cut ----------------------------------------------------------------------------------


_GUARDED = (Tensor, torch.nn.Parameter)


def _guard(make: Any, *tensors: Tensor) -> Guard:
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    check: Guard = make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def _reliable_guards() -> Any:
    """``TensorGuards``, where those of this torch tell apart what ``facts`` does, but the address."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        t, like = (torch.zeros(2, 2, dtype=torch.float32, device="cpu") for _ in "12")
        others = (
            *(t[:, :1], t.t(), t.double(), t.to("meta"), torch._neg_view(t), t.to_sparse()),
            *(t.clone().requires_grad_(), torch.nn.Parameter(t, requires_grad=False)),
        )
        check = _guard(TensorGuards, t)
        return TensorGuards if check(like) and not any(check(other) for other in others) else None
    except Exception:  # private: it may go, or ask for other arguments
        return None


_Guards = _reliable_guards()


def guard_of(call: Call) -> Guard | None:
    """A check that the tensors of an outline are like those of this call; None where there is none."""
    try:
        tensors = (call.q, call.k, call.v, *_beside_guarded(call.config, call.extras)[1])
    except TypeError:
        return None
    if _Guards is None or is_transformed() or any(type(t) not in _GUARDED for t in tensors):
        return None
    return _guard(_Guards, *tensors)


def _beside_guarded(config: Config, extras: Extras) -> tuple[Any, tuple[Tensor, ...]]:
    """What a guard does not see of the other tensors, and those it is asked about. Raises TypeError for what
    cannot be guarded."""
    tensors_of, all_seen = _kinds(tuple(map(type, extras)), extras.cu_seqlens_q is extras.cu_seqlens_kv)
    told: Any = tensors_of
    if not all_seen:
        mask = extras.attention_mask
        told = (
            tensors_of,
            extras.max_seqlen_q,
            extras.max_seqlen_kv,
            mask is not None and known_to_be_trivial(mask),
            lengths_read(config, extras) if config.qkv_format == "thd" else (),
        )
    return told, tensors_of(extras)


_CONTENTS_ASIDE = frozenset({"core_attention_bias", "alibi_slopes", "softmax_offset", "dropout_seed"})


@lru_cache(maxsize=256)
def _kinds(kinds: tuple[type, ...], same: bool) -> tuple[Callable[[Extras], tuple[Tensor, ...]], bool]:
    """For extras of these types, ``same`` being one tensor for both lengths: what gives the tensors among
    them, each once, and stands for the types in an outline; and whether a guard sees all that counts of them.

    Raises TypeError where not all can be guarded.
    """
    if not set(kinds) <= {*_GUARDED, int, type(None)}:
        raise TypeError
    given = [n for n, kind in enumerate(kinds) if kind is not type(None)]
    once = Extras._fields.index("cu_seqlens_kv") if same else None
    places = [n for n in given if kinds[n] in _GUARDED and n != once]
    # Of a slice itemgetter gives a tuple, of a single place what stands there.
    one = slice(places[0], places[0] + 1) if places else slice(0)
    get = itemgetter(*places) if len(places) > 1 else itemgetter(one)
    return get, _CONTENTS_ASIDE.issuperset(Extras._fields[n] for n in given)


class CallCache(BoundedCache["Bound"]):
    """Calls that were met, by their signatures; and by outline the last two that were found."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._last: dict[Any, tuple[Bound, ...]] = {}

    def find(
        self, config: Config, settings: Settings, q: Tensor, k: Tensor, v: Tensor, extras: Extras
    ) -> Bound | None:
        """What was bound for a call like this one; None for a new one, and for what is no call at all."""
        if type(q) is FakeTensor:
            return None  # never kept
        outline: Any = None
        try:
            where = q.data_ptr() | k.data_ptr() | v.data_ptr()
            beside, others = (None, ()) if extras is NO_EXTRAS else _beside_guarded(config, extras)
            for t in others:
                where |= t.data_ptr()
            if not where & 15:  # a guard sees no addresses
                outline = (config, _grad_enabled(), _deterministic(), beside)
                for last in self._last.get(outline, ()):
                    if last.settings is settings and last.guard(q, k, v, *others):  # type: ignore[misc]
                        self.hits += 1
                        return last
        except (AttributeError, TypeError, RuntimeError):  # no address, or no guard: the signature says more
            outline = None
        try:
            bound = self.get(signature_of(config, settings, q, k, v, extras))
        except (AttributeError, TypeError, RuntimeError, InvalidInput):
            return None
        if bound is not None and bound.guard is not None and outline is not None:
            if len(self._last) >= self.limit:
                self._last = {}
            self._last[outline] = (bound, *self._last.get(outline, ())[:1])
        return bound

    def clear(self) -> None:
        super().clear()
        self._last = {}
