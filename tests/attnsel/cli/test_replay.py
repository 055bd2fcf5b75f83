"""A call that was refused or came out wrong: the file it leaves, and the program that makes it again."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

import attnsel.flash_attn  # noqa: E402
from attnsel import Environment, NoBackendError, attention, clear_cache, override  # noqa: E402
from attnsel.backends.tiled import kernel as tiled  # noqa: E402
from attnsel.cli import main  # noqa: E402
from attnsel.cli.replay import program  # noqa: E402
from attnsel.debug import FallbackWarning  # noqa: E402
from attnsel.runtime import kernels  # noqa: E402
from attnsel.runtime import leave_replay as leave  # noqa: E402
from attnsel.runtime.replay_file import ReplayFile  # noqa: E402
from attnsel.settings import Settings  # noqa: E402
from records import Record  # noqa: E402
from tables import each  # noqa: E402

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::attnsel.debug.FallbackWarning")

WORDS = "no plan \x1b[2J for this"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leave, "_left", set())
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
            result = tiled.forward(spec, inputs)
            return result._replace(out=result.out * times)

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


def left(folder: Path, *tensors: Tensor, **call: Any) -> Path:
    """The file of the first kernel of a call that is broken."""
    with contextlib.suppress(NoBackendError), override(replay_dir=str(folder), selfcheck="all"):
        attention(*tensors, **call)
    return next(path for path in folder.iterdir() if "nothing-runs" not in path.name)


def ran(text: str, folder: Path) -> tuple[dict[str, Any], str]:
    """A program in this process, which has torch already: its names, and what it prints."""
    (folder / "issue.py").write_text(text)
    said = io.StringIO()
    with redirect_stdout(said):
        names = runpy.run_path(str(folder / "issue.py"))
    assert said.getvalue().startswith(f"{torch.__version__} ")
    return names, said.getvalue()


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


# ---- the program -------------------------------------------------------------------------------------


def test_views_strides_and_offsets_come_back(tmp_path: Path, broken: Any, again: Any) -> None:
    q, k, v = torch.randn(2, 12, 3, 2, 8).unbind(2)
    broken()
    path = left(tmp_path, q[:, 1:], k[:, 1:], v[:, 1:])
    names, _ = ran(again(path, "--backend", "sdpa.math")[1], tmp_path)
    for letter, theirs in zip("qkv", (q, k, v), strict=True):
        assert names[letter].transpose(1, 2).stride() == theirs.stride()
        assert names[letter].data_ptr() % 64 == theirs[:, 1:].data_ptr() % 64
    assert names["k"].data_ptr() - names["q"].data_ptr() == k.data_ptr() - q.data_ptr()
    assert len({names[letter].untyped_storage().data_ptr() for letter in "qkv"}) == 1


PADDED = (torch.arange(12) >= torch.tensor([[12], [5]]))[:, None, None]
BOOL_MASK = {"attn_mask_type": "arbitrary", "attention_mask": torch.rand(2, 1, 12, 12) > 0.7}
BIAS = torch.randn(1, 2, 12, 12)
OF_TORCH: dict[str, dict[str, Any]] = {
    "causal": {"attn_mask_type": "causal"},
    "window": {"attn_mask_type": "causal_bottom_right", "window_size": (3, 0)},
    "mask": BOOL_MASK,
    "bias": {"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": BIAS},
    "alibi": {"core_attention_bias_type": "alibi", "attn_mask_type": "causal"},
}
OF_ATTNSEL: dict[str, dict[str, Any]] = {
    "padding": {"attn_mask_type": "padding", "attention_mask": PADDED},
    "bias": {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": BIAS},
    "sinks": {"softcap": 3.0, "softmax_type": "off-by-one"},
    "learnt": {"softmax_type": "learnable", "softmax_offset": torch.randn(2)},
}


def as_wrong(path: Path) -> Path:
    """The same file as that of wrong numbers, whose program compares them."""
    held = json.loads(path.read_text())
    held["happened"]["kind"] = "wrong numbers"
    path.write_text(json.dumps(held))
    return path


def agrees(out: str, most: float = 1e-5) -> bool:
    errors = [float(line.split()[4].rstrip(";")) for line in out.splitlines()[1:]]
    return len(errors) == 4 and max(errors) < most


def test_a_program_of_torch_agrees_with_its_definition(tmp_path: Path, broken: Any, again: Any) -> None:
    broken()
    for name, call in OF_TORCH.items():
        clear_cache()
        broken(name="tiled")
        path = as_wrong(left(tmp_path / name, *qkv(requires_grad=True), backend="tiled", **call))
        code, text, err = again(path, "--backend", "sdpa.math")
        assert (code, err.count("\n")) == (0, 1)
        assert "attnsel" not in text
        assert ("is_causal=True" in text) == (name == "causal"), "the others need a mask"
        assert agrees(ran(text, tmp_path)[1]), name


def test_a_program_shows_wrong_numbers(tmp_path: Path, broken: Any, again: Any) -> None:
    broken(times=1.1)
    path = left(tmp_path, *qkv(requires_grad=True))
    text = again(path)[1].replace("dout = ", "out = out * 1.01\ndout = ")
    assert text.startswith("# sdpa.flash: wrong numbers\n")
    assert not agrees(ran(text, tmp_path)[1])


def test_what_torch_has_no_call_for_is_made_with_attnsel(tmp_path: Path, broken: Any, again: Any) -> None:
    right = kernels.kernel_of("tiled")
    for name, call in OF_ATTNSEL.items():
        broken(name="tiled")
        path = as_wrong(left(tmp_path / name, *qkv(requires_grad=True), backend="tiled", **call))
        kernels.KERNELS["tiled"] = right
        clear_cache()
        names, out = ran(again(path)[1], tmp_path)
        assert agrees(out), name
        if name == "padding":
            assert torch.equal(names["attention_mask"], PADDED)


def test_packed_sequences_by_flash_attn(
    tmp_path: Path, broken: Any, again: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor of lengths for q and for kv is one again. Instead of flash_attn: attnsel.flash_attn."""
    cu = torch.tensor([0, 7, 24], dtype=torch.int32)
    call = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    broken(name="tiled")
    tensors = [t.flatten(0, 1).requires_grad_() for t in qkv(dtype=torch.float16)]
    path = as_wrong(left(tmp_path, *tensors, backend="tiled", max_seqlen_q=17, max_seqlen_kv=17, **call))
    monkeypatch.undo()
    clear_cache()
    monkeypatch.setitem(sys.modules, "flash_attn", attnsel.flash_attn)
    names, out = ran(again(path, "--backend", "flash_attn.2")[1], tmp_path)
    assert agrees(out, 1e-2)
    assert torch.equal(names["cu_seqlens_q"], cu)
    assert names["cu_seqlens_q"] is names["cu_seqlens_kv"]


