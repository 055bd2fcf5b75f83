"""What a model hands to attention, read off its configuration alone.

``data/families.csv`` has a row for each ``model_type`` that was held against transformers' own code: which
models are inside it, what its class sets where a file says nothing, and what no field says plainly. A family
without a row is read by the names that most of them share, and the answer says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from attnsel.base.rows import read_rows
from attnsel.diagnose.models.calls import Call, Grid, Layers, Other, Stack, grouped
from attnsel.diagnose.models.other import other_layer_type
from attnsel.errors import InvalidInput

Config = Mapping[str, Any]

NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "vt_num_hidden_layers"),
    "heads": (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
        "vt_num_attention_heads",
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "vt_hidden_size"),
    "head_dim": ("head_dim", "attention_head_dim", "d_kv", "kv_channels"),
    "window": ("sliding_window", "attention_window_size", "sliding_window_size", "window_size"),
    "softcap": ("attn_logit_softcapping", "attn_logit_softcap"),
}
"""What fields are called, the commonest name first."""


_NO_MIXING = frozenset({"moe", "mlp", "dense", "sparse"})
"""Layers that tokens pass one by one, as Nemotron-H lists them."""


_COMPRESSED = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
"""Layers that attend to a window and to compressed keys behind it, with a mask of both."""

_MOST_LAYERS = 1 << 14
"""More are a slip."""


class Family(NamedTuple):
    """A row. ``parts``: the model inside each sub-config where that has no ``model_type``. ``defaults``: of
    the config's class. ``says``: what no field says, by name, as _Reader asks for it."""

    stack: Stack | None = None
    parts: Mapping[str, str] = MappingProxyType({})
    defaults: Config = MappingProxyType({})
    says: Mapping[str, str] = MappingProxyType({})


@cache
def _families() -> dict[str, Family]:
    found = {}
    for row in read_rows("attnsel.diagnose.models", "families"):
        says = dict(word.partition("=")[::2] for word in row["says"].split())
        stack: Any = row["stack"] or None
        parts, defaults = (json.loads(row[name] or "{}") for name in ("parts", "defaults"))
        found[row["model_type"]] = Family(stack, parts, defaults, says)
    return found


def tabled(config: Config) -> Layers:
    """Every attention of a model, and of each model inside it. Raises InvalidInput for a field that is no
    number where one is needed."""
    if "_class_name" in config:
        return _denoiser(config)
    model_type = str(config.get("model_type", ""))
    calls: list[tuple[int, Call]] = []
    other: list[Other] = []
    unread: list[str] = []
    for name, part in _parts(config):
        own_type = str(part.get("model_type", ""))
        family = _families().get(own_type)
        if family is None:
            own_code = ", not by its own code (auto_map)" if "auto_map" in config else ""
            named = own_type or "a model without model_type"
            unread.append(f"{named} is in no row: read by the usual names{own_code}")
        reader = _Reader(part, family or Family(), name)
        try:
            found, others = reader.read()
        except _Missing as missing:
            unread.append(f"{name or own_type}: {missing}")
            continue
        calls += found
        other += others
    return Layers(model_type, "the table of families", grouped(calls), tuple(other), tuple(unread))


@cache
def denoisers() -> dict[str, dict[str, str]]:
    """The rows of diffusion transformers, by class."""
    return {row["class"]: row for row in read_rows("attnsel.diagnose.models", "denoisers")}


