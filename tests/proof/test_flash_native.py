"""FlashAttention's file of checks, compiled without CUDA: on small sources of ours, and on a checkout.

ATTNSEL_FLASH_ATTENTION_SOURCE=~/flash-attention pytest tests/proof/test_flash_native.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_flash_attention
from attnsel.base.processes import python
from flash_attention_ask import native
from flash_attention_ask.native import NoLibrary, build, find_source, kernel_bodies
from flash_attention_ask.package_cpp import _custom_op

_NAMED = os.environ.get("ATTNSEL_FLASH_ATTENTION_SOURCE")
needs_source = pytest.mark.skipif(
    _NAMED is None, reason="ATTNSEL_FLASH_ATTENTION_SOURCE names no checkout of flash-attention"
)

_TOOLS = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"  # a child sees attnsel alone
# Asks lines of JSON: an expression in the package's functions, with ``t`` for a tensor of device meta.
ASK = """
import json, sys, torch
from pathlib import Path
from flash_attention_ask.package_cpp import install

def t(*shape, dtype=torch.float16, grad=False, device="meta"):
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=grad)

def both(out):
    out = out[0] if isinstance(out, tuple) else out
    out.backward(torch.empty_like(out))

def wrapped(call):
    try:
        call()
    except AssertionError as error:
        raise RuntimeError("in other words") from error

folder, generation, questions = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
package = install(folder, generation, 80, 108)
names = {**vars(package.interface), "t": t, "both": both, "wrapped": wrapped, "torch": torch}
for arch, sm_count, question in questions:
    package.describe(arch, sm_count)
    said = package.ask(lambda: eval(question, names))
    failed = [failure.words for failure in package.failures(said.launches)]
    print(json.dumps({**said._asdict(), "failures": failed}))
"""


def ask(folder: Path, generation: int, *questions: tuple[int, int, str]) -> list[dict[str, Any]]:
    """What the package in ``folder`` says to each (architecture, SMs, expression), in its own process."""
    command = python(_TOOLS + ASK, str(folder), str(generation), json.dumps(questions))
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="module")
def answers(tmp_path_factory, own_cache):
    folder = tiny_flash_attention.write_three(tmp_path_factory.mktemp("three"))
    questions = (
        (90, 132, "flash_attn_func(t(2, 1000000, 8, 64), True)"),
        (86, 84, "flash_attn_func(t(2, 16, 8, 64))"),
        (75, 40, "flash_attn_func(t(2, 16, 8, 64))"),
        (90, 114, "flash_attn_func(t(2, 16, 8, 64))"),
        (90, 114, "flash_attn_func(t(2, 16, 8))"),
        (90, 114, "flash_attn_func(t(2, 16, 8, 64, device='cpu'))"),
        (90, 114, "wrapped(lambda: flash_attn_func(t(2, 16, 8)))"),
    )
    return folder, ask(folder, 3, *questions)


class TestStable:
    """A file against torch's stable ABI, as FlashAttention 3 builds from torch 2.9 on."""

    def test_a_kernel_and_what_was_handed_to_it_are_noted(self, answers):
        prepare, forward = answers[1][0]["launches"]
        assert (prepare["kernel"], prepare["packgqa"], prepare["blockM"]) == (
            "prepare_varlen_num_blocks",
            True,
            128,
        )
        assert forward == {
            "kernel": "run_mha_fwd_", "Arch": 90, "T": "bfloat16", "kHeadDim": 64, "Split": False, "b": 2,
            "h": 8, "seqlen_q": 1_000_000, "seqlen_k": 1_000_000, "d": 64, "dv": 0, "num_splits": 132,
        }  # fmt: skip

    def test_the_device_is_the_one_described_for_this_question(self, answers):
        told = answers[1]
        assert [told[1]["launches"][0][name] for name in ("Arch", "T", "num_splits")] == [80, "float16", 84]
        assert told[3]["launches"][0]["num_splits"] == 114

    def test_a_failed_check_comes_with_its_line(self, answers):
        folder, told = answers
        file = folder / "hopper/flash_api_stable.cpp"
        lines = file.read_text().splitlines()
        line = next(n for n, text in enumerate(lines, 1) if "too old" in text)
        assert told[2]["supported"] is False
        assert told[2]["where"] == f"{file}:{line}"
        assert "too old" in told[2]["words"]
        assert told[2]["launches"] == []

    def test_a_check_in_python_comes_with_its_line(self, answers):
        folder, told = answers
        assert told[4]["supported"] is False
        assert told[4]["words"].startswith("AssertionError")
        assert told[4]["where"] == f"{folder / 'hopper/flash_attn_interface.py'}:6"
        assert (told[6]["supported"], told[6]["where"]) == (False, told[4]["where"])
        assert "in other words" in told[6]["words"]

    def test_a_tensor_of_the_cpu_is_not_on_the_gpu(self, answers):
        assert answers[1][5]["supported"] is not True


