"""What is asked: one attention call, described without a single tensor."""

from attnsel.params.attention import (
    ITEMSIZE,
    AttentionParams,
    DType,
    Fp8Meta,
    MaskType,
    Tensors,
    TensorSpec,
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
    "read_dtype",
    "read_mask_type",
]
