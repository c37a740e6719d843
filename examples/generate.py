"""Generate text with a model of transformers, patched, optionally with weights of codes. These lines are all it takes:

    model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", device_map="cuda")
    rtkernels.models.patch(model, fused_layers=True, attention=True)
    model.generate(**tokenizer(prompt, return_tensors="pt").to("cuda"))

    python examples/generate.py MODEL --prompt "Once upon a time"      # a folder or a name of the hub
    python examples/generate.py MODEL --weights int4                   # linear layers by codes: fp8, int4 or nvfp4
    python examples/generate.py --tiny                                 # a small random model, also without a GPU

``generate`` captures its decoding step in a CUDA graph at the second token and replays it from then on; the report says
how many graphs were captured, and why there are none for calls that it decodes as transformers does.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

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
    if args.weights:
        rtkernels.models.serve(model, weights=args.weights)
    rtkernels.models.patch(model, loss=False, fused_layers=True, attention=True)
    return model


def main(arguments: list[str] | None = None) -> torch.Tensor:
    """Generate, print, and return the new tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder or a name of the hub")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=64, help="to generate")
    parser.add_argument("--weights", choices=("fp8", "int4", "nvfp4"), help="codes of linear layers; default: 16 bits")
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
    options = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens if args.tiny else None}
    found = model.generate(prompt, do_sample=False, **options)[:, prompt.shape[1] :]
    texts = [str(found[0].tolist())] if args.tiny else tokenizer.batch_decode(found)
    seconds = time.perf_counter() - started
    print(rtkernels.models.report(model))
    print(texts[0])
    print(f"{found.shape[1]} tokens in {seconds:.2f} s, compilation of kernels and the first prompt included")
    return found


if __name__ == "__main__":
    main()