@pytest.mark.slow  # torch's C++ headers take 20 seconds to compile
def test_a_file_of_the_other_abi(tmp_path, own_cache):
    folder = tiny_flash_attention.write_two(tmp_path)
    table = "block_table=t(2, 4, dtype=torch.int32)"
    plain, dropout, old, paged, one, called = ask(
        folder,
        2,
        (89, 58, "flash_attn_func(t(2, 16, 8, 60))"),
        (89, 58, "flash_attn_func(t(2, 16, 8, 64, dtype=torch.bfloat16), dropout_p=0.25)"),
        (75, 40, "flash_attn_func(t(2, 16, 8, 64))"),
        (90, 132, f"flash_attn_func(t(2, 16, 8, 64), {table})"),
        (90, 132, f"flash_attn_func(t(1, 16, 8, 64), {table})"),
        (90, 132, "1 / (capability() != (9, 0))"),
    )
    assert plain["supported"]
    assert plain["launches"][0] == {
        "kernel": "run_mha_fwd_", "T": "float16", "Headdim": 64, "b": 2, "h": 8, "seqlen_q": 16,
        "seqlen_k": 16, "d": 64, "num_splits": 58, "p_dropout": 1.0,
    }  # fmt: skip
    assert (dropout["launches"][0]["T"], dropout["launches"][0]["p_dropout"]) == ("bfloat16", 0.75)
    assert old["words"] == "RuntimeError: too old"
    assert old["where"].startswith(f"{folder / 'csrc/flash_attn/flash_api.cpp'}:")
    assert paged["supported"]
    assert "a table for one sequence" in one["words"], "a tensor of device meta has an address"
    assert called["words"].startswith("ZeroDivisionError")


class TestSource:
    def test_the_file_that_setup_py_would_build(self, tmp_path, monkeypatch):
        folder = tiny_flash_attention.write_three(tmp_path)
        assert find_source(folder, 3).api.name == "flash_api_stable.cpp"
        assert find_source(folder / "hopper", 3) == find_source(folder, 3)
        monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
        assert find_source(folder, 3).api.name == "flash_api.cpp"

    def test_its_version_is_what_it_says(self, tmp_path):
        assert find_source(tiny_flash_attention.write_two(tmp_path), 2).version == "2.0.0"

    @pytest.mark.parametrize("lost", ["flash_attn/__init__.py", "csrc/flash_attn/flash_api.cpp"])
    def test_what_is_missing_is_named(self, tmp_path, lost):
        folder = tiny_flash_attention.write_two(tmp_path)
        (folder / lost).unlink()
        with pytest.raises(NoLibrary, match=f"no FlashAttention 2 source.*{Path(lost).name} is missing"):
            find_source(folder, 2)

    def test_an_older_hopper_is_not_taken_for_it(self, tmp_path):
        folder = tiny_flash_attention.write_three(tmp_path)
        (folder / "hopper/flash_attn_interface.py").write_text("import flash_attn_3_cuda\n")
        with pytest.raises(NoLibrary, match="before FlashAttention 3 was the package flash_attn_3"):
            find_source(folder, 3)

    def test_a_file_that_does_not_compile_says_why(self, tmp_path):
        folder = tiny_flash_attention.write_three(tmp_path / "source")
        (folder / "hopper/flash_api_stable.cpp").write_text("#error of another toolkit\n")
        with pytest.raises(NoLibrary, match=r"cannot compile .*stable\.cpp 3\.0\.0: .*another toolkit"):
            build(find_source(folder, 3), tmp_path / "cache")

    def test_compiled_once_for_the_same_files(self, tmp_path, monkeypatch):
        folder = tiny_flash_attention.write_three(tmp_path / "source")
        compiled: list[str] = []

        def record(source, compiler, scratch, name):
            compiled.append(name)
            (scratch / name).write_bytes(b"")
            return scratch / name

        monkeypatch.setattr(native, "_compile", record)
        first = build(find_source(folder, 3), tmp_path / "cache")
        assert build(find_source(folder, 3), tmp_path / "cache") == first
        assert compiled == ["_C.so"]
        header = folder / "hopper/flash.h"
        header.write_text(header.read_text() + "// changed\n")
        assert build(find_source(folder, 3), tmp_path / "cache") != first
        assert compiled == ["_C.so"] * 2


