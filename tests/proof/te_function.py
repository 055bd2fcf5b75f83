"""TransformerEngine's own ``get_attention_backend``, run here: the definitions it needs are taken out of its
Python, and its query of cuDNN is compiled from its C++ with what it asks of CUDA stated.

    TRANSFORMER_ENGINE_FOR_TESTS=DIR  # a checkout of NVIDIA/TransformerEngine, or several, parted by ":"

Releases 1.11 to 2.20. What PyPI has (a wheel, unpacked) will do for the Python. It holds no C++ of the query:
2.19's is that of the newest checkout among the others, 2.20's is stated by :class:`_Asking`.
Nothing of TransformerEngine is in this repository. It takes g++.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dataclasses
import enum
import functools
import hashlib
import logging
import math
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from packaging.version import Version as Written

from attnsel import AttentionParams, Environment
from attnsel.environment.versions import Version

VARIABLE = "TRANSFORMER_ENGINE_FOR_TESTS"
_PYTORCH = "transformer_engine/pytorch"
_FOLDERS = ("attention/dot_product_attention/utils.py", "dot_product_attention/utils.py", "attention.py")
_RANKS = "transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py"
_QUERY = "transformer_engine/common/fused_attn/fused_attn.cpp"
_RAGGED = "transformer_engine/common/fused_attn/utils.cu"
_HEADER = "transformer_engine/common/include/transformer_engine/fused_attn.h"
_WHEEL = "transformer_engine/wheel_lib/libtransformer_engine.so"
_MODULE = "te_utils_under_test"
_ASKS_CUDNN = Version(2, 20)
_PRELUDE = r"""
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <string>
static int g_arch = 0; static size_t g_cudnn = 0;
extern "C" void te_state(int arch, size_t cudnn) { g_arch = arch; g_cudnn = cudnn;
std::cout.setstate(std::ios_base::failbit); } static size_t cudnnGetVersion() { return g_cudnn; }
#ifdef TE_COVERAGE
extern "C" void __gcov_dump(void);
extern "C" void te_dump(void) { __gcov_dump(); }
#endif
namespace transformer_engine {
namespace cuda { static int current_device() { return 0; } static int sm_arch(int) { return g_arch; } }
enum class DType { kInt32, kInt64 };
template <typename T> static T getenv(const char* name, T value) {
  const char* text = std::getenv(name); return text ? static_cast<T>(std::atoi(text)) : value; }
}
using namespace transformer_engine;
#define NVTE_CHECK(...)
#define NVTE_ERROR(...) std::abort()
enum NVTEDType { kNVTEFloat16 = 4, kNVTEBFloat16 = 5, kNVTEFloat8E4M3 = 6, kNVTEFloat8E5M2 = 7, kOther = 1 };
"""
_DTYPES = {"fp16": 4, "bf16": 5, "fp8_e4m3": 6, "fp8_e5m2": 7}


def checkouts() -> list[Path]:
    return [Path(part) for part in os.environ.get(VARIABLE, "").split(":") if part]


def has_query(root: Path) -> bool:
    return (root / _QUERY).exists()


def version_of(root: Path) -> Version:
    """The release that lies in ``root``; 2.20's development snapshots count as 2.19."""
    file = root / "build_tools/VERSION.txt"
    written = file.read_text().strip() if file.exists() else next(root.glob("*.dist-info")).name.split("-")[1]
    if ".dev" in written:
        major, minor, *_ = map(int, written.split(".")[:2])
        return Version(major, minor - 1)
    return Version.parse(written.removesuffix(".dist"))


def _function(text: str, start: str) -> str:
    """From ``start`` to the first brace at the beginning of a line."""
    begin = text.index(start)
    return text[begin : text.index("\n}", begin) + 3]


