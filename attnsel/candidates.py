"""The candidates: the finest things that can be chosen, so that no choice hides inside another.

Those of plug-ins join them when they are first needed: see attnsel/plugins.py.
"""

from __future__ import annotations

from typing import NamedTuple


class CandidateInfo(NamedTuple):
    name: str
    title: str
    runs_here: bool  # attnsel has code that runs it; otherwise it is known to the planner only
    adaptations: tuple[str, ...]  # exact changes of a call that may be made for it (attnsel/adapt.py)
    last_resort: bool = False  # right everywhere, slow on a GPU
    component: str | None = None  # what must be installed for it
    owned: bool = False  # a kernel of ours: proven on an architecture by our own results only
    called: bool = False  # its makers' kernel, called by code of ours that is proven in the same way
    plugin: str = ""  # the distribution it comes from and its version; empty for attnsel's own
    proven_on: frozenset[str] = frozenset()  # of a plug-in: where its maker shows it right ("sm90", "cpu")
    kernel: str = ""  # of a plug-in: the module that holds forward and backward
    place: tuple[str, int] | None = None  # of a plug-in: -1 before or 1 after that candidate


_SHAPED = (
    "drop_mask",
    "unpack",
    "pad_sequence",
    "pad_head_dim_qk",
    "pad_head_dim_v",
    "expand_gqa",
    "contiguous",
)
_MASKED = (*_SHAPED, "fold_mask")

OLDEST_TORCH = (2, 6)  # what attnsel runs on; older ones can be planned for

CANDIDATES: dict[str, CandidateInfo] = {
    info.name: info
    for info in (
        CandidateInfo("cudnn", "cuDNN fused attention", True, _SHAPED, component="cudnn", called=True),
        CandidateInfo(
            "triton",
            "attnsel's Triton flash attention",
            True,
            ("drop_mask", "contiguous"),
            component="triton",
            owned=True,
        ),
        CandidateInfo("sdpa.cudnn", "PyTorch SDPA, cuDNN kernel", True, _MASKED, component="torch"),
        CandidateInfo("sdpa.flash", "PyTorch SDPA, flash kernel", True, _MASKED, component="torch"),
        CandidateInfo(
            "sdpa.efficient", "PyTorch SDPA, memory-efficient kernel", True, _MASKED, component="torch"
        ),
        CandidateInfo(
            "sdpa.math", "PyTorch SDPA, plain operations, stores the scores", True, _MASKED, True, "torch"
        ),
        CandidateInfo(
            "tiled",
            "flash attention in plain PyTorch operations, O(S) memory",
            True,
            ("drop_mask",),
            True,
            "torch",
        ),
    )
}
