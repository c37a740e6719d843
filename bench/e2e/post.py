"""Steps of post-training, each arm in a process of its own: SFT, DPO and GRPO with TRL's fused head and with ours.

``python -m bench e2e post --step sft|dpo|grpo --arms trl,trl_liger,ours,ours_fused`` needs TRL 1.15 or newer. The calls
are those of TRL's trainers: ``model(..., labels=..., fused_lm_head=True)`` of policy and reference, the loss, the
backward pass and the optimizer's step, without data loading and sampling. All arms have the same weights, batches and
optimizer.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from bench import meta
from bench.e2e import processes
from bench.e2e.arms import MODELS

ARMS = ("trl", "trl_liger", "ours", "ours_fused")
STEPS = ("sft", "dpo", "grpo")
GATES = {"time": 1.25, "memory": 1.0}  # TRL's step over ours at least, our peak over TRL's at most
# How far the first loss may be from TRL's, relative to it. That of DPO is a sum over tokens, each rounded to bf16.
LOSSES = {"sft": 1e-3, "dpo": 0.15, "grpo": 1e-2}
LEARNING_RATE = 1e-6
_FIELDS = {
    "sft": ("log_probs", "entropy", "is_top1"),
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "grpo": ("log_probs", "entropy"),
}


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench e2e post", description=__doc__.splitlines()[0])
    processes.add_model_options(options, MODELS, ARMS)
    options.add_argument("--step", choices=STEPS, default="sft")
    options.add_argument("--sequences", type=int, default=8, help="of a step; in DPO half of them are rejected ones")
    options.add_argument("--seq", type=int, default=2048)
    options.add_argument("--prompt", type=int, default=512, help="tokens of a sequence without a loss")
    options.add_argument("--steps", type=int, default=10, help="measured ones")
    options.add_argument("--warmup", type=int, default=3, help="steps before them")
    options.add_argument(
        "--optimizer", choices=("hf", "ours"), default="hf", help="of all arms: torch's AdamW, or ours"
    )
    processes.add_options(options)
    return options


def prepare(arm: str, step: str, model: Any, reference: Any) -> str:
    """Give the models TRL's fused head as its trainers do, and patch them as the arm says; return the report."""
    from trl.trainer.utils import add_fused_lm_head

    if arm == "trl_liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        for one in (model, reference):
            if one is not None:
                _apply_liger_kernel_to_instance(model=one, fused_linear_cross_entropy=False)
    report = ""
    if arm.startswith("ours"):
        import rtkernels

        options = {"fused_layers": True, "attention": True} if arm == "ours_fused" else {}
        for one in (model, reference):
            report += "" if one is None else f"{rtkernels.models.patch(one, **options)}\n"
    temperature = 0.9 if step == "grpo" else 1.0
    add_fused_lm_head(model, temperature=temperature, outputs=_FIELDS[step])
    if reference is not None:
        add_fused_lm_head(reference, temperature=temperature)
    if arm.startswith("ours"):
        report += str(rtkernels.models.use_fused_head(SimpleNamespace(model=model, ref_model=reference)))
    return report


def loss_function(step: str, model: Any, reference: Any, prompt: int, vocabulary: int) -> Callable[[Any], Any]:
    """Return the loss of a batch of ids as a function."""
    import torch

    from rtkernels import losses

    def log_probs(of: Any, ids: Any, labels: Any) -> Any:
        return of(input_ids=ids, labels=labels, use_cache=False, fused_lm_head=True).log_probs

    def loss(ids: Any) -> Any:
        labels = ids.clone()
        labels[:, : 0 if step == "sft" else prompt] = -100
        if step == "sft":
            return model(input_ids=ids, labels=labels, use_cache=False, fused_lm_head=True).loss
        mask = labels[:, 1:] != -100
        own = log_probs(model, ids, labels)
        if step == "grpo":
            # Of another policy, the same for all arms, so that ratios, and the loss, depend on what an arm computes.
            advantages = torch.linspace(-0.5, 1.5, ids.shape[0], device=ids.device)
            old = 0.05 * torch.cos(torch.arange(own.shape[1], device=own.device)) - math.log(vocabulary)
            return losses.grpo(own, advantages, old=old.expand(own.shape), mask=mask)
        with torch.no_grad():
            ref = log_probs(reference, ids, labels)
        (w, l), (ref_w, ref_l), (m, n) = own.chunk(2), ref.chunk(2), mask.chunk(2)  # noqa: E741
        return losses.dpo(w, l, ref_w, ref_l, chosen_mask=m, rejected_mask=n)

    return loss


