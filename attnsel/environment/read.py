"""How old the knowledge is: the newest release of each component that was read, and what is newer than that.

A release that nobody has read is answered as the newest one that somebody did, and the answer says so. That
is done in one place: rules are asked about :func:`as_read`, so that no gate and no table meets a version that
is not known, and whoever tells an answer tells :func:`unread` of it. The rows are ``data/read.csv``.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attnsel.base.records import json_fields
from attnsel.base.rows import read_rows
from attnsel.environment.gpus import read_as
from attnsel.environment.versions import Version, Versions, component_name, versions_of

if TYPE_CHECKING:
    from attnsel.environment.machine import Environment


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
    """A row. ``newest`` is None of what has no releases; ``others``: newer releases that are known too."""

    subject: str
    packages: tuple[str, ...]
    newest: Version | None
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
        newest = self.newest
        if version is None or newest is None or version <= newest:
            return None
        if self.others is not None and version in self.others:
            return None
        return Unread(self.name, str(version), str(newest), self.on)


@cache
def everything_read() -> dict[str, Read]:
    """Every row, by its subject."""
    return {row["subject"]: _read(row) for row in read_rows("attnsel.environment", "read")}


def _read(row: dict[str, str]) -> Read:
    subject = row["subject"]
    has_releases = row["newest"][:1].isdigit()
    return Read(
        subject=subject,
        packages=tuple(row["packages"].split()),
        newest=Version.parse(row["newest"]) if has_releases else None,
        others=versions_of(subject, row["others"]) if row["others"] else None,
        released=row["released"],
        tables=tuple(row["tables"].split("; ")),
        source=row["source"],
        on=row["read"],
    )


def newest_read(subject: str) -> Version:
    """The newest release that was read of a component, or of transformers."""
    newest = everything_read()[subject].newest
    assert newest is not None, f"{subject} has no releases"
    return newest


def unread_release(subject: str, version: Version | None) -> Unread | None:
    """What is to be said of one version of a component, or of transformers; None where it was read."""
    return everything_read()[subject].unread(version)


@lru_cache(maxsize=1024)
def unread(environment: Environment) -> tuple[Unread, ...]:
    """What of an environment is newer than anything that was read, in the order of its fields."""
    found = (
        row.unread(getattr(environment, subject))
        for subject, row in everything_read().items()
        if subject in type(environment).model_fields
    )
    return tuple(filter(None, (_unread_gpu(environment), *found)))


def _unread_gpu(environment: Environment) -> Unread | None:
    """What is to be said of a GPU of an architecture whose kernels nobody has read."""
    device, read = environment.device, read_as(environment.device.arch)
    arch = f"sm{device.arch}"
    value = arch if device.name in ("", arch) else f"{device.name} ({arch})"
    return Unread("GPU", value, f"sm{read}", everything_read()["gpus"].on) if read else None


@lru_cache(maxsize=1024)
def as_read(environment: Environment) -> Environment:
    """The environment that answers for this one: the newest that was read in place of what is newer."""
    changes: dict[str, Any] = {
        subject: row.newest
        for subject, row in everything_read().items()
        if subject in type(environment).model_fields and row.unread(getattr(environment, subject))
    }
    device = environment.device
    if read := read_as(device.arch):
        changes["device"] = device.replace(arch=read)
    return environment.derive(**changes) if changes else environment
