"""Machines: the one in front of us and those that are only described."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnsel import Device, Environment, InvalidInput
from attnsel.environment import without_code
from attnsel.environment.gpus import WITHOUT_PYTORCH, architecture_of, catalogue
from attnsel.environment.releases import ON_ARM, build_with, runs_on
from attnsel.environment.versions import Version
from tables import each


@each("field, given", [("gpu", 90), ("cudnn", 9.1), ("triton", [3, "2"])])
def test_what_is_of_another_type_names_the_component(field, given):
    with pytest.raises(InvalidInput) as caught:
        Environment.describe(**{"gpu": "A100", field: given})
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_no_other_way_leads_to_a_torch_before_2_2():
    with pytest.raises(InvalidInput, match="torch"):
        Environment(device=Device(), torch="2.1.2")
    with pytest.raises(InvalidInput, match="torch"):
        Environment.describe("A100").replace(torch="2.1.2")


@each("gpu", [gpu.name for gpu in catalogue().values() if gpu.device == "cuda"])
def test_what_is_assumed_runs_on_the_card(gpu):
    """With nothing stated, no card gets a torch without code for it."""
    env = Environment.describe(gpu)
    assert env.device.type == "cuda"
    assert env.device.shared_memory == architecture_of(env.arch).shared_memory
    assert env.warnings == ()
    build = build_with(env.torch, env.cuda)
    assert runs_on(build, env.arch) or env.arch in ON_ARM | WITHOUT_PYTORCH


def test_what_is_here_is_not_doubted_and_what_is_assumed_takes_no_blame():
    env = Environment.describe("H100", torch="2.6", cuda="13.0")
    assert env.warnings
    assert env.replace(detected=True).warnings == ()  # it is there, however it came
    env = Environment.describe("V100", torch="2.14").replace(cuda=Version(13, 0))
    assert without_code(env) is None
    assert without_code(env.replace(assumed=())) is not None


def test_this_machine_can_be_detected():
    env = Environment.detect("cpu")
    assert env.detected
    assert env.device.type == "cpu"
    assert env.python == Version(*sys.version_info[:3])
    assert Environment.detect("cpu") is env


def test_what_needs_torch_says_so_where_there_is_none():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import attnsel\n"
        "assert attnsel.Environment.detect().device.type == 'cpu'\n"
        "try:\n    attnsel.DotProductAttention\n"
        "except ImportError as error:\n    assert 'pip install torch' in str(error), error\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_libraries_are_named_once_and_others_are_not_known():
    env = Environment.describe("H100")
    given = ("libnvrtc", "libnvrtc.so, libcudnn", ["libcudnn", "libcudnn"], ())
    named = [env.replace(missing=text).missing for text in given]
    assert named == [("libnvrtc",), ("libcudnn", "libnvrtc"), ("libcudnn",), ()]
    for value in ("libcuda", 3, [3], None):
        with pytest.raises(InvalidInput, match="missing"):
            env.replace(missing=value)
