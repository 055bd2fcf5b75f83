"""A call that fell back, was refused or came out wrong: the file it leaves, the call again, the program."""

from __future__ import annotations

import ast
import io
import json
import pickle
import runpy
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
from attnsel.diagnose.replay.run import build, load_data
from attnsel.runtime import kernels
from attnsel.runtime import leave_replay as leave
from attnsel.runtime.replay_file import read_file
from tables import each

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::attnsel.debug.FallbackWarning")

WORDS = "no plan \x1b[2J for this"
CPU = torch.device("cpu")


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
    """Put another kernel in the place of one: it refuses, or its output is off."""

    def put(times: float | None = None, name: str = "sdpa.flash") -> None:
        def forward(spec: Any, inputs: Any) -> Any:
            if times is None:
                raise RuntimeError(WORDS)
            result = right(spec, inputs)
            return result._replace(out=result.out * times)

        right = tiled.forward
        monkeypatch.setitem(kernels.KERNELS, name, kernels.Kernel(forward, tiled.backward))

    return put


@pytest.fixture
def again(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["replay", *map(str, words)])
        return (code, *capsys.readouterr())

    return call


def qkv(s: int = 12, **kind: Any) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, s, 2, 8, generator=gen, **kind) for _ in "qkv")


def left(folder: Path, *tensors: Tensor, data: bool = False, **call: Any) -> Path:
    """The file that a call leaves."""
    with override(replay_dir=str(folder), replay_data=data, selfcheck="all"):
        attention(*tensors, **call)
    (path,) = folder.glob("*.json")
    return path


def left_by_a_refusal_of(name: str, broken: Any, folder: Path, *tensors: Tensor, **call: Any) -> Path:
    """The file that a call leaves which no other kernel may run."""
    broken(name=name)
    with pytest.raises(NoBackendError), override(replay_dir=str(folder), replay_data=True, selfcheck="0"):
        attention(*tensors, backend=name, **call)
    (path,) = folder.glob("*refused*.json")
    return path


# ---- what is left ------------------------------------------------------------------------------------


def test_one_file_for_a_question_and_kernel_none_written_over_and_a_bound_for_all(
    tmp_path: Path, broken: Any, monkeypatch: Any
) -> None:
    broken()
    monkeypatch.setattr(leave, "MOST_FILES", 3)
    for made, wanted in (((5, 5), 1), ((5,), 2), ((6, 7, 8, 9), 5)):  # by processes one after the other
        leave._left.clear()
        with override(replay_dir=str(tmp_path)):
            for s in made:
                clear_cache()
                attention(*qkv(s))
        assert len(list(tmp_path.iterdir())) == wanted


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, broken: Any) -> None:
    (tmp_path / "file").touch()
    broken()
    with warnings.catch_warnings(record=True) as caught, override(replay_dir=str(tmp_path / "file/sub")):
        warnings.simplefilter("always")
        assert attention(*qkv()).shape == (2, 12, 2, 8)
    kinds = [w.category for w in caught if w.category is not FallbackWarning]
    assert kinds == [leave.ReplayFileWarning]


# ---- built again -------------------------------------------------------------------------------------


def test_views_strides_and_offsets_come_back(tmp_path: Path, broken: Any) -> None:
    q, k, v = torch.randn(2, 12, 3, 2, 8).unbind(2)
    broken()
    built = build(read_file(left(tmp_path, q[:, 1:], k[:, 1:], v[:, 1:])), CPU, 0, {})
    for mine, theirs in zip(built[:3], (q, k, v), strict=True):
        assert mine.stride() == theirs.stride()
        assert mine.data_ptr() % 64 == theirs[:, 1:].data_ptr() % 64
    assert built.k.data_ptr() - built.q.data_ptr() == k.data_ptr() - q.data_ptr()
    assert len({t.untyped_storage().data_ptr() for t in built[:3]}) == 1


