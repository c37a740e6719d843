"""Train a model with random weights in several ways, each in a process of its own: time, memory, loss.

``python -m bench e2e train --model dense|moe --arms hf,liger,compile,ours`` starts this file for each arm and writes a
result file. Every arm has the same weights, batches and learning rate; an arm with a missing library is recorded as
such.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from typing import Any

from bench import meta
from bench.e2e import gates, processes, split
from bench.e2e.arms import ARMS, FAMILIES, MODELS
from bench.e2e.text import add_text_options, corpus_of

LEARNING_RATE = 3e-4
PEAK_FLOPS = 989e12  # bf16, of an H200


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench e2e train", description=__doc__.splitlines()[0])
    processes.add_model_options(options, MODELS | FAMILIES, ARMS)
    options.add_argument("--tokens", type=int, default=16384, help="of a step")
    options.add_argument("--seq", type=int, default=2048)
    add_text_options(options)
    options.add_argument("--steps", type=int, default=30, help="measured ones")
    options.add_argument("--warmup", type=int, default=5, help="steps before them, at least 1")
    options.add_argument("--seed", type=int, default=0, help="of the order of the data")
    options.add_argument("--cold", action="store_true", help="begin with an empty cache of our kernels")
    options.add_argument(
        "--rounds", type=int, default=1, help="processes of each arm, in shuffled order; the fastest counts"
    )
    processes.add_options(options)
    return options


def run_arm(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm in this process; return its record."""
    started = time.perf_counter()
    import torch

    from bench.e2e import arms

    arms.quiet()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = corpus_of(args)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    losses: list[Any] = []

    def train(ids: Any) -> list[Any]:
        """Run a step; return timestamps before it, after its backward pass and after the optimizer's step."""
        marks = [processes.mark(device)]
        loss = loss_of(ids)
        loss.backward()
        marks.append(processes.mark(device))
        optimizer.step()
        losses.append(loss.detach())
        return [*marks, processes.mark(device)]

    def first_step() -> tuple[float, float]:
        """Run the first step; return the seconds since the process began, and those of the step."""
        before = time.perf_counter()
        train(batches.pop(0))
        processes.wait(device)
        return time.perf_counter() - started, time.perf_counter() - before

    first = None
    with processes.sharing():
        model = arms.build(
            args.model, args.vocab, args.seq, tiny=args.tiny, device=device, dtype=dtype, layers=args.layers
        )
        products = _products(model, args)
        prepared, note = arms.prepare(arm, model, backend="aot_eager" if args.tiny and device == "cpu" else "inductor")
        loss_of, optimizer = arms.loss_of(prepared), arms.optimizer(arm, model, LEARNING_RATE)
        orders = range(args.steps + args.warmup)
        batches = [corpus.batch(i, args.tokens, args.seq, args.seed).to(device) for i in orders]
    if "compile" in arm:  # long work on the host alone, during which others may measure
        first = first_step()
        if device == "cuda":
            torch.cuda.empty_cache()
    with processes.alone():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        first = first_step() if first is None else first
        steps = [train(ids) for ids in batches][max(args.warmup, 1) - 1 :]
        processes.wait(device)
        reached = [float(loss) for loss in losses]
        memory = {}
        if device == "cuda":
            memory = {"peak_mib": torch.cuda.max_memory_allocated(), "reserved_mib": torch.cuda.max_memory_reserved()}
        profile = split.of_step(lambda: train(batches[0])) if device == "cuda" else None
    backward = [processes.between(a, b) for a, b, _ in steps]
    whole = [processes.between(a, c) for a, _, c in steps]
    median = statistics.median(whole)
    return {
        "step_ms": round(median, 2),
        "forward_backward_ms": round(statistics.median(backward), 2),
        "quartiles_ms": [round(q, 2) for q in statistics.quantiles(whole, n=4)] if len(whole) > 1 else [],
        "tokens_per_s": round(args.tokens / median * 1000),
        "mfu": round(products / (median / 1000) / PEAK_FLOPS, 4),
        "peak_mib": None,
        **{name: round(size / 2**20) for name, size in memory.items()},
        "profile": profile,
        "first_step_s": round(first[0], 1),
        "first_step_itself_s": round(first[1], 2),
        "losses": [round(loss, 5) for loss in reached],
        "corpus": corpus.sha256[:16],
        "note": note,
    }


def _products(model: Any, args: argparse.Namespace) -> float:
    """Return the FLOPs of matrix products and causal attention of a step, forward and backward."""
    config = model.config
    active = 0
    for name, p in model.named_parameters():
        if p.dim() == 3:  # experts: a token goes to some of them
            active += p.numel() * config.num_experts_per_tok // len(p)
        elif p.dim() == 2 and "embed" not in name:
            active += p.numel()
    active += config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    width = getattr(config, "qk_head_dim", None) or config.head_dim
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * width * args.seq
    return 3 * args.tokens * (2 * active + attention)


def main(argv: list[str] | None = None) -> int:
    """Run all arms, each in its own process; print a table and write the result file."""
    args = parser().parse_args(argv)
    if args.one:
        return processes.one(lambda: run_arm(args.one, args), args.out)
    passed = sys.argv[1:] if argv is None else argv
    sizes = {"layers": args.layers, "tokens": args.tokens, "seq": args.seq, "cold": args.cold}
    result = processes.begun(args.out, args.goes_on, {"kind": "train", "model": args.model, **sizes})
    print(f"{'arm':14}{'step':>10}{'fwd+bwd':>10}{'tokens/s':>10}{'MFU':>7}{'peak':>11}", end="")
    print(f"{'first':>8}{'itself':>9}{'last loss':>10}")
    with tempfile.TemporaryDirectory() as folder:
        environment = {"RTKERNELS_CACHE_DIR": folder} if args.cold else {}
        arms = [arm for arm in args.arms.split(",") if arm not in result["arms"]]
        for number in range(args.rounds):
            order = random.Random(number).sample(arms, len(arms)) if args.rounds > 1 else arms
            for arm, record in processes.records("bench.e2e.train", order, passed, args.together, environment):
                result["arms"][arm] = _merged(result["arms"].get(arm), record)
                print(_line(arm, record), flush=True)
                result["gates"] = gates.gates(args.model, result["arms"], starts=not args.together, cold=args.cold)
                result["environment"] = result.get("environment") or meta.environment()
                processes.write(args.out, result)
    print(gates.text(result.get("gates", [])))
    return 1 if any("failed" in record for record in result["arms"].values()) else 0


def _merged(known: dict[str, Any] | None, record: dict[str, Any]) -> dict[str, Any]:
    """Return the faster one of two records of an arm, with the times of all its processes."""
    if known is None or "step_ms" not in known or "step_ms" not in record:
        return record if known is None or "step_ms" not in known else known
    times = [*known.get("rounds_ms", [known["step_ms"]]), record["step_ms"]]
    return {**min(known, record, key=lambda r: r["step_ms"]), "rounds_ms": times}


def _line(arm: str, r: dict[str, Any]) -> str:
    if "step_ms" not in r:
        return f"{arm:14}{'absent: ' + r['absent'] if 'absent' in r else 'failed: ' + r['failed'][-300:]}"
    peak = f"{r['peak_mib']} MiB" if r["peak_mib"] else "-"
    last = statistics.mean(r["losses"][-5:])
    return (
        f"{arm:14}{r['step_ms']:7.1f} ms{r['forward_backward_ms']:7.1f} ms{r['tokens_per_s']:10}{r['mfu']:7.3f}"
        f"{peak:>11}{r['first_step_s']:6.1f} s{r['first_step_itself_s']:7.2f} s{last:10.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
