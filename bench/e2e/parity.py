"""Train a model with random weights in several ways, and compare losses and gradients.

``python -m bench e2e parity --model dense|moe`` starts this file for each arm and writes a result file with the gates.
"hf" is transformers as it is; "hf_perturbed" has weights that differ by 1e-3, which shows how much equally good runs
differ; "ours_fused" and "fp8" are patched, and trained with several orders of the data; "fp8_saturated" uses scales
that are eight times too small, a mistake that the gates have to detect. Times are meaningless here: arms share the
device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from bench import meta
from bench.e2e import processes
from bench.e2e.arms import MODELS
from bench.e2e.gates import parity_gates, text
from bench.e2e.text import add_text_options, corpus_of

ARMS = ("hf", "hf_perturbed", "ours_fused", "fp8", "fp8_saturated")
_PATCHED_AS = {"hf_perturbed": "hf", "fp8_saturated": "fp8"}
_SEVERAL_ORDERS = ("ours_fused", "fp8")
LEARNING_RATE = 3e-4
WARMUP = 0.1  # share of warm-up steps: without warm-up, losses jump and diverge for uninteresting reasons
HELD_OUT_SEQUENCES = 16
PERTURBATION = 1e-3
TOO_SMALL = 8


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench e2e parity", description=__doc__.splitlines()[0])
    processes.add_model_options(options, MODELS, ARMS)
    options.add_argument("--tokens", type=int, default=8192, help="of a step")
    options.add_argument("--seq", type=int, default=2048)
    add_text_options(options)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--seeds", type=int, default=3, help="orders of the data, for ours_fused and fp8")
    processes.add_options(options)
    return options


def run_arm(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm in this process; return its record."""
    from bench.e2e import arms

    arms.quiet()
    corpus = corpus_of(args)
    if arm == "fp8_saturated":
        _saturate()
    orders = range(args.seeds if arm in _SEVERAL_ORDERS else 1)
    with processes.sharing():
        runs = [_trained(arm, args, corpus, order) for order in orders]
    return {"runs": runs, "corpus": corpus.sha256[:16]}


def _trained(arm: str, args: argparse.Namespace, corpus: Any, seed: int) -> dict[str, Any]:
    """Train a model from the common weights; return losses, and how gradients of fp8 compare with bf16's."""
    import torch

    from bench.e2e import arms

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def model() -> Any:
        return arms.build(
            args.model, args.vocab, args.seq, tiny=args.tiny, device=device, dtype=torch.bfloat16, layers=args.layers
        )

    trained = model()
    if arm == "hf_perturbed":
        _perturb(trained)
    prepared, _ = arms.prepare(_PATCHED_AS.get(arm, arm), trained)
    loss_of = arms.loss_of(prepared)
    optimizer = arms.optimizer(_PATCHED_AS.get(arm, arm), trained, LEARNING_RATE)
    plain = model() if arm.startswith("fp8") else None
    losses, gradients = [], []
    for step in range(args.steps):
        ids = corpus.batch(step, args.tokens, args.seq, seed).to(device)
        for group in optimizer.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / max(1.0, WARMUP * args.steps))
        loss = loss_of(ids)
        loss.backward()
        if plain is not None and step in (0, args.steps - 1):
            gradients.append({"step": step, **_against(trained, plain, ids)})
        optimizer.step()
        losses.append(loss.detach())
    return {
        "seed": seed,
        "losses": [round(float(loss), 5) for loss in losses],
        "held_out": round(_held_out(prepared, loss_of, corpus, args, device), 5),
        "gradients": gradients,
    }


def _against(trained: Any, plain: Any, ids: Any) -> dict[str, float]:
    """Return cosine and ratio of norms of a model's gradient and that of transformers in bf16."""
    import torch

    from bench.e2e import arms

    with torch.no_grad():
        for p, q in zip(plain.parameters(), trained.parameters(), strict=True):
            p.copy_(q)
    plain.zero_grad(set_to_none=True)
    arms.loss_of(plain)(ids).backward()
    both = first = second = 0.0
    for p, q in zip(plain.parameters(), trained.parameters(), strict=True):
        a, b = p.grad.double(), q.grad.double()
        both, first, second = both + (a * b).sum(), first + a.square().sum(), second + b.square().sum()
    plain.zero_grad(set_to_none=True)
    return {"cosine": round(float(both / (first * second) ** 0.5), 6), "norm": round(float((second / first) ** 0.5), 5)}


