"""The way of a call: choose, bind, check, and try the next candidate where one refuses.

It exists once, in :func:`choose_bind_run`. Eager calls, traced calls, explicit gradients and the steps of
context parallelism differ in what they bind and how that is compared with the reference: each is a
:class:`CallMode`.

In front of it stands a cache from call signatures to closures, behind it one from questions to selections
(``attnsel.selection``). Neither lives in a module, so modules stay deep-copyable and picklable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attnsel import debug
from attnsel.backends.checks import is_transformed
from attnsel.backends.contract import Grads
from attnsel.backends.registry import CANDIDATES
from attnsel.decision import Selection, select
from attnsel.environment import Device, Environment
from attnsel.errors import NoBackendError
from attnsel.params import read_dtype
from attnsel.params.layout import detect_layout
from attnsel.policy import Policy
from attnsel.runtime import compiled, selfcheck
from attnsel.runtime.adaptations import Known
from attnsel.runtime.bind import Bound, bind, bind_gradients, binding_of, contract_call
from attnsel.runtime.cache import BoundedCache, CacheInfo, clear_all, record_length, with_lengths
from attnsel.runtime.call import NO_EXTRAS, Call, Config, Extras, needs_grad
from attnsel.runtime.inputs import params_of
from attnsel.runtime.leave_replay import leave_nothing_runs, leave_refusals
from attnsel.runtime.mistakes import suspicions_of
from attnsel.runtime.refusals import evidence, forget, is_refusal, record_refusals, refusal_of
from attnsel.runtime.signature import CallCache, guard_of, signature_of
from attnsel.settings import Settings, current, override
from attnsel.verdicts.reasons import Evidence, Refusal
from attnsel.verdicts.record import CandidateRecord

# ---- What the records of candidates say about calls whose backward autograd does not record ------------
# Such are traced calls (``compiled.py``): forward and backward are operators, with plain tensors between
# them.


def can(config: Config, record: CandidateRecord) -> bool:
    """Whether it replays dropout from a seed, and gives gradients without autograd."""
    if config.attention_dropout and record.dropout == "generator":
        return False
    return record.explicit_backward or not config.is_training


@lru_cache(maxsize=1024)
def carries_lse_between(config: Config, dtype: str, env: Environment) -> bool:
    """Whether the output and log-sum-exp of any forward are all that any backward of such a call needs.

    Both are chosen when they run, and settings or refusals may change in between. So every candidate that
    may be chosen at all has to give a log-sum-exp, and where there is dropout all of them have to drop the
    same entries. Nothing that may change enters, so that forward and backward agree.
    """
    asked = {dtype, env.device.type, "training"}
    if config.attention_dropout:
        asked.add("dropout")
    able = [
        record
        for name, record in CANDIDATES.items()
        if config.backend in (None, name)
        and asked.issubset(record.takes)
        and all(getattr(env, component) is not None for component in record.needs)
        and can(config, record)
    ]
    if config.attention_dropout and len(able) > 1 and any(record.dropout != "contract" for record in able):
        return False
    return all(record.gives_lse for record in able)


_bound = CallCache(limit=4096)
_carrying: BoundedCache[Bound] = BoundedCache(limit=4096)
_gradients: BoundedCache[Bound] = BoundedCache(limit=4096)
_merged: BoundedCache[Bound] = BoundedCache(limit=4096)
_settings: BoundedCache[Settings] = BoundedCache(limit=256)

# One look for all device types, where this torch has it: asking for a tensor's own type costs a microsecond.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


class CallMode:
    """One way in which a call runs: this one as it is made, differentiable; others say what is different.

    Everything but ``select`` may raise what :func:`is_refusal` knows.
    """

    def select(self, call: Call, evidence: Evidence) -> Selection:
        """The selection for this call, given what refused before."""
        return with_layout_of(select_for(call, evidence), call)

    def bind(self, selection: Selection, call: Call) -> Bound:
        """The chosen kernel, prepared for calls like this one."""
        return bind(selection, call)

    def check(self, bound: Bound, call: Call) -> bool:
        """Compare it with the reference, unless it has passed before; False: not now, ask again."""
        return selfcheck.check(bound, call)

    def run(self, bound: Bound, call: Call) -> Any:
        """The call itself; a refusal here counts as well."""
        return bound.run(call)


def choose_bind_run(way: CallMode, call: Call) -> tuple[Bound, bool, Any]:
    """Choose, bind, check and run. A kernel that refuses is evidence against it, and the next is tried.

    A refusal is remembered only if another candidate then goes through: where all of them fail, the call or
    the device is at fault. Returns what is bound, whether it may be kept, and what the call gave. Raises
    NoBackendError with every reason, from the last refusal.
    """
    known, learned = evidence(), list[Refusal]()
    cause: BaseException | None = None
    while True:
        selection = way.select(call, known)
        try:
            selection.require()
        except NoBackendError as error:
            if call.settings.replay_dir:
                leave_refusals(call, learned, selection)
                leave_nothing_runs(call, selection)
            raise error from cause
        assert selection.backend is not None
        debug.announce(selection, call.settings, call.config.label, suspicions_of(call, selection))
        try:
            bound = way.bind(selection, call)
            checked = way.check(bound, call)
            result = way.run(bound, call)
        except Exception as error:
            if not is_refusal(error, selection.backend) or _autograd_refuses(call):
                raise
            cause = error
            learned.append(refusal_of(selection, error))
            known = known.plus(learned[-1])
            continue
        if learned and is_transformed():
            return bound, False, result
        record_refusals(learned, call.settings)
        if learned and call.settings.replay_dir:
            leave_refusals(call, learned, selection)
        record_length(selection)
        return bound, checked, result


def _autograd_refuses(call: Call) -> bool:
    """Tensors that autograd refuses to save, whichever kernel runs; some kernels happen not to save them."""
    recorded = call.need_grad and torch.is_grad_enabled()
    return recorded and any(t.is_inference() for t in (call.q, call.k, call.v))


class Traced(CallMode):
    """While a graph is traced: nothing runs, and nothing can be compared."""

    def check(self, bound: Bound, call: Call) -> bool:
        return True

    def run(self, bound: Bound, call: Call) -> Any:
        return None


class Carrying(CallMode):
    """A forward that gives its log-sum-exp as well, so that a backward elsewhere may start from it.

    The question asks for none: which candidate runs must not depend on how gradients come about.
    """

    def bind(self, selection: Selection, call: Call) -> Bound:
        params = selection.params.derive(return_lse=True)
        return bind(selection.for_params(params), _with_lse(call), need_grad=True)

    def check(self, bound: Bound, call: Call) -> bool:
        return selfcheck.check(bound, _with_lse(call))

    def run(self, bound: Bound, call: Call) -> Any:
        return bound.run(_with_lse(call))


def _with_lse(call: Call) -> Call:
    return call._replace(config=call.config.replace(return_lse=True))


class Gradients(CallMode):
    """The backward of a traced call, where autograd does not record.

    From the ``known`` output and log-sum-exp of its forward, whichever candidate gave them, or (None) after
    a forward of its own.
    """

    def __init__(self, dout: Tensor, known: Known | None) -> None:
        self.dout, self.known = dout, known

    def select(self, call: Call, evidence: Evidence) -> Selection:
        return select_for(call, evidence)

    def bind(self, selection: Selection, call: Call) -> Bound:
        return Bound(bind_gradients(selection, call), None, selection, call.settings)

    def check(self, bound: Bound, call: Call) -> bool:
        if self.known is None:
            return selfcheck.check_gradients(bound, call)

        def from_its_forward(call: Call, dout: Tensor) -> Grads:
            with torch.no_grad():  # a bias that learns would be recorded
                out, lse, *_ = CARRYING.run(CARRYING.bind(bound.selection, call), call)
            grads: Grads = bound.run(call, dout, Known(out, lse))
            return grads

        return selfcheck.check_gradients(bound._replace(run=from_its_forward), call, carried=True)

    def run(self, bound: Bound, call: Call) -> Any:
        return bound.run(call, self.dout, self.known)


class MergedGradients(Gradients):
    """The chosen kernel's backward alone: there is no telling what ``known`` was merged from."""

    def check(self, bound: Bound, call: Call) -> bool:
        if not selfcheck.is_wanted(bound.selection, call.settings):
            return True
        binding = binding_of(bound.selection, call)
        _, inputs = contract_call(call, bound.selection.params, dropout=True)
        return selfcheck.check_kernel(binding.kernel, binding.spec, inputs, bound.selection, call.settings)


