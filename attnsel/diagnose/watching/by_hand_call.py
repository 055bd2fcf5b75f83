"""One attention written by hand, from the product of queries and keys on, and what it amounts to."""

from __future__ import annotations

from math import isclose, prod
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.diagnose.watching.by_hand_tried import Numbers, heads_of, picked
from attnsel.diagnose.watching.record import Materialised
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams, read_dtype, read_mask_type

# --------------------------------------------------------------------------------------------------------
# What the masks of attention written by hand hide: a causal triangle, padding, a window, nothing, or more.
#
# Written by hand, a mask is added to the scores or overwrites them with a large negative number. Read from
# the values, once for each tensor: two masks over the same scores hide what either hides.


LARGEST = 1 << 24  # elements of a mask that is read; a larger one is called "arbitrary"
_HIDES = -1e3  # what is added to a score that shall not count: finfo.min, -1e4 (BERT), -1e9, -inf
_MAYBE_HIDES = -50.0  # Swin adds -100: a mask only where nothing else but 0 is added


class Addition(NamedTuple):
    """A change of the scores before softmax. ``hides``: True where ``tensor`` is bool and True hides a pair,
    False where True shows it, None where ``tensor`` is added ``times`` times."""

    tensor: Tensor
    hides: bool | None = None
    times: float = 1.0


class Visibility(NamedTuple):
    """What the masks of one call leave. ``kind`` is an attn_mask_type; ``window`` (left, right) or None."""

    kind: str = "no_mask"
    window: tuple[int, int] | None = None
    hides_nothing: bool = False
    same: bool = True  # for the whole batch and all heads: none of them has its own
    shape: tuple[int, ...] | None = None
    note: str = ""


class Bias(NamedTuple):
    """What is added to scores and hides nothing. ``kind``: alibi or post_scale_bias."""

    kind: str = "no_bias"
    shape: tuple[int, ...] = ()
    requires_grad: bool = False


class Masks(NamedTuple):
    """What masks and biases mean together, and their values: True where a pair is hidden, and what is added
    to others."""

    visibility: Visibility = Visibility()
    bias: Bias = Bias()
    hidden: Tensor | None = None
    added: Tensor | None = None
    unread: bool = False


def read_masks(additions: list[Addition], s_q: int, s_kv: int) -> Masks:
    """What masks and biases of [.., s_q, s_kv] scores mean together."""
    hidden: Tensor | None = None
    added: Tensor | None = None
    learned = unread = False
    for one in additions:
        if one.tensor.dim() and one.tensor.shape[-1] == 1 and s_kv > 1:
            continue  # the same for all keys of a row: softmax takes no notice
        if one.tensor.numel() > LARGEST or not _can_read(one.tensor):
            unread = True
            continue
        its, rest = _parts(one)
        if its is not None:
            hidden = its if hidden is None else hidden | its
        if rest is not None:
            added = rest if added is None else added + rest
            learned = learned or one.tensor.requires_grad
    bias = Bias() if added is None else _bias(added, learned)
    if unread:
        return Masks(Visibility("arbitrary", note="the mask was too large to read"), bias, unread=True)
    if hidden is None:
        return Masks(bias=bias, added=added)
    visibility = _visibility(hidden, s_q, s_kv)._replace(same=max(hidden.shape[:-2], default=1) == 1)
    return Masks(visibility, bias, hidden, added)


