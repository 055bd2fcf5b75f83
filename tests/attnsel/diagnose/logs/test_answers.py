"""Whole answers to logs against ``answers.txt``: of threads in ``cases/`` and of short ones in ``made/``.

An answer is told as text or as Markdown, with the question behind it; of those in ``made/`` and of one thread
as JSON too. What changed is accepted as tests/support/records.py says.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.backends.registry import CANDIDATES
from attnsel.diagnose.logs.answer import AnsweredCall, Explained, Stated, _ways, explained
from attnsel.diagnose.logs.calls import gather
from attnsel.diagnose.logs.report import _verdict, log_document
from attnsel.report.markdown import to_markdown
from attnsel.report.text import to_text
from records import Record
from tables import each, rows_of

RECORD = Path(__file__).with_name("answers.txt")
LOGS = [*sorted(RECORD.parent.glob("made/*.txt")), *sorted(RECORD.parent.glob("cases/*.txt"))]
DERIVED = {"cudnn_frontend", "head_dim_v", "dtype", "tensors"}  # told in other words than figures
IN_JSON = ("made", "NVIDIA-TransformerEngine-2285.txt")


@functools.cache
def read(log: str) -> Explained:
    """Several tests ask about the same texts."""
    return explained(gather(log.splitlines()), Stated())


def question(answer: AnsweredCall) -> Iterator[str]:
    p, env = answer.rebuilt.params, answer.rebuilt.environment
    yield f"call: {p.model_dump(mode='json', exclude_defaults=True)}"
    yield f"sm{env.arch}: {env.model_dump(mode='json', exclude_defaults=True, exclude={'device', 'assumed'})}"
    yield f"said: {', '.join(answer.rebuilt.stated)}"


def reports() -> Iterator[str]:
    for place, path in enumerate(LOGS):
        found = read(path.read_text(encoding="utf-8"))
        yield f"==== {path.parent.name}/{path.stem}\n\n"
        document = log_document(found)
        yield to_markdown(document) if place % 2 else to_text(document, 77)
        yield ""
        for answer, call in zip(found.answers, found.as_dict()["calls"], strict=True):
            yield from question(answer)
            facts = {key: value for key, value in call.items() if key not in ("params", "environment")}
            if path.name in IN_JSON or path.parent.name in IN_JSON:
                yield json.dumps(facts, indent=1, ensure_ascii=False)
            yield ""


def test_whole_answers_are_as_they_are_written_down(record: Record) -> None:
    record.holds(RECORD, "\n".join(reports()).splitlines())


def told(log: str) -> tuple[str, dict[str, str]]:
    """An answer, its first sentence and what it proposes; all empty where nothing is known."""
    found = read(log)
    text = to_text(log_document(found), 99) if found.answers else ""
    verdict = re.split(r"\n *(?:Why|What (?:may help|helps)|What the log says)\n", text)[0]
    helps = " ".join(re.findall(r"What (?:may help|helps)\n(.*?)\n *What the log says\n", text, re.DOTALL))
    return text, {"says": " ".join(verdict.split()), "helps": " ".join(helps.split())}


@each("form", rows_of(__file__, "forms.csv"))
def test_what_no_row_knows_is_read_by_its_form_near_attention_alone(form: dict[str, str]) -> None:
    for cell, place in told(form["log"])[1].items():
        assert re.search(form[cell] or r"\A\Z", place), (cell, place)


def test_what_a_form_says_is_told_as_a_guess() -> None:
    frame = 'File "/opt/octo/attention.py", line 12, in forward\n'
    guess = read(
        frame + "RuntimeError: The size of tensor a (7) must match the size of tensor b (9) at dimension 1"
    )
    assert {cause.how for one in guess.answers for cause in one.causes} == {"guessed"}
    assert "What may help" in to_text(log_document(guess), 99)
    known = read("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi")
    assert {cause.how for one in known.answers for cause in one.causes} == {"known", "said"}


@each("thread", rows_of(__file__, "threads/threads.csv"))
def test_a_thread_is_told_its_cause_and_what_helped_there(thread: dict[str, str]) -> None:
    log = (RECORD.parent / f"threads/{thread['name']}.txt").read_text(encoding="utf-8")
    text, places = told(log)
    for cell, place in places.items():
        assert re.search(thread[cell], place), (cell, place)
    assert not thread["never"] or not re.search(thread["never"], " ".join(text.split())), text
    assert all(code in text for code in thread["codes"].split()), text


def test_nothing_is_told_against_what_a_log_says() -> None:
    """``never.csv`` over every text that is kept: threads, cases, forms."""
    rules = rows_of(__file__, "never.csv")
    paths = (path for folder in ("threads", "cases") for path in RECORD.parent.glob(f"{folder}/*.txt"))
    texts = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    texts |= {form["log"]: form["log"] for form in rows_of(__file__, "forms.csv")}
    found = []
    for name, text in texts.items():
        answers = read(text).answers
        told = {"verdict": [*map(_verdict, answers)], "fixes": [fix for a in answers for fix in a.fixes]}
        for rule in rules:
            meant = re.search(rule["log"], text) and not re.search(rule["unless"] or r"(?!)", text)
            if meant and (said := re.search(rule["never"], "\n".join(told[rule["place"]]))):
                found.append((name, rule["name"], said[0]))
    assert not found


def test_four_ways_help_and_none_that_is_not_worth_showing() -> None:
    """flash_attn.2 would be installed only to come behind others."""
    p = AttentionParams(head_dim_qk=192, head_dim_v=128)
    plain = select(p, Environment.describe("H100", cudnn="9.1.0", torch="2.9.1"))
    assert "flash_attn.2" in [way.candidate for way in plain.unlocks]
    shown = [way.candidate for way in _ways(plain, list(CANDIDATES), bool)]
    assert shown == ["cudnn", "flash_attn.3", "flash_attn.4", "sdpa.cudnn"]
    assert [way.candidate for way in _ways(plain, ["flash_attn.2", "cudnn"], bool)] == ["cudnn"]
    denied = select(p, Environment.describe("H100", cudnn="9.1.0"), policy=Policy(deny=("flash_attn.3",)))
    assert not list(_ways(denied, ["flash_attn.3"], bool)), "what a user's policy rules out is no way"


def test_no_fact_outlives_its_line() -> None:
    """Whichever line is taken out of a log: figures of what an answer calls stated stand in the others."""
    for path in RECORD.parent.glob("cases/*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for gone in range(0, len(lines), 1 + len(lines) // 12):
            left = lines[:gone] + lines[gone + 1 :]
            figures = re.sub(r"\W", "", "".join(left))
            for answer in explained(gather(left), Stated()).answers:
                p, env = answer.rebuilt.params, answer.rebuilt.environment
                for name in {*answer.rebuilt.stated} - DERIVED:
                    card = f"{env.device.arch} {env.device.name}"
                    value = card if name == "gpu" else getattr(p, name, None) or getattr(env, name, None)
                    word = r"\w+" if name == "gpu" else r"\d\d+"
                    found = re.findall(word, str(value).replace(".0", "").replace(".", ""))
                    told = [figure in figures for figure in found]
                    assert any(told) if name == "gpu" else all(told), (path.name, lines[gone], name, value)
