"""Machines: the one in front of us and those that are only described."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnsel import Device, Environment, InvalidInput
from attnsel.environment import without_code
from attnsel.environment.gpus import ARCHITECTURES, CATALOGUE
from attnsel.environment.releases import ON_ARM, build_with, runs_on
from attnsel.environment.versions import Version
from tables import each


@each(
    "field, given",
    [
        ("cudnn", {"cudnn": "nine"}),
        ("cudnnn", {"cudnnn": "9.1.0"}),
        ("torch", {"torch": "2.x"}),
        ("gpu", {"gpu": 90}),
        ("cudnn", {"cudnn": 9.1}),
        ("triton", {"triton": [3, "2"]}),
        # a torch before 2.2, stated or implied
        ("torch", {"torch": "2.1.2", "cuda": "11.7"}),
        ("cuda", {"cuda": "11.7"}),  # of torch 2.0
        ("triton", {"triton": "2.1"}),  # of torch 2.1
    ],
)
def test_what_cannot_be_described_names_the_component(field, given):
    with pytest.raises(InvalidInput) as caught:
        Environment.describe(**{"gpu": "A100", **given})
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    before_2_2 = {"2.1.2", "11.7", "2.1"} & set(map(str, given.values()))
    assert not before_2_2 or "2.2" in str(caught.value)


def test_no_other_way_leads_to_a_torch_before_2_2():
    with pytest.raises(InvalidInput, match="torch"):
        Environment(device=Device(), torch="2.1.2")
    with pytest.raises(InvalidInput, match="torch"):
        Environment.describe("A100").replace(torch="2.1.2")
    # What came with an older torch may stand beside a torch that is stated.
    Environment.describe("A100", torch="2.2", cuda="11.7")
    Environment.describe("A100", torch=None, triton="2.1")


def test_none_means_not_installed():
    env = Environment.describe("H100", triton=None, cudnn="none")
    assert (env.triton, env.cudnn) == (None, None)
    assert "triton" not in env.assumed


@each(
    "gpu, given, companions",
    [
        ("V100", {}, {"torch": "2.10.0", "cuda": "12.8.0", "cudnn": "9.10.2", "triton": "3.6.0"}),
        ("V100", {"torch": "2.14"}, {"cuda": "12.6.0", "cudnn": "9.10.2", "triton": "3.8.0"}),
        ("RTX 5090", {"torch": "2.7"}, {"cuda": "12.8.0", "cudnn": "9.7.1", "triton": "3.3.0"}),
        (
            "A100",
            {"torch": "2.2.2"},
            {"cuda": "12.1.0", "cudnn": "8.9.2", "triton": "2.2.0", "python": "3.12.0"},
        ),
        ("H100", {"torch": "2.10", "cuda": "13.0"}, {"cudnn": "9.15.1"}),
        ("H100", {"torch": "2.8", "cudnn": "9.28.0"}, {"cudnn": "9.28.0", "cuda": "12.8.0"}),
        ("H100", {"python": "3.8"}, {"torch": "2.4.1"}),
        ("cpu", {"torch": "2.5.1"}, {"triton": "3.1.0", "cuda": "None", "cudnn": "None"}),
    ],
)
def test_companions_are_those_of_the_wheel_that_fits(gpu, given, companions):
    env = Environment.describe(gpu, **given)
    assert {name: str(getattr(env, name)) for name in companions} == companions
    assert not set(given) & set(env.assumed)
    assert {name for name in companions if companions[name] != "None"} - set(given) <= set(env.assumed)


@each("gpu", [gpu.name for gpu in CATALOGUE.values()])
def test_what_is_assumed_runs_on_the_card(gpu):
    """With nothing stated, no card gets a torch without code for it."""
    env = Environment.describe(gpu)
    assert env.device.type == "cuda"
    assert env.device.shared_memory == ARCHITECTURES[env.arch].shared_memory
    assert env.warnings == ()
    build = build_with(env.torch, env.cuda)
    assert runs_on(build, env.arch) or env.arch in ON_ARM


@each("gpu, family", [("B300", 100), ("GB10", 120)])
def test_a_toolkit_that_only_has_code_for_the_family_is_told_as_that(gpu, family):
    env = Environment.describe(gpu, torch="2.8", cuda="12.8")
    (told,) = env.warnings
    assert told.startswith(f"sm{env.arch} runs the code for sm{family} of CUDA 12.8.0; ")
    assert told.endswith("what is compiled there needs CUDA 12.9 or newer")
    assert Environment.describe(gpu, torch="2.8", cuda="12.9").warnings == ()


NO_WHEEL = "no wheel of torch 2.6 has CUDA 13.0: built from source or stated wrongly"
OTHER_PYTHON = "no wheel of torch 2.2 is for Python 3.13, only for 3.8 to 3.12"


@each(
    "given, warning",
    [
        ({"torch": "2.6", "cuda": "13.0"}, NO_WHEEL),
        ({"torch": "2.2.2", "python": "3.13"}, OTHER_PYTHON),
    ],
)
def test_what_came_in_no_wheel_is_said_and_kept(given, warning):
    env = Environment.describe("H100", **given)
    assert env.warnings == (warning,)
    assert all(getattr(env, name) == Version.parse(value) for name, value in given.items())
    assert env.replace(detected=True).warnings == ()  # it is there, however it came


def test_what_is_not_known_is_not_doubted_and_what_is_assumed_takes_no_blame():
    env = Environment.describe("V100", torch="2.99", cuda="14.0")
    assert env.warnings == ()
    assert without_code(env) is None
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
        "except ImportError as error:\n    assert \"pip install 'attnsel[torch]'\" in str(error), error\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_libraries_are_named_once_and_others_are_not_known():
    env = Environment.describe("H100")
    for text, expected in (
        ("libnvrtc", ("libnvrtc",)),
        ("libnvrtc.so, libcudnn", ("libcudnn", "libnvrtc")),
        (["libcudnn", "libcudnn"], ("libcudnn",)),
        ((), ()),
    ):
        assert env.replace(missing=text).missing == expected
    for value in ("libcuda", 3, [3], None):
        with pytest.raises(InvalidInput, match="missing"):
            env.replace(missing=value)
