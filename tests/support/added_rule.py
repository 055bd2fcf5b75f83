"""A rule that is there for one test: written as a contributor writes one, imported, and taken out again.

What is generated from the rules (pages, matrix, search) has to show it without another edit.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TEXT = '''
from __future__ import annotations

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import rule
from attnsel.verdicts.requirements import OneOf
from attnsel.verdicts.reasons import Violation
from attnsel.environment.versions import cudnn


@rule(
    "CUDNN999",
    "cudnn",
    when=cudnn(">=9.8.0"),
    arch={90},
    fp8=False,
    fires_on={"window_size": (128, 0), "attn_mask_type": "causal"},
)
def no_window_for_a_test(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper a sliding window is refused | by a <test> of the *site*

    Why: the test looks for the word quokka.
    Fix: wait until the test is over.
    Source: pytorch#987654; tests/support/added_rule.py, "TEXT".
    """
    if p.windowed:
        return Violation("window_size", p.window_size, OneOf((-1, -1)))
    return None
'''
"""CUDNN999: ``cudnn`` takes no window on sm90, from cuDNN 9.8.0 on, where really it does.

Its title holds what has a meaning in Markdown, in a table and in HTML."""

_names = itertools.count()


def forget() -> None:
    """Clear every memo of attnsel and of the site's generators: any may hold what the rules said."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("attnsel", "sitegen"):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if callable(clear) and not isinstance(value, type):  # not the type of memos itself
                    clear()


@contextmanager
def as_it_was() -> Iterator[None]:
    """attnsel's own registry afterwards holds what it held before, in the same order."""
    from attnsel.rules import REGISTRY, load_all

    load_all()
    known: tuple[dict[str, Any], ...] = (REGISTRY.pages, REGISTRY.removed)
    before = [dict(pages) for pages in known]
    try:
        yield
    finally:
        for pages, held in zip(known, before, strict=True):
            pages.clear()
            pages.update(held)
        forget()


@pytest.fixture
def added_rule(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``added_rule()`` adds CUDNN999 and gives its page; ``added_rule(text)`` imports another file of rules,
    and gives the page of the last one in it. When the test ends, nothing of them is left."""
    imported: list[str] = []

    def add(text: str = TEXT) -> Any:
        from attnsel.rules import REGISTRY

        name = f"rules_of_a_test_{next(_names)}"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        importlib.import_module(name)
        imported.append(name)
        forget()
        return list(REGISTRY.pages.values())[-1]

    with as_it_was():
        sys.path.insert(0, str(tmp_path))
        try:
            yield add
        finally:
            sys.path.remove(str(tmp_path))
            for name in imported:
                sys.modules.pop(name, None)
