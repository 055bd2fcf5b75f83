"""What ``DotProductAttention`` is built from, and what it is not able to do yet: held to its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnsel.base.scalars import number, text
from attnsel.base.suggestions import arguments_of, unknown_argument
from attnsel.errors import InvalidInput, UnsupportedArgument, short
from attnsel.params import AttentionParams
from attnsel.params.checks import MOST
from attnsel.policy import Policy

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


def check_choices(qkv_format: str, attention_type: str, softmax_type: str, attention_dropout: float) -> None:
    """Raises InvalidInput."""
    if text("qkv_format", qkv_format) not in ("sbhd", "bshd", "thd"):
        raise InvalidInput("qkv_format", qkv_format, "must be one of sbhd, bshd, thd")
    if text("attention_type", attention_type) not in ("self", "cross"):
        raise InvalidInput("attention_type", attention_type, "must be self or cross")
    if text("softmax_type", softmax_type) not in ("vanilla", "off-by-one", "learnable"):
        raise InvalidInput("softmax_type", softmax_type, "must be one of vanilla, off-by-one, learnable")
    if not 0.0 <= number("attention_dropout", attention_dropout) < 1.0:
        raise InvalidInput("attention_dropout", attention_dropout, "must be at least 0 and below 1")


def check_labels(name: Any, layer_number: Any, get_rng_state_tracker: Any) -> None:
    """Raises InvalidInput."""
    if name is not None and not isinstance(name, str):
        raise InvalidInput("name", name, "must be a text")
    if layer_number is not None and not isinstance(layer_number, int):
        raise InvalidInput("layer_number", layer_number, "must be an int")
    if get_rng_state_tracker is not None and not callable(get_rng_state_tracker):
        raise InvalidInput("get_rng_state_tracker", get_rng_state_tracker, "must be callable")


def head_dims(kv_channels: Any) -> tuple[int, int]:
    """(head_dim_qk, head_dim_v) of one number for both or a pair. Raises InvalidInput."""
    channels = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
    if len(channels) != 2 or any(not isinstance(n, int) or not 0 < n <= MOST for n in channels):
        raise InvalidInput("kv_channels", kv_channels, "must be a positive int or a pair of them")
    return channels


def check_heads(heads: int, groups: int, tp_size: int) -> None:
    if not isinstance(heads, int) or not 0 < heads <= MOST:
        raise InvalidInput("num_attention_heads", heads, f"must be a positive int, at most {MOST}")
    if not isinstance(groups, int) or groups <= 0 or heads % groups:
        raise InvalidInput("num_gqa_groups", groups, f"must be a positive divisor of {heads}")
    if not isinstance(tp_size, int) or tp_size <= 0 or heads % tp_size or groups % tp_size:
        raise InvalidInput("tp_size", tp_size, f"must divide {heads} heads and {groups} groups")


def check_names(static: dict[str, Any]) -> None:
    """What no later argument can put right, said before the first call. Raises InvalidInput."""
    window = static["window_size"]
    if window is not None and min(window) < -1:
        raise InvalidInput("window_size", window, "must have bounds of at least -1")
    AttentionParams(attn_mask_type=static["attn_mask_type"], softcap=static["softcap"])
    Policy(**{name: static[name] for name in ("backend", "adapt") if static[name] is not None})


def refuse_not_yet(given: dict[str, Any], method: Callable[..., Any], init: Callable[..., Any]) -> None:
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
