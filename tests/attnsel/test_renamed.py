"""Earlier names still work: each gives what it is called now, with one warning at the caller's line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

import attnsel
from attnsel import plugins
from attnsel.plugins import Registry
from attnsel.rules import rule
from attnsel.verdicts.requirements import AtMost


def warned(ask: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a lambda of one line gives, and its warnings: all of them say that line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = ask()
    code = ask.__code__
    for each in caught:
        assert each.category is DeprecationWarning
        assert (each.filename, each.lineno) == (code.co_filename, code.co_firstlineno)
    return value, [str(each.message) for each in caught]


def current(new: str) -> Any:
    if new in attnsel._NEEDS_TORCH:
        pytest.importorskip("torch")
    return getattr(attnsel, new)


@pytest.mark.parametrize(("old", "new"), attnsel._RENAMED.items())
def test_a_name_of_the_package(old: str, new: str) -> None:
    now = current(new)
    value, told = warned(lambda: getattr(attnsel, old))
    assert value is now
    assert told == [f"attnsel.{old} is attnsel.{new} now"]
    assert new in dir(attnsel)
    assert old not in dir(attnsel)


@pytest.mark.parametrize(("old", "new"), attnsel._RENAMED.items())
def test_a_name_that_is_imported_from_the_package(old: str, new: str) -> None:
    now, space = current(new), {"__name__": "theirs"}
    code = compile(f"\n\nfrom attnsel import {old} as found", "theirs.py", "exec")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        exec(code, space)
    assert space["found"] is now
    # Python looks twice for it, and shows once what one line is told twice.
    assert [(str(each.message), each.filename, each.lineno) for each in caught] == [
        (f"attnsel.{old} is attnsel.{new} now", "theirs.py", 3)
    ]


@pytest.mark.parametrize(("old", "new"), plugins._RENAMED.items())
def test_a_name_for_plug_ins(old: str, new: Any) -> None:
    value, told = warned(lambda: getattr(plugins, old))
    assert value is new is getattr(plugins, new.__name__)
    assert told == [f"attnsel.plugins.{old} is {new.__name__} now"]


def test_an_argument_of_a_rule() -> None:
    own = Registry("acme")
    about = {"requires": {"head_dim_qk": AtMost(32)}, "evidence": "measured", "registry": own}
    register, told = warned(lambda: rule("ACME001", "acme", trips={"head_dim_qk": 64}, **about))

    @register
    def too_wide(p, env):
        """Nothing is wider than 32 for this rule

        Why: it is a test's.
        Source: this file.
        """
        return True

    assert told == ["ACME001: trips is fires_on now"]
    assert own.rules["ACME001"].fires_on == {"head_dim_qk": 64}


@pytest.mark.parametrize("module", [attnsel, plugins])
def test_a_name_that_never_was_is_an_error_and_no_warning(module: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
            _ = module.no_such_name
