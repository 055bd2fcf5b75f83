"""The playground without a browser: questions as the command's, a form with every flag, a closed page."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import quote

import pytest

pytest.importorskip("tomllib", reason="the site is built with Python 3.11 or newer")

import playground_questions
from sitegen import playground
from sitegen.playground import bundle, form

ANSWER = playground.glue()
FIELDS = form.fields(ANSWER.NOT_HERE)
BUILT = bundle.Bundle(
    {"pyodide.mjs": b"x" * 1000, "rest.zip.gzip": b"y" * 9000}, {"info": {}, "packages": {}}
)


@pytest.fixture(scope="module")
def page():
    return playground.page(BUILT)


def test_an_answer_is_what_the_command_prints():
    query = "gpu=RTX+4090&head-dim=64&window-size=-1,0&inference"
    said = json.loads(ANSWER.ask(query))
    assert said["words"] == [
        "explain",
        "--gpu=RTX 4090",
        "--head-dim=64",
        "--window-size=-1,0",
        "--inference",
    ]
    run = [sys.executable, "-m", "attnsel", *said["words"], "--json"]
    printed = subprocess.run(run, capture_output=True, text=True)
    assert (said["code"], said["out"], said["err"]) == (printed.returncode, printed.stdout, printed.stderr)
    assert json.loads(said["out"])["environment"]["device"]["name"] == "RTX 4090"


def test_rows_and_columns_make_it_a_grid():
    said = json.loads(ANSWER.ask("gpu=H100&rows=head_dim_qk=64,128&cols=cudnn=8.9.7,9.5.0"))
    assert said["words"][0] == "matrix"
    assert json.loads(said["out"])["rows"] == {"field": "head_dim_qk", "values": ["64", "128"]}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("head-dim=64", "--gpu is missing: a page has no GPU of its own, so name one, such as H100"),
        ("gpu=H100&params=x.json", "--params reads a file: ask it on the command line"),
        ("gpu=H100&from_log=x", "--from-log reads a file: ask it on the command line"),
        ("gpu=H100&ask-library", "--ask-library asks a libcudnn: ask it on the command line"),
        ("gpu=H100&help", "--help is about the command: ask it on the command line"),
        (
            "gpu=H100&dtype=bf17",
            "--dtype bf17: must be 'bf16', 'fp16', 'fp32', 'fp64', 'fp8_e4m3' or 'fp8_e5m2'",
        ),
        ("gpu=H100&head-dim-qk=1,024", "--head-dim-qk 1,024: must be a whole number without commas: 1024"),
        ("gpu=H100&cudnn", "--cudnn needs a value behind it"),
        ("gpu=H100&gpu=A100", "--gpu is given twice"),
        ("gpu=H100&head_dims=3", "there is no flag --head_dims. Did you mean --head-dim?"),
        ("gpu=" + "x" * 5000, "the question has 5004 characters; at most 4000 are read"),
        ("gpu=H100&" + "&".join(["a"] * 200), "Max number of fields exceeded"),
    ],
)
def test_a_question_that_is_none_is_told_in_a_sentence(query, message):
    for form_ in ANSWER.FORMS:
        said = json.loads(ANSWER.ask(query, form_))
        assert (said["code"], said["out"]) == (2, "")
        assert said["err"] == f"attnsel: {message}\n"


def test_no_file_is_read_whatever_stands_in_the_address():
    for name in ("params", "env", "from-log", "cudnn-lib", "--params", "-params", "PARAMS"):
        said = json.loads(ANSWER.ask(f"gpu=H100&{name}=/etc/passwd"))
        assert said["code"] == 2
        assert "root" not in said["err"]


def test_every_answer_to_a_random_question_can_be_shown():
    for query in itertools.islice(playground_questions.questions(7), 40):
        for form_ in ANSWER.FORMS:
            said = json.loads(ANSWER.ask(query, form_))
            assert said["code"] in (0, 2, 3), query
            assert "Traceback" not in said["err"]


# ---- the form -----------------------------------------------------------------------------------------


def test_the_form_has_every_flag_of_the_command_but_those_of_files_and_output():
    help_text = subprocess.run(
        [sys.executable, "-m", "attnsel", "explain", "--help"], capture_output=True, text=True, env=_wide()
    ).stdout
    in_help = set(re.findall(r"^│ (--[a-z0-9-]+)", help_text, re.M))
    in_form = {f"--{field.name}" for field in FIELDS}
    assert len(in_help) > 60
    assert in_help - in_form == {f"--{name}" for name in ANSWER.NOT_HERE if f"--{name}" in in_help}


def test_every_choice_and_default_of_the_form_is_accepted():
    for field in FIELDS:
        options = [field.name, field.negative] if field.yes_or_no else []
        pairs = [name for name in options if name]
        pairs += [f"{field.name}={quote(choice)}" for choice in field.choices]
        for pair in pairs:
            said = json.loads(ANSWER.ask(f"gpu=H100&{pair}"))
            assert "there is no flag" not in said["err"], pair
            # a choice that is none would be answered with the list of them
            assert not re.search(r"must be '[^']*'(,| or) '", said["err"]), said["err"]


def test_known_releases_are_suggested_newest_first():
    by_name = {field.name: field for field in FIELDS}
    assert "9.5.0" in by_name["cudnn"].suggestions
    assert by_name["torch"].suggestions.index("2.10.0") < by_name["torch"].suggestions.index("2.9.1")
    assert "RTX 4090" in by_name["gpu"].suggestions
    for name in ("triton", "cuda", "cudnn-frontend", "flash-attn", "flash-attn-4"):
        assert by_name[name].suggestions, name


# ---- the page -----------------------------------------------------------------------------------------


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_the_page_asks_nothing_of_another_host(page):
    for tag, attributes in Page(page).tags:
        for name in ("src", "href", "action", "srcset"):
            value = attributes.get(name) or ""
            assert not re.match(r"[a-z]+:|/", value) or value == "data:,", (tag, value)
    for name in playground._SCRIPTS:
        text = (playground.PAGES / name).read_text(encoding="utf-8")
        assert not re.search(
            r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text
        ), name


def test_the_policy_of_the_page_allows_only_its_own_files(page):
    policy = next(
        a["content"] for t, a in Page(page).tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'self'" in policy
    assert "unsafe-inline" not in policy
    assert "'unsafe-eval'" not in policy
    assert not any("style" in a or any(name.startswith("on") for name in a) for _, a in Page(page).tags)


def test_the_first_answer_is_in_the_page_and_is_the_engines(page):
    start = json.loads(re.search(r'<script type="application/json" id="start">(.*?)</script>', page, re.S)[1])
    said = json.loads(ANSWER.ask(playground.FIRST))
    assert start["answers"]["json"] == said
    assert start["bytes"] == {"pyodide.mjs": 1000}  # the rest is not waited for
    assert "CUDNN204" in start["codes"]
    assert json.loads(ANSWER.ask(playground.FIRST, "text"))["out"].splitlines()[0] in page


def test_every_control_has_a_label_and_every_id_is_there_once(page):
    tags = Page(page).tags
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    labelled = {a.get("for") for tag, a in tags if tag == "label"}
    assert {a["id"] for tag, a in tags if tag in ("input", "select")} == labelled
    for _, a in tags:
        for name in ("aria-controls", "aria-labelledby", "list"):
            assert a.get(name) in (None, *ids)


# ---- Python for the browser ---------------------------------------------------------------------------


def test_the_modules_of_the_wheel_are_taken_without_its_tests():
    names = [name for name, _ in bundle.ours()]
    assert len(names) == len(set(names))
    assert {
        "attnsel/params/attention.py",
        "attnsel/rules/cudnn/fp8.py",
        "attnsel/cli/explain.py",
        "answer.py",
    } <= set(names)
    assert not any("_suite" in name for name in names)


def test_what_the_browser_gets_is_pinned_with_hashes():
    pins = (bundle.HERE / "requirements.txt").read_text(encoding="utf-8")
    lines = [line for line in pins.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    lock = json.loads((bundle.HERE / "package-lock.json").read_text(encoding="utf-8"))
    package = json.loads((bundle.HERE / "package.json").read_text(encoding="utf-8"))
    assert lock["packages"]["node_modules/pyodide"]["version"] == package["dependencies"]["pyodide"]
    assert all("integrity" in entry for name, entry in lock["packages"].items() if name)
    assert not any("resolved" in entry for entry in lock["packages"].values())


def test_without_npm_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(bundle.NotFetched, match="needs npm, which is not installed"):
        bundle.fetch()
    assert not [path for path in bundle.cache().rglob("*") if path.is_file()]


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_a_registry_that_cannot_be_reached_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    with pytest.raises(bundle.NotFetched, match="npm could not bring what the playground needs"):
        bundle.fetch()


def _wide() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200"}
