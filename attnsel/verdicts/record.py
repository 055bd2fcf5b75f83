"""What a candidate is: one record, the same for a kernel of attnsel's and for one of another package's.

Everything that differs from candidate to candidate stands in its record; whoever needs it reads the record,
and no table elsewhere lists candidates by name. A record imports no torch, as plans are made where there is
none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.environment.versions import Version
    from attnsel.params import AttentionParams
    from attnsel.verdicts.reasons import Reason

Memory = tuple[str, int]
"""What it is, in words, and its bytes."""

KernelFamily = Literal["cudnn", "flash", "flash3", "flash4", "efficient", ""]
Dropout = Literal["contract", "own", "generator"]


class Executed(NamedTuple):
    """Calls whose compiled kernels a committed record shows executed without a GPU, and without a fault."""

    targets: frozenset[str]  # "sm75"
    dtypes: frozenset[str]
    head_dim: int  # the widest


class Proven(NamedTuple):
    """Calls that results show right on one target, and no others there: those that ask for nothing else than
    these features, with heads no wider."""

    target: str  # "sm90"
    features: frozenset[str]  # words of ``takes``, element types among them
    head_dim: int  # the widest


class Efficiency(NamedTuple):
    archs: Container[int]
    share: float
    source: str


@dataclass(frozen=True, kw_only=True, eq=False)
class CandidateRecord:
    """One candidate. ``name``, ``title``, ``family``, ``kernel`` and ``takes`` are required.

    name: lower-case words joined by dots, such as "acme.flash"; 15 characters at most.
    title: a few words for lists.
    family: capital letters that begin the codes of its rules. ``<family>000`` is the rule that ``takes``
        makes, unless ``limits`` says that rules of its own say all of it.
    kernel: the module with ``forward``, ``backward`` and perhaps ``prepare`` and ``bind``
        (attnsel/backends/contract.py), or "module:name" of an object that has them. Imported when the
        candidate is first chosen; torch is allowed there, and only there.
    takes: what the kernel takes; a call that asks for anything else is refused. Element types (bf16, fp16,
        fp32, fp64), device types (cuda, rocm, cpu, mps, xpu) and features: training, causal, window,
        top_left and bottom_right (the diagonal's anchor, where lengths differ), padding, mask, thd, gaps,
        paged, gqa, head_dim_v, bias, bias_grad, alibi, softcap, sinks, dropout, deterministic, lse,
        max_logit, strides, cuda_graph, empty, fp8, offsets (Spec.q_offset and kv_offset), head_offset.
    not_called: of features that it does not list, by their texts, what its package has all the same and where
        that is written. attnsel makes no such call.
    planned_on: device types where it is judged and not run, as attnsel's calls were never made there.
    rules: what narrows that down: a Registry with rules about ``name`` alone, or modules that register some.
    limits: "takes"; the code of the rule that ``takes`` makes, where a family has several candidates; or
        "rules" where own rules refuse, in better words, whatever ``takes`` does not list.
    needs: components that must be installed (fields of Environment).
    adaptations: exact changes of a call that may be made for it, in the order in which they are carried out.
    memory: what it allocates for a call beyond the call's own tensors, results and gradients; None: nothing
        that grows with s_q * s_kv.
    less_memory: releases that, each group installed together, bring ``memory`` down for some calls.
    dropout: whose random numbers decide what is dropped: "contract" (the seed that is given, entries numbered
        as attnsel/backends/contract.py says, so that any split of a sequence drops the same ones), "own" (the
        seed that is given, other entries) or "generator" (PyTorch's generator: no seed can replay it).
    explicit_backward: ``backward`` works from a forward that ran outside autograd, so that a forward can be
        recomputed; where the kernel gives a log-sum-exp, from ``out`` and ``lse`` with nothing saved, so that
        partial results can be merged and no forward runs twice under torch.compile.
    refusals: exceptions of its library that say no to one call, as "module:name"; ValueError, RuntimeError
        and NotImplementedError always do.
    library: the library whose kernels run ("cudnn"), where several candidates share one, with its bugs.
    beyond: why a call that these reasons stand against is planned all the same: its library has other kernels
        for it, which attnsel does not call. None where the reasons stand.
    explain_refusal: "module:function" that turns what the library says into codes of rules.
    proven: where committed results (or tests of its maker's) show it right: "sm90", "cpu" for every call, or
        ``Proven("sm90", features, head_dim)`` for some. The first of other calls is compared with ``tiled``.
    executed: calls whose kernels were executed off-GPU, for attnsel's own. They stay unproven: ptxas and the
        GPU had no part.
    trusted: its maker tests it wherever its rules admit it; it is never unproven.
    unproven_last: where it is unproven it ranks below what is proven.
    unproven_note: what was done there instead of running it, for reports; for calls in ``executed`` that.
    kernel_family: for ranking by speed, see attnsel/rules/preferences.py.
    written_for: architectures that the kernels were written for: of a family, these go first.
    slower_on: architectures where they were timed beside others that fit as well, and were slower.
    place: "before NAME" or "after NAME", for one that belongs to no family.
    plan_per_length: its library prepares something, for tens of milliseconds or more, for each number of
        queries and keys that it has not seen.
    compiled_here: a compiler makes its kernels in a call of a new kind, which takes seconds or more.
    efficiency: shares of a GPU's peak 16-bit arithmetic that its kernels reach on long sequences, by
        architecture and with the source; where nobody has measured it no time is estimated.
    last_resort: right everywhere and slow on a GPU; it ranks among the last.
    source: what ``takes`` rests on, for the page of ``<family>000``.
    distribution: the package it comes from and its version, filled in by the loader; empty for attnsel's own.
    """

    name: str
    title: str
    family: str
    kernel: str
    takes: Collection[str]
    not_called: Mapping[str, str] = field(default_factory=dict)
    planned_on: Collection[str] = ()
    rules: Any = ()
    limits: str = "takes"
    needs: tuple[str, ...] = ("torch",)
    adaptations: tuple[str, ...] = ()
    memory: Callable[[AttentionParams, Environment], Memory] | None = None
    less_memory: tuple[Mapping[str, Version], ...] = ()
    dropout: Dropout = "contract"
    explicit_backward: bool = True
    refusals: tuple[str, ...] = ()
    library: str = ""
    beyond: Callable[[AttentionParams, Environment, Collection[Reason]], str | None] | None = None
    explain_refusal: str = ""
    proven: Collection[str | Proven] = ()
    executed: Executed | None = None
    trusted: bool = False
    unproven_last: bool = True
    unproven_note: str = "not run there yet"
    kernel_family: KernelFamily = ""
    written_for: Container[int] = ()
    slower_on: Container[int] = ()
    place: str = ""
    plan_per_length: bool = False
    compiled_here: bool = False
    efficiency: tuple[Efficiency, ...] = ()
    last_resort: bool = False
    source: str = ""
    distribution: str = ""

    @property
    def plans_fp8(self) -> bool:
        """Whether it has rules about attention in FP8 beside those about other types."""
        return "fp8" in self.takes

    @property
    def f_sdpa(self) -> bool:
        """Whether F.scaled_dot_product_attention reaches this kernel too, without attnsel."""
        return self.family == "SDPA" and "fold_mask" in self.adaptations

    @property
    def offsets(self) -> bool:
        """Whether its kernel takes the offset of its rows and columns in a longer sequence."""
        return "offsets" in self.takes

    @property
    def gives_lse(self) -> bool:
        """Whether it gives the log-sum-exp, by which partial results are merged."""
        return "lse" in self.takes

    @property
    def plugin(self) -> bool:
        return bool(self.distribution)

    @property
    def beside(self) -> tuple[str, int] | None:
        """``place`` as a name and -1 (before it) or 1 (after it); None for no place."""
        side, _, name = self.place.partition(" ")
        return (name, -1 if side == "before" else 1) if name else None

    def efficiency_on(self, arch: int | None) -> Efficiency | None:
        """What share of the peak it reaches there, if somebody has measured it."""
        return next((known for known in self.efficiency if arch in known.archs), None)

    @cached_property
    def proven_targets(self) -> frozenset[str]:
        """Where every call is proven."""
        return frozenset(known for known in self.proven if isinstance(known, str))

    @cached_property
    def proven_in_part(self) -> dict[str, Proven]:
        """By target, what is proven where not every call is."""
        parts = (known for known in self.proven if isinstance(known, Proven))
        return {known.target: known._replace(features=frozenset(known.features)) for known in parts}

    def unproven_on(self, target: str) -> bool:
        """Whether nothing shows any call right there ("sm90", "cpu"). Of one call: ``proof.unproven``."""
        return not (self.trusted or target in self.proven_targets or target in self.proven_in_part)

    def executed_for(self, p: AttentionParams, target: str) -> bool:
        """Whether kernels as this call's were executed off-GPU for that architecture."""
        known = self.executed
        if known is None or target not in known.targets or p.dtype not in known.dtypes:
            return False
        return max(p.head_dim_qk, p.head_dim_v) <= known.head_dim