EAGER = CallMode()
TRACED = Traced()
CARRYING = Carrying()


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
    result = attend_again(config, q, k, v, extras, holder)
    return attend_anew(config, q, k, v, extras, holder) if result is None else result


def attend_anew(
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras = NO_EXTRAS,
    holder: dict[str, Any] | None = None,
) -> Any:
    """What ``attend`` gives outside a graph, for a call of which ``attend_again`` knows nothing."""
    if any_autocast():
        q, k, v = autocast(q, k, v)
    bound, result = _first_call(make_call(config, q, k, v, extras, current()))
    if holder is not None:
        holder["_last"] = bound
    return result


def attend_again(
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras = NO_EXTRAS,
    holder: dict[str, Any] | None = None,
    grouped: bool = True,
) -> Any:
    """What ``attend`` gives outside a graph, for a call like one that was met; None for any other.

    ``grouped`` False: None as well for fewer heads of k and v than of q, unless there is one.
    """
    if any_autocast():
        q, k, v = autocast(q, k, v)
    settings = current()
    bound = _bound.find(config, settings, q, k, v, extras)
    if bound is None or (bound.grouped and not grouped):
        return None
    try:
        if extras is NO_EXTRAS and bound.plain is not None:
            result = bound.plain(q, k, v)
        elif bound.beside is not None:
            result = bound.beside(q, k, v, extras)
        else:
            result = bound.run(make_call(config, q, k, v, extras, settings))
    except RuntimeError:
        if not is_transformed():
            raise
        bound, _, result = choose_bind_run(EAGER, make_call(config, q, k, v, extras, settings))
    if holder is not None:
        holder["_last"] = bound
    return result