def _compiled(root: Path, folder: Path) -> ctypes.CDLL:
    source, header = (root / _QUERY).read_text(), (root / _HEADER).read_text()
    enums = "\n".join(re.findall(r"enum NVTE_\w+ \{.*?\};", header, re.DOTALL))
    offsets = (root / _RAGGED).read_text()
    ragged = ""
    if "DType get_ragged_offset_dtype(" in offsets:
        ragged = _function(offsets, "DType get_ragged_offset_dtype(")
        ragged = f"namespace transformer_engine {{ namespace fused_attn {{ {ragged} }} }}"
    names = [
        "NVTE_QKV_Layout_Group nvte_get_qkv_layout_group(",
        "NVTE_QKV_Format nvte_get_qkv_format(",
        "NVTE_QKV_Format nvte_get_q_format(",
        "NVTE_QKV_Format nvte_get_kv_format(",
    ]
    parts = [_function(source, name) for name in names if name in source]
    query = _function(source, "NVTE_Fused_Attn_Backend nvte_get_fused_attn_backend(")
    text = "\n".join([_PRELUDE, enums, ragged, *parts, 'extern "C" {', query, "}"])
    library = folder / f"query-{hashlib.sha256(text.encode()).hexdigest()[:12]}.so"
    if not library.exists():
        file = library.with_suffix(".cpp")
        file.write_text(text)
        command = ["g++", "-shared", "-fPIC", "-w", "-O0" if COVERAGE else "-O1", *COVERAGE]
        subprocess.run([*command, str(file), "-o", str(library)], check=True, cwd=folder)
    found = ctypes.CDLL(str(library))
    found.arguments = query[: query.index("{")].count(",") + 1  # type: ignore[attr-defined]
    found.trains = "is_training" in query[: query.index("{")]  # type: ignore[attr-defined]
    return found


COVERAGE: list[str] = []
"""Flags for g++ of what measures the branches of the query."""


def _told(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class _Released:
    """The query in the library of a wheel from PyPI (transformer_engine_cu12), beside a CUDA and a cuDNN that
    say which GPU and version they are and otherwise do nothing. cuDNN refuses every graph, with "BACKEND"."""

    devices = (70, 75, 80, 86, 89, 90, 100, 103, 110, 120, 121)
    _beside: ClassVar[dict[str, ctypes.CDLL]] = {}

    def __init__(self, library: Path, folder: Path) -> None:
        os.environ.setdefault("CUDNN_FRONTEND_CUDART_LIB_NAME", "libcudart.so.12")
        if not self._beside:  # one for all, as a process has one library of a name
            self._write_beside([root / _WHEEL for root in checkouts()] or [library], folder / "beside")
            for file in sorted((folder / "beside").glob("lib*")):
                self._beside[file.name] = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(library))
        self._device = ctypes.c_int.in_dll(self._beside["libcudart.so.12"], "stated_device")
        self._cudnn = ctypes.c_size_t.in_dll(self._beside["libcudnn.so.9"], "stated_cudnn")

    def te_state(self, arch: int, cudnn: ctypes.c_size_t) -> None:
        self._device.value, self._cudnn.value = self.devices.index(arch), cudnn.value

    def asked(self, fields: dict[str, Any]) -> tuple[int, str]:
        """nvte_get_fused_attn_backend_v2 with its message."""
        create = self.library.nvte_create_fused_attn_config
        create.restype = ctypes.c_void_p
        config = ctypes.c_void_p(create())
        for place, (name, value) in enumerate(fields.items()):
            kind = _KIND.get(name, ctypes.c_size_t if isinstance(value, int) else ctypes.c_int)
            held = kind(_number(name, value))
            size = ctypes.c_size_t(ctypes.sizeof(held))
            self.library.nvte_set_fused_attn_config_attribute(config, place, ctypes.byref(held), size)
        message = ctypes.c_char_p()
        found = self.library.nvte_get_fused_attn_backend_v2(config, ctypes.byref(message))
        self.library.nvte_destroy_fused_attn_config(config)
        return int(found), (message.value or b"").decode()

    def _write_beside(self, libraries: list[Path], beside: Path) -> None:
        """A library for each of CUDA's that they need, with the functions that they take from them."""
        beside.mkdir(parents=True)
        names: dict[str, set[str]] = {}
        for library in filter(Path.exists, libraries):
            for name in re.findall(
                r"Shared library: \[(lib(?:cu|nccl)[^\]]*)\]", _told("readelf", "-d", library)
            ):
                names.setdefault(name, set())
            for line in _told("nm", "-D", "--undefined-only", library).splitlines():
                name, _, version = line.split()[-1].partition("@")
                if version in names:
                    names[version].add(name)
                elif re.match(r"(__)?(cuda|nccl|nvrtc)", name):
                    names["libnccl.so.2" if name.startswith("nccl") else "libcudart.so.12"].add(name)
        names["libcudart.so.12"] |= _OF_CUDA
        names["libcudnn.so.9"] |= _OF_CUDNN
        for name, functions in names.items():
            stated = _STATED.get(name, "")
            plain = sorted(one for one in functions if not re.search(rf"\b{one}\(", stated))
            text = stated + "".join(f"long {one}(void) {{ return 0; }}\n" for one in plain)
            (beside / "source.c").write_text("#include <string.h>\n#include <stddef.h>\n" + text)
            (beside / "map").write_text(f"{name} {{ global: *; }};\n")
            made = [
                "gcc",
                "-shared",
                "-fPIC",
                "-w",
                f"-Wl,-soname,{name}",
                f"-Wl,--version-script={beside}/map",
            ]
            subprocess.run([*made, str(beside / "source.c"), "-o", str(beside / name)], check=True)


