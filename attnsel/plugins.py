"""Candidates from elsewhere: a package adds its kernel, and the rules about it, without a change here.

Three pieces. In the package's pyproject.toml, an entry point::

    [project.entry-points."attnsel.backends"]
    acme = "acme_attention.planning:PLUGIN"

In ``acme_attention/planning.py``, which must import no torch (plans are made where there is none)::

    from attnsel.plugins import Bad, Multiple, Plugin, Registry, rule

    RULES = Registry("acme.flash")

    @rule("ACME001", "acme.flash", registry=RULES, evidence="documented", trips={"head_dim_qk": 100})
    def whole_vectors(p, env):
        '''The head dimension must be a multiple of 8

        Why: rows are loaded 16 bytes at a time.
        Fix: pad the heads.
        Source: acme_attention's README.
        '''
        return Bad("head_dim_qk", p.head_dim_qk, Multiple(8)) if p.head_dim_qk % 8 else None

    PLUGIN = Plugin(
        name="acme.flash",
        title="Acme's attention",
        family="ACME",
        kernel="acme_attention.kernel",
        takes={"cuda", "bf16", "fp16", "causal", "top_left", "training"},
        rules=RULES,
        place="before triton",
    )

And ``acme_attention/kernel.py``: ``forward(spec, inputs)`` and ``backward(spec, inputs, result, dout)`` as
attnsel/backends/contract.py states them, and ``prepare(spec, inputs)`` if there is something to compile.
It is imported when the candidate is first chosen.

A plug-in that does not load, or says something that cannot be, is named in a warning and by
``attnsel doctor``, and left out.
"""

from __future__ import annotations

import importlib.metadata
import re
import threading
import warnings
from collections.abc import Collection
from typing import NamedTuple

from attnsel.candidates import CANDIDATES, CandidateInfo
from attnsel.rules import load_families
from attnsel.rules.api import REGISTRY, Page, Registry, Rule, rule
from attnsel.rules.takes import DEVICES, DTYPES, WORDS, limits
from attnsel.verdict import AtLeast, AtMost, Bad, EqualTo, Multiple, OneOf, Unknown, Words

__all__ = [
    "AtLeast",
    "AtMost",
    "Bad",
    "EqualTo",
    "Multiple",
    "OneOf",
    "Plugin",
    "PluginWarning",
    "Registry",
    "Unknown",
    "Words",
    "load_plugins",
    "rule",
]

GROUP = "attnsel.backends"
ADAPTATIONS = ("contiguous", "expand_gqa")  # what attnsel itself carries out for any candidate
LONGEST_NAME = 15  # columns a report has for it


class Plugin(NamedTuple):
    """One candidate from elsewhere. ``name``, ``title``, ``family``, ``kernel`` and ``takes`` are required.

    name: lower-case words joined by dots, such as "acme.flash"; 15 characters at most.
    title: a few words for lists.
    family: capital letters that begin the codes of its rules. ``<family>000`` is the rule that ``takes``
        makes.
    kernel: the module with ``forward``, ``backward`` and perhaps ``prepare``.
    takes: what the kernel takes; a call that asks for anything else is refused. Element types (bf16, fp16,
        fp32, fp64), device types (cuda, rocm, cpu, mps, xpu) and features: training, causal, window,
        top_left and bottom_right (the diagonal's anchor, where lengths differ), padding, mask, thd, gaps,
        paged, gqa, head_dim_v, bias, bias_grad, alibi, softcap, sinks, dropout, deterministic, lse,
        max_logit, strides, cuda_graph, empty. Dropout is the contract's: its seed is given, and its entries
        are numbered.
    rules: what narrows that down; each about ``name`` alone.
    place: "before NAME" or "after NAME", where it ranks among attnsel's fused kernels; behind them if empty.
    proven: where tests of the maker's show it right: architectures ("sm90") and "cpu". Elsewhere it ranks
        below what is proven, and its first call is compared with ``tiled``.
    adaptations: exact changes that may be made for it, of "contiguous" and "expand_gqa".
    last_resort: right and slow: it then ranks among the last.
    source: what ``takes`` rests on, for the page of ``<family>000``; the distribution's name if empty.
    """

    name: str
    title: str
    family: str
    kernel: str
    takes: Collection[str]
    rules: Registry | None = None
    place: str = ""
    proven: Collection[str] = ()
    adaptations: tuple[str, ...] = ()
    last_resort: bool = False
    source: str = ""


class PluginWarning(UserWarning):
    """A plug-in was left out."""


class Found(NamedTuple):
    """An entry point of the group: where it comes from, and the plug-in or what is wrong with it."""

    entry: str  # "acme = acme_attention.planning:PLUGIN"
    distribution: str  # "acme-attention 1.2"
    plugin: Plugin | None
    trouble: str = ""


_found: tuple[Found, ...] | None = None
_loading = False
_lock = threading.RLock()


def load_plugins() -> tuple[Found, ...]:
    """Every plug-in that is installed, its candidate and rules in their places. Looks once per process.

    Not when attnsel is imported: a plug-in's package may be what imports it. Looking takes 3 ms where 40
    distributions are installed and 30 ms where 400 are (importlib.metadata reads each one's entry points).
    """
    return _look() if _found is None else _found


def _look() -> tuple[Found, ...]:
    global _found, _loading
    with _lock:
        if _found is not None:
            return _found
        if _loading:
            raise RuntimeError("attnsel was asked to choose while its plug-ins are imported")
        _loading = True
        try:
            load_families()
            points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: (e.name, e.value))
            _found = tuple([_load(point) for point in points])
        finally:
            _loading = False
        return _found


