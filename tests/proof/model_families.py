"""Holds the table of model families against transformers' own code, and writes its rows.

    python tests/proof/model_families.py            # every row against the recorder; 1 for a contradiction
    python tests/proof/model_families.py --write    # fits what no field says, and writes the rows that hold

For each model type that transformers can build on the meta device three configurations are asked: another
number of layers and of heads, windows in another place, and the class's own defaults. A type is a row where
the table says the same of all of them, in each form that a config.json has: whole, as it is saved (what
differs from the class), and as hubs carry it (without what is derived).
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from datetime import date
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from attnsel.base.rows import read_rows
from attnsel.diagnose.models import table
from attnsel.diagnose.models.calls import Layers
from attnsel.diagnose.models.recorded import recorded, recorded_config
from paths import ROOT

FILE = ROOT / "attnsel" / "diagnose" / "models" / "data" / "families.csv"
HUB = ROOT / "tests" / "attnsel" / "diagnose" / "models" / "hub.json"
KEPT = (
    *(name for names in table.NAMES.values() for name in names),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "global_head_dim", "num_global_key_value_heads"),
    *("attention_k_eq_v", "max_window_layers", "use_sliding_window", "sliding_window_pattern", "multi_query"),
    *("full_attention_interval", "attn_layer_period", "attn_layer_offset", "no_rope_layer_interval"),
    *("attention_chunk_size", "query_pre_attn_scalar", "attention_multiplier", "new_decoder_architecture"),
    *(
        "use_bidirectional_attention",
        "encoder_layers",
        "decoder_layers",
        "num_decoder_layers",
        *("local_attention", "attn_layer_indices", "layers_block_type", "hybrid_override_pattern"),
    ),
    *("layer_group_size", "cross_attention_layers", "cross_attention_frequency", "fullatt_block_indexes"),
    *("patch_size", "spatial_merge_size", "window_size", "use_sliding_window"),
    *("block_types", "attention_dim", "swa_head_dim"),
    *("encoder_attention_heads", "decoder_attention_heads", "global_attn_every_n_layers", "attention_scale"),
)
CHANGES: tuple[dict[str, Any], ...] = (
    {
        "num_hidden_layers": 7,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "hidden_size": 768,
        **{"head_dim": 96, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        "attn_layer_indices": [1, 4],
    },
    {
        **{"num_hidden_layers": 9, "sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3},
        **{"sliding_window_pattern": 3, "layer_types": None, "attention_multiplier": 0.02},
        **{"query_pre_attn_scalar": 144, "attn_logit_softcapping": 30.0, "attention_chunk_size": 64},
    },
    {"num_hidden_layers": 5, "num_attention_heads": 8, "hidden_size": 512, "window_size": 56},
    {"num_hidden_layers": 8, "use_bidirectional_attention": True, "layer_types": None},
)
RUNNABLE: dict[str, tuple[dict[str, Any], ...]] = {
    "dots1": (
        {"n_routed_experts": 8, "n_shared_experts": 1, "num_hidden_layers": 5},
        {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 96,
        },
    ),
    "lfm2_moe": ({"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},),
    "glm4v_moe_text": (
        {
            "num_hidden_layers": 3,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [8, 12, 12],
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "glm_image_text": (
        {
            "num_hidden_layers": 3,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]},
        },
    ),
    "dbrx": ({"n_layers": 3, "attn_config": {"kv_n_heads": 2, "rope_theta": 5e5, "clip_qkv": 8.0}},),
    "esm": ({"vocab_size": 33, "mask_token_id": 1, "pad_token_id": 2, "num_hidden_layers": 4},),
    "t5gemma2_text": ({"num_hidden_layers": 7, "dropout_rate": 0.0},),
}
"""Of types whose class cannot run as it is: all that is asked."""
DERIVED = ("layer_types", "rope_parameters", "per_layer_config")
FITS = {
    "window": (
        *("", "windowed", "pattern=windows_from", "pattern=windows_below"),
        *(f"pattern=full_every:sliding_window_pattern:{n}" for n in (4, 5, 6)),
        *(f"pattern=full_every:none:{n}" for n in (2, 4, 5, 6)),
        *(f"pattern=full_first_of:none:{n}" for n in (2, 3, 4)),
        "pattern=linear_but_every:layer_group_size:6",
        *(f"pattern=full_every_and_last:none:{n}" for n in (5, 6)),
        "pattern=linear_but_every:full_attention_interval:4",
        "pattern=attention_at",
        *("pattern=attention_in:attn_layer_indices", "pattern=letters:hybrid_override_pattern"),
        "pattern=windows_every:no_rope_layer_interval:4",
        "pattern=chunks_but_every:no_rope_layer_interval:4",
        "pattern=chunks_but_in:fullatt_block_indexes grid",
        "pattern=full_first_of:global_attn_every_n_layers:3 sides=local_attention",
        *(
            f"pattern=repeat:{letters}"
            for letters in (
                "L|LLLF",
                "|FL",
                "C|CFCS",
                "LLH|LLLLHL",
                "|FS",
                "FSSSSF|SSSSSF",
                "|SSSSF",
                "|LF",
                "|SSF",
            )
        ),
        "pattern=repeat:|LLS",
        "pattern=ratios:compress_ratios",
        "pattern=chunks_but_in:global_attn_indexes square",
    ),
    "scale": ("", "scale=1", "scale=query_pre_attn_scalar^-0.5", "scale=attention_multiplier"),
    "more": (
        "",
        "bidirectional",
        "global_head_dim=512",
        "hidden=embed_dim",
        "kv=heads",
        "kv=1",
        "window_kv=2 v_head_dim sinks=sliding_attention reach=sliding_window_size",
        "widened=2 times=1.4142135623730951",
        "reach=both",
        "windowed",
        "crosses=cross_attention_layers",
        "crosses_every=cross_attention_frequency",
    ),
}


def configs(model_type: str) -> Iterator[tuple[PretrainedConfig, dict[str, Any]]]:
    """Configurations, and what their class was told."""
    plain = AutoConfig.for_model(model_type)
    has = {*plain.to_dict(), *plain.attribute_map, "layer_types"}
    parts = parts_of(model_type)
    for fields in RUNNABLE.get(model_type, ()):
        yield AutoConfig.for_model(model_type, **fields), {"model_type": model_type, **fields}
    for changes in CHANGES if model_type not in RUNNABLE else ():
        given: dict[str, Any] = {name: value for name, value in changes.items() if name in has}
        if "qk_rope_head_dim" in has:  # of which head_dim is another name, or that part alone
            given.pop("head_dim", None)
        if "num_key_value_heads" in plain.attribute_map:  # another name of the query heads
            given.pop("num_key_value_heads", None)
        for name in parts:
            own = getattr(plain, name)
            there = {*own.to_dict(), *own.attribute_map}
            given[name] = {field: value for field, value in changes.items() if field in there}
        if given.keys() <= {"layer_types", "num_hidden_layers"} and changes is CHANGES[-1]:
            continue
        try:
            yield AutoConfig.for_model(model_type, **given), {"model_type": model_type, **given}
        except Exception:
            continue
    if (
        model_type not in RUNNABLE
        and not has & {"num_hidden_layers", *parts}
        and (plain.to_dict().get("num_layers") or 0) <= 40
    ):
        yield plain, {"model_type": model_type}


def forms(config: PretrainedConfig, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Whole, as it is saved, as hubs carry it without what is derived, and what its class was told alone."""
    whole, saved = config.to_dict(), config.to_diff_dict()
    saved.setdefault("model_type", config.model_type)
    yield whole
    yield saved
    if config.model_type not in RUNNABLE:  # which are nothing without
        yield {name: value for name, value in saved.items() if name not in DERIVED}
    yield {name: value for name, value in given.items() if value is not None}


