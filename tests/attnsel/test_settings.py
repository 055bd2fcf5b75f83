"""Policies and settings: where they come from, and how far they reach."""

from __future__ import annotations

import warnings

import pytest

import attnsel
from attnsel import InvalidInput, settings
from attnsel.settings import VARIABLES, VariableWarning, configure, current, unknown_variables
from tables import each


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    configure()
    yield
    monkeypatch.undo()
    configure()


@each(
    "variable, text, field, value",
    [
        ("ATTNSEL_BACKENDS", "triton, sdpa.flash", "allow", ("triton", "sdpa.flash")),
        ("ATTNSEL_DISABLE", "cudnn", "deny", ("cudnn",)),
        ("ATTNSEL_ADAPT", "never", "adapt", "never"),
        ("ATTNSEL_ALLOW_KNOWN_BUGS", "bug007,BUG008", "allow_known_bugs", ("BUG007", "BUG008")),
        ("ATTNSEL_DETERMINISTIC", "1", "deterministic", True),
        ("ATTNSEL_MEMORY_LIMIT", "2GiB", "memory_limit", 2 << 30),
    ],
)
def test_the_environment_sets_the_policy(monkeypatch, variable, text, field, value):
    with monkeypatch.context() as patched:
        patched.setenv(variable, text)
        assert getattr(configure().policy, field) == value


@each(
    "variable, text",
    [
        ("ATTNSEL_BACKENDS", "fast"),
        ("ATTNSEL_DEBUG", "3"),
        ("ATTNSEL_DEBUG", "yes"),
        ("ATTNSEL_ADAPT", "maybe"),
        ("ATTNSEL_DEBUG_FORMAT", "xml"),
        ("ATTNSEL_DETERMINISTIC", "perhaps"),
        ("ATTNSEL_MEMORY_LIMIT", "plenty"),
    ],
)
def test_a_bad_variable_is_named_with_its_value(monkeypatch, variable, text):
    with monkeypatch.context() as patched:
        patched.setenv(variable, text)
        with pytest.raises(InvalidInput) as caught:
            configure()
    assert caught.value.field == variable
    assert caught.value.value == text


@each(
    "changes, field",
    [
        ({"backend": ["tiled"]}, "backend"),
        ({"backend": 3}, "backend"),
        ({"allow": [["tiled"]]}, "allow"),
        ({"deny": {"tiled", 1}}, "deny"),
        ({"policy": "never", "adapt": "never"}, "policy"),
        ({"backends": "cudnn"}, "backends"),
        ({"allow": ("flash",)}, "allow"),
    ],
)
def test_a_value_of_another_type_is_named(changes, field):
    with pytest.raises(InvalidInput) as caught:
        attnsel.configure(**changes)
    assert caught.value.field == field


@each(
    "written, meant",
    [
        ("ATTNSEL_BACKEND", "ATTNSEL_BACKENDS"),
        ("ATTNSEL_ALLOW", "ATTNSEL_BACKENDS"),
        ("ATTNSEL_DENY", "ATTNSEL_DISABLE"),
        ("ATTNSEL_DISBALE", "ATTNSEL_DISABLE"),
        ("ATTNSEL_EXCLUDE", "ATTNSEL_DISABLE"),
        ("attnsel_debug", "ATTNSEL_DEBUG"),
        ("ATTNSEL_MAX_MEMORY", "ATTNSEL_MEMORY_LIMIT"),
        ("ATTNSEL_COLOUR", ""),
    ],
)
def test_a_misspelt_variable_is_known_by_what_was_meant(written, meant):
    assert unknown_variables({written: "x", "HOME": "/", "ATTNSEL_DEBUG": "0"}) == {written: meant}


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
