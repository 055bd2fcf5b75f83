"""From a described graph to one of cudnn-frontend's, 1.20 and newer. The module comes as an argument."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from attnsel.backends.cudnn.candidate import DP_LIMIT, DP_LIMIT_VARIABLE, can_add_in_order, dp_bytes
from attnsel.backends.cudnn.graph import Graph, Tensor
from attnsel.base.processes import ForkSafeLock
from attnsel.environment.versions import Version
from attnsel.errors import UnsupportedArgument

_DTYPES = {
    "bf16": "BFLOAT16",
    "fp16": "HALF",
    "fp32": "FLOAT",
    "fp64": "DOUBLE",
    "fp8_e4m3": "FP8_E4M3",
    "fp8_e5m2": "FP8_E5M2",
    "fp8_e8m0": "FP8_E8M0",
    "int32": "INT32",
    "int64": "INT64",
}
_RETURNED = {
    "sdpa": ("o", "stats"),
    "sdpa_backward": ("dQ", "dK", "dV"),
    "sdpa_fp8": ("o", "stats", "amax_s", "amax_o"),
    "sdpa_fp8_backward": ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP"),
    "sdpa_mxfp8": ("o", "stats", "amax_o"),
    "sdpa_mxfp8_backward": ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV"),
}
"""What each of the frontend's functions returns; other outputs are handed in as tensors."""

STAGES = ("validate", "build_operation_graph", "create_execution_plans", "check_support")


def declare(
    graph: Graph,
    cudnn: Any,
    *,
    handle: Any = None,
    device_property: Any = None,
    sm_version: int | None = None,
) -> Any:
    """The frontend's graph, not yet checked. For a GPU that is here pass ``handle``; for a described one
    ``device_property`` and ``sm_version``.

    Errors of the frontend pass through.
    """
    types = cudnn.data_type
    dtype = {name: getattr(types, called) for name, called in _DTYPES.items()}
    where = {"handle": handle, "device_property": device_property, "sm_version": sm_version}
    made = cudnn.pygraph(
        io_data_type=dtype[graph.io_dtype],
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        **{name: value for name, value in where.items() if value is not None},
    )
    ragged = {
        offsets.name: made.tensor(
            name=offsets.name,
            uid=offsets.uid,
            dim=[offsets.entries, 1, 1, 1],
            stride=[1, 1, 1, 1],
            data_type=dtype[offsets.dtype],
        )
        for offsets in graph.ragged
    }
    returned = _RETURNED[graph.node]
    handed = [tensor for tensor in graph.outputs if tensor.name not in returned]
    tensors = {
        tensor.name: made.tensor(
            name=tensor.name,
            uid=tensor.uid,
            dim=list(tensor.dims),
            stride=list(tensor.strides),
            data_type=dtype[tensor.dtype],
            **({"ragged_offset": ragged[tensor.ragged]} if tensor.ragged else {}),
            **_reordered(tensor, cudnn),
        )
        for tensor in (*graph.inputs, *handed)
    }
    arguments = _options(graph, cudnn, tensors)
    try:
        results = getattr(made, graph.node)(**tensors, **arguments, name=graph.node)
    except TypeError as error:
        raise _unknown_words(graph, cudnn, {**tensors, **arguments}, error) from error
    results = dict(zip(returned, results, strict=True))
    for tensor in graph.outputs:
        if tensor.name in returned:
            result = results[tensor.name]
            result.set_output(True).set_uid(tensor.uid).set_data_type(dtype[tensor.dtype])
            result.set_dim(list(tensor.dims)).set_stride(list(tensor.strides))
            if tensor.ragged:
                result.set_ragged_offset(ragged[tensor.ragged])
        else:
            tensors[tensor.name].set_output(True)
    return made


def _reordered(tensor: Tensor, cudnn: Any) -> dict[str, Any]:
    if not tensor.reordering:
        return {}
    return {"reordering_type": getattr(cudnn.tensor_reordering, tensor.reordering)}


def _unknown_words(graph: Graph, cudnn: Any, given: dict[str, Any], error: TypeError) -> Exception:
    """A binding refuses words it does not know with its whole signature: name the words instead."""
    said = str(error).split("Invoked with", 1)[0]
    unknown = [name for name in given if f"{name}:" not in said] if "supported:" in said else []
    if not unknown:
        return error
    return UnsupportedArgument(
        f"{graph.node} of cudnn-frontend {cudnn.__version__} does not take {', '.join(unknown)}"
    )


