"""Every family of the installed transformers by ``attn_implementation="attnsel"``, beside its eager code.

    python tests/proof/transformers_families.py                       # all families, an hour on one core
    python tests/proof/transformers_families.py llama gemma3 --jobs 2
    python tests/proof/transformers_families.py --csv families.csv

A family is a model type whose class says ``_supports_attention_backend``. Its configuration is made small and
its weights are drawn at random; nothing is downloaded. For each case (a forward pass, a training step, a kind
of cache) one word is given:

``equal``    the same numbers as eager, within the rounding of float32
``refused``  attnsel's own error, with the argument that it names
``eager``    eager fails itself, so that nothing can be compared
``differs``, ``error``, ``time``   wrong: exit code 1

A family that cannot be made small by the table below is told as ``not made``, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import inspect
import io
import json
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # once, and not in each process

BATCH, LENGTH, NEW, WINDOW = 2, 7, 6, 4
VOCABULARY = 64

# What a field of a configuration becomes, by its name; numbers that are smaller already stay. Names that no
# line holds stay as they are.
BY_SIZE: dict[int, str] = {
    VOCABULARY: "vocab_size text_vocab_size encoder_vocab_size decoder_vocab_size vocab_size_per_layer_input "
    "max_position_embeddings n_positions max_target_positions n_ctx "
    "hidden_size d_model n_embd dim embed_dim d_embed hidden_dim embedding_size projection_dim width "
    "encoder_hidden_size decoder_hidden_size intermediate_size ffn_dim n_inner d_ff encoder_ffn_dim "
    "decoder_ffn_dim mlp_dim ffn_hidden_size word_embed_proj_dim shared_expert_intermediate_size "
    "moe_intermediate_size intermediate_size_mlp out_hidden_size attention_hidden_size",
    4: "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads "
    "attention_heads index_n_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "linear_num_value_heads",
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers depth num_encoder_layers "
    "num_decoder_layers encoder_num_layers num_key_value_heads num_experts_per_tok moe_topk moe_k "
    "sliding_window_pattern full_attention_interval mamba_expand linear_num_key_heads",
    1: "n_group topk_group first_k_dense_replace num_dense_layers",
    8: "patch_size mamba_n_heads mamba_num_heads chunk_size local_attention",
    16: "head_dim kv_channels global_head_dim attention_head_dim qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim index_head_dim hidden_size_per_layer_input mamba_d_state mamba_d_head state_size "
    "ssm_state_size mamba_head_dim linear_key_head_dim linear_value_head_dim rotary_dim",
    32: "q_lora_rank kv_lora_rank qk_head_dim image_size",
    128: "mamba_d_ssm",
}
SMALL = {name: size for size, names in BY_SIZE.items() for name in names.split()}
SMALL |= dict.fromkeys(("sliding_window", "attention_window", "window_size", "attention_chunk_size"), WINDOW)
NO_DROPOUT = (
    "attention_dropout hidden_dropout dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout_prob "
    "attention_probs_dropout_prob activation_dropout layerdrop encoder_layerdrop decoder_layerdrop "
    "embd_dropout"
)
ALWAYS: dict[str, Any] = {
    **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))},
    "decoder_start_token_id": 1,
    "use_sliding_window": True,
    "max_window_layers": 0,
    **dict.fromkeys(NO_DROPOUT.split(), 0.0),
}
# One field for each distinct word of a list with an entry a layer, so that every kind of layer is there.
PER_LAYER = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types", "attention_layers")


# What is tried in turn until eager gives numbers: everything small; what has no default as well; heads as
# wide as they are; only fewer layers, experts and words.
FEWER = {name for name in SMALL if any(word in name for word in ("layers", "experts", "vocab", "window"))}
WAYS = (set(SMALL), set(SMALL), {name for name in SMALL if "head_dim" not in name}, FEWER)


def made_small(config: Any, way: int = 0, fields: dict[str, Any] | None = None) -> Any:
    """The configuration of a family, small: the constructor derives what depends on sizes again. ``fields``:
    what some are set to, with dots to those of its parts."""
    fields = fields or {}
    found, parts = config.to_dict(), getattr(config, "sub_configs", {})
    given: dict[str, Any] = {}
    for name, value in found.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if name in ALWAYS and (way == 0 or number or value is None):
            given[name] = ALWAYS[name]
        elif name in WAYS[way] and (number or (value is None and (way == 1 or name == "sliding_window"))):
            given[name] = min(SMALL[name], value or SMALL[name])
    if way == 2 and found.get("num_attention_heads") and found.get("hidden_size"):
        wide = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
        given["hidden_size"] = given["num_attention_heads"] * wide
    if given.get("num_key_value_heads") and found.get("num_key_value_heads") == found.get(
        "num_attention_heads"
    ):
        given["num_key_value_heads"] = given["num_attention_heads"]
    layers = next((name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in found), None)
    kinds = [list(dict.fromkeys(found[name])) for name in PER_LAYER if isinstance(found.get(name), list)]
    if layers and kinds:
        given[layers] = count = max(2, *(len(kind) for kind in kinds))
        for name in PER_LAYER:
            if isinstance(found.get(name), list) and found[name]:
                kind = list(dict.fromkeys(found[name]))
                given[name] = [kind[n % len(kind)] for n in range(count)]
    for name in parts:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "to_dict"):
            of_part = {key[len(name) + 1 :]: fields[key] for key in fields if key.startswith(f"{name}.")}
            given[name] = made_small(part, way, of_part)
    accepted = {name: value for name, value in given.items() if name in found or name in ALWAYS}
    accepted |= {name: value for name, value in fields.items() if "." not in name}
    made = type(config)(**accepted)
    if not hasattr(made, "pad_token_id"):
        made.pad_token_id = 0
    rope = getattr(made, "rope_parameters", None)
    if (
        isinstance(rope, dict) and "rope_type" in rope and "rope_parameters" not in fields
    ):  # the parts of half a head that is turned
        wide = getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads
        half = int(wide * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return made


def families() -> dict[str, Any]:
    """Model types and the class of each that is tried, the one that generates before others."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tables = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_MASKED_LM_MAPPING,
        auto.MODEL_MAPPING,
    )
    found: dict[str, Any] = {}
    for kind, config in CONFIG_MAPPING.items():
        for table in tables:
            with contextlib.suppress(Exception):
                model = table[config]
                model = model[0] if isinstance(model, tuple) else model
                of_a_part = model.config_class in getattr(config, "sub_configs", {}).values()
                if not of_a_part and getattr(model, "_supports_attention_backend", False):
                    found[kind] = model
                    break
    return found


