"""A small language model whose attention is written by hand: right, and slower than it has to be.

    python examples/slow_model/before.py
    attnsel watch examples/slow_model/before.py     # which line is slow, why, and what to write instead

What is slow about it: every score is stored, in forward and backward; a mask of [s, s] is made and added
where "causal" says the same; key and value heads are repeated for the query heads that share them.
``after.py`` is the same program with what ``attnsel watch`` says.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs {missing.name}: pip install -e '.[examples]'") from None

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 8, 2, 64, 256
WIDTH = HEADS * HEAD_DIM


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, width]
        length = x.shape[1]
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)  # [b, h, s, d]
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        mask = torch.full((length, length), float("-inf"), device=x.device).triu(1)
        scores = q @ k.transpose(-2, -1) / HEAD_DIM**0.5 + mask
        out = torch.softmax(scores, dim=-1) @ v
        return self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:  # [b, s] → [b, s, vocabulary]
        x = self.embed(tokens)
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x))
        return x @ self.embed.weight.t()


def train(steps: int, length: int) -> tuple[list[float], list[float]]:
    """The loss and the seconds of each step, on one phrase that repeats; the same in every run."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (1, length // 4), device=device).repeat(1, 5)[:, : length + 1]
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - start)
    return losses, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    options = parser.parse_args()
    if options.steps < 1 or options.length < 4:
        parser.error("--steps must be at least 1 and --length at least 4")
    losses, seconds = train(options.steps, options.length)
    print(f"loss {losses[0]:.4f} → {losses[-1]:.4f}, {1000 * median(seconds):.0f} ms a step")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
