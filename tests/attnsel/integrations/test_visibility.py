"""What a layer of transformers computes with attnsel's visibility is what its own mask says, pair by pair."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch

LENGTHS = ((5, 5), (3, 8), (1, 8), (8, 8))
PADDING = ("11111111", "00111111", "11111100", "11011111", "00111100", "00000000")
SEQUENCES = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2]])


def cases(m):
    functions = [m.causal_mask_function, m.bidirectional_mask_function]
    functions += map(m.sliding_window_causal_mask_function, (1, 3, 7, 8))
    functions += map(m.sliding_window_bidirectional_mask_function, (1, 6, 7))
    functions += [m.or_masks(m.causal_mask_function, m.sliding_window_bidirectional_mask_function(2))]
    yield from product(functions, (None, *PADDING), LENGTHS)
    yield m.and_masks(m.causal_mask_function, m.packed_sequence_mask_function(SEQUENCES)), None, (8, 8)


@pytest.mark.filterwarnings("ignore::attnsel.debug.CopyWarning")
def test_every_mask_function_beside_every_padding():
    theirs = pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")
    from attnsel.integrations.transformers import LazyMask, attention_forward, visible

    made, kinds = torch.Generator().manual_seed(0), set()
    for function, padding, (rows, keys) in cases(theirs):
        q, k, v = (torch.randn(2, 2, n, 8, generator=made, dtype=torch.float64) for n in (rows, keys, keys))
        real = torch.ones(2, keys, dtype=torch.bool)
        if padding is not None:
            real[1] = torch.tensor([one == "1" for one in padding[-keys:]])
        asked = {
            "batch_size": 2,
            "q_length": rows,
            "kv_length": keys,
            "q_offset": keys - rows,
            "dtype": q.dtype,
        }
        asked |= {"mask_function": function, "attention_mask": None if padding is None else real}
        seen = visible(**asked, allow_is_causal_skip=True, allow_is_bidirectional_skip=True)
        kinds.add(type(seen))
        causal = function is not theirs.bidirectional_mask_function
        out, _ = attention_forward(SimpleNamespace(is_causal=causal), q, k, v, seen, scaling=0.5)
        pairs = theirs.sdpa_mask(**asked, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        exact = (q @ k.mT * 0.5).masked_fill(~pairs, -torch.inf).softmax(-1) @ v
        judged = pairs.any(-1)[:, 0] & (real[:, -rows:] if causal else True)
        assert torch.allclose(out[judged], exact.transpose(1, 2)[judged], atol=1e-6), (
            function,
            padding,
            rows,
        )
        assert (seen.clone()[...] if type(seen) is LazyMask else seen).equal(pairs), "to whoever looks at it"
    assert kinds == {LazyMask, torch.Tensor}
