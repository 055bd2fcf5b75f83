"""Where it is asked: a GPU and the software beside it, as found or as described."""

from attnsel.environment.machine import (
    COMPONENTS,
    Device,
    Environment,
    Missing,
    describe_device,
    require_known_torch,
    without_code,
)
from attnsel.environment.versions import COMPONENT_NAMES, component_name

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