class TestBodies:
    def test_every_declaration_gets_one(self):
        text = kernel_bodies(tiny_flash_attention._FLASH_H_THREE)
        assert "template <int Arch, typename T, int kHeadDim, bool Split>\nvoid run_mha_fwd_(" in text
        assert 'launch.type<T>("T");' in text
        assert 'launch.number("blockM", blockM);' in text
        assert "namespace" not in text

    def test_in_the_namespace_of_the_header(self):
        text = kernel_bodies("namespace FLASH_NAMESPACE {\nvoid run_mha_fwd_(P &params, cudaStream_t s);\n}")
        assert text.startswith("namespace FLASH_NAMESPACE {\nvoid run_mha_fwd_(")

    def test_a_header_without_any_is_refused(self):
        with pytest.raises(NoLibrary, match="declares no kernel launcher"):
            kernel_bodies("struct Flash_fwd_params {};")


def test_an_operator_runs_its_function_on_meta_and_differentiates():
    """torch's own would run the fake. Its schema still refuses a wrong type."""
    ran = []

    @_custom_op("flash_attn::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor, factor: float) -> torch.Tensor:
        ran.append(x.device.type)
        return x * factor

    twice.register_autograd(lambda ctx, grad: (grad * ctx.factor, None), setup_context=_keep_factor)
    x = torch.ones(3, requires_grad=True)
    torch.ops.flash_attn.twice(x, 2.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    twice(torch.empty(3, device="meta"), 2.0)
    assert ran == ["cpu", "meta"]
    with pytest.raises(RuntimeError, match="factor"):
        twice(torch.empty(3, device="meta"), "two")


def _keep_factor(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.factor = inputs[1]


@pytest.fixture(scope="module")
def told():
    q, g = "t(2, 128, 8, {0})", "t(2, 128, 8, {0}, grad=True)"
    plain, wide = ", ".join([q.format(64)] * 3), ", ".join([q.format(264)] * 3)
    cu, packed = "t(3, dtype=torch.int32)", ", ".join(["t(256, 8, 64, grad=True)"] * 3)
    huge = "t(64, 1000000, 64, 128), t(64, 1000000, 64, 128), t(64, 1000000, 64, 128)"
    questions = {
        "turing": (75, 40, f"flash_attn_func({plain})"),
        "plain": (80, 108, f"flash_attn_func({plain})"),
        "wide": (80, 108, f"flash_attn_func({wide})"),
        "odd": (80, 108, f"both(flash_attn_func({', '.join([g.format(60)] * 3)}, causal=True))"),
        "float32": (80, 108, "flash_attn_func(*[t(2, 128, 8, 64, dtype=torch.float32)] * 3)"),
        "packed": (89, 58, f"both(flash_attn_varlen_func({packed}, {cu}, {cu}, 200, 200))"),
        "lost": (89, 58, f"both(flash_attn_func({', '.join([g.format(256)] * 3)}, dropout_p=0.1))"),
        "huge": (90, 132, f"flash_attn_func({huge})"),
        "cache": (
            90,
            132,
            "flash_attn_with_kvcache(t(2, 1, 8, 64), *[t(2, 4096, 2, 64)] * 2, cache_seqlens=7)",
        ),
        "pages": (
            90,
            132,
            "flash_attn_with_kvcache(t(2, 1, 8, 64), *[t(9, 16, 2, 64)] * 2, "
            "cache_seqlens=t(2, dtype=torch.int32), block_table=t(2, 4, dtype=torch.int32))",
        ),
    }
    assert _NAMED is not None
    answers = ask(Path(_NAMED).expanduser(), 2, *questions.values())
    return dict(zip(questions, answers, strict=True))


@needs_source
class TestTwo:
    """A checkout of FlashAttention 2."""

    @pytest.mark.parametrize(
        ("question", "words"),
        [
            ("turing", "Ampere GPUs or newer"),
            ("wide", "at most 256"),
            ("float32", "fp16 and bf16"),
            ("pages", "divisible by 256"),
        ],
    )
    def test_a_refusal_is_its_own_and_leads_to_the_line(self, told, question, words):
        answer = told[question]
        assert answer["supported"] is False
        assert words in answer["words"]
        file, _, line = answer["where"].rpartition(":")
        assert "TORCH_CHECK" in Path(file).read_text().splitlines()[int(line) - 1]

    def test_a_plain_call_picks_the_forward_of_its_head_dim(self, told):
        [launch] = told["plain"]["launches"]
        assert (launch["kernel"], launch["Headdim"], launch["T"]) == ("run_mha_fwd_", 64, "float16")

    def test_forward_and_backward(self, told):
        for question in ("odd", "packed"):
            kernels = [launch["kernel"] for launch in told[question]["launches"]]
            assert kernels == ["run_mha_fwd_", "run_mha_bwd_"]
        assert all(launch["is_causal"] for launch in told["odd"]["launches"])

    def test_shapes_cost_no_memory(self, told):
        assert told["huge"]["supported"]

    def test_a_backward_that_launches_nothing(self, told):
        """Refused by its checks up to 2.7.2, afterwards by nobody."""
        if told["lost"]["supported"]:
            [words] = told["lost"]["failures"]
            assert "no kernel is launched" in words
        else:
            assert "requires A100/A800 or H100/H800" in told["lost"]["words"]

    def test_a_cache_of_long_rows_is_split(self, told):
        [launch] = told["cache"]["launches"]
        assert launch["kernel"] == "run_mha_fwd_splitkv_dispatch"
        assert launch["num_splits"] > 1


@needs_source
def test_three_differs_where_the_gpu_does():
    """A checkout that has hopper/."""
    assert _NAMED is not None
    folder = Path(_NAMED).expanduser()
    try:
        find_source(folder, 3)
    except NoLibrary as error:
        pytest.skip(str(error))
    other_v = "flash_attn_func(t(2, 128, 8, 192), t(2, 128, 8, 192), t(2, 128, 8, 128))"
    fp8 = "flash_attn_func(*[t(2, 128, 8, 128, dtype=torch.float8_e4m3fn)] * 3)"
    both = "both(flash_attn_func(*[t(2, 128, 8, 64, grad=True)] * 3))"
    hopper, ampere, fp8_hopper, fp8_ada, trained = ask(
        folder, 3, (90, 132, other_v), (80, 108, other_v), (90, 132, fp8), (89, 58, fp8), (86, 84, both)
    )
    assert [launch["kHeadDimV"] for launch in hopper["launches"]] == [128]
    assert "Only Hopper supports different V headdim" in ampere["words"]
    assert fp8_hopper["launches"][0]["T"] == "float8_e4m3fn"
    assert fp8_ada["supported"] is False
    assert [(launch["kernel"], launch["Arch"]) for launch in trained["launches"]] == [
        ("run_mha_fwd_", 86),
        ("run_mha_bwd_", 86),
    ]
