"""Prefill and decode with a model of random weights in several ways, each in a process of its own.

``python -m bench e2e infer --model dense|moe --arms hf,hf_compile,ours,ours_graph,fp8`` starts this file for each arm
and writes a result file with the gates that the arms have to pass. All arms have the same weights and prompts. "hf" is
transformers as it is; "hf_compile" has a static cache and ``torch.compile(mode="reduce-overhead")``; "ours" is patched,
"ours_graph" the same with a static cache and a step in a ``torch.cuda.graph``, "fp8" that with quantised weights.
``--rows`` runs the table of ``bench.e2e.decode_rows`` instead, which has options of its own: ``--rows --help``.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from bench import meta
from bench.e2e import processes
from bench.e2e.arms import MODELS
from bench.e2e.gates import text

ARMS = ("hf", "hf_compile", "ours", "ours_graph", "fp8")
PARITY_TOKENS = 16
# Minimum ratio of ours to another arm, for decode at batch 1 and for the largest prefill.
GATES = (
    ("decode, ours_graph : hf", "decode_1", "ours_graph", "hf", 6.0),
    ("decode, ours_graph : hf_compile", "decode_1", "ours_graph", "hf_compile", 0.95),
    ("prefill, ours : hf", "prefill", "ours", "hf", 1.3),
    ("prefill, ours : hf_compile", "prefill", "ours", "hf_compile", 1.0),
)
FIRST_TOKEN_S = 3.0  # with patching, from a loaded model: imports and weights take equally long for all arms


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench e2e infer", description=__doc__.splitlines()[0])
    processes.add_model_options(options, MODELS, ARMS)
    options.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    options.add_argument("--prefill", default="1,8", help="batches of the prefill")
    options.add_argument("--decode", default="1,32", help="batches of the decode")
    options.add_argument("--new", type=int, default=256, help="tokens that are decoded")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--rows", action="store_true", help="generate() of six models: `--rows --help`")
    processes.add_options(options)
    return options


class Runner:
    """A model as an arm has it: prefill and steps of decoding over a cache."""

    def __init__(self, arm: str, model: Any, room: int, tiny: bool) -> None:
        import torch

        self.torch, self.arm, self.room = torch, arm, room
        self.device = next(model.parameters()).device
        self.static = arm in ("hf_compile", "ours_graph", "fp8")
        self.note = ""
        if arm == "fp8":
            import rtkernels

            model = rtkernels.models.serve_fp8(model)
        if arm in ("ours", "ours_graph", "fp8"):
            import rtkernels

            report = rtkernels.models.patch(model, loss=False, fused_layers=True, attention=True)
            if not report.replaced.get("fused"):  # otherwise a plain model would be measured under our name
                raise RuntimeError(f"the model's layers were not recognised:\n{report}")
            self.note = str(report)
        self.model = self.decode_model = model
        if arm == "hf_compile":
            on_cpu = {"backend": "aot_eager"} if tiny and self.device.type == "cpu" else {}
            self.model = torch.compile(model, **on_cpu)
            self.decode_model = torch.compile(model, **(on_cpu or {"mode": "reduce-overhead"}))
        self.config = model.config

    def cache(self) -> Any:
        from transformers import DynamicCache, StaticCache

        if self.static:
            return StaticCache(config=self.config, max_cache_len=self.room)
        return DynamicCache(config=self.config)

    def prefill(self, ids: Any, cache: Any) -> Any:
        """Return the tokens after the prompts, ``[batch, 1]``."""
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def decode(self, token: Any, position: int, cache: Any, count: int) -> Any:
        """Return `count` tokens after a token at a position, ``[batch, count]``."""
        torch = self.torch
        ids = token.clone()
        positions = torch.full_like(ids, position)
        found = torch.empty(ids.shape[0], count, dtype=ids.dtype, device=ids.device)
        at = torch.zeros(1, dtype=torch.long, device=ids.device)

        def step() -> None:
            out = self.decode_model(input_ids=ids, past_key_values=cache, position_ids=positions, use_cache=True)
            ids.copy_(out.logits[:, -1].argmax(-1, keepdim=True))
            found.index_copy_(1, at, ids)
            positions.add_(1)
            at.add_(1)

        if self.arm not in ("ours_graph", "fp8") or self.device.type == "cpu":
            for _ in range(count):
                step()
            return found
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # outside of the graph, to compile what is missing
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        self.started = processes.mark(self.device.type)  # recording is not decoding
        for _ in range(count - 1):
            graph.replay()
        return found


def run_arm(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one arm in this process; return its record."""
    started = time.perf_counter()
    import torch

    from bench.e2e import arms

    arms.quiet()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    room = args.prompt + args.new + 8

    def model(dtype: Any) -> Any:
        options = {"tiny": args.tiny, "device": device, "dtype": dtype, "layers": args.layers}
        result = arms.build(args.model, args.vocab, room, **options)
        return result.eval().requires_grad_(False)

    dtype = torch.bfloat16 if device == "cuda" or arm == "fp8" else torch.float32
    record: dict[str, Any] = {"prefill": {}, "decode": {}}
    with torch.no_grad():
        with processes.sharing():
            built = model(dtype)
            processes.wait(device)
        with nullcontext() if "compile" in arm else processes.sharing():  # long work on the host alone
            before = time.perf_counter()
            runner = Runner(arm, built, room, args.tiny)
            record["note"] = runner.note
            runner.prefill(_prompt(1, args, device), runner.cache()).tolist()
            record["first_token_s"] = round(time.perf_counter() - started, 2)
            record["first_token_itself_s"] = round(time.perf_counter() - before, 2)
            if "compile" in arm:
                for batch in map(int, args.prefill.split(",")):
                    runner.prefill(_prompt(batch, args, device), runner.cache())
                for batch in map(int, args.decode.split(",")):
                    _decoded(runner, batch, args, device, runs=1)
        with processes.alone():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for batch in map(int, args.prefill.split(",")):
                ids = _prompt(batch, args, device)
                ms = _median(lambda ids=ids: runner.prefill(ids, runner.cache()), device, args.repeats)
                record["prefill"][str(batch)] = {"ms": ms, "tokens_per_s": round(batch * args.prompt / ms * 1000)}
            for batch in map(int, args.decode.split(",")):
                record["decode"][str(batch)] = _decoded(runner, batch, args, device)
            record["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20) if device == "cuda" else None
        if arm != "fp8":
            del runner, built
            with processes.sharing():
                record["tokens"] = _parity(arm, model(torch.float32), args, device)
    return record


def _prompt(batch: int, args: argparse.Namespace, device: str) -> Any:
    import torch

    generator = torch.Generator().manual_seed(batch)
    return torch.randint(0, args.vocab, (batch, args.prompt), generator=generator).to(device)


def _median(call: Callable[[], Any], device: str, repeats: int) -> float:
    call()
    marks = []
    for _ in range(repeats):
        start = processes.mark(device)
        call()
        marks.append((start, processes.mark(device)))
    processes.wait(device)
    return round(statistics.median(processes.between(*pair) for pair in marks), 3)


def _decoded(runner: Runner, batch: int, args: argparse.Namespace, device: str, runs: int = 3) -> dict[str, Any]:
    """Return time per token of a batch, after a prefill that is not measured."""
    ids, samples = _prompt(batch, args, device), []
    for i in range(runs):  # the first one compiles
        cache = runner.cache()
        token = runner.prefill(ids, cache)
        processes.wait(device)
        runner.started, steps = None, args.new if i else min(args.new, 8)
        start = processes.mark(device)
        runner.decode(token, args.prompt, cache, steps)
        end = processes.mark(device)
        processes.wait(device)
        if runner.started is not None:
            start, steps = runner.started, steps - 1
        samples.append(processes.between(start, end) / steps)
    ms = min(samples[1:] or samples)
    return {"ms_per_token": round(ms, 4), "tokens_per_s": round(batch / ms * 1000)}


def _parity(arm: str, model: Any, args: argparse.Namespace, device: str) -> str:
    """Return a hash of tokens decoded in fp32: those of an arm have to be hf's."""
    room = min(args.prompt, 64) + PARITY_TOKENS + 8
    runner = Runner(arm, model, room, args.tiny)
    ids, cache = _prompt(2, args, device)[:, : min(args.prompt, 64)], runner.cache()
    token = runner.prefill(ids, cache)
    found = runner.decode(token, ids.shape[1], cache, PARITY_TOKENS)
    return hashlib.sha256(str([token.tolist(), found.tolist()]).encode()).hexdigest()[:16]


def gates(arms: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the arms have to reach and what they did; gates without data are left out."""

    def rate(arm: str, what: str) -> float | None:
        record = arms.get(arm, {})
        if what == "decode_1":
            return record.get("decode", {}).get("1", {}).get("tokens_per_s")
        found = record.get("prefill", {})
        return found[max(found, key=int)]["tokens_per_s"] if found else None

    results: list[dict[str, Any]] = []
    for name, what, ours, other, must in GATES:
        a, b = rate(ours, what), rate(other, what)
        if a and b:
            results.append({"gate": name, "value": round(a / b, 3), "must": must, "passed": a / b >= must})
    wanted = arms.get("hf", {}).get("tokens")
    for arm in ("hf_compile", "ours", "ours_graph"):
        if wanted and arms.get(arm, {}).get("tokens"):
            same = arms[arm]["tokens"] == wanted
            results.append({"gate": f"fp32 tokens, {arm} = hf", "value": same, "must": True, "passed": same})
    if (first := arms.get("ours", {}).get("first_token_itself_s")) is not None:
        passed = first <= FIRST_TOKEN_S
        results.append(
            {"gate": "first token, ours, warm cache", "value": first, "must": FIRST_TOKEN_S, "passed": passed}
        )
    return results


def main(argv: list[str] | None = None) -> int:
    """Run all arms, each in its own process; print tables and write the result file."""
    given = sys.argv[1:] if argv is None else argv
    if "--rows" in given:
        from bench.e2e import decode_rows

        return decode_rows.main([word for word in given if word != "--rows"])
    args = parser().parse_args(argv)
    if args.one:
        return processes.one(lambda: run_arm(args.one, args), args.out)
    passed = sys.argv[1:] if argv is None else argv
    sizes = {"layers": args.layers, "prompt": args.prompt, "new": args.new}
    result = processes.begun(args.out, args.goes_on, {"kind": "infer", "model": args.model, **sizes})
    arms = [arm for arm in args.arms.split(",") if arm not in result["arms"]]
    print(f"{'arm':12}{'prefill, tokens/s':>24}{'decode, ms/token':>24}{'peak':>12}{'first token':>13}")
    for arm, record in processes.records("bench.e2e.infer", arms, passed, args.together):
        result["arms"][arm] = record
        print(_line(arm, record), flush=True)
        result["gates"] = gates(result["arms"])
        result["environment"] = result.get("environment") or meta.environment()
        processes.write(args.out, result)
    print(text(result.get("gates", [])))
    return 1 if any("failed" in record for record in result["arms"].values()) else 0


def _line(arm: str, r: dict[str, Any]) -> str:
    if "prefill" not in r:
        return f"{arm:12}{'absent: ' + r['absent'] if 'absent' in r else 'failed: ' + r['failed'][-300:]}"
    prefill = "  ".join(f"{b}: {v['tokens_per_s']}" for b, v in r["prefill"].items())
    decode = "  ".join(f"{b}: {v['ms_per_token']:.2f}" for b, v in r["decode"].items())
    peak = f"{r['peak_mib']} MiB" if r["peak_mib"] else "-"
    return f"{arm:12}{prefill:>24}{decode:>24}{peak:>12}{r['first_token_itself_s']:11.1f} s"


if __name__ == "__main__":
    sys.exit(main())
