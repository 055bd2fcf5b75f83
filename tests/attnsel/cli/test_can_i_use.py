"""``attnsel can-i-use``: a feature on a screen, one GPU with reasons, all features in a list; two fields."""

from __future__ import annotations

import csv
import io
import json

from attnsel import AttentionParams, Environment, select
from attnsel.pages.can_i_use import all_features
from tables import each


@each("name", list(all_features())[::15])
def test_every_feature_fits_eighty_columns_in_one_table(run, name):
    code, out, _ = run(["can-i-use", name])
    assert code == (3 if name == "fp8-block" else 0)  # which nothing runs
    assert max(map(len, out.splitlines())) <= 80
    assert sum(line.startswith("kernel") for line in out.splitlines()) == 1


def test_json_holds_the_question_of_every_cell_and_nothing_that_runs_it_is_an_exit_code(run):
    code, out, _ = run("can-i-use softcap paged --gpu H100 --kernel triton,flash_attn.3 --json")
    said = json.loads(out)
    assert code == 0
    names = [feature["name"] for feature in said["features"]]
    assert names == ["softcap", "paged-kv", "paged-decode", "paged-decode-256"]
    assert len(said["cells"]) == 8
    modes = [mode for cell in said["cells"] for mode in cell["modes"]]
    assert all(mode["command"].startswith("attnsel explain --gpu H100 ") for mode in modes)
    code, out, _ = run("can-i-use softcap --gpu H100 --kernel sdpa.flash,sdpa.math")
    assert (code, out.count("✖")) == (3, 2)


# ---- a grid of two fields ------------------------------------------------------------------------------


GRID = "can-i-use --rows head_dim_qk=64,128,256 --cols cudnn=8.9.7,9.1.0,9.5.0 --gpu H100"


def test_each_cell_is_its_own_question(run):
    code, out, _ = run(f"{GRID} --json")
    told = json.loads(out)
    assert code == 0
    assert told["rows"] == {"field": "head_dim_qk", "values": ["64", "128", "256"]}
    assert told["cols"] == {"field": "cudnn", "values": ["8.9.7", "9.1.0", "9.5.0"]}
    assert told["kernel"] is None
    for row, head_dim in zip(told["cells"], (64, 128, 256), strict=True):
        for cell, cudnn in zip(row, ("8.9.7", "9.1.0", "9.5.0"), strict=True):
            answer = select(AttentionParams(head_dim_qk=head_dim), Environment.describe("H100", cudnn=cudnn))
            assert cell["backend"] == answer.backend
    rows = list(csv.reader(io.StringIO(run(f"{GRID} --csv")[1])))
    assert rows[0] == ["head_dim_qk \\ cudnn", "8.9.7", "9.1.0", "9.5.0"]
    assert [row[0] for row in rows[1:]] == ["64", "128", "256"]
    assert rows[3][3] == "cudnn"


def test_other_flags_and_files_hold_for_every_cell(run, written):
    file = written('{"num_heads": 12}')
    line = f"can-i-use --rows num_gqa_groups=4,5 --cols gpu=A100,H100 --params {file} --backend tiled --json"
    cells = json.loads(run(line)[1])["cells"]
    assert [cell["backend"] for cell in cells[0]] == ["tiled", "tiled"]
    assert "must divide num_heads = 12" in cells[1][0]["invalid"]
    line = "can-i-use --gpu T4 --rows max_seqlen_q=1k --cols cudnn=8.9.7,9.5.0 --json"  # fp16, as nobody said
    assert [cell["backend"] for cell in json.loads(run(line)[1])["cells"][0]] == ["sdpa.efficient"] * 2
