"""attnsel as it is installed: built, carried to other releases and to where no network is, and used there.

    python tests/proof/installed.py                   # all parts
    python tests/proof/installed.py build offline     # some of them

build     The source distribution, the wheel out of it, ``twine check --strict``; and a clone without tags,
          which builds the version of attnsel/_version.py.
offline   In a network namespace, with no index but a folder of wheels: ``uv tool run``, ``pipx run`` and pip
          install the wheel, and README's question is answered.
releases  Each row of data/installed.csv is an environment of its own: a Python with releases of what attnsel
          depends on, the oldest and the newest. All commands are used there, and attention is computed where
          there is torch. A Python that is not on this machine is said to be missing.
torch     The same, of the rows with torch from the index: some 4 GB each, one at a time.
types     ``mypy --strict`` of examples/ against the wheel, not the checkout.

uv, pipx and the packages come from the index that pip and uv are told to use. Exit code: 0 all parts went
well, 4 one did not.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).parent / "data" / "installed.csv"
QUESTION = "--gpu H100 --cudnn 9.1.0 --head-dim 192,128 --training --short"
# What a user does, and words of the answer.
USED = {
    f"attnsel explain {QUESTION}": "pip install 'torch==2.7.0'",
    "attnsel explain --gpu T4 --json": '"schema"',
    "attnsel explain --gpu A100 --markdown": "- ✖ `",
    "attnsel explain --help": "--gpu",
    "attnsel doctor": "attnsel",
    "attnsel can-i-use window --gpu A100": "A100",
    "attnsel rule CUDNN204": "Backward above head_dim 128",
    "attnsel gpus": "H100",
}
CALL = """
import torch, attnsel
q, k, v = torch.randn(3, 2, 128, 4, 64).unbind()
out = attnsel.attention(q, k, v, attn_mask_type="causal")
heads_first = [x.transpose(1, 2) for x in (q, k, v)]
there = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
torch.testing.assert_close(out, there.transpose(1, 2), rtol=1e-4, atol=1e-5)
print("torch", torch.__version__, "computed")
"""
# torch and transformers have functions without types; flash_attn is not there at all.
STRICT = """
[mypy]
strict = True
untyped_calls_exclude = torch, transformers
[mypy-flash_attn.*]
ignore_missing_imports = True
"""
OURS = ("--no-python-downloads",)  # Pythons of this machine
# pyenv's stand-ins of the Pythons that it has fail, but for those that are named here.
PYENV = subprocess.getoutput("pyenv versions --bare").split() if shutil.which("pyenv") else []
PYTHONS = {**os.environ, "PYENV_VERSION": ":".join(PYENV)} if PYENV else dict(os.environ)
# What a process keeps of this one's variables: no checkout on Python's path, no environment that is active.
DROPPED = ("PYTHON", "VIRTUAL_ENV", "ATTNSEL", "PIP_FIND_LINKS", "PIP_INDEX", "PIP_EXTRA")


def variables(**more: str) -> dict[str, str]:
    """The variables of a process that knows neither this checkout nor this environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return kept | {"PYTHONUTF8": "1", "COLUMNS": "80"} | more


def ran(command: Sequence[object], where: Path, *, minutes: float = 10, **more: str) -> str:
    """What a command prints. Raises AssertionError with all of it where it fails or takes too long."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            cwd=where,
            env=variables(**more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60 * minutes,
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{shlex.join(words)}: not ended after {minutes:g} minutes") from late
    assert done.returncode == 0, (
        f"{shlex.join(words)}: ended with {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout + done.stderr


def without_network() -> list[str]:
    """What a command begins with to have no network: nothing where this system has no such namespaces."""
    begins = ["unshare", "--map-root-user", "--net"]
    there = shutil.which("unshare") and not subprocess.run([*begins, "true"], capture_output=True).returncode
    return begins if there else []


def bin_of(environment: Path, name: str) -> Path:
    return environment / ("Scripts" if os.name == "nt" else "bin") / name


def wheel_of(folder: Path) -> Path:
    (wheel,) = folder.glob("attnsel-*.whl")
    return wheel


def folder_of_wheels(work: Path) -> Path:
    """attnsel's wheel and those of all that it depends on, for the Python that runs this."""
    folder = work / "wheels"
    if not folder.is_dir():
        ran([sys.executable, "-m", "pip", "wheel", "--quiet", "-w", folder, ROOT], work)
    return folder


def place(work: Path) -> Path:
    """The Python of an environment that has the wheel, from the folder of wheels alone."""
    environment = work / "place"
    if not environment.is_dir():
        wheels = folder_of_wheels(work)
        venv.create(environment, with_pip=True)
        pip = [bin_of(environment, "python"), "-m", "pip", "install", "--quiet", "--no-index"]
        ran([*without_network(), *pip, "--find-links", wheels, "attnsel"], work)
    return bin_of(environment, "python")


def tools(work: Path) -> Path:
    """The folder of uv, uvx, pipx and twine."""
    environment = work / "tools"
    if not environment.is_dir():
        venv.create(environment, with_pip=True)
        pip = [bin_of(environment, "python"), "-m", "pip", "install", "--quiet"]
        ran([*pip, "uv", "pipx", "build", "twine", "mypy"], work)
    return bin_of(environment, "uv").parent


