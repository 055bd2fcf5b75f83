"""What one attention call is: its static side, its tensors, and the settings it is made under."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attnsel.base.model import flag, number, text
from attnsel.errors import InvalidInput
from attnsel.params import read_mask_type
from attnsel.params.layout import FORMATS, Format

if TYPE_CHECKING:
    from attnsel.settings import Settings


# ---- What is said to Dynamo and asked of symbolic sizes ------------------------------------------------
# Without loading either before something is compiled: ``torch.compiler.assume_constant_result`` imports
# ``torch._dynamo``, ``torch.fx.experimental.symbolic_shapes`` sympy: 1.2 s of CPU together (torch 2.13) that
# a program which compiles nothing would pay when it imports us.


F = TypeVar("F", bound=Callable[..., Any])


def constant_when_traced(function: F) -> F:
    """Dynamo runs it once, on what it knows while tracing, and puts the result into the graph as it is.

    What ``torch.compiler.assume_constant_result`` does: this one attribute (``_dynamo/decorators.py`` of
    torch 2.13.0, and of pytorch/pytorch at 00abea08).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_causal_bias(mask: Any) -> TypeGuard[Any]:
    """Whether a mask is one of torch.nn.attention.bias: by its name, as importing that loads Dynamo."""
    return type(mask).__name__ == "CausalBias" and type(mask).__module__ == "torch.nn.attention.bias"


def concrete(value: Any) -> Any:
    """A number that dynamic shapes made symbolic, as the number it is: the graph holds for that alone."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(value)


def is_static(size: Any) -> bool:
    """Whether a size or stride is one number wherever the graph runs."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return bool(has_static_value(size))


# ---- Masks that are known to hide nothing, without reading a GPU ---------------------------------------
# Three ways to know: the mask lies on the CPU, where it is read (of an expanded one, what it is made of); it
# was made by ``trivial_mask``; or the caller said so with ``assume_all_visible``. The last two are a note on
# the tensor that holds until PyTorch changes it in place.
#
# Reading a CPU mask is part of looking a call up: contents may change between two calls, and memory shared
# with NumPy changes without a trace. One that hid nothing is read at every call, as kernels run without it.
# One that hid something goes to the kernel as it then is, and is read again only where PyTorch counts a
# change: numbers are right in any case, and NumPy may at most leave a call with a kernel that takes masks.


_NOTE = "_attnsel_hides_nothing"
_READ_AT_ONCE = 1 << 12  # elements that cost less than a look at some of them
_COMPARED = 1 << 10  # elements that are held against zeros sooner than looked through
_MOST_SEEN = 256
#: By id: masks that were read, at which version, and what they must equal to hide nothing; None: they hide.
_seen: dict[int, tuple[ref[Tensor], int, Tensor | None]] = {}


def assume_all_visible(mask: Tensor) -> Tensor:
    """Say that an ``attention_mask`` (True = masked out) is False everywhere; returns it.

    For masks on a GPU: attnsel does not read them, as that would wait, so that kernels without a mask
    argument stay out of reach. The note is on this tensor object, not on views or copies of it, and ends with
    the next in-place change by PyTorch. Not checked, unless ``configure(check=True)`` asks for it.
    """
    setattr(mask, _NOTE, _version(mask))
    return mask


def trivial_mask(*shape: int, device: Any = None) -> Tensor:
    """A bool mask that hides nothing, known as such: one element, expanded, so that it takes no memory."""
    return assume_all_visible(torch.zeros(1, dtype=torch.bool, device=device).expand(*shape))


def known_to_be_trivial(mask: Any) -> bool:
    """Whether a mask, or each of a pair, is known to hide nothing. Never waits for a device."""
    if isinstance(mask, (tuple, list)):
        return bool(mask) and all(known_to_be_trivial(one) for one in mask)
    if not isinstance(mask, Tensor):
        return False
    noted = getattr(mask, _NOTE, None)
    if noted is not None and noted == _version(mask):
        return True
    known = _seen.get(id(mask))
    if known is not None and known[0]() is mask and known[1] == mask._version:
        return known[2] is not None and mask.equal(known[2])
    if not mask.is_cpu or type(mask) is not Tensor or mask.dtype != torch.bool:
        return False
    hides = _any(mask)
    if (hides or mask.numel() <= _COMPARED) and not mask.is_inference():
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen[id(mask)] = ref(mask), mask._version, None if hides else torch.zeros_like(mask)
    return not hides


