"""The playground without a browser: questions as the command's, a form with every flag, a closed page."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest

pytest.importorskip("tomllib", reason="the site is built with Python 3.11 or newer")

from attnsel.cli import main
from attnsel.cli.flags import FLAGS
from sitegen import playground
from sitegen.playground import bundle, form

ANSWER = playground.glue()


def test_an_answer_is_what_the_command_prints(capsys):
    said = json.loads(ANSWER.ask("gpu=RTX+4090&head-dim=64&window-size=-1,0&inference"))
    words = ["explain", "--gpu=RTX 4090", "--head-dim=64", "--window-size=-1,0", "--inference"]
    assert said["words"] == words
    code = main([*words, "--json"])
    assert (said["code"], said["out"], said["err"]) == (code, *capsys.readouterr())
    grid = json.loads(ANSWER.ask("gpu=H100&rows=head_dim_qk=64,128&cols=cudnn=8.9.7,9.5.0"))
    assert grid["words"][0] == "can-i-use"
    assert json.loads(grid["out"])["rows"] == {"field": "head_dim_qk", "values": ["64", "128"]}


MISTAKES = {
    "head-dim=64": "--gpu is missing: a page has no GPU of its own, so name one, such as H100",
    "gpu=H100&help": "--help is about the command: ask it on the command line",
    "gpu=H100&ask-library": "--ask-library asks a libcudnn: ask it on the command line",
    "gpu=H100&cudnn": "--cudnn needs a value behind it",
    "gpu=H100&head_dims=3": "there is no flag --head_dims. Did you mean --head-dim?",
    "gpu=" + "x" * 5000: "the question has 5004 characters; at most 4000 are read",
    "gpu=H100&" + "&".join(["a"] * 200): "Max number of fields exceeded",
}


def test_a_question_that_is_none_is_told_in_a_sentence_and_no_file_is_read():
    for query, message in MISTAKES.items():
        for form_ in ANSWER.FORMS:
            said = json.loads(ANSWER.ask(query, form_))
            assert (said["code"], said["out"], said["err"]) == (2, "", f"attnsel: {message}\n")
    for name in ("params", "env", "from-log", "cudnn-lib", "--params", "-params", "PARAMS"):
        said = json.loads(ANSWER.ask(f"gpu=H100&{name}=/etc/passwd"))
        assert said["code"] == 2
        assert "root" not in said["err"]


def test_the_form_has_every_flag_of_the_command_but_those_of_files_and_every_choice_is_accepted():
    fields = form.fields(ANSWER.NOT_HERE)
    asked = {flag.name.removeprefix("--") for flag in FLAGS}
    assert len(asked) > 40
    assert asked - {field.name for field in fields} <= set(ANSWER.NOT_HERE)
    pairs = [
        pair
        for field in fields
        for pair in (
            *(name for name in (field.name, field.negative) if name and field.yes_or_no),
            *(f"{field.name}={quote(choice)}" for choice in field.choices),
        )
    ]
    for pair in pairs:
        words = json.loads(ANSWER.ask(f"gpu=H100&{pair}&head-dim=x"))["err"]  # told before anything is chosen
        assert "--head-dim" in words, (pair, words)


def test_the_page_is_closed_and_its_first_answer_is_the_engines():
    built = bundle.Bundle({"pyodide.mjs": b"x", "rest.zip.gzip": b"y"}, {"info": {}, "packages": {}})
    answers = playground.prepared()
    page = playground.page(built, answers[playground.FIRST])
    assert re.search(r'Content-Security-Policy"\s+content="[^"]*default-src \'self\'', page)
    assert "unsafe-inline" not in page
    assert not re.search(r"<[^>]+\s(style|on\w+)=", page)
    for name in playground._SCRIPTS:
        text = (playground.PAGES / name).read_text(encoding="utf-8")
        forbidden = r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\("
        assert not re.search(forbidden, text), name
    start = json.loads(re.search(r'<script type="application/json" id="start">(.*?)</script>', page, re.S)[1])
    assert start["answers"]["json"] == json.loads(ANSWER.ask(playground.FIRST))
    assert all(said["json"]["code"] == 0 for said in answers.values())


def test_what_the_browser_gets_is_pinned_and_the_wheel_without_its_tests():
    pins = (bundle.HERE / "requirements.txt").read_text(encoding="utf-8")
    lines = [line for line in pins.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    lock = json.loads((bundle.HERE / "package-lock.json").read_text(encoding="utf-8"))
    assert all("integrity" in entry for name, entry in lock["packages"].items() if name)
    names = [name for name, _ in bundle.ours()]
    assert len(names) == len(set(names))
    assert {"attnsel/environment/data/gpus.csv", "attnsel/rules/cudnn/fp8.py", "answer.py"} <= set(names)
    assert not any("_suite" in name for name in names)