def make_call(config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, settings: Settings) -> Call:
    return Call(config, q, k, v, extras, settings, needs_grad(q, k, v, extras))


def prepare(config: Config, q: Tensor, k: Tensor, v: Tensor) -> Bound:
    """The closure that would run this call. Nothing runs and nothing is remembered: for tracing."""
    return choose_bind_run(TRACED, make_call(config, q, k, v, NO_EXTRAS, current()))[0]


def attend_with_lse(config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, ...]:
    """What ``attend`` gives, with the log-sum-exp in the second place, for ``gradients`` to start from.

    Only where ``carries_lse``. Raises as ``attend`` does.
    """
    call = make_call(config, q, k, v, extras, current())
    results: tuple[Tensor, ...] = kept(_carrying, CARRYING, call)[1]
    return results


def gradients(
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    dout: Tensor,
    known: tuple[Tensor, Tensor] | None = None,
) -> Grads:
    """Gradients of ``attend`` for a gradient of its output, without autograd. Raises as ``attend`` does.

    ``known``: output and log-sum-exp; without them the forward is run again.
    """
    call = Call(config, q, k, v, extras, current(), need_grad=True)
    way = Gradients(dout, None if known is None else Known(*known))
    grads: Grads = kept(_gradients, way, call)[1]
    return grads


# ---- A backward of its own, and dropout whose entries can be named -------------------------------------
# For whoever merges partial results: ring attention runs the forward on each part of the keys, merges outputs
# and log-sum-exps itself, and runs the backward on each part with the merged ones.


@contextmanager
def seeded_dropout() -> Iterator[None]:
    """Only candidates that drop by the contract's generator, besides what the policy says.

    On all of those a seed keeps the same entries; cuDNN replays a seed too, but by a generator of its own.
    """
    others = [name for name, record in CANDIDATES.items() if record.dropout != "contract"]
    with override(deny=tuple(dict.fromkeys((*current().policy.deny, *others)))):
        yield


class MergedResult(NamedTuple):
    """What a backward starts from: ``out`` and ``dout`` in the call's format, ``lse`` float32 [b, h, s_q] or
    [h, t_q], -inf where a row saw no key. ``out`` and ``lse`` may be merged from parts of the keys."""

    out: Tensor
    lse: Tensor
    dout: Tensor


def merged_gradients(
    config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, merged: MergedResult
) -> Grads:
    """Gradients of q, k and v from an output and log-sum-exp that may be merged from parts of the keys.

    Tensors in ``config.qkv_format``. ``config`` must say is_training, return_lse and adapt "never"; with
    dropout, ``extras.dropout_seed`` and ``seeded_dropout()``. Raises as ``attend`` does.
    """
    call = Call(config, q, k, v, extras, current(), need_grad=True)
    with torch.no_grad():
        way = MergedGradients(merged.dout, Known(merged.out, merged.lse))
        grads: Grads = kept(_merged, way, call)[1]
    return grads


def carries_lse(config: Config, q: Tensor) -> bool:
    """Whether ``gradients`` of such a call may start from what ``attend_with_lse`` gave."""
    return carries_lse_between(config, read_dtype(q.dtype), environment_of(q))