def _denoiser(config: Config) -> Layers:
    """A diffusion transformer of diffusers. Raises InvalidInput as ``tabled`` does."""
    name, by = str(config["_class_name"]), "the table of diffusion transformers"
    row = denoisers().get(name)
    if row is None:
        return Layers(name, by, (), unread=(f"{name} of diffusers is in no row",))
    reader = _Reader(config, Family("vision", {}, json.loads(row["defaults"])), "")
    fields = row["layers"].split("+")
    count = sum(reader.count(field) or 0 for field in fields if reader.value(field) != 0)
    call = reader.call("full_attention")._replace(
        grid=Grid(*(int(row[each]) for each in ("side", "pixels", "frames", "text"))),
        joint="joint" in row["attends"],
        mask="none",
    )
    across = ("num_cross_attention_heads", "cross_attention_head_dim")
    heads, width = (reader.count(field) for field in across)
    text = call._replace(attn="cross", joint=False, mask="tensor" if "masked" in row["attends"] else "none")
    if heads and width:
        text = text._replace(
            q_heads=heads, kv_heads=heads, head_dim_qk=width, head_dim_v=width, scale=width**-0.5
        )
    crosses = ("cross" in row["attends"]) + bool(reader.value("added_kv_proj_dim"))  # to a picture too
    if not crosses:
        call = call._replace(mask=text.mask)
    linear = "linear" in row["attends"]
    calls = [(index, each) for index in range(count) for each in (*[call] * (not linear), *[text] * crosses)]
    twice = reader.indices("dual_attention_layers")  # once more to the picture alone
    calls += [(index, call._replace(joint=False)) for index in range(count) if index in twice]
    unread = (f"{row['unread']} of {name}",) if row["unread"] else ()
    other = (Other(tuple(range(count)), "vision", "linear attention", "", "plain PyTorch"),) if linear else ()
    return Layers(name, by, grouped(calls), other, unread)


def _parts(config: Config) -> list[tuple[str, Config]]:
    """The configs of the models inside one, with the type that each has where it says none."""
    family = _families().get(str(config.get("model_type", "")), Family())
    inner = {name for name, value in config.items() if name.endswith("_config") and _is_a_model(value)}
    found: list[tuple[str, Config]] = []
    for name in sorted(inner | set(family.parts)):
        stated = config.get(name) or {}
        if not isinstance(stated, Mapping):
            raise InvalidInput(name, stated, "must be an object")
        part = dict(stated)
        part["model_type"] = part.get("model_type") or family.parts.get(name, "")
        found.append((name, part))
    own = not {"layers", *NAMES["layers"]}.isdisjoint({*config, *family.defaults, *family.says})
    return [*found, ("", config)] if own or not found else found


def _is_a_model(part: Any) -> bool:
    return isinstance(part, Mapping) and not {"model_type", *NAMES["layers"]}.isdisjoint(part)


class _Missing(Exception):
    """A field without which nothing can be said."""


