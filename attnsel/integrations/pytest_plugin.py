"""``@pytest.mark.attention``: a test fails where its attention silently runs on another kernel.

pytest loads this in every run where attnsel is installed (entry point ``pytest11``): nothing is imported
before a test has the mark.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

_MARKER = (
    "attention(kernel=None, max_score_bytes=None): fail where attention in this test ran on another kernel "
    "than `kernel` (a name of attnsel's or several, 'by hand' among them; None: on a slow path although a "
    "better one was there), or made more than so many bytes of scores or masks of queries x keys"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(hookwrapper=True)  # as pytest before 8 knows it too
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    mark = item.get_closest_marker("attention")
    if mark is None:
        yield
        return
    from attnsel.diagnose.watching.expected import broken, kernels_of
    from attnsel.diagnose.watching.session import watch

    try:
        kernel, most = _arguments(*mark.args, **mark.kwargs)
        kernels = kernels_of(kernel)
    except (TypeError, ValueError) as error:  # InvalidInput among them
        pytest.fail(f"@pytest.mark.attention: {error}", pytrace=False)
    with watch() as seen:
        outcome = yield
    if outcome.excinfo is None and (told := broken(seen.watched(), kernels, most)):
        text = "\n".join(("attention did not run as this test expects:", *told))
        outcome.force_exception(pytest.fail.Exception(text, pytrace=False))


def _arguments(kernel: Any = None, max_score_bytes: int | None = None) -> tuple[Any, int | None]:
    """What a mark says; Python's own error for what it does not take."""
    return kernel, max_score_bytes
