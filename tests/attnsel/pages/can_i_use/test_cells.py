"""A cell says what ``select`` says, with every release, to the question that its command asks."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from itertools import pairwise

import pytest

from attnsel import select
from attnsel.backends.registry import CANDIDATES
from attnsel.cli import main
from attnsel.environment.versions import Version
from attnsel.pages.can_i_use import (
    GPUS,
    Cell,
    Mode,
    Span,
    all_features,
    cells,
    environment,
    find,
    releases_asked,
)
from attnsel.pages.can_i_use_tables import command, label, sentence
from sitegen.can_i_use import rows
from tables import each, rows_of

OWN = [name for name, record in CANDIDATES.items() if not record.plugin]


def cell(feature: str, kernel: str, gpu: str, **stated: str) -> Cell:
    versions = tuple(sorted((name, Version.parse(text)) for name, text in stated.items()))
    (found,) = cells(find([feature]), [kernel], [gpu], versions)
    return found


def samples(count: int, columns: int) -> Iterator[tuple[Cell, Mode, Version]]:
    """Cells, modes and releases at random, from so many columns of the matrix, each made at once."""
    chosen = random.Random(19)
    for kernel, gpu in chosen.sample([(kernel, gpu) for kernel in OWN for gpu in GPUS], columns):
        features = chosen.sample(list(all_features().values()), count // columns)
        for made in cells(features, [kernel], [gpu]):
            mode = chosen.choice(list(made.spans))
            yield made, mode, chosen.choice(releases_asked(kernel, made.at))
    for kernel in ("sdpa.flash", "sdpa.efficient", "sdpa.varlen"):  # nobody knows
        made = cell("deterministic", kernel, "sm90")
        yield made, "training", made.at


@pytest.fixture
def pasted(monkeypatch):
    """What the command line makes of a command: the very question that it puts to the engine."""

    def ask(line: str):
        asked = []

        def catch(p, env, policy):
            asked.append((p, env, policy))
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("attnsel.cli.question.select", catch)
            program, *words = shlex.split(line)
            assert program == "attnsel"
            assert main(words) == 130, line
        return asked[-1]

    return ask


@pytest.mark.parametrize(("count", "columns"), [(48, 6), pytest.param(500, 25, marks=pytest.mark.slow)])
def test_cells_say_what_select_says_to_the_pasted_command(pasted, no_switches_from_outside, count, columns):
    wrong, outcomes = [], set()
    for made, mode, version in samples(count, columns):
        p, env, policy = pasted(command(made, mode, version))
        said = select(p, env, policy=policy)[made.kernel]
        span = made.span(mode, version)
        codes = tuple(dict.fromkeys(reason.code for reason in said.reasons))
        changes = [change.text for change in said.adaptations]
        told = (span.outcome, span.codes, [change.text for change in span.candidate.adaptations])
        if (Span(version, version, said).outcome, codes, changes) != told:
            wrong.append((made, mode, str(version), told, codes))
        outcomes.add(span.outcome)
    assert not wrong
    assert outcomes == {"yes", "no", "adapts", "unknown"}


# ---- states ---------------------------------------------------------------------------------------------


@each("row", rows_of(__file__, "states.csv"))
def test_a_state_and_how_it_is_shown(row):
    found = cell(row["feature"], row["kernel"], row["gpu"])
    assert (found.state, label(found)) == (row["state"], row["shown"])


def test_support_that_comes_and_goes_is_several_ranges():
    found = cell("causal", "cudnn", "sm90")
    states = [each.state for each in found.ranges]
    assert (found.state, found.always, found.whenever) == ("yes", False, True)
    assert "never" in states[1:-1]  # 9.10.0 and 9.10.1 are blocked
    assert "9.10.2" in sentence(found)


def test_the_release_at_hand_is_the_one_that_was_stated_and_what_else_was_stated_holds_with_every_one():
    found = cell("mla", "cudnn", "sm90", cudnn="9.1.0")
    assert (found.state, str(found.at)) == ("forward", "9.1.0")
    assert "both ways from 9.5.0 on" in sentence(found)
    below = cell("mla", "cudnn", "sm90", cudnn="8.9.7")
    assert (below.state, str(below.unlocked_at), label(below)) == ("version", "9.1.0", "△ 9.1+")
    unpublished = cell("causal", "cudnn", "sm90", cudnn="9.5.9")
    assert Version(9, 5, 9) in releases_asked("cudnn", unpublished.at)
    assert unpublished.state == "yes"
    old = cell("causal", "flash_attn.2", "sm120", cuda="12.6")  # whose build has no Blackwell
    assert (cell("causal", "flash_attn.2", "sm120").state, old.state) == ("yes", "never")


def test_what_a_feature_says_of_the_question_beside_its_own_fields():
    assert list(cell("paged-kv", "triton", "sm90").spans) == ["inference"]
    assert list(cell("dropout", "triton", "sm90").spans) == ["training"]
    long = cell("long-128k", "sdpa.math", "sm90")
    assert (long.state, long.span("inference").codes) == ("never", ("POLICY004",))
    assert command(long, "inference").endswith("--memory-limit 80GiB")


@each("kernel", OWN)
def test_ranges_and_rows_cover_every_release_once(kernel):
    found = cell("sliding-window", kernel, "sm90")
    known = releases_asked(kernel, found.at)
    for parts in (found.ranges, tuple(reversed(rows(found))), *found.spans.values()):
        assert (parts[0].first, parts[-1].last) == (known[0], known[-1])
        for one, other in pairwise(parts):
            assert known.index(other.first) == known.index(one.last) + 1


# ---- releases -------------------------------------------------------------------------------------------


def test_each_torch_comes_with_the_cudnn_of_its_wheel():
    env = environment("sdpa.cudnn", "sm90", Version(2, 7))
    assert (str(env.torch), str(env.cudnn)) == ("2.7.0", "9.5.1")
    assert "torch" not in env.assumed
