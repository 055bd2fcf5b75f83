"""Which cudnn-frontend, in C++, is inside each release of TransformerEngine.

Up to 2.17 it is a submodule, compiled into TransformerEngine's libraries, whatever nvidia-cudnn-frontend is
installed beside it. Read from NVIDIA/TransformerEngine: the commit of ``3rdparty/cudnn-frontend`` at each tag
from v1.0 to v2.17.1, and that commit's version in cudnn-frontend's CMakeLists.txt (of v2.17: the title of
66e8aab1b). From 2.18 on there is no submodule (8d06ed40d, #3169): it is compiled against the headers of the
nvidia-cudnn-frontend that was installed there, 1.25.0 or newer (pyproject.toml of v2.18).
"""

from __future__ import annotations

from attnsel.environment.versions import Version

_BUNDLED: tuple[tuple[Version, Version], ...] = tuple(
    (Version.parse(release), Version.parse(frontend))
    for release, frontend in (
        line.split()
        for line in (
            "1.0   0.9.2",
            "1.2   1.0.0",
            "1.3   1.0.3",
            "1.6   1.3.0",
            "1.8   1.4.0",
            "1.9   1.5.2",
            "1.10  1.6.1",
            "1.12  1.8.0",
            "2.0   1.10.0",
            "2.2   1.11.0",
            "2.4   1.12.0",
            "2.5   1.12.1",
            "2.6   1.13.0",
            "2.7   1.14.0",
            "2.8   1.14.1",
            "2.9   1.15.0",
            "2.10  1.16.0",
            "2.11  1.16.1",
            "2.12  1.17.0",
            "2.13  1.18.0",
            "2.14  1.21.0",
            "2.15  1.22.0",
            "2.17  1.25.0",
        )
    )
)
"""The first release with a frontend, and that frontend; it stays until the next row."""

UNBUNDLED = Version(2, 18, 0)
"""The first release that is compiled against an installed frontend."""

OLDEST_INSTALLED = Version(1, 25, 0)
"""The oldest frontend that such a release may be compiled against."""


def bundled_frontend(transformer_engine: Version) -> Version | None:
    """The frontend inside a release; None where it has none of its own, or is older than the table."""
    if transformer_engine >= UNBUNDLED:
        return None
    found = [frontend for release, frontend in _BUNDLED if release <= transformer_engine]
    return found[-1] if found else None
