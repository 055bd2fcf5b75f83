"""One call of ``attnsel.attention`` from plain values, and what the definition of attention gives for it.

For the runtime's tests and the fuzz targets. A failure's script is rounding.py, reference.py, this file and
one more line. Shape letters as in the kernels' contract: b, h, g, s_q, s_kv, t (packed rows), d, e.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel import InvalidInput, NoBackendError, attention, clear_cache, override
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.tiled import kernel as tiled_backward
from attnsel.backends.tiled import kernel as tiled_forward
from attnsel.debug import FallbackWarning
from reference import attention_reference
from rounding import UNITS, unexplained

torch.set_num_threads(1)

CASE: dict[str, Any] = {
    "seed": 0,
    "fmt": "bshd",
    "dtype": "float32",
    "b": 2,
    "g": 1,
    "r": 1,  # query heads of each kv head
    "s_q": 3,  # of a packed batch: what max_seqlen_q says, where it is given
    "s_kv": 3,
    "d": 4,
    "e": 4,
    "mask": "no_mask",
    "window": None,
    "anchor": None,  # bottom_right_diagonal
    "scale": None,
    "softcap": 0.0,
    "softmax": "vanilla",
    "bias": None,  # (pre_scale_bias or post_scale_bias, names of its dimensions, gradient, own dtype or None)
    "alibi": None,  # "computed", "h" or "b h"
    "arbitrary": None,  # names of the dimensions of attention_mask
    "lengths": None,  # "cu_seqlens" or "masks"
    "lens_q": None,
    "lens_kv": None,
    "gaps": None,  # packed: rows without a sequence after each sequence of q, and of k and v
    "max_seqlen": False,
    "lse": False,
    "max_logit": False,
    "deterministic": False,
    "is_training": None,
    "grads": "qkv",
    "layouts": ("dense", "dense", "dense"),
    "fused": None,  # (qkv_layer or kv_layer, qkv_interleave_dim)
    "dout": "random",
    "times": (1.0, 1.0),  # what q and v are multiplied by
    "garbage": None,  # what rows of no sequence hold
    "backend": None,
    "adapt": None,
    "blocks": None,  # tiled's tiles, rows and columns
    "selfcheck": "0",
    "again": (),  # what changes in further calls
    "in_place": False,  # these write into the tensors of the first one
}
FORMATS = {"bshd": "b s h d", "sbhd": "s b h d", "bhsd": "b h s d", "thd": "t h d"}
TO_KERNEL = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3), "thd": (0, 1, 2)}
FROM_KERNEL = TO_KERNEL | {"sbhd": (2, 0, 1, 3)}


# ---- tensors ----------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How a tensor lies in memory: the shape of what is allocated, and the tensor as a view of it."""

    base: Callable[[list[int]], list[int]]
    view: Callable[[Tensor, list[int]], Tensor]


def _with(shape: list[int], axis: int, size: Callable[[int], int]) -> list[int]:
    shape = list(shape)
    shape[axis] = size(shape[axis])
    return shape


LAYOUTS = {
    "dense": Layout(lambda s: s, lambda t, s: t),
    "swapped 1 2": Layout(lambda s: [s[0], s[2], s[1], *s[3:]], lambda t, s: t.transpose(1, 2)),
    "swapped 0 1": Layout(lambda s: [s[1], s[0], *s[2:]], lambda t, s: t.transpose(0, 1)),
    "last outermost": Layout(lambda s: [s[-1], *s[:-1]], lambda t, s: t.movedim(0, -1)),
    "every second element": Layout(lambda s: _with(s, -1, lambda n: 2 * n), lambda t, s: t[..., ::2]),
    "every second of 1": Layout(lambda s: _with(s, 1, lambda n: 2 * n), lambda t, s: t[:, ::2]),
    "slice of the last": Layout(lambda s: _with(s, -1, lambda n: n + 3), lambda t, s: t[..., 1 : 1 + s[-1]]),
    "slice of 1": Layout(lambda s: _with(s, 1, lambda n: n + 2), lambda t, s: t[:, 1 : 1 + s[1]]),
    "one element in": Layout(lambda s: [1 + math.prod(s)], lambda t, s: t[1:].view(s)),
    "eight elements in": Layout(lambda s: [8 + math.prod(s)], lambda t, s: t[8:].view(s)),
    "expanded by an element": Layout(
        lambda s: [s[0] + math.prod(s[1:])],
        lambda t, s: t.as_strided(s, (1, *torch.empty(s[1:], device="meta").stride())),
    ),
    "expanded 0": Layout(lambda s: _with(s, 0, lambda n: 1), lambda t, s: t.expand(s)),
    "expanded 1": Layout(lambda s: _with(s, 1, lambda n: 1), lambda t, s: t.expand(s)),
    "expanded 2": Layout(lambda s: _with(s, 2, lambda n: 1), lambda t, s: t.expand(s)),
}


