"""What choosing costs elsewhere, beside attnsel in one run: for a call that repeats, and for a new question.

    python benchmarks/peers.py                                         # what is installed: torch, diffusers
    python benchmarks/peers.py --source vllm=FOLDER@0.33.0 --source te=FOLDER@2.18 --source mslk=FOLDER@1.3.0
    python benchmarks/peers.py --source … --json benchmarks/results/peers.json

FOLDER is a checkout, or a source distribution unpacked: one file of it is loaded, with stand-ins for what
needs a GPU or a compiled part; of mslk and diffusers the package itself. Nothing of theirs is kept here. All
of them take turns with a calibration, as in budgets.py, whose docstring says what a µs is.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from budgets import REFERENCE_US, Asking, asked, calibration, hits, in_turn
from measure import number, record, row, version_of, write

TURNS = 400
EACH = 10


class Source(NamedTuple):
    """Where a library's files lie, and of which version they are."""

    folder: Path
    version: str


class Peer(NamedTuple):
    """A library's way to choose: ``hit`` of a call that repeats, ``miss`` of a new one, where callable."""

    name: str
    version: str | None
    how: str
    hit: Callable[[], Any] | None = None
    miss: Callable[[], Any] | None = None
    less: Callable[[], Any] | None = None  # what ``hit`` holds besides choosing: the kernel itself


@dataclass(frozen=True)
class Cost:
    """µs of the calibration's idle core, medians; None where it cannot be called."""

    name: str
    version: str | None
    how: str
    hit: float | None
    miss: float | None

    def as_dict(self) -> dict[str, Any]:
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(self).items()}


# ---- files of others, and stand-ins for what they import ----------------------------------------------


class StandIn(types.ModuleType):
    """A module whose every name is a class that may be subscripted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__class_getitem__": classmethod(lambda cls, key: key)})
        setattr(self, name, made)
        return made


def stand_in(name: str, **names: Any) -> None:
    """That module, and the packages it lies in, with these names."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        package = ".".join(parts[:end])
        if package not in sys.modules:
            module = sys.modules[package] = StandIn(package)
            module.__path__ = []
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
    vars(sys.modules[name]).update(names)