def _load(point: importlib.metadata.EntryPoint) -> Found:
    dist = point.dist
    distribution = "an unnamed distribution" if dist is None else f"{dist.name} {dist.version}"
    entry = f"{point.name} = {point.value}"
    try:
        plugin = point.load()
        _admit(plugin, distribution)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a stranger's import raises, SystemExit included
        trouble = " ".join(f"{type(error).__name__}: {error}".split())
        warnings.warn(
            f"the attnsel plug-in {entry!r} of {distribution} is left out: {trouble}",
            PluginWarning,
            stacklevel=5,
        )
        return Found(entry, distribution, None, trouble)
    return Found(entry, distribution, plugin)


def _admit(plugin: Plugin, distribution: str) -> None:
    """Put it among the candidates and its rules among the rules, or raise and change nothing."""
    if not isinstance(plugin, Plugin):
        raise TypeError(f"it loads to {type(plugin).__name__!r}; allowed: an attnsel.plugins.Plugin")
    _check_words(plugin)
    own = Registry(plugin.name)
    limits(own, plugin.name, plugin.family, frozenset(plugin.takes), plugin.source or distribution)
    pages: dict[str, Page] = {} if plugin.rules is None else plugin.rules.pages
    for page in pages.values():
        _check_rule(page, plugin)
        own.add(page)
    for code in own.pages:
        if code in REGISTRY.pages:
            raise ValueError(f"rule code {code} is taken by {REGISTRY.pages[code].module}")
    CANDIDATES[plugin.name] = CandidateInfo(
        plugin.name,
        plugin.title,
        True,
        plugin.adaptations,
        plugin.last_resort,
        plugin=distribution,
        proven_on=frozenset(plugin.proven),
        kernel=plugin.kernel,
        place=_place(plugin),
    )
    REGISTRY.pages.update(own.pages)


def _check_words(plugin: Plugin) -> None:
    """Raises ValueError or TypeError naming the field, its value and what is allowed."""
    for field in ("name", "title", "family", "kernel", "place", "source"):
        if not isinstance(getattr(plugin, field), str):
            raise TypeError(f"{field} = {getattr(plugin, field)!r}: must be text")
    name, family = plugin.name, plugin.family
    if not re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*", name) or len(name) > LONGEST_NAME:
        raise ValueError(f"name = {name!r}: lower-case words joined by dots, {LONGEST_NAME} characters")
    if name in CANDIDATES:
        owner = CANDIDATES[name].plugin or "attnsel"
        raise ValueError(f"name = {name!r}: taken by {owner}")
    if not re.fullmatch(r"[A-Z]{2,8}", family) or family in {page.family for page in REGISTRY.pages.values()}:
        raise ValueError(f"family = {family!r}: two to eight capital letters that begin no other's codes")
    if not re.fullmatch(r"\w+(\.\w+)*", plugin.kernel):
        raise ValueError(f"kernel = {plugin.kernel!r}: the name of a module")
    _check_listed("takes", plugin.takes, WORDS)
    for kind, words in (("element", DTYPES), ("device", DEVICES)):
        if not set(words) & set(plugin.takes):
            raise ValueError(f"takes = {sorted(plugin.takes)}: needs a type of {kind}: {', '.join(words)}")
    _check_listed("adaptations", plugin.adaptations, ADAPTATIONS)
    odd = [word for word in _collection("proven", plugin.proven) if not re.fullmatch(r"sm\d+|[a-z]+", word)]
    if odd:
        raise ValueError(f"proven = {odd[0]!r}: an architecture such as 'sm90', or 'cpu'")
    _place(plugin)
    if plugin.rules is not None and not isinstance(plugin.rules, Registry):
        raise TypeError(f"rules = {plugin.rules!r}: must be a Registry")


def _collection(field: str, value: Collection[str]) -> Collection[str]:
    listed = isinstance(value, (list, tuple, set, frozenset))
    if not listed or not all(isinstance(word, str) for word in value):
        raise TypeError(f"{field} = {value!r}: must be a set or a list of words")
    return value


def _check_listed(field: str, value: Collection[str], allowed: tuple[str, ...]) -> None:
    unknown = sorted(set(_collection(field, value)) - set(allowed))
    if unknown:
        raise ValueError(f"{field} = {unknown[0]!r}: allowed: {', '.join(allowed)}")


def _check_rule(page: Page, plugin: Plugin) -> None:
    if not isinstance(page, Rule):
        raise TypeError(f"{page.code} is a {type(page).__name__}; a plug-in has rules only")
    if page.candidates != (plugin.name,):
        raise ValueError(f"{page.code} is about {', '.join(page.candidates)}; allowed: {plugin.name}")
    if page.family != plugin.family:
        raise ValueError(f"rule code {page.code}: must begin with {plugin.family}")


def _place(plugin: Plugin) -> tuple[str, int] | None:
    """("triton", -1) for "before triton"; None for no place. Raises ValueError for anything else."""
    if not plugin.place:
        return None
    side, _, name = plugin.place.partition(" ")
    ours = [info.name for info in CANDIDATES.values() if not info.plugin and not info.last_resort]
    if side not in ("before", "after") or name not in ours:
        raise ValueError(f"place = {plugin.place!r}: 'before' or 'after' one of {', '.join(ours)}")
    return name, -1 if side == "before" else 1