@dataclass
class Problem:
    """A call's tensors and plain arguments. ``leaves`` are what gradients are asked for, as allocated."""

    case: dict[str, Any]
    sizes: dict[str, int]
    leaves: dict[str, Tensor]
    tensors: dict[str, Any]  # lengths, masks, slopes
    plain: dict[str, Any]
    dout: Tensor

    def qkv(self, leaves: dict[str, Tensor]) -> list[Tensor]:
        """q, k and v in the caller's format, views of the leaves."""
        case, found = self.case, []
        fused = case["fused"]
        packed = () if fused is None else leaves[fused[0]].unbind(fused[1])
        for number, name in enumerate("qkv"):
            if len(packed) > 2 - number:
                found.append(packed[number - 3 + len(packed)])
            else:
                layout = LAYOUTS[case["layouts"][number]]
                found.append(layout.view(leaves[name], shape_of(case, self.sizes, name)))
        return found

    @property
    def arguments(self) -> dict[str, Any]:
        """All that is given by name besides q, k and v."""
        others = {name: leaf for name, leaf in self.leaves.items() if len(name) > 1}
        return {**self.plain, **self.tensors, **others}

    def memory_rows(self, which: str) -> Tensor:
        """Rows of the caller's tensor that are real, as its leading dimensions [b, s, 1], [s, b, 1], ..."""
        fmt = self.case["fmt"]
        if fmt == "thd":
            made = torch.zeros(self.sizes[f"t_{which}"], 1, dtype=torch.bool)
            for start, length in zip(starts_of(self.case, which), self.case[f"lens_{which}"], strict=False):
                made[start : start + length] = True
            return made
        real = real_rows(self.case, self.sizes, which)
        return {"bshd": real[:, :, None], "sbhd": real.T[:, :, None], "bhsd": real[:, None]}[fmt]


def real_rows(case: dict[str, Any], sizes: dict[str, int], which: str) -> Tensor:
    """Of a dense batch: [b, s]."""
    lens = case[f"lens_{which}"]
    lens = [sizes[f"s_{which}"]] * sizes["b"] if lens is None else lens
    return torch.arange(sizes[f"s_{which}"]) < torch.tensor(lens, dtype=torch.long).reshape(-1, 1)


def starts_of(case: dict[str, Any], which: str) -> list[int]:
    starts, gaps = [0], case["gaps"][which == "kv"] if case["gaps"] else [0] * len(case[f"lens_{which}"])
    for length, gap in zip(case[f"lens_{which}"], gaps, strict=True):
        starts.append(starts[-1] + length + gap)
    return starts


def sizes_of(case: dict[str, Any]) -> dict[str, int]:
    sizes = {name: case[name] for name in ("b", "g", "s_q", "s_kv", "d", "e")}
    sizes |= {"h": case["g"] * case["r"], "1": 1}
    if case["fmt"] == "thd":
        sizes |= {"b": len(case["lens_q"])}
        sizes |= {"t_q": starts_of(case, "q")[-1], "t_kv": starts_of(case, "kv")[-1]}
        if not case["max_seqlen"]:
            sizes |= {"s_q": max(case["lens_q"]), "s_kv": max(case["lens_kv"])}
    return sizes


def shape_of(case: dict[str, Any], sizes: dict[str, int], name: str) -> list[int]:
    rows = "q" if name == "q" else "kv"
    letters = {"s": f"s_{rows}", "t": f"t_{rows}", "h": "h" if name == "q" else "g"}
    letters["d"] = "e" if name == "v" else "d"
    return [sizes[letters.get(letter, letter)] for letter in FORMATS[case["fmt"]].split()]


