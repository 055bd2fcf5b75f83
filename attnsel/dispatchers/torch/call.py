"""A question as a call of F.scaled_dot_product_attention: what it is given, and what it has no word for."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from attnsel.environment.versions import Version
from attnsel.params import AttentionParams, TensorSpec
from attnsel.rules.sdpa.common import window_hides

_BIAS_ROWS = {"bhss": "bhqk", "1hss": "hqk", "b1ss": "bqk", "11ss": "qk", "111s": "k"}
"""Dimensions of a bias that are not 1, by its shape."""


class Call(NamedTuple):
    """``seen``: the question that is left for a kernel, with ``mask`` as a tensor where one is given.
    ``text``: the call. ``notes``: how the rest of the question is brought into it."""

    text: str
    seen: AttentionParams
    mask: TensorSpec | None
    notes: tuple[str, ...]


class _Mask(NamedTuple):
    """What a mask that the caller builds has to say: the dimensions that are not 1, and whether numbers."""

    dimensions: frozenset[str] = frozenset()
    numbers: bool = False
    causal: bool = False  # left to is_causal
    given: TensorSpec | None = None

    @property
    def needed(self) -> bool:
        return bool(self.dimensions)


def call_of(p: AttentionParams, release: Version, enable_gqa: bool, deterministic: bool) -> Call:
    """The call that asks F.sdpa for ``p``. Only what a mask can say, or an argument, comes through: what
    neither can stays in ``seen`` for the rules to object to."""
    notes: list[str] = []
    made = _mask_of(p, notes)
    mask = _spec(p, made) if made.needed else None
    kind = "arbitrary" if mask is not None else "causal" if made.causal else "no_mask"
    seen = p
    if p.qkv_format != "thd" and p.kv_cache != "paged":
        seen = p.replace(
            attn_mask_type=kind,
            window_size=(-1, -1),
            bottom_right_diagonal=None,
            core_attention_bias_type="no_bias",
            core_attention_bias_shape=None,
            core_attention_bias_requires_grad=False,
            alibi_slopes_shape=None,
            kv_cache="none",
            fp8=False,
            cp_size=1,
            deterministic=deterministic,
            tensors=p.tensors.replace(mask=mask, mask_hides_nothing=False),
        )
    if p.cp_size > 1:
        notes.append("F.sdpa knows no ranks: judged as one call on the whole sequence")
    if p.fp8 and not p.dtype.startswith("fp8"):
        notes.append("F.sdpa takes no FP8 recipe: it computes in the type of q, k and v")
    text = f"F.scaled_dot_product_attention({', '.join(_arguments(p, seen, mask, release, enable_gqa))})"
    return Call(text, seen, mask, tuple(notes))


def _arguments(
    p: AttentionParams, seen: AttentionParams, mask: TensorSpec | None, release: Version, enable_gqa: bool
) -> list[str]:
    arguments = ["q", "k", "v"]
    if mask is not None:
        arguments.append(f"attn_mask={mask.dtype}{list(mask.shape)}")
    if seen.attn_mask_type == "causal":
        arguments.append("is_causal=True")
    if p.dropout:
        arguments.append(f"dropout_p={p.attention_dropout:g}")
    if p.gqa and enable_gqa and release >= (2, 5):
        arguments.append("enable_gqa=True")
    return arguments


def _mask_of(p: AttentionParams, notes: list[str]) -> _Mask:
    """What has to be in a mask, and what is left to is_causal."""
    tensor = p.tensors.mask
    alone = p.attn_mask_type == "no_mask" and not window_hides(p)
    numbers = tensor is not None and tensor.dtype != "bool"
    if alone and numbers and p.core_attention_bias_type == "post_scale_bias":
        return _Mask(frozenset({"given"}), numbers=True, given=tensor)  # the bias as a call gave it
    biased = p.has_bias or p.core_attention_bias_type == "alibi"
    diagonal = _diagonal(p, notes, biased or p.padding)
    needs: set[str] = set()
    if diagonal == "mask":
        needs |= {"q", "k"}
    if p.padding:
        needs |= {"b", "k"}
        if p.attn_mask_type == "padding_causal" and p.same_lengths and not biased and not p.windowed:
            notes.append(
                "where padding is at the end, is_causal=True alone gives the real queries the same result"
            )
    if p.has_bias:
        needs |= set(_BIAS_ROWS[p.core_attention_bias_shape or "1hss"])
        if p.core_attention_bias_type == "pre_scale_bias":
            notes.append("attn_mask is added to scaled scores: the bias times the softmax scale")
    if p.core_attention_bias_type == "alibi":
        notes.append("ALiBi is a mask of numbers that the caller builds: F.sdpa takes no slopes")
        needs |= {"h", "q", "k"} | ({"b"} if len(p.alibi_slopes_shape or ()) == 2 else set())
    given = None
    if p.attn_mask_type == "arbitrary":
        given = tensor
        if given is None:
            needs |= {"b", "q", "k"}
            notes.append("nothing says what the mask is: taken for bool[b, 1, s_q, s_kv]")
        else:
            needs.add("given")
    return _Mask(frozenset(needs), biased, diagonal == "flag", given)


def _diagonal(p: AttentionParams, notes: list[str], masked: bool) -> str:
    """Who says which keys lie too far: nobody (""), is_causal ("flag") or the mask."""
    if window_hides(p):
        return "mask"
    if not p.causal:
        return ""
    if p.bottom_right and p.max_seqlen_q == 1:
        return ""  # a single query, as in decoding, sees every key
    if p.bottom_right and (p.max_seqlen_q != p.max_seqlen_kv or not p.same_lengths):
        notes.append(
            "is_causal starts at the top left, so that a mask says the bottom right; from torch 2.3 on "
            "torch.nn.attention.bias.causal_lower_right(s_q, s_kv) as attn_mask keeps flash"
        )
        return "mask"
    if masked:  # one call takes attn_mask or is_causal
        return "mask"
    return "flag"


def _spec(p: AttentionParams, made: _Mask) -> TensorSpec:
    """The mask as a tensor: the given one, or a dense one of what it has to say."""
    if made.given is not None and made.dimensions == {"given"}:
        given = made.given
        return given.replace(requires_grad=True) if p.core_attention_bias_requires_grad else given
    sizes = {"b": p.batch_size, "h": p.num_heads, "q": p.max_seqlen_q, "k": p.max_seqlen_kv}
    wanted = made.dimensions
    if made.given is not None:  # with a bias, a window or padding besides: of all their sizes
        wanted = wanted | {"b", "q", "k"}
    shape = tuple(size if name in wanted else 1 for name, size in sizes.items())
    if not wanted & {"b", "h"}:
        shape = shape[2:]
    elif p.tensors.rank == 3:  # q is [b*h, s, d]
        shape = (p.batch_size * p.num_heads, *shape[2:])
    numbers = "bf16" if p.dtype.startswith("fp8") else p.dtype
    return TensorSpec(
        shape=shape,
        stride=tuple(prod(shape[place + 1 :]) for place in range(len(shape))),
        dtype=numbers if made.numbers else "bool",
        requires_grad=p.core_attention_bias_requires_grad,
    )