def test_kept_numbers_come_back_even_of_expanded_tensors(tmp_path: Path, broken: Any) -> None:
    q, k, v = qkv()
    k = k[:, :, :1].expand(-1, -1, 2, -1)
    broken()
    path = left(tmp_path, q, k, v.transpose(0, 1).contiguous().transpose(0, 1), data=True)
    file = read_file(path)
    built = build(file, CPU, 5, load_data(path, file))
    for mine, theirs in zip(built[:3], (q, k, v), strict=True):
        assert torch.equal(mine, theirs)
    assert built.k.stride()[2] == 0


PADDED = (torch.arange(12) >= torch.tensor([[12], [5]]))[:, None, None]


def test_lengths_and_padding_masks_come_back_without_data(tmp_path: Path, broken: Any) -> None:
    """One tensor of lengths for q and for kv is one again."""
    broken()
    path = left(tmp_path, *qkv(), attn_mask_type="padding", attention_mask=PADDED)
    assert torch.equal(build(read_file(path), CPU, 0, {}).extras.attention_mask, PADDED)
    cu = torch.tensor([0, 7, 24], dtype=torch.int32)
    call = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    packed = [t.flatten(0, 1) for t in qkv()]
    path = left_by_a_refusal_of("triton", broken, tmp_path / "packed", *packed, **call)
    built = build(read_file(path), CPU, 0, {})
    assert torch.equal(built.extras.cu_seqlens_q, cu)
    assert built.extras.cu_seqlens_q is built.extras.cu_seqlens_kv


# ---- run again ---------------------------------------------------------------------------------------


def test_a_refusal_is_reproduced_with_others_beside_it(tmp_path: Path, broken: Any, again: Any) -> None:
    broken()
    path = left(tmp_path, *qkv())
    code, out, err = again(path)
    assert (code, err) == (1, "")
    assert out.startswith("sdpa.flash refuses this call when it runs. As recorded.")
    assert out.replace("\n", "").isprintable()
    assert max(map(len, out.splitlines())) <= 80
    assert again(path, "--backend", "tiled")[0] == 0
    code, out, _ = again(path, "--backend", "cudnn")
    assert code == 3
    assert "cudnn cannot run this call here." in out
    code, out, _ = again(path, "--json", "--seed", "4")
    told = json.loads(out)
    assert (code, told["what"], told["as_recorded"], told["seed"]) == (1, "refused", True, 4)


def test_wrong_numbers_are_reproduced_with_their_figures_and_found_by_the_program(
    tmp_path: Path, broken: Any, again: Any
) -> None:
    broken(times=1.1)
    path = left(tmp_path, *qkv(requires_grad=True))
    code, out, _ = again(path)
    assert code == 1
    assert "As recorded." in out
    assert "✖ out: off by 0.1" in out
    code, text, err = again(path, "--script", "-")
    assert (code, err) == (0, "")
    program = tmp_path / "issue.py"
    program.write_text(text.replace("# ---- beside", "out = out * 1.01\n# ---- beside"))
    code, out = ran(program)
    assert code == 1
    assert "WRONG: out" in out


