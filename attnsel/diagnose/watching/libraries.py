"""Functions of flash_attn, flex_attention, varlen_attn, attnsel; modules of torch.nn and TransformerEngine.

Each is replaced while watching, in modules that are imported already and in those that come later. What a
call runs inside is read from the operators of the first call of each kind; nothing else is watched there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnsel.decision import Selection
from attnsel.diagnose.framework_fixes import unwritten
from attnsel.diagnose.watching.by_hand_call import TracedProduct
from attnsel.diagnose.watching.by_hand_operators import ByHand
from attnsel.diagnose.watching.hooks import (
    FAKE,
    GRADIENTS,
    MATH,
    OPERATORS,
    FunctionMode,
    Ran,
    not_readable,
    operator_name,
    out_of_reach,
)
from attnsel.diagnose.watching.observe import Observer, Patch, Place, Recorder, Seen, Tally, WatchedCall
from attnsel.diagnose.watching.record import Api
from attnsel.diagnose.watching.sdpa import api_of, forgotten_eval, part
from attnsel.dispatchers.torch.switches import as_words, set_here
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams, read_dtype, read_mask_type
from attnsel.runtime.dispatch import explain

Arguments = Mapping[str, Any]
Question = Callable[[Arguments], AttentionParams]


@contextmanager
def without_mode() -> Iterator[None]:
    """Without the session's function mode, where it is the innermost one."""
    if not isinstance(torch.overrides._get_current_function_mode(), FunctionMode):
        yield  # the program has a mode of its own, for which the module leaves its fast path anyway
        return
    with torch.overrides._pop_mode_temporarily():
        yield


class Inside(Ran):
    """The operators of one call: those of attention by name, and attention that is made of pieces."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.found: list[TracedProduct] = []
        self._reader = ByHand(self.found.append)

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        super().read(func, args, kwargs, out)
        if isinstance(func, torch._ops.OpOverload) and operator_name(func) not in OPERATORS:
            self._reader.read(func, args, kwargs, out)


def _only_counted(recorder: Recorder, call: WatchedCall, api: Api, name: str) -> bool:
    """Whether the call is one that cannot be looked into: it has run then, and is counted by its name."""
    hindered, other = out_of_reach(), not_readable(*call.args, *call.kwargs.values(), nested=True)
    # There views of weights require a gradient, and under a mode not: products are then folded otherwise.
    if not hindered and isinstance(call.argument(0, "self"), torch.nn.Module):
        hindered = "inference_mode" if torch.is_inference_mode_enabled() else ""
    if not hindered and not other:
        return False
    place = recorder.place()
    with recorder.quiet():
        call.run()
    if hindered == FAKE:
        recorder.cannot_see(f"{place.where}: {name} of {FAKE} ran no kernel")
    else:
        why = f"{other} was given" if other else f"{hindered} was at work"
        recorder.file(place, Seen(api_of(place, api), name, unread=f"{why}, so its operators were not read"))
    return True


def _library_call(
    recorder: Recorder, call: WatchedCall, api: Api, name: str, candidate: str, asked: Question
) -> None:
    """A call of a library's function ``name``, counted by its place, its arguments and what it ran."""
    if _only_counted(recorder, call, api, name):
        return
    place = recorder.place()
    key = (name, place.where, torch.is_grad_enabled(), *map(part, call.args))
    key += tuple((argument, part(value)) for argument, value in call.kwargs.items())
    tally = recorder.recall(key)
    if tally is not None:
        with recorder.quiet():
            out = call.run()
        recorder.follow(tally, out, GRADIENTS)
        return
    with recorder.quiet(), Inside(recorder) as inside:
        out = call.run()
    seen = Seen(api_of(place, api), name, candidate=candidate)
    if inside.names and candidate in ("", "sdpa.varlen"):
        operator = OPERATORS[inside.names[0]]
        seen = seen._replace(forward=f"{name}: {operator.name}", candidate=operator.candidate)
    elif inside.found:
        what = ", ".join(inside.found[0].operators)
        seen = seen._replace(forward=f"{name}: {what}", materialised=tuple(inside.found[0].made))
    seen = seen.asking(lambda: {"params": asked(_bound(call))})
    recorder.follow(recorder.file(place, seen, key), out, GRADIENTS)


