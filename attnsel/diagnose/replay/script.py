"""A call of a file as a program of its own, for an upstream issue: torch, and the library in question.

It builds the same tensors from the same seed, makes the call that the library documents, compares with
attention by its definition (the source of functions of this module), and prints the versions.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnsel.backends.registry import CANDIDATES
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams, default_softmax_scale
from attnsel.params.layout import FORMATS
from attnsel.runtime.reference import UNITS
from attnsel.runtime.replay_file import ReplayFile, TensorRecord

_BACKENDS = {
    "sdpa.flash": "FLASH_ATTENTION",
    "sdpa.efficient": "EFFICIENT_ATTENTION",
    "sdpa.cudnn": "CUDNN_ATTENTION",
    "sdpa.math": "MATH",
    "cudnn": "CUDNN_ATTENTION",
}
_DTYPES = {"fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}


class _Part(NamedTuple):
    """What differs from library to library: imports, the call (sets ``out`` from q, k, v as ``form`` lies),
    and the words that stand above it."""

    imports: str
    call: str
    note: str = ""


def program(file: ReplayFile, backend: str | None, seed: int) -> str:
    """The whole text. Raises InvalidInput where a program without attnsel cannot make this call."""
    name = backend or file.happened.candidate
    p = file.params
    part = _part(name, p, file)
    unit = next(unit for dtype, unit in UNITS.items() if str(dtype) == f"torch.{_DTYPES.get(p.dtype)}")
    functions = (exact_attention, moved, worst_row)
    sections = [
        _HEAD.format(title=_comment(_title(file, name, part.note)), imports=part.imports),
        *(inspect.getsource(function).rstrip() for function in functions),
        _tensors(file, seed),
        _extras(file),
        "# ---- the call ----\n" + part.call.rstrip(),
        _TAIL.format(unit=repr(unit), **_definition(file)),
    ]
    return "\n\n\n".join(sections) + "\n"


def _title(file: ReplayFile, name: str, note: str) -> str:
    happened, env = file.happened, file.environment
    lines = [
        f"{name}: {_KIND[happened.kind] if name == happened.candidate else 'the same call'}",
        f"on {env.device.name or env.device.type}, torch {env.torch}, cuDNN {env.cudnn}, CUDA {env.cuda}",
        happened.message if name == happened.candidate else "",
        note,
    ]
    return "\n".join(line for text in lines for line in textwrap.wrap(text, 100))


_KIND = {
    "refused": "refuses this call",
    "wrong numbers": "gives wrong numbers",
    "nothing runs": "cannot run it",
}


def _comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in text.splitlines())


_HEAD = """{title}
from __future__ import annotations

import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
{imports}"""

_TAIL = """# ---- beside the definition, in float64 ----
def as_heads(t):
    return t if t is None else t.detach().transpose(0, 1) if PACKED else t.detach()


torch.manual_seed(7)
dout = torch.randn(out.shape).to(out) if out.requires_grad else None
grads = {{}}
if dout is not None:
    wanted = {{name: t for name, t in (("dq", q), ("dk", k), ("dv", v)) if t.requires_grad}}
    grads = dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), dout)))
UNIT = {unit}
print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())
print("on", torch.cuda.get_device_name() if DEVICE == "cuda" else platform.machine())
wrong = []
for number, (rows, keys) in enumerate(SEQUENCES):
    def mine(t, place):
        t = as_heads(t)
        return t if t is None else t[:, place] if PACKED else t[number]

    def pairs(t):
        return None if t is None else t.expand(len(SEQUENCES), *t.shape[1:])[number]

    settings = dict(
        scale={scale}, left={left}, right={right}, bottom_right={bottom_right}, softcap={softcap},
        bias=pairs(bias), slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[number],
        hidden=pairs(hidden),
    )
    given = mine(q, rows), mine(k, keys), mine(v, keys)
    flows = mine(dout, rows)
    exact = exact_attention(*given, flows, **settings)
    changed = [
        exact_attention(
            *(moved(t, UNIT, 10 * n + i) for i, t in enumerate(given)), flows, slip=UNIT, **settings
        )
        for n in range(4)
    ]
    seen = exact["lse"] > -torch.inf
    for name, t in dict(out=out, **grads).items():
        of_rows = name in ("out", "dq")
        error, allowed = worst_row(
            mine(t, rows if of_rows else keys), exact[name], [one[name] for one in changed],
            seen if of_rows else None, UNIT,
        )
        explained = f"rounding explains {{allowed:.2g}}"
        print(f"sequence {{number}}: {{name}} is off by {{error:.2g}} of its size; {{explained}}")
        if not error <= allowed:
            wrong.append(name)
