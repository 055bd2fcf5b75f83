"""The knowledge: one small function per constraint, a file per family.

=============  ==========================================================
file           speaks about
=============  ==========================================================
``common``     what every candidate needs: a device, an installed library
``cudnn/``     cuDNN fused attention
``sdpa``       PyTorch's four SDPA kernels
``triton``     attnsel's own Triton kernels
``tiled``      the plain PyTorch fallback
``context_parallel``  one sequence over many ranks
``bugs``       what compiles, runs and is wrong
``preferences``  which of several candidates goes first, and why
``policies``   what the user allowed, wished or forbade
``takes``      what a plug-in did not say that it takes
=============  ==========================================================

Everything a rule says (``attnsel rule CODE``) comes from its decorator and docstring.
"""

import importlib

from attnsel.rules.api import (
    REGISTRY,
    Page,
    Preference,
    Registry,
    Rule,
    Wish,
    find_rule,
    preference,
    rule,
    wish,
)

__all__ = [
    "REGISTRY",
    "Page",
    "Preference",
    "Registry",
    "Rule",
    "Wish",
    "find_rule",
    "load_all",
    "load_families",
    "preference",
    "rule",
    "wish",
]

FAMILIES = (
    "common",
    "policies",
    "cudnn",
    "triton",
    "sdpa",
    "tiled",
    "context_parallel",
    "bugs",
    "preferences",
)


def load_families() -> None:
    """Import every family. Later calls cost a dictionary look-up each."""
    for family in FAMILIES:
        importlib.import_module(f"attnsel.rules.{family}")


def load_all() -> None:
    """Every family and every plug-in's rules, so that the registry is complete."""
    from attnsel.plugins import load_plugins  # late: a plug-in's module may import anything up to here

    load_families()
    load_plugins()
