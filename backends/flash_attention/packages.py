"""The functions of FlashAttention's packages, found when they are first needed, and called by name.

Their arguments differ from release to release, in number and in order; the names have stayed. So a call names
everything, an argument that a release does not have may only be left out where it says nothing, and one that
attnsel has never heard of is an error rather than a guess.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple


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


def function(module: ModuleType, name: str) -> Function:
    """A function of a package. Raises Missing."""
    return _function(module, name)


@lru_cache(maxsize=32)
def _function(module: ModuleType, name: str) -> Function:
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