print("WRONG: " + ", ".join(dict.fromkeys(wrong)) if wrong else "all agree")
raise SystemExit(1 if wrong else 0)"""


# ---- Attention by its definition, for who has torch alone ----------------------------------------------
# The program holds the source of these functions. attnsel itself compares with backends/tiled.


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    scale: float,
    left: int = -1,
    right: int = -1,
    bottom_right: bool = False,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    hidden: Tensor | None = None,
    slip: float = 0.0,
) -> dict[str, Tensor]:
    """out [h, m, e] and lse [h, m]; with dout [h, m, e] also dq, dk and dv.

    q [h, m, d], k [g, n, d], v [g, n, e]; bias and hidden broadcast to [h, m, n]; slopes [h]. A key
    j is seen by a query i if -left <= j - i - shift <= right, a bound of -1 being none, shift n - m where
    bottom_right, else 0. A row that sees nothing gives 0. ``slip``: how far dout.v and dout.out may be
    rounded apart; where one key has all the weight, the gradient is their difference.
    """
    q, k, v = (t.detach().double() for t in (q, k, v))
    (h, m, _), (g, n, _) = q.shape, k.shape
    out, lse = q.new_zeros(h, m, v.shape[-1]), q.new_zeros(h, m)
    grads = [torch.zeros_like(t) for t in (q, k, v)] if dout is not None else []
    columns = torch.arange(n, device=q.device)
    for head in range(h):
        for first in range(0, m, 512):  # so that the scores stay small
            rows = slice(first, min(first + 512, m))
            kv = head // (h // g)
            with torch.enable_grad():
                mine = [t.clone().requires_grad_(dout is not None) for t in (q[head, rows], k[kv], v[kv])]
                x = mine[0] @ mine[1].T * scale
                if softcap:
                    x = softcap * torch.tanh(x / softcap)
                shift = n - m if bottom_right else 0
                away = columns - torch.arange(m, device=q.device)[rows, None] - shift
                if bias is not None:
                    x = x + bias.detach().double().expand(h, m, n)[head, rows]
                if slopes is not None:
                    x = x - slopes[head].double() * away.abs()
                unseen = torch.zeros_like(away, dtype=torch.bool)
                if left >= 0:
                    unseen = unseen | (away < -left)
                if right >= 0:
                    unseen = unseen | (away > right)
                if hidden is not None:
                    unseen = unseen | hidden.expand(h, m, n)[head, rows]
                x = x.masked_fill(unseen, -torch.inf)
                top = x.detach().amax(1, keepdim=True).clamp(min=-1e300)
                weights = torch.exp(x - top)
                total = weights.sum(1, keepdim=True)
                p = weights / torch.where(total > 0, total, 1.0)
                made = p @ mine[2]
                sums = torch.where(total > 0, torch.log(torch.where(total > 0, total, 1.0)) + top, -torch.inf)
            out[head, rows] = made.detach()
            lse[head, rows] = sums.detach()[:, 0]
            if dout is not None:
                flow = dout[head, rows].double()
                apart = slip * (flow * made.detach()).abs().sum(1, keepdim=True)
                dq, dk, dv = torch.autograd.grad([made, sums], mine, [flow, apart])
                grads[0][head, rows] += dq
                grads[1][kv] += dk
                grads[2][kv] += dv
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=False))}


def moved(t: Tensor, unit: float, seed: int) -> Tensor:
    """The same numbers in float64, each off by up to one ``unit`` of itself, at random."""
    noise = torch.rand(t.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return t.detach().double() * (1.0 + unit * (2.0 * noise.to(t.device) - 1.0))


def worst_row(
    actual: Tensor, exact: Tensor, changed: list[Tensor], seen: Tensor | None, unit: float
) -> tuple[float, float]:
    """(error, what rounding explains) of the worst row, both against the row's size.

    ``changed``: the exact result for inputs that are off by up to one ``unit`` of rounding. A right kernel is
    about as far off as these (backward stability); twice that is allowed, and a unit of the row itself.
    ``seen``: rows that see a key, which alone are judged.
    """
    error = torch.nan_to_num(actual.double() - exact, nan=torch.inf).norm(dim=-1)
    size = exact.norm(dim=-1)
    moved = torch.stack([(other - exact).norm(dim=-1) for other in changed]).amax(0)
    largest = size.max() if size.numel() else size.sum()
    allowed = 2.0 * moved + unit * (size + largest / 32) + 1e-30
    ratio = error / allowed
    if seen is not None:
        ratio = torch.where(seen, ratio, 0.0)
    if not ratio.numel():
        return 0.0, 0.0
    at = int(ratio.argmax())
    scale = max(float(size.flatten()[at]), float(largest) / 32, 1e-30)
    return float(error.flatten()[at]) / scale, float(allowed.flatten()[at]) / scale


# ---- tensors ------------------------------------------------------------------------------------------


def _tensors(file: ReplayFile, seed: int) -> str:
    """q, k and v, and what else the call has, as build.py makes them; q, k, v then as [b, h, s, d] views."""
    form = FORMATS[file.static["qkv_format"]]
    device = "cuda" if file.named("q") and file.tensors[0].device == "cuda" else "cpu"
    lines = [
        "# ---- the same tensors: strides, offsets and shared memory as they were; random numbers ----",
        f'DEVICE = "{device}" if "{device}" == "cpu" or torch.cuda.is_available() else "cpu"',
        f"PACKED = {form.packed}",
        "memory = {}",
    ]
    for number in dict.fromkeys(t.storage for t in file.tensors if _used(t)):
        views = [t for t in file.tensors if t.storage == number]
        count, dtype = max(view.span for view in views), views[0].dtype
        made = f"torch.randn({count}, generator=torch.Generator().manual_seed({seed * 100 + number}))"
        whole = made if dtype.startswith(("float", "bfloat")) else f"torch.zeros({count})"
        lines.append(f"memory[{number}] = {whole}.to(torch.{dtype}).to(DEVICE)")
    for t in file.tensors:
        if _used(t):
            lines.append(f"{_variable(t)} = {_view(t)}")
            lines += _contents(t)
    if file.data:
        lines += _KEPT.format(name=file.data).splitlines()
    if form.to_contract is not None:
        lines += [f"{name} = {name}.permute{form.to_contract}  # [b, h, s, d]" for name in "qkv"]
    return "\n".join(lines)


_KEPT = """DATA = Path({name!r})  # the numbers of the call itself, if the file lies here
if DATA.exists():
    for name, t in torch.load(DATA, map_location="cpu", weights_only=True).items():
        if name != "dropout_seed":
            view = globals()[name.replace(".", "_")].detach()
            for dim, stride in enumerate(view.stride()):
                if stride == 0 and view.shape[dim] > 1:
                    view = view.narrow(dim, 0, 1)
            view.copy_(t)
