"""Where it is asked: a GPU and the software beside it, as found or as described."""

from attnsel.environment.machine import (
    COMPONENT_NAMES,
    COMPONENTS,
    Device,
    Environment,
    Missing,
    component_name,
    describe_device,
    require_known_torch,
    without_code,
)

__all__ = [
    "COMPONENTS",
    "COMPONENT_NAMES",
    "Device",
    "Environment",
    "Missing",
    "component_name",
    "describe_device",
    "require_known_torch",
    "without_code",
]
