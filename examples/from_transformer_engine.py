"""A model written for TransformerEngine's DotProductAttention, with attnsel's: on a CPU too, with reasons.

    python examples/from_transformer_engine.py

1. The model. One line of it is new: where the module is imported from.
2. Weights that TransformerEngine saved are loaded. Two things differ in them.
3. It runs here, forward and backward, and each sequence alone in float64 says the same.
4. What attnsel does not do is refused by name. Nothing that is passed is ignored.
5. TransformerEngine's switches, as attnsel's settings.
6. What TransformerEngine itself would choose for these calls on an H100, beside attnsel's choice: planned.

Argument by argument: docs/how-to/from-transformer-engine.md.
"""

from __future__ import annotations

import argparse
from textwrap import fill
from typing import Any

try:
    import torch
    from torch import Tensor, nn

    import attnsel
    from attnsel import AttentionParams, DotProductAttention, Environment, UnsupportedArgument, select
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs {missing.name}: pip install -e '.[examples]'") from None

# ---- 1. the model: its import said "from transformer_engine.pytorch import DotProductAttention" ----------

HEADS, GROUPS, HEAD_DIM = 8, 2, 64
WIDTH = HEADS * HEAD_DIM


class Attention(nn.Module):
    """Grouped heads with a learnable sink, over [s, b, width], as a program for TransformerEngine has it."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.core_attention = DotProductAttention(
            num_attention_heads=HEADS,
            kv_channels=HEAD_DIM,
            num_gqa_groups=GROUPS,
            attention_dropout=0.0,
            qkv_format="sbhd",
            attn_mask_type="padding_causal",
            sequence_parallel=False,
            tp_size=1,
            layer_number=layer,
            attention_type="self",
            softmax_type="learnable",
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((HEADS, GROUPS, GROUPS), dim=2)  # [s, b, h, d]
        context = self.core_attention(q, k, v, attention_mask=mask, fast_zero_fill=True)
        out: Tensor = self.out(context)  # of [s, b, h * d]
        return out


# ---- 2. weights that TransformerEngine saved ------------------------------------------------------------


def state_from_te(state: dict[str, Any]) -> dict[str, Any]:
    """A state dictionary of TransformerEngine's in the shapes of attnsel's modules.

    Sinks are [h] there and [1, h, 1, 1] here, and the FP8 history that each module saves has no place here.
    """
    own = {name: value for name, value in state.items() if not name.endswith("core_attention._extra_state")}
    for name, value in own.items():
        if name.endswith("core_attention.softmax_offset"):
            own[name] = value.reshape(1, -1, 1, 1)
    return own


def saved_by_te(model: nn.Module) -> dict[str, Any]:
    """What TransformerEngine 2.14 saves for this model, made up here: its package is not needed."""
    state = {name: torch.randn(value.shape) / WIDTH**0.5 for name, value in model.state_dict().items()}
    state["core_attention.softmax_offset"] = torch.randn(HEADS)
    state["core_attention._extra_state"] = torch.empty(0, dtype=torch.uint8)
    return state


# ---- 3. is it right? ----------------------------------------------------------------------------------


def alone(model: Attention, x: Tensor) -> Tensor:
    """One sequence [s, width] without padding, in float64 and plain PyTorch."""
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}
    heads = (x.detach().double() @ weights["qkv.weight"].t()).unflatten(-1, (-1, HEAD_DIM))
    q, k, v = heads.split((HEADS, GROUPS, GROUPS), dim=1)
    k, v = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    sinks = weights["core_attention.softmax_offset"].reshape(HEADS, 1, 1).expand(HEADS, len(x), 1)
    probabilities = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    out: Tensor = torch.einsum("hij,jhd->ihd", probabilities, v).flatten(1) @ weights["out.weight"].t()
    return out


def refusal_of(core: nn.Module, q: Tensor, wish: dict[str, Any]) -> str:
    try:
        core(q, q, q, **wish)
    except UnsupportedArgument as error:
        return str(error)
    return "it runs"


def heading(text: str) -> None:
    print(f"\n── {text} " + "─" * max(0, 74 - len(text)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=96, help="rows of the longest of three sequences")
    length = parser.parse_args().length
    if length < 4:
        parser.error("--length must be at least 4")

    torch.manual_seed(0)
    model = Attention(layer=1)
    model.load_state_dict(state_from_te(saved_by_te(model)))
    lengths = [length, length // 2, length // 4]
    x = torch.randn(length, len(lengths), WIDTH, requires_grad=True)
    padding = [torch.arange(length) >= real for real in lengths]
    mask = torch.stack(padding)[:, None, None, :]  # [b, 1, 1, s], True = masked out
    out = model(x, mask)
    sum(out[:real, i].square().mean() for i, real in enumerate(lengths)).backward()

    heading("the module runs here")
    chosen = model.core_attention.last_selection
    assert chosen is not None
    print(f"padding_causal with sinks, [s, b, h, d] on the CPU: {chosen.backend}")
    apart = max((out[:n, i] - alone(model, x[:n, i])).abs().max().item() for i, n in enumerate(lengths))
    print(f"largest difference from each sequence alone in float64: {apart:.0e}")
    print(f"gradients of x and of the sinks: {all(t.grad is not None for t in (x, *model.parameters()))}")

    # ---- 4. what is refused
    heading("what attnsel does not do, it says")
    q = torch.randn(8, 1, HEADS, HEAD_DIM)
    core = DotProductAttention(HEADS, HEAD_DIM)
    for wish in ({"num_splits": 2}, {"fp8_output": True}):
        print(refusal_of(core, q, wish))

    # ---- 5. switches
    heading("NVTE_FLASH_ATTN=0, in attnsel's words")
    core(q, q, q)
    before = core.last_selection
    with attnsel.override(deny=("sdpa.flash", "sdpa.varlen", "flash_attn.2", "flash_attn.3", "flash_attn.4")):
        core(q, q, q)
    after = core.last_selection
    assert before is not None
    assert after is not None
    print(f"without FlashAttention: {before.backend} → {after.backend}")

    # ---- 6. on an H100
    heading("what an H100 would run (planned, not run)")
    machine = Environment.describe("H100", transformer_engine="2.14.0", cudnn="9.10.2")
    call = AttentionParams(
        qkv_layout="sbhd",
        num_gqa_groups=2,
        attn_mask_type="padding_causal",
        is_training=True,
    )
    for what, changes, switches in (
        ("padding_causal", {}, {}),
        ("with a learnable sink", {"softmax_type": "learnable"}, {}),
        ("with NVTE_FUSED_ATTN=0", {}, {"NVTE_FUSED_ATTN": "0"}),
    ):
        answer = select(call.replace(**changes), machine, dispatcher="te", switches=switches)
        print(fill(f"{what}: {answer.difference}", 78, subsequent_indent="    "))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
