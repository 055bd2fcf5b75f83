"""``conformance.py --backend flash_attn.4``: counts, disagreements, exit codes, what is missing."""

from __future__ import annotations

import importlib.util
import json
from typing import ClassVar

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import fake_flash_attn_4 as fake
from flash_attention_ask import client, source
from flash_attention_ask.client import Answer

LINE = "--backend flash_attn.4"


class Said:
    """In place of the process: every call is supported unless ``refuses`` says otherwise."""

    compiler: str | None = None
    notes = ("a note",)
    asked: ClassVar[list[tuple[int, str]]] = []

    def __init__(self, found):
        self.source = found

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def ask(self, p, arch, sm_count, depth):
        self.asked.append((arch, depth))
        supported = self.refuses(p, arch, depth)
        return Answer(not supported, "forward", "no" if supported else "", "interface.py:1", depth)

    @staticmethod
    def refuses(p, arch, depth):
        return False


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setattr(client, "Package", Said)
    monkeypatch.setattr(Said, "asked", [])
    return Said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fake.install(tmp_path_factory.mktemp("wheel"))


def test_a_release_in_a_folder_is_asked_and_judged(run, folder):
    """The whole way, with a package of a few checks: most of what the rules know it does not refuse."""
    code, out, _ = run(f"{LINE} --source {folder} --samples 12 --arch 75,90 --json")
    told = json.loads(out)
    assert told["schema"] == "attnsel.conformance-flash/1"
    assert (told["backend"], told["version"]) == ("flash_attn.4", "4.0.0b36")
    assert (told["asked"], told["gpus"], told["samples"]) == (24, ["sm75", "sm90"], 12)
    outcomes = ("agree", "false_accept", "false_reject", "known_bug", "unknown", "no_answer")
    assert sum(told[name] for name in outcomes) == 24
    assert told["agree"] >= 12  # nothing runs on sm75, and both know it
    assert code == (4 if told["false_accept"] else 0)


def test_a_false_accept_is_an_exit_code_and_is_written_out(run, said, folder, monkeypatch):
    monkeypatch.setattr(said, "refuses", staticmethod(lambda p, arch, depth: True))
    code, out, _ = run(f"{LINE} --source {folder} --samples 20 --arch 90")
    assert code == 4
    assert "false accept ×" in out
    assert "forward: no (interface.py:1)" in out
    assert "sm90: bf16" in out


def test_what_the_rules_refuse_and_the_checks_do_not_is_traced(run, said, folder, monkeypatch):
    """Where the kernels then refuse it too, both agree."""
    monkeypatch.setattr(said, "compiler", "4.8.1")
    monkeypatch.setattr(said, "refuses", staticmethod(lambda p, arch, depth: depth == "trace"))
    code, out, _ = run(f"{LINE} --source {folder} --samples 20 --arch 75 --json")
    told = json.loads(out)
    assert (code, told["agree"], told["traced"], told["compiler"]) == (0, 20, 20, "4.8.1")
    assert said.asked == [(75, "check"), (75, "trace")] * 20


def test_without_a_compiler_nothing_is_traced(run, said, folder):
    code, out, _ = run(f"{LINE} --source {folder} --samples 20 --arch 75 --trace --json")
    told = json.loads(out)
    assert (code, told["false_reject"], told["traced"], told["compiler"]) == (0, 20, 0, None)


def test_trace_builds_what_both_accept(run, said, folder, monkeypatch):
    monkeypatch.setattr(said, "compiler", "4.8.1")
    run(f"{LINE} --source {folder} --samples 20 --arch 90 --json")
    few = said.asked.count((90, "trace"))
    said.asked.clear()
    run(f"{LINE} --source {folder} --samples 20 --arch 90 --json --trace")
    assert said.asked.count((90, "trace")) == 20 > few


def test_eight_architectures_unless_said_otherwise(run, said, folder):
    _, out, _ = run(f"{LINE} --source {folder} --samples 1 --json")
    assert json.loads(out)["gpus"] == [f"sm{arch}" for arch in (75, 80, 86, 89, 90, 100, 103, 120)]


def test_a_missing_package_is_one_line_that_says_where_to_get_it(run, monkeypatch):
    def absent(name):
        raise source.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(source.importlib.metadata, "distribution", absent)
    code, out, err = run(LINE)
    assert (code, out) == (2, "")
    assert "flash-attn-4 is not installed" in err
    assert "pip download --no-deps" in err


def test_bad_input(run, folder):
    assert run(f"{LINE} --source {folder} --samples 0")[0] == 2
    assert run(f"{LINE} --source {folder} --arch nonsense")[0] == 2
    code, _, err = run("--backend flash_attn.5")
    assert code == 2
    assert "flash_attn.4" in err
