"""aten's attention operators: which candidate is the same kernel, and the name of the gradient.

Names: torch 2.13 ``native_functions.yaml``; gradients: ``derivatives.yaml``, whose classes are named after
the operator in camel case with ``Backward0`` behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operator(NamedTuple):
    """``name``: with its namespace, without an overload. ``candidate``: "" where attnsel has none.
    ``gradient``: name of the autograd node, "" where the gradient is that of its pieces or there is none.
    """

    name: str
    candidate: str
    gradient: str = ""


_ALL = (
    Operator(
        "aten::_scaled_dot_product_flash_attention", "sdpa.flash", "ScaledDotProductFlashAttentionBackward0"
    ),
    Operator(
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "sdpa.flash",
        "ScaledDotProductFlashAttentionForCpuBackward0",
    ),
    Operator(
        "aten::_scaled_dot_product_efficient_attention",
        "sdpa.efficient",
        "ScaledDotProductEfficientAttentionBackward0",
    ),
    Operator(
        "aten::_scaled_dot_product_cudnn_attention", "sdpa.cudnn", "ScaledDotProductCudnnAttentionBackward0"
    ),
    Operator(
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "",
        "ScaledDotProductFusedAttentionOverrideableBackward0",
    ),
    Operator("aten::_scaled_dot_product_attention_math", "sdpa.math"),
    Operator("aten::_scaled_dot_product_attention_math_for_mps", "sdpa.math"),
    Operator("aten::_flash_attention_forward", "sdpa.varlen", "FlashAttentionBackward0"),
    Operator("aten::_efficient_attention_forward", "sdpa.efficient", "EfficientAttentionBackward0"),
    Operator("aten::_cudnn_attention_forward", "sdpa.cudnn", "CudnnAttentionBackward0"),
    Operator("aten::_native_multi_head_attention", ""),
    Operator("aten::_transformer_encoder_layer_fwd", ""),
    Operator("aten::_triton_scaled_dot_attention", ""),
    Operator("aten::_triton_multi_head_attention", ""),
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


@lru_cache(maxsize=4096)
def composite(function: Any) -> bool:
    """Whether an operator is made of others for every device. In inference mode, and for tensors made there,
    a dispatch mode is given such operators whole; ``function.decompose`` runs what they are made of."""
    return isinstance(function, torch._ops.OpOverload) and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
    )


class OperatorMode(TorchDispatchMode):
    """Told of each operator that ran while it is entered, in pieces where a composite one comes whole."""

    supports_higher_order_operators = True

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
        if composite(func):
            with self:
                return func.decompose(*args, **given)
        out = func(*args, **given)
        self.read(func, args, given, out)
        return out