ALIBI = {"core_attention_bias_type": "alibi", "attn_mask_type": "causal"}
WINDOW = {"attn_mask_type": "causal_bottom_right", "window_size": (3, 0)}
BOOL_MASK = {"attn_mask_type": "arbitrary", "attention_mask": torch.rand(2, 1, 12, 12) > 0.7}
BIAS = torch.randn(1, 2, 12, 12)
CALLS: list[dict[str, Any]] = [
    WINDOW,
    {"attn_mask_type": "padding", "attention_mask": PADDED},
    BOOL_MASK,
    {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": BIAS},
    {"softcap": 3.0, "softmax_type": "off-by-one"},
    {"softmax_type": "learnable", "softmax_offset": torch.randn(2), "attention_dropout": 0.2},
]


def test_every_feature_agrees_with_the_definition(tmp_path: Path, broken: Any, again: Any) -> None:
    """tiled was refused; by now it runs again."""
    for at, call in enumerate(CALLS):
        right = kernels.kernel_of("tiled")
        path = left_by_a_refusal_of("tiled", broken, tmp_path / f"{at}", *qkv(requires_grad=True), **call)
        kernels.KERNELS["tiled"] = right
        clear_cache()
        code, out, _ = again(path)
        assert code == 0, out
        assert [line.split()[1] for line in out.splitlines() if "✔" in line] == ["out:", "dq:", "dk:", "dv:"]
        assert "Not as recorded." in out
        assert "random" not in out, "numbers were kept"


# ---- bad files ---------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path, broken: Any) -> Path:
    broken()
    return left(tmp_path / "good", *qkv(), data=True)


def refused_in_one_line(told: tuple[int, str, str], said: str) -> None:
    code, out, err = told
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err[:-1].isprintable()
    assert said in err


HUGE = {"name": "q", "shape": [2**40, 1], "stride": [1, 1], "values": None}


@each(
    ("change", "said"),
    [
        ({"schema": "attnsel.replay/99"}, "which is newer"),
        ({"tensors": []}, "has no q"),
        ({"tensors": HUGE}, "more than this machine has memory"),
        ({"config": '{"qkv_format": "bshd", "x": 1}'}, "is no call"),
        ({"data": "../../etc/passwd"}, "same folder"),
        ({"new": 1}, "there is no such field"),
    ],
)
def test_a_file_that_is_none_of_ours_is_one_line(
    change: dict[str, Any], said: str, good: Path, again: Any
) -> None:
    held = json.loads(good.read_text())
    if change.get("tensors") is HUGE:
        change = {"tensors": [held["tensors"][0] | HUGE, *held["tensors"][1:]]}
    bad = good.with_name("bad.json")
    bad.write_text(json.dumps(held | change))
    refused_in_one_line(again(bad), said)


def test_what_is_no_json_or_would_run_code_is_one_line(good: Path, again: Any) -> None:
    for text in (b"", b"{", b"\0" * 10, b"[]", b'{"a":' * 100_000, b"\xff"):
        good.with_name("x.json").write_bytes(text)
        refused_in_one_line(again(good.with_name("x.json")), "")

    class Bomb:
        def __reduce__(self) -> Any:
            return pytest.fail, ("the data was run",)

    good.with_suffix(".pt").write_bytes(pickle.dumps(Bomb()))
    refused_in_one_line(again(good), "")


# ---- the program -------------------------------------------------------------------------------------


def ran(program: Path) -> tuple[int, str]:
    """A program in this process, which has torch already: its exit code, and what it prints."""
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(SystemExit) as left:
        runpy.run_path(str(program))
    return left.value.code, said.getvalue()  # type: ignore[return-value]


def test_the_program_runs_without_attnsel(tmp_path: Path, broken: Any, again: Any) -> None:
    pre_scaled = {"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": BIAS}
    rows = [
        ("sdpa.flash", {"attn_mask_type": "causal"}),
        ("sdpa.flash", ALIBI),
        *(("sdpa.math", call) for call in (WINDOW, BOOL_MASK, pre_scaled)),
    ]
    broken()
    for at, (backend, call) in enumerate(rows):
        clear_cache()
        path = left(tmp_path / f"{at}", *qkv(requires_grad=True), **call)
        program = tmp_path / f"issue_{at}.py"
        code, out, _ = again(path, "--backend", backend, "--script", program)
        assert code == 0
        assert "wrote" in out
        assert "attnsel" not in program.read_text()
        assert ("is_causal=True" in program.read_text()) == (at == 0), "the others need a mask"
        code, out = ran(program)
        assert code == 0, out
        assert out.rstrip().endswith("all agree")
        assert out.startswith(f"torch {torch.__version__}")


def test_the_program_takes_the_kept_numbers_and_is_written_over_nothing_unless_asked(
    good: Path, tmp_path: Path, again: Any, monkeypatch: Any
) -> None:
    program = tmp_path / "issue.py"
    program.write_text("mine")
    code, _, err = again(good, "--script", program)
    assert (code, program.read_text()) == (2, "mine")
    assert "--force writes over it" in err
    assert again(good, "--script", program, "--force")[0] == 0
    assert not list(tmp_path.glob(".attnsel-*"))
    monkeypatch.chdir(good.parent)
    code, out = ran(program)
    assert code == 0
    assert out.startswith(f"numbers: {good.stem}.pt")


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
