"""What a measured call should have taken, beside what it took: EXPLAIN ANALYZE. Imports no torch.

Bytes: those of the result, and what the kernel allocates by its own record; of attention written by hand
those of the result alone, which is all that a fused kernel makes. Seconds: arithmetic at the GPU's rate on
paper, or reading and writing the call's tensors at its bandwidth, whichever is longer: a lower bound. None
where the GPU has no figures, and for float32, whose rate is another.
"""

from __future__ import annotations

from attnsel.backends.registry import CANDIDATES
from attnsel.diagnose.watching.record import Site
from attnsel.environment import Environment
from attnsel.environment.hardware_specs import figures_of
from attnsel.params import ITEMSIZE, AttentionParams
from attnsel.selection.memory import memory_parts, tensor_bytes


def with_expectation(site: Site, env: Environment) -> Site:
    """The site with an expectation beside each measurement of a forward."""
    p = site.params
    if p is None or (site.seconds is None and site.peak_bytes is None):
        return site
    changes: dict[str, float | int | None] = {}
    if site.peak_bytes is not None:
        changes["expected_bytes"] = _bytes(site, p, env)
    if site.seconds is not None:
        changes["expected_seconds"] = _seconds(p, env)
    return site.replace(**changes)


def _bytes(site: Site, p: AttentionParams, env: Environment) -> int | None:
    result = p.batch_size * p.max_seqlen_q * p.num_heads * p.head_dim_v * ITEMSIZE[p.dtype]
    if site.candidate in CANDIDATES:
        return result + sum(size for _, size in memory_parts(site.candidate, p, env))
    return result if site.materialised else None


def _seconds(p: AttentionParams, env: Environment) -> float | None:
    figures = figures_of(env.device.name)
    if figures is None or p.dtype not in ("bf16", "fp16"):
        return None
    forward = p.derive(is_training=False)
    return max(forward.flops / (figures.tflops * 1e12), tensor_bytes(forward) / (figures.memory * 1e9))
