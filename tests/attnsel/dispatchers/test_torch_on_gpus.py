"""What is said of plain torch on NVIDIA's GPUs is what the source of each release says.

No C++ check of these runs without a GPU: fake CUDA tensors reach Python's and the meta side of torch alone.
``torch_answers.json`` holds what a second writing of each release's chooser answers, and rows by hand of all
releases (tests/proof/f_sdpa_answers.py): the kernels in the order of trial, ``!`` where one is passed over.
"""

from __future__ import annotations

import json
from pathlib import Path

from attnsel import AttentionParams, Environment
from attnsel.dispatchers import dispatched_by

ANSWERS = Path(__file__).with_name("torch_answers.json")


def test_it_is_what_the_source_says() -> None:
    recorded, differences = 0, []
    for row in json.loads(ANSWERS.read_text(encoding="utf-8")):
        p = AttentionParams(**row["params"])
        for release, answer in row["answers"].items():
            recorded += 1
            env = Environment.describe(**row["machine"], torch=release)
            dispatch = dispatched_by("torch", p, env, row.get("switches", {}))
            said = []
            for offer in dispatch.offers:
                raises = f"{offer.name} is taken"  # and not passed over
                passed_over = any(not refusal.text.startswith(raises) for refusal in offer.refusals)
                said.append(offer.name + "!" * passed_over)
            if " ".join(said) != answer:
                differences.append(f"{release} {row}: says {' '.join(said)}")
            taken = [name for name in said if not name.endswith("!")][:1]
            if dispatch.chosen is not None and [dispatch.chosen.name] != taken:
                differences.append(f"{release} {row}: chooses {dispatch.chosen.name} of {' '.join(said)}")
    assert recorded > 1900
    assert not differences
