"""Asking FlashAttention's packages: a release that is described here, dies, hangs, is broken; and a real one.

The real wheel is asked where ATTNSEL_FLASH_ATTN_4_SOURCE names a folder that it was unpacked to.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

import fake_flash_attn_4 as fake
from attnsel import AttentionParams
from attnsel.environment.versions import Version
from flash_attention_ask.client import Package
from flash_attention_ask.sample import questions
from flash_attention_ask.source import Missing, find_source

SOURCE = os.environ.get("ATTNSEL_FLASH_ATTN_4_SOURCE", "")
real_wheel = pytest.mark.skipif(
    not SOURCE, reason="ATTNSEL_FLASH_ATTN_4_SOURCE names no unpacked flash-attn-4"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fake.install(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def package(folder):
    with Package(find_source("flash_attn.4", str(folder)), standins=True, timeout=60) as made:
        yield made


# Answers.


def test_what_the_checks_let_pass_is_supported(package):
    answer = package.ask(fake.question(), 80, 108)
    assert (answer.supported, answer.stage, answer.words, answer.where) == (True, "done", "", "")


def test_an_assert_is_a_refusal_with_its_words_and_its_line(package):
    answer = package.ask(fake.question(), 75, 40)
    where = fake.line_of('    assert arch // 10 in [8, 9, 10], "Unsupported compute capability"')
    assert (answer.supported, answer.stage, answer.words) == (
        False,
        "forward",
        "Unsupported compute capability",
    )
    assert answer.where == f"interface.py:{where}"


def test_an_assert_without_words_is_told_by_its_line(package):
    answer = package.ask(fake.question(fake.WORDLESS), 80, 108)
    assert (answer.supported, answer.words) == (False, "assert h != 1004")


def test_the_kernels_constructor_is_asked_too(package):
    answer = package.ask(fake.question(fake.CONSTRUCTOR), 80, 108)
    assert (answer.supported, answer.words) == (False, "no tile for 1005 heads")
    assert answer.where.startswith("kernels.py:")


def test_can_implement_is_asked_though_the_package_does_not(package):
    assert package.ask(fake.question(head_dim_qk=160), 80, 108).supported
    answer = package.ask(fake.question(head_dim_qk=168), 80, 108)
    assert answer.supported is False
    assert answer.words.startswith("FlashAttentionForwardSm80.can_implement says no")
    assert answer.where.startswith("kernels.py:")


def test_training_asks_the_backward_too(package):
    answer = package.ask(fake.question(is_training=True, deterministic=True), 90, 132)
    assert (answer.supported, answer.stage) == (False, "backward")
    assert answer.words == "deterministic backward not supported"
    assert package.ask(fake.question(is_training=True), 90, 132).supported
    assert package.ask(fake.question(deterministic=True), 90, 132).supported


def test_attnsels_own_refusal_is_told_as_one(package):
    answer = package.ask(fake.question(core_attention_bias_type="alibi"), 90, 132)
    assert (answer.supported, answer.stage) == (False, "prepare")
    assert "alibi_slopes" in answer.words
    assert answer.where.startswith("kernel.py:")


def test_every_question_is_a_first_call(package):
    """A check that stands where a kernel is built is met again."""
    assert package.ask(fake.question(fake.FIRST_CALL), 80, 108).supported
    for _ in range(2):
        assert package.ask(fake.question(fake.FIRST_CALL, softcap=30.0), 80, 108).words == "not with softcap"


# What is nobody's answer.


def test_what_only_the_compiler_knows_is_no_answer(package):
    answer = package.ask(fake.question(fake.STAND_IN), 80, 108)
    assert answer.supported is None
    assert "stand-in" in answer.words


def test_a_value_that_is_read_is_no_answer(package):
    assert package.ask(fake.question(fake.NO_GPU), 80, 108).supported is None


def test_a_name_that_is_not_there_is_the_packages_own_fault(package):
    answer = package.ask(fake.question(fake.BUG), 80, 108)
    assert answer.supported is False
    assert answer.words.startswith("UnboundLocalError")


def test_a_death_is_an_answer_and_the_next_question_has_another_process(package):
    answer = package.ask(fake.question(fake.DIES), 80, 108)
    assert (answer.supported, answer.stage, answer.crashed) == (False, "crashed", True)
    assert "exit code 3" in answer.words
    assert package.ask(fake.question(), 80, 108).supported


def test_silence_is_no_answer(folder):
    with Package(find_source("flash_attn.4", str(folder)), standins=True, timeout=20) as package:
        assert package.ask(
            fake.question(), 80, 108
        ).supported  # it is up, and the clock is the question's own
        package._timeout = 0.5
        answer = package.ask(fake.question(fake.SILENT), 80, 108)
        assert (answer.supported, answer.stage) == (None, "timeout")
        package._timeout = 20
        assert package.ask(fake.question(), 80, 108).supported


def test_sizes_without_end_need_no_memory(package):
    large = fake.question(batch_size=4096, max_seqlen_q=1 << 20, num_heads=128, is_training=True)
    assert package.ask(large, 90, 132).supported


def test_every_kind_of_call_gets_through(package):
    """Strides, pages, packed rows, lengths and sinks: nothing of how a call is made fails here."""
    for p in questions(7, 80):
        answer = package.ask(p, 90, 132)
        ours = answer.stage == "prepare" and answer.supported is None
        assert not ours, (p, answer)


# Where a package is, and which.


def test_a_folder_says_its_release(folder, tmp_path):
    source = find_source("flash_attn.4", str(folder))
    assert (source.folder, source.version) == (folder.resolve(), Version.parse("4.0.0b36"))
    for name, text in (
        ("flash_attn/flash_attn_interface.py", ""),
        ("flash_attn/__init__.py", '__version__ = "2.8.3"\n'),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert find_source("flash_attn.2", str(tmp_path)).version == Version(2, 8, 3)


@pytest.mark.parametrize("backend", ["flash_attn.2", "flash_attn.3", "flash_attn.4"])
def test_a_folder_without_the_package_says_what_to_do(backend, tmp_path):
    with pytest.raises(Missing, match="--source wants") as missing:
        find_source(backend, str(tmp_path))
    assert "\n" not in str(missing.value)


def test_a_folder_of_no_release_says_so(tmp_path):
    fake.install(tmp_path)
    (tmp_path / "flash_attn_4-4.0.0b36.dist-info" / "METADATA").unlink()
    with pytest.raises(Missing, match="does not say which release"):
        find_source("flash_attn.4", str(tmp_path))


def test_a_package_that_does_not_import_is_missing(tmp_path):
    fake.install(tmp_path)
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("import nothing_of_this_name\n")
    package = Package(find_source("flash_attn.4", str(tmp_path)), timeout=60)
    with package, pytest.raises(Missing, match="nothing_of_this_name"):
        package.ask(fake.question(), 80, 108)


# Questions.


def test_questions_are_seeded_different_and_about_what_matters():
    drawn = list(questions(1, 600))
    assert drawn == list(questions(1, 600))
    assert drawn != list(questions(2, 600))
    assert len(set(drawn)) == 600
    seen = {
        "softcap": sum(p.softcap > 0 for p in drawn),
        "sinks": sum(p.softmax_type != "vanilla" for p in drawn),
        "paged": sum(p.kv_cache == "paged" for p in drawn),
        "two widths": sum(p.head_dim_qk != p.head_dim_v for p in drawn),
        "one query": sum(p.max_seqlen_q == 1 for p in drawn),
        "packed": sum(p.qkv_format == "thd" for p in drawn),
        "deterministic": sum(p.deterministic and p.is_training for p in drawn),
        "grouped": sum(p.gqa for p in drawn),
        "windowed": sum(p.windowed for p in drawn),
    }
    assert min(seen.values()) > 20, seen
    assert all(p.padding for p in drawn if p.kv_cache == "paged")


# The real wheel.


@pytest.fixture(scope="module")
def wheel():
    with Package(find_source("flash_attn.4", SOURCE), standins=True) as made:
        yield made


@real_wheel
@pytest.mark.parametrize(
    ("arch", "fields", "words"),
    [
        (75, {}, "Unsupported compute capability"),
        (80, {"is_training": True}, "Unsupported compute capability"),
        (90, {"head_dim_qk": 264}, "is not supported on SM90"),
        (100, {"head_dim_qk": 160}, "is not supported on SM100/SM110"),
        (90, {"dtype": "fp32"}, "inputs must be float16"),
        (
            120,
            {"is_training": True, "deterministic": True},
            "deterministic backward not supported on SM 12.0",
        ),
    ],
)
def test_the_real_package_refuses(wheel, arch, fields, words):
    answer = wheel.ask(fake.question(**fields), arch, 132)
    assert answer.supported is False
    assert words in answer.words
    assert answer.where.startswith("interface.py:")


@real_wheel
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 103])
def test_the_real_package_accepts(wheel, arch):
    assert wheel.ask(fake.question(num_gqa_groups=4), arch, 132).supported
    assert wheel.ask(AttentionParams(), arch, 132).supported is (arch >= 90)


@real_wheel
def test_every_answer_of_the_real_package_is_its_own(wheel):
    """Nothing is left to a stand-in: each refusal has words and a line of somebody's."""
    for arch in (80, 90, 100, 120):
        for p in questions(11, 60):
            answer = wheel.ask(p, arch, 132)
            assert answer.supported is not None, (arch, p, answer)
            assert answer.supported or (answer.words and answer.where), (arch, p, answer)


def test_the_folder_of_a_package_may_be_relative(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert find_source("flash_attn.4", Path(folder.name).as_posix()).folder == folder.resolve()
