"""Where in the program a call stands: its file, line and function, outside of torch and of this package."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from types import CodeType, FrameType
from typing import NamedTuple

from attnsel.errors import printable


class Place(NamedTuple):
    """``where``: the innermost line outside torch, and for a library's line also the program's own that led
    there ("transformers/…/modeling_llama.py:251 forward < train.py:31 step"). ``library``: the package that
    the innermost frame outside torch belongs to, "" for the program itself. ``torch_file``: the file of torch
    that the call came through last, relative to it, "" for none ("nn/modules/activation.py").
    """

    where: str
    library: str
    torch_file: str


_TORCH, _LIBRARY, _OWN, _SKIPPED = range(4)

# Files of libraries that pass attention on for all of a library's models: the line of the model says more.
_PASS_ON = ("transformers/integrations/", "diffusers/models/attention_dispatch.py", "accelerate/hooks.py")

_MOST = 20_000  # code objects and places that are remembered; programs that make code at run time end here


class _Kind(NamedTuple):
    code: CodeType  # held, so that its id stays its own
    kind: int
    file: str  # relative to the folder that decides
    package: str


class Places:
    """Finds the place of the call that is being made. ``program``: the folder that paths are relative to."""

    def __init__(self, program: str | None = None) -> None:
        self.program = os.path.realpath(program or os.getcwd())
        self._kinds: dict[int, _Kind] = {}
        self._places: dict[tuple[int, ...], Place] = {}

    def here(self, depth: int = 1) -> Place:
        """The place of the caller ``depth`` frames up."""
        frame: FrameType | None = sys._getframe(depth)
        kinds = self._kinds
        torch_file = library = None
        key: tuple[int, ...] = ()
        found: list[tuple[_Kind, int]] = []
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code)) or self._kind(code)
            if kind.kind == _TORCH:
                if library is None and torch_file is None:
                    torch_file = kind
            elif kind.kind != _SKIPPED:
                if library is None:
                    library = kind
                if not kind.file.startswith(_PASS_ON) and (kind.kind == _OWN or not found):
                    line = frame.f_lineno
                    found.append((kind, line))
                    key = (*key, id(code), line)
                    if kind.kind == _OWN:
                        break
            frame = frame.f_back
        key = (*key, id(library and library.code), id(torch_file and torch_file.code))
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= _MOST:
                self._places.clear()
            place = self._places[key] = Place(
                " < ".join(f"{kind.file}:{line} {_function(kind.code)}" for kind, line in found) or "?",
                library.package if library else "",
                torch_file.file if torch_file else "",
            )
        return place

    def _kind(self, code: CodeType) -> _Kind:
        if len(self._kinds) >= _MOST:
            self._kinds.clear()
            self._places.clear()  # they are known by ids of code that may now go
        made = self._kinds[id(code)] = _Kind(code, *self._sorted(code.co_filename))
        return made

    def _sorted(self, name: str) -> tuple[int, str, str]:
        if name.startswith("<"):
            kind = _SKIPPED if name.startswith(("<frozen", "<eval_with_key>")) else _OWN
            return kind, printable(name), ""
        path = os.path.realpath(name)
        if _by_inductor(path):
            return _SKIPPED, "", ""  # what called it says more: a line of the program
        inside = _inside(path, _SITE)
        if inside.startswith("torch/"):
            return _TORCH, inside.removeprefix("torch/"), "torch"
        if _inside(path, (_HERE,)).startswith(("diagnose/watching/", "cli/", "__main__.py")):
            return _SKIPPED, "", "attnsel"
        if _inside(path, (_HERE, _CHECKOUT_RULES, _CHECKOUT_BACKENDS)):
            return _LIBRARY, f"attnsel/{_inside(path, (_HERE,)) or os.path.basename(path)}", "attnsel"
        if inside:
            return _LIBRARY, printable(inside), inside.split("/")[0].removesuffix(".py")
        own = _inside(path, (self.program,))
        if not own and _inside(path, _STANDARD):
            return _SKIPPED, "", ""
        return _OWN, printable(own or os.path.basename(path)), ""


def _by_inductor(path: str) -> bool:
    """Whether torch.compile wrote the file: one of its cache (_inductor/runtime/cache_dir_utils.py)."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder and path.startswith(os.path.realpath(folder) + os.sep):
        return True
    return any(part.startswith("torchinductor_") for part in path.split(os.sep)[:-1])


def _function(code: CodeType) -> str:
    name = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
    return printable("top level" if name == "<module>" else name)


def _inside(path: str, folders: tuple[str, ...]) -> str:
    """``path`` relative to the first of the folders that holds it, with ``/``; "" where none does."""
    for folder in folders:
        if path.startswith(folder + os.sep):
            return path[len(folder) + 1 :].replace(os.sep, "/")
    return ""


def _site_folders() -> tuple[str, ...]:
    names = ("purelib", "platlib")
    folders = [sysconfig.get_paths()[name] for name in names]
    folders += getattr(site, "getsitepackages", list)()
    folders.append(site.getusersitepackages())
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        folders.append(os.path.dirname(os.path.dirname(torch.__file__)))
    return tuple(dict.fromkeys(os.path.realpath(folder) for folder in folders))


_SITE = _site_folders()
_STANDARD = tuple(os.path.realpath(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib"))
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # attnsel/
_CHECKOUT_RULES = os.path.join(os.path.dirname(_HERE), "rules")
_CHECKOUT_BACKENDS = os.path.join(os.path.dirname(_HERE), "backends")
