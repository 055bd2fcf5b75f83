"""Mistakes and hostile words and files: exit code 2, one clear line, nothing obeyed.

A row names what the line must say; what tests/net has whole does not stand here again. Markup stands in it as
it was given; what would steer a terminal, as an escape. tests/fuzz/command_lines.py draws others of the kind,
for every flag and at any depth of a file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from attnsel import AttentionParams, Environment, InvalidInput
from attnsel.environment.versions import Version
from attnsel.errors import short
from tables import cells_of, each

pytestmark = pytest.mark.usefixtures("no_switches_from_outside")

ESC = "\x1b[2J\x1b]0;owned\x07"
RTL = "\u202e"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
LOG = Path(__file__).parents[1] / "diagnose" / "logs" / "cases" / "NVIDIA-TransformerEngine-2285.txt"

# ---- words: behind ``explain --gpu H100`` where the first is a flag ------------------------------------

HOSTILE: list[tuple[list[str], str]] = [
    (["--num-heads", "9" * 100_000], "is far too large a number"),
    (["--num-heads", f"8{ESC}"], "--num-heads 8\\x1b[2J\\x1b]0;owned\\x07: must be a whole number"),
    (["--dtype", "b" * 100_000], "… must be 'bf16'"),
    (["--gpu", f"[bold]H{RTL}[/bold]"], "--gpu [bold]H\\u202e[/bold]:"),
    (["--cudnn", "9.0.0.0.0.0.0.0.0.0.0.0.0.0.0" * 9], "not a version: it is too long"),
    ([f"--x{ESC}"], "there is no flag --x\\x1b[2J"),
    (["rule", "A\x1b[2J"], "no rule 'A\\x1b[2J'"),
    (["run", "a\0b"], "program = a\\x00b: there is no such file"),
    (["explain", "--from-log", "a\0b"], "--from-log"),
]
FILES = {"HERE": __file__, "LOG": str(LOG)}
LINES = [
    ([FILES.get(word, word) for word in line.split()], said)
    for line, said in cells_of(__file__, "mistakes.txt")
]


@each("words, said", HOSTILE + LINES)
def test_words(refused, words, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    if words[0].startswith("-"):
        words = ["explain", *(() if "--gpu" in words else ("--gpu", "H100")), *words]
    assert said in refused(words)


# ---- files --------------------------------------------------------------------------------------------


def _loop(folder: Path) -> Path:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    return folder / "a"


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


ENV = Environment.describe("H100").model_dump(mode="json")
HUGE = {**ENV["device"], "memory": 10**400}
# A text is what the file holds.
PARAMS_FILES: list[tuple[Any, str]] = [
    (lambda folder: folder, "Is a directory"),
    (_loop, "symbolic link"),
    (_pipe, "nobody writes into this pipe"),
    (lambda folder: folder / f"x{ESC}", "x\\x1b[2J\\x1b]0;owned\\x07: No such file"),
    (lambda folder: "x\0y", "x\\x00y: cannot be read: embedded null"),
    (lambda folder: "/dev/zero", "is longer than 16 Mi characters"),  # not read to its end
    ("", "is empty"),
    ('{"num_heads": 4}'.encode("utf-16"), "is no UTF-8 text"),
    (b'{"a": "' + b"x" * (20 << 20) + b'"}', "longer than 16 Mi characters"),
    (DEEP, "is nested too deeply"),
    (f'{{"tensors": {"[" * 900}{"]" * 900}}}', "tensors = "),
    ('{"num_heads": 4,\n}', "is no JSON: line 2, column 1"),
    ('{"num_head": 4}', "num_head = 4: there is no such field"),
    ('{"num_heads": 6, "num_gqa_groups": 4}', "num_gqa_groups = 4: must divide num_heads"),
    ('{"num_heads": ' + "9" * 5000 + "}", "cannot be read: Exceeds"),
    ('{"batch_size": 2.5}', "batch_size = 2.5: must be a valid integer"),
    (json.dumps({"dtype": f"{ESC}{RTL}"}), "dtype = \\x1b[2J\\x1b]0;owned\\x07\\u202e: must"),
    (json.dumps({ESC: 1}), "\\x1b[2J\\x1b]0;owned\\x07 = 1: there"),
    ("__import__('os').system('true')", "is no JSON: line 1, column 1"),
    ("{'qkv_dtype': torch.half, 'batch_size': exit(0)}", "batch_size = exit(0): must be a valid integer"),
]
ENV_FILES: list[tuple[Any, str]] = [
    (lambda folder: "/dev/zero", "is longer than 16 Mi characters"),
    ("{}", "device"),
    ('{"device": {"type": "[red]"}}', "device.type = [red]:"),
    (json.dumps({**ENV, "torch": "**2**"}), "torch = **2**: not a version"),
    (json.dumps({**ENV, "device": HUGE}), "device.memory = 1000"),
    ('{"devices": []}', "devices = []: must hold an environment"),
    ('{"environment": "x"}', "device = None: must be given"),
]


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no /dev/zero")
@each("flag, made, said", [("--params", *r) for r in PARAMS_FILES] + [("--env", *r) for r in ENV_FILES])
def test_files(refused, written, tmp_path, monkeypatch, flag, made, said):
    monkeypatch.setattr("attnsel.cli.question._PATIENCE", 0.05)
    path = made(tmp_path) if callable(made) else written(made)
    told = refused(["explain", *(["--gpu", "H100"] if flag == "--params" else []), flag, str(path)])
    assert said in told
    assert callable(made) or f"{path}: " in told


def test_what_the_system_refuses_is_no_traceback(run, tmp_path):
    code, out, _ = run(["explain", "--gpu", "H100", "--ask-library", "--cudnn-lib", "1" * 400])
    assert (code, "libcudnn" in out) == (0, True)
    os.makedirs(tmp_path.joinpath(*"d" * 80))
    code, _, err = run(["compare", str(tmp_path)])
    assert (code, "deeper than 64 folders" in err) == (3, True)


def test_standard_input_is_a_file_too(refused):
    assert "is nested too deeply" in refused(["explain", "--gpu", "H100", "--params", "-"], DEEP)


# ---- what strangers wrote is shown and not obeyed -----------------------------------------------------


def test_a_value_that_cannot_be_written_is_named_all_the_same():
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert short(Broken()) == "<Broken that cannot be shown>"
    assert short(nested) == "<list that cannot be shown>"
    with pytest.raises(InvalidInput, match="must be less than"):
        AttentionParams(batch_size=10**5000)
    with pytest.raises(ValueError, match="not a version"):
        Version.parse((10**5000,))


def test_what_a_library_or_a_variable_says_forges_no_line(capsys):
    from attnsel.cli.findings import variables
    from attnsel.cli.output import print_text

    print_text("✔ one\n" + "no\x1b[2A\x9bengine\r\u202e")
    assert capsys.readouterr().out == "✔ one\nno\\x1b[2A\\x9bengine\\r\\u202e\n"
    assert variables({"ATTNSEL_X\n": "a\nFindings: nothing is wrong\x1b[2J"}) == {
        "ATTNSEL_X\\n": "a\\nFindings: nothing is wrong\\x1b[2J"
    }