def test_dropout_is_made_from_the_seed_and_compared_with_nothing(
    tmp_path: Path, broken: Any, again: Any
) -> None:
    broken(name="tiled")
    path = as_wrong(left(tmp_path, *qkv(), backend="tiled", attention_dropout=0.2))
    text = again(path, "--backend", "sdpa.math")[1]
    assert f"torch.manual_seed({torch.initial_seed()})" in text
    assert "dropout_p=0.2" in text
    assert "right" not in text


def test_the_question_stands_beside_the_program(tmp_path: Path, broken: Any, again: Any, capsys: Any) -> None:
    broken()
    path = left(tmp_path, *qkv(), backend="sdpa.flash")
    code, out, err = again(path)
    assert out.startswith("# sdpa.flash: refused\n")
    assert out.replace("\n", "").isprintable()
    command = err.strip().partition(": attnsel ")[2].split()
    assert command == [
        "explain", "--params", str(path), "--env", str(path), "--backend", "sdpa.flash"
    ]  # fmt: skip
    assert (code, main(command)) == (0, 0)


def test_programs(record: Record) -> None:
    """Of each call the whole program by F.sdpa, and what others have that it has not."""
    folder = Path(__file__).parent
    same = {"attnsel": "1.2.3", "settings": Settings()}
    env = Environment.describe("H100", torch="2.9.1", cudnn="9.10.2")
    lines: list[str] = []
    for name, call in json.loads((folder / "replayed_calls.json").read_text()).items():
        file = ReplayFile(**same, environment=env, **call)
        first = program(file, "sdpa.math").splitlines()
        lines += [f"==== {name}, sdpa.math", *first]
        for kernel in ("cudnn", "flash_attn.2", "triton"):
            others = [line for line in program(file, kernel).splitlines() if line not in first]
            lines += [f"---- {name}, {kernel}", *others]
    record.holds(folder / "replayed_calls.txt", lines)


# ---- bad files ---------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path, broken: Any) -> Path:
    broken()
    return left(tmp_path / "good", *qkv())


def refused_in_one_line(told: tuple[int, str, str], said: str) -> None:
    code, out, err = told
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err[:-1].isprintable()
    assert said in err


LENGTHS = {"name": "cu_seqlens_q", "shape": [1], "stride": [1], "dtype": "int32", "storage": 0}


@each(
    ("change", "said"),
    [
        ({"schema": "attnsel.replay/99"}, "holds attnsel.replay/99 of attnsel "),
        ({"tensors": []}, "must begin with q, k and v"),
        ({"config": '{"qkv_format": "x"}'}, "is no call's"),
        ({"new": 1}, "there is no such field"),
        ({"generator": {"initial_seed": -(2**70)}}, "initial_seed"),
        ({"generator": {"state": [256]}}, "state"),
        ({"tensors": [{**LENGTHS, "values": [-(2**70)]}]}, "values"),
    ],
)
def test_a_file_that_is_none_of_ours_is_one_line(
    change: dict[str, Any], said: str, good: Path, again: Any
) -> None:
    bad = good.with_name("bad.json")
    bad.write_text(json.dumps(json.loads(good.read_text()) | change))
    refused_in_one_line(again(bad), said)


def test_what_is_no_file_of_ours_is_one_line(good: Path, again: Any) -> None:
    for text in (b"", b"{", b"\0" * 10, b"[]", b"{}", b'{"a":' * 100_000, b"\xff"):
        good.write_bytes(text)
        refused_in_one_line(again(good), "")


def test_nothing_of_a_file_becomes_code_of_the_program(good: Path, again: Any) -> None:
    held = json.loads(good.read_text())
    held["happened"]["message"] = "x\nprint('owned')"
    held["environment"]["device"]["name"] = "x\nprint('owned')"
    config = json.loads(held["config"])
    config["softmax_scale"] = config["window_size"] = config["attention_dropout"] = "'\nprint('owned')"
    held["config"] = json.dumps(config)
    good.write_text(json.dumps(held))
    for backend in ("sdpa.flash", "flash_attn.2", "tiled"):
        code, out, _ = again(good, "--backend", backend)
        assert code == 0
        tree = ast.parse(out)
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == "owned"]