def is_noted(mask: Any) -> bool:
    """Whether somebody said so, rather than the mask's contents."""
    return isinstance(mask, Tensor) and getattr(mask, _NOTE, None) == _version(mask)


def _any(mask: Tensor) -> bool:
    """Whether a CPU mask masks something out. Its last column alone often tells: causal masks hide it."""
    if mask.numel() > _READ_AT_ONCE:
        mask = mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())]
        if mask.dim() > 1 and mask[..., :1, -1:].any():
            return True
    return bool(mask.any())


def _version(mask: Tensor) -> int:
    """Counts in-place changes. Those of an inference tensor are not counted: a note holds for its life."""
    return -1 if mask.is_inference() else mask._version


class _Referable:
    __slots__ = ("__weakref__",)  # dataclasses add it themselves from Python 3.11 on


@dataclass(frozen=True, slots=True, eq=False)
class Config(_Referable):
    """The static side of a call. Interned by :func:`config`, so it hashes and compares by identity."""

    qkv_format: str = "bshd"
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    softmax_scale: float | None = None  # None: 1 / sqrt(head_dim_qk)
    softcap: float = 0.0
    attention_dropout: float = 0.0  # what really happens in this call: 0 outside training
    softmax_type: str = "vanilla"
    bias_type: str = "no_bias"
    is_training: bool = False  # besides what needs a gradient
    deterministic: bool = False
    return_lse: bool = False
    return_max_logit: bool = False
    flatten_heads: bool = False  # output [..., h * e] instead of [..., h, e]
    backend: str | None = None
    adapt: str | None = None
    num_attention_heads: int | None = None  # what a module was built for; None: whatever the tensors have
    num_gqa_groups: int | None = None
    head_dim_qk: int | None = None
    head_dim_v: int | None = None
    label: str = ""
    replayable: bool = False  # dropout must be replayed from a seed tensor (see runtime/compiled.py)
    said: str = ""  # of "mask", "diagonal", "layout": what the caller said so that it cannot be mistaken

    text: str = ""  # all of the above as JSON, for operators whose arguments are plain values

    def __reduce__(self) -> tuple[Any, ...]:
        return read_config, (self.text,)  # a copy of a module shares the interned object

    def replace(self, **changes: Any) -> Config:
        """The Config with some fields changed."""
        return config(**{**{name: getattr(self, name) for name in _GIVEN}, **changes})

    @property
    def form(self) -> Format:
        """Where the dimensions of q, k and v stand."""
        return FORMATS[self.qkv_format]

    @property
    def has_padding(self) -> bool:
        return "padding" in self.attn_mask_type

    def results(self, out: Any, lse: Any, max_logit: Any) -> Any:
        """What the caller gets: the output, or a tuple with what else the config asks for."""
        results = [out]
        if self.return_lse:
            results.append(lse)
        if self.return_max_logit:
            results.append(max_logit)
        return results[0] if len(results) == 1 else tuple(results)


_GIVEN = tuple(field.name for field in fields(Config) if field.name != "text")


class Extras(NamedTuple):
    """The other tensors of a call, under TransformerEngine's names. Shapes as there."""

    attention_mask: Any = None  # bool, True = masked out; a pair (q, kv) for cross attention with padding
    core_attention_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softmax_offset: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    block_table: Tensor | None = None  # int32 [b, n]: k and v are pools of pages
    dropout_seed: Tensor | None = None  # int64 scalar; drawn from the device's generator if None


NO_EXTRAS = Extras()


class Call(NamedTuple):
    """One attention call. ``q``, ``k`` and ``v`` lie as ``config.qkv_format`` says."""

    config: Config
    q: Tensor
    k: Tensor
    v: Tensor
    extras: Extras
    settings: Settings
    need_grad: bool  # a backward will follow this very call

    @property
    def training(self) -> bool:
        """Dropout that is asked for takes place, whatever is said about training."""
        return self.config.is_training or self.config.attention_dropout > 0.0 or self.need_grad

    @property
    def paged(self) -> bool:
        return self.extras.block_table is not None


