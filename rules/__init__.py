"""The knowledge: one small function per constraint, a file per family.

====================  ==========================================================
file                  constrains
====================  ==========================================================
``common``            what every candidate needs: a device, an installed library
``cudnn/``            cuDNN fused attention
``sdpa/``             PyTorch's four SDPA kernels
``flash_attention/``  FlashAttention's own packages, 2, 3 and 4
``triton``            attnsel's own Triton kernels
``tiled``             the plain PyTorch fallback
``context_parallel``  one sequence over many ranks
``bugs``              what compiles, runs and is wrong
``preferences``       which of several candidates goes first, and why
``orders``            which kernel family is the faster one, by the kind of call
``figures``           published times, as rows
``policies``          what the user allowed or forbade, and what does not fit
``hints``              questions that may not be what was meant
``takes``             what a record does not list under ``takes``
``codes``             which codes lie in which file, and those that were in use once
``api``               how a rule is written down
====================  ==========================================================

Everything a rule says (``attnsel rule CODE``) comes from its decorator and docstring.
"""

import difflib
import importlib

from attnsel.backends.registry import CANDIDATES, complete
from attnsel.rules.api import (
    REGISTRY,
    Hint,
    Placing,
    PolicyRule,
    Preference,
    Registry,
    Removed,
    Rule,
    limit,
    policy_rule,
    preference,
    rule,
)
from attnsel.rules.takes import add_limits
from attnsel.verdicts.reasons import Page

__all__ = [
    "REGISTRY",
    "Hint",
    "Page",
    "Placing",
    "PolicyRule",
    "Preference",
    "Registry",
    "Removed",
    "Rule",
    "add_limits",
    "find_rule",
    "limit",
    "load_all",
    "load_families",
    "policy_rule",
    "preference",
    "rule",
]

_FIRST = ("attnsel.rules.codes", "attnsel.rules.common", "attnsel.rules.policies")
_LAST = (
    "attnsel.rules.context_parallel",
    "attnsel.rules.bugs",
    "attnsel.rules.preferences",
    "attnsel.rules.hints",
)

_limited: set[str] = set()


def load_families() -> None:
    """Import what is known about attnsel's own candidates. Later calls cost a dictionary look-up each."""
    for module in _FIRST:
        importlib.import_module(module)
    for record in list(CANDIDATES.values()):
        if not record.plugin:
            for module in record.rules:
                importlib.import_module(module)
            if record.name not in _limited:
                _limited.add(record.name)
                add_limits(record)
    for module in _LAST:
        importlib.import_module(module)


def load_all() -> None:
    """Every family and every plug-in's rules, so that the registry is complete."""
    load_families()
    complete()


def find_rule(code: str) -> Page | Removed:
    """A rule of any kind, or what became of it, by its code. Raises KeyError with the nearest codes."""
    load_all()
    key = code.strip().upper()
    found: Page | Removed | None = REGISTRY.pages.get(key) or REGISTRY.removed.get(key)
    if found is not None:
        return found
    near = difflib.get_close_matches(key, REGISTRY.pages, n=3, cutoff=0.6)
    raise KeyError(f"no rule {code!r}{'; near: ' + ', '.join(near) if near else ''}")
