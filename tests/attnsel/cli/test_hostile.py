"""Malformed or hostile command lines and files: exit code 2, one clear line, nothing obeyed.

Each row names what the line must say: the flag or the file, and a piece of what is allowed. Markup stands in
it as it was given; what would steer a terminal, as an escape.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from attnsel import Environment, settings
from attnsel.cli import main
from tables import each

ESC = "\x1b[2J\x1b]0;owned\x07"
RTL = "\u202e"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.fixture(autouse=True)
def _plain_process(monkeypatch):
    for name in (*settings.VARIABLES, "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    settings.configure()
    monkeypatch.setattr("attnsel.cli.files._PATIENCE", 0.05)
    yield
    monkeypatch.undo()
    settings.configure()


@pytest.fixture
def refused(capsys, monkeypatch):
    """Runs a command line, and gives its one line of complaint."""

    def call(words: list[str], stdin: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(words)
        out, err = capsys.readouterr()
        assert code == 2, (code, out[:200], err[:200])
        assert out == ""
        assert err.startswith("attnsel: ")
        assert err.count("\n") == 1, err
        assert err[:-1].isprintable()
        assert len(err) < 1500
        return err[len("attnsel: ") : -1]

    return call


# ---- words --------------------------------------------------------------------------------------------

LINES: list[tuple[list[str], str]] = [
    # numbers
    (["--num-heads", "NaN"], "--num-heads NaN: must be a whole number"),
    (["--num-heads", "1e400"], "--num-heads 1e400: must be a whole number"),
    (["--num-heads", "-1"], "--num-heads -1: must be greater than 0"),
    (["--num-heads", "9" * 400], "--num-heads 999"),
    (["--num-heads", "9" * 100_000], "is far too large a number"),
    (["--num-heads", "[red]8[/red]"], "--num-heads [red]8[/red]: must be a whole number"),
    (["--num-heads", "**8**"], "--num-heads **8**: must be a whole number"),
    (["--num-heads", "`8`"], "--num-heads `8`: must be a whole number"),
    (["--num-heads", ""], "--num-heads '': must be a whole number"),
    (["--num-heads", " "], "must be a whole number"),
    (["--num-heads=--num-heads"], "must be a whole number"),
    (["--num-heads", "٣"], "--num-heads ٣: must be a whole number"),
    (["--num-heads", f"8{ESC}"], "--num-heads 8\\x1b[2J\\x1b]0;owned\\x07: must be a whole number"),
    (["--num-heads", f"8{RTL}"], "--num-heads 8\\u202e: must be a whole number"),
    (["--num-heads", "8\n9"], "--num-heads 8\\n9: must be a whole number"),
    (["--num-heads", "8\0"], "--num-heads 8\\x00: must be a whole number"),
    (["--num-heads", "\ud800"], "--num-heads \\ud800: must be a whole number"),
    (["--softcap", "nan"], "--softcap nan: must be"),
    (["--softcap", "inf"], "--softcap inf: must be"),
    (["--softcap", "-1"], "--softcap -1.0: must be greater than or equal to 0"),
    (["--softcap", "[link=x]1[/link]"], "[link=x]1[/link]"),
    (["--attention-dropout", "nan"], "--attention-dropout nan: must be"),
    (["--attention-dropout", "1"], "--attention-dropout 1.0: must be less than 1"),
    (["--attention-dropout", "-0.1"], "--attention-dropout -0.1: must be greater"),
    (["--window-size", "-5"], "--window-size -5 -5: each bound must be -1 (none) or at least 0"),
    (["--window-size", "x", "y"], "--window-size x: must be a whole number"),
    (["--window-size", "1", "2", "3"], "must be LEFT RIGHT, or one number"),
    (["--alibi-slopes-shape", "[bold]"], "--alibi-slopes-shape [bold]: must be a whole number"),
    (["--head-dim", "64,"], "--head-dim '': must be a whole number"),
    (["--head-dim", ","], "--head-dim '': must be a whole number"),
    (["--seqlen", "1_"], "--seqlen 1_: must be a whole number"),
    (["--page-size", "0"], "--page-size 0: must be greater than 0"),
    (["--cp-size", "9" * 20], "must be less than or equal to 8192"),
    (["--link-gbs", "nan", "--cp-size", "2"], "--link-gbs nan: must be above 0"),
    (["--gpus-per-node", "-8", "--cp-size", "2"], "--gpus-per-node -8: must be above 0"),
    # words
    (["--dtype", "[red]bf16[/red]"], "--dtype [red]bf16[/red]: must be 'bf16'"),
    (["--dtype", ""], "--dtype '': must be 'bf16'"),
    (["--dtype", "b" * 100_000], "… must be 'bf16'"),
    (["--qkv-layout", "../../etc/passwd"], "--qkv-layout ../../etc/passwd:"),
    (["--attn-mask-type", f"causal{ESC}"], "--attn-mask-type causal\\x1b[2J"),
    (["--softmax-type", "**x**"], "--softmax-type **x**: must be 'vanilla'"),
    (["--fp8-recipe", "[red]"], "--fp8-recipe [red]: must be one of delayed"),
    (["--gpu", ""], "--gpu '': unknown GPU"),
    (["--gpu", "H100" * 1000], "unknown GPU"),
    (["--gpu", f"[bold]H{RTL}[/bold]"], "--gpu [bold]H\\u202e[/bold]:"),
    (["--gpu", "`rm -rf /`"], "--gpu `rm -rf /`:"),
    (["--cudnn", "[link=https://x.y]9[/link]"], "--cudnn [link=https://x.y]9[/link]: not a version"),
    (["--cudnn", "9.0.0.0.0.0.0.0.0.0.0.0.0.0.0" * 9], "not a version: it is too long"),
    (["--torch", "-1"], "--torch"),
    (["--platform", "[red]linux"], "--platform [red]linux: must be 'linux'"),
    (["--torch-flash", "FA\x9b"], "--torch-flash FA\\x9b:"),
    (["--backend", "[blink]cudnn[/blink]"], "[blink]cudnn[/blink]"),
    (["--allow", ",,,"], "--allow ,,,: must be names with commas between"),
    (["--deny", f"cudnn,{ESC}"], "\\x1b[2J"),
    (["--adapt", "yes"], "--adapt yes: must be 'auto' or 'never'"),
    (["--memory-limit", "1e999GiB"], "--memory-limit 1e999GiB: must be a size"),
    (["--memory-limit", "-1"], "--memory-limit -1: must be a size"),
    (["--memory-limit", "nan"], "--memory-limit nan: must be a size"),
    # flags themselves
    (["--heads", "8", "--num-heads", "8"], "--heads and --num-heads are one flag"),
    (["--num-heads", "8", "--num-heads=9"], "--num-heads is given twice"),
    (["--causal", "--no-causal"], "--causal and --no-causal are one flag"),
    (["--params=-", "--params=-"], "--params is given twice"),
    (["--params", "-", "--env", "-"], "--env -: standard input is read by --params already"),
    (["--frob=1"], "there is no flag --frob; attnsel explain --help"),
    (["--[red]x[/red]"], "there is no flag --[red]x[/red];"),
    ([f"--x{ESC}"], "there is no flag --x\\x1b[2J"),
    (["--" + "x" * 100_000], "there is no flag --xxx"),
    (["--training=maybe"], "--training"),
    (["-"], "there is no flag -;"),
    (["--", "x"], "unexpected: x"),
    (["[red]extra[/red]"], "unexpected: [red]extra[/red]"),
    (["@file"], "unexpected: @file"),
    (["--gpu"], "--gpu needs a value behind it"),
    (["--short", "--json"], "--short: cannot go with --json"),
]


@each("words, said", LINES)
def test_words(refused, words, said):
    gpu = [] if "--gpu" in words else ["--gpu", "H100"]
    assert said in refused(["explain", *gpu, *words], "{}")


@each(
    "words, said",
    [
        (["[red]explain[/red]"], 'there is no command "[red]explain[/red]"'),
        ([f"expl{ESC}"], 'there is no command "expl\\x1b[2J'),
        ([""], 'there is no command ""'),
        (["matrix", "--rows", "[red]=1", "--cols", "dtype=bf16"], "--rows [red]=1: there is no field"),
        (["matrix", "--rows", "heads=" + "9" * 5000, "--cols", "dtype=bf16"], "is far too large a number"),
        (["matrix", "--rows", "heads=8", "--cols", "gpu=[b]"], "[b]"),
        (["matrix", "--rows", "heads=8", "--cols", "heads=9"], "is the field of --rows already"),
        (["rule", "[bold]CUDNN204[/bold]"], "[bold]CUDNN204[/bold]"),
        (["completion", "[red]"], "[red]"),
        (["completion"], "SHELL"),
    ],
)
def test_commands(refused, words, said):
    assert said in refused(words)


# ---- files --------------------------------------------------------------------------------------------


def _loop(folder: Path) -> Path:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    return folder / "a"


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _holding(content: bytes | str) -> Any:
    def make(folder: Path) -> Path:
        file = folder / "file"
        file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return file

    return make


ENV = Environment.describe("H100").model_dump(mode="json")
FILES: dict[str, tuple[str, Any, str]] = {
    "a folder": ("--params", lambda folder: folder, "Is a directory"),
    "a loop of links": ("--params", _loop, "symbolic link"),
    "a pipe without a writer": ("--params", _pipe, "nobody writes into this pipe"),
    "nothing": ("--params", lambda folder: folder / "none", "No such file"),
    "a name with markup": ("--params", lambda folder: folder / "[red]x[/red]", "[red]x[/red]: No such file"),
    "a name with escapes": ("--params", lambda folder: folder / f"x{ESC}", "x\\x1b[2J\\x1b]0;owned\\x07: No"),
    "a name with a line end": ("--params", lambda folder: folder / "x\ny", "x\\ny: No such file"),
    "a name with a NUL": ("--params", lambda folder: "x\0y", "x\\x00y: cannot be read: embedded null"),
    "a long name": ("--params", lambda folder: folder / ("x" * 5000), "File name too long"),
    "empty": ("--params", _holding(""), "is no JSON: line 1, column 1"),
    "binary": ("--params", _holding(bytes(range(256)) * 100), "is no UTF-8 text"),
    "UTF-16": ("--params", _holding('{"num_heads": 4}'.encode("utf-16")), "is no UTF-8 text"),
    "UTF-16 without a mark": ("--params", _holding('{"a": 4}'.encode("utf-16-le")), "is no JSON: line 1"),
    "a gzip": ("--params", _holding(b"\x1f\x8b\x08" + bytes(100)), "is no UTF-8 text"),
    "20 MB": ("--params", _holding(b'{"a": "' + b"x" * (20 << 20) + b'"}'), "longer than 16 Mi characters"),
    "20 MB of brackets": ("--env", _holding(b"[" * (20 << 20)), "longer than 16 Mi characters"),
    "deep": ("--params", _holding(DEEP), "is nested too deeply"),
    "deep in a field": ("--params", _holding(f'{{"tensors": {"[" * 900}{"]" * 900}}}'), "tensors = "),
    "a list": ("--params", _holding("[1]"), "must hold a JSON object"),
    "a text": ("--params", _holding('"x"'), "must hold a JSON object"),
    "NaN": ("--params", _holding('{"num_heads": NaN}'), "num_heads = nan: must be"),
    "Infinity": ("--params", _holding('{"softcap": Infinity}'), "softcap = inf: must be"),
    "a huge number": ("--params", _holding('{"num_heads": ' + "9" * 5000 + "}"), "cannot be read: Exceeds"),
    "a negative": ("--params", _holding('{"batch_size": -1}'), "batch_size = -1: must be greater than 0"),
    "a float": ("--params", _holding('{"batch_size": 2.5}'), "batch_size = 2.5: must be a valid integer"),
    "a word for a yes": (
        "--params",
        _holding('{"is_training": "perhaps"}'),
        "is_training = perhaps: must be",
    ),
    "a list for a number": ("--params", _holding('{"num_heads": [1]}'), "num_heads = 1: must be"),
    "an object for a text": ("--params", _holding('{"dtype": {"a": 1}}'), "dtype = {'a': 1}: must be"),
    "null": ("--params", _holding('{"num_heads": null}'), "num_heads = None: must be"),
    "markup": ("--params", _holding('{"dtype": "[red]x[/red]"}'), "dtype = [red]x[/red]: must be 'bf16'"),
    "escapes": ("--params", _holding(json.dumps({"dtype": ESC})), "dtype = \\x1b[2J\\x1b]0;owned\\x07: must"),
    "right to left": ("--params", _holding(json.dumps({"dtype": f"x{RTL}"})), "dtype = x\\u202e: must be"),
    "a surrogate": ("--params", _holding('{"dtype": "\\ud800"}'), "dtype = \\ud800: must be 'bf16'"),
    "a raw surrogate": ("--params", _holding('{"dtype": "\ud800"}'), "is no UTF-8 text"),
    "markup in a key": ("--params", _holding('{"[bold]x": 1}'), "[bold]x = 1: there is no such field"),
    "escapes in a key": ("--params", _holding(json.dumps({ESC: 1})), "\\x1b[2J\\x1b]0;owned\\x07 = 1: there"),
    "an empty key": ("--params", _holding('{"": 1}'), "= 1: "),
    "code": ("--params", _holding("__import__('os').system('true')"), "is no JSON: line 1, column 1"),
    "a dictionary of another": ("--params", _holding("{'num_heads': 4}"), "is no JSON: line 1, column 2"),
    "a broken configuration": (
        "--params",
        _holding("{'qkv_dtype': torch.half, 'x': ["),
        "is no JSON: line 1",
    ),
    "a configuration with code": (
        "--params",
        _holding("{'qkv_dtype': torch.half, 'batch_size': exit(0)}"),
        "batch_size = exit(0): must be a valid integer",
    ),
    "no device": ("--env", _holding("{}"), "device"),
    "a device of text": ("--env", _holding('{"device": "H100"}'), "device = H100"),
    "an unknown kind of device": ("--env", _holding('{"device": {"type": "[red]"}}'), "device.type = [red]:"),
    "a version with markup": ("--env", _holding(json.dumps({**ENV, "torch": "**2**"})), "torch = **2**: not"),
    "a version of lists": (
        "--env",
        _holding(json.dumps({**ENV, "torch": [[1]]})),
        "torch = [1]: not a version",
    ),
    "a huge memory": (
        "--env",
        _holding(json.dumps({**ENV, "device": {**ENV["device"], "memory": 10**400}})),
        "device.memory = 1000",
    ),
    "an unknown field": ("--env", _holding(json.dumps({**ENV, "[u]x[/u]": 1})), "[u]x[/u] = 1: there is no"),
    "devices of nothing": ("--env", _holding('{"devices": []}'), "devices = []: must hold an environment"),
    "devices of numbers": ("--env", _holding('{"devices": [1e999]}'), "devices = inf: must hold"),
    "an environment of text": ("--env", _holding('{"environment": "x"}'), "device = None: must be given"),
}


@each("what", FILES)
def test_files(refused, tmp_path, what):
    flag, make, said = FILES[what]
    if make is _pipe and not hasattr(os, "mkfifo"):  # Windows has none
        return
    gpu = ["--gpu", "H100"] if flag == "--params" else []
    assert said in refused(["explain", *gpu, flag, str(make(tmp_path))])


def test_standard_input_is_a_file_too(refused):
    for text, said in (
        (DEEP, "is nested too deeply"),
        ("", "is no JSON"),
        ('{"[b]": 1}', "[b] = 1: there is"),
    ):
        assert said in refused(["explain", "--gpu", "H100", "--params", "-"], text)


# ---- what is shown of what was right ------------------------------------------------------------------


@each("form", ["--short", "--markdown", ""])
def test_the_name_of_a_device_is_shown_and_not_obeyed(capsys, monkeypatch, form):
    name = f"[red]H100[/red] **x** `y` ```\n# z | @someone {ESC}{RTL}"
    env = {**ENV, "device": {**ENV["device"], "name": name}}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(env)))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["explain", "--env", "-", *filter(None, [form])]) == 0
    out = capsys.readouterr().out
    out = re.sub(r"\x1b\[[0-9;]*m", "", out)  # attnsel's own colours
    assert all(map(str.isprintable, out.splitlines()))
    if form != "--short":
        assert "[red]H100[/red] **x** `y` ```\\n# z | @someone \\x1b[2J\\x1b]0;owned\\x07\\u202e" in " ".join(
            out.split()
        )
    if form == "--markdown":  # within a block of code that only a longer fence could end
        assert out.count("\n````\n") == 1
        assert "\n````text\n" in out
