"""The way of a call: look up its signature, else choose and bind, then run.

Two caches: signatures to closures here, questions to selections in ``attnsel.select``. Neither lives in a
module, so modules stay deep-copyable and picklable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attnsel import debug
from attnsel.backends import sdpa
from attnsel.backends.contract import Grads
from attnsel.environment import Device, Environment
from attnsel.errors import InvalidInput, NoBackendError
from attnsel.layout import detect_layout
from attnsel.policy import Policy
from attnsel.runtime import compiled, selfcheck
from attnsel.runtime.bind import Bound, CannotPrepare, bind, bind_gradients
from attnsel.runtime.cache import BoundedCache, CacheInfo
from attnsel.runtime.call import NO_EXTRAS, Config, Extras, signature
from attnsel.runtime.inputs import ask
from attnsel.runtime.refusals import refusal_of
from attnsel.select import NO_EVIDENCE, Evidence, Refusal, Selection, select
from attnsel.settings import Settings, current

_bound: BoundedCache[Bound] = BoundedCache(limit=4096)
_backwards: BoundedCache[Bound] = BoundedCache(limit=4096)  # of operators that recompute
_settings: BoundedCache[Settings] = BoundedCache(limit=256)
_evidence: Evidence = NO_EVIDENCE
_evidence_lock = threading.Lock()
_MOST_REFUSALS = 256

# One look for all device types, where this torch has it: asking for a tensor's own type costs a microsecond.
_deterministic: Callable[[], bool] = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


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
    if any_autocast():
        q, k, v = autocast(q, k, v)
    settings = current()
    key = _key(config, settings, q, k, v, extras)
    bound = _bound.items.get(key)
    if bound is None:
        bound, result = _first_call(key, config, q, k, v, extras, settings)
    else:
        _bound.hits += 1
        result = bound.run(q, k, v, extras)
    if holder is not None:
        holder["_last"] = bound
    return result


def _key(
    config: Config, settings: Settings, q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> tuple[Any, ...]:
    """The call's signature: all that a choice, or a closure made for it, may depend on."""
    try:
        return (
            config,
            type(q),  # tensors without data must not meet closures made for those with
            id(settings),  # hashing a model costs microseconds; the entry keeps this object alive
            torch.is_grad_enabled(),
            _deterministic(),
            q.shape, q.stride(), q.storage_offset(), q.dtype, q.device, q.requires_grad,
            k.shape, k.stride(), k.storage_offset(), k.dtype, k.device, k.requires_grad,
            v.shape, v.stride(), v.storage_offset(), v.dtype, v.device, v.requires_grad,
            None if extras is NO_EXTRAS else signature(extras),
        )  # fmt: skip
    except (AttributeError, TypeError, RuntimeError):  # no tensor, or one without strides
        ask(config, q, k, v, extras, config.is_training)  # lets the checks name it
        raise


def prepare(config: Config, q: Tensor, k: Tensor, v: Tensor) -> Bound:
    """The closure that would run this call. Nothing runs and nothing is remembered: for tracing."""
    settings = current()
    need_grad = needs_grad(q, k, v, NO_EXTRAS)
    while True:
        selection = _select(config, q, k, v, NO_EXTRAS, settings, _evidence).require()
        debug.announce(selection, settings, config.label)
        try:
            return bind(selection, config, q, k, v, NO_EXTRAS, need_grad, settings)
        except CannotPrepare as error:
            learn([refusal_of(selection, error)], settings)


def explain(config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras = NO_EXTRAS) -> Selection:
    """The selection this call would get, without running it."""
    if any_autocast():
        q, k, v = autocast(q, k, v)
    return _located(_select(config, q, k, v, extras, current(), _evidence), config, q, k, v, extras)


def recompute_gradients(
    config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, dout: Tensor
) -> Grads:
    """Gradients of ``attend`` without autograd: the same choice, forward and backward in one go."""
    settings = current()
    key = _key(config, settings, q, k, v, extras)
    bound = _backwards.get(key)
    if bound is None:
        settings = _same_settings(settings)
        made = _checked_gradients(config, q, k, v, extras, settings)
        bound = _backwards.add((*key[:2], id(settings), *key[3:]), made)
    return bound.run(q, k, v, extras, dout)


def _checked_gradients(
    config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, settings: Settings
) -> Bound:
    evidence, learnt = _evidence, []
    while True:
        selection = _select(config, q, k, v, extras, settings, evidence).require()
        run = bind_gradients(selection, config, settings)
        try:
            selfcheck.check_gradients(run, selection, config, q, k, v, extras, settings)
        except selfcheck.Disagreement as error:
            learnt.append(refusal_of(selection, error))
            evidence = evidence.plus(learnt[-1])
            continue
        learn(learnt, settings)
        return Bound(run, selection, settings)


def evidence() -> Evidence:
    """What kernels refused in this process so far."""
    return _evidence


def cache_info() -> CacheInfo:
    """Hits, misses and size of the signature cache."""
    return _bound.info()


