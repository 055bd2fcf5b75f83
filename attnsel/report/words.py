"""Where and what was asked, in the words people use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.rules.figures import family_of
from attnsel.verdicts.requirements import size

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams
    from attnsel.rules.figures import Quoted
    from attnsel.selection.view import SelectionView


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


def figure_words(quoted: Quoted) -> str:
    """What was published of a choice, at the shape that was measured: ``on an H200, d128, 8k causal backward:
    flash_attn.4 648, cudnn 541 TFLOP/s``."""
    shape = quoted.measurement.shape
    card = shape.gpu or f"sm{shape.arch}"
    where = f"on {an(card)}" if quoted.same_card else f"on {an(card)} (sm{shape.arch} too)"
    heads = f"d{shape.head_dim_qk}"
    if shape.head_dim_v != shape.head_dim_qk:
        heads += f"/{shape.head_dim_v}"
    length = short_length(shape.seqlen_q)
    if shape.seqlen_kv != shape.seqlen_q:
        length += f" over {short_length(shape.seqlen_kv)}"
    mask = {"no_mask": "unmasked", "": ""}.get(shape.mask, shape.mask)
    window = f"window {shape.window}" if shape.window else ""
    direction = {"fwd": "forward", "bwd": "backward"}.get(shape.direction, "forward and backward")
    kind = " ".join(filter(None, (length, mask, "deterministic" * shape.deterministic, direction)))
    return f"{', '.join(filter(None, (where, heads, kind, window)))}: {measured_words(quoted)}"


def clause_words(quoted: Quoted, name: str) -> str:
    """The same in a clause, of the choice and the fastest other: ``648, cudnn 541 TFLOP/s (H100 d128 8k fwd)``."""
    shape = quoted.measurement.shape
    own = next((figure for figure in quoted.figures if figure.kernel == name), quoted.figures[0])
    other = next(figure for figure in quoted.figures if family_of(figure.kernel) != family_of(own.kernel))
    both = measured_words(quoted._replace(figures=(own, other))).removeprefix(f"{name} ")
    where = shape.gpu or f"sm{shape.arch}"
    return f"{both} ({where} d{shape.head_dim_qk} {short_length(shape.seqlen_q)} {shape.direction})"


def measured_words(quoted: Quoted) -> str:
    """The kernels, the fastest first, in one unit."""
    figures = quoted.figures
    if all(figure.tflops for figure in figures):
        told = [f"{figure.kernel} {figure.tflops:.0f}" for figure in figures]
        return f"{', '.join(told)} TFLOP/s"
    return f"{', '.join(f'{figure.kernel} {figure.value:g}' for figure in figures)} {figures[0].unit}"


def an(word: str) -> str:
    """A card with its article, as its name is said: an H100, a GB200, an RTX 4090."""
    said_with_vowel = word[:1] in "AEFHILMNORSX" and (len(word) < 2 or not word[1].islower())
    return f"{'an' if said_with_vowel else 'a'} {word}"


def short_length(length: int) -> str:
    """8192 as 8k; 985 as it is."""
    return f"{length // 1024}k" if length and not length % 1024 else str(length)
