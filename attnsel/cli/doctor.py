"""``attnsel doctor``: what is installed, what runs here, and what is wrong."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterable
from typing import Any

from attnsel._version import __version__
from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import stamped, to_json
from attnsel.cli.findings import Finding, PlainCall, find, find_cuda, settings_in_force, variables
from attnsel.cli.flash import examine, find_flash
from attnsel.cli.form import TEXT, Form
from attnsel.cli.output import CHECK_FAILED, FOUND
from attnsel.cli.probe import Probe, ProbedMachine, redact
from attnsel.decision import select
from attnsel.environment import Environment
from attnsel.environment.installed import FLASH_ATTN
from attnsel.params import AttentionParams, DType
from attnsel.policy import Policy
from attnsel.report.document import Document, Facts, Fields, Item, Items, Ref, Section, Table
from attnsel.report.words import environment_words
from attnsel.rules import REGISTRY
from attnsel.settings import VariableWarning
from attnsel.verdicts.reasons import Candidate
from attnsel.verdicts.requirements import size

_MARKS = {"error": "✖", "warning": "?", "note": "i"}
_DTYPES: tuple[DType, ...] = ("bf16", "fp16", "fp32")


def doctor(*, form: Form = TEXT) -> int:
    """What is installed here, what a plain causal call gets on each device, and what is wrong.

    Libraries are imported in child processes, so that one that crashes is given, not felt. No user name,
    host name or home folder is printed: the output is meant for bug reports.

    --json prints one object: attnsel, python, platform, components (installed, loads, version,
    trouble), flash_attention (packages, cute_owner), plugins (entry, distribution,
    name, loads, trouble), devices (environments), gpus_in_sight, calls (device, dtype, training,
    backend, verdicts), variables, settings (null if a variable is invalid) and findings (code, level,
    text, consequence, fix). --env reads it back: attnsel explain --env doctor.json.

    Exit code: 0 nothing is wrong, 4 a finding is an error.
    """
    form.require_one()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VariableWarning)  # a finding says it
        machine = examine()
        calls = plain_calls(machine)
        more = [*find_flash(machine), *find_cuda(machine.cuda, machine.environments[0])]
        findings = find(machine, calls, more)
    form.print(
        lambda: _document(machine, calls, findings),
        lambda: stamped("doctor", to_json(_as_dict(machine, calls, findings))),
    )
    return CHECK_FAILED if any(finding.level == "error" for finding in findings) else FOUND


def plain_calls(machine: ProbedMachine) -> list[PlainCall]:
    """A plain causal call per device and dtype, training and inference, under the policy in force."""
    settings = settings_in_force()
    policy = Policy() if settings is None else settings.policy
    calls = []
    for number, env in enumerate(machine.environments):
        for dtype in _DTYPES:
            for training in (True, False):
                answer = select(AttentionParams(dtype=dtype, is_training=training), env, policy=policy)
                verdicts = {c.name: _verdict(c) for c in answer}
                calls.append(PlainCall(number, dtype, training, answer.backend, verdicts))
    return calls


def _verdict(candidate: Candidate) -> dict[str, Any]:
    reason = candidate.reasons[0] if candidate.reasons else None
    return {
        "verdict": candidate.verdict,
        "plan_only": candidate.plan_only,
        "code": None if reason is None else reason.code,
        "message": None if reason is None else reason.message,
    }


def _word(verdict: dict[str, Any]) -> str:
    if verdict["verdict"] == "refused":
        return f"✖ {verdict['code']}"
    if verdict["plan_only"]:
        return "plan"
    return "✔" if verdict["verdict"] == "eligible" else f"? {verdict['code']}"


def _as_dict(machine: ProbedMachine, calls: list[PlainCall], findings: list[Finding]) -> dict[str, Any]:
    settings = settings_in_force()
    said = None if settings is None else settings.model_dump(mode="json")
    if said is not None and said.get("debug_file") is not None:
        said["debug_file"] = redact(said["debug_file"])
    return {
        "attnsel": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "components": {
            name: {
                "installed": probe.installed,
                "loads": probe.loads,
                "version": probe.said.get("version"),
                "trouble": probe.trouble,
            }
            for name, probe in machine.probes.items()
        },
        "flash_attention": {
            "packages": machine.flash.packages,
            "cute_owner": machine.flash.cute,
        },
        "plugins": [
            {
                "entry": found.entry,
                "distribution": found.distribution,
                "name": None if found.plugin is None else found.plugin.name,
                "loads": probe.loads if found.plugin else False,
                "trouble": redact(probe.trouble),
            }
            for found, probe in machine.plugins
        ],
        "devices": [env.model_dump(mode="json") for env in machine.environments],
        "gpus_in_sight": machine.gpus_in_sight,
        "calls": calls,
        "variables": variables(os.environ),
        "settings": said,
        "findings": findings,
    }


def _document(machine: ProbedMachine, calls: list[PlainCall], findings: list[Finding]) -> Document:
    system = f"{platform.system()} {platform.machine()}"
    installed = [
        (name.replace("_", "-"), _state(name, probe))
        for name, probe in machine.probes.items()
        if name not in FLASH_ATTN or probe.installed is not None
    ]
    if not any(machine.probes[name].installed for name in FLASH_ATTN):
        installed.append(("flash-attn", "not installed, nor flash-attn-3 or flash-attn-4"))
    plugins = []
    for found, probe in machine.plugins:
        name = found.entry if found.plugin is None else found.plugin.name
        state = "✖ left out" if found.plugin is None else "✖ does not load" if probe.loads is False else ""
        plugins.append((name, f"{found.distribution}  {state or ('✔ loads' if probe.loads else '')}"))
    set_ = [f"{name}={value}" for name, value in variables(os.environ).items()]
    return Document(
        (
            Facts(((f"attnsel {__version__}", f"Python {platform.python_version()}", system),)),
            Item("Installed", below=(_fields(installed),)),
            *([Item("Plug-ins", below=(_fields(plugins),))] if plugins else []),
            Section("ATTNSEL_ variables", (Items(tuple(map(Item, set_ or ["none set"]))),)),
            *(
                _device(number, env, [call for call in calls if call.device == number])
                for number, env in enumerate(machine.environments)
            ),
            _findings(findings),
        )
    )


def _fields(rows: Iterable[tuple[str, str]]) -> Fields:
    return Fields(tuple((name, (text,)) for name, text in rows))


def _state(name: str, probe: Probe) -> str:
    if probe.installed is None:
        return "not installed"
    version = str(probe.said.get("version") or probe.installed)
    if probe.loads is False:
        return f"{version}  ✖ does not load: {probe.trouble}"
    notes = []
    if name == "torch" and probe.loads:
        build = probe.said.get("cuda_build")
        hip = probe.said.get("hip_build")
        notes.append(f"CUDA {build} build" if build else f"ROCm {hip} build" if hip else "CPU build")
    if probe.loads:
        notes.append("✔ loads")
    return "  ".join([version, *notes])


def _device(number: int, env: Environment, calls: list[PlainCall]) -> Section:
    """Candidates down, calls along; calls that got the same answers share a column."""
    columns: dict[tuple[str, ...], list[PlainCall]] = {}
    for call in calls:
        words = tuple(
            _word(call.verdicts[name]) + (" ←" if call.backend == name else "") for name in CANDIDATES
        )
        columns.setdefault(words, []).append(call)
    table = Table(
        ("", *(_label(group) for group in columns.values())), tuple(zip(CANDIDATES, *columns, strict=True))
    )
    legend = [Item(mark="←", text="chosen")]
    if any(word.startswith("plan") for words in columns for word in words):
        legend.append(Item(label="plan", text="known to the planner; attnsel does not run it yet"))
    codes = {verdict["code"] for call in calls for verdict in call.verdicts.values() if verdict["code"]}
    legend += [Item(label=Ref(code), text=REGISTRY.pages[code].title) for code in sorted(codes)]
    memory = [size(env.device.memory)] if env.device.memory else []
    where = Facts(((*environment_words(env), *memory),))
    title = f"Device {number}: what a plain causal call gets"
    return Section(title, (where, table, Items(tuple(legend))))


def _label(calls: list[PlainCall]) -> str:
    """Several calls in few words: ``bf16/fp16 train+infer``."""
    by_kinds: dict[str, list[str]] = {}
    for dtype in dict.fromkeys(call.dtype for call in calls):
        kinds = "+".join("train" if call.training else "infer" for call in calls if call.dtype == dtype)
        by_kinds.setdefault(kinds, []).append(dtype)
    return ", ".join(f"{'/'.join(dtypes)} {kinds}" for kinds, dtypes in by_kinds.items())


def _findings(findings: list[Finding]) -> Section:
    errors = sum(finding.level == "error" for finding in findings)
    doubtful = sum(finding.level == "warning" for finding in findings)
    title = f"{errors} wrong" if errors else "nothing is wrong"
    items = tuple(
        Item(
            mark=_MARKS[finding.level],
            label=finding.code,
            text=finding.text,
            below=tuple(
                Item(text, mark) for text, mark in ((finding.consequence, "so"), (finding.fix, "→")) if text
            ),
        )
        for finding in findings
    )
    return Section(
        f"Findings: {title}" + (f", {doubtful} probably not as meant" if doubtful else ""), (Items(items),)
    )
