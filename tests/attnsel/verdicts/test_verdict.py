"""What a reason says of what is missing."""

from __future__ import annotations

from attnsel import AttentionParams, Environment, select
from tables import each

RECIPE = "fp8_meta is not given, needs a recipe of kind"


@each(
    "code, p, machine, words",
    [
        ("CUDNN301", AttentionParams(dtype="fp8_e4m3"), {}, RECIPE),
        ("INSTALL003", AttentionParams(), {"cudnn": None}, "cudnn is not installed, needs at least"),
    ],
)
def test_what_is_missing_was_not_given_or_is_not_installed(code, p, machine, words):
    cudnn = select(p, Environment.describe("H100", **machine))["cudnn"]
    (found,) = [reason for reason in cudnn.reasons if reason.code == code]
    assert found.observed is None
    assert f" — {words}" in found.message