print("numbers:", DATA if DATA.exists() else "random")"""


def _used(t: TensorRecord) -> bool:
    return t.name != "dropout_seed"


def _variable(t: TensorRecord) -> str:
    return t.name.replace(".", "_")


def _view(t: TensorRecord) -> str:
    view = f"memory[{t.storage}].as_strided({t.shape}, {t.stride}, {t.storage_offset})"
    return f"{view}.requires_grad_()" if t.requires_grad else view


def _contents(t: TensorRecord) -> list[str]:
    name = _variable(t)
    if t.values is not None:
        return [f"{name}.copy_(torch.tensor({list(t.values)}).reshape({t.shape}))"]
    if t.lengths is not None:
        hidden = f"torch.arange({t.shape[-1]}) >= torch.tensor({list(t.lengths)})[:, None]"
        return [f"{name}.copy_(({hidden})[:, None, None])"]
    if t.dtype == "bool":
        drawn = f"torch.rand({t.shape}, generator=torch.Generator().manual_seed(1)) < {t.hidden or 0.0}"
        return [f"{name}.copy_({drawn})", f"{name}[..., 0] = False"]
    return [f"{name}.abs_()"] if t.name == "alibi_slopes" else []


def _extras(file: ReplayFile) -> str:
    """``bias``, ``slopes`` and ``hidden`` as the definition takes them, and where sequences lie."""
    p = file.params
    lines = ["bias = slopes = hidden = None"]
    if p.has_bias:
        scale = _scale(file) if p.core_attention_bias_type == "pre_scale_bias" else 1.0
        lines.append(f"bias = core_attention_bias[(None,) * (4 - core_attention_bias.dim())] * {scale!r}")
    if p.core_attention_bias_type == "alibi":
        given = file.named("alibi_slopes") is not None
        lines.append("slopes = alibi_slopes" if given else f"slopes = {_default_slopes(p.num_heads)}")
    if p.attn_mask_type == "arbitrary":
        lines.append("hidden = attention_mask[(None,) * (4 - attention_mask.dim())]")
    if p.qkv_format == "thd":
        lines += [
            "starts = [n.tolist() for n in (cu_seqlens_q, cu_seqlens_kv)]",
            "SEQUENCES = [",
            "    (slice(starts[0][n], starts[0][n + 1]), slice(starts[1][n], starts[1][n + 1]))",
            "    for n in range(len(starts[0]) - 1)",
            "]",
        ]
    else:
        lines.append(f"SEQUENCES = [(slice(None), slice(None))] * {p.batch_size}")
    return "\n".join(lines)


def _default_slopes(heads: int) -> str:
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * n / power) for n in range(1, power + 1)]
    slopes += [2 ** (-8 * n / (2 * power)) for n in range(1, 2 * power, 2)][: heads - power]
    return f"torch.tensor({slopes}, device=DEVICE)"


def _scale(file: ReplayFile) -> float:
    given = file.static.get("softmax_scale")
    return float(given) if isinstance(given, (int, float)) else default_softmax_scale(file.params.head_dim_qk)


def _definition(file: ReplayFile) -> dict[str, str]:
    p = file.params
    left, right = p.window_size
    held = {
        "scale": _scale(file),
        "left": left,
        "right": right,
        "bottom_right": bool(p.bottom_right_diagonal),
        "softcap": p.softcap,
    }
    return {name: repr(value) for name, value in held.items()}


# ---- the call -----------------------------------------------------------------------------------------


def _part(name: str, p: AttentionParams, file: ReplayFile) -> _Part:
    if name not in CANDIDATES:
        said = "the file names no candidate: say which with --backend, such as --backend sdpa.math"
        raise InvalidInput("--script", name, said)
    if name in ("triton", "tiled"):
        said = (
            f"{name} is attnsel's own kernel, which no program without attnsel can call: send the file, "
            "which attnsel replay runs; with --backend sdpa.math the program shows what is right"
        )
        raise InvalidInput("--script", name, said)
    _refuse(name, p)
    write: Callable[[str, AttentionParams, ReplayFile], _Part] | None = None
    if name in _BACKENDS:
        write = _f_sdpa
    elif name == "sdpa.varlen":
        write = _flash_forward
    elif name.startswith("flash_attn."):
        write = _flash_attn
    if write is None:
        raise InvalidInput("--script", name, "is a plug-in: its maker knows how it is called without attnsel")
    return write(name, p, file)


def _refuse(name: str, p: AttentionParams) -> None:
    """Raises InvalidInput for what neither F.sdpa nor flash_attn's functions have an argument for."""
    cannot = {
        "an attention sink": p.softmax_type != "vanilla",
        "pages": p.kv_cache != "none",
        "FP8": p.fp8_attention,
        "gaps between packed sequences": p.pad_between_seqs,
        "softcap": bool(p.softcap) and not name.startswith("flash_attn."),
        "packed sequences (thd)": p.qkv_format == "thd" and name in _BACKENDS,
        "padding of dense tensors (attnsel packs them)": "padding" in p.attn_mask_type
        and p.qkv_format != "thd",
    }
    for what, asked in cannot.items():
        if asked:
            said = (
                f"the call has {what}, which a plain call of it has no argument for; attnsel replay runs it"
            )
            raise InvalidInput("--script", name, said)


