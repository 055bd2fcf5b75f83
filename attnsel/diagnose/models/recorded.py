"""What transformers' own code hands to attention.

The model is built on the meta device, where nothing is computed and no weight takes memory, and run once with
an attention function that writes down what it gets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModel, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnsel.diagnose.models.calls import Attn, Call, Layers, Mask, Other, Stack, grouped
from attnsel.diagnose.models.other import Kind, other_layer
from attnsel.diagnose.models.table import NAMES
from attnsel.runtime.mask_functions import Pattern, read_pattern

_NAME = "attnsel_recorder"
_LENGTH, _ENCODED = 48, 80
"""Tokens of the question; different, so that keys which come from the encoder are told from one's own."""


def recorded_config(config: Mapping[str, Any]) -> Layers | None:
    """Of a configuration as a file has it; None where transformers does not know the model, or not this
    configuration of it."""
    fields = {name: value for name, value in config.items() if name != "model_type"}
    loud = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # of kernels that are not here, which the answer says
    try:
        return recorded(AutoConfig.for_model(str(config.get("model_type")), **fields))
    except Exception:  # whatever the class of a config raises for what it did not expect
        return None
    finally:
        transformers.logging.set_verbosity(loud)


def recorded(config: PretrainedConfig) -> Layers:
    """Every attention of a model, and of each model inside it."""
    calls: list[tuple[int, Call]] = []
    other: list[Other] = []
    parts, left = _parts(config)
    unread = [f"{name}: transformers builds no model of it by itself" for name in left]
    for name, part in parts:
        try:
            found, others = _one(part, name)
        except Exception as error:  # whatever a model's code raises on the meta device
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            unread.append(f"{name or part.model_type}: transformers' code did not run: {first}")
            continue
        if not found and not others:
            unread.append(f"{name or part.model_type}: nothing of it reaches an attention function")
        calls += found
        other += others
    return Layers(
        config.model_type,
        f"transformers {transformers.__version__}",
        grouped(calls),
        tuple(other),
        tuple(unread),
    )


def _parts(config: PretrainedConfig) -> tuple[list[tuple[str, PretrainedConfig]], list[str]]:
    """The models inside a model (text_config, vision_config), or itself; and the names of those inside that
    cannot be built by themselves."""
    inner = ((name, getattr(config, name, None)) for name in getattr(config, "sub_configs", {}))
    models = [(name, part) for name, part in inner if isinstance(part, PretrainedConfig)]
    known = transformers.MODEL_MAPPING._model_mapping
    built = [(name, part) for name, part in models if part.model_type in known]
    left = [name for name, part in models if part.model_type not in known and _has_layers(part)]
    return (built, left) if built else ([("", config)], [])


def _has_layers(part: PretrainedConfig) -> bool:
    return any(getattr(part, name, None) for name in NAMES["layers"])


def _one(config: PretrainedConfig, name: str) -> tuple[list[tuple[int, Call]], list[Other]]:
    for implementation in (_NAME, "sdpa", "eager"):
        recorder = _Recorder(config, name)
        try:
            with recorder.listening(implementation), torch.device("meta"), torch.no_grad():
                model = AutoModel.from_config(
                    config, attn_implementation=implementation, dtype=torch.bfloat16
                ).eval()
                # The other implementations ask how many tokens an expert has.
                model.config._experts_implementation = "batched_mm"
                recorder.paths = {id(module): path for path, module in model.named_modules()}
                model(**_question(model, config))
        except (KeyError, ValueError) as error:
            if implementation in str(error) or "scaled_dot_product_attention" in str(error):
                continue  # it has a table of attention classes of its own, or no attention
            raise
        if recorder.calls:
            break
    return recorder.calls, _others(model, recorder)


