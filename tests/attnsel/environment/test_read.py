"""A release newer than any that was read is answered as the newest that was, and every form says so."""

from __future__ import annotations

import json
import random

from attnsel import AttentionParams, Environment, select
from attnsel.cli import main
from attnsel.dispatchers import te, transformers
from attnsel.dispatchers.torch import read_for
from attnsel.environment import COMPONENTS, component_name
from attnsel.environment.read import as_read, everything_read, newest_read, unread, unread_release
from attnsel.environment.releases import ASSUMED, FRONTENDS
from attnsel.environment.versions import Version
from attnsel.environment.wheels import on_pypi
from attnsel.report.answer import one_line
from questions import questions
from tables import each, rows_of


def sentence(subject: str, version: str) -> str:
    row = everything_read()[subject]
    as_which = f"is answered as {row.version}, the newest read on {row.on}; nothing newer is known"
    return f"{component_name(subject)} {version} {as_which}"


@each("component, stated, read, newer", [row.values() for row in rows_of(__file__, "newer.csv")])
def test_what_is_newer_has_the_sentence_in_every_form(component, stated, read, newer, capsys):
    env = Environment.describe("H100", **{component: stated})
    expected = [sentence(component, read)] if newer else []
    assert [str(one) for one in unread(env)] == expected
    selection = select(AttentionParams(), env)
    assert getattr(selection.environment, component) == Version.parse(read)
    assert all(text in one_line(selection) and text in selection.report(400) for text in expected)
    for form in ("", "--short", "--markdown", "--json", "--as=te", "--as=transformers", "--as=torch --short"):
        flag = f"--{component.replace('_', '-')}={stated}"
        assert main(["explain", "--gpu=H100", flag, *form.split()]) == 0
        told = capsys.readouterr().out
        if form == "--json":
            assert [one["text"] for one in json.loads(told)["unread"]] == expected
        told = " ".join(told.split())
        assert ("nothing newer is known" in told) == bool(expected)
        assert all(text in told for text in expected)


def test_rules_say_of_a_newer_release_what_they_say_of_the_newest_read_and_none_is_proposed():
    rng, rows = random.Random(5), [row for row in everything_read().values() if row.subject in COMPONENTS]
    for p, _, policy in questions(5, 60):
        newer = [row.version._replace(patch=row.version.patch + 1, beta=10_000) for row in rows]
        stated = {row.subject: v for row, v in zip(rows, newer, strict=True) if rng.random() < 0.4}
        env = Environment.describe(rng.choice(["H100", "A100", "B200", "V100", "sm110", "cpu"]), **stated)
        asked, known = select(p, env, policy=policy), select(p, as_read(env), policy=policy)
        assert asked.candidates == known.candidates
        for way in asked.unlocks:
            installed = {*way.changes, *(() if way.install is None else way.install.changes)}
            assert not any(isinstance(v, Version) and unread_release(name, v) for name, v in installed)


def test_a_row_is_not_older_than_what_its_table_was_read_for():
    assert newest_read("torch") >= max(ASSUMED, read_for(Version(99)).release)
    assert newest_read("cudnn_frontend")[:2] >= FRONTENDS[-1][:2]
    assert newest_read("transformer_engine") == te.NEWEST
    assert newest_read("transformers") == transformers.switches.NEWEST
    for row in everything_read().values():
        listed = [on_pypi()[package][-1] for package in row.packages if package in on_pypi()]
        assert not listed or row.released in listed
