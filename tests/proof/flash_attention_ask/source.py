"""Where a FlashAttention package lies, and which release it is, without importing it."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

from attnsel.environment.versions import Version

DISTRIBUTIONS = {"flash_attn.2": "flash-attn", "flash_attn.3": "flash-attn-3", "flash_attn.4": "flash-attn-4"}
COMPONENTS = {"flash_attn.2": "flash_attn", "flash_attn.3": "flash_attn_3", "flash_attn.4": "flash_attn_4"}
_MAIN_FILES = {
    "flash_attn.2": "flash_attn/flash_attn_interface.py",
    "flash_attn.3": "hopper/flash_attn_interface.py",
    "flash_attn.4": "flash_attn/cute/interface.py",
}
_STATED = {
    "flash_attn.2": ("flash_attn/__init__.py",),
    "flash_attn.3": ("hopper/__init__.py", "hopper/setup.py"),
    "flash_attn.4": (),
}
_TO_GET = {
    "flash_attn.2": "a checkout of the flash-attention repository at a tag (v2.8.3)",
    "flash_attn.3": "a checkout of the flash-attention repository, which has it in hopper/",
    "flash_attn.4": "pip download --no-deps 'flash-attn-4==4.0.0b36', and unpack the wheel",
}
_VERSION = re.compile(r"""^(?:__version__|PACKAGE_VERSION)\s*=\s*["']([^"']+)["']""", re.MULTILINE)


class Missing(Exception):
    """Something without which a package cannot be asked; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """A folder that holds a package, and its release."""

    backend: str
    folder: Path
    version: Version


def find_source(backend: str, given: str | None) -> Source:
    """The package in the folder ``given``, else the installed one. Raises Missing."""
    if given is not None:
        folder = Path(given).expanduser().resolve()
        if not (folder / _MAIN_FILES[backend]).is_file():
            raise Missing(f"{given} has no {_MAIN_FILES[backend]}: --source wants {_TO_GET[backend]}")
        return Source(backend, folder, _version(backend, folder))
    name = DISTRIBUTIONS[backend]
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise Missing(
            f"{name} is not installed; --source DIR asks one that lies in a folder: {_TO_GET[backend]}"
        ) from None
    folder = Path(str(found.locate_file("")))
    if not (folder / _MAIN_FILES[backend]).is_file():
        raise Missing(
            f"{name} {found.version} holds no {_MAIN_FILES[backend]}: --source DIR, {_TO_GET[backend]}"
        )
    return Source(backend, folder, Version.parse(found.version))


def _version(backend: str, folder: Path) -> Version:
    """From the metadata beside the package, else from where its source states it. Raises Missing."""
    wanted = DISTRIBUTIONS[backend]
    for found in importlib.metadata.distributions(path=[str(folder)]):
        if re.sub(r"[-_.]+", "-", found.metadata["Name"] or "").lower() == wanted:
            return Version.parse(found.version)
    for name in _STATED[backend]:
        path = folder / name
        stated = _VERSION.search(path.read_text(errors="replace")) if path.is_file() else None
        if stated is not None:
            return Version.parse(stated.group(1))
    raise Missing(f"{folder} does not say which release it is: --source wants {_TO_GET[backend]}")
