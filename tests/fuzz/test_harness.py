"""The fuzzers find what is wrong: numbers off by 2 %, a mask one key too wide, a number kept from an earlier
call, padded rows that leak. Each is planted in ``tiled``, which every target runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from attention_numbers import Choices, cases, valid_case
from harness import Case, Failed, fuzz
from targets import TARGETS

from attnsel import clear_cache
from attnsel.runtime import kernels


def on_tiled(choose: Choices) -> Case:
    return valid_case(choose) | {"backend": "tiled"}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put ``change`` around one of tiled's functions."""

    def plant(part: str, change: Callable[..., Any]) -> None:
        kernel = kernels.kernel_of("tiled")
        whole = getattr(kernel, part)
        changed = kernel._replace(**{part: lambda *args: change(whole, *args)})
        monkeypatch.setitem(kernels.KERNELS, "tiled", changed)
        clear_cache()

    yield plant
    monkeypatch.undo()
    clear_cache()


def one_key_wider(whole: Any, spec: Any, *args: Any) -> Any:
    right = spec.window_right
    return whole(replace(spec, window_right=right + 1 if right >= 0 else right), *args)


def rows_that_leak(whole: Any, spec: Any, inputs: Any) -> Any:
    result = whole(spec, inputs)
    return result._replace(out=result.out + 0 * inputs.q.sum())


KEPT: dict[Any, Any] = {}


def lengths_of_an_earlier_call(whole: Any, spec: Any, inputs: Any) -> Any:
    KEPT.setdefault(spec, inputs.seqlens_kv)
    same = inputs.seqlens_kv is not None and KEPT[spec] is not None
    same = same and KEPT[spec].shape == inputs.seqlens_kv.shape
    return whole(spec, inputs._replace(seqlens_kv=KEPT[spec]) if same else inputs)


@pytest.mark.parametrize(
    ("target", "part", "change"),
    [
        ("numbers", "forward", one_key_wider),
        ("repeats", "forward", lengths_of_an_earlier_call),
        ("padding", "forward", rows_that_leak),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_error_is_found(target: str, part: str, change: Callable[..., Any], planted: Any) -> None:
    planted(part, change)
    drawn = TARGETS[target]
    if target == "numbers":
        drawn = replace(drawn, cases=cases(on_tiled))
    with pytest.raises(Failed, match="off by" if target == "numbers" else None):
        fuzz(drawn, 150, 1, shrink=False)
