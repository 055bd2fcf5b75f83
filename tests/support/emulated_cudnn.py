"""cudnn-frontend's face: it writes down what a graph is made of, answers as it is told, and carries out
attention graphs on CPU tensors (emulated_cudnn_math.py).

It stands where the ``cudnn`` module would, behind ``backends/cudnn``. ``install`` makes it a package of a
folder, for worker processes: there the head dimension of q decides what becomes of a graph (``CRASH`` ...).

Sources: cudnn-frontend docs/operations/Attention.md and its python bindings (1.23).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = os.environ.get("FAKE_FRONTEND", "1.23.0")
DTYPES = ("BFLOAT16", "HALF", "FLOAT", "DOUBLE", "INT32", "INT64")
data_type = SimpleNamespace(
    **{name: name for name in (*DTYPES, "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "NOT_SET")}
)
tensor_reordering = Enum("tensor_reordering", "F8_128x4")
diagonal_alignment = Enum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT")
heur_mode = Enum("heur_mode", "A FALLBACK")

CRASH, REFUSE, NO_PLAN = 88, 104, 112
HANG = 1096  # that no sample has
REFUSAL = """No valid engine configs for X
{{"engineId":8,"smVersion":900,"knobChoices":{{}}}}
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: {reason} at: a > b
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: ptr->isSupported()
"""
reason = "too much shared memory"
refuse: list[str] = []
"""Nodes for which no plan is built, such as "sdpa_backward"."""
built: list[pygraph] = []
"""Every graph whose plans were built, in order."""


class cudnnGraphNotSupportedError(RuntimeError):
    pass


class _Handles:
    library: Any = None

    def _set_dlhandle_cudnn(self, handle: int) -> None:
        _Handles.library = ctypes.CDLL(None, handle=handle)


_pybind_module = _Handles()


def backend_version() -> int:
    return ctypes.c_size_t(_Handles.library.cudnnGetVersion()).value


def create_device_properties(text: str) -> str:
    return text


class Tensor:
    """Remembers what it was told; every setter returns itself, as the frontend's do."""

    def __init__(self, **said: Any) -> None:
        self.ragged_offset: Tensor | None = None
        self.__dict__.update(said)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def setter(value: Any) -> Tensor:
            setattr(self, name.removeprefix("set_"), value)
            return self

        return setter


# The results of each node; those of the plain ones by name, as they are carried out.
RESULTS = {"sdpa": ("o", "stats"), "sdpa_backward": ("dQ", "dK", "dV")}
COUNTS = {"sdpa_fp8": 4, "sdpa_fp8_backward": 7, "sdpa_mxfp8": 3, "sdpa_mxfp8_backward": 6}


class pygraph:
    """One node: ``tensors`` holds what was declared, by name, ``given`` the keywords of the node."""

    def __init__(self, **how: Any) -> None:
        self.how = how
        self.tensors: dict[str, Tensor] = {}
        self.node = ""
        self.given: dict[str, Any] = {}
        self.results: list[Tensor] = []

    def tensor(
        self, *, name: str, dim: Any, stride: Any, data_type: str, uid: int, ragged_offset: Any = None,
        reordering_type: Any = None,
    ) -> Tensor:  # fmt: skip
        self.tensors[name] = Tensor(
            name=name, dim=dim, stride=stride, data_type=data_type, uid=uid, ragged_offset=ragged_offset,
            reordering_type=reordering_type,
        )  # fmt: skip
        return self.tensors[name]

    def __getattr__(self, node: str) -> Any:
        if node not in RESULTS and node not in COUNTS:
            raise AttributeError(node)

        def make(**given: Any) -> list[Tensor | None]:
            if node == "sdpa_mxfp8" and "use_padding_mask" in given:
                # In the words of a binding of frontend 1.23.
                raise TypeError(
                    "sdpa_mxfp8(): incompatible function arguments. The following argument types are "
                    "supported:\n    1. (self: pygraph, q: tensor, k: tensor, v: tensor, descale_q: tensor, "
                    "descale_k: tensor, descale_v: tensor, attn_scale: object = None, "
                    "diagonal_band_right_bound: object = None, name: str = '', generate_stats: object) -> "
                    "list\n\nInvoked with: seq_len_q: 1"
                )
            self.node, self.given = node, given
            self.results = [Tensor() for _ in range(COUNTS.get(node) or len(RESULTS[node]))]
            if node == "sdpa" and not given["generate_stats"]:
                return [self.results[0], None]
            return list(self.results)

        return make

    def validate(self) -> None:
        if self.tensors["q"].dim[3] % 8:
            raise cudnnGraphNotSupportedError("hidden_dim should be multiple of 8")

    def build_operation_graph(self) -> None:
        pass

    def create_execution_plans(self, modes: Any) -> None:
        pass

    def check_support(self) -> None:
        fate = self.tensors["q"].dim[3]
        if fate == CRASH:
            print("about to die", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if fate == HANG:
            threading.Event().wait(60)
        if fate == REFUSE:
            with Path(os.environ["CUDNN_LOGDEST_DBG"]).open("a") as log:
                log.write("E! what the library logged\n")
        if fate == REFUSE or self.node in refuse:
            raise cudnnGraphNotSupportedError(REFUSAL.format(reason=reason))

    def build_plans(self) -> None:
        if self.tensors["q"].dim[3] == NO_PLAN:
            raise RuntimeError("no kernel came out")
        built.append(self)

    def get_workspace_size(self) -> int:
        return 4096

    def get_execution_plan_count(self) -> int:
        return 2

    def get_plan_name_at_index(self, index: int) -> str:
        return f"eng{index}"

    def execute(self, pack: dict[int, Any], workspace: Any, handle: object) -> None:
        import emulated_cudnn_math

        assert workspace.numel() >= self.get_workspace_size()
        assert handle is not None
        assert self.how["handle"] is not None
        emulated_cudnn_math.carry_out(self, RESULTS[self.node], pack)


def install(folder: Path) -> Path:
    """A package ``cudnn`` in ``folder``, which is the one for PYTHONPATH."""
    package = folder / "cudnn"
    package.mkdir(parents=True)
    shutil.copy(__file__, package / "__init__.py")
    return folder


def site(folder: Path) -> Path:
    """A site-packages folder with a libcudnn that only knows a version, an NVRTC and this frontend."""
    from attnsel.backends.cudnn.ask import libraries

    for source, place, soname in (
        ("libcudnn.c", "nvidia/cudnn/lib", "libcudnn.so.9"),
        ("libcublasLt.c", "nvidia/cuda_nvrtc/lib", "libnvrtc.so.12"),
    ):
        path, note = libraries.stand_in(source, soname, folder / "made")
        assert not note
        (folder / place).mkdir(parents=True)
        shutil.copy(path, folder / place / soname)
    install(folder / "frontend")
    return folder
