"""What is said to Dynamo and asked of symbolic sizes, without loading either before something is compiled.

``torch.compiler.assume_constant_result`` imports ``torch._dynamo``, ``torch.fx.experimental.symbolic_shapes``
sympy: 1.2 s of CPU together (torch 2.13) that a program which compiles nothing would pay when it imports us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def constant_when_traced(function: F) -> F:
    """Dynamo runs it once, on what it knows while tracing, and puts the result into the graph as it is.

    What ``torch.compiler.assume_constant_result`` does: this one attribute (``_dynamo/decorators.py`` of
    torch 2.13.0, and of pytorch/pytorch at 00abea08).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def concrete(value: Any) -> Any:
    """A number that dynamic shapes made symbolic, as the number it is: the graph holds for that alone."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(value)


def is_static(size: Any) -> bool:
    """Whether a size or stride is one number wherever the graph runs."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return bool(has_static_value(size))
