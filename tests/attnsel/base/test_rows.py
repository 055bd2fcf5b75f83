"""Facts as rows: every file has its columns, and every row of it a source and a day."""

from __future__ import annotations

import datetime
import re
from typing import get_args

from attnsel.base.rows import read_rows
from attnsel.diagnose.watching.record import Api
from paths import ROOT
from tables import each

NUMBER, VERSION, SENTENCE = r"\d+(\.\d+)?", r"\d+(\.\w+)*", r"\S+( \S+)*"
SCHEMAS = {
    "attnsel.environment gpus": {
        "name": SENTENCE,
        "kind": "data center|workstation|GeForce|Jetson|mining",
        "arch": r"\d{2,3}",
        "memory_gb": r"(\d+)?",
        "sms": r"(\d+)?",
        "familiar": "(yes)?",
        "also": r"([a-z0-9]+( [a-z0-9]+)*)?",
        "vgpu": r"([a-z0-9]+)?",
    },
    "attnsel.environment gpu_figures": {
        "gpu": SENTENCE,
        "tflops": NUMBER,
        "memory": NUMBER,
        "link": NUMBER,
        "link_name": r"NVLink \d|PCIe \d\.0 x16",
        "network": rf"({NUMBER})?",
    },
    "attnsel.environment torch_builds": {
        "torch": VERSION,
        "cuda": VERSION,
        "pypi": "(yes)?",
        "cudnn": VERSION,
        "nccl": VERSION,
        "triton": VERSION,
        "code": r"\d+( \d+)*\+?",
        "pythons": r"3\.\d+-3\.\d+",
    },
    "attnsel.environment te_frontends": {"transformer_engine": VERSION, "frontend": VERSION},
    "attnsel.environment flash_attn_wheels": {
        "release": VERSION,
        "cuda": r"cu\d+",
        "torch": r"\d\.\d+",
        "pythons": r"3\.\d+-3\.\d+",
        "old_abi": "(yes)?",
    },
    "attnsel.diagnose framework_fixes": {
        "topic": r"[a-z_]+( [a-z_]+)*",
        "api": "|".join(get_args(Api)),
        "text": SENTENCE,
        "code": r"(\S.*)?",
    },
    "attnsel.pages.can_i_use features": {
        "group": SENTENCE,
        "name": r"[a-z0-9]+(-[a-z0-9]+)*",
        "title": SENTENCE,
        "about": SENTENCE,
        "changes": r"(\w+=[^;]+(; \w+=[^;]+)*)?",
        "also": r"(\S+( \S+)*)?",
        "mode": "(training|inference)?",
        "memory_limit": r"(\d+GiB)?",
    },
    "attnsel.environment pypi": {"package": r"[a-z0-9-]+", "version": VERSION},
}
OURS = {"features"}  # questions, not facts
KEYS = {
    "gpus": ("name",),
    "gpu_figures": ("gpu",),
    "torch_builds": ("torch", "cuda"),
    "te_frontends": ("transformer_engine",),
    "flash_attn_wheels": ("release", "cuda", "torch"),
    "pypi": ("package", "version"),
    "features": ("name",),
    "framework_fixes": ("topic", "api"),
}


def test_every_file_has_a_schema():
    files = [path for folder in ("attnsel", "rules", "backends") for path in ROOT.glob(f"{folder}/**/*.csv")]
    named = {f"{'.'.join(path.parent.parent.relative_to(ROOT).parts)} {path.stem}" for path in files}
    assert named == set(SCHEMAS)


@each("file", list(SCHEMAS))
def test_rows_have_the_columns_of_their_schema_a_source_and_a_day(file):
    package, name = file.split()
    rows = read_rows(package, name)
    for row in rows:
        sourced = ["source", "read"] if name not in OURS else []
        assert list(row) == [*SCHEMAS[file], *sourced], row
        unlike = [column for column, form in SCHEMAS[file].items() if not re.fullmatch(form, row[column])]
        assert not unlike, row
        assert not sourced or (row["source"] and datetime.date.fromisoformat(row["read"])), row
    keys = [tuple(row[column] for column in KEYS[name]) for row in rows]
    assert len(set(keys)) == len(keys)
