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
=============  ==========================================================

Everything a rule says (``attnsel rule CODE``) comes from its decorator and docstring.
"""

import importlib

from attnsel.rules.api import REGISTRY, Page, Preference, Rule, Wish, find_rule, preference, rule, wish

__all__ = [
    "REGISTRY",
    "Page",
    "Preference",
    "Rule",
    "Wish",
    "find_rule",
    "load_all",
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


def load_all() -> None:
    """Import every family, so that the registry is complete. Later calls cost a dictionary look-up."""
    for family in FAMILIES:
        importlib.import_module(f"attnsel.rules.{family}")