def clear_cache() -> None:
    """Forget bound kernels, and what kernels refused in this process."""
    global _evidence
    with _evidence_lock:
        _evidence = NO_EVIDENCE
    _bound.clear()
    _backwards.clear()
    selfcheck.clear()


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast does to F.scaled_dot_product_attention: float32 and 16-bit inputs to its type."""
    device = q.device.type if isinstance(q, Tensor) else "meta"
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    castable = (torch.float32, torch.float16, torch.bfloat16)
    cast = [t.to(dtype) if isinstance(t, Tensor) and t.dtype in castable else t for t in (q, k, v)]
    return cast[0], cast[1], cast[2]


def needs_grad(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> bool:
    if not torch.is_grad_enabled():
        return False
    others = (extras.core_attention_bias, extras.softmax_offset)
    return any(isinstance(t, Tensor) and t.requires_grad for t in (q, k, v, *others))


def _select(
    config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, settings: Settings, evidence: Evidence
) -> Selection:
    # Dropout that is asked for takes place, whatever is said about training.
    training = config.is_training or config.attention_dropout > 0.0 or needs_grad(q, k, v, extras)
    p = ask(config, q, k, v, extras, training)
    return select(p, environment_of(q), policy=policy_of(config, settings), evidence=evidence)


def _located(
    selection: Selection, config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> Selection:
    """The selection with where its tensors lie, if some tensor is not dense and aligned."""
    specs = selection.params.tensors
    if specs.q is specs.k is specs.v is None:
        return selection
    return selection.located(detect_layout(q, k, v, config.qkv_format, paged=extras.block_table is not None))


def policy_of(config: Config, settings: Settings) -> Policy:
    policy = settings.policy
    changes: dict[str, Any] = {
        name: getattr(config, name) for name in ("backend", "adapt") if getattr(config, name)
    }
    if config.replayable:
        # sdpa.math has no backward outside autograd; with dropout all of these draw for themselves, and a
        # recompute could not drop the same entries.
        barred = tuple(sdpa.KERNELS) if config.attention_dropout else ("sdpa.math",) * config.is_training
        changes["deny"] = tuple(dict.fromkeys((*policy.deny, *barred)))
    return policy.replace(**changes) if changes else policy


def environment_of(q: Tensor) -> Environment:
    if type(q) is not Tensor and q.device.type == "cuda" and not torch.cuda.is_available():
        # A fake CUDA tensor on a machine without CUDA: only its shape is wanted.
        return Environment.detect("cpu").replace(device=Device(type="meta", name="fake"))
    return Environment.detect(q.device)


# ---- the first call of a signature ------------------------------------------------------------------


def _first_call(
    key: tuple[Any, ...],
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    settings: Settings,
) -> tuple[Bound, Any]:
    """Choose, prepare, run. A kernel that refuses is evidence against it, and the next candidate is tried.

    A refusal counts only if another candidate then runs the very same call: where all of them fail, the call
    or the device is at fault, and nothing is remembered.
    """
    settings = _same_settings(settings)
    key = (*key[:2], id(settings), *key[3:])
    bound = _bound.get(key)
    if bound is not None:
        return bound, bound.run(q, k, v, extras)
    need_grad = needs_grad(q, k, v, extras)
    if isinstance(q, FakeTensor) or q.device.type == "meta":
        bound = _shapes_only(config, q, k, v, extras, settings, need_grad)
        return bound, bound.run(q, k, v, extras)
    evidence, learnt = _evidence, []
    cause: Exception | None = None
    while True:
        selection = _select(config, q, k, v, extras, settings, evidence)
        selection = _located(selection, config, q, k, v, extras)
        try:
            selection.require()
        except NoBackendError as error:
            raise error from cause
        debug.announce(selection, settings, config.label)
        try:
            bound = bind(selection, config, q, k, v, extras, need_grad, settings)
            settled = selfcheck.check(bound, config, q, k, v, extras, need_grad)
            result = bound.run(q, k, v, extras)
        except _REFUSALS as error:
            if isinstance(error, _NOT_REFUSALS) or (need_grad and _any_inference(q, k, v)):
                raise
            cause = error
            refusal = refusal_of(selection, error)
            learnt.append(refusal)
            evidence = evidence.plus(refusal)
            continue
        learn(learnt, settings)
        return _bound.add(key, bound) if settled else bound, result


def _shapes_only(
    config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, settings: Settings, need_grad: bool
) -> Bound:
    """For tensors without data: checked and chosen as ever, but no kernel sees them. Not remembered."""
    selection = _select(config, q, k, v, extras, settings, _evidence).require()

    def run(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Any:
        return compiled.opaque(config, q, k, v, extras, need_grad)

    return Bound(run, selection, settings)


_REFUSALS = (CannotPrepare, selfcheck.Disagreement, RuntimeError, ValueError)
_NOT_REFUSALS = (InvalidInput, torch.OutOfMemoryError)


def _any_inference(*tensors: Tensor) -> bool:
    """Tensors that autograd refuses to save, whichever kernel runs; some kernels happen not to save them."""
    return any(t.is_inference() for t in tensors)


def learn(refusals: list[Refusal], settings: Settings) -> None:
    """Share refusals with later calls, and say each once. The oldest of too many are forgotten."""
    global _evidence
    for refusal in refusals:
        with _evidence_lock:
            if refusal in _evidence.refusals:
                continue
            _evidence = Evidence((*_evidence.refusals[-_MOST_REFUSALS + 1 :], refusal))
        words = f"{refusal.message} ({refusal.hint})" if refusal.hint else refusal.message
        wrong = refusal.code == "RUNTIME002"
        debug.warn_fallback(refusal.candidate, words, settings, wrong=wrong)


def _same_settings(settings: Settings) -> Settings:
    """The object that stands for these settings in keys: an equal one met before, if there is one."""
    return _settings.get(settings) or _settings.add(settings, settings)