_OF_CUDA = {"cudaGetDeviceProperties", "cudaStreamIsCapturing", "cudaDeviceGetPCIBusId"}
_OF_CUDA |= {
    f"cudaGraph{name}" for name in ("Create", "Destroy", "GetNodes", "AddKernelNode", "AddMemcpyNode1D")
}
_OF_CUDA |= {f"cudaGraph{name}" for name in ("AddMemsetNode", "AddChildGraphNode", "KernelNodeSetParams")}
_OF_CUDA |= {f"cudaGraph{name}" for name in ("MemcpyNodeSetParams1D", "MemsetNodeSetParams")}
_OF_CUDA |= {"cudaGraphChildGraphNodeGetGraph", "cudaGraphNodeGetDependentNodes"}
_OF_CUDNN = {"cudnnDestroy", "cudnnGetStream", "cudnnBackendDestroyDescriptor", "cudnnBackendExecute"}
_OF_CUDNN |= {"cudnnBackendPopulateCudaGraph", "cudnnBackendUpdateCudaGraph"}
_STATED = {
    "libcudart.so.12": f"""
int stated_device = 0;
static const int sm[] = {{ {", ".join(map(str, _Released.devices))} }};
static int nothing(void) {{ return 0; }}
static int current(void **context) {{ *context = (void *)1; return 0; }}
int cudaGetDevice(int *device) {{ *device = stated_device; return 0; }}
int cudaGetDeviceCount(int *count) {{ *count = {len(_Released.devices)}; return 0; }}
int cudaDeviceGetAttribute(int *value, int name, int device) {{
  *value = name == 75 ? sm[device] / 10 : name == 76 ? sm[device] % 10 : 0; return 0; }}
int cudaGetDeviceProperties_v2(char *all, int device) {{
  memset(all, 0, 1032); *(int *)(all + 360) = sm[device] / 10; *(int *)(all + 364) = sm[device] % 10; return
  0; }} int cudaGetDeviceProperties(char *all, int device) {{ return cudaGetDeviceProperties_v2(all, device);
  }} int cudaGetDriverEntryPoint(const char *name, void **found, unsigned long long flags, int *how) {{
  *found = strcmp(name, "cuCtxGetCurrent") ? (void *)nothing : (void *)current; *how = 0; return 0; }}
""",
    "libcudnn.so.9": """
size_t stated_cudnn = 0;
size_t cudnnGetVersion(void) { return stated_cudnn; }
const char *cudnnGetErrorString(int status) { return "BACKEND"; }
void cudnnGetLastErrorString(char *text, size_t size) { if (size) text[0] = 0; }
int cudnnBackendCreateDescriptor(int kind, void **made) { return 3000; }
int cudnnBackendFinalize(void *made) { return 3000; }
int cudnnBackendSetAttribute(void *made, int name, int kind, long count, const void *values) { return 3000; }
int cudnnBackendGetAttribute(void *made, int name, int kind, long most, long *count, void *values) { return
3000; } int cudnnBackendInitialize(void *made) { return 3000; }
""",
}


