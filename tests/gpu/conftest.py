"""The GPU suite: not collected where there is no CUDA device.

pytest tests/gpu                       on a GPU
pytest tests/gpu --gpu-device=cpu      the same tests on Triton's interpreter, at tiny shapes
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shows import shown_by


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-device", choices=("cuda", "cpu"), default="cuda", help="where tests/gpu runs")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "cuda_only(why): has no meaning, or takes too long, on the interpreter"
    )
    config.addinivalue_line(
        "markers", "shows(candidate, *features, also=()): what it shows, see tests/support/shows.py"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without a device every test would be skipped: a module is then not even imported."""
    return True if _device(config) == "cuda" and not torch.cuda.is_available() else None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.user_properties.append(("shows", shown_by(item)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _device(item.config) == "cpu":
        marker = item.get_closest_marker("cuda_only")
        if marker is not None:
            pytest.skip(f"not on the interpreter: {marker.args[0]}")


def _device(config: pytest.Config) -> str:
    # Without a default: the option does not exist where this file was found late.
    return str(config.getoption("gpu_device", default="cuda"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    if _device(request.config) == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference for float32 is float32
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def arch(device: torch.device) -> int | None:
    """90 for sm90; None on the interpreter."""
    if device.type == "cpu":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@pytest.fixture(scope="session")
def scale(device: torch.device) -> int:
    """Lengths of the shared cases times this: 21 by 27 becomes 357 by 459, several tiles and an odd rest."""
    return 17 if device.type == "cuda" else 1


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A kernel that faults does so in the test that launched it."""
    yield
    if _device(request.config) == "cuda" and torch.cuda.is_available():
        torch.cuda.synchronize()
