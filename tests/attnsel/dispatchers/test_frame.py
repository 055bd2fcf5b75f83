"""Another library's chooser beside attnsel: asked, compared and told, whatever it says."""

from __future__ import annotations

import pickle
import sys
import types

import pytest

import attnsel.dispatchers as dispatchers
from attnsel import AttentionParams, Environment, InvalidInput, Policy, select
from attnsel.cli import main
from attnsel.decision import _beside
from attnsel.dispatchers import Dispatch, Offer, Refusal, Switch, switches_of
from tables import each

H100 = Environment.describe("H100", torch="2.9.0")
P = AttentionParams()
REFUSED = Offer(
    "cudnn", "sdpa.cudnn", (Refusal("head_dim is 136, at most 128", "sdp_utils.cpp, line 1", told="nothing"),)
)
FLASH = Offer("flash", "sdpa.flash")
MATH = Offer("math", "sdpa.math", note="repeats heads\x1b[31m")


def answer(*offers: Offer, chosen: Offer | None, error: str = "", **more) -> Dispatch:
    return Dispatch(
        "torch", "2.9.0", "2.9.0", "F.sdpa(q, k, v)", offers, chosen, "context.h", error=error, **more
    )


@pytest.fixture
def chooser(monkeypatch):
    """Makes ``torch`` give an answer; the questions and switches that it was asked come back in a list."""
    asked = []

    def put(dispatch: Dispatch):
        module = types.ModuleType("attnsel.dispatchers.torch")
        module.SWITCHES = (  # type: ignore[attr-defined]
            Switch("MODE", ("on", "off"), "what it does", "a source"),
            Switch("FREE", (), "", ""),
        )
        module.held = lambda env: {"MODE": "on"}  # type: ignore[attr-defined]

        def say(p, env, switches):
            asked.append((p, env, dict(switches)))
            return dispatch._replace(switches=tuple(sorted(switches.items())))

        module.dispatch = say  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "attnsel.dispatchers.torch", module)
        dispatchers._dispatched.cache_clear()
        return asked

    yield put
    dispatchers._dispatched.cache_clear()
    _beside.cache_clear()


def test_it_is_asked_once_with_the_switches_of_the_process_where_none_are_given(chooser):
    asked = chooser(answer(REFUSED, MATH, chosen=MATH))
    first = select(P, H100, dispatcher="torch", switches={})
    assert first.dispatched.switches == ()
    assert select(P, H100, dispatcher="torch", switches={}) is first
    assert select(P, H100, dispatcher="torch").dispatched.switches == (("MODE", "on"),)
    off = select(P, H100, dispatcher="torch", switches={"MODE": "off"})
    assert off.dispatched.switches == (("MODE", "off"),)
    assert [switches for _, _, switches in asked] == [{}, {"MODE": "on"}, {"MODE": "off"}]
    assert select(P, H100).dispatched is None
    assert first.backend == select(P, H100).backend
    again = pickle.loads(pickle.dumps(first))
    assert again.dispatched == first.dispatched
    assert again.report() == first.report()


@each(
    "dispatch, words",
    [
        (answer(FLASH, chosen=FLASH), "takes flash; attnsel takes the same kernel."),
        (
            answer(REFUSED, MATH, chosen=MATH),
            "takes math; attnsel runs sdpa.flash, which F.sdpa does not have.",
        ),
        (answer(MATH, FLASH, chosen=MATH), "runs sdpa.flash, which F.sdpa has too and tries later."),
        (
            answer(Offer("flash", "sdpa.flash", REFUSED.refusals * 2), MATH, chosen=MATH),
            "attnsel runs sdpa.flash, which F.sdpa refuses: head_dim is 136, at most 128 (and 1 more).",
        ),
        (
            answer(REFUSED, chosen=None, error="No available kernel"),
            "raises; attnsel runs sdpa.flash.",
        ),
    ],
)
def test_the_difference_is_one_sentence(chooser, dispatch, words):
    chooser(dispatch)
    flash = Policy(allow=("sdpa.flash", "sdpa.math"))
    said = select(P, H100, policy=flash, dispatcher="torch").difference
    assert words in said
    assert said.startswith("F.scaled_dot_product_attention of torch 2.9.0 ")
    nothing = select(AttentionParams(softcap=3.0), H100, policy=flash, dispatcher="torch").difference
    none = "has none either." if dispatch.chosen is None else "has no kernel for this call."
    assert nothing.endswith(f"; attnsel {none}")


@each(
    "flags, words",
    [
        ("--as pytorch", "--as pytorch: allowed: torch, te, transformers"),
        ("--switch MODE=on", "--switch MODE=on: says nothing without --as"),
        ("--as torch --switch MODE", "--switch MODE: must be NAME=VALUE; torch has: MODE, FREE"),
        ("--as torch --switch MODE=on --switch MODE=off", "--switch MODE=off: MODE is given twice"),
        ("--as torch --switch MODE=maybe", "--switch MODE=maybe: allowed: on, off"),
        ("--as torch --switch MODES=on", "--switch MODES=on: torch has no such switch: did you mean MODE?"),
        ("--as torch --switch XYZ=1", "--switch XYZ=1: torch has no such switch; has: MODE, FREE"),
    ],
)
def test_bad_input_is_one_line(chooser, capsys, flags, words):
    chooser(answer(MATH, chosen=MATH))
    assert main(["explain", "--gpu", "H100", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_bad_arguments_in_python(chooser):
    chooser(answer(MATH, chosen=MATH))
    with pytest.raises(InvalidInput, match="switches"):
        select(P, H100, switches={"MODE": "on"})
    with pytest.raises(InvalidInput, match="dispatcher = 'vllm': allowed: torch, te, transformers"):
        select(P, H100, dispatcher="vllm")
    assert list(switches_of("torch")) == ["MODE", "FREE"]