# ---- one family ------------------------------------------------------------------------------------------


class Said(NamedTuple):
    case: str
    word: str
    more: str = ""


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def real(side: str) -> torch.Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if side != "none":
        mask[0, 4:] = 0
    return mask.flip(1) if side == "left" else mask


@functools.cache
def said_of() -> dict[str, dict[str, Any]]:
    """What no rule of this file says, by family: fields of its configuration ("config." before the name, with
    dots to those of its parts), arguments of its forward, the ``implementation`` where a part cannot be
    "attnsel", and the ``double`` case: one whose float32 rounds away what is compared (drawn weights make
    scores of 1e6), which is asked in float64."""
    found: dict[str, dict[str, Any]] = {}
    with (Path(__file__).parent / "data/transformers_families.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for kind in row["families"].split():
                found.setdefault(kind, {})[row["name"]] = json.loads(row["value"])
    return found


def tensor_of(value: Any, made: torch.Generator) -> Any:
    """An argument from its words: {"normal": [2, 3, 4]}, {"ones": [2, 7]}, {"false": [2, 7]}, {"below": [9]};
    a list is its numbers, and anything else is itself."""
    if isinstance(value, list):
        return torch.tensor(value)
    if not isinstance(value, dict):
        return value
    ((what, shape),) = value.items()
    if what == "normal":
        return torch.randn(shape, generator=made)
    if what == "below":
        return torch.randint(3, shape[0], shape[1:], generator=made)
    return torch.ones(shape, dtype=torch.long) if what == "ones" else torch.zeros(shape, dtype=torch.bool)


def image_of(config: Any, made: torch.Generator) -> torch.Tensor:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None) or 64
    height, width = (size, size) if isinstance(size, int) else size
    frames = [config.num_frames] if getattr(config, "num_frames", None) else []
    return torch.randn(BATCH, *frames, getattr(config, "num_channels", 3), height, width, generator=made)


