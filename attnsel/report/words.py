"""Where and what was asked, in the words people use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnsel.backends.registry import CANDIDATES
from attnsel.verdicts.requirements import size

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams
    from attnsel.rules.figures import Measurement
    from attnsel.selection.view import SelectionView
    from attnsel.verdicts.measured import Row


def on_gpu(env: Environment) -> bool:
    return env.device.type in ("cuda", "rocm")


def environment_words(env: Environment) -> list[str]:
    """Device and versions; an asterisk marks what nobody stated."""
    device = env.device
    first = device.name or device.type
    arch = f"sm{device.arch}"
    if device.arch is not None and device.name != arch:
        first = f"{device.name or 'GPU'} ({arch})"
    words = [first]
    names = {"cudnn": "cuDNN", "cuda": "CUDA", "cudnn_frontend": "frontend"}
    shown = (
        ("cudnn", "cudnn_frontend", "torch", "triton", "cuda")
        if device.type == "cuda"
        else ("torch", "triton")
    )
    for component in shown:
        version = getattr(env, component)
        star = "*" if component in env.assumed else ""
        words.append(f"{names.get(component, component)} {version or 'none'}{star}")
    for component in ("flash_attn", "flash_attn_3", "flash_attn_4"):
        version = getattr(env, component)
        if version is not None:
            words.append(f"{component.replace('_', '-')} {version}")
    if env.transformer_engine is not None:
        words.append(f"TransformerEngine {env.transformer_engine}")
    words += [f"no {library}" for library in env.missing]
    if env.torch_flash != "FA2":
        words.append(f"torch's flash is {env.torch_flash}")
    if env.assumed:
        words.append("* assumed")
    return words


def params_words(p: AttentionParams) -> list[str]:
    """The question in the order people say it; only what differs from plain attention is named."""
    words = [p.dtype, p.qkv_layout if p.layout.group != "hd_hd_hd" or p.layout.paged else p.qkv_format]
    words += [
        f"b{p.batch_size}",
        f"h{p.num_heads}/{p.num_gqa_groups}",
        f"s{p.max_seqlen_q}×{p.max_seqlen_kv}",
        f"d{p.head_dim_qk}/{p.head_dim_v}",
        p.attn_mask_type,
    ]
    if p.windowed:
        words.append(f"window {p.window_size[0]},{p.window_size[1]}")
    if p.has_bias:
        grad = " with grad" if p.core_attention_bias_requires_grad else ""
        words.append(f"{p.core_attention_bias_type} {p.core_attention_bias_shape}{grad}")
    elif p.core_attention_bias_type == "alibi":
        words.append("alibi")
    if p.softmax_type != "vanilla":
        words.append(f"{p.softmax_type} sink")
    if p.softcap:
        words.append(f"softcap {p.softcap:g}")
    if p.attention_dropout:
        words.append(f"dropout {p.attention_dropout:g}")
    if p.fp8_attention:
        words.append(f"FP8 {getattr(p.recipe, 'kind', 'without recipe')}")
    for flag in ("deterministic", "return_lse", "return_max_logit", "pad_between_seqs", "cuda_graph"):
        if getattr(p, flag):
            words.append(flag.removeprefix("return_"))
    if p.kv_cache != "none":
        words.append(f"{p.kv_cache} KV cache" + (f" of {p.page_size}-token pages" if p.page_size else ""))
    if p.context_parallel:
        words.append(f"cp{p.cp_size} {p.cp_comm_type}")
    words.append("training" if p.is_training else "inference")
    return words


def tensor_words(p: AttentionParams) -> list[str]:
    """Where tensors lie that are only described: strides of those with gaps, unaligned addresses."""
    words = []
    for name in ("q", "k", "v", "mask"):
        spec = getattr(p.tensors, name)
        if spec is not None and not spec.contiguous:
            words.append(f"{name} strides {','.join(map(str, spec.stride))}")
        if spec is not None and spec.alignment < 16:
            words.append(f"{name} on {spec.alignment} bytes")
    return words


def policy_words(selection: SelectionView) -> list[str]:
    policy = selection.policy
    return [
        f"{name}={size(value) if name == 'memory_limit' else value}"
        for name in type(policy).model_fields
        if (value := getattr(policy, name)) != type(policy).model_fields[name].default
    ]


def figure_words(one: Measurement) -> str:
    """What was published, at the shape that was measured: ``H200, bf16, d128, causal, backward, 8k:
    flash_attn.4 648, cudnn 541 TFLOP/s``; with the architecture where the card is another than asked."""
    shape = one.shape
    length = short_length(int(shape["seqlen_q"]))
    if shape["seqlen_kv"] != shape["seqlen_q"]:
        length += f" over {short_length(int(shape['seqlen_kv']))}"
    other = "" if one.same_card or not shape["gpu"] else f" (sm{shape['arch']} too)"
    return f"{shape_words(shape, other)}, {length}: {measured_words(one.rows)}"


def figure_record(one: Measurement) -> dict[str, Any]:
    """The same as JSON."""
    kernels = [
        {"name": row["kernel"], "value": float(row["value"]), "unit": row["unit"]}
        | {"tflops": float(row["tflops"]) if row["tflops"] else None, "cudnn": row["cudnn"] or None}
        for row in one.rows
    ]
    told = {"text": figure_words(one), "direction": one.shape["direction"], "same_card": one.same_card}
    where = {"pair": one.name, **{name: one.source[name] for name in ("title", "date", "source")}}
    return {**told, "kernels": kernels, **where}


def shape_words(shape: Row, card: str = "") -> str:
    """What was measured but for its lengths."""
    heads = f"d{shape['head_dim_qk']}" if shape["head_dim_qk"] else ""
    heads += f"/{shape['head_dim_v']}" if shape["head_dim_v"] != shape["head_dim_qk"] else ""
    ways = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
    words = (
        f"{shape['gpu'] or 'sm' + shape['arch']}{card}",
        shape["dtype"],
        heads,
        shape["mask"].replace("_", " "),
        f"window {shape['window']}" if shape["window"] else "",
        ("deterministic " if shape["deterministic"] else "") + ways[shape["direction"]],
    )
    return ", ".join(filter(None, words))


def clause_words(one: Measurement, name: str) -> str:
    """In a clause, of the choice and the fastest other: ``648, cudnn 541 TFLOP/s (H100 d128 8k fwd)``."""
    if one.here:
        families, family = {row["kernel"]: row["kernel"] for row in one.rows}, name
    else:
        families = {row["kernel"]: CANDIDATES[row["kernel"]].kernel_family for row in one.rows}
        family = CANDIDATES[name].kernel_family
    own = next((row for row in one.rows if families[row["kernel"]] == family), None)
    other = next((row for row in one.rows if families[row["kernel"]] != family), None)
    if own is None or other is None:  # of what was measured here it may be the only one, or not among them
        return ""
    where = "here," if one.here else own["gpu"] or f"sm{own['arch']}"
    both = measured_words((own, other)).removeprefix(f"{name} ")
    return f"{both} ({where} d{own['head_dim_qk']} {short_length(int(own['seqlen_q']))} {own['direction']})"


def measured_words(rows: Sequence[Row]) -> str:
    """The kernels in one unit."""
    if all(row["tflops"] for row in rows):
        return ", ".join(f"{row['kernel']} {float(row['tflops']):.0f}" for row in rows) + " TFLOP/s"
    return ", ".join(f"{row['kernel']} {float(row['value']):g}" for row in rows) + f" {rows[0]['unit']}"


def short_length(length: int) -> str:
    """8192 as 8k; 985 as it is."""
    return f"{length // 1024}k" if length and not length % 1024 else str(length)
