"""libcudnn's answers beside the rules': samplers, the tally of outcomes, and the real library where it is."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections import defaultdict
from itertools import product

import pytest

import conformance
import emulated_cudnn
from agreement import GPUS, compare, starting_points, upper_bound
from attnsel import AttentionParams, Environment
from attnsel.backends.cudnn.ask import libraries
from attnsel.backends.cudnn.ask.client import Library
from attnsel.backends.cudnn.ask.libraries import Missing, device_json
from attnsel.backends.cudnn.graph import backward, forward, planned
from attnsel.selection.evaluate import fold
from sampling import samples

H100 = device_json(90, "H100")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="stand-ins are compiled, and libcudnn is asked on Linux",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A site-packages folder with a libcudnn, an NVRTC and a frontend, none of them real."""
    return emulated_cudnn.site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def here(installed, tmp_path, monkeypatch):
    """An environment in which the stand-ins are what --cudnn-lib names and the child imports."""
    monkeypatch.setenv("ATTNSEL_CUDNN_VERSION", "91300")
    monkeypatch.setenv("PYTHONPATH", str(installed / "frontend"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return ["--cudnn-lib", str(installed)]


class Spy:
    """Parameters that tell which of their fields were read, also through their properties; a dot leads into
    recipes and specs."""

    def __init__(self, p, seen, path=""):
        self._p, self._seen, self._path = p, seen, path

    def __getattr__(self, name):
        kind = type(self._p)
        if name not in kind.model_fields:
            made = getattr(kind, name)
            ways = ("fget", "func", "compute")  # a property, a cached one, attnsel's lazy
            return next(getattr(made, way) for way in ways if hasattr(made, way))(self)
        value = getattr(self._p, name)
        if hasattr(type(value), "model_fields"):
            return Spy(value, self._seen, f"{self._path}{name}.")
        self._seen.add(self._path + name)
        return value


def at(p, path):
    for name in path.split("."):
        p = None if p is None else getattr(p, name, None)
    return p


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["half precision", "fp8"])
def test_samples_move_every_field_that_a_cudnn_rule_reads_and_trip_every_rule(fp8):
    seen, fires_on = set(), defaultdict(int)
    questions = [p for p in samples(0, 2500, starting_points(), fp8=0.4) if p.fp8_attention == fp8]
    archs = ("sm80", "sm89", "sm90", "sm100", "sm120")
    edges = ("9.8.0", "9.9.0", "9.11.0", "9.13.0", "9.13.1", "9.14.0", "9.18.1", "9.26.0", "9.28.0")
    frontends = ("1.20.0", "1.23.0", "1.25.0", "1.28.0")
    for place, (gpu, cudnn) in enumerate(product(archs, edges)):
        for number, frontend in enumerate(frontends):
            env = Environment.describe(gpu, cudnn=cudnn, cudnn_frontend=frontend)
            rules = [
                r
                for r in fold(env, fp8, False, True).rules
                if "cudnn" in r.candidates and r.code[:5] == "CUDNN"
            ]
            for p in questions[(place + number) % 4 :: 4]:  # every question once per GPU and cuDNN
                spy = Spy(p, seen)
                for rule in rules:
                    if p.is_training >= rule.training:
                        fires_on[rule.code] += rule.find(spy, env) is not None
    assert not [code for code, count in fires_on.items() if not count]
    still = {path for path in seen if len({at(p, path) for p in questions}) < 2}
    # One rank is all that a graph knows; what makes a question one about FP8 is the same on each side.
    assert still <= {"cp_size", "cp_comm_type"} | (set() if fp8 else {"fp8_meta.recipe.fp8_dpa"})


def test_samples_differ_and_equal_seeds_give_equal_ones():
    near = starting_points()
    found = list(samples(3, 50, near))
    assert found == list(samples(3, 50, near))
    assert found != list(samples(4, 50, near))
    assert len(set(found)) == 50


@pytest.mark.slow
def test_conformance_counts_and_fails_on_a_false_accept(here, capsys):
    # These stand-ins know no limits: what the rules refuse, they take; what they kill, the rules take.
    code = conformance.main(["--backend", "cudnn", "--samples", "30", "--arch", "90", "--json", *here])
    said = json.loads(capsys.readouterr().out)
    assert said["asked"] == 30
    assert said["agree"] + said["false_reject"] + said["false_accept"] + said["known_bug"] == 30
    assert code == (4 if said["false_accept"] else 0)
    assert {d["outcome"] for d in said["disagreements"]} <= {"false reject", "false accept"}
    assert conformance.main(["--backend", "cudnn", "--samples", "30", "--arch", "90", *here]) == code
    text = capsys.readouterr().out
    assert "judged at check_support" in text
    assert "false reject × " in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_false_accept_is_counted(installed, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNSEL_CUDNN_VERSION", "91300")
    library = Library(str(installed), cache=tmp_path, frontend=str(installed / "frontend"))
    p = AttentionParams(head_dim_qk=emulated_cudnn.CRASH, is_training=False)
    with library:
        tally = compare(library, [p, p.replace(head_dim_qk=64)], ["H100"])
    assert (tally.outcomes["false accept"], tally.outcomes["agree"], tally.crashes) == (1, 1, 1)
    assert tally.disagreements[0].library == "forward: planner crashed (SIGSEGV)"


def test_the_bound_is_the_rule_of_three_or_wilsons():
    assert upper_bound(0, 3000) == pytest.approx(0.001)
    assert upper_bound(10, 1000) == pytest.approx(0.0183, abs=2e-4)
    assert upper_bound(0, 0) == 1.0


# The real thing, where it is installed.


@pytest.fixture
def real(tmp_path):
    if importlib.util.find_spec("cudnn") is None or not os.path.isabs(libraries.find_cudnn(None)):
        pytest.skip("needs nvidia-cudnn-frontend and a libcudnn wheel")
    try:
        with Library(cache=tmp_path, timeout=120) as one:
            one.versions()
            yield one
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.mark.slow
def test_the_real_library_plans_for_a_gpu_that_is_not_here(real):
    call = planned(AttentionParams())
    for make in (forward, backward):
        answer = real.ask(make(call), H100, build=True)
        assert answer.supported
        assert answer.engines
        assert answer.workspace is not None
    assert not real.ask(forward(planned(AttentionParams(head_dim_qk=100))), H100).supported


@pytest.mark.slow
def test_the_rules_agree_with_the_real_library(real):
    tally = compare(real, samples(1, 60, starting_points()), GPUS)
    assert not [one.as_dict() for one in tally.disagreements]
