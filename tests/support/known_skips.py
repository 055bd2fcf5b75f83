"""What may be skipped, and where: any other skip fails the run, with the test's name and its reason.

A test that turns a lost ability into a skip would pass for ever. So a reason stands here, as a regular
expression that matches all of it, with the condition of a machine under which it is no news.
"""

# ruff: noqa: E501 - a row is a line

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import pytest

# What tests ask for by importorskip. Tests of .ci/planner run without torch, and of those that need it, modules
# and single tests skip. README's second command installs all but the last line.
OPTIONAL = {
    "torch", "triton", "transformers", "setuptools", "jsonschema", "nbclient", "matplotlib", "tomllib",
    "griffe", "zensical", "selectolax", "yaml", "check_jsonschema", "playwright", "cudnn", "mypy", "ruff",
}  # fmt: skip


def found(module: str) -> bool:
    """Whether it can be imported here; what is inside a package that is missing cannot."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return module in sys.modules


def without(*modules: str) -> Callable[[], bool]:
    return lambda: not all(map(found, modules))


def without_programs(*names: str) -> Callable[[], bool]:
    """Without one of them at least."""
    return lambda: not all(map(shutil.which, names))


def without_gloo() -> bool:
    torch = importlib.import_module("torch") if found("torch") else None
    return torch is None or not torch.distributed.is_available() or not torch.distributed.is_gloo_available()


def without_cuda() -> bool:
    torch = importlib.import_module("torch") if found("torch") else None
    return torch is None or not torch.cuda.is_available()


def release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def unset(variable: str) -> Callable[[], bool]:
    return lambda: not os.environ.get(variable)


def always() -> bool:
    return True


def not_linux() -> bool:
    return sys.platform != "linux"


def windows() -> bool:
    return os.name == "nt"


def not_a_git_checkout() -> bool:
    return not (Path(__file__).parents[2] / ".git").exists() or shutil.which("git") is None


def older_than(*python: int) -> Callable[[], bool]:
    return lambda: sys.version_info < python


class Known(NamedTuple):
    reason: str
    here: Callable[[], bool]  # whether this machine is one where it is skipped
    why: str


KNOWN = (
    # packages
    Known(r"(torch or )?triton is (not installed|missing)|they compile", without("torch", "triton"), "Linux's"),
    Known(r"torch is not installed|it runs|it counts what runs|no torch.distributed", without("torch"), "planner"),
    Known(r"transformers is not installed", without("transformers"), "extra examples"),
    Known(r"module 'transformers' has __version__ .* required is: .*", always, "tests of its newest release"),
    Known(r"the site is built with: .*", without("zensical", "selectolax", "griffe"), "group docs; the gate's planner"),
    Known(r"no Chromium is installed .*", always, "big"),
    Known(r"(ruff|mypy) is not installed", without("ruff", "mypy"), "extra lint; the gate checks types elsewhere"),
    Known(r"(zizmor|npm) is not installed", without_programs("zizmor", "npm"), "the site's workflow has them"),
    Known(r"needs nvidia-cudnn-frontend and a libcudnn wheel", always, "the gate asks libcudnn by itself"),
    Known(r"nvidia-cudnn-frontend is not installed", without("cudnn"), "for GPUs"),
    Known(r"the rest of it needs .*|\S+ needs [\w., -]+", always, "a page that names what is not installed"),
    Known(r"\S+ installs a package, which needs setuptools here", without("setuptools"), "extra test"),
    Known(r"compared with torch 2\.13", lambda: not release("torch").startswith("2.13."), "recorded of that one"),
    Known(r"the table is of another release", lambda: release("triton") != "3.7.1", "of Triton"),
    Known(r"the kernel is not for this Triton|not with this Triton", lambda: release("triton") < "3.", "older"),
    # what is installed, and must not be
    Known(r"a real flash_attn is installed here", lambda: found("flash_attn"), "stand-ins take its place"),
    Known(r"there is a GPU", lambda: not without_cuda(), "for its absence"),
    # systems
    Known(r"no Gloo", without_gloo, "a torch without it"),
    Known(r"import-linter needs Python 3\.11|.* with Python 3\.11 or newer", older_than(3, 11),
          "older Python"),
    Known(r"libcudnn is asked on Linux|the peak of memory is read from /proc|looks for \.so files", not_linux, ""),
    Known(r"there is no /dev/(full|zero)", not_linux, "Linux's files"),
    Known(r"needs a POSIX shell|no named pipes here|signals .*|no SIGPIPE there", windows, ""),
    Known(r"no pseudo-terminal there|no users as on Unix|no fork on this platform",
          windows, ""),
    Known(r"only root can give folders away", lambda: hasattr(os, "geteuid") and os.geteuid() != 0, ""),
    Known(r"there is no bash|no bash|pages are typed into bash", without_programs("bash"), ""),
    Known(r"no C compiler|stand-ins are compiled.*", lambda: not_linux() or without_programs("cc")(),
          ""),
    # what lies elsewhere
    Known(r"no git checkout|.*(none|needs a checkout) of git's", not_a_git_checkout, "an unpacked source distribution"),
    Known(r"CUDNN_FOR_TESTS names no libcudnn", unset("CUDNN_FOR_TESTS"), "the gate names one"),
    Known(r"ATTNSEL_FLASH_ATTENTION_SOURCE names no .*", unset("ATTNSEL_FLASH_ATTENTION_SOURCE"), "1 GB"),
    Known(r"ATTNSEL_FLASH_ATTN_4_SOURCE names no .*", unset("ATTNSEL_FLASH_ATTN_4_SOURCE"), "a wheel"),
    Known(r"TRANSFORMER_ENGINE_FOR_TESTS names no checkout", unset("TRANSFORMER_ENGINE_FOR_TESTS"), "TransformerEngine's"),
    Known(r"the page is (not )?about .*|.* has no (flash_attn|hopper)/.*", always, "another checkout than the page's"),
)  # fmt: skip
# What a GPU refuses there, `attnsel prove` records as not shown; without one all of it skips.
ON_GPUS = re.compile(r"(^|/)tests/gpu/")


def is_known(where: str, reason: str) -> bool:
    """Whether a test of file ``where`` may be skipped here for this reason."""
    missing = re.match(r"could not import '([\w.]+)'", reason)
    if missing:
        inner = re.search(r"No module named '([\w.]+)'", reason)
        names = {missing[1].partition(".")[0], *([inner[1].partition(".")[0]] if inner else [])}
        return any(name in OPTIONAL and not found(name) for name in names)
    if ON_GPUS.search(where.replace(os.sep, "/")):
        return True
    return any(re.fullmatch(one.reason, reason, re.S) and one.here() for one in KNOWN)


class KnownSkips:
    """Looks at every report; with pytest-xdist in the controller, which gets those of all workers."""

    def __init__(self) -> None:
        self.unknown: dict[str, str] = {}

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        where, text = (report.nodeid, str(report.longrepr))
        if isinstance(report.longrepr, tuple):
            file, _, text = report.longrepr
            where = f"{file} {where}"
        reason = text.removeprefix("Skipped: ").strip()
        if not is_known(where, reason):
            self.unknown[report.nodeid] = reason

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.unknown and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unknown:
            terminalreporter.section("skips that are not known", red=True, bold=True)
            terminalreporter.line(
                "A test must not pass by skipping. Where a skip is right: tests/support/known_skips.py"
            )
            for name, reason in self.unknown.items():
                terminalreporter.line(f"{name}: {reason}")


def watch(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker's reports reach the controller
        config.pluginmanager.register(KnownSkips(), "known_skips")