def run_arm(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one arm in this process; return its record."""
    import torch

    from bench.e2e import arms

    arms.quiet()
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    if args.tiny:
        args.vocab, args.seq, args.prompt, args.sequences = 128, 16, 4, 4
    sizes = {"tiny": args.tiny, "device": device, "dtype": dtype, "layers": args.layers}
    with processes.sharing():
        model = arms.build(args.model, args.vocab, args.seq, **sizes)
        reference = arms.build(args.model, args.vocab, args.seq, **sizes).eval() if args.step == "dpo" else None
        if reference is not None:
            reference.requires_grad_(False)
            reference.model.norm.weight.mul_(0.9)  # so that policy and reference differ from the first step on
        report = prepare(arm, args.step, model, reference)
    loss_of = loss_function(args.step, model, reference, args.prompt, args.vocab)
    optimizer = arms.optimizer(args.optimizer, model, LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    total = args.warmup + args.steps
    batches = [torch.randint(0, args.vocab, (args.sequences, args.seq), generator=generator) for _ in range(total)]
    batches = [ids.to(device) for ids in batches]
    times, values = [], []
    with processes.alone():
        for number, ids in enumerate(batches):
            if number == args.warmup and cuda:
                torch.cuda.reset_peak_memory_stats()
            begun = processes.mark(device)
            loss = loss_of(ids)
            loss.backward()
            optimizer.step()
            ended = processes.mark(device)
            values.append(loss.detach())
            times += [(begun, ended)] if number >= args.warmup else []
        processes.wait(device)
        each = [processes.between(a, b) for a, b in times]
    peak = torch.cuda.max_memory_allocated() >> 20 if cuda else None
    return {
        "step_ms": statistics.median(each), "peak_mib": peak, "losses": [v.item() for v in values],
        "report": report,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run all arms, each in its own process; print a table and write the result file."""
    args = parser().parse_args(argv)
    if args.one:
        return processes.one(lambda: run_arm(args.one, args), args.out)
    passed = sys.argv[1:] if argv is None else argv
    sizes = {
        "layers": args.layers,
        "sequences": args.sequences,
        "seq": args.seq,
        "prompt": args.prompt,
        "optimizer": args.optimizer,
    }
    result = processes.begun(args.out, args.goes_on, {"kind": "post", "step": args.step, "model": args.model, **sizes})
    arms = [arm for arm in args.arms.split(",") if arm not in result["arms"]]
    for arm, record in processes.records("bench.e2e.post", arms, passed, args.together):
        result["arms"][arm] = record
        print(_line(f"{args.step} {arm}", record), flush=True)
        result["environment"] = result.get("environment") or meta.environment()
        processes.write(args.out, result)
    result["gates"] = gates(result["arms"], args.step)
    processes.write(args.out, result)
    for gate in result["gates"]:
        print(f"{gate['arm']}: {gate['what']} {gate['value']:.4g}, gate {gate['limit']}")
    return 1 if any("failed" in record for record in result["arms"].values()) else 0


def gates(arms: dict[str, Any], step: str = "sft") -> list[dict[str, Any]]:
    """Return how our arms stand beside TRL's; nothing where one of them was not measured."""
    theirs, found = arms.get("trl", {}), []
    for arm, record in arms.items():
        if not arm.startswith("ours") or "step_ms" not in record or "step_ms" not in theirs:
            continue
        speed = theirs["step_ms"] / record["step_ms"]
        found.append({"arm": arm, "what": "times as fast as TRL", "value": speed, "limit": GATES["time"]})
        if record["peak_mib"] and theirs["peak_mib"]:
            share = record["peak_mib"] / theirs["peak_mib"]
            found.append({"arm": arm, "what": "of TRL's peak memory", "value": share, "limit": GATES["memory"]})
        if record.get("losses") and theirs.get("losses"):
            value = abs(record["losses"][0] / theirs["losses"][0] - 1.0)
            found.append({"arm": arm, "what": "from TRL's first loss", "value": value, "limit": LOSSES[step]})
    return found


def _line(name: str, r: dict[str, Any]) -> str:
    if "step_ms" not in r:
        return f"{name:18}{'absent: ' + r['absent'] if 'absent' in r else 'failed: ' + r['failed'][-300:]}"
    peak = f"{r['peak_mib']} MiB" if r["peak_mib"] else "-"
    return f"{name:18}{r['step_ms']:8.1f} ms{peak:>12}  loss {r['losses'][0]:.4f} ... {r['losses'][-1]:.4f}"


if __name__ == "__main__":
    sys.exit(main())