def used(work: Path, begins: Sequence[object], python: Path | None = None) -> None:
    """Every command of USED, started with these words; attention too, of a Python with torch."""
    empty = work / "empty"
    empty.mkdir(exist_ok=True)
    for line, words in USED.items():
        said = ran([*begins, *shlex.split(line)[1:]], empty)
        assert words in said, f"{line}: {words!r} is not in\n{said}"
        assert max(map(len, said.splitlines())) <= 80 or "--json" in line or "--markdown" in line, said
    if python is not None:
        print("   ", ran([python, "-c", CALL], empty).strip())


def build(work: Path) -> None:
    ran([bin_of(work / "tools", "python"), "-m", "build", "--outdir", work / "dist", ROOT], work)
    files = sorted((work / "dist").iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"], files
    ran([tools(work) / "twine", "check", "--strict", *files], work)
    ran(["git", "clone", "--quiet", "--no-tags", "--depth", "1", f"file://{ROOT}", "clone"], work)
    ran(
        [bin_of(work / "tools", "python"), "-m", "build", "--outdir", work / "untagged", work / "clone"], work
    )
    written = re.findall('"(.+)"', (ROOT / "attnsel" / "_version.py").read_text(encoding="utf-8"))
    assert wheel_of(work / "untagged").name.split("-")[1] == written[0]
    print("   ", *(path.name for path in files))


def offline(work: Path) -> None:
    wheels, alone = folder_of_wheels(work), without_network()
    wheel, folder = wheel_of(wheels), tools(work)
    assert alone or os.name == "nt" or sys.platform == "darwin", (
        "unshare --map-root-user --net does not work here"
    )
    used(work, [*alone, place(work), "-m", "attnsel"])
    uv = [folder / "uv", "tool", "run", "--no-index", "--find-links", wheels, "--from", wheel, "attnsel"]
    used(work, [*alone, *uv])
    pipx = [
        folder / "pipx",
        "run",
        f"--pip-args=--no-index --find-links={wheels}",
        "--spec",
        wheel,
        "attnsel",
    ]
    here = {"PIPX_HOME": str(work / "pipx"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    assert "torch==2.7.0" in ran([*alone, *pipx, "explain", *QUESTION.split()], work, **here)
    print(f"    pip, uv tool run and pipx run {'in a network namespace' if alone else 'with no index'}")


def environments(work: Path, with_torch: bool) -> None:
    """The rows of data/installed.csv, each made, used and thrown away."""
    with ROWS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    uv, wheel = tools(work) / "uv", wheel_of(folder_of_wheels(work))
    for row in rows:
        if ("torch" in row["packages"]) is not with_torch:
            continue
        environment = work / row["place"]
        found = subprocess.run([uv, "python", "find", *OURS, row["python"]], capture_output=True, env=PYTHONS)
        if found.returncode:
            print(f"    {row['place']}: no Python {row['python']} here")
            continue
        ran([uv, "venv", *OURS, "--python", os.fsdecode(found.stdout).strip(), environment], work)
        python, cache = bin_of(environment, "python"), str(work / "cache")
        into = ["pip", "install", "--quiet", "--python", python, wheel, *row["packages"].split()]
        ran([uv, *into], work, minutes=30, UV_CACHE_DIR=cache, UV_HTTP_TIMEOUT="600")
        listed = ran([uv, "pip", "list", "--python", python, "--format", "freeze"], work)
        names = ("pydantic", "rich", "cyclopts", "packaging", "torch")
        print(
            f"    {row['place']}: Python {row['python']},",
            *re.findall(rf"^({'|'.join(names)})==(\S+)", listed, re.M),
        )
        used(work, [python, "-m", "attnsel"], python if with_torch else None)
        shutil.rmtree(environment)
        if with_torch:
            shutil.rmtree(cache)


def types(work: Path) -> None:
    """The packages that examples import are this environment's; attnsel is the wheel's."""
    environment = work / "typed"
    venv.create(environment, with_pip=True)
    python = bin_of(environment, "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", wheel_of(folder_of_wheels(work))]
    ran(pip, work)
    (site,) = (
        Path(line)
        for line in ran([python, "-c", "import site; print(site.getsitepackages()[0])"], work).split()
    )
    (site / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    examples = work / "examples"
    shutil.copytree(ROOT / "examples", examples, ignore=shutil.ignore_patterns("__pycache__"))
    (work / "mypy.ini").write_text(STRICT, encoding="utf-8")
    files = sorted(examples.glob("*.py"))
    mypy = [sys.executable, "-m", "mypy", "--config-file", work / "mypy.ini", "--python-executable", python]
    print("   ", ran([*mypy, "--cache-dir", work / "mypy", *files], work).strip())


PARTS: Mapping[str, Callable[[Path], None]] = {
    "build": build,
    "offline": offline,
    "releases": lambda work: environments(work, with_torch=False),
    "torch": lambda work: environments(work, with_torch=True),
    "types": types,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    chosen = parser.parse_args().parts or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: no such part: {', '.join(PARTS)}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        tools(Path(folder))
        for name in chosen:
            try:
                PARTS[name](Path(folder))
                print(f"✔ {name}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"✖ {name}: {error}", flush=True)
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
