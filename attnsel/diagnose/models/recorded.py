"""What transformers' own code hands to attention.

The model is built on the meta device, where nothing is computed and no weight takes memory, and run once with
an attention function that writes down what it gets.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import partial
from importlib import import_module
from inspect import signature
from itertools import product
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnsel.base.rows import read_rows
from attnsel.diagnose.models.calls import Attn, Call, Layers, Mask, Other, Stack, grouped
from attnsel.diagnose.models.other import Kind, other_layer
from attnsel.diagnose.models.table import NAMES
from attnsel.diagnose.models.written_out import Scores, followed
from attnsel.runtime.mask_functions import Pattern, read_pattern

_NAME = "attnsel_recorder"
_GRID = 32
"""Patches of an image on each side, so many that windows are smaller."""
_PIXELS = 64
"""Tokens of a picture that is made from noise."""
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


def recorded_denoiser(config: Mapping[str, Any]) -> list[tuple[int, Call]] | None:
    """The calls of a diffusion transformer by diffusers' own code, without ``grid``; None where diffusers is
    not installed, does not know it, or its code did not run."""
    try:
        diffusers = import_module("diffusers")
        with torch.device("meta"):
            model = getattr(diffusers, str(config["_class_name"])).from_config(dict(config)).to("meta").eval()
        questions = list(_noises(model))
    except Exception:  # whatever a library raises that is not whole, and a class for a config
        return None
    for place, (pixels, text, asked) in product(("meta", "cpu"), questions):  # the latter has values to read
        question = tree_map_only(Tensor, lambda tensor: tensor.to(place), asked)  # noqa: B023
        recorder = _Recorder(PretrainedConfig(), "diffusion vision")
        recorder.paths = {id(module): path for path, module in model.named_modules()}
        with recorder.listening("eager", True), _no_autocast(), torch.no_grad(), torch.device("meta"):
            try:
                model(**question)
            except Exception:  # as above
                continue
        return _of_blocks(recorder, pixels, text)
    return None


def _of_blocks(recorder: _Recorder, pixels: int, text: int) -> list[tuple[int, Call]]:
    """Calls of blocks that lie in several lists, each counted from 0."""
    lists: dict[str, int] = {}
    found: list[tuple[int, Call]] = []
    for (layer, call), (module, rows) in zip(recorder.calls, recorder.rows, strict=True):
        path = recorder.place(module)[0]
        if rows == text or not path:  # a text that is refined or pooled by itself
            continue
        if path not in lists:
            lists[path] = max((index + 1 for index, _ in found), default=0)
        found.append((lists[path] + layer, call._replace(joint=rows >= pixels + text)))
    return found


@contextmanager
def _no_autocast() -> Iterator[None]:
    """torch.autocast knows no meta device."""
    before = torch.autocast
    torch.autocast = lambda *_, **__: nullcontext()  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.autocast = before  # type: ignore[misc]


def _noises(model: Any) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """What a diffusion transformer's forward asks for, by name, with the picture in each usual shape; before
    it the tokens of the picture and of the text."""
    config = model.config
    text = config.get("max_text_seq_length") or config.get("text_len") or _ENCODED
    sizes = {
        **config,
        "pixels": _PIXELS,
        "text": text,
        "axes": len(config.get("axes_dims_rope") or (1, 1, 1)),
    }
    given = {
        "img_shapes": [(1, 8, _PIXELS // 8)],
        "txt_seq_lens": [text],
        "added_cond_kwargs": {"resolution": torch.zeros(1, 2), "aspect_ratio": torch.zeros(1, 1)},
        **{"num_frames": 1, "height": 8, "width": _PIXELS // 8},
    }
    for row in read_rows("attnsel.diagnose.models", "arguments"):
        there = not row["where"] or config.get(row["where"])
        given[row["name"]] = _tensor(row, sizes.get) if there else None
    own = {name: given[name] for name in signature(model.forward).parameters if name in given}
    patch, at_once = config.get("patch_size") or 1, config.get("patch_size_t") or 1
    frames = ((config.get("sample_frames") or 1) - 1) // (config.get("temporal_compression_ratio") or 4) + 1
    picture = [8 * each for each in ((patch, patch) if isinstance(patch, int) else patch[-2:])]
    channels = config["in_channels"]
    for tokens, shape in (
        (_PIXELS, (_PIXELS, channels)),
        (_PIXELS, (channels, *picture)),
        (_PIXELS, (channels, 1, *picture)),
        (_PIXELS, (1, channels, *picture)),
        (_PIXELS * frames, (frames * at_once, channels, *picture)),
        (_PIXELS * 4, (channels, 4 * at_once, *picture)),
        (_PIXELS, (channels, _PIXELS)),
    ):
        yield tokens, text, {**own, "hidden_states": torch.zeros(1, *shape)}


def _parts(config: PretrainedConfig) -> tuple[list[tuple[str, PretrainedConfig]], list[str]]:
    """The models inside a model (text_config, vision_config), or itself; and the names of those inside that
    cannot be built by themselves."""
    inner = ((name, getattr(config, name, None)) for name in getattr(config, "sub_configs", {}))
    models = [(name, part) for name, part in inner if isinstance(part, PretrainedConfig)]
    built = [(name, part) for name, part in models if _class_of(part) is not None]
    left = [name for name, part in models if _class_of(part) is None and _has_layers(part)]
    if not built or _crosses(config):
        return [("", config)], []
    return ([*built, ("", config)] if _has_layers(config) else built), left


def _crosses(config: PretrainedConfig) -> bool:
    """Whether the models inside are an encoder and the decoder that attends to it, which are run together."""
    return config.is_encoder_decoder and type(config) in transformers.MODEL_MAPPING


def _has_layers(part: PretrainedConfig) -> bool:
    return any(_field(part, name) for name in NAMES["layers"])


def _field(config: PretrainedConfig, *names: str) -> Any:
    """The first of these that is set; one that differs by layer cannot be asked for and raises."""
    for name in names:
        with suppress(Exception):
            found = getattr(config, name)
            if found is not None:
                return found
    return None


def _class_of(config: PretrainedConfig) -> type[Any] | None:
    """The class that transformers builds of a config: by its own list, or the one in the same folder that is
    made of it, as of towers that no user builds by themselves."""
    kind: Any = transformers.MODEL_MAPPING.get(type(config), None)
    if kind is not None:
        return kind[0] if isinstance(kind, tuple) else kind  # type: ignore[no-any-return]
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        members = vars(import_module(module)).values()
    except ImportError:
        return None
    models = (each for each in members if isinstance(each, type) and issubclass(each, PreTrainedModel))
    own = [each for each in models if _made_of(each) is type(config)]
    named = [each for each in own if re.search(r"(Model|Encoder|Transformer|Tower|Decoder)$", each.__name__)]
    return next(iter(named or own), None)


def _made_of(model: type[Any]) -> Any:
    """The class of its config, as its constructor says it, or as the class does; None of a base class."""
    stated = signature(model.__init__).parameters.get("config")
    if stated is None or "forward" not in vars(model):
        return None
    annotated = stated.annotation
    if isinstance(annotated, str):
        annotated = getattr(sys.modules[model.__module__], annotated, None)
    return annotated if isinstance(annotated, type) else model.config_class


def _one(config: PretrainedConfig, name: str) -> tuple[list[tuple[int, Call]], list[Other]]:
    kind = _class_of(config)
    if kind is None:
        raise LookupError("it has no class for this config")
    error: Exception | None = None
    for implementation, truth in product((_NAME, "sdpa", "eager"), (True, False)):
        recorder = _Recorder(config, name)
        try:
            with recorder.listening(implementation, truth), torch.no_grad():
                with torch.device("meta"):
                    model = kind._from_config(
                        deepcopy(config), attn_implementation=implementation, dtype=torch.float32
                    ).eval()
                    questions = list(_questions(model, config))
                recorder.paths = {id(module): path for path, module in model.named_modules()}
                recorder.lists = {
                    path: len(module)
                    for path, module in model.named_modules()
                    if isinstance(module, nn.ModuleList)
                }
                for module in model.modules():
                    if re.search(r"Experts$", type(module).__name__):  # which say nothing of attention
                        module.forward = _passed_on
                _run(model, questions)
        except Exception as raised:  # whatever a model's code raises on the meta device
            error = error or raised
            if len(recorder.calls) < (_field(config, *NAMES["layers"]) or 1 << 14):
                continue  # what stands behind all layers may fail
        if recorder.calls:
            return recorder.found(), _others(model, recorder)
        error = None
    if error is not None:
        raise error
    return recorder.found(), _others(model, recorder)


def _passed_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _run(model: Any, questions: list[dict[str, Any]]) -> None:
    """Asks the model, in another shape where its code does not take the first. What is made beside the model
    has values: windows of an image are counted."""
    error: Exception | None = None
    for question in questions:
        try:
            model(**question)
            return
        except Exception as raised:  # noqa: PERF203 - whatever a model's code raises for another shape
            error = error or raised
    if error is not None:
        raise error


def _questions(model: Any, config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Inputs of the shapes that the model's forward may ask for, the likeliest first: the rows of
    ``data/inputs.csv``."""
    asked, main = signature(model.forward).parameters, model.main_input_name
    cases: dict[str, list[dict[str, str]]] = {}
    for row in read_rows("attnsel.diagnose.models", "inputs"):
        cases.setdefault(row["case"], []).append(row)
    beside, needed = cases.pop("beside"), cases.pop("needed")
    size = partial(_size, config)

    def has(word: str) -> bool:
        named = any(re.fullmatch(word.removeprefix("!"), name) for name in (*asked, f"main={main}"))
        return named != word.startswith("!")

    def stated(word: str) -> bool:
        return bool(_field(config, *word.removeprefix("!").split("|"))) != word.startswith("!")

    def given(rows: list[dict[str, str]], way: int = 0) -> dict[str, Any]:
        return {
            name: _tensor(row, size, way)
            for name, row in product(asked, rows)
            if re.fullmatch(row["name"], name) and all(map(stated, row["where"].split()))
        }

    def by_name(name: str) -> Tensor:
        return _tensor(next(row for row in needed if re.search(row["name"], name)), size)

    rows = next((rows for case, rows in cases.items() if all(map(has, case.split()))), [])
    many = max((row["shape"].count(",") + 1 for row in rows), default=0)
    ways = [given(rows, way) for way in range(many)] or [{main: _tokens(size("tokens"))}]
    if {"input_ids", "pixel_values"} <= asked.keys():
        ways.append({"input_ids": _tokens(size("tokens")), "pixel_values": by_name("pixel_values")})
    more: dict[str, Any] = given(beside) | ({"use_cache": False} if "use_cache" in asked else {})
    wanting = [name for name, each in asked.items() if each.default is each.empty and each.kind < 2]
    for way in ways:
        known = way | more
        yield {name: by_name(name) for name in wanting if name not in known} | known


