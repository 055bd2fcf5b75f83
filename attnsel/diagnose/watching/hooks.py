"""How calls are seen: a TorchFunctionMode, functions of libraries replaced, operators inside of one call.

A dispatch mode would see every operator of the program, in Python, at about 10 µs each. A function mode sees
fewer calls, in a tenth of that, and whole ones rather than their pieces; a dispatch mode is entered only
inside of one call, and left when it returns: none stands where the program's own lines run, which may enter
modes themselves, trace, export, or make tensors of other types.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import threading
import types as kinds
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attnsel.diagnose.watching.observe import After, Around, Observer, Patch, Recorder, WatchedCall

# ---- aten's attention operators: which candidate is the same kernel, and the name of the gradient ------
# Names: torch 2.13 ``native_functions.yaml``; gradients: ``derivatives.yaml``, whose classes are named after
# the operator in camel case with ``Backward0`` behind it.


class Operator(NamedTuple):
    """``name``: with its namespace, without an overload. ``candidate``: "" where attnsel has none.
    ``gradient``: name of the autograd node, "" where the gradient is that of its pieces or there is none.
    """

    name: str
    candidate: str
    gradient: str = ""


def _operator(name: str, candidate: str = "", gradient: str = "") -> Operator:
    words = name.removesuffix("_forward").split("_")
    return Operator(f"aten::{name}", candidate, "".join(map(str.title, words)) + gradient if gradient else "")


_ALL = (
    _operator("_scaled_dot_product_flash_attention", "sdpa.flash", "Backward0"),
    _operator("_scaled_dot_product_flash_attention_for_cpu", "sdpa.flash", "Backward0"),
    _operator("_scaled_dot_product_efficient_attention", "sdpa.efficient", "Backward0"),
    _operator("_scaled_dot_product_cudnn_attention", "sdpa.cudnn", "Backward0"),
    _operator("_scaled_dot_product_fused_attention_overrideable", "", "Backward0"),
    _operator("_scaled_dot_product_attention_math", "sdpa.math"),
    _operator("_scaled_dot_product_attention_math_for_mps", "sdpa.math"),
    _operator("_flash_attention_forward", "sdpa.varlen", "Backward0"),
    _operator("_efficient_attention_forward", "sdpa.efficient", "Backward0"),
    _operator("_cudnn_attention_forward", "sdpa.cudnn", "Backward0"),
    _operator("_native_multi_head_attention"),
    _operator("_transformer_encoder_layer_fwd"),
    _operator("_triton_scaled_dot_attention"),
    _operator("_triton_multi_head_attention"),
)
OPERATORS = {operator.name: operator for operator in _ALL}
GRADIENTS = frozenset(operator.gradient for operator in _ALL if operator.gradient)

MATH = OPERATORS["aten::_scaled_dot_product_attention_math"]
"""What F.sdpa ran where none of the others did: it is composite, so a dispatch mode sees its pieces only."""

ZEROS = Operator("aten::zeros", "")
"""What F.sdpa runs where there is no query or no key: it asks no kernel (torch 2.12 and newer)."""


def operator_name(function: Any) -> str:
    """``aten::bmm`` of an operator or an overload of one; "" for what is none."""
    schema = getattr(function, "_schema", None)
    if schema is not None:
        return str(schema.name)
    return str(getattr(function, "_qualified_op_name", ""))


_MODE_KEYS = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def out_of_reach() -> str:
    """What is going on here that must not meet a dispatch mode, or whose tensors are none that can be read;
    "" where a call can be looked into."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func or torch.vmap"
    if torch._C._autograd._profiler_enabled():
        return "a profiler"
    depth = torch._C._len_torch_dispatch_stack()
    if any(not isinstance(torch._C._get_dispatch_stack_at(at), OperatorMode) for at in range(depth)):
        fake = any(torch._C._get_dispatch_mode(key) is not None for key in _MODE_KEYS)
        return FAKE if fake else "a dispatch mode of the program's"
    return ""