def needs_grad(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> bool:
    if not torch.is_grad_enabled():
        return False
    others = (extras.core_attention_bias, extras.softmax_offset)
    return any(isinstance(t, Tensor) and t.requires_grad for t in (q, k, v, *others))


# One object per content, for as long as it is referenced: a learned scale makes a new one each step.
_by_text: WeakValueDictionary[str, Config] = WeakValueDictionary()


def config(**given: Any) -> Config:
    """The one Config with these fields. Raises InvalidInput for what can be judged without tensors."""
    if torch.compiler.is_compiling():
        return _constant(**{name: _specialised(value) for name, value in given.items()})
    return _interned(**given)


@constant_when_traced
def _constant(**given: Any) -> Config:
    return _interned(**given)


def _specialised(value: Any) -> Any:
    """A number that dynamic shapes made symbolic (even a default is one), as the number it is."""
    if isinstance(value, (int, float)):
        return concrete(value)
    if isinstance(value, tuple):
        return tuple([concrete(n) for n in value])
    return value


@lru_cache(maxsize=4096)
def read_config(text: str) -> Config:
    """The Config whose ``text`` this is."""
    given = json.loads(text)
    if given["window_size"] is not None:
        given["window_size"] = tuple(given["window_size"])
    return _interned(**given)


def _interned(**given: Any) -> Config:
    try:
        return _remembered(**given)
    except InvalidInput:
        raise
    except Exception:  # what cannot be hashed
        _read(given)
        raise


_NONE_ALLOWED = frozenset({"bottom_right_diagonal", "softmax_scale", "backend", "adapt"})
_KINDS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("qkv_format", "attn_mask_type", "softmax_type", "backend", "adapt"), text),
    **dict.fromkeys(("softmax_scale", "softcap", "attention_dropout"), number),
    **dict.fromkeys(("bottom_right_diagonal", "is_training", "deterministic", "return_lse"), flag),
    "return_max_logit": flag,
}


def _read(given: dict[str, Any]) -> dict[str, Any]:
    """Plain values of what may be of a kindred type. Raises InvalidInput for what is of another."""
    made = dict(given)
    for name, kind in _KINDS.items():
        if name in given and not (given[name] is None and name in _NONE_ALLOWED):
            made[name] = kind(name, given[name])
    if "bias_type" in given:
        made["bias_type"] = text("core_attention_bias_type", given["bias_type"])
    return made


@lru_cache(maxsize=4096, typed=True)  # True and 1 are equal, and not the same to JSON
def _remembered(**given: Any) -> Config:
    made = Config(**_read(given))
    if made.qkv_format not in FORMATS:
        raise InvalidInput("qkv_format", made.qkv_format, f"must be one of {', '.join(FORMATS)}")
    object.__setattr__(made, "text", json.dumps({name: getattr(made, name) for name in _GIVEN}))
    return _by_text.setdefault(made.text, made)


def mask_name(attn_mask_type: str) -> str:
    """A mask type's one spelling."""
    name: str = read_mask_type(attn_mask_type)
    return name


def torch_mask(
    attn_mask: Any, attention_mask: Any, kind: str, bias_type: str, bias: Any
) -> tuple[str, str, Any, Any]:
    """``attn_mask`` as F.sdpa reads it: bool with True = takes part, or floating and added to the scores.

    Returns what says the same here: attn_mask_type, core_attention_bias_type, attention_mask and
    core_attention_bias. A bool mask may stand beside a padding type, [b, 1, 1, s] (a pair where lengths
    differ); nothing else hides anything beside it. Raises InvalidInput.
    """
    masks = attn_mask if isinstance(attn_mask, (tuple, list)) else (attn_mask,)
    for mask in masks:
        if not isinstance(mask, Tensor):
            raise InvalidInput("attn_mask", type(mask).__name__, "must be a torch.Tensor")
        if mask.dtype != torch.bool and not (mask.is_floating_point() and mask is attn_mask):
            allowed = "must be torch.bool, True = takes part, or one tensor of floats, added to the scores"
            raise InvalidInput("attn_mask.dtype", str(mask.dtype), allowed)
    if attention_mask is not None:
        raise InvalidInput("attn_mask", "a tensor", "must be left out beside attention_mask")
    floating = masks[0].is_floating_point()
    if kind not in ("no_mask", "arbitrary") and (floating or "padding" not in kind):
        allowed = "must be no_mask or arbitrary beside attn_mask, which says all that is visible"
        raise InvalidInput("attn_mask_type", kind, allowed)
    if not floating:
        hidden = tuple(~mask for mask in masks)
        kind = "arbitrary" if kind == "no_mask" else kind
        return kind, bias_type, hidden[0] if attn_mask is masks[0] else hidden, bias
    if bias is not None or bias_type != "no_bias":
        raise InvalidInput("core_attention_bias_type", bias_type, "must be no_bias beside such an attn_mask")
    return "no_mask", "post_scale_bias", None, attn_mask


