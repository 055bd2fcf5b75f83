"""Published figures: of the schema beside this file; no rule orders without one, or against one unnamed."""

import csv
import re
from pathlib import Path

from attnsel.base.rows import read_rows
from attnsel.environment.gpus import ARCHITECTURES, look_up_gpu
from attnsel.pages.figures import claims, resting
from attnsel.rules import REGISTRY, Placing, load_all
from attnsel.rules.figures import measured, sources

load_all()


def test_every_row_has_a_source_and_cells_that_are_allowed():
    allowed = dict(csv.reader(Path(__file__).with_name("figures_allowed.csv").read_text().splitlines()[1:]))
    for row in (row for arch in (0, *ARCHITECTURES) for one in measured(arch) for row in one.rows):
        assert [name for name in allowed if not re.fullmatch(allowed[name], row[name])] == [], row
        assert sources()[row["source"]]["source"].startswith("https://")
        assert not row["arch"] or not row["gpu"] or look_up_gpu(row["gpu"]).arch == int(row["arch"])


def test_no_order_is_without_a_row_and_none_stands_against_one_that_it_does_not_name():
    named = {(row["code"], row["pair"]) for row in read_rows("attnsel.rules", "against")}
    for code in (code for code, page in REGISTRY.pages.items() if isinstance(page, Placing)):
        known, found = resting().get(code, {}), claims().get(code, ())
        assert found or known.get("untimed"), f"{code} rests on nothing"
        against = {(code, claim.measurement.name) for claim in found if claim.ratio < 1 / 1.05}
        assert known.get("contested") or against <= named, against - named
