"""Asking libcudnn in a child process: what is said when it answers, dies, hangs or is not there.

The library and the frontend are stand-ins (``emulated_cudnn``, and our own libcudnn that only knows a
version), so that all of it runs anywhere with a C compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import sqlite3
import sys

import pytest

import emulated_cudnn
from attnsel import AttentionParams
from attnsel.backends.cudnn.ask import client, libraries
from attnsel.backends.cudnn.ask.client import Library
from attnsel.backends.cudnn.ask.libraries import Missing, device_json
from attnsel.backends.cudnn.graph import forward, planned
from attnsel.cli import main

H100 = device_json(90, "H100")


def loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="stand-ins are compiled, and libcudnn is asked on Linux",
)


def graph(head_dim=64, **fields):
    return forward(planned(AttentionParams(head_dim_qk=head_dim, is_training=False, **fields)))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A site-packages folder with a libcudnn, an NVRTC and a frontend, none of them real."""
    return emulated_cudnn.site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def library(installed, tmp_path, monkeypatch):
    """``library()``: a Library on the stand-ins, closed at the end."""
    monkeypatch.setenv("ATTNSEL_CUDNN_VERSION", "91300")
    with contextlib.ExitStack() as opened:

        def make(**how):
            how = {"cache": tmp_path / "cache", "frontend": str(installed / "frontend"), "timeout": 30, **how}
            return opened.enter_context(Library(how.pop("cudnn_lib", str(installed)), **how))

        yield make


pytestmark = needs_compiler


def test_an_answer_holds_engines_versions_the_judge_and_the_workspace_of_a_plan(library):
    one = library()
    answer = one.ask(graph(), H100)
    assert (answer.supported, answer.stage, answer.judge) == (True, "check_support", "library")
    assert answer.engines == ("eng0", "eng1")
    assert (answer.cudnn, answer.cudnn_frontend) == ("9.13.0", "1.23.0")
    assert answer.workspace is None
    answer = one.ask(graph(), H100, build=True)
    assert (answer.supported, answer.stage, answer.workspace) == (True, "build_plans", 4096)
    answer = one.ask(graph(emulated_cudnn.NO_PLAN), H100, build=True)
    assert (answer.supported, answer.stage, answer.workspace) == (True, "build_plans", None)
    assert answer.words == "no kernel came out"


def test_a_refusal_has_its_stage_its_words_and_the_librarys_log(library):
    answer = library().ask(graph(emulated_cudnn.REFUSE), H100)
    assert (answer.supported, answer.stage) == (False, "check_support")
    assert answer.words == "no engine takes it (engine 8: too much shared memory)"
    assert answer.message.startswith("No valid engine configs for X")
    assert answer.log == "E! what the library logged"
    early = library().ask(graph(100), H100)
    assert (early.supported, early.stage, early.log) == (False, "validate", "")


def test_a_second_identical_question_starts_no_process_and_no_other_is_answered_from_memory(
    library, tmp_path, monkeypatch
):
    assert not library(remember=False).ask(graph(), H100).remembered
    assert not list(tmp_path.glob("cache/*.sqlite3"))
    one = library()
    first = one.ask(graph(), H100)
    for other in ((graph(num_heads=8), H100), (graph(), device_json(80, "A100"))):
        assert not one.ask(*other).remembered
    assert not one.ask(graph(), H100, build=True).remembered
    monkeypatch.setattr(client, "_Child", None)
    again = library()
    assert again.versions() == {"cudnn": "9.13.0", "cudnn_frontend": "1.23.0"}
    second = again.ask(graph(), H100)
    assert second.remembered
    assert second.as_dict() == {**first.as_dict(), "remembered": True}


def test_a_crash_of_the_planner_is_an_answer_and_the_next_question_is_asked(library):
    one = library()
    assert one.ask(graph(), H100).supported
    answer = one.ask(graph(emulated_cudnn.CRASH), H100)
    assert (answer.supported, answer.stage) == (False, "planner crashed")
    assert answer.message == "planner crashed (SIGSEGV)"
    assert "about to die" in answer.log
    assert one.ask(graph(72), H100).supported
    assert one.ask(graph(emulated_cudnn.CRASH), H100).remembered


def test_a_planner_that_hangs_or_is_killed_is_given_up_and_not_remembered(library):
    one = library()
    assert one.ask(graph(), H100).supported  # the process is there
    one._timeout = 1
    answer = one.ask(graph(emulated_cudnn.HANG), H100)
    assert (answer.supported, answer.stage) == (None, "timeout")
    assert answer.message == "no answer within 1 s"
    one._timeout = 30
    one.ask(graph(72), H100)
    child = one._child
    child.ask = lambda question, timeout: child._process.kill()
    assert one.ask(graph(80), H100).message == "planner crashed (SIGKILL)"
    assert not one.ask(graph(80), H100).remembered  # what kills from outside says nothing of the question
    with sqlite3.connect(one._store._path) as kept:
        assert not kept.execute("SELECT * FROM answers WHERE answer LIKE '%timeout%'").fetchall()


# What is not there: one sentence, what is missing, what still works.


def refusal(library, **how):
    with pytest.raises(Missing) as caught:
        library(**how).versions()
    text = str(caught.value)
    assert "\n" not in text
    assert "the rules answer without it" in text
    return caught.value.what, text


