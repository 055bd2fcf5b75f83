"""attnsel.flash_attn beside the real flash_attn, or beside plain PyTorch where that is missing or refuses.

    python benchmarks/flash_attn_compare.py                   # this machine's GPU, else the CPU
    python benchmarks/flash_attn_compare.py --quick --device cpu
    python benchmarks/flash_attn_compare.py --json compare.json --dtype fp16

Each row is one function, one mask and one direction. The rivals: the installed flash_attn; else plain PyTorch
operations that store the scores, eager and under torch.compile. *agrees* is FlashAttention's criterion: the
largest error against float64, of ours and of plain PyTorch at the same dtype; ours may be twice that (a
gradient: three times), and a few ulps. The rival's error stands beside them. *faster* is a ratio of medians,
above 1 where attnsel is faster. The exit code is 1 where ours errs too much, else 0.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
import torch
from clocks import Clock, CudaClock, HostClock, describe
from measure import number, progress, record, write
from rich.console import Console
from rich.table import Table
from torch import Tensor

import attnsel
from attnsel import flash_attn as ours

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
DENSE = ("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func")
VARLEN = ("flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func")
CACHE = "flash_attn_with_kvcache"
ULPS = 4  # of the largest value, beside the factor


class Sizes(NamedTuple):
    """Dense: batch x rows. Packed: a quarter, a half and all of ``rows``. Cache: one query row."""

    batch: int
    rows: int
    heads: int
    groups: int
    head_dim: int
    rounds: int


class Case(NamedTuple):
    function: str
    causal: bool
    backward: bool

    def __str__(self) -> str:
        parts = [
            self.function,
            "causal" if self.causal else "full",
            "backward" if self.backward else "forward",
        ]
        return " ".join(parts)


@dataclass(frozen=True)
class Figure:
    """One case beside one rival; milliseconds, and largest errors against float64."""

    case: str
    rival: str
    backend: str
    ours_ms: float
    rival_ms: float | None
    ours_error: float
    plain_error: float
    rival_error: float | None
    agrees: bool
    note: str = ""

    @property
    def faster(self) -> float | None:
        return None if self.rival_ms is None else self.rival_ms / self.ours_ms

    def as_dict(self) -> dict[str, Any]:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {**rounded, "faster": None if self.faster is None else round(self.faster, 3)}


# ---- the calls --------------------------------------------------------------------------------------


class Call:
    """One case's tensors, and how each side is called with them."""

    def __init__(self, case: Case, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.case, self.packed, self.cached = case, case.function in VARLEN, case.function == CACHE
        generator = torch.Generator(device=device).manual_seed(0)
        groups = sizes.heads if "qkvpacked" in case.function else sizes.groups
        shape: tuple[int, ...] = (sizes.batch, sizes.rows)
        self.lengths: list[int] = [sizes.rows] * sizes.batch
        if self.packed:
            self.lengths = [max(1, sizes.rows // 4), max(1, sizes.rows // 2), sizes.rows]
            shape = (sum(self.lengths),)

        def random(*dims: int) -> Tensor:
            return torch.randn(*dims, generator=generator, device=device, dtype=torch.float32).to(dtype)

        rows_q = (sizes.batch, 1) if self.cached else shape
        self.q = random(*rows_q, sizes.heads, sizes.head_dim)
        self.k, self.v = (random(*shape, groups, sizes.head_dim) for _ in range(2))
        self.dout = random(*self.q.shape)
        self.cu = torch.tensor([0, *self.lengths], device=device).cumsum(0, dtype=torch.int32)
        self.used = torch.full((sizes.batch,), sizes.rows - 3, dtype=torch.int32, device=device)

    def package(self, module: Any) -> Callable[[], tuple[Tensor, ...]]:
        """A call of this function of ``module``: ours or the real one. Returns out, or the gradients too."""
        function, causal = getattr(module, self.case.function), self.case.causal
        if self.cached:
            return lambda: (function(self.q, self.k, self.v, cache_seqlens=self.used, causal=causal),)
        parts: list[Tensor] = [self.q, self.k, self.v]
        if "qkvpacked" in self.case.function:
            parts = [torch.stack(parts, dim=-3)]
        elif "kvpacked" in self.case.function:
            parts = [self.q, torch.stack(parts[1:], dim=-3)]
        lengths: list[Any] = []
        if self.packed:
            once = 1 if "qkvpacked" in self.case.function else 2
            lengths = [*[self.cu] * once, *[max(self.lengths)] * once]
        return self._with_gradients(lambda *t: function(*t, *lengths, causal=causal), parts)

    def plain(self, dtype: torch.dtype, compiled: bool = False) -> Callable[[], tuple[Tensor, ...]]:
        """The same in plain operations, one sequence at a time where they differ in length."""
        attend = torch.compile(_plain, dynamic=self.packed or None) if compiled else _plain
        causal = self.case.causal
        parts = [t.to(dtype) for t in (self.q, self.k, self.v)]
        if self.cached:
            used = int(self.used[0])
            q, k, v = parts[0], parts[1][:, :used], parts[2][:, :used]
            return lambda: (attend(q, k, v, causal),)
        if not self.packed:
            return self._with_gradients(lambda q, k, v: attend(q, k, v, causal), parts)

        def sequences(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = [t.split(self.lengths) for t in (q, k, v)]
            each = zip(*rows, strict=True)
            return torch.cat([attend(a[None], b[None], c[None], causal)[0] for a, b, c in each])

        return self._with_gradients(sequences, parts)

    def _with_gradients(
        self, call: Callable[..., Tensor], parts: list[Tensor]
    ) -> Callable[[], tuple[Tensor, ...]]:
        if not self.case.backward:
            return lambda: (call(*parts),)
        leaves = [t.detach().clone().requires_grad_() for t in parts]

        def both() -> tuple[Tensor, ...]:
            out = call(*leaves)
            grads = torch.autograd.grad(out, leaves, self.dout.to(out.dtype))
            return out, *_unpacked(list(grads))

        return both


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention [b, s, h, d] as everybody writes it."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    x = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
        x = x.masked_fill(hidden.triu(1 + x.shape[-1] - x.shape[-2]), -torch.inf)
    return (x.softmax(-1) @ v).transpose(1, 2)


def _unpacked(grads: list[Tensor]) -> list[Tensor]:
    """dq, dk, dv, whatever was packed."""
    if len(grads) == 1:
        return list(grads[0].unbind(-3))
    return [grads[0], *grads[1].unbind(-3)] if len(grads) == 2 else grads


# ---- measuring --------------------------------------------------------------------------------------


def compare(
    case: Case,
    sizes: Sizes,
    dtype: torch.dtype,
    clock: Clock,
    device: torch.device,
    real: Any,
    with_compile: bool,
) -> list[Figure]:
    """One case beside each rival."""
    call = Call(case, sizes, dtype, device)
    exact, plain = call.plain(torch.float64)(), call.plain(dtype)()
    mine = call.package(ours)
    actual = mine()
    backend = _what_ran()
    plain_error = _worst(plain, exact)
    agrees = all(
        _worst((a,), (e,)) <= (3 if n else 2) * _worst((p,), (e,)) + ULPS * _ulp(e, dtype)
        for n, (a, p, e) in enumerate(zip(actual, plain, exact, strict=True))
    )
    rivals: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    if real is not None:
        rivals["flash_attn"] = call.package(real)
    else:
        rivals["eager"] = call.plain(dtype)
        if with_compile:
            torch.compiler.reset()
            rivals["torch.compile"] = call.plain(dtype, compiled=True)
    figures = []
    for name, rival in rivals.items():
        try:
            rival_error = _worst(rival(), exact)
            mine_ms, rival_ms = (statistics.median(t) for t in clock.rounds([mine, rival], sizes.rounds))
            note = ""
        except Exception as error:  # a rival may refuse, run out of memory or find no compiler
            rival_error, rival_ms = None, None
            mine_ms = statistics.median(clock.rounds([mine], sizes.rounds)[0])
            note = f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
        errors = _worst(actual, exact), plain_error, rival_error
        figures.append(Figure(str(case), name, backend, mine_ms, rival_ms, *errors, agrees, note))
    return figures


def _what_ran() -> str:
    """The backend of the one call since the cache was cleared."""
    from attnsel.runtime import dispatch as run

    for bound in reversed(list(run._bound.items.values())):
        if bound.selection.backend is not None:
            return bound.selection.backend
    return ""


def _worst(results: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    pairs = zip(results, exact, strict=True)
    return max(float((a.double() - e.double()).abs().max()) for a, e in pairs)


def _ulp(exact: Tensor, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps * float(exact.abs().max())


def real_package(device: torch.device) -> tuple[Any, str]:
    """The installed flash_attn if it runs on this device, and what was found in words."""
    try:
        module = importlib.import_module("flash_attn")
        if (
            module.__name__ != "flash_attn"
            or getattr(module, "flash_attn_func", None) is ours.flash_attn_func
        ):
            return None, "flash_attn here is attnsel's"
        q = torch.zeros(1, 16, 1, 64, dtype=torch.float16, device=device)
        module.flash_attn_func(q, q, q)
    except Exception as error:  # absent, broken, or not for this GPU
        return (
            None,
            f"no flash_attn ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})",
        )
    return module, f"flash_attn {getattr(module, '__version__', '')}"


def show(figures: list[Figure], title: str) -> None:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("case", ratio=1)
    for name in ("runs", "ours ms", "rival", "rival ms", "faster", "error", "plain's", "rival's"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("agrees", no_wrap=True)
    for f in figures:
        table.add_row(
            f.case + (f" [dim]({f.note})[/]" if f.note else ""),
            f.backend,
            number(f.ours_ms),
            f.rival,
            "" if f.rival_ms is None else number(f.rival_ms),
            "" if f.faster is None else f"{f.faster:.2f}",
            f"{f.ours_error:.1e}",
            f"{f.plain_error:.1e}",
            "" if f.rival_error is None else f"{f.rival_error:.1e}",
            "[green]yes[/]" if f.agrees else "[red]no[/]",
        )
    console = Console()
    (console if console.is_terminal else Console(width=150)).print(table)


def cases(only: str | None) -> list[Case]:
    every = [
        Case(function, causal, backward)
        for function in (*DENSE, *VARLEN, CACHE)
        for causal in (False, True)
        for backward in ((False,) if function == CACHE else (False, True))
    ]
    return [case for case in every if only is None or only in str(case)]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--quick", action="store_true", help="small tensors, few rounds")
    parser.add_argument("--no-compile", action="store_true", help="no torch.compile among the rivals")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the record here, anew after each case")
    given = parser.parse_args(words)
    device = torch.device(given.device)
    on_gpu = device.type == "cuda"
    sizes = Sizes(4, 4096, 16, 4, 128, 30) if on_gpu else Sizes(2, 512, 8, 2, 64, 7)
    if given.quick:
        sizes = Sizes(2, 1024, 8, 2, 64, 7) if on_gpu else Sizes(2, 96, 4, 2, 32, 3)
    clock: Clock = CudaClock(device) if on_gpu else HostClock()
    real, found = real_package(device)
    chosen = cases(given.only)
    if not chosen:
        parser.error(f"--only {given.only}: there is no such case")
    what = {"device": describe(device), "dtype": given.dtype, "sizes": sizes._asdict(), "found": found}
    figures: list[Figure] = []
    for case in progress(chosen):
        attnsel.clear_cache()
        figures += compare(case, sizes, DTYPES[given.dtype], clock, device, real, not given.no_compile)
        if given.json:
            write(given.json, record("flash_attn_compare", figures, finished=case == chosen[-1], **what))
    show(figures, f"attnsel.flash_attn on {what['device']['name'] if on_gpu else device.type}; {found}")
    wrong = [f.case for f in figures if not f.agrees]
    if wrong:
        print(f"errs too much: {', '.join(dict.fromkeys(wrong))}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