class _Reader:
    """One model's config, its family's row, and the name of the part that it is of a larger one."""

    def __init__(self, config: Config, family: Family, part: str) -> None:
        self.config, self.family, self.part = config, family, part
        self.model_type = str(config.get("model_type", ""))
        self.says = family.says

    # ---- fields

    def value(self, name: str) -> Any:
        """A field as the file has it, or as its class sets it; None where neither does."""
        found = self.config.get(name)
        return self.family.defaults.get(name) if found is None and name not in self.config else found

    def number(self, *names: str) -> float | None:
        """Under the first of these names that the file has, else as the class sets one of them."""
        for name in (*(name for name in names if self.config.get(name) is not None), *names):
            value = self.value(name)
            if value is None:
                continue
            if isinstance(value, (list, dict)) and value and self.model_type not in _families():
                raise _Missing(f"{name} is not one number, and no row says how its layers differ")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise InvalidInput(name, value, "must be a number")
            return value
        return None

    def count(self, *names: str) -> int | None:
        """A positive whole number."""
        value = self.number(*names)
        if value is None:
            return None
        if value != int(value) or not 0 < value < 1 << 24:
            field = next(name for name in names if self.value(name) == value)
            raise InvalidInput(field, self.value(field), "must be a whole number from 1 on")
        return int(value)

    def indices(self, name: str) -> Sequence[int]:
        """A list of layers."""
        value = self.value(name) or ()
        if not isinstance(value, (list, tuple)) or not all(isinstance(each, int) for each in value):
            raise InvalidInput(name, value, "must be a list of layers")
        return value

    def width(self, heads: int) -> int:
        """Of one head, where the file says the width of all."""
        hidden = self.needed("hidden")
        if hidden < heads:
            raise InvalidInput("hidden_size", hidden, f"must be at least the number of heads, {heads}")
        if hidden % heads and self.model_type not in _families():
            raise _Missing(f"it has no width of a head, and {hidden} is no multiple of {heads} heads")
        return hidden // heads

    def names(self, what: str) -> tuple[str, ...]:
        """What the family calls a thing, or what most do."""
        return (self.says[what],) if what in self.says else NAMES[what]

    def needed(self, what: str) -> int:
        found = self.count(*self.names(what))
        if found is None:
            raise _Missing(f"it has none of {', '.join(self.names(what))}")
        found += self.count(self.says.get(f"{what}_more", "")) or 0
        if what == "layers" and found > _MOST_LAYERS:
            raise InvalidInput("num_hidden_layers", found, f"must be at most {_MOST_LAYERS}")
        return found

    # ---- the model

    def read(self) -> tuple[list[tuple[int, Call]], list[Other]]:
        if "seq2seq" in self.says:
            return list(self.two_stacks()), []
        calls: list[tuple[int, Call]] = []
        others: dict[Any, list[int]] = {}
        for index, kind in enumerate(self.kinds()):
            if kind in _NO_MIXING:
                continue
            mixes_otherwise = other_layer_type(kind, self.model_type)
            if mixes_otherwise is not None:
                others.setdefault(mixes_otherwise, []).append(index)
            if mixes_otherwise is None or kind == "hybrid":
                calls += ((index, call) for call in self.crossed(index, self.of_layer(index).call(kind)))
        stack = self.stack()
        return calls, [Other(tuple(at), stack, *kind) for kind, at in others.items()]

    def crossed(self, index: int, call: Call) -> Iterator[Call]:
        """What a layer calls that may attend to another model's tokens, in place of its own or after them."""
        across = call._replace(attn="cross", causal=False, window_left=None, window_right=None)
        listed, every = (self.says.get(name) for name in ("crosses", "crosses_every"))
        if call.stack == "decoder":
            yield from (call, across)
            return
        if listed and index in self.indices(listed):
            yield across
            return
        yield call
        if every and index % (self.count(every) or 1) == 0:
            yield across

    def two_stacks(self) -> Iterator[tuple[int, Call]]:
        """An encoder and a decoder, whose layers attend to themselves and to the encoder's."""
        encoder: Stack = "speech encoder" if "speech" in self.says else "encoder"
        for stack, layers, heads in (
            (encoder, ("encoder_layers", "num_layers", "num_hidden_layers"), "encoder_attention_heads"),
            ("decoder", ("decoder_layers", "num_decoder_layers", "num_layers"), "decoder_attention_heads"),
        ):
            count, own = self.count(*layers), self.count(heads, *NAMES["heads"])
            if stack == "decoder":  # whose heads the common names do not mean
                own = self.count(heads) or own
            if count is None or own is None:
                raise _Missing(f"it has none of {', '.join(layers)}, or no {heads}")
            width = self.count(*NAMES["head_dim"]) or self.width(own)
            call = Call(
                stack=stack,
                attn="self",
                q_heads=own,
                kv_heads=own,
                head_dim_qk=width,
                head_dim_v=width,
                causal=stack == "decoder",
                scale=self.scale(width),
                bias=self.biased(),
                mask="tensor" if self.biased() else "implied",
                by_hand="by_hand" in self.says,
                reaches=self.says.get("by_hand", ""),
            )
            for index in range(count):
                yield index, call
                if stack == "decoder":
                    yield index, call._replace(attn="cross", causal=False)

    def stack(self) -> Stack:
        if self.family.stack is not None:
            return self.family.stack
        if self.part in ("encoder", "decoder"):
            return "encoder" if self.part == "encoder" else "decoder"
        if "vision" in self.part + self.model_type:
            return "vision"
        return "speech encoder" if "audio" in self.part + self.model_type else "text"

    def kinds(self) -> list[str]:
        """What each layer is, in the words of ``layer_types``."""
        pattern = self.says.get("pattern", "")
        name, _, rest = pattern.partition(":")
        stated = self.config.get("layer_types") or self.config.get("layers_block_type")
        if stated is None and self.config.get(rest.partition(":")[0]) is None:
            stated = self.family.defaults.get("layers_block_type")
        if stated is not None:
            if not isinstance(stated, (list, tuple)) or not all(isinstance(kind, str) for kind in stated):
                raise InvalidInput("layer_types", stated, "must be a list of words")
            renamed = {"attention": "full_attention", "mamba": "linear_attention"}
            known = [renamed.get(str(kind), str(kind)) for kind in stated]
            own = self.count(*(name for name in self.names("layers") if name in self.config))
            return known[: own or None]  # behind them may stand those that draft tokens
        count = self.needed("layers")
        if not pattern:
            plain = "sliding_attention" if "windowed" in self.says else "full_attention"
            return [plain] * count
        return _PATTERNS[name](self, count, rest)

    def of_layer(self, index: int) -> _Reader:
        """With the fields that ``per_layer_config`` has for one layer: {"05": {"head_dim": 512}}, or
        ``block_configs``: [{"attention": {"n_heads_in_group": 8}}]."""
        apart, blocks = self.value("per_layer_config"), self.value("block_configs")
        own = (apart.get(f"{index:02}") or apart.get(str(index))) if isinstance(apart, Mapping) else None
        group = _block(blocks, index).get("n_heads_in_group")
        if isinstance(group, int) and group > 0:
            own = {"num_key_value_heads": max(1, self.needed("heads") // group)}
        if not isinstance(own, Mapping):
            return self
        return _Reader({**self.config, **own}, self.family, self.part)

    def call(self, kind: str) -> Call:
        heads = self.needed("heads")
        if kind == "sliding_attention":
            other = self.value("attention_other_setting")
            other = other if isinstance(other, Mapping) else {}
            heads = self.count("num_sliding_attention_heads") or other.get("num_attention_heads") or heads
        width, value_width = self.head_dims(heads, kind)
        stack = self.stack()
        causal = stack in ("text", "decoder") and not self.bidirectional()
        window = self.window(kind, causal)
        tensor = kind in _COMPRESSED or self.biased() or "by_hand" in self.says
        chunk = self.chunk() if kind == "chunked_attention" else None
        return Call(
            stack=stack if causal or stack != "text" else "encoder",
            attn="self",
            q_heads=heads,
            kv_heads=self.kv_heads(heads, kind),
            head_dim_qk=width,
            head_dim_v=value_width,
            causal=causal,
            scale=self.scale(width),
            window_left=window,
            window_right=None if causal else window,
            chunk=chunk,
            softcap=self.softcap(),
            sinks=self.says.get("sinks", "no") in ("", kind),
            bias=self.biased(),
            mask="tensor" if (chunk and causal) or tensor else "implied",
            by_hand="by_hand" in self.says,
            reaches=self.says.get("by_hand", ""),
        )

    def chunk(self) -> int | None:
        """Tokens that see each other alone: of a text, or the patches of a window of an image, whose sides
        are whole merged patches (transformers 5.23.0, get_window_index of Qwen2.5-VL's vision tower)."""
        if "square" in self.says:
            return (self.count("window_size") or 0) ** 2
        if "grid" not in self.says:
            return self.count("attention_chunk_size")
        window, patch = self.count("window_size"), self.count("patch_size")
        merge = self.count("spatial_merge_size") or 1
        if not window or not patch:
            return None
        if window < merge * patch:
            raise InvalidInput("window_size", window, f"must be at least a merged patch, {merge * patch}")
        return (window // merge // patch * merge) ** 2

    def head_dims(self, heads: int, kind: str) -> tuple[int, int]:
        """Of queries and keys, and of values; MLA's queries have a rotary part beside the other."""
        plain, rotary = self.number("qk_nope_head_dim"), self.number("qk_rope_head_dim")
        if plain is not None and rotary is not None:
            if min(plain, rotary) < 0:
                raise InvalidInput("qk_nope_head_dim", plain, "must be 0 or more")
            return int(plain + rotary), self.count("v_head_dim") or self.width(heads)
        width = self.count(*self.names("head_dim"))
        if kind == "full_attention" and self.value("per_layer_config") is None:
            width = self.count("global_head_dim") or int(self.says.get("global_head_dim", 0)) or width
        if width is None:
            width = self.width(heads) * int(self.says.get("widened", 1))
        return width, (self.count("v_head_dim") if "v_head_dim" in self.says else None) or width

    def kv_heads(self, heads: int, kind: str) -> int:
        if "window_kv" in self.says and kind == "sliding_attention":
            return int(self.says["window_kv"]) * (self.count(*NAMES["kv_heads"]) or heads)
        if kind == "full_attention" and self.value("attention_k_eq_v"):
            return self.count("num_global_key_value_heads") or heads
        if self.number("qk_nope_head_dim") is not None or self.says.get("kv") == "heads":
            return heads
        if self.says.get("kv", "").isdigit():
            return int(self.says["kv"])
        if self.value("multi_query") and not self.value("new_decoder_architecture"):
            return 1
        if self.value("multi_query_attention") is False:
            return heads
        return self.count(*NAMES["kv_heads"]) or heads

    def window(self, kind: str, causal: bool) -> int | None:
        """Keys beside a token's own that it sees on one side; None no bound. ``sides`` names a field of both
        sides together; ``reach`` one that counts the keys beside."""
        every = kind == "full_attention" and "windowed" in self.says
        if not every and kind not in ("sliding_attention", "hybrid_sliding"):
            return None
        sides, reach = (self.says.get(name) for name in ("sides", "reach"))
        size = self.count(sides) if sides else self.count(*self.names("window"))
        if reach and (reach == "both") > causal:
            return size
        if reach and self.config.get(reach) is not None:
            return self.count(reach)
        if size is None:
            return None
        return size // 2 if sides or self.bidirectional() else size - 1

    def bidirectional(self) -> bool:
        """A field that some families keep from one they were made from and do not read."""
        read = "bidirectional" in self.says or self.model_type not in _families()
        return read and bool(self.value("use_bidirectional_attention"))

    def biased(self) -> bool:
        """``bias``: always; ``bias=FIELD``: where that is set; ``bias=FIELD:NUMBER``: where it is that."""
        field, _, number = self.says.get("bias", "no").partition(":")
        return not field or (str(self.value(field)) == number if number else bool(self.value(field)))

    def softcap(self) -> float:
        """A field that some families keep from one they were made from and do not read."""
        read = "softcap" in self.says or self.model_type not in _families()
        return float(self.number(*NAMES["softcap"]) or 0.0) if read else 0.0

    def mscale(self) -> float:
        """What yarn adds to the scale of MLA's scores (transformers 5.23.0, DeepseekV3Attention.__init__)."""
        rope = self.value("rope_scaling") or self.value("rope_parameters")
        if not isinstance(rope, Mapping) or self.number("qk_nope_head_dim") is None:
            return 1.0
        kind = rope.get("rope_type", rope.get("type", "default"))
        factor, all_dims = rope.get("factor"), rope.get("mscale_all_dim")
        if kind == "default" or not isinstance(factor, (int, float)) or factor <= 1:
            return 1.0
        return 0.1 * all_dims * math.log(factor) + 1.0 if isinstance(all_dims, (int, float)) else 1.0

    def scale(self, width: int) -> float:
        said = self.says.get("scale")
        if said is None:
            return float(width**-0.5) * self.mscale() ** 2 * float(self.says.get("times", 1))
        field, _, power = said.partition("^")
        value = self.number(field) if not field.replace(".", "").isdigit() else float(field)
        if value is None:
            return float(width**-0.5)
        if value <= 0:
            raise InvalidInput(field, value, "must be above 0")
        return float(value ** float(power or 1))


# ---- which layer is what, where a config has no layer_types -------------------------------------------

Pattern = Callable[[_Reader, int, str], list[str]]
"""The kinds of so many layers; the text is what follows the pattern's name in a row."""


def _nth(one: str, others: str, *, first: bool = False) -> Pattern:
    """``FIELD:DEFAULT``: of each n layers the last is ``one``, or the ``first``."""

    def kinds(reader: _Reader, count: int, rest: str) -> list[str]:
        field, _, usual = rest.partition(":")
        every = reader.count(field) or int(usual)
        return [others if (index + (not first)) % every else one for index in range(count)]

    return kinds


def _full_every_and_last(reader: _Reader, count: int, rest: str) -> list[str]:
    """As full_every, and the last layer of all too."""
    return [*_PATTERNS["full_every"](reader, count, rest)[:-1], "full_attention"]


def _windows_where(chosen: Callable[[int, float], bool]) -> Pattern:
    """Qwen's: windows in the layers that are ``chosen`` by their index and max_window_layers, where
    use_sliding_window says so."""

    def kinds(reader: _Reader, count: int, rest: str) -> list[str]:
        bound = reader.number("max_window_layers") or 0
        used = _uses_windows(reader)
        return [
            "sliding_attention" if used and chosen(index, bound) else "full_attention"
            for index in range(count)
        ]

    return kinds


def _windows_every(reader: _Reader, count: int, rest: str) -> list[str]:
    """``FIELD:DEFAULT``: windows in the last of each n layers, where use_sliding_window says so."""
    if not _uses_windows(reader):
        return ["full_attention"] * count
    return _nth("sliding_attention", "full_attention")(reader, count, rest)


def _uses_windows(reader: _Reader) -> bool:
    return bool(reader.value("use_sliding_window")) and reader.value("sliding_window") is not None


def _attention_in(reader: _Reader, count: int, rest: str) -> list[str]:
    """``FIELD``: a list of the layers with attention; the others are linear."""
    stated = reader.indices(rest)
    return ["full_attention" if index in stated else "linear_attention" for index in range(count)]


def _chunks_but_in(reader: _Reader, count: int, rest: str) -> list[str]:
    """``FIELD``: a list of the layers that see all; the others see a chunk."""
    stated = reader.indices(rest)
    return ["full_attention" if index in stated else "chunked_attention" for index in range(count)]


def _attention_at(reader: _Reader, count: int, rest: str) -> list[str]:
    """Jamba: attention in each attn_layer_period-th layer, from attn_layer_offset on."""
    period, offset = reader.count("attn_layer_period") or 8, int(reader.number("attn_layer_offset") or 0)
    return ["full_attention" if index % period == offset else "linear_attention" for index in range(count)]


def _letters(reader: _Reader, count: int, rest: str) -> list[str]:
    """``FIELD``: Nemotron-H's layers as letters: M is Mamba-2, * attention, - and E are none."""
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    stated = str(reader.value(rest) or "")
    if not stated or not set(stated) <= set(kinds):
        raise InvalidInput(rest, stated, f"must be letters of {''.join(kinds)}")
    return [kinds[letter] for letter in stated]


def _ratios(reader: _Reader, count: int, rest: str) -> list[str]:
    """``FIELD``: by how much each layer compresses keys, 0 not at all; without it all of them do."""
    stated = reader.indices(rest) or [1] * count
    return ["compressed_sparse_attention" if ratio else "sliding_attention" for ratio in stated[:count]]


def _no_ops(reader: _Reader, count: int, rest: str) -> list[str]:
    """``FIELD``: a list of blocks, of which some have no attention."""
    blocks = reader.value(rest)
    return ["mlp" if _block(blocks, index).get("no_op") else "full_attention" for index in range(count)]


def _block(blocks: Any, index: int) -> Config:
    """What one of ``block_configs`` says of its attention."""
    block = blocks[index] if isinstance(blocks, (list, tuple)) and index < len(blocks) else None
    found = block.get("attention") if isinstance(block, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _repeat(reader: _Reader, count: int, rest: str) -> list[str]:
    """``HEAD|CYCLE``: letters of the first layers, then those that come again and again."""
    head, cycle = rest.split("|")
    letters = (head + cycle * count)[:count]
    return [_LETTERS[letter] for letter in letters]


_LETTERS = {
    "F": "full_attention",
    "S": "sliding_attention",
    "L": "linear_attention",
    "C": "conv",
    "H": "hybrid",
}

_PATTERNS: dict[str, Pattern] = {
    "repeat": _repeat,
    "ratios": _ratios,
    "no_ops": _no_ops,
    "all": lambda reader, count, rest: [rest] * count,
    "full_every": _nth("full_attention", "sliding_attention"),
    "full_every_and_last": _full_every_and_last,
    "full_first_of": _nth("full_attention", "sliding_attention", first=True),
    "linear_but_every": _nth("full_attention", "linear_attention"),
    "chunks_but_every": _nth("full_attention", "chunked_attention"),  # Llama 4: that one is not rotated
    "windows_every": _windows_every,
    "windows_from": _windows_where(lambda index, bound: index >= bound),
    "windows_below": _windows_where(lambda index, bound: index < bound and not index % 2),
    "attention_in": _attention_in,
    "chunks_but_in": _chunks_but_in,
    "attention_at": _attention_at,
    "letters": _letters,
}
