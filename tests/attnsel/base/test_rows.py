"""Facts as rows: every cell has its column's form, every row its own key, a source and a day."""

from __future__ import annotations

import datetime
import re
from typing import get_args

from attnsel.base.rows import read_rows
from attnsel.diagnose.logs.message import Kind, More
from paths import ROOT
from tables import each

# Held by tests/rules/test_figures.py.
ELSEWHERE = {"figures", "figure_sources", "orders", "against", "resting", "slow_paths"}
FOUND = sorted(path for room in ("attnsel", "rules", "backends") for path in ROOT.glob(f"{room}/**/*.csv"))
FILES = [path for path in FOUND if path.stem not in ELSEWHERE]
# Of us, or what we asked ourselves: these have no source.
OURS = {"features", "asked", "meant", "tiles", "ranges", "removed", "said", "shapes", "sentences"} | {
    *("open_engines", "gpu_spellings", "libraries", "machine", "texts", "mentions", "findings", "questions"),
    *("copy_advice", "topics"),
}
# Columns.
LOGS = {path.stem: 4 for path in FILES if path.parent.parent.name == "logs"} | {  # part, what it does, texts
    **{"libraries": 3, "texts": 2},
}
KEY = LOGS | {
    **dict.fromkeys(("torch_builds", "pypi", "framework_fixes", "features", "meant", "ranges", "said"), 2),
    **dict.fromkeys(
        ("lines", "secrets", "gpu_spellings", "mentions", "questions", "inputs", "copy_advice"), 2
    ),
    **{
        "flash_attn_wheels": 3,
        "names": 3,
        "open_engines": 3,
        "tiles": 5,
        "refusals": 5,
        "filters": 6,
        "checks": 9,
    },
}
FORMS = {
    r"\d+(\.\w+)*": "torch cudnn nccl triton release version transformer_engine frontend tflops memory link",
    r"(\d+(\.\d+)?)?": "sms network",
    r"(\d+( \d+)*)?\+?|shared": "memory_gb",  # each with which it was sold
    r"(cu)?\d+(\.\d+)?": "cuda",
    r"3\.\d+-3\.\d+": "pythons",
    r"\d+( \d+)*\+?|\D.*|": "code",  # architectures; of a fix, lines of Python
    "data center|workstation|GeForce|Jetson|mining|family|"
    "Instinct|Radeon( PRO)?|Ryzen|Arc|Core|Apple|": "kind",
    "(yes)?": "familiar pypi old_abi always_right ahead",
    r"(yes|\d+)?": "near",
    "(training|inference)?": "mode",
    "|".join((*get_args(Kind), "or")): "does",
    r"(\w+=[^;]+(; \w+=[^;]+)*)?": "changes params environment supposed usual when",
    "|".join(get_args(More)): "more",
    r"(\S+( \S+)*)?": "also vgpu memory_limit on remark pattern known fix codes candidates reader issue "
    "replaced_by write why values others opt_in example packages newest released gfx "
    "text looked_for dispatcher ask stack parts defaults says without package conditions since until "
    "told switch unread thread where own before effect name",
    ".*": "quick instead",  # it stands so in a log or a name, spaces and all
    r"\d.+ \((refused|accepted|no engine|segmentation fault|CUDNN_\w+)\)": "answers",
}
FORM = {column: form for form, columns in FORMS.items() for column in columns.split()}


@each("path", FILES)
def test_rows_are_whole_and_no_two_are_about_the_same(path):
    package = ".".join(path.parent.parent.relative_to(ROOT).parts)
    rows = read_rows(f"attnsel.{package.removeprefix('attnsel.')}", path.stem)
    for row in rows:
        unlike = [c for c, cell in row.items() if not re.fullmatch(FORM.get(c, r"\S+( +\S+)*"), cell)]
        assert not unlike, row
        assert path.stem in OURS or (row["source"] and datetime.date.fromisoformat(row["read"])), row
    keys, key = set(), ()
    for row in rows:
        if row.get("does") != "or":  # a meaning of the message above it
            key = tuple(row.values())[: KEY.get(path.stem, 1)]
        keys.add((*key, row.get("when")))
    assert len(keys) == len(rows) > 0
