"""Words: what the commands and the errors say, whole, at 80 columns. No torch is needed here.

Each output is a file of ``words/``. Most are transcripts, and what stands there is typed again: a new output
is a new file with its ``$ attnsel ...`` lines. ``test_words_with_torch.py`` has what runs attention. What
changed fails with a diff of the file. To write a new or a changed one::

    pytest tests/net/test_words.py --snapshot-update

and read the diff before it is committed. ``tests/net/README.md`` says more.

The net holds while modules move: it knows ``attnsel``, ``attnsel.cli.main`` and ``attnsel.rules``, and what
differs between machines is fixed at the standard library.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import attnsel
from attnsel import AttentionParams, Environment, InvalidInput, NoBackendError, Policy, select
from attnsel.cli import main
from attnsel.rules import REGISTRY, load_all
from attnsel.rules.codes import question
from transcripts import retold

HERE = Path(__file__).parent
WORDS = {path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / "words").iterdir())}

DOCTORS = [name for name in WORDS if name.startswith("doctor_")]
MADE = {"rule_pages", "warning_variable", *DOCTORS}  # of more than what is typed in them
TRANSCRIPTS = [name for name, text in WORDS.items() if text.startswith("$ ") and name not in MADE]
MISTAKES = [name for name, text in WORDS.items() if text.startswith(">>> ")]
assert len(WORDS) >= 110, "outputs are gone"

# syrupy, where it writes a file that is not named after its test. The names here are what was asked.
pytestmark = pytest.mark.filterwarnings(r"ignore:\s*Can not relate snapshot:UserWarning")

# All private names that this file knows: where the release is printed from, and what is remembered of the
# environment variables, which no public function makes forget.
RELEASE_OF_COMMANDS = "attnsel.cli.__version__"
RELEASE_OF_DOCTOR = "attnsel.cli.doctor.__version__"
NOTHING_READ_YET: dict[str, Any] = {"attnsel.settings._process": None, "attnsel.settings._warned": set()}


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``with forget(variables):`` these are set, and nothing has been read yet."""

    @contextmanager
    def forget(variables: dict[str, str]) -> Iterator[None]:
        with monkeypatch.context() as only:
            for name, value in variables.items():
                only.setenv(name, value)
            for private, nothing in NOTHING_READ_YET.items():
                only.setattr(private, copy.copy(nothing))
            yield

    return forget


@pytest.fixture
def at_a_prompt(same_machine, forget, capsys, monkeypatch) -> Callable[[str], str]:
    """What the lines typed in a transcript print now: ``files`` and ``logs`` lie in the current folder."""
    for folder in ("files", "logs"):
        shutil.copytree(HERE / folder, same_machine, dirs_exist_ok=True)
    monkeypatch.setattr(RELEASE_OF_COMMANDS, "1.2.3")

    def run(words: list[str], program: str, variables: dict[str, str]) -> tuple[int, str, str]:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding=variables.get("PYTHONIOENCODING", "utf-8"), errors="strict")
        with forget(variables):
            return main(words), *capsys.readouterr()

    return lambda transcript: retold(transcript, run, same_machine)


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_a_command_says(name, at_a_prompt, says):
    says(name, at_a_prompt(WORDS[name]))


# Words that other libraries use for flags, commands and fields of ours: each is named in its file.
@pytest.mark.parametrize("name", ["did_you_mean_a_flag", "did_you_mean_a_command"])
def test_the_word_that_was_meant(name, same_machine, capsys, says):
    told = []
    for line in re.findall(r"^attnsel ([^:]+): ", WORDS[name], re.MULTILINE):
        code = main(line.split())
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        told.append(f"attnsel {line}: {err}")
    says(name, "".join(told))


