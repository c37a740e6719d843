"""Generate text with a model of transformers: patched, optionally with fp8 weights, and with the decoding step in a
CUDA graph.

    python examples/generate.py MODEL --prompt "Once upon a time"      # a folder or a name of the hub
    python examples/generate.py MODEL --fp8                            # linear layers and experts by fp8 codes
    python examples/generate.py --tiny                                 # a small random model, also without a GPU

The graph is plain ``torch.cuda.graph``: nothing is compiled, and a step reads nothing on the host.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, StaticCache

import rtkernels


def load(args: argparse.Namespace) -> torch.nn.Module:
    """Return a patched model for inference."""
    dtype = torch.bfloat16
    if args.tiny:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "qwen3", hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, vocab_size=256, max_position_embeddings=512,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    model.to(args.device).eval()
    if args.fp8:
        rtkernels.models.serve_fp8(model)
    print(rtkernels.models.patch(model, loss=False, fused_layers=True, attention=True))
    return model


@torch.no_grad()
def generate(model: torch.nn.Module, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` tokens after prompts ``[batch, length]`` without padding, the likeliest at every step."""
    length = prompt.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=length + count)
    logits = model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits
    token = logits[:, -1].argmax(-1, keepdim=True)
    position = torch.full_like(token, length)

    def step() -> None:
        out = model(input_ids=token, past_key_values=cache, position_ids=position)
        token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))
        position.add_(1)

    found, replay = [token.clone()], step
    for i in range(count - 1):
        if i == 1 and token.is_cuda:  # the previous step compiled what was missing
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay = graph.replay
        replay()
        found.append(token.clone())
    return torch.cat(found, 1)


def main(arguments: list[str] | None = None) -> torch.Tensor:
    """Generate, print, and return the new tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder or a name of the hub")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=64, help="to generate")
    parser.add_argument("--fp8", action="store_true", help="weights as fp8 codes")
    parser.add_argument("--tiny", action="store_true", help="a small random model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    if not args.tiny and args.model is None:
        parser.error("expected a model, or --tiny")
    model = load(args)
    if args.tiny:
        prompt = torch.tensor([list(args.prompt.encode())], device=args.device)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        prompt = tokenizer(args.prompt, return_tensors="pt").input_ids.to(args.device)
    started = time.perf_counter()
    found = generate(model, prompt, args.tokens)
    texts = [str(found[0].tolist())] if args.tiny else tokenizer.batch_decode(found)
    seconds = time.perf_counter() - started
    print(texts[0])
    print(f"{args.tokens} tokens in {seconds:.2f} s, compilation of kernels and the first prompt included")
    return found


if __name__ == "__main__":
    main()
