"""Known bugs of the kernel that another library's chooser takes, in the call that it makes of a question."""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.releases import bundled_frontend
from attnsel.params import AttentionParams
from attnsel.rules.api import every_hint, is_known_bug
from attnsel.selection.evaluate import findings
from attnsel.verdicts.dispatch import DispatcherName, Refusal

_OWN_KERNELS = {"torch": ("sdpa.math", "TORCH"), "te": ("cudnn", "TE")}
"""The candidate that stands for kernels of the library's own, and the family of the hints about these."""


def known_bugs(
    dispatcher: DispatcherName, candidate: str, p: AttentionParams, env: Environment
) -> tuple[Refusal, ...]:
    """Those that touch ``candidate`` ("" for a kernel that attnsel has none for: nothing is known of it)."""
    if not candidate:
        return ()
    if dispatcher == "te" and env.transformer_engine is not None:
        frontend = bundled_frontend(env.transformer_engine)
        env = env if frontend is None else env.replace(cudnn_frontend=frontend)
    pages = [
        reason.rule
        for reason in findings(p, env, among=(candidate,))[candidate]
        if not reason.unknown and is_known_bug(reason.code)
    ]
    own, family = _OWN_KERNELS.get(dispatcher, ("", ""))
    if candidate == own:
        pages += [
            hint
            for hint in every_hint()
            if hint.family == family and is_known_bug(hint.code) and hint.advice(p, env) is not None
        ]
    return tuple(Refusal(page.title, page.source, page.code) for page in pages)