def _question(model: Any, config: PretrainedConfig) -> dict[str, Any]:
    """Inputs of the shapes that the model's forward asks for."""
    first, asked = model.main_input_name, signature(model.forward).parameters
    given: dict[str, Any]
    if "grid_thw" in asked:  # patches of one image, flattened; the grid's values are read
        patch = config.patch_size**2 * getattr(config, "temporal_patch_size", 1)
        rows = torch.zeros(256, patch * getattr(config, "in_channels", 3), dtype=torch.bfloat16)
        given = {next(iter(asked)): rows, "grid_thw": torch.tensor([[1, 16, 16]], device="cpu")}
    elif "pixel_values" in asked and "input_ids" not in asked:
        side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        shape = (1, getattr(config, "num_channels", 3), side, side)
        given = {"pixel_values": torch.zeros(shape, dtype=torch.bfloat16)}
    elif first == "input_features":
        given = {first: torch.zeros(1, getattr(config, "num_mel_bins", 80), 3000, dtype=torch.bfloat16)}
    elif first == "input_values":
        given = {first: torch.zeros(1, 16_000, dtype=torch.bfloat16)}
    else:
        given = {first: torch.zeros(1, _ENCODED if config.is_encoder_decoder else _LENGTH, dtype=torch.long)}
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.zeros(1, _LENGTH, dtype=torch.long)
    return given


class _Seen(NamedTuple):
    """What a mask lets through, as ``Call`` has it. ``unknown``: the pattern was not understood."""

    causal: bool
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    unknown: bool = False