def make(case: dict[str, Any]) -> Problem:
    case = {**CASE, **case}
    sizes, dtype = sizes_of(case), getattr(torch, case["dtype"])
    gen = torch.Generator().manual_seed(case["seed"])

    def normal(shape: list[int], of: torch.dtype = dtype, times: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=gen, dtype=torch.float64) * times).to(of)

    def named(names: str) -> list[int]:
        return [sizes[name] for name in names.split()]

    leaves: dict[str, Tensor] = {}
    fused = case["fused"]
    if fused is not None:
        count = 3 if fused[0] == "qkv_layer" else 2
        shape = shape_of(case, sizes, "k")
        shape.insert(len(shape) + 1 + fused[1], count)
        leaves[fused[0]] = normal(shape)
    for number, (name, times) in enumerate(
        zip("qkv", (case["times"][0], 1.0, case["times"][1]), strict=True)
    ):
        if fused is None or (fused[0] == "kv_layer" and name == "q"):
            shape = LAYOUTS[case["layouts"][number]].base(shape_of(case, sizes, name))
            leaves[name] = normal(shape, times=times)
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in case["grads"] or (len(name) > 1 and case["grads"] != ""))
    plain: dict[str, Any] = {
        "qkv_format": case["fmt"],
        "attn_mask_type": case["mask"],
        "window_size": case["window"],
        "bottom_right_diagonal": case["anchor"],
        "softmax_scale": case["scale"],
        "softcap": case["softcap"],
        "softmax_type": case["softmax"],
        "is_training": case["is_training"],
        "deterministic": case["deterministic"],
        "return_lse": case["lse"],
        "return_max_logit": case["max_logit"],
        "backend": case["backend"],
        "adapt": case["adapt"],
    }
    tensors: dict[str, Any] = {}
    if case["bias"] is not None:
        kind, names, grad, own = case["bias"]
        bias = normal(named(names), getattr(torch, own) if own else dtype)
        leaves["core_attention_bias"] = bias.requires_grad_(grad)
        plain["core_attention_bias_type"] = kind
    if case["softmax"] == "learnable":
        leaves["softmax_offset"] = normal([sizes["h"]]).requires_grad_("s" in case["grads"])
    if case["alibi"] is not None:
        plain["core_attention_bias_type"] = "alibi"
        if case["alibi"] != "computed":
            tensors["alibi_slopes"] = normal(named(case["alibi"]), torch.float32).abs()
    if case["mask"] == "arbitrary":
        tensors["attention_mask"] = normal(named(case["arbitrary"])) > 0.3
    elif case["lengths"] == "masks":
        pair = [~real_rows(case, sizes, which)[:, None, None] for which in ("q", "kv")]
        same = sizes["s_q"] == sizes["s_kv"] and case["lens_q"] == case["lens_kv"]
        tensors["attention_mask"] = pair[0] if same else tuple(pair)
    elif case["lengths"] == "cu_seqlens":
        for w in ("q", "kv"):
            cu = torch.tensor([0, *case[f"lens_{w}"]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            tensors[f"cu_seqlens_{w}"] = cu
            if case["gaps"]:
                starts = torch.tensor(starts_of(case, w), dtype=torch.int32)
                tensors[f"cu_seqlens_{w}_padded"] = starts
        if case["max_seqlen"]:
            plain |= {"max_seqlen_q": sizes["s_q"], "max_seqlen_kv": sizes["s_kv"]}
    if fused is not None:
        plain["qkv_interleave_dim"] = fused[1]
    out_shape = shape_of(case, {**sizes, "d": sizes["e"]}, "q")
    dout = torch.ones((), dtype=dtype).expand(out_shape) if case["dout"] == "ones" else normal(out_shape)
    problem = Problem(case, sizes, leaves, tensors, plain, dout)
    if case["garbage"] is not None:
        with torch.no_grad():
            for t, which in zip((*problem.qkv(leaves), dout), ("q", "kv", "kv", "q"), strict=True):
                held = normal(list(t.shape)) * 50 if case["garbage"] == "random" else float(case["garbage"])
                t.copy_(torch.where(problem.memory_rows(which)[..., None], t, held))
    return problem


# ---- the definition ---------------------------------------------------------------------------------


def spec_of(case: dict[str, Any]) -> Spec:
    causal = "causal" in case["mask"]
    left, right = case["window"] or (-1, -1)
    return Spec(
        packed=case["fmt"] == "thd",
        softmax_scale=case["d"] ** -0.5 if case["scale"] is None else case["scale"],
        window_left=left,
        window_right=0 if causal else right,
        bottom_right="bottom_right" in case["mask"] if causal else case["anchor"] is not False,
        softcap=case["softcap"],
        softmax_type=case["softmax"],
    )


def inputs_of(problem: Problem, leaves: dict[str, Tensor]) -> Inputs:
    case, tensors = problem.case, problem.tensors
    q, k, v = (t.permute(TO_KERNEL[case["fmt"]]) for t in problem.qkv(leaves))
    bias = leaves.get("core_attention_bias")
    if bias is not None and case["bias"][0] == "pre_scale_bias":
        bias = bias * spec_of(case).softmax_scale
    slopes = tensors.get("alibi_slopes")
    if case["alibi"] == "computed":
        slopes = computed_slopes(problem.sizes["h"])
    lengths = {name: t for name, t in tensors.items() if name.startswith("cu_seqlens")}
    if case["fmt"] != "thd" and case["lens_q"] is not None:
        lengths = {f"seqlens_{w}": torch.tensor(case[f"lens_{w}"], dtype=torch.long) for w in ("q", "kv")}
    mask = tensors["attention_mask"] if case["mask"] == "arbitrary" else None
    return Inputs(q, k, v, mask, bias, slopes, softmax_offset=leaves.get("softmax_offset"), **lengths)


def definition(problem: Problem, dtype: torch.dtype, change: float = 0.0, seed: int = 0) -> dict[str, Tensor]:
    """out, lse, max_logit and gradients at this precision, by autograd.

    ``change``: every input first changes at random by up to so much of itself.
    """
    case = problem.case
    gen = torch.Generator().manual_seed(seed)

    def widened(t: Tensor) -> Tensor:
        t = t.detach().to(dtype)
        return t * (1 + change * (2 * torch.rand(t.shape, generator=gen, dtype=dtype) - 1)) if change else t

    def rounded_tanh(z: Tensor) -> Tensor:
        """Rounded, near 1 it has lost most of its derivative 1 - t * t."""
        t = widened(torch.tanh(z))
        return t + (z - z.detach()) * (1 - t * t)

    leaves = {name: widened(t).requires_grad_(t.requires_grad) for name, t in problem.leaves.items()}
    tanh = rounded_tanh if change else torch.tanh
    out, lse, max_logit = attention_reference(spec_of(case), inputs_of(problem, leaves), dtype, tanh)
    found = {"out": out.detach().permute(FROM_KERNEL[case["fmt"]]), "lse": lse.detach()}
    found["max_logit"] = max_logit
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    grads: Sequence[Tensor | None] = [None] * len(wanted)
    if out.requires_grad:  # without a row nothing depends on anything
        dout = problem.dout.permute(TO_KERNEL[case["fmt"]])
        outputs, into = [out], [widened(dout)]
        if change and lse.requires_grad:
            # A kernel rounds dout.v and dout.out apart from each other. Where one key has all the weight the
            # gradient is the difference of the two, equal but for that: like a small gradient into the LSE.
            size = (torch.where(out == 0, 0.0, dout.detach().to(dtype)) * out).abs().sum(-1).detach()
            outputs.append(torch.where(lse == -math.inf, 0.0, lse))
            into.append(widened(size.T if case["fmt"] == "thd" else size) * change)
        grads = torch.autograd.grad(outputs, list(wanted.values()), into, allow_unused=True)
    for (name, leaf), grad in zip(wanted.items(), grads, strict=True):
        found[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


def computed_slopes(h: int) -> Tensor:
    """ALiBi's own: powers of 2^(-8/n) for the largest power of two n, then every second one of 2n's."""
    n = 2 ** math.floor(math.log2(h))
    first = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    return torch.tensor(first + [2 ** (-4 * (i + 1) / n) for i in range(0, 2 * (h - n), 2)])


# ---- the call ---------------------------------------------------------------------------------------


@contextmanager
def settings_of(case: dict[str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", FallbackWarning)
        if case["selfcheck"] != "0":
            stack.enter_context(override(selfcheck=case["selfcheck"]))
        if case["blocks"] is not None:
            stack.enter_context(tiles(*case["blocks"]))
        yield


@contextmanager
def tiles(rows: int, columns: int) -> Iterator[None]:
    """Tiles of tiled so small that a few rows are many tiles."""
    whole = tiled_forward.choose_blocks

    def small(dense: Any) -> Any:
        chosen = whole(dense)
        return chosen._replace(q=min(rows, chosen.q), kv=min(columns, chosen.kv), elements=columns)

    for module in (tiled_forward, tiled_backward):
        module.choose_blocks = small  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in (tiled_forward, tiled_backward):
            module.choose_blocks = whole  # type: ignore[attr-defined]


def carried_out(problem: Problem) -> dict[str, Tensor]:
    """What attnsel gives, by the names of ``definition``. Raises what it raises."""
    case, leaves = problem.case, problem.leaves
    given = problem.qkv(leaves)
    count = 3 if case["fused"] is None else 0 if case["fused"][0] == "qkv_layer" else 1
    with settings_of(case):
        result = attention(*given[:count], **problem.arguments)
        out, *more = result if isinstance(result, tuple) else (result,)
        found = {"out": out.detach()}
        if case["lse"]:
            found["lse"] = more[0]
        if case["max_logit"]:
            found["max_logit"] = more[-1]
        wanted = {name: t for name, t in leaves.items() if t.requires_grad}
        if wanted:
            grads = torch.autograd.grad(out, list(wanted.values()), problem.dout, allow_unused=True)
            for (name, leaf), grad in zip(wanted.items(), grads, strict=True):
                found[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return found


# ---- held against each other ------------------------------------------------------------------------


def complaint(problem: Problem, actual: dict[str, Tensor]) -> str:
    """What is wrong with these numbers; nothing if rounding explains it."""
    dtype = problem.dout.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    kept = {"lse": wide, "max_logit": wide, **{f"d{name}": t.dtype for name, t in problem.leaves.items()}}
    for name, found in actual.items():
        if found.dtype != kept.get(name, dtype):
            return f"{name} is {found.dtype}, not {kept.get(name, dtype)}"
        if found.requires_grad:
            return f"{name} requires a gradient"
    # A bias may be of a dtype of its own.
    coarsest = max((t.dtype for t in problem.leaves.values()), key=UNITS.__getitem__)
    wrong = unexplained(actual, partial(definition, problem), dtype, coarsest)
    return wrong or padded_rows(problem, actual)


def padded_rows(problem: Problem, actual: dict[str, Tensor]) -> str:
    """Rows of no sequence: their output and gradients are 0, not nearly so."""
    if problem.case["lens_q"] is None:
        return ""
    held = [("out", actual["out"], "q")]
    grads = {name[1:]: t for name, t in actual.items() if name.startswith("d") and name[1:] in problem.leaves}
    shared = any("expanded" in layout for layout in problem.case["layouts"])  # rows have one memory
    if not shared and {n for n in problem.leaves if n in "qkv" or n.endswith("_layer")} <= {*grads}:
        views = problem.qkv(grads)
        held += [(f"d{n}", t, w) for n, t, w in zip("qkv", views, ("q", "kv", "kv"), strict=True)]
    for name, t, which in held:
        if not (torch.where(problem.memory_rows(which)[..., None], 0.0, t) == 0).all():
            return f"{name} is not 0 in rows of no sequence"
    return ""


def outcome(case: dict[str, Any]) -> tuple[str, str]:
    """A word for the tally, and what is wrong, if something is."""
    word, first = "", None
    for change in ({}, *case.get("again", ())):
        problem = make({**case, **change})
        if first is not None and problem.case["in_place"]:
            reuse(first, problem)
        first = first or problem
        word, wrong = one_outcome(problem)
        if wrong:
            clear_cache()
            which = f" (call {change})" if change else ""
            return word, wrong + which
    return word, ""


def reuse(first: Problem, problem: Problem) -> None:
    """The numbers of ``problem`` in the tensors of ``first``, wherever these have the same shape."""
    for old, new in ((first.leaves, problem.leaves), (first.tensors, problem.tensors)):
        for name, t in new.items():
            pairs = zip(old[name], t, strict=True) if isinstance(t, tuple) else [(old.get(name), t)]
            if type(t) is not type(old.get(name)):
                continue
            pairs = list(pairs)
            if all(a is not None and a.shape == b.shape for a, b in pairs):
                with torch.no_grad():
                    for a, b in pairs:
                        a.copy_(b)
                new[name] = old[name]


def one_outcome(problem: Problem) -> tuple[str, str]:
    case = problem.case
    try:
        actual = carried_out(problem)
    except NoBackendError as refused:
        name = case["backend"]
        if name in (None, "tiled"):
            return "refused", f"nothing can run it: {refused}"
        reasons = refused.selection[name].reasons
        if not reasons or any(reason.code.startswith("RUNTIME") for reason in reasons):
            return "refused", f"{name} refused while it ran: {refused}"
        if case["adapt"] != "never" and {reason.field for reason in reasons} <= {
            f"tensors.{n}" for n in "qkv"
        }:
            return "refused", f"{name} refused strides, where a copy was allowed: {refused}"
        return "refused", ""
    except InvalidInput as invalid:
        return "InvalidInput", f"a valid call: {invalid}"
    except Exception as other:
        return "error", f"{type(other).__name__}: {other}"
    wrong = complaint(problem, actual)
    if not wrong and case["garbage"] is not None:
        clean = make({**case, "garbage": "0"})
        for name, t in carried_out(clean).items():
            if not torch.equal(t, actual[name]):
                return "right", f"{name} depends on what padded rows hold"
    return "right", wrong