FAKE = "fake tensors, an export or a trace"
"""Where no kernel runs at all."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def not_readable(*tensors: Any, nested: bool = False) -> str:
    """Which of these is a tensor whose shape and memory are not its own, in words; "" where there is none.
    ``nested``: whether nested ones, without a class of their own, can be read."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            kind = type(tensor)
            if kind not in _PLAIN and kind.__torch_dispatch__ is not _NO_DISPATCH:
                return f"a {kind.__name__}"
            if tensor.is_nested and nested:
                continue
            if tensor.is_nested or tensor.layout != torch.strided:
                return "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        elif hasattr(type(tensor), "__torch_function__"):
            return f"a {type(tensor).__name__}"
    return ""


class OperatorMode(TorchDispatchMode):
    """Told of each operator that ran while it is entered."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without it, torch.compile would run what it compiled eagerly."""
        return True

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """An operator, what it was called with, and what it gave."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if types:  # tensors that take operators themselves: one put apart may come back
            return func(*args, **given)
        # In inference mode, and for tensors made there, a mode is given whole what is made of operators.
        # Put apart under a mode most of these would take other ways, with other last bits.
        if func is _WHOLE:
            with self:
                return func._op_dk(_COMPOSITE, *args, **given)
        out = func(*args, **given)
        self._recorder.safely(self.read, func, args, given, out)
        return out


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_WHOLE = torch.ops.aten.scaled_dot_product_attention.default
_OPERATOR_TYPES = (OpOverload, OpOverloadPacket)
_tracing = torch.compiler.is_dynamo_compiling
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_again_without_modes = getattr(torch._C, "_skip_one_hop_torch_function", None)  # torch 2.13 and newer


class FunctionMode(TorchFunctionMode):
    """Gives the calls that are watched to their observers. One for each thread."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self._hooks = hooks
        self._watched, self._readers = hooks.watched, hooks.recorder.readers

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # While Dynamo traces, this is all that it reads: the graph is the same as without a mode.
        if _tracing():
            return func(*args, **(kwargs or {}))
        # Nearly every call ends here: it costs a microsecond, most of it torch's own.
        if func not in self._watched and type(func) not in _OPERATOR_TYPES and not self._readers:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._seen(func, types, args, kwargs or {})

    def _seen(self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hooks, recorder = self._hooks, self._hooks.recorder
        if func in _BACKWARD:
            if _again_without_modes is None:
                return func(*args, **kwargs)
            with self:  # what a checkpoint runs again there, and hooks of the program's, are seen too
                return _again_without_modes(func, types, args, kwargs)
        if recorder.is_quiet:
            return func(*args, **kwargs)
        around = hooks.around.get(func)
        if around is None and type(func) in _OPERATOR_TYPES:
            around = hooks.operators.get(operator_name(func))
        if around is not None:
            return recorder.watched(around, WatchedCall(func, args, kwargs))
        out = self._readers[0](func, args, kwargs) if self._readers else func(*args, **kwargs)
        after = hooks.after.get(func)
        if after is not None:
            recorder.told(after, func, args, kwargs, out)
        return out


class Hooks:
    """All hooks of a session: put in place by ``enter``, taken out by ``leave``, which puts back all."""

    def __init__(self, recorder: Recorder, observers: Sequence[Observer]) -> None:
        self.recorder = recorder
        self.around: dict[Any, Around] = {}
        self.after: dict[Any, After] = {}
        self.operators: dict[str, Around] = {}
        self.on = False
        patches: list[Patch] = []
        for observer in observers:
            self.around.update(observer.around)
            self.after.update(observer.after)
            self.operators.update(observer.operators)
            patches += observer.patches
        self.watched = {*self.around, *self.after, *_BACKWARD}
        self._patches = Patches(self, patches)
        self._mode: FunctionMode | None = None
        self._thread = 0
        self._away = False  # an optimizer's step runs, without our mode
        self._step_hooks: list[Any] = []
        self._start: Any = None

    def enter(self) -> None:
        self.on = True
        self._patches.enter()
        self._start = threading.Thread.start
        threading.Thread.start = self._starting(self._start)  # type: ignore[method-assign, assignment]
        self._mode = FunctionMode(self)
        self._mode.__enter__()
        self._thread = threading.get_ident()
        self._step_hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step asks hundreds of attributes of parameters, each of which a function mode is told of."""
        self._after_step()  # of a step that raised
        closure = any(callable(arg) for arg in args) or kwargs.get("closure") is not None
        if closure or self._mode is None or _tracing() or threading.get_ident() != self._thread:
            return  # a closure runs the model
        self._away = _take_out(self._mode)

    def _after_step(self, *_: Any) -> None:
        if self._away and self._mode is not None and threading.get_ident() == self._thread:
            self._away = False
            self._mode.__enter__()

    def leave(self) -> None:
        self.on = False
        self.around.clear()  # threads of the program that still run are not watched any more
        self.after.clear()
        self.operators.clear()
        self.watched.clear()
        try:
            for hook in self._step_hooks:
                hook.remove()
            if self._mode is not None and not self._away:
                _take_out(self._mode)
        finally:
            threading.Thread.start = self._start  # type: ignore[method-assign]
            self._patches.leave()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing in this thread is watched inside: what is timed there is the program alone."""
        assert self._mode is not None
        _take_out(self._mode)
        try:
            yield
        finally:
            self._mode.__enter__()

    def _starting(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        """``Thread.start`` for threads that are to be watched: modes belong to one thread."""
        hooks = self

        @functools.wraps(start)
        def watched_start(thread: threading.Thread) -> None:
            def replace() -> None:
                run = thread.run

                def watched_run() -> None:
                    if not hooks.on:
                        return run()
                    with FunctionMode(hooks):
                        return run()

                thread.run = watched_run  # type: ignore[method-assign]

            if hooks.on:
                try:
                    replace()
                except AttributeError:
                    hooks.recorder.cannot_see("threads of a class whose run is no method")
            return start(thread)

        return watched_start


def _take_out(mode: TorchFunctionMode) -> bool:
    """Takes a mode from this thread's stack, also from below a mode that the program has not left yet.
    Returns whether it was there."""
    above = []
    found = False
    while torch._C._len_torch_function_stack() and not found:
        top = torch.overrides._pop_mode()
        if top is mode:
            found = True
        else:
            above.append(top)
    for other in reversed(above):
        torch.overrides._push_mode(other)
    return found


class Patches(importlib.abc.MetaPathFinder):
    """Functions of libraries, replaced now or when their module is imported, and put back."""

    def __init__(self, hooks: Hooks, patches: Sequence[Patch]) -> None:
        self._hooks = hooks
        self._waiting: dict[str, list[Patch]] = {}
        for patch in patches:
            self._waiting.setdefault(patch.module, []).append(patch)
        self._done: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is there
        self._looking = threading.local()

    def enter(self) -> None:
        for name in list(self._waiting):
            if name in sys.modules:
                self._apply(sys.modules[name])
        sys.meta_path.insert(0, self)

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._done:
            owner, name, before, ours = self._done.pop()
            if vars(owner).get(name) is ours:  # else the program has put something of its own there
                setattr(owner, name, before)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting or getattr(self._looking, "on", False):
            return None
        self._looking.on = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.on = False
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self._hooks.on:
                self._hooks.recorder.safely(self._apply, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _apply(self, module: ModuleType) -> None:
        for patch in self._waiting.get(module.__name__, ()):
            *owners, name = patch.name.split(".")
            owner: Any = module
            for part in owners:
                owner = getattr(owner, part, None)
            before = vars(owner).get(name) if owner is not None else None
            if callable(before) and not any(b is before for _, _, _, b in self._done):
                ours = self._wrapped(patch, before)
                setattr(owner, name, ours)
                self._done.append((owner, name, before, ours))

    def _wrapped(self, patch: Patch, function: Callable[..., Any]) -> Callable[..., Any]:
        hooks = self._hooks

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # A program may keep this function for longer than it is watched.
            if _tracing() or not hooks.on or hooks.recorder.is_quiet:
                return function(*args, **kwargs)
            return hooks.recorder.watched(patch.around, WatchedCall(function, args, kwargs))

        def watched(*args: Any, **kwargs: Any) -> Any:
            return run(args, kwargs)

        # TorchScript reads the source of what was wrapped, with the names that the wrapper knows.
        known = getattr(function, "__globals__", watched.__globals__)
        made = kinds.FunctionType(watched.__code__, known, watched.__name__, None, watched.__closure__)
        return functools.wraps(function)(made)


class Ran(OperatorMode):
    """Attention operators that run while it is entered, by name, in ``names``; all others in ``pieces``."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.names: list[str] = []
        self.pieces: list[str] = []

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = operator_name(func)
        (self.names if name in OPERATORS else self.pieces).append(name)
