"""What is asked: one attention call, described without a single tensor."""

from attnsel.params.attention import (
    ITEMSIZE,
    AttentionParams,
    DType,
    Fp8Meta,
    MaskType,
    Tensors,
    TensorSpec,
    default_softmax_scale,
    read_dtype,
    read_mask_type,
)

__all__ = [
    "ITEMSIZE",
    "AttentionParams",
    "DType",
    "Fp8Meta",
    "MaskType",
    "TensorSpec",
    "Tensors",
    "default_softmax_scale",
    "read_dtype",
    "read_mask_type",
]