def test_the_field_that_was_meant(same_machine, says):
    told = []
    for word in re.findall(r"^AttentionParams\((\w+)=1\)", WORDS["did_you_mean_a_field"], re.MULTILINE):
        with pytest.raises(InvalidInput) as caught:
            AttentionParams(**{word: 1})
        told.append(f"AttentionParams({word}=1): {caught.value}\n")
    says("did_you_mean_a_field", "".join(told))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_python(name, same_machine, says):
    """One mistake each, as an expression; what it raises is the words."""
    names = {"attnsel": attnsel, "H100": Environment.describe("H100", torch="2.9.1"), "select": select}
    names |= {kind.__name__: kind for kind in (AttentionParams, Environment, Policy)}
    told = []
    for line in re.findall("^>>> (.*)", WORDS[name], re.MULTILINE):
        with pytest.raises((InvalidInput, TypeError, KeyError)) as caught:
            eval(line, names)
        told.append(f">>> {line}\n{caught.type.__name__}: {caught.value}\n")
    says(name, "\n".join(told))


def test_a_variable_that_nothing_reads(same_machine, forget, says):
    told = []
    for name in ("ATTNSEL_BACKEND", "ATTNSEL_DEUBG", "ATTNSEL_NONSENSE"):
        with forget({name: "1"}), pytest.warns(UserWarning, match=name) as warned:
            attnsel.configure()
        told += [f"$ export {name}=1\n>>> attnsel.configure()\n"]
        told += [f"{warning.category.__name__}: {warning.message}\n\n" for warning in warned]
    says("warning_variable", "".join(told))


# ---- selections in Python ----------------------------------------------------------------------------


def test_no_backend_error_says_the_whole_report(same_machine, says):
    refused = select(
        AttentionParams(softcap=30.0, head_dim_qk=100),
        Environment.describe("H100", torch="2.9.1"),
        policy=Policy(backend="cudnn", adapt="never"),
    )
    with pytest.raises(NoBackendError) as caught:
        refused.require()
    says("no_backend_error", f"NoBackendError: {caught.value}\n")


def test_every_kind_of_way_out(same_machine, says):
    load_all()
    told, kinds = [], set()
    # Rules whose examples show, between them, every kind of way out.
    for code in re.findall(r"^([A-Z]+\d+)  ", WORDS["ways_out"], re.MULTILINE):
        rule = REGISTRY.rules[code]
        policy = Policy(preview=rule.status == "preview")
        asked = select(*question(rule, rule.fires_on), policy=policy)
        told.append(f"\n{code}  {rule.title}")
        for way in asked.as_dict()["unlocks"]:
            kinds.add(way["effect"])
            told.append(f"  {way['candidate']}: {way['change']}  [{way['effect']}; rank {way['rank']}]")
            told += [f"      {line}" for line in (way["paste"] or "").splitlines()]
            told += [f"      # {line}" for line in (way["install"] or {}).get("why", ())]
    assert kinds == {"exact", "config", "install", "hardware", "risk"}
    says("ways_out", "\n".join(told).lstrip() + "\n")


# ---- rules -------------------------------------------------------------------------------------------


def test_every_reason(same_machine, says):
    """The message of each rule for its own example."""
    load_all()
    lines = []
    for _, rule in sorted(REGISTRY.rules.items()):  # not as modules are loaded: they move
        asked = question(rule, rule.fires_on)
        answer = select(*asked, policy=Policy(adapt="never", preview=rule.status == "preview"))
        messages = {
            reason.message
            for name in rule.candidates
            for reason in answer[name].reasons
            if reason.code == rule.code
        }
        assert messages, rule.code
        lines += [f"{rule.code}  {message}" for message in sorted(messages)]
    says("reasons", "\n".join(lines) + "\n")


def test_every_page(at_a_prompt, says):
    """All that ``attnsel rule CODE`` prints, without the line that names a module: modules move."""
    load_all()
    lines = at_a_prompt("\n".join(f"$ attnsel rule {code}" for code in sorted(REGISTRY.pages))).splitlines()
    says("rule_pages", "\n".join(line for line in lines if not line.startswith("Written in:")) + "\n")


