"""attnsel in a program's other libraries while it runs, and out of them again: what ``attnsel run`` does."""

from __future__ import annotations

from attnsel.base.spawned import first_in_children, no_longer_in_children
from attnsel.debug import is_logging_rank
from attnsel.f_sdpa import shim as f_sdpa
from attnsel.flash_attn import shim as flash_attn
from attnsel.integrations import transformers_flash
from attnsel.settings import current

_TRANSFORMERS = "attnsel.integrations.transformers"


def put_in_place(*, force: bool, sdpa: bool, transformers: bool) -> str:
    """Put attnsel under the name flash_attn and wherever else was asked for; says what was done.

    The sentence is empty on ranks that do not log. Raises ModuleNotFoundError without transformers.
    """
    installed = flash_attn.install(force=force)
    message = str(installed or "flash_attn is the real package: it works here")
    if sdpa:
        f_sdpa.install()
        message += "; F.scaled_dot_product_attention is attnsel's"
    if transformers:
        from attnsel.integrations.transformers import register  # needs transformers, which takes seconds

        first_in_children(_TRANSFORMERS, f"from {_TRANSFORMERS} import register; register()")
        message += f'; transformers knows attn_implementation="{register()}"'
        if installed:
            message += f' and loads "{transformers_flash.resolve()}" on attnsel\'s functions'
    return message if is_logging_rank(current()) else ""


def put_back(*, sdpa: bool, transformers: bool) -> None:
    """What was put into other libraries goes when the program has ended."""
    if sdpa:
        f_sdpa.uninstall()
    if transformers:
        transformers_flash.undo()
        no_longer_in_children(_TRANSFORMERS)
