"""Train a small character GPT whose attention is ``attnsel.DotProductAttention``.

    python examples/train_char_gpt.py                        # under a minute on two CPU cores
    python examples/train_char_gpt.py --backend tiled        # force a candidate, or read why it cannot run
    python examples/train_char_gpt.py --compile              # the same through torch.compile
    ATTNSEL_DEBUG=2 python examples/train_char_gpt.py        # the whole report of each new selection

The model reads ``corpus.txt`` beside this file, one character at a time: three blocks of grouped-query
attention (four query heads, two kv heads) and a SwiGLU each. It prints which kernel was chosen and why not
another, the loss as it falls, and at the end a page in the manner of the corpus. It runs on a GPU if torch
sees one, in bfloat16 there.

What to look at for your own model is ``Attention``: q, k and v go in as [b, s, h, d], the result comes out
as [b, s, h * d], and there is no mask to build.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

try:
    import torch
    from rich.console import Console
    from rich.progress import Progress
    from torch import Tensor, nn
    from torch.nn import functional as F

    import attnsel
    from attnsel.backends.registry import CANDIDATES
    from attnsel.report.answer import one_line
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs {missing.name}: pip install -e '.[examples]'") from None

CORPUS = Path(__file__).with_name("corpus.txt")
LAYERS, HEADS, GROUPS, HEAD_DIM, CONTEXT = 3, 4, 2, 32, 128
WIDTH = HEADS * HEAD_DIM


def rotations() -> Tensor:
    """Cosine and sine of every position's angles, [2, s, 1, d / 2]."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(CONTEXT)[:, None, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, turned: Tensor) -> Tensor:
    """Rotary position embedding of [b, s, h, d]: pairs of coordinates turned by the position's angles."""
    cos, sin = turned[:, : x.shape[1]].to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention, [b, s, width] to [b, s, width]."""

    def __init__(self, layer: int, backend: str | None) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * HEAD_DIM, bias=False)
        self.core = attnsel.DotProductAttention(
            num_attention_heads=HEADS,
            kv_channels=HEAD_DIM,
            num_gqa_groups=GROUPS,
            qkv_format="bshd",
            attn_mask_type="causal",
            layer_number=layer,
            backend=backend,
        )
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, turned: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, GROUPS, GROUPS], dim=2)
        out: Tensor = self.out(self.core(rotate(q, turned), rotate(k, turned), v))
        return out


class Block(nn.Module):
    def __init__(self, layer: int, backend: str | None) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(layer, backend)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, turned: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), turned)
        gate, value = self.up(self.before_mlp(x)).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * value)
        return x


class GPT(nn.Module):
    """Characters [b, s] to logits [b, s, characters]."""

    def __init__(self, characters: int, backend: str | None = None) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, WIDTH)
        self.blocks = nn.ModuleList(Block(layer, backend) for layer in range(1, LAYERS + 1))
        self.norm = nn.RMSNorm(WIDTH)
        nn.init.normal_(self.character.weight, std=0.02)
        self.register_buffer("turned", rotations(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.character(tokens)
        for block in self.blocks:
            x = block(x, self.turned)
        return F.linear(self.norm(x), self.character.weight)


def batch(data: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``size`` random pieces of the text, and the same pieces one character on."""
    starts = torch.randint(len(data) - CONTEXT, (size, 1), device=data.device)
    pieces = data[starts + torch.arange(CONTEXT + 1, device=data.device)]
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per character."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def write(model: GPT, tokens: list[int], length: int, temperature: float = 0.6) -> list[int]:
    """``tokens`` and ``length`` more, drawn one by one.

    Every call has the whole context's shape, so there is one selection and not one per length: what stands
    to the right of the last character is hidden by the causal mask.
    """
    model.eval()
    device = model.character.weight.device
    for _ in range(length):
        seen = tokens[-CONTEXT:]
        window = torch.zeros(1, CONTEXT, dtype=torch.long, device=device)
        window[0, : len(seen)] = torch.tensor(seen)
        logits = model(window)[0, len(seen) - 1].float()
        tokens = [*tokens, int(torch.multinomial((logits / temperature).softmax(-1), 1))]
    return tokens


def train(model: GPT, data: Tensor, options: argparse.Namespace) -> None:
    """AdamW with a short warm-up and a cosine to zero; prints what runs, then the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm = min(20, options.steps // 5 + 1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, options.steps - warm))
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warm)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, cosine], [warm])

    loss_of(model, *batch(data, options.batch))  # once: compiled code does not record what it runs
    first = model.blocks[0]
    assert isinstance(first, Block)
    chosen = first.attention.core.last_selection
    assert chosen is not None
    print(f"attention runs on {chosen.backend}\n  {one_line(chosen)}\n")

    running = torch.compile(model, fullgraph=True) if options.compile else model
    start, losses = time.perf_counter(), []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for step in bar.track(range(1, options.steps + 1), description="training"):
            loss = loss_of(running, *batch(data, options.batch))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            if step % options.every == 0 or step == options.steps:
                mean = torch.stack(losses).mean().item()
                print(f"step {step:>4}  loss {mean:.3f}  {time.perf_counter() - start:5.1f} s", flush=True)
                losses = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text per step")
    parser.add_argument("--every", type=int, default=50, help="steps between two lines of loss")
    parser.add_argument("--length", type=int, default=400, help="characters to write at the end")
    names = sorted(CANDIDATES)
    parser.add_argument("--backend", choices=names, metavar="NAME", help=f"force one of {', '.join(names)}")
    parser.add_argument("--compile", action="store_true", help="train through torch.compile")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    if options.steps < 1:
        parser.error("--steps must be at least 1")
    torch.manual_seed(options.seed)
    text = CORPUS.read_text(encoding="utf-8")
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = torch.tensor([number[character] for character in text], device=device)
    model = GPT(len(characters), options.backend).to(device)
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(text):,} characters, {len(characters)} different; {size:,} parameters on {device}")

    try:
        train(model, data, options)
    except attnsel.NoBackendError as error:
        raise SystemExit(str(error)) from None

    prompt = "In the morning "
    written = write(model, [number[character] for character in prompt], options.length)
    print("\n" + "".join(characters[token] for token in written))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
