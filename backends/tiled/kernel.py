"""The contract's two functions, side by side."""

from __future__ import annotations

from attnsel.backends.tiled.backward import backward
from attnsel.backends.tiled.forward import forward

__all__ = ["backward", "forward"]