def _tokens(count: int) -> Tensor:
    return torch.zeros(1, count, dtype=torch.long)


_HOLDS: dict[str, tuple[Callable[..., Tensor], torch.dtype]] = {
    "zeros": (torch.zeros, torch.float32),
    "index": (torch.zeros, torch.long),
    "ones": (torch.ones, torch.long),
    "true": (torch.ones, torch.bool),
}


def _tensor(row: Mapping[str, str], size: Callable[[str], Any], way: int = 0) -> Tensor:
    """What a row says: in the shape of this ``way`` where it has several, each of its sizes a number, or the
    first of these names that has a ``size``. Numbers that are read are on the CPU."""
    shapes = row["shape"].split(", ")
    sizes = []
    for word in shapes[min(way, len(shapes) - 1)].split():
        found = (int(name) if name.isdecimal() else size(name) for name in word.split("|"))
        sizes.append(int(next(filter(None, found), 1)))
    if row["holds"] not in _HOLDS:
        return torch.tensor(list(map(int, row["holds"].split())), device="cpu").reshape(sizes)
    made, kind = _HOLDS[row["holds"]]
    return made(*sizes, dtype=kind)


_OF_A_PICTURE = ("high", "wide", "side", "patch", "patches", "flattened")
_FIELDS = {
    "channels": ("num_channels", "in_channels", "in_chans"),
    "mels": ("num_mel_bins", "input_feat_size", "feature_size", "input_size", "input_dim"),
}


