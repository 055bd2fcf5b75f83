"""Train a small causal language model on sequences that are spread over several processes.

    torchrun --nproc-per-node 2 examples/long_context.py               # two processes on the CPU, with Gloo
    torchrun --nproc-per-node 4 examples/long_context.py --comm a2a    # another exchange
    python examples/long_context.py                                    # one process, the same losses

Each process holds two chunks of every sequence, one from the head and one from the tail
(``shard_sequence``). All layers but attention work on rows alone and need no change; attention gets the
process group. Rotary embeddings turn by the position in the whole sequence (``sequence_positions``), and the
gradients of all processes are added up. Where torch sees GPUs, each process takes one, and NCCL is used.

At the end it puts the logits together again (``unshard_sequence``), in the sequence's own order.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.nn  # before there is a group: its default arguments would hold that to the end
    from torch import Tensor, nn
    from torch.nn import functional as F

    from attnsel import DotProductAttention
    from attnsel.context_parallel import sequence_positions, shard_sequence, unshard_sequence
    from attnsel.context_parallel.sharding import place_of
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs {missing.name}: pip install -e '.[examples]'") from None

LAYERS, HEADS, GROUPS, HEAD_DIM, VOCABULARY = 2, 4, 4, 16, 32
WIDTH = HEADS * HEAD_DIM


class Attention(nn.Module):
    """Causal self-attention over this process's rows and, through the group, those of the others."""

    def __init__(self, group: Any, comm: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.core = DotProductAttention(
            HEADS,
            HEAD_DIM,
            num_gqa_groups=GROUPS,
            qkv_format="bshd",
            attn_mask_type="causal",
            cp_group=group,
            cp_comm_type=comm,
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # [b, s / size, width]
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split((HEADS, GROUPS, GROUPS), dim=2)
        out: Tensor = self.out(self.core(rotate(q, positions), rotate(k, positions), v))
        return out


class Model(nn.Module):
    def __init__(self, group: Any, comm: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.attention = nn.ModuleList(Attention(group, comm) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:  # [b, s / size] → [b, s / size, v]
        x: Tensor = self.embed(tokens)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * i](x), positions)
            x = x + mlp(self.norms[2 * i + 1](x))
        return x @ self.embed.weight.t()


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [b, s, h, d] by positions [s]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None, None] * frequencies
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


def batch(step: int, length: int) -> Tensor:
    """Two sequences that repeat a random phrase of a quarter of their length: what comes is far back."""
    random = torch.Generator().manual_seed(step)
    phrase = torch.randint(VOCABULARY, (2, length // 4), generator=random)
    return phrase.repeat(1, 4 + 1)[:, : length + 1]


def train(chosen: argparse.Namespace, group: Any, device: torch.device) -> None:
    """Train, print the losses and the logits of the whole sequences, and leave nothing that holds a group."""
    place: Any = (1, 0) if group is None else group
    first = group is None or dist.get_rank() == 0

    torch.manual_seed(0)  # the same model in every process
    model = Model(group, chosen.comm).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = sequence_positions(chosen.length, place, device)
    for step in range(chosen.steps):
        tokens = batch(step, chosen.length).to(device)
        inputs, targets = (shard_sequence(t, place, dim=1) for t in (tokens[:, :-1], tokens[:, 1:]))
        logits = model(inputs, positions)
        # Each process's share of the mean over all rows, so that shares and their gradients add up.
        loss = (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens[:, 1:].numel()
        )
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach().clone()
        if group is not None:
            dist.all_reduce(shown, group=group)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        if first and step == 0:
            layer = model.attention[0]
            assert isinstance(layer, Attention)
            ran = layer.core.last_selection
            assert ran is not None
            print(f"processes: {place_of(place)[0]}; every step of attention runs on {ran.backend}")
        if first and (step % 5 == 0 or step == chosen.steps - 1):
            print(f"step {step:3d}  loss {shown:.4f}", flush=True)

    with torch.no_grad():
        whole = unshard_sequence(model(inputs, positions), place, dim=1)
    if first:
        loss = F.cross_entropy(whole.flatten(0, 1), tokens[:, 1:].flatten())
        print(f"logits of the whole sequences {list(whole.shape)}, loss {loss:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=256, help="rows of a sequence, over all processes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--comm", default="p2p", choices=("p2p", "all_gather", "a2a"))
    chosen = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "WORLD_SIZE" not in os.environ:  # not started by torchrun
        train(chosen, None, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(chosen, dist.group.WORLD, device)
    dist.destroy_process_group()  # the last to hold the group: its threads must end before the interpreter


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
