"""Whatever a plug-in's rules, memory model and kernel do: one candidate is in doubt, for a reason."""

from __future__ import annotations

import json

import pytest

from plugin_packages import by_hand, python
from tables import rows_of

RULES = rows_of(__file__, "misbehaving_rules.csv")
RULE = """
from attnsel.plugins import AtMost, FreeText, Unknown, Violation

class Odd:
    def __str__(self): raise LookupError('lost')

rules = Registry(NAME)
@rule(FAMILY + "001", NAME, registry=rules, evidence="documented", REQUIRES)
def body(p, env):
    '''A title that says something

    Source: x
    '''
    BODY
PLUGIN = plugin(name=NAME, family=FAMILY, rules=rules)
"""


def family(number: int) -> str:
    return "ACME" + "ABCDEFGHIJKLMNOPQRST"[number]


def planning(number: int, body: str, requires: str = "") -> str:
    text = RULE.replace("BODY", body).replace("REQUIRES", requires)
    return f"NAME, FAMILY = 'acme{number}', '{family(number)}'\n{text}"


TAKES = "{'cpu', 'fp32', 'training', 'lse', 'top_left'}"
SELECTS = """
import json, sys, warnings
import attnsel
from attnsel.plugins import PluginWarning
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for length in (64, 65):
        p = attnsel.AttentionParams(dtype="fp32", max_seqlen_q=length, head_dim_qk=24, head_dim_v=24)
        cpu, policy = attnsel.Environment.describe("cpu"), attnsel.Policy(memory_limit=2**30)
        chosen = attnsel.select(p, cpu, policy=policy)
        chosen.report(), chosen.to_json(), chosen.unlocks
    said = [str(w.message) for w in caught if issubclass(w.category, PluginWarning)]
reasons = {c.name: [(r.code, r.unknown, r.message) for r in c.reasons if r.code[-1] != "0"]
           for c in chosen.candidates}
json.dump([chosen.backend, reasons, said], sys.stdout)
"""


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, list[list[str]]], list[str]]:
    site = tmp_path_factory.mktemp("rules")
    for number, rule in enumerate(RULES):
        by_hand(site, f"acme{number}", planning(number, rule["body"]))
    number = len(RULES)
    by_hand(site, f"acme{number}", planning(number, "raise KeyError", 'requires={"head_dim_qk": AtMost(8)}'))
    by_hand(
        site, f"acme{number + 1}", planning(number + 1, "return 3", 'requires={"head_dim_qk": AtMost(64)}')
    )
    fails = "def memory(p, env):\n    return 'scores', -1\n"
    fails += "PLUGIN = plugin(name='acmem', family='MEM', memory=memory, takes=TAKES)"
    by_hand(site, "acmem", fails.replace("TAKES", TAKES))
    done = python(SELECTS, site)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_rule_that_does_not_answer_leaves_its_candidate_unknown(selected) -> None:
    backend, reasons, said = selected
    assert backend == "sdpa.flash"
    for number, rule in enumerate(RULES):
        ((code, unknown, message),) = reasons[f"acme{number}"]
        assert code == family(number) + "001", rule["what"]
        assert unknown, rule["what"]
        assert rule["told"] in message
        assert message.endswith(f"needs a mend by acme{number} 1.0")
        told = [text for text in said if f"rule {code} of acme{number} 1.0 is broken" in text]
        assert len(told) == 1, "once, however often it is asked"


def test_a_broken_rule_with_a_requirement_refuses_what_does_not_satisfy_it(selected) -> None:
    _, reasons, said = selected
    number = len(RULES)
    ((_, unknown, message),) = reasons[f"acme{number}"]
    assert not unknown
    assert "needs at most 8" in message
    assert reasons[f"acme{number + 1}"] == []
    assert any(f"rule {family(number)}001 of acme{number} 1.0 is broken: KeyError" in text for text in said)
    (told,) = [text for text in said if "memory model" in text]
    assert told == (
        "memory model of acmem of acmem 1.0 is broken: it returned ('scores', -1); allowed: words and bytes"
    )


# ---- kernels ----------------------------------------------------------------------------------------

KERNEL = """
import torch
from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.tiled import kernel as tiled
def good(spec, inputs):
    return tiled.forward(spec, inputs)
def forward(spec, inputs):
    FORWARD
def backward(spec, inputs, result, dout, dlse=None):
    BACKWARD
"""
RIGHT_BACKWARD = "return tiled.backward(spec, inputs, result, dout)"
KERNELS = rows_of(__file__, "misbehaving_kernels.csv")
RUNS = """
import json, sys, warnings
import torch, attnsel
from attnsel import NoBackendError
warnings.simplefilter("ignore")
said = {}
for name in NAMES:
    tensors = [torch.randn(2, 5, 4, 8).requires_grad_() for _ in "qkv"]
    try:
        attnsel.attention(*tensors, backend=name).sum().backward()
    except NoBackendError as error:
        said[name] = "; ".join(r.message for r in error.selection[name].reasons)
    except RuntimeError as error:
        said[name] = "later: " + str(error)
    attnsel.attention(*tensors).sum().backward()
json.dump(said, sys.stdout)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("torch")
    site = tmp_path_factory.mktemp("kernels")
    names = []
    for number, row in enumerate(KERNELS):
        for proven, name in (("", f"acme{number}"), ("proven={'cpu'}, ", f"sure{number}")):
            letters = family(number).replace("ACME", name[:4].upper())
            plugin = (
                f"plugin(name='{name}', family='{letters}', kernel='{name}_kernel', {proven}takes={TAKES})"
            )
            kernel = KERNEL.replace("FORWARD", row["forward"])
            kernel = kernel.replace("BACKWARD", row["backward"] or RIGHT_BACKWARD)
            by_hand(site, name, f"PLUGIN = {plugin}", kernel)
            names.append(name)
    gone = f"PLUGIN = plugin(name='gone', family='GONE', kernel='gone_kernel', takes={TAKES})"
    by_hand(site, "gone", gone, "raise SystemExit(3)")
    done = python(RUNS.replace("NAMES", repr([*names, "gone"])), site)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_result_outside_the_contract_is_a_refusal(ran: dict[str, str]) -> None:
    for number, row in enumerate(KERNELS):
        what, words = row["what"], row["told"]
        first, later = ran[f"acme{number}"], ran.get(f"sure{number}", words)  # proven: nobody looks
        assert words in first, what
        assert not first.startswith("later"), "its first call is compared"
        assert words in later, what
        assert later.startswith("later") == (what == "one gradient"), "where nothing is compared: an error"
    assert "gone_kernel of gone 1.0: SystemExit: 3" in ran["gone"]