def told(layers: Layers) -> set[tuple[Any, ...]]:
    return {(other.stack, other.kind, other.layers) for other in layers.other} | {
        (*call[:7], round(call.scale, 6), *call[8:13], call.bias, call.by_hand, call.reaches, call.layers)
        for call in (each._replace(mask="none", calls_per_layer=1) for each in layers.calls)
    }


def defaults_of(model_type: str) -> dict[str, Any]:
    """As the class declares them: what it derives from others is left to the reader."""
    fields = type(AutoConfig.for_model(model_type)).__dataclass_fields__
    stated = {name: fields[name].default for name in KEPT if name in fields}
    listed = ("cross_attention_layers", "fullatt_block_indexes", "global_attn_indexes")
    plain = AutoConfig.for_model(model_type)
    stated |= {name: tuple(getattr(plain, name)) for name in listed if getattr(plain, name, None)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in stated.items()
        if isinstance(value, (int, float, str, tuple)) and value not in ((), "")
    }


def parts_of(model_type: str) -> dict[str, str]:
    try:
        config = AutoConfig.for_model(model_type)
    except Exception:
        return {}
    inner = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    return {name: part.model_type for name, part in inner.items() if isinstance(part, PretrainedConfig)}


Question = tuple[PretrainedConfig, dict[str, Any], set[tuple[Any, ...]]]