def _held_out(model: Any, loss_of: Any, corpus: Any, args: argparse.Namespace, device: str) -> float:
    """Return the mean loss of the held-out text."""
    import torch

    whole = corpus.held_out[: min(len(corpus.held_out) // args.seq, HELD_OUT_SEQUENCES) * args.seq].view(-1, args.seq)
    model.eval()
    with torch.no_grad():
        found = [float(loss_of(ids.to(device))) for ids in whole.split(max(1, args.tokens // args.seq))]
    model.train()
    return statistics.mean(found)


def _perturb(model: Any) -> None:
    """Change weights by 1e-3 of themselves; bf16 is coarser, so there some of them change by a whole step."""
    import torch

    generator = torch.Generator(next(model.parameters()).device).manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, device=p.device)
            p.copy_(p.float() * (1 + PERTURBATION * noise))


def _saturate() -> None:
    """Make all scales of this process too small, so that the largest codes saturate."""
    import torch

    from rtkernels.models import fp8_products
    from rtkernels.nn import fp8_experts
    from rtkernels.ops.gemm import fp8_linear

    def cut(codes: Any, scale: Any) -> tuple[Any, Any]:
        if codes.dtype != torch.float8_e4m3fn:
            return codes, scale
        return (codes.float() * TOO_SMALL).clamp(-448, 448).to(codes.dtype), scale / TOO_SMALL

    of_models, of_linears = fp8_products.multiply, fp8_linear.scaled_mm
    of_experts, of_gradients = fp8_experts._product, fp8_experts._weight_gradient

    def multiply(site: Any, a: Any, b: Any, scale_a: Any, scale_b: Any, *rest: Any, **options: Any) -> Any:
        (a, scale_a), (b, scale_b) = cut(a, scale_a), cut(b, scale_b)
        return of_models(site, a, b, scale_a, scale_b, *rest, **options)

    def scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, **options: Any) -> Any:
        (a, scale_a), (b, scale_b) = cut(a, scale_a), cut(b, scale_b)
        return of_linears(a, b, scale_a, scale_b, **options)

    def product(site: Any, left: Any, right: Any, *rest: Any) -> Any:
        return of_experts(site, fp8_experts.Codes(*cut(*left)), fp8_experts.Codes(*cut(*right)), *rest)

    def weight_gradient(site: Any, left: Any, right: Any, *rest: Any) -> Any:
        return of_gradients(site, fp8_experts.Codes(*cut(*left)), fp8_experts.Codes(*cut(*right)), *rest)

    fp8_products.multiply, fp8_linear.scaled_mm = multiply, scaled_mm
    fp8_experts._product, fp8_experts._weight_gradient = product, weight_gradient


def main(argv: list[str] | None = None) -> int:
    """Run all arms, each in its own process; print a table and write the result file."""
    args = parser().parse_args(argv)
    if args.one:
        return processes.one(lambda: run_arm(args.one, args), args.out)
    passed = sys.argv[1:] if argv is None else argv
    sizes = {name: getattr(args, name) for name in ("layers", "vocab", "tokens", "seq", "steps")}
    result = processes.begun(args.out, args.goes_on, {"kind": "parity", "model": args.model, **sizes})
    arms = [arm for arm in args.arms.split(",") if arm not in result["arms"]]
    print(f"{'arm':14}{'order':>6}{'first':>9}{'last 20 %':>11}{'held out':>10}  cosine and norm of the gradient")
    for arm, record in processes.records("bench.e2e.parity", arms, passed, args.together):
        result["arms"][arm] = record
        print(_lines(arm, record), flush=True)
        result["gates"] = parity_gates(result["arms"])
        result["environment"] = result.get("environment") or meta.environment()
        processes.write(args.out, result)
    print(text(result.get("gates", [])))
    return 1 if any("failed" in record for record in result["arms"].values()) else 0


def _lines(arm: str, record: dict[str, Any]) -> str:
    if "runs" not in record:
        reason = "absent: " + record["absent"] if "absent" in record else "failed: " + record["failed"][-300:]
        return f"{arm:14}{reason}"
    lines = []
    for run in record["runs"]:
        losses = run["losses"]
        last = statistics.mean(losses[-max(1, len(losses) // 5) :])
        seen = ", ".join(f"{g['cosine']:.4f} {g['norm']:.3f}" for g in run["gradients"])
        lines.append(f"{arm:14}{run['seed']:6}{losses[0]:9.4f}{last:11.4f}{run['held_out']:10.4f}  {seen}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
