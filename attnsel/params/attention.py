"""What is asked: one attention call, described without a single tensor.

Names follow TransformerEngine's ``AttentionParams``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    model_validator,
)

from attnsel.base.model import FrozenModel, flag, lazy
from attnsel.errors import InvalidInput, short
from attnsel.params.layout import LAYOUTS, LayoutName, read_layout
from attnsel.params.options import CpCommType, _Recipe, read_recipe

# --------------------------------------------------------------------------------------------------------
# What the fields of a question say to each other: contradictions, and the one form of equal questions.


LARGEST = 2**63 - 1
"""What int64 holds: sizes in bytes, shapes, strides and windows."""
MOST = 2**40
"""Of any one size of a question; products of them are floats without overflow."""
MOST_RANKS = 2**13
LARGEST_SOFTCAP = 1e30
"""Beyond it score / softcap soon leaves float32's normal numbers, and softcap float32 itself: 0 * inf."""


def check_params(p: AttentionParams) -> None:
    """Contradictions between fields. Raises InvalidInput naming one of them."""
    if p.num_heads % p.num_gqa_groups:
        raise InvalidInput(
            "num_gqa_groups", p.num_gqa_groups, f"must divide num_heads = {p.num_heads} without remainder"
        )
    if p.softcap > LARGEST_SOFTCAP:
        raise InvalidInput(
            "softcap", p.softcap, f"must be at most {LARGEST_SOFTCAP:g}, which caps nothing; 0 is off"
        )
    if not p.has_bias:
        if p.core_attention_bias_shape is not None:
            raise InvalidInput(
                "core_attention_bias_shape",
                p.core_attention_bias_shape,
                "must be left out unless core_attention_bias_type is pre_scale_bias or post_scale_bias",
            )
        if p.core_attention_bias_requires_grad:
            raise InvalidInput(
                "core_attention_bias_requires_grad",
                True,
                "must be False unless core_attention_bias_type is pre_scale_bias or post_scale_bias",
            )
    if p.alibi_slopes_shape is not None:
        allowed = ((p.num_heads,), (p.batch_size, p.num_heads))
        if p.core_attention_bias_type != "alibi":
            raise InvalidInput(
                "alibi_slopes_shape", p.alibi_slopes_shape, "needs core_attention_bias_type 'alibi'"
            )
        if p.alibi_slopes_shape not in allowed:
            raise InvalidInput("alibi_slopes_shape", p.alibi_slopes_shape, f"must be one of {allowed}")
    if p.qkv_format == "thd" and not p.padding:
        raise InvalidInput(
            "attn_mask_type",
            p.attn_mask_type,
            f"must be padding, padding_causal or padding_causal_bottom_right with layout {p.qkv_layout!r}",
        )
    if p.pad_between_seqs and p.qkv_format != "thd":
        raise InvalidInput("pad_between_seqs", True, f"needs a thd layout, not {p.qkv_layout!r}")
    if p.layout.paged != (p.kv_cache == "paged"):
        raise InvalidInput(
            "kv_cache",
            p.kv_cache,
            f"must be 'paged' exactly when qkv_layout is a paged_kv_… layout; here it is {p.qkv_layout!r}",
        )
    if (p.kv_cache == "paged") != (p.page_size is not None):
        raise InvalidInput("page_size", p.page_size, "must be given exactly when kv_cache is 'paged'")
    if p.kv_cache != "none" and p.is_training:
        raise InvalidInput("is_training", True, "must be False with a kv_cache: a cache has no backward")


def normalise_window(window: tuple[int, int], attn_mask_type: str) -> tuple[int, int]:
    """TransformerEngine's reading of a window: a causal mask type closes the right side.

    Raises InvalidInput for bounds below -1 or beyond int64, and for (-1, 0) without a causal mask type.
    """
    left, _ = window
    if min(window) < -1 or max(window) > LARGEST:
        raise InvalidInput(
            "window_size", window, f"each bound must be -1 (none) or at least 0, at most {LARGEST}"
        )
    if "causal" in attn_mask_type:
        return (left, 0)
    if window == (-1, 0):
        raise InvalidInput(
            "window_size",
            window,
            f"must be (-1, -1) with attn_mask_type {attn_mask_type!r}; for causal attention say so there",
        )
    return window


