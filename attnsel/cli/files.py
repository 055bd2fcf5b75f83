"""What ``--params`` and ``--env`` read: JSON, of attnsel's own or of ``doctor``, and what TransformerEngine
prints."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnsel.cli.output import complain
from attnsel.dispatchers.te.config import TeConfig, configs
from attnsel.environment import Environment
from attnsel.errors import InvalidInput

_PATIENCE = 2  # seconds for the writer of a named pipe to come
_MOST_CHARACTERS = 16 << 20  # of a file; a selection with every reason and way out has some 100,000


def read_params(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The fields of a call, and of the machine what TransformerEngine's line says of it: ``gpu`` and versions
    for Environment.describe. Raises InvalidInput."""
    text = _text(path, "--params")
    found = _printed(path, text)
    if found is None:
        return _object(path, text, "params", "--params"), {}
    machine = dict(found.versions) if found.gpu is None else {"gpu": found.gpu, **found.versions}
    return found.params, machine


def read_environment(path: Path) -> Environment:
    """An environment. Raises InvalidInput naming the file."""
    described = dict(_object(path, _text(path, "--env"), "environment", "--env"))
    devices = described.get("devices")
    if "device" not in described and isinstance(devices, list):  # of doctor --json
        described = dict(_first_device(path, devices))
    described.pop("warnings", None)  # written by an earlier --json, and worked out again
    try:
        return Environment(**described)
    except InvalidInput as error:
        raise InvalidInput(f"{called(path)}: {error.field}", error.value, error.allowed) from None


def called(path: Path | None) -> str:
    """A file's name in a message."""
    return "standard input" if str(path) == "-" else str(path)


def once_only(params: Path | None, env: Path | None) -> None:
    """Raises InvalidInput where both files are standard input, which can be read once."""
    if str(params) == str(env) == "-":
        raise InvalidInput("--env", "-", "standard input is read by --params already; put one into a file")


def _first_device(path: Path, devices: list[Any]) -> Mapping[str, Any]:
    """The machine of a doctor's answer: its first device, as for a call that names none."""
    if not devices or not isinstance(devices[0], dict):
        raise InvalidInput(f"{called(path)}: devices", devices, "must hold an environment")
    if len(devices) > 1:
        complain(f"{called(path)}: holds {len(devices)} devices; the first is asked about")
    first: Mapping[str, Any] = devices[0]
    return first


def _printed(path: Path, text: str) -> TeConfig | None:
    """The first configuration of TransformerEngine's in a text that is no JSON of ours; None without one."""
    found = list(_distinct(text))
    if not found:
        return None
    first, name = found[0], called(path)
    if len(found) > 1:
        complain(
            f"{name}: holds {len(found)} different configurations of TransformerEngine; the first is read"
        )
    if first.unread:
        complain(f"{name}: not read of TransformerEngine's configuration: {', '.join(first.unread)}")
    return first


def _distinct(text: str) -> list[TeConfig]:
    found: list[TeConfig] = []
    for one in configs(text):
        if one not in found and len(found) < 100:
            found.append(one)
    return found


def _object(path: Path, text: str, part: str, flag: str) -> dict[str, Any]:
    """An object; ``part`` of it where the file holds a whole answer. Raises InvalidInput."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise InvalidInput(flag, str(path), "is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidInput(flag, str(path), f"is no JSON: {where}: {error.msg}") from None
    except ValueError as error:  # a number of thousands of digits
        raise InvalidInput(flag, str(path), f"cannot be read: {str(error).partition(';')[0]}") from None
    if isinstance(data, dict) and isinstance(data.get(part), dict):
        data = data[part]
    if not isinstance(data, dict):
        raise InvalidInput(flag, str(path), "must hold a JSON object")
    return data


def _text(path: Path, flag: str) -> str:
    """A file's text. Raises InvalidInput."""
    try:
        text = _read(path)
    except OSError as error:
        raise InvalidInput(flag, str(path), error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise InvalidInput(flag, str(path), "is no UTF-8 text; needs JSON") from None
    except ValueError as error:  # a name with a NUL in it
        raise InvalidInput(flag, str(path), f"cannot be read: {error}") from None
    if len(text) > _MOST_CHARACTERS:
        raise InvalidInput(flag, str(path), f"is longer than {_MOST_CHARACTERS >> 20} Mi characters")
    return text


def _read(path: Path) -> str:
    """What stands there, as far as it is looked at: /dev/zero has no end."""
    if str(path) == "-":
        if sys.stdin is None:
            raise OSError("standard input is closed")
        return sys.stdin.read(_MOST_CHARACTERS + 1).removeprefix("\ufeff")
    with open(path, encoding="utf-8-sig", opener=_open) as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            return _from_pipe(file.fileno()).decode("utf-8-sig")
        return file.read(_MOST_CHARACTERS + 1)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _from_pipe(pipe: int) -> bytes:
    """All of a named pipe, or of ``<(command)``. Raises OSError where nobody begins to write."""
    if sys.platform == "win32":  # it was opened as it is: reading waits
        with open(pipe, "rb", closefd=False) as file:
            return file.read(_MOST_CHARACTERS + 1)
    data = bytearray()
    until = time.monotonic() + _PATIENCE
    while len(data) <= _MOST_CHARACTERS:
        try:
            chunk = os.read(pipe, 1 << 16)
        except BlockingIOError:  # there is a writer, who may take as long as it takes
            os.set_blocking(pipe, True)
            continue
        if chunk:
            data += chunk
        elif data or os.get_blocking(pipe):
            break
        elif time.monotonic() > until:
            raise OSError("nobody writes into this pipe")
        else:
            time.sleep(0.02)
    return bytes(data)
