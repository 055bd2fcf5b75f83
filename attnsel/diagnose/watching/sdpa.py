"""The observer of F.scaled_dot_product_attention, and of aten's attention operators called directly, also by
what torch.compile made."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnsel.diagnose.framework_fixes import known_fixes
from attnsel.diagnose.watching.hooks import (
    FAKE,
    GRADIENTS,
    MATH,
    OPERATORS,
    ZEROS,
    Operator,
    Ran,
    not_readable,
    operator_name,
    out_of_reach,
)
from attnsel.diagnose.watching.observe import Observer, Place, Recorder, Seen, WatchedCall, named_behind
from attnsel.diagnose.watching.record import Api
from attnsel.dispatchers.torch.switches import Set, as_words, set_here
from attnsel.errors import InvalidInput, in_words
from attnsel.params import AttentionParams, Tensors, TensorSpec, read_dtype
from attnsel.runtime.call import is_causal_bias

# ---- A call of F.scaled_dot_product_attention in attnsel's words ---------------------------------------


def question(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool
) -> AttentionParams:
    """q, k, v [.., h, s, d]: the third dimension from the end are heads, of which there is one where there
    is none; all before it are the batch. ``mask`` is kept as it was given, as F.sdpa chooses by its rank.

    Raises InvalidInput for what F.sdpa computes and a question has no words for.
    """
    rank = max(t.dim() for t in (q, k, v))
    if min(t.dim() for t in (q, k, v)) < 2:
        raise InvalidInput("query.shape", tuple(q.shape), "must have at least 2 dimensions")
    heads, groups, of_v = (t.shape[-3] if t.dim() > 2 else 1 for t in (q, k, v))
    if groups != of_v:
        raise InvalidInput("value.shape", tuple(v.shape), f"must have key's number of heads, {groups}")
    lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (q, k, v)))
    dtype = _computed_in(q)
    return AttentionParams(
        dtype=read_dtype(dtype),
        qkv_layout="bhsd",
        batch_size=math.prod(lead),
        num_heads=heads,
        num_gqa_groups=groups,
        max_seqlen_q=q.shape[-2],
        max_seqlen_kv=k.shape[-2],
        head_dim_qk=q.shape[-1],
        head_dim_v=v.shape[-1],
        attention_dropout=dropout,
        # F.sdpa drops out whenever it is told to, and chooses by it.
        is_training=dropout > 0 or (torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        tensors=Tensors(
            q=_spec(q, lead),
            k=_spec(k, lead),
            v=_spec(v, lead),
            mask=_mask_spec(mask, lead),
            rank=min(8, rank),
        ),
        **_mask_fields(mask, causal, q.shape[-2]),
    )


def fits(mask: Tensor, q: Tensor, k: Tensor, enable_gqa: bool) -> bool:
    """Whether a mask can be added to the scores in place, as math does it, and leaves their type."""
    if is_causal_bias(mask):
        return True
    if mask.dim() > max(q.dim(), k.dim()) or min(q.dim(), k.dim()) < 2:
        return False
    reduced = getattr(torch.backends.cuda, "fp16_bf16_reduction_math_sdp_allowed", bool)()
    if reduced and mask.dtype not in (torch.bool, q.dtype):
        return False
    heads_of_k = q.shape[-3:-2] if enable_gqa else k.shape[-3:-2]
    try:
        lead = torch.broadcast_shapes(q.shape[:-2], (*k.shape[:-3], *heads_of_k))
        scores = (*lead, q.shape[-2], k.shape[-2])
        return torch.broadcast_shapes(scores, mask.shape) == scores
    except RuntimeError:
        return False


def _mask_fields(mask: Tensor | None, causal: bool, s_q: int) -> dict[str, Any]:
    if is_causal_bias(mask):
        lower = mask.variant.name == "LOWER_RIGHT" and mask.seq_len_q != mask.seq_len_kv
        return {"attn_mask_type": "causal_bottom_right" if lower else "causal"}
    if mask is None:
        return {"attn_mask_type": "causal" if causal else "no_mask"}
    if mask.dtype == torch.bool:
        return {"attn_mask_type": "arbitrary"}
    return {
        "attn_mask_type": "no_mask",
        "core_attention_bias_type": "post_scale_bias",
        "core_attention_bias_shape": _bias_shape(mask, s_q),
        "core_attention_bias_requires_grad": mask.requires_grad and torch.is_grad_enabled(),
    }


def _bias_shape(mask: Tensor, s_q: int) -> str:
    """Which of a bias's dimensions are not 1, [b, h, s_q, s_kv] from the end: a mask may have fewer."""
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    batch, heads = (size != 1 for size in sizes[-4:-2])
    if not batch and not heads and sizes[-2] == 1 and s_q != 1:
        return "111s"
    return ("b" if batch else "1") + ("h" if heads else "1") + "ss"


