"""Fine-tune a model of Hugging Face transformers on packed sequences: nothing is computed on padding.

    python examples/finetune_packed.py
    attnsel watch examples/finetune_packed.py --steps 2      # which kernels run, and the shapes

The model is a small Llama with random weights, made here: nothing is downloaded. With weights of your own it
is ``AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnsel")``, and the rest stays.

1. ``register()`` makes the name ``attn_implementation="attnsel"`` known.
2. Texts of different lengths, as two batches: padded to the longest, and packed one behind the other by
   transformers' own collator. With ``cu_seq_lens`` each text attends to itself alone.
3. The loss of both is the same: packing changes no result.
4. Training on packed batches, and how many tokens a second each way takes.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

try:
    import torch
    from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

    from attnsel.integrations.transformers import register
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs {missing.name}: pip install -e '.[examples]'") from None

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, PAD = 512, 0


def make_model() -> Any:
    torch.manual_seed(0)
    make: Any = LlamaConfig  # its types name few of its arguments
    config = make(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        attn_implementation="attnsel",
        pad_token_id=PAD,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(DEVICE)


def make_texts(count: int, longest: int) -> list[dict[str, list[int]]]:
    """Token ids of ``count`` texts, a few long and most short, each a phrase that repeats."""
    random = torch.Generator().manual_seed(0)
    texts = []
    for number in range(count):
        length = longest if number % 8 == 0 else int(torch.randint(16, longest // 3, (1,), generator=random))
        phrase = torch.randint(1, VOCABULARY, (8,), generator=random)
        texts.append({"input_ids": phrase.repeat(length // 8 + 1)[:length].tolist()})
    return texts


def padded(texts: list[dict[str, list[int]]]) -> dict[str, Any]:
    """[b, s], padded on the right to the longest; labels are -100 where there is nothing to learn."""
    rows = [torch.tensor(text["input_ids"]) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = ids.masked_fill(real == 0, -100)
    labels[:, 0] = -100  # as the collator of the packed batch: a text's first token is not predicted
    return {"input_ids": ids, "attention_mask": real, "labels": labels}


def packed(texts: list[dict[str, list[int]]]) -> dict[str, Any]:
    """[1, t], one text behind the other, with positions that restart and cu_seq_lens that say where."""
    collator: Any = DataCollatorWithFlattening
    batch: dict[str, Any] = collator(return_flash_attn_kwargs=True, return_tensors="pt")(texts)
    return batch


def on_device(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(DEVICE) if hasattr(value, "to") else value for name, value in batch.items()}


def tokens_per_second(model: Any, batch: dict[str, Any], tokens: int, repeats: int = 2) -> float:
    """Real tokens through forward and backward in a second; the best of ``repeats``, after one to warm up."""
    best = float("inf")
    for _ in range(1 + repeats):
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        loss.item()  # waits for the device
        best = min(best, time.perf_counter() - start)
        model.zero_grad()
    return tokens / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=11, help="of training")
    parser.add_argument("--texts", type=int, default=12, help="in a batch")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest text")
    options = parser.parse_args()
    if options.steps < 1 or options.texts < 1 or options.longest < 64:
        parser.error("--steps and --texts must be at least 1, --longest at least 64")

    register()
    model = make_model()
    texts = make_texts(options.texts, options.longest)
    real = sum(len(text["input_ids"]) for text in texts)
    wide, flat = on_device(padded(texts)), on_device(packed(texts))
    print(f"{len(texts)} texts, {real} tokens")
    print(f"  padded  {list(wide['input_ids'].shape)}: {wide['input_ids'].numel() - real} tokens are padding")
    print(f"  packed  {list(flat['input_ids'].shape)}, {len(flat['cu_seq_lens_q']) - 1} sequences")

    with torch.no_grad():
        losses = model(**wide).loss.item(), model(**flat).loss.item()
    print(f"loss padded {losses[0]:.6f}, packed {losses[1]:.6f}; apart by {abs(losses[0] - losses[1]):.0e}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        loss = model(**flat).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == options.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)

    speeds = tokens_per_second(model, wide, real), tokens_per_second(model, flat, real)
    print(f"real tokens a second on {DEVICE}: padded {speeds[0]:,.0f}, packed {speeds[1]:,.0f}")
    print(f"packed is {speeds[1] / speeds[0]:.1f} times as fast here")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
