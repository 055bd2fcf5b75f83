"""Policies and settings: where they come from, and how far they reach."""

from __future__ import annotations

import warnings

import pytest

from attnsel import InvalidInput, settings
from attnsel.settings import VARIABLES, VariableWarning, configure, current
from tables import each


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    configure()
    yield
    monkeypatch.undo()
    configure()


@each("variable, text", [("ATTNSEL_BACKENDS", "fast"), ("ATTNSEL_DEBUG", "3")])
def test_a_bad_variable_is_named_with_its_value(monkeypatch, variable, text):
    with monkeypatch.context() as patched:
        patched.setenv(variable, text)
        with pytest.raises(InvalidInput) as caught:
            configure()
    assert caught.value.field == variable
    assert caught.value.value == text


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