def _computed_in(t: Tensor) -> torch.dtype:
    """The type that F.sdpa is given: autocast casts tensors before."""
    return t.dtype if t.dtype == torch.float64 else _autocast_to(t.device.type) or t.dtype


def _autocast_to(kind: str) -> torch.dtype | None:
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _spec(t: Tensor, lead: tuple[int, ...]) -> TensorSpec | None:
    """How a tensor lies in memory, if it is [b, h, s, d]; None where that is dense and aligned."""
    if t.dim() != 4:
        return None
    dtype, stride = _computed_in(t), t.stride()
    alignment = math.gcd(t.data_ptr(), 16) or 16
    if dtype != t.dtype:
        stride, alignment = torch.empty_like(t, dtype=dtype, device="meta").stride(), 16
    # Of a dimension of one element any stride is dense, and F.sdpa looks at the last one all the same.
    dense = t.is_contiguous() and stride[-1] == 1
    if dense and alignment == 16 and t.shape[:1] == lead:
        return None
    return TensorSpec(
        shape=tuple(t.shape),
        stride=tuple(stride),
        dtype=read_dtype(dtype),
        alignment=alignment,
        requires_grad=t.requires_grad,
    )


def _mask_spec(mask: Tensor | None, lead: tuple[int, ...]) -> TensorSpec | None:
    """As it was given: F.sdpa chooses by its rank, its layout and whether it requires a gradient."""
    if mask is None or is_causal_bias(mask) or mask.dim() > 4:
        return None
    shape = tuple(mask.shape)
    if len(lead) > 1 and mask.dim() == 4 and shape[0] != 1:
        shape = (math.prod(lead), *shape[1:])  # one for each of the last of several dimensions of a batch
    return TensorSpec(
        shape=shape,
        stride=tuple(mask.stride()),
        dtype="bool" if mask.dtype == torch.bool else read_dtype(_computed_in(mask)),
        requires_grad=mask.requires_grad,
    )


_LIBRARIES: dict[str, Api] = {"transformers": "transformers", "diffusers": "diffusers", "attnsel": "attnsel"}


def api_of(place: Place, otherwise: Api) -> Api:
    """Whose attention it is: a library's that called torch, or torch's own."""
    if place.torch_file == "nn/modules/activation.py":
        return "nn.MultiheadAttention"
    return _LIBRARIES.get(place.library, otherwise)


def watch_sdpa(recorder: Recorder, call: WatchedCall) -> None:
    """F.scaled_dot_product_attention: the operator is looked up once for calls that are alike."""
    q, k, v = call.argument(0, "query"), call.argument(1, "key"), call.argument(2, "value")
    mask = call.argument(3, "attn_mask")
    dropout, causal = call.argument(4, "dropout_p", 0.0), call.argument(5, "is_causal", False)
    scale, gqa = call.kwargs.get("scale"), call.kwargs.get("enable_gqa", False)
    hindered, place = out_of_reach(), recorder.place()
    if hindered == FAKE:
        call.run()
        recorder.cannot_see(f"{place.where}: F.scaled_dot_product_attention of {FAKE} ran no kernel")
        return
    other = not_readable(q, k, v, None if is_causal_bias(mask) else mask)
    if hindered or other:
        _count_alone(recorder, call, place, f"{other} was given" if other else f"{hindered} was at work")
        return
    key = (
        place,
        _signature(q), _signature(k), _signature(v), _mask_signature(mask),
        dropout, causal, scale, gqa, _switches(q),
    )  # fmt: skip
    tally = recorder.recall(key)
    if tally is not None:
        recorder.follow(tally, call.run(), GRADIENTS)
        return
    ran = Ran(recorder)
    # Under a dispatch mode math adds a mask in another way than alone, which would take masks that it
    # otherwise raises for: a call with one runs as it would alone.
    call.run(ran if mask is None or fits(mask, q, k, gqa) else None)
    operator = _operator(ran, empty=0 in (q.numel(), k.numel()))
    seen = Seen(api_of(place, "F.scaled_dot_product_attention"), operator.name, candidate=operator.candidate)
    seen = seen.asking(
        lambda: {
            "params": question(q, k, v, mask, dropout, causal),
            "switches": switches(q, k, gqa),
        }
    )
    tally = recorder.file(place, seen, key)
    if dropout and not torch.is_grad_enabled():
        tally.extra["fix"] = forgotten_eval(seen.api)
    if dropout and seen.api == "transformers":
        tally.extra["dropout_name"] = _in_the_configuration(dropout)
    recorder.follow(tally, call.out, GRADIENTS)


