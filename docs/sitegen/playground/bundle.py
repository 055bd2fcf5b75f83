"""Python, the planner and what it imports, as the files that a browser loads.

Pyodide comes from npm and the wheels from the Python package index, at the versions and hashes that
``package-lock.json`` and ``requirements.txt`` beside this file pin. They are fetched once into the user's
cache folder. The modules are compiled by that same Python (``compile.mjs``): a browser would need seconds.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PLATFORM = "pyemscripten_2026_0_wasm32"
PYTHON = "3.14"
ARCHIVES = ("library", "packages", "rest")
_PINS = ("package.json", "package-lock.json", "requirements.txt")
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)  # of a zip file: the same input gives the same bytes

_NOT_PLANNED = "attnsel/_suite/"  # tests and benchmarks
# What Pyodide needs besides what was imported while questions were asked: the browser's own codecs and loop.
_ALWAYS = ("encodings.idna", "encodings.latin_1", "encodings.cp437", "pyodide.webloop", "pyodide.http")


class Fetched(NamedTuple):
    """What the registries gave: the folder of Pyodide's package, that of axe-core, and the wheels."""

    pyodide: Path
    axe: Path
    wheels: Path


class NotFetched(RuntimeError):
    """A registry could not be reached, or gave something else than what is pinned."""


def cache() -> Path:
    """The user's own folder for what is fetched; it is never inside the checkout."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "attnsel" / "playground"


def fetch() -> Fetched:
    """What is pinned, from the cache or else from the registries. Raises NotFetched."""
    pins = b"".join((HERE / name).read_bytes() for name in _PINS)
    place = cache() / hashlib.sha256(pins + PLATFORM.encode()).hexdigest()[:16]
    found = Fetched(place / "node_modules/pyodide", place / "node_modules/axe-core", place / "wheels")
    if place.is_dir():
        return found
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as work:
        folder = Path(work) / "new"
        folder.mkdir()
        for name in _PINS:
            shutil.copy(HERE / name, folder)
        _run("npm", ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"], folder)
        target = ["--platform", PLATFORM, "--python-version", PYTHON, "--implementation", "cp"]
        exact = [
            "--no-deps",
            "--require-hashes",
            "--only-binary",
            ":all:",
            "--abi",
            f"cp{PYTHON.replace('.', '')}",
        ]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        _run("pip", [*pip, *exact, *target, "-d", "wheels", "-r", "requirements.txt"], folder)
        try:
            folder.rename(place)
        except OSError:  # another build was first
            if not place.is_dir():
                raise
    return found


def _run(tool: str, command: list[str], folder: Path, given: str = "") -> None:
    try:
        done = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True)
    except FileNotFoundError:
        raise NotFetched(f"the playground needs {command[0]}, which is not installed") from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-1500:]
        raise NotFetched(f"{tool} could not bring what the playground needs:\n{words}")


class Bundle(NamedTuple):
    """What a page loads. files: by name, Pyodide's own and archives of compiled modules; lock: which Python
    they are, as Pyodide asks it."""

    files: dict[str, bytes]
    lock: dict[str, Any]


def build() -> Bundle:
    """What a page loads; from the cache where nothing has changed. Raises NotFetched.

    ``library`` and ``packages`` hold the modules that answers were seen to need, ``rest`` all others; a page
    loads it where one of them is missed. What compresses well is stored as gzip under a name that no server
    changes on the way; the page unpacks it.
    """
    fetched = fetch()
    lock = json.loads((fetched.pyodide / "pyodide-lock.json").read_text(encoding="utf-8"))["info"]
    files = {name: (fetched.pyodide / name).read_bytes() for name in ("pyodide.mjs", "pyodide.asm.mjs")}
    files["pyodide.asm.wasm.gzip"] = _gzip((fetched.pyodide / "pyodide.asm.wasm").read_bytes())
    return Bundle({**files, **_compiled(fetched)}, {"info": lock, "packages": {}})


def _compiled(fetched: Fetched) -> dict[str, bytes]:
    """The archives, compiled anew where a module or a pin is another than the last time."""
    own = dict(ours())
    made_by = [HERE / name for name in (*_PINS, "bundle.py", "compile.mjs", "warm.txt")]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in made_by))
    for name, content in own.items():
        key.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    place = cache() / "compiled" / key.hexdigest()[:16]
    names = [f"{name}.zip.gzip" for name in ARCHIVES]
    if all((place / name).is_file() for name in names):
        return {name: (place / name).read_bytes() for name in names}
    with tempfile.TemporaryDirectory() as work:
        sources, compiled = Path(work) / "sources", Path(work) / "compiled"
        with zipfile.ZipFile(fetched.pyodide / "python_stdlib.zip") as library:
            modules = [name for name in library.namelist() if name.endswith(".py")]
            _write(sources / "library", ((name, library.read(name)) for name in modules))
        _write(sources / "packages", _packages(fetched.wheels))
        _write(sources / "packages", own.items())
        compiled.mkdir()
        script = [
            str(HERE / "compile.mjs"),
            str(fetched.pyodide / "pyodide.mjs"),
            str(sources),
            str(compiled),
        ]
        _run("node", ["node", *script], Path(work), (HERE / "warm.txt").read_text(encoding="utf-8").strip())
        loaded = {*json.loads((compiled / "loaded.json").read_text()), *_ALWAYS}
        made = {f"{name}.zip.gzip": _gzip(archive) for name, archive in _archives(compiled, loaded).items()}
    shutil.rmtree(place.parent, ignore_errors=True)  # one edition is kept
    _write(place, made.items())
    return made


def _archives(compiled: Path, loaded: set[str]) -> dict[str, bytes]:
    """Zip files without compression: Python reads them faster, and gzip then packs all modules as one."""
    written = {name: io.BytesIO() for name in ARCHIVES}
    archives = {name: zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) for name, file in written.items()}
    for part in ("library", "packages"):
        for path in sorted((compiled / part).rglob("*")):
            if path.is_dir():
                continue
            name = path.relative_to(compiled / part).as_posix()
            module = name.removesuffix(".pyc").removesuffix("/__init__").replace("/", ".")
            needed = module in loaded or not name.endswith(".pyc")
            place, inside = (part, name) if needed else ("rest", f"{part}/{name}")
            archives[place].writestr(zipfile.ZipInfo(inside, _FIRST_DAY), path.read_bytes())
    for archive in archives.values():
        archive.close()
    return {name: file.getvalue() for name, file in written.items()}


def _packages(wheels: Path) -> Iterator[tuple[str, bytes]]:
    """Modules of the wheels, and the metadata that importlib reads versions from."""
    for path in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if name.endswith((".py", ".so")):
                    yield name, wheel.read(name)
                elif name.endswith(".dist-info/METADATA"):
                    yield name, wheel.read(name).partition(b"\n\n")[0] + b"\n"


def ours() -> Iterator[tuple[str, bytes]]:
    """The modules and rows of attnsel that planning needs, as the wheel has them (setup.py)."""
    for inside in ("attnsel", "attnsel/rules", "attnsel/backends"):
        folder = ROOT / (inside if inside == "attnsel" else inside.removeprefix("attnsel/"))
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".csv")):
            name = f"{inside}/{path.relative_to(folder).as_posix()}"
            if not name.startswith(_NOT_PLANNED):
                yield name, path.read_bytes()
    yield "answer.py", (ROOT / "docs" / "playground" / "answer.py").read_bytes()


def _write(folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
    for name, content in files:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


def _gzip(content: bytes) -> bytes:
    return gzip.compress(content, compresslevel=9, mtime=0)