def patches_of(config: Any, main: str, made: torch.Generator) -> dict[str, torch.Tensor]:
    """Two images of four by four patches, as towers take them whose images differ in size."""
    config = getattr(config, "vision_config", config)
    channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
    frames = getattr(config, "temporal_patch_size", None) or getattr(config, "patch_temporal", 1)
    wide = channels * frames * config.patch_size**2
    return {main: torch.randn(32, wide, generator=made), "grid_thw": torch.tensor([[1, 4, 4]] * 2)}


def inputs_of(model: Any, side: str = "none") -> tuple[dict[str, Any], torch.Tensor | None]:
    """What a family is called with, and which rows count."""
    accepted = inspect.signature(model.forward).parameters
    names = (model.main_input_name, "pixel_values", "input_values", "input_features")
    main = next((name for name in names if name in accepted), "input_ids")
    made = torch.Generator().manual_seed(2)
    said = said_of().get(model.config.model_type, {}).items()
    given = {name: tensor_of(value, made) for name, value in said if name in accepted}
    if given:
        return given, None
    if "grid_thw" in accepted:
        return patches_of(model.config, "hidden_states" if "hidden_states" in accepted else main, made), None
    if main != "input_ids":
        config = getattr(model.config, "encoder_config", model.config)
        bins, frames = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 32)
        features = (frames, bins) if hasattr(config, "subsampling_conv_channels") else (bins, frames)
        samples = (1, 4000) if getattr(config, "audio_channels", 0) else (4000,)
        if main == "pixel_values":
            given[main] = image_of(model.config, made)
        else:
            given[main] = torch.randn(
                BATCH, *(features if main == "input_features" else samples), generator=made
            )
        for name, one in accepted.items():
            if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD and name not in given:
                ids = name.endswith("ids")
                given[name] = tokens() if ids else torch.ones(BATCH, given[main].shape[-1], dtype=torch.long)
        return given, None
    given = {"input_ids": tokens()}
    kept = None
    if "pixel_values" in accepted and not model.can_generate() and hasattr(model.config, "vision_config"):
        given["pixel_values"] = image_of(model.config, made)
    if side != "none" and "attention_mask" in accepted:
        given |= {"attention_mask": real(side), "input_ids": tokens() * real(side)}
        kept = real(side).bool()
    if model.config.is_encoder_decoder and "decoder_input_ids" in accepted:
        given["decoder_input_ids"], kept = tokens(), None
    return given, kept


def first(output: Any) -> torch.Tensor:
    for name in ("logits", "last_hidden_state", "pooler_output", "logits_per_image", "image_embeds"):
        if isinstance(getattr(output, name, None), torch.Tensor):
            return getattr(output, name)
    return next(t for t in output.values() if isinstance(t, torch.Tensor) and t.is_floating_point())


def forward(model: Any, side: str) -> dict[str, torch.Tensor]:
    given, kept = inputs_of(model, side)
    with torch.no_grad():
        out = first(model(**given))
    return {"out": out if kept is None or out.shape[:2] != kept.shape else out[kept]}


