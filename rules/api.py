"""How a constraint is written down.

::

    @rule("CUDNN204", "cudnn", when=cudnn("<9.5.0"), arch={90}, evidence="source",
          trips=dict(head_dim_qk=192, head_dim_v=128))
    def backward_head_dim(p, env):
        '''Backward above head_dim 128 needs cuDNN 9.5.

        Why: the Hopper backward engine of that era keeps one tile of 128 columns.
        Fix: upgrade cuDNN.
        Source: TransformerEngine#1591
        '''
        if p.is_training and p.head_dim_qk > 128:
            return Bad("head_dim_qk", p.head_dim_qk, AtMost(128))

Gates (``when``, ``arch``, ``device``, ``fp8``) are folded away once per environment; only bodies run per
question. A body reads its two arguments and nothing else, never raises, and returns ``Bad``,
``Unknown`` or None. ``trips`` and ``passes`` are examples: the page shows them, the tests run them.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnsel.candidates import CANDIDATES
from attnsel.verdict import EVIDENCE, Bad, Standing, Unknown
from attnsel.versions import Versions

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams
    from attnsel.policy import Policy

    Body = Callable[[AttentionParams, Environment], Bad | Unknown | None]

Example = Mapping[str, Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Page:
    """What is said about a rule of any kind: its code, its text and what it rests on."""

    code: str
    name: str
    title: str
    text: str
    source: str
    evidence: str
    module: str
    when_text: str = ""

    @property
    def family(self) -> str:
        return self.code.rstrip("0123456789")


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule(Page):
    """One constraint on what is asked, where it would run."""

    candidates: tuple[str, ...]
    when: tuple[Versions, ...]
    arch: Container[int] | None
    device: Container[str] | None
    fp8: bool | None
    body: Body
    trips: Example
    passes: Example

    def concerns(self, p: AttentionParams) -> bool:
        """Whether it is about this kind of question: FP8 attention, other, or both."""
        return self.fp8 is None or self.fp8 == p.fp8_attention

    def applies(self, env: Environment) -> bool:
        """Whether the gates are open in this environment."""
        if self.device is not None and env.device.type not in self.device:
            return False
        if self.arch is not None:
            arch = env.device.arch
            if arch is None or arch not in self.arch:
                return False
        for versions in self.when:  # noqa: SIM110 - a generator would cost more than the loop
            if getattr(env, versions.component) not in versions:
                return False
        return True


@dataclass(frozen=True, eq=False, kw_only=True)
class Wish(Page):
    """A refusal that rests on what the user asked for, or on what happened in this process."""

    body: Callable[..., Bad | None]  # (name, policy), and what one call takes where that matters
    trips: tuple[str, Example]  # a candidate, and the fields of a Policy that refuses it


@dataclass(frozen=True, eq=False, kw_only=True)
class Preference(Page):
    """One reason to put a candidate before another: the lower value goes first."""

    value: Callable[[Standing, int | None, Policy], int]


class Registry:
    """Everything that was written down, in order. Codes are unique across kinds.

    A plug-in makes one for its own rules and says which ``candidate`` they are about.
    """

    def __init__(self, candidate: str | None = None) -> None:
        self.pages: dict[str, Page] = {}
        self.candidate = candidate

    def add(self, page: Page) -> None:
        if page.code in self.pages:
            raise ValueError(f"{page.code} is taken: {page.name} needs a code of its own")
        self.pages[page.code] = page

    @property
    def rules(self) -> dict[str, Rule]:
        return {code: page for code, page in self.pages.items() if isinstance(page, Rule)}

    @property
    def wishes(self) -> dict[str, Wish]:
        return {code: page for code, page in self.pages.items() if isinstance(page, Wish)}

    @property
    def preferences(self) -> dict[str, Preference]:
        return {code: page for code, page in self.pages.items() if isinstance(page, Preference)}


REGISTRY = Registry()

INTERPRETED = "TRITON007"
"""The one rule a forced backend lifts: backend="triton" on CPU tensors asks for the interpreter."""

_CODE = re.compile(r"[A-Z]+\d{3}$")


def rule(
    code: str,
    *candidates: str,
    when: Versions | Iterable[Versions] = (),
    arch: Container[int] | None = None,
    device: Container[str] | None = None,
    fp8: bool | None = None,
    evidence: str,
    trips: Example | None = None,
    passes: Example | None = None,
    registry: Registry | None = None,
) -> Callable[[Body], Body]:
    """Register a constraint on ``candidates``.

    ``when``: version sets that must all hold. ``arch``: architectures, e.g. ``{90}`` or
    ``range(80, 90)``. ``device``: device types, e.g. ``{"cuda"}``; a rule with ``arch`` is about CUDA
    already. ``fp8``: only questions that run attention in FP8 (True), or only others (False).
    ``trips``/``passes``: fields of AttentionParams, or ``gpu`` and component versions, that
    differ from the defaults inside the gates. ``registry``: a plug-in's own; None is attnsel's.

    Raises ValueError at import for a rule that could not be explained: no docstring, no ``Source:``.
    """
    if not _CODE.match(code):
        raise ValueError(f"rule code {code!r}: capital letters and three digits, such as CUDNN204")
    target = REGISTRY if registry is None else registry
    allowed = tuple(CANDIDATES) if target.candidate is None else (target.candidate,)
    unknown = [name for name in candidates if name not in allowed]
    if unknown or not candidates:
        raise ValueError(f"{code}: candidates {unknown or 'missing'}; allowed: {', '.join(allowed)}")
    if evidence not in EVIDENCE:
        raise ValueError(f"{code}: evidence {evidence!r}; allowed: {', '.join(EVIDENCE)}")
    gates = (when,) if isinstance(when, Versions) else tuple(when)

    def register(body: Body) -> Body:
        page = Rule(
            **_page(code, body, evidence),
            candidates=candidates,
            when=gates,
            arch=arch,
            device=device,
            fp8=fp8,
            body=body,
            trips=dict(trips or {}),
            passes=dict(passes or {}),
            when_text=_gate_text(gates, arch),
        )
        target.add(page)
        return body

    return register


def wish(code: str, *, evidence: str = "policy", trips: tuple[str, Example]) -> Callable[[Any], Any]:
    """Register a refusal by policy: ``fn(candidate_name, policy) -> Bad | None``."""

    def register(fn: Callable[[str, Policy], Bad | None]) -> Any:
        REGISTRY.add(Wish(**_page(code, fn, evidence), body=fn, trips=trips))
        return fn

    return register


def preference(code: str, *, evidence: str) -> Callable[[Any], Any]:
    """Register an ordering: ``fn(standing, arch, policy) -> int``; lower first, first code decides."""

    def register(fn: Callable[[Standing, int | None, Policy], int]) -> Any:
        REGISTRY.add(Preference(**_page(code, fn, evidence), value=fn))
        return fn

    return register


def find_rule(code: str) -> Page:
    """A rule of any kind by its code. Raises KeyError with the nearest codes."""
    from attnsel.rules import load_all

    load_all()
    key = code.strip().upper()
    if key in REGISTRY.pages:
        return REGISTRY.pages[key]
    near = difflib.get_close_matches(key, REGISTRY.pages, n=3, cutoff=0.6)
    raise KeyError(f"no rule {code!r}{'; near: ' + ', '.join(near) if near else ''}")


def _page(code: str, fn: Callable[..., Any], evidence: str) -> dict[str, Any]:
    """What every kind of page says, from its code and its docstring."""
    doc = inspect.getdoc(fn)
    if not doc:
        raise ValueError(f"{code}: a rule needs a docstring; it is what users read")
    title, _, text = doc.partition("\n")
    source = re.search(r"^Source: (.+?)(?=\n[A-Z]\w+:|\Z)", text, re.MULTILINE | re.DOTALL)
    if not source:
        raise ValueError(f"{code}: the docstring needs a line 'Source: …'")
    return {
        "code": code,
        "name": fn.__name__,
        "title": title.rstrip("."),
        "text": text.strip(),
        "source": " ".join(source[1].split()),
        "evidence": evidence,
        "module": fn.__module__,
    }


def _gate_text(gates: tuple[Versions, ...], arch: Container[int] | None) -> str:
    names = {"cudnn": "cuDNN", "cudnn_frontend": "cudnn-frontend", "torch": "torch", "cuda": "CUDA"}
    parts = [f"{names.get(gate.component, gate.component)} {gate}" for gate in gates]
    if isinstance(arch, (range, set, frozenset, tuple)):
        parts.append("/".join(_arch_runs(sorted(arch))))
    return ", ".join(parts)


def _arch_runs(archs: list[int]) -> list[str]:
    """``[80, 81, …, 89, 110]`` as ``sm80 to sm89`` and ``sm110``."""
    runs: list[list[int]] = []
    for arch in archs:
        if runs and arch == runs[-1][-1] + 1:
            runs[-1].append(arch)
        else:
            runs.append([arch])
    return [f"sm{run[0]}" if len(run) == 1 else f"sm{run[0]} to sm{run[-1]}" for run in runs]
