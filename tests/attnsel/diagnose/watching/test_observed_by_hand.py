"""Attention by hand, while a program is watched: found, counted, and left as it is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from attnsel.diagnose.watching.session import watch  # noqa: E402


class Block(nn.Module):
    def __init__(self, d=32, h=4):
        super().__init__()
        self.qkv, self.out, self.h = nn.Linear(d, 3 * d), nn.Linear(d, d), h

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (d // self.h) ** -0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        scores = F.dropout(F.softmax(scores, -1), 0.1, self.training)
        return self.out((scores @ v).transpose(1, 2).reshape(b, n, d))


def trained(model, steps=20):
    torch.manual_seed(0)
    x, results = torch.randn(2, 16, 32), []
    model.zero_grad()
    for _ in range(steps):
        out = model(x)
        out.sum().backward()
        results.append(out.detach())
    return [*results, *(p.grad.clone() for p in model.parameters())]


@pytest.fixture
def model():
    torch.manual_seed(1)
    return nn.Sequential(*[Block() for _ in range(3)])


def test_every_call_is_counted_and_nothing_changes(model):
    plain = trained(model)
    with watch() as w:
        watched = trained(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    (site,) = w.sites
    assert (site.api, site.calls, site.backward_calls) == ("by hand", 60, 60)
    assert site.params.attn_mask_type == "causal"
    assert site.params.attention_dropout == 0.1
    assert "is_causal=True, dropout_p=0.1 if self.training else 0.0" in site.fix
    assert [one.what for one in site.materialised] == [
        "scores",
        "scores, scaled",
        "scores, masked",
        "probabilities",
        "probabilities, dropped",
    ]
    assert {one.bytes for one in site.materialised} == {2 * 4 * 16 * 16 * 4}
    assert "Block.forward" in site.where
