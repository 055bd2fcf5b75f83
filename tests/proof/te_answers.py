"""What attnsel says that TransformerEngine chooses, against TransformerEngine's own function.

TRANSFORMER_ENGINE_FOR_TESTS=DIR:DIR python tests/proof/te_answers.py            # 1,000 questions each
TRANSFORMER_ENGINE_FOR_TESTS=DIR:DIR python tests/proof/te_answers.py --coverage # and what they reach
TRANSFORMER_ENGINE_FOR_TESTS=DIR:DIR python tests/proof/te_answers.py --write    # the record for test_te.py
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

import te_function
from attnsel import AttentionParams, Environment
from attnsel.dispatchers import dispatched_by
from attnsel.dispatchers.te import selected
from attnsel.dispatchers.te.asked import FilterInput
from attnsel.selection.evaluate import findings
from te_function import TransformerEngine, dtype_of
from te_questions import questions

RECORD = Path(__file__).resolve().parents[1] / "attnsel/dispatchers/te_answers.json"


def engine_of(root: Path, folder: Path) -> TransformerEngine:
    """A checkout; one without the C++ of the query takes that of the newest that has it."""
    queries = [one for one in te_function.checkouts() if te_function.has_query(one)]
    newest = max(queries, key=te_function.version_of, default=None)
    return TransformerEngine(root, folder, newest, cudnn_takes)


def asked_of_theirs(engine: TransformerEngine, seed: int, count: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """Questions at random that the release can be asked, as rows of te_answers.json with its answer, and
    ours."""
    release = str(engine.version)
    every = ((q, dispatched_by("te", *q)) for q in questions(seed, 9 * count, release))
    for (p, env, switches), ours in islice((pair for pair in every if pair[1].offers), count):
        window = FilterInput(p, env, engine.version, switches).window
        chosen, alive = engine.choice(p, env, window, switches)
        machine = _machine(env, release)
        row = {"params": _params(p), "machine": machine, "switches": switches, "chosen": chosen}
        yield row | {"alive": list(alive)}, selected(ours)


def contradictions(engine: TransformerEngine, seed: int, count: int) -> list[Any]:
    pairs = asked_of_theirs(engine, seed, count)
    return [(row, ours) for row, ours in pairs if (row["chosen"], tuple(row["alive"])) != ours]


def cudnn_takes(engine: TransformerEngine, fields: dict[str, Any]) -> bool:
    """Whether attnsel's rules have nothing against the graph that 2.20 asks cuDNN about."""
    names = ("max_seqlen_q", "max_seqlen_kv", "num_gqa_groups", "attn_mask_type", "deterministic")
    kind, mask = dtype_of(fields["qkv_dtype"]), fields["attn_mask_type"]
    p = engine.asked.replace(
        cp_size=1,
        num_heads=fields["num_attn_heads"],
        window_size=(fields["window_size_left"], fields["window_size_right"]),
        bottom_right_diagonal=None if "causal" in mask else fields["bottom_right_diagonal"],
        core_attention_bias_type=fields["bias_type"],
        alibi_slopes_shape=None,
        dtype=engine.asked.dtype if "fp8" in kind else kind,
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


# ---- what is reached ----------------------------------------------------------------------------------


def reached(root: Path, folder: Path, seed: int, count: int) -> str:
    """The share of lines and branches of its function, and of the conditions of its query, that are
    reached."""
    import coverage  # of the group cover, which asking for answers does without

    te_function.COVERAGE[:] = ["--coverage", "-DTE_COVERAGE"]
    measured = coverage.Coverage(branch=True, config_file=False, data_file=None, include=[str(root / "*")])
    measured.start()
    engine = engine_of(root, folder)
    differ = contradictions(engine, seed, count)
    measured.stop()
    (function,) = (
        node
        for node in ast.parse(engine.utils.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "get_attention_backend"
    )
    within = range(function.lineno, (function.end_lineno or 0) + 1)
    _, lines, _, missing, _ = measured.analysis2(str(engine.utils))
    ours = [line for line in lines if line in within]
    left = [line for line in missing if line in within]
    arcs = measured._analyze(str(engine.utils))
    branches = {line: counts for line, counts in arcs.branch_stats().items() if line in within}
    total, taken = (sum(counts[place] for counts in branches.values()) for place in (0, 1))
    text = f"{len(differ)} of {count} differ; lines {len(ours) - len(left)}/{len(ours)} (left: {left}), "
    return text + f"branches {taken}/{total}{_conditions(engine, folder)}"


def _conditions(engine: TransformerEngine, folder: Path) -> str:
    if engine.library is None:
        return ""
    engine.library.te_dump()
    source = Path(engine.library._name).with_suffix(".cpp")
    (data,) = folder.glob(f"*{source.stem}*.gcda")
    command = ["gcov", "-b", "-c", "-t", str(data)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
    query = told[told.index("nvte_get_fused_attn_backend called") :]
    found = re.findall(r"^branch +\d+ (?:taken (\d+)|never executed)", query, re.MULTILINE)
    return f", conditions of the query {sum(1 for one in found if one and one != '0')}/{len(found)}"


def main() -> int:
    if not te_function.checkouts():
        sys.exit(f"{te_function.VARIABLE} names no checkout")
    bad, rows = 0, []
    for root in sorted(te_function.checkouts(), key=te_function.version_of):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if sys.argv[1:] == ["--coverage"]:
                print(te_function.version_of(root), reached(root, folder, 2026, 4000), flush=True)
                continue
            engine = engine_of(root, folder)
            if sys.argv[1:] == ["--write"]:
                rows += [row for row, _ in asked_of_theirs(engine, 18, 30)]
                continue
            differ = contradictions(engine, 2026, 1000)
            print(
                engine.version, f"{len(differ)} of 1000 answers differ", *differ[:3], sep="\n  ", flush=True
            )
            bad += len(differ)
    if rows:
        text = ",\n".join(json.dumps(row) for row in rows)
        RECORD.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
