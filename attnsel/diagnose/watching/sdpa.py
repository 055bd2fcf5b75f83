"""The observer of F.scaled_dot_product_attention, and of aten's attention operators called directly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias

from attnsel.diagnose.watching.hooks import Ran
from attnsel.diagnose.watching.observe import Call, Observer, Recorder
from attnsel.diagnose.watching.operators import GRADIENTS, MATH, OPERATORS, ZEROS, Operator, operator_name
from attnsel.diagnose.watching.places import Place
from attnsel.diagnose.watching.question import fits, question
from attnsel.diagnose.watching.record import Api
from attnsel.diagnose.watching.sites import Seen
from attnsel.dispatchers.torch.switches import Set, as_words, set_here
from attnsel.errors import InvalidInput, in_words

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_LIBRARIES: dict[str, Api] = {"transformers": "transformers", "diffusers": "diffusers", "attnsel": "attnsel"}


def api_of(place: Place, otherwise: Api) -> Api:
    """Whose attention it is: a library's that called torch, or torch's own."""
    if place.torch_file == "nn/modules/activation.py":
        return "nn.MultiheadAttention"
    return _LIBRARIES.get(place.library, otherwise)


def watch_sdpa(recorder: Recorder, call: Call) -> None:
    """F.scaled_dot_product_attention: the operator is looked up once for calls that are alike."""
    q, k, v = call.argument(0, "query"), call.argument(1, "key"), call.argument(2, "value")
    mask = call.argument(3, "attn_mask")
    dropout, causal = call.argument(4, "dropout_p", 0.0), call.argument(5, "is_causal", False)
    scale, gqa = call.kwargs.get("scale"), call.kwargs.get("enable_gqa", False)
    place = recorder.place()
    plain = all(type(t) in _PLAIN for t in (q, k, v)) and type(mask) in (*_PLAIN, CausalBias, type(None))
    key = (
        place,
        _signature(q), _signature(k), _signature(v), _mask_signature(mask),
        dropout, causal, scale, gqa, _switches(q),
    ) if plain else None  # fmt: skip
    tally = None if key is None else recorder.recall(key)
    if tally is not None:
        recorder.follow(tally, call.run(), GRADIENTS)
        return
    ran = _run(recorder, call, mask is None or fits(mask, q, k, gqa))
    operator = _operator(ran, empty=0 in (q.numel(), k.numel()))
    seen = Seen(api_of(place, "F.scaled_dot_product_attention"), operator.name, candidate=operator.candidate)
    try:
        params = question(q, k, v, mask, dropout, causal)
        seen = seen._replace(params=params, switches=switches(q, k, gqa))
    except (InvalidInput, TypeError) as error:
        seen = seen._replace(unread=in_words(error))
    recorder.follow(recorder.file(place, seen, key), call.out, GRADIENTS)


def _run(recorder: Recorder, call: Call, fitting: bool) -> Ran:
    """Runs the call, and reads its operators. Under a dispatch mode math adds a mask in another way than
    alone, which would take masks that it otherwise raises for: a call with one runs as it would alone."""
    ran = Ran()
    if fitting:
        with ran:
            call.run()
    else:
        with recorder.alone():
            call.run()
    return ran


def switches(q: Tensor, k: Tensor, enable_gqa: bool) -> tuple[str, ...]:
    """What holds for the call beside its question, as switches of ``attnsel.dispatchers.torch``."""
    held: Set = set_here()
    grouped = min(q.dim(), k.dim()) >= 3 and q.shape[-3] != k.shape[-3]
    if grouped:
        held["enable_gqa"] = str(bool(enable_gqa)).lower()
    return as_words(held)


def watch_operator(recorder: Recorder, call: Call) -> None:
    """An attention operator that the program, or a library, calls by its name."""
    operator = OPERATORS[operator_name(call.function)]
    place = recorder.place()
    with recorder.quiet():  # math is made of other operators
        out = call.run()
    seen = Seen(api_of(place, "aten"), operator.name, candidate=operator.candidate)
    recorder.follow(recorder.file(place, seen), out, GRADIENTS)


def _signature(t: Tensor) -> tuple[Any, ...]:
    """All that a kernel is chosen by, of one tensor."""
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.data_ptr() % 16


def _mask_signature(mask: Tensor | None) -> tuple[Any, ...] | None:
    if isinstance(mask, CausalBias):  # which holds no elements
        return mask.variant, mask.seq_len_q, mask.seq_len_kv
    return None if mask is None else _signature(mask)


def _switches(q: Tensor) -> tuple[Any, ...]:
    """What else F.sdpa chooses by."""
    return (
        torch.is_grad_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch.is_autocast_enabled(q.device.type) and torch.get_autocast_dtype(q.device.type),
        torch.are_deterministic_algorithms_enabled(),
    )


def _operator(ran: Ran, *, empty: bool) -> Operator:
    """What F.sdpa ran. Math is composite: only its pieces are operators. Of a call with nothing to compute
    (``empty``) torch 2.12 and newer runs none."""
    if ran.names:
        return OPERATORS[ran.names[0]]
    return ZEROS if empty and not any("softmax" in name for name in ran.pieces) else MATH


OBSERVER = Observer(
    around={F.scaled_dot_product_attention: watch_sdpa},
    operators=dict.fromkeys(OPERATORS, watch_operator),
)