def loaded(path: Path, *strangers: str) -> Any:
    """That file as a module; what it imports of ``strangers`` is a stand-in, unless there is one already."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(strangers):
            stand_in(node.module)
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the libraries ------------------------------------------------------------------------------------


def attnsel_peer() -> Peer:
    asking, ready = Asking(), (TURNS + 1) * EACH
    known = [(asking.params(), asking.h100)]
    asking.decide(*known[0])
    hit = hits()["attention"]
    how = (
        "attention(...) less the op by hand; select, its memo left out, for a new length on a described H100"
    )
    new = asked(asking.decide, asking.lengths(known), ready)
    return Peer("attnsel", version_of("attnsel"), how, hit.ours, new, hit.by_hand)


def torch_peer() -> Peer:
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    choose = partial(torch._fused_sdp_choice, q, k, v, None, 0.0, True)
    how = "torch._fused_sdp_choice on CPU tensors, in C++: nothing is remembered, the answer is a number"
    return Peer("torch", torch.__version__, how, choose, choose)


def diffusers_peer(source: Source | None) -> Peer:
    if source is not None:
        sys.path.insert(0, str(source.folder))
    try:
        module = importlib.import_module("diffusers.models.attention_dispatch")
    except ImportError as error:
        return Peer("diffusers", None, f"not callable here: {error}")
    registry = module._AttentionBackendRegistry
    registry._backends[registry._active_backend] = lambda **arguments: None
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    dispatch = partial(module.dispatch_attention_fn, q, k, v, is_causal=True)
    how = "dispatch_attention_fn with a backend that does nothing: the user names it, checks are off"
    version = sys.modules["diffusers"].__version__
    return Peer("diffusers", version, how, dispatch, dispatch)


def mslk_peer(source: Source | None) -> Peer:
    if source is None:
        return Peer("MSLK", None, "not callable here: no --source mslk=FOLDER@VERSION")
    from torch._subclasses.fake_tensor import FakeTensorMode

    os.environ["MSLK_PYTHON_ONLY"] = "1"
    sys.path.insert(0, str(source.folder))
    # As on an H100, of which there is none: the tensors are fake, and the device says what an H100 says.
    torch.version.cuda = "12.8"
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    fmha = importlib.import_module("mslk.attention.fmha")
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2048, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    inputs = fmha.Inputs(q, k, v, attn_bias=fmha.LowerTriangularMask())
    choose = partial(fmha._dispatch_fw, inputs, True)
    how = f"_dispatch_fw of the package, without its kernels, on fake tensors of an H100: {choose().NAME}; "
    return Peer("MSLK", source.version, how + "nothing is remembered", choose, choose)


def te_peer(source: Source | None) -> Peer:
    if source is None:
        return Peer("TransformerEngine", None, "not callable here: no --source te=FOLDER@VERSION")
    te = "transformer_engine.pytorch"
    chosen = {"No_Backend": -1, "F16_max512_seqlen": 0, "F16_arbitrary_seqlen": 1, "FP8": 2}
    stand_in("transformer_engine_torch", get_fused_attn_backend=lambda *call: chosen["F16_arbitrary_seqlen"])
    stand_in(f"{te}.cpp_extensions.fused_attn", FusedAttnBackend=chosen)
    stand_in(f"{te}.jit", jit_fuser=lambda function: function)
    stand_in("transformer_engine", __version__=source.version)
    of_h100 = {"get_device_compute_capability": lambda: (9, 0), "get_cudnn_version": lambda: (9, 14, 0)}
    stand_in(f"{te}.utils", **of_h100)
    path = source.folder / "transformer_engine/pytorch/attention/dot_product_attention/utils.py"
    module = loaded(path, "transformer_engine")
    made: dict[str, Any] = {
        "qkv_layout": "bshd_bshd_bshd", "max_seqlen_q": 2048, "max_seqlen_kv": 2048, "head_dim_qk": 128,
        "head_dim_v": 128, "attn_mask_type": "causal", "window_size": (-1, 0),
    }  # fmt: skip
    last = module.AttentionParams(**made)
    fields = dict(vars(last))

    def hit() -> bool:
        """As DotProductAttention.forward does: the question is made, and compared with the last one."""
        return bool(module.AttentionParams(**fields) != last)

    how = (
        "AttentionParams(...) against the last one's; get_attention_backend of utils.py, an H100; "
        "its C++ half is a stand-in that costs nothing"
    )
    return Peer("TransformerEngine", source.version, how, hit, partial(module.get_attention_backend, last))


def vllm_peer(source: Source | None) -> Peer:
    if source is None:
        return Peer("vLLM", None, "not callable here: no --source vllm=FOLDER@VERSION")
    config = SimpleNamespace(
        cache_config=SimpleNamespace(user_specified_block_size=False, cache_dtype="auto"),
        kv_transfer_config=None,
        speculative_config=None,
        attention_config=SimpleNamespace(use_non_causal=False, backend=None, backend_per_kind=None),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
        model_config=SimpleNamespace(rswa_window=None),
    )
    stand_in("vllm.config", get_current_vllm_config=lambda: config)
    stand_in("vllm.config.cache", is_known_kv_cache_dtype=lambda name: True)
    stand_in("vllm.envs", VLLM_BATCH_INVARIANT=False)
    stand_in("vllm.v1.attention.backend", AttentionType=SimpleNamespace(DECODER="decoder"))
    stand_in("vllm.platforms", current_platform=SimpleNamespace(get_attn_backend_cls=lambda *a, **k: "a.b"))
    stand_in("vllm.utils.import_utils", resolve_obj_by_qualname=lambda name: object)
    module = loaded(source.folder / "vllm/v1/attention/selector.py", "vllm")
    hit = partial(module.get_attn_backend, 128, torch.bfloat16, "auto", num_heads=16)
    how = (
        "get_attn_backend of selector.py, once for each layer of a model: a key of 18 fields; a miss imports "
        "CUDA kernels: not callable here"
    )
    return Peer("vLLM", source.version, how, hit)


MAKERS = {"vllm": vllm_peer, "diffusers": diffusers_peer, "te": te_peer, "mslk": mslk_peer}


# ---- the run ------------------------------------------------------------------------------------------


def costs(peers: Sequence[Peer], turns: int) -> list[Cost]:
    """All of them in turn with the calibration."""
    calls = [call for peer in peers for call in (peer.hit, peer.miss, peer.less) if call is not None]
    *taken, beside = in_turn([*calls, calibration], turns, EACH)
    of = dict(zip(calls, taken, strict=False))

    def median(call: Callable[[], Any] | None, less: Callable[[], Any] | None = None) -> float | None:
        if call is None:
            return None
        without = [0.0] * turns if less is None else of[less]
        own = [a - b for a, b in zip(of[call], without, strict=True)]
        return row("", "", "", [REFERENCE_US * a / b for a, b in zip(own, beside, strict=True)]).median

    return [Cost(p.name, p.version, p.how, median(p.hit, p.less), median(p.miss)) for p in peers]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER@VERSION")
    parser.add_argument("--quick", action="store_true", help="few samples: whether it runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    sources: dict[str, Source] = {}
    for given in options.source:
        name, _, place = given.partition("=")
        folder, _, version = place.rpartition("@")
        if name not in MAKERS or not Path(folder).is_dir():
            parser.error(f"--source {given}: one of {', '.join(MAKERS)}, = a folder, @ its version")
        sources[name] = Source(Path(folder), version)
    torch.set_num_threads(1)
    started = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    # attnsel and torch look at the machine first: mslk's stand-ins tell of another one.
    ours = [attnsel_peer(), torch_peer()]
    for call in (ours[0].hit, ours[0].less):
        assert call is not None
        call()
    theirs = [make(sources.get(name)) for name, make in MAKERS.items()]
    found = costs([*ours, *theirs], 8 if options.quick else TURNS)
    for cost in found:
        hit, miss = ("-" if us is None else f"{number(us)} µs" for us in (cost.hit, cost.miss))
        print(f"{cost.name:18} {cost.version or '':12} hit {hit:>9}  miss {miss:>9}  {cost.how}")
    if options.json is not None:
        more = {"quick": options.quick, "calibration_us": REFERENCE_US, "load_average_start": started}
        write(options.json, record("peers", found, **more))
    return 0


if __name__ == "__main__":
    sys.exit(main())
