"""Machines: the one in front of us and those that are only described."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnsel import Environment, InvalidInput
from attnsel.gpus import ARCHITECTURES, CATALOGUE
from attnsel.releases import BUILDS
from attnsel.versions import Version


@pytest.mark.parametrize("gpu", [gpu.name for gpu in CATALOGUE.values()])
def test_every_gpu_of_the_catalogue_can_be_described(gpu):
    env = Environment.describe(gpu)
    assert env.device.type == "cuda"
    assert env.arch in ARCHITECTURES
    assert env.device.shared_memory == ARCHITECTURES[env.arch].shared_memory
    assert env.warnings == ()


@pytest.mark.parametrize(
    ("spelling", "arch"),
    [
        ("h100", 90),
        ("RTX4090", 89),
        ("4090", 89),
        ("NVIDIA A100", 80),
        ("sm90", 90),
        ("sm_86", 86),
        ("9.0", 90),
    ],
)
def test_a_gpu_is_found_however_it_is_spelt(spelling, arch):
    assert Environment.describe(spelling).arch == arch


def test_an_unknown_gpu_names_the_nearest_and_all():
    with pytest.raises(InvalidInput, match="did you mean H100") as caught:
        Environment.describe("H1000")
    assert "B200" in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("cudnn", "nine"), ("cudnnn", "9.1.0"), ("torch", "2.x")])
def test_bad_versions_name_the_component(name, value):
    with pytest.raises(InvalidInput) as caught:
        Environment.describe("H100", **{name: value})
    assert caught.value.field == name


def test_what_is_left_out_comes_from_the_release_that_shipped_it_and_is_marked():
    env = Environment.describe("H100", cudnn="9.1.0")
    assert env.cudnn == Version(9, 1, 0)
    assert env.torch == Version(2, 6, 0)  # the newest torch whose wheel required cuDNN 9.1
    assert env.triton == Version(3, 2, 0)
    assert "cudnn" not in env.assumed
    assert {"torch", "triton", "cuda"} <= set(env.assumed)
    assert Environment.describe("A100", cudnn="8.9.7").torch == Version(2, 3, 1)
    assert Environment.describe("H100", torch="2.9.1").cudnn == Version(9, 10, 2)


def test_none_means_not_installed():
    env = Environment.describe("H100", triton=None, cudnn="none")
    assert env.triton is None
    assert env.cudnn is None
    assert "triton" not in env.assumed


def test_an_impossible_set_warns_and_is_not_corrected():
    env = Environment.describe("B200", cudnn="9.1.0", cuda="12.1")
    assert len(env.warnings) == 2
    assert env.cudnn == Version(9, 1, 0)
    assert any("12.8" in text for text in env.warnings)


def test_releases_stand_in_order():
    assert list(BUILDS) == sorted(BUILDS)


def test_a_described_environment_survives_json():
    env = Environment.describe("RTX 5090", cudnn="9.18.1")
    assert Environment.model_validate_json(env.model_dump_json()) == env


def test_this_machine_can_be_detected():
    env = Environment.detect("cpu")
    assert env.detected
    assert env.device.type == "cpu"
    assert env.python == Version(*sys.version_info[:3])
    assert Environment.detect("cpu") is env


def test_importing_attnsel_imports_no_torch_and_initialises_nothing():
    code = (
        "import sys, attnsel; "
        "bad = {'torch', 'triton', 'cudnn', 'numpy'} & set(sys.modules); assert not bad, bad; "
        "from attnsel import select, AttentionParams, Environment; "
        "s = select(AttentionParams(), Environment.describe('H100')); s.report(); s.to_json(); "
        "bad = {'torch', 'triton', 'cudnn'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_needs_torch_says_so_where_there_is_none():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import attnsel\n"
        "assert attnsel.Environment.detect().device.type == 'cpu'\n"
        "try:\n    attnsel.DotProductAttention\n"
        "except ImportError as error:\n    assert \"pip install 'attnsel[torch]'\" in str(error), error\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("given", [{"gpu": 90}, {"cudnn": 9.1}, {"torch": object()}, {"triton": [3, "2"]}])
def test_a_machine_described_in_other_types_is_named(given):
    with pytest.raises(InvalidInput) as caught:
        Environment.describe(**given)
    assert caught.value.field == next(iter(given))