# ---- the doctor, of a machine that is described ------------------------------------------------------


def torch_on(gpu: str, **versions: str) -> dict[str, Any]:
    """What torch says of itself on a machine with this GPU."""
    cuda = versions.get("cuda")
    env = Environment.describe(gpu, **versions).replace(detected=True, assumed=())
    said = {"version": versions["torch"], "cuda_build": cuda, "hip_build": None, "new_abi": True}
    said |= {"cuda_available": cuda is not None, "arch_list": ["sm_80", "sm_90", "sm_100"] if cuda else []}
    return {**said, "devices": [env.model_dump(mode="json")]}


HEALTHY = {"torch": "2.13.0", "triton": "3.7.1", "cudnn": "9.20.0", "cuda": "13.0", "python": "3.12.3"}
GPUS = {"pynvml": {"gpus": ["NVIDIA H100 80GB HBM3"]}}

# What is installed; what a child process says whose program has these words, where a text is what it dies of;
# and the variables.
MACHINES: dict[str, tuple[dict[str, str], dict[str, Any], dict[str, str]]] = {
    "healthy": (
        {
            "torch": "2.13.0",
            "triton": "3.7.1",
            "nvidia-cudnn-cu13": "9.20.0.48",
            "nvidia-cudnn-frontend": "1.28.0",
        },
        {
            "import json, torch": torch_on("H100", **HEALTHY),
            "import json, triton": {"version": "3.7.1"},
            "import json, cudnn": {"version": "1.28.0", "cudnn": 92000},
            **GPUS,
        },
        {},
    ),
    "broken": (
        {"torch": "2.13.0+cpu", "triton": "3.1.0", "flash-attn": "2.8.3", "nvidia-cudnn-cu12": "9.10.2.21"},
        {
            "flash_attn_2_cuda": "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E",
            "import json, torch": torch_on("cpu", torch="2.13.0+cpu", triton="3.1.0", python="3.12.3"),
            "import json, triton": "ImportError: libLLVM.so: cannot open shared object file",
            **GPUS,
        },
        {"ATTNSEL_DEUBG": "1", "ATTNSEL_BACKENDS": "sdpa.flsh"},
    ),
    "without": ({}, {"pynvml": {"gpus": []}}, {}),
}


@pytest.mark.parametrize("name", DOCTORS)
def test_the_doctor_of_a_machine(name, same_machine, capsys, says, monkeypatch):
    packages, answers, variables = MACHINES[name.split("_")[1]]

    def distributions(name: str = "", **_: Any) -> Iterator[Any]:
        for package, version in packages.items():
            if name in ("", package):
                yield SimpleNamespace(version=version, files=(), requires=(), metadata={"Name": package})

    def run(command: list[str], **_: Any) -> Any:
        said = next((said for words, said in answers.items() if words in " ".join(command)), {})
        if isinstance(said, str):
            return SimpleNamespace(returncode=1, stdout="", stderr=f"Traceback:\n{said}\n")
        return SimpleNamespace(returncode=0, stdout=json.dumps(said) + "\n", stderr="")

    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(importlib.metadata, "distributions", distributions)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {})
    # nvidia-ml-py is there, so that nobody looks for a driver's files; attnsel finds its own.
    own, there = importlib.util.find_spec, {"pynvml": object()}
    found = lambda name, *_: own(name) if name.startswith("attnsel") else there.get(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(RELEASE_OF_DOCTOR, "1.2.3")
    typed = WORDS[name].partition("\n")[0]
    if name.endswith("_160_ascii"):
        monkeypatch.setenv("COLUMNS", "160")
        sys.stdout.reconfigure(encoding="ascii")
    code = main(typed.split()[2:])
    out, err = capsys.readouterr()
    assert not err
    says(name, f"{typed}\n--- exit code {code} ---\n{out}")