def diagonal_of(attn_mask_type: str, bottom_right_diagonal: bool | None) -> bool:
    """Where the diagonal is anchored: the mask type decides, else what was stated, else bottom right.

    Raises InvalidInput when a causal mask type and what was stated contradict each other.
    """
    if "causal" not in attn_mask_type:
        return True if bottom_right_diagonal is None else bottom_right_diagonal
    anchored = "bottom_right" in attn_mask_type
    if bottom_right_diagonal is not None and bottom_right_diagonal != anchored:
        raise InvalidInput(
            "bottom_right_diagonal",
            bottom_right_diagonal,
            f"must be {anchored} with attn_mask_type {attn_mask_type!r}, which decides it",
        )
    return anchored


DType = Literal["bf16", "fp16", "fp32", "fp64", "fp8_e4m3", "fp8_e5m2"]
MaskType = Literal[
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
]
BiasType = Literal["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"]
BiasShape = Literal["bhss", "1hss", "b1ss", "11ss", "111s"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
KvCache = Literal["none", "contiguous", "paged"]

ITEMSIZE: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8_e4m3": 1, "fp8_e5m2": 1}

_DTYPE_NAMES: dict[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",  # as JAX and FlashInfer write it
    "float32": "fp32",
    "float": "fp32",
    "f32": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
_MASK_NAMES: dict[str, str] = {
    "none": "no_mask",
    "causal_padding": "padding_causal",
    "bottom_right": "causal_bottom_right",
    "causal_padding_bottom_right": "padding_causal_bottom_right",
}


def default_softmax_scale(head_dim_qk: int) -> float:
    """What scores are multiplied by where a call names no scale: 1 / sqrt(head_dim_qk)."""
    return 1.0 / math.sqrt(head_dim_qk)


def read_dtype(value: Any) -> Any:
    """``"bf16"`` from ``torch.bfloat16``, ``"bfloat16"`` or itself."""
    text = short(value, str).removeprefix("torch.")
    return _DTYPE_NAMES.get(text, text)


def read_mask_type(value: Any) -> Any:
    """TransformerEngine's spellings (``"padding,causal"``) brought to one."""
    if not isinstance(value, str):
        return value
    text = value.replace(",", "_").replace("-", "_")
    return _MASK_NAMES.get(text, text)


_Extent = Annotated[int, Field(ge=0, le=LARGEST)]


class TensorSpec(FrozenModel):
    """One tensor without its data. Shape and strides are in elements and in the format's order."""

    shape: tuple[_Extent, ...]
    stride: tuple[_Extent, ...]
    dtype: Annotated[Literal[DType, "bool"], BeforeValidator(read_dtype)] = "bf16"
    alignment: int = Field(
        default=16, gt=0, description="bytes that the first element's address is a multiple of (at most 16)"
    )
    requires_grad: bool = False

    @model_validator(mode="after")
    def _one_stride_per_dimension(self) -> TensorSpec:
        if len(self.shape) != len(self.stride):
            raise ValueError(
                f"shape has {len(self.shape)} dimensions and stride {len(self.stride)}; they must be equal"
            )
        return self

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def steps_by(self, width: int) -> bool:
        """Whether every stride but the innermost is a multiple of ``width`` elements."""
        steps = zip(self.shape[:-1], self.stride[:-1], strict=True)
        return all(n == 1 or step % width == 0 for n, step in steps)

    @property
    def last_stride(self) -> int:
        """The innermost stride; 1 where the innermost dimension holds a single element."""
        return self.stride[-1] if self.shape and self.shape[-1] != 1 else 1


class Tensors(FrozenModel):
    """Specs of the tensors of a call; None means dense in ``qkv_layout`` (or absent, for the mask)."""

    q: TensorSpec | None = None
    k: TensorSpec | None = None
    v: TensorSpec | None = None
    mask: TensorSpec | None = None
    mask_hides_nothing: bool = Field(
        default=False, description="no pair is masked out, which was known without reading a GPU"
    )
    ragged: bool = Field(
        default=False,
        description="thd: padded to its longest sequence the batch would more than double, or nobody knows",
    )
    lengths_apart: bool = Field(
        default=False,
        description="the lengths of queries and those of keys are two tensors, so that they may differ",
    )
    rank: int = Field(default=4, ge=2, le=8, description="dimensions of q, k and v as F.sdpa is given them")


class Fp8Meta(FrozenModel):
    """What selection keeps of an ``fp8_meta``: its recipe. Scales, histories and tensors are let go."""

    recipe: SerializeAsAny[_Recipe] | None = None


_FOLLOWS = (
    ("num_gqa_groups", "num_heads", 0),
    ("max_seqlen_kv", "max_seqlen_q", -1),
    ("head_dim_v", "head_dim_qk", 0),
)
"""Fields that follow another one unless they are stated, and the value that says so."""

_NONE_IS_UNSTATED = frozenset({"num_gqa_groups", "max_seqlen_kv", "head_dim_v", "window_size"})

_NO_META = Fp8Meta()
_NO_TENSORS = Tensors()


def _several(data: dict[str, Any]) -> bool:
    """Whether the data's ``cp_size`` is above 1; what is no number is left to the field."""
    try:
        return int(data.get("cp_size", 1)) != 1
    except Exception:
        return False


def _read_fp8_meta(value: Any) -> Any:
    if value is None:
        return _NO_META
    if isinstance(value, Fp8Meta):
        return value
    if isinstance(value, (str, _Recipe)):
        return Fp8Meta(recipe=read_recipe(value))
    if isinstance(value, Mapping):
        return Fp8Meta(recipe=read_recipe(value.get("recipe")))
    raise ValueError("allowed: a mapping with a 'recipe', a recipe, or None")


class AttentionParams(FrozenModel):
    """One attention call, as selection sees it.

    Equal parameters get the same answer: no rule can read anything that equality ignores. In
    particular ``fp8_meta`` is cut down to its recipe when it comes in.

    Raises :class:`attnsel.InvalidInput` naming the field, the value and what is allowed.
    """

    model_config = ConfigDict(populate_by_name=True)

    dtype: Annotated[DType, BeforeValidator(read_dtype)] = Field(
        default="bf16",
        validation_alias=AliasChoices("dtype", "qkv_dtype"),
        description="element type of q, k and v",
    )
    qkv_layout: Annotated[str, AfterValidator(read_layout)] = Field(
        default="bshd_bshd_bshd", description="memory layout, or just its format: bshd, sbhd, thd, bhsd"
    )
    batch_size: int = Field(default=2, gt=0, le=MOST, description="sequences in the batch")
    num_heads: int = Field(default=16, gt=0, le=MOST, description="query heads")
    num_gqa_groups: int = Field(
        default=0, ge=0, le=MOST, description="key/value heads; as many as query heads if 0"
    )
    max_seqlen_q: int = Field(default=4096, ge=0, le=MOST, description="longest query sequence")
    max_seqlen_kv: int = Field(
        default=-1, ge=-1, le=MOST, description="longest key sequence; max_seqlen_q if -1"
    )
    head_dim_qk: int = Field(default=128, gt=0, le=MOST, description="head dimension of queries and keys")
    head_dim_v: int = Field(
        default=0, ge=0, le=MOST, description="head dimension of values; head_dim_qk if 0"
    )
    attn_mask_type: Annotated[MaskType, BeforeValidator(read_mask_type)] = Field(
        default="causal", description="which pairs may attend"
    )
    window_size: tuple[int, int] = Field(
        default=(-1, -1), description="(left, right) keys around the diagonal, inclusive; -1 is no bound"
    )
    bottom_right_diagonal: bool | None = Field(
        default=None, description="anchor of windows and ALiBi; decided by a causal mask type"
    )
    core_attention_bias_type: BiasType = Field(default="no_bias", description="what is added to the scores")
    core_attention_bias_shape: BiasShape | None = Field(
        default=None, description="which dimensions of the bias are not 1; 1hss if there is a bias"
    )
    core_attention_bias_requires_grad: bool = Field(default=False, description="the bias needs a gradient")
    alibi_slopes_shape: tuple[int, ...] | None = Field(
        default=None, description="(h,) or (b, h) where slopes are given; computed from the heads if None"
    )
    softmax_type: SoftmaxType = Field(default="vanilla", description="attention sink in the denominator")
    softcap: float = Field(
        default=0.0, ge=0.0, allow_inf_nan=False, description="softcap * tanh(score / softcap); 0 is off"
    )
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="dropout probability")
    is_training: bool = Field(default=True, description="a backward pass will be needed")
    deterministic: bool = Field(default=False, description="bitwise equal results run after run")
    return_lse: bool = Field(default=False, description="the log-sum-exp is needed too")
    return_max_logit: bool = Field(default=False, description="the largest score per head is needed too")
    kv_cache: KvCache = Field(default="none", description="keys and values live in an inference cache")
    page_size: int | None = Field(default=None, gt=0, le=MOST, description="tokens per page of a paged cache")
    pad_between_seqs: bool = Field(default=False, description="thd: gaps between packed sequences")
    cp_size: int = Field(default=1, gt=0, le=MOST_RANKS, description="ranks that one sequence is spread over")
    cp_comm_type: CpCommType = Field(default="p2p", description="how context parallel ranks exchange")
    cuda_graph: bool = Field(default=False, description="the call is captured into a CUDA graph")
    fp8: bool = Field(default=False, description="inside FP8 autocast; the recipe says if attention is FP8")
    fp8_meta: Annotated[Fp8Meta, BeforeValidator(_read_fp8_meta)] = Field(
        default_factory=lambda: _NO_META, description="compared by its recipe only"
    )
    tensors: Tensors = Field(default_factory=lambda: _NO_TENSORS, description="strides, where they are known")

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        """None for "not stated", and TransformerEngine's context_parallel, which follows from cp_size."""
        if not isinstance(data, dict):
            return data
        data = {k: v for k, v in data.items() if v is not None or k not in _NONE_IS_UNSTATED}
        context_parallel = data.pop("context_parallel", None)
        if context_parallel is not None and flag("context_parallel", context_parallel) != _several(data):
            raise InvalidInput(
                "context_parallel",
                context_parallel,
                f"must follow cp_size, which is {short(data.get('cp_size', 1))}; leave it out",
            )
        return data

    @model_validator(mode="after")
    def _tensors_fit(self) -> AttentionParams:
        """Specs of q, k and v have the dimensions of the layout, a mask's at most four."""
        if self.tensors is _NO_TENSORS:
            return self
        kv, mask = "bshd" if self.layout.paged else self.layout.kv_format, self.tensors.mask
        for name, form in (("q", self.qkv_format), ("k", kv), ("v", kv)):
            spec: TensorSpec | None = getattr(self.tensors, name)
            if spec is not None and len(spec.shape) != len(form):
                allowed = f"must have {len(form)} dimensions, {form}"
                raise InvalidInput(f"tensors.{name}.shape", spec.shape, allowed)
        if mask is not None and len(mask.shape) > 4:
            raise InvalidInput("tensors.mask.shape", mask.shape, "must have at most 4 dimensions, bhss")
        return self

    def model_post_init(self, context: Any, /) -> None:
        """Fill in what follows, check across fields, then bring equal questions to one form."""
        values, stated = self.__dict__, self.__pydantic_fields_set__
        for name, source, unstated in _FOLLOWS:
            if values[name] == unstated:
                values[name] = values[source]
                stated.discard(name)  # so that replace() lets it follow again
        check_params(self)
        values["window_size"] = normalise_window(self.window_size, self.attn_mask_type)
        values["bottom_right_diagonal"] = diagonal_of(self.attn_mask_type, self.bottom_right_diagonal)
        if self.core_attention_bias_type in ("pre_scale_bias", "post_scale_bias"):
            values["core_attention_bias_shape"] = self.core_attention_bias_shape or "1hss"
        super().model_post_init(context)

    def replace(self, **changes: Any) -> AttentionParams:
        """A copy with some fields changed, validated. What was never stated follows the changes."""
        if "attn_mask_type" in changes and self.window_size == (-1, 0):
            changes.setdefault("window_size", (-1, -1))  # the right bound was the causal mask's own
        return super().replace(**changes)

    def resized(self, **changes: Any) -> AttentionParams:
        """``derive`` for sizes and memory alone (``_SIZES``): no check across fields can object to what a
        change of these leaves, and what was worked out from the others still holds. For the engine's own use.
        """
        values = {**self.__dict__, **changes}
        for name in _LOST_WHEN_RESIZED:
            values.pop(name, None)
        made = self._of_values(values, changes)
        FrozenModel.model_post_init(made, None)
        return made

    def rewritten(self, **changes: Any) -> AttentionParams:
        """``derive`` for changes that leave a legal question in its one form (a causal mask with its right
        bound closed, a diagonal that is decided): nothing is checked again. For the engine's own use."""
        made = self._changed(changes)
        FrozenModel.model_post_init(made, None)
        return made

    # Words that several rules share.
    @lazy
    def layout(self) -> LayoutName:
        return LAYOUTS[self.qkv_layout]

    @lazy
    def qkv_format(self) -> str:
        return self.layout.q_format

    @property
    def context_parallel(self) -> bool:
        return self.cp_size > 1

    @lazy
    def causal(self) -> bool:
        """Some key after the query is hidden because of the mask type."""
        return "causal" in self.attn_mask_type

    @lazy
    def bottom_right(self) -> bool:
        """The mask type itself is anchored at the bottom right."""
        return "bottom_right" in self.attn_mask_type

    @lazy
    def padding(self) -> bool:
        return "padding" in self.attn_mask_type

    @lazy
    def same_lengths(self) -> bool:
        """Each sequence has as many keys as queries: one tensor says how many, or all of them are real."""
        equal = self.max_seqlen_q == self.max_seqlen_kv and self.kv_cache != "paged"
        return equal and not self.tensors.lengths_apart

    @lazy
    def windowed(self) -> bool:
        """A real window: more than no bound at all or a causal mask's own right bound."""
        left, right = self.window_size
        return left != -1 or right not in (-1, 0)

    @lazy
    def has_bias(self) -> bool:
        """A bias tensor is added (ALiBi is not one: kernels compute it)."""
        return self.core_attention_bias_type in ("pre_scale_bias", "post_scale_bias")

    @lazy
    def gqa(self) -> bool:
        return self.num_heads != self.num_gqa_groups

    @lazy
    def dropout(self) -> bool:
        """Dropout that takes place: outside training there is none."""
        return self.is_training and self.attention_dropout > 0.0

    @lazy
    def recipe(self) -> _Recipe | None:
        return self.fp8_meta.recipe

    @lazy
    def fp8_attention(self) -> bool:
        """The attention itself runs in FP8: FP8 tensors, or an FP8 recipe that covers attention."""
        return self.dtype.startswith("fp8") or (
            self.fp8 and self.recipe is not None and self.recipe.attention_in_fp8
        )

    @lazy
    def score_bytes(self) -> int:
        """Bytes of one [b, h, s_q, s_kv] tensor in ``dtype``: what a kernel that stores scores needs."""
        return (
            self.batch_size * self.num_heads * self.max_seqlen_q * self.max_seqlen_kv * ITEMSIZE[self.dtype]
        )

    @lazy
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that diagonal and window leave, of one head's longest sequence.

        Lengths are not known here, and what a mask tensor hides is not either: those pairs count.
        """
        s_q, s_kv = self.max_seqlen_q, self.max_seqlen_kv
        left, right = self.window_size
        shift = s_kv - s_q if self.bottom_right_diagonal else 0
        highest = s_kv if right < 0 else shift + right
        lowest = -s_q if left < 0 else shift - left
        return max(0, _pairs_up_to(highest, s_q, s_kv) - _pairs_up_to(lowest - 1, s_q, s_kv))

    @lazy
    def flops(self) -> int:
        """Operations of the matrix products, forward and, in training, backward, for pairs that are visible.

        Forward Q K^T and P V; backward the scores again, dO V^T, dV, dQ and dK (FlashAttention-2, appendix).
        """
        pairs = self.batch_size * self.num_heads * self.visible_pairs
        d, e = self.head_dim_qk, self.head_dim_v
        return 2 * pairs * (4 * d + 3 * e if self.is_training else d + e)


def _pairs_up_to(distance: int, rows: int, columns: int) -> int:
    """Pairs (row, column) of a score matrix with column - row at most ``distance``."""

    def up_to(row: int) -> int:  # a sum over rows 1 to ``row``, of which row i has i pairs, or all columns
        if row <= 0:
            return 0
        short = min(row, columns)
        return short * (short + 1) // 2 + columns * (row - short)

    return up_to(distance + rows) - up_to(distance)


# What ``resized`` may change: sequences, heads, head dimensions, and where they lie.
_SIZES = frozenset(
    {"max_seqlen_q", "max_seqlen_kv", "num_gqa_groups", "head_dim_qk", "head_dim_v", "qkv_layout", "tensors"}
)
_LOST_WHEN_RESIZED = ("layout", "qkv_format", "gqa", "score_bytes", "flops", "visible_pairs", "same_lengths")