def _bound(call: WatchedCall) -> dict[str, Any]:
    bound = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _question(qkv: tuple[Tensor, Tensor, Tensor], heads: int, **fields: Any) -> AttentionParams:
    """What q, k and v say themselves, with ``heads`` as that dimension, and the rest."""
    q, k, v = qkv
    return AttentionParams(
        dtype=read_dtype(q.dtype),
        num_heads=q.shape[heads],
        num_gqa_groups=k.shape[heads],
        head_dim_qk=q.shape[-1],
        head_dim_v=v.shape[-1],
        is_training=torch.is_grad_enabled() and any(one.requires_grad for one in qkv),
        **fields,
    )


# ---- flash_attn -------------------------------------------------------------------------------------


def flash_question(given: Arguments) -> AttentionParams:
    """A call of a function of flash_attn, whichever release's. q [b, s, h, d], or [tokens, h, d] packed."""
    q, k, v = _flash_tensors(given)
    cu_q = given.get("cu_seqlens_q", given.get("cu_seqlens"))
    table = given.get("block_table", given.get("page_table"))
    causal, window = bool(given.get("causal")), tuple(given.get("window_size") or (-1, -1))
    kind = "causal_bottom_right" if causal else "no_mask"
    fields: dict[str, Any] = {"qkv_layout": "bshd", "batch_size": q.shape[0], "max_seqlen_q": q.shape[1]}
    fields["max_seqlen_kv"] = k.shape[1]
    if cu_q is not None:
        longest = given.get("max_seqlen_q", given.get("max_seqlen"))
        fields = {"qkv_layout": "thd", "batch_size": len(cu_q) - 1, "max_seqlen_q": int(longest)}
        fields["max_seqlen_kv"] = int(given.get("max_seqlen_k", longest))
        kind = "padding_causal_bottom_right" if causal else "padding"
    elif "k_cache" in given:
        fields["kv_cache"] = "contiguous" if table is None else "paged"
        if table is not None:
            fields |= {"qkv_layout": "paged_kv_bshd_bshd_bshd", "page_size": k.shape[1]}
            fields["max_seqlen_kv"] = k.shape[1] * table.shape[1]
        kind = "padding_causal_bottom_right" if causal else "padding"
    if given.get("alibi_slopes") is not None:
        fields["core_attention_bias_type"] = "alibi"
    return _question(
        (q, k, v),
        -2,
        attn_mask_type=read_mask_type(kind),
        window_size=(window[0], 0 if causal else window[1]) if window[0] != -1 else (-1, -1),
        softcap=float(given.get("softcap") or 0.0),
        attention_dropout=float(given.get("dropout_p") or 0.0),
        deterministic=bool(given.get("deterministic")),
        **fields,
    )