def window_pair(window_size: Any) -> tuple[int, int] | None:
    """A window as a pair of ints. Raises InvalidInput for anything else but None."""
    if window_size is None:
        return None
    pair = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(n, int) for n in pair):
        raise InvalidInput("window_size", window_size, "must be (left, right) or None")
    return pair


def misaligned(t: Tensor) -> int:
    """Bytes from a tensor's address down to a multiple of 16; where it has no memory, from its offset."""
    if type(t) is not FakeTensor:
        try:
            return t.data_ptr() & 15
        except RuntimeError:  # one that a transform wraps
            pass
    return int(t.storage_offset()) * t.element_size() & 15


# --------------------------------------------------------------------------------------------------------
# q, k and v out of one packed buffer, as TransformerEngine's ``qkv_layer`` and ``kv_layer`` say.


_FORMATS = ("bshd", "sbhd", "thd")


def unpack(
    q: Any, k: Any, v: Any, qkv_layer: Any, kv_layer: Any, interleave_dim: int, qkv_format: str, paged: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of ``qkv_layer`` [.., 3, h, d], or k and v of ``kv_layer`` [.., 2, g, d].

    ``interleave_dim`` -2 stands for [.., h, 3, d] and [.., g, 2, d]. No copy; one stack in the backward gives
    the packed gradient. Raises InvalidInput for any other shape, for tensors given twice or not at all, and
    with pages. Where nothing is packed, they are q, k and v as they are.
    """
    if type(interleave_dim) is int and interleave_dim == -3 and qkv_layer is None and kv_layer is None:
        for name, t in (("query_layer", q), ("key_layer", k), ("value_layer", v)):
            if t is None:
                raise InvalidInput(name, None, "must be given, or qkv_layer or kv_layer that holds it")
        return q, k, v
    if not isinstance(interleave_dim, int):
        raise InvalidInput("qkv_interleave_dim", interleave_dim, "must be -3 (bs3hd) or -2 (bsh3d)")
    if qkv_layer is None and kv_layer is None:
        raise InvalidInput("qkv_interleave_dim", interleave_dim, "must be -3 without qkv_layer or kv_layer")
    if qkv_layer is not None and kv_layer is not None:
        raise InvalidInput("kv_layer", "a tensor", "must be left out beside qkv_layer, which holds k and v")
    name, packed, count = ("qkv_layer", qkv_layer, 3) if kv_layer is None else ("kv_layer", kv_layer, 2)
    given = {"query_layer": q, "key_layer": k, "value_layer": v}
    for other in list(given)[3 - count :]:
        if given[other] is not None:
            raise InvalidInput(other, "a tensor", f"must be left out beside {name}, which holds it")
    if count == 2 and q is None:
        raise InvalidInput("query_layer", None, "must be given with kv_layer, which holds k and v only")
    if paged:
        raise InvalidInput("block_table", "a tensor", f"must be left out with {name}: pages are not packed")
    if interleave_dim not in (-3, -2):
        raise InvalidInput("qkv_interleave_dim", interleave_dim, "must be -3 (bs3hd) or -2 (bsh3d)")
    if qkv_format not in _FORMATS:
        raise InvalidInput("qkv_format", qkv_format, f"must be one of {', '.join(_FORMATS)} with {name}")
    if not isinstance(packed, torch.Tensor):
        raise InvalidInput(name, type(packed).__name__, "must be a torch.Tensor")
    if packed.is_nested or packed.layout != torch.strided:
        raise InvalidInput(f"{name}.layout", str(packed.layout), "must be dense and strided")
    rank = FORMATS[qkv_format].rank + 1
    if packed.dim() != rank:
        allowed = f"must have {rank} dimensions with qkv_format {qkv_format!r}"
        raise InvalidInput(f"{name}.shape", tuple(packed.shape), allowed)
    if packed.shape[interleave_dim] != count:
        allowed = f"must have size {count} in dimension {interleave_dim} (qkv_interleave_dim)"
        raise InvalidInput(f"{name}.shape", tuple(packed.shape), allowed)
    views = packed.unbind(interleave_dim)
    return (views[0], views[1], views[2]) if count == 3 else (q, views[0], views[1])