def _size(config: PretrainedConfig, name: str) -> Any:
    """A size of ``data/inputs.csv``: a field of the config where no other is meant."""
    if name not in _OF_A_PICTURE:
        tokens = _ENCODED if config.is_encoder_decoder else _LENGTH
        known = {"length": _LENGTH, "encoded": _ENCODED, "tokens": tokens}
        return known.get(name) or _field(config, *_FIELDS.get(name, (name,)))
    sides, patch, frames = (
        _field(config, field) or usual
        for field, usual in (("image_size", 224), ("patch_size", 14), ("temporal_patch_size", 1))
    )
    high, wide = (sides, sides) if isinstance(sides, int) else (list(sides) * 2)[:2]
    first, side = (patch, patch) if isinstance(patch, int) else (patch[0], patch[-1])
    deep = frames if isinstance(frames, int) else frames[0]
    values = first * first * deep * (_field(config, *_FIELDS["channels"]) or 3)
    found = (high, wide, side, values, high * wide // side**2, side**2 * 3 + 2)
    return found[_OF_A_PICTURE.index(name)]


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
        self.lists: Mapping[str, int] = {}
        self.calls: list[tuple[int, Call]] = []
        self.rows: list[tuple[nn.Module, int]] = []
        self._inside: list[nn.Module] = []

    @contextmanager
    def listening(self, implementation: str, truth: bool) -> Iterator[None]:
        """Attention by ``implementation`` comes here, and so do the masks made for it; whoever reads a value
        that nobody computed gets ``truth``."""
        with ExitStack() as stack:
            made = partial(_mask, kind=torch.float32 if implementation == "eager" else torch.bool)
            stack.enter_context(_registered(ALL_MASK_ATTENTION_FUNCTIONS, implementation, made))
            if implementation == _NAME:
                stack.enter_context(_registered(ALL_ATTENTION_FUNCTIONS, _NAME, self._attend))
            hooks = nn.modules.module
            entering = hooks.register_module_forward_pre_hook(lambda m, _: self._inside.append(m))
            leaving = hooks.register_module_forward_hook(lambda m, *_: self._leave(m))
            stack.callback(entering.remove)
            stack.callback(leaving.remove)
            stack.enter_context(fx_config.patch(meta_nonzero_assume_all_nonzero=True))  # type: ignore[attr-defined]
            stack.enter_context(_Listening(self, truth))
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

    def by_hand(self, scores: Scores, values: Tensor) -> None:
        """Products and a softmax that the model writes out, with heads before the tokens or folded."""
        module, (q, k, v) = self._attention(), (_of_heads(each) for each in (scores.q, scores.k, values.mT))
        if min(q.shape[2], k.shape[2]) < 2 or v.shape[2] != k.shape[2]:
            return
        heads = _field(self.config, *NAMES["heads"], "conf_num_attention_heads")
        if isinstance(heads, int) and 0 < heads < q.shape[1] and q.shape[1] % heads == 0:
            q, k, v = (
                each[:, : max(1, each.shape[1] * heads // q.shape[1])] for each in (q, k, v)
            )  # of blocks
        if q.shape[1] == 1:  # over the pixels of an autoencoder
            return
        mask = scores.mask
        windowed = getattr(module, "attention_type", "") == "local"  # of GPT-Neo, in a buffer
        rest = {"scaling": scores.factor, "softcap": scores.softcap, "bias": scores.bias or None}
        if scores.softcap == 1.0:  # by a number that nobody can read
            rest["softcap"] = _field(self.config, "attention_logit_cap", "conf_attention_logit_cap")
        rest["sliding_window"] = _field(self.config, "window_size") if windowed else None
        seen = getattr(mask, "attnsel_seen", None)
        causal = seen is not None and seen.causal
        self.note(module, q, k, v, None if windowed else mask, causal, rest)
        layer, call = self.calls[-1]
        flash = getattr(_class_of(self.config), "_supports_flash_attn", False)
        made: Mask = "none" if mask is None else "tensor"
        call = call._replace(by_hand=True, reaches="flash_attention_2" if flash else "", mask=made)
        self.calls[-1] = layer, call

    def _attention(self) -> nn.Module:
        """The innermost module that is called so, or that runs."""
        named = (m for m in reversed(self._inside) if re.search(r"att(entio)?n", type(m).__name__, re.I))
        return next(named, self._inside[-1] if self._inside else nn.Identity())

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
            seen = _Seen(causal and not _by_head(mask), window - 1 if window else None)
        if getattr(module, "compressor", None) is not None:  # keys beside those of the window
            seen = _Seen(causal=True, unknown=True)
        scale, stack = rest.get("scaling"), _stack(self.config, self.name, path, seen.causal)
        folded = (
            stack == "vision" and "diffusion" not in self.name and q.shape[0] > 1
        )  # windows of one picture
        call = Call(
            stack=stack,
            attn="cross"
            if "diffusion" in self.name and q.shape[2] != k.shape[2]
            else _attn(module, path, q, k),
            q_heads=q.shape[1],
            kv_heads=self._kv_heads(module, q, k),
            head_dim_qk=q.shape[-1],
            head_dim_v=v.shape[-1],
            causal=seen.causal,
            scale=float(q.shape[-1] ** -0.5 if scale is None else scale),
            window_left=seen.left,
            window_right=seen.right,
            chunk=q.shape[2] if folded else seen.chunk,
            softcap=float(rest.get("softcap") or 0.0),
            sinks=rest.get("s_aux") is not None,
            bias=any("bias" in name and rest[name] is not None for name in rest) or _by_head(mask),
            mask="tensor" if seen.unknown or seen.chunk else made,
        )
        layer = _layer(module, path)
        if layer < 0:  # a module that several layers share
            layer = next((_layer(m, self.paths.get(id(m), "")) for m in self._inside[1:]), 0)
        self.calls.append((layer, call))
        self.rows.append((module, q.shape[2]))

    def found(self) -> list[tuple[int, Call]]:
        """The calls; those that one module makes for the windows of one image, as one with ``chunk``.

        A layer of two attention modules, each counted, has the number of its place in the list of layers.
        """
        found: list[tuple[int, Call]] = []
        of_module: dict[nn.Module, list[int]] = {}
        for module, count in self.rows:
            of_module.setdefault(module, []).append(count)
        done: set[nn.Module] = set()
        seen: dict[nn.Module, list[int]] = {}
        first: dict[str, int] = {}
        causal = any(call.causal for _, call in self.calls)
        places = {module: self.place(module) for module in of_module}
        counts = {(many, path) for path, many, _ in places.values()}
        beyond = any(layer >= many for (layer, _) in self.calls for many, _ in counts) and len(counts) == 1
        for (layer, call), (module, _) in zip(self.calls, self.rows, strict=True):
            rows = of_module[module]
            if causal and call.attn == "cross" and call.stack == "encoder":
                call = call._replace(stack="text")
            if beyond:
                layer = places[module][2]
            inside = re.search(r"^(.*)\.(\d+)\.", self.paths.get(id(module), "") + ".")
            if call.stack == "vision" and inside and getattr(module, "layer_idx", None) is None:
                first.setdefault(inside[1], max((index + 1 for index, _ in found), default=0))
                layer = first[inside[1]] + int(inside[2])  # of stages, or of several lists
            windows = sum(rows) == _GRID**2 if call.stack == "vision" else call.stack == "speech encoder"
            if len(rows) < 2 or not windows:
                again = seen.setdefault(module, [])  # one module in the place of several layers
                shared = len(set(rows)) == 1 and getattr(module, "layer_idx", None) is None
                found.append((layer + len(again) * shared, call))
                again.append(layer)
            elif module not in done:
                done.add(module)
                found.append((layer, call._replace(chunk=max(rows))))
        return found

    def place(self, module: nn.Module) -> tuple[str, int, int]:
        """The list of layers that a module is in, how many it holds, and which of them this is."""
        found = re.search(r"^(.*?)\.?(\d+)\.", self.paths.get(id(module), "") + ".")
        path, index = (found[1], int(found[2])) if found else ("", 0)
        return path, self.lists.get(path, 1 << 24), index

    def _kv_heads(self, module: nn.Module, q: Tensor, k: Tensor) -> int:
        """Before a repeat that the model makes itself. MLA makes keys of every head from a latent one."""
        if getattr(module, "num_key_value_groups", 0) * k.shape[1] == q.shape[1]:
            return k.shape[1]
        names = {"num_key_value_heads", "num_kv_heads"} - {*self.config.attribute_map}
        stated = _field(self.config, *sorted(names))
        repeated = k.shape[1] == q.shape[1] and _field(self.config, "kv_lora_rank") is None
        return stated if repeated and isinstance(stated, int) and 0 < stated < k.shape[1] else k.shape[1]


def _by_head(mask: Any) -> bool:
    """Whether what is called a mask is numbers that differ by head."""
    return isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1 and mask.is_floating_point()


def _of_heads(tensor: Tensor) -> Tensor:
    """[b, h, s, d] of [.., s, d]: one sequence is asked, so what is folded are its heads."""
    whole = tensor[None] if tensor.dim() == 3 else tensor
    return whole.flatten(1, -3)


class _Listening(TorchFunctionMode):
    """Hears attention that goes to torch by itself, and lets a model read values that nobody computed."""

    def __init__(self, recorder: _Recorder, truth: bool) -> None:
        super().__init__()
        self._recorder, self._truth = recorder, truth

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is nn.functional.scaled_dot_product_attention:
            return self._recorder.by_sdpa(*args, **kwargs)
        if function in _READS and args[0].is_meta:
            return _READS[function](self._truth)
        try:
            out = function(*args, **kwargs)
        except RuntimeError as error:
            if "device" not in str(error):
                raise
            on_meta = partial(tree_map_only, Tensor, lambda tensor: tensor.to("meta"))
            out = function(*on_meta(args), **on_meta(kwargs))
        followed(function, args, kwargs, out, self._recorder.by_hand, _Seen(causal=True))
        return out


_READS: dict[Any, Callable[[bool], Any]] = {
    Tensor.item: int,
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__index__: int,
    Tensor.__float__: float,
    Tensor.__contains__: bool,
}


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
    if main == "pixel_values" or (
        re.search(r"vision|visual|image", words) and not config.model_type.endswith("_text")
    ):
        return "vision"
    hears = main in ("input_features", "input_values")
    if hears and (not config.is_encoder_decoder or re.search(r"(^|\.)encoder\.", path)):
        return "speech encoder"
    if config.is_encoder_decoder:
        return "decoder" if re.search(r"(^|\.)decoder\.", path) else "encoder"
    return "text" if causal else "encoder"


def _main_input(config: PretrainedConfig) -> str:
    return str(getattr(_class_of(config), "main_input_name", ""))


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
    *,
    kv_length: int,
    kind: torch.dtype,
    mask_function: Any = None,
    batch_size: int = 1,
    q_length: int = 0,
    **rest: Any,
) -> Tensor:
    """In the place of transformers' mask makers: a mask without values, which knows what it would show."""
    rows = q_length or len(rest.get("cache_position", (0,)))
    made = torch.empty(batch_size, 1, rows, kv_length, dtype=kind, device="meta")
    made.attnsel_seen = _seen(read_pattern(mask_function), mask_function)  # type: ignore[attr-defined]
    return made


def _seen(pattern: Pattern | None, mask_function: Any) -> _Seen:
    if pattern is None:
        return _probed(mask_function)
    left, right = (None if side == -1 else side for side in (pattern.left, pattern.right))
    return _Seen(pattern.causal, left, right, pattern.chunk or None)


def _probed(mask_function: Any) -> _Seen:
    """A mask function that a model makes itself, by what two tokens in the middle of many see of all."""
    many = 1 << 18
    reaches = set()
    try:
        for row in (many // 2, many // 2 + 777):
            shown = mask_function(0, 0, torch.tensor(row), torch.arange(many)).expand(many).nonzero()[:, 0]
            first, last = int(shown[0]), int(shown[-1])
            if last - first + 1 != len(shown):
                return _Seen(causal=last == row, unknown=True)
            reaches.add((row - first if first else None, last - row if last < many - 1 else None))
    except Exception:  # it asks for more than where it stands
        return _Seen(causal=True, unknown=True)
    (left, right), *others = reaches
    return _Seen(right == 0, left, None if right == 0 else right, unknown=bool(others))
