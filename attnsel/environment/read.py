"""How old the knowledge is: the newest release of each component that was read, and what is newer than that.

A release that nobody has read is answered as the newest one that somebody did, and the answer says so. That
is done in one place: rules are asked about :func:`as_read`, so that no gate and no table meets a version that
is not known, and whoever tells an answer tells :func:`unread` of it. The rows are ``data/read.csv``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from attnsel.base.model import FrozenModel
from attnsel.base.records import json_fields
from attnsel.base.rows import read_rows
from attnsel.environment.gpus import read_as
from attnsel.environment.versions import Version, Versions, component_name, versions_of

E = TypeVar("E", bound=FrozenModel)
"""An ``Environment``, whose module reads this one."""


@json_fields("what", "value", "read_as", "on", ("text", str))
class Unread(NamedTuple):
    """Something newer than anything of its kind that was read; the text is the sentence that says so.

    ``what``: a component as people write it, or a kind of thing. ``value``: what was stated or found.
    ``read_as``: what it is answered as. ``on``: the day on which that was read (2026-11-23).
    """

    what: str
    value: str
    read_as: str
    on: str

    def __str__(self) -> str:
        return (
            f"{self.what} {self.value} is answered as {self.read_as}, the newest read on {self.on}; "
            "nothing newer is known"
        )


class Read(NamedTuple):
    """A row. ``newest``: as it is written, and as a ``version`` where it is a release; ``others``: newer
    releases that are known too."""

    subject: str
    packages: tuple[str, ...]
    newest: str
    version: Version | None
    others: Versions | None
    released: str
    tables: tuple[str, ...]
    source: str
    on: str

    @property
    def name(self) -> str:
        """As people write it: ``cuDNN``, ``flash-attn``."""
        return component_name(self.subject)

    def unread(self, version: Version | None) -> Unread | None:
        """What is to be said of a version; None of one that is not newer than what was read."""
        if version is None or self.version is None or version <= self.version:
            return None
        if self.others is not None and version in self.others:
            return None
        return Unread(self.name, str(version), str(self.version), self.on)


@lru_cache(maxsize=1)
def everything_read() -> dict[str, Read]:
    """Every row, by its subject."""
    return {row["subject"]: _read(row) for row in read_rows("attnsel.environment", "read")}


def _read(row: dict[str, str]) -> Read:
    subject, newest = row["subject"], row["newest"]
    return Read(
        subject=subject,
        packages=tuple(row["packages"].split()),
        newest=newest,
        version=Version.parse(newest) if newest[:1].isdigit() else None,
        others=versions_of(subject, *row["others"].split("; ")) if row["others"] else None,
        released=row["released"],
        tables=tuple(row["tables"].split("; ")),
        source=row["source"],
        on=row["read"],
    )


def newest_read(subject: str) -> Version:
    """The newest release that was read of a component, or of transformers."""
    version = everything_read()[subject].version
    assert version is not None, f"{subject} has no releases"
    return version


def unread_release(subject: str, version: Version | None) -> Unread | None:
    """What is to be said of one version of a component, or of transformers; None where it was read, and of
    what is in no table (CUDA, Python)."""
    row = everything_read().get(subject)
    return None if row is None else row.unread(version)


@lru_cache(maxsize=8)
def _rows_of(kind: type[FrozenModel]) -> tuple[Read, ...]:
    """Those about a field of a model."""
    return tuple(row for row in everything_read().values() if row.subject in kind.model_fields)


@lru_cache(maxsize=1024)
def unread(environment: FrozenModel) -> tuple[Unread, ...]:
    """What of an ``Environment`` is newer than anything that was read: its GPU, then the rows in order."""
    found = [row.unread(getattr(environment, row.subject)) for row in _rows_of(type(environment))]
    return tuple([one for one in (_unread_gpu(environment), *found) if one is not None])


def _unread_gpu(environment: Any) -> Unread | None:
    """What is to be said of a GPU of an architecture whose kernels nobody has read."""
    device, read = environment.device, read_as(environment.device.arch)
    arch = f"sm{device.arch}"
    value = arch if device.name in ("", arch) else f"{device.name} ({arch})"
    return Unread("GPU", value, f"sm{read}", everything_read()["gpus"].on) if read else None


def as_read(environment: E) -> E:
    """The ``Environment`` that answers for this one: the newest that was read in place of what is newer."""
    if not unread(environment):
        return environment
    rows = (row for row in _rows_of(type(environment)) if row.unread(getattr(environment, row.subject)))
    changes: dict[str, Any] = {row.subject: row.version for row in rows}
    device: Any = environment.device  # type: ignore[attr-defined]
    if read := read_as(device.arch):
        changes["device"] = device.replace(arch=read)
    return environment.derive(**changes)
