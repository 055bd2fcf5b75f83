"""What cudnn-frontend's own kernels take, asked of the frontend: its table, and whether ours claims no more.

    unzip nvidia_cudnn_frontend-1.32.0-cp311-*.whl -d FOLDER    # for the Python that runs this
    python tests/proof/open_engines.py FOLDER --write           # its rows of open_engines.csv
    python tests/proof/open_engines.py FOLDER --count 2000      # random questions to its functions

Its engines say in Python which graphs they are candidates for (``mismatch`` in cudnn/sdpa/*/engines.py),
without a GPU and without libcudnn: the architecture is put in where it would be read off the device, and the
CuTe DSL is taken to be there. What is lowered and compiled after that nobody asks here.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from attnsel import AttentionParams, Environment, InvalidInput
from attnsel.backends.cudnn.build import declare
from attnsel.backends.cudnn.graph import backward, forward, planned
from attnsel.backends.cudnn.open_engines import open_engines

TABLE = Path(__file__).parents[2] / "backends" / "cudnn" / "data" / "open_engines.csv"
ARCHS = (80, 90, 100, 103, 107, 110, 120, 121)
WORDS = {
    "causal": "causal",
    "bottom_right": "bottom_right",
    "swa": "window",
    "right_band_widening": "right",
    "padded": "padding",
    "sink": "sinks",
    "thd": "thd",
    "deterministic": "deterministic",
    "decode": "decode",
}
"""Fields of an engine's ``Capabilities``, and the words of our table for them."""


def load(folder: str) -> tuple[Any, Any, dict[str, Any]]:
    """The frontend in ``folder``, what reads its graphs, and its engines' modules by phase."""
    sys.path.insert(0, folder)
    sys.modules.setdefault("torch", None)
    engines = {phase: import_module(f"cudnn.sdpa.{phase}.engines") for phase in ("fwd", "bwd")}
    for module in engines.values():
        vars(module).update(
            cutedsl_state=lambda: (True, ("nvidia-cutlass-dsl", "99.0.0")),
            cutedsl_too_old=lambda version: False,
            cutedsl_arch_requirement_error=lambda cc: None,
        )
    return import_module("cudnn"), import_module("cudnn.sdpa.graph_analyzer"), engines


# ---- the table ----------------------------------------------------------------------------------------


def shapes(phase: str, c: Any) -> str:
    """Widths of q and v that it covers, each with the width that both must exceed: ``512x512>256``."""
    if phase == "bwd":
        if c.d_envelope:
            return f"{max(c.d)}x{max(c.d)}" + (f">{c.d_envelope_floor}" if c.d_envelope_floor else "")
        return " ".join(f"{d}x{d}" for d in sorted(c.d))
    floors = dict(c.d_envelope_floors)
    free = [shape for shape in c.d_shapes if shape not in floors]
    wide = [s for s in free if not any(s != o and s[0] <= o[0] and s[1] <= o[1] for o in free)]
    covering = wide if c.d_pad_multiple else list(c.d_shapes)
    return " ".join(
        f"{d}x{e}" + (f">{floors[d, e]}" if (d, e) in floors else "") for d, e in sorted({*covering, *floors})
    )


def rows(cudnn: Any, engines: dict[str, Any]) -> Iterator[list[Any]]:
    """A row for each engine of half precision whose capabilities say all of what it takes."""
    manifest = import_module("cudnn.engines.manifest").MANIFEST
    slots = {name: slot for family in manifest for name, slot in dict(family.slots).items()}
    for phase, module in engines.items():
        for spec in module.ENGINE_SPECS:
            c = spec.capabilities
            if c.is_fp8 or c.is_mxfp8 or getattr(c, "declaration_check", None) is not None:
                continue
            takes = [word for field, word in WORDS.items() if getattr(c, field, False)]
            if phase == "bwd":
                takes = [word for word in takes if word != "thd" and (word != "sinks" or c.dsink)]
                takes += ["gqa"] * c.gqa + ["narrow_v"] * c.dqk_ge_dv
                multiple = c.d_pad_multiple if c.d_envelope else 0
            else:
                if c.sm_lo == 80 or c.thd_d_shapes is not None:  # with conditions
                    takes.remove("thd") if "thd" in takes else None
                takes += ["gqa", "narrow_v", "wide_v"]
                takes += ["tail"] * (not c.skv_tile or c.skv_tail_via_padding)
                multiple = c.d_pad_multiple
            takes += ["any_order"] * ("dense_flex" in c.layouts)
            opt_in = "yes" if slots[spec.name].opt_in else ""
            where = [spec.name, opt_in, c.sm_lo, c.sm_hi]
            yield [cudnn.__version__, phase, *where, shapes(phase, c), multiple, " ".join(takes)]


