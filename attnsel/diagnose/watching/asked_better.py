"""A call of F.sdpa as a program could have written it: the same numbers, in the form that fused kernels want.

F.sdpa goes to math for tensors of other ranks than four, masks of three dimensions, a batch or a head that
broadcasts. None of it is a matter of what is computed. Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from attnsel.params import AttentionParams, TensorSpec

ENABLE_GQA = "enable_gqa"


class Rewritten(NamedTuple):
    """The call in four dimensions, with nothing left to broadcast. ``topics``: what was changed, as
    ``attnsel.diagnose.framework_fixes`` names it."""

    params: AttentionParams
    switches: dict[str, str]
    topics: tuple[str, ...]


def rewritten(p: AttentionParams, switches: dict[str, str]) -> Rewritten:
    """The same call in the form that fused kernels take, and what had to be changed for it."""
    topics: list[str] = []
    tensors = p.tensors
    if tensors.rank != 4:
        topics.append("rank")
        tensors = tensors.replace(rank=4)
    if tensors.mask is not None and len(tensors.mask.shape) not in (2, 4):
        topics.append("mask rank")
        tensors = tensors.replace(mask=_of_four_dimensions(tensors.mask))
    expanded = {name: _expanded(getattr(tensors, name), p.batch_size) for name in ("q", "k", "v")}
    if expanded != {name: getattr(tensors, name) for name in expanded}:
        topics.append("batch of one")
        tensors = tensors.replace(**expanded)
    if switches.get(ENABLE_GQA) == "false" and p.gqa:
        topics.append("no enable_gqa")
        switches = {**switches, ENABLE_GQA: "true"}
    return Rewritten(p.replace(tensors=tensors), switches, tuple(topics))


def _of_four_dimensions(mask: TensorSpec) -> TensorSpec:
    """The mask with leading dimensions of one, which broadcast."""
    missing = 4 - len(mask.shape)
    return mask.replace(shape=(1,) * missing + mask.shape, stride=(0,) * missing + mask.stride)


def _expanded(spec: TensorSpec | None, batch: int) -> TensorSpec | None:
    if spec is None or spec.shape[0] == batch:
        return spec
    return spec.replace(shape=(batch, *spec.shape[1:]), stride=(0, *spec.stride[1:]))


def as_attnsel_takes_it(p: AttentionParams) -> AttentionParams:
    """The question of a rewritten call: a mask of numbers is a bias, which its own fields describe."""
    mask = p.tensors.mask
    if mask is not None and len(mask.shape) < 4:
        mask = _of_four_dimensions(mask)
    if mask is not None and mask.dtype != "bool" and p.attn_mask_type != "arbitrary":
        mask = None
    return p.replace(tensors=p.tensors.replace(mask=mask))
