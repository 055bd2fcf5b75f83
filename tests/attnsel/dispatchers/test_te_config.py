"""What TransformerEngine prints of a selection, as attnsel's question."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnsel import AttentionParams, Environment
from attnsel.dispatchers.te.config import configs
from records import Record
from tables import each

# One line as release 2.14 prints it (NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2), folded as a terminal does.
LINE = Path(__file__).with_name("te_line.txt").read_text(encoding="utf-8")
PLAIN = "{'qkv_dtype': torch.float16, 'qkv_layout': 'bshd_bshd_bshd', 'num_heads': 4, %s}"


def test_each_line_of_a_log_is_a_question_and_a_machine():
    other = LINE.replace("'num_heads': 8", "'num_heads': 16").replace("'not\n installed'", "None")
    found, second = configs(f"before {{'head_dim': 64}}\n{LINE}noise {{'a': 1}} {{\n{other}")
    assert second.params["num_heads"] == 16
    assert AttentionParams(**found.params) == AttentionParams(
        qkv_layout="thd_thd_thd",
        batch_size=4,
        num_heads=8,
        num_gqa_groups=2,
        max_seqlen_q=5743,
        head_dim_qk=256,
        attn_mask_type="padding_causal",
        window_size=(1023, 0),
    )
    assert found.gpu == "sm90"
    versions = {name: version for name, version in found.versions.items() if name != "transformer_engine"}
    assert versions == {"flash_attn": "2.7.4", "flash_attn_3": None, "cudnn": "9.20.0"}
    assert second.versions == found.versions
    Environment.describe(found.gpu, **found.versions)
    assert found.unread == ()


def read(printed: str) -> Iterator[str]:
    (found,) = configs(PLAIN % printed.replace("\\n", "\n"))
    yield str(found.params)
    p = AttentionParams(**found.params)
    recipe: Any = p.recipe
    if recipe is not None:
        yield f"recipe {recipe.kind}, {recipe.fp8_format}; attention in FP8: {p.fp8_attention}"
    yield f"on {found.gpu} with {found.versions}; not read: {found.unread}"


def test_what_is_printed_is_read_as_it_is_written_down(record: Record) -> None:
    record.answers(Path(__file__).with_name("te_config.txt"), read)


def test_nothing_is_evaluated(tmp_path):
    file = tmp_path / "made"
    code = f"__import__('pathlib').Path({str(file)!r}).touch()"
    (found,) = configs(PLAIN % f"'batch_size': {code}, 'head_dim_qk': 1 if {code} else 2")
    assert not file.exists()
    assert found.params["batch_size"] == code


@each(
    "text",
    [
        "{'qkv_dtype':" * 20_000,
        "{'qkv_dtype': " + "'\\" * 100_000,
        "{'qkv_dtype': " + "[" * 200_000,
        "{'qkv_dtype': " + "{'a': " * 10_000 + "}" * 10_001,
        "{'qkv_dtype'" + " " * 200_000,
        "{" * 200_000,
        "{'qkv_dtype': " + "-" * 20_000 + "1}",
    ],
)
def test_no_text_takes_long(text):
    """A reader that goes over the rest for every brace would not come to an end."""
    list(configs(text))
