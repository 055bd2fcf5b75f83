"""``attnsel replay``: a call that fell back, was refused or came out wrong, as a short program."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from attnsel.cli.output import FOUND, complain
from attnsel.cli.question import read_object
from attnsel.errors import InvalidInput, short
from attnsel.pages.commands import flag_name
from attnsel.params import default_softmax_scale
from attnsel.params.layout import FORMATS
from attnsel.policy import Policy
from attnsel.runtime.replay_file import ReplayFile, checked


def replay(
    file: Annotated[Path, Parameter(name="FILE", help="a file of ATTNSEL_REPLAY_DIR")],
    /,
    *,
    backend: Annotated[
        str | None, Parameter(help="call this candidate instead of the one the file is about")
    ] = None,
) -> int:
    """Print a short program that makes a failed call again, for an upstream issue.

    With ATTNSEL_REPLAY_DIR=FOLDER a kernel that refuses when it runs, or fails its self-check, and a call
    that nothing can run, leave a file there: parameters, shapes, strides, offsets, lengths, the generator's
    state, settings and versions; no tensor's numbers. The program builds such tensors from a seed and makes
    the call, and its backward if it had one, with the library itself; where the numbers were wrong, it prints
    how far they are from those in float64. A call that the library's function has no argument for, and one by
    attnsel's own kernels, is made with attnsel.

        attnsel replay FILE > issue.py
        attnsel replay FILE --backend sdpa.math

    Which kernels can run the call is a question for attnsel explain: the command stands on standard error.

    Exit code: 0 the program is printed; 2 bad input.
    """
    held = checked(str(file), read_object(file, "FILE"))
    print(program(held, Policy(backend=backend).backend), end="")
    complain(f"which kernels can run it: {_question(file, held)}")
    return FOUND


def _question(path: Path, file: ReplayFile) -> str:
    """The command that asks the same of the engine, under the same policy."""
    words = ["attnsel", "explain", "--params", str(path), "--env", str(path)]
    policy = file.settings.policy.model_dump(mode="json", exclude_defaults=True)
    policy |= {name: file.static[name] for name in ("backend", "adapt") if file.static.get(name)}
    for field, value in policy.items():
        words.append(flag_name(field))
        if value is not True:
            words.append(",".join(value) if isinstance(value, list) else str(value))
    return shlex.join(words)


# ---- the program -------------------------------------------------------------------------------------

_BACKENDS = {
    "sdpa.flash": "FLASH_ATTENTION",
    "sdpa.efficient": "EFFICIENT_ATTENTION",
    "sdpa.cudnn": "CUDNN_ATTENTION",
    "sdpa.math": "MATH",
    "cudnn": "CUDNN_ATTENTION",
}
_OF_SDPA = ["import torch.nn.functional as F", "from torch.nn.attention import SDPBackend, sdpa_kernel"]
_FUNCTIONS = {
    "flash_attn.2": "flash_attn",
    "flash_attn.3": "flash_attn_interface",
    "flash_attn.4": "flash_attn.cute",
}


class _Form(NamedTuple):
    """One way to make the call. ``call`` sets ``out``, and ``right`` the same in float64, of q, k and v:
    [b, h, s, d] or packed [t, h, d]; attnsel's as they lie in memory."""

    imports: list[str]
    call: list[str]
    right: list[str]
    note: str = ""
    own: bool = False  # by attnsel


