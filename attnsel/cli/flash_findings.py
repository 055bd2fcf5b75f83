"""What the doctor says of FlashAttention: packages that do not load, files of another, and who uses what."""

from __future__ import annotations

from collections.abc import Iterator

from attnsel.cli.findings import Finding
from attnsel.cli.flash_errors import explain, reinstall
from attnsel.cli.flash_users import uses
from attnsel.cli.probe import ProbedMachine
from attnsel.environment.installed import FLASH_ATTN


def find_flash(machine: ProbedMachine) -> Iterator[Finding]:
    """Nothing where there is no FlashAttention: that one line stands among what is installed."""
    yield from _packages(machine)
    yield from _cute(machine)
    yield from _strangers(machine)
    yield from _libraries(machine)


def _packages(machine: ProbedMachine) -> Iterator[Finding]:
    for component, name in FLASH_ATTN.items():
        probe = machine.probes[component]
        if probe.loads is not False:
            continue
        version = machine.flash.packages.get(name, probe.installed)
        told = explain(component, machine)
        why = f". {told.why[0].upper()}{told.why[1:]}" if told.why else ""
        yield Finding(
            "error", f"{name} {version} is installed and does not load: {probe.trouble}{why}", told.fix
        )


def _cute(machine: ProbedMachine) -> Iterator[Finding]:
    """Two packages write flash_attn/cute; the last one to be installed wins."""
    two, four = FLASH_ATTN["flash_attn"], FLASH_ATTN["flash_attn_4"]
    if machine.flash.cute != two:
        return
    has = machine.flash.packages
    yield Finding(
        "error",
        f"flash_attn/cute is that of {two} {has.get(two)}, an early one, which was installed over that of "
        f"{four} {has.get(four)}",
        reinstall("flash_attn_4", machine),
    )


def _strangers(machine: ProbedMachine) -> Iterator[Finding]:
    for module, where in machine.flash.strangers.items():
        if where == "attnsel":
            yield Finding("note", f"the module {module} is attnsel's own in this process")
            continue
        package = FLASH_ATTN["flash_attn_3" if module == "flash_attn_interface" else "flash_attn"]
        yield Finding(
            "warning",
            f"there is a module {module} without the package {package}: it is of {where}. transformers and "
            "attnsel leave it alone, programs that only import it do not",
            f"remove what is left of it, or install {package}",
        )


def _libraries(machine: ProbedMachine) -> Iterator[Finding]:
    asked = machine.flash.transformers
    if asked.loads is False:
        yield Finding(
            "error",
            f"transformers {asked.installed} is installed and does not load: {asked.trouble}",
            "reinstall it: pip install --force-reinstall transformers",
        )
    for use in uses(machine):
        if use.breaks:
            yield Finding("error", f"{use.library}: {use.name} fails: {use.why}", use.fix)
        elif use.gets is None:
            yield Finding("note", f"{use.library}: {use.name} has nothing to run: {use.why}", use.fix)
        else:
            yield Finding("note", f"{use.library}: {use.name} runs {use.gets}: {use.why}")