# ---- its Python ---------------------------------------------------------------------------------------


def _utils(root: Path) -> Path:
    return next(path for name in _FOLDERS if (path := root / _PYTORCH / name).exists())


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _taken_out(path: Path, *roots: str, known: dict[str, Any]) -> None:
    """Runs in ``known`` what ``roots`` of the file at ``path`` need of it, with its own line numbers."""
    statements = ast.parse(path.read_text()).body
    where = {name: statement for statement in statements for name in _defined(statement)}
    wanted, left = set(), [root for root in roots if root in where]
    while left:
        name = left.pop()
        if name in where and name not in known and where[name] not in wanted:
            wanted.add(where[name])
            left += [n.id for n in ast.walk(where[name]) if isinstance(n, ast.Name)]
    body = [statement for statement in statements if statement in wanted]
    exec(compile(ast.Module(body, []), str(path), "exec"), known)


class _Named(dict[str, Any]):
    """A mapping of every name to itself, also as attributes."""

    def __missing__(self, key: Any) -> Any:
        return key

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Any:
    """A class that nothing is an instance of."""


_TYPES = (
    "Float8Tensor",
    "Float8TensorStorage",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "QuantizedTensorStorage",
)
_TYPES += ("InferenceParams", "QuantizedTensor")


def _beside(engine: TransformerEngine) -> dict[str, Any]:
    """What the function finds in its module beside its own definitions."""
    named = ("QKVLayout", "QKVFormat", "AttnBiasType", "AttnMaskType", "SoftmaxType", "TE_DType", "DType")
    quiet = types.SimpleNamespace(_log_level=logging.CRITICAL, _stream_handler=logging.NullHandler())
    return {
        **{name: getattr(typing, name) for name in ("Any", "Callable", "Dict", "List", "Optional")},
        **{name: getattr(typing, name) for name in ("Tuple", "Union")},
        **{name: type(name, (_Any,), {}) for name in _TYPES},
        **{name: _Named() for name in named},
        "__name__": _MODULE,
        "os": os,
        "functools": functools,
        "math": math,
        "torch": torch,
        "logging": logging,
        "dataclass": dataclasses.dataclass,
        "fields": dataclasses.fields,
        "PkgVersion": Written,
        "FusedAttnBackend": _Backend,
        "te": types.SimpleNamespace(__version__=""),
        "tex": _Tex(engine),
        "get_device_compute_capability": lambda: divmod(engine.arch, 10),
        "get_cudnn_version": lambda: tuple(engine.cudnn[:3]),
        "get_fp8_te_dtype": lambda recipe, fprop_tensor=True: "fp8_e4m3" if fprop_tensor else "fp8_e5m2",
        "is_in_onnx_export_mode": lambda: False,
        "FlashAttentionUtils": types.SimpleNamespace(),
        "AttentionLogging": quiet,
        "_log_level": quiet._log_level,
        "_stream_handler": quiet._stream_handler,
        "_attention_backends": {},
        **dict.fromkeys(("_NVTE_FLASH_ATTN", "_NVTE_FUSED_ATTN", "_NVTE_UNFUSED_ATTN"), 1),
    }


class _Tex:
    """transformer_engine_torch: its enums are names."""

    def __init__(self, engine: TransformerEngine) -> None:
        self.get_fused_attn_backend = engine.query

    def __getattr__(self, name: str) -> Any:
        return _Named()


