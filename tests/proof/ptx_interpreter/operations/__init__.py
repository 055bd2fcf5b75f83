"""Instructions by family; importing this registers their forms."""

from ptx_interpreter.operations import (
    arithmetic,
    asynchronous,
    compare,
    convert,
    data,
    matrix,
    tensor,
    warp,
)

__all__ = ["arithmetic", "asynchronous", "compare", "convert", "data", "matrix", "tensor", "warp"]