def explain(
    config: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras = NO_EXTRAS,
    environment: Environment | None = None,
) -> Selection:
    """The selection this call would get, without running it; in ``environment`` if it is not where q is.

    What kernels refused in this process counts only where q is.
    """
    if any_autocast():
        q, k, v = autocast(q, k, v)
    call = make_call(config, q, k, v, extras, current())
    if environment is None:
        return with_layout_of(select_for(call, evidence()), call)
    return with_layout_of(select(params_of(call), environment, policy=policy_of(call)), call)


def cache_info() -> CacheInfo:
    """Hits, misses and size of the signature cache."""
    return _bound.info()


def carried_out() -> list[Selection]:
    """Of each different call that is remembered, the selection that its kernel was bound for."""
    eager = (bound for cache in (_bound, _carrying) for bound in list(cache.items.values()))
    return [*(bound.selection for bound in eager), *compiled.traced.values()]


def clear_cache() -> None:
    """Forget bound kernels, what was compared, and what kernels refused in this process."""
    forget()
    clear_all()
    compiled.forget_traced()


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autocast does to F.scaled_dot_product_attention: float32 and 16-bit inputs to its type."""
    device = q.device.type if isinstance(q, Tensor) else "meta"
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    castable = (torch.float32, torch.float16, torch.bfloat16)
    cast = [t.to(dtype) if isinstance(t, Tensor) and t.dtype in castable else t for t in (q, k, v)]
    return cast[0], cast[1], cast[2]


# ---- the question a call asks -----------------------------------------------------------------------


def select_for(call: Call, evidence: Evidence) -> Selection:
    p, env = params_of(call), environment_of(call.q)
    return select(p, env, policy=policy_of(call), evidence=with_lengths(evidence, p, env))


def with_layout_of(selection: Selection, call: Call) -> Selection:
    """The selection with where its tensors lie, if some tensor is not dense and aligned."""
    specs = selection.params.tensors
    if specs.q is specs.k is specs.v is None:
        return selection
    return selection.with_layout(
        detect_layout(call.q, call.k, call.v, call.config.qkv_format, paged=call.paged)
    )


def policy_of(call: Call) -> Policy:
    config, policy = call.config, call.settings.policy
    changes: dict[str, Any] = {
        name: getattr(config, name) for name in ("backend", "adapt") if getattr(config, name)
    }
    if config.replayable:
        barred = tuple(name for name, record in CANDIDATES.items() if not can(config, record))
        changes["deny"] = tuple(dict.fromkeys((*policy.deny, *barred)))
    return policy.replace(**changes) if changes else policy


def environment_of(q: Tensor) -> Environment:
    if type(q) is not Tensor and q.device.type == "cuda" and not torch.cuda.is_available():
        # A fake CUDA tensor on a machine without CUDA: only its shape is wanted.
        return Environment.detect("cpu").replace(device=Device(type="meta", name="fake"))
    return Environment.detect(q.device)


# ---- the first call of a signature ------------------------------------------------------------------


def kept(cache: BoundedCache[Bound], way: CallMode, call: Call, *more: Any) -> tuple[Bound, Any]:
    """What is bound for this signature, and what the call gives: from ``cache``, or chosen now.

    ``more``: what the key has besides the signature.
    """
    # The object that stands for these settings in keys: an equal one met before, if there is one.
    settings = _settings.get(call.settings) or _settings.add(call.settings, call.settings)
    call = call._replace(settings=settings)
    key = (*signature_of(call.config, settings, call.q, call.k, call.v, call.extras), *more)
    bound = cache.get(key)
    if bound is not None:
        return bound, way.run(bound, call)
    bound, checked, result = choose_bind_run(way, call)
    if checked:
        p = bound.selection.params
        grouped = 1 < p.num_gqa_groups < p.num_heads
        bound = cache.add(key, bound._replace(guard=guard_of(call), grouped=grouped))
    return bound, result


def _first_call(call: Call) -> tuple[Bound, Any]:
    if isinstance(call.q, FakeTensor) or (isinstance(call.q, Tensor) and call.q.device.type == "meta"):
        # Without data: checked and chosen as ever, but no kernel sees the tensors. Not remembered.
        selection = select_for(call, evidence()).require()
        return Bound(compiled.opaque, None, selection, call.settings), compiled.opaque(call)
    return kept(_bound, EAGER, call)


compiled.connect(compiled.Runtime(attend, prepare, attend_with_lse, gradients, carries_lse))
