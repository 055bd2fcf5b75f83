"""The page of FlashAttention's checks, and what reads them out of the source."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cpp_checks import Check, checks
from flash_attention_table import API_THREE, API_TWO, PAGE, STABLE, replaced, table

SOURCE = os.environ.get("ATTNSEL_FLASH_ATTENTION_SOURCE")

TEXT = """\
namespace FLASH_NAMESPACE {
#define CHECK_SHAPE(x, ...) TORCH_CHECK(x.sizes() == 1, \\
    "must be")
void mha_fwd(at::Tensor &q,  // TORCH_CHECK(not this)
             const float p_dropout) {
    TORCH_CHECK(p_dropout < 1.f, "a message, with ) and (");
    CHECK_DEVICE(q); CHECK_DEVICE(k);
    if (softcap > 0.f) { TORCH_CHECK(p_dropout == 0.f, "none"); }
#ifdef FLASHATTENTION_DISABLE_LOCAL
    TORCH_CHECK(false, "of another build");
#endif
    if (paged_KV) {
        if (k_.has_value())
            CHECK_SHAPE(k, num_blocks, page_block_size);
    } else {
        CHECK_CONTIGUOUS(k);
    }
    auto round = [](int x) { return x; };
    TORCH_CHECK(k.dtype() == q_dtype, "same");
}
}
"""


def test_each_check_has_its_line_function_and_conditions():
    assert [*checks(TEXT)] == [
        Check(6, "mha_fwd", "TORCH_CHECK", ("p_dropout < 1.f", '"a message, with ) and ("'), ()),
        Check(7, "mha_fwd", "CHECK_DEVICE", ("q",), ()),
        Check(7, "mha_fwd", "CHECK_DEVICE", ("k",), ()),
        Check(8, "mha_fwd", "TORCH_CHECK", ("p_dropout == 0.f", '"none"'), ("softcap > 0.f",)),
        Check(
            14,
            "mha_fwd",
            "CHECK_SHAPE",
            ("k", "num_blocks", "page_block_size"),
            ("paged_KV", "k_.has_value()"),
        ),
        Check(16, "mha_fwd", "CHECK_CONTIGUOUS", ("k",), ("!(paged_KV)",)),
        Check(19, "mha_fwd", "TORCH_CHECK", ("k.dtype() == q_dtype", '"same"'), ()),
    ]


def test_a_row_for_each_in_our_words():
    text = table(
        {
            "1": TEXT.replace("} else {\n        CHECK_CONTIGUOUS(k);\n", ""),
            "2": "\n" + TEXT.split("#ifdef")[0],
        }
    )
    assert text.splitlines() == [
        "",
        "### mha_fwd",
        "",
        "| must hold | where | 1 | 2 |",
        "|---|---|---|---|",
        "| dropout below 1 |  | 6 | 7 |",
        "| q, k on the GPU |  | 7 | 8 |",
        "| no dropout | softcap | 8 | 9 |",
        "| k is [pages, page size] | paged, k given | 14 | - |",
        "| k is of q's dtype |  | 17 | - |",
    ]


def test_a_condition_that_nobody_translated_is_not_copied():
    with pytest.raises(KeyError, match="something_new"):
        table({"1": "void mha_fwd(int x) { TORCH_CHECK(something_new(x), 1); }"})


def test_only_what_lies_between_the_marks_is_written():
    page = "a\n<!-- t -->\nold\n<!-- end of t -->\nb\n"
    assert replaced(page, "t", "new") == "a\n<!-- t -->\nnew\n<!-- end of t -->\nb\n"
    with pytest.raises(ValueError, match="no marks"):
        replaced(page, "u", "new")


def _column(section: str, version: str) -> set[int]:
    """The lines that the page has of a release."""
    page = PAGE.read_text(encoding="utf-8")
    text = page.partition(f"<!-- checks of {section} -->")[2].partition("<!-- end")[0]
    lines: set[int] = set()
    for row in text.splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if cells[0] == "must hold":
            at = cells.index(version)
        elif row.startswith("|") and cells[0] != "---":
            for number in re.findall(r"(\d+)(?:-(\d+))?", cells[at]):
                lines |= {*range(int(number[0]), int(number[1] or number[0]) + 1)}
    return lines


@pytest.mark.skipif(
    SOURCE is None, reason="ATTNSEL_FLASH_ATTENTION_SOURCE names no checkout of flash-attention"
)
@pytest.mark.parametrize(
    ("section", "api", "about"),
    [
        ("FlashAttention 2", API_TWO, "flash_attn/__init__.py"),
        ("FlashAttention 3", API_THREE, "hopper/__init__.py"),
        ("FlashAttention 3", STABLE, "hopper/__init__.py"),
    ],
)
def test_the_page_has_every_check_of_the_checkout(section, api, about):
    assert SOURCE is not None
    folder = Path(SOURCE).expanduser()
    if not (folder / api).is_file():
        pytest.skip(f"{folder} has no {api}")
    version = re.findall(r'__version__ = "(.*)"', (folder / about).read_text())[0].replace("0.b1", "0b1")
    # Another hopper/ of that name lies in older releases.
    if version == "3.0.0b1" and '"2.8.3"' not in (folder / "flash_attn/__init__.py").read_text():
        pytest.skip(f"the page is not about this {version}")
    header = f"{version} stable" if api == STABLE else version
    if f"| {header} |" not in PAGE.read_text(encoding="utf-8"):
        pytest.skip(f"the page is not about {section} {version}")
    found = {check.line for check in checks((folder / api).read_text()) if check.function}
    assert _column(section, header) == found
