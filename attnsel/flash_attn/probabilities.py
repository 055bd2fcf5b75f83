"""S_dmask: the probabilities of a call with dropout, for tests and inspection.

FlashAttention's contract: [b, h, ceil128(s_q), ceil128(s_k)] in q's dtype; negative where dropout dropped the
entry; not normalised: exp(score - m) with m the running maximum of the row over blocks of
``_get_block_size_n`` keys, from the last block to the first, which is what the package's own normalisation
expects. Zero outside the sequences. Needs O(b h s_q s_k) memory in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnsel.runtime.call import Config, Extras
from attnsel.runtime.explicit_backward import kept_entries


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys per block of FlashAttention-2's forward on this device.

    Source: flash_attn/flash_attn_interface.py, 2.8. Every device but an NVIDIA GPU counts as sm80.
    """
    assert head_dim <= 256
    capability = (8, 0)
    if torch.device(device).type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    consumer_ampere = capability[0] == 8 and capability[1] > 0  # sm86, sm89
    if head_dim <= 32 or (head_dim <= 64 and not is_dropout):
        return 128
    if 96 < head_dim <= 128 and (is_dropout or (consumer_ampere and not is_causal)):
        return 32
    return 64


def signed_probabilities(cfg: Config, q: Tensor, k: Tensor, extras: Extras) -> Tensor:
    """S_dmask of a call that dropped by ``extras.dropout_seed``.

    q [b, s_q, h, d] and k [b, s_k, g, d], or packed with their lengths in ``extras``.
    """
    assert extras.dropout_seed is not None
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        q, rows = _dense(q, extras.cu_seqlens_q, extras.cu_seqlens_q_padded, extras.max_seqlen_q)
        k, keys = _dense(k, extras.cu_seqlens_kv, extras.cu_seqlens_kv_padded, extras.max_seqlen_kv)
        x, visible = _scores(cfg, q, k, extras.alibi_slopes, rows, keys)
        batch, heads, s_q, s_k = x.shape
        block = _get_block_size_n(q.device, q.shape[-1], True, "causal" in cfg.attn_mask_type)
        p = (x - _running_peak(x, block)).exp().masked_fill(~visible, 0.0)
        drop = ~kept_entries(extras.dropout_seed, cfg.attention_dropout, batch, heads, s_q, s_k)
        result = q.new_zeros(batch, heads, -(-s_q // 128) * 128, -(-s_k // 128) * 128)
        result[:, :, :s_q, :s_k] = torch.where(drop, -p, p).to(q.dtype)
        return result


def _dense(
    t: Tensor, cu_seqlens: Tensor | None, starts: Tensor | None, longest: int | None
) -> tuple[Tensor, Tensor]:
    """[b, s, heads, d] and the rows of each sequence, int64 [b].

    starts: int32 [b + 1], where packed sequences start in memory, if not at ``cu_seqlens``.
    """
    if cu_seqlens is None:
        return t, torch.full((t.shape[0],), t.shape[1], device=t.device)
    first = cu_seqlens if starts is None else starts
    index = first[:-1, None].long() + torch.arange(longest or 0, device=t.device)
    dense = t.index_select(0, index.clamp(max=t.shape[0] - 1).flatten()).unflatten(0, index.shape)
    return dense, cu_seqlens.diff().long()


def _scores(
    cfg: Config, q: Tensor, k: Tensor, alibi_slopes: Tensor | None, rows: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Scores [b, h, s_q, s_k] in float32, -inf where not visible, and what is visible [b, 1, s_q, s_k]."""
    heads, groups = q.shape[2], k.shape[2]
    scale = q.shape[-1] ** -0.5 if cfg.softmax_scale is None else cfg.softmax_scale
    q, k = q.transpose(1, 2).float(), k.transpose(1, 2).float().repeat_interleave(heads // groups, dim=1)
    x = scale * (q @ k.transpose(-1, -2))
    if cfg.softcap:
        x = cfg.softcap * torch.tanh(x / cfg.softcap)
    i = torch.arange(x.shape[2], device=x.device)[:, None]
    j = torch.arange(x.shape[3], device=x.device)
    rows, keys = rows.view(-1, 1, 1, 1), keys.view(-1, 1, 1, 1)
    distance = j - i - (keys - rows)
    if alibi_slopes is not None:
        x = x - alibi_slopes.reshape(-1, heads, 1, 1) * distance.abs()
    visible = (i < rows) & (j < keys)
    left, right = cfg.window_size or (-1, -1)
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    return x.masked_fill(~visible, -torch.inf), visible


def _running_peak(x: Tensor, block: int) -> Tensor:
    """The largest score of each row in its block of keys and all later ones; 0 where nothing is visible."""
    columns = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -columns % block), value=-torch.inf).unflatten(-1, (-1, block))
    peak = blocks.amax(-1).flip(-1).cummax(-1).values.flip(-1)
    return peak.repeat_interleave(block, dim=-1)[..., :columns].nan_to_num(neginf=0.0)
