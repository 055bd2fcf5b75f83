"""``DotProductAttention``: TransformerEngine's module, on whichever kernel can run the call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from attnsel import context_parallel
from attnsel.base.model import flag, number, text
from attnsel.base.suggestions import arguments_of, unknown_argument
from attnsel.decision import Selection
from attnsel.environment import Environment
from attnsel.errors import InvalidInput, UnsupportedArgument, short
from attnsel.params import AttentionParams
from attnsel.params.attention import MOST
from attnsel.params.options import exchange_named
from attnsel.policy import Policy
from attnsel.runtime.bind import Bound
from attnsel.runtime.call import NO_EXTRAS, Config, Extras, config, mask_name, torch_mask, unpack, window_pair
from attnsel.runtime.dispatch import attend, explain
from attnsel.runtime.inputs import packed_starts

if TYPE_CHECKING:
    from attnsel.context_parallel.group import ContextParallel

# Arguments of TransformerEngine's that attnsel does not act on yet, and the value that asks for nothing.
_NOT_YET: dict[str, Any] = {
    "inference_params": None,
    "fp8_output": False,
    "bf16_backward": False,
    "num_splits": 1,
    "score_mod": None,
    "score_mod_bprop": None,
    "score_mod_tensors": None,
    "score_mod_bprop_tensors": None,
}


class DotProductAttention(nn.Module):
    """softmax(softmax_scale * Q K^T + …) V, with TransformerEngine's names, defaults and output shape.

    num_attention_heads, num_gqa_groups: query and key/value heads of the whole model; each rank of a tensor
        parallel group of ``tp_size`` holds 1/tp_size of them.
    kv_channels: head dimension, or (head_dim_qk, head_dim_v).
    attention_dropout: applied in training mode.
    qkv_format: ``sbhd``, ``bshd`` or ``thd``. attn_mask_type, window_size, bottom_right_diagonal: see
        :func:`attnsel.attention`; each can be overridden per call.
    softmax_scale: 1 / sqrt(head_dim_qk) if None. softmax_type: ``vanilla``, ``off-by-one`` or ``learnable``
        (parameter ``softmax_offset`` [1, h, 1, 1]).
    return_max_logit: also return the largest score per head, [h].
    softcap: softcap * tanh(score / softcap); 0 is off. Not in TransformerEngine.
    backend: run this candidate or raise NoBackendError. adapt: "auto" or "never".
    get_rng_state_tracker: returns a tracker whose ``fork()`` context holds while dropout draws.
    cp_group, cp_global_ranks, cp_stream, cp_comm_type: ranks that share each sequence; see
        :meth:`set_context_parallel_group`. Tensors then hold this rank's rows
        (``attnsel.context_parallel``), lengths are whole sequences', shared parameters' gradients summed.
    layer_number: a label in debug output. attention_type is held to its two values, and tp_group is kept for
        who asks for it: lengths and masks say all that the computation needs.

    Raises InvalidInput for values that cannot be right, UnsupportedArgument for TransformerEngine arguments
    that attnsel does not act on yet: nothing that is passed is ignored.
    """

    softmax_offset: Tensor | None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
        *,
        softcap: float = 0.0,
        deterministic: bool = False,
        backend: str | None = None,
        adapt: str | None = None,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            known = arguments_of(DotProductAttention.__init__)
            raise unknown_argument("DotProductAttention", next(iter(unknown)), known)
        super().__init__()
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        _check_heads(num_attention_heads, groups, tp_size)
        _check_choices(qkv_format, attention_type, softmax_type, attention_dropout)
        _check_labels(name, layer_number, get_rng_state_tracker)
        channels = _head_dims(kv_channels)
        self.num_attention_heads = num_attention_heads // tp_size
        self.num_gqa_groups = groups // tp_size
        self.head_dim_qk, self.head_dim_v = channels
        self.attention_type = attention_type
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        self.tp_group = tp_group
        self.layer_number = layer_number
        self.name = name
        # With sequence parallelism TransformerEngine draws dropout outside the tracker.
        self._rng_tracker = None if flag("sequence_parallel", sequence_parallel) else get_rng_state_tracker
        self._static: dict[str, Any] = {
            "qkv_format": qkv_format,
            "attn_mask_type": mask_name(attn_mask_type),
            "window_size": window_pair(window_size),
            "bottom_right_diagonal": bottom_right_diagonal,
            "softmax_scale": softmax_scale,
            "softcap": softcap,
            "softmax_type": softmax_type,
            "deterministic": deterministic,
            "return_max_logit": return_max_logit,
            "flatten_heads": True,
            "backend": backend,
            "adapt": adapt,
            "num_attention_heads": self.num_attention_heads,
            "num_gqa_groups": self.num_gqa_groups,
            "head_dim_qk": self.head_dim_qk,
            "head_dim_v": self.head_dim_v,
            "label": name or ("" if layer_number is None else f"layer {layer_number}"),
        }
        _check_names(self._static)
        self.attention_dropout = attention_dropout
        self._learnable = softmax_type == "learnable"  # reading a parameter costs more than this flag
        if self._learnable:
            self.softmax_offset = nn.Parameter(torch.zeros(1, self.num_attention_heads, 1, 1))
        else:
            self.register_parameter("softmax_offset", None)

    @property
    def attention_dropout(self) -> float:
        """In training mode; what is set holds from the next call on."""
        return self._configs[True].attention_dropout

    @attention_dropout.setter
    def attention_dropout(self, attention_dropout: float) -> None:
        _check_dropout(attention_dropout)
        self._configs = _both_modes(self._static, attention_dropout)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Share each sequence with these ranks from the next call on. None, or a group of one: with nobody.

        cp_group: a ProcessGroup or a DeviceMesh of one dimension; with cp_comm_type ``a2a+p2p`` a pair
        [a2a group, p2p group] or a DeviceMesh of two dimensions, p2p outside. cp_global_ranks: its ranks, to
        be checked. cp_stream: where exchanges are posted on CUDA. Raises InvalidInput for other values.
        """
        exchange_named(text("cp_comm_type", cp_comm_type))
        self.cp_comm_type = cp_comm_type
        self._cp: ContextParallel | None = None
        if not (cp_group is None and cp_global_ranks is None and cp_stream is None):
            self._cp = context_parallel.resolve(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    @property
    def qkv_format(self) -> str:
        """The layout of a call that names none."""
        return str(self._static["qkv_format"])

    @property
    def attn_mask_type(self) -> str:
        """The mask of a call that names none."""
        return str(self._static["attn_mask_type"])

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        softmax_scale: float | None = None,
        pad_between_seqs: bool | None = None,
        block_table: Tensor | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        *,
        attn_mask: Any = None,
        **not_yet: Any,
    ) -> Any:
        """Attention of these tensors; shapes and defaults as in TransformerEngine.

        query_layer: [s, b, h, d], [b, s, h, d] or [t, h, d]. The result is [..., h * e] with the query's
        leading dimensions; with return_max_logit the pair (result, [h]). Padded rows may hold anything, NaN
        included: it reaches no other row and no gradient; their output is 0 (on cudnn they must
        be finite: docs/how-to/run.md).

        qkv_layer: one buffer instead of the three, [.., 3, h, d], or [.., h, 3, d] with qkv_interleave_dim
        -2; kv_layer: the same for keys and values, [.., 2, g, d] or [.., g, 2, d]. They are read where they
        lie, and get a gradient of their own shape.

        attention_mask: bool, True = masked OUT, as in TransformerEngine and unlike F.sdpa. attn_mask: as
        F.sdpa takes it, bool with True = takes part, or floating; beside no_mask, arbitrary or padding types.

        block_table: int32 [b, n] for keys and values in pages, see :func:`attnsel.attention`;
        TransformerEngine takes InferenceParams instead. pad_between_seqs says whether *_padded leave gaps;
        None: as they are given; False: they leave none, and are not needed. Arguments given here override the
        constructor's for this call. ``fast_zero_fill`` makes no difference: outputs are always fully written.
        ``checkpoint_core_attention`` recomputes in backward.

        Raises InvalidInput, UnsupportedArgument, or NoBackendError with every reason.
        """
        try:
            if not_yet:
                _refuse_not_yet(not_yet, DotProductAttention.forward, DotProductAttention.__init__)
            if fast_zero_fill is not True:
                flag("fast_zero_fill", fast_zero_fill)
            if checkpoint_core_attention is not False:
                checkpoint_core_attention = flag("checkpoint_core_attention", checkpoint_core_attention)
            if pad_between_seqs is not None:
                cu_seqlens_q_padded, cu_seqlens_kv_padded = packed_starts(
                    pad_between_seqs,
                    (cu_seqlens_q, cu_seqlens_kv),
                    (cu_seqlens_q_padded, cu_seqlens_kv_padded),
                )
            offset = self.softmax_offset if self._learnable else None
            static = self._configs[self.training]
            said = ""
            if attn_mask is not None:
                kind = static.attn_mask_type if attn_mask_type is None else mask_name(attn_mask_type)
                read = torch_mask(
                    attn_mask, attention_mask, kind, core_attention_bias_type, core_attention_bias
                )
                said = "mask"
                attn_mask_type, core_attention_bias_type, attention_mask, core_attention_bias = read
            if not (
                qkv_format is None
                and attn_mask_type is None
                and window_size is None
                and bottom_right_diagonal is None
                and softmax_scale is None
                and core_attention_bias_type == "no_bias"
            ):
                static = _with(
                    static,
                    qkv_format,
                    attn_mask_type,
                    window_size,
                    bottom_right_diagonal,
                    core_attention_bias_type,
                    softmax_scale,
                    said,
                )
            interleaved = type(qkv_interleave_dim) is not int or qkv_interleave_dim != -3
            packed = interleaved or qkv_layer is not None or kv_layer is not None
            if packed or query_layer is None or key_layer is None or value_layer is None:
                given = query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim
                paged = block_table is not None
                query_layer, key_layer, value_layer = unpack(*given, static.qkv_format, paged)
        except Exception as error:
            if self._cp is not None:
                context_parallel.fail(self._cp, error, query_layer)
            raise
        if (
            attention_mask is None
            and cu_seqlens_q is None
            and core_attention_bias is None
            and offset is None
            and alibi_slopes is None
            and cu_seqlens_kv is None
            and cu_seqlens_q_padded is None
            and cu_seqlens_kv_padded is None
            and max_seqlen_q is None
            and max_seqlen_kv is None
            and block_table is None
        ):
            extras = NO_EXTRAS
        else:
            extras = Extras(
                attention_mask,
                core_attention_bias,
                alibi_slopes,
                offset,
                cu_seqlens_q,
                cu_seqlens_kv,
                cu_seqlens_q_padded,
                cu_seqlens_kv_padded,
                max_seqlen_q,
                max_seqlen_kv,
                block_table,
            )
        if checkpoint_core_attention or (static.attention_dropout and self._rng_tracker is not None):
            return self._run_wrapped(
                static, query_layer, key_layer, value_layer, extras, checkpoint_core_attention
            )
        if self._cp is not None:
            return self._attend(static, query_layer, key_layer, value_layer, extras)
        return attend(static, query_layer, key_layer, value_layer, extras, self.__dict__)

    def _attend(self, static: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Any:
        """On this rank alone, or together with the context parallel group."""
        if self._cp is None:
            return attend(static, q, k, v, extras, self.__dict__)
        return context_parallel.attend(self._cp, static, q, k, v, extras, self.__dict__)

    def explain(self, *arguments: Any, environment: Environment | None = None, **named: Any) -> Selection:
        """The selection ``forward`` would get for these arguments, without running anything.

        Takes what ``forward`` takes, by position too. ``environment``: where it would run, described; the
        tensors may be here, and None is where they are. Its report, and its ``layout``, say how the tensors
        lie where they are not dense.
        """
        method = DotProductAttention.forward
        extra = {name: named.pop(name) for name in named.keys() - arguments_of(method)}
        _refuse_not_yet(extra, method, DotProductAttention.__init__)
        bound = signature(method).bind(self, *arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        for name in ("checkpoint_core_attention", "fast_zero_fill"):
            flag(name, given[name])
        gaps = given["pad_between_seqs"]
        if gaps is not None:
            sides = ("cu_seqlens_q", "cu_seqlens_kv")
            lengths, padded = (tuple(given[s + end] for s in sides) for end in ("", "_padded"))
            starts = packed_starts(gaps, lengths, padded)
            given |= {s + "_padded": t for s, t in zip(sides, starts, strict=True)}
        if given["attn_mask"] is not None:
            kind = mask_name(given["attn_mask_type"] or self._static["attn_mask_type"])
            names = ("attn_mask_type", "core_attention_bias_type", "attention_mask", "core_attention_bias")
            stand = torch_mask(given["attn_mask"], given[names[2]], kind, given[names[1]], given[names[3]])
            given |= {**dict(zip(names, stand, strict=True)), "said": "mask"}
        tensors = {name: given[name] for name in Extras._fields if name in given}
        extras = Extras(softmax_offset=self.softmax_offset, **tensors)
        overrides = [given[name] for name in signature(_overridden).parameters if name in given]
        static = _with(self._configs[self.training], *overrides)
        layers = ("query_layer", "key_layer", "value_layer", "qkv_layer", "kv_layer", "qkv_interleave_dim")
        q, k, v, qkv_layer, kv_layer, interleave_dim = (given[name] for name in layers)
        paged = extras.block_table is not None
        qkv = unpack(q, k, v, qkv_layer, kv_layer, interleave_dim, static.qkv_format, paged)
        if self._cp is None:
            selection = explain(static, *qkv, extras, environment)
        else:
            selection = context_parallel.explain(self._cp, static, *qkv, extras, environment)
        self.__dict__["_last"] = selection
        return selection

    @property
    def last_selection(self) -> Selection | None:
        """What ran, or was explained, last. None before the first call and in a copy; compiled code does
        not record what it runs."""
        last = self.__dict__.get("_last")
        return last.selection if isinstance(last, Bound) else last

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("_last", None)  # holds closures over kernels
        return state

    def _run_wrapped(
        self, static: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, recompute: bool
    ) -> Any:
        """Inside the caller's RNG context, and inside a checkpoint if asked."""

        def core(q: Tensor, k: Tensor, v: Tensor) -> Any:
            if not static.attention_dropout or self._rng_tracker is None:
                return self._attend(static, q, k, v, extras)
            forked = False
            try:
                context: AbstractContextManager[Any] = self._rng_tracker().fork()
                with context:
                    forked = True
                    return self._attend(static, q, k, v, extras)
            except Exception as error:
                if self._cp is not None and not forked:
                    context_parallel.fail(self._cp, error, q)
                raise

        if not recompute:
            return core(q, k, v)
        return torch.utils.checkpoint.checkpoint(core, q, k, v, use_reentrant=False)

    def extra_repr(self) -> str:
        shapes = (
            f"heads={self.num_attention_heads}/{self.num_gqa_groups}, d={self.head_dim_qk}/{self.head_dim_v}"
        )
        return f"{shapes}, {self._static['qkv_format']}, {self._static['attn_mask_type']}"


def _overridden(
    base: Config,
    qkv_format: Any,
    attn_mask_type: Any,
    window_size: Any,
    bottom_right_diagonal: Any,
    core_attention_bias_type: Any,
    softmax_scale: Any,
    said: str = "",
) -> Config:
    """The module's static side with what a call says otherwise; None says nothing."""
    changes = {
        "qkv_format": qkv_format,
        "window_size": window_pair(window_size),
        "softmax_scale": softmax_scale,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if attn_mask_type is not None:  # it decides where the diagonal is, unless that is said too
        changes |= {"attn_mask_type": mask_name(attn_mask_type), "bottom_right_diagonal": None}
    if bottom_right_diagonal is not None:
        changes["bottom_right_diagonal"] = bottom_right_diagonal
    return base.replace(**changes, bias_type=core_attention_bias_type, said=said)


_known_override = lru_cache(maxsize=4096, typed=True)(_overridden)


def _with(base: Config, *overrides: Any) -> Config:
    """``_overridden``, remembered outside graphs."""
    try:
        return (_overridden if torch.compiler.is_compiling() else _known_override)(base, *overrides)
    except TypeError:  # what cannot be hashed
        return _overridden(base, *overrides)


def _both_modes(static: dict[str, Any], dropout: float) -> dict[bool, Config]:
    """The module's Config in training and in eval mode."""
    return {
        True: config(**static, attention_dropout=dropout, is_training=True),
        False: config(**static, attention_dropout=0.0, is_training=False),
    }


# ---- what the module is built from, and what it is not able to do yet: held to its kind --------------------


def _check_choices(qkv_format: str, attention_type: str, softmax_type: str, attention_dropout: float) -> None:
    """Raises InvalidInput."""
    if text("qkv_format", qkv_format) not in ("sbhd", "bshd", "thd"):
        raise InvalidInput("qkv_format", qkv_format, "must be one of sbhd, bshd, thd")
    if text("attention_type", attention_type) not in ("self", "cross"):
        raise InvalidInput("attention_type", attention_type, "must be self or cross")
    if text("softmax_type", softmax_type) not in ("vanilla", "off-by-one", "learnable"):
        raise InvalidInput("softmax_type", softmax_type, "must be one of vanilla, off-by-one, learnable")
    _check_dropout(attention_dropout)


def _check_dropout(attention_dropout: float) -> None:
    """Raises InvalidInput."""
    if not 0.0 <= number("attention_dropout", attention_dropout) < 1.0:
        raise InvalidInput("attention_dropout", attention_dropout, "must be at least 0 and below 1")


def _check_labels(name: Any, layer_number: Any, get_rng_state_tracker: Any) -> None:
    """Raises InvalidInput."""
    if name is not None and not isinstance(name, str):
        raise InvalidInput("name", name, "must be a text")
    if layer_number is not None and not isinstance(layer_number, int):
        raise InvalidInput("layer_number", layer_number, "must be an int")
    if get_rng_state_tracker is not None and not callable(get_rng_state_tracker):
        raise InvalidInput("get_rng_state_tracker", get_rng_state_tracker, "must be callable")


def _head_dims(kv_channels: Any) -> tuple[int, int]:
    """(head_dim_qk, head_dim_v) of one number for both or a pair. Raises InvalidInput."""
    channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
    if len(channels) != 2 or any(not isinstance(n, int) or not 0 < n <= MOST for n in channels):
        raise InvalidInput("kv_channels", kv_channels, "must be a positive int or a pair of them")
    return channels


def _check_heads(heads: int, groups: int, tp_size: int) -> None:
    if not isinstance(heads, int) or not 0 < heads <= MOST:
        raise InvalidInput("num_attention_heads", heads, f"must be a positive int, at most {MOST}")
    if not isinstance(groups, int) or groups <= 0 or heads % groups:
        raise InvalidInput("num_gqa_groups", groups, f"must be a positive divisor of {heads}")
    if not isinstance(tp_size, int) or tp_size <= 0 or heads % tp_size or groups % tp_size:
        raise InvalidInput("tp_size", tp_size, f"must divide {heads} heads and {groups} groups")


def _check_names(static: dict[str, Any]) -> None:
    """What no later argument can put right, said before the first call. Raises InvalidInput."""
    window = static["window_size"]
    if window is not None and min(window) < -1:
        raise InvalidInput("window_size", window, "must have bounds of at least -1")
    AttentionParams(attn_mask_type=static["attn_mask_type"], softcap=static["softcap"])
    Policy(**{name: static[name] for name in ("backend", "adapt") if static[name] is not None})


def _refuse_not_yet(given: dict[str, Any], method: Callable[..., Any], init: Callable[..., Any]) -> None:
    """Raise for arguments that ask for something attnsel does not do, or that ``method`` does not have.

    ``init``: what takes the arguments of the module itself.
    """
    for name, value in given.items():
        if name not in _NOT_YET:
            known, built = arguments_of(method), arguments_of(init)
            raise unknown_argument("DotProductAttention", name, known, "DotProductAttention(...)", built)
        default = _NOT_YET[name]
        if value is not default and not (type(value) is type(default) and value == default):
            raise UnsupportedArgument(f"{name} = {short(value)}: not supported yet; allowed: {default!r}")
