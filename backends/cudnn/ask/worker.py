"""The child process that loads libcudnn and answers one question after another.

Started by ``client``, with its settings as an argument. It exchanges JSON lines:
first who it is ({"ready": …} or {"missing": …}), then one answer per line read. What libraries print goes to
standard error.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from attnsel.backends.cudnn.ask import libraries
from attnsel.backends.cudnn.ask.libraries import Missing
from attnsel.backends.cudnn.build import check, declare, engines, workspace_bounded
from attnsel.backends.cudnn.graph import Graph
from attnsel.base.processes import answering
from attnsel.environment.versions import Version

_LOG_LIMIT = 8000  # characters of the library's log that go into an answer
_LAST_WITH_RULES = (1, 26)  # frontends before it check a graph by themselves, with any handle


def _load(path: str) -> ctypes.CDLL | OSError:
    """A library for all to see, or why not."""
    try:
        return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return error


def _or_stand_in(source: str, soname: str, cache: Path | None) -> list[str]:
    """Load the machine's own library, or a stand-in. Returns notes."""
    if isinstance(_load(soname), ctypes.CDLL):
        return []
    path, note = libraries.stand_in(source, soname, cache)
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return [note] if note else []


def _cublas(cudnn: str, cache: Path | None) -> list[str]:
    """cuBLASLt by the names that libcudnn knows, unless it will find the real one beside itself."""
    if any(Path(cudnn).parent.glob("../../cublas/lib/libcublasLt.so.*")):
        return []
    names = ("libcublasLt.so.12", "libcublasLt.so.13")
    return [note for name in names for note in _or_stand_in("libcublasLt.c", name, cache)]


def _frontend(library: ctypes.CDLL) -> Any:
    """The frontend's module, made to call ``library`` and no other libcudnn."""
    # It imports torch where it can, which takes seconds and is not needed to plan.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    try:
        import cudnn
    except ImportError as error:
        raise Missing(
            "frontend",
            f"cudnn-frontend does not import ({error}): pip install 'nvidia-cudnn-frontend<1.29'; "
            "the rules answer without it",
        ) from None
    cudnn._pybind_module._set_dlhandle_cudnn(library._handle)
    return cudnn


class Judge:
    """Answers with libcudnn, or, for versions that cannot be asked, with the frontend's own checks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.cache = None if settings["cache"] is None else Path(settings["cache"])
        self.log = Path(settings["log"])
        self.read = 0  # bytes of the log that earlier answers hold
        self.notes: list[str] = []
        if settings.get("frontend"):
            sys.path.insert(0, settings["frontend"])
        self.pretended: str | None = settings.get("pretend")
        if self.pretended:
            path, note = libraries.stand_in("libcudnn.c", libraries.LIBCUDNN, self.cache)
            self.notes += [note] if note else []
            self.cudnn = _frontend(ctypes.CDLL(path))
            if Version.parse(self.cudnn.__version__) >= _LAST_WITH_RULES:
                raise Missing(
                    "frontend",
                    f"cuDNN {self.pretended} cannot be asked about a described GPU (9.8.0 is the first), and "
                    f"cudnn-frontend {self.cudnn.__version__} has no checks of its own: "
                    "pip install 'nvidia-cudnn-frontend<1.26' for those; the rules answer without it",
                )
            return
        path = settings["cudnn"]
        self.notes += _or_stand_in("libcuda.c", "libcuda.so.1", self.cache)
        self.notes += _cublas(path, self.cache)
        nvrtc = [_load(name) for name in libraries.find_nvrtc(path)]
        if all(isinstance(one, OSError) for one in nvrtc):
            raise libraries.no_nvrtc(nvrtc[0])
        library = _load(path)
        if isinstance(library, OSError):
            raise libraries.no_cudnn(library)
        number = ctypes.c_size_t(library.cudnnGetVersion()).value
        if number < 90800:
            found = Version.parse(number)
            raise Missing(
                "device",
                f"cuDNN {found} at {path} cannot be asked about a described GPU, 9.8.0 is the first; say "
                f"--cudnn {found} to get the frontend's own checks; the rules answer without it",
            )
        self.cudnn = _frontend(library)

    @cached_property
    def versions(self) -> dict[str, str]:
        cudnn = Version.parse(self.cudnn.backend_version())
        return {"cudnn": str(cudnn), "cudnn_frontend": self.cudnn.__version__}

    def answer(self, graph: Graph, device: dict[str, Any], build: bool) -> dict[str, Any]:
        """One verdict, at check_support. What is raised up to there is a refusal, with its stage and words;
        a plan that then does not build is reported and changes nothing: without a GPU it proves little."""
        reached = ["declare"]
        said: dict[str, Any] = {"supported": False, "engines": [], "workspace": None, "message": ""}
        began = time.perf_counter()
        try:
            with workspace_bounded(graph, device["deviceVer"] // 10, self.versions):
                self._plan(graph, device, build, said, reached)
        except Exception as error:  # bindings raise many types, and each of them is an answer
            said["message"] = str(error).strip()
        said["stage"] = reached[-1]
        said["seconds"] = time.perf_counter() - began
        said["log"] = self._logged()
        return said

    def _plan(
        self, graph: Graph, device: dict[str, Any], build: bool, said: dict[str, Any], reached: list[str]
    ) -> None:
        """As far as it goes, noted in ``said`` and ``reached``. Raises what the frontend raises."""
        version = device["deviceVer"] // 10
        if self.pretended:
            made = declare(graph, self.cudnn, handle=1, sm_version=version)
            reached.append("validate")
            made.validate()
            said["supported"] = True
            return
        described = self.cudnn.create_device_properties(json.dumps(device))
        made = declare(graph, self.cudnn, device_property=described, sm_version=version)
        check(made, self.cudnn, reached)
        said["engines"] = engines(made)
        said["supported"] = True
        if build:
            reached.append("build_plans")
            made.build_plans()
            said["workspace"] = made.get_workspace_size()

    def _logged(self) -> str:
        """What the library wrote to its log since the last question."""
        try:
            with self.log.open("rb") as file:
                file.seek(self.read)
                text = file.read()
        except OSError:
            return ""
        self.read += len(text)
        return text.decode(errors="replace").strip()[-_LOG_LIMIT:]


def main(settings: dict[str, Any]) -> None:
    tell = answering()
    try:
        judge = Judge(settings)
        tell({"ready": judge.versions, "notes": judge.notes})
    except Missing as missing:
        tell({"missing": missing.what, "message": str(missing)})
        return
    for line in sys.stdin:
        question = json.loads(line)
        graph = Graph.from_dict(question["graph"])
        tell(judge.answer(graph, question["device"], question["build"]))
