"""What tests/proof alone asks of the stand-ins for flash-attn 2 and 3: caches (new keys are written into them
and then attended to), tensors that are packed, S_dmask. attnsel calls none of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import emulated_flash_attn
from emulated_flash_attn import RENAMED, Call, Release, Three, Two
from emulated_flash_math import Forward, rotated

OF_CACHE = {
    "k": "k_new", "v": "v_new", "k_cache": "k", "v_cache": "v", "cache_seqlens": "seqused_k",
    "cache_leftpad": "leftpad_k", "cache_batch_idx": "kv_batch_idx", "rotary_seqlens": "seqlens_rotary",
}  # fmt: skip
RENAMED["kv_batch_idx"] = "entries"
# What flash_attn_interface of 3.0.0b1 has without a default.
EVERY = (
    "k_new", "v_new", "qv", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k",
    "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
    "seqlens_rotary", "q_descale", "k_descale", "v_descale",
)  # fmt: skip


@dataclasses.dataclass
class OfCache(Call):
    """``seqused_k``: the rows before those of ``k_new``."""

    leftpad_k: Tensor | None = None
    entries: Tensor | None = None  # one per sequence
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = True

    def keys(self, n: int) -> Any:
        first = 0 if self.leftpad_k is None else int(self.leftpad_k[n])
        new = 0 if self.k_new is None else self.k_new.shape[1]
        return self.places(n, first, self.used(n) + new)

    def places(self, n: int, first: int, last: int) -> Any:
        if self.cu_seqlens_k is None and self.pages is None:
            assert last <= self.k.shape[1], "past the cache: memory of others"
        entry = n if self.entries is None else int(self.entries[n])
        return super().places(entry, first, last)


class Whole(Release):
    calls = OfCache

    def _act(self, name: str) -> Callable[[dict[str, Any]], Any]:
        if name == "flash_attn_with_kvcache":
            return self._with_cache
        return self._packed if "packed" in name else super()._act(name)

    def _packed(self, given: dict[str, Any]) -> Any:
        """Along the dimension before the heads; with ``num_heads_q`` (3) along the heads."""
        if self.name == "3.0.0b1+early":
            raise TypeError("six arguments without a default are missing: it is broken in this release")
        if "cu_seqlens" in given:  # one for both
            given |= {name: given[name[:-2]] for name in ("cu_seqlens_q", "cu_seqlens_k")}
            given |= {name: given[name[:-2]] for name in ("max_seqlen_q", "max_seqlen_k")}
        heads = given.get("num_heads_q")
        if heads is not None:
            groups = (given["qkv"].shape[-2] - heads) // 2
            parts = given["qkv"].split([heads, groups, groups], dim=-2)
        elif "qkv" in given:
            parts = given["qkv"].unbind(-3)
        else:
            parts = given["q"], *given["kv"].unbind(-3)
        return self._public(given | dict(zip("qkv", parts, strict=True)))

    def _with_cache(self, given: dict[str, Any]) -> Any:
        for name in ("k_cache", "v_cache"):
            assert given[name].stride(-1) == 1, "caches must have a contiguous last dimension"
        if given["softmax_scale"] is None:
            given["softmax_scale"] = given["q"].shape[-1] ** -0.5
        if isinstance(given["cache_seqlens"], int):
            newer = self.since("2.8.4" if self.generation == 2 else "3.0.0")
            rows = len(given["q" if newer else "k_cache"])
            given["cache_seqlens"] = torch.full((rows,), given["cache_seqlens"], dtype=torch.int32)
        wanted = given.pop("return_softmax_lse", False)
        out, *more = self.over_cache({OF_CACHE.get(name, name): value for name, value in given.items()})
        return (out, *more) if wanted else out

    def over_cache(self, given: dict[str, Any]) -> tuple[Any, ...]:
        raise NotImplementedError

    def queries(self, call: Any, n: int, q: Tensor) -> Tensor:
        """Rotated where that is asked for, after the new keys are in the cache."""
        if call.k_new is None:
            return q
        k, end = call.k_new[n], call.used(n)
        if call.rotary_cos is not None:
            angles, how = (call.rotary_cos, call.rotary_sin), self.masked(call, n)
            moving = how.left is not None or how.right is not None or how.chunk > 0
            k = rotated(k, *angles, end + torch.arange(len(k)), call.rotary_interleaved)
            q = rotated(q, *angles, end + torch.arange(len(q)) * moving, call.rotary_interleaved)
        at = call.places(n, end, end + len(k))
        call.k[at], call.v[at] = k, call.v_new[n]
        return q

    def check_shapes(self, call: Any) -> None:
        picked = call
        if call.entries is not None:
            k, v = (t[call.entries.long()] for t in (call.k, call.v))
            picked = dataclasses.replace(call, k=k, v=v)
        super().check_shapes(picked)
        new, cos, sin, check = call.k_new, call.rotary_cos, call.rotary_sin, self.check
        self.check_tensors(call, k_new=new, v_new=call.v_new)
        for name in ("leftpad_k", "entries"):
            t = getattr(call, name)
            if t is not None:
                check(t.dtype == torch.int32 and t.is_contiguous() and t.shape == (call.batch,), name)
                check(call.pages is None or self.generation == 3, f"{name} with pages")
        if new is not None:
            check(call.v_new is not None and call.seqused_k is not None, "new keys need values and lengths")
            rows, keys = call.longest
            check(rows <= keys, "more queries than the cache has rows")
            check(new.shape == call.v_new.shape == (call.batch, new.shape[1], *call.k.shape[-2:]), "k: shape")
        if cos is not None:
            check(new is not None and sin is not None, "rotary needs new keys, and sin")
            check(2 * cos.shape[1] <= call.q.shape[-1] and cos.shape[1] % 8 == 0, "rotary_dim")
            check(cos.shape == sin.shape and len(cos) >= call.longest[1], "cos, sin: shape")
            check(cos.dtype == sin.dtype == call.q.dtype, "cos, sin: dtype")
            check(cos.is_contiguous() and sin.is_contiguous(), "cos and sin must be contiguous")


class WholeTwo(Whole, Two):
    def over_cache(self, given: dict[str, Any]) -> tuple[Any, ...]:
        call, _ = self.call("flash_attn_with_kvcache", given)
        out, lse = self.unwritten(call)
        self.attend(call, out, lse)
        return out, lse

    def s_dmask(self, call: Call, wanted: bool) -> Tensor | None:
        """p, negative where dropped, of no scale to rely on; lengths up to a multiple of 128."""
        if not wanted:
            return super().s_dmask(call, wanted)
        self.check(call.dropout_p > 0, "return_softmax needs dropout")
        up = [-(-most // 128) * 128 for most in call.longest]
        s_dmask = call.q.new_full((call.batch, call.q.shape[-2], *up), math.nan)

        def encode(n: int, made: Forward) -> None:
            keep = self.keep(call, n, *made.hidden.shape)
            s_dmask[n, :, : made.p.shape[1], : made.p.shape[2]] = torch.where(keep > 0, made.p, -made.p)

        self.attend(call, *self.unwritten(call), encode)
        return s_dmask


class WholeThree(Whole, Three):
    def over_cache(self, given: dict[str, Any]) -> tuple[Any, ...]:
        made: tuple[Any, ...] = self.functions[self.forward_name](**self.told(self.forward_name, given))
        return made


emulated_flash_attn.RELEASES |= {2: WholeTwo, 3: WholeThree}
