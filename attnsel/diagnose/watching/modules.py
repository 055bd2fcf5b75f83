"""nn.MultiheadAttention and nn.TransformerEncoder's layers: which of their ways they took.

These modules look for a function mode, and leave their fast path where they find one. So they run without the
session's, and what ran inside is read from the operators of the first call of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnsel.diagnose.framework_fixes import unwritten
from attnsel.diagnose.watching.by_hand_call import Found
from attnsel.diagnose.watching.by_hand_operators import ByHand
from attnsel.diagnose.watching.hooks import MATH, OPERATORS, FunctionMode, OperatorMode, operator_name
from attnsel.diagnose.watching.observe import Call, Observer, Patch, Recorder, Seen, Tally
from attnsel.dispatchers.torch.switches import as_words, set_here
from attnsel.errors import InvalidInput, in_words
from attnsel.params import AttentionParams, read_dtype, read_mask_type

_NATIVE = "aten::_native_multi_head_attention"
_LAYER = "aten::_transformer_encoder_layer_fwd"
_SLOW = "modules"


@contextmanager
def without_mode() -> Iterator[None]:
    """Without the session's function mode, where it is the innermost one."""
    if not isinstance(torch.overrides._get_current_function_mode(), FunctionMode):
        yield  # the program has a mode of its own, for which the module leaves its fast path anyway
        return
    with torch.overrides._pop_mode_temporarily():
        yield


class Inside(OperatorMode):
    """The operators of one call: those of attention by name, and attention that is made of pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.found: list[Found] = []
        self._reader = ByHand(lambda call, found: self.found.append(found))

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = operator_name(func)
        if name in OPERATORS:
            self.names.append(name)
        elif isinstance(func, torch._ops.OpOverload):
            self._reader.read(func, args, kwargs, out)


def watch_module(recorder: Recorder, call: Call) -> None:
    """nn.MultiheadAttention.forward: one operator in evaluation, F.sdpa, or pieces with weights."""
    module, query, key_, value = (call.argument(i, name) for i, name in enumerate(_NAMES))
    need_weights = call.argument(5, "need_weights", True)
    masks = call.argument(4, "key_padding_mask"), call.argument(6, "attn_mask")
    causal = call.argument(8, "is_causal", False)
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
    with without_mode(), recorder.quiet(), Inside() as inside:
        out = call.run()
    forward, candidate, notes = _way(inside, need_weights)
    seen = Seen("nn.MultiheadAttention", forward, candidate=candidate, notes=notes)
    if inside.found:
        seen = seen._replace(materialised=inside.found[0].materialised)
    try:
        params = _question(module, query, key_, value, masks, causal)
        seen = seen._replace(params=params, switches=as_words(set_here()))
    except (InvalidInput, ValueError, IndexError, RuntimeError) as error:
        seen = seen._replace(unread=in_words(error))
    tally = recorder.file(place, seen, key)
    if inside.found and need_weights:
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


def _question(
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
        attention_dropout=module.dropout if module.training else 0.0,
        is_training=torch.is_grad_enabled()
        and (query.requires_grad or any(parameter.requires_grad for parameter in module.parameters())),
    )


def watch_layer(recorder: Recorder, call: Call) -> None:
    """nn.TransformerEncoderLayer.forward: one operator for the whole layer, or its pieces."""
    module, x = call.argument(0, "self"), call.argument(1, "src")
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
    with without_mode(), Inside() as inside:
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
    try:
        masks = call.argument(3, "src_key_padding_mask"), call.argument(2, "src_mask")
        seen = seen._replace(
            params=_question(module.self_attn, x, x, x, masks, call.argument(4, "is_causal", False))
        )
    except (InvalidInput, ValueError, IndexError, RuntimeError) as error:
        seen = seen._replace(unread=in_words(error))
    recorder.file(place, seen, key)


def watch_encoder(recorder: Recorder, call: Call) -> None:
    """nn.TransformerEncoder.forward: packs padded batches, where there is no function mode."""
    with without_mode():
        call.run()


OBSERVER = Observer(
    patches=(
        Patch("torch.nn.modules.activation", "MultiheadAttention.forward", watch_module),
        Patch("torch.nn.modules.transformer", "TransformerEncoderLayer.forward", watch_layer),
        Patch("torch.nn.modules.transformer", "TransformerEncoder.forward", watch_encoder),
    )
)
