"""What the driver says of clocks and power, with a stand-in for NVML and for the device."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import clocks  # noqa: E402


class NVMLError(Exception):
    pass


def no_sensor(*asked: object) -> int:
    raise NVMLError("Not Supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A driver with the GPU "GPU-7"; torch has it as its current device."""
    asked: list[Any] = []

    def by_uuid(uuid: str) -> str:
        asked.append(uuid)
        if uuid != "GPU-7":
            raise NVMLError("Not Found")
        return uuid

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        asked=asked,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: asked.append("shutdown"),
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetClockInfo=lambda gpu, clock: {1: 1980, 2: 3201}[clock],
        nvmlDeviceGetPowerUsage=lambda gpu: 698_765,
        nvmlDeviceGetTemperature=no_sensor,
        nvmlDeviceGetPowerManagementLimit=lambda gpu: 700_000,
        nvmlSystemGetDriverVersion=lambda: "580.95.05",
    )
    properties = SimpleNamespace(
        uuid="7", name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30, multi_processor_count=132
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return fake


def test_clocks_and_power_are_those_of_torch_s_device_and_what_is_missing_is_told(
    nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert clocks.state() == {
        "clocks.sm": "1980 MHz",
        "clocks.mem": "3201 MHz",
        "power.draw": "698.76 W",
        "temperature.gpu": None,  # this board has no sensor, which spoils nothing else
    }
    assert nvml.asked == ["GPU-7", "shutdown"]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    said = clocks.describe(torch.device("cuda"))
    assert (said["name"], said["driver"], said["power_limit"]) == ("NVIDIA H200", None, None)
    assert clocks.state()["missing"] == "pip install nvidia-ml-py"
