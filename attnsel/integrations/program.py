"""attnsel in a program's other libraries while it runs, and out of them again: what ``attnsel run`` does."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from attnsel.base.processes import first_in_children, no_longer_in_children
from attnsel.debug import is_logging_rank
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput
from attnsel.f_sdpa import shim as f_sdpa
from attnsel.flash_attn import __version__, shim
from attnsel.runtime.call import constant_when_traced
from attnsel.runtime.dispatch import carried_out
from attnsel.settings import current

# --------------------------------------------------------------------------------------------------------
# ``attn_implementation="flash_attention_2"`` of transformers on attnsel's flash_attn functions.
#
# transformers asks whether the package flash-attn is installed (by its metadata) and whether there is a GPU.
# With ``attnsel.flash_attn.install`` in place both are answered with yes, as attnsel's functions run on a CPU
# too. Its own code around them stays: it unpads, casts and calls ``flash_attn_func`` and its relatives.


logger = logging.getLogger("attnsel")

NAME = "flash_attention_2"
_LIBRARY = "transformers"

_lock = threading.RLock()
_undo: ExitStack | None = None


def _available(*args: Any, **kwargs: Any) -> bool:
    """transformers' ``is_flash_attn_2_available``."""
    return True


@constant_when_traced
def _at_least(library_version: str) -> bool:
    """transformers' ``is_flash_attn_greater_or_equal``."""
    return bool(Version.parse(__version__) >= Version.parse(library_version))


_ANSWERS: dict[str, Callable[..., bool]] = {
    "is_flash_attn_2_available": _available,
    "is_flash_attn_greater_or_equal": _at_least,
    "is_flash_attn_greater_or_equal_2_10": _available,
}
"""Its questions about the package, in utils/import_utils.py. (transformers 4.48 to 5.23; some are older than
others and not in all of them.)"""


def resolve() -> str:
    """Let transformers load ``flash_attention_2`` with attnsel's functions; returns that name.

    Needs ``attnsel.flash_attn.install()``, and raises InvalidInput where the real package was kept. A second
    call changes nothing.
    """
    global _undo
    import transformers
    from transformers.modeling_utils import PreTrainedModel
    from transformers.utils import import_utils

    with _lock:
        if _undo is not None:
            return NAME
        if not shim.is_installed():
            raise InvalidInput(
                "flash_attn", "the real package", f"must be attnsel's: {NAME} is transformers' own with it"
            )
        checks = _checks(PreTrainedModel)
        if not checks:
            raise InvalidInput("transformers", transformers.__version__, f"must be 4.54 or newer for {NAME}")
        _undo = ExitStack()
        for question, answer in _ANSWERS.items():
            original = getattr(import_utils, question, None)
            if original is not None:
                _replace_everywhere(original, answer)
        for method, check in checks.items():
            _set(PreTrainedModel, method, check)
        first_in_children(__name__, f"from {__name__} import resolve; resolve()")
        logger.info('transformers loads attn_implementation="%s" on attnsel\'s flash_attn', NAME)
        return NAME


def undo() -> bool:
    """Give transformers its own checks back. Returns whether there was anything to undo."""
    global _undo
    with _lock:
        if _undo is None:
            return False
        _undo.close()
        _undo = None
        no_longer_in_children(__name__)
        return True


def _checks(model: type) -> dict[str, Callable[..., Any]]:
    """A model's own checks by their names, without the questions about package, GPU and weights' device."""
    made: dict[str, Callable[..., Any]] = {}
    of_two = getattr(model, "_flash_attn_2_can_dispatch", None)  # 4.54 to 5.x
    of_any = getattr(model, "_flash_attn_can_dispatch", None)  # since

    def flash_attn_2_can_dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert of_two is not None
        return True if _is_supported(self) else of_two(self, *args, **kwargs)

    def flash_attn_can_dispatch(self: Any, flash_attn_version: int, *args: Any, **kwargs: Any) -> Any:
        if flash_attn_version == 2 and _is_supported(self):
            return True
        assert of_any is not None
        return of_any(self, flash_attn_version, *args, **kwargs)

    if of_two is not None:
        made["_flash_attn_2_can_dispatch"] = flash_attn_2_can_dispatch
    if of_any is not None:
        made["_flash_attn_can_dispatch"] = flash_attn_can_dispatch
    return made


def _is_supported(model: Any) -> bool:
    """Whether this model has code for it; one that has none says so in transformers' words."""
    return bool(
        getattr(model, "_supports_flash_attn", False) or getattr(model, "_supports_flash_attn_2", False)
    )


def _replace_everywhere(original: Any, answer: Any) -> None:
    """In every module of transformers that has imported it by its name, and in the tables that hold it."""
    loaded = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == _LIBRARY]
    for module in filter(None, loaded):
        for name, value in list(vars(module).items()):
            if value is original:
                _set(module, name, answer)
            elif name == "FLASH_ATTENTION_COMPATIBILITY_MATRIX":
                row = value[2]
                if row.get("general_availability_check") is original:
                    _set_item(row, "general_availability_check", answer)
                    _set_item(row, "pkg_availability_check", answer)


def _set(owner: Any, name: str, value: Any) -> None:
    assert _undo is not None
    before = vars(owner)[name]
    setattr(owner, name, value)
    _undo.callback(setattr, owner, name, before)


def _set_item(owner: dict[str, Any], name: str, value: Any) -> None:
    assert _undo is not None
    before = owner[name]
    owner[name] = value
    _undo.callback(owner.__setitem__, name, before)


_TRANSFORMERS = "attnsel.integrations.transformers"


def put_in_place(*, flash_attn: bool, force: bool, sdpa: bool, transformers: bool) -> str:
    """Put attnsel under the name flash_attn and wherever else was asked for; says what was done.

    The sentence is empty on ranks that do not log. Raises ModuleNotFoundError without transformers.
    """
    done = []
    if flash_attn:
        done = [str(shim.install(force=force) or "flash_attn is the real package: it works here")]
    if sdpa:
        f_sdpa.install()
        done.append("F.scaled_dot_product_attention is attnsel's")
    if transformers:
        from attnsel.integrations.transformers import register  # needs transformers, which takes seconds

        first_in_children(_TRANSFORMERS, f"from {_TRANSFORMERS} import register; register()")
        done.append(f'transformers knows attn_implementation="{register()}"')
        if shim.is_installed():
            done[-1] += f' and loads "{resolve()}" on attnsel\'s functions'
    return "; ".join(done) if is_logging_rank(current()) else ""


def what_ran() -> str:
    """The kernels of this process's calls, those of most different calls first."""
    counted = Counter(selection.backend for selection in carried_out()).most_common()
    if not counted:
        return "no attention of this process came to attnsel"
    return "ran " + ", ".join(f"{name} ({n} different call{'s' * (n > 1)})" for name, n in counted)


def put_back(*, sdpa: bool, transformers: bool) -> None:
    """What was put into other libraries goes when the program has ended."""
    if sdpa:
        f_sdpa.uninstall()
    if transformers:
        undo()
        no_longer_in_children(_TRANSFORMERS)