def write(cudnn: Any, engines: dict[str, Any]) -> None:
    """Put this release's rows in place of those that the table has of it."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    head = [line for line in lines if line.startswith("#")]
    columns, *others = csv.reader(line for line in lines if not line.startswith("#"))
    kept = [row for row in others if row[0] != cudnn.__version__]
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        file.write("".join(f"{line}\n" for line in head))
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([columns, *sorted([*kept, *rows(cudnn, engines)], key=lambda row: str(row[0]))])


# ---- questions ----------------------------------------------------------------------------------------


def theirs(cudnn: Any, analyzer: Any, engines: dict[str, Any], p: AttentionParams, arch: int) -> set[str]:
    """The engines that are candidates for a call there; of a call that trains, none if one side has none."""
    analyzer._device_cc = lambda: (arch // 10, arch % 10)
    analyzer._device_sm_count = lambda: 148
    call = planned(p)
    found: set[str] = set()
    for phase, graph in [("fwd", forward(call)), *([("bwd", backward(call))] if p.is_training else [])]:
        made = declare(graph, cudnn)
        import_module("cudnn._sdpa_validate").validate_graph(made)
        facts, module = analyzer.analyze(made), engines[phase]
        taking = {s.name for s in module.ENGINE_SPECS if module.mismatch(s.capabilities, facts) is None}
        if not taking:
            return set()
        found |= taking
    return found


def random_call(draw: random.Random) -> AttentionParams | None:
    layout = draw.choice(
        ["bshd_bshd_bshd"] * 4 + ["sbhd_sbhd_sbhd", "bhsd_bhsd_bhsd", "thd_thd_thd", "bs3hd"]
    )
    masks = ["padding", "padding_causal", "padding_causal_bottom_right"]
    if not layout.startswith("t"):
        masks += ["no_mask", "causal", "causal_bottom_right"] * 2
    rare = lambda value, usual: value if draw.random() < 0.12 else usual  # noqa: E731
    widths = [16, 32, 64, 96, 100, 128, 192, 256, 320, 512, 576]
    d, heads, rows = draw.choice(widths), draw.choice([8, 16]), draw.choice([1, 100, 128, 1000, 1024])
    fields: dict[str, Any] = {
        "qkv_layout": layout,
        "dtype": rare("fp32", draw.choice(["bf16", "fp16"])),
        "head_dim_qk": d,
        "head_dim_v": draw.choice([d, d, d, draw.choice(widths)]),
        "num_heads": heads,
        "num_gqa_groups": rare(2, heads),
        "max_seqlen_q": rows,
        "max_seqlen_kv": draw.choice([rows, rows, 128, 1000, 2048]),
        "attn_mask_type": draw.choice(masks),
        "is_training": draw.random() < 0.5,
        "window_size": rare(draw.choice([(64, -1), (64, 0), (64, 16), (-1, 16)]), (-1, -1)),
        "softmax_type": rare(draw.choice(["learnable", "off-by-one"]), "vanilla"),
        "deterministic": rare(True, False),
        "attention_dropout": rare(0.1, 0.0),
        "core_attention_bias_type": rare(draw.choice(["alibi", "post_scale_bias"]), "no_bias"),
        "return_max_logit": rare(True, False),
    }
    try:
        return AttentionParams(**fields)
    except InvalidInput:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parsed = parser.parse_args()
    cudnn, analyzer, engines = load(parsed.folder)
    if parsed.write:
        write(cudnn, engines)
    draw, seen, wrong = random.Random(parsed.seed), Counter[str](), list[str]()
    while sum(seen.values()) < parsed.count:
        p, arch = random_call(draw), draw.choice(ARCHS)
        if p is None:
            continue
        env = Environment.describe("H100", cudnn_frontend=cudnn.__version__)
        env = env.replace(device=env.device.replace(arch=arch))
        ours = {engine.engine for engine in open_engines(p, env)}
        try:
            taken = theirs(cudnn, analyzer, engines, p, arch)
        except Exception as error:  # its own refusals are of many kinds
            seen[f"no graph ({type(error).__name__})"] += 1
            taken = set()
        else:
            seen["taken by both" if ours and taken else "by them" if taken else "by nobody"] += 1
        if not ours <= taken:
            wrong.append(f"sm{arch}: {sorted(ours - taken)} take {p.model_dump(exclude_unset=True)}")
    print(f"cudnn-frontend {cudnn.__version__}: {dict(seen)}; {len(wrong)} that it refuses and we claim")
    print("\n".join(wrong[:20]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