def _in_the_configuration(dropout: float) -> str:
    """What the model that runs calls its attention's dropout: attention_dropout, attn_pdrop, …; "" where its
    configuration has no one field that says so."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for name in ("self", "module"):
            config = getattr(frame.f_locals.get(name), "config", None)
            said = [field for field, value in getattr(config, "__dict__", {}).items() if value == dropout]
            drops = [field for field in said if "drop" in field]
            drops = [field for field in drops if "att" in field] or drops
            if len(drops) == 1:
                return drops[0]
        frame = frame.f_back
    return ""


def _count_alone(recorder: Recorder, call: WatchedCall, place: Place, why: str) -> None:
    """A call that is not looked into: counted, with the kernel that its gradient names, if there is one."""
    out = call.run()
    node = out.grad_fn if isinstance(out, Tensor) else None
    name = "" if node is None else named_behind(node, GRADIENTS)[1]
    ran = next((one for one in OPERATORS.values() if one.gradient and one.gradient == name), None)
    seen = Seen(
        api_of(place, "F.scaled_dot_product_attention"),
        "F.scaled_dot_product_attention" if ran is None else ran.name,
        candidate="" if ran is None else ran.candidate,
        unread=f"{why}, so its operators were not read",
    )
    recorder.follow(recorder.file(place, seen), out, GRADIENTS)


def forgotten_eval(api: Api) -> str:
    """The fix of dropout where no gradient is wanted: of a module its mode, of a call its argument."""
    fix = known_fixes().get(("dropout in evaluation", api))
    return "" if fix is None else str(fix)


def switches(q: Tensor, k: Tensor, enable_gqa: bool) -> tuple[str, ...]:
    """What holds for the call beside its question, as switches of ``attnsel.dispatchers.torch``."""
    held: Set = set_here()
    grouped = min(q.dim(), k.dim()) >= 3 and q.shape[-3] != k.shape[-3]
    if grouped:
        held["enable_gqa"] = str(bool(enable_gqa)).lower()
    return as_words(held)


def watch_operator(recorder: Recorder, call: WatchedCall) -> None:
    """An attention operator that the program, or a library, calls by its name."""
    operator = OPERATORS[operator_name(call.function)]
    place = recorder.place()
    with recorder.quiet():  # math is made of other operators
        out = call.run()
    seen = Seen(api_of(place, "aten"), operator.name, candidate=operator.candidate)
    recorder.follow(recorder.file(place, seen), out, GRADIENTS)


def part(value: Any) -> Any:
    """What a kernel may be chosen by, of one argument."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value)


def _signature(t: Tensor) -> tuple[Any, ...]:
    """All that a kernel is chosen by, of one tensor."""
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.data_ptr() % 16


def _mask_signature(mask: Tensor | None) -> tuple[Any, ...] | None:
    if is_causal_bias(mask):  # which holds no elements
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
        _autocast_to(q.device.type),
        torch.are_deterministic_algorithms_enabled(),
    )


def _operator(ran: Ran, *, empty: bool) -> Operator:
    """What F.sdpa ran. Math is composite: only its pieces are operators. Of a call with nothing to compute
    (``empty``) torch 2.12 and newer runs none."""
    if ran.names:
        return OPERATORS[ran.names[0]]
    return ZEROS if empty and not any("softmax" in name for name in ran.pieces) else MATH


# ---- torch.compile ------------------------------------------------------------------------------------
# A compiled region calls no function of torch's, but operators by their names, which pass a function mode:
# what Inductor leaves to aten, such as F.sdpa, also where Inductor put it in the place of lines by hand. What
# it makes itself, in Triton or C++, passes nothing, and neither do replays of CUDA graphs.


