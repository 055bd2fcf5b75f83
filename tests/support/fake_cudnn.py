"""A stand-in for cudnn-frontend: it writes down what a graph is made of, and answers as it is told.

``install`` makes it a package of a folder, for worker processes. What it does with a graph is decided by the
head dimension of q: ``CRASH``, ``HANG``, ``REFUSE``, ``NO_PLAN``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

__version__ = os.environ.get("FAKE_FRONTEND", "1.23.0")

_REFUSAL = """No valid engine configs for X
{"engineId":2,"smVersion":900,"knobChoices":{}}
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: too much shared memory at: a > b
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: ptr->isSupported()
"""
CRASH, REFUSE, NO_PLAN = 88, 104, 112
HANG = 1096  # that no sample has: it costs a minute

data_type = SimpleNamespace(
    **{
        name: name
        for name in "BFLOAT16 HALF FLOAT DOUBLE FP8_E4M3 FP8_E5M2 FP8_E8M0 INT32 INT64 NOT_SET".split()  # noqa: SIM905
    }
)
tensor_reordering = Enum("tensor_reordering", "F8_128x4")
diagonal_alignment = Enum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT")
heur_mode = Enum("heur_mode", "A FALLBACK")


class cudnnGraphNotSupportedError(RuntimeError):
    pass


class _Handles:
    library = None

    def _set_dlhandle_cudnn(self, handle):
        _Handles.library = ctypes.CDLL(None, handle=handle)


_pybind_module = _Handles()


def backend_version():
    return ctypes.c_size_t(_Handles.library.cudnnGetVersion()).value  # type: ignore[attr-defined]


def create_device_properties(text):
    return text


class Tensor:
    """Remembers what it was told; every setter returns itself, as the frontend's do."""

    def __init__(self, **said):
        self.__dict__.update(said)

    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)

        def setter(value):
            setattr(self, name.removeprefix("set_"), value)
            return self

        return setter


class pygraph:
    """One graph: ``calls`` holds (function, keywords), ``tensors`` what was declared."""

    def __init__(self, **how):
        self.how, self.calls, self.tensors, self.stages = how, [], {}, []

    def tensor(self, *, name, dim, stride, data_type, uid, ragged_offset=None, reordering_type=None):
        made = Tensor(
            name=name,
            dim=dim,
            stride=stride,
            data_type=data_type,
            uid=uid,
            ragged_offset=ragged_offset,
            reordering_type=reordering_type,
        )
        self.tensors[name] = made
        return made

    def _node(self, function, outputs, keywords):
        self.calls.append((function, keywords))
        self.results = [Tensor() for _ in range(outputs)]
        return self.results

    def sdpa(self, **keywords):
        return self._node("sdpa", 2, keywords)

    def sdpa_backward(self, **keywords):
        return self._node("sdpa_backward", 3, keywords)

    def sdpa_fp8(self, **keywords):
        return self._node("sdpa_fp8", 4, keywords)

    def sdpa_fp8_backward(self, **keywords):
        return self._node("sdpa_fp8_backward", 7, keywords)

    def sdpa_mxfp8(self, **keywords):
        if "use_padding_mask" in keywords:  # in the words of a binding of frontend 1.23
            raise TypeError(
                "sdpa_mxfp8(): incompatible function arguments. The following argument types are supported:\n"
                "    1. (self: pygraph, q: tensor, k: tensor, v: tensor, descale_q: tensor, "
                "descale_k: tensor, descale_v: tensor, attn_scale: object = None, "
                "diagonal_band_right_bound: object = None, name: str = '', generate_stats: object) -> list"
                "\n\nInvoked with: seq_len_q: 1"
            )
        return self._node("sdpa_mxfp8", 3, keywords)

    def sdpa_mxfp8_backward(self, **keywords):
        return self._node("sdpa_mxfp8_backward", 6, keywords)

    def validate(self):
        self.stages.append("validate")
        if self.tensors["q"].dim[3] % 8:
            raise cudnnGraphNotSupportedError("hidden_dim should be multiple of 8")

    def build_operation_graph(self):
        self.stages.append("build_operation_graph")

    def create_execution_plans(self, modes):
        self.stages.append("create_execution_plans")

    def check_support(self):
        fate = self.tensors["q"].dim[3]
        if fate == CRASH:
            print("about to die", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if fate == HANG:
            time.sleep(60)
        if fate == REFUSE:
            with Path(os.environ["CUDNN_LOGDEST_DBG"]).open("a") as log:
                log.write("E! what the library logged\n")
            raise cudnnGraphNotSupportedError(_REFUSAL)

    def build_plans(self):
        if self.tensors["q"].dim[3] == NO_PLAN:
            raise RuntimeError("no kernel came out")

    def get_workspace_size(self):
        return 4096

    def get_execution_plan_count(self):
        return 2

    def get_plan_name_at_index(self, index):
        return f"eng{index}"


def install(folder):
    """A package ``cudnn`` in ``folder``; returns the folder for PYTHONPATH."""
    package = Path(folder) / "cudnn"
    package.mkdir(parents=True)
    shutil.copy(__file__, package / "__init__.py")
    return str(folder)


def site(folder):
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