def program(file: ReplayFile, backend: str | None = None) -> str:
    """The whole text. Raises InvalidInput where the file lacks what the call needs."""
    name = backend or file.happened.candidate
    form = _form(name, file)
    dropout = bool(file.static.get("attention_dropout"))
    # Dropout: each kernel drops other entries.
    compared = file.happened.kind == "wrong numbers" and bool(form.right) and not dropout
    tensors = _tensors(file)
    permuted = FORMATS[file.static["qkv_format"]].to_contract
    if permuted is not None and not form.own:
        tensors.append(f"q, k, v = (t.permute{permuted} for t in (q, k, v))  # [b, h, s, d]")
    if dropout:
        tensors += _generator(file)
    wanted = [letter for letter in "qkv" if (record := file.named(letter)) and record.requires_grad]
    defines = compared and not form.own
    masked = any("added(" in line for line in form.call)
    imports = [*_OF_SDPA, *form.imports] if defines and name in _FUNCTIONS else form.imports
    parts = [
        [*_title(file, name, form.note), "import torch", *imports],
        tensors,
        _added(file) if defines or masked else [],
        _exact(file) if defines else [],
        [*form.call, *(form.right if compared else [])],
        _results(wanted, compared),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _title(file: ReplayFile, name: str, note: str) -> list[str]:
    happened, env = file.happened, file.environment
    recorded = name == happened.candidate
    lines = [
        f"{name or 'every candidate'}: {happened.kind if recorded else 'the same call'}",
        f"on {env.device.name or env.device.type}, torch {env.torch}, cuDNN {env.cudnn}, CUDA {env.cuda}",
        short(happened.message, str, 300) if recorded else "",
        note,
    ]
    wrapped = "\n".join(line for text in lines for line in textwrap.wrap(text, 100))
    return [f"# {line}" for line in wrapped.splitlines()]


def _tensors(file: ReplayFile) -> list[str]:
    """Each tensor of the call under its name.

    What was one tensor under two names (lengths of queries and of keys) is one again: kernels take that for
    equal lengths.
    """
    device = "cuda" if any(t.device == "cuda" for t in file.tensors) else "cpu"
    lines = [
        f'device = "{device}"  # strides, offsets and shared memory as they were; random numbers',
        "generator = torch.Generator().manual_seed(0)",
    ]
    made: dict[Any, str] = {}
    for t in file.tensors:
        name, dtype = t.name.replace(".", "_"), f"torch.{t.dtype}"
        place = (t.storage, t.shape, t.stride, t.storage_offset)
        if name == "dropout_seed":  # drawn from the generator
            continue
        if place in made and name not in ("q", "k", "v"):
            lines.append(f"{name} = {made[place]}")
        elif t.dtype.startswith(("float", "bfloat")):
            if t.storage not in made:
                count = max(view.span for view in file.tensors if view.storage == t.storage)
                made[t.storage] = f"memory{t.storage}"
                drawn = f"torch.randn({count}, generator=generator)"
                lines.append(f"{made[t.storage]} = {drawn}.to(device, {dtype})")
            view = f"{made[t.storage]}.as_strided({t.shape}, {t.stride}, {t.storage_offset})"
            view += ".abs()" if name == "alibi_slopes" else ""
            grad = name in ("q", "k", "v") and t.requires_grad
            lines.append(f"{name} = {view}.requires_grad_()" if grad else f"{name} = {view}")
        elif t.values is not None:
            values = f"torch.tensor({list(t.values)}, dtype={dtype}, device=device)"
            lines.append(f"{name} = {values}" + ("" if len(t.shape) == 1 else f".reshape({t.shape})"))
        elif t.lengths is not None and t.shape:
            hidden = f"torch.arange({t.shape[-1]}) >= torch.tensor({list(t.lengths)})[:, None]"
            lines.append(f"{name} = ({hidden})[:, None, None].to(device)")
        elif t.dtype == "bool":
            drawn = f"torch.rand({t.shape}, generator=generator) < {t.hidden or 0.0}"
            lines += [f"{name} = ({drawn}).to(device)", f"{name}[..., :1] = False  # no row without a key"]
        else:
            said = "were not kept, and the call is another without them"
            raise InvalidInput(f"{name}.values", None, said)
        made.setdefault(place, name)
    return lines


def _generator(file: ReplayFile) -> list[str]:
    """The generator that dropout draws from."""
    seed, state = file.generator.initial_seed, file.generator.state
    if not state:
        return [f"torch.manual_seed({seed})"]
    return [f"state = torch.tensor({list(state)}, dtype=torch.uint8)", "torch.cuda.set_rng_state(state)"]


def _results(wanted: list[str], compared: bool) -> list[str]:
    """Versions, gradients where the call had any, and how far everything is from the same in float64."""
    lines = ["print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version())"]
    found, rights, leaves = "[out]", "[right]", f"[{', '.join(wanted)}]"
    if wanted:
        lines.append("dout = torch.randn(out.shape, generator=generator).to(out)")
        lines.append(f"grads = torch.autograd.grad(out, {leaves}, dout)")
        found = "[out, *grads]"
        rights = f"[right, *torch.autograd.grad(right, {leaves}, dout.double())]"
    if compared:
        names = ["out", *(f"d{letter}" for letter in wanted)]
        lines += [
            f"rights = {rights}",
            f"for name, found, right in zip({names}, {found}, rights):",
            "    error, largest = (found - right).abs().max(), right.abs().max()",
            '    print(f"{name} is off by {error:.2g}; its largest entry is {largest:.2g}")',
        ]
    return lines


# ---- the call, by who makes it -----------------------------------------------------------------------


def _form(name: str, file: ReplayFile) -> _Form:
    """By the library's own function; by attnsel where there is none, or it lacks an argument for the call."""
    p = file.params
    flash, packed = name in _FUNCTIONS, p.qkv_format == "thd"
    alibi, slopes = p.core_attention_bias_type == "alibi", file.named("alibi_slopes")
    first_key = p.window_size != (-1, -1) and not p.bottom_right_diagonal and not p.same_lengths
    if not flash and name not in _BACKENDS:
        return _by_attnsel(name, file)
    lacking = {
        "an attention sink": p.softmax_type != "vanilla",
        "pages": p.kv_cache != "none",
        "FP8": p.fp8_attention,
        "gaps between packed sequences": p.pad_between_seqs,
        "padding of dense tensors": "padding" in p.attn_mask_type and not packed,
        "packed sequences": packed and not flash,
        "softcap": bool(p.softcap) and not flash,
        "a mask or a bias": flash and (p.has_bias or p.attn_mask_type == "arbitrary"),
        "a diagonal that begins at the first key": flash and first_key,
        "ALiBi": flash and alibi and name != "flash_attn.2",
        "ALiBi's slopes of each packed sequence": packed and slopes is not None and len(slopes.shape) == 2,
        "ALiBi between powers of two": alibi and slopes is None and p.num_heads.bit_count() != 1,
        "dropout": flash and name != "flash_attn.2" and bool(file.static.get("attention_dropout")),
    }
    for what, asked in lacking.items():
        if asked:
            note = f"the library's own function has no argument for {what}, so attnsel makes the call"
            return _by_attnsel(name, file)._replace(note=note)
    return _by_flash(name, file) if flash else _by_sdpa(name, file)


_ARGUMENTS: dict[str, Any] = {  # of attnsel.attention, and their defaults
    "qkv_format": None,
    "attn_mask_type": "no_mask",
    "window_size": None,
    "bottom_right_diagonal": None,
    "softmax_scale": None,
    "softcap": 0.0,
    "attention_dropout": 0.0,
    "bias_type": "no_bias",
    "softmax_type": "vanilla",
    "is_training": False,
    "deterministic": False,
    "adapt": None,
}


def _by_attnsel(name: str, file: ReplayFile) -> _Form:
    given = {field: file.static.get(field, default) for field, default in _ARGUMENTS.items()}
    given = {field: value for field, value in given.items() if value != _ARGUMENTS[field]}
    given |= {"max_seqlen_q": file.max_seqlen_q, "max_seqlen_kv": file.max_seqlen_kv}
    words = {field: repr(value) for field, value in given.items() if value is not None}
    if "bias_type" in words:
        words["core_attention_bias_type"] = words.pop("bias_type")
    for t in file.tensors[3:]:
        if t.name == "attention_mask.q":
            words["attention_mask"] = "(attention_mask_q, attention_mask_kv)"
        elif t.name not in ("attention_mask.kv", "dropout_seed"):
            words[t.name] = t.name
    call = ["call = dict(", *(f"    {field}={value}," for field, value in words.items()), ")"]
    backend = f"backend={name!r}, " if name else ""
    call.append(f"out = attnsel.attention(q, k, v, {backend}**call)")
    right = ['right = attnsel.attention(q.double(), k.double(), v.double(), backend="tiled", **call)']
    return _Form(["", "import attnsel"], call, right, own=True)


def _by_sdpa(name: str, file: ReplayFile) -> _Form:
    p, dropout = file.params, file.static.get("attention_dropout")
    others = p.has_bias or p.core_attention_bias_type == "alibi" or p.attn_mask_type == "arbitrary"
    corner = p.same_lengths or not p.bottom_right_diagonal
    call, given = [], [f"scale={_scale(file)!r}"]
    if p.window_size == (-1, 0) and corner and not others:
        given.append("is_causal=True")
    elif _added(file):
        mask = "added(q.shape[2], k.shape[2]).to(q.dtype)"
        call.append(f"mask = {mask}.expand(q.shape[0], q.shape[1], -1, -1)")
        given.append("attn_mask=mask")
    if dropout:
        given.append(f"dropout_p={dropout!r}")
    if p.gqa:
        given.append("enable_gqa=True")
    call += [
        f"with sdpa_kernel(SDPBackend.{_BACKENDS[name]}):",
        f"    out = F.scaled_dot_product_attention(q, k, v, {', '.join(given)})",
    ]
    frontend = "cuDNN's graph was made by nvidia-cudnn-frontend; this asks PyTorch's own cuDNN kernel instead"
    return _Form(_OF_SDPA, call, ["right = exact(q, k, v)"], frontend if name == "cudnn" else "")


def _by_flash(name: str, file: ReplayFile) -> _Form:
    p, dropout = file.params, file.static.get("attention_dropout")
    packed = p.qkv_format == "thd"
    function = "flash_attn_varlen_func" if packed else "flash_attn_func"
    optional = {
        "window_size": p.windowed and p.window_size,
        "softcap": p.softcap,
        "dropout_p": dropout,
        "deterministic": p.deterministic,
    }
    given = [f"causal={p.window_size[1] == 0}", f"softmax_scale={_scale(file)!r}"]
    given += [f"{argument}={value!r}" for argument, value in optional.items() if value]
    if p.core_attention_bias_type == "alibi":
        given.append(f"alibi_slopes={_slopes(file)}")
    rows, back = "*(t.transpose(1, 2) for t in (q, k, v))", ["out = out.transpose(1, 2)"]
    longest, right = [], ["right = exact(q, k, v)"]
    if packed:
        rows, back = "q, k, v, cu_seqlens_q, cu_seqlens_kv, *longest", []
        longest = ["longest = [int(cu.diff().max()) for cu in (cu_seqlens_q, cu_seqlens_kv)]"]
        right = [
            "parts, starts_q, starts_k = [], cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()",
            "for i in range(len(starts_q) - 1):",
            "    rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])",
            "    part = exact(*(t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys])))",
            "    parts.append(part[0].transpose(0, 1))",
            "right = torch.cat(parts)",
            "out = out[: len(right)]  # rows of no sequence may follow",
        ]
    call = [
        *longest,
        f"out = {function}(",
        f"    {rows},",
        f"    {', '.join(given)},",
        ")",
        "out = out[0] if isinstance(out, tuple) else out",
        *back,
    ]
    return _Form([f"from {_FUNCTIONS[name]} import {function}"], call, [] if p.softcap else right)


def _scale(file: ReplayFile) -> float:
    given = file.static.get("softmax_scale")
    return float(given) if isinstance(given, (int, float)) else default_softmax_scale(file.params.head_dim_qk)


def _slopes(file: ReplayFile) -> str:
    """ALiBi's slopes, [h] or [b, h]; where the caller gave none, those of a power of two of heads."""
    if file.named("alibi_slopes") is not None:
        return "alibi_slopes"
    heads = file.params.num_heads
    return f"(2.0 ** (torch.arange(1, {heads} + 1, device=device) * (-8.0 / {heads})))"


# ---- what is right: PyTorch's own in float64, with what the call adds to its scores -------------------


def _added(file: ReplayFile) -> list[str]:
    """The function ``added``: window, mask, bias and slopes, as what is added to scores [..., m, n]."""
    p = file.params
    left, right = p.window_size
    alibi = p.core_attention_bias_type == "alibi"
    body = []
    if left >= 0:
        body.append(f"scores = scores.masked_fill(away < {-left}, -torch.inf)")
    if right >= 0:
        body.append(f"scores = scores.masked_fill(away > {right}, -torch.inf)")
    if alibi:
        body.append(f"scores = scores - {_slopes(file)}.double()[..., None, None] * away.abs()")
    if body:
        shift = " - (n - m)" if p.bottom_right_diagonal else ""
        columns = "torch.arange(n, device=device) - torch.arange(m, device=device)[:, None]"
        body.insert(0, f"away = {columns}{shift}")
    if p.has_bias:
        scale = f" * {_scale(file)!r}" if p.core_attention_bias_type == "pre_scale_bias" else ""
        body.append(f"scores = scores + core_attention_bias.double(){scale}")
    if p.attn_mask_type == "arbitrary":
        body.append("scores = scores.masked_fill(attention_mask, -torch.inf)")
    if not body:
        return []
    zeros = "scores = torch.zeros(m, n, dtype=torch.float64, device=device)"
    return ["def added(m, n):", *(f"    {line}" for line in (zeros, *body, "return scores"))]


def _exact(file: ReplayFile) -> list[str]:
    """The function ``exact`` of q, k and v, [b, h, s, d]."""
    given = [f"scale={_scale(file)!r}"]
    if _added(file):
        given.append("attn_mask=added(q.shape[2], k.shape[2])")
    if file.params.gqa:
        given.append("enable_gqa=True")
    return [
        "def exact(q, k, v):",
        "    with sdpa_kernel(SDPBackend.MATH):",
        "        q, k, v = q.double(), k.double(), v.double()",
        f"        return F.scaled_dot_product_attention(q, k, v, {', '.join(given)})",
    ]
