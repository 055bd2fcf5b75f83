"""What attnsel says that TransformerEngine chooses, against TransformerEngine's own function.

TRANSFORMER_ENGINE_FOR_TESTS=DIR:DIR python tests/proof/te_answers.py          # 3,000 questions each
TRANSFORMER_ENGINE_FOR_TESTS=DIR:DIR python tests/proof/te_answers.py --write  # the record for test_te.py
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    for folder in (".", "tests/support", "tests/attnsel/dispatchers"):
        sys.path.insert(1, str(Path(__file__).resolve().parents[2] / folder))

import te_function
from attnsel import AttentionParams, Environment
from attnsel.dispatchers.te.asked import FilterInput
from attnsel.selection.evaluate import findings
from te_questions import questions


def asked_of_theirs(seed: int, count: int) -> list[dict[str, Any]]:
    """Questions at random with the answers of each checkout, as rows of te_answers.json."""
    rows = []
    for root in te_function.checkouts():
        with tempfile.TemporaryDirectory() as folder:
            engine = te_function.TransformerEngine(root, Path(folder))
        for p, env, switches in questions(seed, count, str(engine.version)):
            window = FilterInput(p, env, engine.version, switches).window
            chosen, alive = engine.choice(p, env, window, switches)
            rows.append(
                {
                    "params": _params(p),
                    "machine": _machine(env, str(engine.version)),
                    "switches": switches,
                    "chosen": chosen,
                    "alive": list(alive),
                }
            )
    return rows


def cudnn_takes(engine: te_function.TransformerEngine, fields: dict[str, Any]) -> bool:
    """Whether attnsel's rules have nothing against the graph that 2.20 asks cuDNN about."""
    names = ("max_seqlen_q", "max_seqlen_kv", "num_gqa_groups", "attn_mask_type", "deterministic")
    p = engine.asked.replace(
        cp_size=1,
        bottom_right_diagonal=None,
        num_heads=fields["num_attn_heads"],
        window_size=(fields["window_size_left"], fields["window_size_right"]),
        core_attention_bias_type=fields["bias_type"],
        alibi_slopes_shape=None,
        dtype=engine.asked.dtype if engine.asked.fp8_attention and engine.asked.fp8 else te_function.dtype_of(fields["qkv_dtype"]),
        **{name: fields[name] for name in names},
    )
    reasons = findings(p, engine.env, among=("cudnn",))["cudnn"]
    return not any(reason.code.startswith("CUDNN") and not reason.unknown for reason in reasons)


def _params(p: AttentionParams) -> dict[str, Any]:
    params = p.model_dump(mode="json", exclude_defaults=True)
    if p.fp8:
        params["fp8_meta"] = p.fp8_meta.model_dump(mode="json")
    return params


def _machine(env: Environment, engine: str) -> dict[str, str | None]:
    machine: dict[str, str | None] = {"gpu": f"sm{env.arch}", "cudnn": str(env.cudnn)}
    machine["transformer_engine"] = engine
    for name in ("flash_attn", "flash_attn_3", "flash_attn_4"):
        version = getattr(env, name)
        machine[name] = None if version is None else str(version)
    return machine


def main() -> int:
    test_te = importlib.import_module("test_te")
    if not te_function.checkouts():
        sys.exit(f"{te_function.VARIABLE} names no checkout")
    if sys.argv[1:] == ["--write"]:
        rows = asked_of_theirs(18, 150)
        text = ",\n".join(json.dumps(row) for row in rows)
        test_te.ANSWERS.write_text(f"[\n{text}\n]\n", encoding="utf-8")
        return 0
    differ = test_te.differences(asked_of_theirs(2026, 3000))
    print(*differ[:3], f"{len(differ)} answers differ", sep="\n")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