class Compilations:
    """Dynamo's and Inductor's counters since the session began."""

    def __init__(self) -> None:
        self._before = _counters()

    def lines(self) -> list[str]:
        """What could not be seen, in figures."""
        now = {name: count - self._before.get(name, 0) for name, count in _counters().items()}
        regions = now.get("unique_graphs", 0)
        if regions <= 0:
            return []
        several = "s" if regions > 1 else ""
        lines = [
            f"torch.compile made {regions} region{several}: inside, what Inductor leaves to aten is seen;"
            " kernels that it makes itself (flex_attention, attention by hand that it does not fuse) are not"
        ]
        fused = now.get("fuse_attention", 0)
        if fused:
            lines.append(
                f"Inductor put F.sdpa in the place of {fused} attention pattern{'s' if fused > 1 else ''}"
                " written by hand"
            )
        if now.get("cudagraph_recorded_non_static_inputs", 0) or now.get("cudagraph_skips", 0):
            lines.append("CUDA graphs were asked for: their replays pass no hook")
        return lines


def _counters() -> Mapping[str, int]:
    """torch._dynamo.utils.counters, without importing it: graphs, frames, and what Inductor fused."""
    module = sys.modules.get("torch._dynamo.utils")
    every = getattr(module, "counters", {})
    return {**every.get("stats", {}), **every.get("inductor", {})}


def watch_read_operator(recorder: Recorder, call: WatchedCall) -> None:
    """An operator of F.sdpa's called by its name: by the program, by a library, or by compiled code."""
    operator = OPERATORS[operator_name(call.function)]
    if out_of_reach() == FAKE or not_readable(*call.args, *call.kwargs.values()):
        return  # torch's own, on the way to a kernel or to a graph
    region = _region()
    place = recorder.place()
    key = (operator.name, place.where, region, *map(part, call.args), *map(part, call.kwargs.values()))
    tally = recorder.recall(key)
    with recorder.quiet():  # math is made of other operators
        out = call.run()
    if tally is None:
        seen = Seen(api_of(place, "aten"), operator.name, candidate=operator.candidate, compiled=bool(region))
        try:
            # By the names of its schema, which differ from one operator to the next.
            overload: Any = getattr(call.function, "default", call.function)
            names = [argument.name for argument in overload._schema.arguments]
            given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
            q, k, v = (given[name] for name in ("query", "key", "value"))
            mask = given.get("attn_mask", given.get("attn_bias"))
            dropout, causal = float(given.get("dropout_p") or 0.0), bool(given.get("is_causal"))
            params = question(q, k, v, mask, dropout, causal)
            params = params.replace(is_training=True) if region == "training" else params
            seen = seen._replace(params=params, switches=switches(q, k, enable_gqa=True))
        except (InvalidInput, TypeError, ValueError, KeyError, AttributeError) as error:
            seen = seen._replace(unread=in_words(error))
        tally = recorder.file(place, seen, key)
        if region == "training":
            tally.notes["the backward of a compiled region is not counted"] = None
    recorder.follow(tally, out, GRADIENTS)


def _region() -> str:
    """Whether compiled code is running, and whether for "training" or for "inference"; "" for neither."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith("_aot_autograd/runtime_wrappers.py"):
            return "training" if _in_autograd(frame) else "inference"
        frame = frame.f_back
    return ""


def _in_autograd(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.endswith("_aot_autograd/runtime_wrappers.py"):
        if frame.f_code.co_name == "forward":
            return True
        frame = frame.f_back
    return False


def _scripted() -> int:
    """How many functions and modules TorchScript has made."""
    unit: Any = torch.jit._state._python_cu
    return len(unit.get_functions()) + len(torch.jit._recursive.concrete_type_store.type_store)


def _begin(recorder: Recorder) -> None:
    recorder.state["compiled"] = Compilations(), _scripted()


def _finish(recorder: Recorder) -> None:
    made, scripted = recorder.state.pop("compiled")
    for line in made.lines():
        recorder.cannot_see(line)
    if _scripted() > scripted or any(
        issubclass(kind, torch.jit.ScriptModule) for kind in {*map(type, gc.get_objects())}
    ):  # their types are few, where objects are a million
        recorder.cannot_see("TorchScript was there: what its functions and modules run inside passes no hook")


_READ = [name for name in OPERATORS if name.startswith("aten::_scaled_dot_product")]
OBSERVER = Observer(
    around={F.scaled_dot_product_attention: watch_sdpa},
    operators=dict.fromkeys(OPERATORS, watch_operator) | dict.fromkeys(_READ, watch_read_operator),
    begin=_begin,
    finish=_finish,
)
