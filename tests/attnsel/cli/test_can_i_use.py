"""``attnsel can-i-use``: one feature on a screen, one GPU with reasons, all features in a list."""

from __future__ import annotations

import json

import pytest

from attnsel.backends.registry import CANDIDATES
from attnsel.pages.can_i_use.features import FEATURES


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_a_feature_is_a_table_of_kernels_and_architectures(run):
    code, out, err = run("can-i-use softcap")
    assert (code, err) == (0, "")
    assert all(name in out for name in CANDIDATES)
    row = next(line for line in out.splitlines() if "flash_attn.2" in line)
    assert "✔ 2.6+" in row
    assert widest(out) <= 80
    assert len(out.splitlines()) <= 26  # one screen, with its legend
    assert "attnsel can-i-use softcap --gpu H100" in out


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.thinned(6)
def test_every_feature_fits_eighty_columns_in_one_table(run, name):
    code, out, _ = run(["can-i-use", name])
    assert code == 0
    assert widest(out) <= 80
    assert sum(line.startswith("kernel") for line in out.splitlines()) == 1


def test_on_one_gpu_every_kernel_has_its_releases_and_reasons(run):
    code, out, _ = run("can-i-use softcap --gpu H100")
    assert code == 0
    assert widest(out) <= 80
    assert "✔ flash_attn.2  runs, from flash-attn 2.6.0 on" in out
    assert "2.5.9 ✖  FLASH220" in out
    assert "✖ sdpa.flash  no known release of torch runs it" in out
    assert "SDPA004  SDPA has no softcap" in out
    assert "attnsel explain --gpu H100" in out


def test_an_adaptation_is_told_with_what_it_costs(run):
    _, out, _ = run("can-i-use mla --gpu H100 --kernel sdpa.flash")
    assert "pads head_dim_v 128 → 192, 64.0 MiB, +17 % work" in " ".join(out.split())


def test_without_a_feature_all_of_them_are_listed(run):
    code, out, _ = run("can-i-use")
    assert code == 0
    assert widest(out) <= 80
    words = {line.split()[0] for line in out.splitlines() if line.startswith(" ") and line.split()}
    assert set(FEATURES) <= words


def test_the_release_at_hand_is_stated(run):
    code, out, _ = run("can-i-use mla --gpu H100 --kernel cudnn --cudnn 9.1")
    assert code == 0
    assert "▷ cudnn" in out
    assert "both ways from 9.5.0 on" in " ".join(out.split())
    assert "--cudnn 9.1.0" in out


def test_nothing_that_runs_it_is_an_exit_code(run):
    code, out, _ = run("can-i-use softcap --gpu H100 --kernel sdpa.flash,sdpa.math")
    assert code == 3
    assert out.count("✖") == 2


@pytest.mark.parametrize(
    ("line", "words"),
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


def test_markdown_is_a_table_or_a_list_of_reasons(run):
    _, out, _ = run("can-i-use softcap --markdown")
    assert "| kernel |" in out
    _, out, _ = run("can-i-use softcap --gpu H100 --markdown")
    assert "- ✖ `sdpa.flash`" in out
    assert "SDPA004" in out
    _, out, _ = run("can-i-use --gpu T4 --markdown")
    assert "| feature |" in out


def test_a_device_without_cuda_has_answers_too(run):
    code, out, _ = run("can-i-use softcap --gpu cpu")
    assert code == 0
    assert "✔ tiled" in out