def _f_sdpa(name: str, p: AttentionParams, file: ReplayFile) -> _Part:
    square = p.max_seqlen_q == p.max_seqlen_kv
    plain_causal = p.causal and not p.windowed and (square or not p.bottom_right_diagonal)
    adds = p.has_bias or p.core_attention_bias_type == "alibi" or p.attn_mask_type == "arbitrary"
    needs_mask = adds or p.windowed or (p.causal and not plain_causal)
    lines = ["mask = None"]
    if needs_mask:
        lines = _MASK.format(**_definition(file)).splitlines()
    gqa = ", enable_gqa=True" if p.gqa else ""
    lines += [
        f"with sdpa_kernel(SDPBackend.{_BACKENDS[name]}):",
        "    out = F.scaled_dot_product_attention(",
        "        q, k, v, attn_mask=mask,",
        f"        is_causal={plain_causal and not needs_mask}, scale={_scale(file)!r}{gqa},",
        "    )",
    ]
    note = ""
    if name == "cudnn":
        note = "cuDNN's graph was made by nvidia-cudnn-frontend; this asks PyTorch's own cuDNN kernel instead"
    return _Part("from torch.nn.attention import SDPBackend, sdpa_kernel", "\n".join(lines), note)


_MASK = """m, n = q.shape[2], k.shape[2]
shift = n - m if {bottom_right} else 0
away = torch.arange(n, device=DEVICE) - torch.arange(m, device=DEVICE)[:, None] - shift
mask = torch.zeros(m, n, dtype=q.dtype, device=DEVICE)
if {left} >= 0:
    mask = mask.masked_fill(away < -{left}, -torch.inf)
if {right} >= 0:
    mask = mask.masked_fill(away > {right}, -torch.inf)
mask = mask[None, None]
if bias is not None:
    mask = mask + bias.detach().to(q.dtype)
if slopes is not None:
    mask = mask - (slopes.reshape(-1, q.shape[1], 1, 1) * away.abs()).to(q.dtype)
if hidden is not None:
    mask = mask.masked_fill(hidden, -torch.inf)
mask = mask.expand(q.shape[0], q.shape[1], m, n)"""


