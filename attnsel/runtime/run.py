"""The way of a call: look up its signature, else choose and bind, then run.

Two caches: signatures to closures here, questions to selections in ``attnsel.select``. Neither lives in a
module, so modules stay deep-copyable and picklable.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from attnsel import debug
from attnsel.backends import sdpa
from attnsel.environment import Device, Environment
from attnsel.policy import Policy
from attnsel.runtime import compiled
from attnsel.backends.contract import Grads
from attnsel.runtime.bind import Bound, CannotPrepare, bind, gradients
from attnsel.runtime.cache import BoundedCache, CacheInfo
from attnsel.runtime.call import NO_EXTRAS, Config, Extras, signature
from attnsel.runtime.inputs import ask
from attnsel.select import NO_EVIDENCE, Evidence, Refusal, Selection, select
from attnsel.settings import Settings, current

_bound: BoundedCache[Bound] = BoundedCache(limit=4096)
_evidence: Evidence = NO_EVIDENCE
_evidence_lock = threading.Lock()


def attend(
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras = NO_EXTRAS,
    holder: dict[str, Any] | None = None,
) -> Any:
    """One attention call with the best candidate that can run it.

    Returns the output, or a tuple with what else the config asks for. ``holder["_last"]`` is set to what ran.
    Raises InvalidInput before anything runs, NoBackendError with every reason when nothing can.
    """
    if torch.compiler.is_compiling():
        return compiled.attend(config, q, k, v, extras)
    if isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    bound = find(config, q, k, v, extras)
    if holder is not None:
        holder["_last"] = bound
    return bound.run(q, k, v, extras)


def find(config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras = NO_EXTRAS) -> Bound:
    """The bound closure for this signature, from the cache if it was met before."""
    settings = current()
    try:
        key = (
            config,
            settings,
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            q.shape, q.stride(), q.storage_offset(), q.dtype, q.device, q.requires_grad,
            k.shape, k.stride(), k.storage_offset(), k.dtype, k.device, k.requires_grad,
            v.shape, v.stride(), v.storage_offset(), v.dtype, v.device, v.requires_grad,
            None if extras is NO_EXTRAS else signature(extras),
        )  # fmt: skip
    except AttributeError:  # something that is no tensor: let the checks name it
        ask(config, q, k, v, extras, config.is_training)
        raise
    return _bound.get(key) or _bound.add(key, lambda: _choose(config, q, k, v, extras, settings))


def explain(config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras = NO_EXTRAS) -> Selection:
    """The selection this call would get, without running it."""
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    return _select(config, q, k, v, extras, current())


def recompute_gradients(
    config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, dout: Tensor
) -> Grads:
    """Gradients of ``attend`` without autograd: the same choice, forward and backward in one go."""
    settings = current()
    selection = _select(config, q, k, v, extras, settings).require()
    return gradients(selection, config, settings, q, k, v, extras, dout)


def cache_info() -> CacheInfo:
    """Hits, misses and size of the signature cache."""
    return _bound.info()


def clear_cache() -> None:
    """Forget bound kernels, and what kernels refused in this process."""
    global _evidence
    with _evidence_lock:
        _evidence = NO_EVIDENCE
    _bound.clear()


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast does to F.scaled_dot_product_attention: float32 and 16-bit inputs to its type."""
    dtype = torch.get_autocast_dtype(q.device.type)
    castable = (torch.float32, torch.float16, torch.bfloat16)
    cast = [t.to(dtype) if isinstance(t, Tensor) and t.dtype in castable else t for t in (q, k, v)]
    return cast[0], cast[1], cast[2]


def _needs_grad(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> bool:
    if not torch.is_grad_enabled():
        return False
    others = (extras.core_attention_bias, extras.softmax_offset)
    return any(t is not None and t.requires_grad for t in (q, k, v, *others))


def _select(
    config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, settings: Settings
) -> Selection:
    training = config.is_training or _needs_grad(q, k, v, extras)
    p = ask(config, q, k, v, extras, training)
    return select(p, _environment(q), policy=_policy(config, settings), evidence=_evidence)


def _policy(config: Config, settings: Settings) -> Policy:
    policy = settings.policy
    changes: dict[str, Any] = {
        name: getattr(config, name) for name in ("backend", "adapt") if getattr(config, name)
    }
    if config.replayable:
        # sdpa.math has no backward outside autograd; with dropout all of these draw for themselves, and a
        # recompute could not drop the same entries.
        barred = sdpa.KERNELS if config.attention_dropout else ("sdpa.math",)
        changes["deny"] = tuple(dict.fromkeys((*policy.deny, *barred)))
    return policy.replace(**changes) if changes else policy


def _environment(q: Tensor) -> Environment:
    if type(q) is not Tensor and q.device.type == "cuda" and not torch.cuda.is_available():
        # A fake CUDA tensor on a machine without CUDA: only its shape is wanted.
        return Environment.detect("cpu").replace(device=Device(type="meta", name="fake"))
    return Environment.detect(q.device)


def _choose(
    config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, settings: Settings
) -> Bound:
    """Select and prepare; a kernel that refuses to be prepared is evidence, and the next one is tried."""
    global _evidence
    need_grad = _needs_grad(q, k, v, extras)
    while True:
        selection = _select(config, q, k, v, extras, settings).require()
        debug.announce(selection, settings, config.label)
        try:
            return bind(selection, config, q, k, v, extras, need_grad, settings)
        except CannotPrepare as error:
            assert selection.backend is not None
            refusal = Refusal(selection.backend, selection.params, str(error))
            debug.warn_fallback(selection.backend, str(error), settings)
            with _evidence_lock:
                _evidence = _evidence.plus(refusal)