class TransformerEngine:
    """One release: its Python from ``root``, its query of cuDNN from ``root`` or, where that has no C++, from
    ``instead``. ``takes``: what cuDNN says of the fields of a FusedAttentionParams, which 2.20 asks."""

    def __init__(
        self,
        root: Path,
        folder: Path,
        instead: Path | None = None,
        takes: Callable[[TransformerEngine, dict[str, Any]], bool] = lambda engine, fields: True,
    ) -> None:
        self.version, self.utils, self.takes = version_of(root), _utils(root), takes
        source = root if (root / _QUERY).exists() else instead
        self.library: Any = None
        self.released = _Released(root / _WHEEL, folder) if (root / _WHEEL).exists() else None
        if self.version < _ASKS_CUDNN and self.released is None:
            assert source is not None, f"{root} has no {_QUERY}"
            self.library = _compiled(source, folder)
        self.arch, self.cudnn, self.asked = 90, Version(9, 1), AttentionParams()
        self.env = Environment.describe("sm90")
        self.known = _beside(self)
        # FlashAttentionUtils is set for each question; what it holds from the start is read here.
        self._flash: Any = self.known["FlashAttentionUtils"]
        text = self.utils.read_text()
        newest = re.findall(
            r"^\s*_?(?:flash_attn_)?max_version = PkgVersion\(\"(.+)\"\)", text, re.MULTILINE
        )[0]
        self.newest, self.exclusive = Written(newest), "is_version_supported" in text
        self._installed(Environment.describe("sm90"))
        sys.modules.setdefault(_MODULE, types.ModuleType(_MODULE))
        _taken_out(self.utils, "AttentionParams", "get_attention_backend", known=self.known)
        self.ranks: dict[str, Any] = {}
        if "cp_per_step_configs" in text:
            held: Any = types.ModuleType(_RANKS.removesuffix(".py").replace("/", "."))
            beside = _beside(self)
            _taken_out(root / _RANKS, "cp_per_step_configs", known=beside)
            held.cp_per_step_configs = beside["cp_per_step_configs"]
            parts = held.__name__.split(".")
            names = [".".join(parts[:end]) for end in range(1, len(parts))]
            self.ranks = {name: types.ModuleType(name) for name in names} | {held.__name__: held}

    def query(self, *asked: Any) -> Any:
        if self.version >= _ASKS_CUDNN:
            return self._cudnn_asked(vars(asked[0]))
        return self._table(list(asked)) if self.released is None else self._released_table(list(asked))

    def _released_table(self, rest: list[Any]) -> int:
        """The same call in the released library, whose numbers of types are one higher."""
        values = [ctypes.c_bool(rest.pop(0))]
        values += [ctypes.c_int(_DTYPES.get(dtype_of(rest.pop(0)), 3) + 1) for _ in range(2)]
        layout, bias, mask, softmax, dropout, *numbers = rest
        places = (_LAYOUTS[layout], _BIASES.index(bias), _MASKS.index(mask), _SOFTMAX.index(softmax))
        values += [ctypes.c_int(place) for place in places] + [ctypes.c_float(dropout)]
        values += [ctypes.c_bool(n) if isinstance(n, bool) else ctypes.c_int64(n) for n in numbers]
        assert self.released is not None
        self.released.te_state(self.arch, ctypes.c_size_t(_numbered(self.cudnn)))
        with _quiet():
            return int(self.released.library.nvte_get_fused_attn_backend(*values))

    def _table(self, rest: list[Any]) -> int:
        values = [int(rest.pop(0))] if self.library.trains else []
        q_type, kv_type, layout, bias, mask = (rest.pop(0) for _ in range(5))
        values += [_DTYPES.get(dtype_of(q_type), 1), _DTYPES.get(dtype_of(kv_type), 1)]
        values += [_LAYOUTS[layout], _BIASES.index(bias), _MASKS.index(mask)]
        if isinstance(rest[0], str):
            values.append(_SOFTMAX.index(rest.pop(0)))
        dropout, *numbers = rest
        call: list[Any] = [ctypes.c_int(value) for value in values] + [ctypes.c_float(dropout)]
        call += [ctypes.c_bool(n) if isinstance(n, bool) else ctypes.c_int64(n) for n in numbers]
        assert len(call) == self.library.arguments, (len(call), self.library.arguments)
        self.library.te_state(self.arch, ctypes.c_size_t(_numbered(self.cudnn)))
        return int(self.library.nvte_get_fused_attn_backend(*call))

    def _cudnn_asked(self, fields: dict[str, Any]) -> tuple[int, str]:
        """The released library's own conditions, and cudnn-frontend's; where they leave it to cuDNN,
        ``takes``."""
        assert self.released is not None, "2.20 is asked in the library of its wheel"
        self.released.te_state(self.arch, ctypes.c_size_t(_numbered(self.cudnn)))
        message = self.released.asked(fields)[1]
        self.refused = message
        if "BACKEND" not in message or not self.takes(self, fields):
            return _Backend.No_Backend, message
        return (_Backend.FP8 if "fp8" in dtype_of(fields["qkv_dtype"]) else _Backend.F16_arbitrary_seqlen), ""

    def choice(
        self, p: AttentionParams, env: Environment, window: tuple[int, int], switches: dict[str, str]
    ) -> tuple[str, tuple[bool, bool, bool]]:
        """What it selects, and which of FlashAttention, FusedAttention and the unfused one survive."""
        self.arch, self.cudnn, self.asked, self.env = env.arch or 0, env.cudnn or Version(0), p, env
        self._installed(env)
        fields = {field.name for field in dataclasses.fields(self.known["AttentionParams"])}
        asked = {name: value for name, value in _fields(p, window).items() if name in fields}
        asked["deterministic"] |= switches.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
        if "nominal_dtype" in fields and p.has_bias and p.core_attention_bias_shape:
            asked["core_attention_bias_shape"] = _sizes(p)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
        with (
            mock.patch.dict(os.environ, {**clean, **switches}, clear=True),
            mock.patch.dict(sys.modules, self.ranks),
        ):
            found = self.known["get_attention_backend"](self.known["AttentionParams"](**asked))
        if len(found) == 5:  # before 2.2
            use_flash, use_fused, _, use_unfused, every = found
            version = "3" if self.known["_use_flash_attn_3"] else "2"
        else:
            use_flash, version, use_fused, _, use_unfused, every = found
        if use_flash:
            name = f"FlashAttention {Written(str(version)).major}"
        else:
            name = "FusedAttention" if use_fused else "UnfusedDotProductAttention" if use_unfused else "none"
        return name, tuple(bool(one) for one in every[:3])  # type: ignore[return-value]

    def _installed(self, env: Environment) -> None:
        utils, two, three, four = self._flash, env.flash_attn, env.flash_attn_3, env.flash_attn_4
        least = "2.0.6" if self.version < Version(1, 12) else "2.1.1"
        utils.version_required = Written(least)
        utils.version_required_blackwell = Written("2.7.3")
        utils.max_version = self.newest
        lowest = utils.version_required
        if self.arch >= 100 and self.version >= Version(2):
            lowest = utils.version_required_blackwell
        version = Written("0" if two is None else str(two))
        below = version < self.newest if self.exclusive else version <= self.newest
        utils.is_installed = two is not None and lowest <= version and below
        utils.version = version
        for name, least in _SINCE.items():
            setattr(utils, name, utils.is_installed and version >= Written(least))
        utils.v3_is_installed, utils.fa3_version = three is not None, Written(str(three or 0))
        utils.fa3_supports_softcap = three is not None
        utils.v4_is_installed, utils.fa4_version = four is not None, Written(str(four or 0))
        utils.v4_validate_head_dims = _validate
        utils.warning_printed = utils.v3_warning_printed = utils.v4_warning_printed = True
        utils.v3_installation_steps = utils.v4_installation_steps = ""
        if self.version < Version(2, 2):
            self.known["_flash_attn_is_installed"] = utils.is_installed
            self.known["_flash_attn_version"] = utils.version
            self.known["_flash_attn_version_required"] = utils.version_required
            self.known["_flash_attn_max_version"] = utils.max_version
            for name in _SINCE:
                self.known[f"_flash_attn_{name[1:]}"] = getattr(utils, name)
            self.known["_flash_attn_3_is_installed"] = three is not None
            self.known["_flash_attn_3_version"] = utils.fa3_version
            self.known["_flash_attn_v3_version"] = utils.fa3_version
            self.known["_use_flash_attn_3"] = self.known["_flash_attn_3_plus"] = three is not None


