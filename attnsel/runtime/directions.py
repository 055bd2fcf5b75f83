"""A backward of its own, and dropout that can be told: for whoever merges partial results.

Ring attention runs the forward on each part of the keys, merges outputs and log-sum-exps itself, and runs the
backward on each part with the merged ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attnsel import debug
from attnsel.backends import sdpa
from attnsel.backends.contract import Grads, Result
from attnsel.backends.tiled.philox import keep_mask, make_key
from attnsel.candidates import CANDIDATES
from attnsel.runtime import bind as _bind
from attnsel.runtime import run as _run
from attnsel.runtime.bind import Bound, CannotPrepare
from attnsel.runtime.cache import BoundedCache
from attnsel.runtime.call import Config, Extras
from attnsel.runtime.refusals import refusal_of
from attnsel.select import Selection
from attnsel.settings import Settings, current, override

_CONTRACTS_GENERATOR = ("triton", "tiled")  # and plug-ins, which must
_backwards: BoundedCache[Bound] = BoundedCache(limit=4096)


@contextmanager
def seeded_dropout() -> Iterator[None]:
    """Only candidates that drop by the contract's generator, besides what the policy says.

    On all of those a seed keeps the same entries; cuDNN replays a seed too, but by a generator of its own.
    """
    others = [name for name, info in CANDIDATES.items() if not (info.plugin or name in _CONTRACTS_GENERATOR)]
    with override(deny=tuple(dict.fromkeys((*current().policy.deny, *others)))):
        yield


def draw_seed(device: torch.device) -> Tensor:
    """An int64 scalar from the device's generator, for ``Extras.dropout_seed``."""
    return torch.randint(0, 2**62, (), dtype=torch.int64, device=device)


def kept(seed: Tensor, dropout_p: float, batch: int, heads: int, rows: int, columns: int) -> Tensor:
    """Which entries dropout kept under a seed: bool [batch, heads, rows, columns]."""
    ranges = (range(batch), range(heads), range(rows), range(columns))
    return keep_mask(make_key(seed, None), dropout_p, *ranges)


def backward(
    config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, out: Tensor, lse: Tensor, dout: Tensor
) -> Grads:
    """Gradients of q, k and v from an output and log-sum-exp that may be merged from parts of the keys.

    Tensors in ``config.qkv_format``; ``lse`` float32 [b, h, s_q] or [h, t_q], -inf where a row saw no key.
    ``config`` must say is_training, return_lse and adapt "never"; with dropout, ``extras.dropout_seed`` and
    ``seeded_dropout()``. Raises as ``attend`` does.
    """
    settings = current()
    key = _run._key(config, settings, q, k, v, extras)
    bound = _backwards.get(key)
    if bound is None:
        settings = _run._same_settings(settings)
        bound = _prepare(config, q, k, v, extras, settings)
        _backwards.add((*key[:2], id(settings), *key[3:]), bound)
    with torch.no_grad():
        grads: Grads = bound.run(q, k, v, extras, out, lse, dout)
    return grads


def _prepare(config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, settings: Settings) -> Bound:
    while True:
        selection = _run._select(config, q, k, v, extras, settings, _run._evidence).require()
        debug.announce(selection, settings, config.label)
        try:
            return Bound(_bound(selection, config, q, k, v, extras, settings), selection, settings)
        except CannotPrepare as error:
            _run.learn([refusal_of(selection, error)], settings)


def _bound(
    selection: Selection, config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, settings: Settings
) -> Callable[..., Grads]:
    """The chosen kernel's backward. Raises CannotPrepare when it refuses what the rules allowed."""
    assert selection.backend is not None
    name, kernel = selection.backend, _bind.kernel_of(selection.backend)
    spec = _bind.make_spec(config, selection.params, need_grad=True)
    gather = _bind._gather(config, spec, _bind.replays_dropout(name), settings)
    to_kernel, to_caller = _bind._TO_KERNEL[config.qkv_format], _bind._TO_CALLER[config.qkv_format]
    if kernel.prepare is not None:
        _bind._prove(kernel.prepare, spec, gather, q, k, v, extras)
    saved: tuple[Tensor, ...] = ()
    if name in sdpa.KERNELS:
        # What dropout would be replayed from. There is none here, but the ops want the arguments.
        saved = (torch.zeros((), dtype=torch.int64, device=q.device),) * 2

    def run(q: Tensor, k: Tensor, v: Tensor, extras: Extras, out: Tensor, lse: Tensor, dout: Tensor) -> Grads:
        inputs = gather(q, k, v, extras)
        grads = kernel.backward(spec, inputs, Result(to_kernel(out), lse, None, saved), to_kernel(dout))
        return Grads(to_caller(grads.q), to_caller(grads.k), to_caller(grads.v))

    return run