def test_a_compiler_that_fails(tmp_path, monkeypatch):
    broken = tmp_path / "bin" / "cc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'out of luck' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    with pytest.raises(Missing, match=r"cannot compile libcuda\.c: out of luck"):
        libraries.stand_in("libcuda.c", "libcuda.so.1", tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_no_library_one_that_is_too_old_and_another_system(library, tmp_path, monkeypatch):
    what, text = refusal(library, cudnn_lib=str(tmp_path))
    assert what == "cudnn"
    assert str(tmp_path) in text
    monkeypatch.setenv("ATTNSEL_CUDNN_VERSION", "90799")
    what, text = refusal(library)
    assert what == "device"
    assert "cuDNN 9.7.99" in text
    assert "--cudnn 9.7.99" in text
    monkeypatch.setenv("ATTNSEL_CUDNN_VERSION", "90800")
    assert library(remember=False).versions()["cudnn"] == "9.8.0"
    monkeypatch.setattr(libraries.platform, "system", lambda: "Darwin")
    with pytest.raises(Missing, match="on Linux only, not on Darwin"):
        libraries.find_cudnn(None)


def test_below_9_8_the_frontend_speaks_for_itself_or_says_why_not(library, tmp_path, monkeypatch):
    one = library(pretend="9.1.0")
    assert one.versions() == {"cudnn": "9.1.0", "cudnn_frontend": "1.23.0"}
    answer = one.ask(graph(), H100)
    assert (answer.supported, answer.stage, answer.judge) == (True, "validate", "frontend")
    assert one.ask(graph(100), H100).words == "hidden_dim should be multiple of 8"
    # Where the library would be asked, the planner would die.
    assert one.ask(graph(emulated_cudnn.CRASH), H100).supported
    monkeypatch.setenv("FAKE_FRONTEND", "1.28.0")
    what, text = refusal(library, pretend="9.1.0", cache=tmp_path / "other")
    assert what == "frontend"
    assert "nvidia-cudnn-frontend<1.26" in text


def test_a_cache_that_cannot_be_written_or_holds_garbage_is_put_aside_and_asked_anew(library, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    one = library(cache=tmp_path / "file" / "cache")
    assert one.ask(graph(), H100).supported
    assert not one.ask(graph(), H100).remembered
    kept = tmp_path / "file/cache/cudnn-answers.sqlite3"
    assert f"answers are not remembered: {kept}: Not a directory" in one.notes
    if not loads("libcuda.so.1"):
        assert any("is not used" in note and "temporary" in note for note in one.notes)
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "cudnn-answers.sqlite3").write_bytes(b"garbage " * 1000)
    one = library()
    assert one.ask(graph(), H100).supported
    assert any("put aside and begun anew" in note for note in one.notes)
    answer = library().ask(graph(), H100)
    assert answer.remembered
    odd = ({"supported": "perhaps"}, {"engines": [3]}, {"judge": "a friend"}, {"workspace": "x"})
    whole = answer.as_dict()
    for garbage in ("{", '{"supported": true}', "null", *(json.dumps({**whole, **part}) for part in odd)):
        with sqlite3.connect(one._store._path) as kept:
            kept.execute("UPDATE answers SET answer = ?", (garbage,))
        kept.close()
        known = one.versions()
        assert (known["cudnn"], known["cudnn_frontend"]) == ("9.13.0", "1.23.0")
        assert not one.ask(graph(), H100).remembered


@pytest.fixture
def here(installed, tmp_path, monkeypatch):
    """An environment in which the stand-ins are what --cudnn-lib names and the child imports."""
    monkeypatch.setenv("ATTNSEL_CUDNN_VERSION", "91300")
    monkeypatch.setenv("PYTHONPATH", str(installed / "frontend"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return ["--cudnn-lib", str(installed)]


def explain(*words):
    return main(["explain", "--gpu", "H100", *words])


def test_explain_puts_the_librarys_answer_beside_the_rules(here, capsys):
    assert explain("--ask-library", *here) == 0
    text = capsys.readouterr().out
    assert "Asked libcudnn 9.13.0 (frontend 1.23.0) for the H100:" in text
    assert "✔ backward: eng0, eng1 · workspace 4.0 KiB (4096 bytes)" in text
    assert "The rules agree." in text
    assert max(map(len, text.splitlines())) <= 80
    assert explain(*here) == 0
    assert capsys.readouterr().out.count("remembered") == 2
    assert explain("--head-dim-qk", str(emulated_cudnn.CRASH), "--inference", "--json", *here) == 0
    said = json.loads(capsys.readouterr().out)["library"]
    assert (said["supported"], said["agree"], said["outcome"]) == (False, False, "false accept")
    assert said["answers"]["forward"]["message"] == "planner crashed (SIGSEGV)"
    assert explain("--head-dim-qk", "264", *here) == 0
    assert "The rules disagree: they refuse: CUDNN233." in capsys.readouterr().out


def test_explain_reports_and_then_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert explain("--cudnn-lib", str(tmp_path), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["backend"] == "cudnn"
    assert said["library"]["missing"] == "cudnn"
    assert main(["explain", "--gpu", "cpu", "--ask-library"]) == 0
    assert "libcudnn was not asked: the question is about CPU; name a GPU" in capsys.readouterr().out
