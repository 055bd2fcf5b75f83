"""Compile a launch for a GPU that is not there, specialised as a launch would be. No driver is involved.

What the machine code needs is read by tests/proof/machine_code.py.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attnsel.backends.triton import compiler as turing
from attnsel.backends.triton.launch import Launch

_POINTERS = {
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float32": "*fp32",
    "int32": "*i32",
    "int64": "*i64",
    "uint8": "*u8",
}


def build(launch: Launch, arch: int) -> Any:
    """Compile what ``launch`` would run, for ``arch`` such as 90, specialised as a launch would be.

    Raises what Triton raises when it cannot compile.
    """
    source = _source(launch)
    hook = turing.tensor_cores() if arch == turing.ARCH else contextlib.nullcontext()
    with hook:
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.block.options)


def _source(launch: Launch) -> ASTSource:
    signature, constants, attributes = _specialised(launch)
    if "constexprs" in inspect.signature(ASTSource).parameters:
        return ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    # Triton 3.2 names its constants, leaves them out of the signature and has a class for the hints.
    from triton.backends.compiler import AttrsDescriptor

    names = list(signature)
    return ASTSource(
        launch.kernel,
        {name: kind for name, kind in signature.items() if kind != "constexpr"},
        constants={names[position]: value for (position,), value in constants.items()},
        attrs=AttrsDescriptor.from_hints({position: 16 for (position,) in attributes}),
    )


def _specialised(launch: Launch) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[Any, Any]]:
    """Signature, constants and divisibility hints of a launch, as Triton's own binder makes them."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, parameter in enumerate(launch.kernel.params):
        value = launch.args[parameter.name]
        plain = parameter.do_not_specialize
        if isinstance(value, Tensor):
            signature[parameter.name] = _POINTERS[str(value.dtype).removeprefix("torch.")]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not plain):
            signature[parameter.name] = "constexpr"
            constants[(position,)] = value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not plain:
                attributes[(position,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes
