"""Every kind of JSON that attnsel prints, as samples of it; and their shape, written to docs/schemas.

    python docs/tools/json_schemas.py        # writes the documents of the present versions

A document that is committed is a promise: where the shape changes, raise the version in
attnsel/base/records.py first, then write the new document beside the old one, and add its digest to
tests/docs/schema_digests.csv.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # these pages are about this checkout
    _ROOT = Path(__file__).resolve().parents[2]
    sys.path[1:1] = [str(_ROOT), *(str(_ROOT / "tests" / name) for name in ("support", "proof"))]

from pydantic import BaseModel

import conformance_flash
import rank_files
from agreement import RuleMismatch, Tally
from attnsel import AttentionParams, Environment, InvalidInput, Policy, select, settings
from attnsel.base.records import stamped, versions
from attnsel.cli import doctor as doctor_module
from attnsel.cli import main
from attnsel.cli.explain_more import Comparison, LibraryAnswer, NotAsked, by_rules
from attnsel.cli.probe import DISTRIBUTIONS, FlashFacts, Probe, ProbedMachine
from attnsel.debug import process_record
from attnsel.diagnose.models import source
from attnsel.diagnose.watching.judge import Watched
from attnsel.diagnose.watching.record import Materialised, Process, Site
from attnsel.environment import COMPONENTS
from attnsel.rules import REGISTRY
from attnsel.rules.api import Removed
from paths import ROOT
from workspaces import WorkspaceMismatch, Workspaces

FOLDER = ROOT / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"

# Objects whose keys are data: names of candidates, components, fields and variables.
MAPS = {
    "changes",
    "answers",
    "components",
    "packages",
    "verdicts",
    "variables",
    "fires_on",
    "passes",
    "instead",
    "pins",
    "switches",
}
MAPS |= {"environments", "models", "questions", "expected", "expected."}
MAPS |= {"limits", "commands", "disagreements.params", "planned_for", "bytes", "architectures", "errors"}

LINES = {
    "selection": [
        "explain --gpu H100",
        "explain --gpu H100 --cudnn 9.1.0 --head-dim-qk 192 --head-dim-v 128",
        "explain --gpu A100 --window-size 128,0",
        "explain --gpu T4 --qkv-layout thd --attn-mask-type padding --dtype fp32",
        "explain --gpu B200 --fp8-recipe mxfp8 --dtype fp16 --memory-limit 2GiB",
        "explain --gpu cpu --core-attention-bias-type alibi --alibi-slopes-shape 16 --inference",
        "explain --gpu sm90 --qkv-layout paged_kv_bshd_bshd_bshd --attn-mask-type padding --kv-cache paged "
        "--page-size 64 --inference --torch none",
        "explain --gpu H100 --backend triton --triton none --fp8-recipe delayed",
        "explain --gpu H100 --fp8-recipe current",
        "explain --gpu H100 --fp8-recipe block --core-attention-bias-type post_scale_bias",
        "explain --gpu A100 --torch 2.7.0 --attn-mask-type padding --as torch",
        "explain --gpu H100 --softcap 30 --as torch --switch TORCH_CUDNN_SDPA_DEPRIORITIZED=1",
        "explain --gpu A100 --qkv-layout thd --attn-mask-type padding --as te --switch NVTE_FLASH_ATTN=0",
        "explain --gpu H100 --softcap 30 --as te --transformer-engine 2.9 --cudnn 9.99.0",
        "explain --gpu T4 --dtype fp16 --as transformers --switch attn_implementation=flash_attention_2",
        "explain --gpu H100 --cudnn 9.20.0 --max-seqlen-q 704 --max-seqlen-kv 704 --allow-known-bugs BUG006 "
        "--core-attention-bias-type post_scale_bias --as te",
    ],
    "log": [
        f"explain --from-log {ROOT}/tests/attnsel/diagnose/logs/cases/{line}"
        for line in (
            "NVIDIA-TransformerEngine-1821.txt",
            "NVIDIA-TransformerEngine-1821.txt --gpu B200 --fp8-recipe mxfp8",
            "NVIDIA-TransformerEngine-3006.txt --fp8-recipe delayed --return-max-logit",
            "NVIDIA-NeMo-Megatron-Bridge-2298.txt",
            "clessig-atmorep-17.txt",
            "clessig-atmorep-17.txt --platform windows --missing libnvrtc",
            "pytorch-pytorch-117354.txt --core-attention-bias-type alibi --alibi-slopes-shape 16 --inference",
            "pytorch-pytorch-139424.txt --gpu cpu --stride q=8192,512,128,1",
            "Comfy-Org-ComfyUI-8118.txt --core-attention-bias-type post_scale_bias",
            "EvolvingLMMs-Lab-LLaVA-OneVision-2-85.txt",
            "NVIDIA-TransformerEngine-568.txt --kv-cache paged --page-size 64 --inference --torch none "
            "--qkv-layout paged_kv_bshd_bshd_bshd --attn-mask-type padding",
            "pytorch-pytorch-140930.txt",
        )
    ],
    "model": [
        "explain --model gpt-oss-20b --gpu T4 --tp-size 8",
        "explain --model qwen3-next-80b-a3b --gpu H100 --cudnn 9.99.0",
        "explain --model deepseek-v3 --gpu B200 --seqlen 8k",
    ],
    "plan": [
        "explain --gpu H100 --cp-size 4",
        "explain --gpu H100 --cp-size 16 --inference --max-seqlen-q 1000 --num-gqa-groups 2",
        "explain --gpu sm90 --cp-size 2 --cp-comm-type a2a --attn-mask-type no_mask",
        "explain --gpu cpu --cp-size 3 --backend cudnn",
        "explain --gpu H100 --cp-size 256 --attn-mask-type padding_causal --qkv-layout thd",
    ],
    "can-i-use": [
        "can-i-use softcap mla deterministic alibi-slopes long-128k packed-qkv paged fp8",
        "can-i-use mla --gpu H100 --cudnn 9.1",
        "can-i-use head-dim-64 --gpu T4 --kernel sdpa.flash,sdpa.math",
        "can-i-use bias --gpu H100 --kernel flash_attn.3",
        "can-i-use softcap --gpu H100 --cudnn 9.99.0",
    ],
    "grid": [
        "can-i-use --rows head_dim_qk=64,128,512 --cols gpu=T4,H100,cpu",
        "can-i-use --rows softcap=0,30 --cols gpu=T4,H100 --as te",
        "can-i-use --rows dtype=fp32,bf16 --cols cudnn=9.1,none --kernel cudnn --gpu H100",
        "can-i-use --rows num_heads=6,16 --cols num_gqa_groups=3,4 --gpu H100 --torch 2.99",
        "can-i-use --rows num_gqa_groups=4,8 --cols gpu=B200 --max-seqlen-q 1 --inference --cudnn 9.20 "
        "--as te",
    ],
    "rules": ["rules"],
    "ranges": ["rules --ranges"],
    "gpus": ["gpus"],
    "rule": [
        "rule CUDNN204",
        "rule PREF001",
        "rule PREF033",
        "rule POLICY001",
        "rule BUG006",
        "rule SDPA003",
        "rule CP001",
    ],
}


def _measured(published: list[Any]) -> Iterator[Any]:
    """What ``explain --measure`` adds: on a CPU, and as on a GPU."""
    from attnsel.cli.explain_measure import record
    from attnsel.runtime.measure import Measuring

    found = Measuring(select(AttentionParams(), Environment.detect("cpu")))
    found.timed[0].samples = {"fwd": [1.0, 2.0], "bwd": [3.0], "fwd+bwd": [4.0]}
    yield record(found, None)
    found.timed[0].peak_bytes = 1 << 20
    yield {**record(found, "figures.csv"), "published": published}


def printed(line: str) -> Any:
    out = io.StringIO()
    with redirect_stdout(out), mock.patch.object(settings, "_process", None):
        main([*line.split(), "--json"])
    return json.loads(out.getvalue()) if out.getvalue() else None


def samples() -> dict[str, list[Any]]:
    """Objects of every kind, as they come out."""
    found: dict[str, list[Any]] = {name: [] for name in versions()}
    for name, lines in LINES.items():
        for answer in filter(None, map(printed, lines)):
            found[name] += answer if isinstance(answer, list) else [answer]
    found["selection"] += _of_every_rule()
    found["selection"] += found["plan"]  # explain --cp-size prints both
    found["plan"] = [answer["context_parallel"] for answer in found["plan"]]
    found["selection"] += [{**found["selection"][0], "library": library} for library in _libraries()]
    found["selection"] += _with_layouts()
    found["measured"] = list(_measured([one for answer in found["selection"] for one in answer["figures"]]))
    found["selection"] += [{**found["selection"][0], "measured": each} for each in found["measured"]]
    found["debug"] = [
        stamped("debug", {"event": "selection", "label": "layer 1", **process_record(), **answer})
        for answer in found["selection"]
        if answer.keys().isdisjoint(("context_parallel", "library", "measured"))
    ]
    from attnsel.pages.rule import whole_page

    for gone in (Removed("BUG901", "0.1.0", "Why.", "BUG006"), Removed("BUG902", "0.1.0", "Why.", "")):
        found["removed-rule"].append(whole_page(gone))
    features = found["can-i-use"][0]
    older = {**features["cells"][0], "state": "version", "unlocked_at": "9.7.1"}  # what no cell is today
    found["can-i-use"].append({**features, "cells": [older]})
    found["doctor"] = _doctor()
    found["ranks"] = _ranks()
    # The table of families will do: LINES ask transformers' own code for answers of the same shape.
    with mock.patch.object(source, "_asks_transformers", return_value=False):
        found["compare"], found["check"], found["baseline"] = _compared(), *_checked()
    found["replay"] = _replays()
    found["watch"] = _watched()
    found["watch-process"] = [stamped("watch-process", one["process"]) for one in found["watch"]]
    found["watch-site"] = [stamped("watch-site", site) for one in found["watch"] for site in one["sites"]]
    change = {"kernel": "sm90 forward 64/64 bf16 full", "worse": True, "words": ["why"]}
    found["conformance"] = [
        stamped("conformance", {"kernels": _kernels(), **more}) for more in ({}, {"changes": [change]})
    ]
    found["conformance-cudnn"] = [_agreement(None), _agreement(Workspaces())]
    found["conformance-flash"] = [_packages("4.8.1"), _packages(None)]
    found["conformance-executed"] = [_executed()]
    return json.loads(json.dumps(found))


def _watched() -> list[Any]:
    """A program that was watched, and the same asked about for another GPU; a call with everything, and one
    that could not be read."""
    full = Site(
        where="train.py:31 step",
        api="by hand",
        params=AttentionParams(),
        switches=("enable_gqa=true",),
        forward="aten::bmm",
        backward="BmmBackward0",
        candidate="sdpa.math",
        calls=3,
        seconds=0.5,
        backward_seconds=0.5,
        peak_bytes=1,
        expected_bytes=1,
        expected_seconds=0.5,
        materialised=(Materialised(what="scores", bytes=1),),
        why=("why",),
        notes=("note",),
    )
    bare = Site(where="?", api="aten", forward="aten::x", unread="no shape")
    here, there = Environment.describe("cpu"), Environment.describe("H100")
    process = Process(attnsel="0", program="train.py", environment=here, exit_code=1, unseen=("a thread",))
    plain = Process(attnsel="0", program="train.py", environment=there)
    return [
        Watched(process, (full, bare), there).as_dict(),
        Watched(plain, (full, bare)).as_dict(),
    ]


def _compared() -> list[Any]:
    """Of two environments and of more, of a model, of another library's choice, and without a change."""
    return [
        printed(f"compare {words}")
        for words in (
            "A100 B200",
            "H100,torch=2.6 H100,torch=2.15 --as torch",
            "A100 H100 B200 --model gpt-oss-20b",
            "H100 H200",
            "H100 T4 --dtype fp32 --allow-known-bugs all",
        )
    ]


def _checked() -> tuple[list[Any], list[Any]]:
    """What check says of a baseline that holds, and of one with everything in it that does not; and both."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "attention.json")
        begin = f"check {file} --update --env H100,cudnn=9.1 --model gemma-3-4b"
        said = [printed(begin), printed(f"check {file} --upgrade cudnn=9.13")]
        begun, whole = (json.loads(file.read_text()) for _ in range(2))
        more = {
            "questions": {"long": {"head_dim_qk": 96, "attention_dropout": 0.5}},
            "dispatcher": "torch",
            "switches": {"enable_gqa": "true"},
            "policy": Policy().model_dump(mode="json"),
            "limits": {"known_bugs": False, "max_score_bytes": "1KiB", "max_memory": 1},
            "expected": {"H100": {"long": {"kernel": None, "allow": ["memory"]}, "gone": None}},
        }
        whole["models"]["gemma-3-4b"] |= {"batch_size": 2, "seqlen": 8192, "encoded": 16, "tp_size": 2}
        whole["models"]["gemma-3-4b"] |= {"dtype": "bf16", "phases": ["training"]}
        file.write_text(json.dumps({**whole, **more}))
        said.append(printed(f"check {file}"))
    return said, [begun, {**whole, **more}]


def _ranks() -> list[Any]:
    """Of ranks that agree, and of a folder with everything that can be said."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        ranks = Path(folder)
        rank_files.write_ranks(ranks, ranks=2, dissenter=None)
        found.append(printed(f"compare {folder}"))
        rank_files.write_ranks(ranks, ranks=8, dissenter=3)
        refused = rank_files.answer(
            refusals=(("cudnn", "RUNTIME001", "no"), ("sdpa.cudnn", "RUNTIME002", "off"))
        )
        (ranks / "rank5.jsonl").write_text(rank_files.debug_line(refused, 5))
        denied = rank_files.answer(deny=("cudnn",))
        (ranks / "rank6.jsonl").write_text(rank_files.debug_line(denied, 6))
        (ranks / "rank9.jsonl").write_text('{"schema": "attnsel.debug/0"}\n{\nstep 1\n{"a')
        (ranks / "watch.jsonl").write_text(
            rank_files.watch_lines(1, [rank_files.site("aten::a", "sdpa.math")], ended=1)
        )
        (ranks / "weights").write_bytes(b"\0")
        found.append(printed(f"compare {folder}"))
    return found


def _replays() -> list[Any]:
    """Files that calls leave."""
    import torch

    from attnsel import NoBackendError, attention
    from attnsel.runtime import leave_replay as leave

    q, k, v = (torch.randn(2, 8, 2, 8, requires_grad=True) for _ in "qkv")
    mask = torch.arange(8).expand(2, 1, 1, 8) >= 5
    arbitrary = torch.zeros(8, 8, dtype=torch.bool)
    calls: list[dict[str, Any]] = [
        {"softcap": 1.0, "backend": "sdpa.flash"},
        {"attn_mask_type": "padding", "attention_mask": mask, "backend": "cudnn"},
        {"attn_mask_type": "arbitrary", "attention_mask": arbitrary, "backend": "cudnn"},
    ]
    cu = torch.tensor([0, 8, 16], dtype=torch.int32)
    packed = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(leave, "_left", set()):
        with settings.override(replay_dir=folder):
            for call in calls:
                with contextlib.suppress(NoBackendError):
                    attention(q, k, v, **call)
            with contextlib.suppress(NoBackendError):
                attention(*(t.flatten(0, 1) for t in (q, k, v)), **packed, max_seqlen_q=8, backend="cudnn")
        files = sorted(Path(folder).iterdir())
        found = [json.loads(file.read_text()) for file in files]
        happened = {"kind": "refused", "candidate": "cudnn", "message": "no", "code": "RUNTIME001"}
        found[0]["happened"] = {**happened, "likely": ["CUDNN204"], "then": "tiled"}
        return found