def asked(model_type: str) -> list[Question]:
    """Configurations, and what transformers' code does with each."""
    found = []
    for config, given in configs(model_type):
        layers = recorded(config)
        if (layers.calls or layers.other) and not layers.unread:
            found.append((config, given, told(layers)))
    if not found:
        plain = AutoConfig.for_model(model_type)
        layers = recorded(plain)
        if (layers.calls or layers.other) and not layers.unread:
            found.append((plain, {"model_type": model_type}, told(layers)))
    return found


def holds(questions: list[Question]) -> bool:
    return all(
        told(table.tabled(form)) == wanted
        for config, given, wanted in questions
        for form in forms(config, given)
    )


def fitted(model_type: str, parts: dict[str, str]) -> table.Family | None:
    """What has to be said of a family beside its fields, the simplest first; None where nothing fits."""
    questions = asked(model_type)
    if not questions:
        return None
    defaults = defaults_of(model_type)
    calls = [call for _, _, wanted in questions for call in wanted if len(call) > 3]
    stacks, more = {call[0] for call in calls} or {"text"}, []
    if "decoder" in stacks:
        more = ["seq2seq", *(["speech"] if "speech encoder" in stacks else [])]
    seen = {"softcap": any(call[11] for call in calls), "sinks": any(call[12] for call in calls)}
    more += [word for word, there in {**seen, "bias": any(call[13] for call in calls)}.items() if there]
    by_hand = sorted({f"by_hand={call[15]}".rstrip("=") for call in calls if call[14]})
    more += by_hand[-1:]
    stack = "text" if len(stacks) > 1 else next(iter(stacks))
    if calls and not calls[0][6] and stack == "text" and len(stacks) == 1:
        stack = "encoder"
    ways = sorted(itertools.product(*FITS.values()), key=lambda way: sum(map(bool, way)))
    for way in ways:
        says = dict(word.partition("=")[::2] for word in " ".join((*way, *more)).split())
        family = table.Family(stack, parts, defaults, says)
        table._families()[model_type] = family
        try:
            if holds(questions):
                return family
        except Exception:
            continue
    del table._families()[model_type]
    return None


def composite(model_type: str, parts: dict[str, str]) -> table.Family | None:
    """A family that is several models; None where its own code does otherwise than these."""
    family = table.Family(None, parts, {}, {})
    table._families()[model_type] = family
    questions = asked(model_type)
    if questions and holds(questions):
        return family
    del table._families()[model_type]
    return fitted(model_type, parts) if defaults_of(model_type) else None


def main() -> int:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if sys.argv[1:2] == ["--write"]:
        return write(sys.argv[2:] or list(CONFIG_MAPPING_NAMES))
    wrong, known = 0, [each for each in table._families() if each in CONFIG_MAPPING_NAMES]
    for model_type in known:
        questions = asked(model_type)
        if not holds(questions):
            wrong += 1
            print(f"{model_type}: the table says otherwise")
    for public in json.loads(HUB.read_text()):
        layers = recorded_config(public["config"])
        if layers and not layers.unread and told(layers) != told(table.tabled(public["config"])):
            wrong += 1
            print(f"{public['name']}: the table says otherwise")
    print(f"{len(known)} families, {wrong} contradictions; {len(table._families()) - len(known)} of own code")
    return 1 if wrong else 0


def write(types: list[str]) -> int:
    kept = {row["model_type"]: row for row in read_rows("attnsel.diagnose.models", "families")}
    for model_type in sorted(types, key=lambda each: bool(parts_of(each))):
        try:
            parts = parts_of(model_type)
            family = composite(model_type, parts) if parts else fitted(model_type, {})
        except Exception as error:
            print(f"{model_type}: {type(error).__name__}: {str(error)[:80]}", flush=True)
            continue
        if family is None:
            print(f"{model_type}: nothing fits{' any more' if model_type in kept else ''}", flush=True)
            continue
        says = " ".join(f"{name}={value}" if value else name for name, value in family.says.items())
        kept[model_type] = {
            "model_type": model_type,
            "stack": family.stack or "",
            "parts": json.dumps(parts) if parts else "",
            "defaults": json.dumps(dict(family.defaults)) if family.defaults else "",
            "says": says,
            "source": f"transformers {transformers.__version__}",
            "read": date.today().isoformat(),
        }
        print(f"{model_type}: {family.stack} {says}", flush=True)
        _save(kept)
    return 0


def _save(rows: dict[str, dict[str, str]]) -> None:
    head = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
    with FILE.open("w", newline="") as file:
        file.writelines(f"{line}\n" for line in head)
        writer = csv.DictWriter(file, next(iter(rows.values())), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows))


if __name__ == "__main__":
    sys.exit(main())