def _can_read(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _parts(one: Addition) -> tuple[Tensor | None, Tensor | None]:
    """What it hides, as bool with True for hidden, and what it adds to the rest; None for nothing."""
    values = one.tensor.detach()
    if one.hides is not None:
        mask = values if values.dtype == torch.bool else values != 0
        return (mask if one.hides else ~mask).cpu(), None
    added = (values.float() * one.times).cpu()
    hidden = added < _HIDES
    kept = torch.where(hidden, 0.0, added)
    lowest = kept.min() if kept.numel() else torch.zeros(())
    if lowest <= _MAYBE_HIDES and bool(((kept == 0) | (kept == lowest)).all()):
        hidden, kept = hidden | (kept == lowest), torch.zeros(())
    is_mask = bool(hidden.any()) or not bool(kept.any())
    return (hidden if is_mask else None), (kept if bool(kept.any()) else None)


def _bias(kept: Tensor, learned: bool) -> Bias:
    """ALiBi where it is linear in the key's position, and the same for no two heads."""
    kind = "post_scale_bias"
    if kept.dim() >= 3 and kept.shape[-1] >= 3 and not learned:
        step = kept[..., 1:] - kept[..., :-1]
        row = step[..., -1:, :]  # a causal mask hides the upper rows; the last row sees all
        if bool((row - row[..., :1]).abs().max() <= 1e-3 * row.abs().max()):
            kind = "alibi"
    return Bias(kind, tuple(kept.shape), learned)


def _visibility(hidden: Tensor, s_q: int, s_kv: int) -> Visibility:
    shape = tuple(hidden.shape)
    if not bool(hidden.any()):
        return Visibility(hides_nothing=True, shape=shape)
    planes = hidden.expand(*hidden.shape[:-2], s_q, s_kv) if hidden.dim() >= 2 else hidden.expand(s_q, s_kv)
    planes = planes.reshape(-1, s_q, s_kv)
    rows = torch.arange(s_q)[:, None]
    columns = torch.arange(s_kv)[None, :]
    for kind, shift in (("causal", 0), ("causal_bottom_right", s_kv - s_q)):
        distance = columns - rows - shift
        if not bool(planes[:, distance > 0].all()):
            continue
        kind = "causal" if s_q == s_kv else kind
        if bool((planes == (distance > 0)).all()):
            return Visibility(kind, shape=shape)
        left = shift + s_q - 1 - int((~planes[0, -1]).int().argmax())
        if bool((planes == ((distance > 0) | (distance < -left))).all()):
            return Visibility(kind, (left, 0), shape=shape)
        if _is_padding(planes, distance <= 0):
            return Visibility("padding_" + kind, shape=shape)
        return Visibility("arbitrary", shape=shape, note=f"{kind.replace('_', ' ')} and more")
    if _is_padding(planes, torch.ones(s_q, s_kv, dtype=torch.bool)):
        return Visibility("padding", shape=shape)
    return Visibility("arbitrary", shape=shape)


def _is_padding(planes: Tensor, among: Tensor) -> bool:
    """Whether, of the pairs ``among``, exactly those with keys from some length on are hidden."""
    visible = (~planes & among).any(dim=1)  # keys that some row sees
    lengths = visible.sum(dim=-1, keepdim=True)
    prefix = torch.arange(planes.shape[-1])[None, :] < lengths
    return bool((visible == prefix).all()) and bool((planes == ~(among & prefix[:, None, :])).all())


def first_value(value: Any) -> float | None:
    """A number, or the first element of a tensor that can be read; None where there is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Tensor) and value.numel() and _can_read(value) and value.dtype != torch.bool:
        return float(value.detach().flatten()[0])
    return None


def zeros_and_ones(value: Any) -> bool:
    """Whether it is a tensor of nothing else."""
    if not isinstance(value, Tensor) or value.numel() > LARGEST or not _can_read(value):
        return False
    return value.dtype == torch.bool or bool(((value == 0) | (value == 1)).all())


class Operand(NamedTuple):
    """What became of a tensor before it was multiplied: by which number, of which dtype it was before a cast,
    how often its heads were repeated, and whether it is a weight of the model."""

    factor: float = 1.0
    dtype: torch.dtype | None = None
    repeats: int = 1
    parameter: bool = False
    bytes: int = 0


class TracedProduct:
    """What is known so far. ``left`` and ``right`` are the factors of the product, [.., rows, depth] and
    [.., depth, columns]; ``batch`` is how many such products it was.

    Once it is over: ``params`` are None where attnsel has no words for it, and ``unread`` says why;
    ``numbers`` are what a replacement can be tried on; ``folded``: batch and heads are one dimension.
    """

    def __init__(self, operator: str, a: Tensor, b: Tensor, left: Operand, right: Operand) -> None:
        self.rows, self.depth, self.columns = a.shape[-2], a.shape[-1], b.shape[-1]
        self.batch = prod(a.shape[:-2])
        self.left, self.right = left, right
        self.dtype = a.dtype
        self.factor = left.factor * right.factor
        self.temperature: Tensor | None = None
        self.tempering = ""  # whether it multiplies, "*", or divides, "/"
        self.softcap = 0.0
        self.additions: list[Addition] = []
        self.done = False
        self.place: Any = None  # what an observer keeps of it
        self.known_as: Any = None
        self.counted = False
        self.between: list[str] = []  # what was not read
        self.zeroed: list[Tensor] = []  # zeros and ones that scores were multiplied by
        self.pieces = False  # whether scores were put together
        self.made: list[Materialised] = []
        self.dropout = 0.0
        self.sink = False
        self.sinks: Tensor | None = None
        self.normalised = False  # scores less their log-sum-exp
        self.shape: tuple[int, ...] = ()  # of the scores, at their softmax
        self.s_q = self.s_kv = 0
        self.outer: list[int] = []
        self.key, self.query = right, left
        self.dim = -1
        self.masks = Masks()
        self.a, self.b = heads_of(a, self.batch), heads_of(b, self.batch)
        self.by_right = self.ordered = True
        self.kept: Tensor | None = None  # probabilities before dropout
        self.v: Tensor | None = None
        self.out: Tensor | None = None
        self.operators = [operator]
        self.requires_grad = a.requires_grad or b.requires_grad
        self.begun, self.seconds = perf_counter(), 0.0
        self.params: AttentionParams | None = None
        self.unread = ""
        self.folded = False
        self.notes: tuple[str, ...] = ()
        self.numbers: Numbers | None = None

    def made_of(self, what: str, out: Tensor) -> None:
        """A tensor as large as the scores that an operator wrote."""
        self.made.append(Materialised(what=what, bytes=out.numel() * out.element_size()))

    def multiplied(self, number: float | None) -> bool:
        """By a number; whether that can be said."""
        if number is None or self.softcap > 0 or self.sink:
            return False
        if self.softcap < 0:  # what stands behind a tanh is the cap itself
            self.softcap = number
        self.factor *= number
        self.additions = [
            one._replace(times=one.times * number) if one.hides is None else one for one in self.additions
        ]
        return True

    def is_default(self, number: float | None) -> bool:
        """Whether the scores then have the usual scale: a tensor that says so is a constant."""
        return number is not None and isclose(self.factor * number, self.depth**-0.5, rel_tol=1e-4)

    def tempered(self, tensor: Tensor, *, inverse: bool) -> bool:
        """By a tensor that is the same for all keys of a query, such as a temperature that is learned."""
        said = self.additions or self.softcap or self.sink or self.temperature is not None
        if said or (tensor.dim() and tensor.shape[-1] != 1):
            return False
        self.temperature, self.tempering = tensor.detach(), "/" if inverse else "*"
        return True

    def capped(self) -> bool:
        """By a tanh: the cap is the number that follows."""
        if self.additions or self.softcap or self.sink or self.temperature is not None:
            return False
        self.softcap = -1.0
        return True

    def softmaxed(self, x: Tensor, dim: int) -> bool:
        """Whether softmax over ``dim`` of these scores is attention, and over which keys."""
        shape, dim = tuple(x.shape), dim % max(x.dim(), 1)
        keys = shape[dim] - self.sink if shape else 0
        if keys < 2 or self.depth < 2 or keys not in (self.columns, self.rows):
            return False
        last = dim == len(shape) - 1
        by_right = keys == self.columns and (last or self.columns != self.rows)
        key, query = (self.right, self.left) if by_right else (self.left, self.right)
        if key.parameter or (query.parameter and self.batch == 1):
            return False  # logits of classes or of experts: a weight of the model, not keys
        if self.operators[0] == "aten::mm" and len(shape) >= 3 and prod(shape[:-2]) > 1:
            return False  # one matrix for the whole batch: a projection without a Parameter
        others = [index for index in range(len(shape)) if index != dim]
        if len(shape) < 2:
            return False
        rows = self.rows if by_right else self.columns
        fitting = [index for index in others if shape[index] == rows] or others
        near = [index for index in fitting if index in (dim - 1, dim + 1)] or fitting
        query_dim = max(near)
        if rows % shape[query_dim]:
            return False
        self.shape, self.dim = shape, dim
        self.s_q, self.s_kv = shape[query_dim], keys
        self.outer = [shape[index] for index in others if index != query_dim]
        self.key, self.query, self.by_right = key, query, by_right
        self.softcap = 1.0 if self.softcap < 0 else self.softcap
        self.masks = masks = read_masks(self._in_order(query_dim, dim), self.s_q, self.s_kv)
        for one in self.zeroed:
            zero = (one.detach() == 0).cpu()
            if masks.hidden is None or bool((zero & ~masks.hidden).any()):
                self.between.append("aten::mul by zeros and ones")
        self.ordered = min(query_dim, dim) == len(shape) - 2  # as the numbers that were copied
        if not self.ordered and (self.temperature is not None or self.additions):
            self.pieces = True
        self.additions.clear()
        return True

    def _in_order(self, query_dim: int, key_dim: int) -> list[Addition]:
        """Masks with queries and keys as their last two dimensions, as far as they have these."""
        rank = len(self.shape)
        if (query_dim, key_dim) == (rank - 2, rank - 1):
            return self.additions
        moved = []
        for one in self.additions:
            tensor = one.tensor.reshape((1,) * (rank - one.tensor.dim()) + tuple(one.tensor.shape))
            moved.append(one._replace(tensor=tensor.movedim((query_dim, key_dim), (-2, -1))))
        return moved

    # ---- the end --------------------------------------------------------------------------------------

    def dropped(self, p: float, probabilities: Tensor) -> None:
        """Before dropout they were these: what is random cannot be compared."""
        self.dropout = p
        last = self.dim == len(self.shape) - 1
        whole = probabilities if last else probabilities.mT
        self.kept = heads_of(whole, prod(self.outer)) if self.ordered else None

    def let_go(self) -> None:
        """Of all tensors: what is followed may be followed for long."""
        self.a = self.b = self.v = self.out = self.kept = self.temperature = self.sinks = None
        self.masks = self.masks._replace(hidden=None, added=None)
        self.additions.clear()
        self.zeroed.clear()

    def ended(self, probabilities: Tensor, values: Tensor, out: Tensor) -> None:
        """The last product, [.., s_q, s_kv] by [.., s_kv, d_v]."""
        if self.requires_grad and torch.is_grad_enabled() and not probabilities.requires_grad:
            self.between.append("a detach")
        self.v, self.out = heads_of(values, self.batch), heads_of(out, self.batch)
        if self.dropout and self.v is not None and self.kept is not None:
            whole = self.kept.shape[0] == self.v.shape[0]
            self.out = self.kept.to(self.v.dtype) @ self.v if whole and self.kept.dim() == 3 else None
        elif self.dropout:
            self.out = None

    def _copied(self) -> Numbers | None:
        """A few heads as one call; None where what was copied of them is not whole."""
        a, b, v, out = self.a, self.b, self.v, self.out
        if a is None or b is None or v is None or out is None or self.pieces:
            return None
        q, k = (a, b.mT) if self.by_right else (b.mT, a)
        q, k = q / self.query.factor, k / self.key.factor
        each = q.shape[-2] // max(self.s_q, 1)
        if each * self.batch != prod(self.outer) or k.shape[-2] != self.s_kv or out.shape[-2] != q.shape[-2]:
            return None
        dtype = self.key.dtype or self.dtype
        heads = [i * each + j for i in picked(self.batch) for j in range(each)]

        def of_heads(tensor: Tensor | None, last: int) -> Tensor | None:
            if tensor is None:
                return None
            whole = tensor.expand(*self.outer, *(1, 1, *tensor.shape)[-2:-1], last)
            places = [torch.unravel_index(torch.tensor(head), self.outer) for head in heads]
            return torch.stack([whole[place] for place in places]).reshape(-1, each, *whole.shape[-2:])

        return Numbers(
            q.to(dtype).reshape(-1, each, self.s_q, q.shape[-1]),
            k.to(dtype),
            v,
            out.reshape(-1, each, self.s_q, out.shape[-1]),
            of_heads(self.masks.hidden, self.s_kv),
            of_heads(self.masks.added, self.s_kv),
            of_heads(self.temperature, 1),
            of_heads(None if self.sinks is None else self.sinks[..., :1, :], 1),
            shared=self.batch > 1 and self.key.repeats > 1,
        )

    @property
    def cast(self) -> bool:
        """Whether q and k were cast to another type before the scores."""
        return self.key.dtype not in (None, self.dtype)

    def finish(self, head_dim_v: int) -> None:
        """The probabilities were multiplied with values of ``head_dim_v``: this is the whole."""
        self.done = True  # its backward multiplies the same probabilities again
        self.seconds = perf_counter() - self.begun
        batch, heads, self.folded = self._batch_and_heads()
        groups = self._groups(batch, heads)
        try:
            self.params = self._params(batch, heads, groups, head_dim_v)
        except InvalidInput as error:
            self.unread = str(error)
        self.between = list(dict.fromkeys(self.between))
        self.notes, self.numbers = self._notes(heads, groups), self._copied()
        self.let_go()

    def _batch_and_heads(self) -> tuple[int, int, bool]:
        outer = self.outer
        if len(outer) >= 2:
            return outer[0], prod(outer[1:]), False
        return (outer[0] if outer else 1), 1, bool(outer)

    def _groups(self, batch: int, heads: int) -> int:
        """Key/value heads: fewer products than heads, or heads that were repeated beforehand."""
        each = self.batch // batch if self.batch % batch == 0 else heads
        if 0 < each < heads and heads % each == 0:
            return each
        repeats = self.key.repeats
        return heads // repeats if heads % repeats == 0 else heads

    def _params(self, batch: int, heads: int, groups: int, head_dim_v: int) -> AttentionParams:
        mask, bias = self.masks.visibility, self.masks.bias
        fields: dict[str, Any] = {}
        if mask.kind == "arbitrary" or mask.hides_nothing:
            shape = _spread(mask.shape or (self.s_q, self.s_kv))
            spec = {"shape": shape, "stride": _strides(shape), "dtype": "bool"}
            fields["tensors"] = {"mask": spec, "mask_hides_nothing": mask.hides_nothing}
        if mask.window is not None:
            fields["window_size"] = mask.window
        if bias.kind != "no_bias":
            fields["core_attention_bias_type"] = bias.kind
        if bias.kind == "post_scale_bias":
            fields["core_attention_bias_shape"] = _bias_shape(bias.shape)
            fields["core_attention_bias_requires_grad"] = bias.requires_grad
        return AttentionParams(
            dtype=read_dtype(self.key.dtype or self.dtype),
            qkv_layout="bhsd_bhsd_bhsd",
            batch_size=batch,
            num_heads=heads,
            num_gqa_groups=groups,
            max_seqlen_q=self.s_q,
            max_seqlen_kv=self.s_kv,
            head_dim_qk=self.depth,
            head_dim_v=head_dim_v,
            attn_mask_type=read_mask_type("arbitrary" if mask.hides_nothing else mask.kind),
            attention_dropout=self.dropout,
            is_training=self.requires_grad,
            softcap=self.softcap,
            softmax_type="learnable" if self.sink else "vanilla",
            **fields,
        )

    def _notes(self, heads: int, groups: int) -> tuple[str, ...]:
        notes = []
        if self.folded:
            notes.append("batch and heads are one dimension here: which is which cannot be told")
        if self.cast:
            before, now = (str(one).removeprefix("torch.") for one in (self.key.dtype, self.dtype))
            notes.append(f"q and k were cast from {before} to {now} first")
        if self.key.repeats > 1:
            notes.append(f"keys of {groups} heads were repeated to {heads} first")
        if self.tempering:
            notes.append("the scale is a tensor")
        if self.masks.visibility.note:
            notes.append(self.masks.visibility.note)
        return tuple(notes)


class Role(NamedTuple):
    """What a storage holds. ``kind``: operand, scores, exponentials, sum, logsumexp, probabilities, noise,
    output (of exponentials that are not divided by their sum yet), or other: what was made of scores or
    probabilities (``of``) by operators that are not read (``path``)."""

    kind: str
    call: TracedProduct | None = None
    operand: Operand = Operand()
    number: float = 0.0
    of: str = ""
    path: tuple[str, ...] = ()


def _spread(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The last four dimensions, at least two."""
    return ((1,) * (2 - len(shape)) + shape)[-4:]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[index + 1 :]) for index in range(len(shape)))


def _bias_shape(shape: tuple[int, ...]) -> str:
    """Which of [b, h, s_q, s_kv] are not 1, in attnsel's letters."""
    full = ((1,) * (4 - len(shape)) + shape)[-4:]
    letters = "".join("1" if n == 1 else letter for n, letter in zip(full, "bhss", strict=True))
    return letters if letters in ("bhss", "1hss", "b1ss", "11ss", "111s") else "bhss"