def _corner(name: str, p: AttentionParams) -> None:
    """Raises InvalidInput where the diagonal begins at the first key: flash_attn's ends at the last."""
    if (p.causal or p.windowed) and not p.bottom_right_diagonal and not p.same_lengths:
        said = "the call's diagonal begins at the first key, and this function's ends at the last"
        raise InvalidInput("--script", name, said)
    if p.has_bias or p.attn_mask_type == "arbitrary":
        raise InvalidInput("--script", name, "this function takes no mask and no bias")


_LENGTHS = """cu_q = cu_seqlens_q
cu_k = cu_seqlens_kv
longest = [int(cu.diff().max()) for cu in (cu_q, cu_k)]
rows = [q, k, v]  # [t, h, d]"""
_DENSE_LENGTHS = """longest = [q.shape[2], k.shape[2]]
cu_q, cu_k = (
    torch.arange(0, (q.shape[0] + 1) * s, s, dtype=torch.int32, device=DEVICE) for s in longest
)
rows = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]  # [t, h, d]"""


def _flash_forward(name: str, p: AttentionParams, file: ReplayFile) -> _Part:
    _corner(name, p)
    left, right = p.window_size
    packed = p.qkv_format == "thd"
    back = "" if packed else "\nout = out.unflatten(0, (q.shape[0], -1)).transpose(1, 2)"
    window = f", window_size_left={left}, window_size_right={right}" if p.windowed else ""
    call = (
        f"{_LENGTHS if packed else _DENSE_LENGTHS}\n"
        "out = torch.ops.aten._flash_attention_forward(\n"
        f"    *rows, cu_q, cu_k, *longest, 0.0, {p.causal}, False, scale={_scale(file)!r}{window}\n"
        f")[0]{back}"
    )
    return _Part("", call)


_FUNCTIONS = {
    "flash_attn.2": "flash_attn",
    "flash_attn.3": "flash_attn_interface",
    "flash_attn.4": "flash_attn.cute",
}


def _flash_attn(name: str, p: AttentionParams, file: ReplayFile) -> _Part:
    _corner(name, p)
    given = [f"causal={p.causal}", f"softmax_scale={_scale(file)!r}"]
    if p.windowed:
        given.append(f"window_size={p.window_size}")
    if p.softcap:
        given.append(f"softcap={p.softcap!r}")
    if p.deterministic:
        given.append("deterministic=True")
    if p.core_attention_bias_type == "alibi":
        given.append("alibi_slopes=slopes")
    arguments = ", ".join(given)
    if p.qkv_format == "thd":
        call = (
            f"{_LENGTHS}\nout = flash_attn_varlen_func(\n"
            "    *rows, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,\n"
            "    max_seqlen_q=longest[0], max_seqlen_k=longest[1],\n"
            f"    {arguments},\n)"
        )
    else:
        call = f"out = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), {arguments})"
    call += "\nout = out[0] if isinstance(out, tuple) else out"
    call += "" if p.qkv_format == "thd" else "\nout = out.transpose(1, 2)"
    return _Part(f"from {_FUNCTIONS[name]} import flash_attn_func, flash_attn_varlen_func", call)
