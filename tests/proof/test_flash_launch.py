"""What the launch templates do with a kernel that was picked, as read from their files."""

from __future__ import annotations

import pytest

from flash_attention_ask.launch import CHECKS, failures

# Words of ours, for what each check looks for in a release.
LINES = {
    "csrc/flash_attn/src/flash_bwd_launch_template.h": (
        "// max smem is 99 KB. Only works without dropout\ndim3 grid_n(gridDimx, params.b, params.h);\n"
    ),
    "csrc/flash_attn/src/flash_fwd_launch_template.h": "dim3 grid(num_m_block, params.b, params.h);\n",
    "setup.py": "\narch=compute_90a,code=sm_90a\n",
    "flash_bwd_launch_template.h": "false /*Deterministic*/\n",
    "flash_api.cpp": "float_e4m3_t, 64, 64\n",
}
SIZES = {"b": 2, "h": 8, "seqlen_q": 128, "seqlen_k": 128, "num_splits": 1, "deterministic": False}
TWO_FORWARD = {**SIZES, "kernel": "run_mha_fwd_", "Headdim": 256, "p_dropout": 0.9}
TWO_SPLIT = {**TWO_FORWARD, "kernel": "run_mha_fwd_splitkv_dispatch", "p_dropout": 1.0}
TWO_BACKWARD = {**TWO_FORWARD, "kernel": "run_mha_bwd_"}
THREE_FORWARD = {**SIZES, "kernel": "run_mha_fwd_", "Arch": 90, "kHeadDimV": 64, "dv": 64}
THREE_BACKWARD = {**SIZES, "kernel": "run_mha_bwd_", "Arch": 90, "dv": 64}
COMBINE = {**SIZES, "kernel": "run_mha_fwd_combine_", "dv": 64}


@pytest.fixture
def release(tmp_path):
    for name, text in LINES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("generation", "arch", "launch", "words"),
    [
        (2, 86, TWO_BACKWARD, "no kernel is launched"),
        (2, 120, TWO_BACKWARD, "no kernel is launched"),
        (2, 80, {**TWO_FORWARD, "seqlen_q": 0}, "CUDA refuses"),
        (2, 80, {**TWO_FORWARD, "b": 65_536}, "CUDA refuses"),
        (2, 80, {**TWO_SPLIT, "num_splits": 2, "b": 8_192}, "CUDA refuses"),
        (2, 80, {**TWO_BACKWARD, "seqlen_k": 0}, "CUDA refuses"),
        (2, 80, {**TWO_BACKWARD, "h": 65_536}, "CUDA refuses"),
        (3, 100, THREE_FORWARD, "compiled for compute capability 9.0 alone"),
        (3, 90, {**THREE_BACKWARD, "deterministic": True}, "not the same bits"),
        (3, 90, {**THREE_FORWARD, "dv": 128}, "smaller head_dim of v"),
    ],
)
def test_it_goes_wrong(release, generation, arch, launch, words):
    [failure] = failures(release, generation, arch, [launch])
    assert words in failure.words
    file, _, line = failure.where.rpartition(":")
    [check] = [check for check in CHECKS if check.words == failure.words]
    assert file == str(release / check.file)
    assert int(line) >= 1


@pytest.mark.parametrize(
    ("generation", "arch", "launch"),
    [
        (2, 80, TWO_BACKWARD),
        (2, 87, TWO_BACKWARD),
        (2, 90, TWO_BACKWARD),
        (2, 86, {**TWO_BACKWARD, "p_dropout": 1.0}),
        (2, 86, {**TWO_BACKWARD, "Headdim": 192}),
        (2, 86, TWO_FORWARD),
        (2, 80, {**TWO_FORWARD, "b": 65_535}),
        (2, 80, {**TWO_SPLIT, "b": 8_192}),
        (2, 80, {**TWO_BACKWARD, "seqlen_k": 0, "deterministic": True}),
        (3, 90, THREE_FORWARD),
        (3, 90, COMBINE),
        (3, 86, {**THREE_FORWARD, "Arch": 86}),
    ],
)
def test_it_goes_well(release, generation, arch, launch):
    assert not [*failures(release, generation, arch, [launch])]


def test_a_release_without_the_line_is_not_accused(release):
    (release / "flash_bwd_launch_template.h").write_text("Deterministic\n", encoding="utf-8")
    (release / "setup.py").unlink()
    launches = [{**THREE_BACKWARD, "deterministic": True}]
    assert not [*failures(release, 3, 100, launches)]
