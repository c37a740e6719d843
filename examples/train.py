"""Train a Qwen3 model with random weights on Python's own source files, patched in one line.

    python examples/train.py                        # a GPU: 0.3 B parameters in bf16; without one add --tiny
    python examples/train.py --tiny --steps 20      # a CPU
    python examples/train.py --plain                # the same model in plain transformers

Needs `pip install transformers`. Prints what was replaced, then loss and tokens per second.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import rtkernels

SIZES = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def text(characters: int) -> Tensor:
    """Return the concatenated bytes of the standard library's files as token ids."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= characters:
            break
    return torch.frombuffer(bytearray(b"".join(parts)[:characters]), dtype=torch.uint8).long()


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--plain", action="store_true", help="do not patch")
    parser.add_argument("--device", help="a GPU if there is one; a CPU takes minutes for a step without --tiny")
    args = parser.parse_args(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and not args.tiny and args.device is None:
        parser.error("there is no GPU: expected --tiny, or --device cpu")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=256, use_cache=False, **(TINY if args.tiny else SIZES))
    model = Qwen3ForCausalLM(config).to(device, dtype).train()
    if not args.plain:
        print(rtkernels.models.patch(model))  # <- the line

    # fp32 copies of bf16 weights are part of the state, as are the moments.
    optimizer = rtkernels.optim.AdamW(model.parameters(), lr=2e-3 if args.tiny else 3e-4)
    data, losses, started = text(2_000_000), [], time.perf_counter()
    for step in range(args.steps):
        starts = torch.randint(0, len(data) - args.length, (args.batch,))
        ids = torch.stack([data[s : s + args.length] for s in starts.tolist()]).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        rtkernels.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == 0 or (step + 1) % 10 == 0:
            shown = loss.item()  # waits for the device
            speed = (step + 1) * ids.numel() / (time.perf_counter() - started)
            print(f"step {step + 1:5}  loss {shown:.4f}  {speed:9.0f} tokens/s, the first step's compilation included")
    return torch.stack(losses).tolist()


if __name__ == "__main__":
    main()