def trained(model: Any) -> dict[str, torch.Tensor]:
    given, kept = inputs_of(model, "right")
    dtype = next(model.parameters()).dtype
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in given.items()}
    model.zero_grad()
    out = first(model(**given))
    out = out if kept is None or out.shape[:2] != kept.shape else out[kept]
    (out.float().sin().sum() / out.numel()).backward()
    return {"out": out.detach()} | {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def compiled(model: Any) -> dict[str, torch.Tensor]:
    given, kept = inputs_of(model, "left")
    torch._dynamo.reset()
    with torch.no_grad():
        out = first(torch.compile(model, backend="eager")(**given))
    return {"out": out if kept is None or out.shape[:2] != kept.shape else out[kept]}


class Stream(contextlib.nullcontext):
    """In place of a GPU's, for caches that are offloaded."""

    def wait_stream(self, other: Any) -> None:
        pass


def generated(model: Any, cache: str, side: str = "left", compiles: bool = False) -> dict[str, torch.Tensor]:
    """Tokens and their logits. Every model generates eager's own: one that differs would hide the rest."""
    given: dict[str, Any] = {}
    if cache in ("quantized", "quanto"):
        side, model = (
            "none",
            model.double(),
        )  # else the rounding of float32 moves a key to the next number of 8 or 4 bits
    given["attention_mask"] = real(side)
    if cache == "quantized":
        given["cache_config"] = {"backend": "fp8"}
    if cache == "quanto":
        given["cache_config"] = {"backend": "quanto", "nbits": 4, "q_group_size": 16, "residual_length": 4}
    forced = getattr(model, "attnsel_forced", None)
    if forced is not None:
        start = 0 if model.config.is_encoder_decoder else LENGTH
        given["prefix_allowed_tokens_fn"] = lambda row, so_far: [
            int(forced[row, len(so_far) - start + start])
        ]
    call = {
        "cache_implementation": {"dynamic": None, "quanto": "quantized"}.get(cache, cache),
        "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True,
        "output_logits": True, "disable_compile": not compiles,
    }  # fmt: skip
    if compiles:
        from transformers import CompileConfig

        torch._dynamo.reset()
        call["compile_config"] = CompileConfig(backend="eager", fullgraph=False)
        call["compile_config"]._compile_all_devices = True
    model._previous_max_cache_length = -1
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():  # nothing is copied beside the computation, all else is as there
            patch.setattr(torch, "Stream", Stream)
            patch.setattr(torch.cuda, "default_stream", Stream)
        made = model.generate(tokens(), **given, **call)
    return {"tokens": made.sequences, "logits": torch.stack(made.logits)}


def chunked(model: Any, static: bool) -> dict[str, torch.Tensor]:
    """Logits of several steps that share a cache: twice across the window, then one token at a time."""
    from transformers import DynamicCache, StaticCache

    config = model.config.get_text_config(decoder=True)
    past = StaticCache(config=config, max_cache_len=LENGTH + 5) if static else DynamicCache(config=config)
    logits, start = [], 0
    for end in (3, 5, 6, 7):
        with torch.no_grad():
            one = model(
                input_ids=tokens()[:, start:end],
                attention_mask=torch.ones(BATCH, end, dtype=torch.long),
                past_key_values=past,
                use_cache=True,
            )
        logits.append(one.logits)
        start = end
    return {"out": torch.cat(logits, 1)}


def cases_of(model: Any) -> Iterator[tuple[str, Any]]:
    for side in ("none", "left", "right") if model.main_input_name == "input_ids" else ("none",):
        yield f"forward {side}", lambda m, side=side: forward(m, side)
    yield "training", trained
    yield "compiled", compiled
    if not model.can_generate() or model.main_input_name != "input_ids":
        return
    for cache in ("dynamic", "static", "offloaded", "offloaded_static", "quantized", "quanto"):
        yield f"generate {cache}", lambda m, cache=cache: generated(m, cache)
    yield "generate static none", lambda m: generated(m, "static", "none")
    yield "generate static compiled", lambda m: generated(m, "static", compiles=True)
    if not model.config.is_encoder_decoder:
        yield "chunks dynamic", lambda m: chunked(m, False)
        yield "chunks static", lambda m: chunked(m, True)


def build(model: Any, config: Any, implementation: Any) -> Any:
    import copy

    torch.manual_seed(0)
    config = copy.deepcopy(config)
    made = model._from_config(config, attn_implementation=implementation)
    for name, parameter in made.named_parameters():
        # Weights large enough that attention decides something; sinks and biases are no zeros.
        deep = parameter.dim() > 1
        torch.nn.init.normal_(parameter, std=0.12 if deep else 0.5)
        if not deep and name.endswith("norm.weight"):
            with torch.no_grad():
                parameter.add_(1.0)
    return made.eval()


def compared(eager: Any, ours: Any, run: Any, case: str, dtype: torch.dtype) -> Said:
    from attnsel.errors import InvalidInput, NoBackendError

    eager.to(dtype), ours.to(dtype)
    torch.manual_seed(0)  # some draw what they mask
    eager.attnsel_forced = ours.attnsel_forced = None
    try:
        wanted = run(eager)
    except Exception as error:
        return Said(case, "eager", f"{type(error).__name__}: {error}"[:200])
    if "tokens" in wanted:
        ours.attnsel_forced = wanted["tokens"]
    torch.manual_seed(0)
    try:
        found = run(ours)
    except (InvalidInput, NoBackendError) as error:
        return Said(case, "refused", " ".join(str(error).split())[:200])
    except Exception as error:
        return Said(case, "error", f"{type(error).__name__}: {error}"[:300])
    for name, want in wanted.items():
        if name not in found or found[name].shape != want.shape:
            return Said(case, "differs", f"{name} is missing or of another shape")
        if name == "tokens":
            continue
        if not want.isfinite().all():
            if name in ("out", "logits"):
                return Said(case, "eager", "gives NaN or infinity")
            continue
        off = (found[name].double() - want.double()).abs().max().item() if want.numel() else 0.0
        size = want.abs().max().item() if want.numel() else 0.0
        if not off <= 2e-3 * max(size, 1e-3):
            return Said(case, "differs", f"{name} by {off:.3g} of {size:.3g}")
    return Said(case, "equal")


def family(kind: str, only: str = "", without: str = "-") -> Iterator[Said]:
    """Every case of one family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from attnsel.integrations.transformers import register

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    register()
    model, why = families()[kind], ""
    said = said_of().get(kind, {}).items()
    implementation = dict(said).get("implementation", "attnsel")
    fields = {name.removeprefix("config."): value for name, value in said if name.startswith("config.")}
    for way in range(len(WAYS)):
        try:
            config = made_small(CONFIG_MAPPING[kind](), way, fields)
            if sum(p.numel() for p in _on_meta(model, config)) > 60e6:
                raise ValueError("too large")
            eager, ours = build(model, config, "eager"), build(model, config, implementation)
            forward(eager, "none")
            break
        except Exception as error:
            why = why or f"{type(error).__name__}: {error}"[:300]
    else:
        yield Said("", "not made", " ".join(why.split()))
        return
    for case, run in cases_of(eager):
        if only in case and without not in case:
            wide = case == dict(said).get("double")
            yield compared(eager, ours, run, case, torch.float64 if wide else torch.float32)


def _on_meta(model: Any, config: Any) -> list[torch.Tensor]:
    import copy

    with torch.device("meta"):
        return list(model._from_config(copy.deepcopy(config)).parameters())


# ---- all of them -----------------------------------------------------------------------------------------


def _child(kind: str, only: str, without: str, pipe: Any) -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
        with contextlib.redirect_stdout(io.StringIO()):
            for said in family(kind, only, without):
                pipe.send(said)
    pipe.send(None)
    pipe.close()
    os._exit(0)


def answers(kind: str, only: str, without: str, seconds: float) -> list[Said]:
    """The cases of one family, in a process of its own."""
    ours, theirs = multiprocessing.Pipe(False)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(kind, only, without, theirs))
    child.start()
    theirs.close()
    found: list[Said] = []
    try:
        while ours.poll(seconds):
            said = ours.recv()
            if said is None:
                return found
            found.append(said)
        found.append(Said("", "time", f"more than {seconds:.0f} s for a case"))
    except EOFError:
        child.join()
        found.append(Said("", "error", f"the process ended with {child.exitcode}"))
    finally:
        child.kill()
        child.join()
    return found


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("kinds", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument(
        "--not", dest="without", default="-", help="cases whose name has this in it are left out"
    )
    parser.add_argument("--csv", help="write family, class, case, word and more here")
    parser.add_argument("--seconds", type=float, default=240, help="bound of one case")
    chosen = parser.parse_args()
    every = families()
    unknown = [kind for kind in chosen.kinds if kind not in every]
    if unknown:
        parser.error(f"no family with _supports_attention_backend: {', '.join(unknown)}")
    tally: Counter[str] = Counter()
    rows = []
    for kind in chosen.kinds or every:
        for said in answers(kind, chosen.only, chosen.without, chosen.seconds):
            tally[said.word] += 1
            rows.append((kind, every[kind].__name__, *said))
            if said.word not in ("equal", "eager"):
                print(kind, *said, sep="\t", flush=True)
    if chosen.csv:
        with open(chosen.csv, "w", newline="") as file:
            csv.writer(file).writerows([("family", "class", "case", "word", "more"), *rows])
    print(f"{len(chosen.kinds or every)} families: {dict(tally)}")
    return 1 if tally.keys() & {"differs", "error", "time"} else 0


if __name__ == "__main__":
    sys.exit(main())
