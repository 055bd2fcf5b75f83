"""``attnsel can-i-use``: one feature on a screen, one GPU with reasons, all features in a list."""

from __future__ import annotations

import json

from attnsel.pages.can_i_use.features import FEATURES
from tables import each


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


@each("name", list(FEATURES)[::15])
def test_every_feature_fits_eighty_columns_in_one_table(run, name):
    code, out, _ = run(["can-i-use", name])
    assert code == (3 if name == "fp8-block" else 0)  # which nothing runs
    assert widest(out) <= 80
    assert sum(line.startswith("kernel") for line in out.splitlines()) == 1


def test_nothing_that_runs_it_is_an_exit_code(run):
    code, out, _ = run("can-i-use softcap --gpu H100 --kernel sdpa.flash,sdpa.math")
    assert code == 3
    assert out.count("✖") == 2


@each(
    "line, words",
    [
        ("can-i-use sofcap", "did you mean softcap?"),
        ("can-i-use softcap --kernel fa3", "did you mean flash_attn.3?"),
        ("can-i-use softcap --gpu H1000", "H100"),
        ("can-i-use softcap --cudnn none", "--cudnn none: not a version"),
        ("can-i-use softcap --cudnn banana", "--cudnn banana: not a version"),
        ("can-i-use softcap --json --markdown", "one form at a time"),
        ("can-i-use softcap --page-size 64", "--page-size"),
    ],
)
def test_a_mistake_is_one_line(run, line, words):
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_json_holds_the_question_of_every_cell(run):
    code, out, _ = run("can-i-use softcap paged --gpu H100 --kernel triton,flash_attn.3 --json")
    said = json.loads(out)
    assert code == 0
    assert [feature["name"] for feature in said["features"]] == [
        "softcap", "paged-kv", "paged-decode", "paged-decode-256",
    ]  # fmt: skip
    assert len(said["cells"]) == 8
    modes = [mode for cell in said["cells"] for mode in cell["modes"]]
    assert all(mode["command"].startswith("attnsel explain --gpu H100 ") for mode in modes)