def _flash_tensors(given: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    if "qkv" in given:
        q, k, v = given["qkv"].unbind(-3)
        return q, k, v
    if "kv" in given:
        k, v = given["kv"].unbind(-3)
        return given["q"], k, v
    if "k_cache" in given:
        return given["q"], given["k_cache"], given["v_cache"]
    return given["q"], given["k"], given["v"]


def _flash(name: str, candidate: str) -> Callable[[Recorder, WatchedCall], None]:
    def watch_flash(recorder: Recorder, call: WatchedCall) -> None:
        ours = call.function.__module__.startswith("attnsel.")
        said = f"attnsel's {name}" if ours else name
        _library_call(recorder, call, "flash_attn", said, "" if ours else candidate, flash_question)

    return watch_flash


_FLASH_NAMES = (
    *("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_with_kvcache"),
    *(f"flash_attn_varlen_{packed}func" for packed in ("", "qkvpacked_", "kvpacked_")),
)
_FLASH_MODULES = {  # none has all of the names
    "flash_attn.flash_attn_interface": "flash_attn.2",
    "flash_attn": "flash_attn.2",
    "flash_attn_interface": "flash_attn.3",
    "flash_attn_3.flash_attn_interface": "flash_attn.3",
    "flash_attn.cute.interface": "flash_attn.4",
    "flash_attn.cute": "flash_attn.4",
}


# ---- torch's own functions --------------------------------------------------------------------------


def watch_flex(recorder: Recorder, call: WatchedCall) -> None:
    """flex_attention outside of a compiled region: it then computes all scores."""
    with without_mode():
        _library_call(recorder, call, "flex_attention", "flex_attention, not compiled", "", flex_question)


def flex_question(given: Arguments) -> AttentionParams:
    """A call of flex_attention. Its functions cannot be read: a mask is arbitrary."""
    q, k, v, block = given["query"], given["key"], given["value"], given["block_mask"]
    fields: dict[str, Any] = {"attn_mask_type": "no_mask"}
    if block is not None:
        shape = (*block.shape[:2], q.shape[2], k.shape[2])
        strides = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
        mask = {"shape": shape, "stride": strides, "dtype": "bool"}
        fields = {"attn_mask_type": "arbitrary", "tensors": {"mask": mask}}
    if given["score_mod"] is not None:
        fields["core_attention_bias_type"] = "post_scale_bias"
    sizes = {"batch_size": q.shape[0], "max_seqlen_q": q.shape[2], "max_seqlen_kv": k.shape[2]}
    return _question((q, k, v), 1, qkv_layout="bhsd", **sizes, **fields)


def watch_varlen(recorder: Recorder, call: WatchedCall) -> None:
    _library_call(recorder, call, "varlen_attn", "varlen_attn", "sdpa.varlen", varlen_question)


def varlen_question(given: Arguments) -> AttentionParams:
    """A call of varlen_attn, q [tokens, h, d]; a window (-1, 0) is how it says causal."""
    q, k, v = given["query"], given["key"], given["value"]
    left, right = given.get("window_size", (-1, 0 if given.get("is_causal") else -1))
    return _question(
        (q, k, v),
        1,
        qkv_layout="thd",
        batch_size=len(given["cu_seq_q"]) - 1,
        max_seqlen_q=int(given["max_q"]),
        max_seqlen_kv=int(given["max_k"]),
        attn_mask_type=read_mask_type("padding" if right else "padding_causal_bottom_right"),
        **({"window_size": (left, right)} if left != -1 or right > 0 else {}),
    )


# ---- nn.MultiheadAttention and nn.TransformerEncoder's layers: which of their ways they took -------------
# These modules look for a function mode, and leave their fast path where they find one. So they run without
# the session's, and what ran inside is read from the operators of the first call of each kind.

_NATIVE = "aten::_native_multi_head_attention"
_LAYER = "aten::_transformer_encoder_layer_fwd"
_SLOW = "modules"


def watch_module(recorder: Recorder, call: WatchedCall) -> None:
    """nn.MultiheadAttention.forward: one operator in evaluation, F.sdpa, or pieces with weights."""
    module, query, key_, value = (call.argument(i, name) for i, name in enumerate(_NAMES))
    need_weights = call.argument(5, "need_weights", True)
    masks = call.argument(4, "key_padding_mask"), call.argument(6, "attn_mask")
    causal = call.argument(8, "is_causal", False)
    with without_mode():
        if _only_counted(recorder, call, "nn.MultiheadAttention", "nn.MultiheadAttention"):
            return
    place = recorder.place()
    key = (
        _SLOW, place.where, _shape(query), _shape(key_), _shape(value), query is key_, key_ is value,
        need_weights, _shape(masks[0]), _shape(masks[1]), causal, module.training, torch.is_grad_enabled(),
        query.requires_grad, module.num_heads, query.is_nested, module.dropout, module.batch_first,
    )  # fmt: skip
    tally = recorder.recall(key)
    if tally is not None:
        with without_mode(), recorder.quiet():
            out = call.run()
        _follow(recorder, tally, out)
        return
    inside = Inside(recorder)
    with without_mode(), recorder.quiet():
        out = call.run(inside)
    forward, candidate, notes = _way(inside, need_weights)
    seen = Seen("nn.MultiheadAttention", forward, candidate=candidate, notes=notes)
    if inside.found:
        seen = seen._replace(materialised=tuple(inside.found[0].made))
    seen = seen.asking(
        lambda: {
            "params": mha_question(module, query, key_, value, masks, causal),
            "switches": as_words(set_here()),
        }
    )
    tally = recorder.file(place, seen, key)
    if module.training and module.dropout and not torch.is_grad_enabled():
        tally.extra["fix"] = forgotten_eval(seen.api)
    elif inside.found and need_weights:
        tally.extra["fix"] = str(unwritten("nn.MultiheadAttention"))
    _follow(recorder, tally, out)


def _follow(recorder: Recorder, tally: Tally, out: Any) -> None:
    """Behind the output stands the last projection, so the gradient's name is the operator's."""
    recorder.follow(tally, out)
    operator = OPERATORS.get(tally.seen.forward)
    if tally.backward:
        tally.backward = "" if operator is None else operator.gradient


_NAMES = ("self", "query", "key", "value")


def _way(inside: Inside, need_weights: bool) -> tuple[str, str, tuple[str, ...]]:
    """The operator that ran, attnsel's candidate for it, and what a reader should know."""
    if inside.names:
        operator = OPERATORS[inside.names[0]]
        fast = ("the fast path of evaluation",) if operator.name == _NATIVE else ()
        return operator.name, operator.candidate, fast
    if inside.found and need_weights:
        return ", ".join(inside.found[0].operators), "", ("weights are returned, so scores are stored",)
    return MATH.name, MATH.candidate, ()


def _shape(tensor: Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None or tensor.is_nested else (tuple(tensor.shape), tensor.dtype, tensor.device)


def mha_question(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    causal: bool,
) -> AttentionParams:
    """The attention inside, after the projections."""
    if query.is_nested:
        raise InvalidInput("query", "a nested tensor", "must be a dense one to be put in attnsel's words")
    rows = (0, 1) if query.dim() == 2 else (1, 0) if module.batch_first else (0, 1)
    batch = 1 if query.dim() == 2 else query.shape[rows[1]]
    kind = "no_mask"
    padding, mask = masks
    dropout = module.dropout if module.training else 0.0
    if causal and padding is None:
        kind = "causal"
    elif mask is not None or padding is not None:
        kind = "padding" if mask is None else "arbitrary"
    return AttentionParams(
        dtype=read_dtype(query.dtype),
        qkv_layout="bhsd",
        batch_size=batch,
        num_heads=module.num_heads,
        max_seqlen_q=query.shape[rows[0]],
        max_seqlen_kv=key.shape[rows[0]] + (module.bias_k is not None) + bool(module.add_zero_attn),
        head_dim_qk=module.head_dim,
        attn_mask_type=read_mask_type(kind),
        attention_dropout=dropout,
        # F.sdpa drops out whenever it is told to, and chooses by it.
        is_training=dropout > 0
        or (
            torch.is_grad_enabled()
            and (query.requires_grad or any(parameter.requires_grad for parameter in module.parameters()))
        ),
    )


def watch_layer(recorder: Recorder, call: WatchedCall) -> None:
    """nn.TransformerEncoderLayer.forward: one operator for the whole layer, or its pieces."""
    module, x = call.argument(0, "self"), call.argument(1, "src")
    with without_mode():
        if _only_counted(recorder, call, "nn.MultiheadAttention", "nn.TransformerEncoderLayer"):
            return
    place = recorder.place()
    key = (
        _LAYER,
        place.where,
        _shape(x),
        module.training,
        torch.is_grad_enabled(),
        len(call.args),
        tuple(call.kwargs),
    )
    tally = recorder.recall(key)
    slow: set[Any] = recorder.state.setdefault(_SLOW, set())
    if tally is not None or key in slow:
        with without_mode():
            call.run()
        return
    with without_mode(), Inside(recorder) as inside:
        call.run()
    if _LAYER not in inside.names:
        if len(slow) < 10_000:
            slow.add(key)
        return  # its nn.MultiheadAttention was seen by itself
    seen = Seen(
        "nn.MultiheadAttention",
        _LAYER,
        notes=("the fast path of evaluation: the whole layer is one operator",),
    )
    masks = call.argument(3, "src_key_padding_mask"), call.argument(2, "src_mask")
    causal = call.argument(4, "is_causal", False)
    seen = seen.asking(lambda: {"params": mha_question(module.self_attn, x, x, x, masks, causal)})
    recorder.file(place, seen, key)


def watch_encoder(recorder: Recorder, call: WatchedCall) -> None:
    """nn.TransformerEncoder.forward: packs padded batches, where there is no function mode."""
    with without_mode():
        call.run()


# ---- TransformerEngine ------------------------------------------------------------------------------

_TE_MODULES = (
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",  # 2.2 and newer
    "transformer_engine.pytorch.attention",
    "transformer_engine.pytorch.dot_product_attention.dot_product_attention",  # 2.1
)


def watch_te(recorder: Recorder, call: WatchedCall) -> None:
    """DotProductAttention.forward: its choice, and the parameters of it, stand in its module."""
    place = recorder.place()
    with recorder.quiet():
        out = call.run()
    chosen = _te_choice()
    forward, candidate = _te_kernel(chosen)
    seen = Seen("TransformerEngine", forward, candidate=candidate)
    seen = seen.asking(lambda: {"params": te_question(chosen.get("attention_params"))})
    recorder.follow(recorder.file(place, seen), out)


def watch_attnsel_module(recorder: Recorder, call: WatchedCall) -> None:
    """attnsel's own DotProductAttention, which says what it chose."""
    place = recorder.place()
    with recorder.quiet():
        out = call.run()
    _file_attnsel(recorder, place, call.argument(0, "self").last_selection, out)


def watch_attnsel_function(recorder: Recorder, call: WatchedCall) -> None:
    """``attnsel.attention`` and what stands in place of F.sdpa: the choice is asked for again.

    Both look a call up first, and what they look it up with gives None for one that was not met.
    """
    place = recorder.place()
    with recorder.quiet():
        out = call.run()
        if out is None:
            return
        selection = explain(*call.args)
    _file_attnsel(recorder, place, selection, out)


def _file_attnsel(recorder: Recorder, place: Place, selection: Selection | None, out: Any) -> None:
    chosen = "" if selection is None or selection.backend is None else selection.backend
    params = None if selection is None else selection.params
    seen = Seen("attnsel", chosen or "attnsel, compiled", params, candidate=chosen)
    recorder.follow(recorder.file(place, seen), out)


def _te_choice() -> dict[str, Any]:
    """TransformerEngine's record of its last choice."""
    for name in _TE_MODULES:
        found = getattr(sys.modules.get(name), "_attention_backends", None)
        if isinstance(found, dict) and found.get("attention_params") is not None:
            return found
    return {}


def _te_kernel(chosen: Mapping[str, Any]) -> tuple[str, str]:
    if chosen.get("use_flash_attention"):
        version = str(chosen.get("flash_attention_backend") or "")
        candidate = f"flash_attn.{version[0]}" if version[:1] in ("2", "3", "4") else ""
        return f"FlashAttention {version}".strip(), candidate
    if chosen.get("use_fused_attention"):
        return f"FusedAttention (sub-backend {_number(chosen.get('fused_attention_backend'))})", "cudnn"
    if chosen.get("use_unfused_attention"):
        return "UnfusedDotProductAttention", ""
    return "DotProductAttention", ""


def _number(backend: Any) -> str:
    try:
        return str(int(backend))
    except (TypeError, ValueError):
        return "?"


def te_question(theirs: Any) -> AttentionParams:
    """Their AttentionParams as ours, whose fields have the same names."""
    if theirs is None:
        raise InvalidInput("attention_params", None, "must be what TransformerEngine chose by; it keeps none")
    named = {**dict.fromkeys(AttentionParams.model_fields), "qkv_dtype": None}
    values = {name: getattr(theirs, name) for name in named if hasattr(theirs, name)}
    if "qkv_dtype" in values:
        values["dtype"] = read_dtype(values.pop("qkv_dtype"))
    values.pop("tensors", None)
    values.pop("kv_cache", None)
    if not values.get("fp8"):
        values.pop("fp8_meta", None)
    return AttentionParams(**{name: value for name, value in values.items() if value is not None})


OBSERVER = Observer(
    patches=(
        Patch("torch.nn.modules.activation", "MultiheadAttention.forward", watch_module),
        Patch("torch.nn.modules.transformer", "TransformerEncoderLayer.forward", watch_layer),
        Patch("torch.nn.modules.transformer", "TransformerEncoder.forward", watch_encoder),
        *(
            Patch(at, name, _flash(name, kernel))
            for at, kernel in _FLASH_MODULES.items()
            for name in _FLASH_NAMES
        ),
        Patch("torch.nn.attention.flex_attention", "flex_attention", watch_flex),
        Patch("torch.nn.attention.varlen", "varlen_attn", watch_varlen),
        *(Patch(module, "DotProductAttention.forward", watch_te) for module in _TE_MODULES),
        Patch("attnsel.module", "DotProductAttention.forward", watch_attnsel_module),
        Patch("attnsel.functional", "attend_again", watch_attnsel_function),
        Patch("attnsel.functional", "attend_anew", watch_attnsel_function),
        Patch("attnsel.f_sdpa.function", "attend_again", watch_attnsel_function),
        Patch("attnsel.f_sdpa.function", "attend", watch_attnsel_function),
    )
)