_SINCE = {
    "v2_plus": "2",
    "v2_1_plus": "2.1",
    "v2_3_plus": "2.3",
    "v2_4_plus": "2.4",
    "v2_4_1_plus": "2.4.1",
    "v2_5_plus": "2.5",
    "v2_5_7_plus": "2.5.7",
    "v2_6_0_plus": "2.6.0",
    "v2_7_0_plus": "2.7.0",
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what C++ prints."""
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)


def _numbered(cudnn: Version) -> int:
    """As cudnnGetVersion says it."""
    return cudnn.major * (10_000 if cudnn.major >= 9 else 1_000) + cudnn.minor * 100 + cudnn.patch


_KIND: dict[str, Any] = {
    **dict.fromkeys(("is_training", "deterministic", "cuda_graph", "return_max_logit"), ctypes.c_uint8),
    **dict.fromkeys(("window_size_left", "window_size_right"), ctypes.c_int64),
    **dict.fromkeys(("dropout", "attn_scale"), ctypes.c_float),
    "bottom_right_diagonal": ctypes.c_uint8,
}
_FORMATS = ("sbhd", "bshd", "thd", "bshd_2sbhd", "sbhd_2bshd", "thd_2bshd", "thd_2sbhd", "bhsd")


def _number(name: str, value: Any) -> Any:
    """A field of FusedAttentionParams as its C++ takes it."""
    if name.endswith("dtype"):
        return _DTYPES.get(dtype_of(value), 3) + 1
    if name == "scaling_mode":
        return int(value == "NVTE_MXFP8_1D_SCALING")
    if name.endswith("format"):
        return _FORMATS.index(value) if value in _FORMATS else len(_FORMATS)
    for ending, values in (("layout", _LAYOUTS), ("mask_type", _MASKS), ("bias_type", _BIASES)):
        if name.endswith(ending):
            return values[value] if isinstance(values, dict) else values.index(value)
    return _SOFTMAX.index(value) if name == "softmax_type" else value


def _sizes(p: AttentionParams) -> tuple[int, int, int, int]:
    shape = p.core_attention_bias_shape or "1hss"
    return (
        p.batch_size if shape[0] == "b" else 1,
        p.num_heads if shape[1] == "h" else 1,
        p.max_seqlen_q if shape[2] == "s" else 1,
        p.max_seqlen_kv,
    )


def _validate(d: int, dv: int, capability: int, alignment: int) -> None:
    """flash_attn/cute/interface.py, _validate_head_dims of 4.0.0b24, in other words."""
    even = d % alignment == 0 and dv % alignment == 0
    small = 8 <= d <= 128 and 8 <= dv <= 128
    pairs = (d, dv) in ((192, 128), (64, 512), (512, 512), (256, 256))
    if capability == 9:
        assert all((8 <= d <= 256, 8 <= dv <= 256, even))
    elif capability in (10, 11):
        assert all((even, small or pairs))


class _Backend(enum.IntEnum):
    F16_max512_seqlen = 0
    F16_arbitrary_seqlen = 1
    FP8 = 2
    No_Backend = -1


def dtype_of(value: Any) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8_e4m3"}
    return names.get(value, str(value))


_TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
}
_BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
_MASKS = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
)
_SOFTMAX = ("vanilla", "off-by-one", "learnable")
_LAYOUTS = {
    name: number
    for number, name in enumerate(
        (
            "sb3hd",
            "sbh3d",
            "sbhd_sb2hd",
            "sbhd_sbh2d",
            "sbhd_sbhd_sbhd",
            "bs3hd",
            "bsh3d",
            "bshd_bs2hd",
            "bshd_bsh2d",
            "bshd_bshd_bshd",
            "t3hd",
            "th3d",
            "thd_t2hd",
            "thd_th2d",
            "thd_thd_thd",
            "sbhd_bshd_bshd",
            "bshd_sbhd_sbhd",
            "thd_bshd_bshd",
            "thd_sbhd_sbhd",
            "paged_kv_bshd_bshd_bshd",
            "paged_kv_bshd_sbhd_sbhd",
            "paged_kv_sbhd_bshd_bshd",
            "paged_kv_sbhd_sbhd_sbhd",
            "paged_kv_thd_bshd_bshd",
            "paged_kv_thd_sbhd_sbhd",
            "bhsd_bhsd_bhsd",
        )
    )
}


class _Kind(enum.Enum):
    delayed = "delayed"
    float8_current_scaling = "current"
    mxfp8 = "mxfp8"
    float8_block_scaling = "block"
    nvfp4 = "nvfp4"


def _recipe(p: AttentionParams) -> Any:
    recipe = p.recipe
    if recipe is None:
        return None
    made = types.SimpleNamespace(
        fp8_dpa=recipe.fp8_dpa or recipe.fp8_mha, fp8_mha=recipe.fp8_mha, fp8_format=recipe.fp8_format
    )
    for kind in _Kind:
        setattr(made, kind.name, lambda kind=kind: recipe.kind == kind.value)  # type: ignore[attr-defined]
    return made


def _fields(p: AttentionParams, window: tuple[int, int]) -> dict[str, Any]:
    cached = p.kv_cache != "none"
    pages = -(-p.max_seqlen_kv // p.page_size) if p.page_size else 0
    cache = types.SimpleNamespace(
        is_paged=p.kv_cache == "paged",
        page_size=p.page_size or 0,
        total_num_pages=pages * p.batch_size,
        cache_manager=types.SimpleNamespace(max_pages_per_seq=pages),
    )
    packed = p.qkv_format == "thd"
    return {
        "qkv_type": torch.Tensor,
        "qkv_dtype": _TORCH[p.dtype],
        "qkv_layout": p.qkv_layout,
        "batch_size": p.batch_size,
        "num_heads": p.num_heads,
        "num_gqa_groups": p.num_gqa_groups,
        "max_seqlen_q": p.max_seqlen_q,
        "max_seqlen_kv": p.max_seqlen_kv,
        "head_dim_qk": p.head_dim_qk,
        "head_dim_v": p.head_dim_v,
        "attn_mask_type": p.attn_mask_type,
        "window_size": window,
        "bottom_right_diagonal": p.bottom_right_diagonal,
        "alibi_slopes_shape": p.alibi_slopes_shape,
        "core_attention_bias_type": p.core_attention_bias_type,
        "core_attention_bias_shape": p.core_attention_bias_shape if p.has_bias else None,
        "core_attention_bias_requires_grad": p.core_attention_bias_requires_grad,
        "pad_between_seqs": p.pad_between_seqs,
        "attention_dropout": p.attention_dropout,
        "context_parallel": p.cp_size > 1,
        "cp_comm_type": p.cp_comm_type,
        "cp_size": p.cp_size,
        "deterministic": p.deterministic,
        "is_training": p.is_training,
        "fp8": p.fp8,
        "fp8_meta": {"recipe": _recipe(p)} if p.fp8 else None,
        "inference_params": cache if cached else None,
        "num_tokens_q": p.batch_size * p.max_seqlen_q if packed else 0,
        "num_tokens_kv": p.batch_size * p.max_seqlen_kv if packed else 0,
        "softcap": p.softcap or 0.0,
        "softmax_scale": 0.125,
        "cp_size_a2a": 2 if p.cp_comm_type == "a2a+p2p" else 1,
        "softmax_type": p.softmax_type,
        "return_max_logit": p.return_max_logit,
        "cuda_graph": p.cuda_graph,
    }
