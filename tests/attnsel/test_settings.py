"""Policies and settings: where they come from, and how far they reach."""

from __future__ import annotations

import warnings

import pytest

from attnsel import settings
from attnsel.settings import VARIABLES, VariableWarning, configure, current


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    configure()
    yield
    monkeypatch.undo()
    configure()


def test_a_misspelt_variable_is_warned_of_once_at_the_callers_line(monkeypatch):
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setattr(settings, "_process", None)
    monkeypatch.setenv("ATTNSEL_BACKEND", "triton")
    wanted = "ATTNSEL_BACKEND is set and nothing reads it: did you mean ATTNSEL_BACKENDS[?]"
    with pytest.warns(VariableWarning, match=wanted) as told:
        current()
    assert [one.filename for one in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configure()
        current()