def _of_every_rule() -> list[dict[str, Any]]:
    """Selections of the questions that rules refuse."""
    found = []
    for rule in REGISTRY.rules.values():
        asked = dict(rule.fires_on)
        machine = {name: asked.pop(name) for name in (*COMPONENTS, "gpu") if name in asked}
        fields = {name: value for name, value in asked.items() if name in AttentionParams.model_fields}
        with contextlib.suppress(InvalidInput):  # of examples that need an environment of another kind
            selection = select(AttentionParams(**fields), Environment.describe(**machine))
            found.append(selection.as_dict(unlocks=len(found) % 16 == 0))
    assert len(found) > len(REGISTRY.rules) // 2
    return found


def _libraries() -> list[dict[str, Any]]:
    from attnsel.backends.cudnn.ask.client import GraphAnswer

    verdict = by_rules(AttentionParams(), Environment.describe("H100"))
    made = [NotAsked("gpu", "Why.").as_dict()]
    for answers, inexpressible, judge, notes in (
        ({"forward": (True, "build_plans", "", ("engine",), 1024)}, None, "library", []),
        ({"forward": (False, "check_support", "no", (), None)}, None, "frontend", ["A note."]),
        ({"backward": (None, "timeout", "", (), None)}, None, "library", []),
        ({}, "why", "library", []),
    ):
        judged = {"judge": judge, "cudnn": "9.20.0", "cudnn_frontend": "1.28.0"}
        said = {name: GraphAnswer(*answer, **judged) for name, answer in answers.items()}
        versions = {"cudnn": "9.20.0", "cudnn_frontend": "1.28.0"}
        asked = LibraryAnswer(said, inexpressible)
        made.append(Comparison(verdict, asked, judge, versions, None, "H100", notes).as_dict())
    return made


