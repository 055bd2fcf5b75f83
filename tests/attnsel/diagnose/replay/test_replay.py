"""A call that fell back, was refused or came out wrong: the file it leaves, the call again, the program."""

from __future__ import annotations

import ast
import io
import json
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnsel import NoBackendError, attention, clear_cache, override
from attnsel.backends.tiled import kernel as tiled
from attnsel.cli import main
from attnsel.debug import FallbackWarning
from attnsel.diagnose.replay.build import build, load_data
from attnsel.diagnose.replay.plain import exact_attention
from attnsel.runtime import kernels
from attnsel.runtime import leave_replay as leave
from attnsel.runtime.replay_file import read_file

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::attnsel.debug.FallbackWarning")

WORDS = "no plan \x1b[2J for this"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leave, "_left", set())
    monkeypatch.delenv("COLUMNS", raising=False)
    clear_cache()
    yield
    monkeypatch.undo()
    clear_cache()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put another kernel in the place of ``sdpa.flash``: one that refuses, or whose output is off."""

    def put(error: BaseException | None = None, times: float = 1.0) -> None:
        def forward(spec: Any, inputs: Any) -> Any:
            if error is not None:
                raise error
            result = tiled.forward(spec, inputs)
            return result._replace(out=result.out * times)

        monkeypatch.setitem(kernels.KERNELS, "sdpa.flash", kernels.Kernel(forward, tiled.backward))

    return put


@pytest.fixture
def again(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["replay", *map(str, words)])
        return (code, *capsys.readouterr())

    return call


def qkv(s: int = 12, h: int = 2, d: int = 8, **kind: Any) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, s, h, d, generator=gen, **kind) for _ in "qkv")


def left(folder: Path, *tensors: Tensor, data: bool = False, **call: Any) -> Path:
    """The file that a call leaves."""
    with override(replay_dir=str(folder), replay_data=data, selfcheck="all"):
        attention(*tensors, **call)
    (path,) = folder.glob("*.json")
    return path


# ---- what is left ------------------------------------------------------------------------------------


def test_nothing_is_left_without_a_folder(tmp_path: Path, broken: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    broken(RuntimeError(WORDS))
    attention(*qkv())
    assert not list(tmp_path.iterdir())


def test_a_refusal_leaves_the_call_and_what_took_over(tmp_path: Path, broken: Any) -> None:
    broken(RuntimeError(WORDS))
    path = left(tmp_path / "new", *qkv(), attn_mask_type="causal")
    assert "\x1b" not in path.read_text()
    file = read_file(path)
    happened = file.happened
    assert (happened.kind, happened.candidate, happened.then) == ("refused", "sdpa.flash", "sdpa.math")
    assert happened.message == r"no plan \x1b[2J for this"
    assert file.params.attn_mask_type == "causal"
    assert [t.shape for t in file.tensors] == [(2, 12, 2, 8)] * 3
    assert file.generator.initial_seed == torch.initial_seed()
    assert file.settings.replay_dir is None, "folders of the user's are not in it"
    assert not list(path.parent.glob("*.pt"))


def test_a_call_that_nothing_runs_leaves_the_codes(tmp_path: Path) -> None:
    with pytest.raises(NoBackendError), override(replay_dir=str(tmp_path)):
        attention(*qkv(), softcap=2.0, backend="sdpa.flash")
    (path,) = tmp_path.glob("*.json")
    file = read_file(path)
    assert (file.happened.kind, file.happened.candidate) == ("nothing runs", "sdpa.flash")
    assert "sdpa.flash: SDPA004" in file.happened.message


def test_one_file_for_a_question_and_kernel_and_a_bound_for_all(
    tmp_path: Path, broken: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(leave, "MOST_FILES", 3)
    broken(RuntimeError(WORDS))
    with override(replay_dir=str(tmp_path)):
        for s in (5, 5, 6, 7, 8, 9):
            clear_cache()
            attention(*qkv(s))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, broken: Any) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    broken(RuntimeError(WORDS))
    with warnings.catch_warnings(record=True) as caught, override(replay_dir=str(blocked / "sub")):
        warnings.simplefilter("always")
        out = attention(*qkv())
    assert out.shape == (2, 12, 2, 8)
    kinds = [w.category for w in caught if w.category is not FallbackWarning]
    assert kinds == [leave.ReplayFileWarning]
    assert "cannot" not in str(caught[0].message) or len(caught) == 2


def test_a_file_is_never_written_over(tmp_path: Path, broken: Any, monkeypatch: Any) -> None:
    broken(RuntimeError(WORDS))
    first = left(tmp_path, *qkv())
    monkeypatch.setattr(leave, "_left", set())
    clear_cache()
    with override(replay_dir=str(tmp_path)):
        attention(*qkv())
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert read_file(first).happened.candidate == "sdpa.flash"


def test_traced_calls_leave_shapes(tmp_path: Path, broken: Any) -> None:
    broken(RuntimeError(WORDS))
    with override(replay_dir=str(tmp_path), replay_data=True, selfcheck="0"):
        torch.compile(attention, backend="eager", fullgraph=True)(*qkv())
    torch._dynamo.reset()
    files = [read_file(path) for path in tmp_path.glob("*.json")]
    assert all(len(file.tensors) == 3 for file in files)


# ---- built again -------------------------------------------------------------------------------------


def test_views_strides_and_offsets_come_back(tmp_path: Path, broken: Any) -> None:
    whole = torch.randn(2, 12, 3, 2, 8)
    q, k, v = whole.unbind(2)
    broken(RuntimeError(WORDS))
    file = read_file(left(tmp_path, q[:, 1:], k[:, 1:], v[:, 1:]))
    built = build(file, torch.device("cpu"), 0, {})
    for mine, theirs in zip(built[:3], (q, k, v), strict=True):
        assert mine.stride() == theirs.stride()
        assert mine.data_ptr() % 64 == theirs[:, 1:].data_ptr() % 64
    assert built.k.data_ptr() - built.q.data_ptr() == k.data_ptr() - q.data_ptr()
    assert len({t.untyped_storage().data_ptr() for t in built[:3]}) == 1


def test_kept_numbers_come_back_even_of_expanded_tensors(tmp_path: Path, broken: Any) -> None:
    q, k, v = qkv()
    broken(RuntimeError(WORDS))
    path = left(
        tmp_path,
        q,
        k[:, :, :1].expand(-1, -1, 2, -1),
        v.transpose(0, 1).contiguous().transpose(0, 1),
        data=True,
    )
    file = read_file(path)
    data = load_data(path, file)
    built = build(file, torch.device("cpu"), 5, data)
    assert torch.equal(built.q, q)
    assert torch.equal(built.k, k[:, :, :1].expand(-1, -1, 2, -1))
    assert built.k.stride()[2] == 0
    assert torch.equal(built.v, v)


def test_lengths_and_padding_masks_come_back_without_data(tmp_path: Path, broken: Any) -> None:
    lengths = torch.tensor([12, 5])
    mask = (torch.arange(12) >= lengths[:, None])[:, None, None]
    broken(RuntimeError(WORDS))
    path = left(tmp_path, *qkv(), attn_mask_type="padding", attention_mask=mask)
    built = build(read_file(path), torch.device("cpu"), 0, {})
    assert torch.equal(built.extras.attention_mask, mask)


def test_one_tensor_of_lengths_for_both_is_one_again(tmp_path: Path, broken: Any, monkeypatch: Any) -> None:
    def refuse(spec: Any, inputs: Any) -> Any:
        raise RuntimeError(WORDS)

    monkeypatch.setitem(kernels.KERNELS, "triton", kernels.Kernel(refuse, tiled.backward))
    packed = [t.flatten(0, 1) for t in qkv()]
    cu = torch.tensor([0, 7, 24], dtype=torch.int32)
    call = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    with pytest.raises(NoBackendError), override(replay_dir=str(tmp_path), selfcheck="0"):
        attention(*packed, backend="triton", **call)
    path = next(tmp_path.glob("*refused*.json"))
    built = build(read_file(path), torch.device("cpu"), 0, {})
    assert torch.equal(built.extras.cu_seqlens_q, cu)
    assert built.extras.cu_seqlens_q is built.extras.cu_seqlens_kv


# ---- run again ---------------------------------------------------------------------------------------


def test_a_refusal_is_reproduced(tmp_path: Path, broken: Any, again: Any) -> None:
    broken(RuntimeError(WORDS))
    path = left(tmp_path, *qkv())
    code, out, err = again(path)
    assert (code, err) == (1, "")
    assert out.startswith("sdpa.flash refuses this call when it runs. As recorded.")
    assert out.replace("\n", "").isprintable()
    assert max(map(len, out.splitlines())) <= 80


def test_wrong_numbers_are_reproduced_with_their_figures(tmp_path: Path, broken: Any, again: Any) -> None:
    broken(times=1.1)
    path = left(tmp_path, *qkv(requires_grad=True))
    code, out, _ = again(path)
    assert code == 1
    assert "As recorded." in out
    assert "✖ out: off by 0.1" in out


def test_a_repaired_kernel_agrees(tmp_path: Path, broken: Any, again: Any, monkeypatch: Any) -> None:
    broken(RuntimeError(WORDS))
    path = left(tmp_path, *qkv(requires_grad=True), data=True)
    monkeypatch.undo()
    code, out, _ = again(path)
    assert code == 0
    assert "Not as recorded." in out
    assert [line.split()[:2] for line in out.splitlines() if "✔" in line] == [
        ["✔", f"{name}:"] for name in ("out", "dq", "dk", "dv")
    ]
    assert "random" not in out


def test_another_candidate_and_what_cannot_be_tried(tmp_path: Path, broken: Any, again: Any) -> None:
    broken(RuntimeError(WORDS))
    path = left(tmp_path, *qkv())
    assert again(path, "--backend", "tiled")[0] == 0
    code, out, _ = again(path, "--backend", "cudnn")
    assert code == 3
    assert "cudnn cannot run this call here." in out
    code, out, _ = again(path, "--json", "--seed", "4")
    told = json.loads(out)
    assert (code, told["what"], told["as_recorded"], told["seed"]) == (1, "refused", True, 4)


CALLS: list[dict[str, Any]] = [
    {"attn_mask_type": "causal"},
    {"attn_mask_type": "causal_bottom_right", "window_size": (3, 0)},
    {"core_attention_bias_type": "alibi", "attn_mask_type": "causal"},
    {
        "attn_mask_type": "padding",
        "attention_mask": (torch.arange(12) >= torch.tensor([[12], [5]]))[:, None, None],
    },
    {"attn_mask_type": "arbitrary", "attention_mask": torch.rand(2, 1, 12, 12) > 0.7},
    {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.randn(1, 2, 12, 12)},
    {"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": torch.randn(1, 2, 12, 12)},
    {"softcap": 3.0, "softmax_type": "off-by-one"},
    {"softmax_type": "learnable", "softmax_offset": torch.randn(2), "attention_dropout": 0.2},
]


@pytest.mark.parametrize("call", CALLS[1:4:2] + CALLS[4:6] + CALLS[7:], ids=range(6))
def test_every_feature_agrees_with_the_definition(
    call: dict[str, Any], tmp_path: Path, again: Any, monkeypatch: Any
) -> None:
    """tiled was refused; by now it runs again."""
    right = kernels.kernel_of("tiled")

    def refuse(spec: Any, inputs: Any) -> Any:
        raise RuntimeError(WORDS)

    monkeypatch.setitem(kernels.KERNELS, "tiled", kernels.Kernel(refuse, tiled.backward))
    with pytest.raises(NoBackendError), override(replay_dir=str(tmp_path), replay_data=True, selfcheck="0"):
        attention(*qkv(requires_grad=True), backend="tiled", **call)
    monkeypatch.setitem(kernels.KERNELS, "tiled", right)
    path = next(tmp_path.glob("*refused*.json"))
    code, out, _ = again(path)
    assert code == 0, out
    assert out.count("✔") == 4


def test_the_definition_is_what_f_sdpa_gives_in_float64() -> None:
    q, k, v = (torch.randn(4, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    dout = torch.randn(4, 9, 8, dtype=torch.float64)
    found = exact_attention(q, k, v, dout, 8**-0.5, right=0)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = dict(
        zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, (q, k, v), dout)), strict=True)
    )
    for name, t in expected.items():
        assert torch.allclose(found[name], t), name


# ---- bad files ---------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path, broken: Any) -> Path:
    broken(RuntimeError(WORDS))
    return left(tmp_path / "good", *qkv(), data=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "attnsel.replay/99"}, "which is newer"),
        ({"tensors": []}, "has no q"),
        ({"tensors": [{"name": "q"}]}, "tensors"),
        ({"params": {"num_heads": -1}}, "num_heads"),
        ({"config": "{}"}, "config"),
        ({"config": '{"qkv_format": "bshd", "x": 1}'}, "is no call"),
        ({"data": "../../etc/passwd"}, "same folder"),
        ({"data": "x\x1b.pt"}, "data"),
        ({"new": 1}, "there is no such field"),
    ],
)
def test_a_file_that_is_none_of_ours_is_one_line(
    change: dict[str, Any], said: str, good: Path, again: Any
) -> None:
    good.write_text(json.dumps({**json.loads(good.read_text()), **change}))
    code, out, err = again(good)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err[:-1].isprintable()
    assert said in err


def test_what_is_no_json_is_one_line(tmp_path: Path, again: Any) -> None:
    for text in (b"", b"{", b"\0" * 10, b"[]", b'{"a":' * 100_000, b"\xff"):
        (tmp_path / "x.json").write_bytes(text)
        code, out, err = again(tmp_path / "x.json")
        assert (code, out, err.count("\n")) == (2, "", 1), text[:10]


def test_data_that_would_run_code_is_not_loaded(good: Path, again: Any) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> Any:
            return print, ("owned",)

    good.with_suffix(".pt").write_bytes(pickle.dumps(Bomb()))
    code, out, err = again(good)
    assert (code, err.count("\n")) == (2, 1)
    assert "owned" not in out + err.replace("replay", "")


def test_bad_words_are_one_line(good: Path, again: Any) -> None:
    for words, said in (
        (["--backend", "flash"], "--backend flash"),
        (["--device", "tpu"], "--device tpu: must be cpu, cuda or cuda:1"),
        (["--device", "cuda:99"], "is not on this machine"),
        (["--seed", "9" * 30], "--seed"),
        (["--script", "/nowhere/x.py"], "--script /nowhere/x.py"),
    ):
        code, out, err = again(good, *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err


def test_tensors_larger_than_the_machine_are_one_line(good: Path, again: Any) -> None:
    data = json.loads(good.read_text())
    data["tensors"][0] |= {"shape": [2**40, 1], "stride": [1, 1], "values": None}
    good.write_text(json.dumps(data))
    code, _, err = again(good)
    assert (code, err.count("\n")) == (2, 1)
    assert "more than this machine has memory" in err


def ran(program: Path) -> tuple[int, str]:
    """A program in this process, which has torch already: its exit code, and what it prints."""
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(SystemExit) as left:
        runpy.run_path(str(program))
    return left.value.code, said.getvalue()  # type: ignore[return-value]


# ---- the program -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "call"),
    [("sdpa.flash", CALLS[2]), ("sdpa.math", CALLS[1]), ("sdpa.math", CALLS[4]), ("sdpa.math", CALLS[6])],
)
def test_the_program_runs_without_attnsel(
    backend: str, call: dict[str, Any], tmp_path: Path, broken: Any, again: Any
) -> None:
    broken(RuntimeError(WORDS))
    path = left(tmp_path, *qkv(requires_grad=True), **call)
    program = tmp_path / "issue.py"
    code, out, _ = again(path, "--backend", backend, "--script", program)
    assert code == 0
    assert "wrote" in out
    assert "attnsel" not in program.read_text()
    code, out = ran(program)
    assert code == 0, out
    assert out.rstrip().endswith("all agree")
    assert out.startswith(f"torch {torch.__version__}")


@pytest.mark.slow
def test_the_program_runs_where_there_is_no_attnsel(good: Path, tmp_path: Path, again: Any) -> None:
    again(good, "--script", tmp_path / "issue.py")
    run = [sys.executable, "-I", str(tmp_path / "issue.py")]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_program_takes_the_kept_numbers(
    tmp_path: Path, broken: Any, again: Any, monkeypatch: Any
) -> None:
    broken(RuntimeError(WORDS))
    q, k, v = qkv(requires_grad=True)
    path = left(tmp_path, q, k, v, data=True)
    again(path, "--script", tmp_path / "issue.py")
    monkeypatch.chdir(tmp_path)
    code, out = ran(tmp_path / "issue.py")
    assert code == 0
    assert out.startswith(f"numbers: {path.stem}.pt")


def test_nothing_of_a_file_becomes_code_of_the_program(good: Path, again: Any) -> None:
    held = json.loads(good.read_text())
    held["data"] = "\"')\nprint('owned')\n#"
    held["happened"]["message"] = "x\nprint('owned')"
    held["environment"]["device"]["name"] = "x\nprint('owned')"
    good.write_text(json.dumps(held))
    code, out, _ = again(good, "--script", "-")
    assert code == 0
    tree = ast.parse(out)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value == "owned"]


def test_the_program_finds_what_is_wrong(tmp_path: Path, broken: Any, again: Any) -> None:
    broken(times=1.1)
    code, text, err = again(left(tmp_path, *qkv(requires_grad=True)), "--script", "-")
    assert (code, err) == (0, "")
    program = tmp_path / "issue.py"
    program.write_text(text.replace("# ---- beside", "out = out * 1.01\n# ---- beside"))
    code, out = ran(program)
    assert code == 1
    assert "WRONG: out" in out


def test_the_program_is_written_over_nothing_unless_asked(good: Path, tmp_path: Path, again: Any) -> None:
    program = tmp_path / "issue.py"
    program.write_text("mine")
    code, _, err = again(good, "--script", program)
    assert (code, program.read_text()) == (2, "mine")
    assert "--force writes over it" in err
    assert again(good, "--script", program, "--force")[0] == 0
    assert program.read_text() != "mine"
    assert not list(tmp_path.glob(".attnsel-*"))


def test_programs_for_gpus_are_python(good: Path, again: Any) -> None:
    for backend in ("cudnn", "sdpa.cudnn", "sdpa.varlen", "flash_attn.2", "flash_attn.3", "flash_attn.4"):
        code, out, _ = again(good, "--backend", backend, "--script", "-")
        assert code == 0
        compile(out, "issue.py", "exec")
