"""Whether a program can notice that it is watched: features and whole programs, with and without.

    python tests/proof/watch_differences.py                        # all: some ten minutes
    python tests/proof/watch_differences.py --features --only nested
    python tests/proof/watch_differences.py --programs

``watched/features.txt`` holds features of torch and of Python. A process runs them one after another, a
second with ``attnsel.watch()`` round each, a third inside of one. What each prints, raises and warns of, and
all that it leaves in its names (tensors and gradients bit for bit), in random states and in torch's stacks
must be the same, and nothing of attnsel's may have failed. ``watched/programs.txt`` holds whole programs,
each run by python and by ``attnsel watch``: output and errors byte by byte, and the exit code or signal.

What may differ stands in docs/how-to/watch.md under "What a program can notice", and is not compared: the
line that a warning names, frames of tracebacks, what ``inspect`` says of functions that are replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import hashlib
import io
import json
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WAYS = ("plain", "each", "one")
LIMIT = 180  # seconds for one feature or program: what takes longer hangs


def blocks(path: Path) -> Iterator[tuple[str, str]]:
    """Title and code of each feature."""
    for block in path.read_text(encoding="utf-8").strip().split("\n\n"):
        title, *lines = block.splitlines()
        if lines and not lines[0].startswith("#"):
            yield title.removeprefix("# "), "\n".join(lines) + "\n"


def programs(path: Path) -> Iterator[tuple[str, list[str], str]]:
    """Title, arguments and code of each program."""
    for block in path.read_text(encoding="utf-8").split("\n#### ")[1:]:
        head, code = block.split("\n", 1)
        title, _, words = head.partition(" | ")
        yield title, words.split(), code


# ---- in a process that runs features -------------------------------------------------------------------


def print_of(value: Any, depth: int = 0) -> Any:
    """What a value is, to the bit, as far as it can be told."""
    import torch

    if depth > 6:
        return "deep"
    if isinstance(value, torch.nn.Module):
        return [type(value).__name__, value.training, *(print_of(p, depth + 1) for p in value.parameters())]
    if isinstance(value, torch.Tensor):
        said = [type(value).__name__, str(value.dtype), value.requires_grad, value.is_leaf]
        with contextlib.suppress(Exception), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            said.append(list(value.shape))
            raw = value.detach().to_dense().resolve_conj().resolve_neg().contiguous()
            said.append(hashlib.sha1(raw.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
            if value.is_leaf and value.grad is not None:
                said.append(print_of(value.grad, depth + 1))
        return [str(one) for one in said]
    if isinstance(value, dict):
        return {str(key): print_of(one, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [print_of(one, depth + 1) for one in value]
    if isinstance(value, (str, int, float, bool, type(None))):
        return re.sub(r"0x[0-9a-f]+", "0x", str(value))
    if type(value).__module__ == "numpy":
        return [type(value).__name__, hashlib.sha1(value.tobytes()).hexdigest()]
    return type(value).__name__


def names() -> dict[str, Any]:
    """What a feature has at hand, the same each time."""
    import torch
    from torch import nn
    from torch.nn import functional

    def by_hand(q: Any, k: Any, v: Any) -> Any:
        return (q @ k.mT * 0.25).softmax(-1) @ v

    def sdpa(q: Any, k: Any, v: Any) -> Any:
        return functional.scaled_dot_product_attention(q, k, v)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Any) -> Any:
            b, s, _ = x.shape
            q, k, v = self.qkv(x).view(b, s, 3, 4, 8).permute(2, 0, 3, 1, 4)
            scores = (q @ k.mT * 8**-0.5).masked_fill(torch.ones(s, s).triu(1).bool(), -torch.inf)
            weights = functional.dropout(scores.softmax(-1), 0.1, self.training)
            return self.out((weights @ v).transpose(1, 2).reshape(b, s, 32))

    random.seed(0)
    torch.manual_seed(0)
    given = {name: torch.randn(2, 4, 8, 16) for name in "qkv"}
    return {
        "__name__": "feature", "torch": torch, "F": functional, "nn": nn, "by_hand": by_hand, "sdpa": sdpa,
        "io": io, "copy": copy, "pickle": pickle, "random": random, **given, "x": torch.randn(2, 8, 32),
        "block": Block(),
    }  # fmt: skip


def run_feature(code: str, file: Path) -> dict[str, Any]:
    """What comes of it."""
    import torch

    torch._dynamo.reset()
    file.write_text(code)  # TorchScript and inspect read sources
    scope, said, printed = names(), {}, io.StringIO()
    given = set(scope)
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            exec(compile(code, str(file), "exec"), scope)
            said["raised"] = ""
        except BaseException as error:
            said["raised"] = re.sub(r"0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error}")
    said["printed"] = printed.getvalue()
    about = {f"{one.category.__name__}: {one.message}".split("Traceback of")[0] for one in warned}
    about = {one for one in about if "`torch.jit." not in one}  # once a process, where it is imported
    said["warned"] = sorted(re.sub(r"(/|0x)\S+", "", one) for one in about)
    said["random"] = [
        print_of(torch.get_rng_state()),
        hashlib.sha1(repr(random.getstate()).encode()).hexdigest(),
    ]
    said["state"] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()]
    said["state"] = [*map(str, said["state"]), torch._C._len_torch_dispatch_stack()]
    left = {
        name: one for name, one in scope.items() if name not in given or name in ("q", "k", "v", "x", "block")
    }
    said["left"] = {name: print_of(one) for name, one in left.items() if not name.startswith("__")}
    return said


def work(way: str, first: int, only: str) -> None:
    """In a process of its own: a line of JSON for each feature, as soon as it is done."""
    sys.path.insert(0, str(ROOT))
    import attnsel

    seen: Any = attnsel.watch() if way == "one" else contextlib.nullcontext()
    sys.stdout, out = sys.stderr, os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryDirectory() as folder, seen:
        for number, (title, code) in enumerate(blocks(HERE / "watched/features.txt")):
            if number < first or only not in title:
                continue
            out.write(json.dumps({"begun": number}) + "\n")
            out.flush()
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            with attnsel.watch() if way == "each" else contextlib.nullcontext() as one:
                said = run_feature(code, Path(folder) / f"feature_{number}.py")
            watched = one if way == "each" else seen if way == "one" else None
            failures = [line for line in (watched.recorder.unseen if watched else ()) if "not read" in line]
            if way == "each":
                one.report()
            out.write(json.dumps({"number": number, "said": said, "failures": failures}) + "\n")
            out.flush()
    os._exit(0)


# ---- outside -------------------------------------------------------------------------------------------


def features(way: str, only: str) -> dict[int, Any]:
    """What each feature says; a process that a feature ends is begun again behind it."""
    told: dict[int, Any] = {}
    first = 0
    while True:
        command = [sys.executable, __file__, "--worker", way, "--first", str(first), "--only", only]
        with tempfile.TemporaryFile("w+") as lines:
            how: dict[str, Any] = {
                "stderr": subprocess.DEVNULL,
                "env": os.environ | {"PYTHONHASHSEED": "0"},
            }
            code = subprocess.run(command, stdout=lines, **how).returncode
            lines.seek(0)
            begun = -1
            for line in map(json.loads, lines):
                begun = line.get("begun", begun)
                if "number" in line:
                    told[line["number"]] = line
        if code == 0 or begun < first:
            return told
        told.setdefault(begun, {"said": {"ended": code}, "failures": []})
        first = begun + 1


def apart(want: dict[str, Any], got: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """What differs: its name, and what it was and is."""
    for name in {**want, **got}:
        before, now = want.get(name), got.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from apart(before, now, f"{above}{name}.")
        elif before != now:
            yield f"{above}{name}", before, now


def compare_features(only: str) -> int:
    titles = dict(enumerate(title for title, _ in blocks(HERE / "watched/features.txt")))
    titles = {number: title for number, title in titles.items() if only in title}
    plain, *others = (features(way, only) for way in WAYS)
    differing, told = 0, list[str]()
    for number, title in titles.items():
        want = plain[number]["said"]
        for way, found in zip(WAYS[1:], others, strict=True):
            got = found.get(number, {"said": {"ended": "before"}, "failures": []})
            parts = list(apart(want, got["said"]))
            new = [line for line in got["failures"] if line not in told]
            told += new
            if parts or new:
                differing += 1
                print(f"DIFFERS  {title} ({way})")
                for name, before, now in parts:
                    print(f"    {name}: {str(before)[:400]}\n      now: {str(now)[:400]}")
                for line in new:
                    print(f"    failed: {line}")
    print(f"{len(titles)} features, each plain and watched in two ways: {differing} differ")
    return differing


def compare_programs(only: str) -> int:
    count = differing = 0
    for title, words, code in programs(HERE / "watched/programs.txt"):
        if only not in title:
            continue
        count += 1
        results = []
        for watch in ([], ["-m", "attnsel", "watch", "--output", "told.txt"]):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "program.py").write_text(code)
                how: dict[str, Any] = {
                    "cwd": folder,
                    "capture_output": True,
                    "input": b"one\ntwo\n",
                    "env": os.environ
                    | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "MASTER_PORT": "29561"},
                }
                command = [sys.executable, *watch, "program.py", *words]
                try:
                    done = subprocess.run(command, timeout=LIMIT, **how)
                except subprocess.TimeoutExpired as late:
                    results.append((f"hangs: {LIMIT} s", late.stdout or b"", late.stderr or b""))
                    continue
                hidden = re.compile(rf"{re.escape(folder)}|0x[0-9a-f]+|\d+:\d+:\d+ .*Profiler.*".encode())
                code_of = 130 if done.returncode == -2 else done.returncode  # an interrupt, as the page says
                results.append((code_of, *(hidden.sub(b"", s) for s in (done.stdout, done.stderr))))
        if results[0] != results[1]:
            differing += 1
            print(f"DIFFERS  {title}")
            for name, want, got in zip(("exit code", "output", "errors"), *results, strict=True):
                if want != got:
                    print(f"    {name}: {str(want)[-600:]}\n      now: {str(got)[-600:]}")
    print(f"{count} programs, each plain and watched: {differing} differ")
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", action="store_true")
    parser.add_argument("--programs", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--worker", default="")
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker, asked.first, asked.only)
    both = asked.features == asked.programs
    begun = time.monotonic()
    differing = compare_features(asked.only) if both or asked.features else 0
    differing += compare_programs(asked.only) if both or asked.programs else 0
    print(f"{time.monotonic() - begun:.0f} s")
    return 4 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