def _with_layouts() -> list[dict[str, Any]]:
    """Selections of tensors that are not dense."""
    import torch

    from attnsel import detect_layout

    packed = torch.zeros(1, 4, 2, 3, 8).unbind(3)
    apart = [torch.zeros(1, 4, 2, 16)[..., :8] for _ in "qkv"]
    selection = select(AttentionParams(), Environment.describe("H100"))
    layouts = [detect_layout(*tensors, "bshd") for tensors in (packed, apart, (packed[0], *apart[1:]))]
    layouts.append(detect_layout(*[t.to("meta") for t in apart], "bshd"))
    return [selection.with_layout(layout).as_dict() for layout in layouts]


def _doctor() -> list[Any]:
    """Of machines that are described: nothing is probed."""
    from attnsel.plugins import Found

    absent = Probe(None, None, {})
    loads = Probe("2.9.1", True, {"version": "2.9.1", "cuda_build": None})
    broken = Probe("1.0", False, {}, "ImportError: why")
    left_out = Found("acme = acme:PLUGIN", "acme 1.2", None, "why")
    found = []
    for gpu, probe in (("cpu", loads), ("H100", broken), ("T4", absent)):
        env = Environment.describe(gpu, torch="2.9.1").replace(detected=True, assumed=())
        plugins = ((left_out, absent),) if gpu == "T4" else ()
        flash = FlashFacts(packages={"flash-attn": "2.8.3"}, cute="flash-attn" if gpu == "H100" else None)
        machine = ProbedMachine(dict.fromkeys(DISTRIBUTIONS, probe), (env,), ("H100",), plugins, flash)
        variables = {"ATTNSEL_DEBUG": "9" if gpu == "T4" else "1"}  # 9: there are no settings then
        seen = mock.patch.object(doctor_module, "examine", lambda machine=machine: machine)
        with seen, mock.patch.dict(os.environ, variables):
            found.append(printed("doctor"))
    return found


def _kernels() -> list[dict[str, Any]]:
    try:
        from gate import KernelReport
    except ImportError:
        return []
    from sass import LoopMix

    named, measured = ("forward", 90, 64, 64, "bf16", "causal"), (128, 0, 1, 2, ("mma",), 0.5)
    waiting = LoopMix(9, 2, 1, *[0] * 9, 6, 1024, 2.0)  # type: ignore[call-arg]
    dense = LoopMix(8, 2, 0, *[0] * 9, 6, 1024, None)  # type: ignore[call-arg]
    made = [
        KernelReport(*named, (128, 64), 4, 2, *measured, loop=waiting, loops=(9, 12), matrix_work=1.5),
        KernelReport(*named, (128, 64), 4, 2, *measured, rows=16, loop=dense, loops=(8,), warnings=("why",)),
        KernelReport("merge", 90, 64, 64, "bf16", "", None, 4, 2, 0, 0, 0, 0, (), 0.5, "why", True),
    ]
    return [report.as_json() for report in made]


def _executed() -> dict[str, Any]:
    about: dict[str, Any] = {"date": "2026-11-22", "triton": "3.7.1"}
    try:
        from ptx_interpreter.cases import CaseReport
    except ImportError:
        return stamped("conformance-executed", {**about, "architectures": {}, "cases": []})
    from conformance_executed import summaries
    from ptx_interpreter.faults import Fault

    fault = Fault("race", "forward", "forward.py:1", 1, "st.shared", 0, 0, "why")
    good = CaseReport("full", 75, "fp16", (64, 64), ["forward"], errors={"out": 0.5, "lse": 0.0})
    bad = CaseReport("full", 80, "bf16", (64, 64), faults=[fault], unsupported=("elect",), refused="why")
    bad.errors["out"] = float("inf")
    said = {"architectures": summaries((good, bad)), "cases": [good.as_json(), bad.as_json()]}
    return stamped("conformance-executed", {**about, **said})


def _agreement(workspaces: Workspaces | None) -> dict[str, Any]:
    tally = Tally(workspaces=workspaces)
    if workspaces is not None:
        for planned in (None, 1):
            workspaces.disagreements.append(WorkspaceMismatch("H100", AttentionParams(), planned, 1))
    tally.outcomes["false accept"] += 1
    about = {"cudnn": "9.20.0", "cudnn_frontend": "1.28.0", "stage": "check_support", "gpus": ["H100"]}
    mismatch = RuleMismatch("false accept", "H100", AttentionParams(num_heads=2), ("CUDNN204",), "why")
    said = {**about, "seed": 0, "samples": 1, **tally.as_dict()}
    return stamped("conformance-cudnn", {**said, "disagreements": [mismatch.as_dict()], "notes": ["why"]})