def _options(graph: Graph, cudnn: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Keywords of the sdpa functions; takes the dropout tensors out of ``tensors``, they go in a tuple."""
    given = dict(graph.options)
    # The forward functions came in two generations, and the newer MXFP8 one is of the first.
    short = graph.node in ("sdpa_fp8", "sdpa_fp8_backward", "sdpa_mxfp8_backward")
    bound = "{}_bound" if short else "diagonal_band_{}_bound"
    keywords: dict[str, Any] = {"attn_scale": given["attn_scale"]}
    for side in ("left", "right"):
        if f"{side}_bound" in given:
            keywords[bound.format(side)] = given[f"{side}_bound"]
    if given.get("bottom_right"):
        keywords["diagonal_alignment"] = cudnn.diagonal_alignment.BOTTOM_RIGHT
    if given.get("alibi"):
        keywords["use_alibi_mask"] = True
    if given.get("padding"):
        keywords["use_padding_mask"] = True
    if "dropout" in given:
        keywords["dropout"] = (given["dropout"], tensors.pop("seed"), tensors.pop("offset"))
    if "generate_stats" in given:
        keywords["generate_stats"] = given["generate_stats"]
    if "max_seq_len_kv" in given:
        keywords["paged_attention_max_seq_len_kv"] = given["max_seq_len_kv"]
    if given.get("deterministic"):
        keywords["use_deterministic_algorithm"] = True
    return keywords


def check(made: Any, cudnn: Any, reached: list[str]) -> None:
    """Take a declared graph through ``check_support``, noting each stage in ``reached`` as it begins.

    Raises what the frontend raises; the last of ``reached`` is where.
    """
    modes = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]
    for stage in STAGES:
        reached.append(stage)
        if stage == "create_execution_plans":
            made.create_execution_plans(modes)
        else:
            getattr(made, stage)()


def engines(made: Any) -> list[str]:
    """Names of the planned engines, best first."""
    return [made.get_plan_name_at_index(i) for i in range(made.get_execution_plan_count())]


def backend_only(made: Any, cudnn: Any) -> None:
    """Leave to the walk over plans only those of libcudnn itself.

    From frontend 1.28 on a graph's plans may begin with engines written in Python (FROST). Those ignore the
    offsets of packed sequences (cudnn-frontend#737), and no question to the library is about them.
    """
    if not hasattr(made, "plans"):
        return
    written_in_python = import_module(f"{cudnn.__name__}.engines.engine_ids").is_python_engine
    plans = enumerate(made.plans)
    names = [made.get_plan_name_at_index(i) for i, plan in plans if written_in_python(plan.engine_id)]
    if names:
        made.deselect_engines(names)


_variable_lock = ForkSafeLock()


@contextlib.contextmanager
def workspace_bounded(graph: Graph, arch: int, versions: Mapping[str, str]) -> Iterator[None]:
    """While ``graph`` is declared and built: ask for the deterministic backward whose workspace does not grow
    with s_q * s_kv, where the other would take more than ``DP_LIMIT``.

    cudnn-frontend reads that from an environment variable and from nowhere else, when it takes a graph
    apart; for all other graphs it has to stay as it is, so it is there for this one only. A limit that the
    user has set stands. ``versions``: of ``cudnn`` and ``cudnn_frontend``.
    """
    if DP_LIMIT_VARIABLE in os.environ or not _wants_order(graph, arch, versions):
        yield
        return
    with _variable_lock:
        os.environ[DP_LIMIT_VARIABLE] = str(DP_LIMIT)
        try:
            yield
        finally:
            os.environ.pop(DP_LIMIT_VARIABLE, None)


def _wants_order(graph: Graph, arch: int, versions: Mapping[str, str]) -> bool:
    if arch != 90 or graph.node != "sdpa_backward" or not dict(graph.options).get("deterministic"):
        return False
    if any(tensor.name == "dBias" for tensor in graph.outputs):
        return False  # its gradient is made from dP
    b, h, rows, _ = graph.tensor("q").dims
    if dp_bytes(b, h, rows, graph.tensor("k").dims[2]) <= DP_LIMIT:
        return False
    return can_add_in_order(*(Version.parse(versions[name]) for name in ("cudnn", "cudnn_frontend")))
