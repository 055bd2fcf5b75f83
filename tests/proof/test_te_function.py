"""What attnsel says that TransformerEngine chooses is what its own function chooses, for every release that
is here.

TRANSFORMER_ENGINE_FOR_TESTS names the checkouts and unpacked wheels; te_answers.json has answers without
them.
"""

from __future__ import annotations

import os

import pytest

import te_function
from te_answers import contradictions, engine_of

pytestmark = pytest.mark.slow


def test_a_thousand_questions_of_each_release(tmp_path):
    roots = te_function.checkouts()
    if not roots:
        pytest.skip(f"{te_function.VARIABLE} names no checkout")
    seed = int.from_bytes(os.urandom(4), "big")
    for root in roots:
        engine = engine_of(root, tmp_path)
        assert contradictions(engine, seed, 1000) == [], f"{engine.version}, seed {seed}"