def _packages(compiler: str | None) -> dict[str, Any]:
    tally = Tally()
    tally.outcomes["false accept"] += 1
    mismatch = RuleMismatch("false accept", "sm90", AttentionParams(num_heads=2), ("FLASH411",), "why")
    tally.disagreements.append(mismatch)
    about = {"backend": "flash_attn.4", "version": "4.0.0b36", "compiler": compiler, "gpus": ["sm90"]}
    said = conformance_flash.as_dict(
        conformance_flash.Run(tally, 1), {**about, "seed": 0, "samples": 1}, ["why"]
    )
    return stamped("conformance-flash", said)


# ---- their shape -------------------------------------------------------------------------------------

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_MODELS: dict[str, type[BaseModel]] = {
    "params": AttentionParams,
    "environment": Environment,
    "devices": Environment,
    "policy": Policy,
    "settings": settings.Settings,
}


def shape(values: list[Any], key: str = "", within: str = "") -> dict[str, Any]:
    """The JSON Schema of these values: an object has exactly the keys that all, or some, of them have."""
    if key in _ANYTHING:
        return {}
    objects = [value for value in values if isinstance(value, dict)]
    arrays = [value for value in values if isinstance(value, list)]
    kinds = sorted({_TYPES[type(value)] for value in values if not isinstance(value, (dict, list))})
    found: list[dict[str, Any]] = []
    if kinds:
        found.append({"type": kinds[0] if len(kinds) == 1 else kinds})
    if arrays:
        items = [item for value in arrays for item in value]
        found.append({"type": "array", **({"items": shape(items, key, within)} if items else {})})
    if objects and key in _MODELS and within != "disagreements":
        found.append({"$ref": f"#/$defs/{key}"})
    elif objects and (key in MAPS or f"{within}.{key}" in MAPS):
        inner = [item for value in objects for item in value.values()]
        free = not inner or key in _FREE or f"{within}.{key}" in MAPS
        found.append({"type": "object", "additionalProperties": {} if free else shape(inner, "", key)})
    elif objects:
        names = list(dict.fromkeys(name for value in objects for name in value))
        parts = {
            name: shape([value[name] for value in objects if name in value], name, key) for name in names
        }
        always = [name for name in names if all(name in value for value in objects)]
        found.append(
            {"type": "object", "properties": parts, "required": always, "additionalProperties": False}
        )
    return found[0] if len(found) == 1 else {"anyOf": found}


_ANYTHING = {"observed"}  # the value of a field, or of several
_FREE = {"questions", "changes", "fires_on", "passes", "instead"}  # of fields, with their values


def _of_model(model: type[BaseModel]) -> dict[str, Any]:
    made = model.model_json_schema(mode="serialization")
    if "_Recipe" in made.get("$defs", {}):
        made["$defs"]["_Recipe"].pop("additionalProperties")  # each kind has fields of its own
    if model is Environment:
        made["properties"] |= {name: {"type": ["string", "null"]} for name in COMPONENTS}
        made["$defs"].pop("Version", None)  # a text in JSON
        made["properties"]["warnings"] = {"type": "array", "items": {"type": "string"}}
    return _plain(made)


def _plain(part: Any) -> Any:
    """Without the words and defaults, which are no promise."""
    if isinstance(part, list):
        return [_plain(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = {}
    for name, value in part.items():
        if name == "properties":
            kept[name] = {field: _plain(inner) for field, inner in value.items()}
        elif name not in ("title", "description", "default"):
            kept[name] = _plain(value)
    return kept


def document(name: str, values: list[Any]) -> dict[str, Any]:
    made = shape(values)
    made["properties"]["schema"] = {"const": f"attnsel.{name}/{versions()[name]}"}
    text = json.dumps(made)
    definitions = {}
    for key, model in _MODELS.items():
        if f'"#/$defs/{key}"' in text:
            definitions[key] = _of_model(model)
            definitions |= definitions[key].pop("$defs", {})
    told = {"$schema": DIALECT, "title": f"attnsel.{name}/{versions()[name]}", **made}
    return {**told, "$defs": definitions} if definitions else told


def path_of(name: str) -> Path:
    return FOLDER / f"{name}-{versions()[name]}.json"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, values in samples().items():
        path_of(name).write_text(json.dumps(document(name, values), indent=1) + "\n", encoding="utf-8")