class _Recorder:
    """What attention functions got, as calls with the layer's index."""

    def __init__(self, config: PretrainedConfig, name: str) -> None:
        self.config, self.name = config, name
        self.paths: Mapping[int, str] = {}
        self.calls: list[tuple[int, Call]] = []
        self._inside: list[nn.Module] = []

    @contextmanager
    def listening(self, implementation: str) -> Iterator[None]:
        """Attention by ``implementation`` comes here, and so do the masks made for it."""
        with ExitStack() as stack:
            stack.enter_context(_registered(ALL_MASK_ATTENTION_FUNCTIONS, implementation, _mask))
            if implementation == _NAME:
                stack.enter_context(_registered(ALL_ATTENTION_FUNCTIONS, _NAME, self._attend))
            else:
                hooks = nn.modules.module
                entering = hooks.register_module_forward_pre_hook(lambda m, _: self._inside.append(m))
                leaving = hooks.register_module_forward_hook(lambda m, *_: self._leave(m))
                stack.callback(entering.remove)
                stack.callback(leaving.remove)
                stack.enter_context(_Listening(self))
            yield

    def _leave(self, module: nn.Module) -> None:
        while self._inside and self._inside.pop() is not module:
            pass

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        causal = rest.get("is_causal")
        causal = bool(getattr(module, "is_causal", False) if causal is None else causal)
        self.note(module, query, key, value, attention_mask, causal, rest)
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def by_sdpa(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """In the place of F.scaled_dot_product_attention."""
        module = self._inside[-1] if self._inside else nn.Identity()
        self.note(module, query, key, value, attn_mask, is_causal, {"scaling": scale})
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    def note(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        causal: bool,
        rest: Mapping[str, Any],
    ) -> None:
        path = self.paths.get(id(module), "")
        made: Mask = "implied"
        seen: _Seen | None = getattr(mask, "attnsel_seen", None)
        if seen is None:
            made = "none" if mask is None else "tensor"
            window = rest.get("sliding_window") if mask is None and causal else None
            seen = _Seen(causal, window - 1 if window else None)
        scale = rest.get("scaling")
        call = Call(
            stack=_stack(self.config, self.name, path, seen.causal),
            attn=_attn(module, path, q, k),
            q_heads=q.shape[1],
            kv_heads=self._kv_heads(q, k),
            head_dim_qk=q.shape[-1],
            head_dim_v=v.shape[-1],
            causal=seen.causal,
            scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
            window_left=seen.left,
            window_right=seen.right,
            chunk=seen.chunk,
            softcap=float(rest.get("softcap") or 0.0),
            sinks=rest.get("s_aux") is not None,
            bias=any("bias" in name and rest[name] is not None for name in rest),
            mask="tensor" if seen.unknown or seen.chunk else made,
        )
        self.calls.append((_layer(module, path), call))

    def _kv_heads(self, q: Tensor, k: Tensor) -> int:
        """Before a repeat that the model makes itself. MLA makes keys of every head from a latent one."""
        stated = getattr(self.config, "num_key_value_heads", getattr(self.config, "num_kv_heads", None))
        repeated = k.shape[1] == q.shape[1] and getattr(self.config, "kv_lora_rank", None) is None
        return stated if repeated and isinstance(stated, int) and 0 < stated < k.shape[1] else k.shape[1]


class _Listening(TorchFunctionMode):
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is nn.functional.scaled_dot_product_attention:
            return self._recorder.by_sdpa(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


@contextmanager
def _registered(table: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A function in one of transformers' tables, and what was there before put back."""
    known = table._global_mapping  # a mask is made only for what stands here
    before = known.get(name)
    known[name] = function
    try:
        yield
    finally:
        if before is None:
            del known[name]
        else:
            known[name] = before


def _layer(module: nn.Module, path: str) -> int:
    """Its index, as the module says or else the path to it."""
    stated = getattr(module, "layer_idx", None)
    number = re.search(r"\.(\d+)\.", f".{path}.")
    return stated if isinstance(stated, int) else int(number[1]) if number else 0


def _attn(module: nn.Module, path: str, q: Tensor, k: Tensor) -> Attn:
    named = re.search(r"cross|encoder_attn|EncDecAttention", f"{path}.{type(module).__name__}")
    return "cross" if named or {q.shape[2], k.shape[2]} == {_LENGTH, _ENCODED} else "self"


def _stack(config: PretrainedConfig, name: str, path: str, causal: bool = True) -> Stack:
    """By the part of the model that the config is of, then by the path of the module inside it."""
    words = f"{name} {config.model_type}"
    if re.search(r"audio|speech", words):
        return "speech encoder"
    main = _main_input(config)
    if main == "pixel_values" or re.search(r"vision|visual|image", words):
        return "vision"
    if main in ("input_features", "input_values") and re.search(r"(^|\.)encoder\.", path):
        return "speech encoder"
    if config.is_encoder_decoder:
        return "decoder" if re.search(r"(^|\.)decoder\.", path) else "encoder"
    return "text" if causal else "encoder"


def _main_input(config: PretrainedConfig) -> str:
    kind: Any = transformers.MODEL_MAPPING[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    return str(kind.main_input_name)


def _others(model: nn.Module, recorder: _Recorder) -> list[Other]:
    """The layers that mix tokens otherwise, by their modules' classes."""
    found: dict[tuple[Stack, Kind], set[int]] = {}
    for path, module in model.named_modules():
        kind = other_layer(type(module).__name__)
        if kind is None:
            continue
        stack = _stack(recorder.config, recorder.name, path)
        found.setdefault((stack, kind), set()).add(_layer(module, path))
    return [Other(tuple(sorted(layers)), stack, *kind) for (stack, kind), layers in found.items()]


def _mask(
    *, kv_length: int, mask_function: Any = None, batch_size: int = 1, q_length: int = 0, **rest: Any
) -> Tensor:
    """In the place of transformers' mask makers: a mask without values, which knows what it would show."""
    rows = q_length or len(rest.get("cache_position", (0,)))
    made = torch.empty(batch_size, 1, rows, kv_length, dtype=torch.bool, device="meta")
    made.attnsel_seen = _seen(read_pattern(mask_function))  # type: ignore[attr-defined]
    return made


def _seen(pattern: Pattern | None) -> _Seen:
    if pattern is None:
        return _Seen(causal=True, unknown=True)
    left, right = (None if side == -1 else side for side in (pattern.left, pattern.right))
    return _Seen(pattern.causal, left, right, pattern.chunk or None)
