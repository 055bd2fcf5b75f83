"""``attnsel can-i-use``: one feature on a screen, one GPU with reasons, all features in a list."""

from __future__ import annotations

import json

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
