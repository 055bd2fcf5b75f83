"""docs/how-to/add-a-cudnn-rule.md shows what the library and the tree say; asked where the library is."""

from __future__ import annotations

import re

import pages
from attnsel import AttentionParams, Environment
from attnsel.cli.explain_more import by_rules
from paths import ROOT

BLOCKS = pages.blocks("docs/how-to/add-a-cudnn-rule.md")
SHOWN = next(block.text for block in BLOCKS if block.text.startswith("cuDNN 9.28.0, cudnn-frontend"))


def test_rule_and_table_on_the_page_are_those_of_the_tree():
    (block,) = (block for block in BLOCKS if block.language == "python")
    assert block.text in (ROOT / block.skipped.removeprefix("it stands in ")).read_text(encoding="utf-8")
    versions = dict(zip(("cudnn", "cudnn_frontend"), re.findall(r"\d+\.\d+\.\d+", SHOWN), strict=False))
    lines = SHOWN.splitlines()
    archs = re.findall(r"sm\d+", lines[2])
    for value, *cells in (re.split(r" {2,}", line.strip()) for line in lines[3:9]):
        for arch, cell in zip(archs, cells, strict=True):
            p = AttentionParams(is_training=True, head_dim_qk=int(value))
            codes = by_rules(p, Environment.describe(arch, **versions)).codes
            assert codes[:1] == ({"✔": (), "? no rule": ("CUDNN235",)}.get(cell) or tuple(cell.split()[1:]))
