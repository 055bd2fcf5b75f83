"""Modules that are not installed, as far as it takes to import what wants them and to run its checks.

``stand_in("cutlass")`` makes ``import cutlass.cute.runtime`` and ``from cutlass import Int32`` work: every
name is a class that can be subclassed, indexed, called and used as a decorator, and does nothing. What a
check would have to know of such a thing is not known: ``StandIn`` is raised where one is counted, compared
or asked for its truth, so that nobody takes it for the package's answer.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any


class StandIn(Exception):
    """Something was asked of a stand-in that only the real thing knows."""


class _Anything(type):
    """Classes that are whatever they are taken for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(f"{cls.__qualname__}.{name}")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls.__dict__.get("_plain"):  # the package's own class, which derives from one of these
            return super().__call__(*args, **kwargs)
        if _decorates(args, kwargs):
            return args[0]
        return Thing(cls.__qualname__)

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def _unknown(cls, *args: Any) -> Any:
        raise StandIn(f"{cls.__qualname__} is a stand-in: what it is was not known")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unknown
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = _unknown


def _decorates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], (Thing, _Anything))


def anything(name: str, **known: Any) -> Any:
    """A class by this name; ``known`` are attributes that are more than stand-ins."""
    made = _Anything(name.rpartition(".")[-1], (), {"_plain": True, **known})
    made.__qualname__ = name
    return made


def _unknown(self: Thing, *args: Any, **kwargs: Any) -> Any:
    raise StandIn(f"{self._name} is a stand-in: what it is was not known")


class Thing:
    """An instance of such a class."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Thing(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if _decorates(args, kwargs) else Thing(f"{self._name}()")

    def __getitem__(self, item: Any) -> Any:
        return Thing(f"{self._name}[]")

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    __hash__ = object.__hash__
    __bool__ = __int__ = __index__ = __float__ = __len__ = _unknown
    __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unknown
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = _unknown


class _Module(ModuleType):
    """A module that has every name; those of ``known`` are real."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = anything(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of a package that is stood in for."""

    def __init__(self, package: str, known: Callable[[ModuleType], None]) -> None:
        self.package, self.known = package, known

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.package and not fullname.startswith(f"{self.package}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        self.known(module)


def stand_in(package: str, known: Callable[[ModuleType], None] = lambda module: None) -> None:
    """``package`` and all of its modules from now on. ``known`` gives a module the names that are real."""
    sys.meta_path.insert(0, _Finder(package, known))
